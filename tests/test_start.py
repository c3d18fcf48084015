"""Start: durable before it returns, once for an id, and a handle that works whichever process runs it."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import (
    ConfigError,
    ExecutionExistsError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    StepContext,
    StepRegistry,
    StoreUnavailableError,
)
from longrun.testing import ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    async def double(state: int) -> int:
        return 2 * state

    async def show(ctx: StepContext, state: Any) -> dict[str, Any]:
        return {
            "id": ctx.execution_id,
            "workflow": ctx.workflow,
            "step": ctx.step,
            "index": ctx.step_index,
            "attempt": ctx.attempt,
            "iteration": ctx.iteration,
            "metadata": dict(ctx.metadata),
        }

    registry.workflow("double", [double])
    registry.workflow("show", [show])
    return registry


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


async def test_it_is_running_and_owned_in_the_store_before_start_returns(registry, store):
    """I1"""
    async with Executor(registry, store=store) as executor:
        run = await executor.start("double", 4, id="a", metadata={"who": "me"})
        first = (await store.boundaries("a"))[0]
        assert (first.seq, first.kind) == (1, "start")
        assert await run.result() == 8
        info = await run.info()
        assert (info.id, info.name, info.state, info.metadata) == ("a", "double", "completed", {"who": "me"})
        assert (info.progress, info.current_step, info.total_steps, info.step_names) == (1.0, 1, 1, ("double",))
        assert info.end_time is not None
        assert info.start_time <= info.last_update <= info.end_time
        assert info.start_time.tzinfo is not None
        assert info.owner is None


async def test_a_step_knows_where_it_is(registry, store):
    async with Executor(registry, store=store) as executor:
        seen = await (await executor.start("show", None, id="x", metadata={"k": [1]})).result()
    assert seen == {
        "id": "x",
        "workflow": "show",
        "step": "show",
        "index": 0,
        "attempt": 1,
        "iteration": 0,
        "metadata": {"k": [1]},
    }


async def test_without_an_id_each_start_is_another_execution(registry, store):
    async with Executor(registry, store=store) as executor:
        runs = [await executor.start("double", n) for n in range(20)]
        assert [await run.result() for run in runs] == [2 * n for n in range(20)]
    assert len({run.id for run in runs}) == 20


async def test_an_id_given_twice_returns_the_first(registry, store):
    async with Executor(registry, store=store) as executor:
        first = await executor.start("double", 1, id="a")
        assert await first.result() == 2
        second = await executor.start("double", 100, id="a")
        assert await second.result() == 2
        with pytest.raises(ExecutionExistsError, match="'double'"):
            await executor.start("show", 1, id="a")


async def test_many_starts_of_one_id_at_once_run_it_once(store):
    registry = StepRegistry()
    calls = []

    async def work(state: int) -> int:
        calls.append(state)
        return state

    registry.workflow("work", [work])
    results = []
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:

        async def start(executor: Executor, n: int) -> None:
            results.append(await (await executor.start("work", n, id="same")).result())

        async with anyio.create_task_group() as tasks:
            for n in range(10):
                tasks.start_soon(start, one, n)
                tasks.start_soon(start, two, 100 + n)
    assert len(calls) == 1
    assert set(results) == set(calls)


async def test_the_result_is_there_for_another_executor_too(store):
    registry = StepRegistry()
    go = anyio.Event()

    async def work(state: int) -> int:
        await go.wait()
        return state + 1

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as one, Executor(registry, store=store) as two:
        await one.start("work", 1, id="a")
        run = await two.start("work", 1, id="a")
        assert (await run.info()).owner == one.owner
        async with anyio.create_task_group() as tasks:

            async def check() -> None:
                assert await run.result() == 2

            tasks.start_soon(check)
            go.set()


async def test_start_takes_up_what_was_interrupted_and_nobody_runs(store):
    registry = StepRegistry()
    calls = []
    first = anyio.Event()

    async def work(state: int) -> int:
        calls.append(state)
        if len(calls) == 1:
            first.set()
            await anyio.sleep_forever()
        return state

    registry.workflow("work", [work])
    async with CrashableExecutor(registry, store=store) as dying:
        await dying.start("work", 5, id="a")
        await first.wait()
        await crash(dying)
    async with Executor(registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
        assert (await executor.get("a")).state == "running"
        assert await (await executor.start("work", 6, id="a")).result() == 5
    assert calls == [5, 5]


async def test_a_start_that_is_cancelled_or_unanswered_still_runs_if_it_was_stored(registry):
    """I9: its answer never came, but the store has it in this owner's name."""

    class Deaf(MemoryCheckpointStore):
        async def create(self, create: Any) -> bool:
            await super().create(create)
            raise StoreUnavailableError("memory", "the answer was lost")

    async with Executor(registry, store=Deaf()) as executor:
        with pytest.raises(StoreUnavailableError):
            await executor.start("double", 4, id="a")
        assert await (await executor.handle("a")).result() == 8


async def test_a_list_of_steps_is_a_workflow(store):
    registry = StepRegistry()

    async def one(state: int) -> int:
        return state + 1

    async with Executor(registry, store=store) as executor:
        run = await executor.start([one, one, "one"], 0)
        assert await run.result() == 3
        assert (await run.info()).name == "steps:one,one,one"


async def test_submit_stores_for_workers_and_runs_nothing(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.submit("double", 2, id="a", queue="slow", priority=5, delay=60)
        await executor.wait_idle()
        info = await run.info()
        assert (info.state, info.queue, info.priority, info.owner) == ("initialized", "slow", 5, None)
        assert info.due is not None
        again = await executor.submit("double", 2, id="a")
        assert again.id == "a"


async def test_a_step_that_waits_until_nothing_runs_is_told_that_it_would_for_ever(store):
    registry = StepRegistry()
    executor = Executor(registry, store=store)

    async def wait(state: int) -> int:
        await executor.wait_idle()
        return state

    with anyio.fail_after(PATIENCE):
        async with executor:
            run = await executor.start([wait], 0, id="a")
            with pytest.raises(ExecutionFailedError, match="'a' cannot wait until nothing runs here"):
                await run.result()


async def test_start_runs_here_what_was_only_submitted(registry, store):
    async with Executor(registry, store=store) as executor:
        await executor.submit("double", 2, id="a")
        assert await (await executor.start("double", 9, id="a")).result() == 4


async def test_what_was_submitted_for_later_begins_at_its_time_and_not_before(registry):
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, clock=clock) as executor:
            run = await executor.submit("double", 2, id="a", delay=10)
            await executor.start("double", 2, id="a")
            await executor.wait_idle()
            head = (await store.load("a")).head
            assert (head.state, head.owner) == ("initialized", None)
            clock.advance(10)
            await executor.start("double", 2, id="a")
            assert await run.result() == 4


async def test_the_callers_object_is_never_touched(store):
    registry = StepRegistry()

    async def change(state: dict[str, Any]) -> dict[str, Any]:
        state["list"].append(1)
        return state

    registry.workflow("change", [change, change])
    mine: dict[str, list[int]] = {"list": []}
    async with Executor(registry, store=store) as executor:
        assert await (await executor.start("change", mine)).result() == {"list": [1, 1]}
    assert mine == {"list": []}


async def test_no_more_than_max_concurrency_run_at_once(store):
    registry = StepRegistry()
    running, most = 0, 0

    async def work(state: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return state

    registry.workflow("work", [work] * 3)
    async with Executor(registry, store=store, config=ExecutorConfig(max_concurrency=3)) as executor:
        runs = [await executor.start("work", n) for n in range(20)]
        assert [await run.result() for run in runs] == list(range(20))
    assert most == 3


async def test_a_parent_that_waits_for_its_children_gives_its_place_to_them(store):
    registry = StepRegistry()

    async def child(state: int) -> int:
        return state * 10

    async def parent(ctx: StepContext, state: int) -> list[Any]:
        handles = [await ctx.start_child("child", n, key=str(n)) for n in range(state)]
        results: dict[int, int] = {}

        async def wait(n: int) -> None:
            results[n] = await handles[n].result()

        async with anyio.create_task_group() as tasks:
            for n in range(state):
                tasks.start_soon(wait, n)
        return [results[n] for n in range(state)]

    registry.workflow("child", [child])
    registry.workflow("parent", [parent])
    async with Executor(registry, store=store, config=ExecutorConfig(max_concurrency=1)) as executor:
        with anyio.fail_after(20):
            run = await executor.start("parent", 4, id="p")
            assert await run.result() == [0, 10, 20, 30]
        children = await executor.list(parent_id="p")
        assert {one.id for one in children} == {f"p~1~{n}" for n in range(4)}


async def test_a_failure_names_step_attempt_and_text(store):
    registry = StepRegistry()

    async def bad(state: Any) -> Any:
        raise ValueError("out of cheese")

    registry.workflow("bad", [bad])
    async with Executor(registry, store=store, config=ExecutorConfig(max_retries=0)) as executor:
        run = await executor.start("bad", id="a")
        for _ in range(2):
            with pytest.raises(ExecutionFailedError, match="out of cheese") as caught:
                await run.result()
            assert (caught.value.step, caught.value.attempt) == ("bad", 1)
            assert caught.value.error == "ValueError: out of cheese"
        assert (await run.info()).error == "ValueError: out of cheese"


async def test_an_executor_is_used_inside_its_block_and_once(registry, store):
    executor = Executor(registry, store=store)
    with pytest.raises(ConfigError, match="not entered"):
        await executor.start("double", 1)
    async with executor:
        run = await executor.start("double", 1)
        assert await run.result() == 2
    with pytest.raises(ConfigError, match="left already"):
        await executor.start("double", 1)
    with pytest.raises(ConfigError, match="once"):
        await executor.__aenter__()
    assert await run.result() == 2


@pytest.mark.parametrize("given", [None, {"team": "a"}])
async def test_what_a_program_does_to_the_metadata_it_is_shown_changes_nothing(tmp_path, given):
    """Neither of this execution nor of any other."""
    registry = StepRegistry()

    @registry.step
    async def scribbles(ctx: StepContext, state: Any) -> Any:
        ctx.metadata["scribbled"] = True  # type: ignore[index]  # a program that does not look at types
        return state

    registry.workflow("work", [scribbles])
    stored = given or {}
    async with Executor(registry, store=f"file:{tmp_path}/store") as executor:
        run = await executor.start("work", {}, id="a", metadata=given)
        await run.result()
        (await run.info()).metadata["scribbled"] = True  # type: ignore[index]
        (await executor.list())[0].metadata["scribbled"] = True  # type: ignore[index]
        assert (await run.info()).metadata == stored
        other = await executor.start("work", {}, id="b")
        await other.result()
        assert (await other.info()).metadata == {}
        assert {one.id: one.metadata for one in await executor.list()} == {"a": stored, "b": {}}
