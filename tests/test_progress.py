"""What a step says of itself: progress in events and records, its place, its log, and the time it has left."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import attrs
import pytest
import structlog
from structlog.testing import capture_logs

from longrun import (
    EventType,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    Progress,
    Repeat,
    StepContext,
    StepRegistry,
)
from tests.crashing import AT_ONCE, NEVER, PATIENCE, registry_of, run, stored

STILL = ExecutorConfig(checkpoint_interval=3600, heartbeat_interval=3600, lease_ttl=10_800)
"""Nothing beats by itself."""


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


class Stage:
    """Stops a step at named places, and lets the test look meanwhile."""

    def __init__(self) -> None:
        self._to_test, self._from_step = anyio.create_memory_object_stream[str](0)
        self._to_step, self._from_test = anyio.create_memory_object_stream[None](0)

    async def stop(self, where: str) -> None:
        await self._to_test.send(where)
        await self._from_test.receive()

    async def arrives(self, where: str) -> None:
        assert await self._from_step.receive() == where

    async def go_on(self) -> None:
        await self._to_step.send(None)

    def close(self) -> None:
        for stream in (self._to_test, self._from_step, self._to_step, self._from_test):
            stream.close()


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


async def test_progress_moves_inside_a_step(stage):
    """`get` is exact at once; 0.0 to 1.0 over all steps."""

    async def first(ctx: StepContext, state):
        ctx.progress(1, 4, "reading")
        await stage.stop("quarter")
        ctx.progress(2, 4)
        await stage.stop("half")

    async def second(ctx: StepContext, state):
        await stage.stop("second")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(first, second), store="memory:", config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("quarter")
            info = await executor.get("x")
            assert info.progress == 0.125
            assert info.step_progress == Progress(done=1, total=4, message="reading")
            await stage.go_on()
            await stage.arrives("half")
            assert (await executor.get("x")).progress == 0.25
            await stage.go_on()
            await stage.arrives("second")
            info = await executor.get("x")
            assert info.progress == 0.5
            assert info.step_progress is None
            await stage.go_on()
            await handle.result()
            assert (await executor.get("x")).progress == 1.0


async def test_a_loop_and_a_map_show_how_far_they_are(stage):
    async def branch(n):
        if n == 3:
            await stage.stop("map")

    async def step(ctx: StepContext, state):
        async for n in ctx.each("items", range(4)):
            async for _ in ctx.each("inner", range(10)):
                pass
            if n == 1:
                await stage.stop("loop")
        await ctx.map(branch, range(4), limit=1)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store="memory:", config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("loop")
            info = await executor.get("x")
            assert info.step_progress == Progress(done=1, total=4)
            assert info.progress == 0.25
            await stage.go_on()
            await stage.arrives("map")
            assert (await executor.get("x")).progress == 0.75
            await stage.go_on()
            await handle.result()


async def test_what_the_step_says_itself_goes_before_what_its_loops_say(stage):
    async def step(ctx: StepContext, state):
        ctx.progress(7, 10)
        async for n in ctx.each("items", range(4)):
            if n == 3:
                await stage.stop("loop")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store="memory:") as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("loop")
            assert (await executor.get("x")).progress == 0.7
            await stage.go_on()
            await handle.result()


async def test_progress_is_told_as_events_and_the_last_value_always():
    """At most ten a second from the step; what came in between is told by the executor's beat."""
    told = anyio.Event()
    seen = []

    async def step(ctx: StepContext, state):
        for n in range(100):
            ctx.progress(n, 100, f"item {n}")
        await told.wait()

    async def listen(event):
        if event.type is EventType.PROGRESS:
            seen.append((event.data["done"], event.data["total"], event.data["message"]))
            if event.data["done"] == 99:
                told.set()

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(checkpoint_interval=0.1, heartbeat_interval=0.1)
        async with Executor(registry_of(step), store="memory:", config=config, on_event=listen) as executor:
            await (await executor.start("work", id="x")).result()
    assert seen[0] == (0, 100, "item 0")
    assert seen[-1] == (99, 100, "item 99")
    assert len(seen) < 10


async def test_progress_is_stored_with_the_beat_though_the_step_saves_nothing(store, stage):
    async def step(ctx: StepContext, state):
        ctx.progress(1, 4, "reading")
        await stage.stop("here")

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(checkpoint_interval=3600, heartbeat_interval=0.05)
        async with Executor(registry_of(step), store=store, config=config) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("here")
            while (await store.load("x")).head.progress != 0.25:
                await anyio.lowlevel.checkpoint()
            assert (await store.load("x")).head.note == "reading"
            await stage.go_on()
            await handle.result()


async def test_only_a_beat_tells_that_a_step_lives_and_stores_how_far_it_is(store, stage):
    """In between, what was captured is handed over when it is due, and that is all."""

    async def step(ctx: StepContext, state):
        ctx.progress(1, 4)
        await stage.stop("here")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=STILL) as executor:
            events = executor.events()
            handle = await executor.start("work", id="x")
            await stage.arrives("here")
            runner = executor.runners["x"]
            revision = runner.head.revision
            runner.tick(beats=False)
            assert runner.head.revision == revision
            runner.tick(beats=True)
            assert runner.head.revision == revision + 1
            await stage.go_on()
            await handle.result()
        seen = [event.type async for event in events]
    assert seen.count(EventType.HEARTBEAT) == 1


async def test_what_is_durable_at_the_exit_alone_stores_no_progress_with_the_beat(store, stage):
    async def step(ctx: StepContext, state):
        ctx.progress(1, 4)
        await stage.stop("here")

    with anyio.fail_after(PATIENCE):
        config = attrs.evolve(STILL, durability="exit")
        async with Executor(registry_of(step), store=store, config=config) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("here")
            runner = executor.runners["x"]
            revision = runner.head.revision
            runner.tick(beats=True)
            assert runner.head.revision == revision
            await stage.go_on()
            await handle.result()


@pytest.mark.parametrize("message", [Path("a/b"), ValueError("a/b")])
async def test_a_message_may_be_anything_that_has_a_text(store, stage, message):
    async def step(ctx: StepContext, state):
        ctx.progress(1, 4, message)
        await stage.stop("here")

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(checkpoint_interval=3600, heartbeat_interval=0.05)
        async with Executor(registry_of(step), store=store, config=config) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("here")
            while (await store.load("x")).head.note != "a/b":
                await anyio.lowlevel.checkpoint()
            assert (await executor.get("x")).step_progress == Progress(done=1, total=4, message="a/b")
            await stage.go_on()
            await handle.result()


@pytest.mark.parametrize(("done", "total"), [(10**400, None), (1, 10**400)], ids=["done", "total"])
async def test_a_number_that_no_float_can_hold_is_the_steps_error(done, total):
    async def step(ctx: StepContext, state):
        ctx.progress(10**300, 10**301)
        ctx.progress(done, total)

    with pytest.raises(ExecutionFailedError, match="numbers that a float can hold"):
        await run(registry_of(step))


async def test_progress_stays_visible_while_paused(store, stage):
    async def step(ctx: StepContext, state):
        ctx.progress(1, 4)
        await stage.stop("here")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await stage.arrives("here")
            await handle.pause(interrupt=True)
            assert (await executor.get("x")).progress == 0.25


async def test_a_step_knows_where_it_is():
    seen = []

    async def step(ctx: StepContext, state):
        seen.append(
            (ctx.execution_id, ctx.workflow, ctx.step, ctx.step_index, ctx.attempt, ctx.iteration, ctx.idempotency_key)
        )
        assert ctx.metadata == {"team": "a"}
        assert "x" in repr(ctx)
        if ctx.attempt == 1:
            raise ValueError
        return Repeat(state) if ctx.iteration == 0 else state

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE), store="memory:") as executor:
            await (await executor.start("work", id="x", metadata={"team": "a"})).result()
    assert seen == [
        ("x", "work", "step", 0, 1, 0, "x:1"),
        ("x", "work", "step", 0, 2, 0, "x:1"),
        ("x", "work", "step", 0, 1, 1, "x:2"),
        ("x", "work", "step", 0, 2, 1, "x:2"),
    ]


async def test_the_log_is_bound_to_the_place():
    async def step(ctx: StepContext, state):
        ctx.log.info("page.fetched", size=3)

    structlog.reset_defaults()
    with capture_logs() as lines:
        await run(registry_of(step))
    structlog.reset_defaults()
    line = next(line for line in lines if line["event"] == "page.fetched")
    assert {**line, "log_level": "info"} == {
        "event": "page.fetched",
        "log_level": "info",
        "size": 3,
        "execution": "x",
        "workflow": "work",
        "step": "step",
        "attempt": 1,
    }


async def test_time_left_is_that_of_the_time_out():
    async def bounded(ctx: StepContext, state):
        assert ctx.time_left is not None
        assert 0 < ctx.time_left <= 60
        assert not ctx.shutting_down

    async def unbounded(ctx: StepContext, state):
        assert ctx.time_left is None

    registry = StepRegistry()
    registry.register("bounded", bounded, timeout=60)
    registry.register("unbounded", unbounded)
    registry.workflow("work", ["bounded", "unbounded"])
    await run(registry)


async def test_time_left_is_that_of_the_shutdown_once_it_has_begun(store):
    """A step can use its last seconds: to bring something to an end, and to save."""
    began = anyio.Event()

    async def step(ctx: StepContext, state):
        began.set()
        while not ctx.shutting_down:
            await anyio.lowlevel.checkpoint()
        ctx.local["left"] = ctx.time_left
        await ctx.checkpoint()

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(drain_timeout=5, checkpoint_interval=3600)
        async with Executor(registry_of(step, timeout=3600), store=store, config=config) as executor:
            await executor.start("work", id="x")
            await began.wait()
    assert 0 < (await stored(store))["local"]["left"] <= 5


async def test_a_step_that_returns_after_its_time_has_failed():
    """Also one that never came to an await, so that nothing could stop it."""

    async def step(ctx: StepContext, state):
        if ctx.attempt == 1:
            time.sleep(0.6)  # blocks the loop on purpose
        return ctx.attempt

    assert await run(registry_of(step, retry=AT_ONCE, timeout=0.5)) == 2
