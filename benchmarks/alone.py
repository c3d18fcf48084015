"""The stores alone: the bare loop, with the records that longrun keeps and all that its stores promise of them.

Place in the life of a measurement: between longrun and the bare loop. Fence and revision are compared, there are
checksums and a row of history for each step; nothing runs the steps, retries them, or listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import anyio

from benchmarks import bare
from longrun.moves import begun, ending, opening, passing
from longrun.stored import Create, Definition, Owner
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore

WORKFLOW, STEP = "steps", "step"
OWNER = "benchmark"
ALONE = ", the store alone"
"""How the lines of the table end that are about this."""
APART = ", the store and a task for each"
"""And those about `execute_apart`."""


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[CheckpointStore]:
    async with open_store(url) as store:
        await store.register(Owner(id=OWNER, life={}, remaining=60.0), 60.0)
        yield store


def first_write(id: str, steps: int) -> Create:
    """What a start stores: the execution, owned, at its first step."""
    now, data = time.time(), bare.dumps({"n": 0})
    head = begun(1, OWNER, now)
    return Create(
        definition=Definition(id=id, workflow=WORKFLOW, steps=(STEP,) * steps, total=steps, created=now),
        head=head,
        boundary=opening(head, data),
    )


async def execute(store: CheckpointStore, id: str, steps: int) -> int:
    made = first_write(id, steps)
    await store.create(made)
    return await run_steps(store, made, steps)


async def execute_apart(store: CheckpointStore, id: str, steps: int) -> int:
    """The same where a start returns before the steps run, and somebody can stop them: the least of an executor."""
    made = first_write(id, steps)
    await store.create(made)

    async def run() -> int:
        with anyio.CancelScope():
            return await run_steps(store, made, steps)
        raise AssertionError("nobody stops it")

    return await asyncio.create_task(run())


async def run_steps(store: CheckpointStore, made: Create, steps: int) -> int:
    id, state, head = made.id, {"n": 0}, made.head
    while (n := state["n"]) < steps:
        state = await bare.step(state)
        cross = passing if n + 1 < steps else ending
        save = cross(id, head, STEP, time.time(), bare.dumps(state), steps, None)
        await store.save(save)
        head = save.head
    return state["n"]
