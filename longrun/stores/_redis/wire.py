"""Records as the bytes that Redis keeps, and back. Pure: no I/O, no driver.

Place in the life of an execution: checkpoint. Every value carries a checksum over its contents and its identity
(execution id, number or name), so that damage and strayed values are found out (I5).

A head is kept in two parts. The control record holds what the server's own scripts read and change (fence, revision,
owner, `woken`, crashes, state); it is text, and its check is a piece of a SHA-1, which a script can compute. The rest
of the head is packed, as are the rows of boundaries: packing is several times quicker than JSON on the hot path.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote
from zlib import crc32

from attrs import frozen

from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Definition, Head, Message, Owner
from longrun.stores import rows

FORMAT = 1

CRC = struct.Struct("<I")
HEAD = struct.Struct("<B?7q7d")
ROW = struct.Struct("<7q2d")
_SEQ = struct.Struct("<q")
_DOUBLE, _BITS, _SIGN = struct.Struct(">d"), struct.Struct(">Q"), 1 << 63
_NAN = math.nan
_STATES = tuple(ExecutionState)
_BY_NAME = {state.value: state for state in _STATES}
_NUMBERS = {state: number for number, state in enumerate(_STATES)}
_NO_TEXTS: tuple[None, None, None, None] = (None, None, None, None)
_CRC_TEXT, _ROW_START = len(b"01234567 "), len(b"01234567 0 ")


def blanks(length: int, digits: int, times: tuple[int, ...]) -> bytes:
    """What to put behind a value of this length. To a script a string is known by every n-th byte of it, and n grows
    with the length; where these are all alike, the server compares each new string with all others that it ever saw.
    A value differs from others in its first digits, and in the low bytes of times, which begin at these places."""

    def bits(size: int) -> int:
        """That differ, and that a script looks at."""
        step = (size >> 5) + 1
        seen = set(range(size - 1, step - 2, -step))
        return 4 * len(seen & set(range(digits))) + 8 * len(seen & {at + n for at in times for n in (0, 1)})

    return b" " * max(range(8), key=lambda more: bits(length + more))


class DamagedError(Exception):
    """Bytes that do not fit their checksum. Never leaves the store."""


@frozen
class Control:
    """The part of a head that the server's scripts know."""

    fence: int
    revision: int
    crashes: int
    woken: bool
    seq: int
    state: ExecutionState
    wake: str
    owner: str | None


# names in keys and indexes


@lru_cache(4096)
def named(name: str | None) -> str:
    """A workflow, queue or parent as it stands in the name of an index: no blank, no letter but ASCII."""
    return "-" if name is None else "=" + quote(name, safe="", errors="surrogatepass")


def owner_name(owner: str) -> bytes:
    return b"=" + _bytes(owner)


def rank(definition: Definition) -> str:
    """Sorts by its letters as a claim does: highest priority first, then oldest."""
    (bits,) = _BITS.unpack(_DOUBLE.pack(definition.created))
    age = bits | _SIGN if bits < _SIGN else ~bits & 0xFFFFFFFFFFFFFFFF
    return f"{_urgency(definition.priority)}{age:016x}"


@lru_cache(256)
def _urgency(priority: int) -> str:
    return f"{_SIGN - 1 - min(max(priority, -_SIGN), _SIGN - 1):016x}"


def index_record(definition: Definition, moment: str | None = None) -> bytes:
    """`moment` is when it was made as text, which takes longest, where that is known."""
    d = definition
    return f"{rank(d)} {moment or repr(d.created)} {_place(d.queue, d.workflow, d.parent_id)}".encode()


@lru_cache(4096)
def _place(queue: str, workflow: str, parent_id: str | None) -> str:
    return f"{named(queue)} {named(workflow)} {named(parent_id)}"


# framed values: states, blobs, entries


def framed(identity: bytes, data: bytes) -> bytes:
    return CRC.pack(crc32(data, crc32(identity))) + data


def unframed(identity: bytes, value: bytes | None) -> bytes:
    if value is None or len(value) < 4:
        raise DamagedError
    data = value[4:]
    if CRC.unpack_from(value)[0] != crc32(data, crc32(identity)):
        raise DamagedError
    return data


def state_identity(id: str, seq: int) -> bytes:
    return f"{id}\0{seq}".encode()


def blob_identity(id: str, name: bytes) -> bytes:
    return id.encode() + b"\0blob\0" + name


def entry_identity(id: str, key: bytes) -> bytes:
    return id.encode() + b"\0entry\0" + key


def _json(value: Any) -> bytes:
    return rows.json_text(value).encode()


def _from_json(data: bytes) -> Any:
    """Decoded first: of bytes the parser would try to find out the encoding."""
    return json.loads(data.decode())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


# definitions


def definition_bytes(definition: Definition, moment: str | None = None) -> bytes:
    """`moment` as for `index_record`."""
    d = definition
    if d.metadata or type(d.created) is not float or not math.isfinite(d.created):
        fields = [d.workflow, d.version, d.total, d.queue, d.priority, dict(d.metadata), d.parent_id, d.created]
        return framed(d.id.encode() + b"\0definition", _json(fields))
    known = _definition_start(d.workflow, d.version, d.total, d.queue, d.priority, d.parent_id)
    return framed(d.id.encode() + b"\0definition", b"%b%b]" % (known, (moment or repr(d.created)).encode()))


@lru_cache(1024, typed=True)
def _definition_start(*known: Any) -> bytes:
    """All but the moment, which comes last: much the same for every execution of a workflow that has no metadata."""
    *fields, parent_id = known
    return _json([*fields, {}, parent_id])[:-1] + b","


def definition_from(id: str, value: bytes | None, steps: tuple[str, ...] = ()) -> Definition:
    fields = _from_json(unframed(id.encode() + b"\0definition", value))
    workflow, version, total, queue, priority, metadata, parent_id, created = fields
    return Definition(
        id=id,
        workflow=workflow,
        version=version,
        steps=steps,
        total=total,
        queue=queue,
        priority=priority,
        metadata=metadata or EMPTY,
        parent_id=parent_id,
        created=created,
    )


@lru_cache(16)
def _steps_text(steps: tuple[str, ...]) -> bytes:
    """The same for every execution of a workflow."""
    return _json(steps)


def steps_bytes(definition: Definition) -> bytes:
    return framed(definition.id.encode() + b"\0steps", _steps_text(definition.steps))


def steps_from(id: str, value: bytes | None) -> tuple[str, ...]:
    return _known_steps(unframed(id.encode() + b"\0steps", value))


@lru_cache(16)
def _known_steps(text: bytes) -> tuple[str, ...]:
    return tuple(_from_json(text))


# heads


def state_number(state: ExecutionState) -> int:
    """How a head names its state."""
    return _NUMBERS[state]


def wake_text(head: Head) -> str:
    """When it wakes if no message does it: a moment, or "-" for never."""
    if head.state is ExecutionState.RUNNING:
        return "0"
    if head.due is not None:
        return repr(head.due)
    return "-" if head.signal is not None else "0"


def control_bytes(id: bytes, head: Head) -> bytes:
    h = head
    owner = "-" if h.owner is None else "=" + h.owner
    text = (f"{h.fence} {h.revision} {h.crashes} {h.seq} {h.woken:d} {h.state} {wake_text(h)} {owner}").encode(
        "utf-8", "surrogatepass"
    )
    return check(id + b"\0" + text) + text


def check(data: bytes) -> bytes:
    """What stands before a control record, the blank behind it included."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:8].encode() + b" "


def control_from(id: str, value: bytes) -> Control:
    found, blank, text = value.partition(b" ")
    if check(id.encode() + b"\0" + text) != found + blank:
        raise DamagedError
    fence, revision, crashes, seq, woken, state, wake, owner = text.split(b" ", 7)
    return Control(
        int(fence),
        int(revision),
        int(crashes),
        woken == b"1",
        int(seq),
        _BY_NAME[state.decode()],
        wake.decode(),
        None if owner == b"-" else text_of(owner[1:]),
    )


def _without_texts() -> bytes:
    texts, updated, started = _json(_NO_TEXTS), CRC.size + 58, CRC.size + 82
    return texts + blanks(CRC.size + HEAD.size + len(texts), 0, (updated, started))


WITHOUT_TEXTS = _without_texts()
"""What stands behind the numbers of most heads."""


def head_bytes(id: bytes, head: Head) -> bytes:
    h = head
    packed = HEAD.pack(
        _NUMBERS[h.state],
        h.hold,
        h.revision,
        h.seq,
        h.step,
        h.visit,
        h.iteration,
        h.attempt,
        h.crashes,
        h.updated,
        h.progress,
        h.done,
        _NAN if h.started is None else h.started,
        _NAN if h.ended is None else h.ended,
        _NAN if h.due is None else h.due,
        _NAN if h.of is None else h.of,
    )
    texts = (h.signal, h.error, h.reason, h.note)
    packed += WITHOUT_TEXTS if texts == _NO_TEXTS else _json(texts)
    return CRC.pack(crc32(packed, crc32(id))) + packed


def head_from(id: str, control: Control, value: bytes | None) -> Head:
    data = unframed(id.encode(), value)
    numbers = HEAD.unpack_from(data)
    texts = data[HEAD.size :]
    signal, error, reason, note = _NO_TEXTS if texts in (b"", WITHOUT_TEXTS) else _from_json(texts)
    _, hold, _, _, step, visit, iteration, attempt, _, updated, progress, done, started, ended, due, of = numbers
    return Head(
        state=control.state,
        fence=control.fence,
        revision=control.revision,
        owner=control.owner,
        seq=control.seq,
        step=step,
        visit=visit,
        iteration=iteration,
        attempt=attempt,
        started=_some(started),
        updated=updated,
        ended=_some(ended),
        due=_some(due),
        signal=signal,
        woken=control.woken,
        hold=hold,
        crashes=control.crashes,
        error=error,
        reason=reason,
        progress=progress,
        done=done,
        of=_some(of),
        note=note,
    )


def control_from_head(id: str, value: bytes | None) -> Control | None:
    """What a head tells when its control record is damaged: all but fence and owner. None if it is damaged too."""
    try:
        data = unframed(id.encode(), value)
    except DamagedError:
        return None
    number, _, revision, seq, _, _, _, _, crashes = HEAD.unpack_from(data)[:9]
    blank = Control(0, revision, crashes, False, seq, _STATES[number], "-", None)
    wake = wake_text(head_from(id, blank, value))
    return Control(0, revision, crashes, False, seq, _STATES[number], wake, None)


def _some(number: float) -> float | None:
    return None if math.isnan(number) else number


# boundaries


@lru_cache(4096)
def row_texts(kind: str, name: str | None) -> bytes:
    """Of a row without an error and without blobs."""
    texts, started = _json((kind, name, None)), _ROW_START + 56
    return texts + blanks(_ROW_START + ROW.size + len(texts), 8, (started, started + 8))


def row_bytes(id: bytes, boundary: Boundary) -> bytes:
    """ "<crc> <length> <blob names as JSON><numbers><texts>": a script reads the names without the rest."""
    b = boundary
    texts = row_texts(b.kind, b.name) if b.error is None else _json((b.kind, b.name, b.error))
    started = _NAN if b.started is None else b.started
    numbers = ROW.pack(b.seq, b.step, b.attempts, b.next, b.visit, b.iteration, b.size, started, b.ended)
    names = _json(b.blobs) if b.blobs else b""
    rest = b"%d %b%b%b" % (len(names), names, numbers, texts)
    return b"%08x %b" % (crc32(rest, crc32(id)), rest)


def _row_rest(id: str, value: bytes | None) -> bytes:
    try:
        crc, _, rest = (value or b"").partition(b" ")
        if int(crc, 16) != crc32(rest, crc32(id.encode())):
            raise DamagedError
    except ValueError:
        raise DamagedError from None
    return rest


def names_in(id: str, flat: Sequence[bytes]) -> list[tuple[int, tuple[str, ...]]]:
    """Of some rows, number and row in turn, the numbers and the names of their blobs."""
    found: list[tuple[int, tuple[str, ...]]] = []
    start = crc32(id.encode())
    for number, row in zip(flat[::2], flat[1::2], strict=True):
        seq, rest = int(number), row[_CRC_TEXT:]
        plain = rest.startswith(b"0 ") and row.startswith(b"%08x " % crc32(rest, start))
        found.append((seq, () if plain and _SEQ.unpack_from(rest, 2)[0] == seq else row_names(id, seq, row)))
    return found


def row_names(id: str, seq: int, value: bytes | None) -> tuple[str, ...]:
    """Only the names of its blobs."""
    length, _, body = _row_rest(id, value).partition(b" ")
    names, body = body[: int(length)], body[int(length) :]
    if _SEQ.unpack_from(body)[0] != seq:
        raise DamagedError
    return tuple(_from_json(names)) if names else ()


@lru_cache(256)
def _texts(data: bytes) -> tuple[str, str | None, str | None]:
    """Kind, name and error of a row: the same for the same step of every execution."""
    kind, name, error = _from_json(data)
    return kind, name, error


def row_from(id: str, seq: int, value: bytes | None) -> Boundary:
    """Without its state."""
    rest = _row_rest(id, value)
    length, _, body = rest.partition(b" ")
    names, body = body[: int(length)], body[int(length) :]
    number, step, attempts, next, visit, iteration, size, started, ended = ROW.unpack_from(body)
    if number != seq:
        raise DamagedError
    kind, name, error = _texts(body[ROW.size :])
    return Boundary(
        seq=seq,
        kind=kind,
        step=step,
        name=name,
        started=_some(started),
        ended=ended,
        attempts=attempts,
        error=error,
        next=next,
        visit=visit,
        iteration=iteration,
        blobs=tuple(_from_json(names)) if names else (),
        size=size,
    )


# messages and owners


def message_bytes(id: str, message: Message) -> bytes:
    """The server puts the message's number into a second check in front, when it gives it."""
    m = message
    header = _json([m.kind, m.name, m.key, m.payload is not None, dict(m.options), m.sent])
    body = CRC.pack(len(header)) + header + (m.payload or b"")
    return b"%08x%b" % (crc32(body, crc32(id.encode() + b"\0message")), body)


def message_from(id: str, number: bytes, value: bytes) -> Message:
    check = hashlib.sha1(id.encode() + b"\0" + number + b"\0" + value[8:16], usedforsecurity=False).hexdigest()[:8]
    body = value[16:]
    crc = crc32(body, crc32(id.encode() + b"\0message"))
    if value[:8] != check.encode() or value[8:16] != b"%08x" % crc:
        raise DamagedError
    (length,) = CRC.unpack_from(body)
    kind, name, key, has_payload, options, sent = _from_json(body[4 : 4 + length])
    return Message(
        kind=kind,
        name=name,
        key=key,
        payload=body[4 + length :] if has_payload else None,
        options=options or EMPTY,
        sent=sent,
        id=int(number),
    )


def owner_bytes(owner: Owner) -> bytes:
    fields: Sequence[Any] = [dict(owner.life), owner.workflows, owner.queues]
    return framed(_bytes(owner.id) + b"\0owner", _json(fields))


def owner_from(id: bytes, value: bytes, remaining: float) -> Owner:
    """Of a damaged record only the lease is left: its owner may well live, so it is not left out."""
    try:
        life, workflows, queues = _from_json(unframed(id + b"\0owner", value))
    except DamagedError:
        return Owner(id=text_of(id), life={}, remaining=remaining)
    return Owner(id=text_of(id), life=life, remaining=remaining, workflows=tuple(workflows), queues=tuple(queues))


def unpacked(reply: Sequence[bytes]) -> list[bytes | None]:
    """Values that a script packed into two: their lengths, and all their bytes."""
    lengths = reply[0].split()
    if b"-1" not in lengths:
        return list(_cut(lengths, reply[1]))
    present = iter(_cut([length for length in lengths if length != b"-1"], reply[1]))
    return [None if length == b"-1" else next(present) for length in lengths]


def _cut(lengths: list[bytes], body: bytes) -> tuple[bytes, ...]:
    """Pieces of these lengths. The pattern is made for this alone: the module would keep a hundred of them."""
    return struct.Struct(b"s".join([*lengths, b""])).unpack(body)


def pairs(flat: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """A hash as a script returns it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
