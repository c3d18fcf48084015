"""Threads and event loops meet here: a handle on the running loop, the same for asyncio and trio.

Place in the life of an execution: checkpoint. The writer thread answers through it, one hop for a whole batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Waiter(Protocol):
    """Somebody who waits in a loop for one answer. Both methods are called in that loop."""

    def set(self, answer: Any) -> None: ...

    async def wait(self) -> Any: ...


class Loop(Protocol):
    """The event loop that was running when it was made."""

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Call `function` in the loop's thread, from any thread; False if the loop is gone."""

    def waiter(self) -> Waiter: ...


class _AsyncioWaiter(Generic[T]):
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[T] = loop.create_future()

    def set(self, answer: T) -> None:
        if not self._future.done():
            self._future.set_result(answer)

    async def wait(self) -> T:
        return await self._future


class _AsyncioLoop:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.key = self._loop = loop

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            return False
        return True

    def waiter(self) -> Waiter:
        return _AsyncioWaiter(self._loop)


class _TrioWaiter:
    __slots__ = ("_answer", "_event")

    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self._answer: Any = None

    def set(self, answer: Any) -> None:
        if not self._event.is_set():
            self._answer = answer
            self._event.set()

    async def wait(self) -> Any:
        await self._event.wait()
        return self._answer


class _TrioLoop:
    def __init__(self) -> None:
        import trio

        self.key = self._token = trio.lowlevel.current_trio_token()
        self._finished = trio.RunFinishedError

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        try:
            self._token.run_sync_soon(function, *args)
        except self._finished:
            return False
        return True

    def waiter(self) -> Waiter:
        return _TrioWaiter()


_here = threading.local()


def current_loop() -> Loop:
    """A handle on the loop that runs this code; the same one every time, so that answers can be gathered by it."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:  # asyncio does not run here
        return _current_trio()
    cached: _AsyncioLoop | None = getattr(_here, "asyncio", None)
    if cached is None or cached.key is not running:
        cached = _here.asyncio = _AsyncioLoop(running)
    return cached


def _current_trio() -> Loop:
    handle = _TrioLoop()
    cached: _TrioLoop | None = getattr(_here, "trio", None)
    if cached is None or cached.key is not handle.key:
        cached = _here.trio = handle
    return cached
