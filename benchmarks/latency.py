"""J7: how long until a step begins, and until it is stopped, here and in another process; what idling costs.

Place in the life of an execution: start, claim, control.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

from benchmarks import alone, bare
from benchmarks.helpers import Helper, helper, percentile, say_ready
from benchmarks.machine import cpu_seconds
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, at_most, value_at_most
from benchmarks.samples import column
from longrun import Executor, StepContext, StepRegistry
from longrun.client import Client
from longrun.handle import ExecutionHandle
from longrun.worker import Worker

ACROSS = {"sqlite": 50.0, "file": 50.0, "postgres": 10.0, "redis": 10.0, "valkey": 10.0}
PAUSED_WITHIN = 200.0
ANSWER_WITHIN = 30.0
BEAT = 0.003
"""Seconds from one checkpoint of a step that has many to the next."""


class Stamped:
    """A step that says when it began, and two that last until they are stopped: at once, or at a checkpoint."""

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.began = 0
        self.running = asyncio.Event()
        self.registry.register("quick", self.quick)
        self.registry.register("lasting", self.lasting)
        self.registry.register("beating", self.beating)
        self.registry.workflow("quick", ["quick"])
        self.registry.workflow("lasting", ["lasting"])
        self.registry.workflow("beating", ["beating"])

    async def quick(self, state: dict[str, Any]) -> dict[str, Any]:
        self.began = time.monotonic_ns()
        return {"began": self.began}

    async def lasting(self, state: dict[str, Any]) -> dict[str, Any]:
        self.running.set()
        await asyncio.Event().wait()
        return state

    async def beating(self, ctx: StepContext, state: dict[str, Any]) -> None:
        for beats in itertools.count(1):
            await asyncio.sleep(BEAT)
            ctx.progress(beats)
            await ctx.checkpoint()


async def in_process(order: Order) -> Figures:
    steps, count = Stamped(), order.sizes["times"]
    async with Executor(steps.registry, store=order.url) as executor:
        starts = [await start_once(executor, steps) for _ in range(count)]
        pauses = [await stop_once(executor, steps, pause=True) for _ in range(count)]
        cancels = [await stop_once(executor, steps, pause=False) for _ in range(count)]
        counted = await executor.count()
    if counted != {"completed": count, "cancelled": 2 * count}:
        raise AssertionError(f"{counted} after {count} of each")
    return {
        "start_ms": percentile(starts, 0.5),
        "start_p99_ms": percentile(starts, 0.99),
        "pause_ms": percentile(pauses, 0.5),
        "cancel_ms": percentile(cancels, 0.5),
    }


async def start_once(executor: Executor, steps: Stamped) -> float:
    """Milliseconds from the call to the step's first line; the execution is durable in between."""
    asked = time.monotonic_ns()
    run = await executor.start("quick", {})
    await run.result()
    return (steps.began - asked) / 1e6


async def stop_once(executor: Executor, steps: Stamped, *, pause: bool) -> float:
    """Milliseconds that stopping a step in flight takes, durable when the call returns."""
    steps.running.clear()
    run = await executor.start("lasting", {})
    await steps.running.wait()
    asked = time.monotonic_ns()
    await (run.pause(interrupt=True) if pause else run.cancel())
    taken = (time.monotonic_ns() - asked) / 1e6
    state = (await run.info()).state
    if state != ("paused" if pause else "cancelled"):
        raise AssertionError(f"it is {state}")
    if pause:
        await run.cancel()
    return taken


async def bare_commits(order: Order) -> Figures:
    taken = []
    with bare.opened(order.store, order.url) as group:
        for number in range(order.sizes["times"]):
            began = time.monotonic_ns()
            await group.put((f"x{number}", 0, b"{}"))
            taken.append((time.monotonic_ns() - began) / 1e6)
        if len(group.sink.load()) != order.sizes["times"]:
            raise AssertionError("wrong rows")
    return {"ms": percentile(taken, 0.5)}


async def creates(order: Order) -> Figures:
    """The one write of a start, by the store alone."""
    taken = []
    async with alone.opened(order.url) as store:
        for number in range(order.sizes["times"]):
            made = alone.first_write(f"x{number}", 1)
            began = time.monotonic_ns()
            created = await store.create(made)
            taken.append((time.monotonic_ns() - began) / 1e6)
            if not created:
                raise AssertionError(f"{made.id} was there before")
    return {"ms": percentile(taken, 0.5)}


async def work(order: Order) -> None:
    """The worker that the other side submits to."""
    async with Worker(Stamped().registry, store=order.url):
        say_ready()
        await asyncio.Event().wait()


def across(order: Order) -> Figures:
    with helper(order, "worker") as worker:
        worker.ready()
        return asyncio.run(submit_to(order, worker))


async def submit_to(order: Order, worker: Helper) -> Figures:
    async with Client(order.url) as client:
        taken = [await answered_once(client, number) for number in range(order.sizes["across"])]
        paused = [await paused_once(client, number) for number in range(order.sizes["pauses"])]
    return {
        "across_ms": percentile(taken, 0.5),
        "across_max_ms": max(taken),
        "paused_ms": percentile(paused, 0.5),
        "paused_max_ms": max(paused),
        "idle_percent": await idle_share(worker.pid, order.sizes["idle_seconds"]),
    }


async def out_of_step(number: int) -> None:
    """Never ask at the same moment of a worker's round, if it polls."""
    await asyncio.sleep(0.03 + 0.0017 * (number % 13))


async def answered_once(client: Client, number: int) -> float:
    """Milliseconds from the call to the first line of a step in the worker."""
    await out_of_step(number)
    asked = time.monotonic_ns()
    run = await client.submit("quick", {})
    async with asyncio.timeout(ANSWER_WITHIN):  # a worker that died would never answer
        return float(((await run.result())["began"] - asked) / 1e6)


async def paused_once(client: Client, number: int) -> float:
    """Milliseconds that pausing takes of a step that the worker is in: asked for here, obeyed there, stored."""
    run = await client.submit("beating", {})
    async with asyncio.timeout(ANSWER_WITHIN):
        await until_running(run)
        await out_of_step(number)
        asked = time.monotonic_ns()
        await run.pause()
        taken = (time.monotonic_ns() - asked) / 1e6
        found = await run.info()
        if found.state != "paused" or found.step_progress is None:
            raise AssertionError(f"it is {found.state}, its step at {found.step_progress}")
        await run.cancel()
    return taken


async def until_running(run: ExecutionHandle) -> None:
    """By asking: who waits for it on PostgreSQL hears of it a second later."""
    while True:
        await asyncio.sleep(BEAT)
        if (await run.info()).state == "running":
            return


async def idle_share(pid: int, seconds: int) -> float:
    """Percent of a core that a worker uses with nothing to do."""
    await asyncio.sleep(1.0)  # whatever the last execution left to do
    before, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began) * 100


def measure(order: Order) -> Figures:
    if order.role == "worker":
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(work(order))
    if order.role == "bare":
        return asyncio.run(bare_commits(order))
    if order.role == "store":
        return asyncio.run(creates(order))
    if order.role == "across":
        return across(order)
    return asyncio.run(in_process(order))


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    common: dict[str, Any] = {"job": "J7", "store": store, "durable": DURABLE[store], "unit": "ms"}
    beside: dict[str, Any] = {"bare": column(samples, "bare", "ms"), "bare_name": "a commit", "goal": at_most(2.0)}
    slowest = {name: max(column(samples, "across", f"{name}_max_ms"), default=0.0) for name in ("across", "paused")}
    return [
        Row(what="start to first step, p50", ours=column(samples, "longrun", "start_ms"), **beside, **common),
        Row(
            what="the write of a start by the store alone, p50",
            ours=column(samples, "store", "ms"),
            **{**beside, "goal": None},
            **common,
        ),
        Row(what="start to first step, p99", ours=column(samples, "longrun", "start_p99_ms"), **common),
        Row(what="pause of a step in flight, p50", ours=column(samples, "longrun", "pause_ms"), **beside, **common),
        Row(what="cancel of a step in flight, p50", ours=column(samples, "longrun", "cancel_ms"), **beside, **common),
        Row(
            what="submit to first step in another process, p50",
            ours=column(samples, "across", "across_ms"),
            goal=value_at_most(ACROSS[store]),
            note=f"slowest {slowest['across']:.0f} ms",
            **common,
        ),
        Row(
            what="pause from another process, p50",
            ours=column(samples, "across", "paused_ms"),
            goal=value_at_most(PAUSED_WITHIN),
            note=f"slowest {slowest['paused']:.0f} ms",
            **common,
        ),
        Row(
            what="an idle worker",
            ours=column(samples, "across", "idle_percent"),
            goal=value_at_most(1.0),
            **{**common, "unit": "% of a core"},
        ),
    ]


JOBS = {
    "J7": Job(
        name="J7",
        title="submit to first step, and pause, here and across processes; cancel; an idle worker",
        roles=("longrun", "store", "bare", "across"),
        measure=measure,
        rows=rows,
        full={"times": 100, "across": 50, "pauses": 10, "idle_seconds": 10},
    ),
}
