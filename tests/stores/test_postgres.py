"""The PostgreSQL store keeps the contract, from a URL and from a pool; and what it says when it cannot be used."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import psycopg
import psycopg_pool
import pytest
from psycopg import errors
from psycopg.rows import dict_row, namedtuple_row, tuple_row

from longrun.client import Client
from longrun.errors import (
    LeaseLostError,
    LongrunError,
    NewerFormatError,
    NotStorableError,
    StoreReadOnlyError,
    StoreSettingsError,
    StoreUnavailableError,
    WriteOrderError,
)
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Owner, Query, Save
from longrun.stores import open_store
from longrun.stores._postgres import batch, links, migrations, sending, writing
from longrun.stores._postgres.batch import Batch
from longrun.stores._postgres.links import OwnConnection
from longrun.stores._postgres.parts import Parts
from longrun.stores._postgres.queries import Queries
from longrun.stores.base import StoreBackend
from longrun.stores.postgres import PostgresBackend, PostgresCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from longrun.testing.conformance_base import created, done, ids_of, loaded, opened
from longrun.testing.conformance_messages import MessageContract
from longrun.testing.conformance_write import SaveContract
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.servers import PostgresServer
from tests.stores.postgres_tools import committed_while_sending

ROOT = Path(__file__).parents[2]


class TestPostgresStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, request: pytest.FixtureRequest, server_url: str) -> None:
        new = request.function.__name__ == "test_opening_together"  # which finds nothing there
        self.url, self.schema = server_url, request.getfixturevalue("postgres_schema" if new else "empty_schema")

    def make_store(self) -> CheckpointStore:
        return PostgresCheckpointStore(self.url, schema=self.schema)

    def damage_definition(self, id: str) -> None:
        with psycopg.connect(self.url) as connection:
            statement = f'UPDATE "{self.schema}".definitions SET version = %s WHERE id = %s'
            connection.execute(statement.encode(), ("changed", id))

    def test_what_no_name_can_be_finds_nothing(self, backend: StoreBackend) -> None:
        created(backend, create("a"))
        for query in (
            Query(queue="\0"),
            Query(workflows=frozenset({"\0"})),
            Query(owner="\0"),
            Query(parent_id="\ud800"),
        ):
            assert backend.find(query) == []
            assert backend.count(query) == {}


class TestPostgresStoreOnAPool(SaveContract, MessageContract):
    """An application's own pool, with its own habits: transactions by default, and only one connection."""

    @pytest.fixture(autouse=True)
    def place(self, server_url: str, empty_schema: str) -> Iterator[None]:
        self.schema = empty_schema
        with psycopg_pool.ConnectionPool(server_url, min_size=1, max_size=1, open=True) as self.pool:
            yield

    def make_store(self) -> CheckpointStore:
        return PostgresCheckpointStore(self.pool, schema=self.schema)

    def test_connections_are_given_back_as_they_were(self) -> None:
        with opened(PostgresBackend(self.pool, schema=self.schema)) as backend:
            created(backend, create("a"))
            backend.claim(claim())
            assert [one.definition.id for one in backend.find(Query())] == ["a"]
        with self.pool.connection() as connection:
            assert connection.autocommit is False
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert not self.pool.closed

    @pytest.mark.parametrize(
        "habits",
        [
            {"row_factory": dict_row},
            {"row_factory": namedtuple_row},
            {"cursor_factory": psycopg.RawCursor},
            {"cursor_factory": psycopg.ClientCursor},
            {"prepare_threshold": 0},
            {"prepare_threshold": None},
            {"options": "-c default_transaction_isolation=serializable -c search_path=nowhere"},
            {"options": "-c client_encoding=latin1 -c TimeZone=Asia/Tokyo -c DateStyle=German -c bytea_output=escape"},
            {"client_encoding": "SQL_ASCII"},
        ],
        ids=["dicts", "named", "raw", "client", "prepared", "unprepared", "serializable", "latin", "ascii"],
    )
    def test_an_application_has_its_own_habits(self, server_url: str, habits: dict[str, Any]) -> None:
        """They matter neither to the store nor, after it, to the application."""
        with psycopg_pool.ConnectionPool(server_url, min_size=1, max_size=1, kwargs=habits, open=True) as pool:
            with opened(PostgresBackend(pool, schema=self.schema)) as backend:
                new = owned("a", metadata={"k": "Ä€"}, blobs={"b": bytes(range(256))})
                done(backend, new, send("a", payload=b"\xff", key="Ä€"), step("a", new.head, put={"€": b"\x00"}))
                found = loaded(backend, "a")
                assert (found.definition, found.entries) == (new.definition, {"€": b"\x00"})
                assert (found.damage, [one.key for one in found.messages]) == ((), ["Ä€"])
                assert ids_of(backend.claim(claim("you", dead=frozenset({"me"})))) == ["a"]
                assert [one.definition.id for one in backend.find(Query(metadata={"k": "Ä€"}))] == ["a"]
                backend.register(Owner(id="you", life={}, remaining=0.0), 60.0)
                assert (backend.next_due(), backend.count(Query()), len(backend.owners())) == (
                    None,
                    {ExecutionState.RUNNING: 1},
                    1,
                )
            with psycopg.connect(server_url, **habits) as fresh, pool.connection() as connection:
                assert connection.info.encoding == fresh.info.encoding
                assert (connection.row_factory, connection.cursor_factory) == (
                    habits.get("row_factory", tuple_row),
                    habits.get("cursor_factory", psycopg.Cursor),
                )

    def test_its_own_writes_do_not_wake_it(self) -> None:
        """They come back over the same channel as those of others."""
        with (
            opened(PostgresBackend(self.pool, schema=self.schema)) as backend,
            opened(PostgresBackend(str(self.pool.conninfo), schema=self.schema)) as other,
        ):
            backend.wait(0.0)
            created(backend, create("a"))
            assert backend.wait(0.3) is False
            created(other, create("b"))
            assert backend.wait(10.0) is True

    def test_the_listening_connection_is_made_as_the_pool_makes_its_own(self, server_url: str) -> None:
        """Its class may fetch the password of the moment."""

        class Knowing(psycopg.Connection[Any]):
            @classmethod
            def connect(cls, conninfo: str = "", **kwargs: Any) -> Any:
                return super().connect(server_url, **kwargs)

        nowhere = "postgresql://nobody@/nothing?host=/nowhere"
        with (
            psycopg_pool.ConnectionPool(nowhere, connection_class=Knowing, min_size=1, max_size=1, open=True) as pool,
            opened(PostgresBackend(pool, schema=self.schema)) as backend,
        ):
            created(backend, create("a"))

    def test_two_stores_on_one_pool_hear_each_other(self) -> None:
        """Their writers have one connection by turns."""
        with (
            opened(PostgresBackend(self.pool, schema=self.schema)) as backend,
            opened(PostgresBackend(self.pool, schema=self.schema)) as other,
        ):
            created(backend, create("a"))
            created(other, create("b"))
            assert backend.wait(10.0) is True
            assert other.wait(10.0) is True
            done(other, send("a"))
            assert backend.wait(10.0) is True
            assert other.wait(0.0) is False


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgres//me:s3cret@host/db",
        "postgresql://me:s3cret@[host/db",
        "password=s3cret x",
        "postgresql://me:x/s3cret@host:5432/db",
        "postgresql://me:12/s3cret@host:5432/db",
        "postgresql://me:x@s3cret@host:5432/db",
        "postgresql://me:s3cret:x@host:s3cret/db",
    ],
)
def test_a_bad_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(StoreSettingsError) as caught:
        PostgresCheckpointStore(url)
    error: BaseException | None = caught.value
    assert "URL" in str(error)
    while error is not None:
        assert "s3cret" not in repr(error)
        error = error.__cause__


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("shcema=x", "the parameter 'shcema' of"),
        ("sslmode=require&shcema=x", "the parameter 'shcema' of"),
        ("application%5Fnames=x", "the parameter 'application_names' of"),
        ("user=me&password=a&s3cret=x", "a parameter of"),
        ("s3cret=x@host/db", "a parameter of"),
        ("shcema", "write postgresql://"),
    ],
)
def test_a_parameter_that_nobody_knows_is_named_where_it_is_no_piece_of_a_password(query: str, says: str) -> None:
    with pytest.raises(StoreSettingsError, match=says) as caught:
        PostgresCheckpointStore(f"postgresql://host/db?{query}")
    assert "s3cret" not in f"{caught.value}{caught.value.__cause__!r}"


def test_an_unreachable_server_is_said_without_the_password(tmp_path: Path) -> None:
    backend = PostgresBackend(f"postgresql://me:s3cret@/db?host={quote(str(tmp_path))}")
    with pytest.raises(StoreUnavailableError) as caught:
        backend.open()
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__} {backend!r}"
    assert "me@" in repr(backend)


def test_a_wrong_password_is_refused_and_never_shown(disposable_postgres: PostgresServer) -> None:
    with psycopg.connect(disposable_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE careful LOGIN PASSWORD 'right'")
        hba = disposable_postgres.directory / "data" / "pg_hba.conf"
        hba.write_text("local all careful scram-sha-256\nlocal all all trust\n")
        connection.execute("SELECT pg_reload_conf()")
    url = disposable_postgres.url.replace("postgres@", "careful:wr0ng@", 1)
    backend = PostgresBackend(url)
    with pytest.raises(StoreUnavailableError, match="careful") as caught:
        backend.open()
    assert "wr0ng" not in f"{caught.value} {caught.value.__cause__!r} {backend!r}"


def test_a_role_that_may_not_create_the_schema_is_told_what_it_needs(disposable_postgres: PostgresServer) -> None:
    with psycopg.connect(disposable_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE poor LOGIN PASSWORD 's3cret'")
    url = disposable_postgres.url.replace("postgres@", "poor:s3cret@", 1)
    with pytest.raises(StoreSettingsError, match=r"permission denied .*; let the role create schema") as caught:
        PostgresBackend(url).open()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("schema", ["", "a b", 'x"; DROP', "pg_temp", "1a", "x" * 64, "é", "a.b"])
def test_a_schema_that_is_no_plain_name_is_refused(schema: str) -> None:
    with pytest.raises(StoreSettingsError, match="schema="):
        PostgresCheckpointStore("postgresql:///x", schema=schema)


def test_what_is_neither_url_nor_pool_is_refused(server_url: str) -> None:
    pool = psycopg_pool.AsyncConnectionPool(server_url, open=False)
    for source in (None, 7, pool):
        with pytest.raises(StoreSettingsError, match="ConnectionPool"):
            PostgresBackend(source)  # type: ignore[arg-type]  # that is the point


def test_without_the_driver_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from longrun.errors import MissingExtraError\n"
        "try:\n    import longrun.stores.postgres\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'longrun[postgres]'" in result.stdout


def test_doctor_facts_name_the_place_and_no_password(server_url: str, postgres_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        facts = backend.describe()
    assert facts["schema"] == postgres_schema
    assert facts["synchronous_commit"] == "on"
    assert {"server", "fsync", "place"} <= set(facts)


# --- the schema -----------------------------------------------------------------------------------------------------


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_a_missing_schema_is_created(server_url: str, postgres_schema: str) -> None:
    execute(server_url, f"DROP SCHEMA {postgres_schema}")
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        created(backend, create("a"))


def test_two_schemas_in_one_database_are_two_stores(server_url: str, postgres_schema: str) -> None:
    other = f"{postgres_schema}_b"[:63]
    try:
        with (
            opened(PostgresBackend(server_url, schema=postgres_schema)) as one,
            opened(PostgresBackend(server_url, schema=other)) as two,
        ):
            created(one, create("a"))
            created(two, create("a", data=b"two"))
            assert loaded(one, "a").boundary.data == b"state 1"
            assert two.wait(0.2) is False
    finally:
        execute(server_url, f"DROP SCHEMA IF EXISTS {other} CASCADE")


def test_a_url_names_its_schema(server_url: str, postgres_schema: str) -> None:
    mark = "&" if "?" in server_url else "?"
    with opened(open_store(f"{server_url}{mark}schema={postgres_schema}").backend) as backend:
        created(backend, create("a"))
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        assert loaded(backend, "a").definition.id == "a"
    with pytest.raises(StoreSettingsError, match="no plain name"):
        open_store(f"{server_url}{mark}schema=a%20b")


def test_a_newer_schema_is_refused(server_url: str, postgres_schema: str) -> None:
    """I14."""
    with opened(PostgresBackend(server_url, schema=postgres_schema)):
        pass
    execute(server_url, f"INSERT INTO {postgres_schema}.longrun_version (version, name) VALUES (99, 'future')")
    with pytest.raises(NewerFormatError, match="99"):
        PostgresBackend(server_url, schema=postgres_schema).open()


def test_somebody_elses_tables_are_left_alone(server_url: str, postgres_schema: str) -> None:
    execute(server_url, f"CREATE TABLE {postgres_schema}.messages (mine text)")
    with pytest.raises(StoreSettingsError, match="messages"):
        PostgresBackend(server_url, schema=postgres_schema).open()
    with psycopg.connect(server_url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (postgres_schema,))
        assert tables.fetchall() == [("messages",)]


OURS = "version integer PRIMARY KEY, name text NOT NULL, applied timestamptz NOT NULL DEFAULT clock_timestamp()"


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"longrun_version": "mine text"}, "longrun_version"),
        ({"longrun_version": "version text, name text, applied timestamptz"}, "longrun_version"),
        ({"longrun_version": "version integer"}, "longrun_version"),
        ({"longrun_version": OURS, "heads": "mine text"}, "heads"),
        ({"longrun_version": "mine text", "heads": "mine text"}, "longrun_version"),
    ],
)
def test_a_version_table_that_is_somebody_elses_is_told(
    server_url: str, postgres_schema: str, tables: dict[str, str], named: str
) -> None:
    for name, columns in tables.items():
        execute(server_url, f"CREATE TABLE {postgres_schema}.{name} ({columns})")
    with pytest.raises(StoreSettingsError, match=rf"a table '{named}' that is not longrun's; give another schema="):
        PostgresBackend(server_url, schema=postgres_schema).open()
    with psycopg.connect(server_url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (postgres_schema,))
        assert {name for (name,) in found} == set(tables)


def test_an_empty_version_table_of_ours_is_filled(server_url: str, postgres_schema: str) -> None:
    execute(server_url, f"CREATE TABLE {postgres_schema}.longrun_version ({OURS})")
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        created(backend, create("a"))


def test_a_schema_that_lost_a_table_is_refused(server_url: str, postgres_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=postgres_schema)):
        pass
    execute(server_url, f"DROP TABLE {postgres_schema}.blobs")
    with pytest.raises(StoreSettingsError, match="blobs"):
        PostgresBackend(server_url, schema=postgres_schema).open()


def test_every_table_of_the_migrations_is_known(server_url: str, postgres_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=postgres_schema)):
        pass
    with psycopg.connect(server_url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (postgres_schema,))
        assert {name for (name,) in found} == {*migrations.TABLES, migrations.VERSION_TABLE}


def test_several_processes_migrate_at_once(server_url: str, postgres_schema: str) -> None:
    code = (
        "import sys; from longrun.stores.postgres import PostgresBackend\n"
        "backend = PostgresBackend(sys.argv[1], schema=sys.argv[2]); print('ready', flush=True); sys.stdin.readline()\n"
        "backend.open(); backend.ping(); backend.close()\n"
    )
    command = [sys.executable, "-c", code, server_url, postgres_schema]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        _, problems = process.communicate(b"\n", timeout=60)
        assert (process.returncode, problems) == (0, b"")
    with psycopg.connect(server_url) as connection:
        versions = connection.execute(f"SELECT version FROM {postgres_schema}.longrun_version".encode()).fetchall()
    assert versions == [(1,)]


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://me@host:1234/db", "me@host:1234/db"),
        ("postgresql://me@host/db?hostaddr=10.0.0.1", "me@host:5432/db"),
        ("postgresql://me@/db?hostaddr=10.0.0.1", "me@10.0.0.1:5432/db"),
        ("postgresql://me@/db", "me@local:5432/db"),
        ("postgresql:///", "@local:5432/"),
    ],
)
def test_where_the_server_is(url: str, place: str) -> None:
    assert links.Links(url).place == place


def test_what_may_pass_is_tried_again() -> None:
    """The server ended the connection, or was busy with itself; not what it will always refuse."""
    for kind in (errors.AdminShutdown, errors.SerializationFailure, errors.DeadlockDetected, errors.TooManyConnections):
        assert links.may_pass(kind("it passes")) is True
    assert links.may_pass(psycopg.OperationalError("the connection is lost")) is True
    assert links.may_pass(errors.UndefinedTable("it stays")) is False
    assert links.may_pass(psycopg_pool.PoolTimeout("it had its own patience")) is False


def test_no_answer_at_all_is_a_lost_connection() -> None:
    def nothing() -> None:
        raise MemoryError

    with pytest.raises(psycopg.OperationalError, match="lost"):
        writing._answer(nothing)


def borrowed(backend: PostgresBackend, number: int) -> list[int]:
    """Have this many readers at once, and give them all back; their processes at the server."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(backend._links._reading()) for _ in range(number)]
        return [connection.info.backend_pid for connection in found]


def test_idle_readers_are_bounded_and_none_outlives_the_store(server_url: str, postgres_schema: str) -> None:
    backend = PostgresBackend(server_url, schema=postgres_schema)
    with opened(backend):
        pids = borrowed(backend, links.IDLE_READERS + 2)
        assert len(backend._links._idle) == links.IDLE_READERS
        with backend._links._reading() as last:
            backend._links.close()
        assert last.closed
        assert backend._links._idle == []
    with psycopg.connect(server_url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND state IS DISTINCT FROM 'idle'"
        assert connection.execute(query, (pids,)).fetchone() == (0,)


def test_when_one_connection_is_lost_the_others_are_not_trusted(server_url: str, postgres_schema: str) -> None:
    """I9: a read has patience for a lost connection, and not for one after the other. Also when it was opened anew."""
    backend = PostgresBackend(server_url, schema=postgres_schema)
    for _ in range(2):
        with opened(backend):
            done(backend, create("a"))
            pids = borrowed(backend, links.IDLE_READERS)
            assert len(backend._links._idle) == links.IDLE_READERS
            with psycopg.connect(server_url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s) AS p (pid)", (pids,))
            assert [one.definition.id for one in backend.find(Query())] == ["a"]


def test_a_connection_that_cannot_be_set_up_is_closed(
    server_url: str, postgres_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[psycopg.Connection[Any]] = []

    def broken(connection: psycopg.Connection[Any]) -> None:
        made.append(connection)
        raise psycopg.DataError("no")

    monkeypatch.setattr(links, "teach", broken)
    with pytest.raises(StoreUnavailableError):
        PostgresBackend(server_url, schema=postgres_schema).open()
    assert made
    assert all(connection.closed for connection in made)


# --- a save and what follows it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sweep_ended", {"state": ExecutionState.COMPLETED, "owner": None}),
        ("wake_released", {"state": ExecutionState.WAITING, "owner": None}),
    ],
)
def test_a_save_and_what_follows_from_it_are_one(
    server_url: str,
    empty_schema: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fields: dict[str, Any],
) -> None:
    """I1: if the second statement fails, the first was not made."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = owned("a")
        created(backend, new)
        backend.commit([send("a")])
        save = change("a", new.head, head_fields=fields)
        usual = Queries.run

        def failing(self: Queries, connection: Any, statement: str, **parameters: Any) -> Any:
            if statement == name:
                raise errors.DiskFull("no")
            return usual(self, connection, statement, **parameters)

        monkeypatch.setattr(Queries, "run", failing)
        with pytest.raises(StoreUnavailableError):
            backend.commit([save])
        assert loaded(backend, "a").head == new.head
        monkeypatch.setattr(Queries, "run", usual)
        done(backend, save)
        assert loaded(backend, "a").head == attrs.evolve(save.head, woken=name == "wake_released")


ENDS = {"state": ExecutionState.COMPLETED, "owner": None}
WAITS = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}


@pytest.mark.parametrize("fields", [ENDS, WAITS])
def test_a_save_that_nobody_has_written_to_is_one_statement(
    server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        many = [owned(id) for id in "abc"]
        created(backend, *many)
        monkeypatch.setattr(psycopg.Connection, "transaction", lambda connection: pytest.fail("a transaction"))
        done(backend, change("a", many[0].head, head_fields=fields, put={"e": b"1"}))
        done(backend, *(change(one.id, one.head, head_fields=fields) for one in many[1:]))
        monkeypatch.undo()
        assert [loaded(backend, id).head.state for id in "abc"] == [fields["state"]] * 3
        assert set(loaded(backend, "a").entries) == (set() if fields is ENDS else {"e"})


@pytest.mark.parametrize("fields", [ENDS, WAITS])
def test_a_message_that_comes_while_a_save_waits_for_the_row_is_not_overlooked(
    server_url: str, empty_schema: str, fields: dict[str, Any]
) -> None:
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        assert isinstance(backend, PostgresBackend)
        new, other = owned("a"), owned("b")
        created(backend, new, other)
        saves = [change(one.id, one.head, head_fields=fields) for one in (new, other)]
        assert committed_while_sending(backend, server_url, "a", saves) == [None, None]
        assert [loaded(backend, id).head.state for id in "ab"] == [fields["state"]] * 2
        assert len(backend.messages("a")) == (0 if fields is ENDS else 1)
        assert [loaded(backend, id).head.woken for id in "ab"] == [fields is WAITS, False]


def test_a_save_that_fits_by_now_is_tried_again(
    server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write before it was made by another connection, between the statement and the look at what is stored."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = owned("a")
        created(backend, new)
        usual, turns = Batch._run_saves, [0]

        def late(self: Batch, connection: Any, saves: list[Save]) -> list[str]:
            turns[0] += 1
            return usual(self, connection, saves) if turns[0] > 1 else []

        monkeypatch.setattr(Batch, "_run_saves", late)
        done(backend, step("a", new.head))
        assert turns == [2]
        monkeypatch.setattr(Batch, "_run_saves", lambda self, connection, saves: [])
        (answer,) = backend.commit([step("a", step("a", new.head).head)])
        assert isinstance(answer, WriteOrderError)


def test_old_keys_are_forgotten(server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: of the messages that were taken only the newest are remembered; of those that wait, all."""
    monkeypatch.setattr(sending, "KEYS_REMEMBERED", 3)
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = owned("a")
        created(backend, new)
        assert done(backend, send("a", key="k0"), send("a", key="k0"), send("a", key="k1")) == [1, 1, 2]
        done(backend, change("a", new.head, take=(1, 2)))
        assert done(backend, *[send("a", key=f"k{n}") for n in range(2, 6)]) == [3, 4, 5, 6]
        with psycopg.connect(server_url) as connection:
            rows = connection.execute(f"SELECT key FROM {empty_schema}.receipts ORDER BY id".encode()).fetchall()
        assert [key for (key,) in rows] == ["k0", "k1", "k2", "k3", "k4", "k5"]
        taken = change("a", change("a", new.head).head, take=(3, 4, 5, 6))
        done(backend, taken)
        assert done(backend, send("a", key="k6"), send("a", key="k5")) == [7, 6]
        assert done(backend, send("a", key="k0")) == [8]


def test_a_batch_that_is_too_large_for_a_statement_is_several(
    server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one transaction: all of it or nothing."""
    monkeypatch.setattr(batch, "STATEMENT_BYTES", 1000)
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        news = [owned(f"x{n}", data=b"x" * 400) for n in range(5)]
        statements: list[int] = []
        usual = Parts.apply

        def counted(self: Parts, *args: Any, **more: Any) -> list[str]:
            statements.append(len(self._rows["create"]))
            return usual(self, *args, **more)

        monkeypatch.setattr(Parts, "apply", counted)
        created(backend, *news)
        assert statements == [2, 2, 1]
        assert [loaded(backend, new.id).boundary.data for new in news] == [b"x" * 400] * 5


def test_a_store_that_is_not_open_can_be_woken_and_not_waited_for(server_url: str) -> None:
    backend = PostgresBackend(server_url)
    backend.wake()
    with pytest.raises(StoreUnavailableError, match="closed"):
        backend.wait(0.0)


def test_metadata_is_equal_and_not_only_contained(server_url: str, empty_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        created(backend, create("a", metadata={"k": [1, 2]}), create("b", metadata={"k": {"x": 1, "y": 2}}))
        for value in ([1], {"x": 1}, [2, 1], []):
            assert backend.find(Query(metadata={"k": value})) == []
        assert [one.definition.id for one in backend.find(Query(metadata={"k": [1, 2]}))] == ["a"]


# --- values and servers ---------------------------------------------------------------------------------------------


def test_a_value_that_postgresql_cannot_hold_is_refused_alone(server_url: str, empty_schema: str) -> None:
    """A NUL or half a character in a name spoils its statement, not the batch."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        a, b = owned("a"), owned("b")
        created(backend, a, b)
        head = a.head
        for field, value in (("signal", "nul \0"), ("signal", "half \ud800"), ("step", 2**80)):
            good, bad = step("a", head), change("b", b.head, head_fields={field: value})
            answers = backend.commit([good, bad, send("a")])
            assert isinstance(answers[1], NotStorableError)
            assert (answers[0], type(answers[2])) == (None, int)
            assert (loaded(backend, "a").head, loaded(backend, "b").head) == (good.head, b.head)
            head = good.head


def shapes(id: str) -> list[Create | Save]:
    """An execution's life in which each part of a save occurs, alone and with others."""
    new = owned(id, blobs={"old": b"1"})
    writes: list[Create | Save] = [new]
    more: tuple[dict[str, Any], ...] = (
        {"put": {"e": b"1"}},
        {"put": {"f": b"2", "g": b""}, "drop": ("e",)},
        {"blobs": {"new": b"blob"}, "drop_blobs": ("old",)},
        {"clear": True, "put": {"h": b"3"}},
        {"keep_from": 4},
        {"clear": True},
        {"boundaries": ()},
    )
    head = new.head
    for fields in more:
        save = step(id, head, **fields)
        head = save.head if save.boundaries else attrs.evolve(save.head, seq=head.seq)
        writes.append(attrs.evolve(save, head=head))
    return writes


def test_one_write_alone_does_what_it_does_in_a_batch(server_url: str, empty_schema: str) -> None:
    """One row stands in its statement, many come as arrays; a life by either way ends the same after each save."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        for alone, first, second in zip(shapes("a"), shapes("b"), shapes("c"), strict=True):
            assert backend.commit([alone]) + backend.commit([first, second]) == [alone.head.revision == 0 or None] * 3
            one, other = loaded(backend, "a"), loaded(backend, "b")
            assert attrs.evolve(one, definition=other.definition) == other
            assert not one.damage
        end = loaded(backend, "a")
        assert backend.commit([step("a", owned("a").head)]) == [None]  # behind: done already
        assert isinstance(backend.commit([step("a", attrs.evolve(end.head, fence=9))])[0], LeaseLostError)
        assert loaded(backend, "a") == end


def test_prepared_statements_are_bounded(server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PREPARED", 2)
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        for id in ("a", "b"):
            for write in shapes(id):
                done(backend, write)
        assert isinstance(backend, PostgresBackend)
        connection = backend._links._writer
        assert isinstance(connection, OwnConnection)
        found = connection.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'longrun_%'").fetchall()
        assert {name.encode() for (name,) in found} == set(connection.written)
        assert len(found) == 2


def test_zeros_of_either_sign_keep_their_bytes(server_url: str, empty_schema: str) -> None:
    """They are equal, but a checksum tells them apart: a column of a batch must not hold one for the other."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        zeros = {"a": 0.0, "b": -0.0, "c": 0}
        created(backend, *map(owned, zeros))
        done(backend, *(change(id, owned(id).head, head_fields={"done": zero}) for id, zero in zeros.items()))
        for id, zero in zeros.items():
            found = loaded(backend, id)
            assert (found.damage, math.copysign(1, found.head.done)) == ((), math.copysign(1, zero))


def test_steps_are_set_by_who_first_runs_it(server_url: str, empty_schema: str) -> None:
    """Only with the fence that fits (I3), and the definition still fits its checksum afterwards."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = owned("a", steps=(), total=0)
        created(backend, new, owned("b"))
        stale = change("a", attrs.evolve(new.head, fence=9), steps=("x",))
        assert isinstance(backend.commit([stale])[0], LeaseLostError)
        assert loaded(backend, "a").definition == new.definition
        done(backend, change("a", new.head, steps=("one", "two")), step("b", owned("b").head))
        assert loaded(backend, "a").definition == attrs.evolve(new.definition, steps=("one", "two"), total=2)
        assert {one.definition.id: one.definition.total for one in backend.find(Query())} == {"a": 2, "b": 3}


def test_steps_are_set_by_the_save_that_names_them(
    server_url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: in its one statement, so that there is nothing between the two."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = [owned(id, steps=(), total=0) for id in "abc"]
        created(backend, *new)
        monkeypatch.setattr(psycopg.Connection, "transaction", lambda connection: pytest.fail("a transaction"))
        done(backend, change("a", new[0].head, steps=("one", "two"), version="2"))
        done(backend, *(change(one.id, one.head, steps=("x",), put={"e": b"1"}) for one in new[1:]))
        monkeypatch.undo()
        found = [loaded(backend, id) for id in "abc"]
        assert [(one.definition.steps, one.definition.version) for one in found] == [
            (("one", "two"), "2"),
            (("x",), "1"),
            (("x",), "1"),
        ]
        assert [one.damage for one in found] == [(), (), ()]


def test_free_text_may_hold_anything(server_url: str, empty_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        new = owned("a", metadata={"odd \0": "\0 \ud800", "nan": float("inf")})
        created(backend, new)
        done(backend, change("a", new.head, head_fields={"error": "bad \0 \udcff file", "note": "\0"}))
        found = loaded(backend, "a")
        assert found.definition.metadata == new.definition.metadata
        assert found.head.error == "bad \\x00 \\udcff file"
        assert [one.definition.id for one in backend.find(Query(metadata={"odd \0": "\0 \ud800"}))] == ["a"]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_client_that_writes_otherwise_reads_what_was_written(
    server_url: str, postgres_schema: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """I5: neither the URL nor the environment makes sound rows look damaged."""
    joint = "&" if "?" in server_url else "?"
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    for id, url in (("a", server_url), ("b", f"{server_url}{joint}client_encoding={encoding}")):
        with opened(PostgresBackend(url, schema=postgres_schema)) as backend:
            head = created_with_words(backend, id)
            found = loaded(backend, id)
            assert (found.damage, found.head, found.messages[0].key) == ((), head, "schlüssel €")


def created_with_words(backend: StoreBackend, id: str) -> Head:
    """An execution in which every kind of text is more than ASCII; its head."""
    new = owned(id, metadata={"größe": "€"}, steps=("prüfe €",), total=1)
    failed = change(id, new.head, head_fields={"error": "größe €", "note": "€"}, put={"€": b"1"}, blobs={"ä": b"2"})
    created(backend, new)
    done(backend, send(id, key="schlüssel €"), failed)
    return failed.head


@pytest.fixture
def database(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a new database in the encoding that the test names."""
    name = f"test_{uuid.uuid4().hex}"
    execute(server_url, f"CREATE DATABASE {name} ENCODING '{request.param}' TEMPLATE template0 LOCALE 'C'")
    yield psycopg.conninfo.make_conninfo(server_url, dbname=name)
    execute(server_url, f"DROP DATABASE {name}")


@pytest.mark.parametrize("database", ["SQL_ASCII", "UTF8", "WIN1252"], indirect=True)
def test_a_database_in_another_encoding_gives_back_what_it_took(database: str) -> None:
    with opened(PostgresBackend(database)) as backend:
        head = created_with_words(backend, "a")
        found = loaded(backend, "a")
        assert (found.damage, found.head, found.messages[0].key) == ((), head, "schlüssel €")
        for query in (Query(metadata={"größe": "€"}), Query(text="€")):
            assert [one.definition.id for one in backend.find(query)] == ["a"]


@pytest.mark.parametrize("database", ["LATIN1"], indirect=True)
def test_what_the_encoding_of_a_database_lacks_is_refused_alone(database: str) -> None:
    with opened(PostgresBackend(database)) as backend:
        good, bad = owned("a", metadata={"k": "größe"}), owned("b", metadata={"k": "€"})
        answers = backend.commit([good, bad, send("a", key="€"), send("a", key="ü")])
        assert (answers[0], answers[3]) == (True, 1)
        assert [type(answer) for answer in answers[1:3]] == [NotStorableError] * 2
        assert (loaded(backend, "a").damage, backend.load("b")) == ((), None)


def test_a_server_that_only_reads_refuses_writes_and_shows_everything(server_url: str, postgres_schema: str) -> None:
    """I10."""
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        created(backend, create("a"))
    joint = "&" if "?" in server_url else "?"
    url = f"{server_url}{joint}options={quote('-c default_transaction_read_only=on')}"
    with opened(PostgresBackend(url, schema=postgres_schema)) as backend:
        with pytest.raises(StoreUnavailableError, match="read-only") as caught:
            backend.commit([create("b")])
        assert isinstance(caught.value.__cause__, psycopg.errors.ReadOnlySqlTransaction)
        execute(server_url, f"UPDATE {postgres_schema}.heads SET step = 7")
        found = backend.load("a")
        assert found is not None
        assert found.damage


async def test_the_async_face_closes_everything(server_url: str, postgres_schema: str, anyio_backend: str) -> None:
    name = f"lr{threading.get_ident()}"
    joint = "&" if "?" in server_url else "?"
    store = PostgresCheckpointStore(f"{server_url}{joint}application_name={name}", schema=postgres_schema)
    async with store:
        assert await store.create(create("a")) is True
        assert await store.exists("a")
    with psycopg.connect(server_url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        for _ in range(1000):  # the server notices a moment later
            if connection.execute(query, (name,)).fetchone() == (0,):
                break
            connection.rollback()
        else:
            pytest.fail("connections are left")
    with pytest.raises(LongrunError):
        await store.create(create("b"))


# --- what a role was given, and what it was not -----------------------------------------------------------------------


@pytest.fixture
def role(server_url: str, postgres_schema: str) -> Iterator[Callable[[str], str]]:
    """Makes a role that may create schemas and has such a setting; its URL."""
    names: list[str] = []
    with psycopg.connect(server_url, autocommit=True) as admin:

        def make(setting: str) -> str:
            names.append(f"{postgres_schema}_{len(names)}")
            admin.execute(f"CREATE ROLE {names[-1]} LOGIN SUPERUSER".encode())
            admin.execute(f"ALTER ROLE {names[-1]} SET {setting}".encode())
            return psycopg.conninfo.make_conninfo(server_url, user=names[-1])

        yield make
        for name in names:
            admin.execute(f"REASSIGN OWNED BY {name} TO CURRENT_USER".encode())
            admin.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize("setting", ["default_transaction_isolation = serializable", "statement_timeout = '100ms'"])
def test_who_waits_for_another_to_migrate_sees_what_it_did(
    server_url: str, postgres_schema: str, role: Callable[[str], str], setting: str
) -> None:
    """Whatever the role's transactions are like: it opens when the other has ended."""
    url = role(setting)
    answers: list[object] = []

    def open_it() -> None:
        backend = PostgresBackend(url, schema=postgres_schema)
        try:
            backend.open()
            backend.close()
            answers.append(None)
        except Exception as error:
            answers.append(error)

    waiting = threading.Thread(target=open_it)
    waits_long = (  # longer than the role's statements may take
        "SELECT FROM pg_stat_activity WHERE wait_event = 'advisory' AND clock_timestamp() - query_start > '250 ms'"
    )
    with psycopg.connect(server_url) as other, psycopg.connect(server_url, autocommit=True) as looker:
        with other.transaction():
            key = migrations.LOCK_SPACE, migrations._lock_key(postgres_schema)
            other.execute("SELECT pg_advisory_xact_lock(%s, %s)", key)
            waiting.start()
            while looker.execute(waits_long).rowcount == 0:
                assert waiting.is_alive(), answers
            migrations.migrate(other, Queries(postgres_schema))
        waiting.join()
    assert answers == [None]


def test_a_role_that_is_strict_by_default_writes_as_others_do(
    server_url: str, postgres_schema: str, role: Callable[[str], str]
) -> None:
    """The writer looks again when it has a lock: it is not refused because somebody else was quicker."""
    url = role("default_transaction_isolation = serializable")
    level = "SHOW transaction_isolation"
    backend = PostgresBackend(url, schema=postgres_schema)
    backend.open()
    try:
        assert backend._links.write(lambda c: c.execute(level).fetchone()) == ("read committed",)
    finally:
        backend.close()
    with psycopg_pool.ConnectionPool(url, min_size=1, open=True) as pool:
        backend = PostgresBackend(pool, schema=postgres_schema)
        backend.open()
        try:

            def shown(connection: Any) -> Any:
                with connection.transaction():
                    return connection.execute(level).fetchone()

            assert backend._links.write(shown) == ("read committed",)
        finally:
            backend.close()
        with pool.connection() as connection:
            assert connection.execute(level).fetchone() == ("serializable",)


def test_an_index_of_somebody_else_is_told(server_url: str, postgres_schema: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {postgres_schema}.other (a integer)".encode())
        connection.execute(f"CREATE INDEX heads_created ON {postgres_schema}.other (a)".encode())
    with pytest.raises(StoreSettingsError, match=r"heads_created.*not longrun's; give another schema="):
        PostgresBackend(server_url, schema=postgres_schema).open()


@pytest.mark.anyio
async def test_a_role_that_may_only_read_lets_a_client_look(server_url: str, postgres_schema: str) -> None:
    with opened(PostgresBackend(server_url, schema=postgres_schema)) as backend:
        backend.commit([create("a")])
    with psycopg.connect(server_url, autocommit=True) as admin:
        name = f"{postgres_schema}_reader"
        admin.execute(f"CREATE ROLE {name} LOGIN".encode())
        admin.execute(f"GRANT USAGE ON SCHEMA {postgres_schema} TO {name}".encode())
        admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {postgres_schema} TO {name}".encode())
        url = psycopg.conninfo.make_conninfo(server_url, user=name)
        try:
            async with Client(PostgresCheckpointStore(url, schema=postgres_schema)) as client:
                assert [one.id for one in await client.list()] == ["a"]
                with pytest.raises(StoreReadOnlyError, match="can only be read: permission denied"):
                    await client.cancel("a")
        finally:
            admin.execute(f"DROP OWNED BY {name}".encode())
            admin.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize("gone", [True, False])
def test_a_pooler_that_loses_prepared_statements_is_named(server_url: str, empty_schema: str, gone: bool) -> None:
    """What PgBouncer does between transactions, seen from here: another connection, with other statements or none."""
    with opened(PostgresBackend(server_url, schema=empty_schema)) as backend:
        done(backend, owned("a"))
        assert isinstance(backend, PostgresBackend)
        writer = backend._links._writer
        assert isinstance(writer, OwnConnection)
        if gone:
            writer.execute("DEALLOCATE ALL")
        else:
            writer.written.clear()
        with pytest.raises(StoreUnavailableError, match=r"pooler.*'prepare_threshold': None"):
            done(backend, owned("b"))


def test_no_two_processes_call_a_statement_alike() -> None:
    """Behind such a pooler one would run what the other has prepared."""
    code = "from longrun.stores._postgres.queries import new_name; print(new_name().decode())"
    environment = {"PYTHONPATH": str(ROOT)}
    names = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert len(set(names)) == 2
