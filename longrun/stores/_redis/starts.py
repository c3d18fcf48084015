"""Starts as the strings of the commit script, each in one go.

Place in the life of an execution: start. The bytes are those that `wire` makes.
"""

from __future__ import annotations

from longrun.stored import Create
from longrun.stores._redis import wire
from longrun.stores._redis.strings import NONE, length, number, string

_START = string(b"c") + number(12)
_ONE, _NO_BLOBS = number(1), number(0)


def add(parts: list[bytes], create: Create) -> int:
    """Add the strings of a start; answered is how many bytes its state has, or -1 if it needs more than this."""
    d, head, first, id = create.definition, create.head, create.boundary, create.id.encode()
    data = first.data
    if create.blobs or data is None or head.ended is not None:
        return -1
    control, packed, row = wire.control_bytes(id, head), wire.head_bytes(id, head), wire.row_bytes(id, first)
    moment = repr(d.created)
    known, steps, record = wire.definition_bytes(d, moment), wire.steps_bytes(d), wire.index_record(d, moment)
    state = wire.framed(b"%b\0%d" % (id, first.seq), data)
    parts += (
        _START, length(len(id)), id, length(len(control)), control, length(len(packed)), packed, NONE,
        length(len(known)), known, length(len(steps)), steps, length(len(record)), record,
        _ONE, number(first.seq), length(len(row)), row, length(len(state)), state, _NO_BLOBS,
    )  # fmt: skip
    return len(data)
