"""J8: progress inside a step. A million items of `ctx.each`, ten thousand branches of `ctx.map`.

Place in the life of an execution: run a step.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks import bare
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, value_at_least, value_at_most
from benchmarks.samples import column
from longrun import Executor, StepContext, StepRegistry
from longrun.client import Client

LIMIT = 100
"""Branches at once: enough for a commit to carry many."""


class Timed:
    """Steps that say how long their loop took."""

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.seconds = 0.0
        self.cpu = 0.0
        self.registry.register("each", self.each)
        self.registry.register("map", self.map)
        self.registry.workflow("each", ["each"])
        self.registry.workflow("map", ["map"])

    async def each(self, ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        total = 0
        began, cpu = time.perf_counter(), time.thread_time()
        async for item in ctx.each("items", range(state["items"])):
            total += item
        self.seconds, self.cpu = time.perf_counter() - began, time.thread_time() - cpu
        return {"total": total}

    async def map(self, ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        squares = await ctx.map(square, range(state["items"]), limit=state["limit"])
        self.seconds = time.perf_counter() - began
        return {"total": sum(squares)}


async def square(item: int) -> int:
    return item * item


async def in_step(order: Order, workflow: str, items: int, limit: int = 0) -> Timed:
    timed = Timed()
    async with Executor(timed.registry, store=order.url) as executor:
        run = await executor.start(workflow, {"items": items, "limit": limit}, id="x")
        result = await run.result()
    expected = sum(range(items)) if workflow == "each" else sum(number * number for number in range(items))
    async with Client(order.url) as client:
        stored = await client.handle("x").result()
    if result != {"total": expected} or stored != result:
        raise AssertionError(f"a wrong answer: {result}, stored {stored}")
    return timed


async def bare_branches(order: Order, items: int, limit: int) -> Figures:
    numbers = iter(range(items))

    async def lane(group: bare.Group) -> None:
        for number in numbers:
            await group.put((f"x.{number}", 1, bare.dumps(await square(number))))

    with bare.opened(order.store, order.url) as group:
        began = time.perf_counter()
        await asyncio.gather(*(lane(group) for _ in range(limit)))
        seconds = time.perf_counter() - began
        if len(group.sink.load()) != items:
            raise AssertionError("wrong rows")
    return {"per_s": items / seconds}


def measure(order: Order) -> Figures:
    items, branches = order.sizes["items"], order.sizes["branches"]
    if order.role == "each":
        timed = asyncio.run(in_step(order, "each", items))
        return {"us": timed.seconds / items * 1e6, "cpu_us": timed.cpu / items * 1e6}
    limit = LIMIT if order.role.endswith(str(LIMIT)) else 8
    if order.role.startswith("bare"):
        return asyncio.run(bare_branches(order, branches, limit))
    timed = asyncio.run(in_step(order, "map", branches, limit))
    return {"per_s": branches / timed.seconds}


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    common: dict[str, Any] = {"job": "J8", "store": store, "durable": DURABLE[store]}
    cpu = max(column(samples, "each", "cpu_us"))
    each = Row(
        what=f"ctx.each over {sizes['items']:,}",
        unit="µs an item",
        ours=column(samples, "each", "us"),
        goal=value_at_most(3.0),
        **{**common, "durable": f"every 5 s; at most {cpu:.2f} µs of processor time"},
    )
    maps = [
        Row(
            what=f"ctx.map over {sizes['branches']:,}, {limit} at once",
            unit="branches/s",
            ours=column(samples, f"map {limit}", "per_s"),
            bare=column(samples, f"bare {limit}", "per_s"),
            goal=value_at_least(5000) if (store, limit) == ("sqlite", LIMIT) else None,
            **common,
        )
        for limit in (LIMIT, 8)
    ]
    return [each, *maps]


JOBS = {
    "J8": Job(
        name="J8",
        title="ctx.each over 1,000,000 items, ctx.map over 10,000",
        roles=("each", f"map {LIMIT}", f"bare {LIMIT}", "map 8", "bare 8"),
        measure=measure,
        rows=rows,
        full={"items": 1_000_000, "branches": 10_000},
    ),
}
