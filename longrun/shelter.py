"""The tasks of a crew: sheltered from the program's own cancellation, and ended together.

Place in the life of an execution: run, leave. When the program around an executor is cancelled, what runs here still
gets its time to be drained: nothing ends before the crew says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from longrun.logging import get_logger
from longrun.loops import current_loop, current_task

Function = Callable[..., Awaitable[Any]]


class Endable(Protocol):
    """What ends a task when it is told to: a cancel scope around it, or something that knows better."""

    def cancel(self) -> None:
        """End it as a task group ends its tasks: again and again, but for what is shielded."""


class Shelter:
    def __init__(self, interrupted: Callable[[], object]) -> None:
        """`interrupted` is called when Ctrl-C came while one of the tasks ran; the tasks are cancelled then."""
        self._heard = interrupted
        self._log = get_logger()
        self._interrupted = self._closing = False
        self._inner: TaskGroup | None = None
        self._early: list[Callable[[], None]] = []
        """What was to be started before the shelter stood."""
        self._plain: dict[Endable, asyncio.Task[None]] = {}
        """The tasks that are in no task group, by what ends them."""
        self._failure: BaseException | None = None
        self._errands: deque[tuple[Function, str]] = deque()
        self._errand = anyio.Event()
        self._own_task: asyncio.Task[Any] | None = None
        self._program: asyncio.Task[Any] | None = None
        """Who opened it."""
        self._has_cancelled = False

    @property
    def stands(self) -> bool:
        """Whether nobody is ending the tasks here: neither the crew, nor a loop that cancels all tasks it has."""
        if self._closing or self._inner is None or self._inner.cancel_scope.cancel_called:
            return False
        return self._own_task is None or not self._own_task.cancelling()

    async def open(self) -> None:
        """With trio, to be closed in the task that opens it. With asyncio it has a task of its own: fixtures of tests
        and cells of notebooks enter in one task and leave in another."""
        self._program, self._loop = current_task(), current_loop()
        if self._program is None:
            self._outer = await anyio.create_task_group().__aenter__()
            self._outer.start_soon(self._stand, name="longrun-shelter")
        else:
            self._own_task = self._program.get_loop().create_task(self._stand(), name="longrun-shelter")
            self._own_task.add_done_callback(self._fallen)
        self.start(self._run_errands, name="longrun-errands")

    async def close(self) -> None:
        """End the tasks. Outside any scope of our own: a task group must be left where it was entered."""
        self._closing = True
        if self._inner is not None:
            self._inner.cancel_scope.cancel()
        if self._own_task is None:
            self._outer.cancel_scope.cancel()
            await self._outer.__aexit__(None, None, None)
        else:
            await self._until_fallen(self._own_task)
        if self._interrupted:
            raise KeyboardInterrupt

    async def _until_fallen(self, own_task: asyncio.Task[Any]) -> None:
        """However often the program is cancelled meanwhile; then it is told what ended the tasks, if anything did."""
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not own_task.done():
                try:
                    await asyncio.wait([own_task])
                except asyncio.CancelledError as error:
                    cancelled = error
        if self._has_cancelled and self._program is not None:
            self._program.uncancel()
        if cancelled is not None:
            raise cancelled
        failure = None if self._interrupted or own_task.cancelled() else own_task.exception()
        if failure is not None:
            raise failure

    def _fallen(self, own_task: asyncio.Task[Any]) -> None:
        if not self._closing and not own_task.cancelled() and own_task.exception() is not None:
            self._end_program()

    def _end_program(self) -> None:
        """Cancel what the program does inside the executor: when it leaves, it hears why."""
        if self._program is None:
            self._outer.cancel_scope.cancel()
        elif not self._closing and not self._has_cancelled:
            self._has_cancelled = self._program.cancel()

    async def _stand(self) -> None:
        async with anyio.create_task_group() as tasks:
            if self._closing:
                return
            tasks.cancel_scope.shield = True
            self._inner = tasks
            for start in self._early:
                start()
            try:
                await anyio.sleep_forever()
            finally:
                await self._end_plain()

    def start(self, function: Function, *args: object, name: str) -> None:
        if self._inner is None:
            self._early.append(partial(self.start, function, *args, name=name))
        else:
            self._inner.start_soon(self._watched, function, *args, name=name)

    def run(self, function: Callable[[], Awaitable[Any]], *, name: str, ended_by: Endable | None = None) -> None:
        """As `start`, for an execution. There are many of these, and with asyncio a plain task costs a fraction of one
        in a task group. It is run under a scope of its own, unless it has what it can be `ended_by`."""
        if self._inner is None:
            self._early.append(partial(self.run, function, name=name, ended_by=ended_by))
        elif self._own_task is None:
            self.start(function, name=name)
        else:
            if ended_by is None:
                ended_by = scope = self._loop.scope()
                function = partial(_within, scope, function)
            task = self._own_task.get_loop().create_task(self._run_plain(function, ended_by), name=name)
            if not task.done():  # as it may be where tasks begin at once
                self._plain[ended_by] = task

    async def _run_plain(self, function: Callable[[], Awaitable[Any]], ended_by: Endable) -> None:
        if not self.stands:
            ended_by.cancel()
        try:
            await function()
        except asyncio.CancelledError as error:
            if not self._takes(error):
                raise
        except Exception as error:  # a step has left a scope open: its execution has ended, and the others go on
            self._log.warning("task.left_open", error_type=type(error).__name__)
        except BaseException as error:
            if not self._takes(error):
                self._failure = self._failure or error
                if self._inner is not None:
                    self._inner.cancel_scope.cancel()
        finally:
            self._plain.pop(ended_by, None)

    async def _end_plain(self) -> None:
        """One that was cancelled before it began is done, and has not left by itself."""
        with anyio.CancelScope(shield=True):
            while left := [task for task in self._plain.values() if not task.done()]:
                for one in list(self._plain):
                    one.cancel()
                await asyncio.wait(left)
        if self._failure is not None:
            raise self._failure

    async def _watched(self, function: Function, *args: object) -> None:
        """A task of the group. What a plain one does is the same, without a call more."""
        try:
            await function(*args)
        except BaseException as error:
            if not self._takes(error):
                raise

    def _takes(self, error: BaseException) -> bool:
        """Whether it ends one task alone. Ctrl-C is raised in whichever runs. Here it means what it means in the
        program's own task: the program is to end, and with it the patience of a drain that is under way. A cancellation
        that asyncio was asked for one task ends that alone: the task group would end all others with it."""
        if isinstance(error, KeyboardInterrupt):
            self._interrupted = True
            self._heard()
            self._end_program()
            return True
        return isinstance(error, anyio.get_cancelled_exc_class()) and self.stands

    def spawn(self, function: Function, *, name: str) -> None:
        """As `start`, where no task may run, such as in a store's answer."""
        self._errands.append((function, name))
        self._errand.set()

    async def _run_errands(self) -> None:
        while True:
            await self._errand.wait()
            self._errand = anyio.Event()
            while self._errands:
                function, name = self._errands.popleft()
                self.start(function, name=name)


async def _within(scope: anyio.CancelScope, function: Callable[[], Awaitable[Any]]) -> None:
    with scope:
        await function()
