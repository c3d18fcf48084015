"""Upgrades in flight: what one program has no code for goes on in another, while both live (I4)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import frozen

from longrun import (
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    QueueLimit,
    Sleep,
    StepRegistry,
    WaitFor,
)
from longrun.client import Client
from longrun.fitness import GOES_ON, SecondLook
from longrun.records import ExecutionState
from longrun.worker import Worker
from tests.crashing import PATIENCE

QUICK = ExecutorConfig(heartbeat_interval=0.1, lease_ttl=30.0)
BLOCKED = ExecutionState.BLOCKED
FINISHED = [state for state in ExecutionState if state.finished]


@frozen
class Pieces:
    pieces: int


@frozen
class Count:
    count: int


class Program:
    """The same workflow in two versions: the last step has another name, and the typed state another field."""

    def __init__(self, last: str, kind: type = Pieces) -> None:
        self.last = last
        self.ran: list[str] = []
        self.registry = StepRegistry()
        self.registry.register("first", self.first)
        self.registry.register("sleeps", self.sleeps)
        self.registry.register("waits", self.waits)
        self.registry.register(last, self.end)

        async def typed(state: Any) -> int:
            self.ran.append("typed")
            return int(getattr(state, "pieces", 0) or getattr(state, "count", 0))

        typed.__annotations__["state"] = kind
        self.registry.register("typed", typed)
        self.registry.workflow("plain", ["first", last])
        self.registry.workflow("sleepy", ["sleeps", last])
        self.registry.workflow("signalled", ["waits", last])
        self.registry.workflow("typed", ["typed"])

    async def first(self, state: Any) -> Any:
        return state

    async def sleeps(self, state: Any) -> Sleep:
        return Sleep(0.05, state)

    async def waits(self, state: Any) -> WaitFor:
        return WaitFor("go", state)

    async def end(self, state: Any) -> Any:
        self.ran.append(self.last)
        return self.last


async def ended(client: Client, id: str) -> Any:
    """What has become of an execution that may be blocked for a while."""
    return await client.handle(id).wait(*FINISHED)


async def blocked(client: Client, id: str) -> Any:
    found = await client.handle(id).wait("blocked")
    assert found.state is BLOCKED
    return found


async def test_two_versions_that_live_side_by_side_finish_everything() -> None:
    """Each claims what it comes across, and blocks what only the other knows; nothing stays so, nothing runs twice."""
    store = MemoryCheckpointStore()
    old, new = Program("ship"), Program("dispatch")
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(old.registry, store=store, config=QUICK, concurrency=2) as before,
            Worker(new.registry, store=store, config=QUICK, concurrency=2) as after,
        ):
            ids: dict[str, str] = {}
            for worker, program in [(before, old), (after, new)] * 5:
                for workflow in ("plain", "sleepy", "signalled"):
                    run = await worker.submit(workflow, 0)
                    ids[run.id] = program.last
                    if workflow == "signalled":
                        await client.signal(run.id, "go")
            for id, last in ids.items():
                assert (await ended(client, id)).state is ExecutionState.COMPLETED
                assert await client.handle(id).result() == last
    assert old.ran == ["ship"] * 15
    assert new.ran == ["dispatch"] * 15


@pytest.mark.parametrize("limits", [None, {"default": QueueLimit(concurrency=1)}], ids=["open", "limited"])
async def test_a_step_that_is_not_known_here_is_taken_up_by_whoever_knows_it(
    limits: dict[str, QueueLimit] | None,
) -> None:
    """By a program that was there before it was blocked, from a limited queue too."""
    store = MemoryCheckpointStore()
    old, new = Program("ship"), Program("dispatch")
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client:
            async with Executor(new.registry, store=store) as after:
                for n in range(3):
                    await after.submit("plain", 0, id=f"x{n}")
            async with Worker(old.registry, store=store, config=QUICK, limits=limits):
                for n in range(3):
                    assert (await blocked(client, f"x{n}")).reason == (
                        f"no step named 'dispatch' is registered here{GOES_ON}"
                    )
                async with Worker(new.registry, store=store, config=QUICK) as after:
                    for n in range(3):
                        assert (await ended(client, f"x{n}")).state is ExecutionState.COMPLETED
                    # and what it has claimed and cannot do goes back to the old one
                    await after.submit("plain", 0, id="last")
                    assert (await ended(client, "last")).state is ExecutionState.COMPLETED
    assert new.ran.count("dispatch") + old.ran.count("ship") == 4


async def test_a_state_that_fits_another_version_goes_on_there() -> None:
    store = MemoryCheckpointStore()
    old, new = Program("ship"), Program("ship", Count)
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client, Worker(new.registry, store=store, config=QUICK):
            await client.submit("typed", {"pieces": 2}, id="x")
            assert str((await blocked(client, "x")).reason).endswith(GOES_ON)
            async with Worker(old.registry, store=store, config=QUICK):
                assert (await ended(client, "x")).state is ExecutionState.COMPLETED
            assert await client.handle("x").result() == 2
    assert old.ran == ["typed"]


async def test_what_nobody_here_can_go_on_with_is_loaded_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another revision of it is stored, or more steps are known."""
    store = MemoryCheckpointStore()
    old, new = Program("ship"), Program("dispatch")
    looks = 0
    take = SecondLook.take

    async def counted(self: SecondLook, claim: Any) -> int:
        """Those alone that were due, and are over: a sweep before the next is due takes no look."""
        nonlocal looks
        before = self._look_at
        try:
            return await take(self, claim)
        finally:
            looks += self._look_at != before

    monkeypatch.setattr(SecondLook, "take", counted)
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client, Worker(old.registry, store=store, config=QUICK) as worker:
            async with Executor(new.registry, store=store, config=ExecutorConfig(auto_resume=False)) as after:
                await after.submit("plain", 0, id="x")
            await blocked(client, "x")
            revision = (await store.load("x")).head.revision
            since = looks
            while looks < since + 5:
                await (await client.submit("plain", 0)).result()
            loads: list[str] = []
            load = store.load

            async def noted(id: str) -> Any:
                loads.append(id)
                return await load(id)

            monkeypatch.setattr(store, "load", noted)
            since = looks
            while looks < since + 5:
                worker.stir()
                await client.count()
            assert "x" not in loads
            monkeypatch.undo()
            assert (await store.load("x")).head.revision == revision
            old.registry.register("dispatch", new.end)
            assert (await ended(client, "x")).state is ExecutionState.COMPLETED


async def test_what_is_blocked_for_another_reason_is_not_taken_up() -> None:
    """Else a step that kills its process would be tried for ever."""
    store = MemoryCheckpointStore()
    program = Program("ship")
    with anyio.fail_after(PATIENCE):
        async with Client(store) as client, Worker(program.registry, store=store, config=QUICK) as worker:
            run = await client.submit("plain", 0, id="x", delay=3600.0)
            (loaded,) = await worker.sweeper.claims.take(
                (run.id,), frozenset({ExecutionState.INITIALIZED}), frozenset()
            )
            await worker.block(loaded, "its process died 3 times")
            for _ in range(5):
                await (await client.submit("plain", 0)).result()
                worker.sweeper._second_look._look_at = -1.0
            assert (await client.get("x")).state is BLOCKED


async def test_without_auto_resume_nothing_is_taken_up() -> None:
    store = MemoryCheckpointStore()
    old, new = Program("ship"), Program("dispatch")
    quiet = ExecutorConfig(auto_resume=False, heartbeat_interval=0.1, lease_ttl=30.0)
    with anyio.fail_after(PATIENCE):
        async with (
            Client(store) as client,
            Worker(old.registry, store=store, config=QUICK),
            Executor(new.registry, store=store, config=quiet) as after,
        ):
            await after.submit("plain", 0, id="x")
            await blocked(client, "x")
            for _ in range(5):
                await after.sweeper.once()
            assert (await client.get("x")).state is BLOCKED
            await after.resume("x")
            assert await client.handle("x").result() == "dispatch"
