"""Run many: start, resume, control and drain. The `Executor` is what most programs use of this library.

Place in the life of an execution: start, claim, and leaving. It owns executions under one lease; each has a `Runner`
while it runs, a line in an index while it is paused here, and nothing at all while it waits.
"""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import anyio

from longrun import views
from longrun.clock import Clock
from longrun.control_room import follow_rows
from longrun.crew import Crew
from longrun.desk import UNCHANGED, check_delay, create, loaded_of
from longrun.errors import (
    ConfigError,
    ExecutionExistsError,
    ExecutionNotFoundError,
    LongrunError,
    StoreUnavailableError,
)
from longrun.events import EventType, ExecutionEvent, Listener, Subscription
from longrun.handle import ExecutionHandle
from longrun.records import Checkpoint, Execution, ExecutionState, ExecutorConfig, ResumeReport, check_id
from longrun.registry import AD_HOC, Step, StepFunction, StepRegistry, Workflow
from longrun.stored import Create, Head
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore

State = ExecutionState
TAKEN_BY_START = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING})
Steps = str | Workflow | Iterable[StepFunction | Step | str]


class Executor(Crew):
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
    ) -> None:
        if not isinstance(registry, StepRegistry):
            raise ConfigError("registry", type(registry).__name__, "give a StepRegistry")
        if config is not None and not isinstance(config, ExecutorConfig):
            raise ConfigError("config", type(config).__name__, "give an ExecutorConfig")
        config = config or ExecutorConfig()
        if not isinstance(store, CheckpointStore):
            store = open_store(store if store is not None else f"file:{config.checkpoint_dir}")
        super().__init__(registry, store, config, clock, strict)
        self._on_event = on_event
        self._entered = False

    # entering and leaving

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ConfigError("executor", "entered", "an executor can be entered once; make another one")
        self._entered = True
        await self.store.open()
        try:
            await self.sign_on(self._on_event)
        except BaseException:
            await self.store.aclose()
            raise
        if self.config.auto_resume:
            try:
                await self.auto_resume_all()
            except BaseException as error:
                await self.__aexit__(type(error), error, None)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: what is unfinished must be written down and given back even when the program is being cancelled.
        with anyio.CancelScope(shield=True):
            await self.drain()
            await self.give_back()
        await self.sign_off()
        await self.store.aclose()

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT. Leaving the executor then drains."""
        with anyio.open_signal_receiver(signals.SIGTERM, signals.SIGINT) as received:
            async for number in received:
                self.log.info("executor.signal", signal=signals.Signals(number).name)
                return

    async def auto_resume_all(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here that has no living owner."""
        self.check_signed_on()
        return await self.sweeper.resume_all()

    # starting

    async def start(
        self, workflow: Steps, state: Any = None, *, id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> ExecutionHandle:
        """Store a new execution as running, then run it here. An `id` given before returns that execution's handle."""
        made, found = self._made(workflow, state, self.first_head(State.RUNNING, owner=self.owner), id, metadata)
        if await self._create(made):
            self.run(loaded_of(made))
            self.emit(EventType.EXECUTION_STARTED, made.id)
        else:
            await self._existing(made.id, found, take_up=True)
        return ExecutionHandle(self, made.id)

    async def submit(
        self,
        workflow: Steps,
        state: Any = None,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float | timedelta | None = None,
    ) -> ExecutionHandle:
        """Store a new execution for any worker on this store."""
        seconds = check_delay(delay)
        due = None if seconds is None else self.clock.now() + seconds
        head = self.first_head(State.INITIALIZED, due=due)
        made, found = self._made(workflow, state, head, id, metadata, queue=queue, priority=priority)
        if not await self._create(made):
            await self._existing(made.id, found, take_up=False)
        return ExecutionHandle(self, made.id)

    async def start_child(self, parent: Any, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        """Start an execution once for a visit of its parent and a key."""
        id = child_id(parent.id, parent.head.visit, key)
        head = self.first_head(State.RUNNING, owner=self.owner)
        made, found = self._made(workflow, state, head, id, None, parent_id=parent.id)
        if await self._create(made):
            self.run(loaded_of(made))
            self.emit(EventType.EXECUTION_STARTED, made.id)
        else:
            await self._existing(made.id, found, take_up=True)
        return ExecutionHandle(self, made.id, gives_slot_back=True)

    def _made(
        self, workflow: Steps, state: Any, head: Head, id: str | None, metadata: Mapping[str, Any] | None, **more: Any
    ) -> tuple[Create, Workflow]:
        self.check_signed_on()
        found = self.registry.resolve(workflow)
        if found.name.startswith(AD_HOC):
            self.ad_hoc.add(found.name)
        return self.new(found, state, head, id=id, metadata=metadata, **more), found

    async def _create(self, made: Create) -> bool:
        try:
            return await self.store.create(made)
        except StoreUnavailableError:
            self.unsure.add(made.id)  # it may have been stored in this executor's name: looked at again later
            raise

    async def _existing(self, id: str, workflow: Workflow, *, take_up: bool) -> None:
        """The id is taken: the same workflow is fine, and what was interrupted is taken up here."""
        loaded = await self.store.load(id)
        if loaded.definition.workflow != workflow.name:
            raise ExecutionExistsError(id, loaded.definition.workflow, workflow.name)
        if take_up and id not in self.runners and loaded.head.state in TAKEN_BY_START:
            await self.take_over(loaded)

    # looking

    async def get(self, id: str) -> Execution:
        """What is known of one execution, with live progress if it runs here."""
        loaded = await self.store.load(check_id(id))
        runner = self.runners.get(id)
        return views.execution(loaded.definition, loaded.head, None if runner is None else runner.live_progress)

    async def fork(
        self, id: str, *, checkpoint: Checkpoint | int | str | None = None, state: Any = UNCHANGED, new_id: str | None = None
    ) -> ExecutionHandle:
        """A new execution from an old boundary, without its signals, children and in-step data."""
        self.check_signed_on()
        made = await self.forked(id, checkpoint, state, new_id, owner=self.owner)
        if not await self._create(made):
            raise ExecutionExistsError(made.id, "another execution", made.definition.workflow)
        self.run(loaded_of(made))
        self.emit(EventType.EXECUTION_STARTED, made.id, data={"forked_from": id})
        return ExecutionHandle(self, made.id)

    async def handle(self, id: str) -> ExecutionHandle:
        """A handle on an execution that exists."""
        if not await self.store.exists(check_id(id)):
            raise ExecutionNotFoundError(id)
        return ExecutionHandle(self, id)

    def events(self) -> Subscription:
        """An async iterator of the events of everything that runs here, from now on."""
        return self.bus.subscribe()

    def events_of(self, id: str) -> AsyncIterator[ExecutionEvent]:
        return self._events_of(id, self.bus.subscribe(only=check_id(id)) if id in self.runners else None)

    async def _events_of(self, id: str, subscription: Subscription | None) -> AsyncIterator[ExecutionEvent]:
        if subscription is None:
            async for event in follow_rows(self, id):
                yield event
            return
        with subscription_closed(subscription):
            async for event in subscription:
                yield event
                if event.type in LAST_EVENTS:
                    return


LAST_EVENTS = frozenset(
    {EventType.EXECUTION_COMPLETED, EventType.EXECUTION_FAILED, EventType.EXECUTION_CANCELLED}
)


class subscription_closed:  # noqa: N801 -- used as a with-statement's verb
    """Close a subscription when its reader goes."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        self._subscription.close()


def child_id(parent: str, visit: int, key: str) -> str:
    """The id of a child: parent, visit and key, shortened with a digest where that is too long or has other letters."""
    if not isinstance(key, str) or not key:
        raise ConfigError("key", key, "give the child a key, unique among the children of this visit")
    wanted = f"{parent}~{visit}~{key}"
    try:
        return check_id(wanted)
    except LongrunError:
        return views.digest_id(parent, wanted)
