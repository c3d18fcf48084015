"""Threads call an application's coroutines: in the loop where its pools live, or in one of our own if there is none.

Place in the life of an execution: checkpoint. The writer, the readers and the watcher are threads; an adapter is async.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from longrun.errors import StoreUnavailableError

T = TypeVar("T")

GONE = "the event loop in which it was opened has ended"
LOOK_AGAIN = 1.0
"""Seconds after which a thread that waits for an answer looks whether the loop still runs."""


class TaskLoop(Protocol):
    """Where an adapter's coroutines run."""

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call it there, and wait; from any other thread. `StoreUnavailableError` if the loop is gone."""

    @property
    def gone(self) -> bool: ...

    def close(self) -> None: ...


class AsyncioTaskLoop:
    """An asyncio loop that somebody runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = contextvars.copy_context()

    @property
    def gone(self) -> bool:
        return not self._loop.is_running()

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        if self.gone:
            raise StoreUnavailableError("task", GONE)
        call = _call(function, args)
        try:
            # Not in the calling thread's context: that belongs to whatever loop it serves.
            future = self._context.copy().run(asyncio.run_coroutine_threadsafe, call, self._loop)
        except RuntimeError as error:
            call.close()
            raise StoreUnavailableError("task", GONE) from error
        try:
            return self._answer(future)
        except concurrent.futures.CancelledError as error:
            raise StoreUnavailableError("task", GONE) from error

    def _answer(self, future: concurrent.futures.Future[T]) -> T:
        while not future.done():
            try:
                return future.result(LOOK_AGAIN)
            except TimeoutError:
                if not future.done() and self.gone:
                    future.cancel()
                    raise StoreUnavailableError("task", GONE) from None
        return future.result()

    def close(self) -> None:
        pass


class TrioTaskLoop:
    """A trio run that somebody runs."""

    def __init__(self) -> None:
        import trio

        self._token = trio.lowlevel.current_trio_token()
        self._context = contextvars.copy_context()
        self._run = trio.from_thread.run
        self._ends = (trio.RunFinishedError, trio.Cancelled)

    @property
    def gone(self) -> bool:
        try:
            self._token.run_sync_soon(_nothing)
        except self._ends:
            return True
        return False

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return self._context.copy().run(partial(self._run, _call, function, args, trio_token=self._token))
        except self._ends as error:
            raise StoreUnavailableError("task", GONE) from error

    def close(self) -> None:
        pass


class OwnTaskLoop(AsyncioTaskLoop):
    """An asyncio loop in a thread of its own, for a backend that was opened outside of any loop."""

    def __init__(self) -> None:
        self._running = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve()], name="longrun-task-loop", daemon=True)
        self._thread.start()
        self._running.wait()

    async def _serve(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self._stop = asyncio.Event()
        self._running.set()
        await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def current_task_loop() -> TaskLoop:
    """A handle on the loop that runs this code."""
    try:
        return AsyncioTaskLoop(asyncio.get_running_loop())
    except RuntimeError:  # asyncio does not run here
        return TrioTaskLoop()


async def _call(function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    return await function(*args)


def _nothing() -> None:
    pass
