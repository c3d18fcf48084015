"""Threads and event loops meet here: a handle on the running loop, the same for asyncio and trio.

Place in the life of an execution: checkpoint. The writer thread answers through it, one hop for a whole batch.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextvars import Context
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.lowlevel


class Waiter(Protocol):
    """Somebody who waits in a loop for one answer: called with it, and awaited, in that loop."""

    def __call__(self, answer: Any) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


Told = tuple[Callable[[Any], object], Any]
"""Whom to tell an answer, and the answer."""


class Loop(Protocol):
    """The event loop that was running when it was made."""

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Call `function` in the loop's thread, from any thread; False if the loop is gone. Whoever gets his answer in
        that call goes on right behind it."""

    def answer(self, answers: list[Told]) -> bool:
        """In the same way tell everybody his answer, one after the other; the list is not to be used again. Who goes
        on lets go what he waited with before he makes anew what he waits with next, and that is no work for the garbage
        collector; if a thousand let go together, and then make it anew, it is."""

    def after_turn(self, function: Callable[[], object]) -> None:
        """Call `function` when what is about to run in the loop has run; at once where the loop does not say when that
        is. To be called in the loop's thread."""

    def waiter(self) -> Waiter: ...

    def scope(self, deadline: float = math.inf) -> anyio.CancelScope: ...


class _Scopes:
    """Makes cancel scopes of the class that the loop has: `anyio.CancelScope` would look for it every time, and set up
    what it gives twice."""

    _kind: type[anyio.CancelScope] | None = None

    def scope(self, deadline: float = math.inf) -> anyio.CancelScope:
        if self._kind is None:
            self._kind = type(anyio.CancelScope())
        return self._kind(deadline=deadline)


WAITING: Any = object()


class _Cancelled:
    """Stands where an answer would, if none is waited for any more."""

    __slots__ = ("error",)

    def __init__(self, message: object) -> None:
        self.error = asyncio.CancelledError() if message is None else asyncio.CancelledError(message)


class _AsyncioWaiter:
    """What asyncio's tasks take for a future (PEP 3156 says how they speak to one). There is one for every write: where
    a future has its task called by the loop, one turn of it later, this lets it go on in the turn that brought the
    answer."""

    __slots__ = ("_answer", "_asyncio_future_blocking", "_home", "_loop", "context", "wake")

    _asyncio_future_blocking: bool

    def __init__(self, home: _AsyncioLoop) -> None:
        self._home, self._loop = home, home.key
        self._answer: Any = WAITING
        self.wake: Callable[[_AsyncioWaiter], object] | None = None
        """Lets the task that waits go on; to be called in `context`, and where no task runs."""

    def __call__(self, answer: Any) -> None:
        if self._answer is not WAITING:
            return
        self._answer = answer
        answered = self._home.answered
        if answered is None:
            self.wake_soon()
        else:
            answered.append(self)

    def wake_soon(self) -> None:
        if self.wake is not None:
            self._loop.call_soon(self.wake, self, context=self.context)

    def __await__(self) -> Generator[Any, Any, Any]:
        answer = self._answer
        if answer is WAITING:
            self._asyncio_future_blocking = True
            yield self
            return self._answer
        return self.result()

    # for the task

    def add_done_callback(self, wake: Callable[[_AsyncioWaiter], object], *, context: Context) -> None:
        self.wake, self.context = wake, context

    def result(self) -> Any:
        answer = self._answer
        if type(answer) is _Cancelled:
            raise answer.error
        return answer

    def done(self) -> bool:
        return self._answer is not WAITING

    def cancel(self, msg: object = None) -> bool:
        if self._answer is not WAITING:
            return False
        self._answer = _Cancelled(msg)
        self.wake_soon()
        self.wake = None  # the answer may take its time: it keeps nobody in memory
        return True


class _AsyncioLoop(_Scopes):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.key = self._loop = loop
        self._left: deque[Told] = deque()
        """What is still to be told, the oldest first."""
        self.answered: list[_AsyncioWaiter] | None = None
        """Who goes on behind the call that is made now."""
        self.waiter = partial(_AsyncioWaiter, self)

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        return self.answer([(lambda _: function(*args), None)])

    def answer(self, answers: list[Told]) -> bool:
        self._left.extend(answers)
        answers.clear()
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            self._left.clear()
            return False
        return True

    def after_turn(self, function: Callable[[], object]) -> None:
        self._loop.call_soon(function)

    def _tell(self) -> None:
        """Tell what was there when this turn began: what comes meanwhile has a turn of its own. If Ctrl-C comes in a
        task that goes on, or one runs the loop itself (as it can where a notebook has been made to), the others have
        their turn again, still before whoever is answered later."""
        left = self._left
        if len(left) > 1:
            self._loop.call_soon(self._tell)
        answered: list[_AsyncioWaiter] = []
        for _ in range(len(left)):
            if not left:
                return
            tell, answer = left.popleft()
            self.answered = answered
            try:
                tell(answer)
            finally:
                self.answered = None
                if len(answered) == 1:  # the rule
                    waiter = answered.pop()
                    if (wake := waiter.wake) is not None:
                        waiter.context.run(wake, waiter)
                elif answered:
                    answered.reverse()
                    self._wake(answered)

    def _wake(self, left: list[_AsyncioWaiter]) -> None:
        """Let those go on whom one call has answered, from the last to the first; the others again, as in `_tell`. The
        list is empty then."""
        if len(left) > 1:
            self._loop.call_soon(self._wake, left)
        while left:
            waiter = left.pop()
            if (wake := waiter.wake) is not None:
                waiter.context.run(wake, waiter)


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

    def answer(self, answers: list[Told]) -> bool:
        return self.call_soon(tell_all, answers)

    def after_turn(self, function: Callable[[], object]) -> None:
        function()

    def waiter(self) -> Waiter:
        return _TrioWaiter()


def tell_all(answers: list[Told]) -> None:
    """Tell everybody his answer, where that lets nobody go on at once."""
    for tell, answer in answers:
        tell(answer)


class Awaited(Protocol):
    """Something that happens once: an `anyio.Event`, or a `Bell`."""

    def is_set(self) -> bool: ...

    async def wait(self) -> None: ...


class Bell:
    """An event for which, mostly, nobody waits: it costs next to nothing until somebody does, and little then. It is
    rung and waited for in one loop, which may be given if it is known."""

    __slots__ = ("_loop", "_rung", "_waiters")

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = loop
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
        waiter = (self._loop or current_loop()).waiter()
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
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)  # none while another thread still imports it
    if lowlevel is not None and lowlevel.in_trio_task():  # asked first: it may be the guest of an asyncio loop
        return _current_trio()
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
