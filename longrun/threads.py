"""Step threads: the library's own, daemon, with a limit of their own; and the channel from them to the loop.

Place in the life of an execution: run a step. A thread cannot be killed: when its attempt is stopped its bridge closes,
so that its next context call raises `StepInterrupted`, and what it returns is thrown away.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

from longrun.errors import ConfigError, StepError, StepInterrupted
from longrun.loops import Loop, current_loop

DEFAULT_LIMIT = 64
_current = threading.local()


class Bridge:
    """One job of a step thread: its calls into the loop, and its end."""

    def __init__(self, loop: Loop, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop = loop
        self._function, self._args = function, args
        self._calls: deque[_Call] = deque()
        self._closed = False
        self._lock = threading.Lock()
        self._wake = anyio.Event()
        self.ended = anyio.Event()
        """Set in the loop when the thread is free again, whatever became of its attempt."""
        self._result: Any = None
        self._error: BaseException | None = None

    # in the thread

    def run(self) -> None:
        _current.bridge = self
        try:
            self._result = self._function(*self._args)
        except BaseException as error:  # carried to the attempt, StepInterrupted and SystemExit included
            self._error = error
        finally:
            _current.bridge = None
            self._function, self._args = _nothing, ()
            self._loop.call_soon(self._end)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        call = _Call(function, args)
        with self._lock:
            if self._closed:
                raise StepInterrupted("this attempt is over")
            self._calls.append(call)
        self._loop.call_soon(self._ring)
        return call.wait()

    # in the loop

    def _ring(self) -> None:
        self._wake.set()

    def _end(self) -> None:
        self.ended.set()
        self._wake.set()

    async def serve(self) -> Any:
        """Answer the thread's calls until it ends; its result, or the error it raised."""
        try:
            while not self.ended.is_set():
                await self._wake.wait()
                self._wake = anyio.Event()
                while self._calls:
                    await self._calls[0].answer()
                    self._calls.popleft()
        finally:
            self._close()
        if self._error is not None:
            raise self._error
        return self._result

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.interrupt()


class _Call:
    """A call from a thread that waits for its answer."""

    __slots__ = ("_args", "_done", "_error", "_function", "_result")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    async def answer(self) -> None:
        try:
            self._result = await self._function(*self._args)
        except Exception as error:
            self._error = error
        self._done.set()

    def interrupt(self) -> None:
        if not self._done.is_set():
            self._error = StepInterrupted("this attempt is over")
            self._done.set()

    def wait(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def call_from_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run an async function in the loop of this thread's step, and wait for it."""
    bridge: Bridge | None = getattr(_current, "bridge", None)
    if bridge is None:
        raise StepError("a step's context can only be used in the thread that longrun runs it in")
    return bridge.call(function, args)


class StepThreads:
    """A pool that starts threads as they are needed, up to a limit, and keeps idle ones for the next step."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        if limit < 1:
            raise ConfigError("limit", limit, "give a whole number of at least 1")
        self._places = anyio.Semaphore(limit)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, function: Callable[..., Any], *args: Any, left: Callable[[Bridge], object] | None = None) -> Any:
        """Run a plain function in a step thread. If this is cancelled the thread goes on; `left` is told of it."""
        await self._places.acquire()
        bridge = Bridge(current_loop(), function, args)
        self._worker().start_job(bridge)
        try:
            return await bridge.serve()
        finally:
            if not bridge.ended.is_set() and left is not None:
                left(bridge)

    def _worker(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self, len(self._workers) + 1, current_loop())
            self._workers.add(worker)
            return worker

    def give_back(self, worker: _Worker, loop: Loop) -> bool:
        """A worker is free (called in its thread); False if it should end."""
        loop.call_soon(self._places.release)
        with self._lock:
            if self._closed:
                return False
            self._idle.append(worker)
            return True

    def close(self) -> None:
        """End the idle threads. Those that still run a step end when it does; they are daemons."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()


class _Worker:
    def __init__(self, pool: StepThreads, number: int, loop: Loop) -> None:
        self._pool = pool
        self._loop = loop
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
            del job
            if not self._pool.give_back(self, self._loop):
                return


def _nothing() -> None:
    return None
