"""Moves and ends as the strings of the commit script: the saves that most steps make, each in one go.

Place in the life of an execution: checkpoint, finish. What is said again and again (an execution's id and owner, the
name of a step) is kept packed. The bytes are those that `wire` makes and reads.
"""

from __future__ import annotations

import math
from functools import lru_cache
from zlib import crc32

from longrun.moves import End, Move
from longrun.records import ExecutionState
from longrun.stores._redis import strings, wire

_NAN = math.nan
_RUNNING, _COMPLETED = wire.state_number(ExecutionState.RUNNING), wire.state_number(ExecutionState.COMPLETED)
_SHORT, _MOST = strings.SHORT, len(strings.SHORT) - 100
_STEP, _END = (strings.string(kind) + strings.number(10) for kind in (b"S", b"E"))
_NO_TEXTS = wire.WITHOUT_TEXTS
_HEAD = _SHORT[4 + wire.HEAD.size + len(_NO_TEXTS)]
_ROW = 11 + wire.ROW.size
_pack_crc, _pack_head, _pack_row = wire.CRC.pack, wire.HEAD.pack, wire.ROW.pack

Words = tuple[bytes, str, int, str, bytes, int]


def _words(id: str, owner: str | None) -> Words | None:
    """What one move of an execution shares with the next; without an owner, that of its end. None where it is too long,
    or not for every encoding."""
    tail = "0 completed 0 -" if owner is None else f"0 running 0 ={owner}"
    try:
        known, end = id.encode(), b" " + tail.encode()
    except UnicodeEncodeError:
        return None
    if len(known) + len(end) > _MOST:
        return None
    return strings.string(known), id + "\0", len(known) + 1, tail, strings.string(end), crc32(known)


_kept_words = lru_cache(4096)(_words)


@lru_cache(4096)
def _texts(kind: str, name: str) -> tuple[bytes, bytes] | None:
    """What stands before and in the row of each boundary behind a step; None where it is too long."""
    texts = wire.row_texts(kind, name)
    return None if len(texts) > _MOST else (_SHORT[_ROW + len(texts)], texts)


@lru_cache(1024)
def _numbered(seq: int) -> tuple[bytes, bytes, bytes]:
    """A boundary's number as what its checksum begins with, as the name of its row and as that of its state."""
    return b"\0%d" % seq, strings.number(seq), strings.string(b"s%d" % seq)


def add(parts: list[bytes], move: Move) -> int:
    """Add the strings of a move or an end; answered is how many bytes its state has, or -1 if it needs more."""
    h, started, data, keep_from = move.head, move.started, move.data, move.keep_from
    seq, fence, revision, to, visit, ended = h.seq, h.fence, h.revision, h.step, h.visit, h.updated
    if type(move) is End:
        step, words, named = _END, _words(move.id, None), _texts("finish", move.name)
        head = _pack_head(
            _COMPLETED, False, revision, seq, to, visit, 0, 0, 0, ended, 1.0, 0, _NAN, ended, _NAN, _NAN
        )  # fmt: skip
    else:
        step, named = _STEP, _texts("step", move.name)
        words = None if h.owner is None else _kept_words(move.id, h.owner)
        head = _pack_head(
            _RUNNING, False, revision, seq, to, visit, 0, 0, 0, ended, h.progress, 0, ended, _NAN, _NAN, _NAN
        )  # fmt: skip
    if words is None or named is None:
        return -1
    id, marked, skip, tail, end, crc = words
    row, texts = named
    place, field, state = _numbered(seq)
    control = f"{marked}{fence} {revision} 0 {seq} {tail}".encode()
    before = b" %d %d " % (fence, revision - 1)
    if step is _END:
        end = strings.string(repr(ended).encode())
    size = len(data)
    crossed = _pack_row(seq, to - 1, 1, to, visit, 0, size, _NAN if started is None else started, ended)
    parts += (
        step, id, _SHORT[9 + len(control) - skip], wire.check(control), control[skip:],
        _SHORT[len(before)], before, end,
        _HEAD, _pack_crc(crc32(_NO_TEXTS, crc32(head, crc))), head, _NO_TEXTS,
        field, row, b"%08x 0 " % crc32(texts, crc32(crossed, crc32(b"0 ", crc))), crossed, texts,
        state, _SHORT[4 + size] if size < _MOST else strings.length(4 + size),
        _pack_crc(crc32(data, crc32(place, crc))), data,
        strings.NONE if keep_from is None else strings.number(keep_from),
    )  # fmt: skip
    return size
