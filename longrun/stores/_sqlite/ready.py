"""Writes made ready for their statements: packed and with their checksums.

Place in the life of an execution: checkpoint. Done in the writer's thread before it takes the lock of the database, so
that no other process waits for it; only what has to be compared with the stored rows is left for the transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longrun.errors import NotStorableError
from longrun.moves import MOVES, Begun, End, Move, Opening
from longrun.stored import Create, Head, Save, Send, Write
from longrun.stores import rows
from longrun.stores._sqlite import pack

UNSTORABLE = (UnicodeError, OverflowError, struct.error, TypeError, ValueError)
"""What a value raises that SQLite, or a packed column, cannot hold."""

Part = tuple[int, bytes]
"""A checksum and what it is of."""


class ReadySave:
    __slots__ = ("blobs", "boundaries", "crc", "numbers", "put", "save", "state", "steps", "words")

    def __init__(self, save: Save) -> None:
        id, self.save = save.id, save
        self.state, self.numbers, self.words, self.crc = pack.head_columns(id, save.head)
        self.boundaries: list[Any] = []
        for boundary in save.boundaries:
            self.boundaries += (0, *pack.boundary_columns(id, boundary))
        self.steps = None if save.steps is None else _steps(id, save.steps)
        if self.steps is not None:
            save.version.encode()  # text that is no Unicode is refused here, not in the middle of a transaction
        self.put = _checked(id, save.put, rows.entry_crc) if save.put else {}
        self.blobs = _checked(id, save.blobs, rows.blob_crc) if save.blobs else {}


OF_START = slice(0, 10)
OF_HEAD = slice(10, 14)
OF_STEPS = slice(14, 16)
OF_BOUNDARY = slice(16, None)


class ReadyStart:
    """A create that runs at once and has neither parent nor metadata nor blobs, as most do: columns without the key,
    those of `START`, `CREATE_HEAD`, `ADD_STEPS` and `ADD_BOUNDARY`. In one tuple: all of a batch are in memory at once,
    and the garbage collector looks at each object."""

    __slots__ = ("columns", "create")

    def __init__(self, create: Create, head: Begun, boundary: Opening) -> None:
        self.create, d = create, create.definition
        id = d.id
        named = id, d.workflow, d.version, d.total, d.queue, d.priority
        crc = rows.definition_crc((*named, "{}", None, d.created))
        begun, opening = pack.start_columns(id, head, boundary)
        self.columns = (*named, d.created, crc, head.fence, head.owner, *begun, *_steps(id, d.steps), *opening)


class ReadyCreate:
    """Any other: columns with room for the key in front."""

    __slots__ = ("blobs", "boundary", "columns", "create", "head", "state", "steps", "wake")

    def __init__(self, create: Create) -> None:
        self.create, d, h = create, create.definition, create.head
        id = d.id
        self.state, numbers, words, crc = pack.head_columns(id, h)
        self.head = [0, h.revision, numbers, words, crc]
        values = rows.definition_values(d)
        self.wake = wake_of(h)
        place = self.state, h.fence, h.owner, h.ended, 1 if h.woken else 0, self.wake
        self.columns = [0, *values, rows.definition_crc(values), *place]
        self.steps = [0, *_steps(id, d.steps)]
        self.boundary = [0, *pack.boundary_columns(id, create.boundary)]
        self.blobs = _checked(id, create.blobs, rows.blob_crc) if create.blobs else {}


def _ready_create(create: Create) -> ReadyStart | ReadyCreate:
    d, head, boundary = create.definition, create.head, create.boundary
    if type(head) is not Begun or type(boundary) is not Opening or d.metadata or d.parent_id is not None:
        return ReadyCreate(create)
    return ReadyStart(create, head, boundary)


class Unfit:
    """A write that cannot be stored, and why. It may have been refused anyway: that would count first."""

    __slots__ = ("refusal", "write")

    def __init__(self, write: Write, error: Exception) -> None:
        self.write = write
        self.refusal = NotStorableError(f"a write of execution {write.id!r}", f"{type(error).__name__}: {error}")
        self.refusal.__cause__ = error


Ready = pack.ReadyMove | ReadySave | ReadyStart | ReadyCreate | Send | Unfit


_WAYS: dict[type, Callable[[Any], Ready]] = {
    Move: pack.move_columns,
    End: pack.move_columns,
    Save: ReadySave,
    Create: _ready_create,
    Send: lambda send: send,
}


def all_ready(writes: Sequence[Write]) -> list[Ready]:
    try:
        if MOVES.issuperset(map(type, writes)):  # as most batches are: no line of ours for each
            return list(map(pack.move_columns, writes))  # type: ignore[arg-type]
        return [_WAYS[type(write)](write) for write in writes]
    except UNSTORABLE:  # one of them: the others are not to suffer
        return [_ready_if_fit(write) for write in writes]


def _ready_if_fit(write: Write) -> Ready:
    try:
        return _WAYS[type(write)](write)
    except UNSTORABLE as error:
        return Unfit(write, error)


def wake_of(head: Head) -> float | None:
    """As `rows.wake_at`, never negative: 0 is the mark of what is due at once."""
    moment = rows.wake_at(head)
    return None if moment is None else max(0.0, moment)


def _steps(id: str, steps: tuple[str, ...]) -> tuple[str, int]:
    names = rows.steps_text(steps)
    return names, rows.steps_crc(id, names)


def _checked(id: str, values: Mapping[str, bytes], crc: Callable[[str, str, bytes], int]) -> dict[str, Part]:
    return {name: (crc(id, name, data), data) for name, data in values.items()}
