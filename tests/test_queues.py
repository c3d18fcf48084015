"""Limits of queues: kept in the store, obeyed by all workers together, and in nobody's way."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from longrun import (
    ConfigError,
    CorruptDataError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    InvalidIdError,
    MemoryCheckpointStore,
    NewerFormatError,
    QueueLimit,
    RegistrationError,
    RetentionPolicy,
    SQLiteCheckpointStore,
    StepRegistry,
    StoreUnavailableError,
    gates,
    open_store,
)
from longrun.client import Client
from longrun.plan import Planner
from longrun.queues import Gate, new_record, record_id
from longrun.stored import QUEUE_WORKFLOW, Claim, Message, Query
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, ManualClock
from longrun.testing.samples import owned
from longrun.worker import Worker
from tests.crashing import CrashableWorker, crash
from tests.limited import PATIENCE, QUICK, Ledger, keeps_to_its_limit

# --- on every store -------------------------------------------------------------------------------------------------


async def test_four_workers_keep_to_a_limit_in_memory() -> None:
    await keeps_to_its_limit(MemoryCheckpointStore())


async def test_four_workers_keep_to_a_limit_on_sqlite(tmp_path: Path) -> None:
    await keeps_to_its_limit(f"sqlite:///{tmp_path / 'store.db'}")


# --- what counts ----------------------------------------------------------------------------------------------------


async def swept(client: Client) -> None:
    """The worker has looked at every queue once more: what was submitted to an open one behind it has run."""
    for _ in range(2):
        await (await client.submit("look", queue="open")).result()


async def test_what_is_parked_takes_no_room_and_waits_for_it_when_it_goes_on() -> None:
    """With room for one: an execution that waits for a signal lets the next one run, and when its signal comes it waits
    for that one to end, although it rests in this very worker."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(ledger.registry, store=store, limits={"one": QueueLimit(concurrency=1)}) as worker,
        ):
            first = await client.submit("waits", "a", id="first", queue="one")
            await first.wait("waiting")
            await client.signal("first", "other")  # it does not want this one: it is looked at and rests
            while "first" not in worker.resting:
                await swept(client)
            second = await client.submit("work", "b", id="second", queue="one")
            await ledger.until_begun(1)
            await client.signal("first", "go")
            await swept(client)
            assert ledger.begun == ["second"]
            ledger.go.set()
            assert (await first.result(), await second.result()) == ("a", "b")
            assert ledger.most == 1


async def test_what_is_asked_for_by_name_runs_at_once_and_counts() -> None:
    """Otherwise a step that starts a child and waits for it could wait for the room that it takes itself."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(ledger.registry, store=store, limits={"default": QueueLimit(concurrency=1)}) as worker,
        ):
            for name in ("a", "b"):
                await worker.start("work", id=name)
            await client.submit("work", id="queued")
            await ledger.until_begun(2)
            await swept(client)
            assert sorted(ledger.begun) == ["a", "b"]
            ledger.go.set()
            await client.handle("queued").result()


async def test_a_paused_execution_takes_no_room() -> None:
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(ledger.registry, store=store, limits={"one": QueueLimit(concurrency=1)}),
        ):
            first = await client.submit("work", id="first", queue="one")
            await ledger.until_begun(1)
            await client.pause("first", interrupt=True)
            second = await client.submit("work", id="second", queue="one")
            await ledger.until_begun(2)
            ledger.go.set()
            await second.result()
            await client.resume("first")
            await first.result()
    assert ledger.begun == ["first", "second", "first"]


async def test_the_executions_of_a_dead_worker_take_no_room_and_are_taken_over_within_the_limit() -> None:
    """Its two are interrupted; the next worker has room for two at once and finishes all of them."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("two", concurrency=2)
            runs = [await client.submit("work", n, queue="two") for n in range(6)]
            async with CrashableWorker(ledger.registry, store=store) as doomed:
                await ledger.until_begun(2)
                await crash(doomed)
            ledger.running.clear()
            async with Worker(ledger.registry, store=store, config=QUICK) as worker:
                await ledger.until_begun(4)
                ledger.go.set()
                assert [await run.result() for run in runs] == [*range(6)]
                assert (await worker.auto_resume_all()).skipped == {}
    assert ledger.most == 2


async def test_the_living_are_counted_behind_very_many_that_a_dead_worker_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest fill the first page of what is owned; the one that is taken over first is on another."""
    monkeypatch.setattr(gates, "PAGE", 1)
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            runs = [await client.submit("work", n, queue="one") for n in range(5)]
            async with CrashableWorker(ledger.registry, store=store) as doomed:
                await ledger.until_begun(5)
                await crash(doomed)
            ledger.running.clear()
            ledger.most = 0
            await client.limit_queue("one", concurrency=1)
            async with Worker(ledger.registry, store=store, config=QUICK):
                await ledger.until_begun(6)
                await swept(client)
                ledger.go.set()
                assert [await run.result() for run in runs] == [*range(5)]
    assert ledger.most == 1


async def test_what_an_owner_that_nobody_knows_has_in_a_step_takes_no_room() -> None:
    """I4: nor can it be taken over here, where its workflow is not known."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await store.create(owned("ghost", "nobody", workflow="retired", queue="one"))
            await client.limit_queue("one", concurrency=1)
            async with Worker(ledger.registry, store=store, config=QUICK):
                assert await (await client.submit("work", "x", queue="one")).result() == "x"
            assert (await store.load("ghost")).head.owner == "nobody"


async def test_what_a_dead_worker_had_only_just_claimed_waits_for_room_too() -> None:
    """It was signalled and claimed; its worker died before it wrote a line, and nothing says that it is due."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("one", concurrency=1)
            async with CrashableWorker(ledger.registry, store=store) as doomed:
                first = await client.submit("waits", "a", id="first", queue="one")
                await first.wait("waiting")
                await doomed.wait_idle()  # neither its runner looks at it any more,
                doomed.stop_sweeping()  # nor the sweep: that would deliver the signal
                await client.signal("first", "go")
                assert await doomed.sweeper.claims.take(("first",), frozenset({ExecutionState.WAITING}), frozenset())
                await crash(doomed)
            second = await client.submit("work", "b", id="second", queue="one", priority=9)
            async with Worker(ledger.registry, store=store, config=QUICK):
                await ledger.until_begun(1)
                await swept(client)
                assert len(ledger.begun) == 1
                ledger.go.set()
                assert (await first.result(), await second.result()) == ("a", "b")
    assert ledger.most == 1


async def test_a_start_up_pass_leaves_a_limited_queue_to_the_sweep() -> None:
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("one", concurrency=1)
            await client.submit("work", id="left", queue="one")
            async with CrashableWorker(ledger.registry, store=store) as doomed:
                await ledger.until_begun(1)
                await crash(doomed)
            executor = Executor(ledger.registry, store=store, config=ExecutorConfig(auto_resume=False))
            executor.takes_work = True
            executor.draining = True  # its sweep takes nothing while the report is made, nor before
            async with executor:
                report = await executor.sweeper.resume_all()
                assert report.skipped == {"left": "its queue 'one' is limited: it is taken up when there is room"}
                executor.draining = False
                executor.stir()
                ledger.go.set()
                await client.handle("left").result()


async def test_what_was_paused_waits_for_room_when_a_start_takes_it_up() -> None:
    """Nobody has asked for it by its id. Paused while it slept, it sleeps on and waits for its signal."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            async with Worker(ledger.registry, store=store):
                for n in range(5):
                    await client.submit("work", n, id=f"x{n}", queue="one")
                await client.submit("waits", id="waits", queue="one")
                await ledger.until_begun(5)
                for n in range(5):
                    await client.pause(f"x{n}", interrupt=True)
                await client.pause("waits")
            await client.limit_queue("one", concurrency=1)
            ledger.begun.clear()
            ledger.most = 0
            async with Worker(ledger.registry, store=store) as worker:
                await ledger.until_begun(1)
                ledger.go.set()
                assert [await client.handle(f"x{n}").result() for n in range(5)] == [*range(5)]
                assert (await worker.get("waits")).waiting_for == "go"
                await client.signal("waits", "go")
                await client.handle("waits").result()
    assert ledger.most == 1


async def test_a_report_says_that_what_was_paused_waits_for_room() -> None:
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            async with Worker(ledger.registry, store=store):
                await client.submit("work", id="a", queue="one")
                await client.submit("work", id="b", queue="one")
                await ledger.until_begun(2)
                for name in "ab":
                    await client.pause(name, interrupt=True)
            await client.limit_queue("one", concurrency=1)
            executor = Executor(ledger.registry, store=store, config=ExecutorConfig(auto_resume=False))
            executor.takes_work = True
            executor.draining = True  # its sweep takes nothing while the report is made, nor before
            async with executor:
                report = await executor.sweeper.resume_all()
                reason = "its queue 'one' is limited: it is taken up when there is room"
                assert (report.resumed, report.skipped) == ((), {"a": reason, "b": reason})
                assert [(await executor.get(name)).state for name in "ab"] == ["resuming"] * 2
                executor.draining = False
                executor.stir()
                ledger.go.set()
                for name in "ab":
                    await client.handle(name).result()


async def test_without_a_sweep_of_its_own_a_pass_runs_what_was_paused_at_once() -> None:
    """`auto_resume=False`: whoever calls `auto_resume_all` asks for it."""
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            async with Worker(ledger.registry, store=store):
                for name in "ab":
                    await client.submit("work", id=name, queue="one")
                await ledger.until_begun(2)
                for name in "ab":
                    await client.pause(name, interrupt=True)
            await client.limit_queue("one", concurrency=1)
            async with Executor(ledger.registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
                report = await executor.auto_resume_all()
                assert sorted(report.resumed) == ["a", "b"]
                await ledger.until_begun(4)
                ledger.go.set()
                await executor.wait_idle()


async def test_a_holder_that_died_behind_the_gate_keeps_nobody_out() -> None:
    """I4: its record is free as its executions are."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("one", concurrency=1)
            async with CrashableWorker(ledger.registry, store=store) as doomed:
                assert await doomed.sweeper.gates._enter("one") is not None
                await crash(doomed)
            run = await client.submit("work", "x", queue="one")
            async with Worker(ledger.registry, store=store, config=QUICK):
                assert await run.result() == "x"
            await client.limit_queue("one", concurrency=2)


async def test_a_holder_that_could_not_write_a_record_back_keeps_nobody_out() -> None:
    """I4: it lives, and what waits there is not even known to it."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(_strange(ledger), store=store, config=QUICK) as holder,
            Worker(ledger.registry, store=store, config=QUICK),
        ):
            await client.limit_queue("one", concurrency=1)
            async with holder.sweeper.claims.lock:
                assert await holder.sweeper.gates._enter("one") is not None
            run = await client.submit("work", "x", queue="one")
            assert await run.result() == "x"
            await client.limit_queue("one", concurrency=2)


def _strange(ledger: Ledger) -> StepRegistry:
    """Of a worker that knows nothing of what waits."""
    registry = StepRegistry()
    registry.register("other", ledger.look)
    registry.workflow("other", ["other"])
    return registry


@pytest.mark.parametrize("how", ["fail", "lose_answer"])
@pytest.mark.parametrize("call", ["claim", "commit"])
async def test_an_outage_behind_the_gate_keeps_nobody_out(tmp_path: Path, call: str, how: str) -> None:
    """The store fails a worker when it enters, or when it leaves."""
    ledger, path = Ledger(), tmp_path / "store.db"
    with anyio.fail_after(PATIENCE):
        async with Client(SQLiteCheckpointStore(path)) as client:
            await client.limit_queue("one", concurrency=5)
            shaky = FaultyStore(SQLiteCheckpointStore(path))
            async with Worker(_strange(ledger), store=shaky, config=QUICK) as holder:
                gates = holder.sweeper.gates
                async with holder.sweeper.claims.lock:
                    getattr(shaky, how)(call)
                    try:
                        record = await gates._enter("one")
                        assert record is not None
                        await gates._leave(record, gates._gate("one", record.head))
                    except StoreUnavailableError:
                        assert call == "claim"
                assert shaky.fired[call] == 1
                async with Worker(ledger.registry, store=SQLiteCheckpointStore(path), config=QUICK):
                    run = await client.submit("work", "x", queue="one")
                    assert await run.result() == "x"


async def test_who_waits_for_a_record_to_set_its_limit_keeps_nobody_waiting() -> None:
    """Another process holds it: what was submitted to other queues goes on meanwhile."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Executor(StepRegistry(), store=store) as holder,
            Worker(ledger.registry, store=store, config=QUICK) as worker,
            anyio.create_task_group() as tasks,
        ):
            await client.limit_queue("one", concurrency=1)
            record = await holder.sweeper.gates._enter("one")
            assert record is not None
            tasks.start_soon(partial(worker.limit_queue, "one", concurrency=2), name="limit")
            await swept(client)
            assert (await client.list_queues())[1].limit == QueueLimit(concurrency=1)
            assert await holder.sweeper.gates._leave(record, holder.sweeper.gates._gate("one", record.head))


async def test_what_a_dead_worker_left_and_nobody_here_knows_is_not_looked_for_again_and_again() -> None:
    """Each look behind the gate is a write, of which the others are told, who look in their turn."""
    ledger, store, stranger = Ledger(), MemoryCheckpointStore(), Ledger(held=True)
    stranger.registry.workflow("strange", ["work"])
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("one", concurrency=1)
            async with CrashableWorker(stranger.registry, store=store, config=QUICK) as doomed:
                await client.submit("strange", queue="one")
                await stranger.until_begun(1)
                await crash(doomed)
            async with Worker(ledger.registry, store=store, config=QUICK):
                await swept(client)
                before = (await store.load(record_id("one"))).head.revision
                for _ in range(5):
                    await swept(client)
                assert (await store.load(record_id("one"))).head.revision == before


async def test_a_holder_that_was_passed_over_gives_back_what_it_took() -> None:
    """I3: it was stopped behind the gate and another one went in; what it claims on waking it does not run."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("one", concurrency=1)
            async with Worker(ledger.registry, store=store, queues=["none"]) as stopped:
                await client.submit("work", id="x", queue="one")
                gates = stopped.sweeper.gates
                await stopped.sweeper.claims.lock.acquire()  # as whoever enters has it
                record = await gates._enter("one")
                assert record is not None
                stored = (await store.find(Query(workflows=frozenset({QUEUE_WORKFLOW}), queue="one")))[0]
                assert stored.head.owner == stopped.owner
                async with Client(store) as thief:  # it sees a dead owner where the store says so
                    thief.sweeper.gates._alive = _nobody  # type: ignore[method-assign]
                    taken = await thief.sweeper.gates._enter("one")
                    assert taken is not None
                    claim = _claim_of(stopped)
                    assert await gates._take_within(record, claim) == 0
                    stopped.sweeper.claims.lock.release()
                    assert not stopped.runners
                    assert (await store.load("x")).head.owner is None
                    assert await thief.sweeper.gates._leave(taken, Gate.full(None, 0.0))
    assert ledger.begun == []


async def _nobody() -> frozenset[str]:
    return frozenset()


def _claim_of(worker: Worker) -> Claim:
    return Claim(
        owner=worker.owner,
        now=worker.clock.now(),
        states=worker.sweeper.claims.states,
        workflows=worker.known_workflows(),
        queues=frozenset({"one"}),
        limit=5,
    )


# --- changes --------------------------------------------------------------------------------------------------------


async def test_a_limit_that_goes_lets_go_what_waited_for_it() -> None:
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        limits = {"gpu": QueueLimit(concurrency=0)}
        async with Client(store) as client, Worker(ledger.registry, store=store, limits=limits):
            runs = [await client.submit("work", n, queue="gpu") for n in range(5)]
            await swept(client)
            assert ledger.begun == []
            await client.limit_queue("gpu", concurrency=2)
            await ledger.until_begun(2)
            await client.limit_queue("gpu")
            await ledger.until_begun(5)
            ledger.go.set()
            assert [await run.result() for run in runs] == [*range(5)]
            assert [queue.limit for queue in await client.list_queues()] == [None] * 3


async def test_a_limit_that_could_not_be_stored_in_time_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: the store takes longer than anybody waits for it."""
    monkeypatch.setattr(gates, "LAST_WORDS", 0.05)
    store = MemoryCheckpointStore()

    async def never(save: object) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("gpu", concurrency=5)
            with monkeypatch.context() as patch:
                patch.setattr(store, "save", never)
                with pytest.raises(StoreUnavailableError, match=r"no answer in 0\.05 s"):
                    await client.limit_queue("gpu", concurrency=1)
            assert (await client.list_queues())[1].limit == QueueLimit(concurrency=5)
            await client.limit_queue("gpu", concurrency=1)
            assert (await client.list_queues())[1].limit == QueueLimit(concurrency=1)


async def test_a_running_worker_sees_a_new_limit_soon() -> None:
    """The records are read again after a second at the latest, without anything else happening."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client, Worker(ledger.registry, store=store) as worker:
            await swept(client)
            await client.limit_queue("gpu", concurrency=1)
            while not worker.sweeper.gates.limits("gpu"):
                await swept(client)


async def test_a_worker_of_all_queues_finds_those_that_come_later() -> None:
    """While one queue is limited, the others are asked for by name: a new name must not be left out."""
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            early = await client.submit("work", "early", queue="early")
            async with Worker(ledger.registry, store=store, limits={"gpu": QueueLimit(concurrency=0)}):
                await client.submit("work", id="never", queue="gpu")
                assert await early.result() == "early"
                assert await (await client.submit("work", "late", queue="späte Queue / 1")).result() == "late"
                assert await (await client.submit("work", "plain")).result() == "plain"
            assert (await client.get("never")).state == "initialized"


async def test_a_queue_that_was_stored_without_its_name_is_noted_with_the_first_limit() -> None:
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            client.sweeper.gates._noted.add("quiet")
            run = await client.submit("work", 1, queue="quiet")
            assert [queue.name for queue in await client.list_queues()] == ["default"]
            client.sweeper.gates._noted.discard("quiet")
            await client.limit_queue("gpu", concurrency=1)
            assert [queue.name for queue in await client.list_queues()] == ["default", "gpu", "quiet"]
            async with Worker(ledger.registry, store=store):
                assert await run.result() == 1


async def test_a_worker_of_named_queues_is_limited_in_them_alone() -> None:
    ledger, store = Ledger(held=True), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        limits = {"a": QueueLimit(concurrency=1), "b": QueueLimit(concurrency=1)}
        async with Client(store) as client, Worker(ledger.registry, store=store, queues=["b", "c"], limits=limits):
            for queue in ("a", "b", "b", "c", "c"):
                await client.submit("work", queue=queue, id=f"{queue}-{len(await client.list())}")
            await ledger.until_begun(3)
            assert sorted(id[0] for id in ledger.begun) == ["b", "c", "c"]
            ledger.go.set()
            await ledger.until_begun(4)


# --- the rate -------------------------------------------------------------------------------------------------------


async def test_so_many_begin_in_a_period_by_the_clock() -> None:
    """Two at once, then one every five seconds; what has begun is not held up by the rate again."""
    clock = ManualClock()
    store, ledger = MemoryCheckpointStore(clock=clock), Ledger()
    with anyio.fail_after(PATIENCE):
        limits = {"mail": QueueLimit(rate=2, per=10.0)}
        worker = Worker(ledger.registry, store=store, clock=clock, limits=limits)
        async with Client(store, clock=clock) as client, worker:
            for n in range(5):
                await client.submit("work", n, queue="mail", id=f"mail-{n}")
            for begun in (2, 3, 4, 5):
                await ledger.until_begun(begun)
                await swept(client)
                assert len(ledger.begun) == begun
                clock.advance(4.5)
                await swept(client)
                assert len(ledger.begun) == begun, "the next token has not come"
                clock.advance(0.5)
            first = [f"mail-{n}" for n in range(2)]
            assert (sorted(ledger.begun[:2]), ledger.begun[2:]) == (first, ["mail-2", "mail-3", "mail-4"])


async def test_a_rate_does_not_hold_up_what_has_begun() -> None:
    clock = ManualClock()
    store, ledger = MemoryCheckpointStore(clock=clock), Ledger()
    with anyio.fail_after(PATIENCE):
        limits = {"mail": QueueLimit(rate=1, per=timedelta(hours=1))}
        worker = Worker(ledger.registry, store=store, clock=clock, limits=limits)
        async with Client(store, clock=clock) as client, worker:
            run = await client.submit("waits", "x", queue="mail")
            await run.wait("waiting")
            await client.submit("work", queue="mail", id="next")
            await client.signal(run.id, "go")
            assert await run.result() == "x"
            assert (await client.get("next")).state == "initialized"


@pytest.mark.parametrize("how", ["client", "worker", "restart"])
async def test_what_was_paused_before_it_began_goes_back_into_its_queue(how: str) -> None:
    """One an hour: nothing gets past the rate by being paused and resumed, whether by a client, in a worker that has to
    wait for its delay, or by the pass of the next worker. The delay stays."""
    clock = ManualClock()
    store, ledger = MemoryCheckpointStore(clock=clock), Ledger()
    with anyio.fail_after(PATIENCE):
        async with Client(store, clock=clock) as client:
            await client.limit_queue("mail", rate=1, per=timedelta(hours=1))
            await client.submit("work", 0, queue="mail", id="mail-0")
            async with Worker(ledger.registry, store=store, clock=clock) as worker:
                await ledger.until_begun(1)
                for n in range(1, 4):
                    delay = 60.0 if how == "worker" else None
                    await client.submit("work", n, queue="mail", id=f"mail-{n}", delay=delay)
                for n in range(1, 4):
                    await (worker if how == "worker" else client).pause(f"mail-{n}")
                    if how != "restart":
                        await (worker if how == "worker" else client).resume(f"mail-{n}")
            clock.advance(60.0)
            async with Worker(ledger.registry, store=store, clock=clock) as worker:
                await swept(client)
                assert [(await client.get(f"mail-{n}")).state for n in range(1, 4)] == ["initialized"] * 3
                assert (await client.list_queues())[1].queued == 3
                for begun in (2, 3, 4):
                    clock.advance(3600.0)
                    await ledger.until_begun(begun)
                    await swept(client)
                    assert len(ledger.begun) == begun
                assert [await client.handle(f"mail-{n}").result() for n in range(4)] == [*range(4)]


async def test_what_was_paused_in_its_first_step_has_begun_and_does_not_wait_for_a_token() -> None:
    clock = ManualClock()
    store, ledger = MemoryCheckpointStore(clock=clock), Ledger(held=True)
    with anyio.fail_after(PATIENCE):
        limits = {"mail": QueueLimit(rate=1, per=timedelta(hours=1))}
        async with Client(store, clock=clock) as client:
            run = await client.submit("work", 7, queue="mail")
            async with Worker(ledger.registry, store=store, clock=clock, limits=limits):
                await ledger.until_begun(1)
                await client.pause(run.id, hold=True, interrupt=True)
            await client.resume(run.id)
            assert (await client.get(run.id)).state == "resuming"
            ledger.go.set()
            async with Worker(ledger.registry, store=store, clock=clock):
                assert await run.result() == 7


@pytest.mark.parametrize("orders", [("pause",), ("cancel",), ("pause", "resume", "pause")])
async def test_what_was_stopped_before_it_began_takes_no_token(store: CheckpointStore, orders: tuple[str, ...]) -> None:
    """Whoever asked for it has stored that, and the worker comes first."""
    ledger = Ledger()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("mail", rate=1, per=timedelta(hours=1))
            stopped = await client.submit("work", 1, queue="mail", priority=1)
            for kind in orders:
                await store.send(stopped.id, Message(kind=kind, sent=0.0), limit=9)
            run = await client.submit("work", 2, queue="mail")
            async with Worker(ledger.registry, store=store):
                assert await run.result() == 2
                assert (await stopped.info()).state == ("cancelled" if "cancel" in orders else "paused")


async def test_what_was_resumed_before_it_began_takes_its_token(store: CheckpointStore) -> None:
    ledger = Ledger()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("mail", rate=1, per=timedelta(hours=1))
            first = await client.submit("work", 1, queue="mail", priority=1)
            for kind in ("pause", "resume"):
                await store.send(first.id, Message(kind=kind, sent=0.0), limit=9)
            second = await client.submit("work", 2, queue="mail")
            async with Worker(ledger.registry, store=store):
                assert await first.result() == 1
                await swept(client)
                assert (await second.info()).state == "initialized"


def test_a_bucket_fills_and_does_not_stall_when_the_clock_is_put_back() -> None:
    """I12: clocks only decide when to try."""
    gate = Gate.full(QueueLimit(rate=10, per=60), now=1000.0)
    assert gate.starts(1000.0) == 10
    empty = Gate(limit=gate.limit, tokens=0.0, at=1000.0)
    assert (empty.starts(1005.0), empty.starts(1006.0), empty.starts(1060.0), empty.starts(9000.0)) == (0, 1, 10, 10)
    assert empty.next_start(1000.0) == 1006.0
    assert empty.starts(990.0) == 0, "another worker's clock is ahead"
    assert empty.next_start(990.0) == 1006.0
    put_back = empty.refilled(100.0)
    assert put_back.at == 100.0
    assert put_back.starts(106.0) == 1
    slow = Gate(limit=QueueLimit(rate=0.5), tokens=0.0, at=0.0)
    assert (slow.starts(1.9), slow.starts(2.0), slow.starts(100.0)) == (0, 1, 1)


def test_a_changed_rate_gives_no_tokens_back() -> None:
    used = Gate(limit=QueueLimit(rate=10), tokens=0.0, at=50.0, granted=(("x", 1, 2),))
    assert used.limited(QueueLimit(rate=5), 50.0).tokens == 0.0
    assert used.limited(QueueLimit(concurrency=5), 50.0).granted == (("x", 1, 2),)
    assert used.limited(None, 50.0).limited(QueueLimit(rate=5), 50.0).tokens == 5.0
    assert Gate.of("mail", attrs.evolve(new_record("mail", None, 0.0).head, note=used.to_text())) == used


# --- nobody sees the records ----------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    urls = {"memory": "memory:", "file": f"file:{tmp_path / 'store'}", "sqlite": f"sqlite:///{tmp_path / 'store.db'}"}
    return open_store(urls[request.param])


async def test_the_records_of_queues_are_no_executions(store: CheckpointStore) -> None:
    """Not listed, counted, planned, resumed, collected or reached by id, and last in no page."""
    ledger = Ledger()
    async with Client(store) as client:
        for n in range(5):
            await client.limit_queue(f"q{n}", concurrency=1)
        for n in range(3):
            await client.submit("work", id=f"x{n}", queue=f"q{n}")
        assert [one.id for one in await client.list()] == ["x2", "x1", "x0"]
        assert [one.id for one in await client.list(limit=2, after="x2")] == ["x1", "x0"]
        assert await client.list(limit=2, after="x0") == []
        assert await client.list("paused") == []
        assert await client.list(queue="q4") == []
        assert await client.count() == {"initialized": 3}
        assert [plan.id async for plan in Planner(store, ledger.registry).all()] == ["x2", "x1", "x0"]
        assert await store.gc(RetentionPolicy(max_age=0.0), client.clock.now() + 1e6) == 0
        with pytest.raises(InvalidIdError):
            await client.get(record_id("q0"))
        assert len(await client.list_queues()) == 6


async def test_nobody_can_take_the_name_of_the_records() -> None:
    registry = StepRegistry()
    registry.register("work", Ledger().work)
    with pytest.raises(RegistrationError):
        registry.workflow(QUEUE_WORKFLOW, ["work"])
    async with Client("memory:") as client:
        with pytest.raises(ConfigError):
            await client.submit(QUEUE_WORKFLOW)


async def test_a_record_that_cannot_be_read_closes_its_queue_and_no_other() -> None:
    ledger, store = Ledger(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("broken", concurrency=1)
            store.backend._records[record_id("broken")].head.note = "{"  # type: ignore[attr-defined]
            waits = await client.submit("work", 1, queue="broken")
            async with Worker(ledger.registry, store=store):
                await (await client.submit("work", 2)).result()
                assert (await client.get(waits.id)).state == "initialized"
                with pytest.raises(CorruptDataError, match="the record of queue 'broken' is damaged: set its limit"):
                    await client.list_queues()
                await client.limit_queue("broken", concurrency=1)
                assert await waits.result() == 1


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"concurrency": -1},
        {"concurrency": 1.5},
        {"concurrency": 2**63 - 1},
        {"concurrency": True},
        {"rate": 0},
        {"rate": float("nan")},
        {"rate": "10/60s"},
        {"rate": 1, "per": 0},
        {"rate": 1, "per": -5.0},
        {"rate": 1, "per": "1m"},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        QueueLimit(**bad)


async def test_bad_names_and_limits_are_refused() -> None:
    with pytest.raises(ConfigError):
        Worker(StepRegistry(), store="memory:", limits={"": QueueLimit(concurrency=1)})
    with pytest.raises(ConfigError):
        Worker(StepRegistry(), store="memory:", limits={"gpu": 3})  # type: ignore[dict-item]
    async with Client("memory:") as client:
        for name in ("", "a\nb", 5):
            with pytest.raises(ConfigError):
                await client.limit_queue(name, concurrency=1)  # type: ignore[arg-type]


def test_the_record_of_a_later_version_is_refused() -> None:
    """I14: a limit that is not understood must not be taken for none."""
    newer = json.loads(Gate.full(QueueLimit(rate=1), now=0.0).to_text()) | {"format": 99}
    with pytest.raises(NewerFormatError, match="99"):
        Gate.of("mail", attrs.evolve(new_record("mail", None, 0.0).head, note=json.dumps(newer)))
