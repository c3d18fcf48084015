"""Writes made ready for their statements: packed and with their checksums.

Place in the life of an execution: checkpoint. Done in the writer's thread before it takes the lock of the database, so
that no other process waits for it; only what has to be compared with the stored rows is left for the transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from longrun.errors import NotStorableError
from longrun.moves import Move
from longrun.stored import Create, Save, Send, Write
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
    __slots__ = ("blobs", "boundary", "crc", "create", "definition", "numbers", "state", "steps", "words")

    def __init__(self, create: Create) -> None:
        id, self.create = create.id, create
        self.state, self.numbers, self.words, self.crc = pack.head_columns(id, create.head)
        values = rows.definition_values(create.definition)
        self.definition = (*values, rows.definition_crc(values))
        self.steps = _steps(id, create.definition.steps)
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


def ready(write: Write) -> Ready:
    try:
        if type(write) is Move:
            return pack.move_columns(write)
        if isinstance(write, Save):
            return ReadySave(write)
        return ReadyCreate(write) if isinstance(write, Create) else write
    except UNSTORABLE as error:
        return Unfit(write, error)


def _steps(id: str, steps: tuple[str, ...]) -> tuple[str, int]:
    names = rows.steps_text(steps)
    return names, rows.steps_crc(id, names)


def _checked(id: str, values: Mapping[str, bytes], crc: Callable[[str, str, bytes], int]) -> dict[str, Part]:
    return {name: (crc(id, name, data), data) for name, data in values.items()}
