"""What readers of a store object see of its own writes: nothing before it is durable and checked, and all the same."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from longrun.errors import LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Head, Query, Save, Write
from longrun.stores._file.disk import Disk
from longrun.stores._file.journal import Journal
from longrun.stores.base import Answer
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, owned, send, step
from tests.stores.file_tools import created, done, loaded, opened

PATIENCE = 30.0
pytestmark = pytest.mark.timeout(60)


class SlowDisk(Disk):
    """A sync that is told to waits until it is let go, and may fail then."""

    def __init__(self) -> None:
        self.slow = False
        self.reached, self.go = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def fdatasync(self, fd: int) -> None:
        if self.slow:
            self.reached.set()
            assert self.go.wait(PATIENCE)
            if self.error is not None:
                raise self.error
        super().fdatasync(fd)


class Held:
    """A write whose sync is under way."""

    def __init__(self, backend: FileBackend, disk: SlowDisk, write: Write) -> None:
        self._disk = disk
        disk.slow = True
        self._pool = ThreadPoolExecutor(1)
        self._answers = self._pool.submit(backend.commit, [write])
        assert disk.reached.wait(PATIENCE)

    def finish(self) -> Answer:
        self._disk.go.set()
        (answer,) = self._answers.result(PATIENCE)
        self._pool.shutdown()
        self._disk.slow = False
        return answer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def backend(path: Path, disk: SlowDisk) -> Iterator[FileBackend]:
    with opened(FileBackend(path, disk=disk)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


def waits(id: str, before: Head) -> Save:
    """The end of a step that waits for a signal."""
    save = step(id, before)
    return attrs.evolve(save, head=attrs.evolve(save.head, state=ExecutionState.WAITING, signal="go", owner=None))


def seen(backend: FileBackend) -> tuple[int, ExecutionState, int, bool]:
    """What all readers agree on: revision, state, checkpoint, and whether the next one is there."""
    found = loaded(backend, "a")
    (listed,) = backend.find(Query())
    assert listed.head == found.head
    assert backend.count(Query()) == {found.head.state: 1}
    rows = [row.seq for row in backend.boundaries("a")]
    assert rows[-1] == found.boundary.seq
    return found.head.revision, found.head.state, found.boundary.seq, backend.checkpoint("a", 2) is not None


def test_a_save_is_seen_by_nobody_before_it_is_durable_and_by_all_after_it(
    path: Path, backend: FileBackend, disk: SlowDisk
) -> None:
    """I1: its bytes are in the file, and neither `load` nor a listing tells of them; then both do."""
    new = owned("a")
    created(backend, new)
    before = seen(backend)
    size = (path / "live" / "a.0.jsonl").stat().st_size
    held = Held(backend, disk, waits("a", new.head))
    assert (path / "live" / "a.0.jsonl").stat().st_size > size
    assert seen(backend) == before
    assert held.finish() is None
    assert seen(backend) == (1, ExecutionState.WAITING, 2, True)


def test_a_save_whose_sync_failed_is_not_seen_until_it_was_repeated(backend: FileBackend, disk: SlowDisk) -> None:
    """I1, I10: the lines stay in the file until it is replaced; nobody was told of them."""
    new = owned("a")
    created(backend, new)
    before = seen(backend)
    held = Held(backend, disk, step("a", new.head))
    disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert isinstance(held.finish(), StoreUnavailableError)
    assert seen(backend) == before
    done(backend, step("a", new.head))
    assert seen(backend) == (1, ExecutionState.RUNNING, 2, True)


def test_what_was_given_back_is_said_to_be_although_somebody_has_taken_it_already(
    path: Path, backend: FileBackend, disk: SlowDisk
) -> None:
    """I3: the taker could only have it because it was given back, and goes on behind this very write."""
    new = owned("a")
    created(backend, new)
    held = Held(backend, disk, waits("a", new.head))
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", ids=("a",)))
        assert (given.head.revision, given.boundary.seq) == (1, 2)
        assert held.finish() is None
        assert loaded(backend, "a").head == given.head
        done(other, step("a", given.head))
        assert isinstance(backend.commit([waits("a", new.head)])[0], LeaseLostError), "asked again, it cannot be told"


def test_what_was_given_back_too_late_is_refused(
    path: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: the taker thought the owner dead, and has not read what that one writes just now."""
    monkeypatch.setattr("longrun.stores._file.journal.FRESH", -1.0)
    new = owned("a")
    created(backend, new)
    check = Journal.check_newest
    with opened(FileBackend(path)) as other:

        def overtaken(journal: Journal) -> None:
            check(journal)
            monkeypatch.setattr(Journal, "check_newest", check)
            assert len(other.claim(claim("new", dead=frozenset({"me"})))) == 1

        monkeypatch.setattr(Journal, "check_newest", overtaken)
        (answer,) = backend.commit([waits("a", new.head)])
        assert isinstance(answer, LeaseLostError)
        done(other, step("a", loaded(other, "a").head))
        assert loaded(other, "a").head.state is ExecutionState.RUNNING


def test_a_save_that_lost_its_fence_while_it_was_synced_is_never_seen(
    path: Path, backend: FileBackend, disk: SlowDisk
) -> None:
    """I3: another process took the execution before the save was checked. It may carry the save on, as durable by
    then; this object shows what the taker stored, and nothing that is taken back."""
    new = owned("a")
    created(backend, new)
    before = seen(backend)
    held = Held(backend, disk, step("a", new.head))
    assert seen(backend) == before
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
        assert isinstance(held.finish(), LeaseLostError)
        assert loaded(backend, "a").head == given.head
        (listed,) = backend.find(Query())
        assert listed.head == given.head
    assert backend._open.place.live.unsettled == {}  # the file's number may become another's


def test_a_message_is_seen_by_nobody_before_it_is_durable_and_not_missed_after_it(
    backend: FileBackend, disk: SlowDisk
) -> None:
    """I1: who looked at the inbox in between finds the message when it looks again."""
    new = owned("a")
    created(backend, new)
    done(backend, send("a"))
    assert backend.pending("me") == ["a"]
    held = Held(backend, disk, send("a"))
    assert [message.id for message in backend.messages("a")] == [1]
    assert [message.id for message in loaded(backend, "a").messages] == [1]
    assert backend.find(Query())
    assert held.finish() == 2
    assert [message.id for message in backend.messages("a")] == [1, 2]
    done(backend, step("a", new.head, take=(1,)))
    assert backend.pending("me") == ["a"]


def test_a_first_message_wakes_also_whom_looked_too_early(backend: FileBackend, disk: SlowDisk) -> None:
    """I1: the catalogue saw the file before the message in it counted."""
    new = owned("a")
    created(backend, new)
    done(backend, waits("a", new.head))
    held = Held(backend, disk, send("a"))
    assert [one.head.woken for one in backend.find(Query())] == [False]
    assert held.finish() == 1
    assert [one.head.woken for one in backend.find(Query())] == [True]
    assert [one.definition.id for one in backend.claim(claim("new"))] == ["a"]
