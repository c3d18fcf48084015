"""`ctx.once`: a call whose result is durable before it is returned, and which is never made again in this visit."""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from string import ascii_letters
from typing import Any, assert_type

import anyio
import attrs
import pytest

from longrun import (
    ExecutionFailedError,
    Executor,
    MemoryCheckpointStore,
    NotStorableError,
    Repeat,
    StepContext,
    StepRegistry,
    SyncStepContext,
    open_store,
)
from longrun.stores.store import CheckpointStore
from tests.crashing import AT_ONCE, NEVER, PATIENCE, Held, crash_at, finish, registry_of, run, stored


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


@attrs.frozen
class Order:
    id: int
    prices: list[Decimal]


@dataclass
class Customer:
    name: str
    since: datetime


def order(id: int) -> Order:
    return Order(id, [Decimal("1.50")])


async def customer(name: str) -> Customer:
    return Customer(name, datetime(2024, 1, 1, tzinfo=UTC))


def later(id: int) -> Awaitable[Order]:
    async def make() -> Order:
        return order(id)

    return make()


class Maker:
    def method(self, id: int) -> Order:
        return order(id)

    async def __call__(self, id: int) -> Order:
        return order(id)


CALLS: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "sync": (order, (3,), Order(3, [Decimal("1.50")])),
    "async": (customer, ("Ann",), Customer("Ann", datetime(2024, 1, 1, tzinfo=UTC))),
    "awaitable": (later, (3,), Order(3, [Decimal("1.50")])),
    "partial": (functools.partial(order, 3), (), Order(3, [Decimal("1.50")])),
    "async partial": (functools.partial(customer, "Ann"), (), Customer("Ann", datetime(2024, 1, 1, tzinfo=UTC))),
    "lambda": (lambda: {"a": (1, Decimal("2.5"))}, (), {"a": (1, Decimal("2.5"))}),
    "method": (Maker().method, (3,), Order(3, [Decimal("1.50")])),
    "callable": (Maker(), (3,), Order(3, [Decimal("1.50")])),
    "builtin": (len, ("abc",), 3),
    "class": (uuid.UUID, ("12345678123456781234567812345678",), uuid.UUID("12345678123456781234567812345678")),
    "None": (time.sleep, (0,), None),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_the_next_attempt_is_given_the_same_value_without_a_call(kind, where):
    function, args, value = CALLS[kind]
    calls: list[Any] = []

    @functools.wraps(function, assigned=())
    def counted(*given):
        calls.append(given)
        return function(*given)

    counting: Any = counted
    if kind == "async":

        async def counting(name: str) -> Customer:
            calls.append((name,))
            return await customer(name)

    elif kind not in ("lambda", "builtin", "None"):
        counted.__annotations__ = {"return": Awaitable[Order] if kind == "awaitable" else type(value)}

    async def step(ctx: StepContext, state):
        result = await ctx.once("call", counting, *args)
        assert result == value
        assert type(result) is type(value)
        if ctx.attempt == 1:
            raise ValueError

    def thread_step(ctx: SyncStepContext, state):
        result = ctx.once("call", counting, *args)
        assert result == value
        assert type(result) is type(value)
        if ctx.attempt == 1:
            raise ValueError

    await run(registry_of(step if where == "loop" else thread_step, retry=AT_ONCE))
    assert calls == [args]


@pytest.mark.parametrize("kind", CALLS)
async def test_every_kind_of_callable_can_be_called(kind):
    function, args, value = CALLS[kind]

    async def step(ctx: StepContext, state):
        assert await ctx.once("call", function, *args) == value
        if ctx.attempt == 1:
            raise ValueError

    await run(registry_of(step, retry=AT_ONCE))


async def test_the_result_is_durable_before_it_is_returned(store):
    """I1, read behind the step's back."""

    async def step(ctx: StepContext, state):
        await ctx.once("pay", int, 3)
        assert (await stored(store))["once:pay"] == 3

    await run(registry_of(step), store, config=NEVER)


async def test_after_a_crash_it_is_not_called_again(store):
    calls: list[Any] = []
    reached = anyio.Event()

    def pay():
        calls.append("pay")
        return 42

    async def step(ctx: StepContext, state):
        result = await ctx.once("pay", pay)
        if not reached.is_set():
            reached.set()
            await anyio.sleep_forever()
        return result

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await finish(registry, store) == 42
    assert calls == ["pay"]


async def test_a_crash_during_the_call_calls_it_again(store):
    calls: list[Any] = []
    reached = anyio.Event()

    async def pay():
        calls.append("pay")
        if not reached.is_set():
            reached.set()
            await anyio.sleep_forever()
        return 42

    async def step(ctx: StepContext, state):
        return await ctx.once("pay", pay)

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    assert await finish(registry, store) == 42
    assert calls == ["pay", "pay"]


async def test_a_call_that_fails_keeps_nothing_and_may_be_made_again():
    calls: list[Any] = []

    def pay():
        calls.append("pay")
        if len(calls) < 3:
            raise OSError("away")
        return "paid"

    async def step(ctx: StepContext, state):
        for _ in range(3):
            try:
                return await ctx.once("pay", pay)
            except OSError:
                pass
        return None

    assert await run(registry_of(step)) == "paid"
    assert len(calls) == 3


@pytest.mark.parametrize("inside", [False, True])
async def test_a_time_limit_that_ends_while_it_becomes_durable_leaves_the_result(inside):
    """The call has been made: asked again, it waits until that is durable, and makes no other."""
    backend, calls = Held(), []

    async def get(ctx: StepContext) -> Any:
        async def fetch() -> int:
            calls.append("fetch")
            backend.free.clear()
            limit.cancel()
            return 5

        try:
            with anyio.CancelScope() as limit:
                await ctx.once("fetch", fetch)
            assert limit.cancelled_caught
            with anyio.CancelScope() as limit:
                limit.cancel()
                await ctx.once("fetch", fetch)
            assert limit.cancelled_caught, "it is not durable yet"
        finally:
            backend.free.set()
        return await ctx.once("fetch", fetch)

    async def step(ctx: StepContext, state):
        if not inside:
            return await get(ctx), await stored(store)
        (seen,) = [(await get(ctx), await stored(store)) async for _ in ctx.each("items", [1])]
        return seen

    async with CheckpointStore(backend) as store:
        result, entries = await run(registry_of(step), store, config=NEVER)
    assert result == 5
    assert calls == ["fetch"]
    assert entries["items#0/once:fetch" if inside else "once:fetch"] == 5


async def test_in_a_thread_too_a_result_that_was_not_seen_durable_is_there_when_asked_again(monkeypatch):
    calls: list[Any] = []

    async def away() -> None:
        raise OSError("away")

    def step(ctx: SyncStepContext, state):
        with monkeypatch.context() as patch:
            patch.setattr(ctx._port, "durable", away)
            for _ in range(2):
                with pytest.raises(OSError, match="away"):
                    ctx.once("fetch", calls.append, 1)
        return ctx.once("fetch", calls.append, 1)

    assert await run(registry_of(step)) is None
    assert calls == [1]


async def test_a_key_used_twice_raises():
    async def step(ctx: StepContext, state):
        await ctx.once("a", int)
        await ctx.once("a", int)

    with pytest.raises(ExecutionFailedError, match="'a' is used twice"):
        await run(registry_of(step, retry=AT_ONCE))


async def test_half_characters_may_be_in_a_key(tmp_path):
    """As in the name of a file that is not UTF-8; and no other key is taken for it."""
    calls: list[Any] = []
    keys = ["k\udcff", "k%uDCFF", "k\ud800", "kä"]

    async def step(ctx: StepContext, state):
        for n, key in enumerate(keys):
            await ctx.once(key, calls.append, n)
        if ctx.attempt == 1:
            raise ValueError

    await run(registry_of(step, retry=AT_ONCE), f"sqlite:///{tmp_path}/work.db", config=NEVER)
    assert calls == [0, 1, 2, 3]


async def test_long_keys_and_such_with_a_nul_are_kept_everywhere(postgres_server, postgres_schema):
    """An index has room for so much, and a text of PostgreSQL holds no NUL: the call would be made at every start."""
    calls: list[Any] = []
    random = Random(1)
    long = "".join(random.choices(ascii_letters, k=6000))
    keys = ["a\0b", "a%00b", long, long[:-1], long[:-1] + "ä"]

    async def step(ctx: StepContext, state):
        for n, key in enumerate(keys):
            await ctx.once(key, calls.append, n)
            async for _ in ctx.each(key, range(1)):
                await ctx.map(calls.append, [n], name=key)
        if ctx.attempt == 1:
            raise ValueError

    store = open_store(postgres_server.url, schema=postgres_schema)
    await run(registry_of(step, retry=AT_ONCE), store, config=NEVER)
    assert sorted(calls) == sorted([*range(5), *range(5)])


async def test_inside_an_item_it_is_dropped_when_the_item_is_saved_past(store):
    held = []

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(4), every=2):
            await ctx.once("fetch", int, item)
            held.append(sorted(key for key in await stored(store) if "once" in key))

    await run(registry_of(step), store, config=NEVER)
    assert held == [
        ["items#0/once:fetch"],
        ["items#1/once:fetch"],  # durable with the cursor behind item 0, in one write
        ["items#2/once:fetch"],
        ["items#3/once:fetch"],
    ]


async def test_a_crash_in_an_item_makes_only_its_missing_calls(store):
    calls: list[Any] = []
    reached = anyio.Event()

    async def step(ctx: StepContext, state):
        async for item in ctx.each("items", range(3)):
            for key in "ab":
                await ctx.once(key, calls.append, f"{item}{key}")
                if (item, key) == (1, "a") and not reached.is_set():
                    reached.set()
                    await anyio.sleep_forever()

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    await finish(registry, store)
    assert calls == ["0a", "0b", "1a", "1b", "2a", "2b"]


async def test_every_visit_calls_it_anew():
    calls: list[Any] = []

    async def step(ctx: StepContext, state):
        await ctx.once("a", calls.append, ctx.iteration)
        return Repeat(state) if ctx.iteration < 2 else state

    await run(registry_of(step))
    assert calls == [0, 1, 2]


async def test_a_result_that_cannot_be_stored_fails_the_step_at_once():
    attempts = []

    async def step(ctx: StepContext, state):
        attempts.append(ctx.attempt)
        await ctx.once("client", lambda: {"a": [threading.Lock()]})

    with pytest.raises(ExecutionFailedError, match=r"once\['client'\]\['a'\]\[0\]"):
        await run(registry_of(step, retry=AT_ONCE))
    assert attempts == [1]


@pytest.mark.parametrize("plain", [False, True])
async def test_a_result_that_was_refused_may_be_made_again_in_another_form(plain):
    async def step(ctx: StepContext, state):
        with pytest.raises(NotStorableError):
            await ctx.once("client", threading.Lock)
        return await ctx.once("client", lambda: "a lock")

    def plain_step(ctx: SyncStepContext, state):
        with pytest.raises(NotStorableError):
            ctx.once("client", threading.Lock)
        return ctx.once("client", lambda: "a lock")

    assert await run(registry_of(plain_step if plain else step)) == "a lock"


async def test_what_says_that_it_gives_something_unstorable_is_not_called():
    """The call may cost something, and its result would be lost."""
    calls = []

    def connect(*_: Any) -> threading.Event:
        calls.append("connected")
        return threading.Event()

    async def step(ctx: StepContext, state):
        with pytest.raises(NotStorableError):
            await ctx.once("client", connect)
        with pytest.raises(NotStorableError):
            await ctx.map(connect, [1, 2])
        return await ctx.once("client", lambda: "nothing")

    assert await run(registry_of(step)) == "nothing"
    assert calls == []


async def test_plain_functions_of_an_async_step_do_not_block_the_loop():
    """They run in a step thread."""
    free = threading.Event()

    async def step(ctx: StepContext, state):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ctx.once, "wait", lambda: free.wait(PATIENCE) and None)
            await anyio.lowlevel.checkpoint()
            free.set()

    await run(registry_of(step))


async def test_calls_made_at_the_same_time_are_all_durable(store):
    async def step(ctx: StepContext, state):
        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(ctx.once, f"call {n}", int, n)
        assert {key: value for key, value in (await stored(store)).items() if key.startswith("once")} == {
            f"once:call {n}": n for n in range(20)
        }

    await run(registry_of(step), store, config=NEVER)


async def test_an_interrupt_during_the_call_calls_it_again(store):
    calls: list[Any] = []
    called = anyio.Event()

    async def pay():
        calls.append("pay")
        called.set()
        if calls.count("pay") == 1:
            await anyio.sleep_forever()

    async def step(ctx: StepContext, state):
        await ctx.once("first", calls.append, "first")
        await ctx.once("pay", pay)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await called.wait()
            await handle.pause(interrupt=True)
            assert list(await stored(store)) == ["once:first"]
            await handle.resume()
            await handle.result()
    assert calls == ["first", "pay", "pay"]


async def test_a_result_has_the_type_of_its_function() -> None:
    """The type checker's business, which reads this; that both kinds of function are called is ours."""

    async def half(number: int, *, fast: bool = False) -> float:
        return number / 2

    async def asynchronous(ctx: StepContext, state: int) -> str:
        assert_type(await ctx.once("later", half, state), float)
        return assert_type(await ctx.once("at once", str, state), str)

    def blocking(ctx: SyncStepContext, state: str) -> float:
        return assert_type(ctx.once("later", half, int(state)), float)

    registry = StepRegistry()
    registry.workflow("w", [asynchronous, blocking])
    async with Executor(registry, store=MemoryCheckpointStore()) as executor:
        assert await (await executor.start("w", 3)).result() == 1.5
