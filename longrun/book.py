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
from longrun.stored import Boundary, Definition, Head, Loaded, Save

if TYPE_CHECKING:
    from longrun.crew import Crew

UNSAVED_LIMIT = 4096
"""So many boundaries are gathered at most, whatever the durability: memory is bounded."""
MISSING: Any = object()
NOTHING: tuple[dict[str, bytes], tuple[str, ...]] = ({}, ())

Event = tuple[EventType, dict[str, Any]]
"""An event to be told when the write that makes it true is durable: its type and fields."""


class Book:
    """One owned execution, as of the newest write handed over."""

    def __init__(self, executor: Crew, loaded: Loaded, value: Any = MISSING) -> None:
        self._executor = executor
        self._clock = executor.clock
        self._durability = executor.config.durability
        self._interval = executor.config.checkpoint_interval
        self.definition, self._given_steps = self._with_steps(loaded.definition)
        self.id = loaded.definition.id
        self.steps = self.definition.steps
        self.head = loaded.head
        self._values = attrs.asdict(loaded.head, recurse=False)
        self.ledger = Ledger(loaded.entries)
        self.outbox = Outbox(executor, self.id, executor.loop)
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
        self._saved_at = self._clock.monotonic()
        self.on_progress: Callable[[], object] | None = None
        """Called when durable progress has cleared the count of crashes."""

    def _with_steps(self, definition: Definition) -> tuple[Definition, tuple[str, ...] | None]:
        """What was submitted by the name of its workflow alone gets its steps from whoever first runs it."""
        registry = self._executor.registry
        if definition.steps or not registry.knows(definition.workflow):
            return definition, None
        steps = registry.resolve(definition.workflow).steps
        return attrs.evolve(definition, steps=steps, total=len(steps)), steps

    def now(self) -> float:
        return self._clock.now()

    @property
    def step_name(self) -> str | None:
        return self.steps[self.head.step] if self.head.step < len(self.steps) else None

    @property
    def last_step(self) -> str | None:
        """The name of the step whose end left the execution where it is."""
        return self._boundary.name

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

    def boundary(self, kind: str, snapshot: Snapshot | None = None, **fields: Any) -> Boundary:
        """The next boundary: by default, one that leaves the execution where it is."""
        head = self.head
        values: dict[str, Any] = {
            "step": head.step,
            "name": self.step_name,
            "started": head.started,
            "ended": self._clock.now(),
            "attempts": head.attempt,
            "next": head.step,
            "visit": head.visit,
            "iteration": head.iteration,
        }
        values.update(fields)
        if snapshot is not None:
            values.update(data=snapshot.data, blobs=snapshot.names, size=snapshot.size)
        return Boundary(seq=head.seq + 1, kind=kind, **values)

    def _next(self, changes: dict[str, Any], revision: int) -> Head:
        """Move on to the head after `changes`; not with `attrs.evolve`, which is slow, and this is done every step."""
        values = self._values
        if "step" in changes:
            values["done"], values["of"], values["note"] = 0, None, None
            values["progress"] = min(1.0, changes["step"] / (len(self.steps) or 1))
        elif (shown := self.progress) is not None:
            values["done"], values["of"], values["note"] = shown.done, shown.total, shown.message
            values["progress"] = min(1.0, (self.head.step + shown.fraction) / (len(self.steps) or 1))
        values["revision"], values["woken"] = revision, False
        values.update(changes)
        self.head = Head(**values)
        return self.head

    # writes

    async def cross(
        self,
        boundary: Boundary,
        changes: dict[str, Any],
        *,
        snapshot: Snapshot | None = None,
        value: Any = MISSING,
        events: tuple[Event, ...] = (),
        take: tuple[int, ...] = (),
        durable: bool = True,
    ) -> None:
        """Cross a boundary. Durable on return, unless `durable` is false and boundaries are being coalesced."""
        if snapshot is not None:
            self._value = value
            self._boundary = boundary
            if snapshot.names or self._blobs:
                known = self._blobs
                self._blobs = {name: known[name] for name in snapshot.names if name in known} | dict(snapshot.new)
                self._unsaved_blobs.update(snapshot.new)
        if boundary.visit != self.head.visit:
            if self.ledger.used:
                self._clear = self._clear or self.ledger.stored
                self.ledger = Ledger()
            self.progress = None
        self._unsaved.append(boundary)
        if self._executor.bus.active:
            data = {"seq": boundary.seq, "kind": boundary.kind}
            self._events.append((EventType.CHECKPOINTED, {"step": boundary.name, "data": data}))
            self._events += events
        changes["seq"] = boundary.seq
        changes["updated"] = boundary.ended
        if durable or self._flush_is_due():
            await self.commit(changes, take=take)
        else:
            self._next(changes, self.head.revision)

    def _flush_is_due(self) -> bool:
        if self._durability == "step" or len(self._unsaved) >= UNSAVED_LIMIT:
            return True
        if self._durability == "exit":
            return False
        return self._clock.monotonic() - self._saved_at >= self._interval

    async def commit(
        self, changes: dict[str, Any], *, take: tuple[int, ...] = (), events: tuple[Event, ...] = ()
    ) -> None:
        """Make `changes` and everything gathered so far durable, then tell what happened."""
        if events and self._executor.bus.active:
            self._events += events
        changes.setdefault("updated", self._clock.now())
        save, told = self._build(changes, take)
        await self.outbox.commit(save)
        self._tell(save, told)

    def submit(self, done: Callable[[Any], object]) -> None:
        """Hand over everything gathered so far, without waiting."""
        self._hand_over({"crashes": 0}, (), done)

    def take(self, numbers: tuple[int, ...], done: Callable[[Any], object]) -> None:
        """Take messages that change nothing, without waiting."""
        self._hand_over({}, numbers, done)

    def _hand_over(self, changes: dict[str, Any], take: tuple[int, ...], done: Callable[[Any], object]) -> None:
        changes["updated"] = self._clock.now()
        save, told = self._build(changes, take)

        def saved(error: object) -> None:
            if error is None:
                self._tell(save, told)
            done(error)

        self.outbox.push(save, saved)

    async def save_progress(self) -> None:
        """Progress inside the step, durable on return."""
        if self.unsaved:
            await self.commit({"crashes": 0})
        else:
            await self.outbox.settle()

    def _build(self, changes: dict[str, Any], take: tuple[int, ...]) -> tuple[Save, list[Event]]:
        put, drop = self.ledger.collect() if self.ledger.used else NOTHING
        head = self._next(changes, self.head.revision + 1)
        events, self._events = self._events, []
        clear, self._clear = self._clear, False
        boundaries, blobs = self._gathered()
        for boundary in boundaries:
            if boundary.data is not None:
                self._snapshots.kept(boundary.seq, boundary.blobs)
        keep_from, gone = self._snapshots.let_go(exactly=head.owner is None)
        self._saved_at = self._clock.monotonic()
        steps, self._given_steps = self._given_steps, None
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
            steps=steps,
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
            b if n == newest or b.data is None else attrs.evolve(b, data=None, blobs=())
            for n, b in enumerate(boundaries)
        ]
        return tuple(stripped), {name: blobs[name] for name in boundaries[newest].blobs if name in blobs}

    # events

    def _tell(self, save: Save, events: list[Event]) -> None:
        if self.on_progress is not None and save.head.crashes == 0:
            self.on_progress()
        if not save.boundaries and (save.put or save.drop) and self._executor.bus.active:
            self.emit(EventType.CHECKPOINTED, data={"seq": save.head.seq, "kind": "progress"})
        for kind, fields in events:
            self.emit(kind, **fields)

    def tell_in_order(self, kind: EventType, **fields: Any) -> None:
        """Tell something that needs no write of its own: at once, or behind what still has to become durable."""
        if self._events:
            self._events.append((kind, {"step": self.step_name, **fields}))
        else:
            self.emit(kind, **fields)

    def tell_if_quiet(self, kind: EventType, **fields: Any) -> None:
        """Tell something that may as well be left out while older events wait for their write."""
        if not self._events:
            self.emit(kind, **fields)

    def emit(self, kind: EventType, **fields: Any) -> None:
        fields.setdefault("step", self.step_name)
        self._executor.emit(kind, self.id, **fields)
