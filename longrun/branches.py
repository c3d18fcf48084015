"""`ctx.map`: bounded parallel branches, each durable on its own.

Place in the life of an execution: run a step. A branch has a context of its own; when it ends, its result is one entry,
saved with whatever other branches end at the same time, and everything below the branch is dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

import anyio

from longrun import codec
from longrun.errors import BranchesFailedError, ConfigError, ItemsChangedError
from longrun.ledger import Group
from longrun.port import Port
from longrun.records import BranchFailure, Progress
from longrun.registry import type_hints

MISSING = object()
FAILED = "$failed"

Call = Callable[[str, Any], Awaitable[Any]]
"""Runs one branch, given its prefix in the ledger and its item."""


def check_limits(limit: int, tolerate: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigError("limit", limit, "give a whole number of at least 1")
    if isinstance(tolerate, bool) or not isinstance(tolerate, int) or tolerate < 0:
        raise ConfigError("tolerate", tolerate, "give a whole number of at least 0")


async def read_items(items: Iterable[Any] | AsyncIterable[Any]) -> list[Any]:
    if isinstance(items, AsyncIterable):
        return [item async for item in items]
    return list(items)


class Branches:
    """One map in flight."""

    def __init__(self, group: Group, port: Port, name: str, items: list[Any], result_type: Any) -> None:
        self._group, self._port, self._name = group, port, name
        self._items = items
        self._type = result_type
        self._key = group.claim("map", name)
        self._errors: dict[int, Exception] = {}
        self._results: list[Any] = [MISSING] * len(items)
        self._done = 0
        self._read_stored()

    def _read_stored(self) -> None:
        entries = self._group.ledger.entries
        stored = entries.get(self._key)
        if stored is None:
            self._group.ledger.record(self._key, codec.dumps({"of": len(self._items)}))
            return
        count = codec.loads(stored)["of"]
        if count != len(self._items):
            raise ItemsChangedError(self._name, count, len(self._items))
        for n in range(count):
            data = entries.get(f"{self._key}/{n}")
            if data is not None:
                self._results[n] = self._read(n, data)
                self._done += 1

    def _read(self, n: int, data: bytes) -> Any:
        tree = codec.loads(data)
        if FAILED in tree:
            return BranchFailure(index=n, error=tree[FAILED])
        return codec.structure(tree["ok"], self._type, f"{self._name}[{n}]")

    async def run(self, call: Call, limit: int, tolerate: int) -> list[Any]:
        """Run what is missing, `limit` at a time; the results in the items' order."""
        todo = iter([n for n, result in enumerate(self._results) if result is MISSING])
        waiting = len(self._items) - self._done
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(limit, waiting)):
                    tasks.start_soon(self._work, todo, call, tolerate, tasks.cancel_scope, name="longrun-branch")
        except BaseExceptionGroup as group:
            raise _only(group) from None
        if len(self._errors) > tolerate:
            self._raise(tolerate)
        await self._keep_failures()
        return self._results

    async def _work(self, todo: Iterable[int], call: Call, tolerate: int, scope: anyio.CancelScope) -> None:
        for n in todo:
            prefix = f"{self._key}/{n}/"
            try:
                result = await call(prefix, self._items[n])
            except Exception as error:
                self._errors[n] = error
                self._results[n] = BranchFailure(index=n, error=describe(error))
                if len(self._errors) > tolerate:
                    scope.cancel()
                    return
            else:
                await self._save(n, prefix, result)
            if self._port.attention:
                await self._port.obey()

    async def _save(self, n: int, prefix: str, result: Any) -> None:
        path = f"{self._name}[{n}]"
        tree = codec.unstructure(result, self._type, path)
        ledger = self._group.ledger
        with ledger.lock:
            if ledger.entries:
                ledger.close(prefix)
            ledger.record(f"{self._key}/{n}", codec.dumps({"ok": tree}))
        for scope in self._group.stack[1:]:
            scope.keys.add(f"{self._key}/{n}")
        self._results[n] = result
        self._done += 1
        self._port.report(Progress(done=self._done, total=len(self._items)))
        await self._port.durable()

    async def _keep_failures(self) -> None:
        """What the step now sees must be what it would see after a crash."""
        if not self._errors:
            return
        for n in self._errors:
            self._group.ledger.record(f"{self._key}/{n}", codec.dumps({FAILED: self._results[n].error}))
        await self._port.durable()

    def _raise(self, tolerate: int) -> None:
        first = self._errors[next(iter(self._errors))]
        if tolerate == 0:
            raise first
        raise BranchesFailedError(self._name, len(self._errors), tolerate, describe(first)) from first


def describe(error: BaseException) -> str:
    """An error's type and text, of bounded length."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= 4000 else text[:3997] + "..."


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error inside groups of one, as a step's author would have seen it without a task group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def result_type(function: Callable[..., Any], name: str) -> Any:
    return type_hints(name, function).get("return", Any)
