"""What the tests of the file store share."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from longrun.stored import Loaded, Write
from longrun.stores._file.disk import Disk
from longrun.stores.base import Answer, StoreBackend


class CountingDisk(Disk):
    """Knows which descriptors are open."""

    def __init__(self) -> None:
        self.left: set[int] = set()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        fd = super().open(name, flags, dir_fd)
        self.left.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.left.discard(fd)
        super().close(fd)


class FolderDisk(CountingDisk):
    """Knows which directories of a store were synced, and can refuse that for one of them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.sick = ""
        self.synced: list[str] = []

    def fsync(self, fd: int) -> None:
        status = os.fstat(fd)
        for folder in self.path.glob("*/"):
            if os.path.samestat(folder.stat(), status):
                if folder.name == self.sick:
                    raise OSError(errno.EIO, "the disk is sick")
                self.synced.append(folder.name)
        super().fsync(fd)


@contextlib.contextmanager
def opened(backend: StoreBackend) -> Iterator[StoreBackend]:
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def done(backend: StoreBackend, *writes: Write) -> list[Answer]:
    """Commit as one batch; none of the writes may be refused."""
    answers = backend.commit(writes)
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    return answers


def created(backend: StoreBackend, *writes: Write) -> None:
    assert done(backend, *writes) == [True] * len(writes)


def loaded(backend: StoreBackend, id: str) -> Loaded:
    """What is stored, undamaged."""
    found = backend.load(id)
    assert found is not None
    assert found.damage == ()
    return found


def ids_of(found: list[Loaded]) -> list[str]:
    return [one.definition.id for one in found]
