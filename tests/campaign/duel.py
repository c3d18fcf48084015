"""Two processes on one store, of which one is stopped past its lease and then goes on as if nothing had happened.

The first starts two executions, or runs them as a worker to which they were submitted. One makes every item durable;
the other waits for ever and never looks up. The second process finishes both. When the first wakes, its writes must be
refused and both of its steps must be cut off.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from longrun import Client, ExecutionHandle, Executor, ExecutorConfig, StepContext, StepRegistry, Worker
from tests.campaign.outside import Outside
from tests.campaign.program import Trap, make_store

ITEMS = 60
LEASE: dict[str, Any] = {"heartbeat_interval": 0.1, "lease_ttl": 0.5, "max_crashes": 1000, "checkpoint_interval": 0.01}
WORKFLOWS = ("slow", "idle")

registry = StepRegistry()
outside: Outside
first = False


@registry.step
async def slow(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    outside.note("started", id=ctx.execution_id)
    try:
        async for n in ctx.each("items", range(ITEMS), every=1):
            outside.note("effect", id=ctx.execution_id, visit=1, name=f"item/{n}")
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
            await anyio.sleep(0.005)
    except BaseException as error:
        outside.note("cut", id=ctx.execution_id, error=type(error).__name__)
        raise
    return {"sum": ctx.local["sum"]}


@registry.step
async def idle(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    outside.note("started", id=ctx.execution_id)
    try:
        if first:
            await anyio.sleep_forever()
    except BaseException as error:
        outside.note("cut", id=ctx.execution_id, error=type(error).__name__)
        raise
    return {"idle": True}


for name in WORKFLOWS:
    registry.workflow(name, [name])


def expected_result(id: str) -> dict[str, Any]:
    return {"sum": sum(range(ITEMS))} if id.endswith("slow") else {"idle": True}


def main(settings: dict[str, Any]) -> int:
    global outside, first  # noqa: PLW0603 -- the steps of this process
    outside = Outside(settings["ledger"], settings["process"])
    first = settings["first"]
    outside.note("up", pid=os.getpid())
    anyio.run(_serve, settings, backend=settings["loop"])
    return 0


async def _serve(settings: dict[str, Any]) -> None:
    trap = None if settings["trap"] is None else Trap(**settings["trap"])
    store = make_store(settings["url"], settings["options"], outside, trap, disk=False)
    config = ExecutorConfig(**LEASE)
    if settings["crew"] == "executor":
        async with Executor(registry, store=store, config=config) as executor:
            await _follow_all(settings["round"], executor.start)
    else:
        async with Worker(registry, store=store, config=config), Client(store) as client:
            await _follow_all(settings["round"], client.submit)


async def _follow_all(round: int, begin: Callable[..., Awaitable[ExecutionHandle]]) -> None:
    async with anyio.create_task_group() as tasks:
        for name in WORKFLOWS:
            tasks.start_soon(_follow, begin, name, f"{round}-{name}")


async def _follow(begin: Callable[..., Awaitable[ExecutionHandle]], workflow: str, id: str) -> None:
    run = await begin(workflow, {}, id=id)
    outside.note("result", id=id, result=await run.result())
