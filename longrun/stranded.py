"""Why nobody takes up what could run: no worker that is alive knows its workflow and looks at its queue.

Place in the life of an execution: before a claim, of what was submitted, has become due, or was left by somebody who
died. After a rolling deploy, or a mistake in a name, it is left for a worker that knows it; whoever looks at it
meanwhile is told.
"""

from __future__ import annotations

from collections.abc import Collection

from longrun import lease
from longrun.records import ExecutionState
from longrun.registry import AD_HOC
from longrun.stored import Definition, Head, Owner
from longrun.stores.store import CheckpointStore

State = ExecutionState
NEEDS_WORKER = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING})
PARKED = frozenset({State.WAITING})


async def living(store: CheckpointStore) -> list[Owner]:
    owners = await store.owners()
    dead = lease.gone(owners)
    return [owner for owner in owners if owner.id not in dead]


def may_be_stranded(head: Head, now: float, here: str = "") -> bool:
    """Whether a worker could take it now, and none has; or somebody has it who may be dead, as `here` is not."""
    if head.state not in NEEDS_WORKER | PARKED or (here and head.owner == here):
        return False
    if head.due is None:
        return head.woken or head.state not in PARKED
    return head.woken or head.due <= now


def stranded(definition: Definition, head: Head, alive: Collection[Owner], now: float) -> str | None:
    """What it waits for, in a sentence; None if somebody has it or will take it, or nobody has to."""
    if not may_be_stranded(head, now) or head.owner in {owner.id for owner in alive}:
        return None
    if definition.workflow.startswith(AD_HOC) and (head.owner is not None or head.state in PARKED):
        return None  # it has no name that those who know its steps could show
    for owner in alive:
        knows = definition.workflow in owner.workflows
        if knows and (not owner.queues or definition.queue in owner.queues):
            return None
    return f"It waits for a worker that knows {definition.workflow!r} on queue {definition.queue!r}; none is alive."
