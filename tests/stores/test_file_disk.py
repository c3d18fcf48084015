"""Bad disks: every system call of the file store can fail, and nothing is acknowledged that is not durable (I10)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longrun.errors import LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Query, Write
from longrun.stores._file.disk import Disk
from longrun.stores._file.syncing import SyncPool
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.crashing import PATIENCE
from tests.stores.file_tools import CountingDisk, FolderDisk, created, done, loaded, opened

CALLS = ("write", "fdatasync", "fsync", "rename", "link", "open")


class BadDisk(CountingDisk):
    """Counts calls, and makes the n-th of a kind and those after it fail, once for each code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kind = ""
        self.at = -1
        self.errors: list[OSError] = []
        self.synced: list[int] = []
        self.short = False

    def fail(self, kind: str, at: int, *codes: int) -> None:
        self.kind, self.at, self.calls = kind, at, 0
        self.errors = [OSError(code, os.strerror(code)) for code in codes]

    def _count(self, kind: str) -> None:
        if kind == self.kind:
            self.calls += 1
            if self.at <= self.calls < self.at + len(self.errors):
                raise self.errors[self.calls - self.at]

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self._count("open")
        return super().open(name, flags, dir_fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._count("write")
        return super().write(fd, data[: max(1, len(data) // 3)] if self.short else data)

    def fdatasync(self, fd: int) -> None:
        self._count("fdatasync")
        self.synced.append(os.fstat(fd).st_ino)
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._count("unlink")
        super().unlink(name, dir_fd)

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        self._count("stat")
        return super().stat(name, dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        self._count("fstat")
        return super().fstat(fd)

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        self._count("rename")
        super().rename(old, new, old_dir, new_dir)

    def link(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        self._count("link")
        super().link(old, new, old_dir, new_dir)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


class BadQueue(BadDisk):
    """The same for a disk that syncs many files with one call: each may fail in it."""

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        return [self._synced(fd) for fd in fds]

    def _synced(self, fd: int) -> OSError | None:
        try:
            self.fdatasync(fd)
        except OSError as error:
            return error
        return None


@pytest.fixture(params=[BadDisk, BadQueue])
def disk(request: pytest.FixtureRequest) -> BadDisk:
    made: BadDisk = request.param()
    return made


@pytest.fixture
def backend(path: Path, disk: BadDisk) -> Iterator[FileBackend]:
    """Whatever fails, no descriptor is left open in the end."""
    with opened(FileBackend(path, disk=disk)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend
    assert disk.left == set()


def sick(fd: int, size: int) -> None:
    raise OSError(errno.EIO, "the disk is sick")


def attempt(backend: StoreBackend, write: Write) -> Any:
    """The answer, or the error that the commit raised."""
    try:
        return backend.commit([write])[0]
    except StoreUnavailableError as error:
        return error


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_failed_save_is_not_acknowledged_and_can_be_repeated(
    path: Path, backend: FileBackend, disk: BadDisk, call: str, code: int
) -> None:
    """I10, I9: the old state stays readable, and the same write goes through when the disk is well again."""
    new = owned("a")
    save = step("a", new.head, put={"e": b"1"})
    done(backend, new)
    disk.fail(call, 1, code, code)
    for _ in range(2):
        error = attempt(backend, save)
        assert isinstance(error, StoreUnavailableError)
        assert isinstance(error.__cause__, OSError)
        with opened(FileBackend(path)) as other:
            assert other.load("a").head.revision in (0, 1)  # type: ignore[union-attr]
    assert attempt(backend, save) is None
    assert attempt(backend, step("a", save.head)) is None
    with opened(FileBackend(path)) as other:
        found = loaded(other, "a")
        assert (found.head.revision, found.entries) == (2, {"e": b"1"})
        assert [row.seq for row in other.boundaries("a")] == [1, 2, 3]


def test_a_failed_sync_is_never_repeated_on_the_same_file(path: Path, backend: FileBackend, disk: BadDisk) -> None:
    """I10: the kernel may have dropped the pages; what was acknowledged is carried over to a new file."""
    new = owned("a")
    save = step("a", new.head)
    done(backend, new)
    before = (path / "live" / "a.0.jsonl").stat().st_ino
    disk.fail("fdatasync", 1, errno.EIO)
    assert isinstance(attempt(backend, save), StoreUnavailableError)
    disk.synced.clear()
    assert attempt(backend, save) is None
    after = (path / "live" / "a.0.jsonl").stat().st_ino
    assert after != before
    assert set(disk.synced) == {after}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("at", range(1, 9))
def test_whatever_call_fails_nothing_is_acknowledged_falsely(
    path: Path, backend: FileBackend, disk: BadDisk, call: str, at: int
) -> None:
    """I10: creation, save, message, claim, finish: each is there if it was acknowledged; work goes on after that."""
    new = owned("a")
    save = step("a", new.head, put={"e": b"1"})
    free = create("b")
    disk.fail(call, at, errno.EIO)
    acknowledged = {"a": attempt(backend, new), "b": attempt(backend, free), "save": attempt(backend, save)}
    acknowledged["send"] = attempt(backend, send("a", key="k"))
    try:
        given = backend.claim(claim("me", ids=("b",)))
    except StoreUnavailableError:
        given = []
    disk.fail("", 0)
    with opened(FileBackend(path)) as other:
        if acknowledged["a"] is True:
            assert loaded(other, "a").head.revision >= (1 if acknowledged["save"] is None else 0)
            assert len(other.messages("a")) >= (1 if acknowledged["send"] == 1 else 0)
        if acknowledged["b"] is True:
            assert loaded(other, "b").head.owner == ("me" if given else None)
    assert attempt(backend, new) in (True, False)
    assert attempt(backend, save) is None
    assert attempt(backend, send("a", key="k")) == 1
    assert attempt(backend, free) in (True, False)
    if not given:
        given = backend.claim(claim("me", ids=("b",)))
    assert attempt(backend, step("b", given[0].head)) is None
    with opened(FileBackend(path)) as other:
        assert (loaded(other, "a").head.revision, loaded(other, "b").head.revision) == (1, 1)
        assert [message.id for message in other.messages("a")] == [1]


def test_short_and_interrupted_writes_are_completed(backend: FileBackend, disk: BadDisk) -> None:
    """A call may write less than it was given, and may be interrupted before it wrote anything."""
    disk.short = True
    new = owned("a", data=b"x" * 10_000)
    done(backend, new)
    disk.fail("write", 2, errno.EINTR, errno.EINTR)
    save = step("a", new.head, put={"e": b"y" * 10_000})
    done(backend, save, send("a", payload=b"z" * 1000))
    found = loaded(backend, "a")
    assert (found.head, found.entries["e"]) == (save.head, b"y" * 10_000)


def test_one_bad_journal_leaves_the_others_of_the_batch(backend: FileBackend, disk: BadDisk) -> None:
    """I10: only its own save is refused."""
    news = [owned(f"x{n}") for n in range(6)]
    done(backend, *news)
    disk.fail("fdatasync", 3, errno.EIO)
    answers = backend.commit([step(new.id, new.head) for new in news])
    assert sum(isinstance(answer, StoreUnavailableError) for answer in answers) == 1
    assert answers.count(None) == 5
    done(backend, *[step(new.id, new.head) for new in news])
    assert [loaded(backend, new.id).head.revision for new in news] == [1] * 6


def test_a_journal_that_cannot_be_mended_leaves_the_others_of_the_batch(backend: FileBackend, disk: BadDisk) -> None:
    """I10: a sync has failed; when its file cannot be replaced either, the saves of others are made all the same."""
    news = [owned(f"x{n}") for n in range(3)]
    done(backend, *news)
    disk.fail("fdatasync", 1, errno.EIO)
    assert isinstance(attempt(backend, step("x0", news[0].head)), StoreUnavailableError)
    disk.fail("fsync", 1, errno.EIO)
    answers = backend.commit([step(new.id, new.head) for new in news])
    assert isinstance(answers[0], StoreUnavailableError)
    assert answers[1:] == [None, None]


@pytest.mark.parametrize(("call", "at"), [("fsync", 1), ("fsync", 2), ("rename", 1)])
def test_a_file_that_could_not_be_replaced_for_good_acknowledges_nothing(
    path: Path, backend: FileBackend, disk: BadDisk, call: str, at: int
) -> None:
    """I10: neither before the new file is durable under its name, nor is anything left of one that was not."""
    new = owned("a")
    save = step("a", new.head)
    created(backend, new)
    disk.fail("fdatasync", 1, errno.EIO)
    assert isinstance(attempt(backend, save), StoreUnavailableError)
    disk.fail(call, at, errno.EIO)
    assert isinstance(attempt(backend, save), StoreUnavailableError)
    assert attempt(backend, save) is None
    assert list((path / "tmp").iterdir()) == []


def test_a_write_that_failed_leaves_the_file_as_it_was(path: Path, backend: FileBackend, disk: BadDisk) -> None:
    """Unlike a failed sync it needs no new file."""
    new = owned("a")
    created(backend, new)
    before = (path / "live" / "a.0.jsonl").stat()
    disk.fail("write", 1, errno.ENOSPC)
    assert isinstance(attempt(backend, step("a", new.head)), StoreUnavailableError)
    assert (path / "live" / "a.0.jsonl").stat().st_size == before.st_size
    assert attempt(backend, step("a", new.head)) is None
    assert (path / "live" / "a.0.jsonl").stat().st_ino == before.st_ino


def test_open_journals_are_bounded_and_the_last_used_stays_open(backend: FileBackend, disk: BadDisk) -> None:
    """I16: however many are owned. Whoever saves again finds its file open."""
    journals = backend._open.writes.journals
    journals.limit = 4
    idle = len(disk.left)
    news = [owned(f"x{n}") for n in range(12)]
    for new in news:
        created(backend, new)
    for new in news[:6]:
        done(backend, step(new.id, new.head))
        assert len(disk.left) <= idle + 4
    disk.fail("open", 1, errno.EIO)
    done(backend, step("x5", step("x5", news[5].head).head))


@pytest.mark.parametrize("at", [1, 2])
def test_a_save_is_not_acknowledged_while_nobody_can_look_whether_it_is_ours(
    backend: FileBackend, disk: BadDisk, at: int
) -> None:
    """I3, I10: the save is durable, but a newer generation may be there."""
    new = owned("a")
    save = step("a", new.head)
    created(backend, new)
    disk.fail("stat", at, errno.EIO)
    assert isinstance(attempt(backend, save), StoreUnavailableError)
    assert attempt(backend, save) is None


def test_an_owner_that_looked_just_now_looks_only_behind_its_write(
    backend: FileBackend, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the sync, for a newer generation and for its own journal; before the write only after it was away."""
    new = owned("a")
    created(backend, new)
    first = step("a", new.head)
    disk.fail("stat", 0)
    done(backend, first)
    assert disk.calls == 2
    monkeypatch.setattr("longrun.stores._file.journal.FRESH", -1.0)
    disk.fail("stat", 0)
    done(backend, step("a", first.head))
    assert disk.calls == 3


def test_a_new_execution_takes_no_save_before_its_name_is_durable(backend: FileBackend, disk: BadDisk) -> None:
    """I1: its owner did not hear whether it was made, and goes on; a power cut would take all of it."""
    new = owned("a")
    disk.fail("fsync", 1, *[errno.EIO] * 100)
    assert isinstance(attempt(backend, new), StoreUnavailableError)
    assert isinstance(attempt(backend, step("a", new.head)), StoreUnavailableError)
    disk.fail("", 0)
    assert attempt(backend, new) in (True, False)
    assert attempt(backend, step("a", new.head)) is None


def test_of_several_that_are_claimed_those_are_given_that_could_be_written(backend: FileBackend, disk: BadDisk) -> None:
    """I10: the other is free as before; if there is none to give, the reason is said."""
    created(backend, create("a"), create("b"))
    disk.fail("fdatasync", 1, errno.EIO)
    (first,) = backend.claim(claim("me"))
    disk.fail("fdatasync", 1, errno.EIO)
    with pytest.raises(StoreUnavailableError):
        backend.claim(claim("me"))
    (second,) = backend.claim(claim("me"))
    assert {first.definition.id, second.definition.id} == {"a", "b"}
    assert (first.head.fence, second.head.fence) == (1, 1)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("call", ["stat", "fstat", "write", "fsync", "unlink"])
def test_a_claim_that_fails_takes_nothing(path: Path, backend: FileBackend, disk: BadDisk, call: str, at: int) -> None:
    """I10: whatever fails, it is free as before, or owned by who was told so."""
    created(backend, create("a"))
    disk.fail(call, at, errno.EIO)
    try:
        given = backend.claim(claim("me", ids=("a",)))
    except StoreUnavailableError:
        given = []
    disk.fail("", 0)
    given = given or backend.claim(claim("me", ids=("a",)))
    assert len(given) == 1
    assert attempt(backend, step("a", given[0].head)) is None


def stuck(name: str, dir_fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["fsync", "write", "stat"])
def test_a_claim_that_cannot_be_taken_back_is_found_by_its_owner(
    backend: FileBackend, disk: BadDisk, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """I9: nobody was told of it and nobody else may have it: its owner, which asks what it has, has to hear of it."""
    created(backend, create("a"), create("b"))
    assert backend.pending("me") == []
    for at in range(1, 20):
        disk.fail(call, at, errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "unlink", stuck)
            with contextlib.suppress(StoreUnavailableError):
                backend.claim(claim("me", dead=frozenset(["me"])))
        disk.fail("", 0)
        mine = {stored.definition.id for stored in backend.find(Query(owner="me"))}
        assert mine == {id for id in "ab" if loaded(backend, id).head.owner == "me"}
    assert len(backend.claim(claim("me", dead=frozenset(["me"])))) == 2


@pytest.mark.parametrize("ask", [lambda backend: backend.pending("me"), lambda backend: backend.find(Query())])
def test_what_could_not_be_looked_at_is_looked_at_again(
    path: Path, backend: FileBackend, disk: BadDisk, ask: Callable[[FileBackend], object]
) -> None:
    """What others rang for is not forgotten because the disk failed when it was to be read."""
    assert backend.claim(claim("me")) == []
    with opened(FileBackend(path)) as other:
        created(other, create("a"), create("b"))
    for at in range(1, 20):
        disk.fail("stat", at, errno.EIO)
        with contextlib.suppress(StoreUnavailableError):
            ask(backend)
    disk.fail("", 0)
    assert len(backend.claim(claim("me"))) == 2


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_message_that_was_not_acknowledged_leaves_no_trace(
    path: Path, backend: FileBackend, disk: BadDisk, call: str
) -> None:
    """I10: nobody sees it, and the next one is number 1 and is seen."""
    done(backend, owned("a"))
    disk.fail(call, 1, errno.EIO)
    assert isinstance(attempt(backend, send("a")), StoreUnavailableError)
    with opened(FileBackend(path)) as other:
        assert other.messages("a") == []
        assert attempt(backend, send("a", "again")) == 1
        for one in (backend, other):
            assert [(message.id, message.name) for message in one.messages("a")] == [(1, "again")]


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_message_that_could_not_be_taken_back_is_made_durable_anew(
    path: Path, backend: FileBackend, disk: BadDisk, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """I9, I10: it may be there or not; whoever sends it again is told that it is there, and then it is, for all."""
    done(backend, create("a", ExecutionState.WAITING, head_fields={"signal": "s"}))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "truncate", sick)
        disk.short = call == "write"
        disk.fail(call, 2 if call == "write" else 1, errno.EIO)
        assert isinstance(attempt(backend, send("a", "s", key="k")), StoreUnavailableError)
        disk.short = False
    torn = (path / "inbox/a.jsonl").stat().st_ino
    disk.synced.clear()
    disk.fail("fsync", 1, errno.EIO)
    assert isinstance(attempt(backend, send("a", "s", key="k")), StoreUnavailableError)
    disk.fail("", 0)
    assert attempt(backend, send("a", "s", key="k")) == 1
    assert (path / "inbox/a.jsonl").stat().st_ino != torn
    with opened(FileBackend(path)) as other:
        for one in (backend, other):
            assert [(message.id, message.name) for message in one.messages("a")] == [(1, "s")]
    assert len(backend.claim(claim("me"))) == 1, "it waits for that message"


def test_a_key_that_was_sent_is_synced_before_it_is_acknowledged_again(
    path: Path, backend: FileBackend, disk: BadDisk
) -> None:
    """Whoever sent it may have died between the write and the sync."""
    done(backend, create("a"))
    assert attempt(backend, send("a", key="k")) == 1
    disk.synced.clear()
    disk.fail("fdatasync", 1, errno.EIO)
    assert isinstance(attempt(backend, send("a", key="k")), StoreUnavailableError)
    assert attempt(backend, send("a", key="k")) == 1
    assert disk.synced == [(path / "inbox/a.jsonl").stat().st_ino]
    assert len(backend.messages("a")) == 1


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("call", ["write", "fsync", "fdatasync", "rename"])
def test_a_compaction_that_fails_loses_nothing(path: Path, disk: BadDisk, call: str, at: int) -> None:
    """I10: the journal it was to replace stays, whole."""
    with opened(FileBackend(path, disk=disk)) as backend:
        new = owned("a")
        done(backend, new)
        head = new.head
        for n in range(12):
            save = step("a", head, put={"e": b"e" * 60_000}, keep_from=head.seq)
            if n == 3:
                disk.fail(call, at, errno.EIO)
            if attempt(backend, save) is not None:
                disk.fail("", 0)
                done(backend, save)
            head = save.head
        disk.fail("", 0)
        assert [row.seq for row in backend.boundaries("a")] == list(range(1, 14))
    with opened(FileBackend(path)) as other:
        assert loaded(other, "a").head == head
        assert [row.seq for row in other.boundaries("a")] == list(range(1, 14))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_refuses_and_recovers(small_disk: Path) -> None:
    """I10: no false acknowledgement while it is full; when space is back, work goes on."""
    ballast = small_disk / "ballast"
    with opened(FileBackend(small_disk / "store")) as backend:
        new = owned("a")
        done(backend, new)
        head = new.head
        ballast.write_bytes(b"x" * 600_000)
        write: Callable[[], Any] = lambda: backend.commit([save])[0]  # noqa: E731 -- the save of the moment
        for n in range(100):
            save = change("a", head, put={f"e{n}": os.urandom(15_000)})
            if isinstance(write(), StoreUnavailableError):
                break
            head = save.head
        else:
            pytest.fail("the disk never filled up")
        assert loaded(backend, "a").head == head
        assert isinstance(write(), StoreUnavailableError)
        ballast.unlink()
        assert write() is None
        assert loaded(backend, "a").head == save.head
        done(backend, change("a", save.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None}))


class ReadOnly(Disk):
    """What a file system does that has turned itself read-only after an error of its drive: files that are open for
    writing are no exception."""

    CHANGES = ("write", "truncate", "chmod", "rename", "link", "unlink", "utime", "mkdir")

    def __init__(self) -> None:
        self.locked = False
        for call in self.CHANGES:
            setattr(self, call, self._around(getattr(super(), call)))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            self._check()
            return function(*args, **options)

        return guarded

    def _check(self) -> None:
        if self.locked:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._check()
        return super().open(name, flags, dir_fd)


def test_a_file_system_that_turns_read_only_refuses_and_recovers(path: Path) -> None:
    """I10: nothing is acknowledged, everything can be read, and the same writes go through later."""
    disk = ReadOnly()
    with opened(FileBackend(path, disk=disk)) as backend:
        new = owned("a")
        done(backend, new, create("b"))
        save = step("a", new.head, put={"e": b"1"})
        disk.locked = True
        for write in (save, owned("c"), send("a", key="k")):
            assert isinstance(attempt(backend, write), StoreUnavailableError)
        with pytest.raises(StoreUnavailableError, match="Read-only file system"):
            backend.claim(claim("me", ids=("b",)))
        assert loaded(backend, "a").head == new.head
        assert backend.load("c") is None
        assert {one.definition.id for one in backend.find(Query())} == {"a", "b"}
        disk.locked = False
        done(backend, save, owned("c"), send("a", key="k"))
        assert [one.definition.id for one in backend.claim(claim("me", ids=("b",)))] == ["b"]
        assert loaded(backend, "a").head == save.head


class Rival(Disk):
    """Lets another process take an execution over while the next batch is being synced; notes what came when."""

    def __init__(self, path: Path, id: str) -> None:
        self.path, self.id, self.calls = path, id, list[str]()
        self.lurks = False

    def lurk(self) -> None:
        self.calls.clear()
        self.lurks = True

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self.calls.append("write")
        return super().write(fd, data)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        if self.lurks and "fdatasync" not in self.calls:
            (self.path / "live" / f"{self.id}.1.jsonl").touch()
        self.calls.append("fdatasync")


def test_who_is_still_the_owner_is_asked_after_the_last_sync(path: Path) -> None:
    """I3: each journal of the batch for itself, and whatever happened while any of them was written."""
    ids = [f"x{n}" for n in range(20)]
    disk = Rival(path, "x7")
    with opened(FileBackend(path, disk=disk)) as backend:
        news = [owned(id) for id in ids]
        done(backend, *news)
        disk.lurk()
        answers = backend.commit([step(new.id, new.head) for new in news])
        assert disk.calls[:40] == ["write"] * 20 + ["fdatasync"] * 20
        refused = [id for id, answer in zip(ids, answers, strict=True) if answer is not None]
        assert refused == ["x7"]
        assert isinstance(answers[7], LeaseLostError)


# --- what a second fault leaves behind --------------------------------------------------------------------------------


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def inodes(path: Path) -> list[int]:
    """Of the journals of a and b."""
    return [(path / "live" / f"{id}.0.jsonl").stat().st_ino for id in "ab"]


@pytest.mark.parametrize("disk", [BadDisk], indirect=True)
def test_where_no_thread_can_be_started_a_batch_is_synced_all_the_same(
    path: Path, backend: FileBackend, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10"""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    news = [owned("a"), owned("b")]
    created(backend, *news)
    disk.synced.clear()
    done(backend, *[step(new.id, new.head) for new in news])
    assert sorted(disk.synced) == sorted(inodes(path))


def test_a_defect_between_write_and_sync_makes_no_later_try_durable(
    path: Path, backend: FileBackend, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: what was written then is not taken for synced when it is compared with the same saves."""

    def defect(pool: SyncPool, fds: Sequence[int]) -> list[OSError | None]:
        raise MemoryError

    news = [owned("a"), owned("b")]
    created(backend, *news)
    saves = [step(new.id, new.head) for new in news]
    before = inodes(path)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(SyncPool, "sync", defect)
        backend.commit(saves)
    disk.synced.clear()
    done(backend, *saves)
    after = inodes(path)
    assert all(new != old for new, old in zip(after, before, strict=True)), "each is written anew"
    assert sorted(disk.synced) == sorted(after)
    with opened(FileBackend(path)) as other:
        assert [loaded(other, new.id).head.revision for new in news] == [1, 1]


class HeldUp(Disk):
    """A helper's rename waits until the caller of the pool comes to its own."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        return [None for _ in fds]  # no helper is needed before journals are compacted

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        if threading.current_thread().name.startswith("longrun-file-sync"):
            self.begun.set()
            self.go.wait(PATIENCE)
        elif new.endswith(".0.jsonl"):
            assert self.begun.wait(PATIENCE)
            self.go.set()
        super().rename(old, new, old_dir, new_dir)


def only_one_helper(patch: pytest.MonkeyPatch) -> list[str]:
    """Let one thread of a pool be started, and no more; the names of those that were asked for."""
    start, asked = threading.Thread.start, list[str]()

    def counted(thread: threading.Thread) -> None:
        asked.append(thread.name)
        if len(asked) > 1:
            no_thread(thread)
        start(thread)

    patch.setattr(threading.Thread, "start", counted)
    return asked


def test_a_helper_that_compacts_is_waited_for_where_no_second_one_can_be_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: it would put its old copy in the place of what is acknowledged meanwhile."""
    disk = HeldUp()
    with opened(FileBackend(path, disk=disk)) as backend:
        news = [owned(id) for id in "abc"]
        for new in news:
            created(backend, new)
        asked = only_one_helper(monkeypatch)
        saves = [step(new.id, new.head, put={"e": b"e" * 400_000}) for new in news]
        try:
            done(backend, *saves)
        finally:
            disk.go.set()
        assert len(asked) == 2
        done(backend, *[step(save.id, save.head) for save in saves])
        with opened(FileBackend(path)) as other:
            assert [loaded(other, save.id).head.revision for save in saves] == [2, 2, 2]


@pytest.fixture
def folders(path: Path) -> FolderDisk:
    return FolderDisk(path)


@pytest.fixture
def store(path: Path, folders: FolderDisk) -> Iterator[FileBackend]:
    with opened(FileBackend(path, disk=folders)) as store:
        assert isinstance(store, FileBackend)
        yield store
    assert folders.left == set()


def test_an_inbox_that_was_compacted_takes_nothing_before_its_name_is_durable(
    store: FileBackend, folders: FolderDisk
) -> None:
    """I1, I10: a power cut would bring the old file back, without what was acknowledged since."""
    new = owned("a")
    done(store, new, *[send("a", payload=b"x" * 10_000) for _ in range(4)])
    folders.sick = "inbox"
    done(store, change("a", new.head, take=(1, 2, 3, 4)))
    assert isinstance(attempt(store, send("a", "late")), StoreUnavailableError)
    folders.sick = ""
    folders.synced.clear()
    assert attempt(store, send("a", "late")) == 5
    assert "inbox" in folders.synced
    assert [message.name for message in store.messages("a")] == ["late"]


def test_an_id_is_not_called_taken_before_its_name_is_durable(store: FileBackend, folders: FolderDisk) -> None:
    """I1: who submits again hears that it is there, and relies on that."""
    folders.sick = "live"
    assert isinstance(attempt(store, create("a")), StoreUnavailableError)
    assert isinstance(attempt(store, create("a")), StoreUnavailableError)
    folders.sick = ""
    folders.synced.clear()
    assert attempt(store, create("a")) is False
    assert "live" in folders.synced


def test_no_row_leaves_its_journal_before_the_history_has_its_name(
    path: Path, store: FileBackend, folders: FolderDisk
) -> None:
    """I7, I10: also if the file was there when it was tried again."""
    new = owned("a")
    created(store, new)
    journal, history = path / "live" / "a.0.jsonl", path / "history" / "a.jsonl"
    before, save = journal.stat().st_ino, step("a", new.head, put={"e": b"e" * 400_000}, keep_from=2)
    folders.sick = "history"
    done(store, save)
    assert history.exists()
    assert journal.stat().st_ino == before, "it was not compacted"
    folders.sick = ""
    while journal.stat().st_ino == before:
        assert "history" not in folders.synced
        save = step("a", save.head, put={"e": b"e" * 400_000}, keep_from=save.head.seq + 1)
        done(store, save)
    assert "history" in folders.synced
    assert [row.seq for row in store.boundaries("a")] == list(range(1, save.head.seq + 1))


def test_nothing_is_removed_before_its_copy_in_quarantine_has_its_name(
    path: Path, store: FileBackend, folders: FolderDisk
) -> None:
    """I10: also if the copy was there when it was tried again."""
    created(store, create("a", ExecutionState.FAILED))
    journal = path / "live" / "a.0.jsonl"
    journal.write_bytes(journal.read_bytes().swapcase())
    folders.sick = "quarantine"
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="the disk is sick"):
            store.delete(["a"])
        assert journal.exists()
    folders.sick = ""
    assert store.delete(["a"]) == [True]
    assert "quarantine" in folders.synced
    assert not journal.exists()
