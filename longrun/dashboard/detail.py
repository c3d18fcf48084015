"""One execution in full. Here, and only here, its error and its states are shown.

Place in the life of an execution: whenever somebody looks into one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs

from longrun import lease, plan, schema
from longrun.dashboard.diff import differences
from longrun.dashboard.kept import Kept
from longrun.dashboard.listing import Listing
from longrun.dashboard.timeline import Timeline, row_json
from longrun.errors import ConfigError
from longrun.records import check_id, to_time
from longrun.snapshot import restore_tree
from longrun.stored import Boundary, Loaded, Query, Stored
from longrun.stores.store import CheckpointStore
from longrun.stranded import stranded

CHILDREN = 50
MESSAGES = 50
CHECKPOINTS = 50
PENDING = 12
STATE_TEXT = 200_000
"""How many characters of a state are shown."""
UNCHANGING = frozenset({"pause", "resume", "retry", "block", "fail", "cancel"})
"""Rows that leave the state as it was."""
LOOK_BACK = 100
REMEMBERED = 100


class Details:
    """Reads what is shown of one execution."""

    def __init__(self, store: CheckpointStore, listing: Listing, now: Callable[[], float]) -> None:
        self._store, self._listing, self._now = store, listing, now
        self._planner = plan.Planner(store)
        self.timeline = Timeline(store)
        self._children: Kept[list[Stored]] = Kept()
        self._rows: OrderedDict[tuple[str, float], dict[int, dict[str, Any]]] = OrderedDict()
        """Those of the checkpoints shown last, by id and creation: a row never changes, and is not read again."""

    async def of(self, id: str) -> dict[str, Any]:
        loaded = await self._store.load(check_id(id))
        owners = await self._store.owners()
        alive = lease.alive(owners)
        head, definition = loaded.head, loaded.definition
        query = Query(parent_id=id, limit=CHILDREN + 1)
        children = await self._children.get(id, lambda: self._store.find(query))
        return {
            "execution": await self._listing.summary(Stored(definition=definition, head=head)),
            "error": head.error,
            "reason": head.reason,
            "crashes": head.crashes,
            "plan": self._plan(loaded, alive),
            "resume": self._resume(loaded),
            "in_flight": _in_flight(loaded),
            "hint": stranded(definition, head, [owner for owner in owners if owner.id in alive], self._now()),
            "messages": [_message(one) for one in loaded.messages[:MESSAGES]],
            "message_count": len(loaded.messages),
            "children": [await self._listing.summary(one) for one in children[:CHILDREN]],
            "more_children": len(children) > CHILDREN,
            "checkpoints": await self._kept(loaded),
            "damage": list(loaded.damage),
            "last_seq": head.seq,
        }

    def _plan(self, loaded: Loaded, alive: frozenset[str]) -> dict[str, Any]:
        """Without the names of the steps before it: there may be thousands, and the timeline has them."""
        made = schema.plan(attrs.evolve(self._planner.plan(loaded, alive), skipped=()))
        del made["skipped"]
        return made

    def _resume(self, loaded: Loaded) -> dict[str, Any]:
        """Where it would go on: `last checkpoint 12 s ago, would resume at step 4 of 9, item 312`."""
        head, steps = loaded.head, loaded.definition.steps
        return {
            "saved": schema.time(to_time(head.updated)),
            "step": head.step,
            "total": loaded.definition.total,
            "name": steps[head.step] if head.step < len(steps) else None,
            "inside": [plan.describe(one) for one in plan.in_step(loaded)],
        }

    async def _kept(self, loaded: Loaded) -> list[dict[str, Any]]:
        """The checkpoints whose states are kept, newest last."""
        wanted = [seq for seq, _ in loaded.kept][-CHECKPOINTS:]
        id, created = loaded.definition.id, loaded.definition.created
        rows = self._rows.get((id, created), {})
        unknown = [seq for seq in wanted if seq not in rows]
        if unknown:
            found = await self._store.boundaries(id, after=unknown[0] - 1)
            rows = rows | {row.seq: _checkpoint(row) for row in found}
        for seq in unknown:
            if seq not in rows:
                found = await self._store.boundaries(id, after=seq - 1, limit=1)
                rows |= {row.seq: _checkpoint(row) for row in found}
        rows = {seq: rows[seq] for seq in wanted if seq in rows}
        self._rows[id, created] = rows
        self._rows.move_to_end((id, created))
        while len(self._rows) > REMEMBERED:
            self._rows.popitem(last=False)
        return list(rows.values())

    async def rows(self, id: str, after: int, before: int | None) -> dict[str, Any]:
        """The timeline between two numbers, folded where it is long, and the names of the next steps."""
        loaded = await self._store.load(check_id(id))
        head, definition = loaded.head, loaded.definition
        last = head.seq if before is None else min(head.seq, before - 1)
        first = head.step + (0 if head.state.finished or head.started is None else 1)
        return {
            "rows": await self.timeline.between(id, definition.created, min(after, last), last),
            "pending": [] if head.state.finished else list(definition.steps[first : first + PENDING]),
            "pending_from": first,
            "total": definition.total,
            "last_seq": head.seq,
        }

    async def news(self, id: str, after: int, limit: int) -> list[dict[str, Any]]:
        """The rows behind a number, one by one."""
        return [row_json(row) for row in await self._store.boundaries(id, after=after, limit=limit)]

    async def checkpoint(self, id: str, seq: int) -> dict[str, Any]:
        """One row with what went in and what came out, as far as the states are kept."""
        rows = await self._store.boundaries(check_id(id), after=seq - 1, limit=1)
        if not rows or rows[0].seq != seq:
            raise ConfigError("checkpoint", seq, "this execution has none of that number")
        before = await self._state_before(id, seq)
        after = before if rows[0].kind in UNCHANGING else await self._state(id, seq)
        return {"step": row_json(rows[0]), "input": _text(before), "output": _text(after)}

    async def _state_before(self, id: str, seq: int) -> tuple[Any, ...]:
        """What stood when row `seq` came: the state of the last row that changed it."""
        rows = await self._store.boundaries(id, after=max(0, seq - 1 - LOOK_BACK), limit=LOOK_BACK)
        changing = [row.seq for row in rows if row.seq < seq and row.kind not in UNCHANGING]
        return await self._state(id, changing[-1]) if changing else ()

    async def diff(self, id: str, before: int, after: int) -> dict[str, Any]:
        old, new = await self._state(check_id(id), before), await self._state(id, after)
        for seq, found in ((before, old), (after, new)):
            if not found:
                raise ConfigError("checkpoint", seq, "its state is not kept; choose among `checkpoints`")
        changes, more = differences(old[0], new[0])
        return {"from": before, "to": after, "changes": [attrs.asdict(one) for one in changes], "more": more}

    async def _state(self, id: str, seq: int) -> tuple[Any, ...]:
        """The state of a checkpoint as its stored JSON, alone in a tuple; nothing if it is not kept."""
        found = await self._store.checkpoint(id, seq)
        if found is None:
            return ()
        boundary, blobs = found
        return () if boundary.data is None else (restore_tree(boundary.data, blobs, bool(boundary.blobs)),)


def _text(state: tuple[Any, ...]) -> dict[str, Any] | None:
    if not state:
        return None
    text = json.dumps(state[0], indent=2, ensure_ascii=False)
    return {"text": text[:STATE_TEXT], "size": len(text), "truncated": len(text) > STATE_TEXT}


def _in_flight(loaded: Loaded) -> dict[str, Any] | None:
    """The visit that goes on now: what the timeline draws behind its last row."""
    head, steps = loaded.head, loaded.definition.steps
    if head.state.finished:
        return None
    return {
        "state": head.state.value,
        "owned": head.owner is not None,
        "step": head.step,
        "name": steps[head.step] if head.step < len(steps) else None,
        "started": schema.time(to_time(head.started)),
        "failed_attempts": head.attempt,
        "visit": head.visit,
        "iteration": head.iteration,
        "due": schema.time(to_time(head.due)),
        "waiting_for": head.signal,
    }


def _message(one: Any) -> dict[str, Any]:
    return {"kind": one.kind, "name": one.name, "sent": schema.time(to_time(one.sent))}


def _checkpoint(row: Boundary) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "step": row.next,
        "kind": row.kind,
        "name": row.name,
        "size": row.size,
        "time": schema.time(to_time(row.ended)),
    }
