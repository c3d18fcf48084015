"""A handle on one execution, whichever process runs it.

Place in the life of an execution: from its start to its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from longrun import views
from longrun.desk import UNCHANGED, check_states, check_timeout
from longrun.errors import (
    CorruptDataError,
    ExecutionBlockedError,
    ExecutionCancelledError,
    ExecutionError,
    ExecutionFailedError,
)
from longrun.records import Execution, ExecutionState
from longrun.snapshot import decode_state
from longrun.stored import Loaded
from longrun.threads import call_from_thread

if TYPE_CHECKING:
    from longrun.control_room import ControlRoom
    from longrun.events import ExecutionEvent

State = ExecutionState


class ExecutionHandle:
    """What `start`, `submit` and `fork` return."""

    def __init__(
        self, room: ControlRoom, id: str, *, away: Callable[[], AbstractAsyncContextManager[Any] | None] | None = None
    ) -> None:
        self._room = room
        self.id = id
        self._away = away
        """What to enter while waiting, if it is a child: the step that waits for it gives its place back meanwhile."""

    def __repr__(self) -> str:
        return f"<ExecutionHandle {self.id}>"

    def _repr_html_(self) -> str:
        """In a notebook: where it stands, if it runs here; a cell's value cannot wait for a store."""
        from longrun import notebook

        known = self._room.look_here(self.id)
        return notebook.unknown(self.id) if known is None else notebook.html(known)

    async def result(self, *, timeout: float | None = None) -> Any:
        """Wait for the end and give its result; raise `ExecutionFailedError`, `ExecutionCancelledError` or
        `ExecutionBlockedError` if there is none, and `TimeoutError` if it has not ended after so many seconds."""
        away = self._absence()
        if away is None and timeout is None:
            here = await self._room.ended_here(self.id)
            return await self._result() if here is None else here.value
        async with away or contextlib.nullcontext():
            with self._within(timeout):
                here = await self._room.ended_here(self.id)
                return await self._result() if here is None else here.value

    @contextlib.contextmanager
    def _within(self, timeout: float | None) -> Iterator[None]:
        """Wait for no longer than this. A `TimeoutError` of whatever is waited for stays as it is."""
        with anyio.move_on_after(check_timeout(timeout)) as scope:
            yield
        if scope.cancelled_caught:
            raise TimeoutError(f"execution {self.id!r} has not come to that after {timeout} s; it goes on")

    def _absence(self) -> AbstractAsyncContextManager[Any] | None:
        """What to enter while waiting, if anything."""
        return self._room.away() if self._away is None else self._away()

    async def _result(self) -> Any:
        """That of one that runs elsewhere, or has ended before: as it is stored."""
        try:
            loaded = await self._room.until(self.id, frozenset({State.BLOCKED}), wakes=self._away is not None)
        except CorruptDataError as error:
            raise ExecutionBlockedError(self.id, error=str(error)) from error
        return result_of(loaded, self._room)

    async def wait(self, *states: ExecutionState | str, timeout: float | None = None) -> Execution:
        """Wait until it is in one of `states` (default: until it has ended), or has ended otherwise. `TimeoutError` if
        it is not after so many seconds; the execution goes on all the same."""
        wanted = check_states(states) or frozenset()
        async with self._absence() or contextlib.nullcontext():
            with self._within(timeout):
                loaded = await self._room.until(self.id, wanted, wakes=self._away is not None)
        forecast = self._room.forecaster.at_once(loaded.definition, loaded.head)
        return views.execution(loaded.definition, loaded.head, forecast=forecast)

    async def pause(self, *, hold: bool = False, interrupt: bool = False, timeout: float | None = None) -> None:
        await self._room.pause(self.id, hold=hold, interrupt=interrupt, timeout=timeout)

    async def resume(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        await self._room.resume(self.id, state=state, timeout=timeout)

    async def cancel(self, reason: str | None = None, *, children: bool = False, timeout: float | None = None) -> None:
        await self._room.cancel(self.id, reason, children=children, timeout=timeout)

    async def signal(
        self, name: str, payload: Any = None, *, key: str | None = None, timeout: float | None = None
    ) -> None:
        await self._room.signal(self.id, name, payload, key=key, timeout=timeout)

    async def retry(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        await self._room.retry(self.id, state=state, timeout=timeout)

    async def info(self) -> Execution:
        """What is known of it now."""
        return await self._room.get(self.id)

    def events(self) -> AsyncIterator[ExecutionEvent]:
        """Its events from now on, until it ends. Of an execution that runs elsewhere, what its stored rows tell."""
        return self._room.events_of(self.id)


class BlockingHandle:
    """The handle that a plain step gets of its child: the same names, blocking."""

    def __init__(self, handle: ExecutionHandle) -> None:
        self._handle = handle
        self.id = handle.id

    def __repr__(self) -> str:
        return f"<BlockingHandle {self.id}>"

    def result(self, *, timeout: float | None = None) -> Any:
        return self._wait_for(self._handle.result, timeout=timeout)

    def wait(self, *states: ExecutionState | str, timeout: float | None = None) -> Execution:
        found: Execution = self._wait_for(self._handle.wait, *states, timeout=timeout)
        return found

    def pause(self, *, hold: bool = False, interrupt: bool = False, timeout: float | None = None) -> None:
        self._wait_for(self._handle.pause, hold=hold, interrupt=interrupt, timeout=timeout)

    def resume(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        self._wait_for(self._handle.resume, state=state, timeout=timeout)

    def cancel(self, reason: str | None = None, *, children: bool = False, timeout: float | None = None) -> None:
        self._wait_for(self._handle.cancel, reason, children=children, timeout=timeout)

    def signal(self, name: str, payload: Any = None, *, key: str | None = None, timeout: float | None = None) -> None:
        call_from_thread(partial(self._handle.signal, name, payload, key=key, timeout=timeout))

    def retry(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        self._wait_for(self._handle.retry, state=state, timeout=timeout)

    def info(self) -> Execution:
        found: Execution = call_from_thread(self._handle.info)
        return found

    def events(self) -> Iterator[ExecutionEvent]:
        return _blocking(call_from_thread(_begun, self._handle.events))

    def _wait_for(self, method: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """It may take its time, and what is waited for may need a thread."""
        return call_from_thread(partial(method, *args, **options), lasting=True)


async def _begun(events: Callable[[], AsyncIterator[ExecutionEvent]]) -> AsyncIterator[ExecutionEvent]:
    """In the loop: what is told from now on is kept, also before it is read."""
    return events()


def _blocking(source: AsyncIterator[ExecutionEvent]) -> Iterator[ExecutionEvent]:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            yield call_from_thread(source.__anext__, lasting=True)


def result_of(loaded: Loaded, room: ControlRoom) -> Any:
    """The result of an execution that has ended, or the error that says how it did."""
    head, definition = loaded.head, loaded.definition
    if head.state is State.COMPLETED:
        boundary = loaded.boundary
        kind = views.state_type(definition.steps, boundary, room.known)
        return decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), kind)
    step = definition.steps[head.step] if head.step < len(definition.steps) else None
    raise error_of(definition.id, head.state, step, head.attempt, head.error, head.reason)


def error_of(
    id: str, state: ExecutionState, step: str | None, attempt: int, error: str | None, reason: str | None
) -> ExecutionError:
    if state is State.FAILED:
        return ExecutionFailedError(id, step=step, attempt=attempt, error=error)
    if state is State.CANCELLED:
        return ExecutionCancelledError(id, step=step, attempt=attempt, error=reason)
    return ExecutionBlockedError(id, step=step, error=reason)
