"""PostgreSQL with much in it and many at it: indexes, races between claimers, quick wake-ups, cheap checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import psycopg
import pytest

from longrun.records import ExecutionState
from longrun.stored import Claim, Query
from longrun.stores._postgres import asking
from longrun.stores._postgres.links import OwnConnection
from longrun.stores._postgres.queries import Statement
from longrun.stores._postgres.writing import Writing
from longrun.stores.base import StoreBackend
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import beside, created, done, ids_of, opened
from longrun.testing.samples import DUE_STATES, NOW, UNFINISHED, change, claim, create, owned, send, step
from tests.servers import PostgresServer, Source

MANY_ROWS = 20_000
S = ExecutionState


@pytest.fixture
def url(postgres_server: PostgresServer | Source) -> str:
    assert postgres_server.url is not None
    return postgres_server.url


@pytest.fixture
def backend(url: str, postgres_schema: str) -> Iterator[StoreBackend]:
    with opened(PostgresBackend(url, schema=postgres_schema)) as backend:
        yield backend


@pytest.fixture
def full(backend: StoreBackend, url: str, postgres_schema: str) -> StoreBackend:
    """Many finished executions beside a few that live."""
    created(backend, create("pattern", S.COMPLETED, head_fields={"ended": NOW}))
    with psycopg.connect(url, autocommit=True, options=f"-c search_path={postgres_schema}") as connection:
        multiply(connection, postgres_schema, "done")
        connection.execute("ANALYZE")
    created(backend, *[create(f"due-{n}", S.INITIALIZED, created=NOW - n) for n in range(30)])
    created(backend, *[create(f"later-{n}", S.WAITING, head_fields={"due": NOW + n + 1}) for n in range(30)])
    created(backend, *[owned(f"mine-{n}", workflow="rare", queue="rare") for n in range(30)])
    done(backend, send("mine-1"))
    return backend


def multiply(connection: psycopg.Connection[Any], schema: str, name: str) -> None:
    """Very many executions like `pattern`, each older than the one before."""
    for table, id, more in (
        ("heads", "id", "created"),
        ("definitions", "id", None),
        ("boundaries", "execution", None),
    ):
        found = connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s"
            " AND is_generated = 'NEVER'",
            (schema, table),
        )
        names = [f'"{name}"' for (name,) in found]
        values = [f"'{name}-' || n" if column == f'"{id}"' else column for column in names]
        values = ["created - n" if more and column == f'"{more}"' else column for column in values]
        connection.execute(
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(values)} FROM {table},"
            f" generate_series(1, {MANY_ROWS}) AS n WHERE {id} = 'pattern'".encode()
        )


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plan of every statement that is run from now on, on the connection that runs it."""
    seen: list[str] = []
    run, write = Statement.run, Writing._run

    def explained(self: Statement, connection: Any, parameters: Any, *, prepare: bool = True) -> Any:
        cursor = psycopg.RawCursor(connection)
        cursor.execute(b"EXPLAIN " + self.text, self.values(parameters), prepare=False)
        seen.append("\n".join(line for (line,) in cursor))
        return run(self, connection, parameters, prepare=prepare)

    def explained_write(self: Writing, connection: OwnConnection, packed: Any, news: Any) -> Any:
        values = [*packed, *map(str.encode, news)]
        found = connection.pgconn.exec_params(b"EXPLAIN " + self.text, values, self._oids, [1] * len(values))
        seen.append("\n".join(found.get_value(n, 0).decode() for n in range(found.ntuples)))  # type: ignore[union-attr]
        return write(self, connection, packed, news)

    monkeypatch.setattr(Statement, "run", explained)
    monkeypatch.setattr(Writing, "_run", explained_write)
    monkeypatch.setattr(asking, "OwnConnection", ())  # whatever is asked, is asked by `Statement.run`
    return seen


ASKED: dict[str, Callable[[StoreBackend], Any]] = {
    "claim": lambda backend: backend.claim(claim("new", limit=5, dead=frozenset({"dead"}), states=DUE_STATES)),
    "claim by id": lambda backend: backend.claim(claim("new", ids=("due-1",))),
    "next_due": lambda backend: backend.next_due(),
    "pending": lambda backend: backend.pending("me"),
    "newest": lambda backend: backend.find(Query(limit=20)),
    "a later page": lambda backend: backend.find(Query(limit=20, after=(NOW - 9000, "x"))),
    "resume-all's scan": lambda backend: backend.find(Query(states=UNFINISHED, limit=500)),
    "by state": lambda backend: backend.find(Query(states=frozenset({S.INITIALIZED}), limit=20)),
    "by workflow": lambda backend: backend.find(Query(workflows=frozenset({"rare"}), limit=20)),
    "by queue": lambda backend: backend.find(Query(queue="rare", limit=20)),
    "by owner": lambda backend: backend.find(Query(owner="me", limit=20)),
    "by time": lambda backend: backend.find(Query(created_after=NOW - 3, limit=20)),
    "by end": lambda backend: backend.find(Query(ended_before=NOW - 1, limit=20)),
    "save": lambda backend: backend.commit([step("mine-1", owned("x").head)]),
    "load": lambda backend: backend.load("mine-1"),
    "boundaries": lambda backend: backend.boundaries("done-77"),
}


def test_what_is_asked_often_goes_by_an_index(full: StoreBackend, plans: list[str]) -> None:
    """I16: with 20,000 finished executions beside, none of these reads a table from end to end."""
    for name, ask in ASKED.items():
        plans.clear()
        assert ask(full) is not False
        assert plans, name
        for plan in plans:
            for table in ("heads", "definitions", "boundaries"):
                assert f"Seq Scan on {table}" not in plan, f"{name}:\n{plan}"


def test_a_load_looks_for_one_id_after_the_other(url: str, postgres_schema: str) -> None:
    """I16: also by a plan that was made when there was nothing yet, and is kept."""
    with opened(PostgresBackend(url, schema=postgres_schema)) as backend:
        assert isinstance(backend, PostgresBackend)
        with backend._links._writing() as connection:
            text = backend._queries.statement("load").text
            plan = "\n".join(line for (line,) in connection.execute(b"EXPLAIN " + text.replace(b"$1", b"NULL")))
    scans = plan.count(" Scan ")
    assert scans >= 7, plan
    assert plan.count("Index Cond: ") == scans, plan


def test_a_plan_that_reads_everything_is_seen(full: StoreBackend, plans: list[str]) -> None:
    """The test above can fail: a count of everything does read the table."""
    assert sum(full.count(Query()).values()) == MANY_ROWS + 91
    assert any("Seq Scan on heads" in plan or "Index Only Scan" in plan for plan in plans)


def test_a_claim_reads_the_first_few_although_nothing_was_counted_yet(
    backend: StoreBackend, plans: list[str], url: str, postgres_schema: str
) -> None:
    """A queue that was filled just now: the server has no statistics of it, and would rather sort all of it."""
    created(backend, create("pattern", S.INITIALIZED))
    with psycopg.connect(url, autocommit=True, options=f"-c search_path={postgres_schema}") as connection:
        multiply(connection, postgres_schema, "due")
    plans.clear()
    backend.claim(claim("new", limit=5, states=frozenset({S.INITIALIZED})))
    (plan,) = [plan for plan in plans if "CTE ready" in plan]
    ready = plan.partition("CTE ready")[2].partition("CTE slept")[0]
    assert "Index Scan using heads_ready" in ready, plan
    assert "Sort" not in ready, plan


def test_eight_claimers_hardly_ever_lose_a_round(url: str, postgres_schema: str) -> None:
    """I3: no execution is given twice; and fewer than one round in ten comes back short while there is work."""
    workers, rounds, each = 8, 12, 5
    with ExitStack() as stack:
        backends = [stack.enter_context(opened(PostgresBackend(url, schema=postgres_schema))) for _ in range(workers)]
        created(backends[0], *[create(f"x{n}", S.INITIALIZED) for n in range(workers * rounds * each)])
        start = Barrier(workers)

        def work(n: int) -> list[list[str]]:
            start.wait(30)
            given = []
            for turn in range(rounds):
                ask = Claim(owner=f"w{n}-{turn}", now=NOW, states=frozenset({S.INITIALIZED}), limit=each)
                given.append(ids_of(backends[n].claim(ask)))
            return given

        pool = stack.enter_context(ThreadPoolExecutor(workers))
        results = [given for found in pool.map(work, range(workers)) for given in found]
    everything = [id for given in results for id in given]
    assert len(everything) == len(set(everything))
    lost = sum(len(given) < each for given in results)
    assert lost < len(results) / 10, f"{lost} of {len(results)} rounds lost"


def test_a_notification_wakes_another_store_at_once(backend: StoreBackend, url: str, postgres_schema: str) -> None:
    with opened(PostgresBackend(url, schema=postgres_schema)) as other:
        created(backend, create("a"))
        while other.wait(0.1):
            pass
        delays = []
        for _ in range(5):
            with beside(lambda: (other.wait(30), time.monotonic())) as waiting:
                sent = time.monotonic()
                done(backend, send("a"))
                woken, at = waiting.result(30)
            assert woken
            delays.append(at - sent)
    assert min(delays) < 0.1


def test_what_a_store_notifies_itself_is_no_news(url: str, postgres_schema: str) -> None:
    """However much of it stands around what others said."""
    here, there = (PostgresBackend(url, schema=postgres_schema) for _ in range(2))
    with opened(here) as one, opened(there) as other:
        for backend in (one, other):
            while backend.wait(0.1):
                pass
        for n in range(20):
            created(one, create(f"x{n}"))
        assert one.wait(0.2) is False
        created(one, create("a"))
        done(other, send("a"))
        created(one, create("b"))
        assert one.wait(0.2) is True
        assert one.wait(0.2) is False


def test_what_is_notified_while_the_driver_has_the_connection_is_news(url: str, postgres_schema: str) -> None:
    """As it has it when it is told to listen, or hears that it does."""
    here, there = (PostgresBackend(url, schema=postgres_schema) for _ in range(2))
    with opened(here) as backend, opened(there) as other:
        while backend.wait(0.1):
            pass
        listener: Any = here._listener
        created(backend, create("a"))
        listener._connection.execute("SELECT 1")
        assert backend.wait(0.2) is False
        created(other, create("b"))
        listener._connection.execute("SELECT 1")
        assert backend.wait(0.0) is True


def test_an_ordinary_checkpoint_notifies_nobody(backend: StoreBackend, url: str, postgres_schema: str) -> None:
    """A notification takes a lock over the whole server; a step must not."""
    new = owned("a")
    created(backend, new)
    with opened(PostgresBackend(url, schema=postgres_schema)) as other:
        save = step("a", new.head)
        done(backend, save)
        assert other.wait(0.2) is False
        done(backend, change("a", save.head, head_fields={"owner": None}))
        assert other.wait(30) is True


def test_checkpoints_touch_no_index_of_the_queue(url: str, postgres_schema: str) -> None:
    """Every step's update of the head is a heap-only one."""
    with opened(PostgresBackend(url, schema=postgres_schema)) as backend:
        new = owned("a")
        created(backend, new)
        head = new.head
        for _ in range(50):
            save = step("a", head, keep_from=max(1, head.seq - 3), put={"e": b"x"}, clear=True)
            done(backend, save)
            head = save.head
    with psycopg.connect(url, autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while True:
            row = connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = 'heads'",
                (postgres_schema,),
            ).fetchone()
            if row is not None and row[0] == 50:
                break
            assert time.monotonic() < deadline, row
    assert row == (50, 50)


def test_a_thousand_executions_are_claimed_with_few_statements(backend: StoreBackend, plans: list[str]) -> None:
    created(backend, *[owned(f"x{n}", "dead", blobs={"b": b"x"}) for n in range(1000)])
    plans.clear()
    assert len(backend.claim(claim("new", dead=frozenset({"dead"}), limit=1000))) == 1000
    assert len(plans) < 12
