"""J6: executions that sleep or wait for a signal. They hold an index entry, and waking one costs the same among many.

Place in the life of an execution: parked between two steps.
"""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from typing import Any

from benchmarks.helpers import percentile
from benchmarks.machine import resident_mib
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, at_most, value_at_most
from benchmarks.samples import column
from longrun import Executor, Sleep, StepRegistry, WaitFor

WAVE = 500
DAY = 86_400.0
FIRST_NAP = 0.3
NAP_APART = 0.02


class Wakes:
    """A registry whose last steps say when they began."""

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.began: dict[str, asyncio.Future[float]] = {}
        self.registry.register("nap", nap)
        self.registry.register("listen", listen)
        self.registry.register("up", self.up)
        self.registry.workflow("sleeping", ["nap", "up"])
        self.registry.workflow("listening", ["listen", "up"])

    def expect(self) -> tuple[str, asyncio.Future[float]]:
        id = f"w{uuid.uuid4().hex}"
        self.began[id] = asyncio.get_running_loop().create_future()
        return id, self.began[id]

    async def up(self, state: dict[str, Any]) -> dict[str, Any]:
        self.began[state["id"]].set_result(time.time())
        return state


async def nap(state: dict[str, Any]) -> Sleep:
    return Sleep(state["seconds"], {**state, "due": time.time() + state["seconds"]})


async def listen(state: dict[str, Any]) -> WaitFor:
    return WaitFor("go", state)


async def park(executor: Executor, count: int, prefix: str) -> None:
    """Half of them sleep for a day, half wait for a signal that does not come."""

    async def one(number: int) -> None:
        workflow = "sleeping" if number % 2 else "listening"
        state = {"id": "", "seconds": DAY}
        run = await executor.start(workflow, state, id=f"{prefix}{number}")
        await run.wait("waiting")

    for start in range(0, count, WAVE):
        await asyncio.gather(*(one(number) for number in range(start, min(start + WAVE, count))))


async def fill(order: Order, count: int) -> Figures:
    """Park them; tell what memory each has left in this process."""
    warm_up = min(count, 2 * WAVE)
    async with Executor(Wakes().registry, store=order.url) as executor:
        await park(executor, warm_up, "a")
        gc.collect()
        before = resident_mib()
        await park(executor, count - warm_up, "b")
        gc.collect()
        grown = resident_mib() - before
        counted = await executor.count()
    if counted != {"waiting": count}:
        raise AssertionError(f"{counted} instead of {count} waiting")
    return {"bytes_each": grown * 2**20 / max(1, count - warm_up)}


async def wake(order: Order) -> Figures:
    wakes, count = Wakes(), order.sizes["wakes"]
    async with Executor(wakes.registry, store=order.url) as executor:
        gc.collect()
        resident = resident_mib()
        signalled = [await wake_by_signal(executor, wakes) for _ in range(count)]
        late = await wake_by_time(executor, wakes, count)
        counted = await executor.count()
    if counted.get("completed", 0) < 2 * count:  # type: ignore[call-overload]  # the states are strings
        raise AssertionError(f"{counted} after {2 * count} wakes")
    return {
        "signal_ms": percentile(signalled, 0.5) * 1e3,
        "late_ms": percentile(late, 0.5) * 1e3,
        "resident_mib": resident,
    }


async def wake_by_signal(executor: Executor, wakes: Wakes) -> float:
    id, began = wakes.expect()
    run = await executor.start("listening", {"id": id}, id=id)
    await run.wait("waiting")
    asked = time.time()
    await run.signal("go")
    seconds = await began - asked
    await run.result()
    return seconds


async def wake_by_time(executor: Executor, wakes: Wakes, count: int) -> list[float]:
    expected = [wakes.expect() for _ in range(count)]
    states = [{"id": id, "seconds": FIRST_NAP + NAP_APART * number} for number, (id, _) in enumerate(expected)]
    runs = await asyncio.gather(*(executor.start("sleeping", state, id=str(state["id"])) for state in states))
    results = [await run.result() for run in runs]
    return [began.result() - result["due"] for (_, began), result in zip(expected, results, strict=True)]


def measure(order: Order) -> Figures:
    if order.role.startswith("prepare-"):
        return asyncio.run(fill(order, order.sizes[order.role.removeprefix("prepare-")]))
    return asyncio.run(wake(order))


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    many, few = sizes["many"], sizes["few"]
    common: dict[str, Any] = {"job": "J6", "store": store, "durable": DURABLE[store]}
    small = column(samples, "few", "resident_mib")
    opened = [
        (large - little) * 2**20 / (many - few)
        for large, little in zip(column(samples, "many", "resident_mib"), small, strict=False)
    ]
    beside: dict[str, Any] = {"bare_name": f"{few:,} parked", "goal": at_most(1.2)}
    return [
        Row(
            what=f"memory of each of {many:,} parked, where they were started",
            unit="bytes",
            ours=column(samples, "prepare-many", "bytes_each"),
            goal=value_at_most(1024),
            **common,
        ),
        Row(
            what="memory of each in a process that opens the store",
            unit="bytes",
            ours=[max(0.0, each) for each in opened],
            goal=value_at_most(1024),
            **common,
        ),
        Row(
            what=f"signal to step among {many:,} parked",
            unit="ms",
            ours=column(samples, "many", "signal_ms"),
            bare=column(samples, "few", "signal_ms"),
            **beside,
            **common,
        ),
        Row(
            what=f"a sleep's end to step among {many:,} parked",
            unit="ms",
            ours=column(samples, "many", "late_ms"),
            bare=column(samples, "few", "late_ms"),
            **beside,
            **common,
        ),
    ]


JOBS = {
    "J6": Job(
        name="J6",
        title="100,000 parked executions: memory of each, and what waking one costs",
        roles=("many", "few"),
        lasting=("many", "few"),
        measure=measure,
        rows=rows,
        full={"many": 100_000, "few": 100, "wakes": 30},
        timeout=900,
    ),
}
