"""Compressed and encrypted on the way into a store, in the writer's thread, and back in a reader's.

Place in the life of an execution: checkpoint, claim. What cannot be unsealed does no more harm than it must.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import attrs

from longrun.errors import CodecError
from longrun.moves import MOVES, Move
from longrun.seal import Seal
from longrun.stored import UNREADABLE, Boundary, Create, Loaded, Message, Save, Write

_DATA = attrgetter("data")


class Sealing:
    """What a seal makes of records, and back."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def all_sealed(self, writes: list[Write]) -> list[Write]:
        """Nothing is done, and nobody called, for a move with a small state: of such there is one for every step."""
        small = self._seal.untouched
        if MOVES.issuperset(map(type, writes)) and max(map(len, map(_DATA, writes)), default=0) <= small:
            return writes
        return [one if isinstance(one, Move) and len(one.data) <= small else self._sealed(one) for one in writes]

    def _sealed(self, write: Write) -> Write:
        seal = self._seal
        if isinstance(write, Move):
            return attrs.evolve(write, boundaries=(self._sealed_boundary(write.id, write.boundary),))
        if isinstance(write, Save):
            if self._needs_no_seal(write):
                return write
            return attrs.evolve(
                write,
                boundaries=tuple([self._sealed_boundary(write.id, b) for b in write.boundaries]),
                blobs={name: seal.wrap(data, f"{write.id}/blob/{name}") for name, data in write.blobs.items()},
                put={key: seal.wrap(data, f"{write.id}/entry/{key}") for key, data in write.put.items()},
            )
        if isinstance(write, Create):
            boundary = self._sealed_boundary(write.id, write.boundary)
            if boundary is write.boundary and not write.blobs:
                return write
            return attrs.evolve(
                write,
                boundary=boundary,
                blobs={name: seal.wrap(data, f"{write.id}/blob/{name}") for name, data in write.blobs.items()},
            )
        if write.message.payload is None:
            return write
        payload = seal.wrap(write.message.payload, _message_context(write.id, write.message))
        return attrs.evolve(write, message=attrs.evolve(write.message, payload=payload))

    def _needs_no_seal(self, save: Save) -> bool:
        """Small and not to be encrypted: the common case, told without building anything."""
        small = self._seal.leaves_alone
        for boundary in save.boundaries:
            data = boundary.data
            if data is not None and not small(data):
                return False
        if save.blobs or save.put:
            return all(map(small, save.blobs.values())) and all(map(small, save.put.values()))
        return True

    def _sealed_boundary(self, id: str, boundary: Boundary) -> Boundary:
        if boundary.data is None or self._seal.leaves_alone(boundary.data):
            return boundary
        wrapped = self._seal.wrap(boundary.data, f"{id}/{boundary.seq}")
        return boundary if wrapped is boundary.data else attrs.evolve(boundary, data=wrapped)

    def unsealed_or_damaged(self, loaded: Loaded) -> Loaded:
        """One that cannot be unsealed must not keep the others of a claim from going on (I5). What it was sent stays
        with it: a cancel is obeyed all the same, and what waits for nobody would wake it again and again."""
        try:
            return self.unsealed(loaded)
        except CodecError as error:
            unreadable = attrs.evolve(loaded.boundary, data=UNREADABLE, blobs=())
            return attrs.evolve(
                loaded,
                boundary=unreadable,
                blobs={},
                entries={},
                messages=tuple([self.unsealed_message(loaded.definition.id, m) for m in loaded.messages]),
                damage=(*loaded.damage, str(error)),
            )

    def unsealed(self, loaded: Loaded) -> Loaded:
        id = loaded.definition.id
        boundary = self.unsealed_boundary(id, loaded.boundary)
        if boundary is loaded.boundary and not (loaded.blobs or loaded.entries or loaded.messages):
            return loaded
        return attrs.evolve(
            loaded,
            boundary=boundary,
            blobs=self.unsealed_blobs(id, loaded.blobs),
            entries={key: self._seal.unwrap(data, f"{id}/entry/{key}") for key, data in loaded.entries.items()},
            messages=tuple([self.unsealed_message(id, m) for m in loaded.messages]),
        )

    def unsealed_boundary(self, id: str, boundary: Boundary) -> Boundary:
        if boundary.data is None:
            return boundary
        data = self._seal.unwrap(boundary.data, f"{id}/{boundary.seq}")
        return boundary if data is boundary.data else attrs.evolve(boundary, data=data)

    def unsealed_blobs(self, id: str, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: self._seal.unwrap(data, f"{id}/blob/{name}") for name, data in blobs.items()}

    def unsealed_message(self, id: str, message: Message) -> Message:
        if message.payload is None:
            return message
        try:
            payload = self._seal.unwrap(message.payload, _message_context(id, message))
        except CodecError:  # whoever takes it will say so; the others, and its execution, are as they were
            payload = UNREADABLE
        return attrs.evolve(message, payload=payload)


def _message_context(id: str, message: Message) -> str:
    """What a payload is bound to: its number is not known when it is sealed, but who sent what when is."""
    return f"{id}/message/{message.kind}/{message.name}/{message.key}/{message.sent!r}"
