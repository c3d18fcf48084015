"""Waiting in a loop for an answer of a thread, and the event for which mostly nobody waits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import anyio
import pytest
import trio

from longrun import Executor, MemoryCheckpointStore, StepRegistry
from longrun.loops import Bell, Loop, Waiter, current_loop, tell_all
from tests.crashing import PATIENCE

NAME: ContextVar[str] = ContextVar("NAME", default="nobody")


async def waiting(*waiters: Waiter) -> list[Any]:
    return [await waiter for waiter in waiters]


async def begun(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that has come to where it waits."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


async def test_an_answer_reaches_who_waits_and_only_the_first_counts() -> None:
    loop = current_loop()
    waiter, early = loop.waiter(), loop.waiter()
    early("early")
    answers: list[Any] = []

    async def wait() -> None:
        answers.extend(await waiting(waiter, early))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert loop.call_soon(waiter, 1)
        assert loop.call_soon(waiter, 2)
    assert answers == [1, "early"]


async def test_who_gives_up_hears_of_no_answer() -> None:
    loop = current_loop()
    waiter = loop.waiter()
    with anyio.move_on_after(0) as scope:
        await waiter
    assert scope.cancelled_caught
    waiter("late")
    with pytest.raises(TimeoutError), anyio.fail_after(0):
        await loop.waiter()


async def test_cancelling_reaches_through_a_shield_only_when_it_ends() -> None:
    loop = current_loop()
    waiter, told = loop.waiter(), []
    with anyio.CancelScope() as outer:
        with anyio.CancelScope(shield=True):
            outer.cancel()
            loop.call_soon(waiter, "kept")
            told.append(await waiter)
        await anyio.lowlevel.checkpoint()
    assert told == ["kept"]
    assert outer.cancelled_caught


Answering = Callable[[Loop, list[Waiter]], object]


def _in_one_call(loop: Loop, waiters: list[Waiter]) -> None:
    loop.call_soon(tell_all, [(waiter, None) for waiter in waiters])


def _one_after_the_other(loop: Loop, waiters: list[Waiter]) -> None:
    loop.answer([(waiter, None) for waiter in waiters])


both_ways = pytest.mark.parametrize("answer", [_in_one_call, _one_after_the_other])
"""Answers come in either way."""


def _turn_until(loop: Any, done: Callable[[], bool], turns: int = 50) -> None:
    """What `nest_asyncio` does for who waits for something in the middle of a task."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.tasks._leave_task(loop, task)
    try:
        while not done():
            turns -= 1
            assert turns, "the loop turns, and who was answered does not go on"
            loop.call_soon(int)
            loop._run_once()
    finally:
        asyncio.tasks._enter_task(loop, task)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestAsyncio:
    """What a task asks of a future, and what goes beyond it."""

    async def test_who_is_answered_goes_on_in_the_same_turn_of_the_loop(self) -> None:
        loop, order = current_loop(), list[object]()

        async def wait(waiter: Waiter) -> None:
            order.append(await waiter)

        waiters = [loop.waiter() for _ in range(3)]
        tasks = [await begun(wait(waiter)) for waiter in waiters]

        def answer() -> None:
            asyncio.get_running_loop().call_soon(order.append, "next turn")
            for number, waiter in enumerate(waiters):
                waiter(number)
            order.append("all answered")

        loop.call_soon(answer)
        await asyncio.gather(*tasks)
        assert order == ["all answered", 0, 1, 2, "next turn"]

    async def test_one_after_the_other_is_answered_and_goes_on(self) -> None:
        """Before the next is even told."""
        loop, order = current_loop(), list[object]()

        async def wait(waiter: Waiter) -> None:
            order.append(await waiter)

        waiters = [loop.waiter() for _ in range(3)]
        tasks = [await begun(wait(waiter)) for waiter in waiters]

        def tell(number: int, answer: object) -> None:
            if not number:
                asyncio.get_running_loop().call_soon(order.append, "next turn")
            order.append(number)
            waiters[number](answer)

        loop.answer([(partial(tell, number), answer) for number, answer in enumerate("abc")])
        await asyncio.gather(*tasks)
        assert order == [0, "a", 1, "b", 2, "c", "next turn"]

    async def test_one_that_cannot_be_told_keeps_no_answer_from_the_others(self) -> None:
        loop, told = current_loop(), list[object]()
        running, failures = asyncio.get_running_loop(), list[Any]()
        running.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        waiters = [loop.waiter() for _ in range(2)]
        tasks = [await begun(waiting(waiter)) for waiter in waiters]

        def fail(answer: object) -> None:
            raise ZeroDivisionError

        loop.answer([(waiters[0], "first"), (fail, "nobody's"), (waiters[1], "last")])
        for task in tasks:
            told += await task
        assert told == ["first", "last"]
        assert [type(failure) for failure in failures] == [ZeroDivisionError]

    async def test_who_is_answered_later_is_told_later(self) -> None:
        """Also where one of those before him runs the loop itself: what he wrote may rest on what they wrote."""
        loop, running, order = current_loop(), asyncio.get_running_loop(), list[str]()
        waiter = loop.waiter()

        async def wait() -> None:
            await waiter
            _turn_until(running, lambda: len(order) == 2)

        python_task: Any = asyncio.tasks._PyTask  # type: ignore[attr-defined]
        task = python_task(wait(), loop=running)
        await asyncio.sleep(0)
        loop.answer([(waiter, None), (order.append, "first")])
        loop.answer([(order.append, "second")])
        await task
        assert order == ["first", "second"]

    async def test_what_comes_while_answers_are_told_has_a_turn_of_its_own(self) -> None:
        """A writer that is quicker than the loop leaves time for everything else."""
        loop, order = current_loop(), list[str]()

        def tell(answer: str) -> None:
            order.append(answer)
            loop.answer([(order.append, "meanwhile")])
            asyncio.get_running_loop().call_soon(order.append, "the next turn")

        loop.answer([(tell, "first"), (order.append, "second")])
        for _ in range(3):
            await asyncio.sleep(0)
        assert order[:2] == ["first", "second"]
        assert sorted(order[2:]) == ["meanwhile", "the next turn"]

    @both_ways
    async def test_a_task_goes_on_in_its_own_context(self, answer: Answering) -> None:
        loop = current_loop()
        waiter = loop.waiter()

        async def wait() -> str:
            NAME.set("its own")
            await waiter
            return NAME.get()

        task = await begun(wait())
        answer(loop, [waiter])
        assert await task == "its own"
        assert NAME.get() == "nobody"

    async def test_a_task_may_answer_another(self) -> None:
        """Two cannot run at once: the other one's turn comes when the first waits again."""
        loop = current_loop()
        first, second = loop.waiter(), loop.waiter()
        order: list[str] = []

        async def answer() -> None:
            await first
            second(None)
            order.append("first")

        async def wait() -> None:
            await second
            order.append("second")

        tasks = [await begun(wait()), await begun(answer())]
        loop.call_soon(first, None)
        await asyncio.gather(*tasks)
        assert order == ["first", "second"]

    @both_ways
    async def test_who_is_answered_and_then_cancelled_by_one_before_him_is_cancelled(self, answer: Answering) -> None:
        loop = current_loop()
        first, second = loop.waiter(), loop.waiter()
        told = await begun(waiting(second))

        async def cancel() -> None:
            await first
            assert told.cancel()

        task = await begun(cancel())
        answer(loop, [first, second])
        await task
        with pytest.raises(asyncio.CancelledError):
            await told

    async def test_a_cancelled_task_hears_who_cancelled_it(self) -> None:
        waiter = current_loop().waiter()
        task = await begun(waiting(waiter))
        task.cancel("by me")
        with pytest.raises(asyncio.CancelledError, match="by me"):
            await task
        with pytest.raises(asyncio.CancelledError, match="by me"):
            await waiter

    async def test_a_task_that_is_to_be_cancelled_does_not_begin_to_wait(self) -> None:
        waiter = current_loop().waiter()

        async def wait() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await waiter

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(wait())

    async def test_tasks_of_pure_python_wait_as_well(self) -> None:
        """As they do where a notebook has been made to run loops in loops."""
        loop = current_loop()
        waiter = loop.waiter()
        python_task: Any = asyncio.tasks._PyTask  # type: ignore[attr-defined]
        task = python_task(waiting(waiter), loop=asyncio.get_running_loop())
        await asyncio.sleep(0)
        loop.call_soon(waiter, "yes")
        assert await task == ["yes"]

    @both_ways
    async def test_who_is_answered_beside_one_that_runs_the_loop_itself_goes_on_in_it(self, answer: Answering) -> None:
        """As steps can where a notebook has been made to run loops in loops: one of them may wait there for another."""
        loop, running = current_loop(), asyncio.get_running_loop()
        waiters = [loop.waiter() for _ in range(4)]
        came: list[int] = []

        async def wait(number: int, behind: int) -> None:
            await waiters[number]
            if behind:
                _turn_until(running, lambda: behind in came)
            came.append(number)

        python_task: Any = asyncio.tasks._PyTask  # type: ignore[attr-defined]
        tasks = [python_task(wait(*pair), loop=running) for pair in ((0, 1), (1, 2), (2, 3), (3, 0))]
        await asyncio.sleep(0)
        answer(loop, waiters)
        await asyncio.gather(*tasks)
        assert came == [3, 2, 1, 0]

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 brought tasks that begin at once")
    async def test_tasks_that_begin_at_once_wait_as_well(self) -> None:
        loop = current_loop()
        waiter = loop.waiter()
        running = asyncio.get_running_loop()
        eager: Any = asyncio.eager_task_factory  # type: ignore[attr-defined, unused-ignore]
        task = eager(running, waiting(waiter))
        loop.call_soon(waiter, "yes")
        assert await task == ["yes"]


@both_ways
def test_ctrl_c_in_one_task_keeps_nobody_else_from_going_on(answer: Answering) -> None:
    """Whoever ends the program lets its tasks come to their end."""
    came: list[str] = []

    async def interrupt(waiter: Waiter) -> None:
        await waiter
        raise KeyboardInterrupt

    async def wait(waiter: Waiter) -> None:
        await waiter
        came.append("here")

    async def begin() -> list[asyncio.Task[Any]]:
        return [await begun((wait, interrupt, wait)[n](waiter)) for n, waiter in enumerate(waiters)]

    async def here() -> Any:
        return current_loop()

    loop = asyncio.new_event_loop()
    try:
        handle = loop.run_until_complete(here())
        waiters = [handle.waiter() for _ in range(3)]
        tasks = loop.run_until_complete(begin())
        answer(handle, waiters)
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        assert came == ["here"]
        loop.run_until_complete(asyncio.wait(tasks))
        assert came == ["here", "here"]
        assert isinstance(tasks[1].exception(), KeyboardInterrupt)
    finally:
        loop.close()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_loop_is_found_while_another_thread_imports_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    known = current_loop()
    monkeypatch.setitem(sys.modules, "trio", ModuleType("trio"))  # as it is before it has come to its parts
    assert current_loop() is known


def test_trio_may_be_the_guest_of_asyncio() -> None:
    """As beside a program with a window, whose loop is the host."""
    registry = StepRegistry()

    @registry.step
    async def count(state: int) -> int:
        return state + 1

    registry.workflow("work", [count, count])

    async def guest() -> int:
        async with Executor(registry, store=MemoryCheckpointStore()) as executor:
            return int(await (await executor.start("work", 0)).result(timeout=PATIENCE))

    async def host() -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=loop.call_soon,
            done_callback=lambda outcome: ended.set_result(outcome.unwrap()),
        )
        return await ended

    assert asyncio.run(host()) == 2


async def test_nobody_is_called_in_a_loop_that_is_gone() -> None:
    async def handle() -> Any:
        return current_loop()

    gone = await anyio.to_thread.run_sync(anyio.run, handle)
    assert not gone.call_soon(print)


async def test_a_bell_wakes_all_who_wait_and_stays_rung() -> None:
    bell, woken = Bell(), []

    async def wait(number: int) -> None:
        await bell.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        assert not bell.is_set()
        bell.set()
    assert sorted(woken) == [0, 1, 2]
    assert bell.is_set()
    await bell.wait()


async def test_who_waits_no_longer_leaves_nothing_behind() -> None:
    """A result that is polled with a time-out for hours must not gather those who gave up."""
    bell = Bell()
    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bell.wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert not bell._waiters
    bell.set()
    await bell.wait()


async def test_a_rung_bell_lets_others_run() -> None:
    """Else a loop around one would keep everybody from running."""
    bell = Bell()
    ran: list[bool] = []
    bell.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_note, ran)
        while not ran:
            await bell.wait()


async def _note(ran: list[bool]) -> None:
    ran.append(True)
