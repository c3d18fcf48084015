"""`ctx.map`: bounded parallel branches, each durable on its own.

Place in the life of an execution: run a step. A branch has a context of its own; when it ends, its result is one entry,
saved with whatever other branches end at the same time, and everything below the branch is dropped.
"""

from __future__ import annotations

import asyncio
import collections.abc
import itertools
import math
import typing
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import Any

import anyio

from longrun import codec
from longrun.errors import (
    BranchesFailedError,
    ConfigError,
    ItemsChangedError,
    StepError,
    StepInterrupted,
    raised_itself,
)
from longrun.items import Obey, refuse_set
from longrun.ledger import Group
from longrun.loops import current_task
from longrun.port import Port
from longrun.records import BranchFailure, Progress
from longrun.registry import type_hints

MISSING = object()
FAILED = "$failed"
GROUP_SHOWN = 10
"""So many errors of a group are named in its text."""
LOOK_AGAIN = 0.2
"""How often a branch that waits for the others looks whether it still has to."""
AWAITABLES = (collections.abc.Awaitable, collections.abc.Coroutine)

Call = Callable[[str, Any], Awaitable[Any]]
"""Runs one branch, given its prefix in the ledger and its item."""


def check_limits(limit: Any, tolerate: Any) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigError("limit", limit, "give a whole number of at least 1")
    if isinstance(tolerate, bool) or not isinstance(tolerate, int) or tolerate < 0:
        raise ConfigError("tolerate", tolerate, "give a whole number of at least 0")


async def read_items(name: str, items: Iterable[Any] | AsyncIterable[Any]) -> list[Any]:
    refuse_set(name, items)
    if isinstance(items, AsyncIterable):
        return [item async for item in items]
    return list(items)


class MeetingPoint:
    """Where the branches of a map stop together: a pause takes effect when the last of them has come to a point."""

    def __init__(self, port: Port, obey: Obey) -> None:
        self._port, self._obey = port, obey
        self._running = 0
        self._parked = 0
        self._opened = anyio.Event()

    def enter(self, workers: int) -> None:
        self._running += workers

    async def obey(self) -> None:
        """A branch is at a point: it waits here for the others, if something has to take effect."""
        if not self._port.must_stop():
            return
        self._running -= 1
        self._parked += 1
        try:
            if self._running == 0:
                await self._stop()
            else:
                await self._parked_until(self._opened)
        finally:
            self._parked -= 1
            self._running += 1

    async def _parked_until(self, opened: anyio.Event) -> None:
        """Until the others have come, or what was asked for has been taken back meanwhile."""
        while not opened.is_set() and self._port.must_stop():
            with anyio.move_on_after(LOOK_AGAIN):
                await opened.wait()

    async def leave(self) -> None:
        """A worker has nothing more to do; if all the others wait here, they need wait no longer."""
        self._running -= 1
        if self._running == 0 and self._parked:
            await self._stop()

    async def _stop(self) -> None:
        await self._obey()
        opened, self._opened = self._opened, anyio.Event()
        opened.set()


class Branches:
    """One map in flight."""

    def __init__(self, group: Group, port: Port, obey: Obey, name: str, items: list[Any], result_type: Any) -> None:
        self._ledger, self._port, self._name = group.ledger, port, name
        self.meeting = MeetingPoint(port, obey)
        self._items = items
        self._type = result_type
        self._group, self._scope = group, group.stack[-1]
        self._key = group.claim("map", name)
        self._around = [] if len(group.stack) == 1 and not group.prefix else list(group.stack)
        self._errors: dict[int, Exception] = {}
        self._results: list[Any] = [MISSING] * len(items)
        self._done = 0
        self._task = current_task()
        self._read_stored(group)
        self._shows = not self._around
        if self._shows:
            port.follow(self._progress)

    def _read_stored(self, group: Group) -> None:
        entries = self._ledger.entries
        stored = entries.get(self._key)
        if stored is None:
            group.record(self._key, codec.dumps({"of": len(self._items)}))
            return
        count = codec.loads(stored)["of"]
        if count != len(self._items):
            raise ItemsChangedError(self._name, count, len(self._items))
        for n in range(count):
            data = entries.get(f"{self._key}/{n}")
            if data is not None:
                self._results[n] = self._read(n, data)
                self._own({f"{self._key}/{n}"})
                self._done += 1

    def _read(self, n: int, data: bytes) -> Any:
        tree = codec.loads(data)
        if FAILED in tree:
            return BranchFailure(index=n, error=tree[FAILED])
        return codec.structure(tree["ok"], self._type, f"{self._name}[{n}]")

    def _own(self, keys: set[str]) -> None:
        """Let keys go with the item or the branch that this map stands in."""
        for scope in self._around:
            scope.keys |= keys

    def _progress(self) -> Progress:
        return Progress(done=self._done, total=len(self._items))

    async def run(self, call: Call, limit: int, tolerate: int) -> list[Any]:
        """Run what is missing, `limit` at a time; the results in the items' order. A map that was cut short, by a time
        limit of the step's own say, may be asked for again: it goes on with what it has got, once that is durable."""
        awaited = self._ledger.awaited
        begun_before = self._key in awaited
        awaited.add(self._key)
        try:
            await self._run(call, limit, tolerate)
            if begun_before:
                await self._port.durable()
        except BaseException:
            self._group.disclaim(self._scope, "map", self._name)
            raise
        awaited.discard(self._key)
        return self._results

    async def _run(self, call: Call, limit: int, tolerate: int) -> None:
        todo = deque([n for n, result in enumerate(self._results) if result is MISSING])
        workers = min(limit, len(todo))
        self.meeting.enter(workers)
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(workers):
                    tasks.start_soon(self._work, todo, call, tolerate, tasks.cancel_scope, name="longrun-branch")
        except BaseExceptionGroup as group:
            raise _only(group) from None
        if len(self._errors) > tolerate:
            self._raise(tolerate)
        if any(result is MISSING for result in self._results):
            raise StepError(f"a branch of the map {self._name!r} ended without a result: something cancelled its task")
        await self._keep_failures()

    async def _work(self, todo: deque[int], call: Call, tolerate: int, scope: anyio.CancelScope) -> None:
        while todo:
            await self._branch(todo.popleft(), call)
            if len(self._errors) > tolerate:
                scope.cancel()
                return
            if todo and self._port.attention:
                await self.meeting.obey()
        await self.meeting.leave()

    async def _branch(self, n: int, call: Call) -> None:
        prefix = f"{self._key}/{n}/"
        try:
            result = await call(prefix, self._items[n])
        except BaseException as error:
            self._own(self._ledger.leave(prefix))
            if as_failure(error) is None and not self._cancelled_itself(error):
                raise
            self._fail(n, error)
        else:
            await self._save(n, prefix, result)

    def _cancelled_itself(self, error: BaseException) -> bool:
        """Whether the branch has cancelled the task that it runs in, and nobody is ending the map: a failure then."""
        ending = anyio.current_effective_deadline() == -math.inf
        return not ending and (self._task is None or not self._task.cancelling()) and take_back(error)

    def _fail(self, n: int, error: BaseException) -> None:
        failure = as_failure(error)
        assert failure is not None
        self._errors[n] = failure
        self._results[n] = BranchFailure(index=n, error=describe(failure))

    async def _save(self, n: int, prefix: str, result: Any) -> None:
        tree = codec.unstructure(result, self._type, f"{self._name}[{n}]")
        self._keep(n, prefix, {"ok": tree})
        self._results[n] = result
        self._done += 1
        if self._shows:
            self._port.report(self._progress())
        await self._port.durable()

    def _keep(self, n: int, prefix: str, outcome: dict[str, Any]) -> None:
        self._port.check()
        key = f"{self._key}/{n}"
        self._ledger.finish(prefix, key, codec.dumps(outcome))
        self._own({key})

    async def _keep_failures(self) -> None:
        """What the step now sees must be what it would see after a crash."""
        if self._errors:
            for n in self._errors:
                self._keep(n, f"{self._key}/{n}/", {FAILED: self._results[n].error})
            await self._port.durable()

    def _raise(self, tolerate: int) -> None:
        first = self._errors[next(iter(self._errors))]
        if tolerate == 0:
            raise first
        raise BranchesFailedError(self._name, len(self._errors), tolerate, describe(first)) from first


def as_failure(error: BaseException) -> Exception | None:
    """What a step or a branch raised, as a failure of the attempt; None for what must go on upwards."""
    if isinstance(error, Exception):
        return error
    if _goes_up(error):
        return None
    return raised_itself(error)


def _goes_up(error: BaseException) -> bool:
    """Whether this ends more than the attempt: a cancellation, Ctrl-C, the end of the coroutine. Anything else that is
    no `Exception`, a panic in an extension say, is a failure like others: it must not take other executions along."""
    if isinstance(error, BaseExceptionGroup):
        return any(not isinstance(one, Exception) and _goes_up(one) for one in error.exceptions)
    if isinstance(error, KeyboardInterrupt | GeneratorExit | StepInterrupted) or getattr(
        error, "ends_the_program", False
    ):
        return True
    if isinstance(error, asyncio.CancelledError):
        return not _is_stray(error)
    return isinstance(error, anyio.get_cancelled_exc_class())


def _is_stray(error: BaseException) -> bool:
    """Whether this is a CancelledError that nobody sent to this task: the step awaited something that was cancelled."""
    if not isinstance(error, asyncio.CancelledError) or anyio.current_effective_deadline() == -math.inf:
        return False
    task = current_task()
    return task is None or not task.cancelling()


def take_back(error: BaseException) -> bool:
    """Undo what cancelled this task by its name, which asyncio lets everybody do. False if it was not that."""
    task = current_task()
    if task is None or not isinstance(error, asyncio.CancelledError):
        return False
    while task.cancelling():
        task.uncancel()
    return True


def describe(error: BaseException) -> str:
    """An error's type and text, of bounded length; a group's with those of the errors in it."""
    text = _type_and_text(error)
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(map(_type_and_text, itertools.islice(_single(error), GROUP_SHOWN)))}"
    return text if len(text) <= 4000 else text[:3997] + "..."


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except (Exception, SystemExit):  # its own defect must not hide what it is
        return ""


def _type_and_text(error: BaseException) -> str:
    words = text_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _single(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in a group and in the groups in it, in their order."""
    left: list[BaseException] = [group]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left.extend(reversed(error.exceptions))
        else:
            yield error


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, as a step's author would have seen it without a task group. What is not an error (a
    cancellation) goes before errors that came with it: nobody will read their outcome."""
    _, others = group.split(Exception)
    if others is not None:
        return others
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def result_type(function: Callable[..., Any], name: str) -> Any:
    """What a function's annotation says it gives, awaited if need be. What cannot be stored is refused here, before
    a call is made whose result would be lost."""
    annotation = type_hints(name, function).get("return", Any)
    if typing.get_origin(annotation) in AWAITABLES:
        annotation = typing.get_args(annotation)[-1]
    codec.check_annotation(annotation)
    return annotation
