"""Why nobody takes up what could run: no worker that is alive knows its workflow and looks at its queue.

Place in the life of an execution: between submit and claim. After a rolling deploy, or a mistake in a name, it is left
for a worker that knows it; whoever looks at it meanwhile is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from longrun import lease
from longrun.records import ExecutionState
from longrun.stored import Definition, Head, Owner
from longrun.stores.store import CheckpointStore

NEEDS_WORKER = frozenset({ExecutionState.INITIALIZED, ExecutionState.RUNNING, ExecutionState.RESUMING})


async def living(store: CheckpointStore) -> list[Owner]:
    owners = await store.owners()
    dead = lease.gone(owners)
    return [owner for owner in owners if owner.id not in dead]


def may_be_stranded(head: Head, now: float) -> bool:
    """Whether a worker could take it now, and none has."""
    due = head.due is None or head.woken or head.due <= now
    return due and head.state in NEEDS_WORKER and head.owner is None


def stranded(definition: Definition, head: Head, alive: Iterable[Owner], now: float) -> str | None:
    """What it waits for, in a sentence; None if somebody will take it, or nobody has to."""
    if not may_be_stranded(head, now):
        return None
    for owner in alive:
        knows = definition.workflow in owner.workflows
        if knows and (not owner.queues or definition.queue in owner.queues):
            return None
    return f"It waits for a worker that knows {definition.workflow!r} on queue {definition.queue!r}; none is alive."
