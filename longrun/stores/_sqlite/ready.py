"""Writes made ready for their statements: packed and with their checksums.

Place in the life of an execution: checkpoint. Done in the writer's thread before it takes the lock of the database, so
that no other process waits for it; only what has to be compared with the stored rows is left for the transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longrun.errors import NotStorableError
from longrun.moves import End, Move
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
            self.boundaries += pack.boundary_columns(id, boundary)
        self.steps = None if save.steps is None else _steps(id, save.steps)
        if self.steps is not None:
            save.version.encode()  # text that is no Unicode is refused here, not in the middle of a transaction
        self.put = _checked(id, save.put, rows.entry_crc) if save.put else {}
        self.blobs = _checked(id, save.blobs, rows.blob_crc) if save.blobs else {}


class ReadyCreate:
    """Columns with room for the key in front: those of `START` if it is `started`, and of `CREATE` otherwise."""

    __slots__ = ("blobs", "boundary", "columns", "create", "head", "started", "state", "steps", "wake")

    def __init__(self, create: Create) -> None:
        self.create, d, h = create, create.definition, create.head
        id, owner = d.id, h.owner
        self.state, numbers, words, crc = pack.head_columns(id, h)
        self.head = [0, h.revision, numbers, words, crc]
        values = rows.definition_values(d)
        crc = rows.definition_crc(values)
        runs = self.state == "running" and owner is not None and h.ended is None and not h.woken
        self.started = runs and values[6] == "{}" and d.parent_id is None
        self.wake = 0.0 if self.started else wake_of(h)
        if self.started:
            self.columns = [0, *values[:6], d.created, crc, h.fence, owner]
        else:
            self.columns = [0, *values, crc, self.state, h.fence, owner, h.ended, 1 if h.woken else 0, self.wake]
        self.steps = [0, *_steps(id, d.steps)]
        self.boundary = pack.boundary_columns(id, create.boundary)
        self.blobs = _checked(id, create.blobs, rows.blob_crc) if create.blobs else {}


class Unfit:
    """A write that cannot be stored, and why. It may have been refused anyway: that would count first."""

    __slots__ = ("refusal", "write")

    def __init__(self, write: Write, error: Exception) -> None:
        self.write = write
        self.refusal = NotStorableError(f"a write of execution {write.id!r}", f"{type(error).__name__}: {error}")
        self.refusal.__cause__ = error


Ready = pack.ReadyMove | ReadySave | ReadyCreate | Send | Unfit


_WAYS: dict[type, Callable[[Any], Ready]] = {
    Move: pack.move_columns,
    End: pack.move_columns,
    Save: ReadySave,
    Create: ReadyCreate,
    Send: lambda send: send,
}


def all_ready(writes: Sequence[Write]) -> list[Ready]:
    try:
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
