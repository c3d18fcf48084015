"""Leaving: running steps get time to reach a point, then are cancelled; nothing of it is stored as cancelled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import sniffio

from longrun import (
    ConfigError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    StepContext,
    StepInterrupted,
    StepRegistry,
    SyncStepContext,
    drain,
    open_store,
)
from longrun.runner import Runner

ROOT = Path(__file__).parent.parent


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


async def test_a_step_that_comes_to_its_end_is_kept_and_the_next_is_left_to_the_next_start(store):
    registry = StepRegistry()
    begun, calls = anyio.Event(), []

    @registry.step
    async def first(ctx: StepContext, state: int) -> int:
        calls.append("first")
        begun.set()
        while not ctx.shutting_down:
            await store.ping()
        assert ctx.time_left is not None
        assert 0 < ctx.time_left <= 10
        return state + 1

    @registry.step
    async def second(state: int) -> int:
        calls.append("second")
        return state + 1

    registry.workflow("work", [first, second])
    async with Executor(registry, store=store) as executor:
        await executor.start("work", 0, id="a")
        await begun.wait()
    head = (await store.load("a")).head
    assert (head.state, head.owner, head.step, head.crashes) == ("running", None, 1, 0)
    assert calls == ["first"]
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == 2
    assert calls == ["first", "second"]


async def test_a_step_is_stopped_at_its_next_checkpoint_with_its_progress(store):
    registry = StepRegistry()
    begun, seen = anyio.Event(), []

    @registry.step
    async def work(ctx: StepContext, state: Any) -> list[Any]:
        async for n in ctx.each("numbers", range(5)):
            seen.append(n)
            if n == 2 and not begun.is_set():
                begun.set()
                while not ctx.shutting_down:
                    await store.ping()
        return seen

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor:
        await executor.start("work", id="a")
        await begun.wait()
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == [0, 1, 2, 3, 4]


async def test_after_the_time_out_a_step_is_cancelled_and_repeats_the_same_attempt(store):
    registry = StepRegistry()
    begun, attempts = anyio.Event(), []

    @registry.step
    async def work(ctx: StepContext, state: Any) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            begun.set()
            await anyio.sleep_forever()
        return "done"

    registry.workflow("work", [work])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.05)) as executor:
        await executor.start("work", id="a")
        await begun.wait()
    head = (await store.load("a")).head
    assert (head.state, head.owner, head.attempt) == ("running", None, 0)
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == "done"
    assert attempts == [1, 1]


async def test_a_program_that_is_being_cancelled_still_gives_everything_back(store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def work(state: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    registry.workflow("work", [work])
    with anyio.CancelScope() as scope:
        async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.05)) as executor:
            run = await executor.start("work", id="a")
            await begun.wait()
            scope.cancel()
            await run.result()
    assert scope.cancelled_caught
    head = (await store.load("a")).head
    assert (head.state, head.owner) == ("running", None)
    async with store:
        assert await store.owners() == []


async def test_an_error_in_the_block_comes_out_as_it_is(store):
    with pytest.raises(ZeroDivisionError):
        async with Executor(StepRegistry(), store=store):
            raise ZeroDivisionError
    async with store:
        assert await store.owners() == []


async def test_what_was_queued_paused_or_parked_is_free_afterwards(store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def work(state: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    registry.workflow("work", [work])
    config = ExecutorConfig(drain_timeout=0.05, max_concurrency=1)
    async with Executor(registry, store=store, config=config) as executor:
        run = await executor.start("work", id="paused")
        await begun.wait()
        await run.pause(interrupt=True, hold=True)
        begun = anyio.Event()
        for id in ("running", "queued"):
            await executor.start("work", id=id)
        await begun.wait()
    for id, state in (("paused", "paused"), ("running", "running"), ("queued", "running")):
        head = (await store.load(id)).head
        assert (head.state, head.owner) == (state, None)


async def test_a_step_that_swallows_its_cancellation_for_a_while_keeps_what_it_returned(store):
    registry = StepRegistry()
    begun = anyio.Event()

    @registry.step
    async def stubborn(state: Any) -> str:
        begun.set()
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()
        return "kept"

    @registry.step
    async def after(state: str) -> str:
        return state + "!"

    registry.workflow("work", [stubborn, after])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.05)) as executor:
        await executor.start("work", id="a")
        await begun.wait()
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == "kept!"


async def test_one_that_swallows_it_longer_than_anybody_waits_keeps_it_too(store, monkeypatch):
    """Its task is told to end then: again and again, and it is its task that stores what the step returns."""
    monkeypatch.setattr(drain, "LAST_WORDS", 0.0)
    registry = StepRegistry()
    begun, calls = anyio.Event(), []

    def is_told() -> bool:
        asyncio_runs = sniffio.current_async_library() == "asyncio"
        return executor.runners["a"]._told_to_end if asyncio_runs else not executor.tasks_go_on

    @registry.step
    async def stubborn(state: Any) -> str:
        calls.append("stubborn")
        begun.set()
        while not is_told():
            with contextlib.suppress(BaseException):
                await anyio.sleep_forever()
        return "kept"

    @registry.step
    async def after(state: str) -> str:
        return state + "!"

    registry.workflow("work", [stubborn, after])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.0)) as executor:
        await executor.start("work", id="a")
        await begun.wait()
    head = (await store.load("a")).head
    assert (head.state, head.owner, head.step) == ("running", None, 1)
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == "kept!"
    assert calls == ["stubborn"]


async def test_a_step_that_is_told_to_end_with_all_others_is_given_back_and_repeats_its_attempt(store, monkeypatch):
    """It never hears of the drain: nothing of it is stored, neither a failure nor a time-out."""
    monkeypatch.setattr(drain, "LAST_WORDS", 0.0)
    monkeypatch.setattr(Runner, "interrupt", lambda self: None)
    registry = StepRegistry()
    begun, attempts = anyio.Event(), []

    @registry.step(timeout=60)
    async def cleans_up_badly(ctx: StepContext, state: Any) -> str:
        attempts.append(ctx.attempt)
        begun.set()
        if len(attempts) > 1:
            return "done"
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("what it held was gone already")

    registry.workflow("work", [cleans_up_badly])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.0)) as executor:
        await executor.start("work", id="a")
        await begun.wait()
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == "done"
        assert (await executor.get("a")).error is None


async def test_a_thread_that_goes_on_keeps_nobody_from_leaving(store):
    registry = StepRegistry()
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    @registry.step
    def work(ctx: SyncStepContext, state: Any) -> str:
        begun.set()
        let_go.wait()
        try:
            ctx.checkpoint()
        except StepInterrupted:
            ended.set()
        return "thrown away"

    registry.workflow("work", [work])
    async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.05)) as executor:
        await executor.start("work", id="a")
        await anyio.to_thread.run_sync(begun.wait)
    head = (await store.load("a")).head
    assert (head.state, head.owner, head.step) == ("running", None, 0)
    let_go.set()
    await anyio.to_thread.run_sync(ended.wait)


async def test_a_second_drain_waits_for_the_first(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()
    left: list[int] = []

    @registry.step
    async def work(state: Any) -> Any:
        begun.set()
        await go.wait()

    async def drain() -> None:
        await executor.drain()
        left.append(len(executor.runners))

    registry.workflow("work", [work])
    async with Executor(registry, store=store) as executor, anyio.create_task_group() as tasks:
        await executor.start("work", id="a")
        await begun.wait()
        tasks.start_soon(drain)
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        assert left == []
        go.set()
    assert left == [0, 0]
    assert (await store.load("a")).head.state == "completed"


async def test_a_drain_that_was_cancelled_is_taken_over_by_who_leaves(store):
    """`serve` in a task of its own: what runs has all its time, although that task has ended."""
    registry = StepRegistry()
    begun, left, go = anyio.Event(), anyio.Event(), anyio.Event()

    @registry.step
    async def work(state: Any) -> str:
        begun.set()
        await go.wait()
        return "kept"

    async def release() -> None:
        await left.wait()
        await anyio.wait_all_tasks_blocked()
        go.set()

    registry.workflow("work", [work])
    async with anyio.create_task_group() as outside:
        outside.start_soon(release)
        async with Executor(registry, store=store) as executor:
            await executor.start("work", id="a")
            await begun.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(executor.drain)
                await anyio.wait_all_tasks_blocked()
                assert executor.draining
                tasks.cancel_scope.cancel()
            left.set()
    assert (await store.load("a")).head.state == "completed"


async def test_a_drain_that_takes_longer_says_for_how_long_at_most(store, monkeypatch, caplog):
    """To who sits before the terminal: in figures that can be read."""
    monkeypatch.setattr(drain, "SOON", 0.0)
    registry, begun, go = StepRegistry(), anyio.Event(), anyio.Event()

    @registry.step
    async def work(state: Any) -> None:
        begun.set()
        await go.wait()

    async def release() -> None:
        while not caplog.messages:
            await store.ping()
        go.set()

    registry.workflow("work", [work])
    async with anyio.create_task_group() as tasks, Executor(registry, store=store) as executor:
        await executor.start("work")
        await begun.wait()
        tasks.start_soon(release)
    [line] = caplog.messages
    assert re.search(r"executor\.draining +executions=1 seconds_left=\d+\.\d$", line), line


SERVER = """
    import sys
    import anyio
    from longrun import Executor, ExecutorConfig, StepRegistry

    registry = StepRegistry()

    @registry.step
    async def work(state: dict) -> dict:
        if sys.argv[3] == "serve":  # which listens by now
            print("begun", flush=True)
        begun.set()
        await anyio.sleep_forever()

    registry.workflow("work", [work])

    async def main() -> None:
        global begun
        begun = anyio.Event()
        config = ExecutorConfig(drain_timeout=float(sys.argv[2]))
        async with Executor(registry, store="sqlite:///work.db", config=config) as executor:
            await executor.start("work", {}, id="a")
            if sys.argv[3] == "serve":
                await executor.serve()
                print("drained", flush=True)
            else:
                await begun.wait()
                print("begun", flush=True)  # not in the step: trio raises Ctrl-C in the task that runs
                await anyio.sleep_forever()

    try:
        anyio.run(main, backend=sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """


@pytest.fixture(params=["asyncio", "trio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def serving(directory: Path, loop: str, drain: float, how: str) -> Iterator[subprocess.Popen[str]]:
    """A real process in the middle of its step."""
    (directory / "program.py").write_text(textwrap.dedent(SERVER))
    with subprocess.Popen(
        [sys.executable, "program.py", loop, str(drain), how],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "LONGRUN_RUN_DIR": str(directory / "run"), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def left_behind(directory: Path) -> tuple[str, str | None]:
    async def look() -> tuple[str, str | None]:
        async with open_store(f"sqlite:///{directory}/work.db") as store:
            head = (await store.load("a")).head
            return str(head.state), head.owner

    return anyio.run(look)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_drains_at_a_signal(tmp_path, loop, number):
    with serving(tmp_path, loop, 0.1, "serve") as process:
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert (output, errors, process.returncode) == ("drained\n", "", 0)
    assert left_behind(tmp_path) == ("running", None)


def test_a_second_signal_during_the_drain_ends_the_patience(tmp_path, loop):
    with serving(tmp_path, loop, 3600, "serve") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("drained\n", 0)
    assert left_behind(tmp_path) == ("running", None)


def test_a_second_control_c_during_the_drain_ends_the_program_and_costs_nothing(tmp_path, loop):
    """Without `serve` the program is interrupted like any other; what it ran is taken up by the next one."""
    with serving(tmp_path, loop, 3600, "sleep") as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)  # it drains; a third one would be too many, since the second is still obeyed
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert output == "interrupted\n"
    assert left_behind(tmp_path) == ("running", None)


def test_serving_in_a_thread_is_refused_in_plain_words(tmp_path: Path) -> None:
    """Signals reach the main thread alone."""

    async def main() -> None:
        async with Executor(StepRegistry(), store=f"file:{tmp_path}") as executor:
            with pytest.raises(ConfigError, match="the main one"):
                await executor.serve()

    errors: list[BaseException] = []

    def work() -> None:
        try:
            anyio.run(main)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
