"""Sweeps: what is left to others, when the next look is due, and that one in trouble costs the others nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import attrs
import pytest

from longrun import (
    CorruptDataError,
    ExecutionNotFoundError,
    Executor,
    ExecutorConfig,
    KeyUnavailableError,
    MemoryCheckpointStore,
    Sleep,
    StepContext,
    StepRegistry,
    StoreUnavailableError,
    WaitFor,
)
from longrun.client import Client
from longrun.fitness import unusable
from longrun.lease import check_ownership
from longrun.records import ExecutionState
from longrun.registry import AD_HOC
from longrun.seal import Seal
from longrun.stored import Claim, Head, Loaded, Query, Stored
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.sweep import AT_ONCE, HIDDEN, SHORTEST
from longrun.testing import ManualClock
from longrun.testing.interposed import InterposedBackend
from longrun.testing.samples import create, definition, head, owned
from longrun.worker import Worker
from tests.crashing import PATIENCE, CrashableExecutor, crash, registry_of

T = TypeVar("T")
NOW = 100.0
HEARTBEAT = 5.0
QUIET = ExecutorConfig(auto_resume=False)


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


class Program:
    """One step, which waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = registry_of(self.wait)

    async def wait(self, state: int) -> int:
        self.begun.set()
        await self.go.wait()
        return state + 1


@pytest.fixture
async def executor(store: MemoryCheckpointStore) -> AsyncIterator[Executor]:
    async with Executor(Program().registry, store=store, config=QUIET) as executor:
        yield executor


async def test_a_death_on_this_machine_is_not_waited_for_until_the_next_heartbeat(store: MemoryCheckpointStore) -> None:
    """I4: heartbeats are an hour apart here, and nothing rings."""
    first, second = Program(), Program()
    config = ExecutorConfig(heartbeat_interval=3600.0, lease_ttl=36_000.0)
    async with Executor(second.registry, store=store, config=config) as living:
        async with CrashableExecutor(first.registry, store=store, config=config) as dying:
            await dying.start("work", 1, id="a")
            await first.begun.wait()
            living.sweeper.dead._look_at = -1.0
            assert await living.sweeper.dead.look() == frozenset()
            await crash(dying)
        with anyio.fail_after(PATIENCE):
            await second.begun.wait()
            second.go.set()
            assert await (await living.handle("a")).result() == 2


async def test_what_a_living_executor_runs_is_left_to_it(store: MemoryCheckpointStore, executor: Executor) -> None:
    """I3: whoever wants to take it over is told so."""
    program = Program()
    async with Executor(program.registry, store=store, config=QUIET) as owner:
        handle = await owner.start("work", 1, id="a")
        await program.begun.wait()
        assert await executor.sweeper.take_over(await store.load("a")) is False
        assert executor.runners == {}
        program.go.set()
        assert await handle.result() == 2


@pytest.mark.parametrize(
    ("due", "taken", "seconds"),
    [
        (None, 0, HEARTBEAT),
        (NOW + 3, 0, 3.0),
        (NOW + 30, 0, HEARTBEAT),
        (NOW - 9, 1, SHORTEST),
        (NOW - 9, 0, HIDDEN),
        (NOW, 0, HIDDEN),
    ],
)
async def test_when_the_next_sweep_is_due(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, due: float | None, taken: int, seconds: float
) -> None:
    """At the next moment; what is due and for others to take makes nobody look without end."""

    async def next_due() -> float | None:
        return due

    executor._sweeping.cancel()  # else its own sweeps ring the timer
    monkeypatch.setattr(executor.store, "next_due", next_due)
    assert await executor.sweeper._until_due(HEARTBEAT, NOW, taken) == seconds
    executor.sweeper.gates.moment = NOW + 0.75
    assert await executor.sweeper._until_due(HEARTBEAT, NOW, taken) == min(seconds, 0.75)
    executor.sweeper._timers.append((NOW + 0.5, "a"))
    assert await executor.sweeper._until_due(HEARTBEAT, NOW, taken) == min(seconds, 0.5)
    executor.sweeper._timers.clear()


async def test_changes_after_a_rest_are_seen_at_once_and_a_flood_of_them_is_not(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaths: list[float] = []
    enough, sleep = anyio.Event(), anyio.sleep

    async def noted(seconds: float) -> None:
        if seconds in (0, SHORTEST):  # of the others that sleep, none does so for that long
            breaths.append(seconds)
            if len(breaths) > 3 * AT_ONCE:
                enough.set()
        await sleep(seconds)

    async def once() -> int:
        executor.stir()
        return 0

    with anyio.fail_after(PATIENCE):
        await anyio.sleep(2 * AT_ONCE * SHORTEST)
        monkeypatch.setattr(anyio, "sleep", noted)
        monkeypatch.setattr(executor.sweeper, "once", once)
        executor.stir()
        await enough.wait()
    executor._sweeping.cancel()
    assert breaths[: AT_ONCE - 1] == [0] * (AT_ONCE - 1)
    assert breaths.count(SHORTEST) > AT_ONCE


async def test_who_knows_no_workflow_looks_at_the_heartbeat_alone(store: MemoryCheckpointStore) -> None:
    async with Executor(StepRegistry(), store=store, config=QUIET) as idle:
        await store.create(create("a"))
        assert await store.next_due() == 0.0
        assert await idle.sweeper._until_due(HEARTBEAT, NOW, 0) == HEARTBEAT


async def test_a_timer_of_what_no_longer_rests_here_goes(executor: Executor) -> None:
    executor.sweeper.set_timer(head(ExecutionState.WAITING, due=0.0), "gone")
    await executor.sweeper._ring()
    assert executor.sweeper._timers == []


async def test_what_cannot_be_given_back_is_said(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(save: object) -> None:
        raise StoreUnavailableError("memory", "it is away")

    monkeypatch.setattr(executor.store, "save", away)
    assert await executor.sweeper.claims.release("a", head(owner=executor.owner)) is False


async def test_what_is_left_at_a_gate_is_looked_at_again_at_once(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next heartbeat: there may be room already."""
    fields = {"owner": executor.owner, "fence": 1, "due": 1e12}
    new = create("a", ExecutionState.WAITING, head_fields=fields, workflow="work")
    await executor.store.create(new)
    executor.resting["a"] = new.head
    stirred: list[None] = []
    monkeypatch.setattr(executor, "stir", lambda: stirred.append(None))
    assert await executor.sweeper._leave_at_gate("a") is True
    assert (await executor.store.load("a")).head.owner is None
    assert "a" not in executor.resting
    assert stirred


async def test_steps_that_cannot_be_read_are_not_known(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: a pass at start goes on to the next."""
    await executor.store.create(create("a", workflow=AD_HOC + "x"))
    (stored,) = await executor.store.find(Query())

    async def damaged(id: str) -> Loaded:
        raise CorruptDataError("execution 'a'", "its list of steps cannot be read")

    monkeypatch.setattr(executor.store, "load", damaged)
    assert await executor.sweeper.claims.knows(stored) is False


async def test_what_was_given_unheard_and_cannot_be_read_is_blocked(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: the answer of a claim was lost; what it had given is looked for, and nobody waits for it."""
    await executor.store.create(owned("a", executor.owner, workflow="work"))

    async def damaged(*asked: object) -> list[Loaded]:
        raise CorruptDataError("execution 'a'", "no state of it is readable")

    monkeypatch.setattr(executor.sweeper.claims, "take", damaged)
    with anyio.fail_after(PATIENCE):
        await executor.sweeper.claims.find_lost()
    (stored,) = await executor.store.find(Query())
    assert (stored.head.state, stored.head.owner) == (ExecutionState.BLOCKED, None)
    assert "no state" in str(stored.head.reason)
    assert executor.sweeper.claims.unsure is False


async def test_who_comes_while_a_start_looks_around_is_not_robbed(
    store: MemoryCheckpointStore, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: what is parked under an owner that was not there a moment ago is not what a dead one left."""
    usual: Any = executor.sweeper.dead.holders
    async with contextlib.AsyncExitStack() as stack:

        async def holders() -> frozenset[str]:
            found: frozenset[str] = await usual()
            late = await stack.enter_async_context(Executor(Program().registry, store=store, config=QUIET))
            fields = {"owner": late.owner, "fence": 1, "due": 1e12}
            await store.create(create("a", ExecutionState.WAITING, head_fields=fields, workflow="work"))
            return found | {late.owner}

        monkeypatch.setattr(executor.sweeper.dead, "holders", holders)
        await executor.auto_resume_all()
        assert (await store.load("a")).head.fence == 1


async def test_what_is_behind_its_last_step_needs_no_state(executor: Executor) -> None:
    """I2: only its end was not stored; a state that cannot be decoded any more does not matter."""
    await executor.store.create(create("a", head_fields={"step": 3}, data=b"no JSON"))
    assert unusable(executor, await executor.store.load("a"))[0] is None


async def test_no_more_is_taken_than_there_is_room_for(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many queues are asked one after the other."""
    asked: list[int] = []

    async def take(part: Claim) -> int:
        asked.append(part.limit)
        return 2

    claim = Claim(owner=executor.owner, now=NOW, states=frozenset({ExecutionState.RUNNING}), limit=4)
    monkeypatch.setattr(executor.sweeper.gates, "split", lambda claim: [(None, claim)] * 3)
    monkeypatch.setattr(executor.sweeper, "_take_open", take)
    assert await executor.sweeper._take_due(claim) == 4
    assert asked == [4, 2]


async def test_what_somebody_else_took_while_it_rested_here_is_let_go(executor: Executor) -> None:
    """I3: its timer rings, and the store knows another owner."""
    await executor.store.create(owned("a", "other", ExecutionState.WAITING, workflow="work"))
    resting = executor.resting["a"] = (await executor.store.load("a")).head
    assert resting.owner == "other"
    assert await executor.sweeper._woken("a") is True
    assert "a" not in executor.resting


async def test_ctrl_c_hurries_a_drain_and_nothing_else(executor: Executor) -> None:
    hurried = []
    for executor.draining in (False, True):
        executor._ctrl_c()
        hurried.append(executor._drain._hurried)
    executor.draining = False
    assert hurried == [False, True]


async def test_a_queue_with_very_many_that_are_not_due_is_tried_now_and_then(executor: Executor) -> None:
    gates = executor.sweeper.gates
    assert gates._may_try("q") is True
    assert gates._may_try("q") is False
    assert gates._may_try("other") is True


async def test_one_that_is_gone_does_not_hide_the_loss_of_the_others(
    store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: an owner that slept past its lease looks at each of what it had."""
    program = Program()
    async with Executor(program.registry, store=store, config=QUIET) as executor:
        for id in ("deleted", "taken", "unreadable"):
            await executor.start("work", 1, id=id)
        usual = store.head

        async def head(id: str) -> Head:
            if id == "deleted":
                raise ExecutionNotFoundError(id)
            if id == "unreadable":
                raise CorruptDataError(id, "no")
            found = await usual(id)
            return attrs.evolve(found, fence=found.fence + 1)

        runners = dict(executor.runners)
        monkeypatch.setattr(store, "head", head)
        await check_ownership(executor, executor.keeper)
        with anyio.fail_after(PATIENCE):
            for id in ("deleted", "taken"):
                await runners[id].ended.wait()
        assert list(executor.runners) == ["unreadable"], "its next write tells"
        monkeypatch.undo()
        program.go.set()
        assert await (await executor.handle("unreadable")).result() == 2


async def test_an_id_that_is_deleted_as_it_is_found_taken_is_created(
    store: MemoryCheckpointStore, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, gone = store.load, [0]

    async def load(id: str) -> Loaded:
        if not gone[0]:
            gone[0] += 1
            assert await store.delete([id]) == [True]
        return await usual(id)

    await store.create(create("a", ExecutionState.COMPLETED, workflow="work"))
    monkeypatch.setattr(store, "load", load)
    await executor.submit("work", 1, id="a", delay=3600)
    assert (gone, (await executor.get("a")).state) == ([1], ExecutionState.INITIALIZED)


async def test_steps_of_what_is_deleted_in_this_moment_are_not_known(executor: Executor) -> None:
    found = Stored(definition=definition("gone", workflow=f"{AD_HOC}x"), head=head(ExecutionState.RUNNING))
    assert not await executor.sweeper.claims.knows(found)


# --- keys that cannot be had ----------------------------------------------------------------------------------------


class Keys:
    """Two keys, of which whoever keeps them may refuse the old one."""

    def __init__(self) -> None:
        self.current, self.refuses = "old", False

    def __call__(self, key_id: str | None) -> tuple[str, bytes]:
        name = key_id or self.current
        if self.refuses and name == "old":
            raise PermissionError("key 'old' is disabled")
        return name, (name.encode() * 32)[:32]

    def store(self) -> CheckpointStore:
        return CheckpointStore(MemoryBackend(), seal=Seal(key=self))


OFTEN = ExecutorConfig(heartbeat_interval=0.1)


async def test_a_key_that_cannot_be_had_keeps_no_other_execution_waiting() -> None:
    """What comes before and after it is run; when its key is back, it is too."""
    keys, program = Keys(), Program()
    store = keys.store()
    program.go.set()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.submit("work", 1, id="bad")
            keys.current, keys.refuses = "new", True
            early = await client.submit("work", 2, id="early")
            async with Worker(program.registry, store=store, config=OFTEN):
                assert await early.result() == 3
                assert await (await client.submit("work", 3, id="late")).result() == 4
                states = {stored.definition.id: stored.head.state for stored in await store.find(Query())}
                assert states["bad"] == "initialized", "it is neither lost nor blocked"
                keys.refuses = False
                assert await client.handle("bad").result() == 2


async def leave_two(keys: Keys) -> CheckpointStore:
    """What a dead executor left: `bad`, which is under the old key, and `good`; from now on the old one is refused."""
    store, program = keys.store(), Program()
    async with CrashableExecutor(program.registry, store=store, config=OFTEN) as dying:
        await dying.start("work", 1, id="bad")
        keys.current = "new"
        await dying.start("work", 2, id="good")
        await program.begun.wait()
        await crash(dying)
    keys.refuses = True
    return store


async def test_an_executor_starts_although_a_key_cannot_be_had() -> None:
    """I5: what needs another key is resumed at once, and what needs this one when it is back."""
    keys, program = Keys(), Program()
    program.go.set()
    with anyio.fail_after(PATIENCE):
        store = await leave_two(keys)
        async with Executor(program.registry, store=store, config=OFTEN) as executor:
            assert await (await executor.handle("good")).result() == 3
            states = {stored.definition.id: stored.head.state for stored in await store.find(Query())}
            assert states["bad"] == "running"
            keys.refuses = False
            assert await (await executor.handle("bad")).result() == 2


async def test_what_is_skipped_for_its_key_is_told_with_the_name_of_the_key() -> None:
    keys, program = Keys(), Program()
    program.go.set()
    with anyio.fail_after(PATIENCE):
        store = await leave_two(keys)
        async with Executor(program.registry, store=store, config=QUIET) as executor:
            report = await executor.auto_resume_all()
            assert (report.resumed, report.blocked, [*report.skipped]) == (("good",), {}, ["bad"])
            assert "key 'old'" in report.skipped["bad"]


async def test_what_the_dead_had_parked_under_a_key_that_cannot_be_had_keeps_nobody_from_starting() -> None:
    keys, program = Keys(), Program()
    store = keys.store()
    program.go.set()
    with anyio.fail_after(PATIENCE):
        async with store:
            fields = {"owner": "dead", "fence": 1, "due": 0.0}
            parked = create("bad", ExecutionState.WAITING, head_fields=fields, workflow="work", data=b"1")
            await store.create(attrs.evolve(parked, definition=attrs.evolve(parked.definition, steps=("wait",))))
            keys.current, keys.refuses = "new", True
            async with Executor(program.registry, store=store, config=OFTEN) as executor:
                assert await (await executor.start("work", 2, id="good")).result() == 3
                keys.refuses = False
                assert await (await executor.handle("bad")).result() == 2


async def test_steps_whose_key_cannot_be_had_are_not_known(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    await executor.store.create(create("a", workflow=AD_HOC + "x"))
    (stored,) = await executor.store.find(Query())
    monkeypatch.setattr(executor.store, "load", _refused)
    assert await executor.sweeper.claims.knows(stored) is False


async def test_what_rests_here_under_a_key_that_cannot_be_had_is_woken_later(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timers behind its own ring all the same."""
    executor.resting["a"] = head(ExecutionState.WAITING, owner=executor.owner, due=0.0)
    executor.sweeper._timers += [(0.0, "a"), (1.0, "gone")]
    monkeypatch.setattr(executor.store, "load", _refused)
    before = executor.clock.now()
    await executor.sweeper._ring()
    ((moment, id),) = executor.sweeper._timers
    assert id == "a"
    assert moment >= before + HIDDEN
    assert "a" in executor.resting
    executor.sweeper._timers.clear()
    executor.resting.clear()


async def _refused(id: str) -> Loaded:
    raise KeyUnavailableError(id, "old", "PermissionError")


@pytest.mark.parametrize("held", [False, True])
async def test_what_was_paused_goes_on_although_its_key_was_away_at_the_start(held: bool) -> None:
    """The pass has claimed it by then: when it is found again, it is known why. What is held was not asked for."""
    registry, backend, away = StepRegistry(), MemoryBackend(), False

    def key(key_id: str | None) -> tuple[str, bytes]:
        if key_id is not None and away:
            raise ConnectionError
        return "key", b"k" * 32

    @registry.step
    async def stay(ctx: StepContext, state: int) -> int:
        while state == 1:
            await ctx.checkpoint()
        return state

    registry.workflow("w", [stay])
    async with Executor(registry, store=CheckpointStore(backend, seal=Seal(key=key))) as executor:
        await executor.start("w", 1, id="a")
        await executor.pause("a", hold=held)
        await executor.pause("a", hold=held)
    away = True
    async with Executor(registry, store=CheckpointStore(backend, seal=Seal(key=key))) as executor:
        assert (await executor.auto_resume_all()).resumed == ()
        away = False
        with anyio.fail_after(PATIENCE):
            while executor.sweeper.claims.unsure:
                await executor.sweeper.once()
            state = "paused" if held else "running"
            assert (await (await executor.handle("a")).wait(state)).state == state
        assert executor.sweeper.claims.waking == set()


# --- lists of steps, whose names nobody knows beforehand --------------------------------------------------------------


class Lists:
    """Steps that belong to no workflow: each execution is started with a list of them."""

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.begun, self.go = anyio.Event(), anyio.Event()
        for step in (self.rest, self.ask, self.stay, self.end):
            self.registry.register(step.__name__, step)

    async def rest(self, state: int) -> Sleep:
        return Sleep(10.0, state)

    async def ask(self, state: int) -> WaitFor:
        return WaitFor("answer", state)

    async def stay(self, state: int) -> int:
        self.begun.set()
        await self.go.wait()
        return state

    async def end(self, state: int) -> int:
        return state + 1


async def test_a_list_of_steps_is_woken_by_the_next_program(store: MemoryCheckpointStore) -> None:
    """I4: it was parked by a program that has ended, and this one was never asked for such a list."""
    clock = ManualClock()
    async with Executor(Lists().registry, store=store, clock=clock) as first:
        for id, steps in (("sleeps", ["rest", "end"]), ("waits", ["ask", "end"])):
            run = await first.start(steps, 1, id=id)
            await run.wait("waiting")
    with anyio.fail_after(PATIENCE):
        async with Executor(Lists().registry, store=store, clock=clock) as second:
            await (await second.handle("waits")).signal("answer")
            clock.advance(11.0)
            for id in ("sleeps", "waits"):
                assert await (await second.handle(id)).result() == 2


async def test_a_list_of_steps_is_taken_over_from_the_dead(store: MemoryCheckpointStore) -> None:
    """I4: by somebody who lived already when its owner died."""
    first, second = Lists(), Lists()
    second.go.set()
    often = ExecutorConfig(heartbeat_interval=0.2)
    with anyio.fail_after(PATIENCE):
        async with Executor(second.registry, store=store, config=often) as living:
            async with CrashableExecutor(first.registry, store=store) as dying:
                await dying.start(["stay", "end"], 1, id="a")
                await first.begun.wait()
                await crash(dying)
            assert await (await living.handle("a")).result() == 2


async def test_a_list_of_steps_is_run_by_any_worker_that_knows_them(store: MemoryCheckpointStore) -> None:
    strange = StepRegistry()
    strange.register("other", Lists().end)
    with anyio.fail_after(PATIENCE):
        async with Executor(Lists().registry, store=store, config=QUIET) as executor, Worker(strange, store=store):
            run = await executor.submit(["end", "end"], 1)
            async with Worker(Lists().registry, store=store):
                assert await run.result() == 3


async def test_lists_of_steps_are_looked_for_now_and_then(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due may wait for room in its queue while very many sweeps come by: each look is a page."""
    looks = []

    async def learn() -> bool:
        looks.append(executor.clock.monotonic())
        return len(looks) == 1

    executor._sweeping.cancel()
    monkeypatch.setattr(executor.sweeper.claims, "learn", learn)
    monkeypatch.setattr(executor, "clock", ManualClock())
    assert [await executor.sweeper._learns() for _ in range(5)] == [True, False, False, False, False]
    assert len(looks) == 2
    executor.clock.advance(HIDDEN)  # type: ignore[attr-defined]
    await executor.sweeper._learns()
    assert len(looks) == 3


async def test_a_list_with_a_step_that_is_not_known_is_read_once(
    store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again when more steps are registered."""
    lists, read = Lists(), list[str]()
    async with Executor(lists.registry, store=store) as executor:
        executor._sweeping.cancel()
        load, never = store.load, ("never", "end")
        await store.create(create("a", ExecutionState.RUNNING, workflow=f"{AD_HOC}never,end", steps=never))

        async def loading(id: str) -> Loaded:
            read.append(id)
            return await load(id)

        monkeypatch.setattr(store, "load", loading)
        for _ in range(3):
            assert await executor.sweeper.claims.learn() is False
            assert await executor.sweeper.claims.learn() is False  # behind the last page
        assert read == ["a"]
        lists.registry.register("never", lists.rest)
        assert await executor.sweeper.claims.learn() is True


# --- what was left on its way to the store ----------------------------------------------------------------------------


class HeldBackend(InterposedBackend):
    """Keeps one call of the writer waiting until it is let go, and says when somebody looks for executions."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.held: str | None = None
        self.reached, self.go, self.looked = threading.Event(), threading.Event(), threading.Event()

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        is_swept = call == "claim" and args[0].ids is None
        if call == self.held and not is_swept:
            self.held = None
            self.reached.set()
            assert self.go.wait(PATIENCE)
        elif call == "find" and self.reached.is_set():
            self.looked.set()
        return function(*args, **options)


@pytest.mark.parametrize("call", ["commit", "claim"])
async def test_what_is_written_after_its_caller_has_left_runs(call: str) -> None:
    """I4: a slow disk, and a request whose client went away. The look for it has to come after the write."""
    program, backend = Program(), HeldBackend()
    program.go.set()
    store = CheckpointStore(backend)
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=store, config=QUIET) as executor:
            if call == "claim":
                await executor.submit("work", 1, id="a")
            backend.held = call
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(executor.start, "work", 1, id="a"))
                assert await anyio.to_thread.run_sync(backend.reached.wait, PATIENCE)
                tasks.cancel_scope.cancel()
            await anyio.to_thread.run_sync(backend.looked.wait, 0.3)  # time for a look that is made too early
            backend.go.set()
            await store.settled()
            assert await (await executor.handle("a")).result() == 2
