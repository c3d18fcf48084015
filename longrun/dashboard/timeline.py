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
BATCH = 10_000
"""How many rows are read at once."""
READ = 1000
"""How many rows of a fold are looked at."""
REMEMBERED = 2000

Key = tuple[str, float, int, int]
"""Of a fold: the execution's id, when it was created, the number before its first row, and that of its last."""


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
        self._folds: OrderedDict[Key, dict[str, Any]] = OrderedDict()

    async def between(self, id: str, created: float, after: int, last: int) -> list[dict[str, Any]]:
        """The rows behind number `after` up to `last`, oldest first: rows and folds of rows."""
        if last - after <= ROWS:
            return await self._rows(id, after, last)
        size = fold_size(last - after - TAIL)
        firsts = range(after, last - TAIL - size, size)
        folds = await self._folded(id, created, firsts)
        return folds + await self._rows(id, firsts[-1] + size, last)

    async def _rows(self, id: str, after: int, last: int) -> list[dict[str, Any]]:
        rows = await self._store.boundaries(id, after=after, limit=max(1, last - after))
        return [row_json(row) for row in rows if row.seq <= last]

    async def _folded(self, id: str, created: float, firsts: range) -> list[dict[str, Any]]:
        """A fold behind each of the numbers. Those that are not known are read many at a time: to a store that keeps an
        execution in one file, a read costs as much as the whole."""
        keys = [(id, created, after, after + firsts.step) for after in firsts]  # created: an id can be used again
        found = {key: self._folds[key] for key in keys if key in self._folds}
        unknown = [key for key in keys if key not in found]
        many = max(1, BATCH // firsts.step)
        for n in range(0, len(unknown), many):
            found |= await self._made(unknown[n : n + many])
        for key in keys:
            self._folds[key] = found[key]
            self._folds.move_to_end(key)
        while len(self._folds) > REMEMBERED:
            self._folds.popitem(last=False)
        return [found[key] for key in keys]

    async def _made(self, keys: list[Key]) -> dict[Key, dict[str, Any]]:
        """Folds, all from one read if that is not too much; of large ones only the beginning and the end are read."""
        (id, _, first, _), (_, _, after, last) = keys[0], keys[-1]
        size = last - after
        if size > READ or last - first > BATCH:
            return {key: await self._look(*key) for key in keys}
        parts: dict[int, list[Boundary]] = {}
        for row in await self._store.boundaries(id, after=first, limit=last - first):
            parts.setdefault((row.seq - 1 - first) // size, []).append(row)
        rows = [parts.get((key[2] - first) // size, []) for key in keys]
        return {key: _fold(own, own[-1:], *key[2:]) for key, own in zip(keys, rows, strict=True)}

    async def _look(self, id: str, created: float, after: int, last: int) -> dict[str, Any]:
        rows = await self._store.boundaries(id, after=after, limit=min(READ, last - after))
        end = rows[-1:] if last - after <= READ else await self._store.boundaries(id, after=last - 1, limit=1)
        return _fold(rows, end, after, last)


def _fold(rows: list[Boundary], end: list[Boundary], after: int, last: int) -> dict[str, Any]:
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
