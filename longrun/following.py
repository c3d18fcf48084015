"""The events of one execution, wherever it runs.

Place in the life of an execution: event. Told as they come where it runs here, and otherwise from the rows that its
boundaries leave in the store. Objects and no generators: who leaves one in the middle need not close it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Self

from longrun.events import LAST_EVENTS, EventType, ExecutionEvent
from longrun.records import check_id, to_time
from longrun.stored import Boundary

if TYPE_CHECKING:
    from longrun.control_room import ControlRoom
    from longrun.crew import Crew

LOOK_AGAIN = 1.0
"""Seconds between two looks at whether it still runs here, while nothing is told."""

KINDS = {
    "start": EventType.EXECUTION_STARTED,
    "step": EventType.STEP_COMPLETED,
    "goto": EventType.STEP_COMPLETED,
    "repeat": EventType.STEP_COMPLETED,
    "sleep": EventType.WAITING,
    "wait": EventType.WAITING,
    "pause": EventType.PAUSED,
    "resume": EventType.RESUMED,
    "retry": EventType.RESUMED,
    "fail": EventType.EXECUTION_FAILED,
    "finish": EventType.EXECUTION_COMPLETED,
    "cancel": EventType.EXECUTION_CANCELLED,
    "block": EventType.EXECUTION_BLOCKED,
    "state": EventType.CHECKPOINTED,
}
"""What the row of each kind of boundary tells."""
LAST = frozenset({"fail", "finish", "cancel"})


class RowEvents:
    """Events of an execution that another process runs, from the rows its boundaries leave behind number `after`, or
    from now on. The last one tells how it ended, also if it had ended before."""

    def __init__(self, room: ControlRoom, id: str, after: int | None = None) -> None:
        self._room, self._id, self._seen = room, check_id(id), after
        self._rows: deque[Boundary] = deque()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecutionEvent:
        while not self._rows:
            if self._over:
                raise StopAsyncIteration
            await self._look()
        row = self._rows.popleft()
        if row.kind in LAST:
            self._over = True
            self._rows.clear()
        return event_of(self._id, row)

    async def _look(self) -> None:
        room, store, changed = self._room, self._room.store, self._room.change_of(self._id)
        loaded = await room.patiently(partial(store.load, self._id), known=self._seen is not None)
        head = loaded.head  # before the rows: the last of them must be seen
        if self._seen is None:
            self._seen = head.seq - head.state.finished
        rows = await room.patiently(partial(store.boundaries, self._id, after=self._seen), known=True)
        if rows:
            self._seen = rows[-1].seq
            self._rows.extend(rows)
        elif head.state.finished:
            self._over = True
        else:
            await room.await_change(changed)


def event_of(id: str, row: Boundary) -> ExecutionEvent:
    """The event that a stored row tells."""
    return ExecutionEvent(
        type=KINDS.get(row.kind, EventType.CHECKPOINTED),
        execution_id=id,
        step=row.name,
        timestamp=to_time(row.ended),  # type: ignore[arg-type]  # never None
        error=row.error,
        attempt=row.attempts,
        data={"seq": row.seq, "kind": row.kind, "step_index": row.step, "next_step": row.next},
    )


class RunEvents:
    """Events of an execution that runs here, as they are told, and its rows' when it goes on elsewhere."""

    def __init__(self, executor: Crew, id: str) -> None:
        self._executor, self._id = executor, id
        self._told = executor.bus.subscribe(only=id)
        self._rows: RowEvents | None = None
        self._seen: int | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecutionEvent:
        if self._over:
            raise StopAsyncIteration
        if self._rows is None and await self._goes_on_elsewhere():
            self._told.close()
            self._rows = RowEvents(self._executor, self._id, self._seen)
        if self._rows is not None:
            return await anext(self._rows)
        event = await anext(self._told)
        self._seen = event.data.get("seq", self._seen)
        self._over = event.type in LAST_EVENTS
        return event

    async def _goes_on_elsewhere(self) -> bool:
        """Wait for the next event; True if none will come, since somebody else has taken the execution up."""
        executor = self._executor
        while not await self._told.arrives(LOOK_AGAIN):
            if self._id not in executor.runners:
                head = (await executor.store.load(self._id)).head
                if head.state.finished or head.owner not in (None, executor.owner):
                    return self._told.empty
        return False
