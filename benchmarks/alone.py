"""The stores alone: the bare loop, with the records that longrun keeps and all that its stores promise of them.

Place in the life of a measurement: between longrun and the bare loop. Fence and revision are compared, there are
checksums and a row of history for each step; nothing runs the steps, retries them, or listens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from benchmarks import bare
from longrun.records import ExecutionState
from longrun.stored import Boundary, Create, Definition, Head, Owner, Save, moved, moving
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore

WORKFLOW, STEP = "steps", "step"
OWNER = "benchmark"
ALONE = ", the store alone"
"""How the lines of the table end that are about this."""


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[CheckpointStore]:
    async with open_store(url) as store:
        await store.register(Owner(id=OWNER, life={}, remaining=60.0), 60.0)
        yield store


def first_write(id: str, steps: int) -> Create:
    """What a start stores: the execution, owned, at its first step."""
    now, data = time.time(), bare.dumps({"n": 0})
    return Create(
        definition=Definition(id=id, workflow=WORKFLOW, steps=(STEP,) * steps, total=steps, created=now),
        head=Head(state=ExecutionState.RUNNING, owner=OWNER, fence=1, revision=1, seq=1, started=now, updated=now),
        boundary=Boundary(seq=1, kind="start", step=0, next=0, ended=now, data=data, size=len(data)),
    )


async def execute(store: CheckpointStore, id: str, steps: int) -> int:
    made = first_write(id, steps)
    await store.create(made)
    state, head, now = {"n": 0}, made.head, made.head.updated
    while (n := state["n"]) < steps:
        state, began = await bare.step(state), now
        data, now = bare.dumps(state), time.time()
        boundary = Boundary(
            seq=n + 2,
            kind="step" if n + 1 < steps else "finish",
            step=n,
            name=STEP,
            started=began,
            ended=now,
            attempts=1,
            next=n + 1,
            visit=n + 2,
            data=data,
            size=len(data),
        )
        head = moved(head, boundary, (n + 1) / steps)
        head.revision += 1
        if n + 1 < steps:
            await store.save(moving(id, head, boundary, None))
        else:
            head.state, head.owner, head.ended = ExecutionState.COMPLETED, None, now
            await store.save(Save(id=id, head=head, boundaries=(boundary,)))
    return state["n"]
