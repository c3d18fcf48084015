"""Events: what happened, told after it is durable, in order per execution, to whoever listens.

Place in the life of an execution: after every checkpoint. A listener that fails, is slow or never returns costs the
executions nothing: each has a bounded buffer of its own, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import enum
import inspect
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

import anyio
from attrs import field, frozen

from longrun.branches import as_failure
from longrun.logging import get_logger
from longrun.loops import current_loop
from longrun.registry import is_async

BUFFER = 10_000
GRACE = 0.1
"""How long a result waits for a listener that is behind."""
log = get_logger()


class EventType(enum.StrEnum):
    STEP_STARTED = "step_started"
    STEP_COMPLETED = "step_completed"
    STEP_FAILED = "step_failed"
    CHECKPOINTED = "checkpointed"
    PAUSED = "paused"
    RESUMED = "resumed"
    EXECUTION_STARTED = "execution_started"
    EXECUTION_COMPLETED = "execution_completed"
    EXECUTION_FAILED = "execution_failed"
    EXECUTION_CANCELLED = "execution_cancelled"
    EXECUTION_BLOCKED = "execution_blocked"
    STEP_RETRYING = "step_retrying"
    WAITING = "waiting"
    PROGRESS = "progress"
    HEARTBEAT = "heartbeat"
    LEASE_LOST = "lease_lost"
    STORE_UNAVAILABLE = "store_unavailable"


LAST_EVENTS = frozenset({EventType.EXECUTION_COMPLETED, EventType.EXECUTION_FAILED, EventType.EXECUTION_CANCELLED})
"""After these nothing more is told of an execution, unless somebody retries it."""


@frozen(kw_only=True)
class ExecutionEvent:
    """What happened to an execution, told after it was durable."""

    type: EventType
    execution_id: str
    step: str | None = None
    """The step it is about, if it is about one."""
    timestamp: datetime
    """When it was told, in UTC."""
    error: str | None = field(default=None, repr=False)
    """What went wrong, if something did."""
    attempt: int = 0
    """Which attempt of the step, from 1; 0 where there is none."""
    data: Mapping[str, Any] = field(factory=dict, repr=False)
    """More, by type: `progress` and `heartbeat` carry the forecast."""


Listener = Callable[[ExecutionEvent], Any]


class Ear(Protocol):
    """What the bus hands events to."""

    def put(self, event: ExecutionEvent) -> None: ...

    def close(self) -> None: ...


class Subscription:
    """One listener's buffer, read as an async iterator. `dropped` counts what did not fit."""

    def __init__(self, bus: Bus, only: str | None = None) -> None:
        self._bus = bus
        self._only = only
        self._buffer: deque[ExecutionEvent] = deque()
        self._arrived = anyio.Event()
        self._closed = False
        self.dropped = 0

    def put(self, event: ExecutionEvent) -> None:
        if self._only is not None and event.execution_id != self._only:
            return
        if len(self._buffer) >= BUFFER:
            self.dropped += 1
            return
        self._buffer.append(event)
        self._arrived.set()

    def close(self) -> None:
        """End the iteration once the buffer is empty."""
        self._closed = True
        self._bus.remove(self)
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[ExecutionEvent]:
        return self

    async def __anext__(self) -> ExecutionEvent:
        while not self._buffer:
            if self._closed:
                raise StopAsyncIteration
            if self._arrived.is_set():  # several may read: who waits already must not be forgotten
                self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._buffer.popleft()

    @property
    def empty(self) -> bool:
        return not self._buffer

    async def arrives(self, seconds: float) -> bool:
        """Wait until there is something to read, or the end of it; False if there is nothing after so long."""
        if self.empty and not self._closed:
            if self._arrived.is_set():
                self._arrived = anyio.Event()
            with anyio.move_on_after(seconds):
                await self._arrived.wait()
        return self._closed or not self.empty

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


class Bus:
    """Fans events out. Lives in one event loop; `emit` never waits."""

    def __init__(self) -> None:
        self._ears: list[Ear] = []
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        """Weakly: who leaves an `async for` in the middle says nothing, and drops the iterator."""
        self.active = False
        """Whether anybody listens: if not, events need not even be built."""
        self.audience = False
        """Whether somebody listens who is shown progress: telemetry is not."""

    def emit(self, event: ExecutionEvent) -> None:
        for ear in self._ears:
            ear.put(event)
        for subscription in self._subscriptions:
            subscription.put(event)
        self._count()

    def subscribe(self, only: str | None = None) -> Subscription:
        subscription = Subscription(self, only)
        self._subscriptions.add(subscription)
        self._count()
        return subscription

    def call(self, listener: Listener) -> _Callback:
        """Call `listener` with every event: an async function in a task (`_Callback.serve`), another in a thread."""
        callback = _Callback(listener)
        self.tap(callback)
        return callback

    def tap(self, ear: Ear) -> None:
        """Hand every event to something of one's own, at once: it must neither wait nor raise."""
        self._ears.append(ear)
        self._count()

    def _count(self) -> None:
        self.active = bool(self._ears or self._subscriptions)
        self.audience = bool(self._subscriptions) or any(isinstance(ear, _Callback) for ear in self._ears)

    def remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        self._count()

    def close(self) -> None:
        for ear in [*self._ears, *self._subscriptions]:
            ear.close()


class _Callback:
    """A function that is called with events, one after the other, in a thread or a task of its own."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._buffer: deque[ExecutionEvent] = deque()
        self._idle = anyio.Event()
        self._idle.set()
        self._loop = current_loop()
        self._wake = threading.Event()
        self._arrived = anyio.Event()
        self._closed = False
        self._behind = False
        self.is_async = is_async(listener)
        self.dropped = self.failed = 0
        if not self.is_async:
            threading.Thread(target=self._run, name="longrun-listener", daemon=True).start()

    def put(self, event: ExecutionEvent) -> None:
        if len(self._buffer) >= BUFFER:
            self.dropped += 1
            return
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._buffer.append(event)
        self._arrived.set()
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()
        self._wake.set()

    async def caught_up(self, seconds: float) -> None:
        """Wait until everything so far was handed to the listener, for a bounded time: it may never return."""
        with anyio.move_on_after(seconds):
            await self._idle.wait()

    async def catch_up_briefly(self) -> None:
        """The same for whoever hands out a result: a listener that once was too slow is not waited for again until it
        has caught up by itself."""
        if not self._behind or self._idle.is_set():
            await self.caught_up(GRACE)
            self._behind = not self._idle.is_set()

    async def serve(self) -> None:
        """Call an async listener; ends after `close`."""
        while True:
            while self._buffer:
                try:
                    await self._listener(self._buffer[0])
                except BaseException as error:
                    if as_failure(error) is None:
                        raise
                    self._report(error)
                self._buffer.popleft()
            self._set_idle()
            if self._closed:
                return
            self._arrived = anyio.Event()
            await self._arrived.wait()

    def _run(self) -> None:
        while True:
            while self._buffer:
                try:
                    self._call_plainly(self._buffer[0])
                except BaseException as error:  # its thread is our own: nothing but the listener can end it
                    self._report(error)
                self._buffer.popleft()
            self._loop.call_soon(self._set_idle)
            if self._closed:
                return
            self._wake.wait()
            self._wake.clear()

    def _call_plainly(self, event: ExecutionEvent) -> None:
        answer = self._listener(event)
        if inspect.iscoroutine(answer):
            answer.close()
            raise TypeError("a plain function that returns a coroutine, which nobody awaits")

    def _set_idle(self) -> None:
        if not self._buffer:
            self._idle.set()

    def _report(self, error: BaseException) -> None:
        """At the first, second, fourth, eighth … failure: one that always fails must not fill the log."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            log.warning("listener.failed", error_type=type(error).__name__, failures=self.failed)
