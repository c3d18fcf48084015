"""Threads that read for whoever asks, so that a slow disk or server never holds up the event loop.

Place in the life of an execution: whenever somebody looks. They are daemons: a program that is torn apart in the
middle, by a third Ctrl-C say, must not hang at its end because of somebody who only wanted to look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio

from longrun.loops import Loop, Waiter, current_loop

T = TypeVar("T")


class _Request:
    """One call, and where its answer goes."""

    __slots__ = ("_args", "_function", "_loop", "_waiter")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], loop: Loop, waiter: Waiter) -> None:
        self._function, self._args, self._loop, self._waiter = function, args, loop, waiter

    def serve(self) -> None:
        answer: tuple[Any, BaseException | None]
        try:
            answer = (self._function(*self._args), None)
        except BaseException as error:  # carried to whoever asked
            answer = (None, error)
        self._loop.call_soon(self._waiter, answer)


class Readers:
    """Up to `limit` threads, started as they are needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._threads = self._busy = 0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What the function gives, called in a reader's thread. Who is cancelled does not wait for it: a server may
        never answer. What it uses stays open until it has."""
        value: T = await _answered(function, args, self._add, shield=False)
        return value

    def _add(self, request: _Request) -> None:
        with self._lock:
            self._busy += 1
            starts = self._busy > self._threads and self._threads < self._limit
            if starts:
                self._threads += 1
        if starts:
            try:
                threading.Thread(target=self._run, name="longrun-reader", daemon=True).start()
            except RuntimeError:  # no more threads are to be had: those that there are do it
                with self._lock:
                    self._threads -= 1
                    if self._threads <= 0:
                        self._threads, self._busy = 0, self._busy - 1
                        raise
        self._requests.put(request)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request.serve()
            with self._lock:
                self._busy -= 1
                self._idle.notify_all()

    @property
    def at_work(self) -> bool:
        return self._busy > 0

    def close(self, patience: float | None = None) -> bool:
        """End the threads, each after what it does now; False if one of them has not after so many seconds."""
        with self._lock:
            threads, self._threads = self._threads, 0
            for _ in range(threads):
                self._requests.put(None)
            return self._idle.wait_for(lambda: self._busy <= 0, patience)


async def apart(function: Callable[[], T], *, shield: bool = True) -> T:
    """What the function gives, called in a thread of its own; without `shield`, who is cancelled leaves it to that."""

    def ask(request: _Request) -> None:
        threading.Thread(target=request.serve, name="longrun-apart", daemon=True).start()

    value: T = await _answered(function, (), ask, shield=shield)
    return value


async def _answered(
    function: Callable[..., Any], args: tuple[Any, ...], ask: Callable[[_Request], object], *, shield: bool
) -> Any:
    loop = current_loop()
    waiter = loop.waiter()
    with anyio.CancelScope(shield=shield):
        ask(_Request(function, args, loop, waiter))
        value, error = await waiter
    if error is not None:
        try:
            raise error
        finally:
            del error
    return value
