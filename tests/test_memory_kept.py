"""I16: what has ended is let go at once, with its state, and not when the garbage is next collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from longrun import ExecutionError, Executor, MemoryCheckpointStore, RetryPolicy, StepContext, StepRegistry, WaitFor

registry = StepRegistry()


@registry.step
async def plain(state: Any) -> Any:
    return state


@registry.step
async def inside(ctx: StepContext, state: Any) -> Any:
    async for item in ctx.each("items", range(3)):
        ctx.local["sum"] = ctx.local.get("sum", 0) + item
    await ctx.once("memo", plain, 1)
    await ctx.map(plain, [1, 2, 3], limit=2)
    return state


@registry.step
def threaded(state: Any) -> Any:
    return state


@registry.step(retry=RetryPolicy(max_attempts=2, initial=0.0))
async def failing(state: Any) -> Any:
    raise ValueError


@registry.step
async def parent(ctx: StepContext, state: Any) -> Any:
    return await (await ctx.start_child("plain", state, key="child")).result()


@registry.step
async def waiting(state: Any) -> Any:
    return WaitFor("go", state)


KINDS = ["plain", "inside", "threaded", "failing", "parent", "waiting", "lasting"]


@registry.step
async def lasting(state: Any) -> Any:
    await anyio.sleep_forever()


for kind in KINDS:
    registry.workflow(kind, [kind, plain])


@pytest.fixture
def collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_ended_is_let_go_without_a_collection(kind: str, collected: None) -> None:
    async with MemoryCheckpointStore() as store, Executor(registry, store=store) as executor:
        run = await executor.start(kind, {"n": 0}, id="a")
        kept = weakref.ref(executor.runners["a"])
        if kind == "lasting":
            await run.pause(interrupt=True)
            await run.cancel()
        elif kind == "waiting":
            await run.wait("waiting")
            await let_go(executor)
            assert kept() is None
            await run.signal("go")
        try:
            await run.result()
        except ExecutionError:
            assert kind in ("failing", "lasting")
        await let_go(executor)
        assert kept() is None


async def let_go(executor: Executor) -> None:
    """Nothing runs here, and the tasks that did are gone."""
    await executor.wait_idle()
    await anyio.wait_all_tasks_blocked()
