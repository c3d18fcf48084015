"""`FaultyStore` fails, delays or loses the answer of the call it is told to, and the library takes it as it must."""

from __future__ import annotations

import time
from typing import Any

import pytest

from longrun import Executor, ExecutorConfig, MemoryCheckpointStore, StepRegistry
from longrun.errors import ConfigError, StoreUnavailableError
from longrun.testing import FaultyStore

registry = StepRegistry()
ran: list[str] = []


@registry.step
async def first(state: dict[str, Any]) -> dict[str, Any]:
    ran.append("first")
    return {**state, "first": True}


@registry.step
async def second(state: dict[str, Any]) -> dict[str, Any]:
    ran.append("second")
    return {**state, "second": True}


registry.workflow("two", [first, second])


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryCheckpointStore())


async def result(store: FaultyStore) -> object:
    async with Executor(registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
        run = await executor.start("two", {}, id="x")
        return await run.result()


DONE = {"first": True, "second": True}


async def test_a_failed_write_is_tried_again_and_the_step_is_not(store: FaultyStore) -> None:
    """I10."""
    store.fail("commit", 2, times=2)
    assert await result(store) == DONE
    assert ran == ["first", "second"]
    assert store.fired == {"commit": 2}


async def test_a_lost_answer_is_no_second_write(store: FaultyStore) -> None:
    """I9: the write was made; its repetition is recognised."""
    store.lose_answer("commit", 2)
    assert await result(store) == DONE
    assert ran == ["first", "second"]
    await store.open()
    assert [row.seq for row in await store.boundaries("x")] == [1, 2, 3]
    await store.aclose()
    assert store.fired == {"commit": 1}


async def test_a_start_that_fails_is_not_acknowledged(store: FaultyStore) -> None:
    """I10."""
    store.fail("commit", 1)
    with pytest.raises(StoreUnavailableError):
        await result(store)
    assert ran == []


async def test_a_delayed_call_is_late_and_right(store: FaultyStore) -> None:
    store.delay("commit", 1, seconds=0.05)
    began = time.monotonic()
    assert await result(store) == DONE
    assert time.monotonic() - began >= 0.05
    assert store.fired["commit"] == 1


async def test_reads_and_anything_can_fail_until_they_are_healed(store: FaultyStore) -> None:
    async with store:
        store.fail("count", times=None)
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                await store.count()
        store.heal()
        assert await store.count() == {}
        store.fail("any")
        with pytest.raises(StoreUnavailableError):
            await store.owners()
        assert await store.owners() == []
    assert store.calls["count"] == 4


async def test_another_error_can_be_chosen(store: FaultyStore) -> None:
    async with store:
        store.fail("load", error=StoreUnavailableError("tested", "on fire"))
        with pytest.raises(StoreUnavailableError, match="on fire"):
            await store.load("x")


def test_a_call_that_does_not_exist_is_refused(store: FaultyStore) -> None:
    with pytest.raises(ConfigError, match="comit"):
        store.fail("comit")
    with pytest.raises(ConfigError, match="nth"):
        store.fail("commit", 0)


def test_a_fault_that_could_never_fire_is_refused(store: FaultyStore) -> None:
    with pytest.raises(ConfigError, match="times=0"):
        store.fail("commit", times=0)
    with pytest.raises(ConfigError, match="seconds=-1"):
        store.delay("commit", seconds=-1)
