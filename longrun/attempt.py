"""Run a step: one attempt, from its state to its outcome. The seam to which other engines can be added.

Place in the life of an execution: run a step. An `Attempt` is the `Port` of the step's context. How the function itself
is called (in the loop, in a thread, in a child process) is an `Engine`'s business.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.lowlevel
from attrs import define

from longrun.branches import as_failure, take_back
from longrun.context import StepContext, SyncStepContext, root_context
from longrun.errors import (
    ContextClosedError,
    StepError,
    StepInterrupted,
    StepMisuseError,
    StepTimeoutError,
    holds,
    raised_itself,
)
from longrun.ledger import Ledger
from longrun.loops import Loop
from longrun.port import StepInfo
from longrun.records import Progress
from longrun.registry import Step
from longrun.threads import Leftovers, StepThreads, call_from_thread, check_here

if TYPE_CHECKING:
    from longrun.handle import ExecutionHandle

T = TypeVar("T")
PROGRESS_EVERY = 0.1
"""Seconds between two events that show progress, at least."""


class Engine(Protocol):
    """Calls a step's function for an attempt. Registered with the executor by the word in `run_in`."""

    def run(self, attempt: Attempt, state: Any) -> Awaitable[Any]:
        """What the function returns, awaited. Cancellation must end or abandon the call."""

    async def aclose(self) -> None: ...


class Host(Protocol):
    """What an attempt needs from the runner of its execution."""

    attention: bool
    checkpoint_interval: float
    loop: Loop
    thread: int
    """The event loop it runs in, and that loop's thread."""

    @property
    def goes_on(self) -> bool:
        """Whether nobody is ending the task that it runs in."""

    @property
    def in_its_task(self) -> bool:
        """Whether its task runs, and is not being closed by a loop or the garbage collector."""

    @property
    def ledger(self) -> Ledger:
        """The progress inside the step, of this visit."""

    def step_info(self, step: Step) -> StepInfo:
        """Where the step is."""

    @property
    def unsaved(self) -> bool:
        """Whether there is anything that a save would make durable."""

    def save_progress(self, done: Callable[[Any], object]) -> None:
        """Hand over what the ledger has captured, without waiting."""

    async def commit_progress(self) -> None:
        """Save what the ledger has captured; durable on return."""

    def stop_here(self) -> bool:
        """Whether something has to take effect at this point of the step."""

    def show_progress(self, progress: Progress) -> None: ...

    def shutdown_left(self) -> float | None: ...

    async def start_child(self, workflow: Any, state: Any, key: str) -> ExecutionHandle: ...


@define
class Outcome:
    """How an attempt ended: a value, an error, or stopped from outside."""

    value: Any = None
    error: BaseException | None = None
    stopped: bool = False


class Attempt:
    """One call of a step's function."""

    # Most steps need few of these: what stands here costs nothing until it is set.
    _over: str | None = None
    _deadline: float | None = None
    _info: StepInfo | None = None
    _ledger: Ledger | None = None
    _saving = False
    _flight: anyio.Event | None = None
    _asked = _answered = 0
    _progress: Progress | None = None
    _source: Callable[[], Progress] | None = None
    _announced = False
    _shown: Progress | None = None
    _show_at = 0.0
    _stored: Progress | None = None

    def __init__(self, host: Host, step: Step, scope: anyio.CancelScope, threads: StepThreads) -> None:
        """`scope` is entered already, and serves one attempt after the other until one of them has cancelled it."""
        self.step = step
        self.stopped = False
        """Whether somebody has stopped it. Its scope may be cancelled then, or if the step has a time-out."""
        self.used = False
        """Whether its context was asked for, or where it is: otherwise it has noted nothing, and nobody has heard of
        it."""
        self.left: Leftovers | None = None
        """The step threads that it has left behind, if it was stopped while they ran on; or none, which is false."""
        self._host = host
        self._threads = threads
        self._scope = scope
        self.save_at = time.monotonic() + host.checkpoint_interval

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._host.ledger
            self.used = True
            self.save_at = time.monotonic() + self._host.checkpoint_interval
        return self._ledger

    @property
    def info(self) -> StepInfo:
        if self._info is None:
            self._info = self._host.step_info(self.step)
            self.used = True
        return self._info

    async def run(self, engine: Engine, state: Any) -> Outcome:
        """Call the function; everything it can do ends as an outcome, but for its cancellation: see `cut_short`."""
        if self.step.engine == "loop":
            self._start_clock()
        try:
            value = await engine.run(self, state)
            if self._deadline is not None and self._is_late():
                return self.cut_short()
            return Outcome(value)
        except BaseException as error:
            if not self.has_raised(error):
                raise
            return self.failed(error)
        finally:
            self.end()

    def _start_clock(self) -> None:
        """The function is called now: the wait for a step thread or a child process before it is not its time."""
        if self.step.timeout is not None and self._deadline is None:
            self._deadline = time.monotonic() + self.step.timeout
            self._scope.deadline = anyio.current_time() + self.step.timeout

    def has_raised(self, error: BaseException) -> bool:
        """Whether what came out of the function is a failure of this attempt, or its end. If not it goes on upwards."""
        if isinstance(error, StepInterrupted) or as_failure(error) is not None or self._closed_itself(error):
            return True
        return self._cancelled_itself(error) or self._cut_with_errors(error)

    def failed(self, error: BaseException) -> Outcome:
        """What became of an attempt that `has_raised` this. Not to be put into a variable where the error was caught:
        that frame is in its traceback, and they would keep each other, and the state, in memory."""
        if self._scope.cancel_called:
            return self.cut_short()
        if isinstance(error, StepInterrupted):
            return Outcome(error=_interrupted(error))
        failure = None if self._closed_itself(error) else as_failure(error)
        return Outcome(error=failure or raised_itself(error))

    def _cancelled_itself(self, error: BaseException) -> bool:
        """Whether the step, or something that it called, has cancelled the task that it runs in, and nobody else is
        ending that: a failure of this attempt then."""
        return not self._scope.cancel_called and self._host.goes_on and take_back(error)

    def _closed_itself(self, error: BaseException) -> bool:
        """Whether the step, or one of its tasks, raised GeneratorExit: no loop and no collector is closing it."""
        if not holds(error, GeneratorExit) or holds(error, KeyboardInterrupt):
            return False
        return self._host.in_its_task and self._host.goes_on

    def _cut_with_errors(self, error: BaseException) -> bool:
        """Whether it was cut short, and what its tasks raised meanwhile came in one group with the cancellation."""
        if not isinstance(error, BaseExceptionGroup) or not self._scope.cancel_called or not self._host.goes_on:
            return False
        return error.split((Exception, anyio.get_cancelled_exc_class()))[1] is None

    def end(self) -> None:
        """The function has returned or raised: from now on its context refuses."""
        self._over = "it was stopped" if self.stopped else "it has ended"
        if self._deadline is not None:
            self._scope.deadline = math.inf
        if self._ledger is not None:
            self._progress, self._source = self.progress, None
            self._ledger.forget_groups()

    def _is_late(self) -> bool:
        """A function that never came to an await can return after its time: that is too late all the same."""
        return not self.stopped and self._deadline is not None and time.monotonic() >= self._deadline

    def cut_short(self) -> Outcome:
        """What became of an attempt whose scope was cancelled."""
        if self.stopped:
            return Outcome(stopped=True)
        return Outcome(error=StepTimeoutError(self.step.name, self.step.timeout or 0.0))

    def interrupt(self) -> None:
        """Stop the function at once: at its next await, a thread at its next context call."""
        if self._host.shutdown_left() is not None:
            self._hand_over()  # a step that will not let itself be stopped must not take its last capture with it
        self._stop()

    def _stop(self) -> None:
        if self._over is None:
            self.stopped = True
            self._scope.cancel()

    def context(self) -> StepContext:
        return root_context(self.info, self, self.ledger)

    @property
    def interval(self) -> float:
        """Seconds to which saves inside the step are coalesced."""
        return self._host.checkpoint_interval

    # the port of the step's context: points and saves

    @property
    def attention(self) -> bool:
        return self._host.attention or self._over is not None

    def check(self, *, blocking: bool = False) -> None:
        if blocking:
            check_here()
        if self._over is not None:
            raise ContextClosedError(self.step.name, self._over)

    def hand_over(self) -> None:
        self.save_at = time.monotonic() + self._host.checkpoint_interval
        if threading.get_ident() == self._host.thread:
            self._hand_over()
        else:
            self._host.loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if not self._saving and self._over is None and self._host.unsaved:
            self._save()

    def _save(self) -> None:
        self._saving = True
        self._stored = self.progress
        self._host.save_progress(self._saved)

    def _saved(self, error: object) -> None:
        self._saving = False

    def tick(self, beats: bool) -> None:
        """Hand over what was captured long enough ago, although the step itself has not come to a point since; with a
        beat, progress too."""
        progress = self.progress
        if progress is not None and progress != self._shown:
            self._show(progress)
        if time.monotonic() >= self.save_at and self._host.unsaved:
            self.hand_over()
        elif beats and progress != self._stored and not self._saving and self._over is None:
            self._save()

    async def durable(self) -> None:
        """Calls that come while a save is on its way are served together by the next one."""
        self.check()
        self.save_at = time.monotonic() + self._host.checkpoint_interval
        self._asked += 1
        mine = self._asked
        while self._answered < mine:
            if self._flight is not None:
                await self._flight.wait()
            else:
                await self._fly()

    async def _fly(self) -> None:
        self._flight, covered = anyio.Event(), self._asked
        self._stored = self.progress
        try:
            await self._host.commit_progress()
            self._answered = covered
        finally:
            self._flight.set()
            self._flight = None

    async def obey(self) -> None:
        if self.must_stop():
            self._stop()
            await anyio.lowlevel.checkpoint()

    def must_stop(self) -> bool:
        self.check()
        return self._host.stop_here()

    # progress and time

    @property
    def progress(self) -> Progress | None:
        """How far the step is, as of now."""
        return self._progress if self._source is None else self._source()

    def announce(self, progress: Progress) -> None:
        self.check()
        self._announced, self._source = True, None
        self._tell(progress)

    def report(self, progress: Progress) -> None:
        if not self._announced:
            self._tell(progress)

    def follow(self, source: Callable[[], Progress]) -> None:
        if not self._announced:
            self._source = source

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        if time.monotonic() >= self._show_at:
            if threading.get_ident() == self._host.thread:
                self._show(progress)
            else:
                self._host.loop.call_soon(self._show, progress)

    def _show(self, progress: Progress) -> None:
        if self._over is not None:
            return
        self._show_at = time.monotonic() + PROGRESS_EVERY
        self._shown = progress
        self._host.show_progress(progress)

    def time_left(self) -> float | None:
        shutdown = self._host.shutdown_left()
        own = None if self._deadline is None else self._deadline - time.monotonic()
        left = [seconds for seconds in (shutdown, own) if seconds is not None]
        return max(0.0, min(left)) if left else None

    @property
    def shutting_down(self) -> bool:
        return self._host.shutdown_left() is not None

    # threads and children

    async def run_sync(self, function: Callable[..., T], *args: Any) -> T:
        if self.left is None:
            self.left = Leftovers()
        result: T = await self._threads.run(function, *args, left=self.left, begun=self._start_clock)
        return result

    async def start_child(self, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        return await self._host.start_child(workflow, state, key)

    def call_from_thread(self, function: Callable[..., Any], *args: Any, lasting: bool = False) -> Any:
        return call_from_thread(function, *args, lasting=lasting)


class LoopEngine:
    """Async functions, in the event loop."""

    def run(self, attempt: Attempt, state: Any) -> Awaitable[Any]:
        step = attempt.step
        call: Awaitable[Any] = step.function(attempt.context(), state) if step.takes_context else step.function(state)
        return call

    async def aclose(self) -> None:
        pass


class ThreadEngine:
    """Plain functions, in step threads."""

    async def run(self, attempt: Attempt, state: Any) -> Any:
        step = attempt.step
        args = (SyncStepContext.of(attempt.context()), state) if step.takes_context else (state,)
        result = await attempt.run_sync(step.function, *args)
        if inspect.iscoroutine(result):
            result.close()
            raise StepMisuseError(f"step {step.name!r} is a plain function that returns a coroutine: make it async")
        return result

    async def aclose(self) -> None:
        pass


def _interrupted(error: StepInterrupted) -> StepError:
    failure = StepError("the step raised StepInterrupted although nothing had stopped it")
    failure.__cause__ = error
    return failure
