"""Durability: what a crash can cost in each mode, and what it cannot cost in any."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from longrun import (
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    Repeat,
    RetryPolicy,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.testing import ManualClock
from tests.crashing import CrashableExecutor, crash

MODES = ["step", "interval", "exit"]


class Counting:
    """Five steps that count their calls; the last one waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("work", self.work)
        self.registry.workflow("work", ["work"] * 5)

    async def work(self, ctx: StepContext, state: int) -> int:
        self.calls.append(ctx.step_index)
        if ctx.step_index == 4:
            self.begun.set()
            await self.go.wait()
        return state + 1


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.mark.parametrize(("mode", "again"), [("step", [4]), ("interval", [0, 1, 2, 3, 4]), ("exit", [0, 1, 2, 3, 4])])
async def test_what_runs_again_after_a_crash(store, mode, again):
    """I2: with `step` nothing but the step in flight; with the others what was not saved yet."""
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600)
    program = Counting()
    async with CrashableExecutor(program.registry, store=store, config=config) as dying:
        await dying.start("work", 0, id="a")
        await program.begun.wait()
        await crash(dying)
    program.calls.clear()
    program.go.set()
    async with Executor(program.registry, store=store, config=config) as executor:
        assert await (await executor.handle("a")).result() == 5
    assert program.calls == again


async def test_interval_saves_boundaries_when_the_interval_has_passed(store):
    clock = ManualClock()
    config = ExecutorConfig(durability="interval", checkpoint_interval=10)
    registry = StepRegistry()
    calls = []
    begun = anyio.Event()

    async def work(ctx: StepContext, state: int) -> int:
        calls.append(ctx.step_index)
        clock.advance(4)
        if ctx.step_index == 6 and len(calls) == 7:
            begun.set()
            await anyio.sleep_forever()
        return state + 1

    registry.workflow("work", [work] * 8)
    async with CrashableExecutor(registry, store=store, config=config, clock=clock) as dying:
        await dying.start("work", 0, id="a")
        await begun.wait()
        assert (await store.load("a")).head.step == 6
        await crash(dying)
    async with Executor(registry, store=store, config=config, clock=clock) as executor:
        assert await (await executor.handle("a")).result() == 8
    assert calls == [0, 1, 2, 3, 4, 5, 6, 6, 7]


@pytest.mark.parametrize("mode", MODES)
async def test_every_boundary_leaves_its_row_in_the_end(store, mode):
    """I7: no gap and no repeat, although only some of them kept their state."""
    program = Counting()
    program.go.set()
    async with Executor(program.registry, store=store, config=ExecutorConfig(durability=mode)) as executor:
        assert await (await executor.start("work", 0, id="a")).result() == 5
        rows = await executor.steps("a")
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row.kind for row in rows] == ["start", "step", "step", "step", "step", "finish"]
        assert (await executor.get("a")).checkpoints == 6
        assert [checkpoint.state for checkpoint in await executor.history("a")][-1] == 5


@pytest.mark.parametrize("mode", MODES)
async def test_pause_is_durable_in_every_mode(store, mode):
    """I1"""
    program = Counting()
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600)
    async with CrashableExecutor(program.registry, store=store, config=config) as dying:
        run = await dying.start("work", 0, id="a")
        await program.begun.wait()
        await run.pause(interrupt=True, hold=True)
        await crash(dying)
    head = (await store.load("a")).head
    assert (head.state, head.step) == ("paused", 4)


@pytest.mark.parametrize("mode", MODES)
async def test_a_wait_is_durable_in_every_mode(store, mode):
    registry = StepRegistry()

    async def one(state: int) -> int:
        return state + 1

    async def ask(state: int) -> WaitFor:
        return WaitFor("answer", state)

    registry.workflow("work", [one, one, ask, one])
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600)
    async with CrashableExecutor(registry, store=store, config=config) as dying:
        run = await dying.start("work", 0, id="a")
        await run.wait("waiting")
        await crash(dying)
    head = (await store.load("a")).head
    assert (head.state, head.step, head.seq) == ("waiting", 3, 4)


@pytest.mark.parametrize("mode", MODES)
async def test_failure_and_attempts_are_durable_in_every_mode(store, mode):
    registry = StepRegistry()

    async def one(state: int) -> int:
        return state + 1

    @registry.step(retry=RetryPolicy(max_attempts=2, initial=0))
    async def bad(state: int) -> int:
        raise ValueError

    registry.workflow("work", [one, bad])
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600)
    async with CrashableExecutor(registry, store=store, config=config) as dying:
        run = await dying.start("work", 0, id="a")
        with pytest.raises(ExecutionFailedError):
            await run.result()
        await crash(dying)
    head = (await store.load("a")).head
    assert (head.state, head.step, head.attempt) == ("failed", 1, 2)


@pytest.mark.parametrize("mode", MODES)
async def test_a_shutdown_is_durable_in_every_mode(store, mode):
    program = Counting()
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600, drain_timeout=0)
    async with Executor(program.registry, store=store, config=config) as executor:
        await executor.start("work", 0, id="a")
        await program.begun.wait()
    head = (await store.load("a")).head
    assert (head.state, head.step, head.owner) == ("running", 4, None)


@pytest.mark.parametrize("mode", MODES)
async def test_once_is_durable_in_every_mode_and_saves_the_boundaries_before_it(store, mode):
    registry = StepRegistry()
    calls: list[Any] = []
    begun, go = anyio.Event(), anyio.Event()

    async def pay() -> int:
        calls.append("paid")
        return 5

    async def one(state: int) -> int:
        calls.append("one")
        return state + 1

    async def two(ctx: StepContext, state: int) -> int:
        paid: int = await ctx.once("pay", pay)
        begun.set()
        await go.wait()
        return state + paid

    registry.workflow("work", [one, two])
    config = ExecutorConfig(durability=mode, checkpoint_interval=3600)
    async with CrashableExecutor(registry, store=store, config=config) as dying:
        await dying.start("work", 0, id="a")
        await begun.wait()
        await crash(dying)
    go.set()
    async with Executor(registry, store=store, config=config) as executor:
        assert await (await executor.handle("a")).result() == 6
    assert calls == ["one", "paid"]


async def test_exit_writes_nothing_in_between(store):
    clock = ManualClock()
    config = ExecutorConfig(durability="exit", checkpoint_interval=1)
    program = Counting()
    async with Executor(program.registry, store=store, config=config, clock=clock) as executor:
        run = await executor.start("work", 0, id="a")
        await program.begun.wait()
        for _ in range(20):
            clock.advance(5)
            await executor.sweeper.once()
        assert (await store.load("a")).head.revision == 1
        program.go.set()
        assert await run.result() == 5
        assert (await store.load("a")).head.revision == 2


async def test_what_is_gathered_is_bounded_in_every_mode(store, monkeypatch):
    """I16"""
    monkeypatch.setattr("longrun.book.UNSAVED_LIMIT", 10)
    registry = StepRegistry()

    async def one(state: int) -> int:
        return state + 1

    registry.workflow("long", [one] * 95)
    config = ExecutorConfig(durability="exit")
    async with Executor(registry, store=store, config=config) as executor:
        assert await (await executor.start("long", 0, id="a")).result() == 95
        assert (await store.load("a")).head.revision == 1 + 9 + 1
        assert [row.seq for row in await executor.steps("a")] == list(range(1, 97))


@pytest.mark.parametrize("mode", MODES)
async def test_large_values_that_do_not_change_are_written_once(store, mode):
    registry = StepRegistry()
    big = "x" * 50_000

    async def one(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "n": state["n"] + 1}

    registry.workflow("work", [one] * 20)
    async with Executor(registry, store=store, config=ExecutorConfig(durability=mode)) as executor:
        run = await executor.start("work", {"big": big, "n": 0}, id="a")
        assert await run.result() == {"big": big, "n": 20}
        assert await store.size("a") < 60_000
        assert all(c.state["big"] == big for c in await executor.history("a"))


@pytest.mark.parametrize("mode", MODES)
async def test_steps_that_never_wait_leave_others_their_turn(store, mode):
    """Between two of them nothing is awaited when their boundaries are coalesced. Threads have theirs too: who asks for
    the record is answered by one."""
    turns = 0

    async def work(state: int) -> Any:
        began = time.monotonic()
        while time.monotonic() - began < 0.001:
            pass
        return Repeat(state + 1) if state < 400 else state

    registry = StepRegistry()
    registry.workflow("work", [work])
    async with Executor(registry, store=store, config=ExecutorConfig(durability=mode)) as executor:
        run = await executor.start("work", 0)
        while not (await run.info()).state.finished:
            turns += 1
        assert turns > 10


async def test_interval_saves_boundaries_while_a_step_runs_that_says_nothing(store):
    """I2: a step that asks for no context is no reason to keep what stands before it in memory."""
    registry, begun = StepRegistry(), anyio.Event()

    async def quick(state: dict[str, Any]) -> dict[str, Any]:
        return {"n": state["n"] + 1}

    async def slow(state: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await anyio.sleep_forever()
        return state

    registry.workflow("work", [quick, quick, slow])
    config = ExecutorConfig(
        durability="interval", checkpoint_interval=0.1, heartbeat_interval=0.1, lease_ttl=60, drain_timeout=0
    )
    async with Executor(registry, store=store, config=config) as executor:
        await executor.start("work", {"n": 0}, id="a")
        await begun.wait()
        with anyio.fail_after(10):
            while (await store.load("a")).head.step < 2:  # noqa: ASYNC110 -- the executor saves by itself
                await anyio.sleep(0.02)
