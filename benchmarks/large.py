"""J3: a large state of which a step changes little. What did not change should not be written again.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from benchmarks import bare
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE, disk_bytes
from benchmarks.results import Figures, Row, at_least, value_at_most
from benchmarks.samples import column
from benchmarks.steps import WORKFLOW, check_rows, registry
from longrun import Executor

SIDES = {"100 KiB": "kib_steps", "5 MiB": "mib_steps"}
BYTES = {"100 KiB": 100 * 1024, "5 MiB": 5 * 1024 * 1024}
ROW_BYTES = 4096
"""What a step may leave on the disk besides the state: its row, index entries, a page."""


def state_of(size: int) -> dict[str, Any]:
    """Text that does not compress to nothing."""
    return {"n": 0, "data": os.urandom(size // 2).hex()}


async def run_longrun(order: Order, state: dict[str, Any], steps: int) -> Figures:
    async with Executor(registry(steps), store=order.url) as executor:
        began = time.perf_counter()
        run = await executor.start(WORKFLOW, state, id="x0")
        result = await run.result()
        seconds = time.perf_counter() - began
    if result != {**state, "n": steps}:
        raise AssertionError("a wrong answer")
    await check_rows(order.url, 1, steps)
    return {"steps_per_s": steps / seconds, "disk": disk_bytes(order.store, order.url)}


async def run_bare(order: Order, state: dict[str, Any], steps: int) -> Figures:
    with bare.opened(order.store, order.url) as group:
        began = time.perf_counter()
        await bare.execute_changed_keys(group, "x0", state, steps)
        seconds = time.perf_counter() - began
        stored = group.sink.load()
    if stored["x0.n"] != (steps, bare.dumps(steps)) or stored["x0.data"] != (1, bare.dumps(state["data"])):
        raise AssertionError("wrong rows")
    return {"steps_per_s": steps / seconds, "disk": disk_bytes(order.store, order.url)}


def measure(order: Order) -> Figures:
    side, _, role = order.role.partition(", ")
    run = run_bare if role == "bare" else run_longrun
    return asyncio.run(run(order, state_of(BYTES[side]), order.sizes[SIDES[side]]))


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    found: list[Row] = []
    for side, name in SIDES.items():
        steps = sizes[name]
        allowed = (2 * BYTES[side] + steps * ROW_BYTES) / 1e6
        common: dict[str, Any] = {"job": "J3", "store": store, "durable": DURABLE[store]}
        ours, bare_role = f"{side}, longrun", f"{side}, bare"
        found += [
            Row(
                what=f"{side} × {steps} steps",
                unit="steps/s",
                ours=column(samples, ours, "steps_per_s"),
                bare=column(samples, bare_role, "steps_per_s"),
                goal=at_least(0.5),
                **common,
            ),
            Row(
                what=f"{side} × {steps} steps, disk",
                unit="MB",
                ours=column(samples, ours, "disk", 1e-6),
                bare=column(samples, bare_role, "disk", 1e-6),
                goal=value_at_most(allowed),
                note="goal: two states and 4 KiB a step",
                **common,
            ),
        ]
    return found


JOBS = {
    "J3": Job(
        name="J3",
        title="states of 100 KiB and 5 MiB, of which a step changes little",
        roles=("100 KiB, longrun", "100 KiB, bare", "5 MiB, longrun", "5 MiB, bare"),
        measure=measure,
        rows=rows,
        full={"kib_steps": 200, "mib_steps": 20},
        short={"kib_steps": 100, "mib_steps": 5},
        short_stores=("sqlite",),
    ),
}
