"""J5: from the start of a process to its first durable step, beside a process that only imports the dependencies.

Place in the life of an execution: before all of it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.child import ROOT
from benchmarks.orders import Job, Order, Samples, Sizes
from benchmarks.places import DURABLE
from benchmarks.results import Figures, Row, at_most, value_at_most
from benchmarks.samples import column

TELL = "\nimport sys, time; print(time.monotonic_ns(), ' '.join(sorted(sys.modules)), flush=True)\n"
BARE = "import anyio, attrs, cattrs, structlog" + TELL
IMPORT = "import longrun" + TELL
NAMES = "from longrun import Executor, StepContext, StepRegistry" + TELL
FIRST_STEP = """
import sys, time
import anyio
from longrun import Executor, StepRegistry

registry = StepRegistry()

@registry.step
async def first(state: dict) -> dict:
    return {"n": state["n"] + 1}

registry.workflow("cold", [first])

async def main() -> None:
    async with Executor(registry, store=sys.argv[1]) as executor:
        run = await executor.start("cold", {"n": 0})
        if await run.result() != {"n": 1}:
            sys.exit("a wrong answer")
        print(time.monotonic_ns(), " ".join(sorted(sys.modules)), flush=True)

anyio.run(main)
"""
HEAVY = frozenset({"psycopg", "redis", "rich", "click", "starlette", "sqlalchemy", "uvicorn", "cryptography"})
"""What nobody should wait for who has not asked for it."""


def started(program: str, url: str) -> tuple[float, frozenset[str]]:
    """Milliseconds from asking for the process to its word, and the modules it had imported by then."""
    asked = time.monotonic_ns()
    command = [sys.executable, "-c", program, url]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    stamp, _, modules = answer.partition(" ")
    return (int(stamp) - asked) / 1e6, frozenset(modules.split())


def median_of(program: str, url: str, times: int) -> tuple[float, int]:
    """Milliseconds, and how many modules it imported that it should not."""
    _, modules = started(program, url)  # fills the caches, of bytecode and of the disk
    return statistics.median(started(program, url)[0] for _ in range(times)), len(modules & HEAVY)


def measure(order: Order) -> Figures:
    times = order.sizes["times"]
    if order.role == "import":
        ms, heavy = median_of(IMPORT, order.url, times)
        names_ms, names_heavy = median_of(NAMES, order.url, times)
        return {"ms": ms, "names_ms": names_ms, "heavy": heavy, "names_heavy": names_heavy}
    return {"ms": median_of(BARE if order.role == "bare" else FIRST_STEP, order.url, times)[0]}


def rows(store: str, samples: Samples, sizes: Sizes) -> list[Row]:
    bare = column(samples, "bare", "ms")
    common: dict[str, Any] = {"job": "J5", "store": store, "durable": DURABLE[store]}
    beside: dict[str, Any] = {"bare": bare, "bare_name": "imports"}
    first = Row(
        what="process start to first step done",
        unit="ms",
        ours=column(samples, "longrun", "ms"),
        goal=at_most(2.0),
        **beside,
        **common,
    )
    if store != "file":
        return [first]
    imports: dict[str, Any] = {**common, "store": "", "durable": ""}
    heavy = column(samples, "import", "heavy") + column(samples, "import", "names_heavy")
    return [
        first,
        Row(what="import longrun", unit="ms", ours=column(samples, "import", "ms"), **beside, **imports),
        Row(what="import Executor", unit="ms", ours=column(samples, "import", "names_ms"), **beside, **imports),
        Row(what="drivers and edges imported", unit="modules", ours=heavy, goal=value_at_most(0), **imports),
    ]


JOBS = {
    "J5": Job(
        name="J5",
        title="import longrun; process start to first step done",
        roles=("longrun", "bare", "import"),
        measure=measure,
        rows=rows,
        full={"times": 7},
        short={"times": 1},
        short_stores=("file",),
        stores=("file", "sqlite"),
    ),
}
