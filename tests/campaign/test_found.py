"""What the storms have found, each as a small case of its own, so that it stays found."""

from __future__ import annotations

from typing import Any

from longrun import StepContext, StepRegistry
from longrun.stores.memory import MemoryBackend
from longrun.testing import CrashPoint, ManualClock
from longrun.testing.crash import CrashPlan, World, ending_of
from longrun.testing.points import Probe


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
