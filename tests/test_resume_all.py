"""Auto-resume: what a crash left is taken up, once, by whoever knows it; the report says what became of each."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import (
    CorruptDataError,
    ExecutionBlockedError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    ResumeReport,
    Sleep,
    StepContext,
    StepRegistry,
)
from longrun.client import Client
from longrun.runner import Runner
from longrun.startup import STARTUP_STATES
from longrun.testing import ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash

ROOT = Path(__file__).parent.parent
NO_RESUME = ExecutorConfig(auto_resume=False)


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


class Program:
    """Two steps; the second one waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("first", self.first)
        self.registry.register("second", self.second)
        self.registry.workflow("work", ["first", "second"])

    async def first(self, ctx: StepContext, state: int) -> int:
        self.calls.append(f"first {ctx.execution_id}")
        return state + 1

    async def second(self, ctx: StepContext, state: int) -> int:
        self.calls.append(f"second {ctx.execution_id}")
        self.begun.set()
        await self.go.wait()
        return state + 1


async def left(store: MemoryCheckpointStore, *ids: str, program: Program | None = None) -> Program:
    """A program that crashed in the second step of these executions."""
    program = program or Program()
    async with CrashableExecutor(program.registry, store=store) as dying:
        for id in ids:
            program.begun = anyio.Event()
            await dying.start("work", 1, id=id)
            await program.begun.wait()
        await crash(dying)
    program.go.set()
    return program


async def test_entering_takes_up_what_a_crash_left_and_a_finished_step_never_runs_again(store):
    """I2, I4"""
    program = await left(store, "a", "b")
    async with Executor(program.registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == 3
        assert await (await executor.handle("b")).result() == 3
    assert sorted(program.calls) == ["first a", "first b", "second a", "second a", "second b", "second b"]


async def test_the_report_lists_what_was_resumed(store):
    program = await left(store, "a", "b", "c")
    async with Executor(program.registry, store=store, config=NO_RESUME) as executor:
        report = await executor.auto_resume_all()
        assert sorted(report.resumed) == ["a", "b", "c"]
        assert (report.skipped, report.blocked, len(report)) == ({}, {}, 3)
        again = await executor.auto_resume_all()
        assert again.resumed == ()
        for id in "abc":
            assert await (await executor.handle(id)).result() == 3


@pytest.mark.parametrize("finished", [False, True])
async def test_what_the_sweep_takes_before_the_pass_is_not_loaded_again(store, finished):
    """They begin together. A thousand that are missing from a claim would be a thousand loads, one by one."""
    program = await left(store, "a", "b", "c")
    if not finished:
        program.go = anyio.Event()
    swept, loads = anyio.Event(), []
    find, claim, load = store.find, store.claim, store.load

    async def found_too_late(query):
        page = await find(query)
        if page and query.states == STARTUP_STATES:
            await swept.wait()
            while finished and (await executor.count()).get(ExecutionState.RUNNING):
                await anyio.lowlevel.checkpoint()
        return page

    async def claimed(asked):
        given = await claim(asked)
        if asked.ids is None and given:
            swept.set()
        return given

    async def loaded(id):
        loads.append(id)
        return await load(id)

    store.find, store.claim, store.load = found_too_late, claimed, loaded
    executor = Executor(program.registry, store=store)
    async with executor:
        assert loads == []
        program.go.set()
        await executor.wait_idle()
        assert await executor.count() == {"completed": 3}


async def test_what_the_dead_left_is_taken_without_a_look_at_it(store, monkeypatch):
    """A thousand that are listed first and claimed then would be read twice."""
    program = await left(store, "a", "b", "c")
    program.go = anyio.Event()
    find, looked = store.find, []

    async def finding(query):
        page = await find(query)
        looked.extend(page)
        return page

    monkeypatch.setattr(store, "find", finding)
    monkeypatch.setattr("longrun.startup.BATCH", 2)
    async with Executor(program.registry, store=store, config=NO_RESUME) as executor:
        report = await executor.auto_resume_all()
        assert sorted(report.resumed) == ["a", "b", "c"]
        assert looked == []
        program.go.set()
        await executor.wait_idle()


@pytest.mark.parametrize("registered", [True, False])
async def test_what_others_have_is_looked_at_beside_what_the_dead_left(store, registered):
    """Who lives keeps his; one whose name nobody knows any more, after a power cut say, is dead too."""
    program = await left(store, "a", "b")
    last = Program()
    async with CrashableExecutor(last.registry, store=store, config=NO_RESUME) as dying:
        await dying.start("work", 1, id="c")
        await last.begun.wait()
        await crash(dying)
    if not registered:
        async with store:
            await store.unregister(dying.owner)
    living = Program()
    async with Executor(living.registry, store=store, config=NO_RESUME) as alive:
        await alive.start("work", 1, id="d")
        await living.begun.wait()
        async with Executor(program.registry, store=store, config=NO_RESUME) as executor:
            report = await executor.auto_resume_all()
            assert sorted(report.resumed) == ["a", "b", "c"]
            assert report.skipped == {"d": f"owned by {alive.owner}, which is alive"}
            await executor.wait_idle()
            assert await executor.count() == {"completed": 3, "running": 1}
        living.go.set()
        await alive.wait_idle()


async def test_what_waits_for_room_is_swept_when_the_pass_is_over(store):
    """I4: heartbeats are an hour apart here, and the sweep leaves the dead to the pass while that lasts."""
    program = await left(store, "a", "b")
    async with Client(store) as client:
        await client.limit_queue("default", concurrency=1)
    config = ExecutorConfig(heartbeat_interval=3600.0, lease_ttl=36_000.0)
    async with Executor(program.registry, store=store, config=config) as executor:
        with anyio.fail_after(PATIENCE):
            for id in "ab":
                assert await (await executor.handle(id)).result() == 3


async def test_what_another_living_executor_runs_is_left_alone(store):
    """I3"""
    program = Program()
    async with Executor(program.registry, store=store) as one:
        run = await one.start("work", 1, id="a")
        await program.begun.wait()
        async with Executor(program.registry, store=store) as two:
            report = await two.auto_resume_all()
            assert report.resumed == ()
            assert report.skipped == {"a": f"owned by {one.owner}, which is alive"}
        program.go.set()
        assert await run.result() == 3
    assert program.calls == ["first a", "second a"]


async def test_workflows_of_other_programs_are_left_as_they_are(store):
    await left(store, "a")
    async with Executor(StepRegistry(), store=store) as stranger:
        report = await stranger.auto_resume_all()
        assert report.skipped == {"a": "not registered here"}
        assert (await stranger.get("a")).state == "running"


async def test_a_list_of_steps_is_resumed_by_whoever_has_those_steps(store):
    program = Program()
    async with CrashableExecutor(program.registry, store=store) as dying:
        await dying.start(["first", "second"], 1, id="a")
        await program.begun.wait()
        await crash(dying)
    program.go.set()
    stranger = StepRegistry()
    stranger.register("first", program.first)
    async with Executor(stranger, store=store) as executor:
        assert (await executor.auto_resume_all()).skipped == {"a": "not registered here"}
    async with Executor(program.registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == 3


async def test_many_executors_share_what_was_left_and_none_is_run_twice(store):
    """I3, I4"""
    program = Program()
    program.go.set()
    ids = [f"e{n}" for n in range(30)]
    hang = Program()
    async with CrashableExecutor(hang.registry, store=store) as dying:
        for id in ids:
            await dying.start("work", 1, id=id)
        await hang.begun.wait()
        await crash(dying)
    async with (
        Executor(program.registry, store=store, config=NO_RESUME) as one,
        Executor(program.registry, store=store, config=NO_RESUME) as two,
    ):
        reports = []

        async def resume(executor: Executor) -> None:
            reports.append(await executor.auto_resume_all())

        async with anyio.create_task_group() as tasks:
            for executor in (one, two, one, two):
                tasks.start_soon(resume, executor)
        resumed = [id for report in reports for id in report.resumed]
        assert sorted(resumed) == sorted(ids)
        for id in ids:
            assert await (await one.handle(id)).result() == 3
    second = [call for call in program.calls if call.startswith("second")]
    assert len(second) == len(set(second)) == 30


async def test_the_sweep_takes_up_what_a_dying_process_leaves(store):
    """I4: within a heartbeat, while this one lives."""
    clock = ManualClock()
    program = Program()
    async with Executor(program.registry, store=store, clock=clock) as survivor:
        await left(store, "a", program=program)
        while (await survivor.get("a")).state != "completed":
            clock.advance(5)
            await survivor.sweeper.once()
        assert await (await survivor.handle("a")).result() == 3


async def test_without_auto_resume_nothing_is_taken_up_but_what_was_parked_goes_on(store):
    clock = ManualClock(autojump=True)
    program = await left(store, "a")

    async def nap(state: int) -> Sleep:
        return Sleep(10, state)

    program.registry.workflow("nap", [nap, "first"])
    config = ExecutorConfig(auto_resume=False, heartbeat_interval=600, lease_ttl=1800)
    async with Executor(program.registry, store=store, config=config, clock=clock) as executor:
        assert await (await executor.start("nap", 1)).result() == 2
        assert (await executor.get("a")).state == "running"


async def test_an_unknown_step_blocks_visibly_and_the_next_pass_looks_again(store):
    program = await left(store, "a", "b")
    renamed = StepRegistry()
    renamed.register("first", program.first)
    renamed.workflow("work", ["first"])
    async with Executor(renamed, store=store) as executor:
        info = await executor.get("a")
        assert info.state == "blocked"
        assert "no step named 'second'" in str(info.reason)
        with pytest.raises(ExecutionBlockedError, match="no step named 'second'"):
            await (await executor.handle("a")).result()
        report = await executor.auto_resume_all()
        assert set(report.blocked) == {"a", "b"}
        rows = await executor.steps("a")
        assert [row.kind for row in rows] == ["start", "step", "block"]
    async with Executor(program.registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == 3


async def test_a_state_that_no_longer_fits_its_step_blocks_that_execution_alone(store):
    program = await left(store, "bad", "good")
    changed = StepRegistry()

    @attrs.frozen
    class Now:
        value: int

    async def second(state: Any) -> Any:
        return "typed"

    async def first(state: Any) -> Any:
        return state

    second.__annotations__ = {"state": Now}
    changed.workflow("work", [first, second])
    async with Executor(changed, store=store, config=NO_RESUME) as executor:
        report = await executor.auto_resume_all()
        assert set(report.blocked) == {"bad", "good"}
        assert "does not fit" in report.blocked["bad"]
        await executor.resume("bad", state=Now(5))
        assert await (await executor.handle("bad")).result() == "typed"
    async with Executor(program.registry, store=store) as executor:
        assert await (await executor.handle("good")).result() == 3


async def test_the_stored_step_list_rules_what_is_in_flight(store):
    program = await left(store, "a")

    async def extra(state: int) -> int:
        raise AssertionError

    changed = StepRegistry()
    for name in ("first", "second"):
        changed.register(name, getattr(program, name))
    changed.workflow("work", ["first", extra, "second", extra], version="2")
    async with Executor(changed, store=store) as executor:
        run = await executor.handle("a")
        assert await run.result() == 3
        info = await run.info()
        assert (info.step_names, info.version) == (("first", "second"), "1")


async def test_what_a_released_owner_had_is_found_by_the_pass_at_start(store):
    """An owner that is not registered any more counts as dead."""
    program = await left(store, "a")
    owner = (await store.load("a")).head.owner
    assert owner is not None
    async with store:
        await store.unregister(owner)
    async with Executor(program.registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == 3


async def held(store: MemoryCheckpointStore) -> Program:
    """A program that crashed while it held a paused execution."""
    program = Program()
    async with CrashableExecutor(program.registry, store=store) as dying:
        run = await dying.start("work", 1, id="a")
        await program.begun.wait()
        await run.pause(hold=True, interrupt=True)
        assert (await run.info()).owner == dying.owner
        await crash(dying)
    program.go.set()
    return program


@pytest.mark.parametrize("entered", ["after", "before"])
async def test_a_dead_owner_of_what_is_held_is_forgotten_and_it_stays_held(store, entered):
    """I16: else every sweep would look after him for ever."""
    registry = (program := await held(store)).registry if entered == "after" else Program().registry
    async with Executor(registry, store=store, clock=ManualClock()) as executor:
        if entered == "before":
            program = await held(store)
            executor.sweeper.dead._look_at = -1.0  # as after half a heartbeat
            await executor.sweeper.once()
        assert [owner.id for owner in await store.owners()] == [executor.owner]
        info = await executor.get("a")
        assert (info.state, info.hold, info.owner) == ("paused", True, None)
    async with Executor(program.registry, store=store) as executor:
        await executor.resume("a")
        assert await (await executor.handle("a")).result() == 3


async def test_one_that_cannot_be_read_does_not_stop_the_others(store):
    program = await left(store, "a", "b", "c")
    backend: Any = store.backend
    claim = backend.claim

    def damaged(request: Any) -> Any:
        taken = claim(request)
        if any(loaded.definition.id == "b" for loaded in taken):
            raise CorruptDataError("checkpoint 2 of 'b'", "its checksum is wrong")
        return taken

    backend.claim = damaged
    async with Executor(program.registry, store=store, config=NO_RESUME) as executor:
        report = await executor.auto_resume_all()
        assert sorted(report.resumed) == ["a", "c"]
        assert set(report.blocked) == {"b"}
        for id in "ac":
            assert await (await executor.handle(id)).result() == 3
        info = await executor.get("b")
        assert (info.state, info.owner) == ("blocked", None)
        assert "checksum" in str(info.reason)
        assert await (await executor.start("work", 5, id="d")).result() == 7
        backend.claim = claim
        assert (await executor.auto_resume_all()).resumed == ("b",)
        assert await (await executor.handle("b")).result() == 3


PROGRAM = """
    import sys
    import anyio
    from longrun import Executor, StepContext, StepRegistry

    registry = StepRegistry()

    @registry.step
    async def first(state: int) -> int:
        return state + 1

    @registry.step
    async def second(ctx: StepContext, state: int) -> int:
        print("begun", flush=True)
        await anyio.sleep_forever()

    registry.workflow("work", [first, second])

    async def main() -> None:
        async with Executor(registry, store=sys.argv[1]) as executor:
            await executor.start("work", 1, id="a")
            await anyio.sleep_forever()

    anyio.run(main)
    """


@pytest.mark.parametrize("url", ["sqlite:///{}/work.db", "file:{}/work"])
async def test_a_living_executor_takes_up_what_a_killed_process_ran(tmp_path, url):
    """I1, I2, I4: a real process and SIGKILL; the survivor sees the free lock, not the end of the lease."""
    url = url.format(tmp_path)
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    program = Program()
    program.go.set()
    config = ExecutorConfig(heartbeat_interval=0.1)
    async with Executor(program.registry, store=url, config=config) as survivor:
        with subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            assert (await survivor.auto_resume_all()).resumed == ()
            process.kill()
        with anyio.fail_after(20):
            assert await (await survivor.handle("a")).result() == 3
    assert program.calls == ["second a"]


def test_a_report_is_true_if_it_tells_anything():
    """So that `if report:` does not hide what was blocked."""
    assert not ResumeReport()
    assert ResumeReport(blocked={"a": "it is damaged"})
    assert ResumeReport(skipped={"a": "not registered here"})
    assert len(ResumeReport(resumed=("a",), blocked={"b": "it is damaged"})) == 1


async def test_a_step_whose_thread_an_executor_left_behind_does_not_run_beside_itself(
    store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt in this process waits for it, whichever executor makes it."""
    registry = StepRegistry()
    begun, go, asked = threading.Event(), threading.Event(), anyio.Event()
    inside: list[int] = []
    most: list[int] = []

    @registry.step
    def slow(state: int) -> int:
        inside.append(state)
        most.append(len(inside))
        begun.set()
        go.wait(30)
        inside.pop()
        return state + 1

    usual = Runner._alone

    async def alone(runner: Runner) -> bool:
        asked.set()
        return await usual(runner)

    monkeypatch.setattr(Runner, "_alone", alone)
    registry.workflow("w", [slow])
    config = ExecutorConfig(drain_timeout=0.0)
    try:
        async with store:
            async with Executor(registry, store=store, config=config) as first:
                await first.start("w", 0, id="p")
                await anyio.to_thread.run_sync(begun.wait, 30)
            async with Executor(registry, store=store, config=config) as second:
                with anyio.fail_after(30):
                    await asked.wait()
                    go.set()
                    assert await (await second.handle("p")).result() == 1
    finally:
        go.set()
    assert most == [1, 1]
