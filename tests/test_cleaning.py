"""What executors clear away beside their work, and that nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from longrun import Executor, ExecutorConfig, MemoryCheckpointStore, StepRegistry, StoreUnavailableError
from longrun.life import Life, LifeLock


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def add(state: int) -> int:
        return state + 1

    registry.workflow("one", [add])
    return registry


# -- the lock files of the dead ----------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(path))
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
