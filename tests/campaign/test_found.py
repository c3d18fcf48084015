"""What the storms have found, each as a small case of its own, so that it stays found."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel

from longrun import (
    EventType,
    ExecutionEvent,
    ExecutionState,
    Executor,
    MemoryCheckpointStore,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
)
from longrun.clock import Clock
from longrun.stores.memory import MemoryBackend
from longrun.testing import CrashPoint, ManualClock
from longrun.testing.crash import CrashPlan, World, ending_of
from longrun.testing.points import Probe
from longrun.testing.samples import claim


async def test_a_loop_that_was_cut_off_behind_its_last_item_just_ends() -> None:
    """Every item is durable and the step is not: the loop has nothing left to hand out, and that is no error."""
    registry = StepRegistry()

    @registry.step
    async def loop(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        async for n in ctx.each("items", range(3), every=1):
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
        return {"sum": ctx.local["sum"]}

    registry.workflow("loops", [loop])
    world = World(CrashPlan(registry=registry, workflow="loops", state={}))
    whole = await world.course(None)
    last = [point for point in whole.points if point.when == "after" and "each:items" in point.what][-1]
    course = await world.course(last)
    assert course.fired
    assert course.ending == whole.ending


async def test_a_parent_and_its_child_that_are_both_suspects_do_not_wait_for_each_other() -> None:
    """I4, I11: suspects run one at a time; a parent that waits for its child lets it have its turn."""
    registry = StepRegistry()

    @registry.step
    async def parent(ctx: StepContext, state: dict[str, Any]) -> Any:
        child = await ctx.start_child("leaf", {}, key="a")
        return await child.result()

    @registry.step
    async def leaf(state: dict[str, Any]) -> dict[str, Any]:
        return {"leaf": True}

    registry.workflow("family", [parent])
    registry.workflow("leaf", [leaf])
    world = World(CrashPlan(registry=registry, workflow="family", state={}, timeout=10.0))
    clock = ManualClock(autojump=True)
    backend = MemoryBackend(clock)
    for _ in range(3):
        probe = Probe(CrashPoint("before", "the checkpoint of crash-test~1~a: finish at step 0 'leaf'"))
        assert not await world.live(backend, clock, probe), "it ended before it crashed"
    assert await world.live(backend, clock, Probe())
    assert ending_of(backend.load("crash-test")).result == {"leaf": True}


class SetBack(Clock):
    """A wall clock that was a day ahead when the step failed, and is right again when the back-off has begun."""

    def __init__(self) -> None:
        self.ahead = 86_400.0

    def now(self) -> float:
        return super().now() + self.ahead


async def test_a_clock_that_is_set_back_does_not_make_a_back_off_longer() -> None:
    """I12: clocks decide when to try; not whether anybody lives to see it."""
    registry, clock = StepRegistry(), SetBack()

    @registry.step(retry=RetryPolicy(max_attempts=2, initial=0.05, jitter=False))
    async def fail_once(ctx: StepContext, state: int) -> int:
        if ctx.attempt == 1:
            raise ConnectionError
        return state + 1

    registry.workflow("work", [fail_once])

    def right(event: ExecutionEvent) -> None:
        if event.type is EventType.STEP_RETRYING:
            clock.ahead = 0.0

    store = MemoryCheckpointStore(clock=clock)
    async with Executor(registry, store=store, clock=clock, on_event=right) as executor:
        run = await executor.start("work", 1)
        with anyio.fail_after(20):
            assert await run.result() == 2


async def test_what_is_claimed_again_by_its_old_owner_has_one_runner() -> None:
    """I3: the owner had lost it without noticing. Its old runner ends; who waited gets the new one's end."""
    registry, begun, go = StepRegistry(), list[int](), anyio.Event()

    @registry.step
    async def wait(ctx: StepContext, state: int) -> int:
        begun.append(len(begun))
        if len(begun) == 1:
            await anyio.sleep_forever()
        await go.wait()
        return state + 1

    registry.workflow("work", [wait])
    store, results = MemoryCheckpointStore(), list[int]()
    async with Executor(registry, store=store) as executor, anyio.create_task_group() as tasks:
        run = await executor.start("work", 1, id="a")

        async def follow() -> None:
            results.append(await run.result())

        tasks.start_soon(follow)
        while not begun:
            await anyio.lowlevel.checkpoint()
        running, here = frozenset({ExecutionState.RUNNING}), executor.owner
        await store.claim(claim("somebody", ids=("a",), states=running, dead=frozenset({here})))
        (given,) = await store.claim(claim(here, ids=("a",), states=running, dead=frozenset({"somebody"})))
        executor.run(given)
        while len(begun) < 2:
            await anyio.lowlevel.checkpoint()
        go.set()
        with anyio.fail_after(20):
            while not results:
                await anyio.lowlevel.checkpoint()
    assert results == [2]


async def test_what_was_parked_under_an_owner_whom_nobody_knows_any_more_goes_on() -> None:
    """I4: a power cut can take an owner's registration, which is not synced, and leave its claim, which is."""
    registry = StepRegistry()

    @registry.step
    async def first(state: int) -> Sleep:
        return Sleep(0.01, state + 1)

    @registry.step
    async def second(state: int) -> int:
        return state + 1

    registry.workflow("work", [first, second])
    store = MemoryCheckpointStore()
    async with store:
        async with Executor(registry, store=store) as executor:
            executor.sweeper.once = _nothing  # type: ignore[method-assign]
            run = await executor.start("work", 1, id="a")
            await run.wait("waiting")
        waiting = frozenset({ExecutionState.WAITING})
        (taken,) = await store.claim(claim("forgotten", ids=("a",), states=waiting))
        assert taken.head.owner == "forgotten"
        async with Executor(registry, store=store) as executor:
            with anyio.fail_after(20):
                assert await (await executor.handle("a")).result() == 3


async def _nothing() -> int:
    return 0
