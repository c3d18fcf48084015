"""Moves, the saves that most steps make, as one narrow statement.

Place in the life of an execution: checkpoint. The head of a move says little that its boundary does not say as well, so
it needs a third of the columns of a save, and its rows of all three tables come from one `unnest`. The checksums are
those of `rows`, over what the statement makes of these columns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from longrun.moves import Move
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
    """In the order of `_COLUMNS`, and `keep_from` last; None if one has no owner or does not keep its own state, if two
    are of one execution, or if their data is more than `most` bytes."""
    found: list[Row] = []
    size = 0
    for move in moves:
        row = _narrow_row(move)
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


@lru_cache(4096)
def _words(id: str, owner: str, name: str) -> tuple[int, int, int]:
    """What the checksums of an execution's head, boundary and state begin with, as in `rows`."""
    head, boundary = f"{id}\0running\0{owner}", f"{id}\0step\0{name}"
    return crc32(head.encode()), crc32(boundary.encode()), crc32(id.encode())


def apply(connection: Connection, queries: Queries, found: Sequence[Row]) -> list[str]:
    """Write these rows in one statement; answered are the ids for which it was done."""
    columns = list(zip(*found, strict=True))
    strips = columns[-1].count(None) < len(found)
    if not strips:
        del columns[-1]
    single = len(found) == 1 and isinstance(connection, OwnConnection)
    statement = _statement(queries, single, strips)
    if isinstance(connection, OwnConnection) and single:
        return statement.one(connection, found[0] if strips else found[0][:-1], ())
    return statement.many(connection, columns, ())


@lru_cache(64)
def _statement(queries: Queries, single: bool, strips: bool) -> Writing:
    text = queries.joined(["move", "move_and_strip", "answer"] if strips else ["move", "answer"])
    text = text.replace("{value}", ", %(strip_before)s" if strips else "").replace(
        "{name}", ", strip_before" if strips else ""
    )
    return Writing(text, (*_COLUMNS, _STRIP) if strips else _COLUMNS, single=single, tell=False)
