"""Cancellation at every await, on asyncio and trio: no lost lease, no stuck task, no half-written state.

Each case is played once to count the awaits of what is cancelled, and then once for every one of them: a scope is
cancelled there, and whatever was interrupted must go on as if it had not been, or had never begun.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import (
    Client,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    MemoryCheckpointStore,
    RetryPolicy,
    StepContext,
    StepRegistry,
    WaitFor,
    Worker,
)
from longrun.stored import Query
from longrun.testing.points import probed_awaits

CONFIG = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=60.0, drain_timeout=5.0, checkpoint_interval=0.0)
PATIENCE = 20.0
Act = Callable[[Executor], Awaitable[object]]

registry = StepRegistry()


@registry.step
async def work(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for n in ctx.each("items", range(3), every=1):
        ctx.local["sum"] = ctx.local.get("sum", 0) + n
    return {**state, "sum": ctx.local["sum"], "once": await ctx.once("one", _one)}


async def _one() -> int:
    await anyio.lowlevel.checkpoint()
    return 1


@registry.step
async def gate(state: dict[str, Any]) -> WaitFor:
    return WaitFor("go", state)


@registry.step
async def end(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "signal": ctx.signal, "mapped": await ctx.map(_double, [1, 2])}


async def _double(n: int) -> int:
    await anyio.lowlevel.checkpoint()
    return n * 2


@registry.step(retry=RetryPolicy(max_attempts=1))
async def fail(state: dict[str, Any]) -> dict[str, Any]:
    raise ValueError


registry.workflow("fails", [fail])
registry.workflow("whole", [work, gate, end])
RESULT = {"sum": 3, "once": 1, "signal": "yes", "mapped": [2, 4]}


async def start(executor: Executor) -> None:
    await executor.start("whole", {}, id="x")


async def submit(executor: Executor) -> None:
    await executor.submit("whole", {}, id="x")


async def signal(executor: Executor) -> None:
    await start(executor)
    await executor.signal("x", "go", "yes", key="k")


async def pause(executor: Executor) -> None:
    await start(executor)
    await executor.pause("x")


async def pause_and_resume(executor: Executor) -> None:
    await pause(executor)
    await executor.resume("x")


async def result(executor: Executor) -> None:
    run = await executor.start("whole", {}, id="x")
    await executor.signal("x", "go", "yes", key="k")
    await run.result()


async def resume_all(executor: Executor) -> None:
    await executor.auto_resume_all()


async def cancel_and_delete(executor: Executor) -> None:
    """Of another one: it is gone, or can be brought there."""
    await executor.start("whole", {}, id="y")
    await executor.cancel("y")
    await executor.delete("y")


async def fail_and_retry(executor: Executor) -> None:
    run = await executor.start("fails", {}, id="y")
    await run.wait("failed")
    await executor.retry("y")


async def fork(executor: Executor) -> None:
    await start(executor)
    await executor.fork("x", new_id="y")


async def look(executor: Executor) -> None:
    await start(executor)
    await executor.get("x")
    await executor.list()
    await executor.history("x")


async def wait_idle(executor: Executor) -> None:
    await start(executor)
    await executor.wait_idle()


ACTS = [
    *(start, submit, signal, pause, pause_and_resume, result, resume_all),
    *(cancel_and_delete, fail_and_retry, fork, look, wait_idle),
]


async def cut_at(act: Act, executor: Executor, n: int | None) -> int:
    """Do it, cancelled at its n-th await; how many awaits it came to."""
    awaits = 0
    with anyio.CancelScope() as scope:

        def reach() -> None:
            nonlocal awaits
            awaits += 1
            if awaits == n:
                scope.cancel()

        await probed_awaits(_as_coroutine(act, executor), reach)
    return awaits


async def _as_coroutine(act: Act, executor: Executor) -> object:
    return await act(executor)


async def finish(executor: Executor) -> object:
    """Whatever state it was left in, it can be brought to its end."""
    run = await executor.start("whole", {}, id="x")
    for send in (lambda: executor.resume("x"), lambda: executor.signal("x", "go", "yes", key="k")):
        try:
            await send()
        except InvalidStateError:
            assert (await run.info()).state.finished
    return await run.result()


async def clear_away(executor: Executor) -> None:
    """The other one, if it was begun, can be brought to its end and be deleted, whatever state it was left in."""
    if not any(found.id == "y" for found in await executor.list()):
        return
    try:
        await executor.cancel("y")
    except InvalidStateError:
        assert (await executor.get("y")).state.finished
    await executor.delete("y")
    assert [found.id for found in await executor.list()] == ["x"]


def chosen(count: int, size: int, seed: int) -> list[int]:
    points = list(range(1, count + 1))
    return points if len(points) <= size else sorted(random.Random(seed).sample(points, size))


async def check_store(store: MemoryCheckpointStore) -> None:
    """No owner is left, nothing is owned, and the numbers have no gap (I7)."""
    async with store:
        assert await store.owners() == []
        assert await store.find(Query(owned=True)) == []
        rows = await store.boundaries("x")
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_a_cancelled_call_leaves_the_executor_whole(act: Act, campaign_size: int, campaign_seed: int) -> None:
    """The caller of `start`, `pause` … may be cancelled at any await; the execution and the executor go on."""
    count = await _call_once(act, None)
    assert count > 0
    for n in chosen(count, campaign_size, campaign_seed):
        await _call_once(act, n)


async def _call_once(act: Act, n: int | None) -> int:
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=CONFIG) as executor:
            awaits = await cut_at(act, executor, n)
            if act is not submit:
                assert await finish(executor) == RESULT
                await clear_away(executor)
        await check_store(store)
    return awaits


async def with_an_executor(store: MemoryCheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        await result(executor)


async def with_a_worker(store: MemoryCheckpointStore) -> None:
    async with Worker(registry, store=store, config=CONFIG), Client(store) as client:
        run = await client.submit("whole", {}, id="x")
        await client.signal("x", "go", "yes", key="k")
        await run.result()


Program = Callable[[MemoryCheckpointStore], Awaitable[None]]


@pytest.mark.parametrize("program", [with_an_executor, with_a_worker], ids=lambda program: program.__name__)
async def test_a_cancelled_program_gives_everything_back(
    program: Program, campaign_size: int, campaign_seed: int
) -> None:
    """The scope around the whole executor is cancelled, entering and leaving it included: what is unfinished is written
    down and given back, and the next program takes it up at once, without waiting for a lease."""
    count = await _program(program, MemoryCheckpointStore(), None)
    for n in chosen(count, 2 * campaign_size, campaign_seed):
        store = MemoryCheckpointStore()
        with anyio.fail_after(PATIENCE):
            await _program(program, store, n)
            async with Executor(registry, store=store, config=CONFIG) as executor:
                assert await finish(executor) == RESULT
                await executor.auto_resume_all()  # buries who was cancelled as it signed on
            await check_store(store)


async def _program(program: Program, store: MemoryCheckpointStore, n: int | None) -> int:
    return await cut_at(lambda nobody: program(store), None, n)  # type: ignore[arg-type]


async def test_a_step_cancelled_at_each_await_is_taken_up(campaign_size: int, campaign_seed: int) -> None:
    """A pause with `interrupt` at any await of a step: its progress is kept, and it ends as it would have."""
    count = await _interrupted_at(None)
    for n in chosen(count, campaign_size, campaign_seed):
        await _interrupted_at(n)


async def _interrupted_at(n: int | None) -> int:
    reached = anyio.Event()
    awaits = 0

    def reach() -> None:
        nonlocal awaits
        awaits += 1
        if awaits == n:
            reached.set()

    own = StepRegistry()

    @own.step
    async def cut(ctx: StepContext, state: dict[str, Any]) -> Any:
        return await probed_awaits(work(ctx, state), reach)

    own.workflow("cut", [cut])
    store = MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(own, store=store, config=CONFIG) as executor:
            run = await executor.start("cut", {}, id="x")
            if n is not None:
                await reached.wait()
                try:
                    await executor.pause("x", interrupt=True)
                    await executor.resume("x")
                except InvalidStateError:
                    assert (await run.info()).state.finished
            assert await run.result() == {"sum": 3, "once": 1}
        await check_store(store)
    return awaits


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
