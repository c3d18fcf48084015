"""The application that the command line's tests run: short steps, long ones, failing ones, and ones that wait."""

from __future__ import annotations

from typing import Any

import anyio
import attrs

from longrun import ExecutorConfig, RetryPolicy, StepContext, StepRegistry, WaitFor

HOSTILE = "bad \x1b[31mred\x1b[0m \x07bell\r\nsecond\u202eline"
registry = StepRegistry()
later = StepRegistry()
"""The same application after a deploy that lost a step and changed a type."""
config = ExecutorConfig(auto_resume=False, checkpoint_interval=0.05, heartbeat_interval=0.2, lease_ttl=5)


@attrs.frozen
class Order:
    amount: int


@attrs.frozen
class NewOrder:
    amount: int
    currency: str


@registry.step
async def prepare(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "prepared": True}


@registry.step
async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for page in ctx.each("pages", range(state.get("pages", 3))):
        ctx.local["last"] = page
        await anyio.sleep(state.get("pause", 0))
    return state


@registry.step
def report(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "reported": True}


@registry.step(retry=RetryPolicy(max_attempts=2, initial=0.0))
async def boom(state: dict[str, Any]) -> dict[str, Any]:
    if state.get("mended"):
        return state
    raise ValueError(HOSTILE)


@registry.step
async def ask(state: dict[str, Any]) -> WaitFor:
    return WaitFor("approval", state)


@registry.step
async def stuck(state: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep_forever()
    return state


@registry.step
async def price(order: Order) -> Order:
    return Order(order.amount + 1)


registry.workflow("site", [prepare, crawl, report])
registry.workflow("bad", [prepare, boom])
registry.workflow("approve", [prepare, ask, report])
registry.workflow("stuck", [prepare, stuck])
registry.workflow("order", [price, ask])

later.register("prepare", prepare)
later.register("report", report)
later.register("ask", ask)


@later.step(name="price")
async def new_price(order: NewOrder) -> NewOrder:
    return order


later.workflow("site", ["prepare", "report"], version="2")
later.workflow("approve", ["prepare", "ask", "report"])
later.workflow("order", ["price", "ask"])
