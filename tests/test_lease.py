"""Ownership: kept by a thread of its own, lost only by fencing, and what is lost stops."""

from __future__ import annotations

import time
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import (
    EventType,
    Executor,
    ExecutorConfig,
    LeaseLostError,
    MemoryCheckpointStore,
    StepContext,
    StepRegistry,
)
from longrun.stored import Save
from longrun.testing import ManualClock


class Program:
    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.log: list[str] = []
        self.registry.register("work", self.work)
        self.registry.register("after", self.after)
        self.registry.workflow("work", ["work", "after"])

    async def work(self, ctx: StepContext, state: int) -> int:
        self.log.append("begin")
        self.begun.set()
        try:
            await self.go.wait()
        except BaseException:
            self.log.append("cancelled")
            raise
        return state + 1

    async def after(self, state: int) -> int:
        self.log.append("after")
        return state + 1


class Stopped:
    """Two executors on one store; the first one's clock stands still, as that of a stopped process."""

    def __init__(self) -> None:
        self.clock, self.standing = ManualClock(), ManualClock()
        self.store = MemoryCheckpointStore(clock=self.clock)
        self.first, self.second = Program(), Program()
        self.events: list[Any] = []

    def one(self) -> Executor:
        return Executor(self.first.registry, store=self.store, clock=self.standing, on_event=self.events.append)

    def two(self) -> Executor:
        return Executor(self.second.registry, store=self.store, clock=self.clock)

    async def taken_over(self, two: Executor) -> None:
        """Let the first one's lease run out, and the second one take over and begin."""
        while self.second.log == []:
            self.clock.advance(6)
            await two.sweeper.once()
            await anyio.lowlevel.checkpoint()


async def test_a_stopped_owner_is_taken_over_and_its_step_is_cancelled_when_it_wakes():
    """I3, I12"""
    s = Stopped()
    async with s.one() as one, s.two() as two:
        await one.start("work", 0, id="a")
        await s.first.begun.wait()
        await s.taken_over(two)
        assert s.first.log == ["begin"]
        s.standing.advance(40)
        while "cancelled" not in s.first.log:
            await s.store.ping()
        await one.wait_idle()
        s.second.go.set()
        assert await (await two.handle("a")).result() == 2
    assert s.first.log == ["begin", "cancelled"]
    assert s.second.log == ["begin", "after"]
    assert [event.type for event in s.events][-1] is EventType.LEASE_LOST


async def test_every_write_of_a_stale_owner_is_refused():
    """I3: also if it never heard that it lost its lease."""
    s = Stopped()
    async with s.one() as one, s.two() as two:
        await one.start("work", 0, id="a")
        await s.first.begun.wait()
        await s.taken_over(two)
        s.first.go.set()
        await one.wait_idle()
        assert s.first.log == ["begin"]
        assert EventType.LEASE_LOST in [event.type for event in s.events]
        assert EventType.STEP_COMPLETED not in [event.type for event in s.events]
        head = (await s.store.load("a")).head
        assert (head.step, head.owner) == (0, two.owner)
        s.second.go.set()
        assert await (await two.handle("a")).result() == 2
        assert await (await one.handle("a")).result() == 2


async def test_a_stale_owner_cannot_pause_or_release():
    s = Stopped()
    async with s.one() as one, s.two() as two:
        run = await one.start("work", 0, id="a")
        await s.first.begun.wait()
        await run.pause(interrupt=True, hold=False)
        stale = one.resting["a"]
        s.clock.advance(31)
        await two.resume("a")
        await s.second.begun.wait()
        with pytest.raises(LeaseLostError):
            await s.store.save(Save(id="a", head=attrs.evolve(stale, owner=None, revision=stale.revision + 1)))
        s.second.go.set()
        assert await (await two.handle("a")).result() == 2


async def test_a_blocked_event_loop_keeps_its_lease():
    """A step that computes for longer than the lease lasts is still its owner's."""
    registry = StepRegistry()
    config = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=0.3)
    store = MemoryCheckpointStore()
    calls = []

    @registry.step
    async def compute(state: int) -> int:
        calls.append(1)
        time.sleep(1.0)
        return state + 1

    registry.workflow("work", [compute])
    async with Executor(registry, store=store, config=config) as executor:
        run = await executor.start("work", 0)
        assert await run.result() == 1
        owners = await store.owners()
        assert [owner.remaining > 0 for owner in owners] == [True]
    assert calls == [1]


async def test_an_owner_that_the_store_forgot_registers_again_and_keeps_what_is_still_its_own():
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    program = Program()
    async with Executor(program.registry, store=store, clock=clock) as executor:
        run = await executor.start("work", 0, id="a")
        await program.begun.wait()
        await store.unregister(executor.owner)
        clock.advance(6)
        while not await store.owners():
            await store.ping()
        program.go.set()
        assert await run.result() == 2
    assert program.log == ["begin", "after"]


async def test_leaving_gives_the_lease_back():
    store = MemoryCheckpointStore()
    async with Executor(StepRegistry(), store=store) as executor:
        assert [owner.id for owner in await store.owners()] == [executor.owner]
    assert store.backend.owners() == []


async def test_a_paused_execution_whose_owner_lost_it_is_no_longer_its_own():
    s = Stopped()
    async with s.one() as one, s.two() as two:
        run = await one.start("work", 0, id="a")
        await s.first.begun.wait()
        await run.pause(interrupt=True)
        assert "a" in one.resting
        s.clock.advance(31)
        await two.resume("a")
        await s.second.begun.wait()
        s.standing.advance(40)
        while "a" in one.resting:
            await s.store.ping()
        s.second.go.set()
        assert await (await two.handle("a")).result() == 2
