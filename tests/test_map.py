"""`ctx.map`: bounded parallel branches, each durable on its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
from typing import Any, assert_type

import anyio
import attrs
import pytest

from longrun import (
    BranchesFailedError,
    BranchFailure,
    ConfigError,
    ContextClosedError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    StepContext,
    SyncStepContext,
)
from longrun.stores.store import CheckpointStore
from tests.crashing import AT_ONCE, NEVER, PATIENCE, Held, crash_at, finish, registry_of, run, stored


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


@attrs.frozen
class Page:
    number: int


async def test_a_time_limit_that_ends_while_a_branch_becomes_durable_leaves_its_result():
    """Asked again, it waits until that is durable, and runs what is missing."""
    backend, calls = Held(), []

    async def step(ctx: StepContext, state):
        async def branch(n: int) -> int:
            calls.append(n)
            if n == 1:
                backend.free.clear()
                limit.cancel()
            return n * 10

        async def all_of_them() -> Any:
            return await ctx.map(branch, [0, 1], limit=1)

        try:
            with anyio.CancelScope() as limit:
                await all_of_them()
            assert limit.cancelled_caught
            with anyio.CancelScope() as limit:
                limit.cancel()
                await all_of_them()
            assert limit.cancelled_caught, "it is not durable yet"
        finally:
            backend.free.set()
        return await all_of_them(), await stored(store)

    async with CheckpointStore(backend) as store:
        results, entries = await run(registry_of(step), store, config=NEVER)
    assert results == [0, 10]
    assert calls == [0, 1]
    assert entries["map:branch/1"] == {"ok": 10}


async def test_a_map_that_was_cut_short_goes_on_and_leaves_nothing_behind(store):
    calls: list[Any] = []

    async def step(ctx: StepContext, state):
        async def branch(inner: StepContext, n: int) -> int:
            if (n, "again") not in inner.local.items():
                inner.local[n] = "again"
                await inner.once("first", calls.append, n)
                limit.cancel()
                await anyio.lowlevel.checkpoint()
            return n

        with anyio.CancelScope() as limit:
            await ctx.map(branch, [1, 2], limit=1)
        with anyio.CancelScope() as limit:
            await ctx.map(branch, [1, 2], limit=1)
        results = await ctx.map(branch, [1, 2], limit=1)
        await ctx.checkpoint(force=True)
        return results, sorted(await stored(store))

    results, keys = await run(registry_of(step), store, config=NEVER)
    assert results == [1, 2]
    assert calls == [1, 2]
    assert keys == ["map:branch", "map:branch/0", "map:branch/1"]


async def test_results_come_in_the_order_of_the_items():
    """However the branches end: here each waits for the one behind it."""
    done = [anyio.Event() for _ in range(6)]
    done[5].set()

    async def branch(n):
        await done[min(n + 1, 5)].wait()
        done[n].set()
        return n * 10

    async def step(ctx: StepContext, state):
        return await ctx.map(branch, range(6))

    assert await run(registry_of(step)) == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("items", [[], (), range(0)])
async def test_a_map_over_nothing_is_an_empty_list(items):
    async def step(ctx: StepContext, state):
        return await ctx.map(str, items)

    assert await run(registry_of(step)) == []


async def test_results_have_the_type_of_the_function() -> None:
    """The type checker's business, which reads this; that both kinds of function are called is ours."""

    async def half(number: int) -> float:
        return number / 2

    async def asynchronous(ctx: StepContext, state: list[int]) -> list[str]:
        assert_type(await ctx.map(half, state, name="a"), list[float])
        assert_type(await ctx.map(half, state, name="b", tolerate=1), list[float | BranchFailure])
        return assert_type(await ctx.map(str, state), list[str])

    def blocking(ctx: SyncStepContext, state: list[str]) -> list[Any]:
        assert_type(ctx.map(half, [1], name="a"), list[float])
        return [*assert_type(ctx.map(int, state, tolerate=2), list[int | BranchFailure])]

    assert await run(registry_of(asynchronous, blocking), state=[1, 2]) == [1, 2]


async def test_no_more_branches_than_the_limit_run_at_once():
    running = most = 0
    full = anyio.Event()

    async def branch(n):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await anyio.lowlevel.checkpoint()
        running -= 1

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(20), limit=3)

    await run(registry_of(step))
    assert most == 3


async def test_only_unfinished_branches_run_again_after_a_crash(store):
    ran = []
    reached = anyio.Event()

    async def branch(n) -> Page:
        ran.append(n)
        if n == 3 and not reached.is_set():
            while len(await stored(store)) < 4:  # the map and three branches
                await anyio.lowlevel.checkpoint()
            reached.set()
            await anyio.sleep_forever()
        return Page(n)

    async def step(ctx: StepContext, state) -> list[Page]:
        return await ctx.map(branch, range(4))

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await finish(registry, store) == [Page(0), Page(1), Page(2), Page(3)]
    assert sorted(ran) == [0, 1, 2, 3, 3]


async def test_a_finished_branch_is_durable_before_its_worker_goes_on(store):
    async def branch(n):
        entries = await stored(store)
        assert all(f"map:branch/{earlier}" in entries for earlier in range(n))

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(5), limit=1)

    await run(registry_of(step), store, config=NEVER)


async def test_a_failed_branch_fails_the_attempt_with_its_own_error_and_the_next_runs_it_again():
    ran = []

    class AwayError(Exception):
        pass

    async def branch(ctx: StepContext, n):
        ran.append(n)
        if n == 2 and ctx.attempt == 1:
            raise AwayError
        return n

    async def step(ctx: StepContext, state):
        try:
            return await ctx.map(branch, range(4), limit=1)
        except AwayError:
            assert ctx.attempt == 1
            raise

    assert await run(registry_of(step, retry=AT_ONCE)) == [0, 1, 2, 3]
    assert ran == [0, 1, 2, 2, 3]


async def test_a_failure_cancels_the_branches_in_flight():
    ended = []
    both = anyio.Event()

    async def branch(n):
        if n:
            await both.wait()
            raise ValueError("second")
        both.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(n)

    async def step(ctx: StepContext, state):
        with pytest.raises(ValueError, match="second"):
            await ctx.map(branch, range(2))

    await run(registry_of(step))
    assert ended == [0]


async def test_tolerated_failures_come_back_as_values_and_are_durable(store):
    ran = []

    def branch(n):
        ran.append(n)
        if n % 2:
            raise ValueError(f"odd {n}")
        return n

    async def step(ctx: StepContext, state):
        results = await ctx.map(branch, range(4), tolerate=2)
        assert results == [
            0,
            BranchFailure(index=1, error="ValueError: odd 1"),
            2,
            BranchFailure(index=3, error="ValueError: odd 3"),
        ]
        assert (await stored(store))["map:branch/1"] == {"$failed": "ValueError: odd 1"}
        if ctx.attempt == 1:
            raise RuntimeError("after the map")

    await run(registry_of(step, retry=AT_ONCE), store, config=NEVER)
    assert sorted(ran) == [0, 1, 2, 3]


async def test_more_failures_than_tolerated_raise():
    async def branch(n):
        raise ValueError(f"branch {n}")

    async def step(ctx: StepContext, state):
        with pytest.raises(BranchesFailedError, match="2 branches of 'branch' failed and 1 are tolerated") as failure:
            await ctx.map(branch, range(5), tolerate=1, limit=1)
        assert isinstance(failure.value.__cause__, ValueError)

    await run(registry_of(step))


@pytest.mark.parametrize("bad", [{"limit": 0}, {"limit": True}, {"limit": 1.5}, {"tolerate": -1}, {"tolerate": None}])
async def test_bad_limits_are_refused(bad):
    async def step(ctx: StepContext, state):
        with pytest.raises(ConfigError):
            await ctx.map(str, [1], **bad)

    await run(registry_of(step))


@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_sets_are_refused(where):
    """Their order differs from one process to the next: results would go to other items."""

    async def step(ctx: StepContext, state):
        await ctx.map(str, {1, 2})

    def thread_step(ctx: SyncStepContext, state):
        ctx.map(str, {1, 2})

    with pytest.raises(ExecutionFailedError, match="no stable order"):
        await run(registry_of(step if where == "loop" else thread_step, retry=AT_ONCE))


async def test_another_number_of_items_is_refused():
    async def step(ctx: StepContext, state):
        await ctx.map(str, range(3 if ctx.attempt == 1 else 4))
        raise ValueError

    with pytest.raises(ExecutionFailedError, match="3 then, 4 now"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_two_maps_need_two_names():
    async def step(ctx: StepContext, state):
        await ctx.map(str, [1], name="first")
        await ctx.map(str, [1], name="second")
        await ctx.map(str, [1], name="second")

    with pytest.raises(ExecutionFailedError, match="'second' is used twice"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_a_branch_has_progress_of_its_own(store):
    """Its own `local`, `once`, `each` and `checkpoint`, taken up where it was, and gone when it is done."""
    calls: list[str] = []
    reached = anyio.Event()

    async def branch(ctx: StepContext, name):
        await ctx.once("begin", calls.append, f"{name} begins")
        async for n in ctx.each("items", range(3), every=1):
            calls.append(f"{name}{n}")
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
            if name == "b" and n == 2 and not reached.is_set():
                reached.set()
                await anyio.sleep_forever()
        await ctx.checkpoint(force=True)
        return ctx.local["sum"]

    async def step(ctx: StepContext, state):
        result = await ctx.map(branch, "ab", limit=1)
        assert ctx.local == {}
        assert set(await stored(store)) == {"map:branch", "map:branch/0", "map:branch/1"}
        return result

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert (await stored(store))["map:branch/1/local"] == {"sum": 1}
    assert await finish(registry, store) == [3, 3]
    assert calls == ["a begins", "a0", "a1", "a2", "b begins", "b0", "b1", "b2", "b2"]


async def test_a_failed_branch_is_taken_up_from_its_last_capture():
    seen = []

    async def branch(ctx: StepContext, item):
        ctx.local.setdefault("list", []).append(ctx.attempt)
        await ctx.checkpoint()
        ctx.local["list"].append("never captured")
        seen.append(list(ctx.local["list"]))
        if ctx.attempt == 1:
            raise ValueError

    async def step(ctx: StepContext, state):
        await ctx.map(branch, [0])

    await run(registry_of(step, retry=AT_ONCE), config=NEVER)
    assert seen == [[1, "never captured"], [1, 2, "never captured"]]


async def test_plain_functions_run_in_threads_with_a_blocking_context(store):
    together = threading.Barrier(3)

    def branch(ctx: SyncStepContext, n) -> Page:
        together.wait(PATIENCE)
        assert threading.current_thread().name.startswith("longrun-step-")
        ctx.local["n"] = n
        ctx.checkpoint(force=True)
        assert ctx.once("double", lambda: n * 2) == n * 2
        return Page(sum(ctx.each("items", range(n))))

    async def step(ctx: StepContext, state) -> list[Page]:
        return await ctx.map(branch, range(3))

    assert await run(registry_of(step), store) == [Page(0), Page(0), Page(1)]


class Scaled:
    async def __call__(self, factor: int, ctx: StepContext, item: int) -> int:
        await ctx.checkpoint()
        return factor * item


async def test_a_partial_of_an_object_with_an_async_call_gets_the_context_of_a_task():
    """As a step does that is one."""

    async def step(ctx: StepContext, state):
        return await ctx.map(functools.partial(Scaled(), 10), range(3), name="scaled")

    assert await run(registry_of(step)) == [0, 10, 20]


async def test_a_late_update_does_not_undo_a_finished_branch(store):
    """A task that a branch left behind still holds its context."""
    contexts = []

    async def branch(ctx: StepContext, n):
        contexts.append(ctx)
        return n

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(2))
        before = await stored(store)
        contexts[0].local["late"] = True
        await contexts[0].checkpoint(force=True)
        await contexts[0].once("late", int)
        await ctx.checkpoint(force=True)
        assert await stored(store) == before

    await run(registry_of(step), store, config=NEVER)


async def test_a_context_of_an_attempt_that_is_over_raises():
    contexts: list[StepContext] = []

    async def step(ctx: StepContext, state):
        contexts.append(ctx)
        if ctx.attempt == 1:
            raise ValueError
        old = contexts[0]
        for call in (
            old.checkpoint(),
            old.checkpoint(force=True),
            old.once("a", int),
            old.map(str, []),
            old.start_child([], key="a"),
        ):
            with pytest.raises(ContextClosedError):
                await call
        with pytest.raises(ContextClosedError):
            old.each("a", [])
        with pytest.raises(ContextClosedError):
            old.progress(1)

    await run(registry_of(step, retry=AT_ONCE))


async def test_maps_may_be_nested_in_items_and_branches(store):
    reached = anyio.Event()
    ran = []

    async def leaf(ctx: StepContext, name):
        ran.append(name)
        await ctx.once("a", int)
        if name == "1b1" and not reached.is_set():
            while not {"outer#1/map:branch/0", "outer#1/map:branch/1/map:leaf/0"} <= set(await stored(store)):
                await anyio.lowlevel.checkpoint()
            reached.set()
            await anyio.sleep_forever()
        return name

    async def branch(ctx: StepContext, name):
        return await ctx.map(leaf, [f"{name}0", f"{name}1"])

    async def step(ctx: StepContext, state):
        results = [await ctx.map(branch, [f"{n}a", f"{n}b"]) async for n in ctx.each("outer", range(2))]
        assert set(await stored(store)) >= {"each:outer"}
        await ctx.checkpoint(force=True)
        assert set(await stored(store)) == {"each:outer"}
        return results

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await finish(registry, store) == [[["1a0", "1a1"], ["1b0", "1b1"]]]
    assert sorted(ran) == ["0a0", "0a1", "0b0", "0b1", "1a0", "1a1", "1b0", "1b1", "1b1"]


async def test_what_failed_branches_leave_goes_with_the_item_they_stood_in(store):
    async def branch(ctx: StepContext, n):
        ctx.local["n"] = n
        await ctx.once("a", int)
        await ctx.checkpoint()
        raise OSError

    async def step(ctx: StepContext, state):
        async for _ in ctx.each("items", range(2)):
            with contextlib.suppress(OSError):
                await ctx.map(branch, range(2))
            await ctx.checkpoint(force=True)
            assert any("once" in key for key in await stored(store))
        await ctx.checkpoint(force=True)
        assert await stored(store) == {"each:items": {"n": 2, "of": 2, "end": True}}

    await run(registry_of(step), store, config=NEVER)


async def test_a_pause_lets_branches_in_flight_come_to_their_end(store):
    """A plain pause cancels nothing: it takes effect when the last branch has come to a point."""
    begun: list[int] = []
    ended: list[int] = []
    may_end = [anyio.Event() for _ in range(4)]

    async def branch(n):
        begun.append(n)
        await may_end[n].wait()
        ended.append(n)

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(4), limit=2)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            while len(begun) < 2:
                await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                may_end[0].set()
                while "map:branch/0" not in await stored(store):
                    await anyio.lowlevel.checkpoint()
                assert (await handle.info()).state == "running"
                may_end[1].set()
            assert begun == ended == [0, 1]
            assert set(await stored(store)) == {"map:branch", "map:branch/0", "map:branch/1"}
            for event in may_end:
                event.set()
            await handle.resume()
            await handle.result()
    assert sorted(begun) == [0, 1, 2, 3]


async def test_a_pause_at_a_checkpoint_in_a_branch_waits_for_the_others(store):
    seen: list[str] = []
    may_end = anyio.Event()

    async def branch(ctx: StepContext, n):
        if n == 0:
            while not (await stored(store)).get("map:branch/0/local"):
                ctx.local["here"] = True
                await ctx.checkpoint(force=True)
            while True:
                await anyio.lowlevel.checkpoint()
                await ctx.checkpoint()
                seen.append("checkpoint")
                if ctx.local.get("resumed"):
                    return
                ctx.local["resumed"] = len(seen) > 3 and may_end.is_set()
        await may_end.wait()
        seen.append("other ended")

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(2))

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            while not seen:
                await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                may_end.set()
            assert "other ended" in seen
            assert "map:branch/1" in await stored(store)
            await handle.resume()
            await handle.result()
    assert seen.count("other ended") == 1


async def test_a_branch_that_waits_at_a_point_goes_on_when_the_pause_is_taken_back(store):
    """The other branches may need what it makes: they would never come to a point."""
    begun, go, made = anyio.Event(), anyio.Event(), anyio.Event()

    async def branch(ctx: StepContext, n):
        if n == 0:
            begun.set()
            await go.wait()
            await ctx.checkpoint()
            made.set()
        await made.wait()
        return n

    async def step(ctx: StepContext, state):
        return await ctx.map(branch, range(2))

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await begun.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                go.set()
                await anyio.wait_all_tasks_blocked()
                assert not made.is_set()
                await handle.resume()
            assert await handle.result() == [0, 1]


async def test_sys_exit_in_a_branch_fails_the_attempt_not_the_program():
    async def branch(n):
        sys.exit(3)

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(2))

    with pytest.raises(ExecutionFailedError, match="SystemExit"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_a_result_that_cannot_be_stored_fails_the_step_at_once():
    attempts = []

    async def branch(n):
        return threading.Lock()

    async def step(ctx: StepContext, state):
        attempts.append(ctx.attempt)
        await ctx.map(branch, range(3), tolerate=3)

    with pytest.raises(ExecutionFailedError, match=r"branch\[\d\] cannot be stored"):
        await run(registry_of(step, retry=AT_ONCE))
    assert attempts == [1]


async def test_async_items_will_do():
    async def items():
        for n in range(3):
            yield n

    async def step(ctx: StepContext, state):
        return await ctx.map(str, items(), name="texts")

    assert await run(registry_of(step)) == ["0", "1", "2"]


async def test_a_function_of_another_shape_is_refused():
    def branch(a, b, c): ...

    async def step(ctx: StepContext, state):
        await ctx.map(branch, [1])

    with pytest.raises(ExecutionFailedError, match=r"must take \(item\) or \(ctx, item\)"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_ten_thousand_branches_take_a_time_in_proportion(store):
    """Not the square of it: the end of a branch looks at what is its own. (2 s would be 200 µs a branch; the square
    took a minute.)"""

    async def branch(ctx: StepContext, n):
        return n

    async def step(ctx: StepContext, state) -> Any:
        return sum(await ctx.map(branch, range(10_000), limit=50))

    assert await run(registry_of(step), store, config=ExecutorConfig(checkpoint_interval=60)) == sum(range(10_000))


@pytest.mark.parametrize("late", [False, True])
async def test_a_branch_that_cancels_its_own_task_has_no_result_and_the_step_fails(anyio_backend_name, late):
    """Late: it returns, and the cancellation comes out where its result is saved. It is never left out silently."""
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio alone lets a task be cancelled by its name")
    attempts: list[int] = []

    async def branch(n: int) -> int:
        if n == 2 and len(attempts) == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if not late:
                await anyio.sleep(60)
        return n

    async def step(ctx: StepContext, state) -> list[int]:
        attempts.append(ctx.attempt)
        return await ctx.map(branch, [1, 2, 3], limit=1)  # the third never begins in the first attempt

    assert await run(registry_of(step, retry=AT_ONCE)) == [1, 2, 3]
    assert attempts == [1, 2]
