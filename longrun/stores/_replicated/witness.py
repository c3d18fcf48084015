"""The witness: a third place that says which term is the newest, so that two stores never both become the active one.

Place in the life of an execution: between a store that died and the one that goes on. A witness does one thing: of all
who propose a term of the same number, it lets one win, durably. It is asked only when something changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs

from longrun.errors import ConfigError, StoreUnavailableError
from longrun.records import ExecutionState, check_id
from longrun.stored import WITNESS_WORKFLOW, Boundary, Create, Definition, Head, Query, Save
from longrun.stores._replicated.term import Term
from longrun.stores.base import StoreBackend
from longrun.stores.store import CheckpointStore

_FILE = re.compile(r"term-(\d{12})\.json")


@runtime_checkable
class Witness(Protocol):
    """What a pair asks of its witness. A witness that cannot be reached raises `StoreUnavailableError`."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def read(self) -> Term | None:
        """The newest term; None if there never was one."""

    def propose(self, term: Term) -> bool:
        """Store it if there is none of its number or of a higher one, in one atomic act and durably. True if this very
        term is the one that is stored, also when it was stored by an earlier call whose answer was lost."""


class DirectoryWitness:
    """A witness in a directory, one file a term. On a file system that all processes share and whose `link` is atomic;
    put it on neither of the two machines that the stores are on."""

    creates: bool = True
    """Whether `open` makes the directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return "<DirectoryWitness>"

    def open(self) -> None:
        if not self.creates:
            return
        with _reaching():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def close(self) -> None:
        pass

    def read(self) -> Term | None:
        with _reaching():
            numbers = self._numbers()
            return Term.from_text(self._file(numbers[-1]).read_text("utf-8")) if numbers else None

    def propose(self, term: Term) -> bool:
        with _reaching():
            newest = self.read()
            if newest is not None and newest.generation >= term.generation:
                if newest == term:  # stored by an earlier call, which may have failed before it was durable
                    self._sync()
                return newest == term
            self._link(term)
            self._sync()
            won = self.read() == term
            for number in self._numbers()[:-2]:
                self._file(number).unlink(missing_ok=True)
            return won

    def _link(self, term: Term) -> None:
        """Whole or not at all, and only if there is none: what link(2) promises."""
        fd, temporary = tempfile.mkstemp(prefix=".term-", dir=self._path)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(term.to_text().encode())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self._file(term.generation))
        finally:
            os.unlink(temporary)

    def _sync(self) -> None:
        directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _file(self, generation: int) -> Path:
        return self._path / f"term-{generation:012d}.json"

    def _numbers(self) -> list[int]:
        return sorted(int(found[1]) for name in os.listdir(self._path) if (found := _FILE.fullmatch(name)))


class StoreWitness:
    """A witness in a third store, one paused execution a term. Several pairs can share it, each under a name."""

    creates: bool = True
    """Whether `open` makes the store."""

    def __init__(self, store: CheckpointStore | StoreBackend, *, name: str = "default") -> None:
        self._backend = store.backend if isinstance(store, CheckpointStore) else store
        if not self._backend.fenced:
            raise ConfigError("witness", self._backend.kind, "give a store that several processes can share")
        self._name = check_id(name)

    def __repr__(self) -> str:
        return f"<StoreWitness {self._backend.kind}>"

    def open(self) -> None:
        self._backend.creates = self._backend.creates and self.creates
        self._backend.open()

    def close(self) -> None:
        self._backend.close()

    def read(self) -> Term | None:
        ours = {"pair": self._name}
        found = self._backend.find(Query(workflows=frozenset({WITNESS_WORKFLOW}), metadata=ours, limit=1))
        return Term.from_text(found[0].head.reason or "") if found else None

    def propose(self, term: Term) -> bool:
        newest = self.read()
        if newest is not None and newest.generation >= term.generation and newest != term:
            return False
        self._commit(self._record(term))  # also where it is there already: the call that stored it may have failed
        won = self.read() == term
        for number in range(max(1, term.generation - 3), term.generation - 1):
            self._remove(self._id(number))
        return won

    def _commit(self, write: Create) -> None:
        for answer in self._backend.commit([write]):
            if isinstance(answer, StoreUnavailableError):
                raise answer

    def _remove(self, id: str) -> None:
        old = self._backend.load(id)
        if old is not None:
            ended = attrs.evolve(old.head, revision=old.head.revision + 1, state=ExecutionState.COMPLETED, ended=0.0)
            self._backend.commit([Save(id=id, head=ended)])
            self._backend.delete([id])

    def _id(self, generation: int) -> str:
        return f"{WITNESS_WORKFLOW}.{self._name}.{generation}"

    def _record(self, term: Term) -> Create:
        """Paused and held, so that nobody takes it or tidies it away. A listing shows the newest first: the number
        stands in for the time."""
        moment = float(term.generation)
        return Create(
            definition=Definition(
                id=self._id(term.generation),
                workflow=WITNESS_WORKFLOW,
                metadata={"pair": self._name},
                created=moment,
            ),
            head=Head(state=ExecutionState.PAUSED, hold=True, seq=1, updated=moment, reason=term.to_text()),
            boundary=Boundary(seq=1, kind="start", step=0, next=0, ended=moment, data=b"null", size=4),
        )


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError("witness", f"its directory cannot be used ({error.strerror})") from error
