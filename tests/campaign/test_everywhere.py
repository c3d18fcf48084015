"""What must hold at every place is tried at many: a copy and a conversation broken off there, and a very long way."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from longrun import ExecutionHandle, Executor, Goto, MemoryCheckpointStore, StepContext, StepRegistry, WaitFor
from longrun.testing import FaultyStore, crash_matrix
from tests.test_copy import PATIENCE, Household, assert_equal, copy_until_done


@pytest.mark.parametrize("anyio_backend", ["asyncio", pytest.param("trio", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", ["fail", "lose_answer"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_copy_that_breaks_off_anywhere_is_completed_by_the_next(side: str, how: str) -> None:
    """At each write in turn, made and not made: then every message is there once, and everything goes on there."""
    number, fired = 1, True
    with anyio.fail_after(PATIENCE):
        while fired:
            house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
            await house.move_in(source)
            stores = {"source": FaultyStore(source), "target": FaultyStore(target)}
            getattr(stores[side], how)("any", number)
            report, interrupted = await copy_until_done(stores["source"], stores["target"])
            fired = bool(stores[side].fired)
            assert not report.skipped, report.skipped
            assert interrupted == fired
            assert set(report.copied) | set(report.present) == house.ids
            async with source, target:
                await assert_equal(source, target, house)
            await house.live_on(lambda: target)  # noqa: B023
            number += 13  # another place in each round, and not every one of them
    assert number > 40, "it broke off in too few places"


async def test_no_crash_loses_or_doubles_a_signal_that_was_queued() -> None:
    registry = StepRegistry()

    async def begin(state: Any) -> WaitFor:
        return WaitFor("begin", state)

    async def listen(state: list[Any]) -> WaitFor:
        return WaitFor("word", state)

    async def reply(ctx: StepContext, state: list[Any]) -> Any:
        state = [*state, ctx.signal]
        return Goto("listen", state) if len(state) < 3 else state

    async def speak(run: ExecutionHandle) -> None:
        for n in range(3):
            await run.signal("word", n, key=f"word {n}")
        await run.signal("begin", key="begin")

    registry.workflow("chat", [begin, listen, reply])
    report = await crash_matrix(registry, "chat", [], drive=speak)
    assert report.ok, str(report)


@pytest.mark.parametrize("anyio_backend", ["asyncio", pytest.param("trio", marks=pytest.mark.thorough)])
async def test_a_step_may_stand_in_a_workflow_ten_thousand_times() -> None:
    registry = StepRegistry()

    @registry.step
    async def add(state: int) -> int:
        return state + 1

    registry.workflow("long", [add] * 10_000)
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        run = await executor.start("long", 0)
        assert await run.result() == 10_000
        info = await run.info()
        assert (info.total_steps, info.checkpoints, info.progress) == (10_000, 10_001, 1.0)
