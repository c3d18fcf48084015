"""Durable cursors: `ctx.each` as an async and as a plain iterator over the same `ItemLoop`.

Place in the life of an execution: run a step. Between saves an item costs a microsecond or two: its end is noted in
the ledger, and every few milliseconds the loop looks up: shows how far it is, hands over a save that is due (without
waiting for it), and lets other tasks run.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio.lowlevel

from longrun.errors import ConfigError, ItemsChangedError, StepMisuseError
from longrun.ledger import Cursor, Group, opened
from longrun.port import Port
from longrun.records import Progress

T = TypeVar("T")
LOOK_EVERY = 0.006
"""Seconds between two looks; also how long a loop without any await of its own keeps other tasks waiting. Longer than
the interpreter's switch interval (5 ms): a thread that waits for the interpreter begins to count anew whenever that is
let go for a moment, as it is at each look. Were that more often, no other thread might ever get it: no reader, no
writer, and not the one that renews the lease."""
BUILT_IN = (list, tuple, range, str, bytes)

Obey = Callable[[], Awaitable[None]]


class ItemLoop:
    """The bookkeeping of one `each`: begins and ends items in the ledger, and says when a point is due."""

    def __init__(self, group: Group, port: Port, obey: Obey, name: str, items: Any, every: int | None) -> None:
        check_loop(name, every)
        refuse_set(name, items)
        self.group, self.port, self.name = group, port, name
        self._obey, self._every = obey, every
        key = group.claim("each", name)
        self.cursor = Cursor(key, group.ledger.entries.get(key))
        self._scope = group.item_scope(name, self.cursor)
        self._frames = [*group.stack, self._scope]
        self._opened: object = None
        self._inside = False
        self._save_due = False
        self._fit(len(items) if isinstance(items, Sized) else None)
        self._shows = len(self._frames) == 2 and not group.prefix
        if self._shows:
            port.follow(self.progress)

    def _fit(self, count: int | None) -> None:
        cursor = self.cursor
        if cursor.of is not None and count is not None and cursor.of != count:
            raise ItemsChangedError(self.name, cursor.of, count)
        if count is not None and cursor.n > count:
            raise ItemsChangedError(self.name, cursor.n, count)
        cursor.of = count if count is not None else cursor.of

    def missing(self, found: int) -> ItemsChangedError:
        return ItemsChangedError(self.name, self.cursor.n, found)

    def progress(self) -> Progress:
        return Progress(done=self.cursor.n, total=self.cursor.of)

    def begin(self) -> None:
        """The item behind the cursor is being handed out."""
        self._inside = True
        if opened.get() is not self._opened or self.group.ledger.inherits:
            self._opened = self.group.item_opened(self._frames)

    def end(self) -> bool:
        """Note the item that was open as done; True if a point is due: something to obey, to save, or time to look."""
        if self._inside:
            self._inside = False
            self.group.item_ended(self.cursor, self._scope)
            if self._every is not None and self.cursor.n % self._every == 0:
                self._save_due = True
                return True
        return self.port.attention or monotonic() >= self.group.look_at

    @property
    def waits(self) -> bool:
        """Whether the point that is due has to be waited for."""
        return self._save_due or self.port.attention

    def finish(self) -> None:
        """All items are done, durably so with the next save."""
        self.group.loop_ended(self.cursor, self._scope)
        if self._shows:
            self.port.report(self.progress())

    async def point(self) -> None:
        """Make the item durable if `every` says so, obey what must be obeyed, hand over a save that is due."""
        port = self.port
        if self._save_due:
            self._save_due = False
            self.group.capture(force=True)
            await port.durable()
        if port.attention:
            self.group.capture(force=True)
            await self._obey()
        self.look()

    def look(self) -> None:
        port = self.port
        now = monotonic()
        if now >= port.save_at:
            port.hand_over()
        if self._shows:
            port.report(self.progress())
        self.group.look_at = min(now + LOOK_EVERY, port.save_at)

    def abandon(self) -> None:
        """The iterator was dropped in the middle (a `break`): names after it belong to the scope around it."""
        if self._inside:
            self._inside = False
            self.group.close_scope(self._scope)


class Each(Generic[T]):
    """What `async for` reads."""

    def __init__(self, loop: ItemLoop, items: Iterable[T] | AsyncIterable[T]) -> None:
        self._loop = loop
        self._source: AsyncIterable[T] | None = None
        self._items: Iterable[T] = ()
        if isinstance(items, AsyncIterable):
            self._source = items
        else:
            self._items = items
        self._next: Iterator[T] | None = None
        self._async_next: AsyncIterator[T] | None = None
        self._ended = loop.cursor.ended

    def __aiter__(self) -> Each[T]:
        return self

    async def __anext__(self) -> T:
        loop = self._loop
        if loop.end():
            await loop.point()
            await anyio.lowlevel.checkpoint()
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._source is not None:
                item = await self._later(self._source)
            else:
                if self._next is None:
                    self._next = skip(loop, self._items)
                item = next(self._next)
        except (StopIteration, StopAsyncIteration) as error:
            if self._source is None and isinstance(error, StopAsyncIteration):  # it would pass for the end of all
                raise RuntimeError(f"the items of {loop.name!r} raised StopAsyncIteration") from error
            self._ended = True
            loop.finish()
            raise StopAsyncIteration from None
        loop.begin()
        return item

    if not TYPE_CHECKING:  # pragma: no branch -- a type checker has its own words for it

        def __iter__(self) -> Iterator[T]:
            raise StepMisuseError(f"this step is async: write `async for … in ctx.each({self._loop.name!r}, …)`")

    async def _later(self, source: AsyncIterable[T]) -> T:
        if self._async_next is None:
            self._async_next = source.__aiter__()
            await self._skip(self._async_next, self._loop.cursor.n)
        return await self._async_next.__anext__()

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

    def __init__(self, loop: ItemLoop, items: Iterable[T]) -> None:
        self._loop = loop
        self._items = items
        self._next: Iterator[T] | None = None
        self._ended = loop.cursor.ended

    def __iter__(self) -> SyncEach[T]:
        return self

    def __next__(self) -> T:
        loop = self._loop
        loop.port.check(blocking=True)
        if loop.end():
            self._point(loop)
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

    if not TYPE_CHECKING:  # pragma: no branch -- a type checker has its own words for it

        def __aiter__(self) -> AsyncIterator[T]:
            raise StepMisuseError(f"this step is a plain function: write `for … in ctx.each({self._loop.name!r}, …)`")

    def _point(self, loop: ItemLoop) -> None:
        if loop.waits:
            loop.port.call_from_thread(loop.point, lasting=loop.port.attention)
        else:
            loop.look()

    def __del__(self) -> None:
        self._loop.abandon()


def check_loop(name: Any, every: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "give the loop a name")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError("every", every, "give a whole number of at least 1, or None")


def refuse_set(name: str, items: Any) -> None:
    if isinstance(items, set | frozenset):
        raise StepMisuseError(f"the items of {name!r} are a set, which has no stable order; give sorted(items)")


def refuse_async(name: str, items: Any) -> None:
    if isinstance(items, AsyncIterable):
        raise StepMisuseError(f"the items of {name!r} are an async iterable; a plain step needs a plain one")


def skip(loop: ItemLoop, items: Iterable[T]) -> Iterator[T]:
    """An iterator over what is left behind the cursor."""
    done = loop.cursor.n
    if isinstance(items, Sequence) and not isinstance(items, BUILT_IN):
        return (items[n] for n in range(done, len(items)))  # an item may be dear to make: those that are done are not
    rest = iter(items)
    skipped = sum(1 for _ in islice(rest, done))
    if skipped < done:
        raise loop.missing(skipped)
    return rest
