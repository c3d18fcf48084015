"""Writes as the one argument of the commit script, and its answers as the contract has them.

Place in the life of an execution: checkpoint. All writes of a call are one MessagePack list of strings, which the
server unpacks in a tenth of the time that it and redis-py need for as many arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
    SignalQueueFullError,
    WriteOrderError,
)
from longrun.moves import End, Move
from longrun.records import ExecutionState
from longrun.stored import Boundary, Create, Definition, Head, Save, Send, Write
from longrun.stores._redis import moves, starts, wire
from longrun.stores._redis.strings import NONE as _NONE
from longrun.stores._redis.strings import number as _number
from longrun.stores._redis.strings import string as _string
from longrun.stores.base import Answer

WRITES = 1000
"""Writes in one call of the script, so that the server is not held for long."""
BYTES = 8 << 20
"""Bytes in one call, about."""


class Chunk:
    """Some writes of a batch, for one call."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self.size = 0
        self.writes: list[Write] = []
        self.comparable = True
        """Only saves: a repetition is a comparison, and needs no number."""

    def add(self, kind: bytes, strings: list[bytes]) -> None:
        self.parts.append(_string(kind) + _number(len(strings)))
        self.parts += strings
        self.count += 2 + len(strings)
        self.size += sum(map(len, strings))

    def argument(self) -> bytes:
        return b"\xdd" + struct.pack(">I", self.count) + b"".join(self.parts)


def chunks(batch: Sequence[Write], renamed: Mapping[int, Definition]) -> Iterator[Chunk]:
    """`renamed` has, by its place in the batch, what each save that sets steps makes of the definition."""
    chunk = Chunk()
    for place, write in enumerate(batch):
        kind = type(write)
        if (kind is Move or kind is End) and (size := moves.add(chunk.parts, write)) >= 0:  # type: ignore[arg-type]
            chunk.count += 12
            chunk.size += size
        elif kind is Create and (size := starts.add(chunk.parts, write)) >= 0:  # type: ignore[arg-type]
            chunk.count += 14
            chunk.size += size
            chunk.comparable = False
        elif isinstance(write, Save):
            _save(chunk, write, renamed.get(place))
        elif isinstance(write, Create):
            _create(chunk, write)
        else:
            _send(chunk, write)
        chunk.writes.append(write)
        if len(chunk.writes) >= WRITES or chunk.size > BYTES:
            yield chunk
            chunk = Chunk()
    if chunk.writes:
        yield chunk


_STEP = _string(b"S") + _number(10)
_STOP = _string(b"P") + _number(10)
_ENDS_BADLY = frozenset({ExecutionState.FAILED, ExecutionState.CANCELLED})


def _save(chunk: Chunk, save: Save, renamed: Definition | None) -> None:
    head, id, rows = save.head, save.id.encode(), save.boundaries
    control = wire.control_bytes(id, head)
    others = bool(save.put or save.blobs or save.take or save.drop or save.drop_blobs or renamed)
    if len(rows) == 1 and not (others or save.clear):
        if rows[0].data is None and _stops(head):
            return _cross(chunk, save, _STOP, control, _ended(head))
        if rows[0].data is not None and head.owner is not None and not head.state.finished:
            return _cross(chunk, save, _STEP, control, _string(b" " + control.split(b" ", 5)[5]))
    keep = _NONE if save.keep_from is None else _number(save.keep_from)
    strings = [_string(id), _string(control), _string(wire.head_bytes(id, head)), _ended(head)]
    strings += [keep, _number(save.clear), *_boundaries(id, rows)]
    strings += _others(save, renamed) if others else _NO_OTHERS
    return chunk.add(b"s", strings)


def _stops(head: Head) -> bool:
    """Whether it pauses where it runs, or ends without a result."""
    return head.state in _ENDS_BADLY if head.owner is None else head.state is ExecutionState.PAUSED


def _cross(chunk: Chunk, save: Save, kind: bytes, control: bytes, compared: bytes) -> None:
    """A save that crosses one boundary and does nothing else."""
    head, row, id = save.head, save.boundaries[0], save.id.encode()
    state = _NONE if row.data is None else _string(wire.framed(b"%b\0%d" % (id, row.seq), row.data))
    keep = _NONE if save.keep_from is None else _number(save.keep_from)
    seq = b"%d" % row.seq
    before = b" %d %d " % (head.fence, head.revision - 1)
    chunk.parts += (kind, _string(id), _string(control), _string(before), compared, _string(wire.head_bytes(id, head)))
    chunk.parts += (_string(seq), _string(wire.row_bytes(id, row)), _string(b"s" + seq), state, keep)
    chunk.count += 12
    chunk.size += len(state)


_NO_OTHERS = [*[_number(0)] * 5, _NONE, _NONE]


def _others(save: Save, renamed: Definition | None) -> list[bytes]:
    strings = _framed(wire.blob_identity, save.id, save.blobs)
    strings += _names(save.drop)
    strings += _framed(wire.entry_identity, save.id, save.put)
    strings += (_number(len(save.take)), *map(_number, save.take))
    strings += _names(save.drop_blobs)
    if renamed is None:
        strings += (_NONE, _NONE)
    else:
        strings += (_string(wire.definition_bytes(renamed)), _string(wire.steps_bytes(renamed)))
    return strings


def _create(chunk: Chunk, create: Create) -> None:
    d, head, id = create.definition, create.head, create.id.encode()
    strings = [
        _string(id),
        _string(wire.control_bytes(id, head)),
        _string(wire.head_bytes(id, head)),
        _ended(head),
        _string(wire.definition_bytes(d)),
        _string(wire.steps_bytes(d)),
        _string(wire.index_record(d)),
    ]
    strings += _boundaries(id, (create.boundary,))
    strings += _framed(wire.blob_identity, create.id, create.blobs)
    chunk.add(b"c", strings)
    chunk.comparable = False


def _send(chunk: Chunk, send: Send) -> None:
    key = b"" if send.message.key is None else b"=" + send.message.key.encode("utf-8", "surrogatepass")
    message = wire.message_bytes(send.id, send.message)
    chunk.add(b"m", [_string(send.id.encode()), _number(send.limit), _string(key), _string(message)])
    chunk.comparable = False


def _ended(head: Head) -> bytes:
    return _NONE if head.ended is None else _string(repr(head.ended).encode())


def _boundaries(id: bytes, boundaries: Sequence[Boundary]) -> list[bytes]:
    strings = [_number(len(boundaries))]
    for b in boundaries:
        state = b"" if b.data is None else wire.framed(b"%b\0%d" % (id, b.seq), b.data)
        strings += (_number(b.seq), _string(wire.row_bytes(id, b)), _string(state))
    return strings


def _framed(identity: Callable[[str, bytes], bytes], id: str, values: Mapping[str, bytes]) -> list[bytes]:
    strings = [_number(len(values))]
    for name, data in values.items():
        field = name.encode("utf-8", "surrogatepass")
        strings += (_string(field), _string(wire.framed(identity(id, field), data)))
    return strings


def _names(names: Sequence[str]) -> list[bytes]:
    return [_number(len(names)), *(_string(name.encode("utf-8", "surrogatepass")) for name in names)]


def answers(chunk: Chunk, reply: bytes, store: str) -> list[Answer]:
    """Of every write in its order. The script only names what is not as expected, and the numbers of messages."""
    found: list[Answer] = [None] * len(chunk.writes)
    if not chunk.comparable:
        found = [True if isinstance(write, Create) else None for write in chunk.writes]
    for item in reply.decode().split():
        place, _, code = item.partition("=")
        found[int(place)] = _answer(chunk.writes[int(place)], code, store)
    return found


def _answer(write: Write, code: str, store: str) -> bool | int | LongrunError:
    kind, value = code[0], code[1:]
    if kind == "x":
        return False
    if kind == "m":
        return int(value)
    if kind == "n":
        return ExecutionNotFoundError(write.id)
    if isinstance(write, Send) and kind == "f":
        return SignalQueueFullError(write.id, write.limit)
    if isinstance(write, Save) and kind == "l":
        return LeaseLostError(write.id, write.head.fence)
    if isinstance(write, Save) and kind == "w":
        return WriteOrderError(store, write.id, int(value), write.head.revision)
    return CorruptDataError(f"execution {write.id!r}", "one of its keys is not what the store put there")
