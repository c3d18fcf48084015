"""The owner's copy of an execution: where it stands, its state, its progress inside the step, and every write of it.

Place in the life of an execution: checkpoint, event. The book alone builds writes, so that their revisions have no gap,
and tells what happened once the store has acknowledged it. With coalesced durability it gathers boundaries here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import attrs

from longrun import codec, views
from longrun.events import EventType
from longrun.items import LOOK_EVERY
from longrun.ledger import Ledger
from longrun.loops import Waiter
from longrun.moves import Move, Passing, ending, is_passing, passing
from longrun.outbox import QUIET, Outbox
from longrun.port import StepInfo
from longrun.records import Progress
from longrun.registry import Step
from longrun.snapshot import Snapshot, Snapshots, decode_state, restore_tree
from longrun.stored import (
    EMPTY,
    TRACE,
    Boundary,
    Definition,
    Head,
    Loaded,
    Save,
    completed,
    copied,
    moved,
    named,
    saving,
    shown_metadata,
)

if TYPE_CHECKING:
    from longrun.crew import Crew

UNSAVED_LIMIT = 4096
"""So many boundaries are gathered at most, whatever the durability: memory is bounded."""
MISSING: Any = object()
Noted = tuple[Mapping[str, bytes], tuple[str, ...]]
"""What a ledger has to be saved: entries to put, and keys to drop."""
NOTHING: Noted = (EMPTY, ())
Given = tuple[tuple[str, ...] | None, str]
"""Steps and version that the next write gives to what was submitted by name."""
KNOWN: Given = (None, "1")

Event = tuple[EventType, dict[str, Any]]
"""An event to be told when the write that makes it true is durable: its type and fields."""


class Book:
    """One owned execution, as of the newest write handed over."""

    # What stands here costs nothing until it is set.
    progress: Progress | None = None
    result: Any = MISSING
    """Once its end is durable: the object that the last step returned."""
    on_progress: Callable[[], object] | None = None
    """Called when durable progress has cleared the count of crashes."""
    _ledger: Ledger | None = None
    _unsaved: list[Boundary] | None = None
    _unsaved_blobs: Mapping[str, bytes] = EMPTY
    _events: tuple[Event, ...] = ()
    _clear = False
    _breathe_at = _saved_at = 0.0

    def __init__(self, executor: Crew, loaded: Loaded, value: Any = MISSING) -> None:
        self._executor = executor
        self._clock = executor.clock
        self._each_step = executor.config.durability == "step"
        self.definition, self._given = self._with_steps(loaded.definition)
        self.trace: str | None = self.definition.metadata.get(TRACE)
        if self.trace is not None:
            self.definition = attrs.evolve(self.definition, metadata=shown_metadata(self.definition.metadata))
        self.id = loaded.definition.id
        self.steps = self.definition.steps
        self.head = loaded.head
        if loaded.entries:
            self._ledger = Ledger(loaded.entries)
        self._loop, self._bus = executor.loop, executor.bus
        self.outbox = Outbox(executor, self.id, executor.loop, self)
        self.value = value
        """What the last step returned, until the next has received it."""
        self._crossed: Boundary | Move = loaded.boundary
        self._blobs = loaded.blobs
        self._snapshots = Snapshots(executor.config.retention.history)
        self._snapshots.restore(loaded.boundary.data or b"null", loaded.blobs, loaded.kept)
        if not self._each_step:
            self._saved_at = self._clock.monotonic()

    def _with_steps(self, definition: Definition) -> tuple[Definition, Given]:
        """What was submitted by the name of its workflow alone gets its steps from whoever first runs it."""
        registry = self._executor.registry
        if definition.steps or not registry.knows(definition.workflow):
            return definition, KNOWN
        workflow = registry.resolve(definition.workflow)
        return named(definition, workflow.steps, workflow.version), (workflow.steps, workflow.version)

    @property
    def _boundary(self) -> Boundary:
        """The one whose state the execution has now."""
        last = self._crossed
        return last.boundary if isinstance(last, Move) else last

    @property
    def step_name(self) -> str | None:
        return self.steps[self.head.step] if self.head.step < len(self.steps) else None

    @property
    def last_step(self) -> str | None:
        """The name of the step whose end left the execution where it is."""
        return self._boundary.name

    @property
    def ledger(self) -> Ledger:
        """The progress inside the step in flight. Most steps note none: it is made when it is first asked for."""
        if self._ledger is None:
            self._ledger = Ledger()
        return self._ledger

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved) or (self._ledger is not None and self._ledger.dirty)

    @property
    def state_type(self) -> Any:
        """The annotation of the state that the execution has now."""
        return views.state_type(self.steps, self._boundary, self._executor.registry)

    def type_of(self, index: int, before: Step) -> Any:
        """The annotation of the state that a step receives; if there is none, or it is not known here, that of what
        the step before it returns."""
        if index >= len(self.steps):
            return before.result_type
        step = self._executor.registry.by_name.get(self.steps[index])
        return codec.for_others(before.result_type) if step is None else step.state_type

    def state(self, annotation: Any) -> Any:
        """What a step receives: the object just returned, once; after that always decoded anew."""
        value, self.value = self.value, MISSING
        return self.stored_state(annotation) if value is MISSING or self._executor.strict else value

    def stored_state(self, annotation: Any) -> Any:
        boundary = self._boundary
        return decode_state(boundary.data or b"null", self._blobs, bool(boundary.blobs), annotation)

    def step_info(self, step: str) -> StepInfo:
        """Where the step in flight is, with what ended the wait before it."""
        head, definition = self.head, self.definition
        woken = self._ledger.entries.get("wait") if self._ledger is not None else None
        wait = {} if woken is None else codec.decode(woken)
        return StepInfo(
            execution_id=self.id,
            workflow=definition.workflow,
            step=step,
            step_index=head.step,
            attempt=head.attempt + 1,
            iteration=head.iteration,
            visit=head.visit,
            metadata=dict(definition.metadata),
            signal=wait.get("payload"),
            timed_out=wait.get("timed_out", False),
        )

    # the pieces of a write

    def snapshot(self, value: Any, annotation: Any, path: str = "state") -> Snapshot:
        return self._snapshots.take(value, annotation, self.head.seq + 1, path)

    def snapshot_again(self) -> Snapshot:
        """Of the state that is stored, as it is."""
        last = self._boundary
        tree = restore_tree(last.data or b"null", self._blobs, bool(last.blobs))
        return self._snapshots.take_tree(tree, self.head.seq + 1)

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
        """Move on to the head after `changes`."""
        step = self.head.step
        self.head = head = copied(self.head)
        if "step" in changes:
            head.done, head.of, head.note = 0, None, None
            head.progress = min(1.0, changes["step"] / (len(self.steps) or 1))
        elif (shown := self.progress) is not None:
            head.done, head.of, head.note = shown.done, shown.total, shown.message
            head.progress = min(1.0, (step + shown.fraction) / (len(self.steps) or 1))
        head.revision, head.woken = revision, False
        for name, value in changes.items():
            setattr(head, name, value)
        return head

    # writes: handed over at once, and durable when the waiter that is returned has been awaited

    async def cross(
        self,
        boundary: Boundary,
        changes: dict[str, Any],
        *,
        snapshot: Snapshot | None = None,
        value: Any = MISSING,
        events: tuple[Event, ...] = (),
        put: tuple[str, bytes] | None = None,
        take: tuple[int, ...] = (),
    ) -> None:
        """Cross a boundary; durable on return. `put` is the entry that the visit behind it begins with."""
        self._note(boundary, snapshot, value, events)
        if put is not None:
            self.ledger.record(*put)
        changes["seq"] = boundary.seq
        changes["updated"] = boundary.ended
        await self.commit(changes, take=take)

    def go_on(self, boundary: Boundary, snapshot: Snapshot, value: Any) -> Awaitable[Any] | None:
        """Cross the boundary between a step and the next: what to await, or None while boundaries are coalesced."""
        events: tuple[Event, ...] = ()
        if self._bus.active:
            events = ((EventType.STEP_COMPLETED, {"step": boundary.name, "attempt": boundary.attempts}),)
        self._note(boundary, snapshot, value, events)
        self.head = head = moved(self.head, boundary, boundary.next / len(self.steps))
        if not (self._each_step or self._flush_is_due()):
            return self._breath()
        head.revision += 1
        waiter = self._loop.waiter()
        self._push(NOTHING, (), waiter)
        return waiter

    def pass_on(self, value: Any) -> Waiter | None:
        """Cross the boundary behind the step in flight, to the next in the list or to the end, in the smallest write
        there is: what to await. The state must be one that no annotation wants to look at. None if it takes more than
        that, or somebody is to be told: then nothing has happened."""
        head, ledger, steps = self.head, self._ledger, self.steps
        if not self._each_step or self._given is not KNOWN or self._bus.active or (ledger and ledger.stored):
            return None
        if type(head) is not Passing and not is_passing(head):
            return None
        ends = head.step + 1 == len(steps)
        taken = self._snapshots.take_flat(value, head.seq + 1, ends)
        if taken is None:
            return None
        make = ending if ends else passing
        move = make(self.id, head, steps[head.step], self._clock.now(), taken[0], len(steps), taken[1])
        self.value, self._crossed, self.head, self.progress = value, move, move.head, None
        if ledger is not None and ledger.used:
            self._ledger = None
        waiter = self._loop.waiter()
        self.outbox.push(move, QUIET if self.on_progress is None else (), waiter)
        return waiter

    async def end(self, boundary: Boundary, snapshot: Snapshot, value: Any, events: tuple[Event, ...]) -> None:
        """Cross the last boundary of an execution that has come to its end; durable on return."""
        self._note(boundary, snapshot, value, events)
        self.head = completed(self.head, boundary, self.head.revision + 1)
        waiter = self._loop.waiter()
        self._push(NOTHING, (), waiter)
        if (error := await waiter) is not None:
            raise error

    def _note(self, boundary: Boundary, snapshot: Snapshot | None, value: Any, events: tuple[Event, ...]) -> None:
        """Take a boundary into the next write, and what was true of the visit before it out of memory."""
        if snapshot is not None:
            self.value = value
            self._crossed = boundary
            if snapshot.names or self._blobs:
                known = self._blobs
                self._blobs = {name: known[name] for name in snapshot.names if name in known} | dict(snapshot.new)
                self._unsaved_blobs = {**self._unsaved_blobs, **snapshot.new}
        if boundary.visit != self.head.visit:
            if self._ledger is not None and self._ledger.used:
                self._clear = self._clear or self._ledger.stored
                self._ledger = None
            self.progress = None
        if self._unsaved is None:
            self._unsaved = []
        self._unsaved.append(boundary)
        if self._bus.active:
            data = {"seq": boundary.seq, "kind": boundary.kind}
            self._events += ((EventType.CHECKPOINTED, {"step": boundary.name, "data": data}), *events)

    def _breath(self) -> Awaitable[None] | None:
        """The steps themselves may never wait for anything: now and then it is the turn of others."""
        if time.monotonic() < self._breathe_at:
            return None
        self._breathe_at = time.monotonic() + LOOK_EVERY
        return anyio.lowlevel.checkpoint()

    def _flush_is_due(self) -> bool:
        if self._unsaved is not None and len(self._unsaved) >= UNSAVED_LIMIT:
            return True
        config = self._executor.config
        if config.durability == "exit":
            return False
        return self._clock.monotonic() - self._saved_at >= config.checkpoint_interval

    async def commit(
        self, changes: dict[str, Any], *, take: tuple[int, ...] = (), events: tuple[Event, ...] = ()
    ) -> None:
        """Make `changes` and everything gathered so far durable, then tell what happened."""
        if events and self._bus.active:
            self._events += events
        error = await self.write(changes, take)
        if error is not None:
            raise error

    def write(self, changes: dict[str, Any], take: tuple[int, ...] = ()) -> Waiter:
        """Hand over `changes` and everything gathered so far; the waiter gets None, or why it never will be durable."""
        waiter = self._loop.waiter()
        self._hand_over(changes, take, waiter)
        return waiter

    def submit(self, done: Callable[[Any], object]) -> None:
        """Hand over everything gathered so far, without waiting."""
        self._hand_over({"crashes": 0}, (), done)

    def take(self, numbers: tuple[int, ...], done: Callable[[Any], object]) -> None:
        """Take messages that change nothing, without waiting."""
        self._hand_over({}, numbers, done)

    def _hand_over(self, changes: dict[str, Any], take: tuple[int, ...], done: Callable[[Any], object]) -> None:
        if "updated" not in changes:
            changes["updated"] = self._clock.now()
        ledger = self._ledger
        noted = ledger.collect() if ledger is not None and ledger.used else NOTHING
        self._next(changes, self.head.revision + 1)
        self._push(noted, take, done)

    async def save_progress(self) -> None:
        """Progress inside the step, durable on return."""
        if self.unsaved:
            await self.commit({"crashes": 0})
        elif (waiter := self.outbox.settled()) is not None:
            error = await waiter
            if error is not None:
                raise error

    def _push(self, noted: Noted, take: tuple[int, ...], done: Callable[[Any], object]) -> None:
        """Hand over the head as it is now, with everything gathered so far and what the ledger has `noted`."""
        (put, drop), head = noted, self.head
        clear, self._clear = self._clear, False
        boundaries, blobs = tuple(self._unsaved or ()), self._unsaved_blobs
        self._unsaved, self._unsaved_blobs = None, EMPTY
        if len(boundaries) > 1:
            boundaries, blobs = _gathered(boundaries, blobs)
        keep_from, gone = self._snapshots.keep(boundaries, head.owner is None)
        if not self._each_step:
            self._saved_at = self._clock.monotonic()
        given, self._given = self._given, KNOWN
        if clear:
            drop = ()
        save = saving(self.id, head, boundaries, blobs, clear, put, drop, take, keep_from, gone, *given)
        told, self._events = self._events, ()
        self.outbox.push(save, told, done)

    # events

    def tell(self, save: Save, events: tuple[Event, ...]) -> None:
        if self.on_progress is not None and save.head.crashes == 0:
            self.on_progress()
        if not save.boundaries and (save.put or save.drop) and self._bus.active:
            self.emit(EventType.CHECKPOINTED, data={"seq": save.head.seq, "kind": "progress"})
        for kind, fields in events:
            self.emit(kind, **fields)

    def tell_in_order(self, kind: EventType, **fields: Any) -> None:
        """Tell something that needs no write of its own: at once, or behind what still has to become durable."""
        if self._events:
            self._events += ((kind, {"step": self.step_name, **fields}),)
        else:
            self.emit(kind, **fields)

    def tell_if_quiet(self, kind: EventType, **fields: Any) -> None:
        """Tell something that may as well be left out while older events wait for their write."""
        if not self._events:
            self.emit(kind, **fields)

    def emit(self, kind: EventType, **fields: Any) -> None:
        fields.setdefault("step", self.step_name)
        self._executor.emit(kind, self.id, **fields)


def _gathered(
    boundaries: tuple[Boundary, ...], blobs: Mapping[str, bytes]
) -> tuple[tuple[Boundary, ...], Mapping[str, bytes]]:
    """Of boundaries that were coalesced, only the last keeps its state."""
    newest = max((n for n, b in enumerate(boundaries) if b.data is not None), default=-1)
    stripped = [
        b if n == newest or b.data is None else attrs.evolve(b, data=None, blobs=()) for n, b in enumerate(boundaries)
    ]
    return tuple(stripped), {name: blobs[name] for name in boundaries[newest].blobs if name in blobs}
