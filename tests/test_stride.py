"""From step to step in one function: whatever takes the short way is stored as the long way would have stored it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest

from longrun import (
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    Goto,
    MemoryCheckpointStore,
    Repeat,
    RetentionPolicy,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.errors import ContextClosedError, LeaseLostError, StoreUnavailableError
from longrun.moves import (
    Begun,
    Completed,
    End,
    Final,
    Move,
    Opening,
    Passed,
    Passing,
    begun,
    ending,
    is_passing,
    loaded_of,
    opening,
    passing,
)
from longrun.records import ExecutionState
from longrun.stored import Boundary, Head, Loaded, Save, Write
from longrun.stores.base import Answer
from longrun.testing import ManualClock
from longrun.testing.samples import NOW, head, owned
from longrun.threads import LEFT, Leftovers

BIG = "x" * 10_000


@attrs.define
class Count:
    n: int = 0


def flows() -> StepRegistry:
    """Workflows of which some steps take the short way and others cannot."""
    registry = StepRegistry()

    @registry.step
    async def add(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "n": state["n"] + 1}

    @registry.step
    async def noting(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        async for _ in ctx.each("items", range(3), every=1):
            ctx.local["seen"] = ctx.local.get("seen", 0) + 1
        return {**state, "seen": ctx.local["seen"]}

    @registry.step
    async def looking(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "at": [ctx.step_index, ctx.attempt, dict(ctx.local)]}

    @registry.step
    async def twice(ctx: StepContext, state: dict[str, Any]) -> Any:
        return Repeat({**state, "n": state["n"] + 1}) if ctx.iteration == 0 else state

    @registry.step
    async def skip(state: dict[str, Any]) -> Goto:
        return Goto("last", state)

    @registry.step
    async def grow(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "big": BIG}

    @registry.step
    async def shrink(state: dict[str, Any]) -> dict[str, Any]:
        return {"n": state["n"], "f": 0.5, "deep": {"a": [1, {"b": None}]}}

    @registry.step
    async def let_go(state: dict[str, Any]) -> dict[str, Any]:
        return {"n": state["n"]}

    @registry.step
    def in_a_thread(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "n": state["n"] + 1}

    @registry.step
    async def typed(state: dict[str, Any]) -> Count:
        return Count(state["n"])

    @registry.step
    async def untyped(state: Count) -> dict[str, Any]:
        return {"n": state.n}

    @registry.step
    async def last(state: dict[str, Any]) -> dict[str, Any]:
        return {"n": state["n"], "last": True}

    @registry.step
    async def told(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        ctx.progress(1, 2, "half")
        ctx.local["forgotten"] = True
        return {**state, "n": state["n"] + 1}

    @registry.step
    async def park(state: dict[str, Any]) -> WaitFor:
        return WaitFor("never", state)

    registry.workflow("parked", [noting, add, park, add])
    registry.workflow("plain", [add] * 15)
    registry.workflow("with a context", [add, told, looking, told, let_go, told, told])
    registry.workflow("mixed", [add, noting, looking, let_go, add, twice, shrink, in_a_thread, typed, untyped, last])
    registry.workflow("large", [add, grow, add, let_go, add, grow, let_go, *[add] * 12])
    registry.workflow("jump", [add, skip, add, last])
    registry.workflow("alone", [last])
    return registry


async def stored(name: str, history: int) -> tuple[Any, ...]:
    """Everything that is left of an execution, by a clock of its own."""
    clock = ManualClock(autojump=True)
    store = MemoryCheckpointStore(clock=clock)
    config = ExecutorConfig(retention=RetentionPolicy(history=history), heartbeat_interval=600, lease_ttl=1800)
    async with store, Executor(flows(), store=store, clock=clock, config=config) as executor:
        run = await executor.start(name, {"n": 0}, id="a")
        result = await (run.wait("waiting") if name == "parked" else run.result())
        loaded = await store.load("a")
        rows, size = await store.boundaries("a"), await store.size("a")
    whole = attrs.evolve(loaded.head, started=None, updated=0.0, ended=None, fence=0)
    lines = [attrs.evolve(row, started=None, ended=0.0) for row in rows]
    kept = loaded.kept, loaded.boundary.data, dict(loaded.blobs), dict(loaded.entries), size
    return None if name == "parked" else result, whole, lines, *kept


async def never(runner: Any) -> bool:
    return True


@pytest.mark.parametrize("history", [1, 3, 10])
@pytest.mark.parametrize("name", ["plain", "parked", "with a context", "mixed", "large", "jump", "alone"])
async def test_the_short_way_leaves_what_the_long_way_leaves(
    monkeypatch: pytest.MonkeyPatch, name: str, history: int
) -> None:
    """I7: the same rows, numbers, states, and the same of them kept."""
    short = await stored(name, history)
    monkeypatch.setattr("longrun.runner.stride", never)
    assert short == await stored(name, history)


async def test_most_writes_are_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []
    store = MemoryCheckpointStore()
    commit = store.backend.commit

    def noted(batch: Sequence[Write]) -> list[Answer]:
        kinds.extend(map(type, batch))
        return commit(batch)

    monkeypatch.setattr(store.backend, "commit", noted)
    async with Executor(flows(), store=store) as executor:
        await (await executor.start("plain", {"n": 0})).result()
        await (await executor.start("with a context", {"n": 0})).result()
    assert [kinds.count(kind) for kind in (Move, End, Save)] == [14 + 4, 1 + 1, 0 + 2]


@pytest.mark.parametrize("durability", ["interval", "exit"])
async def test_boundaries_that_are_coalesced_are_no_moves(durability: str) -> None:
    """I7: one write for all, in their order."""
    store, saves = MemoryCheckpointStore(), []
    commit = store.backend.commit

    def noted(batch: Sequence[Write]) -> list[Answer]:
        saves.extend([[row.seq for row in write.boundaries] for write in batch if isinstance(write, Save)])
        return commit(batch)

    store.backend.commit = noted  # type: ignore[method-assign]
    config = ExecutorConfig(durability=durability, checkpoint_interval=3600)
    async with Executor(flows(), store=store, config=config) as executor:
        await (await executor.start("plain", {"n": 0})).result()
    assert saves == [list(range(2, 17))]


async def test_what_another_execution_has_left_behind_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step thread that runs on keeps its own execution from the next attempt, and only that one."""
    monkeypatch.setattr(Leftovers, "__bool__", lambda self: True)
    monkeypatch.setitem(LEFT, ("another", 0.0), Leftovers())
    await test_most_writes_are_moves(monkeypatch)


async def test_who_listens_hears_of_every_step() -> None:
    told: list[str] = []
    async with Executor(flows(), store="memory:", on_event=lambda event: told.append(event.type.value)) as executor:
        await (await executor.start("plain", {"n": 0})).result()
    assert told.count("step_started") == told.count("step_completed") == 15


async def test_a_listener_that_comes_later_hears_of_the_steps_from_then_on() -> None:
    registry, arrived, go = StepRegistry(), anyio.Event(), anyio.Event()

    @registry.step
    async def wait(state: dict[str, Any]) -> dict[str, Any]:
        arrived.set()
        await go.wait()
        return state

    @registry.step
    async def on(state: dict[str, Any]) -> dict[str, Any]:
        return state

    registry.workflow("w", [on, wait, on])
    async with Executor(registry, store="memory:") as executor:
        run = await executor.start("w", {})
        await arrived.wait()
        async with executor.events() as events:
            go.set()
            await run.result()
            told = [(await anext(events)).type.value for _ in range(3)]
    assert told == ["checkpointed", "step_completed", "step_started"]


async def test_a_context_of_an_earlier_step_is_closed_though_steps_without_one_follow() -> None:
    registry, kept = StepRegistry(), []

    @registry.step
    async def leaks(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        kept.append(ctx)
        return state

    @registry.step
    async def tries(state: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises(Exception, match="has ended"):
            await kept[0].checkpoint()
        return {"tried": True}

    registry.workflow("w", [leaks, tries, tries])
    async with Executor(registry, store="memory:") as executor:
        assert await (await executor.start("w", {})).result() == {"tried": True}


async def test_every_step_has_a_context_of_its_own() -> None:
    """One after the other on the short way: each is open in its step, closed behind it, and says where it is."""
    registry = StepRegistry()
    kept: list[StepContext] = []
    seen: list[Any] = []

    @registry.step
    async def looks(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        for earlier in kept:
            with pytest.raises(ContextClosedError, match="has ended"):
                earlier.progress(1)
        kept.append(ctx)
        ctx.progress(1, 2)
        seen.append((ctx.step, ctx.step_index))
        return state

    @registry.step
    async def passes(state: dict[str, Any]) -> dict[str, Any]:
        return state

    registry.step(name="again")(looks)
    registry.workflow("w", ["looks", "again", "passes", "passes", "looks", "again"])
    async with Executor(registry, store="memory:") as executor:
        await (await executor.start("w", {})).result()
    assert seen == [("looks", 0), ("again", 1), ("looks", 4), ("again", 5)]


async def test_how_far_a_step_was_that_failed_is_kept() -> None:
    registry, store = StepRegistry(), MemoryCheckpointStore()

    @registry.step
    async def breaks(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
        ctx.progress(3, 10, "here")
        raise ValueError

    registry.workflow("w", [breaks])
    async with Executor(registry, store=store, config=ExecutorConfig(max_retries=0)) as executor:
        with pytest.raises(ExecutionFailedError):
            await (await executor.start("w", {}, id="a")).result()
        left = (await store.load("a")).head
    assert (left.done, left.of, left.note) == (3, 10, "here")


async def test_what_a_step_returns_that_was_stopped_by_a_drain_is_kept() -> None:
    """I1: no order is here, and its scope is cancelled: the write is made outside that."""
    registry, store, begun = StepRegistry(), MemoryCheckpointStore(), anyio.Event()

    @registry.step
    async def stubborn(state: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            return {"n": 1}
        return state

    @registry.step
    async def then(state: dict[str, Any]) -> dict[str, Any]:
        return state

    registry.workflow("w", [stubborn, then])
    async with store:
        async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.05)) as executor:
            await executor.start("w", {"n": 0}, id="a")
            await begun.wait()
        left = await store.load("a")
    assert (left.head.state, left.head.step, left.head.owner) == (ExecutionState.RUNNING, 1, None)
    assert left.boundary.data == b'{"n":1}'


@pytest.mark.parametrize("name", ["typed", "untyped"])
async def test_a_state_that_an_annotation_wants_to_see_is_looked_at(name: str) -> None:
    """A plain dict, where the step itself or the next one speaks of a class."""
    registry = flows()

    @registry.step
    async def wrong(state: dict[str, Any]) -> Count:
        return {"n": 1}  # type: ignore[return-value]

    registry.workflow("w", ["add", "wrong"] if name == "typed" else ["add", "untyped"])
    async with Executor(registry, store="memory:", config=ExecutorConfig(max_retries=0)) as executor:
        with pytest.raises(ExecutionFailedError, match="Count"):
            await (await executor.start("w", {"n": 0})).result()


async def test_old_states_are_let_go_on_the_way() -> None:
    """I7: a few more than asked for are kept until the end, however many steps there are."""
    registry, store, kept = flows(), MemoryCheckpointStore(), []

    @registry.step
    async def peek(state: dict[str, Any]) -> dict[str, Any]:
        kept.append(len((await store.load("a")).kept))
        return state

    registry.workflow("w", ["peek"] * 30)
    async with Executor(registry, store=store, config=ExecutorConfig(retention=RetentionPolicy(history=1))) as executor:
        await (await executor.start("w", {"n": 0}, id="a")).result()
        assert len((await store.load("a")).kept) == 1
    assert 1 < max(kept) <= 5


async def test_a_failure_on_the_short_way_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error, its traceback and the state in its frames are kept by nobody once it is told."""
    registry = StepRegistry()

    class Heavy:
        alive = 0

        def __init__(self) -> None:
            Heavy.alive += 1

        def __del__(self) -> None:
            Heavy.alive -= 1

    @registry.step
    async def first(state: dict[str, Any]) -> dict[str, Any]:
        return state

    @registry.step
    async def breaks(state: dict[str, Any]) -> dict[str, Any]:
        held = Heavy()
        raise ValueError(f"with {held}")

    registry.workflow("w", [first, breaks, first])
    gc.collect()
    gc.disable()
    try:
        async with Executor(registry, store="memory:", config=ExecutorConfig(max_retries=0)) as executor:
            run = await executor.start("w", {})
            with pytest.raises(ExecutionFailedError):
                await run.result()
            assert Heavy.alive == 0
    finally:
        gc.enable()


def refusing(store: MemoryCheckpointStore, error: Any) -> None:
    """The end of an execution is not written."""
    commit = store.backend.commit

    def refuse(batch: Sequence[Write]) -> list[Answer]:
        if any(isinstance(write, Save) and write.head.state.finished for write in batch):
            answer = error(batch[0])
            if not isinstance(answer, LeaseLostError):
                raise answer
            return [answer for _ in batch]
        return commit(batch)

    store.backend.commit = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["last", "floating"])
async def test_there_is_no_result_before_it_is_stored(name: str, steps: int) -> None:
    """I1, I3: whoever has lost an execution in its last write does not say how it ended."""
    registry, store = flows(), MemoryCheckpointStore()

    @registry.step
    async def floating(state: dict[str, Any]) -> dict[str, Any]:
        return {"n": state["n"] + 0.5}

    registry.workflow("w", ["add"] * (steps - 1) + [name])
    refusing(store, lambda write: LeaseLostError(write.id, write.head.fence))
    async with Executor(registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
        run = await executor.start("w", {"n": 0}, id="a")
        with pytest.raises(TimeoutError):
            await run.result(timeout=0.3)
        assert (await store.load("a")).head.state is ExecutionState.RUNNING


async def test_there_is_no_result_when_the_executor_leaves_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrun.drain.LAST_WORDS", 0.3)
    store, told = MemoryCheckpointStore(), []
    refusing(store, lambda write: StoreUnavailableError("memory", "away"))

    async def ask(run: Any) -> None:
        with pytest.raises(StoreUnavailableError):
            told.append(await run.result())

    config = ExecutorConfig(drain_timeout=0.1)
    async with store, anyio.create_task_group() as tasks, Executor(flows(), store=store, config=config) as executor:
        tasks.start_soon(ask, await executor.start("alone", {"n": 0}))
        await anyio.sleep(0.1)
    assert told == []


# the records


def plain(record: Any, kind: type) -> Any:
    return kind(**{field.name: getattr(record, field.name) for field in attrs.fields(kind)})


def check_lean(record: Any, kind: type) -> None:
    same = plain(record, kind)
    assert (record == same, same == record) == (True, True)
    assert type(attrs.evolve(record)) is kind
    assert attrs.evolve(record) == record
    assert type(copy.copy(record)) is kind
    assert copy.copy(record) == record
    with pytest.raises(TypeError, match="unhashable"):
        hash(record)


@pytest.mark.parametrize("make", [passing, ending])
def test_a_lean_record_equals_the_plain_one_and_is_changed_into_it(make: Any) -> None:
    move = make("a", owned("a").head, "one", NOW, b"{}", 3, None)
    check_lean(move.head, Head)
    check_lean(move.boundary, Boundary)
    check_lean(move, Save)
    assert move.head != plain(attrs.evolve(move.head, note="another"), Head)
    assert move.head != move.boundary
    assert repr(move.head).startswith(type(move.head).__name__)


def test_what_a_start_makes_equals_what_is_loaded_of_it() -> None:
    head = begun(1, "me", NOW)
    made = attrs.evolve(owned("a"), head=head, boundary=opening(head, b"{}"))
    loaded = loaded_of(made)
    check_lean(head, Head)
    check_lean(made.boundary, Boundary)
    check_lean(loaded, Loaded)
    assert head == Head(state=ExecutionState.RUNNING, fence=1, revision=1, owner="me", seq=1, started=NOW, updated=NOW)
    assert made.boundary == Boundary(seq=1, kind="start", step=0, started=NOW, ended=NOW, next=0, data=b"{}", size=2)
    assert loaded.kept == ((1, ()),)


@pytest.mark.parametrize("kind", [Begun, Opening, Passing, Completed, Passed, Final, Move, End])
def test_what_stands_in_the_class_cannot_be_set(kind: type) -> None:
    """So that nobody changes it in one by mistake: it would be gone in the store."""
    record: Any = object.__new__(kind)
    name = "error" if issubclass(kind, Head | Boundary) else "clear"
    with pytest.raises(AttributeError):
        setattr(record, name, "oh")


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({}, True),
        ({"crashes": 3, "due": NOW, "error": "old", "note": "half", "done": 1.0}, True),
        ({"hold": True}, False),
        ({"attempt": 1}, False),
        ({"signal": "go"}, False),
        ({"reason": "why"}, False),
        ({"ended": NOW}, False),
    ],
)
def test_only_what_a_boundary_leaves_behind_may_be_left_out(fields: dict[str, Any], passes: bool) -> None:
    assert is_passing(head(**fields)) is passes
    assert not is_passing(head(ExecutionState.RESUMING, **fields))
