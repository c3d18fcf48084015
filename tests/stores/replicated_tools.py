"""For the tests of the replicated store: a store that can be switched off, and a comparison of everything in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import longrun.testing.conformance  # noqa: F401 -- first: it has the asserts of the next ones rewritten
from longrun.errors import StoreUnavailableError
from longrun.stored import Query
from longrun.stores._replicated.term import RESERVED, Term
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import ReplicatedCheckpointStore, Witness
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.conformance_base import PATIENCE, beside, created, done, head_of, refused
from longrun.testing.conformance_base import opened as _opened
from longrun.testing.interposed import WRITES, InterposedBackend

__all__ = [
    "PAIRS",
    "PATIENCE",
    "Pair",
    "Switch",
    "Unreachable",
    "assert_equal",
    "beside",
    "created",
    "done",
    "everything",
    "head_of",
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


class Unreachable:
    """A witness that can be cut off."""

    def __init__(self, inner: Witness) -> None:
        self.inner, self.down = inner, False

    def _reach(self) -> Witness:
        if self.down:
            raise StoreUnavailableError("witness", "it is cut off")
        return self.inner

    def open(self) -> None:
        self._reach().open()

    def close(self) -> None:
        pass

    def read(self) -> Term | None:
        return self._reach().read()

    def propose(self, term: Term) -> bool:
        return self._reach().propose(term)


PAIRS = [("memory", "memory"), ("sqlite", "file"), ("file", "sqlite")]


def make(kind: str, path: Path) -> StoreBackend:
    if kind == "memory":
        return MemoryBackend()
    return FileBackend(path / "files") if kind == "file" else SQLiteBackend(path / "store.db")


class Pair:
    """Two stores that can be switched off, and the replicated store on them."""

    def __init__(self, path: Path, kinds: tuple[str, str] = ("memory", "memory"), **options: Any) -> None:
        self.primary = Switch(make(kinds[0], path / "primary"))
        self.secondary = Switch(make(kinds[1], path / "secondary"))
        self.options = {"single_process": True, "health_interval": None, **options}
        self.store = self.again()

    def again(self, **options: Any) -> ReplicatedCheckpointStore:
        """Another store object on the same two."""
        return ReplicatedCheckpointStore(self.primary, self.secondary, **{**self.options, **options})

    @property
    def backend(self) -> Any:
        return self.store.backend

    @property
    def parts(self) -> tuple[str | None, str | None]:
        status = self.store.status()
        return status.active, status.standby


def opened(backend: StoreBackend) -> AbstractContextManager[Any]:
    """With all that the replicated backend has besides the contract."""
    return _opened(backend)


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
