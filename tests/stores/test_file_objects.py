"""Two objects on one directory, as two processes would use it: what one does, the other sees at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import CorruptDataError, ExecutionNotFoundError, LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import QUEUE_WORKFLOW, Query
from longrun.stores._file import catalog, place
from longrun.stores._file.disk import Disk
from longrun.stores._file.place import Place
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.stores.file_tools import CountingDisk, created, done, ids_of, loaded, opened

FAILED = frozenset({ExecutionState.FAILED})


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


def test_who_writes_is_not_told_of_it(
    backend: FileBackend, other: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To sweep after each start and end of one's own would stand in the way of the steps."""
    backend.wait(0.0)
    other.wait(0.0)
    created(backend, create("a"), create("b"))
    assert backend.wait(0.0) is False
    assert other.wait(0.0) is True
    assert other.wait(0.0) is False
    created(backend, create("c"))
    done(other, send("c"))
    created(backend, create("d"))
    assert backend.wait(0.0) is True
    assert backend.wait(0.0) is False
    monkeypatch.setattr(place, "BELL_LIMIT", 0)  # from now on, whoever rings begins the bell anew
    done(other, send("c"))
    assert backend.wait(0.0) is True
    created(backend, create("e"))
    other.wait(0.0)
    created(backend, create("f"))
    done(other, send("f"))
    assert backend.wait(0.0) is True


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


class CutShort(Disk):
    """Fails in the middle of a move: the inbox has moved, the journal has not."""

    def __init__(self) -> None:
        self.sick = False

    def unlink(self, name: str, dir_fd: int) -> None:
        self._check(name)
        super().unlink(name, dir_fd)

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        self._check(new)
        super().rename(old, new, old_dir, new_dir)

    def _check(self, name: str) -> None:
        if self.sick and name == "a.0.jsonl":
            raise OSError(errno.EIO, "the disk is sick")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_messages_that_went_to_done_ahead_of_their_execution_reach_who_retries_it(path: Path) -> None:
    """I1: they come back, with their keys and numbers."""
    disk = CutShort()
    with opened(FileBackend(path, disk=disk)) as backend:
        done(backend, create("a", ExecutionState.FAILED), send("a", "one", key="k"))
        disk.sick = True
    assert (names(path / "live"), names(path / "inbox")) == ({"a.0.jsonl"}, set())
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("me", ids=("a",), states=FAILED))
        assert [message.name for message in given.messages] == ["one"]
        assert done(other, send("a", "one", key="k"), send("a", "two")) == [1, 2]
        assert [message.name for message in other.messages("a")] == ["one", "two"]


def test_a_message_to_what_has_half_gone_to_done_stands_behind_the_others(path: Path) -> None:
    """I1"""
    disk = CutShort()
    with opened(FileBackend(path, disk=disk)) as backend:
        done(backend, create("a", ExecutionState.FAILED), send("a", "one"))
        disk.sick = True
    with opened(FileBackend(path)) as other:
        assert done(other, send("a", "two")) == [2]
        (given,) = other.claim(claim("me", ids=("a",), states=FAILED))
        assert [message.name for message in given.messages] == ["one", "two"]


def test_a_message_to_what_has_half_come_back_from_done_replaces_none(path: Path) -> None:
    """I1: it has the next number, and both reach who retries the execution."""
    disk = CutShort()
    with opened(FileBackend(path, disk=disk)) as backend:
        done(backend, create("a", ExecutionState.FAILED), send("a", "one"))
        backend.close()
        backend.open()
        disk.sick = True
        retry = claim("me", ids=("a",), states=FAILED)
        with pytest.raises(StoreUnavailableError, match="the disk is sick"):
            backend.claim(retry)
        disk.sick = False
        assert (names(path / "done"), names(path / "inbox")) == ({"a.jsonl"}, {"a.jsonl"})
        assert done(backend, send("a", "two")) == [2]
        (given,) = backend.claim(retry)
        assert [message.name for message in given.messages] == ["one", "two"]


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


def test_a_look_at_every_file_stands_in_nobodys_way(
    path: Path, backend: FileBackend, other: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written by a process that died before it rang is found bit by bit; what was rung is heard meanwhile."""
    created(backend, *[create(f"x{n}", ExecutionState.WAITING, head_fields={"signal": "go"}) for n in range(20)])
    assert other.next_due() is None
    monkeypatch.setattr(catalog, "SLICE", -1.0)
    monkeypatch.setattr(catalog, "LOOK_AGAIN", 0.0)
    monkeypatch.setattr(catalog, "SHARE", 0)
    assert len(other.find(Query())) == 20
    with monkeypatch.context() as dying:
        dying.setattr(Place, "ring", lambda *names: None)
        created(backend, create("silent"))
    assert other.next_due() is None
    created(backend, create("told"))
    assert ids_of(other.claim(claim())) == ["told"]
    looks = 1
    while other.next_due() is None:
        looks += 1
    assert 20 < looks < 80
    with opened(FileBackend(path)) as new:
        assert new.next_due() == 0.0, "who knows nothing yet looks at everything"
    assert ids_of(other.claim(claim())) == ["silent"]


class Meanwhile(CountingDisk):
    """Lets something happen just before the next generation of a journal gets its name."""

    def __init__(self) -> None:
        super().__init__()
        self.happens: list[Callable[[], object]] = []

    def link(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        if self.happens:
            self.happens.pop()()
        super().link(old, new, old_dir, new_dir)


def test_what_its_owner_finishes_in_the_moment_of_the_takeover_stays_finished(path: Path, backend: FileBackend) -> None:
    """I8: the taker thought it dead, and reads what is stored only after it has shut the owner out."""
    new = owned("a")
    created(backend, new)
    end = step("a", new.head)
    end = attrs.evolve(end, head=attrs.evolve(end.head, state=ExecutionState.COMPLETED, owner=None))
    disk = Meanwhile()
    with opened(FileBackend(path, disk=disk)) as taker:
        assert len(taker.find(Query())) == 1
        disk.happens.append(lambda: done(backend, end))
        assert taker.claim(claim("new", dead=frozenset({"me"}))) == []
        assert not disk.happens
        assert loaded(taker, "a").head == end.head
        assert taker.count(Query()) == {ExecutionState.COMPLETED: 1}
    assert disk.left == set()


def test_a_journal_that_was_lost_and_came_back_is_open_once(path: Path, other: FileBackend) -> None:
    """Another object on the directory took it over for an owner whose saves come through this one."""
    disk = CountingDisk()
    with opened(FileBackend(path, disk=disk)) as backend:
        created(backend, owned("a"))
        (given,) = other.claim(claim("me", dead=frozenset({"me"})))
        done(backend, step("a", given.head))
    assert disk.left == set()


def test_what_was_given_back_is_seen_as_others_leave_it(backend: FileBackend, other: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    done(backend, change("a", new.head, head_fields={"owner": None}))
    (given,) = other.claim(claim("you"))
    done(other, change("a", given.head, head_fields={"state": ExecutionState.BLOCKED, "owner": None}))
    assert [one.head.state for one in backend.find(Query())] == [ExecutionState.BLOCKED]


def damage(journal: Path) -> None:
    """Nothing but its first line can be read."""
    first, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(first + b"\n" + rest.swapcase())


def test_what_is_found_unreadable_by_its_taker_is_blocked_for_all(path: Path, backend: FileBackend) -> None:
    """I5: by its head alone, in this object and in every other; and its owner is shut out."""
    new = owned("a")
    created(backend, new)
    disk = Meanwhile()
    with opened(FileBackend(path, disk=disk)) as taker:
        disk.happens.append(lambda: damage(path / "live" / "a.0.jsonl"))
        assert taker.claim(claim("new", dead=frozenset({"me"}))) == []
        with opened(FileBackend(path)) as later:
            for one in (taker, later):
                (found,) = one.find(Query())
                assert (found.head.state, found.head.owner) == (ExecutionState.BLOCKED, None)
                assert (found.head.fence, found.head.revision) == (2, 1)
                assert one.next_due() is None
    (answer,) = backend.commit([step("a", new.head)])
    assert isinstance(answer, LeaseLostError)


def test_a_finished_one_that_is_found_unreadable_is_left_as_it_is(path: Path, backend: FileBackend) -> None:
    """Who wanted to retry it leaves nothing behind."""
    created(backend, create("a", ExecutionState.FAILED))
    disk = Meanwhile()
    with opened(FileBackend(path, disk=disk)) as taker:
        disk.happens.append(lambda: damage(path / "live" / "a.0.jsonl"))
        assert taker.claim(claim("me", ids=("a",), states=FAILED)) == []
        assert not disk.happens
        assert [file.name for file in (path / "live").iterdir()] == ["a.0.jsonl"]
        assert [one.head.state for one in taker.find(Query())] == [ExecutionState.BLOCKED]
        with pytest.raises(CorruptDataError):
            taker.load("a")
    assert disk.left == set()


def test_what_one_object_takes_is_not_due_for_another(backend: FileBackend, other: FileBackend) -> None:
    created(backend, create("a"))
    assert other.next_due() == 0.0
    assert ids_of(backend.claim(claim())) == ["a"]
    assert other.next_due() is None


def test_how_many_steps_there_are_is_seen_behind_a_save(backend: FileBackend, other: FileBackend) -> None:
    new = owned("a")
    done(backend, new, step("a", new.head))
    assert [one.definition.total for one in other.find(Query())] == [3]
    late = owned("b", steps=(), total=None)
    named = change("b", late.head, steps=("one", "two"))
    done(backend, late, named, change("b", named.head))
    assert {one.definition.id: one.definition.total for one in other.find(Query())} == {"a": 3, "b": 2}


def test_a_stale_owner_that_comes_with_nothing_at_hand_leaves_no_file_open(path: Path, backend: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    assert ids_of(backend.claim(claim("new", dead=frozenset({"me"})))) == ["a"]
    disk = CountingDisk()
    with opened(FileBackend(path, disk=disk)) as stale:
        (answer,) = stale.commit([step("a", new.head)])
        assert isinstance(answer, LeaseLostError)
    assert disk.left == set()


def test_what_was_unreadable_and_is_mended_is_shown_as_it_is(path: Path, backend: FileBackend) -> None:
    created(backend, create("a"))
    journal = path / "live" / "a.0.jsonl"
    whole = journal.read_bytes()
    with opened(FileBackend(path)) as other:
        journal.write_bytes(whole.swapcase())
        (found,) = other.find(Query())
        assert (found.head.state, found.definition.workflow) == (ExecutionState.BLOCKED, "")
        journal.write_bytes(whole)
        (found,) = other.find(Query())
        assert (found.head.state, found.definition.workflow) == (ExecutionState.RUNNING, "flow")


class Vanishing(Disk):
    """Files are gone in the moment in which they are opened."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, set[str]()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if name in self.files:
            self.files.discard(name)
            (self.path / "live" / name).unlink()
        return super().open(name, flags, dir_fd)


def test_what_is_deleted_while_it_is_looked_at_is_no_longer_listed(path: Path, backend: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    disk = Vanishing(path)
    with opened(FileBackend(path, disk=disk)) as other:
        assert len(other.find(Query())) == 1
        done(backend, change("a", new.head, head_fields={"owner": None}))
        disk.files.add("a.0.jsonl")
        assert other.find(Query()) == []


def test_what_has_moved_away_is_forgotten(backend: FileBackend) -> None:
    """I16: done/ has an index of its own."""
    created(backend, create("a", ExecutionState.COMPLETED), create("b"))
    backend._open.writes.janitor.tidy()
    catalog = backend._open.writes.catalog
    assert list(catalog.entries.by_stem) == ["b"]
    assert catalog.finished == {}


def test_a_message_wakes_also_for_whom_it_was_the_first_to_look(path: Path, backend: FileBackend) -> None:
    new = create("a", ExecutionState.WAITING, head_fields={"signal": "go"})
    created(backend, new)
    with opened(FileBackend(path)) as other:
        assert other.claim(claim()) == []
        done(backend, send("a"))
        assert other.load("a") is not None
        assert [one.head.woken for one in other.find(Query())] == [True]
        assert ids_of(other.claim(claim())) == ["a"]


@pytest.mark.parametrize("fields", [{"owner": None}, {"state": ExecutionState.FAILED}])
def test_what_is_given_back_or_over_is_no_longer_at_hand(backend: FileBackend, fields: dict[str, Any]) -> None:
    """I16: neither its file nor anything in memory."""
    new = owned("a")
    created(backend, new)
    journals = backend._open.writes.journals
    assert journals.get("a") is not None
    done(backend, change("a", new.head, head_fields=fields))
    assert journals.get("a") is None


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_owner_may_save_through_another_object(backend: FileBackend, other: FileBackend, size: int) -> None:
    """It goes on behind the last save, also where only the ends of a long journal are read."""
    new = owned("a", data=b"x" * size)
    second = step("a", new.head)
    done(backend, new, second)
    third = step("a", second.head)
    done(other, third)
    done(other, step("a", third.head))
    assert [row.seq for row in backend.boundaries("a")] == [1, 2, 3, 4]
