"""A worker takes what it knows, leaves what it does not, hears of new work at once, and rests when there is none."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from longrun import (
    ConfigError,
    ExecutionFailedError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    NonRetryable,
    StepContext,
    StepRegistry,
    WaitFor,
    open_store,
)
from longrun.client import Client
from longrun.startup import STARTUP_STATES
from longrun.stored import Message, Query, Stored
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, ManualClock
from longrun.worker import Worker
from tests.crashing import CrashableWorker, crash
from tests.servers import PostgresServer, Source

PATIENCE = 30.0
NEVER = ExecutorConfig(heartbeat_interval=3600.0, lease_ttl=36000.0)
"""Nothing is found by looking now and then: whoever must be told has to be."""


def program(*workflows: str) -> StepRegistry:
    """A registry in which each of these workflows is one step that says who ran it."""
    registry = StepRegistry()
    for name in workflows:

        async def step(ctx: StepContext, state: Any) -> Any:
            return [ctx.workflow, state]

        registry.register(name, step)
        registry.workflow(name, [name])

    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    async def answer(ctx: StepContext, state: Any) -> Any:
        return ctx.signal

    registry.register("ask", ask)
    registry.register("answer", answer)
    registry.workflow("asks", ["ask", "answer"])
    return registry


# --- a rolling deploy -----------------------------------------------------------------------------------------------


async def test_what_a_worker_does_not_know_is_left_for_one_that_does() -> None:
    """An unknown workflow is visible as it is, not failed; a worker with the new code takes it at once."""
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            new = await client.submit("new", 1)
            async with Worker(program("old"), store=store) as worker:
                assert await (await client.submit("old", 2)).result() == ["old", 2]
                shown = await client.get(new.id)
                assert (shown.state, shown.owner, shown.error) == ("initialized", None, None)
                async with Worker(program("old", "new"), store=store):
                    assert await new.result() == ["new", 1]
                assert (await worker.auto_resume_all()).skipped == {}


async def test_an_interrupted_execution_of_an_unknown_workflow_is_told_and_left() -> None:
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(program("new"), store=store) as first:
            run = await first.start("asks", None, id="parked")
            await run.wait("waiting")
            await first.submit("new", 1, id="x")
        async with Worker(StepRegistry(), store=store) as stranger, Client(store) as client:
            await client.pause("x")
            assert (await stranger.auto_resume_all()).skipped == {"x": "not registered here"}
            await client.signal("parked", "go", 5)
            async with Worker(program("new"), store=store):
                assert await client.handle("x").result() == ["new", 1]
                assert await client.handle("parked").result() == 5


async def test_an_unknown_step_of_a_known_workflow_is_blocked_and_told_not_failed() -> None:
    """The code that supplies it frees the execution: by a resume, or by its pass at start."""
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(program("work"), store=store) as executor:
            await (await executor.start("asks", None, id="x")).wait("waiting")
        without = StepRegistry()
        without.register("ask", program().get("ask").function)  # type: ignore[union-attr]
        without.workflow("asks", ["ask"])
        async with Worker(without, store=store), Client(store) as client:
            await client.signal("x", "go", 7)
            await client.handle("x").wait("blocked")
            assert "answer" in ((await client.get("x")).reason or "")
        async with Worker(program(), store=store), Client(store) as client:
            assert await client.handle("x").result() == 7


# --- what a dead one left ---------------------------------------------------------------------------------------------


class Held:
    """A workflow whose step begins and goes on when it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.changed, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("work", self.work)
        self.registry.workflow("work", ["work"])

    async def work(self, ctx: StepContext, state: Any) -> Any:
        self.begun.append(ctx.execution_id)
        changed, self.changed = self.changed, anyio.Event()
        changed.set()
        await self.go.wait()
        return state

    async def until_begun(self, number: int) -> None:
        while len(self.begun) < number:
            await self.changed.wait()


async def left(store: MemoryCheckpointStore, number: int, queue: str = "default", paused: int = 0) -> Held:
    """Executions that a worker had in a step when it died, and some that were paused."""
    held = Held()
    async with Client(store) as client, CrashableWorker(held.registry, store=store) as doomed:
        for n in range(number + paused):
            await client.submit("work", n, id=f"x{n}", queue=queue)
        await held.until_begun(number + paused)
        for n in range(paused):
            await client.pause(f"x{n}", interrupt=True)
        await crash(doomed)
    held.begun.clear()
    return held


async def test_a_start_takes_nothing_of_queues_that_it_does_not_look_at() -> None:
    """Neither what was interrupted there nor what was paused, and not later either."""
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        held = await left(store, 2, "gpu", paused=1)
        async with Client(store) as client:
            async with Worker(held.registry, store=store, queues=["cpu"]) as worker:
                report = await worker.auto_resume_all()
                assert report.skipped == dict.fromkeys(["x0", "x1", "x2"], "its queue 'gpu' is not looked at here")
                held.go.set()
                await (await client.submit("work", queue="cpu", id="mine")).result()
                assert held.begun == ["mine"]
                assert [str((await client.get(f"x{n}")).state) for n in range(3)] == ["paused", "running", "running"]
            async with Worker(held.registry, store=store, queues=["cpu", "gpu"]):
                assert [await client.handle(f"x{n}").result() for n in range(3)] == [0, 1, 2]


async def test_nor_what_a_dead_worker_of_another_queue_had_only_just_claimed() -> None:
    store = MemoryCheckpointStore()
    held = Held()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            async with CrashableWorker(held.registry, store=store, queues=["none"]) as doomed:
                await client.submit("work", 1, id="x", queue="gpu")
                assert await doomed.sweeper.claims.take(("x",), frozenset({ExecutionState.INITIALIZED}), frozenset())
                await crash(doomed)
            held.go.set()
            async with Worker(held.registry, store=store, queues=["cpu"]):
                await (await client.submit("work", queue="cpu", id="mine")).result()
                assert held.begun == ["mine"]
            async with Worker(held.registry, store=store, queues=["gpu"]):
                assert await client.handle("x").result() == 1


@pytest.mark.parametrize("paused", [0, 8])
async def test_a_start_takes_no_more_than_it_has_room_for(paused: int) -> None:
    """What is left is for others, and its states are in nobody's memory."""
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        held = await left(store, 8 - paused, paused=paused)
        async with (
            Client(store) as client,
            Worker(held.registry, store=store, concurrency=2) as one,
            Worker(held.registry, store=store, concurrency=3) as two,
        ):
            await held.until_begun(5)
            assert (len(one.runners), len(two.runners)) == (2, 3)
            held.go.set()
            assert sorted([await client.handle(f"x{n}").result() for n in range(8)]) == list(range(8))
    assert sorted(held.begun) == [f"x{n}" for n in range(8)]


async def test_what_an_owner_that_nobody_knows_left_waits_for_room_too() -> None:
    """After a power cut a store may have lost his name: no sweep asks for what he had."""
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        held = await left(store, 3)
        async with Client(store) as client:
            for owner in await store.owners():
                await store.unregister(owner.id)
            async with Worker(held.registry, store=store, concurrency=1) as worker:
                await held.until_begun(1)
                assert list(worker.runners) == held.begun
                held.go.set()
                assert [await client.handle(f"x{n}").result() for n in range(3)] == [0, 1, 2]


async def test_a_signal_is_obeyed_while_the_pass_at_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        held = await left(store, 1)
        find = store.find

        async def never(query: Query) -> list[Stored]:
            if query.states == STARTUP_STATES:
                os.kill(os.getpid(), signal.SIGTERM)
                await anyio.sleep_forever()
            return await find(query)

        monkeypatch.setattr(store, "find", never)
        await Worker(held.registry, store=store, config=ExecutorConfig(drain_timeout=0.0)).run_forever()


async def test_submitted_work_is_taken_without_auto_resume_and_what_was_interrupted_is_not() -> None:
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        held = await left(store, 1)
        held.go.set()
        async with (
            Client(store) as client,
            Worker(held.registry, store=store, config=ExecutorConfig(auto_resume=False)),
        ):
            assert await (await client.submit("work", 5, id="new")).result() == 5
            assert (await client.get("x0")).state == "running"
        assert held.begun == ["new"]


@pytest.mark.parametrize("limited", [False, True])
async def test_what_a_client_retries_or_resumes_runs_without_auto_resume(limited: bool) -> None:
    """Somebody has asked for it, and nobody else may be there. What a dead owner had claimed of that was interrupted:
    it is left alone until a pass takes it."""
    store, held = MemoryCheckpointStore(), Held()

    async def refuse(state: Any) -> Any:
        if state == "bad":
            raise NonRetryable("bad")
        return state

    held.registry.workflow("refuse", [held.registry.step(refuse)])
    quiet = ExecutorConfig(auto_resume=False, heartbeat_interval=0.1)
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            if limited:
                await client.limit_queue("default", concurrency=3)
            async with Executor(held.registry, store=store) as first:
                for id in ("paused", "claimed"):
                    await first.start("work", id, id=id)
                    await first.pause(id, hold=True, interrupt=True)
            for id in ("paused", "claimed"):
                await client.resume(id)
            held.go.set()
            async with CrashableWorker(held.registry, store=store, config=quiet, queues=["none"]) as doomed:
                asked = frozenset({ExecutionState.RESUMING})
                assert await doomed.sweeper.claims.take(("claimed",), asked, frozenset())
                await crash(doomed)
            async with Worker(held.registry, store=store, config=quiet) as worker:
                assert await client.handle("paused").result() == "paused"
                failed = await client.submit("refuse", "bad", id="failed")
                with pytest.raises(ExecutionFailedError):
                    await failed.result()
                await client.retry("failed", state="again")
                assert await failed.result() == "again"
                assert await (await client.submit("work", 5)).result() == 5
                assert (await client.get("claimed")).state == "resuming"
                assert "claimed" in (await worker.auto_resume_all()).resumed
                assert await client.handle("claimed").result() == "claimed"


@pytest.mark.parametrize("asked", [False, True])
async def test_a_retry_whose_caller_died_in_the_middle_of_it_is_obeyed(asked: bool) -> None:
    """It had claimed what failed, and not yet written that it goes on. Without a request it is only given back."""
    store, registry, fails = MemoryCheckpointStore(), StepRegistry(), [True]

    async def work(state: Any) -> Any:
        if fails:
            raise NonRetryable(fails.pop())
        return state

    registry.workflow("work", [registry.step(work)])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            run = await executor.start("work", 7, id="x")
            await run.wait("failed")
        async with CrashableWorker(registry, store=store, queues=["none"]) as doomed:
            if asked:
                await store.send("x", Message(kind="retry", sent=0.0))
            assert await doomed.sweeper.claims.take(("x",), frozenset({ExecutionState.FAILED}), frozenset())
            await crash(doomed)
        async with Worker(registry, store=store), Client(store) as client:
            while (found := await client.get("x")).owner is not None:
                await (await client.submit("work", 1)).result()
            assert found.state == ("completed" if asked else "failed")


# --- rest -----------------------------------------------------------------------------------------------------------


async def test_a_worker_rests_while_what_is_due_is_not_for_it() -> None:
    """Strangers are due all the time, and nothing is for this worker: it looks now and then, not all the time."""
    store = FaultyStore(MemoryCheckpointStore())
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            for n in range(5):
                await client.submit("of-another-program", id=f"stranger-{n}")
            async with Worker(program("mine"), store=store):
                await (await client.submit("mine")).result()
                before = store.calls["claim"]
                await anyio.sleep(1.0)  # what is measured is time
                assert store.calls["claim"] - before < 10, "a claim every 20 ms would be 50"


async def test_a_worker_rests_while_a_limited_queue_is_full() -> None:
    store = FaultyStore(MemoryCheckpointStore())
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            await client.limit_queue("none", concurrency=0)
            for _ in range(5):
                await client.submit("mine", queue="none")
            async with Worker(program("mine"), store=store):
                await (await client.submit("mine")).result()
                calls = dict(store.calls)
                await anyio.sleep(1.0)  # what is measured is time
                assert store.calls["claim"] - calls["claim"] < 10
                assert store.calls["commit"] - calls["commit"] < 3, "nothing is written for a queue that is full"


async def test_a_delay_ends_in_time_although_something_else_is_due_all_the_time() -> None:
    """What is due and for nobody here hides what becomes due behind it; it is looked for all the same."""
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    with anyio.fail_after(PATIENCE):
        async with Client(store, clock=clock) as client:
            await client.submit("of-another-program")
            async with Worker(program("mine"), store=store, clock=clock, config=NEVER):
                late = await client.submit("mine", 1, delay=10.0)
                await (await client.submit("mine")).result()
                while (await client.get(late.id)).state == "initialized" and clock.monotonic() < 60.0:
                    clock.advance(0.5)
                    with anyio.move_on_after(0.05):  # real time for the worker to look
                        await late.wait()
                assert (await client.get(late.id)).state == "completed"


# --- told at once ---------------------------------------------------------------------------------------------------


async def hears_of_itself(store: CheckpointStore) -> None:
    """A worker that shares its store object with whoever submits and signals, itself for instance."""
    with anyio.fail_after(PATIENCE):
        async with Worker(program("mine"), store=store, config=NEVER) as worker, Client(store, config=NEVER) as client:
            for one in (worker, client):
                assert await (await one.submit("mine", 1)).result() == ["mine", 1]
                run = await one.submit("asks")
                await run.wait("waiting")
                await one.signal(run.id, "go", "heard")
                assert await run.result() == "heard"


async def test_what_is_submitted_and_signalled_in_the_same_program_is_heard_of_at_once() -> None:
    await hears_of_itself(MemoryCheckpointStore())


async def test_so_it_is_on_postgres(postgres_server: PostgresServer | Source, postgres_schema: str) -> None:
    assert postgres_server.url is not None
    await hears_of_itself(open_store(postgres_server.url, schema=postgres_schema))


async def test_so_it_is_on_redis(redis_url: str, redis_prefix: str) -> None:
    await hears_of_itself(open_store(redis_url, prefix=redis_prefix.rstrip(":")))


# --- two programs that start together -------------------------------------------------------------------------------


class LateComer(FaultyStore):
    """Lets another program sign on and start an execution between two looks of a pass at start."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__(store)
        self.before_find: Any = None

    async def find(self, query: Any) -> Any:
        if self.before_find is not None and query.states is not None:
            act, self.before_find = self.before_find, None
            await act()
        return await super().find(query)


async def test_a_pass_at_start_does_not_take_what_a_program_that_has_just_come_runs() -> None:
    """I3: its owner was not registered yet when the pass asked who lives."""
    inner = MemoryCheckpointStore()
    store = LateComer(inner)
    with anyio.fail_after(PATIENCE):
        async with (
            Executor(program("mine"), store=store, config=ExecutorConfig(auto_resume=False)) as early,
            anyio.create_task_group() as tasks,
        ):
            started, go, ended = anyio.Event(), anyio.Event(), anyio.Event()
            registry, ran = StepRegistry(), []

            async def mine(ctx: StepContext, state: Any) -> Any:
                ran.append(ctx.attempt)
                started.set()
                await go.wait()
                return "done"

            registry.register("mine", mine)
            registry.workflow("mine", ["mine"])
            early.registry.workflow("mine2", ["mine"])
            results: list[Any] = []

            async def other_program() -> None:
                async with Executor(registry, store=inner) as late:
                    results.append(await (await late.start("mine", id="x")).result())
                ended.set()

            async def sign_on() -> None:
                tasks.start_soon(other_program)
                await started.wait()

            store.before_find = sign_on
            report = await early.auto_resume_all()
            assert list(report.skipped) == ["x"]
            assert not report.resumed
            go.set()
            await ended.wait()
        assert results == ["done"]
        assert ran == [1]


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queues", ["gpu", [], [""], ["a\x00"], [5]])
def test_queues_that_make_no_sense_are_refused(queues: Any) -> None:
    with pytest.raises(ConfigError):
        Worker(program(), store="memory:", queues=queues)


def test_concurrency_is_said_once_or_not_at_all() -> None:
    five = ExecutorConfig(max_concurrency=5)
    assert Worker(program(), store="memory:").config.max_concurrency == 100
    assert Worker(program(), store="memory:", config=five).config.max_concurrency == 5
    assert Worker(program(), store="memory:", config=five, concurrency=5).config.max_concurrency == 5
    with pytest.raises(ConfigError, match="configuration is for 5: say it once"):
        Worker(program(), store="memory:", config=five, concurrency=6)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, "many"])
def test_a_concurrency_that_makes_no_sense_is_refused(concurrency: Any) -> None:
    with pytest.raises(ConfigError):
        Worker(program(), store="memory:", concurrency=concurrency)
