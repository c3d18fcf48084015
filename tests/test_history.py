"""What is kept of an execution: checkpoints, rows, retention, forks; and how executions are found and deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import (
    Client,
    ConfigError,
    ExecutionExistsError,
    ExecutionNotFoundError,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    MemoryCheckpointStore,
    RetentionPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.testing import ManualClock
from longrun.worker import Worker


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def add(state: int) -> int:
        return state + 1

    registry.workflow("three", [add] * 3)
    registry.workflow("thirty", [add] * 30)
    return registry


async def test_history_gives_the_checkpoints_with_their_states(registry, store):
    async with Executor(registry, store=store) as executor:
        await (await executor.start("three", 0, id="a")).result()
        history = await executor.history("a")
    assert [(c.seq, c.step, c.state, c.kind) for c in history] == [
        (1, 0, 0, "start"),
        (2, 1, 1, "step"),
        (3, 2, 2, "step"),
        (4, 3, 3, "finish"),
    ]
    assert [c.id for c in history] == ["a@1", "a@2", "a@3", "a@4"]
    assert all(c.size > 0 and c.timestamp.tzinfo is not None for c in history)
    assert "state" not in repr(history[0])


@pytest.mark.parametrize("keep", [1, 2, 10])
async def test_retention_bounds_the_states_and_every_row_stays(registry, store, keep):
    """I7, I16"""
    config = ExecutorConfig(retention=RetentionPolicy(history=keep))
    async with Executor(registry, store=store, config=config) as executor:
        await (await executor.start("thirty", 0, id="a")).result()
        history = await executor.history("a")
        assert [c.seq for c in history] == list(range(32 - keep, 32))
        assert [c.state for c in history] == list(range(31 - keep, 31))
        rows = await executor.steps("a")
        assert [row.seq for row in rows] == list(range(1, 32))
        assert len((await store.load("a")).kept) == keep
        assert [row.seq for row in await executor.steps("a", after=10, limit=5)] == [11, 12, 13, 14, 15]


async def test_rows_tell_step_times_attempts_and_errors(store):
    registry = StepRegistry()

    async def shaky(ctx: StepContext, state: Any) -> Any:
        if ctx.attempt == 1:
            raise ValueError("first time")
        return state

    registry.workflow("work", [shaky])
    clock = ManualClock(autojump=True)
    async with Executor(registry, store=store, clock=clock) as executor:
        await (await executor.start("work", id="a")).result()
        start, finish = await executor.steps("a")
    assert (start.kind, start.step, start.next_step) == ("start", 0, 0)
    assert (finish.kind, finish.name, finish.attempts, finish.next_step) == ("finish", "shaky", 2, 1)
    assert finish.started is not None
    assert finish.started < finish.ended


async def test_a_fork_is_a_new_execution_from_an_old_boundary(registry, store):
    async with Executor(registry, store=store) as executor:
        await (await executor.start("three", 0, id="a", metadata={"k": 1})).result()
        history = await executor.history("a")
        same = await executor.fork("a", checkpoint=history[1], new_id="b")
        assert await same.result() == 3
        assert await (await executor.fork("a", checkpoint=2, state=100)).result() == 102
        assert await (await executor.fork("a", checkpoint="a@3", state=100)).result() == 101
        assert await (await executor.fork("a")).result() == 3
        info = await executor.get("b")
        assert info.metadata == {"k": 1, "forked_from": "a@2"}
        assert [row.kind for row in await executor.steps("b")] == ["start", "step", "finish"]
        with pytest.raises(ExecutionExistsError, match="'b'"):
            await executor.fork("a", new_id="b")
        for bad in (99, "a@99"):
            with pytest.raises(ConfigError, match="not kept"):
                await executor.fork("a", checkpoint=bad)
        for bad in ("x@1", True, -1):
            with pytest.raises(ConfigError, match="checkpoint"):
                await executor.fork("a", checkpoint=bad)


@pytest.mark.parametrize("seq", [1 << 63, 10**30])
async def test_a_number_that_no_store_can_hold_is_of_no_checkpoint(
    registry: StepRegistry, tmp_path: Path, seq: int
) -> None:
    async with Executor(registry, store=f"sqlite:///{tmp_path / 'store.db'}") as executor:
        await (await executor.start("three", 0, id="a")).result()
        with pytest.raises(ConfigError, match="not kept"):
            await executor.fork("a", checkpoint=seq)
        for bad in (seq, 0, -1):
            assert await executor.store.checkpoint("a", bad) is None


async def test_a_fork_takes_neither_signals_nor_progress_inside_the_step(store):
    registry = StepRegistry()
    begun, seen = anyio.Event(), []

    async def work(ctx: StepContext, state: int) -> Any:
        seen.append(dict(ctx.local))
        ctx.local["used"] = True
        await ctx.checkpoint(force=True)
        if not begun.is_set():
            begun.set()
            await anyio.sleep_forever()
        return WaitFor("go", state)

    registry.workflow("work", [work])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0)) as executor:
        run = await executor.start("work", 1, id="a")
        await begun.wait()
        await run.signal("go")
        fork = await executor.fork("a", new_id="b")
        info = await fork.wait("waiting")
        assert info.state == "waiting"
        assert await store.messages("b") == []
        assert seen == [{}, {}]
        assert (await fork.info()).parent_id is None
        await fork.cancel()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("kind", ["sleep", "wait"])
async def test_a_fork_of_one_that_waits_waits_as_long(store, kind, paused):
    """Who approves the one has not approved the other."""
    clock = ManualClock()

    async def park(state: str) -> Any:
        return Sleep(10.0, state) if kind == "sleep" else WaitFor("approval", state, timeout=20.0)

    async def after(ctx: StepContext, state: str) -> Any:
        return f"{state} {ctx.signal} {ctx.timed_out}"

    registry = StepRegistry()
    registry.workflow("work", [park, after])
    async with Executor(registry, store=store, clock=clock) as executor, Client(store, clock=clock) as client:
        run = await executor.start("work", "x", id="a")
        await run.wait("waiting")
        due = (await store.load("a")).head.due
        if paused:
            await run.pause(hold=True)
        forks = [await executor.fork("a"), await client.fork("a"), await executor.fork("a", state="y")]
        for fork in forks:
            head = (await store.load(fork.id)).head
            assert (head.state, head.due, head.owner) == ("waiting", due, None)
        if kind == "sleep":
            clock.advance(11.0)
        else:
            await forks[0].signal("approval", "yes")
            await forks[2].signal("approval", "no")
            assert await forks[0].result() == "x yes False"
            clock.advance(21.0)
            assert await forks[1].result() == "x None True"
        ended = [await fork.result() for fork in forks]
        assert [text[0] for text in ended] == ["x", "x", "y"]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_fork_of_a_delayed_submission_is_delayed_as_long(registry, store, paused):
    """Also in an executor, which would run a fork of anything else at once. When its time has come, it is forked as
    what waits for nothing."""
    clock = ManualClock()
    registry.workflow("later", [registry.step(_same)])
    async with Executor(registry, store=store, clock=clock) as executor, Client(store, clock=clock) as client:
        run = await executor.submit("later", "x", id="a", delay=30.0)
        due = (await store.load("a")).head.due
        if paused:
            await client.pause("a", hold=True)
        forks = [await executor.fork("a"), await client.fork("a"), await executor.fork("a", state="y")]
        for fork in forks:
            head = (await store.load(fork.id)).head
            assert (head.state, head.due, head.owner) == ("initialized", due, None)
        clock.advance(31.0)
        assert await (await executor.fork("a", state="at once")).result() == "at once"
        assert (await (await client.fork("a", new_id="late")).info()).state == "initialized"
        async with Worker(registry, store=store, clock=clock):
            assert [await fork.result() for fork in forks] == ["x", "x", "y"]
            await client.handle("late").result()
        assert ((await run.info()).state == "paused") == paused


async def _same(state: Any) -> Any:
    return state


async def test_only_what_has_ended_can_be_deleted_and_then_it_is_gone(registry, store):
    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    registry.workflow("ask", [ask])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask", id="a")
        await run.wait("waiting")
        with pytest.raises(InvalidStateError, match="cancel it first"):
            await executor.delete("a")
        await run.cancel()
        await executor.delete("a")
        for request in (executor.get, executor.history, executor.steps, executor.delete, executor.pause):
            with pytest.raises(ExecutionNotFoundError):
                await request("a")
        assert await store.size("a") == 0
        assert await (await executor.start("three", 0, id="a")).result() == 3


async def test_listing_is_newest_first_a_page_at_a_time_without_step_names(registry, store):
    clock = ManualClock()
    async with Executor(registry, store=store, clock=clock) as executor:
        for n in range(25):
            await (await executor.start("three", n, id=f"e{n:02}")).result()
            clock.advance(1)
        pages, after = [], None
        while page := await executor.list(limit=10, after=after):
            pages.append([one.id for one in page])
            after = page[-1]
        assert [len(page) for page in pages] == [10, 10, 5]
        assert [id for page in pages for id in page] == [f"e{n:02}" for n in reversed(range(25))]
        first = (await executor.list(limit=1))[0]
        assert (first.step_names, first.total_steps) == ((), 3)
        assert [one.id for one in await executor.list(limit=2, after="e05")] == ["e04", "e03"]
        await executor.delete("e05")
        assert [one.id for one in await executor.list(limit=1, after=first)] == ["e23"]


async def test_listing_by_state_workflow_metadata_text_and_time(registry, store):
    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    registry.workflow("ask", [ask])
    clock = ManualClock()
    async with Executor(registry, store=store, clock=clock) as executor:
        await (await executor.start("three", 0, id="done", metadata={"team": "Red"})).result()
        clock.advance(100)
        waiting = await executor.start("ask", id="waits", metadata={"team": "blue"})
        await waiting.wait("waiting")

        async def ids(*args: Any, **options: Any) -> list[str]:
            return [one.id for one in await executor.list(*args, **options)]

        assert await ids("completed") == ["done"]
        assert await ids(["completed", "waiting"]) == ["waits", "done"]
        assert await ids(workflow="ask") == ["waits"]
        assert await ids(workflow=["ask", "three"]) == ["waits", "done"]
        assert await ids(metadata={"team": "blue"}) == ["waits"]
        assert await ids(text="RED") == ["done"]
        border = datetime.fromtimestamp(clock.now(), UTC) - timedelta(seconds=50)
        assert await ids(created_after=border) == ["waits"]
        assert await ids(created_before=border) == ["done"]
        counted = {str(state): number for state, number in (await executor.count()).items()}
        assert counted == {"completed": 1, "waiting": 1}
        with pytest.raises(ConfigError, match="state"):
            await executor.list("sleeping")
        for limit in (0, -1, True, "5"):
            with pytest.raises(ConfigError, match="limit"):
                await executor.list(limit=limit)  # type: ignore[arg-type]
        await waiting.cancel()


async def test_what_is_finished_and_old_goes_and_what_lives_stays(registry, store):
    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    registry.workflow("ask", [ask])
    clock = ManualClock()
    config = ExecutorConfig(retention=RetentionPolicy(max_age=timedelta(days=1), interval=3600))
    async with Executor(registry, store=store, clock=clock, config=config) as executor:
        await (await executor.start("three", 0, id="old")).result()
        waiting = await executor.start("ask", id="waits")
        await waiting.wait("waiting")
        clock.advance(80_000)
        await (await executor.start("three", 0, id="young")).result()
        clock.advance(10_000)
        while await store.exists("old"):
            await store.ping()
        assert {one.id for one in await executor.list()} == {"waits", "young"}
        await waiting.cancel()


async def test_wait_gives_the_execution_in_the_state_asked_for_or_its_end(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("three", 0)
        info = await run.wait("paused")
        assert info.state == "completed"
        assert (await run.wait()).state == "completed"
        with pytest.raises(ConfigError, match="state"):
            await run.wait("sleeping")
        assert repr(run) == f"<ExecutionHandle {run.id}>"
