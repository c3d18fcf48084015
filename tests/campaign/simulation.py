"""Many workers on one store, all in one thread, with every choice of the scheduler taken from a seed.

The workers are real executors with real runners, outboxes and sweeps, on the memory backend. What would be a thread is
a task here (the store's writer, the lease keeper), time is a clock that moves when nobody can do anything else, and
between any two things the seed may let others go first, lose an answer, stop a worker past its lease, or kill it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, TypeVar
from unittest import mock

import anyio

from longrun import ExecutorConfig, InvalidStateError, StoreUnavailableError
from longrun.clock import Clock
from longrun.lease import LeaseKeeper
from longrun.life import LifeLock
from longrun.loops import Awaited, Loop
from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.stores.writer import Job, Writer
from longrun.testing.mortal import MortalExecutor, only_crashes
from longrun.testing.points import Probe, ProbedBackend
from tests.campaign import work
from tests.campaign.judge import judge_records, judge_store
from tests.campaign.outside import Record
from tests.campaign.program import Telling

T = TypeVar("T")
IDS = tuple(f"3-{workflow}" for workflow in ("items", "calls", "moves", "waits", "family"))
LEASE = 5.0
CONFIG = ExecutorConfig(checkpoint_interval=0.0, heartbeat_interval=1.0, lease_ttl=LEASE, max_crashes=10_000)
PAST = 1e-6
"""Time jumps past a moment by more than the loop's own rounding."""
NO_WORK = ("_deliver_cancellation", "_timeout")
"""Callbacks of anyio's scopes that may come in every turn of the loop."""
BEGIN = 1_700_000_000.0
TURNS = 200_000
"""Turns of the loop after which a schedule counts as going on for ever."""

worker_here: contextvars.ContextVar[Worker | None] = contextvars.ContextVar("worker_here", default=None)


class SimulatedClock(Clock):
    """Moves to the next timer when the simulation says so, and stands still otherwise."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return BEGIN + self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        await self.wait(anyio.Event(), max(0.0, seconds))

    async def wait(self, event: Awaited, seconds: float | None) -> bool:
        if seconds is None:
            await event.wait()
            return True
        with anyio.CancelScope() as scope:
            timer = (self._now + max(0.0, seconds), next(self._numbers), scope.cancel)
            heapq.heappush(self._timers, timer)
            try:
                await event.wait()
            finally:
                if timer in self._timers:
                    self._timers.remove(timer)
                    heapq.heapify(self._timers)
        return event.is_set()

    def jump(self, at_most: float | None) -> bool:
        """To the next moment that somebody waits for, here or in the event loop; False if nobody does."""
        if at_most is not None and (not self._timers or at_most <= self._timers[0][0]):
            self._now = max(self._now, at_most) + PAST
            return True
        if not self._timers:
            return False
        due, _, ring = heapq.heappop(self._timers)
        self._now = max(self._now, due) + PAST
        ring()
        return True


class Ordered(dict[Any, None]):
    """A set that is walked in the order in which things came in, not in that of their addresses."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class Name(str):
    """The name of an owner, with a place in a set that is the same in every process."""

    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())


class Dice(Probe):
    """A probe that crashes by chance."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def reach(self, when: str, what: str) -> bool:
        if not self.crashed and self._simulation.happens("kill", 0.01):
            self.crashed = True
            self.crash()
        return self.crashed


class SimulatedWriter(Writer):
    """The store's writer as a task: it can be late, stand still, fail, and lose answers."""

    def __init__(self, simulation: Simulation, backend: StoreBackend, prepare: Any) -> None:
        super().__init__(backend, prepare)
        self._simulation = simulation
        self._serving = False

    def start(self) -> None:
        self._closing = False

    def stop(self, patience: float | None = None) -> bool:
        self._closing = True
        while self._queue:
            self._deliver(*self._next())
        return True

    def add(self, job: Job) -> None:
        if self._closing:
            raise StoreUnavailableError("simulated", "it is closed")
        self._queue.append(job)
        if not self._serving:
            self._serving = True
            self._simulation.spawn(self._serve())

    async def _serve(self) -> None:
        simulation = self._simulation
        try:
            while self._queue:
                await simulation.turns()
                if simulation.happens("stop", 0.004):
                    await simulation.clock.sleep(simulation.dice.uniform(0.0, 3 * LEASE))
                if self._queue:
                    answered = self._next()
                    await simulation.turns()
                    self._deliver(*answered)
        finally:
            self._serving = False

    def _commit(self, batch: list[Job]) -> list[Any]:
        simulation = self._simulation
        if simulation.happens("fail", 0.01):
            return [StoreUnavailableError("simulated", "it failed")] * len(batch)
        answers = super()._commit(batch)
        if simulation.happens("lose", 0.01):
            return [StoreUnavailableError("simulated", "the answer was lost")] * len(batch)
        return answers


class SimulatedStore(CheckpointStore):
    """A store whose every part runs in the one loop."""

    def __init__(self, simulation: Simulation, backend: StoreBackend) -> None:
        super().__init__(backend)
        self._simulation = simulation
        self._writer = SimulatedWriter(simulation, backend, self._sealing.all_sealed)
        self._watcher = simulation  # type: ignore[assignment]  # it tells everybody of every change

    async def open(self) -> Self:
        self._writer.start()
        return self

    async def aclose(self) -> None:
        self._writer.stop()

    async def _read(self, function: Callable[..., T], *args: Any) -> T:
        await self._simulation.turns()
        if self._simulation.happens("fail", 0.002):
            raise StoreUnavailableError("simulated", "it failed")
        result = function(*args)
        await self._simulation.turns()
        return result


class SimulatedKeeper(LeaseKeeper):
    """The lease keeper as a task."""

    simulation: Simulation

    async def start(self) -> None:
        await self.hold()
        self._task = self.simulation.spawn(self._beat())

    def stop(self) -> None:
        self._stopping.set()
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            self._store.renew(self.owner.id, self._ttl, partial(self._renewed, self._clock.monotonic()))


class Worker(MortalExecutor):
    """One executor of the simulation."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self.number = number
        probe = Dice(simulation)
        outside: Any = simulation.outside(number)
        backend = ProbedBackend(Telling(simulation.backend, outside, None), probe)
        store = SimulatedStore(simulation, backend)
        super().__init__(work.registry, probe, store=store, config=CONFIG, clock=simulation.clock)

    @property
    def probe(self) -> Probe:
        return self._probe

    async def _take_lease(self) -> None:
        with mock.patch("longrun.life._owner_id", self._simulation.name_of(self.number)):
            self._lock = LifeLock.acquire()
        self.owner = self._lock.life.owner
        self.keeper = SimulatedKeeper(
            self.store,
            self._lock,
            interval=CONFIG.heartbeat_interval,
            ttl=CONFIG.lease_ttl,
            clock=self.clock,
            lost=self._lease_lost,
        )
        self.keeper.simulation = self._simulation
        try:
            await self.keeper.start()
        except BaseException:
            self._lock.release()
            raise


class Ledger:
    """What a worker tells, with whether the store still holds it for the owner."""

    def __init__(self, simulation: Simulation, number: int | None) -> None:
        self._simulation, self._number = simulation, number

    def note(self, kind: str, **fields: Any) -> None:
        worker = worker_here.get()
        number = self._number if self._number is not None else (worker.number if worker else 0)
        if kind in ("begin", "effect") and worker is not None and self._simulation.is_stale(worker, fields["id"]):
            kind = f"stale {kind}"
        self._simulation.records.append({"kind": kind, "process": number, **fields})


class Simulation:
    """One schedule: some workers, some executions, and the course that the seed gives them."""

    # As a watcher: `tell` has nobody to tell, and nothing comes between it and the store.
    shared = False
    breaks = 0

    def __init__(self, seed: int, *, workers: int = 3, faults: int = 6) -> None:
        self.dice = random.Random(seed)
        self.clock = SimulatedClock()
        self.backend = MemoryBackend(self.clock)
        self.records: list[Record] = []
        self.fired: Counter[str] = Counter()
        self._workers, self._faults = workers, faults
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: dict[object, tuple[Loop, Callable[[], object]]] = {}
        self._numbers = itertools.count(1)
        random.seed(seed)  # the jitter of back-offs

    # chance

    def happens(self, fault: str, chance: float) -> bool:
        """Whether something goes wrong here. Only so many faults for a schedule, so that it comes to an end."""
        if self.fired.total() >= self._faults or self.dice.random() >= chance:
            return False
        self.fired[fault] += 1
        return True

    async def turns(self) -> None:
        """Let others go first, or not."""
        for _ in range(self.dice.randrange(3)):
            await asyncio.sleep(0)

    # what the workers use

    def name_of(self, number: int) -> Callable[[str], str]:
        return lambda host: Name(f"worker-{number}")

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def outside(self, number: int | None = None) -> Ledger:
        return Ledger(self, number)

    def is_stale(self, worker: Worker, id: str) -> bool:
        """Whether an execution has passed to somebody else, although its worker does not know it yet, or is dead."""
        loaded = self.backend.load(id)
        return worker.probe.crashed or loaded is None or loaded.head.owner != worker.owner

    def add(self, loop: Loop, changed: Callable[[], object]) -> Callable[[], None]:
        """Watch the store: told of most changes, late."""
        mark = object()
        self._listeners[mark] = (loop, changed)
        return lambda: self._listeners.pop(mark, None) and None

    def tell(self) -> None:
        """Whoever shares a store object tells each other; here everybody hears of every change anyway."""

    def stop(self) -> None:
        """A store closes; others may still listen."""

    async def _tell_changes(self) -> None:
        seen = 0
        while True:
            await self.clock.sleep(0.01)
            if len(self.records) != seen:
                seen = len(self.records)
                for loop, changed in list(self._listeners.values()):
                    if self.dice.random() < 0.8:
                        loop.call_soon(changed)

    # the course

    def run(self) -> list[str]:
        """Play the schedule to its end; what broke a promise."""
        work.tell_to(self.outside())  # type: ignore[arg-type]
        with (
            mock.patch("time.monotonic", self.clock.monotonic),
            mock.patch("longrun.desk.random_start", partial(self.dice.randrange, 2**48)),
            mock.patch("anyio._backends._asyncio.set", Ordered, create=True),
        ):
            asyncio.run(self._play())
        records = without_repeats([record for record in self.records if not record["kind"].startswith("stale")])
        return judge_records(records) + judge_store(records, self.backend)

    async def _play(self) -> None:
        teller = self.spawn(self._tell_changes())
        workers = [asyncio.get_running_loop().create_task(self._work()) for _ in range(self._workers)]
        loop: Any = asyncio.get_running_loop()
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if all(worker.done() for worker in workers):
                break
            if _is_idle(loop) and not self.clock.jump(loop._scheduled[0].when() if loop._scheduled else None):
                raise AssertionError("everybody waits and nothing will ever happen")
        else:
            raise AssertionError("it goes on for ever")
        teller.cancel()
        for worker in workers:
            worker.result()

    async def _work(self) -> None:
        """One worker after the other in the same place, each until it dies or everything has ended."""
        while not await self._live(Worker(self, next(self._numbers))):
            await self.turns()

    async def _live(self, worker: Worker) -> bool:
        worker_here.set(worker)
        scope = anyio.CancelScope()
        worker.probe.new_life(scope.cancel)
        try:
            with scope:
                async with worker, anyio.create_task_group() as tasks:
                    for id in IDS:
                        tasks.start_soon(self._follow, worker, id)
                return True
        except BaseException as error:
            if not _is_the_faults(error):
                raise
        return False

    async def _follow(self, worker: Worker, id: str) -> None:
        name = "each_durable" if id.endswith("items") else work.workflow_of(id)
        steps: Any = [name] if id.endswith("items") else name
        run = await worker.start(steps, work.first_state(id), id=id)
        if id.endswith("-waits"):
            try:
                await run.signal("go", work.first_state(id), key="go")
            except InvalidStateError:
                self.outside(worker.number).note("over", id=id)
        self.outside(worker.number).note("result", id=id, result=await run.result())


def without_repeats(records: list[Record]) -> list[Record]:
    """The records without writes that were repeated because their answer was lost: the same again is no second one."""
    seen: dict[tuple[str, int, int], Record] = {}
    kept: list[Record] = []
    for record in records:
        key = (record.get("id", ""), record.get("fence", 0), record.get("revision", 0))
        if record["kind"] != "ack" or seen.setdefault(key, record) is record or seen[key] != record:
            kept.append(record)
    return kept


def _is_idle(loop: Any) -> bool:
    """Whether nobody can go on. Scopes that were cancelled say so again in every turn until they are left; those with
    a deadline that is only the loop's rounding away look again in every turn."""
    return all(getattr(handle._callback, "__name__", "") in NO_WORK for handle in loop._ready)


def _is_the_faults(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_the_faults(one) for one in error.exceptions)
    return isinstance(error, StoreUnavailableError) or only_crashes(error)
