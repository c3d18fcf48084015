"""What executors clear away beside their work, and that nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import (
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    RetentionPolicy,
    StepContext,
    StepRegistry,
    StoreUnavailableError,
)
from longrun.cleaning import LATER
from longrun.life import Life, LifeLock
from longrun.stores.store import AT_ONCE
from longrun.testing import ManualClock
from tests.crashing import PATIENCE


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def add(state: int) -> int:
        return state + 1

    registry.workflow("one", [add])
    return registry


# -- what retention lets go --------------------------------------------------------------------------------------------

A_DAY = ExecutorConfig(retention=RetentionPolicy(max_age=timedelta(days=1)), heartbeat_interval=3600, lease_ttl=10_800)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(registry, clock):
    """One execution ended two days ago, another a moment ago."""
    async with MemoryCheckpointStore(clock=clock) as store:
        async with Executor(registry, store=store, clock=clock) as executor:
            await (await executor.start("one", 1, id="old")).result()
            clock.advance(2 * 86_400)
            await (await executor.start("one", 1, id="young")).result()
        yield store


async def test_an_executor_clears_soon_after_entering(registry, store, clock):
    """Most programs are over long before the second look."""
    entered = clock.now()
    async with Executor(registry, store=store, clock=clock, config=A_DAY) as executor:
        while await store.exists("old"):
            clock.advance(0.1)
            assert clock.now() - entered < 60
        assert [one.id for one in await executor.list()] == ["young"]


async def test_some_executors_clear_at_once(registry, store, clock, monkeypatch):
    """Where every program is over in a moment, those of them clear for all."""
    monkeypatch.setattr("longrun.chance.bits", lambda bits: 0)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=clock, config=A_DAY):
            while await store.exists("old"):
                await anyio.lowlevel.checkpoint()


async def test_nobody_waits_while_an_executor_clears(registry, store, clock, monkeypatch):
    """Neither what captures progress, nor who starts, nor who leaves."""
    clearing, going_on = anyio.Event(), anyio.Event()

    async def clear(policy: RetentionPolicy, now: float) -> int:
        clearing.set()
        await anyio.sleep_forever()
        return 0

    @registry.step
    async def tell(ctx: StepContext, state: int) -> int:
        ctx.progress(1, 2, "half of it")
        await going_on.wait()
        return state

    monkeypatch.setattr(store, "gc", clear)
    config = attrs.evolve(A_DAY, heartbeat_interval=1.0, lease_ttl=1e9)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=clock, config=config) as executor:
            while not clearing.is_set():
                clock.advance(0.1)
                await anyio.lowlevel.checkpoint()
            run = await executor.start([tell], 1, id="x")
            while (await store.load("x")).head.note != "half of it":
                clock.advance(0.1)
            going_on.set()
            assert await run.result() == 1


@pytest.mark.parametrize("error", [StoreUnavailableError("memory", "not now"), ValueError("a defect")])
async def test_what_cannot_be_cleared_fails_nobody_and_is_tried_again(
    registry, store, clock, monkeypatch, caplog, error
):
    looks: list[float] = []
    gc = store.gc

    async def fail_once(policy, now):
        looks.append(now)
        if len(looks) == 1:
            raise error
        return await gc(policy, now)

    monkeypatch.setattr(store, "gc", fail_once)
    async with Executor(registry, store=store, clock=clock, config=A_DAY) as executor:
        while await store.exists("old"):
            clock.advance(100)
            await anyio.wait_all_tasks_blocked()
        assert await (await executor.start("one", 1)).result() == 2
    assert looks[1] - looks[0] == pytest.approx(3600, abs=200)
    [line] = [line for line in caplog.messages if line.startswith("retention.")]
    assert "not now" in line or "ValueError" in line


async def test_retention_deletes_a_few_at_a_time(registry, store, clock, monkeypatch):
    """What executors write meanwhile does not wait behind hundreds of deletions."""
    async with Executor(registry, store=store, clock=clock) as executor:
        for _ in range(AT_ONCE + 10):
            await (await executor.start("one", 1)).result()
    clock.advance(2 * 86_400)
    sizes, delete = [], store.delete

    async def counted(ids):
        sizes.append(len(ids))
        return await delete(ids)

    monkeypatch.setattr(store, "delete", counted)
    assert await store.gc(A_DAY.retention, clock.now()) == AT_ONCE + 12
    assert max(sizes) <= AT_ONCE


# -- the lock files of the dead ----------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of executors of which each is one of the sixteen that look at once."""
    path = tmp_path / "run"
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(path))
    monkeypatch.setattr("longrun.cleaning.chance.bits", lambda number: 0)
    return path


def dead_life(*, hours: float) -> Life:
    lock = LifeLock.acquire()
    lock.abandon()
    make_old(lock.life.path, hours=hours)
    return lock.life


def make_old(path: str, *, hours: float) -> None:
    past = time.time() - hours * 3600
    os.utime(path, (past, past))


def until_cleared() -> None:
    for thread in threading.enumerate():
        if thread.name == "longrun-clear":
            thread.join()


async def run_one(registry: StepRegistry, config: ExecutorConfig | None = None) -> None:
    async with Executor(registry, store=MemoryCheckpointStore(), config=config) as executor:
        assert await (await executor.start("one", 1)).result() == 2


async def test_an_executor_removes_the_lock_files_of_the_long_dead_and_nobody_elses(registry, directory):
    living, fresh = LifeLock.acquire(), dead_life(hours=1)
    make_old(living.life.path, hours=24)
    for _ in range(3):
        dead_life(hours=24)
    await run_one(registry)
    until_cleared()
    assert {path.name for path in directory.iterdir()} == {Path(life.path).name for life in (living.life, fresh)}
    living.release()


async def test_a_lock_file_stays_while_a_lease_may_last(registry, directory):
    """It is the proof by which what the dead had is taken over before that."""
    life = dead_life(hours=24)
    await run_one(registry, ExecutorConfig(lease_ttl=86_400.0))
    until_cleared()
    assert [str(path) for path in directory.iterdir()] == [life.path]


async def test_most_executors_look_at_lock_files_when_their_start_is_over(registry, directory, clock, monkeypatch):
    monkeypatch.setattr("longrun.cleaning.chance.bits", lambda number: 1)
    life = dead_life(hours=24)
    async with Executor(registry, store=MemoryCheckpointStore(), clock=clock) as executor:
        assert await (await executor.start("one", 1)).result() == 2
        until_cleared()
        assert os.path.exists(life.path)
        while os.path.exists(life.path):
            clock.advance(LATER)
            await anyio.lowlevel.checkpoint()
            until_cleared()


async def test_nobody_waits_for_the_clearing_of_lock_files(registry, directory, monkeypatch):
    go_on, done = threading.Event(), []
    monkeypatch.setattr("longrun.cleaning.sweep_run_directory", lambda **options: done.append(go_on.wait()))
    await run_one(registry)
    assert not done
    go_on.set()
    until_cleared()
    assert done


@pytest.mark.parametrize("error", [StoreUnavailableError("run-directory", "no list"), ValueError("a defect")])
async def test_lock_files_that_cannot_be_removed_cost_a_line_in_the_log(
    registry, directory, monkeypatch, caplog, error
):
    def fail(**options: object) -> int:
        raise error

    monkeypatch.setattr("longrun.cleaning.sweep_run_directory", fail)
    await run_one(registry)
    until_cleared()
    [line] = [line for line in caplog.messages if line.startswith("lock_files.")]
    assert "no list" in line or "ValueError" in line


async def test_without_a_thread_the_lock_files_stay(registry, directory, monkeypatch, caplog):
    start = threading.Thread.start

    def start_but_one(thread: threading.Thread) -> None:
        if thread.name == "longrun-clear":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_one)
    await run_one(registry)
    assert [line for line in caplog.messages if line.startswith("lock_files.not_cleared")]
