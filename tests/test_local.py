"""`ctx.local` and `ctx.checkpoint`: what is captured, when it becomes durable, and that the last capture is flushed."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest

from longrun import (
    EventType,
    ExecutionCancelledError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    Goto,
    MemoryCheckpointStore,
    Repeat,
    StepContext,
    StepRegistry,
)
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from tests.crashing import AT_ONCE, LASTING, NEVER, PATIENCE, crash_at, expire, finish, registry_of, run, stored


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


async def until_stored(store, key, value) -> None:
    while (await stored(store)).get(key) != value:
        await anyio.lowlevel.checkpoint()


async def test_local_is_empty_in_the_next_visit():
    async def first(ctx: StepContext, state):
        assert ctx.local == {}
        ctx.local["n"] = ctx.iteration
        await ctx.checkpoint(force=True)
        return Repeat(state) if ctx.iteration < 2 else state

    async def second(ctx: StepContext, state):
        assert ctx.local == {}
        ctx.local["n"] = 1
        await ctx.checkpoint(force=True)
        return Goto("second", True) if state is None else state

    assert await run(registry_of(first, second)) is True


async def test_the_store_forgets_the_progress_of_a_finished_visit(store):
    async def first(ctx: StepContext, state):
        ctx.local["n"] = 1
        await ctx.once("a", int)
        await ctx.checkpoint(force=True)

    async def second(ctx: StepContext, state):
        assert await stored(store) == {}

    await run(registry_of(first, second), store)


async def test_a_forced_checkpoint_is_durable_on_return(store):
    """I1, read behind the step's back."""

    async def step(ctx: StepContext, state):
        ctx.local["a"] = {"deep": (1, 2)}
        await ctx.checkpoint(force=True)
        assert await stored(store) == {"local": {"a": {"deep": (1, 2)}}}
        ctx.local["a"] = "scalar"
        await ctx.checkpoint(force=True)
        assert await stored(store) == {"local": {"a": "scalar"}}

    await run(registry_of(step), store, config=NEVER)


class SlowBackend(MemoryBackend):
    """Commits nothing while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = threading.Event(), threading.Event()
        self.released.set()

    def hold(self) -> None:
        self.asked.clear()
        self.released.clear()

    def commit(self, batch):
        self.asked.set()
        assert self.released.wait(PATIENCE)
        return super().commit(batch)


async def each_item(ctx: StepContext) -> None:
    loop = ctx.each("items", range(2), every=1)
    await anext(loop)
    await anext(loop)


DURABLE: dict[str, Any] = {
    "once": lambda ctx: ctx.once("call", int),
    "every=1": each_item,
    "a branch": lambda ctx: ctx.map(str, [1]),
    "force=True": lambda ctx: ctx.checkpoint(force=True),
    "a child": lambda ctx: ctx.start_child(["child"], key="a"),
}


@pytest.mark.parametrize("what", DURABLE)
async def test_what_must_be_durable_does_not_return_before_the_store_has_answered(what):
    """I1, I10: however long that takes."""
    backend = SlowBackend()

    async def step(ctx: StepContext, state):
        done = anyio.Event()

        async def call() -> None:
            await DURABLE[what](ctx)
            done.set()

        ctx.local["n"] = 1
        backend.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            assert await anyio.to_thread.run_sync(backend.asked.wait, PATIENCE)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            returned = done.is_set()
            backend.released.set()
        assert not returned

    async def child(state):
        pass

    registry = registry_of(step)
    registry.register("child", child)
    await run(registry, CheckpointStore(backend), config=NEVER)


async def test_a_plain_checkpoint_is_coalesced(store):
    revisions = []

    async def step(ctx: StepContext, state):
        revisions.append((await store.load("x")).head.revision)
        for n in range(1000):
            ctx.local["n"] = n
            await ctx.checkpoint()
        revisions.append((await store.load("x")).head.revision)
        assert await stored(store) == {}

    await run(registry_of(step), store, config=NEVER)
    assert revisions[0] == revisions[1]


async def test_a_capture_is_saved_when_its_interval_is_over(store):
    async def step(ctx: StepContext, state):
        n = 0
        while not await stored(store):
            n += 1
            ctx.local["n"] = n
            await ctx.checkpoint()
        assert 0 < (await stored(store))["local"]["n"] <= n

    await run(registry_of(step), store, config=ExecutorConfig(checkpoint_interval=timedelta(milliseconds=50)))


async def test_a_capture_is_saved_although_the_step_itself_sleeps(store):
    """By the executor's own beat."""

    async def step(ctx: StepContext, state):
        ctx.local["n"] = 1
        await ctx.checkpoint()
        ctx.local["n"] = "in the middle"
        await until_stored(store, "local", {"n": 1})

    await run(registry_of(step), store, config=ExecutorConfig(checkpoint_interval=0.05, heartbeat_interval=0.1))


async def test_what_was_not_captured_is_gone_after_a_crash(store):
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        if reached.is_set():
            return ctx.local
        ctx.local["a"] = [1]
        await ctx.checkpoint(force=True)
        ctx.local["a"].append("in the middle")
        await ctx.once("b", int)  # durable, and no reason to save the middle
        reached.set()
        return await anyio.sleep_forever()

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await finish(registry, store) == {"a": [1]}


class Ends:
    """A step that captures `n: 1`, and is then ended in the middle in some way."""

    def __init__(self) -> None:
        self.reached = anyio.Event()

    async def step(self, ctx: StepContext, state):
        if ctx.local:
            return dict(ctx.local)
        ctx.local["n"] = 1
        await ctx.checkpoint()
        ctx.local["n"] = "in the middle"
        self.reached.set()
        return await anyio.sleep_forever()

    @property
    def registry(self) -> StepRegistry:
        return registry_of(self.step)


async def test_the_last_capture_is_flushed_by_an_interrupting_pause(store):
    ends = Ends()
    with anyio.fail_after(PATIENCE):
        async with Executor(ends.registry, store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await ends.reached.wait()
            await handle.pause(interrupt=True)
            assert await stored(store) == {"local": {"n": 1}}
            await handle.resume()
            assert await handle.result() == {"n": 1}


async def test_the_last_capture_is_flushed_by_a_pause_at_a_checkpoint(store):
    reached, go_on = anyio.Event(), anyio.Event()

    async def step(ctx: StepContext, state):
        if ctx.local:
            return dict(ctx.local)
        reached.set()
        await go_on.wait()
        ctx.local["n"] = 1
        await ctx.checkpoint()
        raise AssertionError("the pause took no effect")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await reached.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                go_on.set()
            assert (await handle.info()).state == "paused"
            assert await stored(store) == {"local": {"n": 1}}
            await handle.resume()
            assert await handle.result() == {"n": 1}


async def test_the_last_capture_is_flushed_at_the_deadline_of_a_drain(store):
    """What is unfinished stays running, and the next start takes it up from there."""
    ends = Ends()
    config = ExecutorConfig(checkpoint_interval=3600, drain_timeout=0.01)
    with anyio.fail_after(PATIENCE):
        async with Executor(ends.registry, store=store, config=config) as executor:
            await executor.start("work", id="x")
            await ends.reached.wait()
    assert await stored(store) == {"local": {"n": 1}}
    assert (await store.load("x")).head.state == "running"
    assert (await store.load("x")).head.attempt == 0
    assert await finish(ends.registry, store) == {"n": 1}


async def test_a_drain_takes_effect_at_the_next_checkpoint(store):
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        while not ctx.local.get("resumed"):
            ctx.local["n"] = ctx.local.get("n", 0) + 1
            reached.set()
            await anyio.lowlevel.checkpoint()
            if ctx.shutting_down:
                ctx.local["resumed"] = True
            await ctx.checkpoint()
        return "resumed"

    registry = registry_of(step)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=NEVER) as executor:
            await executor.start("work", id="x")
            await reached.wait()
    assert (await stored(store))["local"]["resumed"] is True
    assert await finish(registry, store) == "resumed"


async def test_the_last_capture_is_flushed_although_the_step_will_not_stop(store, monkeypatch):
    """A step that swallows its cancellation loses nothing that it had captured."""
    for module in ("crew", "drain"):
        monkeypatch.setattr(f"longrun.{module}.LAST_WORDS", 0.2)
    reached, release = anyio.Event(), anyio.Event()

    async def step(ctx: StepContext, state):
        if ctx.local:
            return dict(ctx.local)
        ctx.local["n"] = 1
        await ctx.checkpoint()
        reached.set()
        with anyio.CancelScope(shield=True):
            await release.wait()
        return None

    registry = registry_of(step)
    config = ExecutorConfig(checkpoint_interval=3600, drain_timeout=0.01)

    async def look() -> None:
        await until_stored(store, "local", {"n": 1})
        release.set()

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks, Executor(registry, store=store, config=config) as executor:
            await executor.start("work", id="x")
            await reached.wait()
            tasks.start_soon(look)


async def test_the_last_capture_survives_a_time_out(store):
    attempts = []

    async def step(ctx: StepContext, state):
        attempts.append((ctx.attempt, dict(ctx.local)))
        if ctx.attempt == 2:
            return
        ctx.local["n"] = 1
        await ctx.checkpoint()
        ctx.local["n"] = "in the middle"
        expire(executor)
        await anyio.sleep_forever()

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, timeout=LASTING), store=store, config=NEVER) as executor:
            await (await executor.start("work", id="x")).result()
    assert attempts == [(1, {}), (2, {"n": 1})]


async def test_the_last_capture_is_flushed_by_the_failure(store):
    async def step(ctx: StepContext, state):
        ctx.local["n"] = 1
        await ctx.checkpoint()
        ctx.local["n"] = "in the middle"
        raise ValueError

    with pytest.raises(ExecutionFailedError):
        await run(registry_of(step, retry=AT_ONCE), store, config=NEVER)
    assert await stored(store) == {"local": {"n": 1}}


async def test_an_error_after_an_error_keeps_what_the_first_had_captured():
    async def step(ctx: StepContext, state):
        if ctx.attempt == 1:
            ctx.local["list"] = [1]
            await ctx.checkpoint()
        elif ctx.attempt == 2:
            assert ctx.local == {"list": [1]}
            ctx.local["list"].append("never captured")
        else:
            return ctx.local
        raise ValueError

    assert await run(registry_of(step, retry=AT_ONCE), config=NEVER) == {"list": [1]}


async def test_a_cancelled_execution_leaves_no_progress(store):
    ends = Ends()
    with anyio.fail_after(PATIENCE):
        async with Executor(ends.registry, store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await ends.reached.wait()
            await handle.cancel()
            with pytest.raises(ExecutionCancelledError):
                await handle.result()
    assert await stored(store) == {}


@pytest.mark.parametrize("value", [[object()], {"k": object()}, object()])
async def test_a_local_that_cannot_be_stored_fails_the_step_naming_the_place(value):
    attempts = []

    async def step(ctx: StepContext, state):
        attempts.append(ctx.attempt)
        ctx.local["client"] = value
        await ctx.checkpoint()

    with pytest.raises(ExecutionFailedError, match=r"local\['client'\]"):
        await run(registry_of(step, retry=AT_ONCE))
    assert attempts == [1]


async def test_local_keeps_its_types():
    async def step(ctx: StepContext, state):
        if ctx.attempt == 1:
            ctx.local.update({"tuple": (1, 2), 3: {4}, "time": timedelta(seconds=5)})
            await ctx.checkpoint()
            raise ValueError
        assert ctx.local == {"tuple": (1, 2), 3: {4}, "time": timedelta(seconds=5)}

    await run(registry_of(step, retry=AT_ONCE))


async def test_a_checkpoint_event_follows_the_durable_save(store):
    async def step(ctx: StepContext, state):
        ctx.local["n"] = 1
        await ctx.checkpoint(force=True)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            events = executor.events()
            handle = await executor.start("work", id="x")
            await handle.result()
            kinds = []
            async for event in events:
                kinds.append((event.type, event.data.get("kind")))
                if event.type is EventType.EXECUTION_COMPLETED:
                    break
    assert (EventType.CHECKPOINTED, "progress") in kinds
    assert kinds.index((EventType.CHECKPOINTED, "progress")) > kinds.index((EventType.STEP_STARTED, None))


async def test_a_stray_cancellation_is_a_failure_and_not_a_silent_end(anyio_backend):
    """An asyncio task that the step awaits may have been cancelled by somebody else."""
    if anyio_backend != "asyncio":
        pytest.skip("asyncio alone lets one task's cancellation come out of another")
    import asyncio

    async def step(ctx: StepContext, state):
        if ctx.attempt == 1:
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        return ctx.attempt

    assert await run(registry_of(step, retry=AT_ONCE)) == 2
