"""A file of one execution that cannot be opened: that one is blocked and says why, the others run, and nothing of it is
moved; once the file can be opened again, it goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longrun import CorruptDataError, Executor, ExecutorConfig
from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Query
from longrun.stores._file.contents import claim_line
from longrun.stores._file.disk import Disk
from longrun.stores._file.lines import Identity
from longrun.stores.file import FileBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.stores.file_tools import created, done, ids_of, loaded, opened
from tests.stores.test_file_unreadable import left

BLOCKED, COMPLETED = ExecutionState.BLOCKED, ExecutionState.COMPLETED
pytestmark = pytest.mark.timeout(60)


class GuardedDisk(Disk):
    """Some names cannot be opened, for some reason; root, who may open everything, sees that too."""

    def __init__(self) -> None:
        self.shut: dict[str, int] = {}

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if name in self.shut:
            raise OSError(self.shut[name], os.strerror(self.shut[name]))
        return super().open(name, flags, dir_fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def as_directory(file: Path) -> None:
    file.mkdir()


def as_link(file: Path) -> None:
    target = file.parent.parent / "a-file"
    target.write_text("secret")
    file.symlink_to(target)


def as_pipe(file: Path) -> None:
    os.mkfifo(file)


WAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "directory": (as_directory, "it is a directory"),
    "link": (as_link, "it is a symbolic link"),
    "pipe": (as_pipe, "it is no regular file"),
}


def remove(file: Path) -> None:
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink()


async def check_blocked(executor: Executor, file: str, says: str) -> None:
    """Everybody says the same of `b`, and it stays where it is."""
    (found,) = await executor.list(state="blocked")
    assert found.id == "b"
    for words in (file, says):
        assert words in str(found.reason)
        assert words in str((await executor.get("b")).reason)
        with pytest.raises(CorruptDataError, match=words):
            await executor.delete("b")
    assert (await executor.count())[BLOCKED] == 1


@pytest.mark.parametrize("way", WAYS)
async def test_something_else_in_place_of_a_journal_blocks_that_one_alone(path: Path, way: str) -> None:
    """The others are resumed and end; when the journal is back it goes on, in the same executor."""
    program = await left(path, "a", "b", "c")
    put, says = WAYS[way]
    journal, away = path / "live" / "b.0.jsonl", path / "away"
    journal.rename(away)
    put(journal)
    store = CheckpointStore(FileBackend(path))
    async with Executor(program.registry, store=store, config=ExecutorConfig(auto_resume=False)) as executor:
        report = await executor.auto_resume_all()
        assert (sorted(report.resumed), list(report.blocked)) == (["a", "c"], ["b"])
        await check_blocked(executor, "live/b.0.jsonl", says)
        for id in "ac":
            assert await (await executor.handle(id)).result() == 3
        assert list((path / "quarantine").iterdir()) == []
        remove(journal)
        away.rename(journal)
        assert [one.id for one in await executor.list(state="running")] == ["b"]
        assert (await executor.auto_resume_all()).resumed == ("b",)
        assert await (await executor.handle("b")).result() == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
async def test_a_journal_that_may_not_be_read_blocks_that_one_alone(path: Path, code: int) -> None:
    """Also when the executor starts; mended, it goes on without a restart, from where it was (I2)."""
    program = await left(path, "a", "b")
    disk = GuardedDisk()
    disk.shut["b.0.jsonl"] = code
    before = (path / "live" / "b.0.jsonl").read_bytes()
    async with Executor(program.registry, store=CheckpointStore(FileBackend(path, disk=disk))) as executor:
        assert await (await executor.handle("a")).result() == 3
        await check_blocked(executor, "live/b.0.jsonl", os.strerror(code))
        assert (path / "live" / "b.0.jsonl").read_bytes() == before
        assert sorted(file.name for file in (path / "live").glob("b.*")) == ["b.0.jsonl"]
        disk.shut.clear()
        await executor.auto_resume_all()
        assert await (await executor.handle("b")).result() == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_journal_without_permissions_is_listed_as_blocked(path: Path) -> None:
    """The real thing: the mode alone changed, which leaves size and time of change as they were."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"), create("b"))
        (path / "live" / "b.0.jsonl").chmod(0)
        assert [one.definition.id for one in backend.find(Query(states=frozenset({BLOCKED})))] == ["b"]
        assert ids_of(backend.claim(claim("me"))) == ["a"]
        (path / "live" / "b.0.jsonl").chmod(0o600)
        assert backend.find(Query(states=frozenset({BLOCKED}))) == []
        assert ids_of(backend.claim(claim("me"))) == ["b"]


def test_a_claim_that_cannot_open_a_journal_changes_nothing_of_it(path: Path) -> None:
    """The catalogue took it for claimable; no generation is left behind, and it is not blocked for good."""
    disk = GuardedDisk()
    with opened(FileBackend(path, disk=disk)) as backend:
        created(backend, create("a"), create("b"))
        disk.shut["b.0.jsonl"] = errno.EACCES
        assert ids_of(backend.claim(claim("me"))) == ["a"]
        assert [file.name for file in (path / "live").glob("b.*")] == ["b.0.jsonl"]
        assert backend.claim(claim("me", ids=("b",))) == []
        disk.shut.clear()
        assert ids_of(backend.claim(claim("me", ids=("b",)))) == ["b"]


def test_an_earlier_journal_that_cannot_be_opened_is_waited_for(path: Path) -> None:
    """A claim that a crash left without its snapshot needs the generation before: no older state takes its place."""
    disk = GuardedDisk()
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"))
        (given,) = backend.claim(claim("me"))
        done(backend, step("a", given.head))
        known = loaded(backend, "a")
    (path / "live" / "a.2.jsonl").write_bytes(claim_line(Identity("a", 2), "new", 1.0))
    with opened(FileBackend(path, disk=disk)) as backend:
        disk.shut["a.1.jsonl"] = errno.EACCES
        with pytest.raises(CorruptDataError, match=r"live/a\.1\.jsonl"):
            backend.load("a")
        assert [one.head.state for one in backend.find(Query())] == [BLOCKED]
        disk.shut.clear()
        assert loaded(backend, "a").boundary == known.boundary


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE])
def test_a_failing_disk_is_no_fault_of_one_execution(path: Path, code: int) -> None:
    """I10: nobody is blocked for it; the store says that it does not answer."""
    disk = GuardedDisk()
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"), create("b"))
    with opened(FileBackend(path, disk=disk)) as backend:
        disk.shut["b.0.jsonl"] = code
        for look in (lambda: backend.find(Query()), lambda: backend.load("b"), lambda: backend.claim(claim("me"))):
            with pytest.raises(StoreUnavailableError):
                look()
        disk.shut.clear()
        assert sorted(ids_of(backend.claim(claim("me")))) == ["a", "b"]


# inboxes


def test_an_inbox_that_cannot_be_opened_blocks_its_execution_alone(path: Path) -> None:
    """Nobody may go on without the messages in it; none of them is lost (I1)."""
    disk = GuardedDisk()
    with opened(FileBackend(path)) as backend:
        done(backend, create("a"), create("b"), send("b"))
    with opened(FileBackend(path, disk=disk)) as backend:
        disk.shut["b.jsonl"] = errno.EACCES
        (found,) = backend.find(Query(states=frozenset({BLOCKED})))
        assert found.definition.id == "b"
        assert "inbox/b.jsonl" in str(found.head.reason)
        assert backend.count(Query())[BLOCKED] == 1
        assert ids_of(backend.claim(claim("me"))) == ["a"]
        assert backend.claim(claim("me", ids=("b",))) == []
        for look in (backend.load, backend.messages):
            with pytest.raises(CorruptDataError, match=r"inbox/b\.jsonl"):
                look("b")
        first, second = backend.commit([send("b"), send("a")])
        assert (type(second), isinstance(first, CorruptDataError)) == (int, True)
        disk.shut.clear()
        assert backend.find(Query(states=frozenset({BLOCKED}))) == []
        (given,) = backend.claim(claim("me"))
        assert [message.id for message in given.messages] == [1]


def test_an_inbox_that_cannot_be_opened_spoils_no_end_and_no_other_write(path: Path) -> None:
    """Its owner ends it all the same, and so do those of the same batch; then it is completed for everybody."""
    disk = GuardedDisk()
    with opened(FileBackend(path, disk=disk)) as backend:
        a, b = owned("a"), owned("b")
        done(backend, a, b, send("b"))
        disk.shut["b.jsonl"] = errno.EACCES
        over = {"state": COMPLETED, "owner": None}
        done(backend, change("b", b.head, head_fields=over), change("a", a.head, head_fields=over))
        assert backend.count(Query()) == {COMPLETED: 2}
    disk.shut = {"b.inbox": errno.EACCES}
    with opened(FileBackend(path, disk=disk)) as backend:
        assert backend.count(Query()) == {COMPLETED: 2}
        found = backend.load("b")
        assert found is not None
        assert (found.head.state, "done/b.inbox" in "".join(found.damage)) == (COMPLETED, True)


@pytest.mark.parametrize("way", WAYS)
def test_something_else_in_place_of_an_inbox_is_neither_read_nor_written(path: Path, way: str) -> None:
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"), create("b"))
        put, says = WAYS[way]
        put(path / "inbox" / "b.jsonl")
        (answer,) = backend.commit([send("b")])
        assert isinstance(answer, CorruptDataError)
        assert says in str(answer)
        assert [one.definition.id for one in backend.find(Query(states=frozenset({BLOCKED})))] == ["b"]
        remove(path / "inbox" / "b.jsonl")
        assert backend.find(Query(states=frozenset({BLOCKED}))) == []
        done(backend, send("b"))


# what is finished


@pytest.mark.parametrize("index", ["index", "no index"])
def test_a_finished_journal_that_cannot_be_opened(path: Path, index: str) -> None:
    """It stays listed with the reason that `load` raises, is not deleted, and is as before once it can be read."""
    disk = GuardedDisk()
    with opened(FileBackend(path)) as backend:
        created(backend, create("a", COMPLETED), create("b", COMPLETED))
    if index == "no index":
        (path / "finished.jsonl").unlink()
    disk.shut["b.jsonl"] = errno.EACCES
    with opened(FileBackend(path, disk=disk)) as backend:
        found = {one.definition.id: one.head for one in backend.find(Query())}
        assert found["a"].state is COMPLETED
        assert found["b"].state is (COMPLETED if index == "index" else BLOCKED)
        with pytest.raises(CorruptDataError, match=r"done/b\.jsonl cannot be opened") as raised:
            backend.load("b")
        assert found["b"].reason == str(raised.value)
        assert backend.delete(["b", "a"]) == [False, True]
        disk.shut.clear()
        (one,) = backend.find(Query())
        assert (one.head.state, one.head.reason) == (COMPLETED, None)
        assert backend.count(Query()) == {COMPLETED: 1}
        assert loaded(backend, "b").head.state is COMPLETED


def test_an_owner_whose_file_cannot_be_opened_is_nobody(path: Path) -> None:
    """Its executions are taken over; the fence shuts it out (I3)."""
    with opened(FileBackend(path)) as backend:
        (path / "owners" / "me.json").mkdir()
        assert backend.owners() == []


def test_history_that_cannot_be_opened_is_named(path: Path) -> None:
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"), create("b"))
        (path / "history" / "a.jsonl").mkdir()
        with pytest.raises(CorruptDataError, match=r"history/a\.jsonl"):
            backend.boundaries("a")
        assert loaded(backend, "a").boundary.seq == 1
