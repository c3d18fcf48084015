"""Step threads: the library's own, daemon, with a limit of their own; and the channel from them to the loop.

Place in the life of an execution: run a step. A thread cannot be killed: when its attempt is stopped its bridge
closes, so that its next context call raises `StepInterrupted`, and what it returns is thrown away. What an attempt
leaves behind is noted, so that the next one can wait for its end.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import anyio

from longrun.errors import ConfigError, StepInterrupted, StepMisuseError, holds, raised_itself
from longrun.loops import current_loop

try:
    from sniffio import current_async_library_cvar as _library
except ImportError:  # pragma: no cover -- trio brings it; without it nothing is set that has to be unset
    _library = None  # type: ignore[assignment]

DEFAULT_LIMIT = 64
ELSEWHERE = "a step's context can only be used in the thread that longrun runs it in"
_current = threading.local()


class Bridge:
    """One job of a step thread: its calls into the loop, and its end."""

    def __init__(self, pool: StepThreads, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pool = pool
        self._loop = current_loop()
        self._job: Callable[[], Any] | None = _in_this_context(function, args)
        self._calls: deque[_Call] = deque()
        self.closed = False
        self.ended = False
        """Whether the thread is free again, whatever became of its attempt."""
        self.finished = False
        """The same, told by the thread itself: the loop may be gone."""
        self._holds_place = True
        self._lock = threading.Lock()
        self._wake = anyio.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    # in the thread

    def run(self) -> None:
        _current.bridge = self
        job, self._job = self._job, None
        try:
            self._result = job() if job is not None else None
        except BaseException as error:  # carried to the attempt, StepInterrupted and SystemExit included
            own = holds(error, KeyboardInterrupt, GeneratorExit)  # from elsewhere none of these comes to a thread
            self._error = raised_itself(error) if own else error
        finally:
            _current.bridge = None
            if self.closed:  # nobody asks any more
                self._result = self._error = None
            self.finished = True

    def end(self) -> None:
        self._loop.call_soon(self._end)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], lasting: bool) -> Any:
        call = _Call(function, args, lasting)
        with self._lock:
            if self.closed:
                raise StepInterrupted("this attempt is over")
            self._calls.append(call)
        if not self._loop.call_soon(self._ring):
            raise StepInterrupted("the event loop is gone")
        return call.wait()

    # in the loop

    def _ring(self) -> None:
        self._wake.set()

    def _end(self) -> None:
        self.ended = True
        self._give_place()
        self._wake.set()

    def _give_place(self) -> None:
        if self._holds_place:
            self._holds_place = False
            self._pool.places.release()

    async def serve(self) -> Any:
        """Answer the thread's calls until it ends; its result, or the error it raised."""
        try:
            while not self.ended:
                await self._wake.wait()
                self._wake = anyio.Event()
                while self._calls:
                    await self._answer(self._calls[0])
                    self._calls.popleft()
        finally:
            self._close()
        try:
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._error = self._result = None

    async def _answer(self, call: _Call) -> None:
        if call.lasting:
            self._give_place()
        await call.run()
        if call.lasting:
            await self._pool.places.acquire()
            self._holds_place = True
        call.done.set()

    def _close(self) -> None:
        with self._lock:
            self.closed = True
            calls = list(self._calls)
        for call in calls:
            call.interrupt()


class _Call:
    """A call from a thread that waits for its answer."""

    __slots__ = ("_args", "_error", "_function", "_result", "done", "lasting")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], lasting: bool) -> None:
        self._function, self._args = function, args
        self.lasting = lasting
        self.done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    async def run(self) -> None:
        try:
            self._result = await self._function(*self._args)
        except Exception as error:
            self._error = error

    def interrupt(self) -> None:
        if not self.done.is_set():
            self._error = StepInterrupted("this attempt is over")
            self.done.set()

    def wait(self) -> Any:
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def check_here() -> Bridge:
    """The job of the step thread that runs this; raises in any other thread, and when its attempt is over."""
    bridge: Bridge | None = getattr(_current, "bridge", None)
    if bridge is None:
        raise StepMisuseError(ELSEWHERE)
    if bridge.closed:
        raise StepInterrupted("this attempt is over")
    return bridge


def call_from_thread(function: Callable[..., Any], *args: Any, lasting: bool = False) -> Any:
    """Run an async function in the loop of this thread's step, and wait for it. With `lasting`, the thread does not
    count against the limit meanwhile: what it waits for may need a thread too."""
    return check_here().call(function, args, lasting)


class Leftovers:
    """The threads that an attempt has left behind: true while one of them runs."""

    def __init__(self) -> None:
        self._bridges: list[Bridge] = []

    def __bool__(self) -> bool:
        return not all(bridge.finished for bridge in self._bridges)

    def add(self, bridge: Bridge) -> None:
        self._bridges.append(bridge)


LEFT: dict[tuple[str, float], Leftovers] = {}
"""What attempts have left behind in this process, whichever executor ran them: by the execution's id and when it was
created, since another store may have the same id."""


def leave_behind(execution: tuple[str, float], left: Leftovers) -> None:
    """The next attempt in this process waits for these threads to end."""
    for other, ended in list(LEFT.items()):
        if not ended:
            LEFT.pop(other, None)
    LEFT[execution] = left


class StepThreads:
    """A pool that starts threads as they are needed, up to a limit, and keeps idle ones for the next step."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        if limit < 1:
            raise ConfigError("limit", limit, "give a whole number of at least 1")
        self.places = anyio.Semaphore(limit)
        self._idle: list[_Worker] = []
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._closed = False

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        left: Leftovers | None = None,
        begun: Callable[[], object] | None = None,
    ) -> Any:
        """Run a plain function in a step thread. If this is cancelled the thread goes on, and is noted as left. `begun`
        is called when there is a thread for it."""
        await self.places.acquire()
        try:
            bridge = Bridge(self, function, args)
            self._worker().start_job(bridge)
        except BaseException:
            self.places.release()
            raise
        if begun is not None:
            begun()
        try:
            return await bridge.serve()
        finally:
            if not bridge.ended and left is not None:
                left.add(bridge)

    def _worker(self) -> _Worker:
        with self._lock:
            return self._idle.pop() if self._idle else _Worker(self, next(self._numbers))

    def give_back(self, worker: _Worker) -> bool:
        """A worker is free (called in its thread); False if it should end."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
            return not self._closed

    def close(self) -> None:
        """End the idle threads. Those that still run a step end when it does; they are daemons."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()


class _Worker:
    def __init__(self, pool: StepThreads, number: int) -> None:
        self._pool = pool
        self._ready = threading.Event()
        self._job: Bridge | None = None
        self._thread = threading.Thread(target=self._run, name=f"longrun-step-{number}", daemon=True)
        self._thread.start()

    def start_job(self, job: Bridge) -> None:
        self._job = job
        self._ready.set()

    def end(self) -> None:
        self._ready.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._ready.wait()
            self._ready.clear()
            job, self._job = self._job, None
            if job is None:
                return
            job.run()
            goes_on = self._pool.give_back(self)
            job.end()  # after it is free, so that the next job finds this thread instead of starting another
            del job
            if not goes_on:
                return


def _in_this_context(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    """The call with the context variables of here, but for the one that names the loop: none runs in the thread."""
    context = contextvars.copy_context()
    if _library is not None:  # pragma: no branch -- the tests need trio, which brings it
        context.run(_library.set, None)
    return lambda: context.run(function, *args)
