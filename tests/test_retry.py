"""Failures of an attempt: tried again with back-off, durably counted, until the policy gives up."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import pytest

from longrun import (
    EventType,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    NonRetryable,
    RetryPolicy,
    StepContext,
    StepRegistry,
    StepTimeoutError,
)
from longrun.testing import ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash

CALM = ExecutorConfig(heartbeat_interval=600, lease_ttl=1800, checkpoint_interval=600)
STEADY = RetryPolicy(max_attempts=4, initial=10.0, factor=3.0, maximum=50.0, jitter=False)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(autojump=True)


@pytest.fixture
def registry() -> StepRegistry:
    return StepRegistry()


@pytest.fixture
def store(clock: ManualClock) -> MemoryCheckpointStore:
    return MemoryCheckpointStore(clock=clock)


async def test_an_attempt_that_fails_is_repeated_after_the_back_off(registry, store, clock):
    moments = []

    @registry.step(retry=STEADY)
    async def work(ctx: StepContext, state: int) -> int:
        moments.append((ctx.attempt, clock.now() - 1_700_000_000, ctx.idempotency_key))
        if ctx.attempt < 4:
            raise ValueError(ctx.attempt)
        return state

    registry.workflow("work", [work])
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        run = await executor.start("work", 7, id="a")
        assert await run.result() == 7
        rows = await executor.steps("a")
        assert (rows[-1].attempts, rows[-1].error) == (4, None)
        assert (await run.info()).error is None
    assert [attempt for attempt, _, _ in moments] == [1, 2, 3, 4]
    for (_, moment, _), least in zip(moments, [0, 10, 40, 90], strict=True):
        assert moment >= least
    assert len({key for _, _, key in moments}) == 1


async def test_when_the_attempts_are_used_up_it_fails_with_the_last_error(registry, store, clock):
    @registry.step
    async def work(ctx: StepContext, state: Any) -> Any:
        raise ValueError(f"attempt {ctx.attempt}")

    registry.workflow("work", [work])
    config = ExecutorConfig(max_retries=2, heartbeat_interval=600, lease_ttl=1800)
    events: list[Any] = []
    async with Executor(registry, store=store, clock=clock, config=config, on_event=events.append) as executor:
        run = await executor.start("work", id="a")
        with pytest.raises(ExecutionFailedError, match="attempt 3"):
            await run.result()
        info = await run.info()
        assert (info.state, info.attempt, info.current_step) == ("failed", 3, 0)
        assert info.end_time is not None
    told = [(e.type, e.attempt) for e in events if e.type.startswith(("step_", "execution_"))]
    assert told == [
        (EventType.EXECUTION_STARTED, 0),
        (EventType.STEP_STARTED, 1),
        (EventType.STEP_FAILED, 1),
        (EventType.STEP_RETRYING, 2),
        (EventType.STEP_STARTED, 2),
        (EventType.STEP_FAILED, 2),
        (EventType.STEP_RETRYING, 3),
        (EventType.STEP_STARTED, 3),
        (EventType.STEP_FAILED, 3),
        (EventType.EXECUTION_FAILED, 3),
    ]


@pytest.mark.parametrize(
    ("policy", "error", "attempts"),
    [
        (STEADY, NonRetryable("no"), 1),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=OSError), ValueError("no"), 1),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=(OSError, ValueError)), ValueError("no"), 3),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=[OSError, ValueError]), ValueError("no"), 3),
        (RetryPolicy(max_attempts=3, initial=0, give_up_on=ValueError), ValueError("no"), 1),
        (RetryPolicy(max_attempts=3, initial=0, give_up_on=(ValueError,)), UnicodeError("no"), 1),
        (RetryPolicy(max_attempts=1), ValueError("no"), 1),
        (RetryPolicy(max_attempts=2, initial=0), SystemExit(3), 2),
        (RetryPolicy(max_attempts=2, initial=0), ExceptionGroup("many", [ValueError("no")]), 2),
        (STEADY, ExceptionGroup("many", [ValueError("no"), ExceptionGroup("more", [NonRetryable("no")])]), 1),
        (
            RetryPolicy(max_attempts=3, initial=0, give_up_on=OSError),
            ExceptionGroup("many", [OSError(), KeyError()]),
            1,
        ),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=OSError), ExceptionGroup("many", [OSError()]), 3),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=OSError), ExceptionGroup("two", [OSError(), KeyError()]), 1),
        (RetryPolicy(max_attempts=3, initial=0, retry_on=ExceptionGroup), ExceptionGroup("many", [KeyError()]), 3),
    ],
)
async def test_the_policy_says_what_is_tried_again(registry, store, clock, policy, error, attempts):
    calls = []

    @registry.step(retry=policy)
    async def work(state: Any) -> Any:
        calls.append(1)
        raise error

    registry.workflow("work", [work])
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        with pytest.raises(ExecutionFailedError) as caught:
            await (await executor.start("work")).result()
    assert caught.value.attempt == len(calls) == attempts


async def test_attempt_and_next_time_survive_a_crash_during_the_back_off(registry, store):
    """The count does not start again, nor does the wait."""
    clock = ManualClock()
    attempts = []

    @registry.step(retry=STEADY)
    async def work(ctx: StepContext, state: Any) -> Any:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ValueError
        return clock.now()

    registry.workflow("work", [work])
    async with CrashableExecutor(registry, store=store, clock=clock, config=CALM) as dying:
        events = dying.events()
        await dying.start("work", id="a")
        async for event in events:
            if event.type is EventType.STEP_RETRYING:
                break
        await crash(dying)
    assert attempts == [1]
    clock.advance(4)
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        events = executor.events()
        run = await executor.handle("a")
        assert (await run.info()).attempt == 1
        await anyio.wait_all_tasks_blocked()
        assert attempts == [1]
        clock.advance(6)
        async for event in events:
            if event.type is EventType.STEP_RETRYING:
                break
        clock.advance(30)
        await run.result()
    assert attempts == [1, 2, 3]


async def test_a_crash_in_mid_attempt_uses_none_up(registry, store):
    attempts = []
    reached = anyio.Event()

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def work(ctx: StepContext, state: Any) -> Any:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            reached.set()
            await anyio.sleep_forever()
        return "done"

    registry.workflow("work", [work])
    async with CrashableExecutor(registry, store=store) as dying:
        await dying.start("work", id="a")
        await reached.wait()
        await crash(dying)
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == "done"
    assert attempts == [1, 1]


async def test_a_drain_during_the_back_off_keeps_the_count_and_the_time(registry, store):
    clock = ManualClock()
    attempts = []

    @registry.step(retry=STEADY)
    async def work(ctx: StepContext, state: Any) -> Any:
        attempts.append(ctx.attempt)
        if ctx.attempt < 2:
            raise ValueError
        return "done"

    registry.workflow("work", [work])
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        events = executor.events()
        await executor.start("work", id="a")
        async for event in events:
            if event.type is EventType.STEP_RETRYING:
                break
    info = await store.load("a")
    assert (info.head.state, info.head.owner, info.head.attempt) == ("running", None, 1)
    assert info.head.due == clock.now() + 10
    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        run = await executor.handle("a")
        clock.advance(10)
        assert await run.result() == "done"
    assert attempts == [1, 2]


async def test_a_drain_does_not_wait_for_the_end_of_a_back_off(registry, store):
    @registry.step(retry=STEADY)
    async def work(state: Any) -> Any:
        raise ValueError

    registry.workflow("work", [work])
    config = ExecutorConfig(heartbeat_interval=600, lease_ttl=1800, checkpoint_interval=600, drain_timeout=3600)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=ManualClock(), config=config) as executor:
            events = executor.events()
            await executor.start("work", id="a")
            async for event in events:
                if event.type is EventType.STEP_RETRYING:
                    break
            while executor.runners["a"].seat.place is not None:  # it gives it up when it begins to wait
                await store.ping()
    assert (await store.load("a")).head.owner is None


async def test_running_over_the_time_out_is_an_ordinary_failure(registry, store):
    attempts = []

    @registry.step(timeout=0.05, retry=RetryPolicy(max_attempts=2, initial=0))
    async def work(ctx: StepContext, state: Any) -> Any:
        attempts.append(ctx.attempt)
        assert ctx.time_left is not None
        assert ctx.time_left <= 0.05
        await anyio.sleep_forever()

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        with pytest.raises(ExecutionFailedError, match=r"time-out of 0\.05 s") as caught:
            await (await executor.start("work")).result()
    assert attempts == [1, 2]
    assert str(caught.value.error).startswith(StepTimeoutError.__name__)


async def test_a_step_that_swallows_the_time_out_is_called_once_for_each_attempt(registry, store):
    calls = []

    @registry.step(timeout=0.01, retry=RetryPolicy(max_attempts=1))
    async def stubborn(state: Any) -> str:
        calls.append(1)
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()
        return "too late"

    registry.workflow("work", [stubborn])
    async with Executor(registry, store=store) as executor:
        with pytest.raises(ExecutionFailedError, match=r"0\.01"):
            await (await executor.start("work")).result()
    assert calls == [1]


async def test_a_time_out_is_one_although_the_tasks_of_the_step_fail_when_they_are_stopped(registry, store):
    """Their errors come in one group with the cancellation, on trio."""

    async def download() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("the temporary file cannot be removed")

    @registry.step(timeout=0.05, retry=RetryPolicy(max_attempts=2, initial=0))
    async def work(state: Any) -> Any:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(download)
            tasks.start_soon(anyio.sleep_forever)

    registry.workflow("work", [work])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            with pytest.raises(ExecutionFailedError, match=r"time-out of 0\.05 s") as caught:
                await (await executor.start("work")).result()
    assert caught.value.attempt == 2


async def test_every_attempt_receives_a_state_decoded_anew(registry, store):
    seen = []

    @registry.step(retry=RetryPolicy(max_attempts=3, initial=0))
    async def work(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(state["items"]))
        state["items"].append("changed")
        if len(seen) < 3:
            raise ValueError
        return state

    @registry.step
    async def first(state: Any) -> dict[str, Any]:
        return {"items": ["original"]}

    registry.workflow("work", [first, work])
    async with Executor(registry, store=store) as executor:
        assert await (await executor.start("work")).result() == {"items": ["original", "changed"]}
    assert seen == [["original"]] * 3


async def test_retry_runs_a_failed_execution_again_at_the_failed_step_with_its_progress(registry, store):
    calls: list[Any] = []
    broken = [True]

    async def count() -> int:
        calls.append("once")
        return 5

    @registry.step
    async def first(state: int) -> int:
        calls.append("first")
        return state + 1

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def second(ctx: StepContext, state: int) -> int:
        calls.append(("second", ctx.attempt))
        value: int = await ctx.once("count", count)
        if broken:
            raise ValueError
        return state + value

    registry.workflow("work", [first, second])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", 1, id="a")
        with pytest.raises(ExecutionFailedError):
            await run.result()
        broken.clear()
        await run.retry()
        assert await run.result() == 7
        assert (await run.info()).end_time is not None
    assert calls == ["first", ("second", 1), "once", ("second", 1)]


async def test_retry_can_bring_another_state_and_fail_again(registry, store):
    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def work(state: int) -> int:
        if state < 0:
            raise ValueError(state)
        return state

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", -1)
        with pytest.raises(ExecutionFailedError, match="-1"):
            await run.result()
        await run.retry(state=-2)
        with pytest.raises(ExecutionFailedError, match="-2"):
            await run.result()
        await run.retry(state=3)
        assert await run.result() == 3


async def test_the_error_of_a_task_group_says_what_was_in_it(registry, store, clock):
    async def work(state: Any) -> Any:
        raise ExceptionGroup("many", [ValueError("first"), ExceptionGroup("more", [KeyError("second")])])

    async with Executor(registry, store=store, clock=clock, config=CALM) as executor:
        run = await executor.start([work])
        with pytest.raises(
            ExecutionFailedError, match=r"ExceptionGroup: many .*: ValueError: first; KeyError: 'second'"
        ):
            await run.result()


def test_the_delays_grow_to_the_maximum_and_jitter_takes_up_to_half():
    assert [STEADY.delay(n) for n in range(1, 5)] == [10, 30, 50, 50]
    policy = RetryPolicy(initial=8.0, jitter=True)
    assert (policy.delay(1, 0.0), policy.delay(1, 1.0)) == (4.0, 8.0)
    assert RetryPolicy(maximum=1e9).delay(100_000) == 1e9
    assert RetryPolicy(initial=0).delay(100_000) == 0
