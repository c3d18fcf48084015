"""Checkpoint: turn a state into bytes, and write again only what changed.

Place in the life of an execution: checkpoint. A small state is one piece. Of a large one, every large top-level value
becomes a blob of its own; a value whose bytes are those of the last checkpoint keeps its old blob. So a checkpoint is
always complete in itself, and the disk grows with what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define

from longrun import codec
from longrun.errors import CorruptDataError, TooLargeError
from longrun.stored import EMPTY, Boundary

WHOLE_LIMIT = 8192
"""A state up to this many bytes is stored in one piece."""
BLOB_MINIMUM = 2048
"""Of a larger one, values from this size on become blobs."""
NO_CHANGE: tuple[None, tuple[str, ...]] = (None, ())


@define
class Snapshot:
    """An encoded state: what goes into the boundary, and the blobs that are new."""

    data: bytes
    names: tuple[str, ...]
    new: Mapping[str, bytes]
    size: int


def take_first(value: Any, annotation: Any, seq: int, *, plain: bool) -> Snapshot:
    """The state that an execution begins with. `plain`: the annotation leaves it to the value how it is stored."""
    data = codec.dumps_flat(value) if plain else None
    if data is None or len(data) > WHOLE_LIMIT:
        return Snapshots(1).take(value, annotation, seq)
    return Snapshot(data, (), EMPTY, len(data))


def take_again(tree: Any, annotation: Any, seq: int) -> Snapshot:
    """The stored state of one execution for another to begin with, as it is, once it is known to fit."""
    codec.structure(tree, annotation, "state")
    return Snapshots(1).take_tree(tree, seq)


class _Part:
    __slots__ = ("data", "name", "value")

    def __init__(self, name: str, data: bytes, value: object) -> None:
        self.name, self.data, self.value = name, data, value


class Snapshots:
    """The states of one execution: encodes each, knows the blobs of the last, and says what retention lets go."""

    def __init__(self, history: int, limit: int = codec.DEFAULT_LIMIT) -> None:
        self._history = history
        self._most = history + max(4, history // 2) - 1
        """So many there may be for a while."""
        self._limit = limit
        self._parts: dict[str, _Part] = {}
        self._kept: list[int] = []
        self._blobs_of: dict[int, tuple[str, ...]] = {}
        """Of those states that have any."""

    def restore(self, data: bytes, blobs: Mapping[str, bytes], kept: tuple[tuple[int, tuple[str, ...]], ...]) -> None:
        """Go on from a loaded checkpoint: its blobs need not be written again."""
        self._kept = [seq for seq, _ in kept]
        self._blobs_of = {seq: names for seq, names in kept if names}
        if blobs:
            self._parts = {key: _Part(name, blobs[name], None) for key, name in _references(data).items()}

    def take(self, value: Any, annotation: Any, seq: int, path: str = "state") -> Snapshot:
        """Encode `value` for boundary number `seq`."""
        return self.take_tree(codec.unstructure(value, annotation, path), seq, path)

    def take_tree(self, tree: Any, seq: int, path: str = "state") -> Snapshot:
        """The same for what is stored already: who does not know its annotation writes it again as it is."""
        if not self._parts:
            data = codec.dumps(tree)
            size = len(data)
            if size <= WHOLE_LIMIT or type(tree) is not dict:
                if size > self._limit:
                    raise TooLargeError(path, size, self._limit)
                return Snapshot(data, (), EMPTY, size)
        return self._split(tree, seq, path) if type(tree) is dict else self._whole(tree, path)

    def take_flat(self, value: Any, seq: int, exactly: bool) -> tuple[bytes, int | None] | None:
        """As `take` and `keep`, for a small state of plain texts and numbers behind others of that kind: its bytes, and
        from which number states are kept now. None if it is not that: nothing is noted then."""
        if self._parts or self._blobs_of or (data := codec.dumps_flat(value)) is None or len(data) > WHOLE_LIMIT:
            return None
        kept = self._kept
        kept.append(seq)
        if len(kept) <= (self._history if exactly else self._most):
            return data, None
        return data, self.let_go()[0]

    def _whole(self, tree: Any, path: str) -> Snapshot:
        data = codec.dumps(tree)
        self._check(path, len(data))
        self._parts = {}
        return Snapshot(data, (), {}, len(data))

    def _split(self, tree: dict[str, Any], seq: int, path: str) -> Snapshot:
        parts: dict[str, _Part] = {}
        new: dict[str, bytes] = {}
        keep: dict[str, Any] = {}
        for key, value in tree.items():
            part = self._part(key, value, f"{seq}.{len(parts)}")
            if part is None:
                keep[key] = value
                continue
            keep[key] = None
            parts[key] = part
            if part is not self._parts.get(key):
                new[part.name] = part.data
        if not parts:
            return self._whole(tree, path)
        data = codec.dumps({"keep": keep, "blobs": {key: part.name for key, part in parts.items()}})
        size = len(data) + sum(len(part.data) for part in parts.values())
        self._check(path, size)
        self._parts = parts  # only now: a state that is refused is not stored, and nothing may refer to its blobs
        return Snapshot(data, tuple(part.name for part in parts.values()), new, size)

    def _part(self, key: str, value: Any, name: str) -> _Part | None:
        """The blob for a value: the old one if nothing changed, None if the value is small."""
        old = self._parts.get(key)
        if old is not None and type(value) is str and value is old.value:
            return old  # the same immutable object: its bytes are the same
        data = codec.dumps(value)
        if len(data) < BLOB_MINIMUM:
            return None
        if old is not None and old.data == data:
            old.value = value
            return old
        return _Part(name, data, value)

    def _check(self, path: str, size: int) -> None:
        if size > self._limit:
            raise TooLargeError(path, size, self._limit)

    def keep(self, boundaries: tuple[Boundary, ...], exactly: bool) -> tuple[int | None, tuple[str, ...]]:
        """Note boundaries that are stored. From which number states are kept from then on (None: no change), and which
        blobs can go. To spare the store a removal with every write, a few states more than asked for stay until
        `exactly` as many are wanted."""
        kept = self._kept
        for boundary in boundaries:
            if boundary.data is not None:
                kept.append(boundary.seq)
                if boundary.blobs:
                    self._blobs_of[boundary.seq] = boundary.blobs
        return NO_CHANGE if len(kept) <= (self._history if exactly else self._most) else self.let_go()

    def let_go(self) -> tuple[int, tuple[str, ...]]:
        """Of the oldest states, as many as there are too many."""
        kept, blobs_of = self._kept, self._blobs_of
        surplus = len(kept) - self._history
        gone = {name for seq in kept[:surplus] for name in blobs_of.pop(seq, ())}
        del kept[:surplus]
        if gone:
            gone.difference_update(*blobs_of.values())
        return kept[0], tuple(gone)


def restore_tree(data: bytes, blobs: Mapping[str, bytes], split: bool) -> Any:
    """The JSON tree of a stored state."""
    tree = codec.loads(data)
    if not split:
        return tree
    references = _references(data)
    keep = tree["keep"]
    for key, name in references.items():
        if name not in blobs:
            raise CorruptDataError(f"state[{key!r}]", f"blob {name} is missing")
        keep[key] = codec.loads(blobs[name])
    return keep


def decode_state(data: bytes, blobs: Mapping[str, bytes], split: bool, annotation: Any) -> Any:
    """A stored state as the step that receives it declares it."""
    return codec.structure(restore_tree(data, blobs, split), annotation, "state")


def _references(data: bytes) -> dict[str, str]:
    tree = codec.loads(data)
    if not (isinstance(tree, dict) and isinstance(tree.get("blobs"), dict) and isinstance(tree.get("keep"), dict)):
        raise CorruptDataError("a stored state", "it should name its blobs and does not")
    references: dict[str, str] = tree["blobs"]
    return references
