"""Two objects on one directory, as two processes would use it: what one does, the other sees at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError
from longrun.records import ExecutionState
from longrun.stored import QUEUE_WORKFLOW, Query
from longrun.stores._file.disk import Disk
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.stores.file_tools import created, done, ids_of, loaded, opened

FAILED = frozenset({ExecutionState.FAILED})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


def test_what_one_object_deletes_another_does_not_bring_back(backend: FileBackend, other: FileBackend) -> None:
    """An object that saw an execution end, and tidies up after it was deleted elsewhere, lists it no more."""
    created(backend, create("a", ExecutionState.COMPLETED), create("b", ExecutionState.COMPLETED))
    assert len(other.find(Query())) == 2
    assert backend.delete(["a"]) == [True]
    other.close()
    other.open()
    for one in (backend, other):
        assert [found.definition.id for found in one.find(Query())] == ["b"]
        assert one.count(Query()) == {ExecutionState.COMPLETED: 1}


def test_an_id_that_was_deleted_and_is_new_is_heard_of(backend: FileBackend, other: FileBackend) -> None:
    """I4: what is due is known to other objects by the bell alone, though they knew an older one of its id."""
    created(backend, create("a", ExecutionState.FAILED))
    (given,) = backend.claim(claim("me", ids=("a",), states=FAILED))
    done(backend, change("a", given.head, head_fields={"owner": None}))
    assert other.next_due() is None
    assert len(other.find(Query())) == 1
    assert backend.delete(["a"]) == [True]
    created(backend, create("a", ExecutionState.RUNNING))
    assert other.next_due() == 0.0
    assert ids_of(other.claim(claim())) == ["a"]


def test_what_is_claimed_for_a_retry_is_not_moved_away(backend: FileBackend, other: FileBackend) -> None:
    """I4: the messages of a failed execution reach its new owner, whoever tidies up meanwhile."""
    created(backend, create("a", ExecutionState.FAILED))
    (given,) = backend.claim(claim("me", ids=("a",), states=FAILED))
    done(other, send("a"))
    assert len(other.find(Query())) == 1
    other.close()
    other.open()
    assert [one.pending("me") for one in (backend, other)] == [["a"], ["a"]]
    done(backend, change("a", given.head, head_fields={"state": ExecutionState.RUNNING}))


def test_a_stale_owner_is_told_so_also_if_a_write_of_its_own_is_missing(
    backend: FileBackend, other: FileBackend
) -> None:
    """I3: the fence is compared before the revision."""
    new = owned("a")
    created(backend, new)
    assert ids_of(other.claim(claim("new", dead=frozenset({"me"})))) == ["a"]
    late = step("a", change("a", new.head).head)
    (answer,) = backend.commit([late])
    assert isinstance(answer, LeaseLostError)


class Halting(Disk):
    """Stops behind the renaming of an inbox until it is let go."""

    def __init__(self) -> None:
        self.moved, self.go = threading.Event(), threading.Event()

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        super().rename(old, new, old_dir, new_dir)
        if new.endswith(".inbox"):
            self.moved.set()
            assert self.go.wait(20)


def test_messages_are_seen_while_their_execution_moves(path: Path, other: FileBackend) -> None:
    """I1: a failed execution keeps its messages; they move to done/ a moment before its journal does."""
    disk = Halting()
    backend = FileBackend(path, disk=disk)
    backend.open()
    done(backend, create("a", ExecutionState.FAILED), send("a", key="k"))
    known = loaded(other, "a")
    assert len(known.messages) == 1
    closing = threading.Thread(target=backend.close)
    closing.start()
    try:
        assert disk.moved.wait(20)
        assert loaded(other, "a") == known
        assert other.sent("a") == (1, {"k": 1})
    finally:
        disk.go.set()
        closing.join()
    assert loaded(other, "a") == known


def test_what_a_dead_owner_changed_last_is_known_to_who_claims_it(backend: FileBackend, other: FileBackend) -> None:
    """I4: an owner rings no bell while it goes on owning; its last word counts all the same, and at once."""
    new = owned("a", state=ExecutionState.WAITING)
    done(backend, new, change("a", new.head, head_fields={"signal": "go"}))
    assert other.claim(claim("new", dead=frozenset({"me"}))) == []
    known = loaded(other, "a").head
    done(backend, change("a", known, head_fields={"state": ExecutionState.RUNNING, "signal": None}))
    assert ids_of(other.claim(claim("new", dead=frozenset({"me"})))) == ["a"]


def test_what_was_deleted_elsewhere_is_not_there_for_who_knew_it(backend: FileBackend, other: FileBackend) -> None:
    """Its journal was open here; still the answer is that there is no such execution."""
    new = create("a", ExecutionState.FAILED)
    created(backend, new)
    (given,) = backend.claim(claim("me", ids=("a",), states=FAILED))
    assert other.delete(["a"]) == [True]
    (answer,) = backend.commit([step("a", given.head)])
    assert isinstance(answer, ExecutionNotFoundError)
    assert backend.load("a") is None


class Counting(Disk):
    """Counts the looks at files."""

    looks = 0

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        self.looks += 1
        return super().stat(name, dir_fd)


def test_what_executors_ask_for_all_the_time_is_told_by_the_bell(path: Path, other: FileBackend) -> None:
    """With very many parked executions a look at each file takes half a second, and is left to those who list them."""
    created(other, *[create(f"x{n}", ExecutionState.WAITING, head_fields={"signal": "go"}) for n in range(100)])
    created(other, owned("theirs"), create("child", parent_id="x1"))
    disk = Counting()
    with opened(FileBackend(path, disk=disk)) as backend:
        assert len(backend.find(Query(limit=200))) == 102
        assert disk.looks >= 100
        disk.looks = 0
        queues = Query(workflows=frozenset({QUEUE_WORKFLOW}))
        assert backend.find(queues) == []
        created(other, create("q", ExecutionState.PAUSED, workflow=QUEUE_WORKFLOW))
        assert [one.definition.id for one in backend.find(queues)] == ["q"]
        assert [one.definition.id for one in backend.find(Query(owner="me"))] == ["theirs"]
        assert disk.looks < 20
        assert [one.definition.id for one in backend.find(Query(parent_id="x1"))] == ["child"]
