"""Copies between all kinds of store, and a server that is killed while an executor works on a pair (I13)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from longrun import Executor, ExecutorConfig, StepContext, StepRegistry
from longrun.records import ExecutionState
from longrun.stores._replicated.copying import Copier
from longrun.stores._replicated.side import Side
from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.postgres import PostgresBackend
from longrun.stores.redis import RedisBackend
from longrun.stores.replicated import ReplicatedCheckpointStore
from longrun.testing.samples import NOW, boundary, change, claim, create, owned, send, step
from tests.servers import PostgresServer, RedisServer
from tests.stores.replicated_tools import assert_equal, created, done, everything, make, opened


def fill(backend: StoreBackend) -> list[str]:
    """Executions with everything that an execution can have; their ids."""
    created(backend, create("new", ExecutionState.INITIALIZED, metadata={"k": [1, "ü"]}, priority=3))
    parked = create("parked", ExecutionState.WAITING, head_fields={"signal": "go"})
    done(backend, parked, send("parked", key="k", payload=b"\x00"), send("parked", payload=b""))
    new = owned("long", blobs={"b": b"blob", "c": b"other"})
    done(backend, new, *[send("long", key=f"k{n}" if n % 2 else None) for n in range(6)])
    head = new.head
    for n in range(2, 9):
        blobs = {"data": b"state", "blobs": ("b",)} if n % 3 else {"data": None, "blobs": ()}
        save = step("long", head, boundaries=(boundary(n, **blobs),), put={f"e{n}": b"x" * n}, take=(n - 1,))
        done(backend, save)
        head = save.head
    done(backend, change("long", head, keep_from=4, drop_blobs=("c",), drop=("e2",)))
    backend.claim(claim("two", ids=("long",), dead=frozenset({"me"})))
    (given,) = backend.claim(claim("three", ids=("long",), dead=frozenset({"two"})))
    done(backend, step("long", given.head))
    failed = owned("failed")
    error = {"state": ExecutionState.FAILED, "owner": None, "ended": NOW, "error": "no"}
    done(backend, failed, send("failed"), change("failed", failed.head, put={"e": b"1"}, head_fields=error))
    ended = owned("ended")
    end = change("ended", ended.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW})
    done(backend, ended, send("ended", key="early"), end, send("ended", key="late"))
    return ["new", "parked", "long", "failed", "ended"]


def copy(source: Side, target: Side, ids: list[str]) -> None:
    Copier(source, target, lambda *_: None).agree(ids)


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
def test_a_copy_is_exact(kind: str, tmp_path: Path) -> None:
    there_and_back(make(kind, tmp_path))


def test_a_copy_in_postgresql_is_exact(postgres_server: PostgresServer, postgres_schema: str) -> None:
    there_and_back(PostgresBackend(postgres_server.url, schema=postgres_schema))


def test_a_copy_in_redis_is_exact(disposable_redis: RedisServer) -> None:
    there_and_back(RedisBackend(disposable_redis.url))


def there_and_back(other: StoreBackend) -> None:
    """Over what stood there before: fences, revisions, numbers and keys of messages, blobs, what was stripped."""
    source, back = MemoryBackend(), MemoryBackend()
    ids = fill(source)
    here, there, home = Side("primary", source), Side("secondary", other), Side("secondary", back)
    assert all(side.open() for side in (here, there, home))
    try:
        created(other, *[owned(id, "somebody") for id in ids])
        copy(here, there, ids)
        assert_equal(source, other)
        copy(there, home, ids)
        assert_equal(source, back)
        keys = [send("long", key="k1"), send("long"), send("ended", key="early"), send("parked", key="k")]
        assert other.commit(keys) == source.commit(keys) == [2, 7, 1, 1]
        assert_equal(source, other)
        source.delete(["failed"])
        copy(here, there, ids)
        assert_equal(source, other)
    finally:
        there.close()


class Story:
    """A workflow whose fourth step kills the primary."""

    def __init__(self, kill: Any) -> None:
        self.registry = StepRegistry()
        self.ran: list[tuple[str, int]] = []
        self._kill = kill
        self.registry.workflow("long", [self._numbered(n) for n in range(8)])

    def _numbered(self, n: int) -> Any:
        def step(ctx: StepContext, state: list[int]) -> list[int]:
            self.ran.append((ctx.execution_id, n))
            if n == 4 and ctx.execution_id == "run0":
                self._kill()
            return [*state, n]

        return self.registry.register(f"step{n}", step)


async def tell(primary: StoreBackend, secondary: StoreBackend, kill: Any, revive: Any) -> None:
    """I2, I13: the primary dies under load, returns, is brought up to date, and is active again."""
    store = ReplicatedCheckpointStore(primary, secondary, single_process=True, health_interval=None, failback_after=0.0)
    story = Story(kill)
    config = ExecutorConfig(heartbeat_interval=1.0, lease_ttl=60.0)
    async with store, Executor(story.registry, store=store, config=config) as executor:
        await (await executor.start("long", [], id="old")).result()
        runs = [await executor.start("long", [], id=f"run{n}") for n in range(20)]
        for run in runs:
            assert await run.result() == list(range(8))
        assert store.status().active == "secondary"
        await executor.delete("old")
        revive()
        await store.check()
        assert (store.status().active, store.status().standby) == ("primary", "level")
        assert await (await executor.start("long", [], id="last")).result() == list(range(8))
    assert sorted(story.ran) == sorted(set(story.ran))
    with ExitStack() as stack:
        stack.enter_context(opened(primary))
        stack.enter_context(opened(secondary))
        assert_equal(primary, secondary)
        assert "old" not in everything(primary)


async def test_a_redis_killed_during_a_run(disposable_redis: RedisServer, tmp_path: Path) -> None:
    await tell(
        RedisBackend(disposable_redis.url),
        make("sqlite", tmp_path),
        disposable_redis.kill,
        disposable_redis.start,
    )


async def test_a_postgresql_killed_during_a_run(disposable_postgres: PostgresServer, tmp_path: Path) -> None:
    await tell(
        PostgresBackend(disposable_postgres.url),
        make("file", tmp_path),
        lambda: disposable_postgres.stop("immediate"),
        disposable_postgres.start,
    )
