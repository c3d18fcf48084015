"""Writes as arguments of the commit script, in as few pieces as will do, and its answers as the contract has them.

Place in the life of an execution: checkpoint. The common step costs nine arguments; redis-py's time is in arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
    SignalQueueFullError,
    WriteOrderError,
)
from longrun.stored import Boundary, Create, Save, Send, Write
from longrun.stores._redis import format
from longrun.stores.base import Answer

WRITES = 1000
"""Writes in one call of the script, so that the server is not held for long."""
BYTES = 8 << 20
"""Bytes in one call, about."""

Argument = bytes | str | int


class Chunk:
    """Some writes of a batch, as arguments of one call."""

    def __init__(self) -> None:
        self.args: list[Argument] = []
        self.writes: list[Write] = []
        self.size = 0
        self.comparable = True
        """Only saves: a repetition is a comparison, and needs no number."""


def chunks(batch: Sequence[Write]) -> Iterator[Chunk]:
    chunk = Chunk()
    for write in batch:
        if isinstance(write, Save):
            _save(chunk, write)
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


def _save(chunk: Chunk, save: Save) -> None:
    head, id = save.head, save.id.encode()
    control, packed = format.control_bytes(id, head), format.head_bytes(id, head)
    rows = save.boundaries
    keep: Argument = "" if save.keep_from is None else save.keep_from
    rest = save.clear or save.put or save.blobs or save.take or save.drop or save.drop_blobs
    if len(rows) == 1 and not rest and rows[0].data is not None and not head.state.finished:
        row = rows[0]
        state = format.framed(b"%b\0%d" % (id, row.seq), row.data)  # type: ignore[arg-type]  # not None, just above
        chunk.size += len(state)
        chunk.args += ("S", 7, id, control, packed, row.seq, format.row_bytes(id, row), state, keep)
        return
    args: list[Argument] = [id, control, packed, "" if head.ended is None else repr(head.ended), keep, int(save.clear)]
    args += _boundaries(id, rows)
    args += _framed(format.blob_identity, save.id, save.blobs)
    args += _names(save.drop)
    args += _framed(format.entry_identity, save.id, save.put)
    args += (len(save.take), *save.take)
    args += _names(save.drop_blobs)
    _add(chunk, "s", args)


def _create(chunk: Chunk, create: Create) -> None:
    d, head, id = create.definition, create.head, create.id.encode()
    args: list[Argument] = [
        id,
        format.control_bytes(id, head),
        format.head_bytes(id, head),
        "" if head.ended is None else repr(head.ended),
        format.definition_bytes(d),
        format.steps_bytes(d),
        format.index_record(d),
    ]
    args += _boundaries(id, (create.boundary,))
    args += _framed(format.blob_identity, create.id, create.blobs)
    _add(chunk, "c", args)
    chunk.comparable = False


def _send(chunk: Chunk, send: Send) -> None:
    key = b"" if send.message.key is None else b"=" + send.message.key.encode("utf-8", "surrogatepass")
    _add(chunk, "m", [send.id.encode(), send.limit, key, format.message_bytes(send.id, send.message)])
    chunk.comparable = False


def _add(chunk: Chunk, kind: str, args: list[Argument]) -> None:
    chunk.size += sum(len(arg) for arg in args if isinstance(arg, bytes))
    chunk.args += (kind, len(args))
    chunk.args += args


def _boundaries(id: bytes, boundaries: Sequence[Boundary]) -> list[Argument]:
    args: list[Argument] = [len(boundaries)]
    for b in boundaries:
        state = b"" if b.data is None else format.framed(b"%b\0%d" % (id, b.seq), b.data)
        args += (b.seq, format.row_bytes(id, b), state)
    return args


def _framed(identity: Any, id: str, values: Mapping[str, bytes]) -> list[Argument]:
    args: list[Argument] = [len(values)]
    for name, data in values.items():
        field = name.encode("utf-8", "surrogatepass")
        args += (field, format.framed(identity(id, field), data))
    return args


def _names(names: Sequence[str]) -> list[Argument]:
    return [len(names), *(name.encode("utf-8", "surrogatepass") for name in names)]


def answers(chunk: Chunk, reply: bytes, store: str) -> list[Answer]:
    """Of every write in its order. The script only names what is not as expected, and the numbers of messages."""
    found: list[Answer] = [True if isinstance(write, Create) else None for write in chunk.writes]
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
