"""Heads and boundaries packed into one JSON column each, and back into the columns that `rows` speaks of.

Place in the life of an execution: checkpoint. To bind and rewrite twenty columns takes SQLite several times as long as
one text, and a head is written at every step; so only what a statement searches or compares is a column of its own.
The text is put together by hand because the general encoder takes twice as long. `json_extract` reads it in a shell.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from longrun.stored import Boundary, Head
from longrun.stores.rows import clean

HEAD_FIELDS = (
    *("seq", "step", "visit", "iteration", "attempt", "started", "updated", "ended", "due", "hold", "crashes"),
    *("progress", "done", "of", "signal", "error", "reason", "note"),
)
"""In the order of the text. State, fence, revision, owner and `woken` are columns."""

_NO_WORDS = "null,null,null,null"
_quoted = functools.lru_cache(4096)(json.dumps)
"""Names of steps and kinds of boundaries come again and again."""


def _number(value: float | None) -> float | str:
    return "null" if value is None else value


def head_text(head: Head) -> str:
    h = head
    started, ended, due, of = _number(h.started), _number(h.ended), _number(h.due), _number(h.of)
    words = _NO_WORDS
    if h.signal is not None or h.error is not None or h.reason is not None or h.note is not None:
        words = json.dumps((h.signal, clean(h.error), clean(h.reason), clean(h.note)))[1:-1]
    text = (
        f"[{h.seq},{h.step},{h.visit},{h.iteration},{h.attempt},{started},{h.updated},{ended},{due},"
        f"{'true' if h.hold else 'false'},{h.crashes},{h.progress},{h.done},{of},"
    )
    if "inf" in text or "nan" in text:  # seldom: a wait without an end, a total of infinity
        text = text.replace("inf", "Infinity").replace("nan", "NaN")
    return f"{text}{words}]"


def head_crc(id: str, state: str, fence: int, revision: int, owner: str | None, text: str) -> int:
    return crc32(f"{id}\0{state}\0{fence}\0{revision}\0{owner}\0{text}".encode())


def head_values(text: str, state: str, fence: int, revision: int, owner: str | None, woken: int) -> tuple[Any, ...]:
    """In the order of `rows.HEAD_COLUMNS`. Raises ValueError or TypeError if the text is none of ours."""
    fields = json.loads(text)
    seq, step, visit, iteration, attempt, started, updated, ended, due, hold, crashes = fields[:11]
    progress, done, of, signal, error, reason, note = fields[11:]
    return (
        *(state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated),
        *(ended, due, signal, bool(woken), hold, crashes, error, reason, progress, done, of, note),
    )


def boundary_row(key: int, id: str, boundary: Boundary) -> tuple[Any, ...]:
    """For `ADD_BOUNDARY`."""
    b = boundary
    error = "null" if b.error is None else json.dumps(clean(b.error))
    text = (
        f"[{_quoted(b.kind)},{b.step},{_quoted(b.name)},{_number(b.started)},{b.ended},{b.attempts},{error},"
        f"{b.next},{b.visit},{b.iteration},{b.size}]"
    )
    blobs = json.dumps(b.blobs, separators=(",", ":")) if b.blobs else None
    place = _place(id, b.seq)
    state_crc = None if b.data is None else crc32(b.data, _blobs_crc(place, blobs))
    return key, b.seq, text, crc32(text.encode(), place), state_crc, blobs, b.data


def boundary_values(seq: int, text: str, blobs: str | None, data: bytes | None) -> tuple[Any, ...]:
    """In the order of `rows.BOUNDARY_COLUMNS`. Raises ValueError or TypeError if the text is none of ours."""
    fields: Sequence[Any] = json.loads(text)
    kind, step, name, started, ended, attempts, error, next, visit, iteration, size = fields
    return seq, kind, step, name, started, ended, attempts, error, next, visit, iteration, size, blobs, data


def boundary_fits(id: str, seq: int, text: str, crc: object) -> bool:
    try:
        return crc32(text.encode(), _place(id, seq)) == crc
    except (ValueError, AttributeError):  # not text, or not Unicode
        return False


def state_fits(id: str, seq: int, blobs: str | None, data: bytes | None, crc: object) -> bool:
    try:
        return data is None or crc32(data, _blobs_crc(_place(id, seq), blobs)) == crc
    except (ValueError, AttributeError, TypeError):
        return False


def head_fits(id: str, columns: Sequence[Any], text: str, crc: object) -> bool:
    state, fence, revision, owner = columns
    try:
        return head_crc(id, state, fence, revision, owner, text) == crc
    except ValueError:
        return False


def _place(id: str, seq: int) -> int:
    return crc32(f"{id}\0{seq}".encode())


def _blobs_crc(place: int, blobs: str | None) -> int:
    return place if blobs is None else crc32(blobs.encode(), place)
