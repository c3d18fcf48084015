"""Executions written straight into a store, as many as a test wants."""

from __future__ import annotations

import json
import time
from typing import Any

import attrs

from longrun.records import ExecutionState
from longrun.stored import Boundary, Create, Definition, Head, Save
from longrun.stores.store import CheckpointStore

STATES = ("completed",) * 14 + ("failed",) * 3 + ("cancelled", "paused", "waiting")
CHUNK = 10_000


def created(id: str, *, state: str = "completed", at: float | None = None, steps: int = 3, **fields: Any) -> Create:
    """An execution as it stands some time after its start."""
    at = time.time() if at is None else at
    over = ExecutionState(state).finished
    head = Head(
        state=ExecutionState(state),
        revision=1,
        seq=1,
        step=steps if state == "completed" else steps - 1,
        started=None if over else at,
        updated=at + 2,
        ended=at + 2 if over else None,
        progress=1.0 if state == "completed" else 0.5,
        error=fields.pop("error", None),
        hold=state == "paused",
        signal="go" if state == "waiting" else None,
    )
    names = tuple(f"step-{n}" for n in range(steps))
    definition = Definition(id=id, created=at, steps=names, total=steps, **{"workflow": "import", **fields})
    first = Boundary(seq=1, kind="start", step=0, started=at, ended=at, next=0, data=b"{}", size=2)
    return Create(definition=definition, head=head, boundary=first)


def many(store: CheckpointStore, number: int, *, age: float = 86400.0) -> None:
    """As many executions as asked for, over the last day. The store must be open and used by nobody else yet."""
    now = time.time()
    batch: list[Create] = []
    for n in range(number):
        at = now - age + age * n / number
        one = created(
            f"run-{n:06}",
            state=STATES[n % len(STATES)],
            at=at,
            workflow=("import", "export", "report")[n % 3],
            queue=("default", "slow")[n % 10 == 0],
            metadata={"customer": f"customer {n % 997}"},
        )
        batch.append(one)
        if len(batch) == CHUNK or n == number - 1:
            store.backend.commit(batch)
            batch = []


def long_run(store: CheckpointStore, id: str, steps: int, *, in_flight: bool = True) -> None:
    """An execution of many steps, all but the last done, a few of them retried, slept after or failed."""
    now = time.time()
    begun = now - steps * 0.1
    made = created(id, state="running", at=begun, steps=steps, workflow="long")
    head = attrs.evolve(made.head, step=0, fence=0, started=begun, updated=begun)
    store.backend.commit([attrs.evolve(made, head=head)])
    for first in range(1, steps, CHUNK):
        numbers = range(first, min(first + CHUNK, steps))
        rows = tuple(_row(n, begun) for n in numbers)
        done = rows[-1]
        head = attrs.evolve(
            head,
            revision=head.revision + 1,
            seq=done.seq,
            step=done.next,
            visit=done.seq,
            started=done.ended,
            updated=done.ended,
            progress=done.next / steps,
            done=312,
            of=1000,
        )
        store.backend.commit([Save(id=id, head=head, boundaries=rows)])


def _row(n: int, begun: float) -> Boundary:
    data = json.dumps({"n": n}).encode()
    return Boundary(
        seq=n + 1,
        kind="sleep" if n % 100 == 0 else "step",
        step=n - 1,
        name=f"step-{n - 1}",
        started=begun + (n - 1) * 0.1 + (0.03 if n % 100 == 1 else 0),
        ended=begun + n * 0.1 - (0.02 if n % 100 == 0 else 0),
        attempts=3 if n % 250 == 0 else 1,
        next=n,
        visit=n,
        data=data,
        size=len(data),
    )
