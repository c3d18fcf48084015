"""Cancel: at once, for good, from anywhere; and what came before it stays readable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import anyio
import pytest

from longrun import (
    ConfigError,
    EventType,
    ExecutionCancelledError,
    ExecutionEvent,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    MemoryCheckpointStore,
    RetryPolicy,
    StepContext,
    StepInterrupted,
    StepRegistry,
    SyncStepContext,
    WaitFor,
)
from longrun.stored import Message
from longrun.testing import ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.mark.parametrize("again", [False, True])
async def test_an_attempt_that_never_began_is_not_counted(store, again):
    """In a back-off there is none behind the one that failed; after it there is."""
    registry, clock = StepRegistry(), ManualClock()
    backs_off, begun = anyio.Event(), anyio.Event()

    @registry.step(retry=RetryPolicy(initial=30.0, jitter=False))
    async def work(ctx: StepContext, state: Any) -> Any:
        if ctx.attempt == 1:
            raise OSError("away")
        begun.set()
        await anyio.sleep_forever()

    async def note(event: ExecutionEvent) -> None:
        if event.type is EventType.STEP_RETRYING:
            backs_off.set()

    registry.workflow("work", [work])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=clock, on_event=note) as executor:
            run = await executor.start("work")
            await backs_off.wait()
            if again:
                clock.advance(31)
                await begun.wait()
            await run.cancel()
            with pytest.raises(ExecutionCancelledError) as caught:
                await run.result()
            assert caught.value.attempt == (await run.info()).attempt == (2 if again else 1)


def forever(begun: anyio.Event, ended: list[str]) -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def first(state: int) -> int:
        return state + 1

    @registry.step
    async def work(state: int) -> Any:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("unwound")

    registry.workflow("work", [first, work])
    return registry


async def test_cancel_interrupts_the_step_and_is_stored_with_its_reason(store):
    """I1, I8"""
    begun = anyio.Event()
    ended: list[str] = []
    async with Executor(forever(begun, ended), store=store) as executor:
        run = await executor.start("work", 1)
        await begun.wait()
        await run.cancel("changed my mind")
        assert ended == ["unwound"]
        info = await run.info()
        assert (info.state, info.reason, info.owner, info.current_step) == ("cancelled", "changed my mind", None, 1)
        with pytest.raises(ExecutionCancelledError, match="changed my mind") as caught:
            await run.result()
        assert (caught.value.step, caught.value.attempt) == ("work", 1)
        await run.cancel()
        assert (await run.info()).reason == "changed my mind"
        for request in (run.pause, run.resume, run.retry):
            with pytest.raises(InvalidStateError, match="it is cancelled"):
                await request()
        assert [checkpoint.state for checkpoint in await executor.history(run.id)] == [1, 2]


async def test_a_step_that_raises_its_cancellation_along_with_an_error_ends_alone(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def bad(state: Any) -> Any:
        try:
            begun.set()
            await anyio.sleep_forever()
        except BaseException as error:
            raise BaseExceptionGroup("while stopping", [error, ValueError("not cleaned up")]) from None

    @registry.step
    async def good(state: Any) -> str:
        await go.wait()
        return "done"

    registry.workflow("bad", [bad])
    registry.workflow("good", [good])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            other, run = await executor.start("good"), await executor.start("bad")
            await begun.wait()
            await run.cancel()
            assert [row.kind for row in await executor.steps(run.id)] == ["start", "cancel"]
            go.set()
            assert await other.result() == "done"


async def test_cancel_from_another_executor(store):
    begun = anyio.Event()
    ended: list[str] = []
    registry = forever(begun, ended)
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:
        run = await one.start("work", 1, id="a")
        await begun.wait()
        await two.cancel("a")
        assert ended == ["unwound"]
        with pytest.raises(ExecutionCancelledError):
            await run.result()


async def test_what_nobody_runs_is_cancelled_by_the_caller(store):
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state)

    registry.workflow("ask", [ask, ask])
    async with Executor(registry, store=store) as executor:
        waiting, paused, submitted = (
            await executor.start("ask"),
            await executor.start("ask"),
            await executor.submit("ask"),
        )
        await waiting.wait("waiting")
        await paused.wait("waiting")
        await paused.pause(hold=True)
        for run in (waiting, paused, submitted):
            await run.cancel()
            assert (await run.info()).state == "cancelled"


async def test_a_workflow_that_is_unknown_here_can_be_controlled_all_the_same(store):
    begun = anyio.Event()
    async with CrashableExecutor(forever(begun, []), store=store) as dying:
        await dying.start("work", 1, id="a")
        await dying.start("work", 1, id="b")
        await begun.wait()
        await crash(dying)
    async with Executor(StepRegistry(), store=store) as stranger:
        await stranger.cancel("a")
        assert (await stranger.get("a")).state == "cancelled"
        await stranger.pause("b", hold=True)
        info = await stranger.get("b")
        assert (info.state, info.owner) == ("paused", None)
        await stranger.resume("b")
        info = await stranger.get("b")
        assert (info.state, info.owner) == ("resuming", None)


async def test_an_acknowledged_cancel_survives_a_crash(store):
    """I6: and a cancel that was only stored is obeyed by whoever claims the execution next, before any step."""
    begun = anyio.Event()
    registry = forever(begun, [])
    async with CrashableExecutor(registry, store=store) as dying:
        run = await dying.start("work", 1, id="a")
        await begun.wait()
        dying.runners["a"].deliver = lambda messages: None  # type: ignore[method-assign]  # deaf: it never hears of it
        with pytest.raises(TimeoutError):
            await run.cancel(timeout=0.05)
        await crash(dying)
    begun = anyio.Event()
    async with Executor(forever(begun, []), store=store) as executor:
        with pytest.raises(ExecutionCancelledError):
            await (await executor.handle("a")).result()
        assert not begun.is_set()


async def test_cancel_during_a_back_off():
    clock = ManualClock()
    registry = StepRegistry()

    @registry.step(retry=RetryPolicy(initial=1000, maximum=1000))
    async def bad(state: Any) -> Any:
        raise ValueError

    registry.workflow("bad", [bad])
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock) as executor:
        events = executor.events()
        run = await executor.start("bad")
        async for event in events:
            if event.type == "step_retrying":
                break
        await run.cancel()
        assert (await run.info()).state == "cancelled"


async def test_cancel_while_it_parks(store):
    """The request crosses the write that parks: nobody runs it any more, so the caller claims and cancels it."""
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    async def ask(state: Any) -> WaitFor:
        begun.set()
        await go.wait()
        return WaitFor("answer", state)

    registry.workflow("ask", [ask])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask", id="a")
        await begun.wait()
        runner = executor.runners["a"]
        cross = runner.book.cross

        async def slow(*args: Any, **options: Any) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run.cancel)
                while not runner.inbox:
                    await store.ping()
                await cross(*args, **options)
                runner.finish()

        runner.book.cross = slow  # type: ignore[method-assign]
        go.set()
        with pytest.raises(ExecutionCancelledError):
            await run.result()


async def test_cancel_reaches_the_children(store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def child(state: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    @registry.step
    async def parent(ctx: StepContext, state: int) -> Any:
        workflow = "parent" if state else "child"
        return await (await ctx.start_child(workflow, state - 1, key="k")).result()

    registry.workflow("child", [child])
    registry.workflow("parent", [parent])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("parent", 2, id="p")
        await begun.wait()
        await run.cancel("all of it", children=True)
        states = {one.id: (str(one.state), one.reason) for one in await executor.list()}
        assert len(states) == 4
        assert set(states.values()) == {("cancelled", "all of it")}


async def test_without_children_the_children_go_on(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def child(state: Any) -> str:
        begun.set()
        await go.wait()
        return "done"

    @registry.step
    async def parent(ctx: StepContext, state: Any) -> Any:
        return await (await ctx.start_child("child", None, key="k")).result()

    registry.workflow("child", [child])
    registry.workflow("parent", [parent])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("parent", id="p")
        await begun.wait()
        await run.cancel()
        go.set()
        assert await (await executor.handle("p~1~k")).result() == "done"


async def test_a_thread_is_stopped_at_its_next_context_call_and_the_next_attempt_waits_for_it(store):
    registry = StepRegistry()
    begun, let_go = threading.Event(), threading.Event()
    order = []

    @registry.step
    def work(ctx: SyncStepContext, state: Any) -> str:
        order.append("begin")
        if len(order) > 1:
            return "second"
        begun.set()
        let_go.wait()
        try:
            ctx.checkpoint()
        except StepInterrupted:
            order.append("interrupted")
            raise
        return "first"

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work")
        await anyio.to_thread.run_sync(begun.wait)
        await run.pause(interrupt=True)
        await run.resume()
        await anyio.wait_all_tasks_blocked()
        assert order == ["begin"]
        let_go.set()
        assert await run.result() == "second"
    assert order == ["begin", "interrupted", "begin"]


async def test_a_step_that_swallows_its_cancellation_is_cancelled_all_the_same(store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def stubborn(state: Any) -> str:
        begun.set()
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()
        return "never mind"

    @registry.step
    async def after(state: Any) -> str:
        raise AssertionError

    registry.workflow("work", [stubborn, after])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work")
        await begun.wait()
        await run.cancel()
        with pytest.raises(ExecutionCancelledError):
            await run.result()
        assert (await run.info()).current_step == 0


async def test_a_cancel_that_came_too_late_for_a_failure_does_not_spoil_its_retry(store):
    registry = StepRegistry()
    broken = [True]

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def work(state: Any) -> str:
        if broken:
            raise ValueError
        return "done"

    registry.workflow("work", [work])
    async with Executor(registry, store=store, config=ExecutorConfig(max_retries=0)) as executor:
        run = await executor.start("work", id="a")
        with pytest.raises(ExecutionFailedError):
            await run.result()
        await store.send("a", Message(kind="cancel", sent=0.0))
        broken.clear()
        await run.retry()
        assert await run.result() == "done"


async def test_a_reason_is_text(store):
    async with Executor(StepRegistry(), store=store) as executor:
        with pytest.raises(ConfigError, match="reason"):
            await executor.cancel("a", reason=5)  # type: ignore[arg-type]


@pytest.fixture
def asyncio_alone(anyio_backend_name: str) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio alone lets a task be cancelled by its name")


@pytest.mark.usefixtures("asyncio_alone")
async def test_a_step_that_cancels_its_own_task_fails_and_takes_no_other_along(store):
    """As a library does that bounds a call by cancelling the task, and is late."""
    registry = StepRegistry()
    go = anyio.Event()

    @registry.step(retry=RetryPolicy(max_attempts=2, initial=0.0))
    async def cancels(ctx: StepContext, state: Any) -> int:
        if state or ctx.attempt == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.sleep(60)
        return ctx.attempt

    @registry.step
    async def other(state: Any) -> str:
        await go.wait()
        return "went on"

    registry.workflow("cancels", [cancels])
    registry.workflow("other", [other])
    async with Executor(registry, store=store) as executor:
        beside = await executor.start("other")
        assert await (await executor.start("cancels", False)).result() == 2
        with pytest.raises(ExecutionFailedError, match="CancelledError"):
            await (await executor.start("cancels", True)).result()
        go.set()
        assert await beside.result() == "went on"


@pytest.mark.usefixtures("asyncio_alone")
@pytest.mark.parametrize("awaits", [True, False])
async def test_an_execution_whose_task_is_cancelled_by_name_goes_on_by_itself(store, awaits):
    """A cancellation that comes too late for the step comes out where its checkpoint is awaited."""
    registry = StepRegistry()
    ran: list[str] = []

    @registry.step
    async def first(state: Any) -> str:
        ran.append("first")
        if len(ran) == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if awaits:
                with contextlib.suppress(asyncio.CancelledError):
                    await anyio.sleep(60)
        return "a"

    @registry.step
    async def second(state: str) -> str:
        ran.append("second")
        return state + "b"

    registry.workflow("work", [first, second])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work")
        with anyio.fail_after(PATIENCE):
            assert await run.result() == "ab"
    assert ran == ["first", "second"]
