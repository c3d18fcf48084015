"""A store that fails in mid-run: results are kept and written later, no step runs again, nothing is acknowledged."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from longrun import (
    Client,
    EventType,
    ExecutionBlockedError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    LongrunError,
    MemoryCheckpointStore,
    NotStorableError,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    StoreSettingsError,
    StoreUnavailableError,
    TooLargeError,
    WaitFor,
)
from longrun.stored import Claim, Loaded, Query, Save, Write
from longrun.stores.base import Answer
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, ManualClock
from longrun.testing.interposed import InterposedBackend
from tests.crashing import PATIENCE

T = TypeVar("T")


class ShakyBackend(MemoryBackend):
    """Fails the next `failures` commits that save something; if `applied`, after having made the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = self.deaf = self.childless = 0
        self.problem: LongrunError = StoreUnavailableError("shaky", "it is away")
        self.applied = False
        self.saves: list[tuple[str, int]] = []
        self.refuses: TooLargeError | None = None

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        saves = [write for write in batch if isinstance(write, Save)]
        if saves and self.failures > 0:
            self.failures -= 1
            if self.applied:
                super().commit(batch)
            raise self.problem
        if self.childless > 0 and any(write.id.endswith("~child") for write in batch):
            self.childless -= 1
            raise self.problem
        if saves and len(saves) == len(batch) and self.refuses is not None:
            refusal, self.refuses = self.refuses, None
            return [refusal] * len(batch)
        self.saves += [(save.id, save.head.revision) for save in saves]
        return super().commit(batch)

    def load(self, id: str) -> Loaded | None:
        if self.deaf > 0:
            self.deaf -= 1
            raise self.problem
        return super().load(id)


class LongWay(InterposedBackend):
    """Somebody else's way to the same store, on which the next answers are lost."""

    deaf = answered = 0

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        if call in ("load", "boundaries"):
            if self.deaf > 0:
                self.deaf -= 1
                raise StoreUnavailableError("long", "it is away")
            self.answered += 1
        return function(*args, **options)


@pytest.fixture
def backend() -> ShakyBackend:
    return ShakyBackend()


@pytest.fixture
def store(backend: ShakyBackend) -> CheckpointStore:
    return CheckpointStore(backend)


class Steps:
    def __init__(self, backend: ShakyBackend) -> None:
        self.backend = backend
        self.calls: list[int] = []
        self.registry = StepRegistry()
        self.registry.register("work", self.work)
        self.registry.workflow("work", ["work"] * 4)
        self.fail_at = 1
        self.go = anyio.Event()
        self.go.set()

    async def work(self, ctx: StepContext, state: int) -> int:
        self.calls.append(ctx.step_index)
        await self.go.wait()
        if ctx.step_index == self.fail_at and self.calls.count(self.fail_at) == 1:
            self.backend.failures = 3
        return state + 1


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("durability", ["step", "interval"])
async def test_the_step_does_not_run_again_and_nothing_is_doubled(backend, store, applied, durability):
    """I9, I10: also when the store had made the change and only its answer was lost."""
    backend.applied = applied
    steps = Steps(backend)
    events: list[Any] = []
    config = ExecutorConfig(durability=durability)
    async with Executor(steps.registry, store=store, config=config, on_event=events.append) as executor:
        run = await executor.start("work", 0, id="a")
        assert await run.result() == 4
        assert steps.calls == [0, 1, 2, 3]
        assert [row.seq for row in await executor.steps("a")] == [1, 2, 3, 4, 5]
    away = [event for event in events if event.type is EventType.STORE_UNAVAILABLE]
    assert [event.attempt for event in away] == [1, 2, 3]
    assert {event.execution_id for event in away} == {"a"}
    assert "it is away" in str(away[0].error)


async def test_a_right_that_is_taken_away_and_given_again_costs_nothing(backend, store):
    """I10: a password that is changed while executions run, say."""
    backend.problem = StoreSettingsError("shaky", "the server refuses this password")
    steps = Steps(backend)
    events: list[Any] = []
    with anyio.fail_after(PATIENCE):
        async with Executor(steps.registry, store=store, on_event=events.append) as executor:
            assert await (await executor.start("work", 0, id="a")).result() == 4
    assert steps.calls == [0, 1, 2, 3]
    assert [event.type for event in events].count(EventType.STORE_UNAVAILABLE) == 3


async def test_what_cannot_be_put_aside_now_is_when_the_store_is_back(backend, store):
    """I4: else it would stay with an owner who lives and does not run it."""
    steps = Steps(backend)
    steps.fail_at = -1
    with anyio.fail_after(PATIENCE):
        async with Executor(steps.registry, store=store) as executor:
            backend.refuses = TooLargeError("a record", 10, 5)
            steps.go = anyio.Event()
            run = await executor.start("work", 0, id="a")
            while not steps.calls:
                await anyio.lowlevel.checkpoint()
            backend.deaf = 2
            steps.go.set()
            while backend.deaf:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(ExecutionBlockedError, match="the limit is 5"):
                await run.result()


async def test_what_cannot_be_put_aside_for_whatever_reason_is_tried_again(backend, store, monkeypatch):
    """I4: whoever owns it lives, and nobody else would take it."""
    steps = Steps(backend)
    steps.fail_at = -1
    refused = 0
    commit = backend.commit

    def refusing(batch):
        nonlocal refused
        blocks = any(write.head.state is ExecutionState.BLOCKED for write in batch if isinstance(write, Save))
        if blocks and refused < 2:
            refused += 1
            return [NotStorableError("a record", "the server has no room for it")] * len(batch)
        return commit(batch)

    with anyio.fail_after(PATIENCE):
        async with Executor(steps.registry, store=store) as executor:
            backend.refuses = TooLargeError("a record", 10, 5)
            monkeypatch.setattr(backend, "commit", refusing)
            run = await executor.start("work", 0, id="a")
            with pytest.raises(ExecutionBlockedError, match="the limit is 5"):
                await run.result()
    assert refused == 2


async def test_what_ended_here_and_runs_again_after_a_failover_is_taken_up(backend, store, monkeypatch):
    """I4: a replica that lacked the last writes took the server's place. It says that this process owns what it has
    ended, and nobody else would take it."""
    steps = Steps(backend)
    steps.fail_at = -1
    broken = threading.Event()
    wait = backend.wait

    def breaking(timeout):
        if broken.is_set():
            broken.clear()
            raise StoreUnavailableError("shaky", "the connection is gone")
        return wait(timeout)

    monkeypatch.setattr(backend, "wait", breaking)
    with anyio.fail_after(PATIENCE):
        async with Executor(steps.registry, store=store) as executor:
            steps.go = anyio.Event()
            run = await executor.start("work", 0, id="a")
            while not steps.calls:
                await anyio.lowlevel.checkpoint()
            lagging = copy.deepcopy(backend._records["a"])
            steps.go.set()
            assert await run.result() == 4
            backend._records["a"] = lagging
            assert (await executor.get("a")).state is ExecutionState.RUNNING
            broken.set()
            backend.wake()
            found = await executor.handle("a")
            assert (await found.wait("completed")).state is ExecutionState.COMPLETED
    assert steps.calls == [0, 1, 2, 3] * 2


async def test_nothing_is_acknowledged_meanwhile(backend, store):
    """I10"""
    steps = Steps(backend)
    async with Executor(steps.registry, store=store) as executor:
        stream = executor.events()
        run = await executor.start("work", 0, id="a")
        told: list[str] = []
        async for event in stream:
            told.append(event.type.value)
            if event.type is EventType.STORE_UNAVAILABLE:
                backend.failures = 10**9
                assert (await run.info()).current_step == 1
                assert steps.calls == [0, 1]
                assert told.count("step_completed") == 1
            if event.attempt >= 3 and event.type is EventType.STORE_UNAVAILABLE:
                break
        assert steps.calls == [0, 1]
        assert (await run.info()).current_step == 1
        backend.failures = 0
        assert await run.result() == 4
        async for event in stream:
            told.append(event.type.value)
            if event.type is EventType.EXECUTION_COMPLETED:
                break
        assert told.count("step_completed") == 4


async def test_many_executions_wait_for_the_store_together(backend, store):
    steps = Steps(backend)
    steps.go = anyio.Event()
    async with Executor(steps.registry, store=store) as executor:
        runs = [await executor.start("work", n) for n in range(5)]
        steps.go.set()
        assert [await run.result() for run in runs] == [4, 5, 6, 7, 8]
    assert sorted(steps.calls) == sorted([0, 1, 2, 3] * 5)


async def test_progress_handed_over_while_the_store_is_away_keeps_its_order(backend, store):
    registry = StepRegistry()

    @registry.step
    async def work(ctx: StepContext, state: Any) -> Any:
        backend.failures = 2
        for n in range(20):
            ctx.local["n"] = n
            await ctx.checkpoint()
        backend.failures = 2
        ctx.local["n"] = "forced"
        await ctx.checkpoint(force=True)
        return dict(ctx.local)

    registry.workflow("work", [work])
    config = ExecutorConfig(checkpoint_interval=0)
    async with Executor(registry, store=store, config=config) as executor:
        assert await (await executor.start("work", id="a")).result() == {"n": "forced"}
    revisions = [revision for id, revision in backend.saves if id == "a"]
    assert revisions == sorted(revisions)


async def test_a_step_that_waits_for_its_child_does_not_fail_with_the_store(backend, store):
    """Neither when the child is started nor while it waits for it, with no attempt to spare."""
    registry, began = StepRegistry(), list[int]()

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def parent(ctx: StepContext, state: Any) -> Any:
        began.append(ctx.attempt)
        backend.childless = 2
        child = await ctx.start_child("child", key="child")
        return await child.result()

    @registry.step
    async def ask(state: Any) -> Any:
        return WaitFor("answer")

    @registry.step
    async def answer(ctx: StepContext, state: Any) -> Any:
        return ctx.signal

    registry.workflow("parent", [parent])
    registry.workflow("child", [ask, answer])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("parent", id="p")
        with anyio.fail_after(PATIENCE):
            while not await store.exists("p~1~child"):
                await anyio.lowlevel.checkpoint()
            await (await executor.handle("p~1~child")).wait("waiting")
            backend.deaf = 5
            while backend.deaf:
                executor.look()
                await anyio.lowlevel.checkpoint()
            await executor.signal("p~1~child", "answer", 42)
            assert await run.result() == 42
    assert began == [1]


async def test_who_waits_for_an_execution_elsewhere_follows_a_store_that_comes_back(backend, store):
    registry, way = StepRegistry(), LongWay(backend)

    @registry.step
    async def ask(state: Any) -> Any:
        return WaitFor("answer")

    registry.workflow("work", [ask])
    async with Executor(registry, store=store) as executor, Client(CheckpointStore(way)) as client:
        await (await executor.start("work", id="a")).wait("waiting")
        way.deaf = 1
        with pytest.raises(StoreUnavailableError):  # the first question is answered, or it is an error
            await client.handle("a").result()
        told: list[Any] = []
        way.answered = 0

        async def follow() -> None:
            told.extend([event.type async for event in client.watch("a")])

        async def wait() -> None:
            told.append(await client.handle("a").result())

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                tasks.start_soon(wait)
                while way.answered < 3:  # to both: the head to each, and the rows
                    await anyio.lowlevel.checkpoint()
                way.deaf = 6
                while way.deaf:
                    client.look()
                    await anyio.lowlevel.checkpoint()
                await executor.signal("a", "answer")
    assert sorted(map(str, told)) == ["None", "execution_completed"]


async def test_control_waits_for_the_store_and_then_takes_effect(backend, store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def work(state: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="a")
        await begun.wait()
        backend.failures = 3
        await run.cancel()
        assert (await run.info()).state == "cancelled"
    assert backend.failures == 0


async def test_a_drain_with_a_store_that_stays_away_ends_and_the_next_start_resumes(backend, store, monkeypatch):
    for module in ("crew", "drain"):
        monkeypatch.setattr(f"longrun.{module}.LAST_WORDS", 0.1)
    registry = StepRegistry()
    calls = []

    @registry.step
    async def one(state: int) -> int:
        calls.append("one")
        backend.failures = 10**9
        return state + 1

    @registry.step
    async def two(state: int) -> int:
        calls.append("two")
        return state + 1

    registry.workflow("work", [one, two])
    with capture_logs() as lines:
        async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.1)) as executor:
            stream = executor.events()
            await executor.start("work", 0, id="a")
            async for event in stream:
                if event.type is EventType.STORE_UNAVAILABLE:
                    break
    backend.failures = 0
    assert [line["execution"] for line in lines if line["event"] == "store.does_not_answer"] == ["a"]
    assert (await store.load("a")).head.step == 0
    quiet = StepRegistry()

    async def one_again(state: int) -> int:
        calls.append("one")
        return state + 1

    quiet.register("one", one_again)
    quiet.register("two", two)
    quiet.workflow("work", ["one", "two"])
    async with Executor(quiet, store=store) as executor:
        assert await (await executor.handle("a")).result() == 2
    assert calls == ["one", "one", "two"]


async def test_a_write_that_is_refused_for_good_blocks_that_execution_alone(backend, store):
    steps = Steps(backend)
    steps.fail_at = -1
    async with Executor(steps.registry, store=store) as executor:
        backend.refuses = TooLargeError("a record", 10, 5)
        run = await executor.start("work", 0, id="a")
        with pytest.raises(ExecutionBlockedError, match="the limit is 5"):
            await run.result()
        assert await (await executor.start("work", 0, id="b")).result() == 4
        await run.resume()
        assert await run.result() == 4


@pytest.mark.parametrize("applied", [False, True])
async def test_a_claim_whose_answer_is_lost_is_looked_for(backend, store, applied):
    """I9: it may be ours by now, and nobody else may take it."""
    steps = Steps(backend)
    steps.fail_at = -1
    async with Executor(steps.registry, store=store) as executor:
        await executor.submit("work", 0, id="a")
        claim = backend.claim
        lost: list[int] = []

        def deaf(request: Any) -> Any:
            if request.ids == ("a",) and not lost:
                lost.append(1)
                if applied:
                    claim(request)
                raise StoreUnavailableError("shaky", "the answer was lost")
            return claim(request)

        backend.claim = deaf
        with pytest.raises(StoreUnavailableError):
            await executor.start("work", 0, id="a")
        if not applied:
            await executor.start("work", 0, id="a")
        assert await (await executor.handle("a")).result() == 4
    assert steps.calls == [0, 1, 2, 3]


async def test_a_sweep_that_fails_is_made_again(backend, store):
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    registry.workflow("ask", [ask])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask", 5)
        await run.wait("waiting")
        claim: Any = backend.claim
        failures = [1, 1, 1]

        def away(asked: Claim) -> Any:
            if failures:
                failures.pop()
                raise StoreUnavailableError("shaky", "it is away") if failures else ValueError("a defect")
            return claim(asked)

        backend.claim = away
        await run.signal("go")
        while failures:
            executor.stir()
            await store.ping()
        executor.stir()
        assert await run.result() == 5


@pytest.mark.parametrize("trouble", ["away", "starting"])
async def test_what_rests_here_is_woken_although_that_failed_when_its_time_came(trouble):
    clock = ManualClock()
    store = FaultyStore(MemoryCheckpointStore(clock=clock))
    registry = StepRegistry()

    async def nap(state: Any) -> Sleep:
        return Sleep(10, state)

    async def use(state: Any) -> Any:
        return state

    registry.workflow("nap", [nap, use])
    async with Executor(registry, store=store, clock=clock) as executor:
        await (await executor.start("nap", 7, id="x")).wait("waiting")
    async with Executor(registry, store=store, clock=clock) as executor:
        run = await executor.handle("x")
        await run.signal("later")  # nobody waits for it: the execution stays here until its time has come
        while run.id not in executor.resting:
            await executor.sweeper.once()
            await executor.wait_idle()
        if trouble == "away":
            store.fail("load")
        else:
            executor.starting.add(run.id)
        looked = store.calls["load"]
        clock.advance(10)
        while store.calls["load"] == looked:
            await store.ping()
        executor.starting.discard(run.id)
        clock.advance(60)  # until the next sweep
        assert await run.result() == 7


async def test_what_this_program_took_from_itself_without_hearing_of_it_goes_on():
    """A parking write is made and its answer lost; while it waits to be repeated, the sweep claims what is free now,
    and that answer is lost too. The runner then finds that it has lost its execution: to its own program."""
    clock = ManualClock()
    store = FaultyStore(MemoryCheckpointStore(clock=clock))
    registry = StepRegistry()

    async def nap(state: Any) -> Sleep:
        return Sleep(0, state)

    async def use(state: Any) -> Any:
        return state

    registry.workflow("nap", [nap, use])
    with anyio.fail_after(20):
        async with Executor(registry, store=store, clock=clock) as executor:
            store.lose_answer("commit", 2)  # the first creates it
            store.lose_answer("claim")
            run = await executor.start("nap", 7)
            while not store.fired["claim"]:
                with contextlib.suppress(StoreUnavailableError):
                    await executor.sweeper.once()
            await executor.sweeper.once()
            while executor.runners:
                clock.advance(1)
                await store.ping()
            clock.advance(60)  # until the next sweep
            assert await run.result() == 7


async def test_a_store_that_cannot_be_opened_lets_nobody_in():
    class Closed(MemoryBackend):
        def open(self) -> None:
            raise StoreUnavailableError("closed", "no door")

    with pytest.raises(StoreUnavailableError, match="no door"):
        async with Executor(StepRegistry(), store=CheckpointStore(Closed())):
            raise AssertionError


async def test_a_store_that_fails_at_the_first_pass_lets_nobody_in_and_leaves_nothing(store, backend):
    def away(query: Any) -> Any:
        raise StoreUnavailableError("shaky", "it is away")

    find, backend.find = backend.find, away
    with pytest.raises(StoreUnavailableError, match="it is away"):
        async with Executor(StepRegistry(), store=store):
            raise AssertionError
    backend.find = find
    assert backend.owners() == []


async def test_the_log_says_what_is_wrong_with_the_store(store, backend):
    registry = StepRegistry()

    async def work(state: Any) -> Any:
        backend.failures = 1
        return state

    with capture_logs() as lines:
        async with Executor(registry, store=store) as executor:
            await (await executor.start([work], 1, id="a")).result()
    (line,) = [line for line in lines if line["event"] == "store.unavailable"]
    assert (line["execution"], line["problem"]) == ("a", "the shaky store does not answer: it is away")


async def test_who_only_reads_keeps_no_program_from_ending(store):
    """Threads that are no daemons would be waited for at the end of a program that was torn apart by Ctrl-C."""
    async with store:
        await store.ping()
        readers = [thread for thread in threading.enumerate() if thread.name.startswith("longrun-reader")]
        assert readers
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("longrun-"))


class SilentBackend(MemoryBackend):
    """Takes connections, so to speak, and from some moment on answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False
        self.waiting = 0
        self.closed = False
        self.go = threading.Event()

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        self.hang()
        return super().commit(batch)

    def load(self, id: str) -> Loaded | None:
        self.hang()
        return super().load(id)

    def count(self, query: Query) -> dict[ExecutionState, int]:
        self.hang()
        return super().count(query)

    def close(self) -> None:
        self.closed = True
        super().close()

    def hang(self) -> None:
        if self.silent:
            self.waiting += 1
            assert self.go.wait(PATIENCE)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("crew", "drain"):
        monkeypatch.setattr(f"longrun.{module}.LAST_WORDS", 0.05)
    monkeypatch.setattr("longrun.stores.store.PATIENCE", 0.05)


async def test_who_is_cancelled_does_not_wait_for_a_read_that_is_never_answered():
    backend = SilentBackend()
    async with CheckpointStore(backend) as store:
        backend.silent = True
        with anyio.fail_after(PATIENCE), anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.load, "a")
                while not backend.waiting:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert not backend.go.is_set()
        backend.go.set()
    assert backend.closed, "a reader that has answered keeps nothing open"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("busy", [False, True])
async def test_a_store_that_answers_nothing_any_more_can_be_left(busy):
    """It is not closed under the hands of whoever waits for it, and cannot be used again."""
    backend = SilentBackend()
    store = CheckpointStore(backend)
    steps = Steps(ShakyBackend())
    steps.fail_at = -1
    steps.go = anyio.Event()
    config = ExecutorConfig(drain_timeout=0)
    with anyio.fail_after(PATIENCE), capture_logs() as logs:
        async with Executor(steps.registry, store=store, config=config) as executor:
            if busy:
                await executor.start("work", 0, id="a")
                while not steps.calls:
                    await anyio.lowlevel.checkpoint()
            backend.silent = True
            steps.go.set()
        assert not backend.closed
        assert "store.left_behind" in {entry["event"] for entry in logs}
        with pytest.raises(StoreUnavailableError, match="make another"):
            await store.open()
    backend.go.set()
