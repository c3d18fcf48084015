"""Where an execution goes when a step has ended: on, elsewhere, again, to sleep, to its end, or into a back-off.

Place in the life of an execution: checkpoint, event, finish. Each way is one durable write, with the events that it
makes true. What a directive asks for that makes no sense is the step's error.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from longrun import codec
from longrun.book import Book, Event
from longrun.branches import describe
from longrun.errors import (
    CodecError,
    ConfigError,
    DuplicateKeyError,
    ItemsChangedError,
    NonRetryable,
    NotStorableError,
    RegistrationError,
    StepMisuseError,
    TooLargeError,
    UnknownStepError,
    UnknownWorkflowError,
    UnsupportedInProcessError,
    holds,
)
from longrun.events import EventType
from longrun.records import FOREVER, ExecutionState, RetryPolicy
from longrun.registry import Directive, Finish, Goto, Repeat, Sleep, Step, WaitFor
from longrun.snapshot import Snapshot
from longrun.stored import Boundary, Message, crossed, was_waiting

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
GIVES_UP = (
    NonRetryable,
    NotStorableError,
    TooLargeError,
    ItemsChangedError,
    DuplicateKeyError,
    StepMisuseError,
    ConfigError,
    RegistrationError,
    UnknownStepError,
    UnknownWorkflowError,
    UnsupportedInProcessError,
)
"""Errors of the program, not of the moment: another attempt would end in the same way."""


class Course:
    """Moves one owned execution. The answers say whether there is more to run here."""

    def __init__(self, executor: Crew, book: Book) -> None:
        self._executor, self._book = executor, book

    def moved(self, step: Step, value: Any) -> Awaitable[Any] | bool:
        """The step is done. If another follows at once, move there: True, or what to await until that is durable."""
        head, steps = self._book.head, self._book.steps
        if not isinstance(value, Directive):
            return head.step + 1 < len(steps) and self._move(step, "step", head.step + 1, value)
        if isinstance(value, Goto):
            return self._move(step, "goto", target_of(value.step, steps), value.state)
        if isinstance(value, Repeat):
            return self._move(step, "repeat", head.step, value.state, head.iteration + 1)
        return False

    async def stopped(self, step: Step, value: Any, signal: Message | None = None) -> bool:
        """The step is done, and none follows at once: it parks or ends the execution, as its return value says. Given
        the signal that it would wait for, it takes that and goes on, if it can."""
        if isinstance(value, Sleep | WaitFor):
            return await self._park(step, value, signal)
        result = value.state if isinstance(value, Finish) else value
        return await self._complete(result, step.name, self._book.snapshot(result, step.result_type))

    def _move(self, step: Step, kind: str, to: int, value: Any, iteration: int = 0) -> Awaitable[Any] | bool:
        book = self._book
        snapshot = book.snapshot(value, book.type_of(to, step))
        boundary = self._crossed(kind, to, snapshot, iteration, name=book.steps[book.head.step])
        return book.go_on(boundary, snapshot, value) or True

    def _crossed(self, kind: str, to: int, snapshot: Snapshot, iteration: int = 0, *, name: str | None) -> Boundary:
        """The boundary at which the step `name` ended and a new visit begins."""
        s, now = snapshot, self._executor.clock.now()
        return crossed(self._book.head, kind, name, now, to, iteration, s.data, s.names, s.size)

    async def complete_after_wait(self) -> bool:
        """The last step parked the execution, or a fork began behind it: it ends with the state it has."""
        book = self._book
        value = book.state(book.state_type)
        return await self._complete(value, book.last_step, book.snapshot_again(), ends_step=False)

    async def _complete(self, value: Any, name: str | None, snapshot: Snapshot, *, ends_step: bool = True) -> bool:
        book = self._book
        boundary = self._crossed("finish", len(book.steps), snapshot, name=name)
        events: tuple[Any, ...] = ((EventType.EXECUTION_COMPLETED, {"step": None}),)
        if ends_step:
            events = ((EventType.STEP_COMPLETED, {"step": name, "attempt": boundary.attempts}), *events)
        await book.end(boundary, snapshot, value, events)
        book.result = value
        return False

    async def _park(self, step: Step, directive: Sleep | WaitFor, signal: Message | None) -> bool:
        """Sleep or wait. The next step is the next in the list; behind the last, the execution ends after the wait. A
        wait whose signal is here already ends with the write that begins it."""
        book = self._book
        due, name = deadline_of(directive, self._executor.clock.now())
        to = self._book.head.step + 1
        snapshot = book.snapshot(directive.state, book.type_of(to, step))
        boundary = self._crossed("sleep" if name is None else "wait", to, snapshot, name=book.step_name)
        changes = {
            "state": State.WAITING,
            "owner": None,
            "step": to,
            "visit": boundary.visit,
            "iteration": 0,
            "attempt": 0,
            "due": due,
            "signal": name,
            "error": None,
            "crashes": 0,
            "started": None,
        }
        events: tuple[Event, ...] = (
            (EventType.STEP_COMPLETED, {"step": step.name, "attempt": boundary.attempts}),
            (EventType.WAITING, {"step": step.name, "data": {"signal": name, "due": due}}),
        )
        if signal is None or (ending := _readable_end(signal)) is None:
            await book.cross(boundary, changes, snapshot=snapshot, events=events)
            return False
        changes |= {"owner": book.head.owner, **self._awake()}
        events = (*events, _resumed(name, signal))
        await book.cross(boundary, changes, snapshot=snapshot, events=events, put=("wait", ending), take=(signal.id,))
        return True

    async def wake(self, signal: Message | None) -> None:
        """End a wait, with the signal that ended it or because its time has come; what the next step sees of it is kept
        with its progress."""
        book, name = self._book, self._book.head.signal
        if name is not None:
            book.ledger.record("wait", _end_of_wait(signal))
        take = () if signal is None else (signal.id,)
        await book.commit(self._awake(), take=take, events=(_resumed(name, signal),))

    def _awake(self) -> dict[str, Any]:
        """What a head becomes when a wait ends."""
        return {
            "state": State.RUNNING,
            "due": None,
            "signal": None,
            "hold": False,
            "reason": None,
            "started": self._executor.clock.now(),
        }

    async def rest(self, *, here: bool) -> None:
        """It waits on, as it did before it was claimed or paused: here, or for anybody to take."""
        head = self._book.head
        state = State.WAITING if was_waiting(head) else head.state
        if not here or state is not head.state:
            await self._book.commit({"state": state, "owner": head.owner if here else None, "hold": False})

    async def failed(self, step: Step, error: BaseException) -> bool:
        policy = step.retry or RetryPolicy(max_attempts=self._executor.config.max_retries + 1)
        failures = self._book.head.attempt + 1
        text = describe(error)
        self._executor.log.info(
            "step.failed", execution=self._book.id, step=step.name, attempt=failures, error_type=type(error).__name__
        )
        if holds(error, *GIVES_UP) or not policy.allows(error, failures):
            return await self._fail(step, text, failures)
        due = self._executor.clock.now() + policy.delay(failures, random.random())
        events = (
            (EventType.STEP_FAILED, {"error": text, "attempt": failures}),
            (EventType.STEP_RETRYING, {"error": text, "attempt": failures + 1, "data": {"due": due}}),
        )
        await self._book.commit({"attempt": failures, "due": due, "error": text, "crashes": 0}, events=events)
        return True

    async def _fail(self, step: Step, text: str, failures: int) -> bool:
        book = self._book
        boundary = book.boundary("fail", attempts=failures, error=text)
        changes = {
            "state": State.FAILED,
            "owner": None,
            "attempt": failures,
            "due": None,
            "error": text,
            "crashes": 0,
            "ended": boundary.ended,
        }
        fields = {"step": step.name, "error": text, "attempt": failures}
        events = ((EventType.STEP_FAILED, fields), (EventType.EXECUTION_FAILED, dict(fields)))
        await book.cross(boundary, changes, events=events)
        return False


def _end_of_wait(signal: Message | None) -> bytes:
    """What the next step sees of a wait that a signal has ended, or its time."""
    payload = codec.decode(signal.payload or b"null", Any, path="signal") if signal else None
    return codec.encode({"payload": payload, "timed_out": signal is None}, dict, path="signal")


def _readable_end(signal: Message) -> bytes | None:
    """The same; None if it cannot be made, which is no fault of the step that would wait for it."""
    try:
        return _end_of_wait(signal)
    except CodecError:
        return None


def _resumed(name: str | None, signal: Message | None) -> Event:
    return EventType.RESUMED, {"data": {"signal": name, "timed_out": name is not None and signal is None}}


def target_of(step: object, steps: tuple[str, ...]) -> int:
    """The index that a Goto means."""
    if isinstance(step, int) and not isinstance(step, bool):
        if 0 <= step < len(steps):
            return step
        raise StepMisuseError(f"Goto({step}) leads nowhere: this execution has steps 0 to {len(steps) - 1}")
    name = step.name if isinstance(step, Step) else getattr(step, "__name__", step)
    if not isinstance(name, str):
        raise StepMisuseError(f"Goto needs the name or the index of a step, not {type(step).__name__}")
    count = steps.count(name)
    if count > 1:
        raise StepMisuseError(f"Goto({name!r}) is ambiguous: it stands {count} times in this execution; give its index")
    if count == 0:
        raise StepMisuseError(f"Goto({name!r}) leads nowhere: this execution has no such step")
    return steps.index(name)


def deadline_of(directive: Sleep | WaitFor, now: float) -> tuple[float | None, str | None]:
    """When a parked execution is due, and which signal it waits for."""
    if isinstance(directive, Sleep):
        return _moment("Sleep", directive.until, now), None
    name: object = directive.signal
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise StepMisuseError(f"WaitFor needs the name of a signal, 1 to 200 printable characters, not {name!r:.80}")
    return None if directive.timeout is None else _moment("WaitFor", directive.timeout, now), name


def _moment(what: str, until: Any, now: float) -> float:
    if isinstance(until, datetime):
        if until.tzinfo is None:
            raise StepMisuseError(f"{what} until a naive datetime is ambiguous; give one with a time zone")
        return until.timestamp()
    seconds = until.total_seconds() if isinstance(until, timedelta) else until
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise StepMisuseError(f"{what} takes seconds, a timedelta or an aware datetime, not {type(until).__name__}")
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise StepMisuseError(f"{what} takes a finite number of seconds, not {seconds}; WaitFor can wait without end")
    return min(now + float(min(max(0, seconds), FOREVER)), FOREVER)
