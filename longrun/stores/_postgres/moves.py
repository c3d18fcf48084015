"""Plain moves: the saves that most steps make, as one narrow statement.

Place in the life of an execution: checkpoint. A move whose head says nothing that its boundary does not say as well
needs half the columns of a save, and its rows of all three tables come from one `unnest`. What is not plain goes the
way of every save. The checksums are those of `rows`, over what the statement makes of these columns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from longrun.records import ExecutionState
from longrun.stored import Move
from longrun.stores._postgres.arrays import Blobs, Column, Floats, Ints, Texts
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.queries import Queries
from longrun.stores._postgres.writing import Writing

FEW = 16
"""So many moves, or fewer, are not worth a statement of their own beside other saves."""

Row = tuple[Any, ...]

_COLUMNS: tuple[tuple[str, type[Column]], ...] = (
    *(("id", Texts), ("fence", Ints), ("revision", Ints), ("owner", Texts), ("progress", Floats), ("crc", Ints)),
    *(("b_seq", Ints), ("b_kind", Texts), ("b_step", Ints), ("b_name", Texts), ("b_started", Floats)),
    *(("b_ended", Floats), ("b_attempts", Ints), ("b_next", Ints), ("b_visit", Ints), ("b_iteration", Ints)),
    *(("b_size", Ints), ("b_crc", Ints), ("s_data", Blobs), ("s_crc", Ints)),
)
_STRIP = ("strip_before", Ints)

_RUNNING = ExecutionState.RUNNING
_NAN = math.nan
_HEAD = struct.Struct("<8q?7d").pack
_BOUNDARY = struct.Struct("<7q2d").pack


def plain_rows(moves: Sequence[Any], most: int) -> list[Row] | None:
    """In the order of `_COLUMNS`, and `keep_from` last; None if one is not plain, if two are of one execution, or if
    their data is more than `most` bytes."""
    found: list[Row] = []
    size = 0
    for move in moves:
        row = _plain_row(move)
        if row is None:
            return None
        size += len(row[18])
        found.append(row)
    return found if size <= most and len({row[0] for row in found}) == len(found) else None


def _plain_row(move: Move) -> Row | None:
    id, h, b, keep_from = move.id, move.head, move.boundary, move.keep_from
    seq, to, visit, iteration, ended, data, owner = b.seq, b.next, b.visit, b.iteration, b.ended, b.data, h.owner
    if (
        h.state is not _RUNNING
        or not (h.ended is h.due is h.of is None and h.signal is h.error is h.reason is h.note is b.error is None)
        or h.attempt or h.crashes or h.done or h.woken or h.hold or b.blobs or data is None or owner is None
        or not (h.seq == seq and h.step == to and h.visit == visit and h.iteration == iteration)
        or not (h.started == ended == h.updated and (keep_from is None or seq >= keep_from))
    ):  # fmt: skip
        return None
    fence, revision, progress = h.fence, h.revision, h.progress
    step, kind, name, started, attempts, size = b.step, b.kind, b.name, b.started, b.attempts, b.size
    of_head, of_boundary, place = _words(id, owner, kind, name)
    begun = _NAN if started is None else started
    return (
        id,
        fence,
        revision,
        owner,
        progress,
        crc32(
            _HEAD(fence, revision, seq, to, visit, iteration, 0, 0, False, ended, progress, 0, ended, _NAN, _NAN, _NAN),
            of_head,
        ),
        seq,
        kind,
        step,
        name,
        started,
        ended,
        attempts,
        to,
        visit,
        iteration,
        size,
        crc32(_BOUNDARY(seq, step, attempts, to, visit, iteration, size, begun, ended), of_boundary),
        data,
        crc32(data, (place + seq) & 0xFFFFFFFF),
        keep_from,
    )


@lru_cache(4096)
def _words(id: str, owner: str, kind: str, name: str | None) -> tuple[int, int, int]:
    """What the checksums of an execution's head, boundary and state begin with, as in `rows`."""
    head, boundary = f"{id}\0{_RUNNING.value}\0{owner}", f"{id}\0{kind}\0{name}"
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
