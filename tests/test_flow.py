"""Where a step's return value leads: on, elsewhere, again, to the end, to sleep, or to wait for a signal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import attrs
import pytest

from longrun import (
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    Finish,
    Goto,
    MemoryCheckpointStore,
    Repeat,
    Sleep,
    StepContext,
    StepRegistry,
    SyncStepContext,
    WaitFor,
)
from longrun.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(autojump=True)


@pytest.fixture
def registry() -> StepRegistry:
    return StepRegistry()


CALM = ExecutorConfig(heartbeat_interval=600, lease_ttl=1800, checkpoint_interval=600)
"""Few beats between here and the moment that a test waits for."""


async def outcome(registry: StepRegistry, clock: ManualClock, steps: list[Any], state: Any = None) -> Any:
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        return await (await executor.start(steps, state)).result()


async def test_steps_run_in_their_order(registry, clock):
    async def one(state: list[Any]) -> list[Any]:
        return [*state, 1]

    async def two(state: list[Any]) -> list[Any]:
        return [*state, 2]

    assert await outcome(registry, clock, [one, two, one], []) == [1, 2, 1]


async def test_goto_by_name_skips_what_is_between(registry, clock):
    async def first(state: list[Any]) -> Goto:
        return Goto("last", [*state, "first"])

    async def skipped(state: list[Any]) -> list[Any]:
        raise AssertionError

    async def last(state: list[Any]) -> list[Any]:
        return [*state, "last"]

    assert await outcome(registry, clock, [first, skipped, last], []) == ["first", "last"]


async def test_goto_back_is_another_visit(registry, clock):
    keys = []

    async def work(ctx: StepContext, state: int) -> int:
        keys.append(ctx.idempotency_key)
        return state + 1

    async def again(state: int) -> Any:
        return Goto("work", state) if state < 3 else state

    assert await outcome(registry, clock, [work, again], 0) == 3
    assert len(set(keys)) == 3


async def test_goto_by_index_where_a_name_is_not_unique(registry, clock):
    async def hop(ctx: StepContext, state: list[Any]) -> Any:
        state = [*state, ctx.step_index]
        return Goto(2, state) if ctx.step_index == 0 else state

    assert await outcome(registry, clock, [hop, hop, hop], []) == [0, 2]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("hop", "it stands 2 times in this execution; give its index"),
        ("nowhere", "no such step"),
        (2, "steps 0 to 1"),
        (-1, "steps 0 to 1"),
        (True, "not bool"),
        (None, "not NoneType"),
    ],
)
async def test_a_goto_that_leads_nowhere_is_the_steps_error(registry, clock, target, text):
    async def hop(state: Any) -> Goto:
        return Goto(target, state)

    with pytest.raises(ExecutionFailedError, match=text) as caught:
        await outcome(registry, clock, [hop, hop])
    assert caught.value.step == "hop"
    assert caught.value.attempt == 1


async def test_repeat_counts_iterations_and_gives_each_visit_its_own_key(registry, clock):
    seen = []

    async def turn(ctx: StepContext, state: int) -> Any:
        assert ctx.local == {}
        ctx.local["used"] = True
        seen.append((ctx.iteration, ctx.idempotency_key))
        return Repeat(state + 1) if state < 3 else state

    assert await outcome(registry, clock, [turn, turn], 0) == 3
    assert [iteration for iteration, _ in seen] == [0, 1, 2, 3, 0]
    assert len({key for _, key in seen}) == 5


async def test_finish_ends_early_with_its_state_as_the_result(registry, clock):
    async def enough(state: Any) -> Finish:
        return Finish({"done": True})

    async def never(state: Any) -> None:
        raise AssertionError

    assert await outcome(registry, clock, [enough, never]) == {"done": True}


@pytest.mark.parametrize("length", [90, timedelta(seconds=90), datetime.fromtimestamp(1_700_000_090, UTC)])
async def test_sleep_parks_until_its_moment(registry, clock, length):
    async def nap(state: Any) -> Sleep:
        return Sleep(length, "rested")

    async def after(ctx: StepContext, state: str) -> Any:
        assert ctx.signal is None
        assert not ctx.timed_out
        return [state, clock.now()]

    state, woke = await outcome(registry, clock, [nap, after])
    assert state == "rested"
    assert woke - 1_700_000_000 >= 90


async def test_a_parked_execution_is_waiting_has_no_owner_and_no_runner(registry):
    clock = ManualClock()

    async def nap(state: Any) -> Sleep:
        return Sleep(3600, state)

    async def after(state: int) -> int:
        return state + 1

    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        run = await executor.start([nap, after], 1)
        info = await run.wait("waiting")
        await executor.wait_idle()
        assert (info.state, info.owner, info.current_step) == ("waiting", None, 1)
        assert info.due == datetime.fromtimestamp(clock.now() + 3600, UTC)
        assert not executor.runners
        clock.advance(3600)
        assert await run.result() == 2


async def test_a_sleep_behind_the_last_step_ends_the_execution_with_its_state(registry, clock):
    async def nap(state: Any) -> Sleep:
        return Sleep(5, {"slept": True})

    assert await outcome(registry, clock, [nap]) == {"slept": True}


@pytest.mark.parametrize(
    ("length", "text"),
    [("soon", "not str"), (float("nan"), "finite"), (datetime(2030, 1, 1), "time zone"), (True, "not bool")],  # noqa: DTZ001
)
async def test_a_sleep_that_is_no_time_is_the_steps_error(registry, clock, length, text):
    async def nap(state: Any) -> Sleep:
        return Sleep(length, state)

    with pytest.raises(ExecutionFailedError, match=text):
        await outcome(registry, clock, [nap])


async def test_a_negative_sleep_is_no_sleep_and_an_endless_one_can_be_stored(registry, clock):
    async def nap(state: Any) -> Sleep:
        return Sleep(-5, state)

    async def long(state: Any) -> Sleep:
        return Sleep(10**400, state)

    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        run = await executor.start([nap, long])
        info = await run.wait("waiting")
        while info.current_step == 1:
            info = await run.wait("waiting")
        assert info.due is not None
        assert info.due.year == 9999
        await run.cancel()


async def test_a_signal_ends_the_wait_and_the_next_step_sees_its_payload(registry, clock):
    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state)

    async def use(ctx: StepContext, state: str) -> Any:
        return [state, ctx.signal, ctx.timed_out]

    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        run = await executor.start([ask, use], "asked")
        info = await run.wait("waiting")
        assert info.waiting_for == "answer"
        await run.signal("answer", {"yes": True})
        assert await run.result() == ["asked", {"yes": True}, False]


async def test_a_wait_that_runs_out_says_so(registry, clock):
    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state, timeout=30)

    async def use(ctx: StepContext, state: Any) -> Any:
        return [ctx.signal, ctx.timed_out, clock.now() - 1_700_000_000]

    signal, timed_out, passed = await outcome(registry, clock, [ask, use])
    assert (signal, timed_out) == (None, True)
    assert passed >= 30


@pytest.mark.parametrize("name", ["", None, 5, "x" * 201, "a\nb"])
async def test_a_wait_for_no_signal_is_the_steps_error(registry, clock, name):
    async def ask(state: Any) -> WaitFor:
        return WaitFor(name, state)

    with pytest.raises(ExecutionFailedError, match="name of a signal"):
        await outcome(registry, clock, [ask])


async def _for_over_an_async_loop(ctx: StepContext, state: Any) -> Any:
    for item in ctx.each("pages", [1, 2]):  # type: ignore[attr-defined]  # the mistake under test
        state = item
    return state


async def _a_loop_without_a_name(ctx: StepContext, state: Any) -> Any:
    async for item in ctx.each("", [1, 2]):
        state = item
    return state


async def _a_loop_over_a_set(ctx: StepContext, state: Any) -> Any:
    async for item in ctx.each("pages", {1, 2}):
        state = item
    return state


async def _an_unknown_child(ctx: StepContext, state: Any) -> Any:
    return await ctx.start_child("nobody", key="a")


async def _a_signal_without_a_name(state: Any) -> WaitFor:
    return WaitFor("", state)


def _async_for_over_a_plain_loop(ctx: SyncStepContext, state: Any) -> Any:
    ctx.each("pages", [1, 2]).__aiter__()  # type: ignore[attr-defined]  # the mistake under test
    return state


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_for_over_an_async_loop, "write `async for … in ctx.each\\('pages', …\\)`"),
        (_async_for_over_a_plain_loop, "write `for … in ctx.each\\('pages', …\\)`"),
        (_a_loop_without_a_name, "give the loop a name"),
        (_a_loop_over_a_set, "no stable order"),
        (_an_unknown_child, "nobody"),
        (_a_signal_without_a_name, "needs the name of a signal"),
    ],
)
async def test_a_mistake_of_the_program_is_named_and_not_tried_again(registry, clock, step, text):
    with pytest.raises(ExecutionFailedError, match=text) as caught:
        await outcome(registry, clock, [step])
    assert caught.value.attempt == 1


class Panic(BaseException):
    """What an extension module may raise that is no `Exception`."""


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def _panics(state: Any) -> Any:
    raise Panic("the extension is broken")


def _panics_in_a_thread(state: Any) -> Any:
    raise Panic("the extension is broken")


async def _ends_its_coroutine(state: Any) -> Any:
    raise GeneratorExit


async def _has_a_task_that_ends_its_coroutine(state: Any) -> Any:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ends_its_coroutine, state)


async def _has_a_branch_that_ends_its_coroutine(ctx: StepContext, state: Any) -> Any:
    await ctx.map(_ends_its_coroutine, [1, 2])


async def _is_speechless(state: Any) -> Any:
    raise SpeechlessError


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_panics, "Panic, which ends an attempt"),
        (_panics_in_a_thread, "Panic, which ends an attempt"),
        (_ends_its_coroutine, "GeneratorExit, which ends an attempt"),
        (_has_a_task_that_ends_its_coroutine, "BaseExceptionGroup, which ends an attempt"),
        (_has_a_branch_that_ends_its_coroutine, "BaseExceptionGroup, which ends an attempt"),
        (_is_speechless, "SpeechlessError$"),
    ],
)
async def test_whatever_a_step_raises_fails_its_own_execution_alone(registry, clock, step, text):
    async def fine(state: Any) -> Any:
        return "fine"

    config = attrs.evolve(CALM, max_retries=0)
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=config) as executor:
        bad, good = await executor.start([step]), await executor.start([fine])
        with pytest.raises(ExecutionFailedError, match=text):
            await bad.result()
        assert await good.result() == "fine"


async def test_a_step_may_pause_its_own_execution_and_goes_on_to_its_next_point(registry, clock):
    after: list[str] = []

    async def first(ctx: StepContext, state: Any) -> Any:
        await executor.pause(ctx.execution_id)
        after.append(ctx.step)
        return state

    async def second(ctx: StepContext, state: Any) -> Any:
        return "done"

    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        run = await executor.start([first, second], 1)
        await run.wait("paused")
        assert after == ["first"]
        await run.resume()
        assert await run.result() == "done"


async def test_a_step_cannot_wait_for_its_own_end(registry, clock):
    async def vain(ctx: StepContext, state: Any) -> Any:
        return await (await executor.handle(ctx.execution_id)).result()

    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock, config=CALM) as executor:
        with pytest.raises(ExecutionFailedError, match="cannot wait for that execution itself"):
            await (await executor.start([vain])).result()


@pytest.mark.parametrize(("done", "total"), [("x", None), (-1, None), (1, -2), (True, None)])
async def test_progress_that_is_no_number_is_the_steps_error(registry, clock, done, total):
    async def work(ctx: StepContext, state: Any) -> Any:
        ctx.progress(done, total)

    with pytest.raises(ExecutionFailedError, match="progress takes numbers"):
        await outcome(registry, clock, [work])
