"""The rows of one execution, folded where they are too many to draw.

Place in the life of an execution: whenever somebody looks into one. Rows never change once they are written, so a fold
that was made is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from longrun import schema, views
from longrun.records import to_time
from longrun.stored import Boundary
from longrun.stores.store import CheckpointStore

ROWS = 500
"""How many rows are drawn one by one."""
TAIL = 200
"""Of more than that, how many of the newest are."""
FOLDS = 100
READ = 1000
"""How many rows of a fold are looked at."""
REMEMBERED = 2000


def fold_size(rows: int) -> int:
    """How many rows go into one fold: a round number that leaves at most a hundred of them."""
    size = 10
    while rows > size * FOLDS:
        size *= 5 if str(size).startswith("1") else 2
    return size


def row_json(row: Boundary) -> dict[str, Any]:
    return {"fold": False, **schema.step(views.step_record(row))}


class Timeline:
    """Reads rows, and remembers folds."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._folds: OrderedDict[tuple[str, float, int, int], dict[str, Any]] = OrderedDict()

    async def between(self, id: str, created: float, after: int, last: int) -> list[dict[str, Any]]:
        """The rows behind number `after` up to `last`, oldest first: rows and folds of rows."""
        if last - after <= ROWS:
            return await self._rows(id, after, last)
        size = fold_size(last - after - TAIL)
        shown: list[dict[str, Any]] = []
        while last - after > TAIL + size:
            shown.append(await self._fold(id, created, after, after + size))
            after += size
        return shown + await self._rows(id, after, last)

    async def _rows(self, id: str, after: int, last: int) -> list[dict[str, Any]]:
        rows = await self._store.boundaries(id, after=after, limit=max(1, last - after))
        return [row_json(row) for row in rows if row.seq <= last]

    async def _fold(self, id: str, created: float, after: int, last: int) -> dict[str, Any]:
        """Created is part of the key: an id can be deleted and used again."""
        key = (id, created, after, last)
        known = self._folds.get(key)
        if known is None:
            known = await self._look(id, after, last)
            self._folds[key] = known
            while len(self._folds) > REMEMBERED:
                self._folds.popitem(last=False)
        else:
            self._folds.move_to_end(key)
        return known

    async def _look(self, id: str, after: int, last: int) -> dict[str, Any]:
        rows = await self._store.boundaries(id, after=after, limit=min(READ, last - after))
        end = rows[-1:] if last - after <= READ else await self._store.boundaries(id, after=last - 1, limit=1)
        started = [row.started for row in rows if row.started is not None]
        return {
            "fold": True,
            "first": after + 1,
            "last": last,
            "count": last - after,
            "examined": len(rows),
            "steps": sorted({row.step for row in (*rows[:1], *end)}),
            "started": schema.time(to_time(min(started, default=rows[0].ended if rows else None))),
            "ended": schema.time(to_time(end[0].ended if end else None)),
            "retried": sum(row.attempts > 1 for row in rows),
            "errors": sum(row.error is not None for row in rows),
            "waits": sum(row.kind in ("sleep", "wait", "pause") for row in rows),
        }
