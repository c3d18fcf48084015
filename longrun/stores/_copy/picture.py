"""Everything that a store has of an execution, and whether another store has the same.

Place in the life of an execution: between two homes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from longrun.errors import ExecutionNotFoundError
from longrun.stored import Boundary, Definition, Head, Loaded, Message, named
from longrun.stores._copy.family import CLEARED
from longrun.stores.store import CheckpointStore

NOTE = "~copy"
"""The entry of an execution that has arrived and waits to be let go: the state, hold, reason and end that it had. Of
one that was left behind: the number of the last message that was carried."""
LATE = "~copy-"
"""The key that a message without one is given which came too late to be carried with the rest, before its number: who
is interrupted brings it again."""
LET_GO = 3
"""The revision of an execution in the target that nobody has gone on with."""
POSITION = ("seq", "step", "visit", "iteration", "attempt", "started", "due", "signal", "progress", "done", "of")


@frozen
class Picture:
    """Everything of an execution; the boundaries that still have their state with it. Of one that goes on meanwhile, it
    may be of two moments."""

    loaded: Loaded
    rows: tuple[Boundary, ...]
    blobs: Mapping[str, bytes]

    def contents(self) -> tuple[Any, ...]:
        """All but the head and the messages, as it must be found in the target."""
        loaded = self.loaded
        entries = {key: data for key, data in loaded.entries.items() if key != NOTE}
        return loaded.definition, self.rows, dict(self.blobs), entries

    def messages(self) -> list[Message]:
        """Those that wait, as the other store must have them: with others perhaps, which came to that one."""
        if self.loaded.head.state in CLEARED:
            return []
        return [attrs.evolve(one, id=0, key=_own_key(one)) for one in self.loaded.messages]

    def arrived_as(self, other: Picture) -> bool:
        missing = self.messages()
        for message in other.messages():
            if missing and message == missing[0]:
                missing.pop(0)
        same = self.contents() == other.contents()
        return not missing and same and same_position(self.loaded.head, other.loaded.head)

    def went_on_as(self, other: Picture) -> bool:
        """Whether the other one began as this one is."""
        shape = self.shape()
        return _begins(self.loaded.definition, other.loaded.definition) and other.shape()[: len(shape)] == shape

    def shape(self) -> list[Boundary]:
        """The rows without their states, which may be fewer where it has gone on."""
        return [attrs.evolve(row, data=None, blobs=()) for row in self.rows]


async def take_picture(store: CheckpointStore, id: str, loaded: Loaded | None = None) -> Picture:
    loaded = await store.load(id) if loaded is None else loaded
    kept = {seq for seq, _ in loaded.kept}
    rows: list[Boundary] = []
    blobs: dict[str, bytes] = dict(loaded.blobs)
    while page := await store.boundaries(id, after=rows[-1].seq if rows else 0):
        for row in page:
            whole = await store.checkpoint(id, row.seq) if row.seq in kept else None
            rows.append(attrs.evolve(row, data=None, blobs=()) if whole is None else whole[0])
            blobs |= {} if whole is None else whole[1]
    if not rows:
        raise ExecutionNotFoundError(id)  # deleted since it was loaded
    return Picture(loaded, tuple(rows), blobs)


async def is_same(source: CheckpointStore, target: CheckpointStore, id: str) -> bool:
    """Whether the target has what the source has, or has gone on from it."""
    here, there = await take_picture(source, id), await take_picture(target, id)
    if there.loaded.damage:
        return False
    return here.arrived_as(there) if there.loaded.head.revision == LET_GO else here.went_on_as(there)


def same_position(here: Head, there: Head) -> bool:
    return all(getattr(here, name) == getattr(there, name) for name in POSITION)


def _begins(here: Definition, there: Definition) -> bool:
    """What was submitted by its workflow's name has got its steps since."""
    return there == (here if here.steps else named(here, there.steps, there.version))


def _own_key(message: Message) -> str | None:
    return None if message.key is not None and message.key.startswith(LATE) else message.key
