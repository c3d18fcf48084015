"""The runners of one program: their lease, their places, their delivery of messages, and their orderly end.

Place in the life of an execution: claim, run, leave. `Executor` and `Worker` are crews with a public face.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio

from longrun.attempt import Engine, LoopEngine, ThreadEngine
from longrun.book import MISSING, Book
from longrun.claims import SWEPT_STATES
from longrun.cleaning import clear_executions, clear_lock_files
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.control import Obedience, put_aside
from longrun.control_room import Ended, inside, refuse_inside
from longrun.drain import LAST_WORDS, Drain
from longrun.errors import ConfigError, LeaseLostError, LongrunError, StepMisuseError, StoreReadOnlyError
from longrun.events import EventType, ExecutionEvent, Listener
from longrun.lease import LeaseKeeper, check_ownership
from longrun.life import LifeLock
from longrun.logging import get_logger
from longrun.loops import Bell, current_loop
from longrun.places import Places
from longrun.records import UNFINISHED, ExecutionState, ExecutorConfig, to_time
from longrun.registry import Step, StepRegistry
from longrun.runner import Runner
from longrun.seat import SUSPECT
from longrun.shelter import Shelter
from longrun.starting import Starting
from longrun.stored import Head, Loaded, Message, Query
from longrun.stores.store import CheckpointStore
from longrun.stride import Stages
from longrun.sweep import Sweeper
from longrun.threads import StepThreads

State = ExecutionState
AT_ONCE = 0.05
"""How long an order waits for the next point of a step before it is stored: it must survive a crash in the meantime."""
RESTING = frozenset({State.PAUSED, State.WAITING, State.INITIALIZED})


LEFT_OPEN = (
    "a step has left a cancel scope open, which cut short what came behind it: an async generator with a time limit"
    " around its yield does that"
)


class Crew(Starting):
    """Everything that runs here."""

    keeps_paused = True
    queues: frozenset[str] | None = None
    swept_states = SWEPT_STATES
    waits_for_pass = True
    """Whether whoever enters waits for the pass at start. If not the sweep makes it, and a drain ends it."""
    leaves_to_sweep = False
    """Whether the pass at start takes up nothing itself, since others may have room for it."""

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
        self.stages = Stages(registry.by_name, self.engine)
        self.config = config
        self.strict = strict
        """Pass every state through the codec between steps, so that what a crash would change shows at once."""
        self.save_interval = float("inf") if config.durability == "exit" else config.checkpoint_interval
        self.log = get_logger()
        self.runners: dict[str, Runner] = {}
        self.resting: dict[str, Head] = {}
        """What is owned here and has no runner: paused, or parked with signals waiting that it does not want yet."""
        self.ad_hoc: set[str] = set()
        self.starting: set[str] = set()
        self.owner = ""
        self.draining = False
        self.only_reads = False
        """Whether nothing can be written to the store, a standby or a backup. Who runs nothing looks all the same, has
        no lease, and tries again at every heartbeat."""
        self.takes_work = config.auto_resume
        self.places = Places(config.max_concurrency)
        self.suspects = Places(1)
        self.accused: set[str] = set()
        """What was claimed with a count of crashes that makes it a suspect, and has not been heard yet."""
        self.sweeper = Sweeper(self, self.swept_states)
        self.stirred = anyio.Event()
        self.emptied = Bell()
        """Rung when the last runner has ended; then it is another one."""
        self._drain = Drain(self)
        self._shelter = Shelter(self._ctrl_c)
        self._signed_on = False

    @property
    def alive(self) -> bool:
        """Whether what ends here can still be written down; only a simulated crash says no."""
        return True

    @property
    def tasks_go_on(self) -> bool:
        return self._shelter.stands

    @property
    def holds_lease(self) -> bool:
        """Whether nobody else can have taken what is owned here."""
        return self.clock.monotonic() < self.keeper.held_until

    # signing on and off

    async def sign_on(self, listener: Listener | None) -> None:
        """Take a lease and begin to look for work."""
        self.loop = current_loop()
        self.thread = threading.get_ident()
        self.threads = StepThreads()
        self._engines: dict[str, Engine] = {"loop": LoopEngine(), "thread": ThreadEngine()}
        await self._take_lease()
        await self._shelter.open()
        self._callback = None if listener is None else self.bus.call(listener)
        if self._callback is not None and self._callback.is_async:
            self._shelter.start(self._callback.serve, name="longrun-listener")
        self._unwatch = self.store.watch(self.stir)
        self._sweeping = anyio.CancelScope()
        self._shelter.start(self._sweep, name="longrun-sweep")
        self._shelter.start(self.sweeper.dead.mind_neighbours, name="longrun-neighbours")
        self._shelter.start(self._beat, name="longrun-beat")
        self._shelter.start(clear_lock_files, self.clock, self.log, self.config.lease_ttl, name="longrun-clear")
        if self.config.retention.max_age is not None:
            kept = (self.store, self.config.retention, self.clock, self.log)
            self._shelter.start(clear_executions, *kept, name="longrun-retention")
        if self.telemetry is not None:
            self._engines = self.telemetry.sign_on(self, self._engines)
        self._signed_on = True

    def _workflow_names(self) -> tuple[str, ...]:
        return tuple([workflow.name for workflow in self.registry.workflows])

    async def show_workflows(self) -> None:
        await self.keeper.show(self._workflow_names())

    async def _take_lease(self) -> None:
        self._lock = LifeLock.acquire()
        self.owner = self._lock.life.owner
        self.keeper = LeaseKeeper(
            self.store,
            self._lock,
            interval=self.config.heartbeat_interval,
            ttl=self.config.lease_ttl,
            clock=self.clock,
            lost=self._lease_lost,
            workflows=self._workflow_names(),
            queues=tuple(self.queues or ()),
        )
        try:
            await self.keeper.start()
        except StoreReadOnlyError:
            if self.runs_here:
                self._lock.abandon()
                raise
            self.only_reads = True
        except BaseException:
            self._lock.abandon()  # the registration may be on its way: who finds it must see that its owner is dead
            raise

    def check_signed_on(self) -> None:
        if not self._signed_on or self.draining:
            state = "left already" if self.draining else "not entered yet"
            kind = type(self).__name__
            raise ConfigError(kind.lower(), state, f"use it inside `async with {kind}(...) as {kind.lower()}:`")

    async def drain(self) -> None:
        """Let running steps come to a point, then cancel them. Nothing of this is stored as cancelled."""
        await self._drain.run()

    async def cut_short(self) -> None:
        """Stop what still runs, at once, and wait for a moment until it has been given back."""
        await self._drain.cut_short()

    def hurry(self) -> None:
        """Wait no longer for steps that are being drained."""
        self._drain.hurry()

    def shutdown_left(self) -> float | None:
        return self._drain.left()

    def _ctrl_c(self) -> None:
        if self.draining:
            self.hurry()

    def stop_sweeping(self) -> None:
        self._sweeping.cancel()

    async def give_back(self) -> None:
        """Give the lease back and end everything that is not a task."""
        self._signed_on = False
        self._unwatch()
        self.keeper.stop()
        if self._callback is not None:
            await self._callback.caught_up(1.0)
        self.bus.close()
        for engine in self._engines.values():
            await engine.aclose()
        self.threads.close()
        signed_off = False
        try:
            with anyio.move_on_after(LAST_WORDS):
                if not self.runners and not await self.store.count(Query(owner=self.owner)):
                    if not self.only_reads:
                        await self.store.unregister(self.owner)
                    signed_off = True
            if signed_off:
                self._lock.release()
            else:
                self._lock.abandon()  # something did not end: its executions are freed by the lock, not by a promise
        except BaseException as error:
            self._lock.abandon()
            if not isinstance(error, LongrunError):
                raise
            self.log.warning("executor.not_signed_off", owner=self.owner, problem=str(error))

    async def sign_off(self) -> None:
        """End the tasks, in the task that signed on."""
        self.draining = True
        await self._shelter.close()

    async def wait_idle(self) -> None:
        """Return when nothing runs here. Not for steps: each would wait for itself."""
        if (id := inside.get()) in self.runners:
            raise StepMisuseError(f"a step of execution {id!r} cannot wait until nothing runs here: it runs itself")
        while self.runners:
            await self.emptied.wait()
        if self._callback is not None:
            await self._callback.caught_up(1.0)

    # running

    def run(
        self, loaded: Loaded, *, value: Any = MISSING, controls_only: bool = False, wakes_paused: bool = False
    ) -> Runner:
        """Run an execution that this crew owns."""
        runner = Runner(self, loaded, value, controls_only, wakes_paused)
        before = self.runners.get(runner.id)
        if before is not None:
            before.lose()  # others had it meanwhile, which it has not noticed; whoever waits for it must not wait on
        self.runners[runner.id] = runner
        self.resting.pop(runner.id, None)
        self._shelter.run(runner.run, name=f"longrun-{runner.id}", ended_by=runner)
        return runner

    def trouble_with(self, runner: Runner, error: Exception) -> str:
        """Why an execution cannot go on."""
        kind = type(error).__name__
        if isinstance(error, LongrunError):  # refused for good by the store, or it cannot be stored
            self.log.error("execution.stopped", execution=runner.id, error_type=kind)  # a traceback may quote a state
            return str(error)
        if isinstance(error, RuntimeError) and "cancel scope" in str(error).lower():  # anyio says so, and trio
            self.log.error("step.left_open", execution=runner.id, error_type=kind)
            return LEFT_OPEN
        self.log.error("runner.defect", execution=runner.id, error_type=kind, exc_info=error)
        return f"longrun itself failed: {kind}"

    def left(self, runner: Runner, trouble: str | None) -> None:
        """A runner's task is over. What is in trouble is put aside in a task of its own: a step may have left a scope
        open in this one that was cancelled."""
        if trouble is None:
            self._ended(runner)
        else:
            self._shelter.run(partial(self._put_aside, runner, trouble), name=f"longrun-aside-{runner.id}")

    async def _put_aside(self, runner: Runner, reason: str) -> None:
        try:
            await put_aside(self, runner, reason)
        finally:
            self._ended(runner)

    def _ended(self, runner: Runner) -> None:
        if self.runners.get(runner.id) is runner:
            del self.runners[runner.id]
        head, lost = runner.head, runner.book.outbox.lost
        if lost is None and head.state in RESTING:
            if head.owner == self.owner:
                self.resting[runner.id] = head
            if head.state is not State.PAUSED:
                self.sweeper.set_timer(head, runner.id)
        elif isinstance(lost, LeaseLostError):
            self.not_sure()  # the claim that took it may have been our own, of which the answer was lost
        elif self.config.max_concurrency is not None:
            self.stir()  # there is room again
        self.heard(runner.id)
        runner.book.outbox.give_up(lost or LeaseLostError(runner.id, head.fence))
        runner.finish()
        if not self.runners:
            emptied, self.emptied = self.emptied, Bell()
            emptied.set()
        self.look(runner.id)

    def accuse(self, claimed: list[Loaded]) -> None:
        """These were claimed together: none of them is tried before all of them have been heard."""
        self.accused.update(one.definition.id for one in claimed if one.head.crashes >= SUSPECT)

    def heard(self, id: str) -> None:
        if id not in self.accused:
            return
        self.accused.discard(id)
        if not self.accused:
            for runner in self.runners.values():
                if runner.seat.accused:
                    runner.nudge()

    def has(self, id: str) -> bool:
        """Whether an execution is owned here and looked after."""
        return id in self.runners or id in self.resting or id in self.starting

    def engine(self, step: Step) -> Engine:
        """Who calls a step's function."""
        return self._engines.get(step.engine) or self._engine_of_processes()

    def _engine_of_processes(self) -> Engine:
        from longrun.process import ProcessEngine  # when a step first needs it

        engine: Engine = ProcessEngine(self.registry.by_name)
        if self.telemetry is not None:
            engine = self.telemetry.engine("process", engine)
        self._engines["process"] = engine
        return engine

    def spawn(self, function: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Run something beside everything else. May be called where no task runs, such as in a store's answer."""
        self._shelter.spawn(function, name=name)

    async def queue_up(self, loaded: Loaded) -> None:
        """Give a claimed execution to the sweep, which takes it up when there is room."""
        self.heard(loaded.definition.id)
        obedience = Obedience(self, Book(self, loaded), controls_only=True)
        if not loaded.damage or await obedience.accept(loaded.damage):
            await obedience.queue_up()
            self.stir()

    async def block(self, loaded: Loaded, reason: str) -> None:
        """Store a claimed execution as blocked, or leave it so."""
        self.heard(loaded.definition.id)
        obedience = Obedience(self, Book(self, loaded), controls_only=True)
        if loaded.head.state is State.BLOCKED and loaded.head.reason == reason:
            await obedience.release()
        else:
            await obedience.block(reason, hold=bool(loaded.damage) and self.config.on_corruption == "block")

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
        self.log.warning("store.unavailable", execution=execution_id, problem=str(error), tries=tries)
        self.emit(EventType.STORE_UNAVAILABLE, execution_id, error=str(error), attempt=tries)

    async def _beat(self) -> None:
        """Hand over what was captured and is due, and show that it lives."""
        config = self.config
        pace = max(0.02, min(config.checkpoint_interval / 2, config.heartbeat_interval / 2))
        now = self.clock.monotonic()
        beat_at = now + config.heartbeat_interval
        while True:
            await self.clock.sleep(now + pace - self.clock.monotonic())
            now = self.clock.monotonic()
            beats = now >= beat_at
            for runner in list(self.runners.values()):
                runner.tick(beats)
            if beats:
                beat_at = now + config.heartbeat_interval

    # messages and claims

    async def _sweep(self) -> None:
        with self._sweeping:
            while self.only_reads:
                await self.clock.sleep(self.config.heartbeat_interval)
                with contextlib.suppress(LongrunError):
                    await self.keeper.start()
                    self.only_reads = False
            await self.sweeper.run()

    def stir(self) -> None:
        """Let the sweeper look now."""
        self.stirred.set()

    def not_sure(self) -> None:
        self.sweeper.claims.unsure = True
        self.stir()

    def known_workflows(self) -> frozenset[str]:
        return frozenset([workflow.name for workflow in self.registry.workflows]) | self.ad_hoc

    def room_for(self) -> int:
        """How many more executions may be claimed: a crew does not hoard what others could run."""
        if self.config.max_concurrency is None:
            return 1000
        busy = sum(not runner.seat.is_away for runner in self.runners.values())
        return max(0, self.config.max_concurrency - busy)

    def away(self) -> AbstractAsyncContextManager[Any] | None:
        """A step that waits for another execution gives its place and its trial up: the other may need them."""
        runner = self.runners.get(inside.get() or "")
        return None if runner is None or not runner.in_step else runner.seat.away(runner)

    async def deliver(self, id: str) -> None:
        """Messages wait for an execution owned here: hand them to its runner, or wake it up if it rests."""
        runner = self.runners.get(id)
        if runner is not None:
            with runner.inbox.reading():
                messages = await self.store.messages(id)
                if self.runners.get(id) is runner:
                    runner.deliver(messages)
            return
        messages = await self.store.messages(id)
        if id in self.resting and any(self._wakes(message, self.resting[id]) for message in messages):
            await self.take_over(await self.store.load(id))

    @staticmethod
    def _wakes(message: Message, head: Head) -> bool:
        if message.kind != "signal":
            return True
        return head.state is State.WAITING and message.name == head.signal

    def tell(self, id: str, order: Message, allowed: frozenset[ExecutionState]) -> int | None:
        runner = self.runners.get(id)
        if runner is None or runner.head.state not in allowed or inside.get() == id:
            return None
        return runner.tell(order)

    async def obeyed_soon(self, id: str, number: int, deadline: float) -> bool:
        runner = self.runners[id]
        with self.loop.scope(min(deadline, anyio.current_time() + AT_ONCE)):
            return await runner.obeyed(number)
        if number in runner.inbox.obeying:
            with self.loop.scope(deadline):
                return await runner.obeyed(number)
        return False

    def told_and_stored(self, id: str, number: int, message: Message) -> None:
        runner = self.runners.get(id)
        if runner is not None:
            runner.told_and_stored(number, message)

    async def obeyed_here(self, id: str, message: Message) -> bool:
        runner = self.runners.get(id)
        if runner is None:
            return False
        await self.deliver(id)
        return await runner.obeyed(message.id)

    def is_known_dead(self, owner: str) -> bool:
        return owner in self.sweeper.dead.found

    async def take_over(self, loaded: Loaded, states: frozenset[ExecutionState] = UNFINISHED) -> bool:
        return await self.sweeper.take_over(loaded, states)

    async def ended_here(self, id: str) -> Ended | None:
        runner = self.runners.get(id)
        if runner is None:
            return None
        refuse_inside(id)
        await runner.ended.wait()
        if self._callback is not None:
            await self._callback.catch_up_briefly()
        if runner.head.state is State.COMPLETED and runner.book.result is not MISSING:
            return Ended(runner.book.result)
        return None

    def _lease_lost(self) -> None:
        """The store may have given this owner's executions to others. What is still ours goes on, the rest stops."""
        self.log.warning("lease.lost", owner=self.owner)
        self.spawn(partial(check_ownership, self, self.keeper), name="longrun-check-ownership")
