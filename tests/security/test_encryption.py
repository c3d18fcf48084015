"""Encrypted executions: swapped, replayed and changed blobs are refused, and keys can change while one is in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from longrun import ExecutionBlockedError, Executor, SQLiteCheckpointStore, StepRegistry
from longrun.errors import CorruptDataError
from longrun.seal import KeySource, Seal
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import boundary, owned, send, step
from tests.crashing import CrashableExecutor, crash

OLD, NEW = b"o" * 32, b"n" * 32


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
        await store.load("a")
        attack(backend)
        with pytest.raises(CorruptDataError):
            await store.load("a")
