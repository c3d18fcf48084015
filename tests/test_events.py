"""Events: told after the fact is durable, in order per execution; listeners cost the executions nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import (
    Client,
    ConfigError,
    EventType,
    ExecutionEvent,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
)
from longrun.testing import ManualClock
from tests.crashing import PATIENCE

TYPES = [
    "step_started",
    "step_completed",
    "step_failed",
    "checkpointed",
    "paused",
    "resumed",
    "execution_started",
    "execution_completed",
    "execution_failed",
    "execution_cancelled",
    "execution_blocked",
    "step_retrying",
    "waiting",
    "progress",
    "heartbeat",
    "lease_lost",
    "store_unavailable",
]


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    async def one(state: int) -> int:
        return state + 1

    async def two(state: int) -> int:
        return state + 1

    registry.workflow("work", [one, two])
    return registry


def names(events: list[ExecutionEvent]) -> list[str]:
    return [event.type.value if event.step is None else f"{event.type.value} {event.step}" for event in events]


WORK = [
    "execution_started",
    "step_started one",
    "checkpointed one",
    "step_completed one",
    "step_started two",
    "checkpointed two",
    "step_completed two",
    "execution_completed",
]


def test_the_types_are_those_of_the_contract():
    assert sorted(kind.value for kind in EventType) == sorted(TYPES)
    assert str(EventType.PAUSED) == "paused"


async def test_a_plain_listener_that_returns_a_coroutine_is_told_of(registry, store, caplog):
    async def later(event: ExecutionEvent) -> None: ...

    def plain(event: ExecutionEvent) -> Any:
        return later(event)

    async with Executor(registry, store=store, on_event=plain) as executor:
        await (await executor.start("work", 0)).result()
    assert [line for line in caplog.messages if "listener.failed" in line and "TypeError" in line]


@pytest.mark.parametrize("durability", ["step", "interval", "exit"])
async def test_they_come_in_order_whatever_is_coalesced(registry, store, durability):
    events: list[ExecutionEvent] = []
    config = ExecutorConfig(durability=durability)
    async with Executor(registry, store=store, config=config, on_event=events.append) as executor:
        await (await executor.start("work", 0, id="a")).result()
    assert names(events) == WORK
    assert {event.execution_id for event in events} == {"a"}
    assert [event.timestamp for event in events] == sorted(event.timestamp for event in events)
    assert all(event.timestamp.tzinfo is not None for event in events)


async def test_none_is_told_before_its_fact_is_durable(registry, store):
    """At the moment of each event the store already has what it says."""
    wrong: list[str] = []

    def check(event: ExecutionEvent) -> None:
        loaded = store.backend.load(event.execution_id)
        assert loaded is not None
        rows = store.backend.boundaries(event.execution_id)
        if event.type is EventType.CHECKPOINTED and event.data["seq"] > loaded.head.seq:
            wrong.append(str(event))
        if event.type is EventType.STEP_COMPLETED and event.step not in [row.name for row in rows]:
            wrong.append(str(event))
        if event.type is EventType.EXECUTION_COMPLETED and loaded.head.state != "completed":
            wrong.append(str(event))

    for durability in ("step", "interval"):
        config = ExecutorConfig(durability=durability)
        async with Executor(registry, store=store, config=config) as executor:
            executor.bus.emit = check  # type: ignore[method-assign]  # in the very moment
            executor.bus.active = True
            await (await executor.start("work", 0)).result()
    assert wrong == []


@pytest.mark.parametrize("kind", ["plain", "async", "object"])
async def test_a_listener_is_any_callable(registry, store, kind):
    events: list[ExecutionEvent] = []

    async def later(event: ExecutionEvent) -> None:
        await anyio.lowlevel.checkpoint()
        events.append(event)

    class Listener:
        async def __call__(self, event: ExecutionEvent) -> None:
            events.append(event)

    listener: Any = {"plain": events.append, "async": later, "object": Listener()}[kind]
    async with Executor(registry, store=store, on_event=listener) as executor:
        await (await executor.start("work", 0)).result()
        assert names(events) == WORK


async def test_every_listener_gets_every_event(registry, store):
    events: list[ExecutionEvent] = []
    async with Executor(registry, store=store, on_event=events.append) as executor:
        streams = [executor.events(), executor.events()]
        await (await executor.start("work", 0)).result()
        seen: list[list[str]] = []
        for stream in streams:
            seen.append([])
            async for event in stream:
                seen[-1].append(names([event])[0])
                if event.type is EventType.EXECUTION_COMPLETED:
                    break
            stream.close()
        assert seen == [WORK, WORK]
        assert executor.bus.active
        assert not executor.bus._subscriptions


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_listener_that_raises_stops_nothing(registry, store, kind):
    calls = []

    def plain(event: ExecutionEvent) -> None:
        calls.append(event)
        raise ValueError

    async def later(event: ExecutionEvent) -> None:
        plain(event)

    async with Executor(registry, store=store, on_event=plain if kind == "plain" else later) as executor:
        assert await (await executor.start("work", 0)).result() == 2
    assert names(calls) == WORK


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_listener_that_exits_ends_neither_the_program_nor_itself(registry, store, kind):
    calls = []

    def plain(event: ExecutionEvent) -> None:
        calls.append(event)
        raise SystemExit(3)

    async def later(event: ExecutionEvent) -> None:
        plain(event)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, on_event=plain if kind == "plain" else later) as executor:
            assert await (await executor.start("work", 0)).result() == 2
    assert names(calls) == WORK


async def test_a_listener_that_awaited_something_cancelled_is_called_again(registry, store, anyio_backend_name):
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio alone has a CancelledError that nobody sent")
    calls = []

    async def later(event: ExecutionEvent) -> None:
        calls.append(event)
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, on_event=later) as executor:
            assert await (await executor.start("work", 0)).result() == 2
    assert names(calls) == WORK


async def test_all_who_read_one_stream_hear_of_its_end(registry, store):
    ended: list[str] = []

    async def read(name: str) -> None:
        async for _ in stream:
            pass
        ended.append(name)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks, Executor(registry, store=store) as executor:
            stream = executor.events()
            tasks.start_soon(read, "one")
            tasks.start_soon(read, "other")
            await anyio.wait_all_tasks_blocked()
            await (await executor.start("work", 0)).result()
    assert sorted(ended) == ["one", "other"]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_listener_that_never_returns_stops_and_slows_nothing(registry, store, kind):
    let_go = threading.Event()

    def plain(event: ExecutionEvent) -> None:
        let_go.wait()

    async def later(event: ExecutionEvent) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with Executor(registry, store=store, on_event=plain if kind == "plain" else later) as executor:
            began = anyio.current_time()
            for _ in range(50):
                assert await (await executor.start("work", 0)).result() == 2
            assert anyio.current_time() - began < 0.1 * 50 / 2
            let_go.set()


async def test_what_does_not_fit_is_dropped_and_counted(registry, store, monkeypatch):
    monkeypatch.setattr("longrun.events.BUFFER", 3)
    async with Executor(registry, store=store) as executor:
        stream = executor.events()
        assert await (await executor.start("work", 0)).result() == 2
        assert stream.dropped == 5
        assert names([await anext(stream) for _ in range(3)]) == WORK[:3]


@pytest.mark.parametrize("where", ["executor", "here", "elsewhere"])
async def test_who_leaves_in_the_middle_need_not_close_anything(where, registry, store):
    """And nothing is kept for it: events that nobody reads are not even built."""
    async with Executor(registry, store=store) as executor, Client(store) as client:
        run = await executor.start("work", 0)
        events = {"executor": executor.events, "here": run.events, "elsewhere": client.handle(run.id).events}[where]
        async for event in events():
            assert event.execution_id == run.id
            break
        gc.collect()
        assert await run.result() == 2
        await (await executor.start("work", 0)).result()
        assert not executor.bus.active


async def test_a_handle_tells_the_events_of_its_execution_until_the_end(store):
    registry = StepRegistry()
    go = anyio.Event()

    async def work(state: Any) -> Any:
        await go.wait()
        return state

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:
        other = await one.start("work", id="other")
        run = await one.start("work", id="a")
        here, there = run.events(), (await two.handle("a")).events()
        seen: dict[str, list[str]] = {"here": [], "there": []}

        async def listen(name: str, events: Any, ready: anyio.Event) -> None:
            ready.set()
            async for event in events:
                assert event.execution_id == "a"
                seen[name].append(event.type.value)

        async with anyio.create_task_group() as tasks:
            for name, events in (("here", here), ("there", there)):
                ready = anyio.Event()
                tasks.start_soon(listen, name, events, ready)
                await ready.wait()
            head = await store.load("a")
            assert head.head.seq == 1
            go.set()
        await other.result()
    assert seen["here"][-3:] == ["checkpointed", "step_completed", "execution_completed"]
    assert seen["there"] == ["execution_completed"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_handle_tells_the_events_also_when_another_executor_takes_its_execution_up(kind, tmp_path, monkeypatch):
    """It slept; here there was no room for it when it woke up."""
    monkeypatch.setattr("longrun.following.LOOK_AGAIN", 0.05)
    registry = StepRegistry()
    busy = anyio.Event()

    async def nap(state: Any) -> Sleep:
        await busy.wait()
        return Sleep(0.01, state)

    async def after(state: Any) -> Any:
        return state

    async def last(state: Any) -> Any:
        return state

    async def long(state: Any) -> None:
        await anyio.sleep_forever()

    registry.workflow("work", [nap, after, last])
    registry.workflow("long", [long])
    store: Any = MemoryCheckpointStore() if kind == "memory" else f"sqlite:///{tmp_path}/work.db"
    full = ExecutorConfig(max_concurrency=1, drain_timeout=0.01)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=full) as one, Executor(registry, store=store):
            run = await one.start("work", id="a")
            events = run.events()
            await one.start("long")
            busy.set()
            seen = [event async for event in events]
    told = [event.type.value for event in seen]
    assert told[-1] == "execution_completed"
    assert told.count("waiting") == told.count("execution_completed") == 1
    assert [event.step for event in seen if event.type is EventType.STEP_COMPLETED] == ["nap", "after"]


async def test_progress_and_heartbeats_are_told():
    clock = ManualClock()
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def work(ctx: StepContext, state: Any) -> Any:
        ctx.progress(3, 10, "counting")
        begun.set()
        await go.wait()
        return state

    registry.workflow("work", [work])
    store = MemoryCheckpointStore(clock=clock)
    async with Executor(registry, store=store, clock=clock) as executor:
        stream = executor.events()
        run = await executor.start("work", id="a")
        await begun.wait()
        assert (await run.info()).progress == pytest.approx(0.3)
        clock.advance(5)
        async for event in stream:
            if event.type is EventType.PROGRESS:
                assert event.data.items() >= {"done": 3, "total": 10, "message": "counting", "fraction": 0.3}.items()
            if event.type is EventType.HEARTBEAT:
                break
        # for other processes, written with the beat
        while (await store.load("a")).head.done != 3:
            await store.ping()
        go.set()
        await run.result()


async def test_what_was_only_submitted_is_told_as_started_and_what_was_paused_as_resumed(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    @registry.step
    async def work(state: Any) -> Any:
        begun.set()
        await go.wait()
        return state

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="paused")
        await begun.wait()
        await run.pause(interrupt=True)
    go.set()
    seen: list[Any] = []
    async with Executor(registry, store=store, on_event=seen.append) as executor:
        await (await executor.handle("paused")).result()
        await executor.submit("work", id="submitted")
        await (await executor.start("work", id="submitted")).result()
    begins = {EventType.EXECUTION_STARTED, EventType.RESUMED}
    assert [(event.execution_id, event.type) for event in seen if event.type in begins] == [
        ("paused", EventType.RESUMED),
        ("submitted", EventType.EXECUTION_STARTED),
    ]


async def test_waiting_and_failing_are_told_with_what_belongs_to_them():
    clock = ManualClock(autojump=True)
    registry = StepRegistry()

    @registry.step
    async def nap(state: Any) -> Sleep:
        return Sleep(5, state)

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def bad(state: Any) -> Any:
        raise ValueError("no")

    registry.workflow("work", [nap, bad])
    events: list[ExecutionEvent] = []
    config = ExecutorConfig(heartbeat_interval=600, lease_ttl=1800)
    store = MemoryCheckpointStore(clock=clock)
    async with Executor(registry, store=store, clock=clock, config=config, on_event=events.append) as executor:
        run = await executor.start("work")
        await run.wait("failed")
    by_type = {event.type: event for event in events}
    waiting = by_type[EventType.WAITING]
    assert (waiting.step, waiting.data["signal"]) == ("nap", None)
    assert waiting.data["due"] == pytest.approx(1_700_000_005)
    failed = by_type[EventType.EXECUTION_FAILED]
    assert (failed.step, failed.error, failed.attempt) == ("bad", "ValueError: no", 1)
    assert "no" not in repr(failed).replace("lonrun", "").split("timestamp")[0].split("step")[0]


def test_what_cannot_be_called_is_no_listener():
    with pytest.raises(ConfigError, match="on_event"):
        Executor(StepRegistry(), store="memory:", on_event=5)  # type: ignore[arg-type]
