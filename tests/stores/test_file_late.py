"""Claims and looks that come too late: while somebody slept, the execution left live/, or done/. That is no damage."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Claim, Loaded, Query
from longrun.stores._file import place
from longrun.stores._file.claims import Claims
from longrun.stores._file.contents import claim_line
from longrun.stores._file.entry import Entry
from longrun.stores._file.lines import Identity
from longrun.stores._file.moving import _Move
from longrun.stores.file import FileBackend
from longrun.testing.samples import NOW, change, claim, create, owned, send, step
from tests.stores.file_tools import CountingDisk, created, done, ids_of, loaded, opened

S = ExecutionState
FAILED = frozenset({S.FAILED})
ENDED = {"state": S.FAILED, "owner": None, "ended": NOW}
BARE = claim_line(Identity("a", 1), "dead", NOW)
"""All that a claim writes before it reads what it has claimed."""


class Watched(CountingDisk):
    """Lets somebody look after each new name and each removal."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], object] = lambda: None

    def link(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        super().link(old, new, old_dir, new_dir)
        self.look()

    def unlink(self, name: str, dir_fd: int) -> None:
        super().unlink(name, dir_fd)
        self.look()


class Looking(CountingDisk):
    """Something happens just before one of the looks at a file."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = self.at = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def until(self, at: int, meanwhile: Callable[[], object]) -> None:
        self.looks, self.at, self.meanwhile = 0, at, meanwhile

    def _look(self) -> None:
        self.looks += 1
        if self.looks == self.at:
            self.meanwhile()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self._look()
        return super().open(name, flags, dir_fd)

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        self._look()
        return super().stat(name, dir_fd)


class Fleeing(CountingDisk):
    """A finished journal goes to the other folder whenever it is looked for, some times, unless that is locked."""

    def __init__(self, path: Path, times: int) -> None:
        super().__init__()
        self.path, self.times = path, times
        self.places = {"a.0.jsonl": path / "live" / "a.0.jsonl", "a.jsonl": path / "done" / "a.jsonl"}

    def _flee(self, name: str) -> None:
        if name not in self.places or not self.places[name].exists() or not self.times:
            return
        with (self.path / "lock").open("wb") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.times -= 1
            (there,) = [there for there in self.places.values() if there != self.places[name]]
            self.places[name].rename(there)

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self._flee(name)
        return super().open(name, flags, dir_fd)

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        self._flee(name)
        return super().stat(name, dir_fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def states(backend: FileBackend) -> list[ExecutionState]:
    return [one.head.state for one in backend.find(Query())]


def take(backend: FileBackend, **fields: Any) -> Loaded:
    (taken,) = backend.claim(claim("other", **fields))
    return taken


def tidied(backend: FileBackend) -> None:
    """Closing moves what has ended to done/."""
    backend.close()
    backend.open()


def end(backend: FileBackend) -> None:
    done(backend, change("a", take(backend).head, head_fields=ENDED))


def end_and_move(backend: FileBackend) -> None:
    end(backend)
    tidied(backend)


def end_and_delete(backend: FileBackend) -> None:
    end(backend)
    assert backend.delete(["a"]) == [True]


def use_anew(backend: FileBackend) -> None:
    end_and_delete(backend)
    created(backend, create("a", S.PAUSED))


UNFINISHED = Claim(owner="late", now=NOW, states=frozenset({S.INITIALIZED, S.RUNNING}))
RETRY = Claim(owner="late", now=NOW, states=FAILED, ids=("a",))


@pytest.mark.parametrize("claims_before", [0, 2])
@pytest.mark.parametrize(
    ("state", "late", "meanwhile", "then"),
    [
        (S.FAILED, RETRY, tidied, [S.FAILED]),
        (S.INITIALIZED, UNFINISHED, end_and_move, [S.FAILED]),
        (S.INITIALIZED, UNFINISHED, end_and_delete, []),
        (S.INITIALIZED, UNFINISHED, use_anew, [S.PAUSED]),
    ],
    ids=["a retry", "ended and moved", "ended and deleted", "used anew"],
)
def test_who_comes_too_late_leaves_nothing_that_looks_like_damage(
    path: Path,
    other: FileBackend,
    monkeypatch: pytest.MonkeyPatch,
    claims_before: int,
    state: ExecutionState,
    late: Claim,
    meanwhile: Callable[[FileBackend], None],
    then: list[ExecutionState],
) -> None:
    """I5: what is healthy is listed as it is at every moment, and nothing of it goes to quarantine."""
    created(other, create("a", state))
    for _ in range(claims_before):
        done(other, change("a", take(other, ids=("a",), states=frozenset({state})).head, head_fields={"owner": None}))
    disk, usual, seen = Watched(), Claims._take_all, list[list[ExecutionState]]()
    with opened(FileBackend(path, disk=disk)) as taker, opened(FileBackend(path)) as third:
        assert isinstance(third, FileBackend)

        def slept(self: Claims, entries: list[Entry], claim: Claim) -> list[Loaded]:
            monkeypatch.setattr(Claims, "_take_all", usual)
            assert [entry.gen for entry in entries] == [claims_before]
            meanwhile(other)
            disk.look = lambda: seen.append(states(third))
            return usual(self, entries, claim)

        monkeypatch.setattr(Claims, "_take_all", slept)
        assert taker.claim(late) == []
        seen.append(states(third))
    assert [one for one in seen if one != then] == []
    assert names(path / "quarantine") == set()
    assert disk.left == set()


def test_who_retries_too_late_has_it_when_it_asks_again(
    path: Path, other: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: with its messages, which went to done/ with it."""
    usual = Claims._take_all

    def slept(self: Claims, *args: Any) -> list[Loaded]:
        monkeypatch.setattr(Claims, "_take_all", usual)
        tidied(other)
        return usual(self, *args)

    done(other, create("a", S.FAILED), send("a", "one"))
    with opened(FileBackend(path)) as taker:
        monkeypatch.setattr(Claims, "_take_all", slept)
        assert taker.claim(RETRY) == []
        assert (names(path / "live"), names(path / "done")) == (set(), {"a.jsonl", "a.inbox"})
        (given,) = taker.claim(RETRY)
        assert [message.name for message in given.messages] == ["one"]


@pytest.mark.parametrize("line", [BARE, b""], ids=["written", "lost in a power cut"])
def test_a_claim_of_what_is_in_done_is_no_damage(path: Path, line: bytes) -> None:
    """I5: who made it died before it could be taken back. A retry steps over it."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a", S.FAILED))
    (path / "live" / "a.1.jsonl").write_bytes(line)
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        assert states(backend) == [S.FAILED]
        assert loaded(backend, "a").head.state is S.FAILED
        assert names(path / "quarantine") == set()
        (given,) = backend.claim(claim("me", ids=("a",), states=FAILED, dead=frozenset({"dead"})))
        done(backend, step("a", given.head))
        assert loaded(backend, "a").head.seq == 2


def test_a_claim_whose_journal_was_lost_is_damage(path: Path, other: FileBackend) -> None:
    """I5: nothing else is left of the execution, and that is said."""
    (path / "live" / "a.1.jsonl").write_bytes(BARE)
    (found,) = other.find(Query())
    assert (found.definition.id, found.head.state) == ("a", S.BLOCKED)
    assert len(names(path / "quarantine")) == 1
    assert other.delete(["a"]) == [True]
    assert other.find(Query()) == []


@pytest.mark.parametrize("bare", [1, 2])
def test_who_deletes_what_was_claimed_for_a_retry_shows_no_damage(path: Path, other: FileBackend, bare: int) -> None:
    """I5: the takers died before they had written anything."""
    disk, seen = Watched(), list[list[ExecutionState]]()
    with opened(FileBackend(path, disk=disk)) as backend:
        assert isinstance(backend, FileBackend)
        created(backend, create("a", S.FAILED))
        done(backend, change("a", take(backend, ids=("a",), states=FAILED).head, head_fields={"owner": None}))
        for gen in range(2, 2 + bare):
            (path / "live" / f"a.{gen}.jsonl").write_bytes(claim_line(Identity("a", gen), "dead", NOW))

        def look() -> None:
            other._open.catalog.forget("a")  # as one that has just come
            seen.append(states(other))

        disk.look = look
        assert backend.delete(["a"]) == [True]
        assert seen
        assert [one for one in seen if one not in ([S.FAILED], [])] == []
        assert (states(backend), states(other)) == ([], [])
    assert (names(path / "live"), names(path / "quarantine")) == (set(), set())


def test_what_is_taken_in_any_state_does_not_move_to_done_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: it ends after the taker looked, and is on its way to done/ when it is taken. What the taker saves is seen."""
    monkeypatch.setattr(place, "LOCK_PATIENCE", 0.05)
    take_all, ready, looks = Claims._take_all, _Move.ready, list[_Move]()
    given: list[Loaded] = []
    owner = FileBackend(path)
    owner.open()
    new = owned("a")
    created(owner, new)
    with opened(FileBackend(path)) as taker:

        def slept(self: Claims, entries: list[Entry], asked: Claim) -> list[Loaded]:
            def overtaken(move: _Move) -> bool:
                answer = ready(move)
                looks.append(move)
                if len(looks) == 2:  # the last look before the journal goes
                    given.extend(take_all(self, entries, asked))
                return answer

            monkeypatch.setattr(Claims, "_take_all", take_all)
            monkeypatch.setattr(_Move, "ready", overtaken)
            done(owner, change("a", new.head, head_fields=ENDED))
            owner.close()
            assert len(looks) == 2
            return given

        anything = claim("late", ids=("a",), states=frozenset(S), dead=frozenset({"me"}))
        monkeypatch.setattr(Claims, "_take_all", slept)
        for one in taker.claim(anything):
            done(taker, step("a", one.head))
            assert loaded(taker, "a").head.seq == one.head.seq + 1
        assert loaded(taker, "a").head.state is S.FAILED
        assert ids_of(taker.claim(claim("next", ids=("a",), states=FAILED, dead=frozenset({"late"})))) == ["a"]


def retry(backend: FileBackend) -> None:
    take(backend, ids=("a",), states=FAILED)


def fail_again(backend: FileBackend) -> None:
    """What was retried ends as it had ended before, and is in done/."""
    head = loaded(backend, "a").head
    if head.owner is not None:
        done(backend, change("a", head, head_fields=ENDED))
    tidied(backend)


def retry_and_fail_again(backend: FileBackend) -> None:
    retry(backend)
    fail_again(backend)


@pytest.mark.parametrize("meanwhile", [retry, retry_and_fail_again])
@pytest.mark.parametrize(
    "look",
    [
        lambda backend: [loaded(backend, "a").head.state],
        lambda backend: [backend.head("a").state],
        lambda backend: [*backend.states_of(["a"]).values()],
        states,
        lambda backend: [state for state, count in backend.count(Query()).items() for _ in range(count)],
    ],
    ids=["load", "head", "states_of", "find", "count"],
)
def test_what_is_retried_at_any_moment_of_a_look_is_there_and_sound(
    path: Path, other: FileBackend, look: Callable[[Any], list[S]], meanwhile: Callable[[FileBackend], None]
) -> None:
    """I1, I5: in done/, the next generation has the name that the one before it had."""
    disk = Looking()
    created(other, create("a", S.FAILED))
    tidied(other)
    with opened(FileBackend(path, disk=disk)) as backend:
        look(backend)
        for at in itertools.count(1):
            disk.until(at, lambda: meanwhile(other))
            assert (at, look(backend)) == (at, [S.FAILED])
            if disk.looks < at:
                break
            fail_again(other)
        assert at > 3
    assert names(path / "quarantine") == set()
    assert disk.left == set()


def test_a_claim_that_another_retry_overtakes_finds_no_damage(
    path: Path, other: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: at any moment but those in which the directory is locked, or the claim has been made."""

    def meanwhile() -> None:
        with contextlib.suppress(StoreUnavailableError):
            if other.claim(claim("other", ids=("a",), states=FAILED)):
                fail_again(other)

    monkeypatch.setattr(place, "LOCK_PATIENCE", 0.0)
    disk = Looking()
    created(other, create("a", S.FAILED))
    tidied(other)
    with opened(FileBackend(path, disk=disk)) as taker:
        assert isinstance(taker, FileBackend)
        for at in itertools.count(1):
            disk.until(at, meanwhile)
            taken, over = taker.claim(RETRY), disk.looks < at
            disk.until(0, meanwhile)
            for given in taken:
                assert given.damage == ()
                done(taker, change("a", given.head, head_fields=ENDED))
            tidied(taker)
            assert names(path / "quarantine") == set()
            if over:
                break
    assert disk.left == set()


@pytest.mark.parametrize("times", range(13))
def test_what_goes_to_and_fro_is_not_said_to_be_missing(path: Path, other: FileBackend, times: int) -> None:
    """I1: nobody can see two folders in one moment."""
    created(other, create("a", S.FAILED))
    tidied(other)
    with opened(FileBackend(path, disk=Fleeing(path, times))) as backend:
        assert backend.states_of(["a"]) == {"a": S.FAILED}
    with opened(FileBackend(path, disk=Fleeing(path, times))) as backend:
        assert loaded(backend, "a").head.state is S.FAILED


def taken_back(path: Path, other: FileBackend, gen: int) -> None:
    (path / "live" / f"a.{gen}.jsonl").unlink()
    retry(other)


def still_there(path: Path, other: FileBackend, gen: int) -> None:
    (path / "done" / "a.jsonl").rename(path / "live" / f"a.{gen - 1}.jsonl")


@pytest.mark.parametrize("meanwhile", [taken_back, still_there])
def test_what_a_late_claim_was_made_of_comes_back_while_that_is_read(
    path: Path, other: FileBackend, meanwhile: Callable[[Path, FileBackend, int], None]
) -> None:
    """I5: it was in done/ when it was looked for in live/, and is in live/ again when it is looked for in done/."""
    created(other, create("a", S.FAILED))
    tidied(other)
    for at in itertools.count(1):
        gen = loaded(other, "a").head.fence + 1
        late = path / "live" / f"a.{gen}.jsonl"
        late.write_bytes(claim_line(Identity("a", gen), "late", NOW))
        disk = Looking()
        with opened(FileBackend(path, disk=disk)) as backend:
            assert isinstance(backend, FileBackend)
            disk.until(at, functools.partial(meanwhile, path, other, gen))
            assert (at, states(backend)) == (at, [S.FAILED])
        if disk.looks < at:
            break
        if meanwhile is still_there:
            late.unlink()
        fail_again(other)
    assert at > 3
    assert names(path / "quarantine") == set()
