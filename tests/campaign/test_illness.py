"""Whole workflows on a store that fails at random: no false acknowledgement, and work goes on when it is well (I9 I10).

Under the file store any system call may fail with EIO or ENOSPC, be interrupted, or write less than it was given. Of
the other stores any call may fail, before it was done or after, so that its answer is lost. What the executor makes of
it is judged like a kill storm: by a ledger of what the store acknowledged and what the steps did.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from longrun import Executor, ExecutorConfig
from longrun.errors import StoreUnavailableError
from longrun.stores import open_store
from longrun.stores._file.queue import QueueDisk
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.interposed import InterposedBackend
from tests.campaign import work
from tests.campaign.judge import judge
from tests.campaign.outside import Outside, read
from tests.campaign.program import CONFIG, DISK_WRITES, Telling, run_one, until_done

T = TypeVar("T")
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
CALLS = (*DISK_WRITES, "pread", "stat", "names", "chmod")
DISK_RATES = (0.005, 0.02, 0.05)
STORE_RATES = (0.02, 0.1, 0.25)
"""How many of the calls fail, in one batch or another."""
WITHIN = 60.0
"""Seconds for one batch of workflows. It is ill for one of them at most."""
SHARE = 5
"""One batch for so many of the campaign's size, in the ordinary tests."""


class Illness:
    """What a store suffers from, until it is well."""

    def __init__(self, dice: random.Random, rates: tuple[float, ...]) -> None:
        self.dice = dice
        self.well = False
        self.fired: Counter[str] = Counter()
        self._rate = dice.choice(rates)
        self._calls, self._certain = 0, dice.randrange(1, 20)
        """The call that fails whatever the dice say: a store that is well by luck shows nothing."""

    def strikes(self, call: str) -> bool:
        self._calls += 1
        if self._calls != self._certain and (self.well or self.dice.random() >= self._rate):
            return False
        self.fired[call] += 1
        return True

    async def pass_by(self, done: anyio.Event) -> None:
        with anyio.move_on_after(self.dice.uniform(0.2, 1.0)):
            await done.wait()
        self.well = True


class SickDisk(QueueDisk):
    """Its system calls fail now and then."""

    def __init__(self, illness: Illness) -> None:
        super().__init__()
        self._illness = illness
        for call in CALLS:
            setattr(self, call, self._around(call, getattr(super(), call)))

    def _around(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def sick(*args: Any, **options: Any) -> Any:
            if not self._illness.strikes(call):
                return function(*args, **options)
            if call == "write" and self._illness.dice.random() < 0.5:
                return self._short(function, *args)
            raise OSError(self._illness.dice.choice(CODES), "the disk is sick")

        return sick

    def _short(self, write: Callable[..., int], fd: int, data: bytes) -> int:
        size = self._illness.dice.randrange(len(data) + 1)
        if size == 0:
            raise InterruptedError(errno.EINTR, "interrupted before anything was written")
        return write(fd, data[:size])


class SickStore(InterposedBackend):
    """Its calls fail now and then, and half of those have been done all the same."""

    def __init__(self, inner: StoreBackend, illness: Illness) -> None:
        super().__init__(inner)
        self._illness = illness

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        if not self._illness.strikes(call):
            return function(*args, **options)
        if self._illness.dice.random() < 0.5:
            function(*args, **options)
        raise StoreUnavailableError(self.kind, "no answer")


def sick(url: str, options: dict[str, Any], illness: Illness) -> StoreBackend:
    if url.startswith("file:"):
        return FileBackend(url.removeprefix("file:"), disk=SickDisk(illness))
    return SickStore(open_store(url, **options).backend, illness)


Suffered = tuple[int, tuple[str, ...]]
"""How many calls failed, and which promises were broken."""


async def suffer(place: Path, url: str, options: dict[str, Any], batches: int, seed: int) -> Suffered:
    """Run so many batches one after the other, each with an illness of its own."""
    outside, fired = Outside(place / "ledger", 1), 0
    rates = DISK_RATES if url.startswith("file:") else STORE_RATES
    work.tell_to(outside)
    try:
        for batch in range(batches):
            illness = Illness(random.Random(seed + batch), rates)
            await one_batch(url, options, illness, outside, batch)
            fired += illness.fired.total()
    finally:
        outside.close()
    backend = open_store(url, **options).backend
    backend.open()
    try:
        return fired, judge(read(place / "ledger"), backend).faults
    finally:
        backend.close()


async def one_batch(url: str, options: dict[str, Any], illness: Illness, outside: Outside, batch: int) -> None:
    done = anyio.Event()
    with anyio.fail_after(WITHIN):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(illness.pass_by, done)
            await until_done(lambda: run_batch(sick(url, options, illness), outside, batch))
            done.set()
    outside.note("batch", number=batch)


async def run_batch(backend: StoreBackend, outside: Outside, batch: int) -> None:
    """One program: everything is started, or found again, and waited for."""
    store = CheckpointStore(Telling(backend, outside, None))
    async with (
        Executor(work.registry, store=store, config=ExecutorConfig(**CONFIG)) as executor,
        anyio.create_task_group() as tasks,
    ):
        for workflow in work.WORKFLOWS:
            tasks.start_soon(run_one, executor, outside, f"{batch}-{workflow}")


@pytest.mark.parametrize("url", ["file:{}/store", "sqlite:///{}/store.db"])
async def test_workflows_survive_a_sick_store(tmp_path: Path, url: str, campaign_size: int, campaign_seed: int) -> None:
    batches = max(1, campaign_size // SHARE)
    fired, faults = await suffer(tmp_path, url.format(tmp_path), {}, batches, campaign_seed)
    assert faults == ()
    assert fired > 0, "no fault fired"


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))
