"""`ctx.each`: a durable cursor over whatever can be iterated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from longrun import (
    ConfigError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    StepContext,
    SyncStepContext,
)
from tests.crashing import AT_ONCE, NEVER, PATIENCE, crash_at, finish, registry_of, run, stored


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


class Numbers:
    """An async iterator that, unlike an async generator, may be dropped in the middle."""

    def __init__(self, count: int) -> None:
        self._items = iter(range(count))

    def __aiter__(self) -> Numbers:
        return self

    async def __anext__(self) -> int:
        await anyio.lowlevel.checkpoint()
        for item in self._items:
            return item
        raise StopAsyncIteration


async def generated(count):
    for n in range(count):
        yield n


class Lazy(Sequence[int]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, made: list[int]) -> None:
        self.made = made

    def __len__(self) -> int:
        return 5

    def __getitem__(self, n: Any) -> Any:
        self.made.append(n)
        return n


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(5)),
    "tuple": lambda: tuple(range(5)),
    "range": lambda: range(5),
    "generator": lambda: (n for n in range(5)),
    "iterator": lambda: iter(range(5)),
    "async iterator": lambda: Numbers(5),
    "dict": lambda: dict.fromkeys(range(5), "value"),
    "dict keys": lambda: dict.fromkeys(range(5)).keys(),
    "str": lambda: "01234",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_loop_sees_every_item_once(kind):
    async def step(ctx: StepContext, state):
        return [int(item) async for item in ctx.each("items", KINDS[kind]())]

    assert await run(registry_of(step)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_resumed_loop_goes_on_behind_the_last_saved_item(kind, store):
    """I1: what `every=1` acknowledged is not done again."""
    seen = []
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", KINDS[kind](), every=1):
            seen.append(int(item))
            ctx.local["sum"] = ctx.local.get("sum", 0) + int(item)
            if seen == [0, 1, 2, 3]:
                reached.set()
                await anyio.sleep_forever()
        return ctx.local["sum"]

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert (await stored(store))["local"] == {"sum": 3}
    assert await finish(registry, store) == 10
    assert seen == [0, 1, 2, 3, 3, 4]


async def test_half_characters_may_be_in_the_name_of_a_loop(tmp_path):
    """As in the name of a file that is not UTF-8."""
    seen = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("file \udcff", range(3), every=1):
            seen.append(item)
            if ctx.attempt == 1 and item == 1:
                raise ValueError

    await run(registry_of(step, retry=AT_ONCE), f"sqlite:///{tmp_path}/work.db", config=NEVER)
    assert seen == [0, 1, 1, 2]


async def test_an_async_generator_will_do():
    async def step(ctx: StepContext, state):
        return [item async for item in ctx.each("items", generated(3))]

    assert await run(registry_of(step)) == [0, 1, 2]


@pytest.mark.parametrize("items", [{1, 2}, frozenset({1, 2})])
async def test_sets_are_refused(items):
    async def step(ctx: StepContext, state):
        async for _ in ctx.each("items", items):
            pass

    with pytest.raises(ExecutionFailedError, match="no stable order"):
        await run(registry_of(step, retry=AT_ONCE))


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": 3}, {"every": 0}, {"every": True}, {"every": 1.5}])
async def test_bad_arguments_are_refused(bad):
    async def step(ctx: StepContext, state):
        with pytest.raises(ConfigError):
            ctx.each(**{"name": "items", "items": [1], **bad})

    await run(registry_of(step))


async def test_between_saves_nothing_is_durable_and_every_n_saves_every_nth(store):
    seen = []
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(10), every=3):
            seen.append(item)
            if seen == list(range(8)):
                reached.set()
                await anyio.sleep_forever()

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert (await stored(store))["each:items"] == {"n": 6, "of": 10}
    await finish(registry, store)
    assert seen == [*range(8), *range(6, 10)]


async def test_every_1_is_durable_before_the_next_item(store):
    """Read behind the step's back, from inside the next item."""

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(5), every=1):
            if item:
                assert (await stored(store))["each:items"]["n"] == item

    await run(registry_of(step), store, config=NEVER)


async def test_a_failed_attempt_hands_its_progress_to_the_next(store):
    """An error in item k: the next attempt begins with item k, `local` being as it was at the end of item k-1."""
    seen = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(5)):
            seen.append((ctx.attempt, item))
            assert ctx.local.get("count", 0) == item
            assert ctx.local.get("list", []) == list(range(item))
            assert ctx.local.get("deep", {}) == ({"last": {"item": item - 1}} if item else {})
            ctx.local["count"] = item + 1
            ctx.local.setdefault("list", []).append(item)
            ctx.local.setdefault("deep", {})["last"] = {"item": item}
            if ctx.attempt == 1 and item == 3:
                raise ValueError("item 3")
        return ctx.local["list"]

    assert await run(registry_of(step, retry=AT_ONCE), store, config=NEVER) == [0, 1, 2, 3, 4]
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


async def test_progress_of_a_failed_attempt_is_durable_with_the_failure(store):
    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(5)):
            ctx.local["n"] = item
            if item == 3:
                ctx.local["n"] = "in the middle"
                raise ValueError("item 3")

    with pytest.raises(ExecutionFailedError):
        await run(registry_of(step, retry=AT_ONCE), store, config=NEVER)
    assert await stored(store) == {"each:items": {"n": 3, "of": 5}, "local": {"n": 2}}


async def test_retry_of_a_failed_execution_keeps_the_progress(store):
    broken = [True]
    seen = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(5)):
            seen.append(item)
            if item == 3 and broken:
                raise ValueError

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE), store=store) as executor:
            handle = await executor.start("work", id="x")
            with pytest.raises(ExecutionFailedError):
                await handle.result()
            broken.clear()
            await handle.retry()
            await handle.result()
    assert seen == [0, 1, 2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("before", "after"),
    [(range(5), range(6)), (range(5), range(4)), (list(range(5)), []), ({1: 1, 2: 2, 3: 3, 4: 4}, {1: 1, 2: 2})],
    ids=["longer", "shorter", "empty", "dict"],
)
async def test_another_number_of_items_is_refused_and_not_tried_again(before, after):
    attempts = []

    async def step(ctx: StepContext, state):
        attempts.append(ctx.attempt)
        async for _ in ctx.each("items", before if ctx.attempt == 1 else after):
            if ctx.attempt == 1 and ctx.local.setdefault("n", 0) == 2:
                raise ValueError
            ctx.local["n"] += 1

    with pytest.raises(ExecutionFailedError, match="no longer fit") as failure:
        await run(registry_of(step, retry=AT_ONCE))
    assert "ItemsChangedError" in str(failure.value)
    assert attempts == [1, 2]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_iterator_that_is_too_short_now_is_refused(kind):
    async def step(ctx: StepContext, state):
        count = 5 if ctx.attempt == 1 else 2
        async for item in ctx.each("items", Numbers(count) if kind == "async" else iter(range(count))):
            if item == 3:
                raise ValueError

    with pytest.raises(ExecutionFailedError, match="3 then, 2 now"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_an_iterator_may_be_longer_now():
    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", iter(range(5 if ctx.attempt == 1 else 7))):
            ctx.local["last"] = item
            if item == 3 and ctx.attempt == 1:
                raise ValueError
        return ctx.local["last"]

    assert await run(registry_of(step, retry=AT_ONCE)) == 6


async def test_a_loop_that_ended_is_not_read_again():
    read = []

    def items():
        read.append("read")
        yield from range(3)

    async def step(ctx: StepContext, state):
        seen = [item async for item in ctx.each("items", items())]
        if ctx.attempt == 1:
            raise ValueError
        return seen

    assert await run(registry_of(step, retry=AT_ONCE)) == []
    assert read == ["read"]


async def test_items_of_a_lazy_sequence_that_are_done_are_not_made_again():
    made: list[int] = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", Lazy(made)):
            if item == 3 and ctx.attempt == 1:
                raise ValueError

    await run(registry_of(step, retry=AT_ONCE))
    assert made == [0, 1, 2, 3, 3, 4]


async def test_nested_loops_go_on_where_the_inner_one_was(store):
    seen = []
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        async for outer in ctx.each("outer", "abc"):
            async for inner in ctx.each("inner", range(3), every=1):
                seen.append(f"{outer}{inner}")
                if seen[-2:] == ["b1", "b2"] and not reached.is_set():
                    reached.set()
                    await anyio.sleep_forever()

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await stored(store) == {
        "each:outer": {"n": 1, "of": 3},
        "outer#1/each:inner": {"n": 2, "of": 3},
    }
    await finish(registry, store)
    assert seen == ["a0", "a1", "a2", "b0", "b1", "b2", "b2", "c0", "c1", "c2"]


async def test_after_a_break_names_belong_to_the_scope_around_the_loop(store):
    calls: list[Any] = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(5)):
            await ctx.once("same", calls.append, item)
            if item == 2:
                break
        await ctx.once("same", calls.append, "after")
        async for _ in ctx.each("more", range(2)):
            await ctx.once("same", calls.append, "more")
        assert "once:same" in await stored(store)
        if ctx.attempt == 1:
            raise ValueError

    await run(registry_of(step, retry=AT_ONCE), store, config=NEVER)
    assert calls == [0, 1, 2, "after", "more", "more"]


async def test_an_inner_break_belongs_to_the_outer_item():
    calls: list[Any] = []

    async def step(ctx: StepContext, state):
        async for outer in ctx.each("outer", range(2)):
            held = ctx.each("inner", range(3))  # the reference outlives the loop
            async for inner in held:
                if inner == 1:
                    break
            async for inner in ctx.each("second", range(2)):
                await ctx.once("call", calls.append, (outer, inner))

    await run(registry_of(step))
    assert calls == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_a_name_used_twice_fails_the_execution_at_once():
    attempts = []

    async def step(ctx: StepContext, state):
        attempts.append(ctx.attempt)
        async for _ in ctx.each("items", range(2)):
            pass
        async for _ in ctx.each("items", range(2)):
            pass

    with pytest.raises(ExecutionFailedError, match="used twice"):
        await run(registry_of(step, retry=AT_ONCE))
    assert attempts == [1]


async def test_two_loops_read_side_by_side_keep_their_own_places():
    async def step(ctx: StepContext, state):
        left, right = ctx.each("left", range(3)), ctx.each("right", "abc")
        pairs = []
        async for item in left:
            pairs.append((item, await anext(right)))
            if item == 1 and ctx.attempt == 1:
                raise ValueError
        return pairs

    assert await run(registry_of(step, retry=AT_ONCE)) == [(1, "b"), (2, "c")]


async def test_a_loop_without_an_await_lets_others_run_and_can_be_cancelled():
    began = anyio.Event()

    async def step(ctx: StepContext, state):
        async for _ in ctx.each("items", iter(int, 1)):  # endless
            began.set()

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store="memory:") as executor:
            handle = await executor.start("work", id="x")
            await began.wait()
            await handle.cancel()
            assert (await handle.info()).state == "cancelled"


async def test_a_loop_pauses_between_items_and_goes_on_after_resume(store):
    """A plain pause never cuts an item short."""
    seen = []
    in_item, may_end = anyio.Event(), anyio.Event()

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(4)):
            seen.append(f"{item} begins")
            if item == 1:
                in_item.set()
                await may_end.wait()
            seen.append(f"{item} ends")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await in_item.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                may_end.set()
            assert seen[-1] == "1 ends"
            assert (await stored(store))["each:items"]["n"] == 2
            await handle.resume()
            await handle.result()
    assert seen == [f"{n} {what}" for n in range(4) for what in ("begins", "ends")]


async def test_an_interval_of_zero_saves_at_every_item(store):
    """Saves are handed over, not waited for: after the loop at least one of them is there."""

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(3)):
            if item == 2:
                while (await stored(store)).get("each:items", {}).get("n") != 2:
                    await anyio.lowlevel.checkpoint()

    await run(registry_of(step), store, config=ExecutorConfig(checkpoint_interval=0))


async def test_items_that_raise_stop_async_iteration_do_not_pass_for_all_of_them():
    def pages():
        yield 1
        raise StopAsyncIteration

    async def step(ctx: StepContext, state: Any) -> Any:
        return [page async for page in ctx.each("pages", pages())]

    with pytest.raises(ExecutionFailedError, match="the items of 'pages' raised StopAsyncIteration"):
        await run(registry_of(step))


# --- several tasks of one step ----------------------------------------------------------------------------------------


async def test_a_task_in_a_loop_does_not_own_what_another_task_keeps():
    """What is kept beside an item does not go with it: `once` is called once in a visit."""
    calls = []

    async def step(ctx: StepContext, state: Any) -> Any:
        inside, kept = anyio.Event(), anyio.Event()

        async def loop() -> None:
            async for _ in ctx.each("pages", range(3)):
                inside.set()
                await kept.wait()
            inside.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop)
            await inside.wait()
            await ctx.once("charge", lambda: calls.append(ctx.attempt))
            kept.set()
        if ctx.attempt == 1:
            raise ValueError
        return state

    await run(registry_of(step, retry=AT_ONCE))
    assert calls == [1]


async def test_loops_of_several_tasks_keep_their_own_places_and_names():
    seen: dict[str, list[int]] = {"a": [], "b": []}
    sent: list[str] = []

    async def step(ctx: StepContext, state: Any) -> Any:
        turn = {"a": anyio.Event(), "b": anyio.Event()}

        async def loop(name: str, other: str) -> None:
            async for n in ctx.each(name, range(3), every=1):
                turn[name].set()
                await turn[other].wait()  # from here on both are inside an item
                seen[name].append(n)
                await ctx.once("send", sent.append, f"{name}{n}")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(inside, f"{name}{n}")
                if ctx.attempt == 1 and n == 1:
                    return
            turn[name].set()

        async def inside(text: str) -> None:
            """A task that is started inside an item belongs to that item."""
            await ctx.once("inside", sent.append, f"inside {text}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop, "a", "b")
            tasks.start_soon(loop, "b", "a")
        if ctx.attempt == 1:
            raise ValueError
        return state

    await run(registry_of(step, retry=AT_ONCE))
    for name in ("a", "b"):
        assert sorted(set(seen[name])) == [0, 1, 2]
        assert seen[name].count(0) == 1
    assert sorted(sent) == sorted(set(sent))
    assert len(sent) == 12


@pytest.mark.parametrize("nested", ["each", "map"])
async def test_what_a_plain_step_opens_inside_an_item_belongs_to_it(nested):
    """Its loop is read in a thread, and its map runs in the event loop."""
    seen = []

    def step(ctx: SyncStepContext, state: Any) -> Any:
        for page in ctx.each("pages", range(3)):
            if nested == "each":
                seen.extend([(page, part) for part in ctx.each("parts", range(2))])
            else:
                ctx.map(lambda part, page=page: seen.append((page, part)), range(2), name="parts")
        return state

    await run(registry_of(step))
    assert sorted(seen) == [(page, part) for page in range(3) for part in range(2)]
