"""Storms of other kinds than kills: the server dies under the program, the power goes, or the clock is set wrong.

The program, its ledger and the judge are those of the kill storm.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from attrs import define

from longrun.stores import open_store
from tests.campaign.forks import Forks
from tests.campaign.judge import Verdict, judge
from tests.campaign.outside import Outside, Record, read
from tests.campaign.storm import LOOPS, PATIENCE, PROGRAM, Storm

# the server dies


class Mortal(Protocol):
    """A server of the campaign's own."""

    def kill(self) -> None: ...

    def start(self) -> None: ...


@define
class LongStorm(Storm):
    """Processes that are not killed: what happens to them is waited for."""

    def until(self, forks: Forks, true: Callable[[list[Record]], bool], within: float = PATIENCE) -> None:
        deadline = time.monotonic() + within
        while not (self.ledger.exists() and true(read(self.ledger))):
            assert forks.end(0.1, kill=False) is None, "the program ended by itself"
            assert time.monotonic() < deadline, "the program stands still"


@define
class ServerStorm(LongStorm):
    """One program that goes on through all of it, and a server that is killed under it."""

    def rage_at(self, server: Mortal, kills: int, seed: int) -> Verdict:
        dice = random.Random(seed)
        with Forks(PROGRAM) as forks:
            self.spawn(forks, None)
            self.until(forks, lambda seen: any(record["kind"] == "started" for record in seen))
            for _ in range(kills):
                assert forks.end(dice.uniform(0.05, 0.4), kill=False) is None, "the program ended by itself"
                server.kill()
                assert forks.end(dice.choice([0.0, 0.0, 0.2]), kill=False) is None, "the program ended by itself"
                server.start()
                self.kills += 1
            (self.place / "stop").touch()
            end = forks.end(3 * PATIENCE)
            assert end is not None
            assert end.code == 0, f"the program ended with {end.code}; killed for its slowness: {end.by_us}"
        return self.verdict()


# the power goes

_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""
_WITHOUT_THE_LOG = struct.pack("I", 2)
"""Not even the file system's own journal is flushed: what no fsync asked for is gone."""


class NoPowerError(Exception):
    """This machine does not let a file system be mounted, or be cut off."""


class Volume:
    """An ext4 file system of its own in a file, whose power can be cut."""

    def __init__(self, directory: Path) -> None:
        self._image, self.path = directory / "image", directory / "volume"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(256 << 20)
        self._run("mkfs.ext4", "-q", str(self._image))
        self.mount()

    def mount(self) -> None:
        self._run("mount", "-o", "loop", str(self._image), str(self.path))

    def unmount(self) -> None:
        self._run("umount", str(self.path))

    def cut(self) -> None:
        """From now on nothing reaches the disk, and whoever asks for it gets an error."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_THE_LOG)
        except OSError as error:
            raise NoPowerError(f"the file system cannot be shut down: {error.strerror}") from error
        finally:
            os.close(fd)

    @staticmethod
    def _run(*command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            raise NoPowerError(f"{command[0]}: {said.decode(errors='replace').strip()}") from error


@contextmanager
def volume(directory: Path) -> Iterator[Volume]:
    if os.geteuid() != 0:
        raise NoPowerError("only root can mount a file system")
    made = Volume(directory)
    try:
        yield made
    finally:
        made.unmount()


@define
class PowerStorm(Storm):
    """The store lies on a volume of its own, whose power is cut again and again; the ledger lies elsewhere."""

    def rage_on(self, disk: Volume, cuts: int, seed: int) -> Verdict:
        dice = random.Random(seed)
        with Forks(PROGRAM) as forks:
            for _ in range(cuts):
                self.spawn(forks, None)
                assert forks.end(dice.uniform(0.1, 0.8), kill=False) is None, "the program ended by itself"
                self.mark()
                disk.cut()
                forks.signal(signal.SIGKILL)
                forks.end(PATIENCE)
                disk.unmount()
                disk.mount()
                self.kills += 1
            self.finish(forks)
        return self.verdict()

    def mark(self) -> None:
        """A sync that is under way while the file system goes down may come back as done: what is told after this is
        no acknowledgement."""
        outside = Outside(self.ledger, self.processes)
        outside.note("cut")
        outside.close()

    def records(self) -> list[Record]:
        return until_cut(read(self.ledger))


def until_cut(records: Sequence[Record]) -> list[Record]:
    """The records without what a process has done behind its mark; what it told to be over is asked for again."""
    cut: set[int] = set()
    kept: list[Record] = []
    for record in records:
        if record["kind"] == "cut":
            cut.add(record["process"])
        elif record["process"] not in cut or record["kind"] in ("started", "result", "batch"):
            kept.append(record)
    return kept


# the clock is set wrong


@define
class ClockStorm(LongStorm):
    """Two processes on one store, each with a wall clock that jumps by up to a day: leases run out by mistake."""

    def rage_for(self, jumps: int) -> Verdict:
        with Forks(PROGRAM) as ours, Forks(PROGRAM) as theirs:
            for number, forks in enumerate((ours, theirs), 1):
                forks.spawn(
                    url=self.url,
                    options=self.options,
                    ledger=str(self.ledger),
                    process=number,
                    batch=0,
                    stop=str(self.place / "stop"),
                    loop=LOOPS[number % 2],
                    jumps=jumps // 2 + 1,
                )
            self.until(ours, lambda seen: _jumps(seen) >= jumps, within=PATIENCE + jumps)
            (self.place / "stop").touch()
            for forks in (ours, theirs):
                end = forks.end(3 * PATIENCE)
                assert end is not None
                assert end.code == 0, f"a process ended with {end.code}; killed for its slowness: {end.by_us}"
        records = read(self.ledger)
        self.kills = _jumps(records)
        backend = open_store(self.url, **self.options).backend
        backend.open()
        try:
            return judge(in_order(records), backend)
        finally:
            backend.close()


def _jumps(records: Sequence[Record]) -> int:
    return sum(record["kind"] == "jump" for record in records)


def in_order(records: Sequence[Record]) -> list[Record]:
    """The records of several processes at once, as one could have written them.

    A process hears of its own write or claim a moment after the store has made it, and may tell it when another one
    has told of its claim already: it goes before that claim. What a process does that has lost an execution and does
    not know it yet is its own affair: nothing of it is stored."""
    claims: dict[str, Record] = {}
    kept: list[Record] = []
    places: dict[str, int] = {}
    for record in records:
        id, kind = record.get("id", ""), record["kind"]
        claim = claims.get(id)
        if kind == "claim" and (claim is None or record["fence"] > claim["fence"]):
            claims[id] = record
            places[id] = len(kept)
        elif claim is not None and record["process"] != claim["process"]:
            if kind in ("begin", "effect"):
                continue
            if (
                kind in ("ack", "claim")
                and record["fence"] < claim["fence"]
                and record["revision"] <= claim["revision"]
            ):
                kept.insert(places[id], record)
                places = {one: place + (place >= places[id]) for one, place in places.items()}
                continue
        kept.append(record)
    return kept
