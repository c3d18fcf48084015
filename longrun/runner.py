"""Run one execution, step by step, to its end or to the point where it must stop.

Place in the life of an execution: run a step, checkpoint, event, finish. A `Runner` owns its execution: it alone writes
for it, with the fence of its claim. It is a task while steps run; parked and paused executions have none.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from longrun.attempt import Attempt, Outcome
from longrun.book import Book
from longrun.control import Obedience, cancelling, goes_on_anyway, orders_in, stops_at_once
from longrun.control_room import inside
from longrun.course import Course
from longrun.errors import CodecError, LeaseLostError, LongrunError, RegistrationError, StepError, UnknownStepError
from longrun.events import EventType
from longrun.fitness import reason_of
from longrun.host import StepHost
from longrun.inbox import Inbox, by_word
from longrun.loops import RUNG, Bell
from longrun.records import ExecutionState, Progress, RetryPolicy
from longrun.registry import Step, WaitFor
from longrun.seat import Seat
from longrun.stored import Head, Loaded, Message, was_waiting
from longrun.stride import stride
from longrun.threads import LEFT, leave_behind

if TYPE_CHECKING:
    from longrun.crew import Crew
    from longrun.handle import ExecutionHandle

State = ExecutionState
LOOK_AGAIN = 0.02
"""Seconds between two looks at a thread that an earlier attempt has left behind."""
ASK_AGAIN = 1.0
"""Seconds between two looks at whether a lease that had run out is held again."""
LAST_WORDS = 2.0
"""How long an execution whose task is cancelled from outside tries to write that it is free."""
DELAYS = RetryPolicy()
"""The delays of a step without a policy of its own."""


class Runner(StepHost):
    """One owned execution, and the step it is in."""

    # What stands here costs nothing until it is set.
    scope: anyio.CancelScope
    """That of the stretch it is in. The only one that all of them get later than when they are made: what the class
    knows too late of makes a dictionary for each."""
    _cut: tuple[Step, Outcome] | None = None
    """The step that was cut short in the last stretch, and how it ended."""
    _told_to_end = False
    _wake = RUNG

    def __init__(
        self,
        executor: Crew,
        loaded: Loaded,
        value: Any,
        controls_only: bool,
        wakes_paused: bool,
    ) -> None:
        self.crew = executor
        self.book = Book(executor, loaded, value)
        self.id = self.book.id
        self.inbox = Inbox()
        self.inbox.add(loaded.messages)
        self.attention = executor.draining
        self.checkpoint_interval = executor.save_interval
        self.ended = Bell(executor.loop)
        self._controls_only = controls_only
        self._wakes_paused = wakes_paused
        """Whether the pass at start claimed it: what is paused or blocked goes on without being asked to."""
        self._damage = loaded.damage
        self._taken_up = False
        self.attempt: Attempt | None = None
        """The step in flight, while it can be stopped."""
        self.running: Attempt | None = None
        """The step in flight, or the last one if it was cut short."""
        self.loop, self.thread = executor.loop, executor.thread
        self.seat = Seat(executor, self.book)

    # from outside

    @property
    def head(self) -> Head:
        return self.book.head

    @property
    def _obedience(self) -> Obedience:
        return Obedience(self.crew, self.book, controls_only=self._controls_only)

    @property
    def _course(self) -> Course:
        return Course(self.crew, self.book)

    def deliver(self, messages: list[Message]) -> None:
        """Messages have come: they are obeyed at the next point, or at once if they say so."""
        self.inbox.add(messages)
        orders = orders_in(self.inbox)
        if self.attempt is not None and goes_on_anyway(orders):
            self.inbox.wave_through(orders, self.book.take)
        elif orders:
            self.attention = True
            if stops_at_once(self.inbox):
                self.interrupt()
        self._wake.set()

    def tell(self, order: Message) -> int:
        """Take an order by word of mouth; its number, to ask with whether it was obeyed."""
        told = by_word(order)
        self.deliver([told])
        return told.id

    def told_and_stored(self, number: int, order: Message) -> None:
        """An order is stored that was told before: if that came to nothing meanwhile, so does this."""
        if number in self.inbox.taken and self.attempt is not None:
            self.inbox.add([order])
            self.inbox.wave_through([order], self.book.take)
        else:
            self.deliver([order])

    def drain(self) -> None:
        """The executor is leaving: stop at the next point."""
        self.attention = True
        self._wake.set()

    def interrupt(self) -> None:
        """Stop the step in flight at once."""
        if self.attempt is not None:
            self.attempt.interrupt()
        self._wake.set()

    def lose(self) -> None:
        """Somebody else owns it now: nothing more is written, and its step is cancelled."""
        self.book.outbox.give_up(LeaseLostError(self.id, self.head.fence))
        self.attention = True
        self.interrupt()

    def tick(self, beats: bool) -> None:
        """Hand over what was captured and is due, whatever the step is doing; with a beat, show that it lives."""
        attempt = self.attempt
        if attempt is None:
            return
        attempt.tick(beats and self.crew.config.durability != "exit")
        if beats and self.crew.bus.audience:
            data = self.forecast(attempt.progress)
            self.book.tell_if_quiet(EventType.HEARTBEAT, attempt=attempt.info.attempt, data=data)

    @property
    def in_step(self) -> bool:
        return self.attempt is not None

    @property
    def live_progress(self) -> Progress | None:
        return None if self.attempt is None else self.attempt.progress

    async def obeyed(self, number: int) -> bool:
        """Wait until a message was obeyed; False if this runner does not have it or ends without obeying it."""
        return await self.inbox.obeyed(number, self.ended)

    def finish(self) -> None:
        """It runs no more here: tell whoever waits, and let go what only the garbage collector would free."""
        self.running = None
        self.ended.set()
        self.inbox.stir()

    # the task

    async def run(self) -> None:
        """Until it ends, parks, pauses, or the executor leaves."""
        inside.set(self.id)
        trouble: str | None = None
        try:
            while await self._stretch():
                pass
        except LeaseLostError:
            self.book.emit(EventType.LEASE_LOST)
            self.crew.log.warning("execution.lease_lost", execution=self.id, fence=self.head.fence)
        except Exception as error:  # a defect of ours must not take the other executions along
            trouble = self.crew.trouble_with(self, error)
        except BaseException:  # cancelled from outside, or Ctrl-C came while this task ran
            await self._give_back()
            raise
        finally:
            self.seat.close()
            self.crew.left(self, trouble)

    def cancel(self) -> None:
        """End the task: what it does is cut short, but for its last words. Nothing more is begun."""
        self._told_to_end = True
        self.interrupt()
        if hasattr(self, "scope"):  # it has begun
            self.scope.cancel()

    async def _give_back(self) -> None:
        """The program itself is being ended: no crash of this execution, so it is not left to look like one."""
        if not self.crew.alive:
            return
        with anyio.move_on_after(LAST_WORDS, shield=True):
            try:
                await self._obedience.release()
            except LongrunError as error:
                self.crew.log.warning("execution.not_released", execution=self.id, problem=str(error))

    @property
    def _runs_already(self) -> bool:
        """Whether nothing stands between it and its next step, as with one that was just started here."""
        head = self.book.head
        if head.state is not State.RUNNING or head.crashes or self.inbox or self._damage:
            return False
        return not (self._controls_only or self.crew.draining)

    async def _take_up(self) -> bool:
        """Bring a claimed execution into `running`; False if it stays where it is."""
        if self._damage and not await self._obedience.face(self._damage, self.inbox):
            return False
        if not await self._follow_orders():
            return False
        head = self.head
        if head.state.finished or self._controls_only or self.crew.draining:
            await self._obedience.release()
            return False
        if head.state in (State.PAUSED, State.BLOCKED) and (head.hold or not self._wakes_paused):
            return await self._leave_stopped()
        if head.crashes >= self.crew.config.max_crashes:
            await self._obedience.block(f"its process died {head.crashes} times without progress; resume frees it")
            return False
        if head.state is State.WAITING or was_waiting(head):
            return await self._wake_up()
        if head.state is State.INITIALIZED and head.due is not None and head.due > self._now():
            return await self._rest()
        if head.state is not State.RUNNING:
            kind = EventType.EXECUTION_STARTED if head.state is State.INITIALIZED else EventType.RESUMED
            due = head.due if head.attempt else None
            started = {"state": State.RUNNING, "hold": False, "reason": None, "due": due, "started": self._now()}
            await self.book.commit(started, events=((kind, {}),))
        await self.seat.suspect(self)
        return True

    async def _leave_stopped(self) -> bool:
        """Claimed to be controlled, and nothing says that it shall run: it stays as it was."""
        if self.head.state is State.BLOCKED or not self.crew.keeps_paused:
            await self._obedience.release()
        return False

    async def _stretch(self) -> bool:
        """Step after step under one cancel scope, since entering one for each would cost as much as the step. A step
        that was cut short has used the scope up: what follows from that is done in the next. False: nothing more."""
        if self._told_to_end and self._cut is None:
            await self._give_back()
            return False
        with self.loop.scope() as self.scope:
            if self._cut is not None:
                if self._told_to_end:
                    self.scope.cancel()
                if not await self._after_cut(*self._cut):
                    return False
            elif not (self._taken_up or self._runs_already or await self._take_up()):
                return False
            self._taken_up = True
            while not self._told_to_end:
                ended = await stride(self)
                if ended is False:
                    return False
                more = await (self._turn() if ended is True else self._concluded(*ended))
                if not more:
                    if self._cut is None:
                        return False
                    break
                if more is not True and (error := await more) is not None:
                    raise error
        if self._cut is None and not self._told_to_end:  # cancelled, and the cancellation came all the way up
            assert self.running is not None
            self._cut = self.running.step, self.running.cut_short()
        return True

    async def _after_cut(self, step: Step, outcome: Outcome) -> bool:
        """What follows from the step that was cut short in the last stretch."""
        self._cut = None
        assert self.running is not None
        self._conclude(self.running)
        more = self._moved(step, outcome) or await self._after(step, outcome)
        if not isinstance(more, bool) and (error := await more) is not None:
            raise error
        return bool(more)

    async def _turn(self) -> Awaitable[Any] | bool:
        """One step, or one point to obey. False when there is nothing more to do here, or in this stretch; otherwise
        True, or what is to be awaited before the next."""
        step = await self._make_way()
        if not isinstance(step, Step):
            return step
        book = self.book
        try:
            state = book.state(step.state_type)
        except (CodecError, RegistrationError) as error:
            await self._obedience.block(reason_of(error))
            return False
        attempt = self._begin(step)
        try:
            outcome = await attempt.run(self.crew.engine(step), state)
        finally:
            self.attempt = None
            if attempt.used:
                book.progress = attempt.progress
        return await self._concluded(attempt, outcome)

    async def _concluded(self, attempt: Attempt, outcome: Outcome) -> Awaitable[Any] | bool:
        """What follows from the end of a step."""
        step = attempt.step
        if (attempt.stopped or step.timeout is not None) and self.scope.cancel_called:
            self._cut = step, outcome
            return False
        self.running = None
        self._conclude(attempt)
        return self._moved(step, outcome) or await self._after(step, outcome)

    async def _make_way(self) -> Step | bool:
        """The next step, after everything that comes before it; True to look again, False if there is nothing more."""
        if self.attention and not await self._obey():
            return False
        head, book = self.head, self.book
        if head.step >= len(book.steps):
            return await self._end()
        step = self.crew.registry.get(book.steps[head.step])
        if step is None:
            await self._obedience.block(reason_of(UnknownStepError(book.steps[head.step])))
            return False
        if head.attempt and head.due is not None and not await self._back_off(step, head.due):
            return True
        if not await self.seat.take(self):
            return True
        if LEFT and not await self._alone():
            return True
        if not self.crew.holds_lease:
            await self._doubt()
            return True
        return step

    async def _obey(self) -> bool:
        self.attention = False
        if self.book.outbox.lost is not None:
            raise self.book.outbox.lost
        if not await self._follow_orders():
            return False
        if self.crew.draining:
            await self._obedience.release()
            return False
        return True

    async def _follow_orders(self) -> bool:
        orders = orders_in(self.inbox)
        if not orders:
            return True
        self.inbox.obeying = tuple([message.id for message in orders])
        goes_on = await self._obedience.obey(orders)
        self.inbox.have_taken(self.inbox.obeying)
        return goes_on

    async def nudged(self) -> None:
        """Wait until something happens: a message, a drain, a place. Several tasks of a step may wait here at once."""
        if self._wake.is_set():
            self._wake = Bell()
        await self._wake.wait()

    async def linger(self, seconds: float) -> None:
        """Wait for so long, or until something happens."""
        self._wake = Bell()
        await self.crew.clock.wait(self._wake, seconds)

    def nudge(self) -> None:
        self._wake.set()

    # a step

    def _begin(self, step: Step) -> Attempt:
        attempt = Attempt(self, step, self.scope, self.crew.threads)
        self.attempt = self.running = attempt
        if self.crew.bus.active:
            self.book.tell_in_order(EventType.STEP_STARTED, attempt=self.head.attempt + 1)
        if (self.inbox and stops_at_once(self.inbox)) or self.book.outbox.lost is not None:
            attempt.interrupt()
        return attempt

    def _conclude(self, attempt: Attempt) -> None:
        """An attempt is over: what it leaves behind, and what has happened to the execution meanwhile."""
        if attempt.left:
            leave_behind(self.key, attempt.left)
        if self.book.outbox.lost is not None:
            raise self.book.outbox.lost

    @property
    def key(self) -> tuple[str, float]:
        """By which step threads that it has left behind are known."""
        return self.id, self.book.definition.created

    async def _alone(self) -> bool:
        """A thread of an earlier attempt may still run: it ends first. False if something must be obeyed meanwhile."""
        while LEFT.get(self.key):
            if self.attention:
                return False
            with anyio.move_on_after(LOOK_AGAIN):  # the loop that it would tell may be gone
                await self.nudged()
        return True

    async def _doubt(self) -> None:
        """The lease has run out, so that the execution may be somebody else's, or have ended there: no step begins
        until the store has told. Whoever finds it out nudges; a renewal just in time does not."""
        with anyio.move_on_after(ASK_AGAIN):
            await self.nudged()

    def _moved(self, step: Step, outcome: Outcome) -> Awaitable[Any] | bool:
        """Go on to the step that follows at once, which is the rule; False if there is none, or more to be said."""
        if outcome.error is not None or outcome.stopped or (self.inbox and cancelling(self.inbox)):
            return False
        try:
            return self._course.moved(step, outcome.value)
        except (CodecError, StepError, RegistrationError) as error:
            outcome.error = error
            return False

    async def _after(self, step: Step, outcome: Outcome) -> bool:
        """What follows if it is not the next step."""
        if self.inbox and cancelling(self.inbox):
            return await self._obey()
        if outcome.stopped:
            self.attention = True
            return True
        if outcome.error is not None:
            error, outcome.error = outcome.error, None  # the frames in its traceback have the outcome in a variable
            return await self._course.failed(step, error)
        signal = self._signal_here(outcome.value)
        try:
            more = await self._course.stopped(step, outcome.value, signal)
        except (CodecError, StepError, RegistrationError) as error:
            return await self._course.failed(step, error)
        if signal is not None and more:
            self.inbox.consume(signal)
        return more

    async def _back_off(self, step: Step, due: float) -> bool:
        """Wait for the next attempt's time, in nobody's place; False if something has to be obeyed first. A clock that
        was set back meanwhile does not make it longer than the policy says."""
        clock = self.crew.clock
        end = clock.monotonic() + (step.retry or DELAYS).delay(self.head.attempt)
        while (left := min(due - clock.now(), end - clock.monotonic())) > 0:
            if self.attention:
                return False
            self.seat.leave()
            await self.linger(left)
        return True

    async def _end(self) -> bool:
        try:
            return await self._course.complete_after_wait()
        except (CodecError, RegistrationError) as error:
            await self._obedience.block(str(error))
            return False

    # waiting

    async def _wake_up(self) -> bool:
        """A parked execution was claimed: move if its signal is here or its time has come, else park it again."""
        head = self.head
        signal = self.inbox.signal(head.signal)
        if signal is None and (head.due is None or head.due > self._now()):
            return await self._rest()
        await self._course.wake(signal)
        if signal is not None:
            self.inbox.consume(signal)
        return True

    def _signal_here(self, value: Any) -> Message | None:
        """The signal that a step would wait for, if it has come already, nothing is to be obeyed before, and no limit
        of its queue says who goes on when."""
        if not isinstance(value, WaitFor) or self.attention or orders_in(self.inbox):
            return None
        limited = self.crew.sweeper.gates.limits(self.book.definition.queue)
        return None if limited else self.inbox.signal(value.signal)

    async def _rest(self) -> bool:
        """Nothing to do before its time or its signal. It is given back; but while signals for later wait for it, they
        would wake it again at once, so then it stays here, a line in an index."""
        await self._course.rest(here=bool(self.inbox) and not self.crew.draining)
        return False

    async def start_child(self, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        if self.stop_here():  # what would only be started to be stopped again
            self.interrupt()
            await anyio.lowlevel.checkpoint()
        return await self.crew.start_child(self, workflow, state, key)

    def _now(self) -> float:
        return self.crew.clock.now()
