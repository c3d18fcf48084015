"""Plain moves as the strings of the commit script: the saves that most steps make, each in one go.

Place in the life of an execution: checkpoint. What an execution says again and again (its id, its owner, the name of
its step) is kept packed. The bytes are those that `wire` makes and reads; what is not plain goes the way of every save.
"""

from __future__ import annotations

import math
from functools import lru_cache
from zlib import crc32

from longrun.records import ExecutionState
from longrun.stored import Move
from longrun.stores._redis import strings, wire

_RUNNING = ExecutionState.RUNNING
_NAN = math.nan
_STATE = wire.state_number(_RUNNING)
_SHORT, _MOST = strings.SHORT, len(strings.SHORT) - 100
_STEP = strings.string(b"S") + strings.number(10)
_NO_TEXTS = wire.WITHOUT_TEXTS
_HEAD = _SHORT[4 + wire.HEAD.size + len(_NO_TEXTS)]
_ROW = 11 + wire.ROW.size
_pack_crc, _pack_head, _pack_row = wire.CRC.pack, wire.HEAD.pack, wire.ROW.pack

Words = tuple[bytes, str, int, str, bytes, int, bytes, bytes]


@lru_cache(4096)
def _words(id: str, owner: str, kind: str, name: str | None) -> Words | None:
    """What one move of an execution shares with the next; None where that is too long, or not for every encoding."""
    tail, texts = f"0 running 0 ={owner}", wire.row_texts(kind, name)
    try:
        known, end = id.encode(), b" " + tail.encode()
    except UnicodeEncodeError:
        return None
    if max(len(known) + len(end), len(texts)) > _MOST:
        return None
    crc = crc32(known)
    end = strings.string(end)
    return strings.string(known), id + "\0", len(known) + 1, tail, end, crc, _SHORT[_ROW + len(texts)], texts


@lru_cache(1024)
def _numbered(seq: int) -> tuple[bytes, bytes, bytes]:
    """A boundary's number as what its checksum begins with, as the name of its row and as that of its state."""
    return b"\0%d" % seq, strings.number(seq), strings.string(b"s%d" % seq)


def add(parts: list[bytes], move: Move) -> int:
    """Add the strings of a move, if it is plain; answered is how many bytes its state has, or -1 if it is not."""
    h, b = move.head, move.boundary
    owner, data, seq, at = h.owner, b.data, b.seq, h.seq
    if (
        h.state is not _RUNNING
        or owner is None or data is None or h.woken or h.hold or b.blobs
        or not (h.signal is h.error is h.reason is h.note is b.error is None)
    ):  # fmt: skip
        return -1
    words = _words(move.id, owner, b.kind, b.name)
    if words is None:
        return -1
    id, marked, skip, tail, end, crc, row, texts = words
    place, field, state = _numbered(seq)
    fence, revision, crashes, started, keep_from = h.fence, h.revision, h.crashes, b.started, move.keep_from
    control = f"{marked}{fence} {revision} {crashes} {at} {tail}".encode()
    before = b" %d %d " % (fence, revision - 1)
    head = _pack_head(
        _STATE, False, revision, at, h.step, h.visit, h.iteration, h.attempt, crashes, h.updated, h.progress, h.done,
        _NAN if h.started is None else h.started, _NAN if h.ended is None else h.ended,
        _NAN if h.due is None else h.due, _NAN if h.of is None else h.of,
    )  # fmt: skip
    begun = _NAN if started is None else started
    numbers = _pack_row(seq, b.step, b.attempts, b.next, b.visit, b.iteration, b.size, begun, b.ended)
    size = len(data)
    parts += (
        _STEP, id, _SHORT[9 + len(control) - skip], wire.check(control), control[skip:],
        _SHORT[len(before)], before, end,
        _HEAD, _pack_crc(crc32(_NO_TEXTS, crc32(head, crc))), head, _NO_TEXTS,
        field, row, b"%08x 0 " % crc32(texts, crc32(numbers, crc32(b"0 ", crc))), numbers, texts,
        state, _SHORT[4 + size] if size < _MOST else strings.length(4 + size),
        _pack_crc(crc32(data, crc32(place, crc))), data,
        strings.NONE if keep_from is None else strings.number(keep_from),
    )  # fmt: skip
    return size
