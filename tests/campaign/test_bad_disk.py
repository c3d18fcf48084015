"""Whole workflows on a disk that fails at random: no false acknowledgement, and work goes on when it is well (I9, I10).

Any system call of the file store may fail with EIO or ENOSPC, be interrupted, or write less than it was given. What the
executor makes of it is judged like a kill storm: by a ledger of what the store acknowledged and what the steps did.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import Executor, ExecutorConfig
from longrun.stores._file.queue import QueueDisk
from longrun.stores.file import FileBackend
from longrun.stores.store import CheckpointStore
from tests.campaign import work
from tests.campaign.judge import judge
from tests.campaign.outside import Outside, read
from tests.campaign.program import CONFIG, Telling, run_one, until_done

CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
CALLS = (
    "open",
    "write",
    "pread",
    "fdatasync",
    "sync_all",
    "fsync",
    "truncate",
    "rename",
    "link",
    "unlink",
    "stat",
    "names",
    "chmod",
)
SHARE = 5
"""One batch of workflows for so many of the campaign's size."""


class SickDisk(QueueDisk):
    """Fails now and then, in bursts, until it is well."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self.well = False
        self.fired: Counter[str] = Counter()
        self._rate = dice.choice([0.005, 0.02, 0.05])
        for call in CALLS:
            setattr(self, call, self._around(call, getattr(super(), call)))

    def _around(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def sick(*args: Any, **options: Any) -> Any:
            if self.well or self._dice.random() >= self._rate:
                return function(*args, **options)
            self.fired[call] += 1
            if call == "write" and self._dice.random() < 0.5:
                return self._short(function, *args)
            raise OSError(self._dice.choice(CODES), "the disk is sick")

        return sick

    def _short(self, write: Callable[..., int], fd: int, data: bytes) -> int:
        size = self._dice.randrange(len(data) + 1)
        if size == 0:
            raise InterruptedError(errno.EINTR, "interrupted before anything was written")
        return write(fd, data[:size])


async def test_workflows_survive_a_sick_disk(tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    fired: Counter[str] = Counter()
    for round in range(max(1, campaign_size // SHARE)):
        place = tmp_path / str(round)
        place.mkdir()
        fired += await one_batch(place, random.Random(campaign_seed + round))
    print(dict(fired))
    assert fired.total() > 0, "no fault fired"


async def one_batch(place: Path, dice: random.Random) -> Counter[str]:
    disk = SickDisk(dice)
    outside = Outside(place / "ledger", 1)
    work.tell_to(outside)
    healer = anyio.Event()
    try:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(heal, disk, healer, dice.uniform(0.2, 1.0))
                await until_done(lambda: run_batch(place / "store", disk, outside))
                healer.set()
    finally:
        outside.close()
    disk.well = True
    backend = FileBackend(place / "store")
    backend.open()
    try:
        verdict = judge([*read(place / "ledger"), {"kind": "batch", "process": 1, "number": 0}], backend)
    finally:
        backend.close()
    assert not verdict.faults, str(verdict)
    return disk.fired


async def heal(disk: SickDisk, done: anyio.Event, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await done.wait()
    disk.well = True


async def run_batch(path: Path, disk: SickDisk, outside: Outside) -> None:
    """One program: everything is started, or found again, and waited for."""
    store = CheckpointStore(Telling(FileBackend(path, disk=disk), outside, None))
    async with (
        Executor(work.registry, store=store, config=ExecutorConfig(**CONFIG)) as executor,
        anyio.create_task_group() as tasks,
    ):
        for workflow in work.WORKFLOWS:
            tasks.start_soon(run_one, executor, outside, f"0-{workflow}")


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))
