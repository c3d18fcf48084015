"""From stored rows to a `Loaded`: every checksum is compared, and what is damaged is set aside (I5). Pure, no I/O.

Place in the life of an execution: claim. A store reads the rows; this module decides what of them can be used.

The newest boundary whose row, state and blobs are all readable is the one to go on from. If that is not the newest
there is, or the head is damaged, the head is moved back to it. Entries belong to one visit of a step and were captured
together, so one damaged entry discredits them all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import define, field, frozen

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Boundary, Definition, Head, Loaded, Message
from longrun.stores import rows

_STATES = {state.value for state in ExecutionState}
COMPARED: Any = type("Compared", (int,), {"__repr__": lambda self: "compared"})()
"""Stands for a checksum that a store has compared itself, over the bytes as they are stored, and that fits."""


@frozen
class BoundaryRow:
    values: Sequence[Any] = field(repr=False)
    """In the order of `BOUNDARY_COLUMNS`."""
    crc: Any
    state_crc: Any


@define
class Parts:
    """The rows of one execution as a database returned them, checksums unchecked."""

    id: str
    definition: Sequence[Any]
    definition_crc: Any
    steps: Any
    steps_crc: Any
    head: Sequence[Any]
    head_crc: Any
    boundaries: list[BoundaryRow] = field(factory=list)
    """Newest first. Those with a state matter; a store may begin with the newest of them and give more if asked."""
    blobs: dict[str, tuple[Any, Any]] = field(factory=dict)
    """Name to checksum and data."""
    entries: dict[str, tuple[Any, Any]] = field(factory=dict)
    messages: list[tuple[Sequence[Any], Any]] = field(factory=list)
    kept: tuple[tuple[int, tuple[str, ...]], ...] = ()


@frozen
class Damaged:
    """One row that does not fit its checksum, for the quarantine."""

    part: str
    """head, boundary/3, state/3, blob/name, entry/key or message/7."""
    content: str = field(repr=False)
    """All of it, as JSON; bytes as hexadecimal."""


@frozen
class Assembled:
    loaded: Loaded
    damaged: tuple[Damaged, ...] = ()
    entries_dropped: bool = False


def fits(crc: Callable[[], int | None], stored: object) -> bool:
    """Whether a checksum agrees. Values of a wrong type, or text that is none, count as damage."""
    if stored is COMPARED:
        return True
    try:
        return crc() == stored
    except (ValueError, TypeError, OverflowError, struct.error):
        return False


def boundary_fits(id: str, row: BoundaryRow) -> bool:
    return fits(lambda: rows.boundary_crc(id, row.values), row.crc)


def state_fits(id: str, row: BoundaryRow) -> bool:
    return fits(lambda: rows.state_crc(id, row.values), row.state_crc)


def definition_of(parts: Parts) -> Definition:
    """There is no second copy of a definition: if it is damaged, nothing of the execution can be used."""
    if not fits(lambda: rows.definition_crc(parts.definition), parts.definition_crc):
        raise CorruptDataError(f"execution {parts.id!r}", "its definition does not fit its checksum")
    if not fits(lambda: rows.steps_crc(parts.id, parts.steps), parts.steps_crc):
        raise CorruptDataError(f"execution {parts.id!r}", "its list of steps does not fit its checksum")
    return rows.definition_from(parts.definition, rows.steps_from(parts.steps))


def sound(parts: Parts, seen: int) -> Assembled | None:
    """The usual case, from the newest boundary with a state alone; None if anything at all is wrong.

    `seen` is the highest boundary number there is: a head that is past it has lost a boundary."""
    if not parts.boundaries or not fits(lambda: rows.head_crc(parts.id, parts.head), parts.head_crc):
        return None
    head = rows.head_from(parts.head)
    row = parts.boundaries[0]
    if head.seq > seen or not (boundary_fits(parts.id, row) and state_fits(parts.id, row)):
        return None
    boundary = rows.boundary_from(row.values)
    if not all(name in parts.blobs and _blob_fits(parts, name) for name in boundary.blobs):
        return None
    if not all(_entry_fits(parts, key) for key in parts.entries):
        return None
    if not all(_message_fits(parts, message) for message in parts.messages):
        return None
    return Assembled(
        Loaded(
            definition=definition_of(parts),
            head=head,
            boundary=boundary,
            blobs={name: parts.blobs[name][1] for name in boundary.blobs},
            entries={key: data for key, (_, data) in parts.entries.items()},
            messages=tuple([rows.message_from(values) for values, _ in parts.messages]),
            kept=parts.kept,
        )
    )


def mended(parts: Parts, seen: int) -> Assembled:
    """From all rows of an execution, some of them damaged. `seen` is the highest boundary number there is."""
    definition = definition_of(parts)
    damaged: list[Damaged] = []
    notes: list[str] = []
    boundary = _newest_readable(parts, damaged, notes)
    head, intact = _readable_head(parts, boundary, damaged, notes)
    newest = max([seen, head.seq, *(row.values[0] for row in parts.boundaries if isinstance(row.values[0], int))])
    dropped = not _all_entries_fit(parts, damaged, notes)
    if not intact or boundary.seq != _newest_state(parts) or newest > seen:
        dropped = dropped or head.visit != boundary.visit
        notes.append(f"execution went back to checkpoint {boundary.seq}, step {boundary.next}")
        head = attrs.evolve(
            head, step=boundary.next, visit=boundary.visit, iteration=boundary.iteration, attempt=0, seq=newest
        )
    loaded = Loaded(
        definition=definition,
        head=head,
        boundary=boundary,
        blobs={name: parts.blobs[name][1] for name in boundary.blobs},
        entries={} if dropped else {key: data for key, (_, data) in parts.entries.items()},
        messages=_readable_messages(parts, damaged, notes),
        kept=tuple(_kept(parts, boundary.seq)),
        damage=tuple(notes),
    )
    return Assembled(loaded, tuple(damaged), dropped)


def _newest_readable(parts: Parts, damaged: list[Damaged], notes: list[str]) -> Boundary:
    for row in parts.boundaries:
        number = row.values[0]
        if not boundary_fits(parts.id, row):
            _set_aside(damaged, notes, f"boundary/{number}", [*row.values, row.crc, row.state_crc])
        elif row.values[13] is None:
            continue
        elif not state_fits(parts.id, row):
            _set_aside(damaged, notes, f"state/{number}", [*row.values, row.crc, row.state_crc])
        else:
            boundary = rows.boundary_from(row.values)
            if _all_blobs_fit(parts, boundary, damaged, notes):
                return boundary
    raise CorruptDataError(f"execution {parts.id!r}", "none of its checkpoints can be read")


def _readable_head(parts: Parts, boundary: Boundary, damaged: list[Damaged], notes: list[str]) -> tuple[Head, bool]:
    """The head, and whether it was intact. Of a damaged one the columns that can be true are believed."""
    if fits(lambda: rows.head_crc(parts.id, parts.head), parts.head_crc):
        return rows.head_from(parts.head), True
    _set_aside(damaged, notes, "head", [*parts.head, parts.head_crc])
    found = dict(zip(rows.HEAD_COLUMNS, parts.head, strict=True))
    state = found["state"] if found["state"] in _STATES else ExecutionState.RUNNING.value
    head = Head(
        state=ExecutionState(state),
        fence=_whole(found["fence"]),
        revision=_whole(found["revision"]),
        owner=_text(found["owner"]),
        seq=boundary.seq,
        updated=_time(found["updated"]) or boundary.ended,
        ended=_time(found["ended"]),
        due=_time(found["due"]),
        signal=_text(found["signal"]),
        woken=bool(found["woken"]),
        hold=bool(found["hold"]),
        crashes=min(_whole(found["crashes"]), 1),
    )
    return head, False


def _all_blobs_fit(parts: Parts, boundary: Boundary, damaged: list[Damaged], notes: list[str]) -> bool:
    whole = True
    for name in boundary.blobs:
        if name not in parts.blobs:
            notes.append(f"blob/{name} is missing")
            whole = False
        elif not _blob_fits(parts, name):
            _set_aside(damaged, notes, f"blob/{name}", [name, *parts.blobs[name]])
            whole = False
    return whole


def _all_entries_fit(parts: Parts, damaged: list[Damaged], notes: list[str]) -> bool:
    bad = [key for key in parts.entries if not _entry_fits(parts, key)]
    for key in bad:
        _set_aside(damaged, notes, f"entry/{key}", [key, *parts.entries[key]])
    if bad:
        notes.append("progress inside the step was dropped")
    return not bad


def _readable_messages(parts: Parts, damaged: list[Damaged], notes: list[str]) -> tuple[Message, ...]:
    good = []
    for values, crc in parts.messages:
        if _message_fits(parts, (values, crc)):
            good.append(rows.message_from(values))
        else:
            _set_aside(damaged, notes, f"message/{values[0]}", [*values, crc])
    return tuple(good)


def _kept(parts: Parts, newest: int) -> Iterable[tuple[int, tuple[str, ...]]]:
    for row in reversed(parts.boundaries):
        if row.values[13] is None or row.values[0] > newest:
            continue
        if boundary_fits(parts.id, row) and state_fits(parts.id, row):
            yield row.values[0], rows.boundary_from(row.values).blobs


def _newest_state(parts: Parts) -> object:
    return next((row.values[0] for row in parts.boundaries if row.values[13] is not None), None)


def _blob_fits(parts: Parts, name: str) -> bool:
    crc, data = parts.blobs[name]
    return fits(lambda: rows.blob_crc(parts.id, name, data), crc)


def _entry_fits(parts: Parts, key: str) -> bool:
    crc, data = parts.entries[key]
    return fits(lambda: rows.entry_crc(parts.id, key, data), crc)


def _message_fits(parts: Parts, message: tuple[Sequence[Any], Any]) -> bool:
    return fits(lambda: rows.message_crc(parts.id, message[0]), message[1])


def _set_aside(damaged: list[Damaged], notes: list[str], part: str, values: Sequence[Any]) -> None:
    damaged.append(Damaged(part, quarantined(values)))
    notes.append(f"{part} does not fit its checksum")


def quarantined(values: Sequence[Any] | Mapping[str, Any]) -> str:
    """A damaged row as text that any column can hold and that loses no byte."""
    return json.dumps(values, default=lambda value: {"hex": bytes(value).hex()})


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(value: object) -> str | None:
    try:
        return value if isinstance(value, str) and value.encode() else None
    except UnicodeEncodeError:
        return None
