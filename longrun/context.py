"""Run a step: what it sees. `StepContext` for async steps, `SyncStepContext` for steps in threads and processes.

Place in the life of an execution: run a step. Both kinds stand on the same ledger, and need from whoever runs the
attempt only a `Port`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.lowlevel

from longrun import codec
from longrun.branches import Branches, check_limits, read_items, result_type
from longrun.errors import StepError
from longrun.items import YIELD_EVERY, Each, Loop, SyncEach
from longrun.ledger import Group, Ledger
from longrun.logging import user_logger
from longrun.port import Port, StepInfo
from longrun.records import Progress
from longrun.registry import takes_two

if TYPE_CHECKING:
    from longrun.handle import ExecutionHandle

T = TypeVar("T")


class _Context:
    """What both kinds share: where the step is, `local`, progress and log."""

    def __init__(self, info: StepInfo, port: Port, group: Group) -> None:
        self._info, self._port, self._group = info, port, group
        self._log: Any = None
        self._yield_at = 0.0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.execution_id} step {self.step_index} {self.step!r}>"

    @property
    def execution_id(self) -> str:
        return self._info.execution_id

    @property
    def workflow(self) -> str:
        return self._info.workflow

    @property
    def step(self) -> str:
        """The name of this step."""
        return self._info.step

    @property
    def step_index(self) -> int:
        return self._info.step_index

    @property
    def attempt(self) -> int:
        """From 1. A crash, an interrupt or a drain repeats the same attempt."""
        return self._info.attempt

    @property
    def iteration(self) -> int:
        """From 0: how often `Repeat` has brought the execution back to this step."""
        return self._info.iteration

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._info.metadata

    @property
    def idempotency_key(self) -> str:
        """The same for all attempts of this visit, another for every visit: give it to the services you call."""
        return self._info.idempotency_key

    @property
    def signal(self) -> Any:
        """The payload of the signal that ended the `WaitFor` before this step."""
        return self._info.signal

    @property
    def timed_out(self) -> bool:
        """Whether the `WaitFor` before this step ran out of time."""
        return self._info.timed_out

    @property
    def local(self) -> dict[Any, Any]:
        """Durable inside this visit of the step; empty in the next."""
        return self._group.local

    @property
    def log(self) -> Any:
        """A structlog logger bound to execution, workflow, step and attempt."""
        if self._log is None:
            self._log = user_logger(
                execution=self.execution_id, workflow=self.workflow, step=self.step, attempt=self.attempt
            )
        return self._log

    @property
    def time_left(self) -> float | None:
        """Seconds until this attempt is stopped by its time-out or by a shutdown; None if nothing stops it."""
        return self._port.time_left()

    @property
    def shutting_down(self) -> bool:
        return self._port.shutting_down

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """How far this step is: what bars, command line and dashboard show."""
        self._port.report(Progress(done=done, total=total, message=message))


class StepContext(_Context):
    """What an async step sees."""

    async def checkpoint(self, *, force: bool = False) -> None:
        """A point where progress may be saved, and where pause, cancel and shutdown take effect."""
        port = self._port
        captured = self._group.capture(force=force or port.attention)
        if force:
            await port.durable()
        now = time.monotonic()
        if captured and now >= port.save_at:
            port.hand_over()
        if port.attention:
            await port.obey()
        if now >= self._yield_at:
            await anyio.lowlevel.checkpoint()
            self._yield_at = time.monotonic() + YIELD_EVERY

    def each(self, name: str, items: Iterable[T] | AsyncIterable[T], *, every: int | None = None) -> Each[T]:
        """A durable cursor: `async for item in ctx.each("pages", pages)`; a resumed loop goes on behind the last saved item."""
        return Each(Loop(self._group, self._port, name, items, every), items)

    async def once(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` and keep its result, durable before it is returned; never called again in this visit."""
        entry = self._group.claim("once", key)
        kind = result_type(function, str(key))
        stored = self._group.ledger.entries.get(entry)
        if stored is not None:
            return codec.decode(stored, kind, path=f"once[{key!r}]")
        result = await self._call(function, *args)
        self._group.ledger.record(entry, codec.encode(result, kind, path=f"once[{key!r}]"))
        await self._port.durable()
        if self._port.attention:
            await self._port.obey()
        return result

    async def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int = 0,
    ) -> list[Any]:
        """Run `function` for every item, `limit` at a time; each finished branch is durable on its own."""
        check_limits(limit, tolerate)
        name = name or getattr(function, "__name__", "map")
        two = takes_two(function)
        if two is None:
            raise StepError(f"the function of map {name!r} must take (item) or (ctx, item)")
        branches = Branches(self._group, self._port, name, await read_items(items), result_type(function, name))

        async def call(prefix: str, item: Any) -> Any:
            if not two:
                return await self._call(function, item)
            branch = self._branch(prefix)
            if _is_async(function):
                return await function(branch, item)
            return await self._call(function, SyncStepContext.of(branch), item)

        return await branches.run(call, limit, tolerate)

    async def start_child(self, workflow: Any, state: Any = None, *, key: str) -> ExecutionHandle:
        """Start another execution, once for this visit and key; its id is this one's, the visit and the key."""
        handle: ExecutionHandle = await self._port.start_child(workflow, state, key)
        return handle

    def _branch(self, prefix: str) -> StepContext:
        return StepContext(self._info, self._port, self._group.ledger.group(prefix))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if _is_async(function):
            return await function(*args)
        result = await self._port.run_sync(function, *args)
        return await result if inspect.isawaitable(result) else result


class SyncStepContext(_Context):
    """What a plain step sees, in its thread: the same names, blocking."""

    @classmethod
    def of(cls, context: StepContext) -> SyncStepContext:
        """The blocking face of a context."""
        sync = cls(context._info, context._port, context._group)
        sync._inner = context
        return sync

    _inner: StepContext

    def checkpoint(self, *, force: bool = False) -> None:
        """A point where progress may be saved, and where pause, cancel and shutdown take effect."""
        port = self._port
        if not force and not port.attention:
            if self._group.capture() and time.monotonic() >= port.save_at:
                port.call_from_thread(self._inner.checkpoint)
            return
        port.call_from_thread(_forced, self._inner, force)

    def each(self, name: str, items: Iterable[T], *, every: int | None = None) -> SyncEach[T]:
        """A durable cursor: `for item in ctx.each("pages", pages)`."""
        return SyncEach(Loop(self._group, self._port, name, items, every), items)

    def once(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` in this thread and keep its result; never called again in this visit."""
        entry = self._group.claim("once", key)
        kind = result_type(function, str(key))
        stored = self._group.ledger.entries.get(entry)
        if stored is not None:
            return codec.decode(stored, kind, path=f"once[{key!r}]")
        result = function(*args)
        self._group.ledger.record(entry, codec.encode(result, kind, path=f"once[{key!r}]"))
        self._port.call_from_thread(self._port.durable)
        if self._port.attention:
            self._port.call_from_thread(self._port.obey)
        return result

    def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int = 0,
    ) -> list[Any]:
        """Run `function` for every item, in other step threads, `limit` at a time."""
        results: list[Any] = self._port.call_from_thread(_mapped, self._inner, function, items, name, limit, tolerate)
        return results

    def start_child(self, workflow: Any, state: Any = None, *, key: str) -> Any:
        """Start another execution; returns a handle whose methods block."""
        return self._port.call_from_thread(self._port.start_child, workflow, state, key)


async def _forced(context: StepContext, force: bool) -> None:
    await context.checkpoint(force=force)


async def _mapped(
    context: StepContext, function: Any, items: Any, name: str | None, limit: int, tolerate: int
) -> list[Any]:
    return await context.map(function, items, name=name, limit=limit, tolerate=tolerate)


def root_context(info: StepInfo, port: Port, ledger: Ledger) -> StepContext:
    """The context of an attempt."""
    return StepContext(info, port, ledger.group(""))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))
