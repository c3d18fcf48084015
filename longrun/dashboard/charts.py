"""How much was started when, and what became of it.

Place in the life of an execution: after many have finished. Buckets go by when an execution was created, since stores
have an index of that: a chart costs what it shows, however long the history behind it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longrun import schema
from longrun.dashboard.kept import Kept
from longrun.records import FINISHED, to_time
from longrun.stored import Query
from longrun.stores.store import CheckpointStore

BUCKETS = 30
KEEP_AT_LEAST = 3.0


class Charts:
    """Makes charts, and keeps each for a while for everybody who looks."""

    def __init__(self, store: CheckpointStore, now: Callable[[], float]) -> None:
        self._store, self._now = store, now
        self._made: Kept[dict[str, Any]] = Kept(KEEP_AT_LEAST)

    async def started(self, hours: int, workflow: str | None) -> dict[str, Any]:
        """Executions by when they were created, over the last `hours`, and how many of them stand how."""
        return await self._made.get((hours, workflow), lambda: self._make(hours, workflow))

    async def _make(self, hours: int, workflow: str | None) -> dict[str, Any]:
        width = hours * 3600 // BUCKETS
        last = int(self._now() // width)
        numbers = range(last - BUCKETS + 1, last + 1)
        return {"buckets": [await self._bucket(width, number, workflow) for number in numbers], "width": width}

    async def _bucket(self, width: int, number: int, workflow: str | None) -> dict[str, Any]:
        start = number * width
        workflows = None if workflow is None else frozenset({workflow})
        counts = await self._store.count(Query(workflows=workflows, created_after=start, created_before=start + width))
        ended = {state.value: counts.get(state, 0) for state in sorted(FINISHED)}
        unfinished = sum(counts.values()) - sum(ended.values())
        return {"start": schema.time(to_time(start)), **ended, "unfinished": unfinished}
