"""From stored bytes to a `Loaded`: every checksum is compared, and what is damaged is kept in quarantine (I5).

Place in the life of an execution: claim. The usual case is read in one call; only where something is damaged is the
rest of an execution read too, and the rule that all stores share (`assemble`) decides what can still be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from longrun.errors import CorruptDataError
from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.stored import Boundary, Head, Loaded, Message
from longrun.stores import rows
from longrun.stores._redis import wire
from longrun.stores._redis.link import Link
from longrun.stores._redis.wire import Control, DamagedError
from longrun.stores.assemble import BoundaryRow, Parts, mended

LOADED = 200
"""Executions in one call, at most."""
BYTES = 8 << 20
"""Bytes in one call, about."""


class Reader:
    """Reads executions. Any thread may use it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._log = get_logger()

    def load(self, id: str) -> Loaded | None:
        for _, found in self.loads([id]):
            if isinstance(found, CorruptDataError):
                raise found
            return found
        return None

    def loads(
        self, ids: Sequence[str], read: Sequence[bytes] = (b"", b"")
    ) -> Iterator[tuple[str, Loaded | CorruptDataError]]:
        """Those of the executions that are there, in order, a few calls for all of them. `read` is what a claim has
        read already of the first ones."""
        at, found = 0, _records(wire.unpacked(read))
        while at < len(ids):
            if not found:
                found = _records(wire.unpacked(self._link.repeated("load", BYTES, "", *ids[at : at + LOADED])))
            for id, raw in zip(ids[at:], found, strict=False):
                if raw is not None:
                    yield id, self._loaded(id, raw)
            at, found = at + len(found), []

    def _loaded(self, id: str, raw: list[Any]) -> Loaded | CorruptDataError:
        try:
            return _sound(id, raw)
        except DamagedError:
            (everything,) = _records(wire.unpacked(self._link.repeated("load", BYTES, "all", id)))
        try:
            return self._mended(id, everything or raw)
        except CorruptDataError as error:
            self._log.warning("store.unreadable", store=self._link.kind, execution=id)
            return error

    def _mended(self, id: str, raw: list[Any]) -> Loaded:
        parts, damaged = _parts(id, raw)
        self.quarantine(id, damaged)
        if parts is None:
            raise CorruptDataError(f"execution {id!r}", "its definition does not fit its checksum")
        seen = max((int(number) for number in raw[5][::2]), default=0)
        control = _control(id, raw)
        return mended(parts, max(seen, control.seq)).loaded

    def quarantine(self, id: str, damaged: Mapping[str, bytes]) -> None:
        if damaged:
            flat = [value for part, data in damaged.items() for value in (part, data)]
            self._link.repeated("quarantine", id, *flat)
            self._log.warning("store.damaged", store=self._link.kind, execution=id, parts=",".join(damaged))

    # parts of an execution

    def head(self, id: str) -> Head | None:
        """None if there is none, or it is damaged."""
        control, head = self._link.read("HMGET", self._link.base + b"x:" + id.encode(), "c", "h")
        try:
            return None if control is None else wire.head_from(id, wire.control_from(id, control), head)
        except (DamagedError, ValueError, KeyError):
            return None

    def boundaries(self, id: str, after: int, limit: int) -> list[Boundary]:
        if limit <= 0:
            return []
        flat, kept = self._link.repeated("boundaries", id, after, limit)
        states = {int(number) for number in kept}
        found: list[Boundary] = []
        for number, row in wire.pairs(flat).items():
            try:
                boundary = wire.row_from(id, int(number), row)
            except DamagedError:
                self.quarantine(id, {f"boundary/{int(number)}": row})
                continue
            found.append(boundary if boundary.seq in states else attrs.evolve(boundary, blobs=()))
        return found

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        found = self._link.repeated("checkpoint", id, seq)
        if found is None:
            return None
        row, state, flat = found
        stored = wire.pairs(flat)
        try:
            boundary = wire.row_from(id, seq, row)
            data = wire.unframed(wire.state_identity(id, seq), state)
            blobs = {name: _blob(id, name, stored) for name in boundary.blobs}
        except DamagedError:
            self.quarantine(id, {f"boundary/{seq}": row or b"", f"state/{seq}": state})
            raise CorruptDataError(f"checkpoint {seq} of execution {id!r}", "it does not fit its checksum") from None
        return attrs.evolve(boundary, data=data), blobs

    def messages(self, id: str) -> list[Message]:
        found: list[Message] = []
        flat = self._link.repeated("messages", id)
        for number, value in wire.pairs(flat).items():
            try:
                found.append(wire.message_from(id, number, value))
            except DamagedError:
                self.quarantine(id, {f"message/{number.decode()}": value})
        return sorted(found, key=_number)


def _records(values: list[Any]) -> list[list[Any] | None]:
    """What the load script gives, an execution each: five values and five lists."""
    found: list[list[Any] | None] = []
    at = 0
    while at < len(values):
        if values[at] is None:
            found.append(None)
            at += 1
            continue
        record = values[at : at + 5]
        at += 5
        for _ in range(5):
            end = at + 1 + int(values[at])
            record.append(values[at + 1 : end])
            at = end
        found.append(record)
    return found


def head_or_rest(id: str, control_value: bytes, head_value: bytes | None) -> Head:
    """A head for a listing: of a damaged one, what its control record tells."""
    try:
        control = wire.control_from(id, control_value)
    except (DamagedError, ValueError, KeyError):
        control = _control_rest(id, head_value)
    try:
        return wire.head_from(id, control, head_value)
    except DamagedError:
        return _bare_head(control)


def _sound(id: str, raw: list[Any]) -> Loaded:
    """The usual case. Raises `DamagedError` if anything at all is wrong."""
    control_value, head_value, definition, steps, record, flat_rows, flat_states, blobs, entries, messages = raw
    try:
        control = wire.control_from(id, control_value)
    except (ValueError, KeyError):
        raise DamagedError from None
    found = wire.definition_from(id, definition, wire.steps_from(id, steps))
    if record != wire.index_record(found) or not flat_states:
        raise DamagedError
    kept = wire.names_in(id, flat_rows)
    seq = int(flat_states[0][1:])
    if not kept or kept[-1][0] != seq:
        raise DamagedError
    newest = wire.row_from(id, seq, flat_rows[-1])
    stored = wire.pairs(blobs)
    newest.data = wire.unframed(wire.state_identity(id, seq), flat_states[1])
    waiting = [wire.message_from(id, number, value) for number, value in wire.pairs(messages).items()]
    return Loaded(
        definition=found,
        head=wire.head_from(id, control, head_value),
        boundary=newest,
        blobs={name: _blob(id, name, stored) for name in newest.blobs},
        entries={
            wire.text_of(key): wire.unframed(wire.entry_identity(id, key), value)
            for key, value in wire.pairs(entries).items()
        },
        messages=tuple(sorted(waiting, key=_number)),
        kept=tuple(kept),
    )


def _blob(id: str, name: str, stored: Mapping[bytes, bytes]) -> bytes:
    field = name.encode("utf-8", "surrogatepass")
    return wire.unframed(wire.blob_identity(id, field), stored.get(field))


def _number(message: Message) -> int:
    return message.id


# damaged executions, in the shape that `assemble` takes


def _control(id: str, raw: list[Any]) -> Control:
    try:
        return wire.control_from(id, raw[0])
    except (DamagedError, ValueError, KeyError):
        return _control_rest(id, raw[1])


def _control_rest(id: str, head_value: bytes | None) -> Control:
    return wire.control_from_head(id, head_value) or Control(0, 0, 0, False, 0, ExecutionState.RUNNING, "-", None)


def _bare_head(control: Control) -> Head:
    return Head(
        state=control.state,
        fence=control.fence,
        revision=control.revision,
        owner=control.owner,
        seq=control.seq,
        woken=control.woken,
        crashes=control.crashes,
        updated=0.0,
    )


def _parts(id: str, raw: list[Any]) -> tuple[Parts | None, dict[str, bytes]]:
    """What the rule of all stores looks at, each part with a checksum that fits or does not; and what is damaged."""
    damaged: dict[str, bytes] = {}
    try:
        definition = wire.definition_from(id, raw[2], wire.steps_from(id, raw[3]))
    except DamagedError:
        return None, {"definition": raw[2] or b"", "steps": raw[3] or b""}
    values = rows.definition_values(definition)
    steps = rows.steps_text(definition.steps)
    parts = Parts(
        id=id,
        definition=values,
        definition_crc=rows.definition_crc(values),
        steps=steps,
        steps_crc=rows.steps_crc(id, steps),
        head=(),
        head_crc=None,
    )
    _add_head(parts, raw, damaged)
    _add_boundaries(parts, raw, damaged)
    _add_values(parts, raw, damaged)
    _add_messages(parts, raw, damaged)
    return parts, damaged


def _add_head(parts: Parts, raw: list[Any], damaged: dict[str, bytes]) -> None:
    try:
        control = wire.control_from(parts.id, raw[0])
        whole = True
    except (DamagedError, ValueError, KeyError):
        control, whole = _control_rest(parts.id, raw[1]), False
        damaged["control"] = raw[0]
    try:
        parts.head = rows.head_values(wire.head_from(parts.id, control, raw[1]))
        parts.head_crc = rows.head_crc(parts.id, parts.head) if whole else None
    except DamagedError:
        damaged["head"] = raw[1] or b""
        parts.head = rows.head_values(attrs.evolve(_bare_head(control), signal=None))


def _add_boundaries(parts: Parts, raw: list[Any], damaged: dict[str, bytes]) -> None:
    found = wire.pairs(raw[5])
    states = {field[1:]: value for field, value in wire.pairs(raw[6]).items()}
    for number in sorted(set(found) | set(states), key=int, reverse=True):
        seq = int(number)
        state: bytes | None = states.get(number)
        fits = state is not None
        try:
            state = wire.unframed(wire.state_identity(parts.id, seq), state)
        except DamagedError:
            fits = False
            damaged[f"state/{seq}"] = state or b""
        try:
            boundary = attrs.evolve(wire.row_from(parts.id, seq, found.get(number)), data=state)
        except DamagedError:
            damaged[f"boundary/{seq}"] = found.get(number, b"")
            parts.boundaries.append(BoundaryRow([seq, *[None] * 12, state], None, None))
            continue
        values = rows.boundary_values(boundary)
        crc = rows.boundary_crc(parts.id, values)
        parts.boundaries.append(BoundaryRow(values, crc, rows.state_crc(parts.id, values) if fits else None))


def _add_values(parts: Parts, raw: list[Any], damaged: dict[str, bytes]) -> None:
    """Blobs and entries."""
    for kind, flat, into in (("blob", raw[7], parts.blobs), ("entry", raw[8], parts.entries)):
        identity = wire.blob_identity if kind == "blob" else wire.entry_identity
        crc = rows.blob_crc if kind == "blob" else rows.entry_crc
        for field, value in wire.pairs(flat).items():
            name = wire.text_of(field)
            try:
                data = wire.unframed(identity(parts.id, field), value)
                into[name] = (crc(parts.id, name, data), data)
            except DamagedError:
                damaged[f"{kind}/{name}"] = value
                into[name] = (None, value)


def _add_messages(parts: Parts, raw: list[Any], damaged: dict[str, bytes]) -> None:
    for number, value in sorted(wire.pairs(raw[9]).items(), key=lambda item: int(item[0])):
        try:
            values = rows.message_values(wire.message_from(parts.id, number, value))
            parts.messages.append((values, rows.message_crc(parts.id, values)))
        except DamagedError:
            damaged[f"message/{number.decode()}"] = value
            parts.messages.append(([int(number), *[None] * 6], None))
