"""Run many: start, resume, control and drain. The `Executor` is what most programs use of this library.

Place in the life of an execution: start, claim, and leaving. It owns executions under one lease; each has a `Runner`
while it runs, a line in an index while it is paused here, and nothing at all while it waits.
"""

from __future__ import annotations

import builtins
import signal as signals
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import anyio

from longrun import views
from longrun.clock import Clock
from longrun.errors import ConfigError, ExecutionNotFoundError
from longrun.events import ExecutionEvent, Listener, Subscription
from longrun.following import RowEvents, RunEvents
from longrun.handle import ExecutionHandle
from longrun.office import Office
from longrun.records import Checkpoint, Execution, ExecutionState, ExecutorConfig, Progress, ResumeReport, check_id
from longrun.registry import StepRegistry, Workflow
from longrun.starting import Steps
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore
from longrun.telemetry import Observer, Watch

State = ExecutionState


def end_signals() -> AbstractContextManager[AsyncIterator[signals.Signals]]:
    """The signals that ask a program to end, while it is open."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("serve", "in a thread", "signals reach only the main one: leave the executor there instead")
    return anyio.open_signal_receiver(signals.SIGTERM, signals.SIGINT)


class Executor(Office):
    """Runs workflows of a registry, checkpoints them in a store, and takes up what a crash left."""

    def __init__(
        self,
        registry: StepRegistry,
        *,
        store: CheckpointStore | str | None = None,
        config: ExecutorConfig | None = None,
        on_event: Listener | None = None,
        clock: Clock | None = None,
        strict: bool = False,
        telemetry: Observer | Iterable[Observer] | None = None,
    ) -> None:
        _check_kind("registry", registry, StepRegistry)
        config = ExecutorConfig() if config is None else config
        _check_kind("config", config, ExecutorConfig)
        if on_event is not None and not callable(on_event):
            raise ConfigError("on_event", type(on_event).__name__, "give a function, plain or async")
        if not isinstance(store, CheckpointStore):
            store = open_store(store if store is not None else f"file:{config.checkpoint_dir}")
        super().__init__(registry, store, config, clock, strict)
        self.telemetry = Watch.of(telemetry)
        self._on_event = on_event

    # entering and leaving

    async def __aenter__(self) -> Self:
        self.sweeper.passes = self.config.auto_resume and not self.waits_for_pass
        await super().__aenter__()
        if self.config.auto_resume and self.waits_for_pass:
            try:
                await self.auto_resume_all()
            except BaseException as error:
                await self.__aexit__(type(error), error, None)
                raise
        return self

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT, then drain. A second signal ends the patience with steps that still run."""
        with end_signals() as received:
            await self._drain_at(received)

    async def _drain_at(self, received: AsyncIterator[signals.Signals]) -> None:
        async for number in received:
            self.log.info("executor.signal", signal=signals.Signals(number).name)
            break
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hurry_at, received, name="longrun-second-signal")
            with anyio.CancelScope(shield=True):
                await self.drain()
            tasks.cancel_scope.cancel()

    async def _hurry_at(self, received: AsyncIterator[signals.Signals]) -> None:
        async for number in received:
            self.log.warning("executor.hurried", signal=signals.Signals(number).name)
            self.hurry()

    async def auto_resume_all(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here that has no living owner."""
        self.check_signed_on()
        return await self.sweeper.resume_all()

    # starting

    async def start(
        self, workflow: Steps, state: Any = None, *, id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> ExecutionHandle:
        """Store a new execution as running, then run it here. An `id` given before returns that execution's handle."""
        found = self.resolved(workflow)
        made = self.new(found, state, self.begun(), id=id, metadata=metadata)
        if not await self.create(made):
            await self.start_again(made, found)
        return ExecutionHandle(self, made.id)

    def find_workflow(self, workflow: Any) -> Workflow:
        return self.resolved(workflow)

    # looking

    def live_progress(self, id: str) -> Progress | None:
        runner = self.runners.get(id)
        return None if runner is None else runner.live_progress

    def look_here(self, id: str) -> Execution | None:
        runner = self.runners.get(id)
        if runner is None:
            return None
        definition, head, live = runner.book.definition, runner.head, runner.live_progress
        return views.execution(definition, head, live, self.forecaster.at_once(definition, head, live))

    async def history(self, id: str) -> builtins.list[Checkpoint]:
        """The checkpoints whose states are kept, oldest first: as many as the retention policy says."""
        return (await super().history(id))[-self.config.retention.history :]

    async def handle(self, id: str) -> ExecutionHandle:
        """A handle on an execution that exists."""
        if not await self.store.exists(check_id(id)):
            raise ExecutionNotFoundError(id)
        return ExecutionHandle(self, id)

    def events(self) -> Subscription:
        """An async iterator of the events of everything that runs here, from now on."""
        return self.bus.subscribe()

    def events_of(self, id: str) -> AsyncIterator[ExecutionEvent]:
        return RunEvents(self, id) if check_id(id) in self.runners else RowEvents(self, id)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(name, type(value).__name__, f"give a value of {kind.__name__}")
