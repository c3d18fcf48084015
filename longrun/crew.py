"""The runners of one program: their lease, their slots, their delivery of messages, and their orderly end.

Place in the life of an execution: claim, run, leave. `Executor` and `Worker` are crews with a public face.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs

from longrun.attempt import Engine, LoopEngine, ThreadEngine
from longrun.book import MISSING, Book
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.control import Obedience
from longrun.control_room import ControlRoom, Ended
from longrun.errors import ConfigError, LongrunError
from longrun.events import EventType, ExecutionEvent, Listener
from longrun.lease import LeaseKeeper, gone
from longrun.life import LifeLock
from longrun.logging import get_logger
from longrun.records import ExecutionState, ExecutorConfig, to_time
from longrun.registry import Step, StepRegistry
from longrun.runner import Runner
from longrun.stored import Claim, Head, Loaded, Message, Query, Save
from longrun.stores.store import CheckpointStore
from longrun.sweep import SWEPT_STATES, Sweeper
from longrun.threads import StepThreads

State = ExecutionState
LAST_WORDS = 5.0
"""How long a step may take to unwind after it was cancelled before it is reported."""
SUSPECT = 2
"""From this many crashes on, executions run one at a time until they have made progress."""
LISTENER_GRACE = 0.1
"""How long a result waits for listeners that are behind."""


class Crew(ControlRoom):
    """Everything that runs here."""

    keeps_paused = True
    queues: frozenset[str] | None = None
    swept_states = SWEPT_STATES

    def __init__(
        self,
        registry: StepRegistry,
        store: CheckpointStore,
        config: ExecutorConfig,
        clock: Clock | None,
        strict: bool,
    ) -> None:
        super().__init__(store, registry, clock or SYSTEM_CLOCK)
        self.registry = registry
        self.config = config
        self.strict = strict
        """Pass every state through the codec between steps, so that what a crash would change shows at once."""
        self.log = get_logger()
        self.runners: dict[str, Runner] = {}
        self.ad_hoc: set[str] = set()
        self.unsure: set[str] = set()
        self.owner = ""
        self.draining = False
        self.takes_work = config.auto_resume
        self.sweeper = Sweeper(self, self.swept_states)
        self._paused: dict[str, Head] = {}
        self._deadline: float | None = None
        self._signed_on = False

    # signing on and off

    async def sign_on(self, listener: Listener | None) -> None:
        """Take a lease and begin to look for work."""
        self.threads = StepThreads()
        self.stirred = anyio.Event()
        self._engines: dict[str, Engine] = {"loop": LoopEngine(), "thread": ThreadEngine()}
        self._slots = None if self.config.max_concurrency is None else anyio.Semaphore(self.config.max_concurrency)
        self._suspects = anyio.Semaphore(1)
        self._emptied = anyio.Event()
        await self._take_lease()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._background = await anyio.create_task_group().__aenter__()
        self._callback = None if listener is None else self.bus.call(listener)
        if self._callback is not None and self._callback.is_async:
            self._background.start_soon(self._callback.serve, name="longrun-listener")
        self._unwatch = self.store.watch(self._store_changed)
        self._background.start_soon(self.sweeper.run, name="longrun-sweep")
        self._background.start_soon(self._beat, name="longrun-beat")
        self._signed_on = True

    async def _take_lease(self) -> None:
        self._lock = LifeLock.acquire()
        self.owner = self._lock.life.owner
        self._keeper = LeaseKeeper(
            self.store,
            self._lock,
            interval=self.config.heartbeat_interval,
            ttl=self.config.lease_ttl,
            lost=self._lease_lost,
            workflows=tuple(workflow.name for workflow in self.registry.workflows),
            queues=tuple(self.queues or ()),
        )
        try:
            await self._keeper.start()
        except BaseException:
            self._lock.release()
            raise

    def check_signed_on(self) -> None:
        if not self._signed_on or self.draining:
            state = "left already" if self.draining else "not entered yet"
            raise ConfigError("executor", state, "use it inside `async with Executor(...) as executor:`")

    async def drain(self) -> None:
        """Let running steps come to a point, then cancel them. Nothing of this is stored as cancelled."""
        self._deadline = self.clock.monotonic() + self.config.drain_timeout
        self.draining = True
        for runner in list(self.runners.values()):
            runner.drain()
        await self._until_empty(self.config.drain_timeout)
        for runner in list(self.runners.values()):
            runner.interrupt()
        if not await self._until_empty(LAST_WORDS):
            for runner in self.runners.values():
                self.log.error("step.swallows_cancellation", execution=runner.id, step=runner.book.step_name)
        for id, head in list(self._paused.items()):
            await self._release(id, head)

    async def _until_empty(self, seconds: float | None) -> bool:
        with anyio.move_on_after(seconds):
            while self.runners:
                self._emptied = anyio.Event()
                await self._emptied.wait()
        return not self.runners

    async def _release(self, id: str, head: Head) -> None:
        try:
            await self.store.save(Save(id=id, head=attrs.evolve(head, owner=None, revision=head.revision + 1)))
        except LongrunError as error:  # taken by somebody else, or the store is away: the end of the lock frees it
            self.log.warning("execution.not_released", execution=id, error_type=type(error).__name__)

    async def give_back(self) -> None:
        """Give the lease back and end everything that is not a task."""
        self._signed_on = False
        self._unwatch()
        self._keeper.stop()
        if self._callback is not None:
            await self._callback.caught_up(1.0)
        self.bus.close()
        for engine in self._engines.values():
            await engine.aclose()
        self.threads.close()
        try:
            if self.runners:
                self._lock.abandon()  # something would not end: its executions are freed by the lock, not by a promise
                return
            await self.store.unregister(self.owner)
            self._lock.release()
        except LongrunError:
            self._lock.abandon()

    async def sign_off(self) -> None:
        """End the tasks. Outside any scope of our own: task groups must be left where they were entered."""
        for group in (self._background, self._tasks):
            group.cancel_scope.cancel()
            await group.__aexit__(None, None, None)

    async def wait_idle(self) -> None:
        """Return when nothing runs here."""
        await self._until_empty(None)
        if self._callback is not None:
            await self._callback.caught_up(1.0)

    # running

    def run(self, loaded: Loaded, *, value: Any = MISSING, controls_only: bool = False) -> Runner:
        """Run an execution that this crew owns."""
        runner = Runner(self, loaded, value=value, controls_only=controls_only)
        self.runners[runner.id] = runner
        self._paused.pop(runner.id, None)
        self._tasks.start_soon(self._run, runner, name=f"longrun-{runner.id}")
        return runner

    async def _run(self, runner: Runner) -> None:
        try:
            async with self._one_at_a_time(runner):
                if self._slots is None:
                    await runner.run()
                else:
                    async with self._slots:
                        await runner.run()
        except LongrunError as error:
            self.log.error("execution.stopped", execution=runner.id, error_type=type(error).__name__)
        except Exception as error:  # a defect of ours must not take the other executions along
            self.log.error("runner.defect", execution=runner.id, error_type=type(error).__name__, exc_info=error)
            await self._release(runner.id, runner.head)
        finally:
            self._ended(runner)

    def _ended(self, runner: Runner) -> None:
        if self.runners.get(runner.id) is runner:
            del self.runners[runner.id]
        head = runner.head
        if head.state is State.PAUSED and head.owner == self.owner and runner.book.outbox.lost is None:
            self._paused[runner.id] = head
        elif head.state is State.WAITING:
            self.stir()
        runner.ended.set()
        self._emptied.set()
        self.look()

    @asynccontextmanager
    async def _one_at_a_time(self, runner: Runner) -> AsyncIterator[None]:
        """Executions that were in flight at several crashes run alone until they have got somewhere."""
        if runner.head.crashes < SUSPECT:
            yield
            return
        await self._suspects.acquire()
        held = [True]

        def clear() -> None:
            if held:
                held.pop()
                self._suspects.release()

        runner.book.on_progress = clear
        try:
            yield
        finally:
            clear()

    def engine(self, step: Step) -> Engine:
        """Who calls a step's function."""
        name = step.run_in or ("loop" if step.is_async else "thread")
        if name == "process" and name not in self._engines:
            from longrun.process import ProcessEngine

            self._engines[name] = ProcessEngine()
        return self._engines[name]

    def spawn(self, function: Callable[..., Any], *args: object, name: str) -> None:
        self._tasks.start_soon(function, *args, name=name)

    @asynccontextmanager
    async def slot_given_back(self) -> AsyncIterator[None]:
        """While this waits, another execution may run in its place."""
        if self._slots is None:
            yield
            return
        self._slots.release()
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._slots.acquire()

    def shutdown_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self.clock.monotonic())

    async def block(self, loaded: Loaded, reason: str) -> None:
        """Store a claimed execution as blocked, or leave it so."""
        book = Book(self, loaded)
        obedience = Obedience(self, book, controls_only=True)
        if loaded.head.state is State.BLOCKED and loaded.head.reason == reason:
            await obedience.release()
        else:
            await obedience.block(reason)

    # events

    def emit(
        self,
        kind: EventType,
        execution_id: str,
        *,
        step: str | None = None,
        error: str | None = None,
        attempt: int = 0,
        data: dict[str, Any] | None = None,
    ) -> None:
        if self.bus.active:
            self.bus.emit(
                ExecutionEvent(
                    type=kind,
                    execution_id=execution_id,
                    step=step,
                    timestamp=to_time(self.clock.now()),  # type: ignore[arg-type]  # never None
                    error=error,
                    attempt=attempt,
                    data=data or {},
                )
            )

    def store_failed(self, execution_id: str, error: LongrunError, tries: int) -> None:
        self.log.warning("store.unavailable", execution=execution_id, error_type=type(error).__name__, tries=tries)
        self.emit(EventType.STORE_UNAVAILABLE, execution_id, error=str(error), attempt=tries)

    async def _beat(self) -> None:
        """Hand over what was captured and is due, show that it lives, and clear away what retention lets go."""
        config = self.config
        pace = max(0.02, min(config.checkpoint_interval / 2, config.heartbeat_interval / 2))
        beat_at = self.clock.monotonic() + config.heartbeat_interval
        clean_at = self.clock.monotonic() + config.retention.interval
        while True:
            await self.clock.sleep(pace)
            now = self.clock.monotonic()
            beats = now >= beat_at
            for runner in list(self.runners.values()):
                runner.tick(beats)
            if beats:
                beat_at = now + config.heartbeat_interval
                await self._settle_unsure()
            if now >= clean_at:
                clean_at = now + config.retention.interval
                await self._clean()

    async def _settle_unsure(self) -> None:
        """A start whose answer was lost may have been stored in our name: then it is ours to run."""
        for id in list(self.unsure):
            try:
                if await self.store.exists(id):
                    loaded = await self.store.load(id)
                    if loaded.head.owner == self.owner and id not in self.runners:
                        self.run(loaded)
                self.unsure.discard(id)
            except LongrunError as error:
                self.log.warning("start.unsure", execution=id, error_type=type(error).__name__)

    async def _clean(self) -> None:
        try:
            removed = await self.store.gc(self.config.retention, self.clock.now())
        except LongrunError as error:
            self.log.warning("retention.failed", error_type=type(error).__name__)
        else:
            if removed:
                self.log.info("retention.removed", executions=removed)

    # messages and claims

    def _store_changed(self) -> None:
        self.stir()
        self.look()

    def stir(self) -> None:
        """Let the sweeper look now."""
        self.stirred.set()

    def known_workflows(self) -> frozenset[str]:
        return frozenset([workflow.name for workflow in self.registry.workflows]) | self.ad_hoc

    def room_for(self) -> int:
        """How many more executions may be claimed: a crew does not hoard what others could run."""
        if self.config.max_concurrency is None:
            return 1000
        return max(0, self.config.max_concurrency - len(self.runners))

    async def claim(self, claim: Claim) -> list[Loaded]:
        return await self.store.claim(claim)

    async def deliver(self, id: str) -> None:
        """Messages wait for an execution owned here: hand them to its runner, or wake it up if it is paused."""
        runner = self.runners.get(id)
        messages = await self.store.messages(id)
        if runner is not None:
            if self.runners.get(id) is runner:
                runner.deliver(messages)
        elif id in self._paused and any(message.kind != "signal" for message in messages):
            await self.take_over(await self.store.load(id))

    async def obeyed_here(self, id: str, message: Message) -> bool:
        runner = self.runners.get(id)
        if runner is None:
            return False
        runner.deliver([message])
        await runner.obeyed(message.id)
        return message.id in runner.taken

    async def take_over(self, loaded: Loaded) -> bool:
        id, owner = loaded.definition.id, loaded.head.owner
        if id in self.runners or self.draining:
            return False
        owners = await self.store.owners()
        alive = {one.id for one in owners} - gone(owners)
        if owner is not None and owner in alive and owner != self.owner:
            return False
        dead = frozenset([owner]) if owner is not None else frozenset()
        claim = Claim(
            owner=self.owner, now=self.clock.now(), states=frozenset(State), ids=(id,), dead=dead, limit=1
        )
        if id in self.runners:
            return False
        for taken in await self.claim(claim):
            known = self.registry.knows(taken.definition.workflow, taken.definition.steps)
            self.run(taken, controls_only=not known)
            return True
        return False

    async def ended_here(self, id: str) -> Ended | None:
        runner = self.runners.get(id)
        if runner is None:
            return None
        await runner.ended.wait()
        if self._callback is not None:
            await self._callback.caught_up(LISTENER_GRACE)
        if runner.head.state is State.COMPLETED and runner.result is not MISSING and runner.book.outbox.lost is None:
            return Ended(runner.result)
        return None

    def _lease_lost(self) -> None:
        """The store no longer knows this owner: it was taken for dead. What is still ours goes on, the rest stops."""
        self.log.warning("lease.lost", owner=self.owner)
        self._background.start_soon(self._check_ownership, name="longrun-check-ownership")

    async def _check_ownership(self) -> None:
        try:
            await self._keeper.register_again()
            for runner in list(self.runners.values()):
                loaded = await self.store.load(runner.id)
                if loaded.head.fence != runner.head.fence:
                    runner.lose()
        except LongrunError as error:
            self.log.warning("lease.check_failed", error_type=type(error).__name__)
