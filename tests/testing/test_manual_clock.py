"""`ManualClock`: nothing passes until a test says so, and then at once, on asyncio, trio and in threads."""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread
import pytest

from longrun import Executor, MemoryCheckpointStore, StepContext, StepRegistry, WaitFor
from longrun.testing import CALM, FaultyStore, ManualClock
from longrun.testing import clock as clocks


async def waiting(clock: ManualClock, count: int) -> None:
    """Return when so many waits are under way."""
    while clock.waiting < count:
        await anyio.to_thread.run_sync(lambda: None)


async def test_time_stands_still_until_it_is_advanced():
    clock = ManualClock(start=1000.0)
    assert (clock.now(), clock.monotonic()) == (1000.0, 0.0)
    clock.advance(2.5)
    assert (clock.now(), clock.monotonic()) == (1002.5, 2.5)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


async def test_sleepers_wake_in_the_order_of_their_moments():
    clock = ManualClock()
    woken: list[int] = []

    async def sleep(seconds: int) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as tasks:
        for seconds in (30, 10, 20):
            tasks.start_soon(sleep, seconds)
        await waiting(clock, 3)
        clock.advance(10)
        while len(woken) < 1:
            await anyio.to_thread.run_sync(lambda: None)
        assert woken == [10]
        clock.advance(100)
    assert woken[0] == 10
    assert sorted(woken) == [10, 20, 30]
    assert clock.waiting == 0


async def test_a_wait_ends_with_its_event_or_its_time():
    clock = ManualClock()
    answers: list[bool] = []
    event = anyio.Event()

    async def wait(event: anyio.Event) -> None:
        answers.append(await clock.wait(event, 10))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, event)
        await waiting(clock, 1)
        event.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, anyio.Event())
        await waiting(clock, 1)
        clock.advance(10)
    assert answers == [True, False]
    assert await clock.wait(event, None) is True
    assert await clock.wait(event, 0) is True
    assert await clock.wait(anyio.Event(), 0) is False


async def test_a_wait_that_is_cancelled_leaves_nothing_behind():
    clock = ManualClock()
    with anyio.move_on_after(0):
        await clock.sleep(10)
    assert clock.waiting == 0


async def test_a_thread_is_blocked_until_its_moment_or_its_event():
    clock = ManualClock()
    nudge = threading.Event()
    answers: list[bool] = []

    def block() -> None:
        answers.append(clock.block(nudge, 10))
        answers.append(clock.block(nudge, 10))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, block)
        await waiting(clock, 1)
        clock.advance(10)
        while len(answers) < 1:
            await anyio.to_thread.run_sync(lambda: None)
        await waiting(clock, 1)
        nudge.set()
    assert answers == [False, True]


async def test_with_autojump_a_year_passes_when_everybody_waits():
    clock = ManualClock(start=0.0, autojump=True)
    order: list[tuple[str, float]] = []

    async def sleep(name: str, *lengths: float) -> None:
        for length in lengths:
            await clock.sleep(length)
            order.append((name, clock.now()))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep, "a", 100, 31_536_000)
            tasks.start_soon(sleep, "b", 150)
    assert order == [("a", 100), ("b", 150), ("a", 31_536_100)]


@pytest.mark.parametrize("call", ["head", "commit"])
async def test_with_autojump_time_stands_still_while_a_store_is_at_work(call: str):
    """However slow it is: what is on its way comes before whatever only time brings."""
    clock = ManualClock(autojump=True)
    store = FaultyStore(MemoryCheckpointStore(clock=clock))
    registry = StepRegistry()

    @registry.step
    async def ask(state: None) -> WaitFor:
        return WaitFor("answer", state, timeout=60)

    @registry.step
    async def hear(ctx: StepContext, state: None) -> bool:
        return ctx.timed_out

    registry.workflow("ask", [ask, hear])
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        begin = clock.now()
        run = await executor.start("ask")
        await run.wait("waiting")
        store.delay(call, seconds=clocks.QUIET * 6)
        await run.signal("answer")
        assert await run.result() is False
    assert store.fired[call] == 1
    assert clock.now() == begin


async def test_with_autojump_time_goes_on_at_last_although_a_store_does_not_answer(monkeypatch):
    monkeypatch.setattr(clocks, "PATIENCE", clocks.QUIET * 2)

    class Silent:
        at_work = True

    clock, silent = ManualClock(start=0.0, autojump=True), Silent()
    clock.heed(silent)
    with anyio.fail_after(20):
        await clock.sleep(100)
    assert clock.now() == 100
