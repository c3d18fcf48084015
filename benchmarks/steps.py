"""J1 and J2: small steps, one execution after another's step or a thousand at once, durable after each.

Place in the life of an execution: run a step, checkpoint.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks import alone, bare
from benchmarks.machine import begin, peak_mib
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE, disk_bytes
from benchmarks.results import Figures, Row, at_least, at_most, value_at_most
from benchmarks.samples import column
from longrun import Executor, StepRegistry
from longrun.client import Client

WORKFLOW = "steps"


def registry(steps: int) -> StepRegistry:
    made = StepRegistry()

    @made.step
    async def step(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "n": state["n"] + 1}

    made.workflow(WORKFLOW, [step] * steps)
    return made


async def run_longrun(order: Order, executions: int, steps: int) -> Figures:
    async with Executor(registry(steps), store=order.url) as executor:

        async def one(number: int) -> int:
            run = await executor.start(WORKFLOW, {"n": 0}, id=f"x{number}")
            return int((await run.result())["n"])

        began, cpu, loop_cpu = begin(), time.process_time(), time.thread_time()
        done = await asyncio.gather(*(one(number) for number in range(executions)))
        seconds = time.perf_counter() - began
        cpu, loop_cpu = time.process_time() - cpu, time.thread_time() - loop_cpu
        peak = peak_mib()
    if done != [steps] * executions:
        raise AssertionError(f"a wrong answer: {done[:3]} …")
    await check_rows(order.url, executions, steps)
    total = executions * steps
    return {
        "steps_per_s": total / seconds,
        "cpu_us": cpu / total * 1e6,
        "loop_us": loop_cpu / total * 1e6,
        "peak_mib": peak,
        "disk": disk_bytes(order.store, order.url),
    }


async def check_rows(url: str, executions: int, steps: int) -> None:
    """What is stored: every execution completed, with a checkpoint for its start and one for each step."""
    async with Client(url) as client:
        found = await client.list("completed", limit=executions + 1)
        rows = await client.steps(found[0].id, limit=steps + 2)
    if len(found) != executions or any(one.checkpoints < steps + 1 for one in found):
        raise AssertionError(f"{len(found)} of {executions} executions are stored as completed")
    if len(rows) < steps + 1 or [row.step for row in rows if row.kind != "start"][:steps] != list(range(steps)):
        raise AssertionError(f"{len(rows)} rows are stored for {steps} steps")


async def run_bare(order: Order, executions: int, steps: int) -> Figures:
    with bare.opened(order.store, order.url) as group:
        began = begin()
        done = await asyncio.gather(*(bare.execute(group, f"x{i}", {"n": 0}, steps) for i in range(executions)))
        seconds = time.perf_counter() - began
        stored = group.sink.load()
    if done != [steps] * executions or len(stored) != executions or {one[0] for one in stored.values()} != {steps}:
        raise AssertionError("a wrong answer, or wrong rows")
    return {"steps_per_s": executions * steps / seconds}


async def run_store(order: Order, executions: int, steps: int) -> Figures:
    execute = alone.execute_apart if order.role == "task" else alone.execute
    async with alone.opened(order.url) as store:
        began = begin()
        done = await asyncio.gather(*(execute(store, f"x{i}", steps) for i in range(executions)))
        seconds = time.perf_counter() - began
    if done != [steps] * executions:
        raise AssertionError(f"a wrong answer: {done[:3]} …")
    await check_rows(order.url, executions, steps)
    return {"steps_per_s": executions * steps / seconds}


RUNS = {"longrun": run_longrun, "ten times": run_longrun, "bare": run_bare, "store": run_store, "task": run_store}


def measure(order: Order) -> Figures:
    steps = order.sizes["steps"] * (10 if order.role == "ten times" else 1)
    return asyncio.run(RUNS[order.role](order, order.sizes["executions"], steps))


def rows_j1(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    return [
        Row(
            job="J1",
            store=store,
            what=f"1 × {sizes['steps']:,} steps",
            unit="steps/s",
            ours=column(samples, "longrun", "steps_per_s"),
            bare=column(samples, "bare", "steps_per_s"),
            goal=at_least(0.7),
            durable=DURABLE[store],
        ),
        *without_executor("J1", store, f"1 × {sizes['steps']:,} steps", samples),
    ]


def without_executor(job: str, store: str, what: str, samples: Samples) -> list[Row]:
    """The store alone, and with a task for each execution, as far as they were measured: not in the short form."""
    sides = {
        "store": (alone.ALONE, "the same records, with no executor around it"),
        "task": (alone.APART, "the same, each in a task under a cancel scope"),
    }
    return [
        Row(
            job=job,
            store=store,
            what=what + suffix,
            unit="steps/s",
            ours=column(samples, role, "steps_per_s"),
            bare=column(samples, "bare", "steps_per_s"),
            durable=DURABLE[store],
            note=note,
        )
        for role, (suffix, note) in sides.items()
        if role in samples
    ]


def rows_j1x10(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    steps, name = sizes["steps"], f"{sizes['steps']:,} steps"
    ten, one = samples.get("ten times", ()), samples.get("longrun", ())
    common: dict[str, Any] = {"job": "J1x10", "store": store, "bare_name": name, "durable": DURABLE[store]}
    return [
        Row(
            what=f"time a step at {steps * 10:,} steps",
            unit="µs",
            ours=[1e6 / figures["steps_per_s"] for figures in ten],
            bare=[1e6 / figures["steps_per_s"] for figures in one],
            goal=at_most(1.1),
            **common,
        ),
        Row(
            what=f"disk a step at {steps * 10:,} steps",
            unit="bytes",
            ours=[figures["disk"] / steps / 10 for figures in ten],
            bare=[figures["disk"] / steps for figures in one],
            goal=at_most(1.1),
            **common,
        ),
        Row(
            what=f"peak memory at {steps * 10:,} steps",
            unit="MiB",
            ours=column(samples, "ten times", "peak_mib"),
            bare=column(samples, "longrun", "peak_mib"),
            goal=at_most(10.0),
            note="linear would be 10",
            **common,
        ),
    ]


def rows_j2(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    what = f"{sizes['executions']:,} × {sizes['steps']} steps"
    common: dict[str, Any] = {"job": "J2", "store": store, "durable": DURABLE[store]}
    return [
        Row(
            what=what,
            unit="steps/s",
            ours=column(samples, "longrun", "steps_per_s"),
            bare=column(samples, "bare", "steps_per_s"),
            goal=at_least(0.5 if store == "file" else 0.33),
            **common,
        ),
        *without_executor("J2", store, what, samples),
        Row(
            what=f"{what}, processor time a step",
            unit="µs",
            ours=column(samples, "longrun", "cpu_us"),
            note=f"of it the loop's thread {statistics.median(column(samples, 'longrun', 'loop_us')):.0f}",
            **common,
        ),
        Row(
            what=f"{what}, peak memory",
            unit="MiB",
            ours=column(samples, "longrun", "peak_mib"),
            goal=value_at_most(60),
            **common,
        ),
    ]


def rows_j2x5(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    return [
        Row(
            job="J2x5",
            store=store,
            what=f"{sizes['executions']:,} × {sizes['steps']} steps",
            unit="steps/s",
            ours=column(samples, "longrun", "steps_per_s"),
            bare=column(samples, "bare", "steps_per_s"),
            durable=DURABLE[store],
        )
    ]


JOBS = {
    "J1": Job(
        name="J1",
        title="one execution, 1,000 steps, durable after each",
        roles=("longrun", "store", "bare"),
        measure=measure,
        rows=rows_j1,
        full={"executions": 1, "steps": 1000},
        short={"executions": 1, "steps": 300},
        short_without=("store",),
    ),
    "J1x10": Job(
        name="J1x10",
        title="the same with ten times the steps: nothing may grow with their number",
        roles=("longrun", "ten times"),
        measure=measure,
        rows=rows_j1x10,
        full={"executions": 1, "steps": 1000},
        short={"executions": 1, "steps": 100},
        short_stores=("sqlite",),
    ),
    "J2": Job(
        name="J2",
        title="1,000 executions of 10 steps at once",
        roles=("longrun", "store", "task", "bare"),
        measure=measure,
        rows=rows_j2,
        full={"executions": 1000, "steps": 10},
        short={"executions": 300, "steps": 10},
        short_without=("store", "task"),
    ),
    "J2x5": Job(
        name="J2x5",
        title="the same with five times the steps: starts and ends, of which the bare loop has none, weigh less",
        roles=("longrun", "bare"),
        measure=measure,
        rows=rows_j2x5,
        full={"executions": 1000, "steps": 50},
    ),
}
