"""A clock that tests drive: nothing passes until they say so, and then at once.

Place in the life of an execution: everywhere that a moment is written down or waited for. Give the same clock to the
executor and to a `MemoryCheckpointStore`, so that leases run out by it too. Works on asyncio, trio and in threads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel

from longrun.clock import Clock, Works
from longrun.loops import Awaited, current_loop

BEGIN = 1_700_000_000.0
QUIET = 0.05
"""Real seconds without any use of the clock, and with no store at work, after which `autojump` takes everybody to be
waiting. What beats often makes many jumps; a long `heartbeat_interval` spares them."""
PATIENCE = 5.0
"""So many real seconds after the last use of the clock, time goes on although a store is at work: it may hang."""


class ManualClock(Clock):
    """Sleeps, back-offs, leases and timers pass when `advance` is called.

    With `autojump` they pass by themselves: when every task waits, time jumps to the next moment somebody waits for. A
    heartbeat is such a moment too, and a jump takes a twentieth of a second: give the executor the config `CALM`.
    While a store is at work time stands still, for some seconds at most; a step thread at work counts as waiting. A
    step's `timeout`, and the `timeout=` of a call, are those of the machine's clock: they bound what really happens. A
    single `advance` past the length of a lease is to the store what a machine is that stood still: the lease has run
    out before anybody could renew it.
    """

    def __init__(self, start: float = BEGIN, *, autojump: bool = False) -> None:
        self._start = self._now = start
        self._autojump = autojump
        self._lock = threading.Lock()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._used = time.monotonic()
        self._busy = 0
        self._heeded: weakref.WeakSet[Works] = weakref.WeakSet()
        self._worked = 0.0
        """When one of them was seen at work."""
        self._waking: set[int] = set()
        """Timers that have rung and whose task has not gone on yet: time stands still for them."""

    def now(self) -> float:
        self._used = time.monotonic()
        return self._now

    def monotonic(self) -> float:
        self._used = time.monotonic()
        return self._now - self._start

    def advance(self, seconds: float) -> None:
        """Let time pass, from any thread. Whoever waits for a moment within it is woken, the earliest first; what they
        do then, trio's tasks do in any order."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        with self._lock:
            self._move(self._now + seconds)

    @property
    def waiting(self) -> int:
        """How many waits are under way."""
        with self._lock:
            return len(self._timers)

    async def sleep(self, seconds: float) -> None:
        await self.wait(anyio.Event(), max(0.0, seconds))

    async def wait(self, event: Awaited, seconds: float | None) -> bool:
        if seconds is None or event.is_set() or seconds <= 0:
            if seconds is None:
                await event.wait()
            else:
                await anyio.lowlevel.checkpoint()
            return event.is_set()
        rung = anyio.Event()
        loop = current_loop()
        timer = self._set_timer(seconds, lambda: loop.call_soon(rung.set))
        try:
            async with anyio.create_task_group() as tasks:
                for end in (event, rung):
                    tasks.start_soon(_end_at, end, tasks.cancel_scope)
                if self._autojump:
                    await self._jump_when_quiet()
        finally:
            self._remove(timer)
        return event.is_set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._used = time.monotonic()

    def heed(self, whom: Works) -> None:
        with self._lock:
            self._heeded.add(whom)

    def block(self, event: threading.Event, seconds: float) -> bool:
        """A thread cannot wait for two events: `event` is set when the time has passed, and cleared again."""
        reached: list[bool] = []

        def ring() -> None:
            reached.append(True)
            event.set()

        timer = self._set_timer(seconds, ring)
        event.wait()
        self._remove(timer)
        if reached:
            event.clear()
            return False
        return True

    async def _jump_when_quiet(self) -> None:
        while True:
            await anyio.sleep(QUIET)
            await anyio.wait_all_tasks_blocked()
            self._jump()

    def _jump(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._used < PATIENCE and any(one.at_work for one in self._heeded):
                self._worked = now
            busy = self._busy or self._waking
            if self._timers and not busy and now - max(self._used, self._worked) >= QUIET:
                self._used = now
                self._move(max(self._now, self._timers[0][0]))

    def _move(self, to: float) -> None:
        while self._timers and self._timers[0][0] <= to:
            self._now, number, ring = heapq.heappop(self._timers)
            self._waking.add(number)
            ring()
        self._now = to

    def _set_timer(self, seconds: float, ring: Callable[[], object]) -> Any:
        self._used = time.monotonic()
        with self._lock:
            timer = (self._now + seconds, next(self._numbers), ring)
            heapq.heappush(self._timers, timer)
            return timer

    def _remove(self, timer: Any) -> None:
        self._used = time.monotonic()
        with self._lock:
            self._waking.discard(timer[1])
            if timer in self._timers:
                self._timers.remove(timer)
                heapq.heapify(self._timers)


async def _end_at(event: Awaited, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
