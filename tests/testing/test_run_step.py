"""`run_step` runs one step with a context like the real one, and tells what the step did."""

from __future__ import annotations

from inspect import signature
from typing import Any

import attrs
import pytest

from longrun import Goto, NotStorableError, Progress, Sleep, StepContext, StepRegistry, SyncStepContext, WaitFor
from longrun.handle import ExecutionHandle
from longrun.testing import run_step
from longrun.testing.steps import _Child


@attrs.frozen
class Page:
    url: str
    size: int = 0


async def test_a_state_comes_back_through_the_codec() -> None:
    async def measure(state: Page) -> Page:
        return attrs.evolve(state, size=len(state.url))

    run = await run_step(measure, Page("abc"))
    assert run.state == Page("abc", 3)
    assert run.directive is None


async def test_a_state_whose_type_is_not_said_is_what_it_is() -> None:
    """As an executor has it, where the step behind it says so."""

    async def rest(state: Page) -> Sleep:
        return Sleep(5, attrs.evolve(state, size=1))

    async def silent(state: Page):
        return attrs.evolve(state, size=1)

    for step in (rest, silent):
        assert (await run_step(step, Page("abc"))).state == Page("abc", 1)


async def test_where_the_step_is_can_be_chosen() -> None:
    async def look(ctx: StepContext, state: dict[str, Any]) -> list[Any]:
        return [ctx.attempt, ctx.iteration, ctx.signal, ctx.timed_out, ctx.metadata, ctx.idempotency_key, ctx.workflow]

    run = await run_step(
        look, {}, attempt=2, iteration=3, signal="yes", timed_out=True, metadata={"a": 1}, execution_id="x", visit=7
    )
    assert run.state == [2, 3, "yes", True, {"a": 1}, "x:7", "test"]


@pytest.mark.parametrize("directive", [Goto("there", {"n": 1}), Sleep(5, {"n": 1}), WaitFor("go", {"n": 1})])
async def test_a_directive_is_told_with_its_state(directive: object) -> None:
    async def turn(state: dict[str, Any]) -> object:
        return directive

    run = await run_step(turn, {})
    assert run.directive is directive
    assert run.state == {"n": 1}


async def test_local_progress_and_saves_are_told() -> None:
    async def work(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        async for n in ctx.each("items", range(3), every=1):
            ctx.local["last"] = n
        ctx.progress(3, 3, "done")
        return state

    run = await run_step(work, {}, local={"first": True})
    assert run.local == {"first": True, "last": 2}
    assert run.progress == Progress(done=3, total=3, message="done")
    assert run.saves >= 3


async def test_a_step_can_be_taken_up_where_another_run_stopped() -> None:
    called: list[str] = []

    async def effect(name: str) -> str:
        called.append(name)
        return name

    async def work(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        await ctx.once("pay", effect, "pay")
        async for n in ctx.each("items", range(3), every=1):
            await effect(str(n))
        return state

    first = await run_step(work, {})
    await run_step(work, {}, attempt=2, entries=first.entries)
    assert called == ["pay", "0", "1", "2"]


async def test_a_plain_step_runs_in_a_thread_with_the_blocking_context() -> None:
    def work(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
        for n in ctx.each("items", [1, 2]):
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
        ctx.checkpoint(force=True)
        return {"sum": ctx.local["sum"], "doubled": ctx.map(_double, [1, 2])}

    run = await run_step(work, {})
    assert run.state == {"sum": 3, "doubled": [2, 4]}


def _double(n: int) -> int:
    return n * 2


async def test_a_registered_step_can_be_given() -> None:
    registry = StepRegistry()

    @registry.step(name="other")
    async def work(ctx: StepContext, state: dict[str, Any]) -> str:
        return ctx.step

    step = registry.get("other")
    assert step is not None
    assert (await run_step(step, {})).state == "other"


async def test_what_the_step_raises_is_raised() -> None:
    async def breaks(state: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        await run_step(breaks, {})


async def test_a_state_that_cannot_be_stored_is_refused() -> None:
    async def keeps(state: dict[str, Any]) -> dict[str, Any]:
        return {"client": object()}

    with pytest.raises(NotStorableError, match="client"):
        await run_step(keeps, {})


async def test_children_are_answered_for() -> None:
    async def family(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        child = await ctx.start_child("leaf", {"n": 2}, key="a")
        return {"child": await child.result()}

    def children(workflow: str, state: dict[str, Any], key: str) -> dict[str, Any]:
        return {"n": state["n"] * 10, "of": workflow}

    run = await run_step(family, {}, children=children)
    assert run.state == {"child": {"n": 20, "of": "leaf"}}
    with pytest.raises(LookupError, match="children"):
        await run_step(family, {})


async def test_children_are_waited_for_and_asked_as_real_ones_are() -> None:
    async def in_a_task(ctx: StepContext, state: dict[str, Any]) -> list[Any]:
        child = await ctx.start_child("leaf", {}, key="a")
        await child.signal("go", 1, key="k", timeout=5)
        waited = await child.wait("completed", timeout=5)
        heard = [event async for event in child.events()]
        found = await child.info()
        return [await child.result(timeout=5), waited.state.value, found.id, found.name, found.parent_id, heard]

    def in_a_thread(ctx: SyncStepContext, state: dict[str, Any]) -> list[Any]:
        child = ctx.start_child("leaf", {}, key="a")
        child.signal("go", 1, key="k", timeout=5)
        waited = child.wait("completed", timeout=5)
        heard = list(child.events())
        found = child.info()
        return [child.result(timeout=5), waited.state.value, found.id, found.name, found.parent_id, heard]

    for step in (in_a_task, in_a_thread):
        run = await run_step(step, {}, children=lambda workflow, state, key: 3, execution_id="x", visit=2)
        assert run.state == [3, "completed", "x~2~a", "leaf", "x", []]


def test_the_handle_of_such_a_child_has_every_name_of_a_real_one() -> None:
    public = {name for name in vars(ExecutionHandle) if not name.startswith("_")}
    assert public == {name for name in vars(_Child) if not name.startswith("_")}
    for name in public:
        real, stand_in = (signature(getattr(kind, name)) for kind in (ExecutionHandle, _Child))
        assert real.parameters == stand_in.parameters, name
