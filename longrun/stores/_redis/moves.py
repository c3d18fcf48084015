"""Moves as the strings of the commit script: the saves that most steps make, each in one go.

Place in the life of an execution: checkpoint. What an execution says again and again (its id, its owner, the name of
its step) is kept packed. The bytes are those that `wire` makes and reads.
"""

from __future__ import annotations

import math
from functools import lru_cache
from zlib import crc32

from longrun.moves import Move
from longrun.records import ExecutionState
from longrun.stores._redis import strings, wire

_NAN = math.nan
_STATE = wire.state_number(ExecutionState.RUNNING)
_SHORT, _MOST = strings.SHORT, len(strings.SHORT) - 100
_STEP = strings.string(b"S") + strings.number(10)
_NO_TEXTS = wire.WITHOUT_TEXTS
_HEAD = _SHORT[4 + wire.HEAD.size + len(_NO_TEXTS)]
_ROW = 11 + wire.ROW.size
_pack_crc, _pack_head, _pack_row = wire.CRC.pack, wire.HEAD.pack, wire.ROW.pack

Words = tuple[bytes, str, int, str, bytes, int, bytes, bytes]


@lru_cache(4096)
def _words(id: str, owner: str, name: str) -> Words | None:
    """What one move of an execution shares with the next; None where that is too long, or not for every encoding."""
    tail, texts = f"0 running 0 ={owner}", wire.row_texts("step", name)
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
    """Add the strings of a move; answered is how many bytes its state has, or -1 if it needs more than this."""
    h, started, data, keep_from = move.head, move.started, move.data, move.keep_from
    words = None if h.owner is None else _words(move.id, h.owner, move.name)
    if words is None:
        return -1
    id, marked, skip, tail, end, crc, row, texts = words
    seq, fence, revision, to, visit, ended = h.seq, h.fence, h.revision, h.step, h.visit, h.updated
    place, field, state = _numbered(seq)
    control = f"{marked}{fence} {revision} 0 {seq} {tail}".encode()
    before = b" %d %d " % (fence, revision - 1)
    head = _pack_head(
        _STATE, False, revision, seq, to, visit, 0, 0, 0, ended, h.progress, 0, ended, _NAN, _NAN, _NAN
    )  # fmt: skip
    numbers = _pack_row(seq, to - 1, 1, to, visit, 0, len(data), _NAN if started is None else started, ended)
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
