"""Executions read whole: one, or the thousand that a claim gives, with the same few statements.

Place in the life of an execution: claim. Nearly all are read by `sound`. What that leaves out takes a slower way, and
one that is damaged reads all there is of it: the rows are unpacked and compared with their checksums here; `assemble`
decides what becomes of an execution of which a part is damaged.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs
from attrs import define, field, frozen

from longrun.errors import CorruptDataError
from longrun.stored import Boundary, Head, Message
from longrun.stores import rows
from longrun.stores._sqlite import pack, sql
from longrun.stores._sqlite.sound import read_sound
from longrun.stores.assemble import COMPARED, Assembled, BoundaryRow, Damaged, Parts, fits, mended, quarantined, sound
from longrun.stores.rows import BOUNDARY_COLUMNS, DEFINITION_COLUMNS, HEAD_COLUMNS

_DEFINITION_END = 4 + len(DEFINITION_COLUMNS)
_DAMAGED = -1
"""Stands for a checksum that was compared already and did not fit."""


@frozen
class Found:
    """One execution as it was read: usable, or the error that says why not."""

    key: int
    id: str
    kept: int
    last_message: int
    assembled: Assembled | CorruptDataError
    head: Head | None = None
    """Of what cannot be used and is shown all the same: the head as stored, if that is readable."""
    raw_head: str | None = None
    """The head for the quarantine, if it is not."""


@define
class _Reading:
    """One execution while it is read. `raw` keeps what is packed as it stands in the file, for the quarantine."""

    parts: Parts
    kept: int
    last_message: int
    seen: int = 0
    raw: dict[str, Sequence[Any]] = field(factory=dict)


def load_all(connection: sqlite3.Connection, keys: Sequence[int]) -> list[Found]:
    """In the order of `keys`; those that are not there are left out. Inside a transaction, to be consistent."""
    if not keys:
        return []
    found = {}
    for key, (loaded, kept, last_message) in read_sound(connection, json.dumps(list(keys))).items():
        found[key] = Found(key, loaded.definition.id, kept, last_message, Assembled(loaded))
    if len(found) < len(keys):
        others = _read(connection, [key for key in keys if key not in found])
        found |= {key: _found(connection, key, one) for key, one in others.items()}
    return [found[key] for key in keys if key in found]


def _found(connection: sqlite3.Connection, key: int, one: _Reading) -> Found:
    assembled = _assemble(connection, key, one)
    raw = quarantined(one.raw["head"]) if "head" in one.raw else None
    unusable = isinstance(assembled, CorruptDataError)
    head = rows.head_from(one.parts.head) if unusable and raw is None else None
    return Found(key, one.parts.id, one.kept, one.last_message, assembled, head, raw)


def _assemble(connection: sqlite3.Connection, key: int, one: _Reading) -> Assembled | CorruptDataError:
    try:
        assembled = sound(one.parts, one.seen)
        if assembled is not None:
            return assembled
        _read_rest(connection, key, one)
        assembled = mended(one.parts, one.seen)
    except CorruptDataError as error:
        return error
    damaged = [Damaged(d.part, quarantined(one.raw[d.part])) if d.part in one.raw else d for d in assembled.damaged]
    return attrs.evolve(assembled, damaged=tuple(damaged))


def _read(connection: sqlite3.Connection, keys: Sequence[int]) -> dict[int, _Reading]:
    listed = json.dumps(list(keys))
    everything = dict(map(_unpacked, connection.execute(sql.LOAD_HEADS, (listed,))))
    _read_newest(connection, everything, listed)
    _read_blobs(connection, everything)
    for key, name, crc, data in connection.execute(sql.LOAD_ENTRIES, (listed,)):
        everything[key].parts.entries[name] = (crc, data)
    for key, crc, *values in connection.execute(sql.LOAD_MESSAGES, (listed,)):
        everything[key].parts.messages.append((values, crc))
    return everything


def _unpacked(row: Sequence[Any]) -> tuple[int, _Reading]:
    key, definition_crc, names, names_crc = row[:4]
    definition = row[4:_DEFINITION_END]
    state, fence, revision, owner, woken, numbers, words, crc, kept, last_message = row[_DEFINITION_END:]
    id = definition[0]
    head: tuple[Any, ...]
    try:
        head = pack.head_values(state, fence, revision, owner, woken, numbers, words)
    except pack.UNREADABLE:
        head = (state, fence, revision, owner, *(None for _ in HEAD_COLUMNS[4:]))
    whole = pack.head_fits(id, state, fence, owner, (revision, numbers, words, crc))
    head_crc = COMPARED if whole else _DAMAGED
    one = _Reading(Parts(id, definition, definition_crc, names, names_crc, head, head_crc), kept or 0, last_message)
    if not whole:
        one.raw["head"] = (state, fence, revision, owner, woken, numbers, words, crc)
    return key, one


def _boundary(one: _Reading, row: Sequence[Any]) -> BoundaryRow:
    """A row of `LOAD_BOUNDARIES` with checksums as `assemble` compares them."""
    id = one.parts.id
    seq, numbers, words, crc, state_crc, blobs, data = row
    values: tuple[Any, ...]
    try:
        values = pack.boundary_values(seq, numbers, words, blobs, data)
    except pack.UNREADABLE:
        values = (seq, *(None for _ in BOUNDARY_COLUMNS[1:-2]), blobs, data)
    whole = pack.boundary_fits(id, seq, numbers, words, crc)
    state_whole = pack.state_fits(id, seq, blobs, data, state_crc)
    if not (whole and state_whole):
        one.raw[f"boundary/{seq}"] = one.raw[f"state/{seq}"] = row
    return BoundaryRow(values, COMPARED if whole else _DAMAGED, COMPARED if state_whole else _DAMAGED)


def _read_newest(connection: sqlite3.Connection, everything: dict[int, _Reading], listed: str) -> None:
    """The newest boundary with a state of each, and the names of the blobs of those before it."""
    newest: dict[int, int] = {}
    seen: dict[int, int] = {}
    kept: dict[int, list[tuple[int, tuple[str, ...]]]] = {key: [] for key in everything}
    for key, number, seq, blobs, has_state in connection.execute(sql.LOAD_KEPT, (listed,)):
        seen[key] = seq
        if has_state:
            newest[key] = number
            kept[key].append((seq, _names(blobs) if blobs else ()))
    for key, last in seen.items():
        everything[key].seen, everything[key].parts.kept = last, tuple(kept[key])
    for key, *row in connection.execute(sql.LOAD_BOUNDARIES, (json.dumps(list(newest.values())),)):
        everything[key].parts.boundaries.append(_boundary(everything[key], row))


def _read_blobs(connection: sqlite3.Connection, everything: dict[int, _Reading]) -> None:
    wanted = [
        (key, name)
        for key, one in everything.items()
        for row in one.parts.boundaries
        if row.values[12] is not None
        for name in _names(row.values[12])
    ]
    if wanted:
        for key, name, crc, data in connection.execute(sql.LOAD_BLOBS, (json.dumps(wanted),)):
            everything[key].parts.blobs[name] = (crc, data)


def _read_rest(connection: sqlite3.Connection, key: int, one: _Reading) -> None:
    """All boundaries and blobs of an execution that is damaged, whatever its head says of them."""
    found = connection.execute(sql.ALL_BOUNDARIES, (key,)).fetchall()
    one.parts.boundaries = [_boundary(one, row) for row in found]
    one.parts.blobs = {name: (crc, data) for name, crc, data in connection.execute(sql.ALL_BLOBS, (key,))}
    one.seen = max((row[0] for row in found), default=0)


def _names(blobs: object) -> tuple[str, ...]:
    """Names of blobs as a boundary's row lists them; none where the text is damaged, which its checksum will tell."""
    if not blobs or not isinstance(blobs, str):
        return ()
    try:
        names = json.loads(blobs)
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


# single checkpoints, listings of them, and messages


def read_checkpoint(connection: sqlite3.Connection, id: str, seq: int) -> tuple[Boundary, dict[str, bytes]] | None:
    found = connection.execute(sql.CHECKPOINT, (id, seq)).fetchone()
    if found is None:
        return None
    key, _, numbers, words, crc, state_crc, names, data = found
    what = f"checkpoint {seq} of execution {id!r}"
    if not (pack.boundary_fits(id, seq, numbers, words, crc) and pack.state_fits(id, seq, names, data, state_crc)):
        raise CorruptDataError(what, "it does not fit its checksum")
    boundary = rows.boundary_from(pack.boundary_values(seq, numbers, words, names, data))
    wanted = json.dumps([(key, name) for name in boundary.blobs])
    blobs = {name: (crc, data) for _, name, crc, data in connection.execute(sql.LOAD_BLOBS, (wanted,))}
    for name in boundary.blobs:
        if name not in blobs:
            raise CorruptDataError(what, f"its blob {name!r} is missing")
        if not fits(partial(rows.blob_crc, id, name, blobs[name][1]), blobs[name][0]):
            raise CorruptDataError(what, f"its blob {name!r} does not fit its checksum")
    return boundary, {name: data for name, (_, data) in blobs.items()}


def read_boundaries(connection: sqlite3.Connection, id: str, after: int, limit: int) -> Iterable[Boundary]:
    """Without states; a row that does not fit its checksum is left out."""
    for seq, numbers, words, crc, blobs in connection.execute(sql.BOUNDARIES, (id, after, limit)):
        if pack.boundary_fits(id, seq, numbers, words, crc):
            names = blobs if _names(blobs) else None
            yield rows.boundary_from(pack.boundary_values(seq, numbers, words, names))


def read_head(connection: sqlite3.Connection, id: str) -> Head | None:
    """None if there is none, or it is damaged."""
    key = connection.execute(sql.LOAD_KEY, (id,)).fetchone()
    found = [one for _, one in map(_unpacked, connection.execute(sql.LOAD_HEADS, (json.dumps(key or []),)))]
    return rows.head_from(found[0].parts.head) if found and not found[0].raw else None


def read_messages(connection: sqlite3.Connection, id: str) -> list[Message]:
    key = connection.execute(sql.LOAD_KEY, (id,)).fetchone()
    found = connection.execute(sql.LOAD_MESSAGES, (json.dumps(key or []),)).fetchall()
    whole = [v for _, crc, *v in found if fits(lambda v=v: rows.message_crc(id, v), crc)]  # type: ignore[misc]
    return [rows.message_from(values) for values in whole]
