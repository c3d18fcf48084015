"""Look at executions and store new ones, without running anything: what executor and client have in common.

Place in the life of an execution: start, and whenever somebody looks.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Awaitable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import attrs

from longrun import chance, codec, views
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ConfigError, CorruptDataError, ExecutionNotFoundError, InvalidStateError
from longrun.moves import Begun, begun, opening
from longrun.records import FOREVER, Checkpoint, Execution, ExecutionState, Progress, StepRecord, check_id
from longrun.registry import StepRegistry, Workflow
from longrun.snapshot import Snapshot, restore_tree, take_again, take_first
from longrun.stored import (
    TRACE,
    Boundary,
    Create,
    Definition,
    Head,
    Loaded,
    Query,
    creating,
    defining,
    shown_metadata,
    was_queued,
    was_waiting,
)
from longrun.stores.store import CheckpointStore
from longrun.stranded import living, may_be_stranded, stranded

if TYPE_CHECKING:
    from longrun.eta import Forecaster
    from longrun.telemetry import Watch

State = ExecutionState
UNCHANGED: Any = type("Unchanged", (), {"__repr__": lambda self: "..."})()
"""The default of `state=`: leave it as it is. `None` is a state like any other."""


LARGEST_PAGE = 1_000_000


class Desk:
    """Reads and creates executions in a store."""

    owner = ""
    """By which name executions are owned here, if any are."""

    def __init__(self, store: CheckpointStore, registry: StepRegistry | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.store = store
        self._known = registry
        self.clock = clock
        self._forecaster: Forecaster | None = None
        self.telemetry: Watch | None = None

    @property
    def forecaster(self) -> Forecaster:
        """What says when executions of this store will be done; it remembers what it learnt."""
        if self._forecaster is None:
            from longrun.eta import Forecaster  # here: whoever only runs steps does without

            self._forecaster = Forecaster(self.store, self.clock)
        return self._forecaster

    async def get(self, id: str) -> Execution:
        """What is known of one execution; `ExecutionNotFoundError` if there is none. One that cannot be read is shown
        as `list` shows it: blocked, with the reason."""
        try:
            loaded = await self.store.load(check_id(id))
        except CorruptDataError as error:
            return await self._unreadable(id, error)
        found = await self.view(loaded, self.live_progress(id))
        head, now = loaded.head, self.clock.now()
        if found.reason is None and may_be_stranded(head, now, self.owner):
            return attrs.evolve(found, reason=stranded(loaded.definition, head, await living(self.store), now))
        return found

    def live_progress(self, id: str) -> Progress | None:
        """How far the step in flight is, if it runs here."""
        return None

    async def _unreadable(self, id: str, error: CorruptDataError) -> Execution:
        query = Query(text=id, limit=500)
        while page := await self.store.find(query):
            for stored in page:
                if stored.definition.id == id:
                    head = stored.head
                    if not head.state.finished:
                        head = attrs.evolve(head, state=State.BLOCKED, reason=str(error))
                    return views.execution(stored.definition, head)
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        raise error

    async def view(self, loaded: Loaded, live: Progress | None = None) -> Execution:
        """The record of an execution with its forecast. `live` is progress that is not stored yet."""
        forecast = await self.forecaster.of(loaded.definition, loaded.head, live)
        return views.execution(loaded.definition, loaded.head, live, forecast)

    async def list(
        self,
        state: ExecutionState | str | Iterable[ExecutionState | str] | None = None,
        workflow: str | Iterable[str] | None = None,
        limit: int = 100,
        after: Execution | str | None = None,
        *,
        queue: str | None = None,
        parent_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        text: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> builtins.list[Execution]:
        """A page of executions, newest first, without their step names; fewer than `limit` if it is the last page.
        `after` is the last one of the page before: the `Execution`, which may have been deleted since, or its id."""
        query = Query(
            states=check_states(state),
            workflows=_names("workflow", workflow),
            queue=None if queue is None else check_name("queue", queue),
            parent_id=None if parent_id is None else check_id(parent_id),
            metadata=_filter(metadata),
            text=None if text is None else _text(text),
            created_after=_moment("created_after", created_after),
            created_before=_moment("created_before", created_before),
            after=None if after is None else await self._position(after),
            limit=check_limit(limit),
        )
        return [views.execution(stored.definition, stored.head) for stored in await self.store.find(query)]

    async def _position(self, after: Execution | str) -> tuple[float, str]:
        if isinstance(after, Execution):
            return after.start_time.timestamp(), after.id
        try:
            return (await self.store.load(check_id(after))).definition.created, after
        except CorruptDataError as error:
            return (await self._unreadable(after, error)).start_time.timestamp(), after

    async def count(self, query: Query | None = None) -> dict[ExecutionState, int]:
        """How many executions there are, by state."""
        return await self.store.count(query)

    async def history(self, id: str) -> builtins.list[Checkpoint]:
        """The checkpoints whose states are kept and can be read, oldest first."""
        loaded = await self.store.peek(check_id(id))
        found = []
        for seq, _ in loaded.kept:
            with contextlib.suppress(CorruptDataError):
                found.append(await self.store.checkpoint(id, seq))
        return [views.checkpoint(loaded.definition, *one, self._known) for one in found if one is not None]

    async def steps(self, id: str, *, after: int = 0, limit: int = 1000) -> builtins.list[StepRecord]:
        """The rows that every boundary left, oldest first, behind number `after`."""
        rows = await self.store.boundaries(check_id(id), after=after, limit=limit)
        if not rows and not await self.store.exists(id):
            raise ExecutionNotFoundError(id)
        return [views.step_record(row) for row in rows]

    async def delete(self, id: str) -> None:
        """Remove a finished execution with everything that belongs to it; also one of which nothing can be read.
        A child that is removed before its parent has ended is started anew if the parent asks for it again."""
        try:
            loaded = await self.store.peek(check_id(id))
        except CorruptDataError:
            if not (await self.store.delete([id]))[0]:
                raise
            return
        if not loaded.head.state.finished or not (await self.store.delete([id]))[0]:
            raise InvalidStateError(id, loaded.head.state, "delete", "cancel it first")

    # new executions

    def new(
        self,
        workflow: Workflow,
        state: Any,
        head: Head,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        queue: str = "default",
        priority: int = 0,
        parent_id: str | None = None,
    ) -> Create:
        """The write that creates an execution at its first step. `queue` and `priority` are checked already."""
        step = self._known.get(workflow.steps[0]) if self._known is not None and workflow.steps else None
        definition = defining(
            views.new_id() if id is None else check_id(id),
            workflow.name,
            workflow.version,
            workflow.steps,
            queue,
            priority,
            views.check_metadata(metadata),
            parent_id,
            head.updated,
        )
        kind, plain = (Any, True) if step is None else (step.state_type, step.takes_plain)
        return create(self._traced(definition), head, take_first(state, kind, head.seq, plain=plain))

    def _traced(self, definition: Definition, origin: str | None = None) -> Definition:
        trace = None if self.telemetry is None else self.telemetry.creating(definition, origin)
        if trace is None:
            return definition
        return attrs.evolve(definition, metadata={**definition.metadata, TRACE: trace})

    def store_new(self, made: Create) -> Awaitable[bool]:
        """Store a new execution; False if its id is taken."""
        return self.store.create(made) if self.telemetry is None else self._store_watched(made, self.telemetry)

    async def _store_watched(self, made: Create, telemetry: Watch) -> bool:
        created = False
        try:
            created = await self.store.create(made)
        finally:
            telemetry.created(made.definition, created)
        return created

    async def forked(
        self, id: str, checkpoint: Checkpoint | int | str | None, state: Any, new_id: str | None, *, owner: str | None
    ) -> Create:
        """The write that creates a copy of an execution as it was at a boundary. A copy of one that waits there waits
        as long, or for the same signal; one of a submission that is not due yet is due when that is, for any worker."""
        loaded = await self.store.load(check_id(id))
        seq = loaded.boundary.seq if checkpoint is None else sequence_number(id, checkpoint)
        found = await self.store.checkpoint(id, seq)
        if found is None:
            raise ConfigError("checkpoint", checkpoint, "its state is not kept; history() lists those that are")
        boundary, blobs = found
        kind = views.state_type(loaded.definition.steps, boundary, self._known)
        head = self._head_of_copy(loaded.head if seq == loaded.boundary.seq else None, owner)
        head = attrs.evolve(head, step=boundary.next, iteration=boundary.iteration)
        definition = attrs.evolve(
            loaded.definition,
            id=views.new_id() if new_id is None else check_id(new_id),
            created=head.updated,
            metadata={**shown_metadata(loaded.definition.metadata), "forked_from": f"{id}@{seq}"},
            parent_id=None,
        )
        definition = self._traced(definition, loaded.definition.metadata.get(TRACE))
        name = boundary.name if head.step >= len(definition.steps) else None
        if state is UNCHANGED:
            snapshot = take_again(restore_tree(boundary.data or b"null", blobs, bool(boundary.blobs)), kind, head.seq)
        else:
            snapshot = take_first(state, kind, head.seq, plain=False)
        return create(definition, head, snapshot, name)

    def _head_of_copy(self, origin: Head | None, owner: str | None) -> Head:
        """The first head of a copy. `origin` is that of the execution it is made of, if it stands at the same place."""
        if origin is not None and self._is_delayed(origin):
            return self.first_head(State.INITIALIZED, due=origin.due)
        if origin is not None and _waits(origin):
            return attrs.evolve(self.first_head(State.WAITING, due=origin.due), signal=origin.signal)
        return self.first_head(State.INITIALIZED) if owner is None else self.begun()

    def _is_delayed(self, head: Head) -> bool:
        """Whether it was submitted for a time that has not come."""
        queued = head.state is State.INITIALIZED or was_queued(head)
        return queued and head.due is not None and head.due > self.clock.now()

    def first_head(self, state: ExecutionState, *, due: float | None = None) -> Head:
        """That of an execution which nobody owns yet."""
        return Head(state=state, fence=random_start(), revision=1, seq=1, updated=self._now(), due=due)

    def begun(self) -> Begun:
        """The first head of an execution that runs here at once."""
        return begun(random_start(), self.owner, self._now())

    def _now(self) -> float:
        """To the microsecond: every store gives it back as it is."""
        return round(self.clock.now() * 1e6) / 1e6


def _waits(head: Head) -> bool:
    """Whether it is parked, or was when it was paused or blocked."""
    return head.state is State.WAITING or (was_waiting(head) and not was_queued(head))


def random_start() -> int:
    """Where an execution's fencing numbers begin. Were it always the same, an owner that slept through the deletion of
    its execution and the creation of another one with the same id could be taken for the new one's owner."""
    return chance.bits(48)


def create(definition: Definition, head: Head, snapshot: Snapshot, name: str | None = None) -> Create:
    """A new execution at the position of `head`. Behind the last step, `name` is the one whose state it begins with."""
    if type(head) is Begun and not snapshot.names:
        return creating(definition, head, opening(head, snapshot.data), snapshot.new)
    boundary = Boundary(
        seq=head.seq,
        kind="start",
        step=head.step,
        name=name,
        started=head.updated,
        ended=head.updated,
        next=head.step,
        visit=head.visit,
        iteration=head.iteration,
        data=snapshot.data,
        blobs=snapshot.names,
        size=snapshot.size,
    )
    return creating(definition, head, boundary, snapshot.new)


def sequence_number(id: str, checkpoint: Checkpoint | int | str) -> int:
    """The number that a checkpoint, its id or the number itself means."""
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.seq
    try:
        text = str(checkpoint).removeprefix(f"{id}@")
        if not isinstance(checkpoint, bool) and text.isdecimal():
            return int(text)
    except ValueError:  # thousands of digits
        checkpoint = "a very long number"
    raise ConfigError("checkpoint", checkpoint, "give a Checkpoint, its id, or its number")


def check_states(state: Any) -> frozenset[ExecutionState] | None:
    if state is None:
        return None
    wanted = [state] if isinstance(state, str) else list(state)
    try:
        return frozenset(ExecutionState(one) for one in wanted)
    except ValueError:
        raise ConfigError("state", state, f"give one of {', '.join(s.value for s in ExecutionState)}") from None


def check_name(what: str, name: object) -> str:
    if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable():
        raise ConfigError(what, name, "give a printable string of 1 to 200 characters")
    return name


def check_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LARGEST_PAGE:
        raise ConfigError("limit", limit, f"give a whole number from 1 to {LARGEST_PAGE:,}")
    return limit


def check_timeout(seconds: object) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigError("timeout", seconds, "give a number of seconds from 0 on, or None")
    return seconds


def _names(what: str, names: object) -> frozenset[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = [names]
    return frozenset([check_name(what, name) for name in names])


def _filter(metadata: object) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError("metadata", metadata, "give a dict of the values that are looked for")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not views.is_plain(value):
            raise ConfigError("metadata", {key: value}, "look for JSON values, by names that are strings")
    return dict(metadata or {})


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise ConfigError("text", text, "give the text that is looked for")
    return text


def _moment(what: str, moment: object) -> float | None:
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise ConfigError(what, moment, "give a datetime")
    return moment.timestamp()


def check_priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 1_000_000:
        raise ConfigError("priority", priority, "give a whole number from -1,000,000 to 1,000,000")
    return priority


def check_delay(delay: Any) -> float | None:
    if delay is None:
        return None
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError("delay", delay, "give seconds of at least 0, or a timedelta")
    return float(min(seconds, FOREVER))


def encode_payload(value: Any, path: str) -> bytes:
    """A signal's payload, or a state given from outside, as plain data."""
    return codec.encode(value, Any, path=path)
