"""Executions as they are stored, many at once: the rows are read here, and `assemble` judges them.

Place in the life of an execution: claim. A thousand executions are loaded with as many statements as one. Whoever calls
has a transaction open in which the rows cannot change under the reader's eyes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from longrun.errors import CorruptDataError
from longrun.stored import Boundary, Head, Loaded, Message
from longrun.stores import rows
from longrun.stores._postgres.arrays import Texts, columns
from longrun.stores._postgres.asking import Ask, Row
from longrun.stores._postgres.driver import errors
from longrun.stores._postgres.parts import HEAD_KINDS, HEAD_NAMES, head_row
from longrun.stores.assemble import Assembled, BoundaryRow, Parts, boundary_fits, fits, mended, sound, state_fits

_DEFINITION_END = len(rows.DEFINITION_COLUMNS)
_HEAD_START = _DEFINITION_END + 3
_HEAD_END = _HEAD_START + len(rows.HEAD_COLUMNS)
_NEWEST = _HEAD_END + 1
_BOUNDARY_END = len(rows.BOUNDARY_COLUMNS)
_NEWEST_END = _NEWEST + _BOUNDARY_END + 2
_DATA = _NEWEST + rows.BOUNDARY_COLUMNS.index("data")

Found = dict[str, Assembled | CorruptDataError]
"""What each id turned out to be; an id that is not stored is not in it."""


class Loader:
    """Reads whole executions on one connection."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def load(self, ids: Sequence[str]) -> Found:
        """In the order of the ids."""
        return self._read(self._ask("load", ids=Texts(ids)), ids)

    def load_claimed(self, claimed: Iterable[Row]) -> Found:
        """What a claim has chosen in this transaction: its ids need not be known here to be asked for."""
        whole = self._ask("load", ids=None)
        ((ids, _),) = claimed
        return self._read(whole, ids or ())

    def _read(self, whole: Iterable[Row], ids: Sequence[str]) -> Found:
        seen: dict[str, int] = {}
        parts: dict[str, Parts] = {}
        noted, written = [], []
        for row in whole:
            id = row[0]
            parts[id] = _parts(row)
            seen[id], _, _, has_entries, has_messages = row[_NEWEST_END:]
            if has_entries:
                noted.append(id)
            if has_messages:
                written.append(id)
        self._read_more(parts, noted, written)
        return {id: self._assembled(parts[id], seen[id]) for id in dict.fromkeys(ids) if id in parts}

    def _read_more(self, parts: dict[str, Parts], noted: list[str], written: list[str]) -> None:
        """What few have: entries, messages, blobs of the newest state. All is asked for before an answer is read."""
        named = [(id, name) for id, one in parts.items() if one.kept for name in one.kept[-1][1]]
        entries = self._ask("load_entries", ids=Texts(noted)) if noted else ()
        messages = self._ask("load_messages", ids=Texts(written)) if written else ()
        for id, name, data, crc in self._named_blobs(named) if named else ():
            parts[id].blobs[name] = (crc, data)
        for id, key, data, crc in entries:
            parts[id].entries[key] = (crc, data)
        for id, *values, crc in messages:
            parts[id].messages.append((values, crc))

    def _named_blobs(self, named: Sequence[tuple[str, str]]) -> Iterable[Row]:
        executions, names = zip(*named, strict=True)
        return self._ask("load_blobs", executions=Texts(executions), names=Texts(names))

    def _assembled(self, parts: Parts, seen: int) -> Assembled | CorruptDataError:
        try:
            return sound(parts, seen) or mended(self._all_of(parts), seen)
        except CorruptDataError as error:
            return error

    def _all_of(self, parts: Parts) -> Parts:
        """Something is damaged: now every boundary and every blob is wanted."""
        parts.boundaries = [_boundary_row(row) for row in self._ask("load_boundaries", id=parts.id)]
        parts.blobs = {name: (crc, data) for name, data, crc in self._ask("load_all_blobs", id=parts.id)}
        return parts

    # one part alone

    def head(self, id: str) -> Head | None:
        """None if there is none, or it is damaged."""
        for *values, crc in self._ask("load_head", id=id):
            if fits(lambda values=values: rows.head_crc(id, values), crc):  # type: ignore[misc]
                return rows.head_from(values)
        return None

    def messages(self, id: str) -> list[Message]:
        """Those that fit their checksum; the others are reported by whoever loads the execution."""
        found = self._ask("load_messages", ids=Texts([id]))
        good = [values for _, *values, crc in found if _message_fits(id, values, crc)]
        return [rows.message_from(values) for values in good]

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, dict[str, bytes]] | None:
        what = f"checkpoint {seq} of execution {id!r}"
        for row in self._ask("checkpoint", id=id, seq=seq):
            found = _boundary_row(row)
            if not (boundary_fits(id, found) and state_fits(id, found)):
                raise CorruptDataError(what, "it does not fit its checksum")
            boundary = rows.boundary_from(found.values)
            return boundary, self._blobs(id, boundary.blobs, what)
        return None

    def _blobs(self, id: str, names: tuple[str, ...], what: str) -> dict[str, bytes]:
        if not names:
            return {}
        found = {name: (data, crc) for _, name, data, crc in self._named_blobs([(id, name) for name in names])}
        for name in names:
            if name not in found:
                raise CorruptDataError(what, f"its blob {name!r} is missing")
            if rows.blob_crc(id, name, found[name][0]) != found[name][1]:
                raise CorruptDataError(what, f"its blob {name!r} does not fit its checksum")
        return {name: found[name][0] for name in names}


def set_aside(ask: Ask, id: str, found: Assembled) -> None:
    """Copy what is damaged into quarantine."""
    for damaged in found.damaged:
        ask("quarantine", id=id, part=damaged.part, content=damaged.content)


def set_aside_if_writable(ask: Ask, id: str, found: Assembled) -> None:
    """For readers: a server that only reads keeps the damaged rows where they are, and nothing is lost."""
    try:
        set_aside(ask, id, found)
    except errors.ReadOnlySqlTransaction:
        return


def repair(ask: Ask, id: str, found: Assembled) -> None:
    """Set the damage aside, take out of the way what would be found again, and store the head as it is now."""
    set_aside(ask, id, found)
    ask("mend_head", **columns(HEAD_NAMES, HEAD_KINDS, [head_row(id, found.loaded.head)]))
    ask("retire_states", id=id, seq=found.loaded.boundary.seq)
    for damaged in found.damaged:
        kind, _, key = damaged.part.partition("/")
        if kind == "message":
            ask("remove_message", id=id, number=int(key))
    if found.entries_dropped:
        ask("remove_entries", id=id)


def readable(found: Found) -> Iterable[Loaded]:
    return [one.loaded for one in found.values() if isinstance(one, Assembled)]


def _parts(row: Sequence[Any]) -> Parts:
    crc, steps, steps_crc = row[_DEFINITION_END:_HEAD_START]
    _, numbers, blobs, *_ = row[_NEWEST_END:]
    return Parts(
        id=row[0],
        definition=row[:_DEFINITION_END],
        definition_crc=crc,
        steps=steps,
        steps_crc=steps_crc,
        head=row[_HEAD_START:_HEAD_END],
        head_crc=row[_HEAD_END],
        boundaries=[] if row[_DATA] is None else [_boundary_row(row[_NEWEST:_NEWEST_END])],
        kept=tuple(zip(numbers, map(_names, blobs), strict=True)) if numbers else (),
    )


def _boundary_row(row: Sequence[Any]) -> BoundaryRow:
    return BoundaryRow(row[:_BOUNDARY_END], row[_BOUNDARY_END], row[_BOUNDARY_END + 1])


def _names(text: str | None) -> tuple[str, ...]:
    """A list of blobs that is damaged is found out by the checksum of its state."""
    try:
        return tuple(json.loads(text)) if text else ()
    except ValueError:
        return ()


def _message_fits(id: str, values: Sequence[Any], crc: int) -> bool:
    return fits(lambda: rows.message_crc(id, values), crc)
