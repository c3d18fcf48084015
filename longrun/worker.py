"""Take executions from a shared store and run them: queues, priorities, limits.

Place in the life of an execution: claim. A worker is an executor that also claims what was submitted, a batch at a
time, never more than it has room for. Many workers share one store; each claim is one atomic act of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import attrs

from longrun.claims import SWEPT_STATES
from longrun.clock import Clock
from longrun.desk import check_name
from longrun.errors import ConfigError
from longrun.events import Listener
from longrun.executor import Executor, end_signals
from longrun.queues import QueueLimit
from longrun.records import ExecutionState, ExecutorConfig
from longrun.registry import StepRegistry
from longrun.stores.store import CheckpointStore
from longrun.telemetry import Observer

CONCURRENCY = 100
"""Executions at once, if nobody says how many."""


class Worker(Executor):
    """Runs what was submitted to its queues, and whatever a dead worker left."""

    swept_states = SWEPT_STATES | {ExecutionState.INITIALIZED}
    leaves_to_sweep = True

    def __init__(
        self,
        registry: StepRegistry,
        *,
        store: CheckpointStore | str,
        queues: Iterable[str] | None = None,
        concurrency: int | None = None,
        limits: Mapping[str, QueueLimit] | None = None,
        config: ExecutorConfig | None = None,
        on_event: Listener | None = None,
        clock: Clock | None = None,
        telemetry: Observer | Iterable[Observer] | None = None,
    ) -> None:
        """`queues` None means all of them. `concurrency` is how many executions run at once: 100, unless it is said
        here or as `max_concurrency` of the configuration. `limits` are set in the store before anything is claimed, for
        all workers on it; they stay when this one has gone. See `limit_queue` for what they mean."""
        if isinstance(queues, str):
            raise ConfigError("queues", queues, "give a list of queue names")
        names = None if queues is None else frozenset(check_name("queue", name) for name in queues)
        if names is not None and not names:
            raise ConfigError("queues", (), "name at least one queue, or give None for all")
        config = config or ExecutorConfig()
        said = config.max_concurrency
        if concurrency is None:
            concurrency = CONCURRENCY if said is None else said
        elif said not in (None, concurrency):
            raise ConfigError("concurrency", concurrency, f"the configuration is for {said}: say it once")
        config = attrs.evolve(config, max_concurrency=concurrency)
        super().__init__(registry, store=store, config=config, on_event=on_event, clock=clock, telemetry=telemetry)
        self.queues = names
        self.sweeper.gates.wanted = _checked(limits or {})

    async def run_forever(self) -> None:
        """Work until SIGTERM or SIGINT, then drain and give the leases back."""
        self.waits_for_pass = False  # which may be long: a signal is obeyed meanwhile
        with ExitStack() as listening:  # from before the first claim: what was claimed is given back
            received = listening.enter_context(end_signals())
            async with self:
                with listening.pop_all():
                    await self._drain_at(received)


def _checked(limits: Mapping[str, QueueLimit]) -> dict[str, QueueLimit]:
    for name, limit in limits.items():
        check_name("limits", name)
        if not isinstance(limit, QueueLimit):
            raise ConfigError("limits", type(limit).__name__, "give a QueueLimit for each queue")
    return dict(limits)
