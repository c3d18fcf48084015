"""A client looks and controls from anywhere, and blocks where a script has no event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import (
    ConfigError,
    EventType,
    ExecutionNotFoundError,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    MemoryCheckpointStore,
    Sleep,
    StepRegistry,
    WaitFor,
    Worker,
)
from longrun.client import Client, client_sync
from longrun.stored import QUEUE_WORKFLOW
from longrun.testing import CALM, ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash

registry = StepRegistry()


@registry.step
async def ask(state: dict[str, Any]) -> WaitFor:
    return WaitFor("go", state)


@registry.step
async def note(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "noted": True}


@attrs.frozen
class Order:
    amount: int


@registry.step
async def price(order: Order) -> WaitFor:
    return WaitFor("go", order)


registry.workflow("asks", [ask, note])
registry.workflow("prices", [price, price])


async def run_to_the_question(url: str, id: str) -> None:
    async with Executor(registry, store=url, config=ExecutorConfig(auto_resume=False)) as executor:
        await (await executor.start("asks", {"a": 1}, id=id)).wait("waiting")


async def run_to_the_end(url: str, id: str) -> None:
    async with Executor(registry, store=url, config=ExecutorConfig(auto_resume=False)) as executor:
        await (await executor.start("asks", {}, id=id)).result()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'store'}"


def test_a_script_controls_without_an_event_loop(url: str) -> None:
    anyio.run(run_to_the_question, url, "x")
    with client_sync(url) as client:
        assert [one.id for one in client.list()] == ["x"]
        client.pause("x", hold=True)
        assert client.get("x").hold
        client.resume("x")
        client.signal("x", "go", key="once")
        with pytest.raises(ExecutionNotFoundError):
            client.pause("y")
    anyio.run(run_to_the_end, url, "x")


def test_a_blocking_client_that_was_left_says_so(url: str) -> None:
    with client_sync(url) as client:
        pass
    with pytest.raises(ConfigError, match="left already"):
        client.list()


def test_a_fork_is_told_that_it_needs_a_client_of_its_own(url: str) -> None:
    """And leaves this one alone: its threads are not there."""
    program = f"""
import os, sys
from longrun.client import client_sync
from longrun.errors import ConfigError
with client_sync({url!r}) as client:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), client.list())
    else:
        try:
            client.list()
        except ConfigError as error:
            sys.exit(7 if "in a forked process" in str(error) else 8)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "7 []\n"


def test_a_handle_of_a_blocking_client_blocks_too(url: str) -> None:
    with client_sync(url) as client:
        run = client.submit("asks", {"a": 1}, id="x")
        assert run.id == "x"
        assert repr(run).startswith("<blocking ")
        assert run.info().state == "initialized"
        run.cancel("no longer wanted")
        assert run.wait().state == "cancelled"


def test_events_are_a_plain_iterator_that_ends_with_the_execution(url: str) -> None:
    anyio.run(run_to_the_question, url, "x")
    with client_sync(url) as client:
        events = client.handle("x").events()
        client.cancel("x")
        assert [event.type for event in events][-1] is EventType.EXECUTION_CANCELLED


async def test_a_state_that_does_not_fit_the_step_blocks_the_execution_and_says_why(url: str) -> None:
    """A client knows no types: whoever runs the execution finds out, and the state that it had stays in the history."""
    async with Executor(registry, store=url) as executor, Client(url) as client:
        with anyio.fail_after(30):
            run = await executor.start("prices", Order(1), id="x")
            await run.wait("waiting")
            await run.pause()
            await client.resume("x", state={"amount": "much"})
            blocked = await run.wait("blocked")
            assert blocked.reason is not None
            assert "amount" in blocked.reason
            assert [one.state for one in await executor.history("x")] == [Order(1), Order(1)]
            await executor.resume("x", state=Order(7))
            assert (await run.info()).state == "waiting", "it had waited for a signal, which has not come"


async def test_a_handle_is_of_an_execution_that_exists(url: str) -> None:
    async with Executor(registry, store=url) as executor:
        with pytest.raises(ExecutionNotFoundError):
            await executor.handle("nobody")
        await executor.submit("asks", {}, id="x", delay=3600)
        assert (await (await executor.handle("x")).info()).state == "initialized"


@pytest.mark.parametrize("workflow", [None, "", 5, ["ask"], "a\nb", "x" * 201], ids=repr)
async def test_a_workflow_is_a_name(workflow: Any) -> None:
    async with Client("memory:") as client:
        with pytest.raises(ConfigError, match="workflow"):
            await client.submit(workflow, {})
        assert await client.list() == []


async def test_who_submits_steps_is_told_that_a_client_knows_names_only() -> None:
    async with Client("memory:") as client:
        with pytest.raises(ConfigError, match="give its name: a client has no registry"):
            await client.submit([ask, note], {})


def test_a_blocking_client_shows_what_it_can_do_and_how(url: str) -> None:
    with client_sync(url) as client:
        assert {"submit", "pause", "list_queues"} <= {*dir(client)}
        assert client.submit.__doc__ == Client.submit.__doc__
        assert "info" in dir(client.submit("asks", {}))


async def test_the_records_of_queues_are_nobodys_workflow(url: str) -> None:
    async with Client(url) as client:
        with pytest.raises(ConfigError, match="kept for longrun's own records"):
            await client.submit(QUEUE_WORKFLOW, {})


def test_a_script_watches_and_waits_for_so_long(url: str) -> None:
    anyio.run(run_to_the_question, url, "x")
    with client_sync(url) as client:
        for wait in (client.handle("x").result, client.handle("x").wait):
            with pytest.raises(TimeoutError, match=r"'x' has not come to that after 0\.01 s; it goes on"):
                wait(timeout=0.01)
        events = client.watch("x")
        client.cancel("x")
        assert [event.type for event in events][-1] is EventType.EXECUTION_CANCELLED
        assert client.handle("x").wait(timeout=30).state == "cancelled"
        for again in (client.retry, client.resume):
            with pytest.raises(InvalidStateError, match="it is cancelled; use fork"):
                again("x")


@pytest.mark.parametrize("delay", [float("inf"), float("nan"), -1, "soon", True], ids=repr)
async def test_a_delay_that_makes_no_sense_is_refused(url: str, delay: Any) -> None:
    async with Client(url) as client:
        with pytest.raises(ConfigError, match="delay"):
            await client.submit("asks", {}, delay=delay)


async def test_a_delay_beyond_all_time_is_as_long_as_time(url: str) -> None:
    async with Client(url) as client:
        await client.submit("asks", {}, id="x", delay=1e18)
        (found,) = await client.list()
        assert found.due is not None
        assert found.due.year == 9999


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("created_after", "2026-01-01"),
        ("created_before", 5),
        ("workflow", 5),
        ("workflow", ["a", None]),
        ("queue", 5),
        ("text", 5),
        ("metadata", ["a"]),
        ("limit", 10**30),
        ("limit", 0),
    ],
)
async def test_a_list_says_which_of_its_arguments_is_wrong(name: str, value: Any) -> None:
    async with Client("memory:") as client:
        with pytest.raises(ConfigError, match=name):
            await client.list(**{name: value})


async def test_what_no_living_worker_knows_says_so(url: str) -> None:
    other = StepRegistry()
    other.workflow("other", [other.step(note)])
    async with Client(url) as client:
        await client.submit("asks", {}, id="x", queue="slow")
        await client.submit("asks", {}, id="later", delay=3600)
        waits = "It waits for a worker that knows 'asks' on queue 'slow'; none is alive."
        assert (await client.get("x")).reason == waits
        async with Worker(other, store=url):
            assert (await client.get("x")).reason == waits
            async with Worker(registry, store=url, queues=["fast"]):
                assert (await client.get("x")).reason == waits
        assert (await client.get("later")).reason is None
        async with Worker(registry, store=url):
            found = await client.handle("x").wait("waiting")
            assert (found.reason, (await client.get("x")).reason) == (None, None)


async def test_what_is_not_due_yet_by_the_clock_waits_for_nobody() -> None:
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    async with Client(store, clock=clock, config=CALM) as client:
        run = await client.submit("asks", {}, delay=3600)
        assert (await run.info()).reason is None
        clock.advance(3600)
        assert (await run.info()).reason == "It waits for a worker that knows 'asks' on queue 'default'; none is alive."


async def test_what_is_due_or_left_by_the_dead_and_no_living_worker_serves_says_so(url: str) -> None:
    """A signal that nobody is there to take it for, a sleep that is over, and a step whose process died."""
    program, begun = StepRegistry(), anyio.Event()

    async def nap(state: Any) -> Sleep:
        return Sleep(0.0, state)

    async def work(state: Any) -> None:
        begun.set()
        await anyio.sleep_forever()

    program.workflow("naps", [nap, note])
    program.workflow("works", [work])
    program.workflow("asks", [ask, note])
    elsewhere = Worker(program, store=url, queues=["elsewhere"])

    async def reasons() -> list[bool]:
        return [(await client.get(id)).reason is not None for id in ("asks", "naps", "works")]

    async with Client(url) as client:
        async with CrashableExecutor(program, store=url) as doomed:
            doomed.sweeper.claims._states = frozenset()  # what it parks is for others
            for name in ("asks", "naps", "works"):
                run = await doomed.start(name, {}, id=name)
                await (begun.wait() if name == "works" else run.wait("waiting"))
            assert await reasons() == [False, False, False], "somebody is there"
            await crash(doomed)
        assert await reasons() == [False, True, True], "the signal has not come"
        await client.signal("asks", "go")
        async with elsewhere:
            assert await reasons() == [True, True, True]
        async with Worker(program, store=url, config=ExecutorConfig(drain_timeout=0.0)) as worker:
            await client.handle("asks").result()
            await client.handle("naps").result()
            await client.handle("works").wait("running")
            while "works" not in worker.runners:
                await anyio.lowlevel.checkpoint()
            assert await reasons() == [False, False, False]


async def test_what_is_submitted_by_name_has_the_version_of_whoever_first_runs_it(url: str) -> None:
    newer, newest = StepRegistry(), StepRegistry()
    for one, version in ((newer, "7"), (newest, "8")):
        one.workflow("asks", [one.step(ask), one.step(note)], version=version)
    async with Client(url) as client:
        await client.submit("asks", {}, id="x")
        async with Worker(newer, store=url):
            await client.handle("x").wait("waiting")
        assert ((await client.get("x")).version, (await client.list())[0].version) == ("7", "7")
        async with Worker(newest, store=url):
            await client.signal("x", "go")
            assert (await client.handle("x").wait()).version == "7"


async def test_a_workflow_that_a_worker_learns_later_is_known(url: str) -> None:
    growing = StepRegistry()
    growing.step(note)
    growing.workflow("first", [note])
    async with Worker(growing, store=url) as worker, Client(url) as client:
        growing.workflow("second", ["note"])
        with anyio.fail_after(30):
            await client.submit("second", {}, id="x")
            assert (await client.handle("x").wait()).state == "completed"
        await worker.sweeper.once()
        (shown,) = [owner for owner in await client.store.owners() if owner.workflows]
        assert set(shown.workflows) == {"first", "second"}
