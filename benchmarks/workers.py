"""J9: several worker processes on one store, and what a claim costs when much is queued.

Place in the life of an execution: claim. What else is asked of the hundred thousand that are queued: `race`, `pages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import pages, race
from benchmarks.child import MeasurementError
from benchmarks.helpers import Helper, helper, say_ready
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, at_least, at_most
from benchmarks.samples import column
from benchmarks.steps import WORKFLOW, registry
from longrun.client import Client
from longrun.records import ExecutionState
from longrun.stored import Claim, Owner
from longrun.worker import Worker

STEPS = 10
WAVE = 1000
CLAIMED_AT_ONCE = 100
CLAIMS = 9
WORKERS = {"one worker": 1, "two workers": 2, "four workers": 4}
QUEUED = {"few": "few", "prepare-many": "many"}


async def submit(order: Order, count: int) -> None:
    """Under the ids that longrun gives, which sort as they come. Were they "x0" to "x99999", the first thousand would
    stand all over the indexes of the hundred thousand, and claims at work would be compared with claims that warm up.
    """
    async with Client(order.url) as client:
        for start in range(0, count, WAVE):
            wave = min(WAVE, count - start)
            await asyncio.gather(*(client.submit(WORKFLOW, {"n": 0}) for _ in range(wave)))
        counted = await client.count()
    if counted.get(ExecutionState.INITIALIZED) != count:
        raise AssertionError(f"{counted} instead of {count} queued")


async def queue(order: Order, count: int) -> None:
    await pages.leave_oldest(order.url, WORKFLOW)
    await submit(order, count)


async def work(order: Order) -> None:
    say_ready()
    sys.stdin.readline()  # all begin at the same word
    async with Worker(registry(STEPS), store=order.url, concurrency=500):
        await asyncio.Event().wait()


async def until_finished(order: Order, executions: int, workers: Sequence[Helper]) -> float:
    """When the last one ended, by the store's rows: looking seldom costs the workers nothing."""
    async with Client(order.url) as client:
        while (await client.count()).get(ExecutionState.COMPLETED, 0) < executions:
            check_alive(workers)
            await asyncio.sleep(0.2)
        found = await client.list("completed", limit=executions + 1)
    if len(found) != executions or any(one.checkpoints < STEPS + 1 for one in found):
        raise AssertionError(f"{len(found)} of {executions} are completed")
    return max(one.end_time.timestamp() for one in found if one.end_time is not None)


def check_alive(workers: Sequence[Helper]) -> None:
    for worker in workers:
        if worker.process.poll() is not None:
            raise MeasurementError(f"a worker ended with code {worker.process.returncode}")


def crew(order: Order, count: int) -> Figures:
    executions = order.sizes["executions"]
    asyncio.run(submit(order, executions))
    with contextlib.ExitStack() as stack:
        workers: list[Helper] = [stack.enter_context(helper(order, "worker")) for _ in range(count)]
        for worker in workers:
            worker.ready()
        began = time.time()
        for worker in workers:
            worker.tell("go")
        ended = asyncio.run(until_finished(order, executions, workers))
    return {"steps_per_s": executions * STEPS / (ended - began)}


async def claims(order: Order) -> Figures:
    """Microseconds that each execution of a claimed batch costs."""
    me = Owner(id=f"bench-{os.getpid()}", life={}, remaining=60.0)
    states = frozenset({ExecutionState.INITIALIZED})
    taken: list[float] = []
    async with Client(order.url) as client:
        await client.store.register(me, 60.0)
        for _ in range(CLAIMS):
            wanted = Claim(owner=me.id, now=time.time(), states=states, limit=CLAIMED_AT_ONCE)
            began = time.perf_counter()
            given = await client.store.claim(wanted)
            taken.append((time.perf_counter() - began) / CLAIMED_AT_ONCE * 1e6)
            if len({loaded.definition.id for loaded in given}) != CLAIMED_AT_ONCE:
                raise AssertionError(f"{len(given)} claimed instead of {CLAIMED_AT_ONCE}")
    return {"us": sorted(taken)[CLAIMS // 2]}


def measure(order: Order) -> Figures:
    if order.role == "worker":
        asyncio.run(work(order))
    if order.role in WORKERS:
        return crew(order, WORKERS[order.role])
    if order.role == race.ROLE:
        return asyncio.run(race.take(order))
    if order.role in QUEUED:
        asyncio.run(queue(order, order.sizes[QUEUED[order.role]]))
    if order.role.startswith("prepare-"):
        return {}
    figures = {**asyncio.run(claims(order)), **asyncio.run(pages.look(order.url))}
    if order.role == "many" and order.store in race.STORES:
        figures |= race.race(order)
    return figures


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    common: dict[str, Any] = {"job": "J9", "store": store, "durable": DURABLE[store]}
    return [
        Row(
            what=f"four workers, {sizes['executions']:,} × {STEPS} steps",
            unit="steps/s",
            ours=column(samples, "four workers", "steps_per_s"),
            bare=column(samples, "one worker", "steps_per_s"),
            bare_name="one worker",
            goal=at_least(1.5),
            **common,
        ),
        Row(
            what=f"two workers, {sizes['executions']:,} × {STEPS} steps",
            unit="steps/s",
            ours=column(samples, "two workers", "steps_per_s"),
            bare=column(samples, "one worker", "steps_per_s"),
            bare_name="one worker",
            **common,
        ),
        Row(
            what=f"a claim with {sizes['many']:,} queued",
            unit="µs an execution",
            ours=column(samples, "many", "us"),
            bare=column(samples, "few", "us"),
            bare_name=f"{sizes['few']:,} queued",
            goal=at_most(1.2),
            **common,
        ),
        *(race.rows(samples, sizes, common) if store in race.STORES else ()),
        *pages.rows(samples, sizes, common),
    ]


JOBS = {
    "J9": Job(
        name="J9",
        title="four worker processes against one; claims and pages with much queued",
        roles=("four workers", "two workers", "one worker", "many", "few"),
        lasting=("many",),
        measure=measure,
        rows=rows,
        full={"executions": 10_000, "few": 1000, "many": 100_000, "claimers": 8, "turns": 25},
        stores=("postgres", "sqlite"),
        timeout=900,
    ),
}
