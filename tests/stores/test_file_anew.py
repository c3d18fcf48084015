"""Ids that are used anew while a process sleeps: what it then goes on with is never another execution's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longrun.errors import LeaseLostError
from longrun.records import ExecutionState
from longrun.stored import Head, Owner, Query
from longrun.stores._file.claims import Claims
from longrun.stores._file.journal import Journal
from longrun.stores._file.moving import _Move
from longrun.stores.file import FileBackend
from longrun.testing.conformance_base import created, done, ids_of, loaded, opened
from longrun.testing.samples import NOW, change, claim, create, step

ENDED = {"state": ExecutionState.CANCELLED, "owner": None, "ended": NOW}
OLD_FENCE, NEW_FENCE = 111_111, 222_222
"""As long as each other, which makes the files so."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def one(path: Path) -> Iterator[FileBackend]:
    yield from signed_on(path, "one")


@pytest.fixture
def two(path: Path) -> Iterator[FileBackend]:
    yield from signed_on(path, "two")


def signed_on(path: Path, owner: str) -> Iterator[FileBackend]:
    backend = FileBackend(path)
    with opened(backend):
        backend.register(Owner(id=owner, life={}, remaining=0), 1000.0)
        yield backend


def ended_and_deleted(backend: FileBackend, dead: str) -> None:
    (taken,) = backend.claim(claim("two", ids=("a",), dead=frozenset({dead})))
    done(backend, change("a", taken.head, head_fields=ENDED))
    assert backend.delete(["a"]) == [True]


def journal_of(backend: FileBackend) -> Journal:
    assert backend._parts is not None
    journal = backend._parts.writes.journals.get("a")
    assert journal is not None
    return journal


def owned_by(owner: str, fence: int) -> Any:
    return create("a", head_fields={"owner": owner, "fence": fence})


def test_a_late_save_does_not_go_into_the_journal_of_a_new_one(one: FileBackend, two: FileBackend) -> None:
    """I3: its own was closed, to keep few files open, and the file system may give the new one its inode."""
    old, new = owned_by("one", OLD_FENCE), owned_by("two", NEW_FENCE)
    created(one, old)
    journal = journal_of(one)
    journal.close()
    ended_and_deleted(two, "one")
    created(two, new)
    renewed = journal_of(two)
    journal.ino, journal.size = renewed.ino, renewed.size  # as ext4 does it
    (answer,) = one.commit([step("a", old.head)])
    assert isinstance(answer, LeaseLostError)
    assert loaded(two, "a").head == new.head
    done(two, step("a", new.head))


@pytest.mark.parametrize("is_open", [True, False])
def test_what_rests_here_and_is_used_anew_elsewhere_is_found(
    path: Path, one: FileBackend, two: FileBackend, is_open: bool
) -> None:
    """I4: nothing is saved for it here that could be refused."""
    created(one, owned_by("one", OLD_FENCE))
    journal = journal_of(one)
    if not is_open:
        journal.close()
    ended_and_deleted(two, "one")
    created(two, create("a", ExecutionState.WAITING))
    if not is_open:
        journal.ino = (path / "live" / journal.name).stat().st_ino  # as ext4 does it
    assert [stored.head.state for stored in one.find(Query())] == [ExecutionState.WAITING]
    assert ids_of(one.claim(claim("three"))) == ["a"]


def test_a_claim_that_is_taken_back_leaves_the_journal_of_a_new_one(
    one: FileBackend, two: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: others take over, end, delete and use anew, between the link and the reading."""
    heads: list[Head] = []
    usual = Claims._read

    def slept(self: Claims, *args: Any) -> Any:
        if args[1].owner == "one" and not heads:
            ended_and_deleted(two, "one")
            created(two, create("a", ExecutionState.INITIALIZED, queue="other"))
            (taken,) = two.claim(claim("two", ids=("a",)))
            save = step("a", taken.head)
            done(two, save)
            heads.append(save.head)
        return usual(self, *args)

    monkeypatch.setattr(Claims, "_read", slept)
    created(two, create("a", ExecutionState.WAITING, head_fields={"due": NOW - 1}))
    assert one.claim(claim("one", queues=frozenset({"default"}))) == []
    done(two, step("a", heads[0]))
    assert loaded(two, "a").head.seq == heads[0].seq + 1


def test_a_finished_one_that_was_retried_meanwhile_is_not_taken_for_a_relic(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: others move it to done/, bring it back, complete it and move it again, while one that moves it too sleeps."""
    usual = _Move._ended
    slept: list[bool] = []

    def ended(self: _Move, spot: Any) -> bool:
        answer = usual(self, spot)
        if not slept:
            slept.append(True)
            for _ in signed_on(path, "two"):
                pass  # closing tidies up: it is moved
            for backend in signed_on(path, "three"):
                (taken,) = backend.claim(claim("three", ids=("a",), states=frozenset({ExecutionState.FAILED})))
                done(backend, change("a", taken.head, head_fields={**ENDED, "state": ExecutionState.COMPLETED}))
        return answer

    for backend in signed_on(path, "one"):
        new = owned_by("one", OLD_FENCE)
        created(backend, new)
        done(backend, change("a", new.head, head_fields={**ENDED, "state": ExecutionState.FAILED}))
        monkeypatch.setattr(_Move, "_ended", ended)
    assert slept
    with opened(FileBackend(path)) as last:
        assert loaded(last, "a").head.state is ExecutionState.COMPLETED
