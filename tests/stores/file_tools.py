"""What the tests of the file store share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
