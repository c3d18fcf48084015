"""Small records to fill a store with: every argument that a test does not care about has a value.

Place in the life of an execution: none; tests build what the runner would have built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from longrun.moves import End, Move, ending, passing
from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Claim, Create, Definition, Head, Message, Save, Send

NOW = 1_700_000_000.25
"""The moment at which samples are created."""

UNFINISHED = frozenset(state for state in ExecutionState if not state.finished)
EVERY_STATE = frozenset(ExecutionState)
DUE_STATES = frozenset(
    {ExecutionState.INITIALIZED, ExecutionState.WAITING, ExecutionState.RESUMING, ExecutionState.RUNNING}
)


def definition(id: str, **fields: Any) -> Definition:
    values: dict[str, Any] = {"workflow": "flow", "steps": ("one", "two", "three"), "total": 3, "created": NOW}
    return Definition(id=id, **(values | fields))


def head(state: ExecutionState = ExecutionState.RUNNING, **fields: Any) -> Head:
    return Head(state=state, **({"seq": 1, "updated": NOW} | fields))


def boundary(seq: int, **fields: Any) -> Boundary:
    """The start for number 1, the end of a step for any other."""
    data = f"state {seq}".encode()
    values: dict[str, Any] = {
        "kind": "start",
        "step": 0,
        "next": 0,
        "data": data,
        "size": len(data),
        "ended": NOW + seq,
    }
    if seq > 1:
        values |= {"kind": "step", "step": seq - 2, "next": seq - 1, "name": f"step {seq - 1}", "visit": seq}
    return Boundary(seq=seq, **(values | fields))


def create(
    id: str,
    state: ExecutionState = ExecutionState.RUNNING,
    *,
    head_fields: Mapping[str, Any] = EMPTY,
    data: bytes = b"state 1",
    blobs: Mapping[str, bytes] = EMPTY,
    **definition_fields: Any,
) -> Create:
    """A new execution; without a word about the owner nobody owns it."""
    return Create(
        definition=definition(id, **definition_fields),
        head=head(state, **head_fields),
        boundary=boundary(1, data=data, size=len(data), blobs=tuple(blobs)),
        blobs=blobs,
    )


def owned(id: str, owner: str = "me", state: ExecutionState = ExecutionState.RUNNING, **fields: Any) -> Create:
    """A new execution that its creator owns with fence 1, as `Executor.start` makes it."""
    return create(id, state, head_fields={"owner": owner, "fence": 1}, **fields)


def change(id: str, before: Head, *, head_fields: Mapping[str, Any] = EMPTY, **fields: Any) -> Save:
    """The owner's next write: the head before it with a revision more and `head_fields` changed."""
    return Save(id=id, head=attrs.evolve(before, revision=before.revision + 1, **head_fields), **fields)


def step(id: str, before: Head, **fields: Any) -> Save:
    """The checkpoint at the end of a step: one boundary more."""
    seq = before.seq + 1
    after = {"seq": seq, "step": seq - 1, "visit": seq, "updated": NOW + seq}
    return change(id, before, head_fields=after, **({"boundaries": (boundary(seq),)} | fields))


def move(id: str, before: Head, *, keep_from: int | None = None, data: bytes = b"{}") -> Move:
    """The same as the runner makes it where there is nothing else to say."""
    return passing(id, before, f"step {before.seq}", NOW + before.seq + 1, data, 100, keep_from)


def end(id: str, before: Head, *, keep_from: int | None = None, data: bytes = b"{}") -> End:
    """The end behind the last step, in the same way."""
    return ending(id, before, f"step {before.seq}", NOW + before.seq + 1, data, before.step + 1, keep_from)


def signal(name: str = "go", **fields: Any) -> Message:
    return Message(kind="signal", name=name, **({"sent": NOW} | fields))


def send(id: str, name: str = "go", *, limit: int = 1000, **fields: Any) -> Send:
    return Send(id=id, message=signal(name, **fields), limit=limit)


def claim(owner: str = "me", **fields: Any) -> Claim:
    values: dict[str, Any] = {"now": NOW, "states": UNFINISHED}
    return Claim(owner=owner, **(values | fields))
