"""To be watched: the one seam through which traces and metrics see what happens.

Place in the life of an execution: beside all of it. `OpenTelemetry` and `PrometheusMetrics` are `Observer`s; an
executor that has any keeps a `Watch`, which stands around the engines that call steps, listens to the events, and times
the writes. An executor without telemetry has none of this: it pays one comparison a write and nothing a step.

What a step's function returned counts only once it is durable. So a `Call` is settled by the event that says so, and
what never became durable (a pause, a shutdown, a lost lease) is settled as stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field, frozen

from longrun.branches import as_failure
from longrun.errors import ConfigError, LongrunError, StepInterrupted
from longrun.events import LAST_EVENTS, EventType, ExecutionEvent
from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.stored import TRACE, Definition, Query, Save

if TYPE_CHECKING:
    from longrun.attempt import Attempt, Engine
    from longrun.crew import Crew
    from longrun.outbox import Done
    from longrun.port import StepInfo

SAMPLE_EVERY = 15.0
"""Seconds between two looks at how much waits."""
SETTLING = frozenset({*LAST_EVENTS, EventType.PAUSED, EventType.EXECUTION_BLOCKED, EventType.LEASE_LOST})
"""After these, what has not been told of an execution's calls never will be."""
log = get_logger()


@frozen(kw_only=True)
class Subject:
    """The execution that something is told of."""

    id: str
    workflow: str
    created: float
    owner: str
    parent_id: str | None = None
    trace: str | None = None
    """The trace context that was stored when it was created."""


@define(kw_only=True, eq=False)
class Call:
    """One attempt of a step."""

    subject: Subject
    info: StepInfo
    run_in: str
    """loop, thread, process."""
    began: float
    ended: float = 0.0
    error: str | None = None
    """The type of what it raised; never its text."""
    cut: bool = False
    """Whether it was stopped from outside."""
    outcome: str = ""
    """completed, failed or stopped, once it is settled."""
    marks: dict[Observer, Any] = field(factory=dict)
    """What an observer keeps with it."""


class Observer:
    """What telemetry is told, in the event loop's thread. None of it may wait; what it raises is logged."""

    def creating(self, definition: Definition, origin: str | None) -> str | None:
        """The trace context to store with a new execution. `origin` is that of the one it is a fork of."""
        return None

    def created(self, definition: Definition, stored: bool) -> None:
        """It was stored, or its id was taken."""

    def around(self, call: Call) -> AbstractContextManager[object]:
        """What to stand in while the step's function runs."""
        return nullcontext()

    def settled(self, call: Call) -> None:
        """How an attempt ended is known and durable."""

    def happened(self, event: ExecutionEvent, subject: Subject | None) -> None:
        """An event was told."""

    def saved(self, seconds: float, size: int) -> None:
        """A write became durable."""

    def waits(self, queue: str, number: int) -> None:
        """So many executions wait in a queue."""


class Watch:
    """The observers of one executor, and what they have not been told yet."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        self._over: dict[str, list[Call]] = {}
        """Calls that have ended and are not settled, by execution, oldest first."""
        self._crew: Crew

    @classmethod
    def of(cls, telemetry: Observer | Iterable[Observer] | None) -> Watch | None:
        """From what `telemetry=` was given."""
        if telemetry is None:
            return None
        given = (telemetry,) if isinstance(telemetry, Observer) else tuple(telemetry)
        for one in given:
            if not isinstance(one, Observer):
                raise ConfigError("telemetry", type(one).__name__, "give OpenTelemetry(), PrometheusMetrics() or both")
        return cls(given) if given else None

    def _tell(self, name: str, *args: Any) -> list[Any]:
        """Call every observer; one that fails costs nobody else anything."""
        answers = []
        for observer in self._observers:
            try:
                answers.append(getattr(observer, name)(*args))
            except Exception as error:
                log.warning("telemetry.failed", hook=name, error_type=type(error).__name__)
        return answers

    # from the executor

    def sign_on(self, crew: Crew, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        """Begin to watch; the engines to use from now on."""
        self._crew = crew
        crew.bus.tap(self)
        if crew.takes_work:
            crew.spawn(self._sample, name="longrun-sample")
        return {name: self.engine(name, engine) for name, engine in engines.items()}

    def engine(self, name: str, engine: Engine) -> Engine:
        return WatchedEngine(self, name, engine)

    def creating(self, definition: Definition, origin: str | None = None) -> str | None:
        return next((trace for trace in self._tell("creating", definition, origin) if trace is not None), None)

    def created(self, definition: Definition, stored: bool) -> None:
        self._tell("created", definition, stored)

    def timed(self, save: Save, done: Done) -> Done:
        """`done`, which also tells how long the write took."""
        began = time.perf_counter()

        def saved(error: LongrunError | None) -> None:
            if error is None:
                self._tell("saved", time.perf_counter() - began, size_of(save))
            done(error)

        return saved

    async def _sample(self) -> None:
        crew = self._crew
        while True:
            for queue in sorted(crew.queues) if crew.queues is not None else [None]:
                query = Query(states=frozenset({ExecutionState.INITIALIZED}), queue=queue)
                try:
                    number = sum((await crew.store.count(query)).values())
                except LongrunError:  # the store is away, which is told elsewhere
                    continue
                self._tell("waits", queue or "*", number)
            await crew.clock.sleep(SAMPLE_EVERY)

    # calls

    def subject(self, id: str) -> Subject | None:
        runner = self._crew.runners.get(id)
        if runner is None:
            return None
        book = runner.book
        definition = book.definition
        return Subject(
            id=id,
            workflow=definition.workflow,
            created=definition.created,
            owner=self._crew.owner,
            parent_id=definition.parent_id,
            trace=book.trace,
        )

    def begin(self, attempt: Attempt, run_in: str) -> Call:
        info = attempt.info
        for call in [call for call in self._over.get(info.execution_id, ()) if call.cut]:
            self._settle(call, "stopped")
        subject = self.subject(info.execution_id)
        assert subject is not None, "a step runs only while its execution has a runner"
        return Call(subject=subject, info=info, run_in=run_in, began=self._crew.clock.now())

    def around(self, call: Call) -> ExitStack:
        stack = ExitStack()
        for manager in self._tell("around", call):
            stack.enter_context(_Guarded(manager))
        return stack

    def over(self, call: Call, attempt: Attempt, error: BaseException | None) -> None:
        """The function has ended, however it did."""
        call.ended = self._crew.clock.now()
        if isinstance(error, StepInterrupted | anyio.get_cancelled_exc_class()):
            outcome = attempt.cut_short()
            call.cut, error = outcome.stopped, outcome.error
        elif error is not None:
            error = as_failure(error) or error
        call.error = None if error is None else type(error).__name__
        self._over.setdefault(call.subject.id, []).append(call)

    def _settle(self, call: Call, outcome: str) -> None:
        calls = self._over[call.subject.id]
        calls.remove(call)
        if not calls:
            del self._over[call.subject.id]
        call.outcome = outcome
        self._tell("settled", call)

    # events

    def put(self, event: ExecutionEvent) -> None:
        calls = list(self._over.get(event.execution_id, ()))
        if event.type is EventType.STEP_COMPLETED or event.type is EventType.STEP_FAILED:
            self._settle_by(event, calls)
        elif event.type in SETTLING:
            for call in calls:
                self._settle(call, "stopped")
        self._tell("happened", event, self.subject(event.execution_id))

    def _settle_by(self, event: ExecutionEvent, calls: list[Call]) -> None:
        """The attempt that an event tells of; what came before it came to nothing."""
        failed = event.type is EventType.STEP_FAILED
        fitting = [call for call in calls if call.info.step == event.step and call.info.attempt == event.attempt]
        fitting = [call for call in fitting if not call.cut] or (fitting if failed else [])
        if not fitting:
            return
        mine = fitting[0]
        for call in calls[: calls.index(mine)]:
            self._settle(call, "stopped")
        if failed:
            mine.error = mine.error or (event.error or "").partition(":")[0]
        self._settle(mine, "failed" if failed else "completed")

    def close(self) -> None:
        for call in [call for calls in self._over.values() for call in calls]:
            self._settle(call, "stopped")


class _Guarded:
    """What an observer wants to stand around a step. If it fails, the step does not."""

    def __init__(self, manager: AbstractContextManager[object]) -> None:
        self._manager: AbstractContextManager[object] | None = manager

    def __enter__(self) -> None:
        try:
            if self._manager is not None:
                self._manager.__enter__()
        except Exception as error:
            self._manager = None
            log.warning("telemetry.failed", hook="around", error_type=type(error).__name__)

    def __exit__(self, *exception: object) -> None:
        try:
            if self._manager is not None:
                self._manager.__exit__(None, None, None)
        except Exception as error:
            log.warning("telemetry.failed", hook="around", error_type=type(error).__name__)


class WatchedEngine:
    """An engine with the watch around each call."""

    def __init__(self, watch: Watch, name: str, engine: Engine) -> None:
        self._watch, self._name, self._engine = watch, name, engine

    async def run(self, attempt: Attempt, state: Any) -> Any:
        call = self._watch.begin(attempt, self._name)
        failure: BaseException | None = None
        try:
            with self._watch.around(call):
                return await self._engine.run(attempt, state)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._watch.over(call, attempt, failure)
            del failure

    async def aclose(self) -> None:
        await self._engine.aclose()


def size_of(save: Save) -> int:
    """The bytes of a user's data in a write."""
    states = sum(len(boundary.data) for boundary in save.boundaries if boundary.data is not None)
    return states + sum(map(len, save.blobs.values())) + sum(map(len, save.put.values()))


def trace_of(definition: Definition) -> str | None:
    """The trace context that is stored with an execution."""
    found = definition.metadata.get(TRACE)
    return found if isinstance(found, str) else None


def carrier() -> dict[str, str]:
    """The trace context of here, for a step in a child process."""
    otel = sys.modules.get("longrun.otel")
    return {} if otel is None else dict(otel.carrier())


def carried(given: Mapping[str, str]) -> AbstractContextManager[object]:
    """In the child: what to stand in while the step's function runs."""
    if not given:
        return nullcontext()
    from longrun import otel

    return otel.carried(given)
