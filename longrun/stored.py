"""What a store keeps of an execution, and the writes that change it. Plain records: no I/O, no user types.

Place in the life of an execution: between the runner, which builds these, and the stores, which keep them.
States, memos and payloads are opaque `bytes` here; times are seconds since the epoch.

An execution is stored as

- one `Definition`, written once: its steps and whatever else never changes;
- one `Head`, small, replaced by every write: where it is and who owns it;
- one `Boundary` a checkpoint, for its life; the newest few carry the state (`data`, with large values moved out
  into `blobs`, which several boundaries can share, so that what did not change is not written again);
- `entries`, the progress inside the step in flight (cursors, memos, branches, `local`), gone when the step ends;
- `messages`, sent by anybody: signals and control requests, kept until the owner takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import Factory, define, evolve, field, frozen

from longrun.records import ExecutionState

EMPTY: Mapping[str, Any] = MappingProxyType({})
TRACE = "longrun.trace"
"""The name in an execution's metadata of its trace context, kept by telemetry. Users neither see nor search it."""
QUEUE_WORKFLOW = "~queue"
"""The workflow of the records that `queues` keeps."""
REPLICA_WORKFLOW = "longrun.replica"
"""That of what a pair of stores keeps in both of them."""
REPLICA_RECORD = "longrun.replica.term"
"""The first of these. Seen through the pair there is none."""
WITNESS_WORKFLOW = "longrun.witness"
"""That of what a pair keeps in a third one."""
RECORDS = frozenset({QUEUE_WORKFLOW, REPLICA_WORKFLOW, WITNESS_WORKFLOW})
"""Such records are no executions: listings and counts leave them out, and no copy carries them. All are stored as
paused, and as made long ago, so that they come last in a listing."""

KINDS = frozenset(
    {"start", "step", "repeat", "goto", "sleep", "wait", "finish", "fail"}
    | {"cancel", "pause", "resume", "retry", "state", "block"}
)
"""What makes a boundary: a step that ended, or something that was asked for."""

# Head, Boundary and Save are built anew with every step, Definition, Create and Loaded with every start. Nobody changes
# one; but to freeze it would double the price of making it.


@define(kw_only=True)
class Definition:
    """What never changes, but for `steps`, `total` and `version` of what was submitted by name. A listing leaves out
    `steps`."""

    id: str
    workflow: str
    version: str = "1"
    steps: tuple[str, ...] = field(default=(), repr=False)
    total: int = 0
    queue: str = "default"
    priority: int = 0
    metadata: Mapping[str, Any] = EMPTY
    parent_id: str | None = None
    created: float


def defining(
    id: str,
    workflow: str,
    version: str,
    steps: tuple[str, ...],
    queue: str,
    priority: int,
    metadata: Mapping[str, Any],
    parent_id: str | None,
    created: float,
) -> Definition:
    """A definition of all these, in their order. Written out, as `copied` is."""
    new: Definition = object.__new__(Definition)
    new.id, new.workflow, new.version, new.steps, new.total = id, workflow, version, steps, len(steps)
    new.queue, new.priority, new.metadata = queue, priority, metadata
    new.parent_id, new.created = parent_id, created
    return new


@define(kw_only=True)
class Head:
    """Where an execution is. `fence` grows by one with every claim, `revision` by one with every write of its owner."""

    state: ExecutionState
    fence: int = 0
    revision: int = 0
    owner: str | None = None
    seq: int = 0
    """The number of the newest boundary."""
    step: int = 0
    """The index of the step in flight or to run next."""
    visit: int = 1
    """How many step visits there were, this one included."""
    iteration: int = 0
    attempt: int = 0
    """Failed attempts of this visit."""
    started: float | None = None
    """When this visit of the step began."""
    updated: float
    ended: float | None = None
    due: float | None = None
    """Nothing happens before: a sleep, a delay, a wait's deadline, a back-off."""
    signal: str | None = None
    """The signal a waiting execution waits for."""
    woken: bool = False
    """Set by the store when a message arrives for an execution that nobody owns: it is due, whatever `due` says."""
    hold: bool = False
    crashes: int = 0
    """Unclean deaths of its owner since the last durable progress."""
    error: str | None = field(default=None, repr=False)
    reason: str | None = None
    progress: float = 0.0
    done: float = 0
    of: float | None = None
    note: str | None = field(default=None, repr=False)


def copied(head: Head) -> Head:
    """The same head again, to be changed. Written out: `attrs.evolve` takes several times as long, and there is one for
    every step."""
    new: Head = object.__new__(Head)
    new.state, new.fence, new.revision, new.owner = head.state, head.fence, head.revision, head.owner
    new.seq, new.step, new.visit, new.iteration = head.seq, head.step, head.visit, head.iteration
    new.attempt, new.started, new.updated, new.ended = head.attempt, head.started, head.updated, head.ended
    new.due, new.signal, new.woken, new.hold = head.due, head.signal, head.woken, head.hold
    new.crashes, new.error, new.reason, new.progress = head.crashes, head.error, head.reason, head.progress
    new.done, new.of, new.note = head.done, head.of, head.note
    return new


@define(kw_only=True)
class Boundary:
    """One checkpoint: what ended, and where the execution stood after it."""

    seq: int
    kind: str
    """One of `KINDS`."""
    step: int
    """The index of the step that ended here (for a start: 0)."""
    name: str | None = None
    started: float | None = None
    ended: float
    attempts: int = 0
    error: str | None = field(default=None, repr=False)
    next: int
    """The index of the next step: the checkpoint's position."""
    visit: int = 1
    iteration: int = 0
    data: bytes | None = field(default=None, repr=False)
    """The state; None once retention has removed it, or where boundaries were coalesced and only the last has it."""
    blobs: tuple[str, ...] = ()
    """Names of the blobs that `data` refers to."""
    size: int = 0


def moved(head: Head, boundary: Boundary, progress: float) -> Head:
    """The head behind a boundary at which a step ended and the next visit begins. Written out, as `copied` is."""
    new: Head = object.__new__(Head)
    new.state, new.fence, new.revision, new.owner = head.state, head.fence, head.revision, head.owner
    new.seq, new.step, new.visit, new.iteration = boundary.seq, boundary.next, boundary.visit, boundary.iteration
    new.started = new.updated = boundary.ended
    new.ended, new.signal, new.hold, new.reason = head.ended, head.signal, head.hold, head.reason
    new.due = new.error = new.of = new.note = None
    new.attempt = new.crashes = new.done = 0
    new.woken, new.progress = False, progress
    return new


def completed(head: Head, boundary: Boundary, revision: int) -> Head:
    """The head behind the last boundary of an execution that has come to its end. Written out, as `copied` is."""
    new: Head = object.__new__(Head)
    new.state, new.fence, new.revision, new.owner = ExecutionState.COMPLETED, head.fence, revision, None
    new.seq, new.step, new.visit, new.iteration = boundary.seq, boundary.next, boundary.visit, 0
    new.updated = new.ended = boundary.ended
    new.signal, new.hold, new.reason = head.signal, head.hold, head.reason
    new.started = new.due = new.error = new.of = new.note = None
    new.attempt = new.crashes = new.done = 0
    new.woken, new.progress = False, 1.0
    return new


def crossed(
    head: Head,
    kind: str,
    name: str | None,
    ended: float,
    to: int,
    iteration: int,
    data: bytes,
    blobs: tuple[str, ...],
    size: int,
) -> Boundary:
    """The boundary at which the step in flight ended and a new visit begins. Written out, as `copied` is."""
    new: Boundary = object.__new__(Boundary)
    new.seq, new.kind, new.step, new.name = head.seq + 1, kind, head.step, name
    new.started, new.ended, new.attempts, new.error = head.started, ended, head.attempt + 1, None
    new.next, new.visit, new.iteration = to, head.visit + 1, iteration
    new.data, new.blobs, new.size = data, blobs, size
    return new


def is_due(head: Head, now: float) -> bool:
    """Whether something that waits for nothing but a claim has come to its time."""
    if head.state is ExecutionState.RUNNING or head.woken or (head.due is None and head.signal is None):
        return True
    return head.due is not None and head.due <= now


def was_waiting(head: Head) -> bool:
    """Whether an execution that was paused or blocked was parked: it goes back to waiting, with the deadline it had."""
    parked = head.signal is not None or (head.due is not None and head.attempt == 0)
    return parked and head.state in (ExecutionState.PAUSED, ExecutionState.BLOCKED)


def blocked_for_good(head: Head) -> bool:
    """Whether it is blocked until somebody resumes it, for damage that nobody is to pass over (`on_corruption`)."""
    return head.state is ExecutionState.BLOCKED and head.hold


def was_queued(head: Head) -> bool:
    """Whether an execution that was paused or blocked had only been submitted: no visit of a step has begun. A delay is
    one of the first step; a copy of one that slept stands behind the step that said so, and was never queued."""
    begun = head.started is not None or head.visit > 1 or head.attempt > 0
    parked = head.signal is not None or (head.due is not None and head.step > 0)
    return not begun and not parked and head.state in (ExecutionState.PAUSED, ExecutionState.BLOCKED)


MOVED = "moved to another store"
"""What the reason of an execution begins with that `copy_store` has left behind."""


def was_moved(head: Head) -> bool:
    """Whether an execution goes on in another store. Here only a resume takes it up again."""
    return head.state is ExecutionState.PAUSED and (head.reason or "").startswith(MOVED)


UNREADABLE = b"\x01"
"""Stands for bytes that cannot be unsealed: no codec reads it."""


@frozen(kw_only=True)
class Message:
    """A signal or a control request. The store gives it its `id`, which grows within an execution."""

    kind: str
    """signal, pause, resume, cancel, retry."""
    name: str | None = None
    key: str | None = None
    payload: bytes | None = field(default=None, repr=False)
    options: Mapping[str, Any] = EMPTY
    sent: float
    id: int = 0

    @property
    def is_readable(self) -> bool:
        return self.payload != UNREADABLE


@frozen(kw_only=True)
class Stored:
    """An execution as a listing shows it."""

    definition: Definition
    head: Head


@define(kw_only=True)
class Loaded:
    """Everything needed to go on with an execution, or to look into it."""

    definition: Definition
    head: Head
    boundary: Boundary
    """The newest boundary with a readable state."""
    blobs: Mapping[str, bytes] = field(factory=dict, repr=False)
    entries: Mapping[str, bytes] = field(factory=dict, repr=False)
    messages: tuple[Message, ...] = ()
    kept: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Sequence number and blob names of every boundary that still has its state, oldest first."""
    damage: tuple[str, ...] = ()
    """What was found broken and put into quarantine; `head` and `boundary` are already the newest readable ones."""


# Writes. `commit` takes any mixture of them and answers each on its own.


@define(kw_only=True)
class Create:
    """A new execution with its first boundary. Answer: True if it was created, False if the id is taken."""

    definition: Definition
    head: Head
    boundary: Boundary
    blobs: Mapping[str, bytes] = EMPTY
    id: str = field(init=False, repr=False, eq=False, default=Factory(lambda self: self.definition.id, takes_self=True))


def creating(definition: Definition, head: Head, boundary: Boundary, blobs: Mapping[str, bytes]) -> Create:
    """A create of all these. Written out, as `copied` is."""
    new: Create = object.__new__(Create)
    new.definition, new.head, new.boundary, new.blobs, new.id = definition, head, boundary, blobs, definition.id
    return new


@define(kw_only=True)
class Save:
    """What the owner of an execution changes, all of it or nothing.

    Refused with `LeaseLostError` unless the stored fence is `head.fence`. The stored revision must be the one before
    `head.revision`; if it is that one or a later one already, this very write was applied before (its answer was
    lost): answered as done, nothing changes. If it is an earlier one, a write in between is missing:
    `WriteOrderError`. So a repetition after a lost connection is a comparison, never a blind second write (I9).
    """

    id: str
    head: Head
    boundaries: tuple[Boundary, ...] = ()
    blobs: Mapping[str, bytes] = EMPTY
    clear: bool = False
    """Remove all entries first: the visit is over."""
    put: Mapping[str, bytes] = EMPTY
    drop: tuple[str, ...] = ()
    take: tuple[int, ...] = ()
    """Messages that this write obeys or consumes."""
    keep_from: int | None = None
    """Boundaries before this number lose their state (not their row)."""
    drop_blobs: tuple[str, ...] = ()
    steps: tuple[str, ...] | None = None
    """The steps of an execution that was submitted by its workflow's name alone: set once, by who first runs it."""
    version: str = "1"
    """The version of its workflow: set with them, and without them of no meaning."""


def saving(
    id: str,
    head: Head,
    boundaries: tuple[Boundary, ...],
    blobs: Mapping[str, bytes],
    clear: bool,
    put: Mapping[str, bytes],
    drop: tuple[str, ...],
    take: tuple[int, ...],
    keep_from: int | None,
    drop_blobs: tuple[str, ...],
    steps: tuple[str, ...] | None,
    version: str,
) -> Save:
    """A save of all these, in their order. Written out, as `copied` is."""
    new: Save = object.__new__(Save)
    new.id, new.head, new.boundaries, new.blobs = id, head, boundaries, blobs
    new.clear, new.put, new.drop, new.take = clear, put, drop, take
    new.keep_from, new.drop_blobs, new.steps, new.version = keep_from, drop_blobs, steps, version
    return new


def named(definition: Definition, steps: tuple[str, ...], version: str) -> Definition:
    """The definition of what was submitted by name, once its steps are known."""
    return evolve(definition, steps=steps, total=len(steps), version=version)


@frozen(kw_only=True)
class Send:
    """A message from anybody. Answer: its id; the id of the first one if its key was seen before.

    Refused with `ExecutionNotFoundError`, or `SignalQueueFullError` when `limit` messages wait already.
    """

    id: str
    message: Message
    limit: int = 1000


Write = Create | Save | Send


def shown_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an execution's metadata is to users."""
    if TRACE not in metadata:
        return metadata
    return {key: value for key, value in metadata.items() if key != TRACE}


def searched_texts(id: str, metadata: Mapping[str, Any]) -> list[str]:
    """What a text filter looks into."""
    return [id, *map(str, shown_metadata(metadata).values())]


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of metadata are equal, as JSON has it: 1 is 1.0 and is not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)


@frozen(kw_only=True)
class Claim:
    """Which executions an owner asks for. Only what nobody owns, or what one of `dead` owns, is given."""

    owner: str
    now: float
    states: frozenset[ExecutionState]
    ids: tuple[str, ...] | None = None
    """Just these, due or not; otherwise any that are due."""
    workflows: frozenset[str] | None = None
    queues: frozenset[str] | None = None
    dead: frozenset[str] = frozenset()
    limit: int = 100


@frozen(kw_only=True)
class Query:
    """Which executions a listing shows: newest first, a page at a time."""

    states: frozenset[ExecutionState] | None = None
    workflows: frozenset[str] | None = None
    queue: str | None = None
    owner: str | None = None
    owned: bool | None = None
    parent_id: str | None = None
    metadata: Mapping[str, Any] = EMPTY
    text: str | None = None
    """Part of the id or of a metadata value, letters of either case."""
    created_after: float | None = None
    created_before: float | None = None
    ended_before: float | None = None
    after: tuple[float, str] | None = None
    """Where the last page ended: creation time and id of its last row."""
    limit: int = 100


@frozen(kw_only=True)
class Owner:
    """A process that may own executions: how to see whether it lives, and what is left of its lease."""

    id: str
    life: Mapping[str, Any]
    remaining: float
    """Seconds until the lease runs out, by the store's clock; negative when it has."""
    workflows: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
