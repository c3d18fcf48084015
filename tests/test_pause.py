"""Pause and resume: at the step's end or its next point, at once with `interrupt`, through restarts with `hold`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

from longrun import (
    Client,
    ExecutionCancelledError,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    MemoryCheckpointStore,
    NotStorableError,
    Sleep,
    StepContext,
    StepRegistry,
    StoreUnavailableError,
    WaitFor,
    Worker,
)
from longrun.stored import Message, Send
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, ManualClock
from longrun.testing.interposed import InterposedBackend
from tests.crashing import PATIENCE, CrashableExecutor, crash

T = TypeVar("T")


class Gate:
    """A step that tells when it has begun, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.calls = 0

    async def __call__(self, state: Any) -> Any:
        self.calls += 1
        self.begun.set()
        await self.go.wait()
        return state


async def heard(executor: Executor, id: str, count: int = 1) -> None:
    """Return when so many messages have come to the runner of an execution."""
    while len(executor.runners[id].inbox) < count:
        await executor.store.ping()


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
def registry(gate: Gate) -> StepRegistry:
    registry = StepRegistry()

    async def after(state: list[Any]) -> list[Any]:
        return [*state, "after"]

    registry.register("gate", gate)
    registry.workflow("work", ["gate", after])
    return registry


async def test_a_pause_takes_effect_at_the_end_of_the_step(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", ["x"])
        await gate.begun.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pause)
            await heard(executor, run.id)
            assert (await run.info()).state == "running"
            gate.go.set()
        info = await run.info()
        assert (info.state, info.current_step, info.owner) == ("paused", 1, executor.owner)
        await executor.wait_idle()
        await run.resume()
        assert await run.result() == ["x", "after"]
    assert gate.calls == 1


async def test_a_pause_takes_effect_at_a_checkpoint_inside_the_step_and_keeps_its_progress(store):
    registry = StepRegistry()
    reached, seen = anyio.Event(), []

    @registry.step
    async def work(ctx: StepContext, state: int) -> int:
        async for n in ctx.each("numbers", range(6)):
            seen.append(n)
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
            if n == 3 and not reached.is_set():
                reached.set()
                await heard(executor, "a")
        return int(ctx.local["sum"])

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", 0, id="a")
        await reached.wait()
        await run.pause()
        assert seen == [0, 1, 2, 3]
        await run.resume()
        assert await run.result() == 15
    assert seen == [0, 1, 2, 3, 4, 5]


async def test_interrupt_cancels_the_step_in_flight_at_once(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        await run.pause(interrupt=True)
        info = await run.info()
        assert (info.state, info.current_step, info.attempt) == ("paused", 0, 0)
        gate.go.set()
        await run.resume()
        assert await run.result() == ["after"]
    assert gate.calls == 2


async def test_interrupt_stops_a_step_whose_tasks_fail_while_they_are_stopped(store):
    """Their errors come in one group with the cancellation, on trio."""
    registry = StepRegistry()
    begun, calls = anyio.Event(), []

    async def download() -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            raise OSError("the temporary file cannot be removed")

    @registry.step
    async def work(state: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(download)
                tasks.start_soon(anyio.sleep_forever)
        return "done"

    registry.workflow("work", [work])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            run = await executor.start("work")
            await begun.wait()
            await run.pause(interrupt=True, hold=True)
            info = await run.info()
            assert (info.state, info.attempt) == ("paused", 0)
            await run.resume()
            assert await run.result() == "done"


@pytest.mark.parametrize("order", ["pause", "cancel"])
async def test_what_runs_here_is_stopped_with_one_write_and_no_stored_request(registry, gate, order):
    store = FaultyStore(MemoryCheckpointStore())
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", ["x"])
        await gate.begun.wait()
        before = store.calls["commit"], store.calls["messages"]
        await (run.pause(interrupt=True) if order == "pause" else run.cancel())
        assert (store.calls["commit"], store.calls["messages"]) == (before[0] + 1, before[1])


async def test_resuming_what_runs_here_costs_nothing(registry, gate):
    store = FaultyStore(MemoryCheckpointStore())
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", ["x"])
        await gate.begun.wait()
        before = store.calls["commit"], store.calls["messages"]
        await run.resume()
        assert (store.calls["commit"], store.calls["messages"]) == before
        gate.go.set()
        assert await run.result() == ["x", "after"]


async def test_a_stored_resume_of_what_runs_is_taken_once_however_often_it_is_delivered(registry, store, gate):
    """Every sweep finds it until the write that takes it is durable."""
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", ["x"])
        await gate.begun.wait()
        runner = executor.runners[run.id]
        before, resume = runner.head.revision, Message(id=7, kind="resume", sent=0.0)
        runner.deliver([resume])
        runner.deliver([resume])
        assert await runner.obeyed(7)
        assert runner.head.revision == before + 1
        gate.go.set()
        assert await run.result() == ["x", "after"]


async def test_a_pause_that_the_step_does_not_come_to_soon_is_stored_and_survives_a_crash(registry, store, gate):
    async with CrashableExecutor(registry, store=store) as dying:
        run = await dying.start("work", ["x"])
        await gate.begun.wait()
        with pytest.raises(TimeoutError):
            await run.pause(hold=True, timeout=0.001)
        await crash(dying)
    async with Executor(registry, store=store) as executor:
        await (await executor.handle(run.id)).wait("paused")
        assert (await executor.get(run.id)).hold
    assert gate.calls == 1


async def test_resume_can_replace_the_state_and_the_old_checkpoint_stays(registry, store, gate):
    gate.go.set()
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", ["old"], id="a")
        await run.result()
        gate.go = anyio.Event()
        gate.begun = anyio.Event()
        run = await executor.start("work", ["old"], id="b")
        await gate.begun.wait()
        await run.pause(interrupt=True)
        gate.go.set()
        await run.resume(state=["new"])
        assert await run.result() == ["new", "after"]
        states = [(checkpoint.kind, checkpoint.state) for checkpoint in await executor.history("b")]
        assert states[:2] == [("start", ["old"]), ("state", ["new"])]


async def test_the_state_of_what_runs_cannot_be_replaced_nor_one_that_cannot_be_stored(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        with pytest.raises(InvalidStateError, match="pause it first"):
            await run.resume(state=[1])
        await run.pause(interrupt=True)
        with pytest.raises(NotStorableError, match=r"state\[0\]"):
            await run.resume(state=[object()])
        assert (await run.info()).state == "paused"


async def test_pause_and_resume_that_wait_together_leave_it_running(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pause)
            await heard(executor, run.id)
            await run.resume()
            gate.go.set()
        assert await run.result() == ["after"]
        assert [row.kind for row in await executor.steps(run.id)] == ["start", "step", "finish"]


async def test_two_resumes_at_once_run_it_once(registry, store, gate):
    events: list[Any] = []
    async with Executor(registry, store=store, on_event=events.append) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        await run.pause(interrupt=True)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(run.resume)
        gate.go.set()
        assert await run.result() == ["after"]
    assert gate.calls == 2
    assert [event.type for event in events].count("resumed") == 1
    assert "lease_lost" not in [event.type for event in events]


async def test_resuming_what_runs_is_answered_at_once_and_does_not_trouble_the_step(registry, store, gate):
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:
        run = await one.start("work", [], id="a")
        await gate.begun.wait()
        with anyio.fail_after(10):
            await run.resume()
            await two.resume("a")
        gate.go.set()
        assert await run.result() == ["after"]
    assert gate.calls == 1


async def test_a_pause_that_is_taken_back_in_time_does_not_trouble_the_step(store):
    registry = StepRegistry()
    begun, go, calls = anyio.Event(), anyio.Event(), []

    @registry.step
    async def work(ctx: StepContext, state: Any) -> str:
        calls.append(1)
        begun.set()
        await go.wait()
        await ctx.checkpoint()
        return "done"

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="a")
        await begun.wait()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run.pause)
                await heard(executor, "a")
                tasks.start_soon(run.resume)
        go.set()
        assert await run.result() == "done"
    assert calls == [1]


class SlowPost(InterposedBackend):
    """Messages are on their way until they may arrive."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.posted, self.arrives = threading.Event(), threading.Event()

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        if call == "commit" and any(isinstance(write, Send) for write in args[0]):
            self.posted.set()
            assert self.arrives.wait(10)
        return function(*args, **options)


async def test_a_pause_that_is_taken_back_while_it_is_being_stored_does_not_come_back():
    """What was told by word of mouth is stored when it is not obeyed soon: the two are one request."""
    backend, registry = SlowPost(), StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def work(ctx: StepContext, state: Any) -> str:
        begun.set()
        await go.wait()
        await ctx.checkpoint()
        return "done"

    registry.workflow("work", [work])
    async with Executor(registry, store=CheckpointStore(backend)) as executor:
        run = await executor.start("work", id="a")
        await begun.wait()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run.pause)
                await anyio.to_thread.run_sync(backend.posted.wait)
                await run.resume()
                backend.arrives.set()
        assert await executor.store.messages("a") == []
        go.set()
        assert await run.result() == "done"


async def test_two_pauses_at_once_are_one_pause_and_hold_wins(registry, store, gate):
    """I6"""
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        async with anyio.create_task_group() as tasks:
            for hold in (False, True, False):
                tasks.start_soon(partial(run.pause, hold=hold))
            await heard(executor, run.id, 3)
            gate.go.set()
        info = await run.info()
        assert (info.state, info.hold) == ("paused", True)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(run.pause)
        await executor.wait_idle()
        info = await run.info()
        assert (info.state, info.hold) == ("paused", True)


async def test_control_works_on_what_another_living_executor_runs(registry, store, gate):
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:
        run = await one.start("work", [], id="a")
        await gate.begun.wait()
        await two.pause("a", interrupt=True)
        assert (await two.get("a")).owner == one.owner
        assert "a" in one.resting
        gate.go.set()
        await two.resume("a")
        assert await run.result() == ["after"]
        assert not two.runners


async def test_resume_runs_here_when_no_living_process_owns_it(registry, store, gate):
    async with Executor(registry, store=store) as one:
        run = await one.start("work", [], id="a")
        await gate.begun.wait()
        await run.pause(interrupt=True, hold=True)
    gate.go.set()
    async with Executor(registry, store=store) as two:
        info = await two.get("a")
        assert (info.state, info.hold, info.owner) == ("paused", True, None)
        await two.resume("a")
        assert await (await two.handle("a")).result() == ["after"]


@pytest.mark.parametrize("crashes", [False, True])
async def test_hold_stays_through_restarts_and_a_plain_pause_ends_with_the_next_start(registry, store, gate, crashes):
    """I6"""
    async with CrashableExecutor(registry, store=store) as dying:
        for id, hold in (("held", True), ("plain", False)):
            gate.begun = anyio.Event()
            run = await dying.start("work", [], id=id)
            await gate.begun.wait()
            await run.pause(interrupt=True, hold=hold)
        if crashes:
            await crash(dying)
    gate.go.set()
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("plain")).result() == ["after"]
        report = await executor.auto_resume_all()
        assert report.skipped == {"held": "held: it stays paused until it is resumed"}
        assert (await executor.get("held")).state == "paused"


async def test_the_sweep_never_takes_up_what_is_paused(registry, store, gate):
    """I6: only a pass at start ends a plain pause."""
    clock = ManualClock()
    async with Executor(registry, store=store, clock=clock) as watching:
        async with CrashableExecutor(registry, store=store) as dying:
            run = await dying.start("work", [], id="a")
            await gate.begun.wait()
            await run.pause(interrupt=True)
            await crash(dying)
        for _ in range(3):
            clock.advance(5)
            await watching.sweeper.once()
        assert (await watching.get("a")).state == "paused"


async def test_a_paused_wait_keeps_its_deadline_and_its_signals():
    clock = ManualClock()
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state, timeout=100)

    async def use(ctx: StepContext, state: Any) -> Any:
        return [ctx.signal, ctx.timed_out]

    registry.workflow("ask", [ask, use])
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock) as executor:
        late, answered = await executor.start("ask", id="late"), await executor.start("ask", id="answered")
        for run in (late, answered):
            due = (await run.wait("waiting")).due
            await run.pause()
            info = await run.info()
            assert (info.state, info.due, info.waiting_for) == ("paused", due, "answer")
        await answered.signal("answer", 5)
        clock.advance(200)
        await executor.sweeper.once()
        assert (await late.info()).state == "paused"
        assert (await answered.info()).state == "paused"
        await answered.resume()
        await late.resume()
        assert await answered.result() == [5, False]
        assert await late.result() == [None, True]


@pytest.mark.parametrize("early", [False, True], ids=["alone", "with a signal for later"])
async def test_the_next_start_lets_a_paused_wait_wait_on(early):
    """While a signal that it does not want yet is there, it stays with its owner: it would be woken again at once."""
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state, timeout=100)

    async def use(ctx: StepContext, state: Any) -> Any:
        return ctx.signal

    registry.workflow("ask", [ask, use])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=clock) as executor:
            run = await executor.start("ask", id="a")
            due = (await run.wait("waiting")).due
            await run.pause()
            if early:
                await run.signal("later", 1)
        async with Executor(registry, store=store, clock=clock) as executor:
            run = await executor.handle("a")
            info = await run.wait("waiting")
            assert (info.due, info.waiting_for) == (due, "answer")
            await executor.wait_idle()
            assert (await store.load("a")).head.owner == (executor.owner if early else None)
            await run.signal("answer", 5)
            assert await run.result() == 5


async def test_a_paused_sleep_goes_back_to_sleep():
    clock = ManualClock()
    registry = StepRegistry()

    async def nap(state: Any) -> Sleep:
        return Sleep(100, state)

    registry.workflow("nap", [nap])
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock) as executor:
        run = await executor.start("nap", "x")
        await run.wait("waiting")
        await run.pause()
        await run.resume()
        assert (await run.info()).state == "waiting"
        clock.advance(100)
        assert await run.result() == "x"


async def test_looking_at_what_is_paused_leaves_it_with_its_owner(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [], id="a")
        await gate.begun.wait()
        await run.pause(interrupt=True)
        assert await executor.take_over(await store.load("a"))
        await executor.wait_idle()
        assert "a" in executor.resting
        head = (await store.load("a")).head
        assert (head.state, head.owner) == ("paused", executor.owner)


async def test_a_timeout_ends_the_waiting_and_not_the_request(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await gate.begun.wait()
        with pytest.raises(TimeoutError, match="is stored"):
            await run.pause(timeout=0.05)
        gate.go.set()
        assert (await run.wait("paused")).state == "paused"


async def test_a_timeout_ends_the_waiting_also_while_the_store_is_away(store):
    """The step has obeyed, and what it wrote then is not answered."""
    faulty = FaultyStore(store)

    async def work(ctx: StepContext, state: Any) -> Any:
        while True:
            await ctx.checkpoint()
            await anyio.lowlevel.checkpoint()

    registry = StepRegistry()
    registry.workflow("work", [work])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=faulty) as executor:
            run = await executor.start("work")
            faulty.fail("commit", times=None)
            with anyio.move_on_after(PATIENCE / 4) as patience, pytest.raises((TimeoutError, StoreUnavailableError)):
                await run.pause(timeout=0.1)
            assert not patience.cancelled_caught
            assert faulty.fired["commit"]
            faulty.heal()
            await run.wait("paused")


@pytest.mark.parametrize("kind", ["resume", "cancel"])
async def test_a_request_that_is_not_waited_for_is_seen_to(registry, store, gate, kind):
    """Nobody owns it, and nobody else would: a living worker looks at what is paused only when it is asked to."""
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await run.pause(hold=True, interrupt=True)
    gate.go.set()
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client, Worker(registry, store=store):
            with pytest.raises(TimeoutError, match="is stored"):
                await getattr(client, kind)(run.id, timeout=0)
            ended = await client.handle(run.id).wait("completed", "cancelled")
            assert ended.state == ("cancelled" if kind == "cancel" else "completed")


async def test_a_resume_whose_sender_died_is_obeyed_by_the_next_program(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        await run.pause(hold=True, interrupt=True)
    await store.open()
    await store.send(run.id, Message(kind="resume", sent=1.0))
    gate.go.set()
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            await (await executor.handle(run.id)).result()
    await store.aclose()


async def test_a_pause_that_comes_too_late_says_so(registry, store, gate):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", [])
        gate.go.set()
        await run.result()
        for request in (run.pause, run.resume):
            with pytest.raises(InvalidStateError, match="it is completed"):
                await request()


async def test_a_pause_during_the_last_step_is_refused_once_it_has_ended(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def only(state: Any) -> str:
        begun.set()
        await go.wait()
        return "done"

    registry.workflow("only", [only])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("only")
        await begun.wait()
        caught = []

        async def pause() -> None:
            try:
                await run.pause()
            except InvalidStateError as error:
                caught.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause)
            await heard(executor, run.id)
            go.set()
        assert await run.result() == "done"
        assert len(caught) == 1


async def test_what_waits_for_a_place_can_be_paused_and_cancelled(registry, store, gate):
    async with Executor(registry, store=store, config=ExecutorConfig(max_concurrency=1)) as executor:
        await executor.start("work", [], id="running")
        await gate.begun.wait()
        queued = await executor.start("work", [], id="queued")
        other = await executor.start("work", [], id="other")
        with anyio.fail_after(10):
            await queued.pause()
            await other.cancel()
        assert (await queued.info()).state == "paused"
        with pytest.raises(ExecutionCancelledError):
            await other.result()
        gate.go.set()
        await queued.resume()
        assert await queued.result() == ["after"]


async def test_pausing_what_was_only_submitted_keeps_workers_away(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.submit("work", [])
        await run.pause(hold=True)
        assert (await run.info()).state == "paused"
