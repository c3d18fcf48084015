"""Records as database columns, and back; and the checksum that each row carries. Pure: no I/O, no SQL, no driver.

Place in the life of an execution: checkpoint. Every store that keeps rows uses this one mapping.

A checksum covers a row's contents *and* its identity (execution id, number or name), so that a row that strayed to
another place is found out as well. Three things are left out on purpose, because a store changes them alone: `woken`
of a head (it follows from the messages), and a boundary's state, which has a checksum of its own (`state_crc`) since
retention removes it from a row that stays. Whole numbers are packed as 64 bit integers and times as doubles, so that
a column that returns 1.0 for 1 does not look damaged.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Definition, Head, Message, Owner, Save

FORMAT = 1
"""The version of this mapping. A store writes it down once and refuses a higher one."""

DEFINITION_COLUMNS = ("id", "workflow", "version", "total", "queue", "priority", "metadata", "parent_id", "created")
"""Without `steps`, which a listing must not read: see `steps_text`."""

HEAD_COLUMNS = (
    *("state", "fence", "revision", "owner", "seq", "step", "visit", "iteration", "attempt", "started", "updated"),
    *("ended", "due", "signal", "woken", "hold", "crashes", "error", "reason", "progress", "done", "of", "note"),
)

BOUNDARY_COLUMNS = (
    *("seq", "kind", "step", "name", "started", "ended", "attempts", "error", "next", "visit", "iteration", "size"),
    *("blobs", "data"),
)

MESSAGE_COLUMNS = ("id", "kind", "name", "key", "payload", "options", "sent")

_VERSION, _TOTAL = DEFINITION_COLUMNS.index("version"), DEFINITION_COLUMNS.index("total")
_NAN = math.nan
_json = json.JSONEncoder(separators=(",", ":")).encode
_STATES = {state.value: state for state in ExecutionState}
_NEEDS_DUE = frozenset({ExecutionState.INITIALIZED, ExecutionState.WAITING, ExecutionState.RESUMING})
_HEAD = struct.Struct("<8q?7d").pack
_BOUNDARY = struct.Struct("<7q2d").pack
_DEFINITION = struct.Struct("<2qd").pack
_MESSAGE = struct.Struct("<qd").pack


def clean(text: str | None) -> str | None:
    """Free text as every database takes it: what is not Unicode (and NUL) is written as an escape."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def wake_at(head: Head) -> float | None:
    """From when on an execution that nobody owns may be claimed as due: 0 at once, None never by itself."""
    if head.state is ExecutionState.RUNNING:
        return 0.0
    if head.state not in _NEEDS_DUE:
        return None
    if head.woken:
        return 0.0
    if head.due is not None:
        return head.due
    return None if head.signal is not None else 0.0


# definitions


def definition_values(definition: Definition) -> tuple[Any, ...]:
    """In the order of `DEFINITION_COLUMNS`; `metadata` as JSON text."""
    d = definition
    metadata = json_text(d.metadata)
    return d.id, d.workflow, d.version, d.total, d.queue, d.priority, metadata, d.parent_id, d.created


def definition_crc(values: Sequence[Any]) -> int:
    """Of `DEFINITION_COLUMNS` as stored: the metadata's text, byte by byte."""
    id, workflow, version, total, queue, priority, metadata, parent_id, created = values
    text = f"{id}\0{workflow}\0{version}\0{queue}\0{metadata}\0{parent_id}"
    return crc32(text.encode(), crc32(_DEFINITION(total, priority, created)))


def set_named(values: list[Any], save: Save) -> tuple[str, int]:
    """Put into a definition's values what a save that names its steps makes of them; version and total by then."""
    values[_VERSION], values[_TOTAL] = save.version, len(save.steps or ())
    return values[_VERSION], values[_TOTAL]


def definition_from(values: Sequence[Any], steps: tuple[str, ...] = ()) -> Definition:
    fields = dict(zip(DEFINITION_COLUMNS, values, strict=True))
    fields["metadata"] = json_mapping(fields["metadata"])
    return Definition(steps=steps, **fields)


@lru_cache(16)
def steps_text(steps: tuple[str, ...]) -> str:
    """The same for every execution of a workflow."""
    return json.dumps(steps, ensure_ascii=False, separators=(",", ":"))


@lru_cache(16)
def steps_from(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def steps_crc(id: str, text: str) -> int:
    return crc32(f"{id}\0steps\0{text}".encode())


# heads


def head_values(head: Head) -> tuple[Any, ...]:
    """In the order of `HEAD_COLUMNS`; the state as its text, free text cleaned."""
    h = head
    return (
        h.state.value,
        h.fence,
        h.revision,
        h.owner,
        h.seq,
        h.step,
        h.visit,
        h.iteration,
        h.attempt,
        h.started,
        h.updated,
        h.ended,
        h.due,
        h.signal,
        h.woken,
        h.hold,
        h.crashes,
        clean(h.error),
        clean(h.reason),
        h.progress,
        h.done,
        h.of,
        clean(h.note),
    )


def head_crc(id: str, values: Sequence[Any]) -> int:
    """Of `HEAD_COLUMNS` as `head_values` gives them or as a database returns them; `woken` does not count."""
    (state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated, ended,
     due, signal, _woken, hold, crashes, error, reason, progress, done, of, note) = values  # fmt: skip
    numbers = _HEAD(
        fence,
        revision,
        seq,
        step,
        visit,
        iteration,
        attempt,
        crashes,
        hold,
        updated,
        progress,
        done,
        _NAN if started is None else started,
        _NAN if ended is None else ended,
        _NAN if due is None else due,
        _NAN if of is None else of,
    )
    if signal is None and error is None and reason is None and note is None:
        return crc32(numbers, _words(id, state, owner))
    return crc32(f"{signal}\0{error}\0{reason}\0{note}".encode(), crc32(numbers, _words(id, state, owner)))


@lru_cache(4096)
def _words(*words: str | None) -> int:
    """The checksum of what stands in row after row of an execution."""
    return crc32("\0".join(map(str, words)).encode())


def head_from(values: Sequence[Any]) -> Head:
    fields = dict(zip(HEAD_COLUMNS, values, strict=True))
    fields["state"] = _STATES[fields["state"]]
    fields["woken"], fields["hold"] = bool(fields["woken"]), bool(fields["hold"])
    return Head(**fields)


def counts_from(found: Iterable[tuple[str, int]]) -> dict[ExecutionState, int]:
    """How many there are in each state; a damaged one counts as a listing shows it."""
    counts: dict[ExecutionState, int] = {}
    for text, number in found:
        state = _STATES.get(text, ExecutionState.BLOCKED)
        counts[state] = counts.get(state, 0) + number
    return counts


def states_from(found: Iterable[tuple[str, str]]) -> dict[str, ExecutionState]:
    """The state of each by its id; a damaged one as a listing shows it."""
    return {id: _STATES.get(text, ExecutionState.BLOCKED) for id, text in found}


# boundaries


def boundary_values(boundary: Boundary) -> tuple[Any, ...]:
    """In the order of `BOUNDARY_COLUMNS`; `blobs` as JSON text or None, `data` last."""
    b = boundary
    return (
        b.seq,
        b.kind,
        b.step,
        b.name,
        b.started,
        b.ended,
        b.attempts,
        clean(b.error),
        b.next,
        b.visit,
        b.iteration,
        b.size,
        json_text(b.blobs) if b.blobs else None,
        b.data,
    )


def boundary_crc(id: str, values: Sequence[Any]) -> int:
    """Of the small row, without `blobs` and `data`, which retention removes."""
    seq, kind, step, name, started, ended, attempts, error, next, visit, iteration, size, *_ = values
    begun = _NAN if started is None else started
    crc = crc32(_BOUNDARY(seq, step, attempts, next, visit, iteration, size, begun, ended), _words(id, kind, name))
    return crc if error is None else crc32(f"{error}".encode(), crc)


def state_crc(id: str, values: Sequence[Any]) -> int | None:
    """Of `blobs` and `data`, bound to the boundary's number; None where there is no state."""
    blobs, data = values[12], values[13]
    if data is None:
        return None
    place = boundary_place(id, values[0])
    return crc32(data, place if blobs is None else crc32(f"{blobs}".encode(), place))


def boundary_place(id: str, seq: int) -> int:
    """What checksums of a boundary begin with: another number gives another checksum of the same contents."""
    return (crc32(id.encode()) + seq) & 0xFFFFFFFF


def boundary_from(values: Sequence[Any]) -> Boundary:
    fields = dict(zip(BOUNDARY_COLUMNS, values, strict=True))
    fields["blobs"] = tuple(json.loads(fields["blobs"])) if fields["blobs"] else ()
    return Boundary(**fields)


# blobs, entries, messages


def blob_crc(id: str, name: str, data: bytes) -> int:
    return crc32(data, crc32(f"{id}\0blob\0{name}".encode()))


def entry_crc(id: str, key: str, data: bytes) -> int:
    return crc32(data, crc32(f"{id}\0entry\0{key}".encode()))


def message_values(message: Message) -> tuple[Any, ...]:
    """In the order of `MESSAGE_COLUMNS`; `options` as JSON text or None."""
    m = message
    return m.id, m.kind, m.name, m.key, m.payload, json_text(m.options) if m.options else None, m.sent


def message_crc(id: str, values: Sequence[Any]) -> int:
    number, kind, name, key, payload, options, sent = values
    text = f"{id}\0{kind}\0{name}\0{key}\0{options}"
    return crc32(payload or b"", crc32(text.encode(), crc32(_MESSAGE(number, sent))))


def message_from(values: Sequence[Any]) -> Message:
    fields = dict(zip(MESSAGE_COLUMNS, values, strict=True))
    fields["options"] = json_mapping(fields["options"])
    return Message(**fields)


# owners


def owner_from(id: str, life: Any, workflows: Any, queues: Any, remaining: float) -> Owner:
    """Of a damaged row only the lease is left: its owner may well live, so it is not left out."""
    try:
        known, served = _names(workflows), _names(queues)
        return Owner(id=id, life=json_mapping(life), remaining=remaining, workflows=known, queues=served)
    except (ValueError, TypeError, CorruptDataError):
        return Owner(id=id, life=EMPTY, remaining=remaining)


def _names(text: Any) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptDataError("a JSON column", "it holds no list of names")
    return tuple(names)


# JSON columns


def json_text(value: Any) -> str:
    """JSON in ASCII, so that no database refuses a character of it."""
    if value == {}:  # as most are
        return "{}"
    return _json(dict(value) if isinstance(value, Mapping) else value)


def json_mapping(text: str | None) -> Mapping[str, Any]:
    if not text or text == "{}":
        return EMPTY
    value = json.loads(text)
    if not isinstance(value, dict):
        raise CorruptDataError("a JSON column", "it holds no object")
    return value
