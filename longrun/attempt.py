"""Run a step: one attempt, from its state to its outcome. The seam to which other engines can be added.

Place in the life of an execution: run a step. An `Attempt` is the `Port` of the step's context. How the function itself
is called (in the loop, in a thread, in a child process) is an `Engine`'s business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.lowlevel
from attrs import frozen

from longrun.context import StepContext, SyncStepContext, root_context
from longrun.errors import ContextClosedError, StepError, StepInterrupted, StepTimeoutError
from longrun.ledger import Ledger
from longrun.loops import current_loop
from longrun.port import StepInfo
from longrun.records import Progress
from longrun.registry import Step
from longrun.threads import Bridge, StepThreads, call_from_thread

if TYPE_CHECKING:
    from longrun.handle import ExecutionHandle

T = TypeVar("T")
PROGRESS_EVERY = 0.1


class Engine(Protocol):
    """Calls a step's function for an attempt. Registered with the executor by the word in `run_in`."""

    async def run(self, attempt: Attempt, state: Any) -> Any:
        """What the function returned. Cancellation must end or abandon the call."""

    async def aclose(self) -> None: ...


class Host(Protocol):
    """What an attempt needs from the runner of its execution."""

    attention: bool
    checkpoint_interval: float

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


@frozen
class Outcome:
    """How an attempt ended: a value, an error, or stopped from outside."""

    value: Any = None
    error: BaseException | None = None
    stopped: bool = False


class Attempt:
    """One call of a step's function."""

    def __init__(self, host: Host, step: Step, info: StepInfo, ledger: Ledger, threads: StepThreads) -> None:
        self.step, self.info, self.ledger = step, info, ledger
        self._host = host
        self._threads = threads
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._over: str | None = None
        self._deadline: float | None = None
        self._saving = False
        self._shown_at = 0.0
        self._loop = current_loop()
        self._thread = threading.get_ident()
        self.progress: Progress | None = None
        self._stored_progress: Progress | None = None
        self.left: Bridge | None = None
        """The step thread that this attempt left behind, if it was stopped while the thread ran on."""
        self.save_at = time.monotonic() + host.checkpoint_interval

    async def run(self, engine: Engine, state: Any) -> Outcome:
        """Call the function; everything it can do ends as an outcome."""
        timeout = self.step.timeout
        try:
            with anyio.CancelScope() as self._scope:
                if timeout is not None:
                    self._deadline = time.monotonic() + timeout
                    self._scope.deadline = anyio.current_time() + timeout
                if self._stopped:
                    self._scope.cancel()
                return Outcome(value=await engine.run(self, state))
            return self._cut_short()
        except StepInterrupted as error:
            return self._cut_short() if self._stopped else Outcome(error=_as_failure(error))
        except (Exception, SystemExit) as error:
            if self._scope.cancel_called:
                return self._cut_short()
            return Outcome(error=_as_failure(error) if isinstance(error, SystemExit) else error)
        finally:
            self._over = "it was stopped" if self._stopped else "it has ended"
            self.ledger.forget_groups()

    def _cut_short(self) -> Outcome:
        if self._stopped:
            return Outcome(stopped=True)
        return Outcome(error=StepTimeoutError(self.step.name, self.step.timeout or 0.0))

    def interrupt(self) -> None:
        """Stop the function at once: at its next await, a thread at its next context call."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    def context(self) -> StepContext:
        return root_context(self.info, self, self.ledger)

    @property
    def interval(self) -> float:
        """Seconds to which saves inside the step are coalesced."""
        return self._host.checkpoint_interval

    # the port of the step's context

    @property
    def attention(self) -> bool:
        return self._host.attention or self._over is not None

    def hand_over(self) -> None:
        self.save_at = time.monotonic() + self._host.checkpoint_interval
        if threading.get_ident() == self._thread:
            self._hand_over()
        else:
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if not self._saving and self._over is None and self._host.unsaved:
            self._saving = True
            self._host.save_progress(self._saved)

    def _saved(self, error: object) -> None:
        self._saving = False

    def tick(self, beats: bool) -> None:
        """Hand over what was captured long enough ago, although the step itself has not come to a point since; with a
        beat, progress too."""
        if time.monotonic() >= self.save_at and self._host.unsaved:
            self.hand_over()
        elif beats and self.progress is not self._stored_progress and not self._saving and self._over is None:
            self._saving = True
            self._host.save_progress(self._saved)
        self._stored_progress = self.progress

    async def durable(self) -> None:
        self._check_open()
        self.save_at = time.monotonic() + self._host.checkpoint_interval
        await self._host.commit_progress()

    async def obey(self) -> None:
        self._check_open()
        if self._host.stop_here():
            self.interrupt()
            await anyio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._over is not None:
            raise ContextClosedError(self.step.name, self._over)

    def report(self, progress: Progress) -> None:
        self.progress = progress
        now = time.monotonic()
        if now >= self._shown_at:
            self._shown_at = now + PROGRESS_EVERY
            if threading.get_ident() == self._thread:
                self._host.show_progress(progress)
            else:
                self._loop.call_soon(self._host.show_progress, progress)

    def time_left(self) -> float | None:
        shutdown = self._host.shutdown_left()
        own = None if self._deadline is None else self._deadline - time.monotonic()
        left = [seconds for seconds in (shutdown, own) if seconds is not None]
        return max(0.0, min(left)) if left else None

    @property
    def shutting_down(self) -> bool:
        return self._host.shutdown_left() is not None

    async def run_sync(self, function: Callable[..., T], *args: Any) -> T:
        result: T = await self._threads.run(function, *args, left=self._leave)
        return result

    def _leave(self, bridge: Bridge) -> None:
        self.left = bridge

    async def start_child(self, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        return await self._host.start_child(workflow, state, key)

    def call_from_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return call_from_thread(function, *args)


class LoopEngine:
    """Async functions, in the event loop."""

    async def run(self, attempt: Attempt, state: Any) -> Any:
        function = attempt.step.function
        if attempt.step.takes_context:
            return await function(attempt.context(), state)
        return await function(state)

    async def aclose(self) -> None:
        pass


class ThreadEngine:
    """Plain functions, in step threads."""

    async def run(self, attempt: Attempt, state: Any) -> Any:
        function = attempt.step.function
        if attempt.step.takes_context:
            return await attempt.run_sync(function, SyncStepContext.of(attempt.context()), state)
        return await attempt.run_sync(function, state)

    async def aclose(self) -> None:
        pass


def _as_failure(error: BaseException) -> StepError:
    failure = StepError(f"the step raised {type(error).__name__}, which ends an attempt, not the program")
    failure.__cause__ = error
    return failure
