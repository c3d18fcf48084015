"""The tasks of a crew: how executions are ended, on asyncio and trio alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import sniffio

from longrun import ExecutionBlockedError, Executor, ExecutorConfig, RetryPolicy, StepRegistry, Worker
from longrun.client import Client
from longrun.shelter import Shelter
from longrun.stored import Save, Write
from longrun.stores.base import Answer
from longrun.stores.memory import MemoryBackend, MemoryCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.stores.writer import Writer
from tests.crashing import PATIENCE


class EndOfAllError(BaseException):
    """What no step's failure is."""


async def standing() -> Shelter:
    shelter = Shelter(lambda: None)
    await shelter.open()
    return shelter


async def test_one_that_takes_no_notice_is_cancelled_again() -> None:
    heard: list[str] = []
    began = anyio.Event()

    async def stubborn() -> None:
        began.set()
        for word in ("first", "second", "third"):
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                heard.append(word)
        await anyio.sleep_forever()

    shelter = await standing()
    shelter.run(stubborn, name="stubborn")
    await began.wait()
    await shelter.close()
    assert heard == ["first", "second", "third"]


async def test_what_is_shielded_ends_in_its_own_time() -> None:
    done: list[str] = []
    began = anyio.Event()

    async def careful() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                done.append("written down")

    shelter = await standing()
    shelter.run(careful, name="careful")
    await began.wait()
    await shelter.close()
    assert done == ["written down"]


async def test_one_that_is_started_before_the_shelter_stands_runs() -> None:
    ran = anyio.Event()
    shelter = Shelter(lambda: None)

    async def run() -> None:
        ran.set()

    shelter.run(run, name="early")
    await shelter.open()
    await ran.wait()
    await shelter.close()


async def test_an_execution_that_is_told_to_end_before_it_has_begun_is_given_back(monkeypatch: Any) -> None:
    """On asyncio, where a task that is started while all end begins all the same."""
    if sniffio.current_async_library() != "asyncio":
        pytest.skip("with trio a task group ends its tasks itself")
    registry, calls = StepRegistry(), []

    @registry.step
    async def work(state: Any) -> str:
        calls.append("work")
        return "done"

    registry.workflow("work", [work])
    store = MemoryCheckpointStore()
    async with Executor(registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(Shelter, "stands", False)
            await executor.start("work", id="a")
            await executor.wait_idle()
        head = (await store.load("a")).head
        assert (head.state, head.owner, calls) == ("running", None, [])
        await executor.auto_resume_all()
        assert await (await executor.handle("a")).result() == "done"


async def test_what_ends_the_program_ends_the_others_and_goes_up() -> None:
    ended: list[Any] = []
    began = anyio.Event()

    async def other() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            ended.append("other")

    async def breaks() -> None:
        await began.wait()
        raise EndOfAllError

    shelter = await standing()
    shelter.run(other, name="other")
    shelter.run(breaks, name="breaks")
    with pytest.raises(BaseExceptionGroup) as caught:
        try:
            await anyio.sleep_forever()
        finally:
            await shelter.close()
    assert ended == ["other"]
    assert caught.group_contains(EndOfAllError)


async def test_one_that_is_started_while_all_end_ends_too() -> None:
    began = anyio.Event()

    async def last() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            shelter.run(anyio.sleep_forever, name="late")

    with anyio.fail_after(10):
        shelter = await standing()
        shelter.run(last, name="last")
        await began.wait()
        await shelter.close()


async def test_a_step_that_leaves_a_scope_open_ends_nobody_else(recwarn: Any) -> None:
    """On asyncio; trio itself ends a program that does so."""
    if sniffio.current_async_library() != "asyncio":
        pytest.skip("trio ends the whole program: no library can keep that from it")
    going_on, ended = anyio.Event(), anyio.Event()

    async def leaves_open() -> None:
        anyio.CancelScope().__enter__()

    async def other() -> None:
        await going_on.wait()
        ended.set()

    shelter = await standing()
    shelter.run(other, name="other")
    shelter.run(leaves_open, name="leaves open")
    await anyio.wait_all_tasks_blocked()
    going_on.set()
    await ended.wait()
    assert shelter.stands
    await shelter.close()


async def is_cut(state: dict[str, Any]) -> dict[str, Any]:
    """As one that goes over an async generator which has a time-out around its yield: that cancels who is here, and the
    scope stays open."""
    anyio.move_on_after(0.01).__enter__()
    await anyio.sleep(5.0)
    return {"whole": True}


async def leaves_one_open(state: dict[str, Any]) -> dict[str, Any]:
    anyio.move_on_after(0.01).__enter__()
    return state


async def waits(state: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep(5.0)
    return {"waited": True}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio itself ends a program that does so
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("steps", [(is_cut,), (is_cut, waits), (leaves_one_open, waits)])
async def test_a_step_that_a_scope_left_open_has_cut_did_not_end(steps: tuple[Any, ...], watched: bool) -> None:
    """I2: no checkpoint says so. In its task nothing can be awaited any more, and nobody waits for that for ever."""
    registry = StepRegistry()
    for step in steps:
        registry.register(step.__name__, step, retry=RetryPolicy(max_attempts=2, initial=0))
    registry.workflow("work", [step.__name__ for step in steps])
    on_event = (lambda event: None) if watched else None
    async with Executor(registry, store=MemoryCheckpointStore(), on_event=on_event) as executor:
        run = await executor.start("work", {}, id="x")
        with pytest.raises(ExecutionBlockedError, match="a step has left a cancel scope open"):
            await run.result(timeout=10.0)
        ended = [record.name for record in await executor.steps("x") if record.kind in ("step", "finish")]
        assert ended == [step.__name__ for step in steps if step is leaves_one_open]
        assert not executor.runners


class Hesitant(MemoryBackend):
    """Makes the write behind a failed attempt when another one has come, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.hesitates, self.next_came = threading.Event(), threading.Event()

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        if any(isinstance(write, Save) and write.head.attempt for write in batch):
            self.hesitates.set()
            assert self.next_came.wait(PATIENCE)
        return super().commit(batch)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_is_put_aside_comes_behind_what_was_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that nobody waits for any more is still on its way: blocked is what the execution is in the end."""
    backend, registry, add = Hesitant(), StepRegistry(), Writer.add

    def noticed(self: Writer, job: Any) -> None:
        add(self, job)
        if backend.hesitates.is_set():
            backend.next_came.set()

    monkeypatch.setattr(Writer, "add", noticed)
    registry.register("is_cut", is_cut, retry=RetryPolicy(max_attempts=2, initial=0))
    registry.workflow("work", ["is_cut"])
    async with Executor(registry, store=CheckpointStore(backend)) as executor:
        run = await executor.start("work", {}, id="x")
        with pytest.raises(ExecutionBlockedError):
            await run.result(timeout=PATIENCE)


@pytest.mark.parametrize("kind", [Executor, Worker])
def test_with_asyncio_it_may_be_entered_in_one_task_and_left_in_another(kind: type[Executor]) -> None:
    """As fixtures of pytest-asyncio, `enterAsyncContext` of unittest and cells of a notebook do."""
    registry = StepRegistry()

    async def step(state: int) -> int:
        return state + 1

    registry.workflow("work", [step])
    executor = kind(registry, store=MemoryCheckpointStore())
    client = Client(executor.store)

    async def work() -> object:
        return await (await executor.start("work", 1)).result()

    with asyncio.Runner() as runner:
        runner.run(executor.__aenter__())
        runner.run(client.__aenter__())
        assert runner.run(work()) == 2
        runner.run(client.__aexit__(None, None, None))
        runner.run(executor.__aexit__(None, None, None))


def test_closing_goes_on_although_the_program_is_cancelled_meanwhile() -> None:
    """With asyncio, whose tasks can be cancelled again and again; it is told when all have ended."""
    ended: list[str] = []

    async def main() -> None:
        began, go = anyio.Event(), anyio.Event()

        async def careful() -> None:
            try:
                began.set()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await go.wait()
                ended.append("careful")

        shelter = await standing()
        shelter.run(careful, name="careful")
        await began.wait()
        closing = asyncio.create_task(shelter.close())
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
            closing.cancel()
        assert not ended
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(main())
    assert ended == ["careful"]
