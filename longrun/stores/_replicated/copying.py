"""One execution, carried from the active side to the other exactly as it is: fence, revision, message numbers and keys.

Place in the life of an execution: beside it, whenever the two sides do not agree about it. Only the contract of the
backends is used. The copy on the standby is not made in one atomic act, so it is compared afterwards, and made again
until the two are equal; what is half there after a crash is unlike the original, and is replaced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from longrun.errors import CorruptDataError, StoreUnavailableError
from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.stored import Boundary, Create, Head, Loaded, Message, Query, Save, Send, Write
from longrun.stores._replicated.side import LostError, Side

TRIES = 50
PAGE = 1000
CLEARED = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})


class Copier:
    """Makes executions at `target` equal to those at `source`."""

    def __init__(self, source: Side, target: Side, allowed: Callable[[str, bool], None]) -> None:
        """`allowed` raises when the sides may have changed their parts: it is asked before a copy is made, and told
        whether it replaces another."""
        self._source, self._target = source, target
        self._allowed = allowed
        self._log = get_logger(store="replicated")
        self.copied = 0
        self.unreadable: set[str] = set()

    def agree(self, ids: Iterable[str]) -> None:
        """Return when both sides have the same of each, or neither has it."""
        for id in ids:
            for tries in range(TRIES):
                if tries:
                    time.sleep(random.random() * 0.002 * tries)  # two who repair the same one must not keep in step
                if self._same(id):
                    break
                head = self._head(id)
                self._allowed(id, head is not None)
                if self._cleared(id, head):
                    self._place(id)
            else:
                raise LostError(
                    self._target, StoreUnavailableError(self._target.backend.kind, f"{id!r} cannot be made equal")
                )

    def adopt(self, id: str) -> None:
        """Give the target what only the source has. What the target has by now is left alone."""
        batches = self._batches(id)
        if batches and self._target.write("commit", batches[0]) == [True]:
            for batch in batches[1:]:
                self._target.write("commit", batch)
            self.copied += 1

    # comparing

    def _same(self, id: str) -> bool:
        try:
            here = _seen(self._source, id)
        except CorruptDataError:
            self.unreadable.add(id)
            self._log.warning("replica.unreadable", execution=id, side=self._source.name)
            return True  # the older copy is better than none, and a copy of nothing is none
        try:
            there = _seen(self._target, id)
        except CorruptDataError:
            return False
        return bool(here == there) or (here is not None and _without_damaged(self._source, here) == there)

    # clearing the place

    def _head(self, id: str) -> Head | None:
        """Where the target's copy stands, also when the rest of it cannot be read."""
        try:
            loaded: Loaded | None = self._target.read("load", id)
        except CorruptDataError:
            query = Query(text=id, limit=PAGE)
            return next((s.head for s in self._target.read("find", query) if s.definition.id == id), None)
        return None if loaded is None else loaded.head

    def _cleared(self, id: str, head: Head | None) -> bool:
        """Remove the target's copy as it was seen. One that has changed since then is not finished, and stays."""
        if head is None:
            return True
        if not head.state.finished:
            end = attrs.evolve(
                head, revision=head.revision + 1, state=ExecutionState.CANCELLED, owner=None, ended=head.updated
            )
            self._target.write("commit", [Save(id=id, head=end)])
        return bool(self._target.write("delete", [id])[0])

    # making the copy

    def _place(self, id: str) -> None:
        batches = self._batches(id)
        for batch in batches:
            self._target.write("commit", batch)
        self.copied += bool(batches)

    def _batches(self, id: str) -> list[list[Write]]:
        """The writes that make a copy; none if there is nothing to copy."""
        whole = _picture(self._source, id)
        if whole is None:
            return []
        loaded, rows, blobs = whole
        last, keys = self._source.read("sent", id)
        return _writes(loaded, rows, blobs, last, keys)


def _seen(side: Side, id: str) -> Any:
    loaded: Loaded | None = side.read("load", id)
    if loaded is None:
        return None
    rows = [attrs.evolve(row, blobs=()) for row in _rows(side, id)]
    return attrs.evolve(loaded, damage=()), rows, side.read("sent", id)[0]


def _without_damaged(side: Side, seen: Any) -> Any:
    """What a copy can be like at best: a checkpoint that cannot be read here is not kept there."""
    loaded, rows, last = seen
    kept = tuple([one for one in loaded.kept if _state(side, loaded.definition.id, one[0]) is not None])
    return attrs.evolve(loaded, kept=kept), rows, last


def _rows(side: Side, id: str) -> list[Boundary]:
    rows: list[Boundary] = []
    while page := side.read("boundaries", id, after=rows[-1].seq if rows else 0, limit=PAGE):
        rows += page
    return rows


def _picture(side: Side, id: str) -> tuple[Loaded, list[Boundary], dict[str, bytes]] | None:
    """Everything of an execution; the boundaries that still have their state with it."""
    loaded: Loaded | None = side.read("load", id)
    if loaded is None:
        return None
    kept = {seq for seq, _ in loaded.kept}
    rows: list[Boundary] = []
    blobs: dict[str, bytes] = dict(loaded.blobs)
    for row in _rows(side, id):
        found = _state(side, id, row.seq) if row.seq in kept else None
        rows.append(attrs.evolve(row, data=None, blobs=()) if found is None else found[0])
        blobs |= {} if found is None else found[1]
    return (loaded, rows, blobs) if rows else None  # deleted meanwhile


def _state(side: Side, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
    try:
        found: tuple[Boundary, Mapping[str, bytes]] | None = side.read("checkpoint", id, seq)
    except CorruptDataError:
        return None
    return found


def _writes(
    loaded: Loaded, rows: list[Boundary], blobs: Mapping[str, bytes], last: int, keys: Mapping[str, int]
) -> list[list[Write]]:
    """A `Create` one revision before the end, every message that there ever was, and a `Save` that brings the rest and
    takes what was taken: the store then numbers the messages as the original did."""
    id, head = loaded.definition.id, loaded.head
    first, *more = rows
    waiting = {message.id: message for message in loaded.messages}
    messages = _messages(last, keys, waiting)
    if head.revision == 0:
        create = Create(definition=loaded.definition, head=head, boundary=first, blobs=blobs)
        return [[create], [Send(id=id, message=message, limit=last + 1) for message in messages]]
    begin = attrs.evolve(
        head, revision=head.revision - 1, state=ExecutionState.PAUSED, hold=True, owner=None, seq=first.seq, ended=None
    )
    oldest = min([row.seq for row in rows if row.data is not None], default=loaded.boundary.seq)
    placeholder = first if first.data is not None else attrs.evolve(first, data=loaded.boundary.data)
    new: Write = Create(definition=loaded.definition, head=begin, boundary=placeholder, blobs=blobs)
    taken = tuple(number for number in range(1, last + 1) if number not in waiting)
    save: Write = Save(
        id=id, head=head, boundaries=tuple(more), put=loaded.entries, take=taken, keep_from=max(oldest, first.seq)
    )
    sends: list[Write] = [Send(id=id, message=message, limit=last + 1) for message in messages]
    # What ends takes its messages with it: those that wait all the same came after the end.
    late = len(waiting) if head.state in CLEARED else 0
    early = len(sends) - late
    return [batch for batch in ([new], sends[:early], [save], sends[early:]) if batch]


def _messages(last: int, keys: Mapping[str, int], waiting: Mapping[int, Message]) -> list[Message]:
    """Number 1 to `last`: those that wait as they are, those that were taken as a blank with the key they had."""
    by_number = {number: key for key, number in keys.items()}
    blank = Message(kind="signal", sent=0.0)
    return [
        attrs.evolve(waiting.get(number) or attrs.evolve(blank, key=by_number.get(number)), id=0)
        for number in range(1, last + 1)
    ]
