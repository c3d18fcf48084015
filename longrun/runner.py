"""Run one execution, step by step, to its end or to the point where it must stop.

Place in the life of an execution: run a step, checkpoint, event, finish. A `Runner` owns its execution: it alone writes
for it, with the fence of its claim. It is a task while steps run; parked and paused executions have none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio

from longrun import codec
from longrun.attempt import Attempt, Outcome
from longrun.book import MISSING, Book
from longrun.branches import describe
from longrun.control import Obedience, cancelling, needs_point, stops_at_once, was_waiting
from longrun.errors import (
    CodecError,
    DuplicateKeyError,
    ItemsChangedError,
    LeaseLostError,
    NonRetryable,
    NotStorableError,
    StepError,
    TooLargeError,
    UnknownStepError,
)
from longrun.events import EventType
from longrun.port import StepInfo
from longrun.records import ExecutionState, Progress, RetryPolicy
from longrun.registry import DIRECTIVES, Finish, Goto, Repeat, Sleep, Step, WaitFor
from longrun.stored import Head, Loaded, Message

if TYPE_CHECKING:
    from longrun.crew import Crew
    from longrun.handle import ExecutionHandle

State = ExecutionState
GIVES_UP = (NonRetryable, NotStorableError, TooLargeError, ItemsChangedError, DuplicateKeyError)


class Runner:
    """One owned execution, and the step it is in."""

    def __init__(
        self, executor: Crew, loaded: Loaded, *, value: Any = MISSING, controls_only: bool = False
    ) -> None:
        self._executor = executor
        self.book = Book(executor, loaded, value)
        self.id = self.book.id
        self.inbox: dict[int, Message] = {message.id: message for message in loaded.messages}
        self.attention = False
        self.checkpoint_interval = executor.config.checkpoint_interval
        self.result: Any = MISSING
        """What it ended with, as the object that the last step returned."""
        self.taken: set[int] = set()
        """Messages that this runner has obeyed or consumed, durably."""
        self.ended = anyio.Event()
        self._changed = anyio.Event()
        self._controls_only = controls_only
        self._obedience = Obedience(executor, self.book, controls_only=controls_only)
        self._damage = loaded.damage
        self._attempt: Attempt | None = None
        self._left: anyio.Event | None = None
        self._wake = anyio.Event()

    # from outside

    @property
    def head(self) -> Head:
        return self.book.head

    def deliver(self, messages: list[Message]) -> None:
        """Messages have come: they are obeyed at the next point, or at once if they say so."""
        for message in messages:
            if message.id not in self.taken:
                self.inbox.setdefault(message.id, message)
        if needs_point(self.inbox):
            self.attention = True
        if stops_at_once(self.inbox):
            self.interrupt()
        self._wake.set()

    def drain(self) -> None:
        """The executor is leaving: stop at the next point."""
        self.attention = True
        self._wake.set()

    def interrupt(self) -> None:
        """Stop the step in flight at once."""
        if self._attempt is not None:
            self._attempt.interrupt()
        self._wake.set()

    def lose(self) -> None:
        """Somebody else owns it now: nothing more is written, and its step is cancelled."""
        self.book.outbox.give_up(LeaseLostError(self.id, self.head.fence))
        self.attention = True
        self.interrupt()

    def tick(self, beats: bool) -> None:
        """Hand over what was captured and is due, whatever the step is doing; with a beat, show that it lives."""
        attempt = self._attempt
        if attempt is None:
            return
        attempt.tick(beats)
        if beats and self._executor.bus.active:
            self.book.emit(EventType.HEARTBEAT, attempt=attempt.info.attempt)

    @property
    def live_progress(self) -> Progress | None:
        return None if self._attempt is None else self._attempt.progress

    async def obeyed(self, number: int) -> None:
        """Wait until a message was obeyed, or this runner has ended without it."""
        while number not in self.taken and not self.ended.is_set():
            changed = self._changed
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_first, changed, tasks.cancel_scope)
                tasks.start_soon(_first, self.ended, tasks.cancel_scope)

    # the task

    async def run(self) -> None:
        """Until it ends, parks, pauses, or the executor leaves."""
        try:
            if await self._take_up():
                while await self._turn():
                    pass
        except LeaseLostError:
            self.book.emit(EventType.LEASE_LOST)
            self._executor.log.warning("execution.lease_lost", execution=self.id, fence=self.head.fence)

    async def _take_up(self) -> bool:
        """Bring a claimed execution into `running`; False if it stays where it is."""
        if self._damage and not await self._accept_damage():
            return False
        if not await self._follow_orders():
            return False
        head = self.head
        if head.state.finished or self._controls_only:
            await self._obedience.release()
            return False
        if head.crashes >= self._executor.config.max_crashes:
            await self._obedience.block(f"its process died {head.crashes} times without progress")
            return False
        if head.state is State.WAITING or (head.state is State.PAUSED and was_waiting(head)):
            return await self._wake_up()
        if head.state is not State.RUNNING:
            kind = EventType.EXECUTION_STARTED if head.state is State.INITIALIZED else EventType.RESUMED
            started = self.book.next(state=State.RUNNING, hold=False, reason=None, due=None, started=self._now())
            await self.book.commit(started, events=((kind, {}),))
        return True

    async def _turn(self) -> bool:
        """One step, or one point to obey. False when there is nothing more to do here."""
        if self.attention and not await self._obey():
            return False
        head, book = self.head, self.book
        if head.step >= len(book.steps):
            return await self._complete(book.state(Any), None)
        name = book.steps[head.step]
        step = self._executor.registry.get(name)
        if step is None:
            await self._obedience.block(str(UnknownStepError(name)))
            return False
        if head.attempt and head.due is not None and not await self._back_off(head.due):
            return True
        try:
            state = book.state(step.state_type)
        except CodecError as error:
            await self._obedience.block(str(error))
            return False
        return await self._after(step, await self._attempt_step(step, state))

    async def _obey(self) -> bool:
        self.attention = False
        if not await self._follow_orders():
            return False
        if self._executor.draining:
            await self._obedience.release()
            return False
        return True

    async def _follow_orders(self) -> bool:
        orders = [number for number, message in self.inbox.items() if message.kind != "signal"]
        goes_on = await self._obedience.obey(self.inbox)
        self.taken.update(orders)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        return goes_on

    # a step

    async def _attempt_step(self, step: Step, state: Any) -> Outcome:
        if self._left is not None:
            await self._left.wait()  # a thread of an earlier attempt still runs: it ends first
            self._left = None
        attempt = self._attempt = Attempt(self, step, self._info(step), self.book.ledger, self._executor.threads)
        if self._executor.bus.active:
            self.book.emit(EventType.STEP_STARTED, attempt=attempt.info.attempt)
        if stops_at_once(self.inbox) or self.book.outbox.lost is not None:
            attempt.interrupt()
        try:
            outcome = await attempt.run(self._executor.engine(step), state)
        finally:
            self._attempt = None
            self.book.progress = attempt.progress
        if attempt.left is not None:
            self._left = attempt.left.ended
        if self.book.outbox.lost is not None:
            raise self.book.outbox.lost
        return outcome

    def _info(self, step: Step) -> StepInfo:
        head, definition = self.head, self.book.definition
        woken = self.book.ledger.entries.get("wait")
        wait = codec.decode(woken) if woken is not None else {"payload": None, "timed_out": False}
        return StepInfo(
            execution_id=self.id,
            workflow=definition.workflow,
            step=step.name,
            step_index=head.step,
            attempt=head.attempt + 1,
            iteration=head.iteration,
            visit=head.visit,
            metadata=definition.metadata,
            signal=wait["payload"],
            timed_out=wait["timed_out"],
        )

    async def _after(self, step: Step, outcome: Outcome) -> bool:
        if cancelling(self.inbox):
            return await self._obey()
        if outcome.stopped:
            self.attention = True
            return True
        if outcome.error is not None:
            return await self._failed(step, outcome.error)
        try:
            return await self._returned(step, outcome.value)
        except (CodecError, StepError) as error:
            return await self._failed(step, error)

    async def _returned(self, step: Step, value: Any) -> bool:
        """The step is done: move on, as its return value says."""
        here = self.head.step
        if not isinstance(value, DIRECTIVES):
            return await self._move(step, "step", here + 1, value)
        if isinstance(value, Goto):
            return await self._move(step, "goto", target_of(value.step, self.book.steps), value.state)
        if isinstance(value, Repeat):
            return await self._move(step, "repeat", here, value.state, iteration=self.head.iteration + 1)
        if isinstance(value, Finish):
            return await self._complete(value.state, step)
        return await self._park(step, value)

    async def _move(self, step: Step, kind: str, to: int, value: Any, *, iteration: int = 0) -> bool:
        book = self.book
        if to >= len(book.steps):
            return await self._complete(value, step)
        snapshot = book.snapshot(value, book.type_of(to))
        boundary = self._crossed(kind, to, snapshot, iteration)
        head = book.next(
            step=to,
            visit=boundary.visit,
            iteration=iteration,
            attempt=0,
            due=None,
            error=None,
            crashes=0,
            started=boundary.ended,
        )
        event = (EventType.STEP_COMPLETED, {"step": step.name, "attempt": boundary.attempts})
        await book.cross(boundary, head, snapshot=snapshot, value=value, events=(event,), durable=False)
        return True

    def _crossed(self, kind: str, to: int, snapshot: Any, iteration: int = 0) -> Any:
        """The boundary at which the step in flight ended and a new visit begins."""
        head = self.head
        return self.book.boundary(
            kind, snapshot, attempts=head.attempt + 1, next=to, visit=head.visit + 1, iteration=iteration
        )

    async def _complete(self, value: Any, step: Step | None) -> bool:
        book = self.book
        snapshot = book.snapshot(value, Any if step is None else step.result_type, "result")
        boundary = self._crossed("finish", len(book.steps), snapshot)
        head = book.next(
            state=State.COMPLETED,
            step=len(book.steps),
            visit=boundary.visit,
            iteration=0,
            attempt=0,
            owner=None,
            due=None,
            error=None,
            crashes=0,
            started=None,
            ended=boundary.ended,
            progress=1.0,
        )
        events: tuple[Any, ...] = ((EventType.EXECUTION_COMPLETED, {"step": None}),)
        if step is not None:
            events = ((EventType.STEP_COMPLETED, {"step": step.name, "attempt": boundary.attempts}), *events)
        self.result = value
        await book.cross(boundary, head, snapshot=snapshot, value=value, events=events)
        return False

    async def _park(self, step: Step, directive: Sleep | WaitFor) -> bool:
        """Sleep or wait. The next step is the next in the list; behind the last, the execution ends after the wait."""
        book = self.book
        due, name = deadline_of(directive, self._now())
        to = self.head.step + 1
        kind = book.type_of(to) if to < len(book.steps) else step.result_type
        snapshot = book.snapshot(directive.state, kind)
        boundary = self._crossed("sleep" if name is None else "wait", to, snapshot)
        head = book.next(
            state=State.WAITING,
            owner=None,
            step=to,
            visit=boundary.visit,
            iteration=0,
            attempt=0,
            due=due,
            signal=name,
            error=None,
            crashes=0,
            started=None,
        )
        events = (
            (EventType.STEP_COMPLETED, {"step": step.name, "attempt": boundary.attempts}),
            (EventType.WAITING, {"step": step.name, "data": {"signal": name, "due": due}}),
        )
        await book.cross(boundary, head, snapshot=snapshot, events=events)
        return False

    # failure

    async def _failed(self, step: Step, error: BaseException) -> bool:
        policy = step.retry or RetryPolicy(max_attempts=self._executor.config.max_retries + 1)
        failures = self.head.attempt + 1
        text = describe(error)
        self._executor.log.info(
            "step.failed", execution=self.id, step=step.name, attempt=failures, error_type=type(error).__name__
        )
        if isinstance(error, GIVES_UP) or not policy.allows(error, failures):
            return await self._fail(step, text, failures)
        due = self._now() + policy.delay(failures, random.random())  # noqa: S311 -- jitter, not a secret
        events = (
            (EventType.STEP_FAILED, {"error": text, "attempt": failures}),
            (EventType.STEP_RETRYING, {"error": text, "attempt": failures + 1, "data": {"due": due}}),
        )
        await self.book.commit(self.book.next(attempt=failures, due=due, error=text, crashes=0), events=events)
        return True

    async def _fail(self, step: Step, text: str, failures: int) -> bool:
        book = self.book
        boundary = book.boundary("fail", attempts=failures, error=text)
        head = book.next(
            state=State.FAILED, owner=None, attempt=failures, due=None, error=text, crashes=0, ended=boundary.ended
        )
        fields = {"step": step.name, "error": text, "attempt": failures}
        events = ((EventType.STEP_FAILED, fields), (EventType.EXECUTION_FAILED, dict(fields)))
        await book.cross(boundary, head, events=events)
        return False

    async def _back_off(self, due: float) -> bool:
        """Wait for the next attempt's time; False if something has to be obeyed first."""
        async with self._executor.slot_given_back():
            while (left := due - self._now()) > 0:
                if self.attention:
                    return False
                self._wake = anyio.Event()
                await self._executor.clock.wait(self._wake, left)
        return not self.attention

    async def _accept_damage(self) -> bool:
        reason = "; ".join(self._damage)
        if self._executor.config.on_corruption == "block":
            await self._obedience.block(reason)
            return False
        self._executor.log.warning("execution.damaged", execution=self.id)
        await self.book.commit(self.book.next(reason=reason))
        return True

    # waiting

    async def _wake_up(self) -> bool:
        """A parked execution was claimed: move if its signal is here or its time has come, else park it again."""
        book, head = self.book, self.head
        signal = self._signal(head.signal)
        due = head.due is not None and head.due <= self._now()
        if signal is None and not due:
            await book.commit(book.next(state=State.WAITING, owner=None, hold=False))
            return False
        take: tuple[int, ...] = ()
        if signal is not None:
            take = (signal.id,)
            self.taken.add(signal.id)
            del self.inbox[signal.id]
        if head.signal is not None:
            payload = codec.decode(signal.payload or b"null", Any, path="signal") if signal else None
            entry = codec.encode({"payload": payload, "timed_out": signal is None}, dict, path="signal")
            book.ledger.record("wait", entry)
        moved = book.next(state=State.RUNNING, due=None, signal=None, hold=False, reason=None, started=self._now())
        data = {"signal": head.signal, "timed_out": head.signal is not None and signal is None}
        await book.commit(moved, take=take, events=((EventType.RESUMED, {"data": data}),))
        return True

    def _signal(self, name: str | None) -> Message | None:
        if name is None:
            return None
        return next((m for m in self.inbox.values() if m.kind == "signal" and m.name == name), None)

    # what an attempt needs

    def stop_here(self) -> bool:
        return needs_point(self.inbox) or self._executor.draining or self.book.outbox.lost is not None

    @property
    def unsaved(self) -> bool:
        return self.book.unsaved

    def save_progress(self, done: Callable[[Any], object]) -> None:
        self._note_progress()
        self.book.submit(done)

    async def commit_progress(self) -> None:
        self._note_progress()
        await self.book.save_progress()

    def _note_progress(self) -> None:
        if self._attempt is not None:
            self.book.progress = self._attempt.progress

    def show_progress(self, progress: Progress) -> None:
        if self._executor.bus.active:
            data = {"done": progress.done, "total": progress.total, "message": progress.message}
            self.book.emit(EventType.PROGRESS, data=data)

    def shutdown_left(self) -> float | None:
        return self._executor.shutdown_left()

    async def start_child(self, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        return await self._executor.start_child(self.book, workflow, state, key)

    def _now(self) -> float:
        return self._executor.clock.now()


async def _first(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def target_of(step: str | int, steps: tuple[str, ...]) -> int:
    """The index that a Goto means."""
    if isinstance(step, int) and not isinstance(step, bool):
        if 0 <= step < len(steps):
            return step
        raise StepError(f"Goto({step}) leads nowhere: this execution has steps 0 to {len(steps) - 1}")
    name = step if isinstance(step, str) else getattr(step, "__name__", None)
    count = steps.count(name) if isinstance(name, str) else 0
    if count > 1:
        raise StepError(f"Goto({name!r}) is ambiguous: the step stands {count} times in this execution; give its index")
    if count == 0:
        raise StepError(f"Goto({name!r}) leads nowhere: this execution has no such step")
    return steps.index(str(name))


def deadline_of(directive: Sleep | WaitFor, now: float) -> tuple[float | None, str | None]:
    """When a parked execution is due, and which signal it waits for."""
    if isinstance(directive, Sleep):
        return _moment(directive.until, now), None
    if not isinstance(directive.signal, str) or not directive.signal:
        raise StepError(f"WaitFor needs the name of a signal, not {type(directive.signal).__name__}")
    return None if directive.timeout is None else _moment(directive.timeout, now), directive.signal


def _moment(until: float | timedelta | datetime, now: float) -> float:
    if isinstance(until, datetime):
        if until.tzinfo is None:
            raise StepError("Sleep until a naive datetime is ambiguous; give one with a time zone")
        return until.timestamp()
    seconds = until.total_seconds() if isinstance(until, timedelta) else until
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise StepError(f"a time is seconds, a timedelta or a datetime, not {type(until).__name__}")
    return now + max(0.0, float(seconds))
