"""Many syncs in one call of the kernel: each file has its own answer, and where there is no such call, threads sync."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from longrun.errors import StoreUnavailableError
from longrun.stores._file import queue
from longrun.stores._file.disk import Disk
from longrun.stores._file.queue import QueueDisk
from longrun.stores._file.syncing import SyncPool
from longrun.stores.file import FileBackend
from longrun.testing.samples import owned, step
from tests.stores.file_tools import created, loaded, opened

NUMBERS = SETUP, _, SUBMIT, GETEVENTS = 1, 2, 3, 4
REQUEST, EVENT = struct.Struct("=QQHHI40x"), struct.Struct("=QQqq")
CONTEXT = 77


class Kernel:
    """Stands for the kernel's calls. What was asked for last ends first."""

    def __init__(self) -> None:
        self.refuses = 0
        """The error code with which it gives no queue."""
        self.room = 1000
        self.results: dict[int, int] = {}
        """What comes of a descriptor's sync, if not 0."""
        self.at_once = 1000
        """How many ends it tells of before a signal comes."""
        self.waits: list[int] = []
        """Error codes of the next waits."""
        self.asked: list[int] = []
        self._under_way: list[tuple[int, int]] = []

    def __call__(self, number: int, *args: int) -> int:
        if number == SETUP:
            ctypes.c_uint64.from_address(args[1]).value = CONTEXT
            return -self.refuses
        assert args[0] == CONTEXT
        if number == SUBMIT:
            return self._submit(*args[1:])
        return self._wait(*args[1:]) if number == GETEVENTS else 0

    def _submit(self, count: int, pointers: int) -> int:
        taken = min(count, self.room)
        for place in (ctypes.c_uint64 * taken).from_address(pointers):
            handle, _, what, _, fd = REQUEST.unpack(ctypes.string_at(place, REQUEST.size))
            assert what == 3, "IOCB_CMD_FDSYNC of linux/aio_abi.h"
            self.asked.append(fd)
            self._under_way.append((handle, self.results.get(fd, 0)))
        return taken or -errno.EAGAIN

    def _wait(self, least: int, most: int, events: int) -> int:
        assert least == most == len(self._under_way), "it waits for all that is under way"
        if self.waits:
            return -self.waits.pop()
        count = min(most, self.at_once)
        for n in range(count):
            handle, result = self._under_way.pop()
            ctypes.memmove(events + n * EVENT.size, EVENT.pack(handle, 0, result, 0), EVENT.size)
        return count


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(queue, "_system_call", lambda: made)
    monkeypatch.setattr(queue, "_NUMBERS", {"here": NUMBERS})
    monkeypatch.setattr("platform.machine", lambda: "here")
    return made


def codes(answers: list[OSError | None]) -> list[int | None]:
    return [None if answer is None else answer.errno for answer in answers]


def test_each_file_has_its_own_answer(kernel: Kernel) -> None:
    """I10: what failed is said of the file that it failed for."""
    kernel.results = {11: -errno.EIO, 13: -errno.ENOSPC}
    disk = QueueDisk()
    assert codes(disk.sync_all([10, 11, 12, 13])) == [None, errno.EIO, None, errno.ENOSPC]
    assert codes(disk.sync_all([13, 12])) == [errno.ENOSPC, None]
    assert kernel.asked == [10, 11, 12, 13, 13, 12]


def test_a_signal_ends_no_wait(kernel: Kernel) -> None:
    """Nothing is answered before all of it has ended."""
    kernel.waits, kernel.at_once, kernel.results = [errno.EINTR, errno.EINTR], 2, {10: -errno.EIO, 14: -errno.EIO}
    assert codes(QueueDisk().sync_all([10, 11, 12, 13, 14])) == [errno.EIO, None, None, None, errno.EIO]


def test_many_files_go_to_the_kernel_in_several_goes(kernel: Kernel) -> None:
    kernel.results = {3: -errno.EIO, 700: -errno.EIO}
    pool = SyncPool(QueueDisk())
    answers = pool.sync(range(1000))
    assert [n for n, answer in enumerate(answers) if answer is not None] == [3, 700]
    assert kernel.asked == list(range(1000))
    pool.close()


def test_what_the_kernel_does_not_take_is_left_to_others(kernel: Kernel) -> None:
    kernel.room = 2
    disk = QueueDisk()
    assert codes(disk.sync_all([10, 11, 12])) == [None, None]
    kernel.room = 0
    assert disk.sync_all([10, 11]) == []
    kernel.room = 2
    assert disk.sync_all([10, 11]) == [], "it is not asked again"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EAGAIN, errno.EPERM])
def test_where_the_kernel_gives_no_queue_nothing_is_asked_of_it(kernel: Kernel, code: int) -> None:
    kernel.refuses = code
    disk = QueueDisk()
    assert disk.sync_all([10, 11]) == []
    assert disk.sync_all([10, 11]) == []
    assert kernel.asked == []


def test_an_unknown_machine_has_no_queue(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "elsewhere")
    assert QueueDisk().sync_all([10, 11]) == []


def test_a_python_without_ctypes_has_no_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: one that was built without libffi; threads sync there."""
    monkeypatch.setattr(queue, "_NUMBERS", {"here": NUMBERS})
    monkeypatch.setattr("platform.machine", lambda: "here")
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert QueueDisk().sync_all([10, 11]) == []
    with opened(FileBackend(tmp_path / "store")) as backend:
        news = [owned("a"), owned("b")]
        created(backend, *news)
        assert backend.commit([step(new.id, new.head) for new in news]) == [None, None]


def test_a_wait_that_fails_leaves_all_in_doubt(kernel: Kernel) -> None:
    """I10: nobody knows what became of them, and what the queue says of them later is not taken for others' answer."""
    kernel.waits = [errno.EINVAL]
    disk = QueueDisk()
    pool = SyncPool(disk)
    assert codes(pool.sync([10, 11])) == [errno.EINVAL, errno.EINVAL]
    pool.close()
    assert disk.sync_all([12, 13]) == []
    assert kernel.asked == [10, 11]


class Threads(Disk):
    """A disk whose queue takes two files and no more."""

    def __init__(self) -> None:
        self.together: list[int] = []
        self.alone: list[int] = []

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        if self.together:
            return []
        self.together = list(fds[:2])
        return [None, OSError(errno.EIO, "bad")]

    def fdatasync(self, fd: int) -> None:
        self.alone.append(fd)
        if fd == 13:
            raise OSError(errno.ENOSPC, "full")


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def pool(threads: Threads) -> Iterator[SyncPool]:
    made = SyncPool(threads)
    yield made
    made.close()


def test_threads_sync_the_rest(pool: SyncPool, threads: Threads) -> None:
    assert codes(pool.sync([10, 11, 12, 13, 14])) == [None, errno.EIO, None, errno.ENOSPC, None]
    assert (threads.together, sorted(threads.alone)) == ([10, 11], [12, 13, 14])


def test_a_single_file_needs_no_queue_and_no_thread(pool: SyncPool, threads: Threads) -> None:
    assert codes(pool.sync([13])) == [errno.ENOSPC]
    assert codes(pool.sync([])) == []
    assert threads.together == []


# the real ones


def real_queue(path: Path) -> QueueDisk:
    disk = QueueDisk()
    with (path / "first").open("wb") as file:
        if not disk.sync_all([file.fileno()]):
            pytest.skip("this kernel has no such queue")
    return disk


def test_the_kernel_syncs_files(tmp_path: Path) -> None:
    disk = real_queue(tmp_path)
    files = [(tmp_path / str(n)).open("wb", buffering=0) for n in range(300)]
    try:
        for file in files:
            file.write(b"x" * 5000)
        assert disk.sync_all([file.fileno() for file in files]) == [None] * queue.CAPACITY
    finally:
        for file in files:
            file.close()


def test_the_kernel_syncs_files_only(tmp_path: Path) -> None:
    """It takes what it can sync up to the first that it cannot: fdatasync says what is wrong with that."""
    disk = real_queue(tmp_path)
    reading, writing = os.pipe()
    with (tmp_path / "file").open("wb") as file:
        assert disk.sync_all([file.fileno(), reading]) == [None]
        pool = SyncPool(disk)
        assert codes(pool.sync([file.fileno(), reading, file.fileno()])) == [None, errno.EINVAL, None]
        pool.close()
    os.close(reading)
    os.close(writing)


def test_a_store_syncs_a_batch_through_the_queue(tmp_path: Path, kernel: Kernel) -> None:
    """I10: a save whose sync has failed in there is refused, the others are not; it can be repeated."""
    with opened(FileBackend(tmp_path / "store")) as backend:
        news = [owned(f"x{n}") for n in range(4)]
        created(backend, *news)
        fds = kernel.asked[:4]
        kernel.results = {fds[2]: -errno.EIO}
        answers = backend.commit([step(new.id, new.head) for new in news])
        assert kernel.asked == fds * 2
        assert isinstance(answers.pop(2), StoreUnavailableError)
        assert answers == [None] * 3
        kernel.results = {}
        assert backend.commit([step(new.id, new.head) for new in news]) == [None] * 4
        assert [loaded(backend, new.id).head.revision for new in news] == [1] * 4
