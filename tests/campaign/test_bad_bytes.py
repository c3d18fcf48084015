"""Damage to the files of a store is told, or harmless, and never misread (I5)."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel

from longrun import Executor, FileCheckpointStore, StepRegistry
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, owned, send
from tests.campaign.rain import rain
from tests.crashing import CrashableExecutor, crash
from tests.stores.file_tools import done, opened

EACH = 50


def test_no_damage_is_misread(tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    """I5: fifty flips, truncations and blanked ranges for each of the campaign's size."""
    counts = rain(tmp_path, EACH * campaign_size, campaign_seed)
    print(dict(counts))
    assert counts["flip: told"] > 0, "no damage was found, so none was done"


def test_a_damaged_message_is_told_by_its_execution(tmp_path: Path) -> None:
    """I5: the bytes are in quarantine, the others go on, and the execution says what happened."""
    with opened(FileBackend(tmp_path)) as backend:
        done(backend, owned("a"), send("a", payload=b"1"), send("a", payload=b"2"))
    _damage_last_line(tmp_path / "inbox" / "a.jsonl")
    with opened(FileBackend(tmp_path)) as backend:
        found = backend.load("a")
        assert found is not None
        assert [message.payload for message in found.messages] == [b"1"]
        assert any((tmp_path / "quarantine").iterdir())
        assert found.damage != ()


def test_a_message_sent_after_a_damaged_one_that_was_taken_arrives(tmp_path: Path) -> None:
    """I1: its number is a new one, although the line with the highest number cannot be read any more."""
    with opened(FileBackend(tmp_path)) as backend:
        new = owned("a")
        done(backend, new, send("a", payload=b"1"), send("a", payload=b"2"))
        done(backend, change("a", new.head, take=(1, 2)))
    _damage_last_line(tmp_path / "inbox" / "a.jsonl")
    with opened(FileBackend(tmp_path)) as backend:
        done(backend, send("a", payload=b"3"))
        assert [message.payload for message in backend.messages("a")] == [b"3"]


async def test_an_execution_says_that_it_went_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    """I5: it goes on from the newest checkpoint that can be read, and its `reason` tells that this was not the last."""
    registry, ran, stop = StepRegistry(), list[str](), anyio.Event()

    async def first(state: int) -> int:
        ran.append("first")
        return state + 1

    async def second(state: int) -> int:
        ran.append("second")
        if not stop.is_set():
            await anyio.sleep_forever()
        return state + 1

    registry.workflow("work", [registry.register("first", first), registry.register("second", second)])
    async with CrashableExecutor(registry, store=FileCheckpointStore(tmp_path)) as dying:
        await dying.start("work", 1, id="a")
        while "second" not in ran:
            await anyio.lowlevel.checkpoint()
        await crash(dying)
    _damage_last_line(tmp_path / "live" / "a.0.jsonl")
    stop.set()
    async with Executor(registry, store=FileCheckpointStore(tmp_path)) as executor:
        run = await executor.handle("a")
        assert await run.result() == 3
        assert "damaged" in str((await run.info()).reason)
    assert ran == ["first", "second", "first", "second"]


def _damage_last_line(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(bytes(data))
