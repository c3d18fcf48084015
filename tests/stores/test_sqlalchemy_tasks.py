"""`SQLAlchemyTaskStore`: the ready bridge, on a real SQLite file and a real PostgreSQL.

The contract of all stores: `tests/campaign/test_sqlalchemy_contract.py`, and of every task store `test_task.py`.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import sqlalchemy

from longrun.errors import ConfigError, StoreSettingsError, StoreUnavailableError
from longrun.stored import Query
from longrun.stores.sqlalchemy_tasks import SQLAlchemyTaskStore
from longrun.stores.task import TaskBackend, TaskCheckpointStore, TaskRecord
from longrun.testing.samples import claim, create, owned, step
from tests.servers import PostgresServer

# --- the table -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return f"sqlite:///{tmp_path / 'tasks.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[sqlalchemy.Engine]:
    """The application's own."""
    made = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


def record(id: str = "a", revision: int = 1, **fields: Any) -> TaskRecord:
    values: dict[str, Any] = {"status": "running", "progress": 0.5, "data": bytes(range(256))}
    return TaskRecord(id=id, metadata={"revision": str(revision), "ünï": "cödé"}, **(values | fields))


async def test_the_six_methods(engine: sqlalchemy.Engine) -> None:
    tasks = SQLAlchemyTaskStore(engine)
    assert await tasks.get_task("a") is None
    assert await tasks.list_tasks() == []
    await tasks.save_task(record())
    await tasks.save_task(record("b", status="pending"))
    again = record(progress=1 / 3, data=b"\x00\xff'; drop table", revision=2)
    await tasks.save_task(again)
    assert await tasks.get_task("a") == again
    assert sorted([one.id for one in await tasks.list_tasks()]) == ["a", "b"]
    assert [one.id for one in await tasks.list_tasks(status="pending")] == ["b"]
    await tasks.update_status("b", "paused")
    await tasks.update_progress("b", 0.75)
    await tasks.update_progress("nowhere", 0.75)
    assert await tasks.get_task("b") == record("b", status="paused", progress=0.75)
    assert await tasks.delete_task("b") is True
    assert await tasks.delete_task("b") is False
    assert await tasks.list_tasks() == [again]


async def test_a_task_that_somebody_else_keeps_otherwise_is_left_alone(engine: sqlalchemy.Engine) -> None:
    tasks = SQLAlchemyTaskStore(engine)
    await tasks.save_task(record())
    with engine.begin() as connection:
        columns = "id, status, progress, data, metadata, revision, created_at, updated_at"
        odd = f"INSERT INTO longrun_tasks ({columns}) SELECT 'odd', {columns[4:]} FROM longrun_tasks"
        connection.execute(sqlalchemy.text(odd))
        connection.execute(sqlalchemy.text("UPDATE longrun_tasks SET metadata = '[]' WHERE id = 'odd'"))
    assert await tasks.list_tasks() == [record()]
    assert await tasks.get_task("odd") is None


async def test_created_at_is_kept(engine: sqlalchemy.Engine) -> None:
    """And `updated_at` moves, whichever method wrote."""
    tasks = SQLAlchemyTaskStore(engine)
    await tasks.save_task(record())

    def times() -> tuple[Any, Any]:
        with engine.connect() as connection:
            row = connection.execute(sqlalchemy.text("SELECT created_at, updated_at FROM longrun_tasks")).one()
            return row[0], row[1]

    created, updated = times()
    assert created == updated
    await tasks.save_task(record(revision=2))
    assert await tasks.replace_task(record(revision=3), expected_revision=2)
    await tasks.update_status("a", "paused")
    assert times()[0] == created
    assert times()[1] > updated


async def test_replacing_compares_the_revision(engine: sqlalchemy.Engine) -> None:
    """I3."""
    tasks = SQLAlchemyTaskStore(engine)
    assert not await tasks.replace_task(record(), expected_revision=1)
    assert await tasks.replace_task(record(), expected_revision=None)
    assert not await tasks.replace_task(record(revision=9), expected_revision=None)
    assert not await tasks.replace_task(record(revision=9), expected_revision=2)
    assert await tasks.get_task("a") == record()
    assert await tasks.replace_task(record(revision=2), expected_revision=1)
    assert await tasks.delete_task("a", expected_revision=1) is False
    assert await tasks.delete_task("a", expected_revision=2) is True


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("stale", ["stale-insert", "stale-update"])
async def test_of_many_at_once_each_is_answered_for_itself(
    engine: sqlalchemy.Engine, stale: str, autocommit: bool
) -> None:
    """They share transactions; one that does not fit does not take the others down with it, nor is it taken along. Nor
    does an engine of the application's that has no transactions."""
    tasks = SQLAlchemyTaskStore(engine.execution_options(isolation_level="AUTOCOMMIT") if autocommit else engine)
    answers: dict[str, bool] = {}

    async def replace(id: str, expected: int | None) -> None:
        new = record(id, 1 if expected is None else expected + 1)
        answers[id] = await tasks.replace_task(new, expected_revision=expected)

    for id in ("old-1", "old-2", "stale-insert", "stale-update"):
        await tasks.save_task(record(id))
    async with anyio.create_task_group() as group:
        for id in ("new-1", "new-2"):
            group.start_soon(replace, id, None)
        for id in ("old-1", "old-2"):
            group.start_soon(replace, id, 1)
        group.start_soon(replace, stale, None if stale == "stale-insert" else 7)
    assert answers == {"new-1": True, "new-2": True, "old-1": True, "old-2": True, stale: False}
    revisions = {one.id: one.revision for one in await tasks.list_tasks()}
    assert revisions == {"new-1": 1, "new-2": 1, "old-1": 2, "old-2": 2, "stale-insert": 1, "stale-update": 1}


async def test_of_those_who_expect_the_same_revision_one_succeeds(engine: sqlalchemy.Engine) -> None:
    """I3: from several connections at once, as several processes would."""
    stores = [SQLAlchemyTaskStore(engine) for _ in range(4)]
    await stores[0].save_task(record(revision=0))
    for revision in range(5):
        wins: list[int] = []

        async def replace(n: int, revision: int = revision, wins: list[int] = wins) -> None:
            new = record(revision=revision + 1, data=bytes([n]))
            if await stores[n].replace_task(new, expected_revision=revision):
                wins.append(n)

        async with anyio.create_task_group() as group:
            for n in range(4):
                group.start_soon(replace, n)
        (winner,) = wins
        found = await stores[0].get_task("a")
        assert found is not None
        assert found.data == bytes([winner])


async def test_a_replacement_that_was_cancelled_before_its_turn_is_not_made(tmp_path: Path) -> None:
    async with SQLAlchemyTaskStore(f"sqlite:///{tmp_path / 'tasks.db'}") as tasks:
        await tasks.save_task(record())
        held, done = anyio.Event(), anyio.Event()

        async def hold() -> None:
            async with tasks._lane().turn:
                held.set()
                await done.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            await held.wait()
            with anyio.move_on_after(0.01) as scope:
                await tasks.replace_task(record(revision=2), expected_revision=1)
            assert scope.cancelled_caught
            done.set()
        assert await tasks.replace_task(record("b"), expected_revision=None)
        assert await tasks.get_task("a") == record()


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ("id VARCHAR(255) PRIMARY KEY, title TEXT", "lacks"),
        ("{ours}, tenant VARCHAR(9) NOT NULL", "demands tenant"),
        ("{text}", "no bytes"),
        ("{keyless}", "primary key"),
    ],
)
async def test_somebody_elses_table_is_refused(engine: sqlalchemy.Engine, columns: str, word: str) -> None:
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"CREATE TABLE longrun_tasks ({columns.format(**schemas(engine))})"))
    with pytest.raises(StoreSettingsError, match=word):
        await SQLAlchemyTaskStore(engine).get_task("a")


async def test_a_table_with_columns_of_the_applications_own(engine: sqlalchemy.Engine) -> None:
    """They may be there as long as a row can do without them."""
    own = f"{schemas(engine)['ours']}, tenant VARCHAR(9), rank INTEGER NOT NULL DEFAULT 7"
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"CREATE TABLE app_tasks ({own})"))
    tasks = SQLAlchemyTaskStore(engine, table="app_tasks")
    await tasks.save_task(record())
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT rank FROM app_tasks")).scalar() == 7


def schemas(engine: sqlalchemy.Engine) -> dict[str, str]:
    """Columns as SQL: as the bridge makes them, with text for bytes, and without a key."""
    binary = "BYTEA" if engine.name == "postgresql" else "BLOB"
    ours = (
        f"id VARCHAR(255) PRIMARY KEY, status VARCHAR(32), progress FLOAT, data {binary}, metadata JSON, "
        "revision BIGINT, created_at TIMESTAMP, updated_at TIMESTAMP"
    )
    return {"ours": ours, "text": ours.replace(binary, "TEXT"), "keyless": ours.replace(" PRIMARY KEY", "")}


def test_several_who_make_the_table_at_once(url: str) -> None:
    stores = [TaskCheckpointStore(SQLAlchemyTaskStore(url)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda store: store.backend.open(), stores))
    try:
        for n, store in enumerate(stores):
            assert store.backend.commit([create(f"x{n}")]) == [True]
        assert len(stores[0].backend.find(Query())) == 4
    finally:
        for store in stores:
            store.backend.close()


# --- engines and addresses -------------------------------------------------------------------------------------------


async def test_an_engine_that_was_given_is_not_closed(engine: sqlalchemy.Engine) -> None:
    pool = engine.pool
    async with SQLAlchemyTaskStore(engine) as tasks:
        await tasks.save_task(record())
    assert engine.pool is pool


async def test_an_engine_of_its_own_is_closed_and_can_be_used_again(url: str) -> None:
    tasks = SQLAlchemyTaskStore(url)
    for _ in range(2):
        async with TaskCheckpointStore(tasks) as store:
            await store.count()
            assert pooled(tasks) > 0
        assert pooled(tasks) == 0


def pooled(tasks: SQLAlchemyTaskStore) -> int:
    pool = tasks._engine.pool
    assert isinstance(pool, sqlalchemy.QueuePool)
    return pool.checkedin() + pool.checkedout()


async def test_a_password_is_shown_nowhere(tmp_path: Path) -> None:
    place = f"postgresql://user:pa55word@/db?host={tmp_path}&sslpassword=pa55word"
    tasks = SQLAlchemyTaskStore(place)
    with pytest.raises(StoreUnavailableError) as error:
        await tasks.get_task("a")
    store = TaskCheckpointStore(tasks)
    assert "pa55word" not in f"{tasks!r} {error.value} {store!r} {store.backend.describe()}"
    with pytest.raises(StoreSettingsError) as wrong:
        SQLAlchemyTaskStore("nonsense+x://user:pa55word@host/db")
    assert "pa55word" not in str(wrong.value)


@pytest.mark.parametrize(
    "given", ["sqlite://", "sqlite:///:memory:", "no url at all", "mysql+nosuchdriver://host/db", object()]
)
def test_what_cannot_be_a_database_is_refused(given: Any) -> None:
    with pytest.raises(StoreSettingsError):
        SQLAlchemyTaskStore(given)


@pytest.mark.parametrize("name", ["", "a b", "x;drop", 'a"b', "a.b.c", "1x"])
def test_a_table_has_a_plain_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        SQLAlchemyTaskStore(f"sqlite:///{tmp_path / 'x.db'}", table=name)


async def test_a_table_in_a_schema(postgres_server: Any, postgres_schema: str) -> None:
    async with SQLAlchemyTaskStore(postgres_server.url, table=f"{postgres_schema}.jobs") as tasks:
        await tasks.save_task(record())
        assert await tasks.get_task("a") == record()


# --- crashes ---------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from longrun.stores.sqlalchemy_tasks import SQLAlchemyTaskStore
from longrun.stores.task import TaskCheckpointStore
from longrun.testing.samples import claim, owned, step

class SixMethods:
    def __init__(self, tasks):
        for name in ("save_task", "get_task", "list_tasks", "delete_task", "update_progress", "update_status"):
            setattr(self, name, getattr(tasks, name))

tasks = SQLAlchemyTaskStore(sys.argv[1])
backend = TaskCheckpointStore(tasks if sys.argv[2] == "7" else SixMethods(tasks)).backend
backend.open()
backend.commit([owned("a", "child")])
head = backend.claim(claim("child", dead=frozenset({"child"})))[0].head
while True:
    save = step("a", head, keep_from=head.seq - 2)
    assert backend.commit([save]) == [None]
    head = save.head
    print(head.seq, flush=True)
"""


@contextlib.contextmanager
def child(url: str, methods: str) -> Iterator[subprocess.Popen[str]]:
    """A process that saves and says so until it is killed."""
    command = [sys.executable, "-c", CHILD, url, methods]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_after(process: subprocess.Popen[str], saves: int) -> int:
    """The last number that it acknowledged."""
    assert process.stdout is not None
    for _ in range(saves):
        process.stdout.readline()
    process.kill()
    rest = process.stdout.read().split()
    assert process.wait() == -signal.SIGKILL
    return int(rest[-1]) if rest else saves + 1


def test_what_was_acknowledged_survives_a_kill(url: str) -> None:
    """I1, I2: and the claim of the dead one ends with a new fence (I3)."""
    with child(url, "7") as process:
        acknowledged = kill_after(process, 25)
    backend = TaskCheckpointStore(SQLAlchemyTaskStore(url)).backend
    backend.open()
    try:
        (given,) = backend.claim(claim("heir", dead=frozenset({"child"})))
        assert given.boundary.seq in (acknowledged, acknowledged + 1)
        assert (given.head.fence, given.head.crashes, given.damage) == (3, 1, ())
        assert [row.seq for row in backend.boundaries("a")] == list(range(1, given.head.seq + 1))
    finally:
        backend.close()


class SixMethods:
    """The bridge as an application might write it that cannot compare and write in one act."""

    def __init__(self, tasks: SQLAlchemyTaskStore) -> None:
        self.save_task, self.get_task, self.list_tasks = tasks.save_task, tasks.get_task, tasks.list_tasks
        self.update_progress, self.update_status = tasks.update_progress, tasks.update_status
        self.delete_task, self.store_closed = tasks.delete_task, tasks.store_closed


def test_without_replace_task_another_process_waits_until_the_first_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: its kernel lock proves the death, so nobody waits for a lease."""
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "run"))
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    backend = TaskBackend(SixMethods(SQLAlchemyTaskStore(url)))
    with child(url, "6") as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(StoreSettingsError, match=f"process {process.pid}"):
            backend.open()
        kill_after(process, 1)
    backend.open()
    try:
        assert len(backend.claim(claim("heir", dead=frozenset({"child"})))) == 1
    finally:
        backend.close()


def test_a_server_that_dies_and_comes_back(disposable_postgres: PostgresServer) -> None:
    """I10: an error while it is away, no acknowledgement; afterwards the same write goes through."""
    backend = TaskCheckpointStore(SQLAlchemyTaskStore(disposable_postgres.url)).backend
    backend.open()
    try:
        new = owned("a")
        second = step("a", new.head)
        third = step("a", second.head)
        assert backend.commit([new, second]) == [True, None]
        disposable_postgres.stop("immediate")
        (refused,) = backend.commit([third])
        assert isinstance(refused, StoreUnavailableError)
        with pytest.raises(StoreUnavailableError):
            backend.ping()
        disposable_postgres.start()
        assert backend.commit([third]) == [None]
        assert [row.seq for row in backend.boundaries("a")] == [1, 2, 3]
    finally:
        backend.close()


async def test_a_database_that_fails_tells_everybody_whose_turn_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacements are made together; none of them may be left without an answer."""
    tasks = SQLAlchemyTaskStore(f"sqlite:///{tmp_path / 'tasks.db'}")
    await tasks.save_task(record())
    monkeypatch.setattr(tasks, "_transaction", _away)
    answers: list[str] = []

    async def replace(id: str) -> None:
        with pytest.raises(StoreUnavailableError, match="pulled out"):
            await tasks.replace_task(record(id), expected_revision=None)
        answers.append(id)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for id in "bcd":
                group.start_soon(replace, id)
    assert sorted(answers) == ["b", "c", "d"]
    await tasks.close()


def _away(*args: object) -> bool:
    raise StoreUnavailableError("task", "the plug was pulled out")


async def test_a_driver_that_does_not_count_its_rows_replaces_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = SQLAlchemyTaskStore(f"sqlite:///{tmp_path / 'tasks.db'}")
    await tasks.save_task(record())
    monkeypatch.setattr(tasks._engine.dialect, "supports_sane_multi_rowcount", False)
    replaced: dict[str, bool] = {}

    async def replace(id: str, expected: int | None) -> None:
        replaced[id] = await tasks.replace_task(record(id, revision=2), expected_revision=expected)

    async with anyio.create_task_group() as group:
        for id, expected in (("a", 1), ("b", None), ("c", 7)):
            group.start_soon(replace, id, expected)
    assert replaced == {"a": True, "b": True, "c": False}
    await tasks.close()


async def test_a_column_of_a_type_that_python_has_no_word_for_holds_no_bytes(tmp_path: Path) -> None:
    made = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'tasks.db'}")
    tasks = SQLAlchemyTaskStore(made)
    await tasks.save_task(record())
    with made.begin() as connection:
        text = connection.execute(
            sqlalchemy.text("SELECT sql FROM sqlite_master WHERE name = 'longrun_tasks'")
        ).scalar()
        assert isinstance(text, str)
        connection.execute(sqlalchemy.text("DROP TABLE longrun_tasks"))
        connection.execute(sqlalchemy.text(text.replace("BLOB", "NUMERIC_OF_ITS_OWN")))
    with pytest.raises(StoreSettingsError, match="holds no bytes"):
        await SQLAlchemyTaskStore(made).save_task(record())
    made.dispose()
