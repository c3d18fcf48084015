"""States: typed by the step that receives them, decoded anew, refused at once where they cannot be stored."""

from __future__ import annotations

import dataclasses
import enum
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import attrs
import pytest
from attrs import define, fields, frozen
from structlog.testing import capture_logs

import longrun
from longrun import (
    ExecutionBlockedError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    Finish,
    Goto,
    MemoryCheckpointStore,
    NotStorableError,
    Repeat,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.client import Client as PlainClient
from longrun.stored import Head, copied
from longrun.testing import ManualClock
from longrun.worker import Worker
from tests.crashing import PATIENCE, CrashableExecutor, crash


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@frozen
class Item:
    name: str
    price: Decimal
    colour: Colour


@dataclasses.dataclass
class Basket:
    items: list[Item]
    owner: UUID
    note: str | None = None


@define
class Total:
    amount: Decimal
    when: datetime


BASKET = Basket([Item("hat", Decimal("9.90"), Colour.RED)], UUID(int=7))


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
def registry() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def add(state: Basket) -> Basket:
        assert isinstance(state, Basket)
        return dataclasses.replace(state, items=[*state.items, Item("tie", Decimal("1.00"), Colour.BLUE)])

    @registry.step
    async def sum_up(state: Basket) -> Total:
        assert all(isinstance(item, Item) for item in state.items)
        return Total(sum((item.price for item in state.items), Decimal(0)), datetime(2026, 1, 1, tzinfo=UTC))

    registry.workflow("shop", [add, sum_up])
    return registry


TOTAL = Total(Decimal("10.90"), datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("strict", [False, True])
async def test_classes_come_back_as_they_went(registry, store, strict):
    async with Executor(registry, store=store, strict=strict) as executor:
        run = await executor.start("shop", BASKET, id="a")
        assert await run.result() == TOTAL
        states = [checkpoint.state for checkpoint in await executor.history("a")]
        assert states[0] == BASKET
        assert states[-1] == TOTAL
    async with Executor(registry, store=store) as another:
        result = await (await another.handle("a")).result()
        assert result == TOTAL
        assert type(result) is Total
    async with Executor(StepRegistry(), store=store) as stranger:
        assert await (await stranger.handle("a")).result() == {
            "amount": TOTAL.amount,
            "when": TOTAL.when,
        }


async def test_a_fork_behind_the_last_step_has_its_type(registry, store):
    """Also a fork of the fork, and one that somebody makes who knows no steps."""
    async with Executor(registry, store=store) as executor:
        await (await executor.start("shop", BASKET, id="a")).result()
        for id in ("a", "b", "c"):
            fork = await executor.fork(id, new_id=chr(ord(id) + 1))
            assert await fork.result() == TOTAL
        assert [checkpoint.state for checkpoint in await executor.history("d")] == [TOTAL, TOTAL]
        other = attrs.evolve(TOTAL, amount=Decimal(1))
        assert await (await executor.fork("a", state=other)).result() == other
    async with longrun.Client(store) as client:
        await client.fork("a", new_id="z")
    async with Worker(registry, store=store) as worker:
        assert await (await worker.handle("z")).result() == TOTAL


async def test_a_state_given_behind_the_last_step_has_its_type(registry, store):
    async def last(state: Basket) -> Total | WaitFor:
        return WaitFor("go", TOTAL)

    registry.workflow("ask", [last])
    other = attrs.evolve(TOTAL, amount=Decimal(1))
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask", BASKET, id="a")
        await run.wait("waiting")
        await run.pause()
        with pytest.raises(NotStorableError):
            await run.resume(state=BASKET)
        await run.resume(state=other)
        await run.signal("go")
        assert await run.result() == other
        assert [checkpoint.state for checkpoint in await executor.history("a")] == [BASKET, TOTAL, other, other]
        assert await (await executor.fork("a", checkpoint=(await executor.history("a"))[2])).result() == other


async def test_stored_data_holds_no_class_names(registry, store):
    """I15"""
    async with Executor(registry, store=store) as executor:
        await (await executor.start("shop", BASKET, id="a")).result()
        loaded = await store.load("a")
    stored = b"".join([loaded.boundary.data or b"", *loaded.blobs.values()])
    for name in (b"Basket", b"Total", b"test_states", b"Item"):
        assert name not in stored


async def test_plain_states_keep_the_standard_types(store):
    value = {
        "when": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "time": time(1, 2),
        "span": timedelta(days=1, microseconds=5),
        "id": UUID(int=5),
        "sum": Decimal("1.10"),
        "bytes": b"\0\xff",
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "tuple": (1, (2, None)),
        "path": Path("a/b"),
        "keys": {1: "one", (2, 3): "pair", None: "none"},
    }
    registry = StepRegistry()

    async def same(state: Any) -> Any:
        assert state == value
        return state

    registry.workflow("same", [same, same])
    async with Executor(registry, store=store, strict=True) as executor:
        await (await executor.start("same", value, id="a")).result()
        loaded = await (await executor.handle("a")).result()
        assert loaded == value
        assert type(loaded["tuple"]) is tuple


async def test_a_resume_receives_a_state_decoded_anew(store):
    registry = StepRegistry()
    begun = anyio.Event()
    seen = []

    async def make(state: Any) -> dict[str, Any]:
        return {"list": [1]}

    async def change(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(state["list"]))
        state["list"].append(2)
        if len(seen) == 1:
            begun.set()
            await anyio.sleep_forever()
        return state

    registry.workflow("work", [make, change])
    async with CrashableExecutor(registry, store=store) as dying:
        await dying.start("work", id="a")
        await begun.wait()
        await crash(dying)
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == {"list": [1, 2]}
    assert seen == [[1], [1]]


class Client:
    """Something that no store can hold."""


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"client": Client()}, r"state\['client'\]"),
        ({"a": [1, {"b": Client()}]}, r"state\['a'\]\[1\]\['b'\]"),
        ({"call": print}, r"state\['call'\]"),
    ],
)
async def test_a_state_that_cannot_be_stored_fails_its_step_at_once_and_names_the_path(store, value, path):
    registry = StepRegistry()
    calls = []

    async def good(state: Any) -> dict[str, Any]:
        return {"good": True}

    @registry.step(retry=RetryPolicy(max_attempts=5, initial=0))
    async def bad(state: Any) -> Any:
        calls.append(1)
        return value

    async def never(state: Any) -> Any:
        raise AssertionError

    registry.workflow("work", [good, bad, never])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="a")
        with pytest.raises(ExecutionFailedError, match=path) as caught:
            await run.result()
        assert (caught.value.step, caught.value.attempt) == ("bad", 1)
        assert len(calls) == 1
        info = await run.info()
        assert (info.state, info.current_step) == ("failed", 1)
        assert [checkpoint.state for checkpoint in await executor.history("a")] == [None, {"good": True}]


@pytest.mark.parametrize("how", ["goto", "repeat", "sleep", "finish", "return"])
async def test_it_does_whatever_way_the_step_ends(store, how):
    registry = StepRegistry()
    bad = {"client": Client()}
    ways: dict[str, Any] = {
        "goto": Goto(0, bad),
        "repeat": Repeat(bad),
        "sleep": Sleep(1, bad),
        "finish": Finish(bad),
        "return": bad,
    }

    async def step(state: Any) -> Any:
        return ways[how]

    registry.workflow("work", [step])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work")
        with pytest.raises(ExecutionFailedError, match=r"\['client'\]") as caught:
            await run.result()
        assert caught.value.attempt == 1


async def test_a_class_instance_where_the_next_step_says_dict_is_refused(store):
    registry = StepRegistry()

    async def one(state: Any) -> Basket:
        return BASKET

    async def two(state: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    registry.workflow("work", [one, two])
    async with Executor(registry, store=store) as executor:
        with pytest.raises(ExecutionFailedError, match="state cannot be stored"):
            await (await executor.start("work")).result()


async def test_a_first_state_that_cannot_be_stored_starts_nothing(registry, store):
    async with Executor(registry, store=store) as executor:
        for state in ({"a": 1}, None, BASKET.items):
            with pytest.raises(NotStorableError, match="state"):
                await executor.start("shop", state, id="a")
        assert await executor.list() == []


async def test_a_state_over_the_limit_fails_its_step_and_the_earlier_one_stays(store, monkeypatch):
    monkeypatch.setattr("longrun.snapshot.Snapshots.__init__.__defaults__", (100_000,))
    registry = StepRegistry()

    async def small(state: Any) -> dict[str, Any]:
        return {"keep": "x" * 20_000, "n": 1}

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def large(state: dict[str, Any]) -> dict[str, Any]:
        if state["n"] == 2:
            return {**state, "n": 3}
        return {**state, "more": "y" * 200_000}

    registry.workflow("work", [small, large])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="a")
        with pytest.raises(ExecutionFailedError, match="the limit is 100,000") as caught:
            await run.result()
        assert caught.value.step == "large"
        assert (await executor.history("a"))[-1].state == {"keep": "x" * 20_000, "n": 1}
        await run.retry(state={"keep": "x" * 20_000, "n": 2})
        assert await run.result() == {"keep": "x" * 20_000, "n": 3}
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == {"keep": "x" * 20_000, "n": 3}


async def test_what_local_cannot_store_fails_the_attempt_and_nobody_else(store):
    registry = StepRegistry()

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def bad(ctx: StepContext, state: Any) -> Any:
        ctx.local["client"] = Client()
        await ctx.checkpoint(force=True)

    @registry.step
    async def good(state: Any) -> str:
        return "fine"

    registry.workflow("bad", [bad])
    registry.workflow("good", [good])
    async with Executor(registry, store=store) as executor:
        with pytest.raises(ExecutionFailedError, match=r"local\['client'\]"):
            await (await executor.start("bad")).result()
        assert await (await executor.start("good")).result() == "fine"


@pytest.mark.parametrize("waits", [False, True], ids=["found when it returns", "found by the beat"])
async def test_it_does_so_whenever_that_is_found(store, waits):
    registry = StepRegistry()

    @registry.step(retry=RetryPolicy(max_attempts=1))
    async def bad(ctx: StepContext, state: Any) -> Any:
        ctx.local["client"] = Client()
        await ctx.checkpoint()
        if waits:
            await anyio.sleep_forever()

    registry.workflow("bad", [bad])
    config = ExecutorConfig(checkpoint_interval=0.02) if waits else ExecutorConfig()
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=config) as executor:
            with pytest.raises(ExecutionFailedError, match=r"local\['client'\]"):
                await (await executor.start("bad")).result()


async def test_a_result_behind_a_sleep_is_typed_too(store):
    registry = StepRegistry()

    async def last(state: Any) -> Total | Sleep:
        return Sleep(5, TOTAL)

    clock = ManualClock(autojump=True)
    registry.workflow("work", [last])
    async with Executor(registry, store=store, clock=clock) as executor:
        run = await executor.start("work", id="a")
        assert await run.result() == TOTAL
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == TOTAL


@pytest.mark.parametrize("end", ["finish", "sleep", "return"])
@pytest.mark.parametrize("plain", [False, True])
async def test_a_result_of_which_the_step_says_nothing_may_be_of_the_class_that_it_receives(store, end, plain):
    """An agent that says only where it goes on has made all its calls by then; what it ends with is not lost."""
    registry, clock = StepRegistry(), ManualClock(autojump=True)

    def ended(state: Total) -> Any:
        return {"amount": state.amount} if plain else state

    @registry.step
    async def finish(state: Total) -> Repeat | Finish:
        if state.amount < 3:
            return Repeat(attrs.evolve(state, amount=state.amount + 1))
        return Finish(ended(state))

    @registry.step
    async def sleep(state: Total) -> Sleep:
        return Sleep(1, ended(attrs.evolve(state, amount=Decimal(3))))

    @registry.step(name="return")
    async def give(state: Total | None):  # it says nothing
        assert state is not None
        return ended(attrs.evolve(state, amount=Decimal(3)))

    registry.workflow("w", [end])
    first = Total(Decimal(1), datetime(2026, 1, 1, tzinfo=UTC))
    expected = {"amount": Decimal(3)} if plain else attrs.evolve(first, amount=Decimal(3))
    async with Executor(registry, store=store, clock=clock) as executor:
        run = await executor.start("w", first, id="a")
        assert await run.result() == expected
    async with Executor(registry, store=store, clock=clock) as executor:
        assert await (await executor.handle("a")).result() == expected


@define
class Job:
    url: str = ""
    pages: int = 0


DICTS: dict[str, dict[Any, Any]] = {
    "more": {"url": "u", "total": 42, "rows": [1, 2, 3]},
    "the same keys": {"url": "u", "pages": 3},
    "some of them": {"url": "u"},
    "none": {},
    "other keys": {1: Decimal(2)},
    "large": {"url": "u" * 20_000, "pages": 3},
}


def job_workflow(end: str, result: Any) -> StepRegistry:
    """Its only step says nothing of its result."""
    registry = StepRegistry()

    @registry.step
    async def report(state: Job):
        return {"return": result, "finish": Finish(result), "sleep": Sleep(5, result)}[end]

    registry.workflow("work", [report])
    return registry


@pytest.mark.parametrize("end", ["return", "finish", "sleep"])
@pytest.mark.parametrize("kind", DICTS)
async def test_a_dict_stays_a_dict_where_a_class_could_stand(store, end, kind):
    """I1: the class has a default for every field, and so any dict could be read as one."""
    registry, clock, expected = job_workflow(end, DICTS[kind]), ManualClock(autojump=True), DICTS[kind]
    async with Executor(registry, store=store, clock=clock) as executor:
        run = await executor.start("work", Job("u"), id="a")
        assert await run.result() == expected
        assert await run.result() == expected
        assert (await executor.history("a"))[-1].state == expected
        assert await (await executor.fork("a")).result() == expected
    async with PlainClient(store) as client:
        assert await client.handle("a").result() == expected
        assert (await client.history("a"))[-1].state == expected
        await client.fork("a", new_id="b")
    async with Worker(registry, store=store, clock=clock) as worker:
        assert await (await worker.handle("a")).result() == expected
        assert await (await worker.handle("b")).result() == expected


async def test_a_dict_stays_one_if_the_wait_behind_its_step_ends_where_that_is_not_known(store):
    registry, clock = job_workflow("sleep", {"url": "u"}), ManualClock()
    async with Executor(registry, store=store, clock=clock) as executor:
        await (await executor.start("work", Job("u"), id="a")).wait("waiting")
    other = StepRegistry()

    async def another(state: Any) -> Any:
        raise AssertionError

    other.workflow("work", [another])
    async with Executor(other, store=store, clock=ManualClock(autojump=True)) as executor:
        assert await (await executor.handle("a")).result() == {"url": "u"}
    async with Executor(registry, store=store, clock=clock) as executor:
        assert await (await executor.handle("a")).result() == {"url": "u"}


async def test_a_dict_for_a_step_that_is_not_known_here_is_read_by_its_annotation(store):
    newer, older = StepRegistry(), StepRegistry()

    async def fetch(state: Job):
        return {"amount": Decimal(9), "when": datetime(2026, 1, 1, tzinfo=UTC)}

    async def pay(state: Total) -> Decimal:
        return state.amount

    newer.workflow("buy", [fetch, pay])
    older.workflow("buy", [fetch])
    async with Executor(newer, store=store, clock=ManualClock()) as executor:
        await executor.submit("buy", Job(), id="a")
    async with Worker(older, store=store) as worker:
        await (await worker.handle("a")).wait("blocked")
    async with Executor(newer, store=store) as executor:
        assert await (await executor.handle("a")).result() == Decimal(9)


async def test_a_history_can_be_read_although_a_class_has_changed(registry, store):
    async with Executor(registry, store=store) as executor:
        await (await executor.start("shop", BASKET, id="a")).result()

    changed = StepRegistry()

    async def add(state: Total) -> Total:
        return state

    async def sum_up(state: Total) -> Total:
        return state

    changed.workflow("shop", [add, sum_up])
    async with Executor(changed, store=store) as executor:
        states = [checkpoint.state for checkpoint in await executor.history("a")]
        assert states[0]["items"][0]["name"] == "hat"


async def test_a_blocked_result_says_why(store):
    registry = StepRegistry()

    async def last(state: Any) -> Any:
        return Sleep(3600, {"a": 1})

    registry.workflow("work", [last])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("work", id="a")
        await run.wait("waiting")

    typed = StepRegistry()

    async def typed_last(state: Any) -> Total:
        raise AssertionError

    typed.register("last", typed_last)
    typed.workflow("work", ["last"])
    clock = ManualClock(start=datetime(2100, 1, 1, tzinfo=UTC).timestamp())
    with capture_logs() as lines:
        async with Executor(typed, store=store, clock=clock) as executor:
            with pytest.raises(ExecutionBlockedError, match="does not fit"):
                await (await executor.handle("a")).result()
    told = {line["event"] for line in lines if line.get("execution") == "a"}  # by the pass at start, the sweep, or both
    assert told == {"execution.blocked"}


async def test_the_result_before_a_step_that_is_not_known_here_is_kept_and_the_execution_blocks():
    """An older program knows the step that runs, not the one behind it: what the step did must not be lost."""
    store, calls = MemoryCheckpointStore(), []
    newer, older = StepRegistry(), StepRegistry()

    async def add_up(state: Basket) -> Total:
        calls.append(1)
        return Total(Decimal("9.90"), datetime(2026, 1, 1, tzinfo=UTC))

    async def pay(state: Total) -> str:
        return str(state.amount)

    newer.workflow("buy", [add_up, pay])
    older.workflow("buy", [add_up])
    async with Executor(newer, store=store, clock=ManualClock()) as executor:
        await executor.submit("buy", BASKET, id="a")
    async with Worker(older, store=store) as worker:
        await (await worker.handle("a")).wait("blocked")
        assert "no step named 'pay'" in str((await worker.get("a")).reason)
    assert [row.kind for row in await store.boundaries("a")].count("block") == 1
    async with Executor(newer, store=store) as executor:
        assert await (await executor.handle("a")).result() == "9.90"
    assert calls == [1]


async def test_a_state_that_does_not_fit_the_first_step_blocks_when_it_is_claimed():
    store, calls = MemoryCheckpointStore(), []
    newer, older = StepRegistry(), StepRegistry()

    async def pay(state: dict[str, Any]) -> None:
        raise AssertionError

    async def pay_once(state: Total) -> None:
        calls.append(1)

    newer.workflow("buy", [pay])
    older.register("pay", pay_once)
    older.workflow("buy", ["pay"])
    async with Executor(newer, store=store) as executor:
        await executor.submit("buy", {"a": 1}, id="a")
    with anyio.fail_after(PATIENCE), capture_logs() as lines:
        async with Worker(older, store=store) as worker:
            await (await worker.handle("a")).wait("blocked")
            assert "does not fit" in str((await worker.get("a")).reason)
    assert {line["event"] for line in lines if line.get("execution") == "a"} == {"execution.blocked"}
    assert calls == []


def test_an_executor_can_be_made_where_no_event_loop_runs():
    executor = Executor(StepRegistry(), store=MemoryCheckpointStore())

    async def use() -> str:
        async with executor:
            return executor.owner

    assert anyio.run(use)


def test_a_copied_head_is_the_same_in_every_field() -> None:
    """Its fields are written out one by one: a new one must not be forgotten."""
    values: dict[str, Any] = {field.name: object() for field in fields(Head)}
    head = Head(**values)
    twin = copied(head)
    assert twin is not head
    assert {name: getattr(twin, name) for name in values} == values
