"""Run a step: what it sees. `StepContext` for async steps, `SyncStepContext` for steps in threads and processes.

Place in the life of an execution: run a step. Both kinds stand on the same ledger, and need from whoever runs the
attempt only a `Port`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, Unpack, overload

import anyio.lowlevel

from longrun import codec
from longrun.branches import Branches, check_limits, read_items, result_type
from longrun.errors import StepMisuseError
from longrun.handle import BlockingHandle
from longrun.items import LOOK_EVERY, Each, ItemLoop, Obey, SyncEach, refuse_async, refuse_set
from longrun.ledger import Group, Ledger, Scope
from longrun.logging import user_logger
from longrun.port import Port, StepInfo
from longrun.records import BranchFailure, Progress
from longrun.registry import is_async, takes_two

if TYPE_CHECKING:
    from longrun.handle import ExecutionHandle

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Context:
    """What both kinds share: where the step is, `local`, progress and log."""

    def __init__(self, info: StepInfo, port: Port, group: Group, obey: Obey | None = None) -> None:
        self._info, self._port, self._group = info, port, group
        self._obey = obey or port.obey
        self._log: Any = None

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
        """How far this step is: what bars, command line and dashboard show. Until the first call, its loops and maps
        say so. May be called from any thread."""
        for number in (done, 0.0 if total is None else total):
            check_amount(number)
        if message is not None and type(message) is not str:
            message = str(message)  # a path, an error: what cannot be stored would never be written
        self._port.announce(Progress(done=done, total=total, message=message))


class StepContext(_Context):
    """What an async step sees."""

    async def checkpoint(self, *, force: bool = False) -> None:
        """A point where progress may be saved, and where pause, cancel and shutdown take effect. With `force` it is
        durable on return. Inside an item of `each` it saves `local` as that item has changed it, and the item runs
        again after a crash: use `every=N` there, or checkpoint before the item touches `local`."""
        port, group = self._port, self._group
        captured = group.capture(force=force or port.attention)
        if force:
            await port.durable()
        if port.attention:
            await self._obey()
        now = time.monotonic()
        if captured and now >= port.save_at:
            port.hand_over()
        if now >= group.look_at:
            await anyio.lowlevel.checkpoint()
            group.look_at = min(time.monotonic() + LOOK_EVERY, port.save_at)

    def each(self, name: str, items: Iterable[T] | AsyncIterable[T], *, every: int | None = None) -> Each[T]:
        """A durable cursor: `async for page in ctx.each("pages", pages)` goes on behind the last saved item. With
        `every=N` cursor and `local` are durable together after each N items, which a `checkpoint()` inside an item
        cannot give: the cursor passes an item only at its end."""
        self._port.check()
        return Each(ItemLoop(self._group, self._port, self._obey, name, items, every), items)

    @overload
    async def once(self, key: str, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T: ...
    @overload
    async def once(self, key: str, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T: ...
    async def once(self, key: str, function: Callable[[Unpack[Ts]], Any], *args: *Ts) -> Any:
        """Call `function` and keep its result, durable before it is returned; never called again in this visit."""
        self._port.check()
        memo = Memo(self._group, key, function)
        if memo.is_durable:
            return memo.read()
        try:
            result = memo.read() if memo.stored is not None else memo.keep(await self._call(function, *args))
            await self._port.durable()
            memo.settle()
            if self._port.attention:
                await self._obey()
        except BaseException:
            memo.release()
            raise
        return result

    @overload
    async def map(
        self,
        function: Callable[..., Awaitable[T]],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: Literal[0] = 0,
    ) -> list[T]: ...
    @overload
    async def map(
        self,
        function: Callable[..., Awaitable[T]],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int,
    ) -> list[T | BranchFailure]: ...
    @overload
    async def map(
        self,
        function: Callable[..., T],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: Literal[0] = 0,
    ) -> list[T]: ...
    @overload
    async def map(
        self,
        function: Callable[..., T],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int,
    ) -> list[T | BranchFailure]: ...
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
        self._port.check()
        check_limits(limit, tolerate)
        name = name or str(getattr(function, "__name__", "map"))
        two = takes_two(function)
        if two is None:
            raise StepMisuseError(f"the function of map {name!r} must take (item) or (ctx, item)")
        in_loop = is_async(function)
        found = await read_items(name, items)
        branches = Branches(self._group, self._port, self._obey, name, found, result_type(function, name))

        async def call(prefix: str, item: Any) -> Any:
            if not two:
                return await self._call(function, item)
            branch = StepContext(self._info, self._port, self._group.ledger.group(prefix), branches.meeting.obey)
            return await self._call(function, branch if in_loop else SyncStepContext.of(branch), item)

        return await branches.run(call, limit, tolerate)

    async def start_child(self, workflow: Any, state: Any = None, *, key: str) -> ExecutionHandle:
        """Start another execution, once for this visit and key; its id is this one's, the visit and the key. Queue and
        priority are this one's. Its workflow has to be registered here, though another worker may come to run it."""
        self._port.check()
        handle: ExecutionHandle = await self._port.start_child(workflow, state, key)
        return handle

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if is_async(function):
            return await function(*args)
        result = await self._port.run_sync(function, *args)
        return await result if inspect.isawaitable(result) else result


class SyncStepContext(_Context):
    """What a plain step sees, in its thread: the same names, blocking."""

    _inner: StepContext

    @classmethod
    def of(cls, context: StepContext) -> SyncStepContext:
        """The blocking face of a context."""
        sync = cls(context._info, context._port, context._group, context._obey)
        sync._inner = context
        return sync

    def checkpoint(self, *, force: bool = False) -> None:
        """A point where progress may be saved, and where pause, cancel and shutdown take effect. With `force` it is
        durable on return. Inside an item of `each` it saves `local` as that item has changed it, and the item runs
        again after a crash: use `every=N` there, or checkpoint before the item touches `local`."""
        port = self._port
        port.check(blocking=True)
        if force or port.attention:
            port.call_from_thread(_forced, self._inner, force, lasting=port.attention)
        elif self._group.capture() and time.monotonic() >= port.save_at:
            port.hand_over()

    def each(self, name: str, items: Iterable[T], *, every: int | None = None) -> SyncEach[T]:
        """A durable cursor: `for page in ctx.each("pages", pages)` goes on behind the last saved item. With
        `every=N` cursor and `local` are durable together after each N items, which a `checkpoint()` inside an item
        cannot give: the cursor passes an item only at its end."""
        self._port.check(blocking=True)
        refuse_async(name, items)
        return SyncEach(ItemLoop(self._group, self._port, self._obey, name, items, every), items)

    @overload
    def once(self, key: str, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T: ...
    @overload
    def once(self, key: str, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T: ...
    def once(self, key: str, function: Callable[[Unpack[Ts]], Any], *args: *Ts) -> Any:
        """Call `function` in this thread (an async one in the loop) and keep its result, durable before it is returned;
        never called again in this visit."""
        port = self._port
        port.check(blocking=True)
        memo = Memo(self._group, key, function)
        if memo.is_durable:
            return memo.read()
        try:
            result = memo.read() if memo.stored is not None else memo.keep(self._call(function, *args))
            port.call_from_thread(port.durable)
            memo.settle()
            if port.attention:
                port.call_from_thread(self._obey, lasting=True)
        except BaseException:
            memo.release()
            raise
        return result

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        return self._port.call_from_thread(_awaited, result, lasting=True) if inspect.isawaitable(result) else result

    @overload
    def map(
        self,
        function: Callable[..., Awaitable[T]],
        items: Iterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: Literal[0] = 0,
    ) -> list[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., Awaitable[T]],
        items: Iterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int,
    ) -> list[T | BranchFailure]: ...
    @overload
    def map(
        self,
        function: Callable[..., T],
        items: Iterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: Literal[0] = 0,
    ) -> list[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., T],
        items: Iterable[Any],
        *,
        name: str | None = None,
        limit: int = 8,
        tolerate: int,
    ) -> list[T | BranchFailure]: ...
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
        self._port.check(blocking=True)
        refuse_async(name or "map", items)
        refuse_set(name or "map", items)
        results: list[Any] = self._port.call_from_thread(
            _mapped, self._inner, self._group.stack, function, list(items), name, limit, tolerate, lasting=True
        )
        return results

    def start_child(self, workflow: Any, state: Any = None, *, key: str) -> BlockingHandle:
        """Start another execution; returns a handle whose methods block."""
        self._port.check(blocking=True)
        return BlockingHandle(self._port.call_from_thread(self._port.start_child, workflow, state, key))


class Memo:
    """The result of one `once`, stored or to be stored. Who gives up waiting until it is durable, a time limit of the
    step's own say, may ask for it again: the call has been made, and the result is there."""

    def __init__(self, group: Group, key: str, function: Callable[..., Any]) -> None:
        self._group, self._key = group, key
        self._type = result_type(function, str(key))
        self._path = f"once[{key!r}]"
        self._scope = group.stack[-1]
        self._entry = group.claim("once", key)
        self.stored = group.ledger.entries.get(self._entry)

    def read(self) -> Any:
        return codec.decode(self.stored or b"null", self._type, path=self._path)

    @property
    def is_durable(self) -> bool:
        return self.stored is not None and self._entry not in self._group.ledger.awaited

    def keep(self, result: Any) -> Any:
        data = codec.encode(result, self._type, path=self._path)
        self._group.ledger.awaited.add(self._entry)
        self._group.record(self._entry, data)
        return result

    def settle(self) -> None:
        self._group.ledger.awaited.discard(self._entry)

    def release(self) -> None:
        """It was not returned: its name may be used again."""
        self._group.disclaim(self._scope, "once", self._key)


async def _forced(context: StepContext, force: bool) -> None:
    await context.checkpoint(force=force)


async def _awaited(result: Awaitable[T]) -> T:
    return await result


async def _mapped(
    context: StepContext, frames: list[Scope], function: Any, items: Any, name: str | None, limit: int, tolerate: int
) -> list[Any]:
    with context._group.within(frames):
        return await context.map(function, items, name=name, limit=limit, tolerate=tolerate)


def check_amount(number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
        raise StepMisuseError(f"progress takes numbers from 0 on, not {number!r:.40}")
    if isinstance(number, int) and number.bit_length() > 1000:
        raise StepMisuseError("progress takes numbers that a float can hold")


def root_context(info: StepInfo, port: Port, ledger: Ledger) -> StepContext:
    """The context of an attempt."""
    return StepContext(info, port, ledger.group(""))
