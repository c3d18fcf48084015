"""The writes of one execution on their way: in order, again when the store was away, and whoever waits is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import pytest

from longrun import LeaseLostError, LongrunError, MemoryCheckpointStore
from longrun.clock import Clock
from longrun.loops import current_loop
from longrun.outbox import BACKOFF, Outbox
from longrun.stored import Save
from longrun.stores.store import CheckpointStore
from longrun.telemetry import Watch
from longrun.testing import FaultyStore, ManualClock, samples
from tests.crashing import PATIENCE


class Courier:
    """What stands for the executor, and what it is told."""

    telemetry: Watch | None = None

    def __init__(self, store: CheckpointStore, tasks: anyio.abc.TaskGroup) -> None:
        self.store = store
        self.clock: Clock = ManualClock(autojump=True)
        self.failed: list[tuple[str, int]] = []
        self._errands: list[Callable[[], Awaitable[Any]]] = []
        self._errand = anyio.Event()
        tasks.start_soon(self._run_errands)

    def spawn(self, function: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Called by the store's answer, where no task runs."""
        self._errands.append(function)
        self._errand.set()

    async def _run_errands(self) -> None:
        while True:
            await self._errand.wait()
            self._errand = anyio.Event()
            while self._errands:
                await self._errands.pop(0)()

    def store_failed(self, execution_id: str, error: LongrunError, tries: int) -> None:
        self.failed.append((execution_id, tries))


class Sender:
    """An execution that only writes."""

    def __init__(self, store: FaultyStore, tasks: anyio.abc.TaskGroup) -> None:
        self.store = store
        self.courier = Courier(store, tasks)
        self.head = samples.owned("a").head
        self.told: list[int] = []
        self.answers: list[LongrunError | None] = []
        self.outbox = Outbox(self.courier, "a", current_loop(), self)

    def tell(self, save: Save, told: object) -> None:
        self.told.append(save.head.seq)

    def push(self) -> None:
        save = samples.step("a", self.head)
        self.head = save.head
        self.outbox.push(save, None, self.answers.append)

    async def settled(self) -> object:
        waiter = self.outbox.settled()
        assert waiter is not None
        with anyio.fail_after(PATIENCE):
            return await waiter


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    async with FaultyStore(MemoryCheckpointStore()) as store:
        await store.create(samples.owned("a"))
        yield store


async def test_a_store_that_was_away_gets_everything_again_in_order(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        store.fail(times=2)
        for _ in range(3):
            sender.push()
        assert await sender.settled() is None
        assert (sender.told, sender.answers) == ([2, 3, 4], [None, None, None])
        assert [row.seq for row in await store.boundaries("a")] == [1, 2, 3, 4]
        tasks.cancel_scope.cancel()
    assert sender.courier.failed[0] == ("a", 1)
    assert store.fired["commit"] == 2


async def test_the_tries_are_counted_anew_after_a_write_that_got_through(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        for _ in range(2):
            store.fail(times=2)
            sender.push()
            await sender.settled()
        tasks.cancel_scope.cancel()
    assert sender.courier.failed == [("a", 1), ("a", 2), ("a", 1), ("a", 2)]


async def test_it_gets_them_after_a_while_and_not_at_once(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        sender.courier.clock = clock = ManualClock()
        store.fail()
        sender.push()
        with anyio.fail_after(PATIENCE):
            while not clock.waiting:
                await store.ping()
        assert (store.calls["commit"], sender.answers) == (2, [])  # with the one that made it
        clock.advance(5)
        assert await sender.settled() is None
        tasks.cancel_scope.cancel()


class NotedClock(ManualClock):
    """Never waits, and knows how long it was asked to."""

    def __init__(self) -> None:
        super().__init__(autojump=True)
        self.asked: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        await super().sleep(seconds)


async def test_not_everybody_comes_back_to_the_store_at_once(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        sender.courier.clock = clock = NotedClock()
        for _ in range(10):
            store.fail()
            sender.push()
            await sender.settled()
        tasks.cancel_scope.cancel()
    assert len(clock.asked) == 10
    assert len(set(clock.asked)) > 1
    assert all(BACKOFF.initial / 2 <= seconds <= BACKOFF.initial for seconds in clock.asked)


async def test_a_store_that_is_closed_is_waited_for(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        await store.aclose()
        sender.push()
        sender.push()
        assert sender.courier.failed == [("a", 1)]
        await store.open()
        assert await sender.settled() is None
        assert sender.told == [2, 3]
        tasks.cancel_scope.cancel()


async def test_whoever_settles_waits_for_the_last_write_and_disturbs_nobody(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        assert sender.outbox.settled() is None
        sender.push()
        sender.push()
        waiters = [sender.outbox.settled(), sender.outbox.settled()]
        with anyio.fail_after(PATIENCE):
            for waiter in waiters:
                assert waiter is not None
                assert await waiter is None
                assert (sender.told, sender.answers) == ([2, 3], [None, None])
        assert sender.outbox.settled() is None
        tasks.cancel_scope.cancel()


async def test_whoever_settles_hears_that_nothing_can_be_written_any_more(store):
    async with anyio.create_task_group() as tasks:
        sender = Sender(store, tasks)
        store.fail(times=None)
        sender.push()
        waiter = sender.outbox.settled()
        lost, later = LeaseLostError("a", 1), LeaseLostError("a", 2)
        sender.outbox.give_up(lost)
        sender.outbox.give_up(later)
        assert waiter is not None
        assert await waiter is lost
        sender.push()
        assert sender.answers == [lost, lost]
        tasks.cancel_scope.cancel()
    assert sender.told == []
