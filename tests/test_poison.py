"""Poison: an execution that keeps killing its process is parked, and the innocent that died with it are not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import ExecutionBlockedError, Executor, ExecutorConfig, MemoryCheckpointStore, StepContext, StepRegistry
from longrun.testing import ManualClock
from tests.crashing import PATIENCE, CrashableExecutor, crash

ROOT = Path(__file__).parent.parent


class Deadly:
    """A program whose step `poison` brings the process down, as far as this test goes."""

    def __init__(self, innocent_steps: int = 1) -> None:
        self.killed = anyio.Event()
        self.calls: list[str] = []
        self.running = 0
        self.most = 0
        self.cured = False
        self.spared = 0
        """So many of the next calls do no harm."""
        self.slow = True
        self.registry = StepRegistry()
        self.registry.register("poison", self.poison)
        self.registry.register("innocent", self.innocent)
        self.registry.workflow("poison", ["poison"])
        self.registry.workflow("innocent", ["innocent"] * innocent_steps)

    async def poison(self, ctx: StepContext, state: Any) -> str:
        self.calls.append("poison")
        if self.cured or self.spared:
            self.spared = max(0, self.spared - 1)
            return "harmless"
        self.killed.set()
        await anyio.sleep_forever()
        return "never"

    async def innocent(self, ctx: StepContext, state: Any) -> str:
        self.calls.append(ctx.execution_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await (anyio.sleep_forever() if self.slow else anyio.lowlevel.checkpoint())
        finally:
            self.running -= 1
        return "fine"


async def die_of_it(program: Deadly, store: MemoryCheckpointStore, config: ExecutorConfig, *ids: str) -> None:
    """One life of the program: up to the moment at which the poison works."""
    program.killed = anyio.Event()
    program.calls.clear()
    async with CrashableExecutor(program.registry, store=store, config=config) as executor:
        for id in ids:
            await executor.start("poison" if id == "poison" else "innocent", id=id)
        with anyio.fail_after(20):
            await program.killed.wait()
        await crash(executor)


async def test_after_max_crashes_it_is_blocked_and_resume_frees_it():
    """I11"""
    store, program = MemoryCheckpointStore(), Deadly()
    config = ExecutorConfig(max_crashes=3)
    await die_of_it(program, store, config, "poison")
    for _ in range(2):
        await die_of_it(program, store, config)
    program.calls.clear()
    async with Executor(program.registry, store=store, config=config) as executor:
        run = await executor.handle("poison")
        with pytest.raises(ExecutionBlockedError, match="died 3 times without progress"):
            await run.result()
        assert program.calls == []
        assert (await executor.auto_resume_all()).blocked
        program.cured = True
        await run.resume()
        assert await run.result() == "harmless"


async def test_a_sweep_that_finds_it_blocks_it_too():
    store, program, clock = MemoryCheckpointStore(), Deadly(), ManualClock()
    config = ExecutorConfig(max_crashes=1)
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=store, config=config, clock=clock) as living:
            await die_of_it(program, store, config, "poison")
            program.calls.clear()
            clock.advance(config.heartbeat_interval)
            await living.sweeper.once()
            with pytest.raises(ExecutionBlockedError, match="died 1 times without progress"):
                await (await living.handle("poison")).result()
            await living.wait_idle()
    assert program.calls == []


async def test_progress_clears_the_count():
    store, program = MemoryCheckpointStore(), Deadly()
    config = ExecutorConfig(max_crashes=2)
    registry = program.registry

    @registry.step
    async def well(state: Any) -> Any:
        return state

    registry.workflow("mixed", [well, "poison", well, "poison"])

    async def die(*, spared: int) -> None:
        program.killed, program.spared = anyio.Event(), spared
        async with CrashableExecutor(registry, store=store, config=config) as executor:
            if not await store.exists("a"):
                await executor.start("mixed", id="a")
            with anyio.fail_after(PATIENCE):
                await program.killed.wait()
            await crash(executor)

    await die(spared=0)
    assert ((await store.load("a")).head.step, (await store.load("a")).head.crashes) == (1, 0)
    await die(spared=1)  # claimed with one crash, it comes as far as the other poison
    assert ((await store.load("a")).head.step, (await store.load("a")).head.crashes) == (3, 0)
    program.cured = True
    async with CrashableExecutor(registry, store=store, config=config) as executor:
        await (await executor.handle("a")).result()
        assert (await store.load("a")).head.crashes == 0


@pytest.mark.parametrize("place", [0, 10, 20])
async def test_suspects_run_one_at_a_time_and_those_that_wait_are_not_accused(place):
    """I11: twenty innocent executions die with the poison again and again; only the poison is blocked."""
    store = MemoryCheckpointStore()
    config = ExecutorConfig(max_crashes=4)
    program = Deadly()
    innocents = [f"i{n}" for n in range(20)]
    await die_of_it(program, store, config, *innocents[:place], "poison", *innocents[place:])
    await die_of_it(program, store, config)
    deaths, program.slow = 2, False
    results: list[Any] = []
    while True:
        program.killed, program.most = anyio.Event(), 0
        program.calls.clear()
        async with CrashableExecutor(program.registry, store=store, config=config) as executor:
            state = (await executor.get("poison")).state
            if state == "blocked":
                results = [await (await executor.handle(id)).result() for id in innocents]
                break
            with anyio.fail_after(20):
                await program.killed.wait()
            assert program.most <= 1
            await crash(executor)
            deaths += 1
    assert results == ["fine"] * 20
    assert deaths == 4


async def test_a_suspect_that_waits_for_its_turn_can_be_cancelled():
    store = MemoryCheckpointStore()
    config = ExecutorConfig(max_crashes=10)
    program = Deadly()
    await die_of_it(program, store, config, "poison", "i0", "i1")
    await die_of_it(program, store, config)
    program.calls.clear()
    async with CrashableExecutor(program.registry, store=store, config=config) as executor:
        while not program.calls or len(accused(executor)) < 2:
            await store.ping()
        for id in accused(executor):
            await executor.cancel(id)
            assert (await executor.get(id)).state == "cancelled"
        await crash(executor)


def accused(executor: Executor) -> list[str]:
    """The suspects that wait for their turn."""
    return [id for id, runner in executor.runners.items() if runner.seat.accused]


async def test_a_clean_shutdown_is_no_crash():
    store, program = MemoryCheckpointStore(), Deadly()
    config = ExecutorConfig(max_crashes=2, drain_timeout=0)
    for n in range(4):
        program.killed = anyio.Event()
        async with Executor(program.registry, store=store, config=config) as executor:
            if n == 0:
                await executor.start("poison", id="a")
            await program.killed.wait()
        head = (await store.load("a")).head
        assert (head.state, head.owner, head.crashes) == ("running", None, 0)


PROGRAM = """
    import os, sys
    import anyio
    from longrun import Executor, ExecutorConfig, StepRegistry

    registry = StepRegistry()

    @registry.step
    async def wait(state: dict) -> dict:
        await all_started.wait()
        await anyio.sleep(0.05)
        return state

    @registry.step
    async def die(state: dict) -> dict:
        os._exit(9)

    @registry.step
    async def good(state: dict) -> dict:
        await anyio.sleep(0.2)
        return state

    registry.workflow("bad", [wait, die])
    registry.workflow("good", [good, good])

    async def main() -> None:
        global all_started
        all_started = anyio.Event()
        async with Executor(registry, store="file:kept", config=ExecutorConfig(max_crashes=3)) as executor:
            if not await executor.list():
                for id, workflow in (("b", "bad"), ("g", "good"), ("h", "good")):
                    await executor.start(workflow, {}, id=id)
            all_started.set()
            await executor.wait_idle()
            print(sorted((one.id, one.state.value) for one in await executor.list()))

    anyio.run(main)
    """


def test_who_was_claimed_along_with_a_real_killer_is_not_blamed(tmp_path):
    """I11: it is the first of them to run, and may end the process before it is noted that the others only waited."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    env = {"PYTHONPATH": str(ROOT), "LONGRUN_RUN_DIR": str(tmp_path / "run"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    for _ in range(5):
        assert ran.returncode in (0, 9), ran.stderr
        if ran.returncode == 0:
            break
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "[('b', 'blocked'), ('g', 'completed'), ('h', 'completed')]\n"
