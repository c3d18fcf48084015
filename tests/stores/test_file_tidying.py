"""What can wait: old generations, and journals on their way to done/."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from longrun.records import ExecutionState
from longrun.stored import Query
from longrun.stores._file.disk import Disk
from longrun.stores._file.entry import mark_of
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, owned, step
from tests.stores.file_tools import created, done, loaded, opened


def test_old_generations_stay_until_a_lease_is_renewed(path: Path, backend: FileBackend, other: FileBackend) -> None:
    """Most that were claimed end before that, and take them along."""
    news = [owned("ends"), owned("stays")]
    created(backend, *news)
    given = other.claim(claim("you", ids=("ends", "stays"), dead=frozenset({"me"})))
    heads = {one.definition.id: one.head for one in given}
    for _ in range(2):
        saves = {id: step(id, head) for id, head in heads.items()}
        done(other, *saves.values())
        heads = {id: save.head for id, save in saves.items()}
    done(other, change("ends", heads["ends"], head_fields={"state": ExecutionState.COMPLETED, "owner": None}))
    journals = {id: path / "live" / f"{id}.0.jsonl" for id in heads}
    before = {id: journal.stat().st_ino for id, journal in journals.items()}
    assert other.renew("you", 60.0) is False, "it was not registered"
    other._open.writes.janitor.tidy()
    assert journals["stays"].stat().st_ino != before["stays"]
    assert b'"kind":"moved"' in journals["stays"].read_bytes()
    assert not journals["ends"].exists()
    assert sorted(file.name for file in (path / "done").iterdir()) == ["ends.jsonl"]
    assert loaded(backend, "stays").head == heads["stays"]


def test_a_journal_of_the_same_size_is_not_taken_for_the_one_that_ended(
    path: Path, backend: FileBackend, other: FileBackend
) -> None:
    """I1: its id is used anew, and the file looks as the old one did. Whose it is, its birth mark tells."""
    created(backend, create("a", ExecutionState.COMPLETED))
    (entry,) = backend._open.catalog.finished.values()
    assert other.delete(["a"]) == [True]
    created(other, create("a", ExecutionState.WAITING, head_fields={"due": 1e12}))
    entry.mark = mark_of((path / "live" / "a.0.jsonl").stat())
    backend._open.writes.janitor.tidy()
    assert not list((path / "done").iterdir())
    assert loaded(other, "a").head.state is ExecutionState.WAITING


class Between(Disk):
    """Does something when the names in done/ are to be synced: the journal has its new one, and still the old one."""

    def __init__(self) -> None:
        self.then: Callable[[], None] | None = None

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if self.then is not None and os.readlink(f"/proc/self/fd/{fd}").endswith("/done"):
            then, self.then = self.then, None
            then()


def test_what_others_have_moved_away_and_back_meanwhile_stays(path: Path, other: FileBackend) -> None:
    """I1: what is in live/ is then the only copy."""
    disk = Between()
    with opened(FileBackend(path, disk=disk)) as backend:
        assert isinstance(backend, FileBackend)
        failed = create("a", ExecutionState.FAILED, head_fields={"error": "e", "ended": 1.0})
        created(other, failed)
        assert len(backend.find(Query())) == 1

        moved: list[str] = []

        def there_and_back() -> None:
            other._open.writes.janitor.tidy()
            moved.extend(file.name for file in (path / "done").iterdir())
            other._open.writes.journals.bring_back("a")

        disk.then = there_and_back
        backend._open.writes.janitor.tidy()
        assert moved == ["a.jsonl"]
        assert loaded(other, "a").head == failed.head
    assert loaded(other, "a").head == failed.head
    assert len(other.find(Query())) == 1
