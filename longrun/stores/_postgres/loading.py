"""Executions as they are stored, many at once: the rows are read here, and `assemble` judges them.

Place in the life of an execution: claim. A thousand executions are loaded with as many statements as one. Whoever calls
has a transaction open in which the rows cannot change under the reader's eyes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from longrun.errors import CorruptDataError
from longrun.stored import Boundary, Loaded, Message
from longrun.stores import rows
from longrun.stores._postgres.arrays import Texts
from longrun.stores._postgres.driver import errors
from longrun.stores._postgres.links import Connection
from longrun.stores._postgres.queries import Cursor, Queries
from longrun.stores.assemble import Assembled, BoundaryRow, Parts, boundary_fits, fits, mended, sound, state_fits

_DEFINITION_END = len(rows.DEFINITION_COLUMNS)
_HEAD_START = _DEFINITION_END + 3
_HEAD_END = _HEAD_START + len(rows.HEAD_COLUMNS)
_BOUNDARY_END = len(rows.BOUNDARY_COLUMNS)

_WHOLE = ("load_heads", "load_kept", "load_newest", "load_entries", "load_messages")

Found = dict[str, Assembled | CorruptDataError]
"""What each id turned out to be; an id that is not stored is not in it."""


class Loader:
    """Reads whole executions on one connection."""

    def __init__(self, connection: Connection, queries: Queries) -> None:
        self._connection = connection
        self._queries = queries

    def load(self, ids: Sequence[str]) -> Found:
        """In the order of the ids. All is asked for before the first answer is read."""
        wanted = Texts(ids)
        heads, kept, newest, entries, messages = [self._ask(name, ids=wanted) for name in _WHOLE]
        seen: dict[str, int] = {}
        parts: dict[str, Parts] = {}
        for head in heads:
            parts[head[0]] = _parts(head)
            seen[head[0]] = head[-1]
        numbers: dict[str, list[tuple[int, tuple[str, ...]]]] = {id: [] for id in parts}
        for id, seq, blobs in kept:
            if id in parts:
                numbers[id].append((seq, _names(blobs)))
        for id, *row in newest:
            if id in parts:
                parts[id].boundaries.append(_boundary_row(row))
        for id, key, data, crc in entries:
            if id in parts:
                parts[id].entries[key] = (crc, data)
        for id, *values, crc in messages:
            if id in parts:
                parts[id].messages.append((values, crc))
        self._read_blobs(parts, numbers)
        return {id: self._assembled(parts[id], seen[id]) for id in dict.fromkeys(ids) if id in parts}

    def _read_blobs(self, parts: dict[str, Parts], kept: dict[str, list[tuple[int, tuple[str, ...]]]]) -> None:
        """The numbers of all boundaries that have a state, and the blobs of the newest."""
        for id, numbers in kept.items():
            parts[id].kept = tuple(numbers)
        named = [(id, name) for id, numbers in kept.items() if numbers for name in numbers[-1][1]]
        if named:
            executions, names = Texts([id for id, _ in named]), Texts([name for _, name in named])
            for id, name, data, crc in self._ask("load_blobs", executions=executions, names=names):
                parts[id].blobs[name] = (crc, data)

    def _assembled(self, parts: Parts, seen: int) -> Assembled | CorruptDataError:
        try:
            return sound(parts, seen) or mended(self._all_of(parts), seen)
        except CorruptDataError as error:
            return error

    def _ask(self, name: str, **parameters: Any) -> Cursor:
        return self._queries.run(self._connection, name, **parameters)

    def _all_of(self, parts: Parts) -> Parts:
        """Something is damaged: now every boundary and every blob is wanted."""
        parts.boundaries = [_boundary_row(row) for row in self._ask("load_boundaries", id=parts.id)]
        parts.blobs = {name: (crc, data) for name, data, crc in self._ask("load_all_blobs", id=parts.id)}
        return parts

    # one part alone

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
        wanted = {"executions": Texts([id] * len(names)), "names": Texts(names)}
        found = {name: (data, crc) for _, name, data, crc in self._ask("load_blobs", **wanted)}
        for name in names:
            if name not in found:
                raise CorruptDataError(what, f"its blob {name!r} is missing")
            if rows.blob_crc(id, name, found[name][0]) != found[name][1]:
                raise CorruptDataError(what, f"its blob {name!r} does not fit its checksum")
        return {name: found[name][0] for name in names}


def set_aside(connection: Connection, queries: Queries, id: str, found: Assembled) -> None:
    """Copy what is damaged into quarantine."""
    for damaged in found.damaged:
        queries.run(connection, "quarantine", id=id, part=damaged.part, content=damaged.content)


def set_aside_if_writable(connection: Connection, queries: Queries, id: str, found: Assembled) -> None:
    """For readers: a server that only reads keeps the damaged rows where they are, and nothing is lost."""
    try:
        set_aside(connection, queries, id, found)
    except errors.ReadOnlySqlTransaction:
        return


def repair(connection: Connection, queries: Queries, id: str, found: Assembled) -> None:
    """Set the damage aside, and take out of the way what would be found again."""
    set_aside(connection, queries, id, found)
    queries.run(connection, "retire_states", id=id, seq=found.loaded.boundary.seq)
    for damaged in found.damaged:
        kind, _, key = damaged.part.partition("/")
        if kind == "message":
            queries.run(connection, "remove_message", id=id, number=int(key))
    if found.entries_dropped:
        queries.run(connection, "remove_entries", id=id)


def readable(found: Found) -> Iterable[Loaded]:
    return [one.loaded for one in found.values() if isinstance(one, Assembled)]


def _parts(row: Sequence[Any]) -> Parts:
    crc, steps, steps_crc = row[_DEFINITION_END:_HEAD_START]
    return Parts(
        id=row[0],
        definition=row[:_DEFINITION_END],
        definition_crc=crc,
        steps=steps,
        steps_crc=steps_crc,
        head=row[_HEAD_START:_HEAD_END],
        head_crc=row[_HEAD_END],
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
