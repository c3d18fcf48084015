"""The points at which a program can crash, and the probe that finds them or crashes there.

Place in the life of an execution: all of it. A point is known by what happens there and how often that had happened
before, not by a number of its own: so it is found again although writes of other executions come in another order.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from attrs import frozen

from longrun.attempt import Attempt
from longrun.context import StepContext, SyncStepContext
from longrun.errors import StoreUnavailableError
from longrun.events import EventType
from longrun.stored import Create, Save, Write
from longrun.stores.base import Answer, StoreBackend
from longrun.testing.interposed import WRITES, InterposedBackend

T = TypeVar("T")
BY_THE_CLOCK = frozenset({EventType.HEARTBEAT, EventType.PROGRESS, EventType.STORE_UNAVAILABLE, EventType.LEASE_LOST})
"""Events that come when their time has come: no point can be found again by them."""


@frozen
class CrashPoint:
    """A moment in the life of an execution: before or after something, for the n-th time."""

    when: str
    what: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.when} {self.what}" + (f" (no. {self.nth})" if self.nth > 1 else "")


class SimulatedCrash(BaseException):
    """The program has crashed in this test. Not an `Exception`: nothing in it may catch it and go on."""

    ends_the_program = True


class Probe:
    """Sees every point. Without a target it writes them down; with one it crashes there, once."""

    def __init__(self, target: CrashPoint | None = None) -> None:
        self.target = target
        self.points: list[CrashPoint] = []
        self.crash: Callable[[], object] = lambda: None
        """What ends the life that is under way; from any thread."""
        self.crashed = False
        self.fired = False
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def reach(self, when: str, what: str) -> bool:
        """A point is reached: True if the program is dead now."""
        with self._lock:
            if self.crashed:
                return True
            self._seen[when, what] += 1
            point = CrashPoint(when, what, self._seen[when, what])
            self.points.append(point)
            if self.fired or point != self.target:
                return False
            self.crashed = self.fired = True
        self.crash()
        return True

    def pass_through(self, when: str, what: str) -> None:
        """The same for a point in the program's own code, which must not go on when it is dead."""
        if self.reach(when, what):
            raise SimulatedCrash(f"{when} {what}")

    def new_life(self, crash: Callable[[], object]) -> None:
        self.crash, self.crashed = crash, False


class ProbedBackend(InterposedBackend):
    """Every write of the store is a point before and a point after; a dead program reaches nothing any more."""

    def __init__(self, inner: StoreBackend, probe: Probe) -> None:
        super().__init__(inner)
        self._probe = probe

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        if self._probe.crashed:
            raise _gone()
        if call not in WRITES or call in ("renew", "delete"):
            return function(*args, **options)
        if call == "claim":
            claimed = function(*args, **options)
            if claimed and self._probe.reach("after", "a claim"):
                raise _gone()
            return claimed
        self._check("before", call)
        result = function(*args, **options)
        self._check("after", call)
        return result

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        answers: list[Answer] = []
        for write in batch:
            if self._probe.crashed:
                raise _gone()
            what = describe_write(write)
            self._check("before", what)
            answers += self.inner.commit([write])
            self._check("after", what)
        return answers

    def _check(self, when: str, what: str) -> None:
        if self._probe.reach(when, what):
            raise _gone()


def _gone() -> StoreUnavailableError:
    return StoreUnavailableError("tested", "the program has crashed")


def describe_write(write: Write) -> str:
    """What a write means, in words that are the same in every run."""
    if isinstance(write, Create):
        return f"the start of {write.id}"
    if not isinstance(write, Save):
        return f"a {write.message.kind} for {write.id}"
    if write.boundaries:
        ends = ", ".join(f"{b.kind} at step {b.step} {b.name!r}" for b in write.boundaries)
        return f"the checkpoint of {write.id}: {ends}"
    if write.put or write.drop:
        keys = dict.fromkeys(map(_without_branch, [*write.put, *write.drop]))
        return f"progress of {write.id} in step {write.head.step}: {', '.join(keys)}"
    failed = f", failed attempt {write.head.attempt}" if write.head.attempt else ""
    return f"the note that {write.id} is {write.head.state}{failed}"


def _without_branch(key: str) -> str:
    """Which branches of a map share a write, and which comes first, differs from run to run."""
    return re.sub(r"/\d+", "", key) if key.startswith("map:") else key


def describe_event(kind: EventType, execution_id: str, step: str | None) -> str | None:
    """The same for an event; None for one that comes by the clock."""
    if kind in BY_THE_CLOCK:
        return None
    return f"the event {kind} of {execution_id}" + (f" {step!r}" if step else "")


# inside a step


class ProbedContext(StepContext):
    """Each item that a loop hands out is a point; each await of a branch too, if that is asked for."""

    _probe: Probe
    _awaits: bool

    @classmethod
    def probing(cls, attempt: Attempt, probe: Probe, *, awaits: bool) -> ProbedContext:
        context = cls(attempt.info, attempt, attempt.ledger.group(""))
        context._probe, context._awaits = probe, awaits
        return context

    async def map(self, function: Callable[..., Any], items: Any, **options: Any) -> Any:
        """A branch is a task of its own, whose awaits are not the step's."""
        if self._awaits and inspect.iscoroutinefunction(function):
            function = self._probed_branch(function)
        results: list[Any] = await super().map(function, items, **options)
        return results

    def _probed_branch(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        name = getattr(function, "__name__", "map")
        what = f"an await in a branch of {name!r} in step {self.step_index} {self.step!r} of {self.execution_id}"

        @functools.wraps(function)
        async def probed(*args: Any) -> Any:
            return await probed_awaits(function(*args), lambda: self._probe.reach("at", what))

        return probed

    def each(self, name: str, items: Any, *, every: int | None = None) -> Any:
        return _probed_items(super().each(name, items, every=every), self._probe, self._what(name))

    def _what(self, name: str) -> str:
        return f"an item of {name!r} in step {self.step_index} {self.step!r} of {self.execution_id}"


class ProbedSyncContext(SyncStepContext):
    _probe: Probe

    @classmethod
    def probing(cls, attempt: Attempt, probe: Probe, *, awaits: bool) -> ProbedSyncContext:
        inner = ProbedContext.probing(attempt, probe, awaits=awaits)
        context = cls(inner._info, inner._port, inner._group, inner._obey)
        context._inner, context._probe = inner, probe
        return context

    def each(self, name: str, items: Iterable[T], *, every: int | None = None) -> Any:
        what = f"an item of {name!r} in step {self.step_index} {self.step!r} of {self.execution_id}"
        return _probed_plain_items(super().each(name, items, every=every), self._probe, what)


async def _probed_items(items: AsyncIterator[T], probe: Probe, what: str) -> AsyncIterator[T]:
    async for item in items:
        probe.pass_through("at", what)
        yield item


def _probed_plain_items(items: Iterator[T], probe: Probe, what: str) -> Iterator[T]:
    for item in items:
        probe.pass_through("at", what)
        yield item


class probed_awaits:  # noqa: N801 -- used like a function: `await probed_awaits(coroutine, reach)`
    """Awaits a coroutine and reaches a point each time that it waits for something."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], reach: Callable[[], object]) -> None:
        self._coroutine, self._reach = coroutine, reach

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            self._reach()
            try:
                value = yield waits_for
                step = self._coroutine.send
            except BaseException as error:  # whatever the loop throws in belongs to the coroutine
                value, step = error, self._coroutine.throw


class ProbedEngine:
    """Calls a step's function with a context that has points, in the loop or in a step thread."""

    def __init__(self, probe: Probe, *, awaits: bool) -> None:
        self._probe, self._awaits = probe, awaits

    async def run(self, attempt: Attempt, state: Any) -> Any:
        step = attempt.step
        args: tuple[Any, ...] = (state,)
        if step.takes_context:
            kind = ProbedContext if step.is_async else ProbedSyncContext
            args = (kind.probing(attempt, self._probe, awaits=self._awaits), state)
        if not step.is_async:
            return await attempt.run_sync(step.function, *args)
        if not self._awaits:
            return await step.function(*args)
        what = f"an await in step {attempt.info.step_index} {step.name!r} of {attempt.info.execution_id}"
        return await probed_awaits(step.function(*args), lambda: self._probe.reach("at", what))

    async def aclose(self) -> None:
        pass
