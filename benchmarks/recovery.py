"""J4: a thousand executions in flight, SIGKILL, and how long a new process takes until all of them are finished.

Place in the life of an execution: claim, after its owner's death.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any

from benchmarks import bare
from benchmarks.helpers import helper, say_ready, since
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, at_most, value_at_most
from benchmarks.samples import column
from longrun import Executor, StepRegistry
from longrun.client import Client

STEPS = 10
BLOCKED = 5
"""The step, counted from 0, that is in flight when the process is killed."""
WAVE = 1000
LIMITS = {"sqlite": 0.8, "postgres": 1.2, "redis": 1.2, "valkey": 1.2, "file": 2.0}


def workflow_of(mark: int) -> str:
    """Another name in every round, so that the rounds on one store do not count each other's executions."""
    return f"killed-{mark}"


class Ran:
    """Which steps ran in this process, and whether all that should be in flight are."""

    def __init__(self, expected: int = 0) -> None:
        self.counts: Counter[int] = Counter()
        self.expected = expected
        self.all_blocked = asyncio.Event()

    def note(self, step: int) -> None:
        self.counts[step] += 1
        if self.counts[BLOCKED] == self.expected:
            self.all_blocked.set()


def registry(mark: int, ran: Ran, *, block: bool) -> StepRegistry:
    made = StepRegistry()

    @made.step
    async def step(state: dict[str, Any]) -> dict[str, Any]:
        ran.note(state["n"])
        if block and state["n"] == BLOCKED:
            await asyncio.Event().wait()
        return {**state, "n": state["n"] + 1}

    made.workflow(workflow_of(mark), [step] * STEPS)
    return made


async def until_killed(ran: Ran) -> None:
    await ran.all_blocked.wait()
    say_ready()
    await asyncio.Event().wait()


async def crash_longrun(order: Order) -> None:
    mark, executions = order.sizes["mark"], order.sizes["executions"]
    ran = Ran(executions)
    async with Executor(registry(mark, ran, block=True), store=order.url) as executor:
        ids = [f"k{mark}-{number}" for number in range(executions)]
        await asyncio.gather(*(executor.start(workflow_of(mark), {"n": 0}, id=id) for id in ids))
        await until_killed(ran)


async def resume_longrun(order: Order) -> Figures:
    ran, mark = Ran(), order.sizes["mark"]
    async with Executor(registry(mark, ran, block=False), store=order.url) as executor:
        entered = since(order.asked)
        await executor.wait_idle()
        seconds = since(order.asked)
    return {"seconds": seconds, "entered": entered, **told(ran)}


def told(ran: Ran) -> Figures:
    again = sum(count for step, count in ran.counts.items() if step < BLOCKED)
    return {"again": again, "bodies": ran.counts.total()}


async def check(order: Order, mark: int) -> None:
    executions = order.sizes["executions"]
    async with Client(order.url) as client:
        found = await client.list("completed", workflow=workflow_of(mark), limit=executions + 1)
        result = await client.handle(found[0].id).result() if found else None
    if len(found) != executions or result != {"n": STEPS}:
        raise AssertionError(f"{len(found)} of {executions} executions are completed, one with {result}")


async def crash_bare(order: Order) -> None:
    ran = Ran(order.sizes["executions"])

    async def one(group: bare.Group, id: str) -> None:
        await bare.execute(group, id, {"n": 0}, BLOCKED)
        ran.note(BLOCKED)

    with bare.opened(order.store, order.url) as group:
        await asyncio.gather(*(one(group, f"k{number}") for number in range(order.sizes["executions"])))
        await until_killed(ran)


async def resume_bare(order: Order) -> Figures:
    executions = order.sizes["executions"]
    with bare.opened(order.store, order.url) as group:
        found = {id: bare.loads(state) for id, (_, state) in group.sink.load().items()}
        await asyncio.gather(*(bare.execute(group, id, state, STEPS) for id, state in found.items()))
        seconds = since(order.asked)
        stored = group.sink.load()
    if len(stored) != executions or {done for done, _ in stored.values()} != {STEPS}:
        raise AssertionError("wrong rows")
    return {"seconds": seconds}


async def fill(order: Order) -> Figures:
    """Store finished executions, a wave at a time, as a program would have left them."""
    made, wanted = StepRegistry(), order.sizes["beside"]

    @made.step
    async def only(state: dict[str, Any]) -> dict[str, Any]:
        return state

    made.workflow("finished", [only])
    began = time.perf_counter()
    async with Executor(made, store=order.url) as executor:

        async def one(number: int) -> None:
            run = await executor.start("finished", {"n": number}, id=f"f{number}")
            await run.result()

        for start in range(0, wanted, WAVE):
            await asyncio.gather(*(one(number) for number in range(start, min(start + WAVE, wanted))))
        counted = await executor.count()
    if sum(counted.values()) != wanted:
        raise AssertionError(f"{counted} stored instead of {wanted}")
    return {"seconds": time.perf_counter() - began}


def kill_and_resume(order: Order, crash: str, resume: str) -> Figures:
    mark = time.monotonic_ns()
    with helper(order, crash, mark=mark) as victim:
        victim.ready()
        victim.kill()
    with helper(order, resume, mark=mark) as heir:
        figures = heir.figures()
    if crash == "crash-longrun":
        asyncio.run(check(order, mark))
        expected = (STEPS - BLOCKED) * order.sizes["executions"] + figures["again"]
        if figures["bodies"] != expected:
            raise AssertionError(f"{figures['bodies']} step bodies ran after the kill instead of {expected}")
    return figures


def measure(order: Order) -> Figures:
    if order.role.startswith("crash-"):
        asyncio.run(crash_longrun(order) if order.role == "crash-longrun" else crash_bare(order))
        os._exit(1)  # it is killed before it comes here
    if order.role.startswith("resume-"):
        return asyncio.run(resume_longrun(order) if order.role == "resume-longrun" else resume_bare(order))
    if order.role.startswith("prepare-"):
        return asyncio.run(fill(order))
    side = "bare" if order.role == "bare" else "longrun"
    return kill_and_resume(order, f"crash-{side}", f"resume-{side}")


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    common: dict[str, Any] = {"job": "J4", "store": store, "durable": DURABLE[store]}
    alone = column(samples, "longrun", "seconds")
    return [
        Row(
            what=f"{sizes['executions']:,} in flight, killed, until all are finished",
            unit="s",
            ours=alone,
            bare=column(samples, "bare", "seconds"),
            goal=value_at_most(LIMITS[store]),
            **common,
        ),
        Row(
            what=f"the same beside {sizes['beside']:,} finished",
            unit="s",
            ours=column(samples, "beside", "seconds"),
            bare=alone,
            bare_name="alone",
            goal=at_most(1.1),
            **common,
        ),
        Row(
            what="finished steps run again",
            unit="steps",
            ours=column(samples, "longrun", "again") + column(samples, "beside", "again"),
            goal=value_at_most(0),
            **common,
        ),
    ]


JOBS = {
    "J4": Job(
        name="J4",
        title="1,000 in flight, SIGKILL, restart until all are finished",
        roles=("longrun", "bare", "beside"),
        lasting=("beside",),
        measure=measure,
        rows=rows,
        full={"executions": 1000, "beside": 100_000},
        timeout=900,
    ),
}
