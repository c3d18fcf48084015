"""Heads and boundaries packed into few columns, and back into the columns that `rows` speaks of.

Place in the life of an execution: checkpoint. To bind and rewrite twenty columns takes SQLite several times as long as
one, to write floats as text takes Python as long as the rest of a save, and a head is written at every step. So what a
statement searches or compares is a column of its own; all other numbers are one BLOB (`numbers`: little-endian, eight
bytes each, NaN for a time that is not set), and all other texts one JSON list (`words`).

For every value that is neither a number, nor a text, nor a bytearray, sqlite3 looks for an adapter first, and takes
longer over that than over the rest of the row. So bytes are bound as bytearrays, and an empty text stands for none.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any
from zlib import crc32

from longrun.moves import Begun, Move, Opening
from longrun.records import ExecutionState
from longrun.stored import Boundary, Head
from longrun.stores.rows import boundary_place, clean

_NAN = math.nan
_STATES = {state.value: state for state in ExecutionState}
_HEAD = struct.Struct("<7q?7d")
_PASSING = struct.Struct("<4q2d")
_BOUNDARY = struct.Struct("<6q2d")
_PASSED = struct.Struct("<3q2d")
"""What there is to say of a move, of which there is one for every step: it fills half the pages. The length tells."""
COPIED = 65_536
"""What is larger is bound as it is: then the copy would take longer."""
ReadyMove = tuple[Move, bytearray, int, int, bytearray, str, int, int, str, bytearray]
"""A move, numbers and checksum of its head, and the columns of its boundary behind the key: one object for every step,
and no class."""
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, struct.error)
"""What damaged columns raise here."""


# heads


def head_columns(id: str, head: Head) -> tuple[str, bytearray, str, int]:
    """State, numbers, words and checksum."""
    h = head
    state = h.state._value_
    if h.signal is None and h.error is None and h.reason is None and h.note is None:
        words = ""
    else:
        words = json.dumps((h.signal, clean(h.error), clean(h.reason), clean(h.note)))
    started, ended, due, of = h.started, h.ended, h.due, h.of
    numbers = _HEAD.pack(
        h.revision,
        h.seq,
        h.step,
        h.visit,
        h.iteration,
        h.attempt,
        h.crashes,
        h.hold,
        h.updated,
        h.progress,
        h.done,
        _NAN if started is None else started,
        _NAN if ended is None else ended,
        _NAN if due is None else due,
        _NAN if of is None else of,
    )
    return state, bytearray(numbers), words, crc32(numbers, _place(id, state, h.fence, h.owner, words))


def _place(id: str, state: str, fence: int, owner: str | None, words: str) -> int:
    """What the checksum of a head's numbers begins with."""
    return crc32(f"{id}\0{state}\0{fence}\0{owner}\0{words}".encode())


@lru_cache(4096)
def _places(id: str, fence: int, owner: str | None) -> tuple[int, int]:
    """The same for every step of an execution that does not change hands: what the checksums of its heads begin with,
    and, to which the number is still to be added, those of its boundaries."""
    return _place(id, "running", fence, owner, ""), boundary_place(id, 0)


def start_columns(id: str, head: Begun, boundary: Opening) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `head_columns` gives of the first head, with its revision instead of its state, and `boundary_columns` of
    the first boundary."""
    head_place, place = _places(id, head.fence, head.owner)
    at, data, (words, words_crc) = head.updated, boundary.data, _names("start", None)
    place = place + 1 & 0xFFFFFFFF
    numbers = _HEAD.pack(1, 1, 0, 1, 0, 0, 0, False, at, 0.0, 0.0, at, _NAN, _NAN, _NAN)
    begun = 1, bytearray(numbers), "", crc32(numbers, head_place)
    numbers = _BOUNDARY.pack(0, 0, 0, 1, 0, boundary.size, boundary.started, boundary.ended)
    bound = bytearray(data) if len(data) <= COPIED else data
    crc = crc32(numbers, place) ^ words_crc
    return begun, (1, bytearray(numbers), words, crc, crc32(data, place), "", bound)


def move_columns(move: Move) -> ReadyMove:
    """What `head_columns` and `boundary_columns` give of a move or an end: numbers and checksum of the head, which has
    no words, and the columns of the boundary."""
    id, h, started, data = move.id, move.head, move.started, move.data
    seq, step, visit, at = h.seq, h.step, h.visit, h.updated
    if type(move) is Move:
        words, words_crc = _names("step", move.name)
        head_place, place = _places(id, h.fence, h.owner)
        place = place + seq & 0xFFFFFFFF
        head = _PASSING.pack(h.revision, seq, step, visit, at, h.progress)
    else:
        words, words_crc = _names("finish", move.name)
        head_place, place = _place(id, "completed", h.fence, None, ""), boundary_place(id, seq)
        head = _HEAD.pack(h.revision, seq, step, visit, 0, 0, 0, False, at, 1.0, 0.0, _NAN, at, _NAN, _NAN)
    numbers = _PASSED.pack(step, visit, len(data), _NAN if started is None else started, at)
    crc = crc32(numbers, place) ^ words_crc
    state_crc = crc32(data, place)
    return (
        move,
        bytearray(head),
        crc32(head, head_place),
        seq,
        bytearray(numbers),
        words,
        crc,
        state_crc,
        "",
        bytearray(data),
    )


def head_numbers(numbers: bytes) -> tuple[Any, ...]:
    """As `_HEAD` has them, whichever they are."""
    if len(numbers) != _PASSING.size:
        return _HEAD.unpack(numbers)
    revision, seq, step, visit, at, progress = _PASSING.unpack(numbers)
    return revision, seq, step, visit, 0, 0, 0, False, at, progress, 0.0, at, _NAN, _NAN, _NAN


def head_fits(id: str, state: str, fence: int, owner: str | None, row: Sequence[Any]) -> bool:
    """`row` is revision, numbers, words and checksum. The revision stands in the numbers too, and must be the same."""
    revision, numbers, words, crc = row
    try:
        same: bool = head_numbers(numbers)[0] == revision
        return same and crc32(numbers, _place(id, state, fence, owner, words)) == crc
    except UNREADABLE:
        return False


def head_values(
    state: str, fence: int, revision: int, owner: str | None, woken: int, numbers: bytes, words: str
) -> tuple[Any, ...]:
    """In the order of `rows.HEAD_COLUMNS`. Damaged columns raise one of `UNREADABLE`."""
    _, seq, step, visit, iteration, attempt, crashes, hold, updated, progress, done, *times = head_numbers(numbers)
    started, ended, due, of = [None if math.isnan(moment) else moment for moment in times]
    signal, error, reason, note = json.loads(words) if words else (None, None, None, None)
    return (
        *(state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated),
        *(ended, due, signal, bool(woken), hold, crashes, error, reason, progress, done, of, note),
    )


def head_from(state: str, fence: int, revision: int, owner: str | None, woken: int, numbers: bytes, words: str) -> Head:
    """The head itself. Damaged columns raise one of `UNREADABLE`."""
    _, seq, step, visit, iteration, attempt, crashes, hold, updated, progress, done, *times = head_numbers(numbers)
    started, ended, due, of = [None if moment != moment else moment for moment in times]
    signal, error, reason, note = json.loads(words) if words else (None, None, None, None)
    return Head(
        state=_STATES[state],
        fence=fence,
        revision=revision,
        owner=owner,
        seq=seq,
        step=step,
        visit=visit,
        iteration=iteration,
        attempt=attempt,
        started=started,
        updated=updated,
        ended=ended,
        due=due,
        signal=signal,
        woken=bool(woken),
        hold=hold,
        crashes=crashes,
        error=error,
        reason=reason,
        progress=progress,
        done=done,
        of=of,
        note=note,
    )


# boundaries


@lru_cache(1024)
def _names(kind: str, name: str | None) -> tuple[str, int]:
    """The words of a boundary without an error, and their checksum. As `json.dumps` writes them, at a tenth of the
    price."""
    words = f'["{kind}", {"null" if name is None else encode_basestring_ascii(name)}, null]'
    return words, crc32(words.encode())


@lru_cache(1024)
def _named(words: str) -> tuple[str, str | None, str | None]:
    """Kind, name and error. The same for the same step of every execution."""
    kind, name, error = json.loads(words)
    return kind, name, error


def boundary_numbers(numbers: bytes) -> tuple[Any, ...]:
    """As `_BOUNDARY` has them, whichever they are."""
    if len(numbers) != _PASSED.size:
        return _BOUNDARY.unpack(numbers)
    next, visit, size, started, ended = _PASSED.unpack(numbers)
    return next - 1, 1, next, visit, 0, size, started, ended


BOUNDARY_WIDTH = 8
"""With the execution's key in front."""


def boundary_columns(id: str, boundary: Boundary) -> tuple[Any, ...]:
    """For `ADD_BOUNDARY`, behind the execution's key."""
    b = boundary
    seq, started, data = b.seq, b.started, b.data
    numbers = _BOUNDARY.pack(
        b.step, b.attempts, b.next, b.visit, b.iteration, b.size, _NAN if started is None else started, b.ended
    )
    if b.error is None:
        words, words_crc = _names(b.kind, b.name)
    else:
        words = json.dumps((b.kind, b.name, clean(b.error)))
        words_crc = crc32(words.encode())
    blobs = json.dumps(b.blobs, separators=(",", ":")) if b.blobs else ""
    place = boundary_place(id, seq)
    crc = crc32(numbers, place) ^ words_crc
    if data is None:
        return seq, bytearray(numbers), words, crc, None, blobs, None
    bound = bytearray(data) if len(data) <= COPIED else data
    return seq, bytearray(numbers), words, crc, crc32(data, _blobs_crc(place, blobs)), blobs, bound


def boundary_values(
    seq: int, numbers: bytes, words: str, blobs: str | None = None, data: bytes | None = None
) -> tuple[Any, ...]:
    """In the order of `rows.BOUNDARY_COLUMNS`. Damaged columns raise one of `UNREADABLE`."""
    step, attempts, next, visit, iteration, size, started, ended = boundary_numbers(numbers)
    kind, name, error = _named(words)
    begun = None if math.isnan(started) else started
    return seq, kind, step, name, begun, ended, attempts, error, next, visit, iteration, size, blobs, data


def boundary_from(seq: int, numbers: bytes, words: str, blobs: tuple[str, ...], data: bytes) -> Boundary:
    """The boundary itself. Damaged columns raise one of `UNREADABLE`."""
    step, attempts, next, visit, iteration, size, started, ended = boundary_numbers(numbers)
    kind, name, error = _named(words)
    return Boundary(
        seq=seq,
        kind=kind,
        step=step,
        name=name,
        started=None if started != started else started,
        ended=ended,
        attempts=attempts,
        error=error,
        next=next,
        visit=visit,
        iteration=iteration,
        data=data,
        blobs=blobs,
        size=size,
    )


def boundary_fits(id: str, seq: int, numbers: bytes, words: str, crc: object) -> bool:
    try:
        return crc32(numbers, boundary_place(id, seq)) ^ crc32(words.encode()) == crc
    except UNREADABLE:
        return False


def state_fits(id: str, seq: int, blobs: str | None, data: bytes | None, crc: object) -> bool:
    try:
        return data is None or crc32(data, _blobs_crc(boundary_place(id, seq), blobs)) == crc
    except UNREADABLE:
        return False


def _blobs_crc(place: int, blobs: str | None) -> int:
    return crc32(blobs.encode(), place) if blobs else place
