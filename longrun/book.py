"""The owner's copy of an execution: where it stands, its state, its progress inside the step, and every write of it.

Place in the life of an execution: checkpoint, event. The book alone builds writes, so that their revisions have no gap,
and tells what happened once the store has acknowledged it. With coalesced durability it gathers boundaries here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from longrun.events import EventType
from longrun.ledger import Ledger
from longrun.outbox import Outbox
from longrun.records import Progress
from longrun.snapshot import Snapshot, Snapshots, decode_state
from longrun.stored import Boundary, Head, Loaded, Save

if TYPE_CHECKING:
    from longrun.crew import Crew

UNSAVED_LIMIT = 4096
MISSING: Any = object()

Event = tuple[EventType, dict[str, Any]]
"""An event to be told when the write that makes it true is durable: its type and fields."""


class Book:
    """One owned execution, as of the newest write handed over."""

    def __init__(self, executor: Crew, loaded: Loaded, value: Any = MISSING) -> None:
        self._executor = executor
        self.definition = loaded.definition
        self.id = loaded.definition.id
        self.steps = loaded.definition.steps
        self.head = loaded.head
        self.ledger = Ledger(loaded.entries)
        self.outbox = Outbox(executor, self.id)
        self.progress: Progress | None = None
        self._value = value
        self._boundary = loaded.boundary
        self._blobs = dict(loaded.blobs)
        self._snapshots = Snapshots(executor.config.retention.history)
        self._snapshots.restore(loaded.boundary.data or b"null", loaded.blobs, loaded.kept)
        self._unsaved: list[Boundary] = []
        self._unsaved_blobs: dict[str, bytes] = {}
        self._events: list[Event] = []
        self._clear = False
        self._entries_stored = bool(loaded.entries)
        self._saved_at = executor.clock.monotonic()
        self.on_progress: Callable[[], object] | None = None
        """Called when durable progress has cleared the count of crashes."""

    @property
    def step_name(self) -> str | None:
        return self.steps[self.head.step] if self.head.step < len(self.steps) else None

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved) or self.ledger.dirty

    def type_of(self, index: int) -> Any:
        """The annotation of the state that a step receives."""
        step = self._executor.registry.get(self.steps[index]) if index < len(self.steps) else None
        return Any if step is None else step.state_type

    def state(self, annotation: Any) -> Any:
        """What a step receives: the object just returned, once; after that always decoded anew."""
        value, self._value = self._value, MISSING
        if value is not MISSING and not self._executor.strict:
            return value
        boundary = self._boundary
        return decode_state(boundary.data or b"null", self._blobs, bool(boundary.blobs), annotation)

    # the pieces of a write

    def snapshot(self, value: Any, annotation: Any, path: str = "state") -> Snapshot:
        return self._snapshots.take(value, annotation, self.head.seq + 1, path)

    def next(self, **changes: Any) -> Head:
        """The head of the next write."""
        head = self.head
        shown = self.progress
        if "step" in changes:
            changes.update(done=0, of=None, note=None)
            changes.setdefault("progress", min(1.0, changes["step"] / (len(self.steps) or 1)))
        elif shown is not None:
            changes.update(done=shown.done, of=shown.total, note=shown.message)
            changes.setdefault("progress", min(1.0, (head.step + shown.fraction) / (len(self.steps) or 1)))
        return attrs.evolve(
            head, revision=head.revision + 1, updated=self._executor.clock.now(), woken=False, **changes
        )

    def boundary(self, kind: str, snapshot: Snapshot | None = None, **fields: Any) -> Boundary:
        """The boundary of the next write: by default, one that leaves the execution where it is."""
        head = self.head
        values: dict[str, Any] = {
            "step": head.step,
            "name": self.step_name,
            "started": head.started,
            "ended": self._executor.clock.now(),
            "attempts": head.attempt,
            "next": head.step,
            "visit": head.visit,
            "iteration": head.iteration,
        }
        values.update(fields)
        if snapshot is not None:
            values.update(data=snapshot.data, blobs=snapshot.names, size=snapshot.size)
        return Boundary(seq=head.seq + 1, kind=kind, **values)

    # writes

    async def cross(
        self,
        boundary: Boundary,
        head: Head,
        *,
        snapshot: Snapshot | None = None,
        value: Any = MISSING,
        events: tuple[Event, ...] = (),
        take: tuple[int, ...] = (),
        durable: bool = True,
    ) -> None:
        """Cross a boundary. Durable on return, unless `durable` is false and boundaries are being coalesced."""
        head = attrs.evolve(head, seq=boundary.seq)
        if snapshot is not None:
            self._value = value
            self._boundary = boundary
            self._blobs = {name: self._blobs[name] for name in snapshot.names if name in self._blobs} | dict(snapshot.new)
            self._unsaved_blobs.update(snapshot.new)
        if boundary.visit != self.head.visit:
            self._clear = self._clear or self._entries_stored or self.ledger.stored
            self.ledger = Ledger()
            self.progress = None
        self._unsaved.append(boundary)
        self._events += events
        if durable or self._flush_is_due():
            await self.commit(head, take=take)
        else:
            self.head = attrs.evolve(head, revision=self.head.revision)

    def _flush_is_due(self) -> bool:
        if self._executor.config.durability == "step" or len(self._unsaved) >= UNSAVED_LIMIT:
            return True
        if self._executor.config.durability == "exit":
            return False
        return self._executor.clock.monotonic() - self._saved_at >= self._executor.config.checkpoint_interval

    async def commit(self, head: Head, *, take: tuple[int, ...] = (), events: tuple[Event, ...] = ()) -> None:
        """Make `head` and everything gathered so far durable, then tell what happened."""
        self._events += events
        save, told = self._build(head, take)
        await self.outbox.commit(save)
        self._tell(save, told)

    def submit(self, done: Callable[[Any], object]) -> None:
        """Hand over everything gathered so far, without waiting."""
        save, told = self._build(self.next(crashes=0), ())

        def saved(error: object) -> None:
            if error is None:
                self._tell(save, told)
            done(error)

        self.outbox.push(save, saved)

    async def save_progress(self) -> None:
        """Progress inside the step, durable on return."""
        if self.unsaved:
            await self.commit(self.next(crashes=0))
        else:
            await self.outbox.settle()

    def _build(self, head: Head, take: tuple[int, ...]) -> tuple[Save, list[Event]]:
        events, self._events = self._events, []
        put, drop = self.ledger.collect()
        clear, self._clear = self._clear, False
        self._entries_stored = bool(put) or (self._entries_stored and not clear)
        boundaries, blobs = self._gathered()
        keep_from, gone = None, ()
        for boundary in boundaries:
            if boundary.data is not None:
                keep_from, gone = self._snapshots.kept(boundary.seq, boundary.blobs)
        self.head = head
        self._saved_at = self._executor.clock.monotonic()
        save = Save(
            id=self.id,
            head=head,
            boundaries=boundaries,
            blobs=blobs,
            clear=clear,
            put=put,
            drop=() if clear else drop,
            take=take,
            keep_from=keep_from,
            drop_blobs=gone,
        )
        return save, events

    def _gathered(self) -> tuple[tuple[Boundary, ...], dict[str, bytes]]:
        """The boundaries not written yet; of those that were coalesced, only the last keeps its state."""
        boundaries, blobs = self._unsaved, self._unsaved_blobs
        if not boundaries:
            return (), {}
        self._unsaved, self._unsaved_blobs = [], {}
        if len(boundaries) == 1:
            return tuple(boundaries), blobs
        newest = max((n for n, b in enumerate(boundaries) if b.data is not None), default=-1)
        stripped = [
            b if n == newest or b.data is None else attrs.evolve(b, data=None, blobs=()) for n, b in enumerate(boundaries)
        ]
        return tuple(stripped), {name: blobs[name] for name in boundaries[newest].blobs if name in blobs}

    def _tell(self, save: Save, events: list[Event]) -> None:
        if self.on_progress is not None and save.head.crashes == 0:
            self.on_progress()
        if not self._executor.bus.active:
            return
        for boundary in save.boundaries:
            self.emit(EventType.CHECKPOINTED, step=boundary.name, data={"seq": boundary.seq, "kind": boundary.kind})
        if not save.boundaries and (save.put or save.drop):
            self.emit(EventType.CHECKPOINTED, data={"seq": save.head.seq, "kind": "progress"})
        for kind, fields in events:
            self.emit(kind, **fields)

    def emit(self, kind: EventType, **fields: Any) -> None:
        fields.setdefault("step", self.step_name)
        self._executor.emit(kind, self.id, **fields)
