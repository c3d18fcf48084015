"""Moves and ends, the saves that most steps make, as one narrow statement.

Place in the life of an execution: checkpoint, finish. The head of a move says little that its boundary does not say as
well, so it needs a third of the columns of a save, and its rows of all three tables come from one `unnest`. The
checksums are those of `rows`, over what the statement makes of these columns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from longrun.moves import End, Move
from longrun.stores._postgres.arrays import Blobs, Column, Floats, Ints, Texts
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.queries import Queries
from longrun.stores._postgres.writing import Writing

FEW = 16
"""So many moves, or fewer, are not worth a statement of their own beside other saves."""

Row = tuple[Any, ...]

_COLUMNS: tuple[tuple[str, type[Column]], ...] = (
    *(("id", Texts), ("fence", Ints), ("revision", Ints), ("owner", Texts), ("progress", Floats), ("crc", Ints)),
    *(("b_seq", Ints), ("b_name", Texts), ("b_started", Floats), ("b_ended", Floats), ("b_next", Ints)),
    *(("b_visit", Ints), ("b_crc", Ints), ("s_data", Blobs), ("s_crc", Ints)),
)
_DATA = 13
_STRIP = ("strip_before", Ints)

_NAN = math.nan
_HEAD = struct.Struct("<8q?7d").pack
_BOUNDARY = struct.Struct("<7q2d").pack


def narrow_rows(moves: Sequence[Any], most: int) -> list[Row] | None:
    """Of moves, or of ends. In the order of `_COLUMNS`, and `keep_from` last; None if one has no owner to move it or
    does not keep its own state, if two are of one execution, or if their data is more than `most` bytes."""
    found: list[Row] = []
    size = 0
    narrow = _end_row if type(moves[0]) is End else _narrow_row
    for move in moves:
        row = narrow(move)
        if row is None:
            return None
        size += len(row[_DATA])
        found.append(row)
    return found if size <= most and len({row[0] for row in found}) == len(found) else None


def _narrow_row(move: Move) -> Row | None:
    id, h, keep_from, name, started, data = move.id, move.head, move.keep_from, move.name, move.started, move.data
    fence, revision, owner, seq, to, visit, ended = h.fence, h.revision, h.owner, h.seq, h.step, h.visit, h.updated
    if owner is None or (keep_from is not None and seq < keep_from):
        return None
    progress, begun, (of_head, of_boundary, place) = (
        h.progress,
        _NAN if started is None else started,
        _words(id, owner, name),
    )
    head = _HEAD(fence, revision, seq, to, visit, 0, 0, 0, False, ended, progress, 0, ended, _NAN, _NAN, _NAN)
    boundary = _BOUNDARY(seq, to - 1, 1, to, visit, 0, len(data), begun, ended)
    crcs = crc32(head, of_head), crc32(boundary, of_boundary), crc32(data, (place + seq) & 0xFFFFFFFF)
    return (
        *(id, fence, revision, owner, progress, crcs[0], seq, name, started, ended, to, visit, crcs[1]),
        *(data, crcs[2], keep_from),
    )


def _end_row(end: End) -> Row | None:
    """The same for an end: nobody owns it, and nothing is in flight."""
    id, h, keep_from, name, started, data = end.id, end.head, end.keep_from, end.name, end.started, end.data
    fence, revision, seq, to, visit, ended = h.fence, h.revision, h.seq, h.step, h.visit, h.ended
    if keep_from is not None and seq < keep_from:
        return None
    begun = _NAN if started is None else started
    head = _HEAD(fence, revision, seq, to, visit, 0, 0, 0, False, ended, 1.0, 0, _NAN, ended, _NAN, _NAN)
    boundary = _BOUNDARY(seq, to - 1, 1, to, visit, 0, len(data), begun, ended)
    place = crc32(id.encode())
    crcs = crc32(b"\0completed\0None", place), crc32(f"\0finish\0{name}".encode(), place)
    state = crc32(data, (place + seq) & 0xFFFFFFFF)
    return (
        *(id, fence, revision, None, 1.0, crc32(head, crcs[0]), seq, name, started, ended, to, visit),
        *(crc32(boundary, crcs[1]), data, state, keep_from),
    )


@lru_cache(4096)
def _words(id: str, owner: str, name: str) -> tuple[int, int, int]:
    """What the checksums of an execution's head, boundary and state begin with, as in `rows`."""
    head, boundary = f"{id}\0running\0{owner}", f"{id}\0step\0{name}"
    return crc32(head.encode()), crc32(boundary.encode()), crc32(id.encode())


def apply(connection: Connection, queries: Queries, found: Sequence[Row], *, ends: bool) -> list[str]:
    """Write these rows in one statement; answered are the ids for which it was done. An end is told to others, and not
    made where messages may have to be swept."""
    columns = list(zip(*found, strict=True))
    strips = columns[-1].count(None) < len(found)
    if not strips:
        del columns[-1]
    single = len(found) == 1 and isinstance(connection, OwnConnection)
    statement = _statement(queries, single, strips, ends)
    news = queries.news if ends else ()
    if isinstance(connection, OwnConnection) and single:
        return statement.one(connection, found[0] if strips else found[0][:-1], news)
    return statement.many(connection, columns, news)


_MOVE = {"state": "'running'", "started": "w.ended", "ended": "NULL", "kind": "'step'", "unless": ""}
_END = {"state": "'completed'", "started": "NULL", "ended": "w.ended", "kind": "'finish'"}


@lru_cache(64)
def _statement(queries: Queries, single: bool, strips: bool, ends: bool) -> Writing:
    words = {**_END, "unless": queries.text("unless_sent_to")} if ends else dict(_MOVE)
    words |= {"value": ", %(strip_before)s", "name": ", strip_before"} if strips else {"value": "", "name": ""}
    parts = ["move", *(["move_and_strip"] * strips), *(["move_and_clear"] * ends)]
    text = queries.joined([*parts, "answer_and_tell" if ends else "answer"])
    for place, word in words.items():
        text = text.replace(f"{{{place}}}", word)
    return Writing(text, (*_COLUMNS, _STRIP) if strips else _COLUMNS, single=single, tell=ends)
