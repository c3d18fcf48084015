"""`on_corruption="block"`: what is damaged stays blocked until somebody has seen it and says that it shall go on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import Executor, ExecutorConfig, StepRegistry
from longrun.client import Client
from longrun.plan import Planner
from tests.crashing import PATIENCE, CrashableExecutor, crash

BLOCK = ExecutorConfig(on_corruption="block")
SMALL, LARGE = 10, 10_000
"""Characters in the state. A large one is a blob."""


class Program:
    """Two steps; it is killed in the second one, and what the first one left is damaged."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.url, self.size = path, f"sqlite:///{path}", size
        self.ran: list[str] = []
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("first", self.first)
        self.registry.register("second", self.second)
        self.registry.workflow("work", ["first", "second"])

    async def first(self, state: dict[str, Any]) -> dict[str, Any]:
        self.ran.append("first")
        return {"text": "." * self.size}

    async def second(self, state: dict[str, Any]) -> int:
        self.ran.append("second")
        self.begun.set()
        await self.go.wait()
        return len(state["text"])

    async def break_down(self) -> None:
        async with CrashableExecutor(self.registry, store=self.url) as dying:
            await dying.start("work", {}, id="x")
            await self.begun.wait()
            await crash(dying)
        table, row = ("boundary", "seq = 2") if self.size == SMALL else ("blob", "1")
        with closing(sqlite3.connect(self.path)) as connection, connection:
            changed = connection.execute(f"UPDATE {table} SET data = CAST('0' || substr(data, 2) AS BLOB) WHERE {row}")
            assert changed.rowcount == 1
        self.ran.clear()
        self.go.set()


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
async def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    made = Program(tmp_path / "store.db", request.param)
    with anyio.fail_after(PATIENCE):
        await made.break_down()
    return made


async def test_it_stays_blocked_through_restarts_and_passes(program: Program) -> None:
    """I5, I2: without that, the steps behind the damage would run again as if nothing had happened."""
    with anyio.fail_after(PATIENCE):
        for _ in range(2):
            async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
                blocked = await (await executor.handle("x")).wait("blocked")
                before = blocked.checkpoints
                assert list((await executor.auto_resume_all()).blocked) == ["x"]
                await executor.wait_idle()
                found = await executor.get("x")
                assert (found.state, found.reason, found.checkpoints) == ("blocked", blocked.reason, before)
                planner = Planner(executor.store, program.registry, BLOCK)
                assert [plan.action async for plan in planner.all()] == ["block"]
    assert program.ran == []


async def test_a_resume_frees_it(program: Program) -> None:
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
            run = await executor.handle("x")
            await run.wait("blocked")
            await run.resume()
            assert await run.result() == program.size
            assert (await run.info()).checkpoints < 12
    assert program.ran == ["first", "second"]


async def test_a_resume_by_who_runs_nothing_frees_it_for_the_next_who_does(program: Program) -> None:
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
            await (await executor.handle("x")).wait("blocked")
        async with Client(program.url) as client:
            await client.resume("x")
        async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
            assert await (await executor.handle("x")).result() == program.size
    assert program.ran == ["first", "second"]


async def test_it_can_be_cancelled(program: Program) -> None:
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
            await (await executor.handle("x")).wait("blocked")
            await executor.cancel("x")
            assert (await executor.get("x")).state == "cancelled"


async def test_a_blob_of_another_type_is_damage_too(tmp_path: Path) -> None:
    program = Program(tmp_path / "store.db", LARGE)
    with anyio.fail_after(PATIENCE):
        await program.break_down()
        with closing(sqlite3.connect(program.path)) as connection, connection:
            connection.execute("UPDATE blob SET data = 'text'")
        async with Client(program.url) as client:
            assert [one.seq for one in await client.history("x")] == [1]


async def test_the_checkpoints_that_can_be_read_are_shown(program: Program) -> None:
    with anyio.fail_after(PATIENCE):
        async with Executor(program.registry, store=program.url, config=BLOCK) as executor:
            await (await executor.handle("x")).wait("blocked")
            assert [one.seq for one in await executor.history("x")] == [1]
        async with Executor(program.registry, store=program.url) as executor:
            await executor.resume("x")
            assert await (await executor.handle("x")).result() == program.size
            assert next(one.seq for one in await executor.history("x")) == 1
