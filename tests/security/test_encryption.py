"""Encrypted executions: swapped, replayed and changed blobs are refused, and keys can change while one is in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import (
    ExecutionBlockedError,
    Executor,
    ExecutorConfig,
    SQLiteCheckpointStore,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.client import Client
from longrun.errors import CorruptDataError, InvalidStateError
from longrun.seal import KeySource, Seal
from longrun.stored import Message
from longrun.stores.copy import copy_store
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import boundary, owned, send, step
from tests.crashing import CrashableExecutor, crash

OLD, NEW = b"o" * 32, b"n" * 32
PATIENCE = 20.0


def keys(current: str, **known: bytes) -> KeySource:
    """Writes with one key, reads with all it knows."""

    def give(key_id: str | None) -> tuple[str, bytes]:
        name = current if key_id is None else key_id
        return name, known[name]

    return give


class Program:
    """Two steps. It crashes in the second one, under one seal, and goes on under another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()
        self.registry.register("one", self.one)
        self.registry.register("two", self.two)
        self.registry.workflow("work", ["one", "two"])

    async def one(self, state: dict[str, str]) -> dict[str, str]:
        return {**state, "one": "secret-of-one"}

    async def two(self, state: dict[str, str]) -> dict[str, str]:
        self.begun.set()
        await self.go.wait()
        return {**state, "two": state["one"]}

    async def run(self, first: Seal, second: Seal) -> Any:
        async with CrashableExecutor(self.registry, store=SQLiteCheckpointStore(self.path, seal=first)) as dying:
            await dying.start("work", {}, id="a")
            await self.begun.wait()
            await crash(dying)
        self.go.set()
        async with Executor(self.registry, store=SQLiteCheckpointStore(self.path, seal=second)) as executor:
            return await (await executor.handle("a")).result()


async def test_an_execution_in_flight_survives_a_change_of_keys(tmp_path: Path) -> None:
    """What is stored already is read with the old key, what is new is written with the new one."""
    program = Program(tmp_path / "store.db")
    result = await program.run(Seal(key=keys("old", old=OLD)), Seal(key=keys("new", old=OLD, new=NEW)))
    assert result == {"one": "secret-of-one", "two": "secret-of-one"}
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"secret-of-one" not in stored
    assert b"old" in stored
    assert b"new" in stored


async def test_without_the_old_key_what_was_in_flight_is_blocked_until_there_is_one(tmp_path: Path) -> None:
    """The error names the key that is missing; nothing is lost."""
    program = Program(tmp_path / "store.db")
    with pytest.raises(ExecutionBlockedError, match="unknown key id, 'old'"):
        await program.run(Seal(key=keys("old", old=OLD)), Seal(key=keys("new", new=NEW)))
    both = SQLiteCheckpointStore(tmp_path / "store.db", seal=Seal(key=keys("new", old=OLD, new=NEW)))
    async with Executor(program.registry, store=both) as executor:
        # The pass at start has looked at it again, and taken it up.
        assert (await (await executor.handle("a")).result())["two"] == "secret-of-one"


# somebody who can write to the store, mends every checksum, and has no key


def swap_states(backend: MemoryBackend) -> None:
    a, b = backend._records["a"].boundaries, backend._records["b"].boundaries
    a[-1], b[-1] = attrs.evolve(a[-1], data=b[-1].data), attrs.evolve(b[-1], data=a[-1].data)


def replay_a_state(backend: MemoryBackend) -> None:
    """The state of an earlier checkpoint in the place of the last."""
    rows = backend._records["a"].boundaries
    rows[-1] = attrs.evolve(rows[-1], data=rows[0].data)


def change_a_byte(backend: MemoryBackend) -> None:
    rows = backend._records["a"].boundaries
    data = bytearray(rows[-1].data or b"")
    data[-1] ^= 1
    rows[-1] = attrs.evolve(rows[-1], data=bytes(data))


def write_in_the_clear(backend: MemoryBackend) -> None:
    rows = backend._records["a"].boundaries
    rows[-1] = attrs.evolve(rows[-1], data=b'{"mine": true}')


def swap_entries(backend: MemoryBackend) -> None:
    entries = backend._records["a"].entries
    entries["e"], entries["f"] = entries["f"], entries["e"]


def swap_blobs(backend: MemoryBackend) -> None:
    backend._records["a"].blobs["big"] = backend._records["b"].blobs["big"]


def move_a_message(backend: MemoryBackend) -> None:
    (message,) = backend._records["b"].messages.values()
    backend._records["a"].messages = {1: message}


ATTACKS = (swap_states, replay_a_state, change_a_byte, write_in_the_clear, swap_entries, swap_blobs, move_a_message)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_what_was_swapped_replayed_or_changed_is_refused(attack: Callable[[MemoryBackend], None]) -> None:
    backend = MemoryBackend()
    async with CheckpointStore(backend, seal=Seal(key=keys("k", k=OLD))) as store:
        for id in ("a", "b"):
            new = owned(id, data=b'{"n": 1}', blobs={"big": id.encode() * 100})
            await store.create(new)
            row = boundary(2, data=b'{"n": 2}', blobs=("big",))
            await store.save(step(id, new.head, boundaries=(row,), put={"e": b"1", "f": b"2"}))
            await store.send(id, send(id, payload=b'"hello"').message)
        assert all(message.is_readable for message in (await store.load("a")).messages)
        attack(backend)
        try:
            loaded = await store.load("a")
        except CorruptDataError:
            return
        assert not any(message.is_readable for message in loaded.messages), "who takes it hears of that"


# --- what cannot be unsealed does no more harm than it must -----------------------------------------------------------


RIGHT, WRONG = Seal(key=keys("k", k=OLD)), Seal(key=keys("k", k=NEW))


@pytest.fixture
def waiting() -> StepRegistry:
    registry = StepRegistry()

    @registry.step
    async def ask(state: Any) -> WaitFor:
        return WaitFor("go", state)

    @registry.step
    async def end(ctx: StepContext, state: Any) -> Any:
        return [state, ctx.signal]

    registry.workflow("wait", [ask, end])
    return registry


async def leave_waiting(registry: StepRegistry, backend: MemoryBackend, name: str) -> None:
    """An execution that waits for "go", and a signal that was sealed under another key."""
    async with Executor(registry, store=CheckpointStore(backend, seal=RIGHT)) as executor:
        await (await executor.start("wait", "fine", id="a")).wait("waiting")
    async with Client(CheckpointStore(backend, seal=WRONG)) as client:
        await client.store.send("a", Message(kind="signal", name=name, payload=b"1", sent=0.0))


async def test_a_signal_that_cannot_be_read_harms_nothing_that_does_not_want_it(waiting: StepRegistry) -> None:
    backend = MemoryBackend()
    await leave_waiting(waiting, backend, "other")
    with anyio.fail_after(PATIENCE):
        async with Executor(waiting, store=CheckpointStore(backend, seal=RIGHT)) as executor:
            run = await executor.handle("a")
            assert (await run.info()).state == "waiting"
            assert [one.step for one in await executor.history("a")] == [0, 1]
            await run.signal("go", "here")
            assert await run.result() == ["fine", "here"]
            await executor.delete("a")


async def test_a_signal_that_cannot_be_read_blocks_who_waits_for_it_and_stays(waiting: StepRegistry) -> None:
    """I5: it is not thrown away. Where the right key is, the execution goes on."""
    backend = MemoryBackend()
    await leave_waiting(waiting, backend, "go")
    with anyio.fail_after(PATIENCE):
        async with Executor(waiting, store=CheckpointStore(backend, seal=RIGHT)) as executor:
            run = await executor.handle("a")
            blocked = await run.wait("blocked")
            assert blocked.reason is not None
            assert "signal" in blocked.reason
        assert len(backend.messages("a")) == 1
        async with Executor(waiting, store=CheckpointStore(backend, seal=RIGHT)) as executor:
            await executor.cancel("a")
            assert (await executor.get("a")).state == "cancelled"


@pytest.mark.parametrize("how", ["previous", "block"])
async def test_what_nobody_has_the_key_of_can_be_ended_and_removed(waiting: StepRegistry, how: Any) -> None:
    backend = MemoryBackend()
    async with Executor(waiting, store=CheckpointStore(backend, seal=RIGHT)) as executor:
        await (await executor.start("wait", "fine", id="a")).wait("waiting")
    config = ExecutorConfig(on_corruption=how)
    lost = CheckpointStore(backend, seal=Seal(key=keys("new", new=NEW)))
    with anyio.fail_after(PATIENCE):
        async with Executor(waiting, store=lost, config=config) as executor:
            with pytest.raises(InvalidStateError, match="cancel it first"):
                await executor.delete("a")
            await executor.cancel("a", "its key is gone")
            assert (await executor.get("a")).state == "cancelled"
            await executor.delete("a")
            assert await executor.list() == []


async def test_another_state_takes_the_place_of_one_whose_key_is_gone(waiting: StepRegistry) -> None:
    backend = MemoryBackend()
    async with Executor(waiting, store=CheckpointStore(backend, seal=RIGHT)) as executor:
        await (await executor.start("wait", "fine", id="a")).wait("waiting")
    lost = CheckpointStore(backend, seal=Seal(key=keys("new", new=NEW)))
    with anyio.fail_after(PATIENCE):
        async with Executor(waiting, store=lost) as executor:
            await executor.pause("a", hold=True)
            await executor.resume("a", state="another")
            await executor.signal("a", "go", 1)
            assert await (await executor.handle("a")).result() == ["another", 1]


async def test_a_message_that_cannot_be_read_is_not_copied_as_something_else(waiting: StepRegistry) -> None:
    backend = MemoryBackend()
    await leave_waiting(waiting, backend, "other")
    target = CheckpointStore(MemoryBackend(), seal=RIGHT)
    report = await copy_store(CheckpointStore(backend, seal=RIGHT), target)
    assert list(report.skipped) == ["a"]
    assert "unsealed" in report.skipped["a"]
