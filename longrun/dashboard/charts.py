"""How much was finished when, and how much of it failed.

Place in the life of an execution: after many have finished. A count is asked for at every edge between two buckets, of
what had ended by then; neighbours are subtracted. So a chart costs a few dozen counts, however many executions there
are, and one that was made serves everybody for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from longrun.cli import _schema as schema
from longrun.records import FINISHED, ExecutionState, to_time
from longrun.stored import Query
from longrun.stores.store import CheckpointStore

BUCKETS = 30
KEEP_AT_LEAST = 5.0
KEEP_FACTOR = 20
"""A chart is kept for this many times what it took to make: making them never keeps a store busy."""
REMEMBERED = 50


class Charts:
    def __init__(self, store: CheckpointStore, now: Callable[[], float]) -> None:
        self._store, self._now = store, now
        self._made: dict[tuple[int, str | None], tuple[float, dict[str, Any]]] = {}

    async def finished(self, hours: int, workflow: str | None) -> dict[str, Any]:
        """Executions by when they ended, over the last `hours`."""
        key = (hours, workflow)
        until, chart = self._made.get(key, (0.0, {}))
        if time.monotonic() < until:
            return chart
        began = time.monotonic()
        chart = await self._make(hours, workflow)
        took = time.monotonic() - began
        if len(self._made) >= REMEMBERED:
            self._made.clear()
        self._made[key] = (time.monotonic() + max(KEEP_AT_LEAST, took * KEEP_FACTOR), chart)
        return chart

    async def _make(self, hours: int, workflow: str | None) -> dict[str, Any]:
        width = hours * 3600 / BUCKETS
        end = (self._now() // width + 1) * width
        edges = [end - width * n for n in range(BUCKETS, -1, -1)]
        workflows = None if workflow is None else frozenset({workflow})
        counts = [
            await self._store.count(Query(states=FINISHED, workflows=workflows, ended_before=edge)) for edge in edges
        ]
        buckets = [
            {"start": schema.time(to_time(edges[n])), **_difference(counts[n], counts[n + 1])} for n in range(BUCKETS)
        ]
        return {"buckets": buckets, "width": width}


def _difference(before: dict[ExecutionState, int], after: dict[ExecutionState, int]) -> dict[str, int]:
    """What ended in between. Something deleted or retried meanwhile must not make it negative."""
    return {
        state.value: max(0, after.get(state, 0) - before.get(state, 0)) for state in ExecutionState if state in FINISHED
    }
