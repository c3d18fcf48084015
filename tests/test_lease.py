"""Ownership: kept by a thread of its own, lost only by fencing, and what is lost stops."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
from structlog.testing import capture_logs

from longrun import (
    EventType,
    Executor,
    ExecutorConfig,
    LeaseLostError,
    MemoryCheckpointStore,
    RetryPolicy,
    StepContext,
    StepRegistry,
)
from longrun.lease import LeaseKeeper, gone
from longrun.life import LifeLock
from longrun.records import UNFINISHED
from longrun.stored import Claim, Owner, Save
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, ManualClock
from tests.crashing import PATIENCE


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


async def test_items_that_never_wait_keep_the_lease():
    """They let the interpreter go now and then for a moment: so seldom that whoever renews the lease can take it."""
    registry = StepRegistry()
    config = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=0.4)
    store = FaultyStore(MemoryCheckpointStore())

    @registry.step
    async def compute(ctx: StepContext, state: int) -> int:
        async for _ in ctx.each("parts", range(1000)):
            began = time.monotonic()
            while time.monotonic() - began < 0.001:
                pass
        return state + 1

    registry.workflow("work", [compute])
    with capture_logs() as lines:
        async with Executor(registry, store=store, config=config) as executor:
            assert await (await executor.start("work", 0)).result() == 1
    assert "lease.lost" not in [line["event"] for line in lines]
    assert store.calls["renew"] > 10


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


async def test_a_check_of_ownership_that_failed_is_made_again_at_the_next_beat():
    clock = ManualClock()
    store = FaultyStore(MemoryCheckpointStore(clock=clock))
    program = Program()
    async with Executor(program.registry, store=store, clock=clock) as executor:
        beat = executor.config.heartbeat_interval
        await executor.start("work", 0, id="a")
        await program.begun.wait()
        dead = frozenset([executor.owner])
        await store.claim(Claim(owner="another", now=clock.now(), states=UNFINISHED, ids=("a",), dead=dead))
        store.fail("head")
        with anyio.fail_after(PATIENCE), capture_logs() as lines:
            clock.advance(executor.config.lease_ttl + 1)
            while "lease.check_failed" not in [line["event"] for line in lines]:
                await store.ping()
            assert program.log == ["begin"]
            clock.advance(beat)
            while program.log == ["begin"]:
                await store.ping()
    assert program.log == ["begin", "cancelled"]


class CutOff:
    """Two executors on one memory; the way of the first to it can be cut while its step waits for its next attempt."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        memory = MemoryBackend(clock=self.clock)
        self.way, self.store = FaultyStore(CheckpointStore(memory)), CheckpointStore(memory)
        self.log: list[str] = []
        self.events: list[EventType] = []

    def executor(self, name: str, store: CheckpointStore) -> Executor:
        registry = StepRegistry()

        async def work(ctx: StepContext, state: int) -> int:
            self.log.append(f"{name} {ctx.attempt}")
            if ctx.attempt == 1:
                raise ValueError("not yet")
            return state + 1

        registry.register("work", work, retry=RetryPolicy(max_attempts=3, initial=100, maximum=100, jitter=False))
        registry.workflow("work", ["work"])
        return Executor(registry, store=store, clock=self.clock, on_event=lambda event: self.events.append(event.type))

    async def cut(self, one: Executor) -> None:
        await one.start("work", 0, id="a")
        while (await self.store.head("a")).attempt == 0:
            await self.store.ping()
        self.way.fail("any", times=None)

    async def pass_by(self, seconds: float) -> None:
        """Let time pass, and whoever wakes then come to rest."""
        self.clock.advance(seconds)
        for _ in range(3):
            await self.store.ping()
            await anyio.wait_all_tasks_blocked()


async def test_no_step_begins_once_the_lease_has_run_out():
    """I6: whoever is cut off from the store cannot know that what it had was taken over, and cancelled."""
    c = CutOff()
    with anyio.fail_after(PATIENCE):
        async with c.store, c.executor("one", c.way) as one:
            await c.cut(one)
            async with c.executor("two", c.store) as two:
                while (await c.store.head("a")).owner != two.owner:
                    await c.pass_by(one.config.lease_ttl + 1)
                await two.cancel("a")
                await c.pass_by(200)
                assert c.log == ["one 1"]
            c.way.heal()
            while EventType.LEASE_LOST not in c.events:
                await c.pass_by(one.config.heartbeat_interval)
    assert c.log == ["one 1"]


async def test_steps_go_on_when_a_lease_that_had_run_out_is_held_again():
    """Nobody has taken anything meanwhile."""
    c = CutOff()
    with anyio.fail_after(PATIENCE):
        async with c.store, c.executor("one", c.way) as one:
            await c.cut(one)
            await c.pass_by(200)
            assert c.log == ["one 1"]
            c.way.heal()
            while c.log == ["one 1"]:
                await c.pass_by(one.config.heartbeat_interval)
            assert await (await one.handle("a")).result() == 1
    assert c.log == ["one 1", "one 2"]


async def test_a_check_of_ownership_that_takes_longer_than_the_lease_comes_to_an_end():
    """The lease is renewed meanwhile."""
    registry = StepRegistry()
    store = FaultyStore(MemoryCheckpointStore())
    config = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=0.2)
    begun, go = anyio.Event(), anyio.Event()

    async def work(state: int) -> int:
        begun.set()
        await go.wait()
        return state + 1

    async def after(state: int) -> int:
        return state + 1

    registry.workflow("work", [registry.register("work", work), registry.register("after", after)])
    async with Executor(registry, store=store, config=config) as executor:
        with anyio.fail_after(PATIENCE), capture_logs() as lines:
            run = await executor.start("work", 0)
            await begun.wait()
            store.delay("head", seconds=0.5)
            await store.unregister(executor.owner)
            while "lease.lost" not in [line["event"] for line in lines]:
                await store.ping()
            go.set()
            assert await run.result() == 2
    assert store.fired["head"] == 1
    assert [line["event"] for line in lines].count("lease.lost") == 1


async def test_a_defect_met_in_a_check_of_ownership_keeps_nobody_waiting():
    store = FaultyStore(MemoryCheckpointStore())
    program = Program()
    config = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=0.2)
    async with Executor(program.registry, store=store, config=config) as executor:
        with anyio.fail_after(PATIENCE), capture_logs() as lines:
            run = await executor.start("work", 0)
            await program.begun.wait()
            store.fail("head", error=RecursionError("a defect"))
            await store.unregister(executor.owner)
            while "lease.check_defect" not in [line["event"] for line in lines]:
                await store.ping()
            program.go.set()
            assert await run.result() == 2


async def test_behind_a_step_that_outlasted_the_lease_it_is_first_seen_whose_the_execution_is():
    """I2: its write was in time, but the next one may have been made by somebody else."""
    clock = ManualClock()
    store = FaultyStore(MemoryCheckpointStore(clock=clock))
    looks: list[int] = []

    async def work(state: int) -> int:
        looks.append(store.calls["head"])
        clock.advance(31)
        return state + 1

    async def after(state: int) -> int:
        looks.append(store.calls["head"])
        return state + 1

    registry = StepRegistry()
    registry.workflow("work", [registry.register("work", work), registry.register("after", after)])
    async with Executor(registry, store=store, clock=clock) as executor:
        with anyio.fail_after(PATIENCE):
            assert await (await executor.start("work", 0)).result() == 2
    assert looks[1] > looks[0]


@pytest.mark.parametrize(
    ("usable", "remaining", "dead"),
    [(True, 0.0, False), (True, 0.5, False), (True, -0.1, True), (False, 0.0, False), (False, -0.1, True)],
)
def test_without_a_proof_of_death_the_lease_decides(usable, remaining, dead):
    """A record that says nothing usable about a process proves nothing."""
    lock = LifeLock.acquire()
    owner = Owner(id="one", life=lock.life.to_dict() if usable else {"host": 1}, remaining=remaining)
    assert gone([owner]) == ({"one"} if dead else set())
    lock.release()


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


# --- the keeper by itself -------------------------------------------------------------------------------------------


class Kept:
    """A lease without an executor, and how often it was called lost."""

    def __init__(self, *, interval: float = 5.0, ttl: float = 15.0) -> None:
        self.clock = ManualClock()
        self.store = FaultyStore(MemoryCheckpointStore(clock=self.clock))
        self.interval, self.ttl = interval, ttl
        self.lost = 0

    async def __aenter__(self) -> Kept:
        await self.store.open()
        self.lock = LifeLock.acquire()
        self.keeper = LeaseKeeper(
            self.store, self.lock, interval=self.interval, ttl=self.ttl, lost=self.be_lost, clock=self.clock
        )
        await self.keeper.start()
        (self.thread,) = [thread for thread in threading.enumerate() if thread.name == "longrun-lease"]
        return self

    async def __aexit__(self, *error: object) -> None:
        self.keeper.stop()
        self.lock.release()
        await self.store.aclose()

    def be_lost(self) -> None:
        self.lost += 1

    async def beat(self, seconds: float | None = None) -> None:
        """Let a beat pass and its renewal be answered."""
        before = self.store.calls["renew"]
        await self.pass_by(seconds)
        with anyio.fail_after(PATIENCE):
            while self.store.calls["renew"] == before:
                await self.store.ping()
        await self.store.unregister("nobody")  # by the writer's thread too, and answered behind the renewal

    async def pass_by(self, seconds: float | None = None) -> None:
        with anyio.fail_after(PATIENCE):
            while not self.clock.waiting:
                await self.store.ping()
        self.clock.advance(self.interval if seconds is None else seconds)


async def test_a_lease_that_is_renewed_in_time_is_never_doubted():
    async with Kept() as kept:
        for _ in range(7):
            await kept.beat()
            assert [owner.remaining for owner in await kept.store.owners()] == [kept.ttl]
    assert kept.lost == 0


async def test_a_lease_lasts_to_its_last_moment():
    async with Kept(interval=15, ttl=15) as kept:
        await kept.beat()
        assert kept.lost == 0
        await kept.beat(16)
        assert kept.lost == 1


async def test_while_a_renewal_has_no_answer_none_is_queued_behind_it(monkeypatch: pytest.MonkeyPatch):
    """I16: nor does leaving wait for a pile of them."""
    asked: list[Any] = []
    async with Kept() as kept:
        monkeypatch.setattr(kept.store, "renew", lambda owner, ttl, done: asked.append(done))
        for _ in range(4):
            await kept.pass_by()
        await kept.pass_by(0)
        assert len(asked) == 1
        asked[0](True)
        await kept.pass_by()
        await kept.pass_by(0)
        assert len(asked) == 2


async def test_a_renewal_that_failed_has_renewed_nothing():
    async with Kept() as kept:
        kept.store.fail("renew", times=3)
        for _ in range(3):
            await kept.beat()
        assert kept.lost == 0, "a store that is away says nothing"
        await kept.beat()
    assert kept.store.fired["renew"] == 3
    assert kept.lost == 1


async def test_the_lock_is_touched_now_and_then(monkeypatch):
    """So that nobody who clears away old files takes it for one."""
    touched: list[LifeLock] = []

    def touch(lock: LifeLock) -> None:
        touched.append(lock)

    monkeypatch.setattr(LifeLock, "touch", touch)
    async with Kept(interval=200, ttl=600) as kept:
        for touches in (0, 0, 1, 1, 1, 2, 2):
            await kept.beat()
            assert len(touched) == touches


async def test_a_lock_that_cannot_be_touched_keeps_no_lease_from_being_renewed(monkeypatch):
    """I12: the thread that renews it goes on."""

    def touch(lock: LifeLock) -> None:
        raise OSError(errno.EIO, "the disk is sick")

    monkeypatch.setattr(LifeLock, "touch", touch)
    async with Kept(interval=600, ttl=1800) as kept:
        for _ in range(2):
            await kept.beat()
            assert kept.thread.is_alive()
            assert [owner.remaining for owner in await kept.store.owners()] == [kept.ttl]
    assert kept.lost == 0


async def test_a_keeper_ends_quietly_with_its_store():
    async with Kept() as kept:
        await kept.store.aclose()
        await kept.pass_by()
        kept.thread.join(PATIENCE)
        assert not kept.thread.is_alive()


async def test_a_keeper_that_was_stopped_has_ended_and_does_not_call_any_more(monkeypatch):
    async with Kept() as kept:
        answers: list[Any] = []
        monkeypatch.setattr(kept.store, "renew", lambda owner, ttl, done: answers.append(done))
        await kept.pass_by()
        with anyio.fail_after(PATIENCE):
            while not answers:
                await kept.store.ping()
        assert kept.thread.daemon
        kept.keeper.stop()
        assert not kept.thread.is_alive()
        answers[0](False)
        await kept.store.ping()
    assert kept.lost == 0
