"""J9: a page of a listing, newest first, of everything and of one state.

Place in the life of an execution: whenever somebody looks. The state asked for is that of the oldest ones alone: who
has no index for it reads all the others first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.helpers import percentile
from benchmarks.orders import Samples, Sizes
from benchmarks.results import Figures, Row, at_most
from benchmarks.samples import column
from longrun.client import Client
from longrun.records import Execution, ExecutionState
from longrun.stored import Query

PAGE = 50
LOOKS = 50
RARE = ExecutionState.CANCELLED


async def leave_oldest(url: str, workflow: str) -> None:
    """A page of cancelled ones, before anything else is stored."""
    async with Client(url) as client:
        runs = [await client.submit(workflow, {"n": 0}) for _ in range(PAGE)]
        await asyncio.gather(*(run.cancel() for run in runs))
        counted = await client.count()
    if counted != {RARE: PAGE}:
        raise AssertionError(f"{counted} instead of {PAGE} cancelled")


async def look(url: str) -> Figures:
    """Milliseconds for a page of each kind, as a client gets it."""
    async with Client(url) as client:
        newest, newest_ms = await timed(client, None)
        rare, rare_ms = await timed(client, RARE)
        await check(client, newest)
    if {one.state for one in rare} != {RARE}:
        raise AssertionError(f"{len(rare)} listed by their state")
    return {"newest_ms": newest_ms, "rare_ms": rare_ms}


async def timed(client: Client, state: ExecutionState | None) -> tuple[Sequence[Execution], float]:
    taken: list[float] = []
    found: Sequence[Execution] = ()
    for _ in range(LOOKS):
        began = time.perf_counter()
        found = await client.list(state, limit=PAGE)
        taken.append((time.perf_counter() - began) * 1e3)
        if len({one.id for one in found}) != PAGE:
            raise AssertionError(f"{len(found)} listed instead of {PAGE}")
    return found, percentile(taken, 0.5)


async def check(client: Client, newest: Sequence[Execution]) -> None:
    """Nothing is as new as the last of them, but they: counted, which goes another way than a listing."""
    stored = await client.store.find(Query(limit=PAGE))
    counted = sum((await client.store.count(Query(created_after=stored[-1].definition.created))).values())
    ids, times = [one.id for one in newest], [one.start_time for one in newest]
    if ids != [one.definition.id for one in stored] or times != sorted(times, reverse=True) or counted != PAGE:
        raise AssertionError(f"{counted} are as new as the {PAGE} newest")


def rows(samples: Samples, sizes: Sizes, common: dict[str, Any]) -> list[Row]:
    beside: dict[str, Any] = {"bare_name": f"{sizes['few']:,} stored", "goal": at_most(1.2), "unit": "ms"}
    return [
        Row(
            what=f"a page of {PAGE} with {sizes['many']:,} stored, {kind}",
            ours=column(samples, "many", name),
            bare=column(samples, "few", name),
            **beside,
            **common,
        )
        for kind, name in (("newest first", "newest_ms"), ("of a rare state", "rare_ms"))
    ]
