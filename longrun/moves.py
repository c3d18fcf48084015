"""The records that there are most of: of a start, and of the writes from a step to the next and behind the last.

Place in the life of an execution: checkpoint. For everybody who does not care these are saves, heads and boundaries as
any others (`stored`). Who does care can leave out what they cannot have.
"""

from __future__ import annotations

from typing import Any

from attrs import fields

from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Create, Head, Loaded, Save


class Lean:
    """A record of which there is one for every step, or every start: what it cannot have stands in its class, and takes
    neither time nor room in each. For everybody who does not care it is of the class it is derived from, equal to one
    that says the same; `attrs.evolve` or a copy makes one of that class, which can have everything."""

    __slots__ = ()

    def __new__(cls, **fields: Any) -> Any:
        return cls._plain()(**fields)

    @classmethod
    def _plain(cls) -> type[Any]:
        return cls.__mro__[-2]

    def __eq__(self, other: object) -> bool:
        plain = self._plain()
        return isinstance(other, plain) and all(getattr(self, f.name) == getattr(other, f.name) for f in fields(plain))

    __hash__ = None  # type: ignore[assignment]  # as the classes that are compared by what they say

    def __reduce__(self) -> tuple[Any, ...]:
        plain = self._plain()
        return _made, (plain, {field.name: getattr(self, field.name) for field in fields(plain)})


def _made(plain: type[Any], values: dict[str, Any]) -> Any:
    return plain(**values)


class Begun(Lean, Head):
    """The head of an execution that runs from its start on."""

    __slots__ = ()

    owner: str
    state = ExecutionState.RUNNING
    revision = seq = visit = 1
    step = iteration = attempt = crashes = 0
    ended = due = signal = error = reason = of = note = None
    woken = hold = False
    progress = done = 0.0


class Opening(Lean, Boundary):
    """The boundary that it begins with, with a state in one piece."""

    __slots__ = ()

    data: bytes
    kind = "start"
    seq = visit = 1
    step = next = attempts = iteration = 0
    name = error = None
    blobs = ()


class Created(Lean, Loaded):
    """What loading an execution that was just created would give."""

    __slots__ = ()

    entries = EMPTY
    messages = damage = ()


class Passing(Lean, Head):
    """The head of an execution on its way from step to step: it runs, nothing has failed, nothing is waited for."""

    __slots__ = ()

    state = ExecutionState.RUNNING
    attempt = crashes = done = iteration = 0
    ended = due = signal = error = reason = of = note = None
    woken = hold = False


class Completed(Lean, Head):
    """The head of an execution that has come to its end in this way."""

    __slots__ = ()

    state = ExecutionState.COMPLETED
    attempt = crashes = done = iteration = 0
    owner = started = due = signal = error = reason = of = note = None
    woken = hold = False
    progress = 1.0


class Passed(Lean, Boundary):
    """The boundary behind a step that ended at its first attempt, with a small state."""

    __slots__ = ()

    data: bytes
    kind = "step"
    attempts = 1
    error = None
    iteration = 0
    blobs = ()


class Final(Passed):
    """That behind the last step."""

    __slots__ = ()

    kind = "finish"


class Move(Lean, Save):
    """A save that crosses one boundary, from a step to the one that stands behind it, and does nothing else. What the
    boundary says that the head does not are `name`, `started` and `data`, which is JSON."""

    __slots__ = ("_boundary", "data", "name", "started")

    head: Passing
    name: str
    started: float | None
    data: bytes
    _boundary: Boundary | None
    blobs = put = EMPTY
    clear = False
    drop = take = drop_blobs = ()
    steps = None
    version = "1"

    @property
    def boundary(self) -> Boundary:
        """Made when it is asked for."""
        if self._boundary is None:
            self._boundary = self._crossed()
        return self._boundary

    def _crossed(self) -> Boundary:
        return _behind(self, object.__new__(Passed))

    @property
    def boundaries(self) -> tuple[Boundary, ...]:  # type: ignore[override]  # never set
        return (self.boundary,)


class End(Move):
    """That which crosses the last one."""

    __slots__ = ()

    head: Completed  # type: ignore[assignment]

    def _crossed(self) -> Boundary:
        return _behind(self, object.__new__(Final))


MOVES: frozenset[type] = frozenset({Move, End})
"""The writes that most batches are made of."""


def _behind(move: Move, boundary: Passed) -> Boundary:
    head = move.head
    boundary.seq, boundary.next, boundary.visit, boundary.ended = head.seq, head.step, head.visit, head.updated
    boundary.step, boundary.name, boundary.started = head.step - 1, move.name, move.started
    boundary.data, boundary.size = move.data, len(move.data)
    return boundary


def begun(fence: int, owner: str, now: float) -> Begun:
    """The first head of an execution that runs at once."""
    head: Begun = object.__new__(Begun)
    head.fence, head.owner, head.started, head.updated = fence, owner, now, now
    return head


def opening(head: Begun, data: bytes) -> Opening:
    """The first boundary of an execution with this state."""
    boundary: Opening = object.__new__(Opening)
    boundary.started = boundary.ended = head.updated
    boundary.data, boundary.size = data, len(data)
    return boundary


def loaded_of(made: Create) -> Created:
    """What loading an execution just created would give."""
    loaded: Created = object.__new__(Created)
    loaded.definition, loaded.head = made.definition, made.head
    loaded.boundary, loaded.blobs = made.boundary, made.blobs
    loaded.kept = ((made.boundary.seq, made.boundary.blobs),)
    return loaded


def is_passing(head: Head) -> bool:
    """Whether the head behind the next boundary can be a `Passing` one."""
    asked = head.hold or head.attempt or head.ended or head.signal is not None or head.reason is not None
    return head.state is ExecutionState.RUNNING and not asked


def passing(id: str, head: Head, name: str, ended: float, data: bytes, total: int, keep_from: int | None) -> Move:
    """The move from the step in flight to the one behind it, for a head that `is_passing`. As `crossed`, `moved` and
    `saving` would make it, in one."""
    after: Passing = object.__new__(Passing)
    after.fence, after.owner, after.revision, after.seq = head.fence, head.owner, head.revision + 1, head.seq + 1
    after.step = to = head.step + 1
    after.visit, after.progress = head.visit + 1, to / total
    after.started = after.updated = ended
    move: Move = object.__new__(Move)
    move.id, move.head, move.keep_from, move._boundary = id, after, keep_from, None
    move.name, move.started, move.data = name, head.started, data
    return move


def ending(id: str, head: Head, name: str, ended: float, data: bytes, total: int, keep_from: int | None) -> End:
    """The end of an execution behind the step in flight, in the same way."""
    after: Completed = object.__new__(Completed)
    after.fence, after.revision, after.seq = head.fence, head.revision + 1, head.seq + 1
    after.step, after.visit = total, head.visit + 1
    after.updated = after.ended = ended
    end: End = object.__new__(End)
    end.id, end.head, end.keep_from, end._boundary = id, after, keep_from, None
    end.name, end.started, end.data = name, head.started, data
    return end
