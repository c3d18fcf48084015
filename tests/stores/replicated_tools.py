"""For the tests of the replicated store: a store that can be switched off, and a comparison of everything in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import longrun.testing.conformance  # noqa: F401 -- first: it has the asserts of the next ones rewritten
from longrun.errors import StoreUnavailableError
from longrun.stored import Query
from longrun.stores._replicated.term import RESERVED
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.conformance_base import PATIENCE, beside, created, done, opened, refused
from longrun.testing.interposed import WRITES, InterposedBackend

__all__ = [
    "KINDS",
    "PATIENCE",
    "Switch",
    "assert_equal",
    "beside",
    "created",
    "done",
    "everything",
    "make",
    "opened",
    "refused",
]

T = TypeVar("T")


class Switch(InterposedBackend):
    """A backend that can be away, refuse writes only, lose answers, or be held up."""

    def __init__(self, inner: StoreBackend) -> None:
        super().__init__(inner)
        self.down = False
        self.full = False
        """Writes fail, and everything else works: a disk that is full."""
        self.deaf: str | None = None
        """The next call of this name is made, and its answer is lost; then the store is down."""
        self.fuse: int | None = None
        """So many writes are made before the store is down."""
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.told: Callable[[str], object] = lambda call: None
        """Gets the name of every call, answered or not."""

    def open(self) -> None:
        self._check("open")
        self.inner.open()

    def wait(self, timeout: float) -> bool:
        self._check("wait")
        return super().wait(min(timeout, 0.05))

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        self.told(call)
        self._check(call)
        if call in WRITES:
            assert self.open_gate.wait(30)
            if self.fuse is not None:
                self.fuse -= 1
                self.down = self.fuse <= 0
        answer = function(*args, **options)
        if call == self.deaf:
            self.deaf, self.down = None, True
            raise StoreUnavailableError(self.kind, "the answer was lost")
        return answer

    def _check(self, call: str) -> None:
        if self.down or (self.full and call in WRITES):
            raise StoreUnavailableError(self.kind, "it is switched off" if self.down else "it is full")


KINDS = ("memory", "file", "sqlite")


def make(kind: str, path: Path) -> StoreBackend:
    if kind == "memory":
        return MemoryBackend()
    return FileBackend(path / "files") if kind == "file" else SQLiteBackend(path / "store.db")


def everything(backend: StoreBackend) -> dict[str, Any]:
    """All that can be read of all executions, and who is registered."""
    found: dict[str, Any] = {"owners": sorted(owner.id for owner in backend.owners())}
    for row in backend.find(Query(limit=10_000)):
        id = row.definition.id
        if id in RESERVED:
            continue
        loaded = backend.load(id)
        assert loaded is not None
        assert loaded.damage == ()
        rows = backend.boundaries(id, limit=10_000)
        found[id] = {
            "listed": row,
            "loaded": loaded,
            "rows": rows,
            "states": [backend.checkpoint(id, one.seq) for one in rows],
            "messages": backend.messages(id),
            "sent": (backend.sent(id)[0], dict(backend.sent(id)[1])),
        }
    return found


def assert_equal(one: StoreBackend, two: StoreBackend) -> None:
    """Everything, owners and deletions included."""
    left, right = everything(one), everything(two)
    assert sorted(left) == sorted(right)
    for id in left:
        assert left[id] == right[id], id
