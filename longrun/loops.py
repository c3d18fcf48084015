"""Threads and event loops meet here: a handle on the running loop, the same for asyncio and trio.

Place in the life of an execution: checkpoint. The writer thread answers through it, one hop for a whole batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

import anyio
import anyio.lowlevel


class Waiter(Protocol):
    """Somebody who waits in a loop for one answer: called with it, and awaited, in that loop."""

    def __call__(self, answer: Any) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


class Loop(Protocol):
    """The event loop that was running when it was made."""

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Call `function` in the loop's thread, from any thread; False if the loop is gone."""

    def waiter(self) -> Waiter: ...

    def scope(self) -> anyio.CancelScope: ...


class _Scopes:
    """Makes cancel scopes of the class that the loop has: `anyio.CancelScope` would look for it every time, and set up
    what it gives twice."""

    _kind: type[anyio.CancelScope] | None = None

    def scope(self) -> anyio.CancelScope:
        if self._kind is None:
            self._kind = type(anyio.CancelScope())
        return self._kind()


class _AsyncioWaiter(asyncio.Future[Any]):
    """A future itself: there is one for every write, and nothing that is between them is free."""

    def __call__(self, answer: Any) -> None:
        if not self.done():
            self.set_result(answer)


class _AsyncioLoop(_Scopes):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.key = self._loop = loop

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            return False
        return True

    def waiter(self) -> Waiter:
        return _AsyncioWaiter(loop=self._loop)


class _TrioWaiter:
    __slots__ = ("_answer", "_event")

    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self._answer: Any = None

    def __call__(self, answer: Any) -> None:
        if not self._event.is_set():
            self._answer = answer
            self._event.set()

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from self._event.wait().__await__()
        return self._answer


class _TrioLoop(_Scopes):
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


class Awaited(Protocol):
    """Something that happens once: an `anyio.Event`, or a `Bell`."""

    def is_set(self) -> bool: ...

    async def wait(self) -> None: ...


class Bell:
    """An event for which, mostly, nobody waits: it costs next to nothing until somebody does, and little then. It is
    rung and waited for in one loop."""

    __slots__ = ("_rung", "_waiters")

    def __init__(self) -> None:
        self._rung = False
        self._waiters: list[Waiter] | None = None

    def set(self) -> None:
        self._rung = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter(None)

    def is_set(self) -> bool:
        return self._rung

    async def wait(self) -> None:
        if self._rung:
            await anyio.lowlevel.checkpoint()
            return
        waiter = current_loop().waiter()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None:  # cancelled
                self._waiters.remove(waiter)


RUNG = Bell()
"""For those whom nobody has waited for yet."""
RUNG.set()


def current_task() -> asyncio.Task[Any] | None:
    """The task that runs this code; None if that is not asyncio's."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # trio runs here
        return None


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
