"""Durable cursors: `ctx.each` as an async and as a plain iterator over the same `Loop`.

Place in the life of an execution: run a step. Between saves an item costs a few microseconds: its end is noted in the
ledger, the loop is yielded to every few milliseconds, and a save that is due is handed over, not waited for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence, Sized
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Generic, TypeVar

import anyio.lowlevel

from longrun.errors import ConfigError, ItemsChangedError, StepError
from longrun.ledger import Cursor, Group
from longrun.port import Port
from longrun.records import Progress

T = TypeVar("T")
YIELD_EVERY = 0.004


class Loop:
    """The bookkeeping of one `each`: opens and closes items in the ledger, and says when a point is due."""

    def __init__(self, group: Group, port: Port, name: str, items: Any, every: int | None) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError("name", name, "give the loop a name")
        if isinstance(items, AbstractSet) and not isinstance(items, Sequence) and isinstance(items, set | frozenset):
            raise StepError(f"the items of {name!r} are a set, which has no stable order; give a list, e.g. sorted(items)")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError("every", every, "give a whole number of at least 1, or None")
        self.group, self.port, self.name, self.every = group, port, name, every
        self.cursor: Cursor = group.cursor(group.claim("each", name))
        self.depth = len(group.stack)
        self._first = True
        self._inside = False
        self._fit(len(items) if isinstance(items, Sized) else None)

    def _fit(self, count: int | None) -> None:
        cursor = self.cursor
        if cursor.of is not None and count is not None and cursor.of != count:
            raise ItemsChangedError(self.name, cursor.of, count)
        if count is not None and cursor.n > count:
            raise ItemsChangedError(self.name, cursor.n, count)
        cursor.of = count if count is not None else cursor.of

    def missing(self, found: int) -> ItemsChangedError:
        return ItemsChangedError(self.name, self.cursor.n, found)

    def begin(self) -> None:
        self.group.enter(self.name, self.cursor.n, self.depth, self._first)
        self._first = False
        self._inside = True

    def end(self) -> bool:
        """Note the item that was open as done; True if a point is due: something to obey, to save, or `every`."""
        if not self._inside:
            return self.port.attention
        self._inside = False
        self.group.leave(self.depth)
        cursor = self.cursor
        cursor.n += 1
        self.group.capture()
        port = self.port
        if port.attention or (self.every is not None and cursor.n % self.every == 0):
            return True
        if time.monotonic() >= port.save_at:
            self.show()
            port.hand_over()
        return False

    def finish(self) -> None:
        """All items are done, durably so with the next save."""
        self.group.leave(self.depth)
        self.cursor.ended = True
        self.group.capture(force=True)
        self.show()

    def show(self) -> None:
        if self.depth == 1 and not self.group.prefix:
            self.port.report(Progress(done=self.cursor.n, total=self.cursor.of))

    async def point(self) -> None:
        """Obey what must be obeyed and, with `every`, make the item durable before the next one."""
        if self.every is not None and self.cursor.n % self.every == 0:
            self.group.capture(force=True)
            self.show()
            await self.port.durable()
        if self.port.attention:
            self.group.capture(force=True)
            await self.port.obey()

    def abandon(self) -> None:
        """The iterator was dropped in the middle (a `break`): names after it belong to the scope around it."""
        if self._inside:
            self._inside = False
            del self.group.stack[self.depth :]


class Each(Generic[T]):
    """What `async for` reads."""

    def __init__(self, loop: Loop, items: Iterable[T] | AsyncIterable[T]) -> None:
        self._loop = loop
        self._items = items
        self._next: Iterator[T] | None = None
        self._async_next: AsyncIterator[T] | None = None
        self._yield_at = time.monotonic() + YIELD_EVERY
        self._ended = loop.cursor.ended

    def __aiter__(self) -> Each[T]:
        return self

    async def __anext__(self) -> T:
        loop = self._loop
        if loop.end():
            await loop.point()
        if time.monotonic() >= self._yield_at:
            await anyio.lowlevel.checkpoint()
            self._yield_at = time.monotonic() + YIELD_EVERY
        if self._ended:
            raise StopAsyncIteration
        try:
            item = next(self._next) if self._next is not None else await self._later()
        except (StopIteration, StopAsyncIteration):
            self._ended = True
            loop.finish()
            raise StopAsyncIteration from None
        loop.begin()
        return item

    async def _later(self) -> T:
        if self._async_next is not None:
            return await self._async_next.__anext__()
        done = self._loop.cursor.n
        if isinstance(self._items, AsyncIterable):
            self._async_next = self._items.__aiter__()
            await self._skip(self._async_next, done)
            return await self._async_next.__anext__()
        self._next = skip(self._loop, self._items)
        return next(self._next)

    async def _skip(self, items: AsyncIterator[T], done: int) -> None:
        for n in range(done):
            try:
                await items.__anext__()
            except StopAsyncIteration:
                raise self._loop.missing(n) from None

    def __del__(self) -> None:
        self._loop.abandon()


class SyncEach(Generic[T]):
    """What `for` reads in a step thread or a child process."""

    def __init__(self, loop: Loop, items: Iterable[T]) -> None:
        if isinstance(items, AsyncIterable):
            raise StepError(f"the items of {loop.name!r} are an async iterable; a plain step needs a plain one")
        self._loop = loop
        self._items = items
        self._next: Iterator[T] | None = None
        self._ended = loop.cursor.ended

    def __iter__(self) -> SyncEach[T]:
        return self

    def __next__(self) -> T:
        loop = self._loop
        if loop.end():
            loop.port.call_from_thread(loop.point)
        if self._ended:
            raise StopIteration
        try:
            if self._next is None:
                self._next = skip(loop, self._items)
            item = next(self._next)
        except StopIteration:
            self._ended = True
            loop.finish()
            raise
        loop.begin()
        return item

    def __del__(self) -> None:
        self._loop.abandon()


def skip(loop: Loop, items: Iterable[T]) -> Iterator[T]:
    """An iterator over what is left behind the cursor."""
    done = loop.cursor.n
    if isinstance(items, Sequence):
        return (items[n] for n in range(done, len(items)))
    rest = iter(items)
    skipped = sum(1 for _ in islice(rest, done))
    if skipped < done:
        raise loop.missing(skipped)
    return rest
