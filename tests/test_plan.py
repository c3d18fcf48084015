"""What a resume would do: said before it is done, and borne out when it is."""

from __future__ import annotations

from typing import Any

import anyio
import attrs
import pytest

from longrun import (
    EventType,
    ExecutionState,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.client import Client
from longrun.errors import CorruptDataError
from longrun.plan import InStep, Planner, ResumePlan, describe, in_step
from longrun.stored import Loaded, Save
from longrun.testing import FaultyStore

State = ExecutionState
CONFIG = ExecutorConfig(auto_resume=False, checkpoint_interval=0.01, heartbeat_interval=0.1, lease_ttl=5)


@pytest.fixture
def registry() -> StepRegistry:
    made = StepRegistry()

    @made.step
    async def first(state: dict[str, Any]) -> dict[str, Any]:
        return state

    @made.step
    async def loop(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        await ctx.once("call/1", str, 3)
        await ctx.map(str, range(4), name="parts")
        async for _ in ctx.each("pages 100%", range(100)):
            if state.get("stop") == (await _noted(ctx)):
                await anyio.sleep_forever()
        return state

    @made.step
    async def ask(state: dict[str, Any]) -> WaitFor:
        return WaitFor("go", state)

    made.workflow("flow", [first, loop, first])
    made.workflow("ask", [first, ask, first])
    return made


async def _noted(ctx: StepContext) -> int:
    ctx.local["n"] = ctx.local.get("n", 0) + 1
    await ctx.checkpoint()
    return int(ctx.local["n"])


async def plans(store: Any, registry: StepRegistry | None, **config: Any) -> dict[str, ResumePlan]:
    planner = Planner(store, registry, ExecutorConfig(**config))
    return {one.id: one async for one in planner.all()}


async def interrupted(store: Any, registry: StepRegistry, id: str = "a") -> None:
    """Left in the middle of the second step, seven of its items done."""
    config = attrs.evolve(CONFIG, drain_timeout=0)
    async with Executor(registry, store=store, config=config) as executor:
        events = executor.events()
        await executor.start("flow", {"stop": 8}, id=id)
        async for event in events:
            if event.type is EventType.PROGRESS and event.data["done"] == 7:
                break


async def test_a_step_in_flight_runs_again_and_keeps_what_it_had_done(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        found = (await plans(store, registry))["a"]
        assert (found.action, found.step, found.step_name, found.skipped) == ("run-again", 1, "loop", ("first",))
        assert set(found.inside) == {
            InStep(kind="each", name="pages 100%", done=7, total=100),
            InStep(kind="map", name="parts", done=4, total=4),
            InStep(kind="once", name="", done=1),
        }
        assert "pages 100%: from item 8 of 100" in found.reason
        assert not found.blocked


async def test_it_is_borne_out(registry: StepRegistry) -> None:
    """What the plan calls blocked is what the pass at start blocks, and for the same reason."""
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        other = StepRegistry()
        other.register("first", lambda state: state)
        other.workflow("flow", ["first"])
        (found,) = (await plans(store, other)).values()
        assert (found.action, found.missing) == ("block", ("loop",))
        async with Executor(other, store=store, config=CONFIG) as executor:
            report = await executor.auto_resume_all()
            assert set(report.blocked) == {"a"}
        (found,) = (await plans(store, other)).values()
        assert found.action == "block"
        (found,) = (await plans(store, registry)).values()
        assert found.action == "run-again", "with the right code it would go on"


async def test_a_later_step_that_is_missing_blocks_too(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store, Client(store) as client:
        await client.submit("flow", {}, id="by-name")
        async with Executor(registry, store=store, config=CONFIG) as executor:
            await executor.submit("flow", {}, id="a")
        other = StepRegistry()
        other.register("first", lambda state: state)
        other.workflow("flow", ["first"])
        found = await plans(store, other)
        assert (found["a"].action, found["a"].missing) == ("block", ("loop",))
        assert found["by-name"].action == "start", "it has no steps yet: the code gives it its own"


async def test_what_a_resume_would_not_touch(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        async with Executor(registry, store=store, config=CONFIG) as executor:
            for id in ("held", "paused"):
                await executor.submit("flow", {}, id=id)
                await executor.pause(id, hold=id == "held")
            await (await executor.start("ask", {}, id="waiting")).wait("waiting")
            events = executor.events()
            await executor.start("flow", {"stop": 1}, id="running")
            async for event in events:
                if event.type is EventType.STEP_STARTED and event.step == "loop":
                    break
            found = await plans(store, registry)
            assert (found["running"].action, found["running"].owner_alive) == ("leave", True)
            assert found["running"].at_risk is not None
            await executor.cancel("running")
        found = await plans(store, registry)
        assert {id: one.action for id, one in found.items()} == {"held": "stay", "paused": "go-on", "waiting": "wait"}
        assert found["waiting"].reason == "for signal 'go'"
        assert {one.action for one in (await plans(store, StepRegistry())).values()} == {"leave"}
        planner = Planner(store, registry)
        assert [one.action async for one in planner.some(["running"])] == ["stay"]


async def test_poison_would_be_blocked(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        head = (await store.load("a")).head
        await store.save(Save(id="a", head=attrs.evolve(head, crashes=5, revision=head.revision + 1)))
        found = (await plans(store, registry, max_crashes=5))["a"]
        assert (found.action, "died 5 times" in found.reason) == ("block", True)
        assert (await plans(store, registry, max_crashes=6))["a"].action == "run-again"


async def test_the_claim_of_what_a_dead_process_left_counts_as_one_more_crash(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        await saved(store, "a", crashes=4, owner="gone")
        found = (await plans(store, registry, max_crashes=5))["a"]
        assert (await plans(store, registry, max_crashes=6))["a"].action == "run-again"
        config = attrs.evolve(CONFIG, max_crashes=5, auto_resume=False)
        async with Executor(registry, store=store, config=config) as executor:
            report = await executor.auto_resume_all()
    assert found.action == "block"
    assert report.blocked == {"a": found.reason}


async def test_a_wait_whose_time_is_over_is_none_any_more(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        for due, action in ((None, "wait"), (1e12, "wait"), (1.0, "run-again")):
            await saved(store, "a", state=ExecutionState.WAITING, signal="go", due=due)
            assert (await plans(store, registry))["a"].action == action


async def test_without_the_code_it_says_what_was_not_checked(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        (found,) = (await plans(store, None)).values()
        assert found.action == "run-again"
        assert found.unchecked


async def test_planning_changes_nothing(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        before = await store.load("a")
        await plans(store, registry)
        assert await store.load("a") == before
        assert in_step(before)
        assert all(describe(one) for one in in_step(before))


async def saved(store: Any, id: str, **fields: Any) -> None:
    """Change the head of an execution that nobody owns."""
    head = (await store.load(id)).head
    await store.save(Save(id=id, head=attrs.evolve(head, revision=head.revision + 1, **fields)))


async def test_what_cannot_be_read_would_be_blocked(registry: StepRegistry) -> None:
    """The plan still says which workflow it is: the listing knows."""
    store = FaultyStore(MemoryCheckpointStore())
    async with store:
        await interrupted(store, registry)
        store.fail("load", error=CorruptDataError("the head", "its checksum is wrong"))
        (found,) = (await plans(store, registry)).values()
        assert (found.action, found.workflow, found.state) == ("block", "flow", State.BLOCKED)
        assert "its checksum is wrong" in found.reason


@pytest.mark.parametrize(("setting", "action"), [("block", "block"), ("previous", "run-again")])
async def test_damage_is_in_the_way_only_if_the_settings_say_so(
    registry: StepRegistry, setting: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        real = store.backend.load

        def damaged(id: str) -> Loaded:
            found = real(id)
            assert found is not None
            return attrs.evolve(found, damage=("checkpoint 2 is damaged",))

        monkeypatch.setattr(store.backend, "load", damaged)
        (found,) = (await plans(store, registry, on_corruption=setting)).values()
        assert found.action == action
        assert ("checkpoint 2 is damaged" in found.reason) == (action == "block")


async def test_without_the_code_what_is_blocked_stays_so(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        for reason, said in (("no step named 'x'", "no step named 'x'"), (None, "it is blocked")):
            await saved(store, "a", state=State.BLOCKED, reason=reason)
            (found,) = (await plans(store, None)).values()
            assert (found.action, found.reason) == ("block", said)


async def test_what_has_no_step_left_has_only_to_be_finished(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store:
        await interrupted(store, registry)
        await saved(store, "a", step=3)
        (found,) = (await plans(store, registry)).values()
        assert (found.action, found.step_name) == ("finish", None)


async def test_what_was_submitted_by_a_name_that_the_code_does_not_know_is_left(registry: StepRegistry) -> None:
    async with MemoryCheckpointStore() as store, Client(store) as client:
        await client.submit("elsewhere", {}, id="a")
        assert (await plans(store, registry))["a"].action == "leave"
        found = (await plans(store, None))["a"]
        assert (found.action, found.total, found.step_name) == ("start", 0, None)


async def test_what_was_submitted_by_name_was_started_by_no_version_yet(registry: StepRegistry) -> None:
    registry.workflow("newer", ["first"], version="7")
    async with MemoryCheckpointStore() as store, Client(store) as client:
        await client.submit("newer", {}, id="x")
        found = (await plans(store, registry))["x"]
        assert (found.action, found.notes) == ("start", ())
