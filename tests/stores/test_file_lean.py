"""Moves and ends on their short way, alone and in a batch: a bad disk, a rival, and what stands beside them (I3, I10).

What is asked of saves in `test_file_disk` and `test_file_settled` is asked of these here.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Create, Query, Save, Write
from longrun.stores._file.disk import Disk
from longrun.stores._file.saves import Saves
from longrun.stores._file.syncing import SyncPool
from longrun.stores.base import Answer
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, end, move, owned, send, step
from tests.stores.file_tools import created, done, loaded, opened
from tests.stores.test_file_disk import BadDisk, BadQueue, Rival

KINDS = pytest.mark.parametrize("kind", [move, end])
NUMBERS = pytest.mark.parametrize("number", [1, 3])
"""Alone, and with others."""
Kind = Callable[..., Save]


@pytest.fixture(params=[BadDisk, BadQueue])
def disk(request: pytest.FixtureRequest) -> BadDisk:
    made: BadDisk = request.param()
    return made


@pytest.fixture
def backend(path: Path, disk: BadDisk) -> Iterator[FileBackend]:
    with opened(FileBackend(path, disk=disk)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend
    assert disk.left == set()


@pytest.fixture(autouse=True)
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The executions whose saves took the long way."""
    taken: list[str] = []
    original = Saves._save

    def noted(self: Saves, todo: Sequence[tuple[int, Save]], answers: list[Answer]) -> None:
        taken.extend(save.id for _, save in todo)
        original(self, todo, answers)

    monkeypatch.setattr(Saves, "_save", noted)
    return taken


def started(backend: FileBackend, number: int) -> list[Create]:
    news = [owned(f"x{n}") for n in range(number)]
    created(backend, *news)
    return news


def inodes(path: Path, news: Sequence[Create]) -> list[int]:
    return [(path / "live" / f"{new.id}.0.jsonl").stat().st_ino for new in news]


def kinds_of(answers: Sequence[Answer]) -> list[type | None]:
    return [None if answer is None else type(answer) for answer in answers]


@NUMBERS
@KINDS
def test_simple_ones_take_the_short_way(backend: FileBackend, kind: Kind, number: int, long_way: list[str]) -> None:
    news = started(backend, number)
    moves = [move(new.id, new.head) for new in news]
    done(backend, *moves)
    lasts = [kind(one.id, one.head) for one in moves]
    done(backend, *lasts)
    assert long_way == []
    assert [loaded(backend, one.id).head for one in lasts] == [one.head for one in lasts]


@NUMBERS
@KINDS
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_one_that_failed_is_not_acknowledged_and_can_be_repeated(
    path: Path, backend: FileBackend, disk: BadDisk, kind: Kind, number: int, call: str, code: int
) -> None:
    """I10, I9: its own journal alone; the old state stays readable."""
    news = started(backend, number)
    saves = [kind(new.id, new.head) for new in news]
    before = inodes(path, news)
    disk.fail(call, number, code)
    *others, last = backend.commit(saves)
    assert others == [None] * (number - 1)
    assert isinstance(last, StoreUnavailableError)
    assert isinstance(last.__cause__, OSError)
    assert loaded(backend, news[-1].id).head == news[-1].head
    (listed,) = [one for one in backend.find(Query()) if one.definition.id == news[-1].id]
    assert listed.head == news[-1].head
    disk.synced.clear()
    done(backend, *saves)
    assert (before[-1] in disk.synced) == (call == "write"), "a failed sync is never repeated on the same file"
    with opened(FileBackend(path)) as other:
        assert [loaded(other, save.id).head for save in saves] == [save.head for save in saves]


@KINDS
@pytest.mark.parametrize(
    ("number", "place"),
    [
        (1, (Disk, "fdatasync")),
        (1, (BadDisk, "write")),
        (3, (SyncPool, "sync")),
        (3, (Disk, "fdatasync")),
        (3, (BadDisk, "write")),
    ],
)
def test_a_defect_makes_no_later_try_durable(
    path: Path,
    backend: FileBackend,
    disk: BadDisk,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    number: int,
    place: tuple[type, str],
) -> None:
    """I10: what was written then is not taken for synced when it is compared with the same saves."""
    whole = BadDisk.write

    def defect(self: Any, fd: Any, data: bytes = b"") -> Any:
        if data:
            whole(self, fd, data)
        raise MemoryError

    news = started(backend, number)
    saves = [kind(new.id, new.head) for new in news]
    before = inodes(path, news)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(*place, defect)
        backend.commit(saves)
    done(backend, *saves)
    if kind is move:
        assert inodes(path, news)[0] != before[0], "it is written anew"
    with opened(FileBackend(path)) as other:
        assert [loaded(other, save.id).head for save in saves] == [save.head for save in saves]


@NUMBERS
@KINDS
def test_who_is_still_the_owner_is_asked_after_the_last_sync(path: Path, kind: Kind, number: int) -> None:
    """I3"""
    rival = Rival(path, f"x{number - 1}")
    with opened(FileBackend(path, disk=rival)) as backend:
        assert isinstance(backend, FileBackend)
        news = started(backend, number)
        rival.lurk()
        answers = backend.commit([kind(new.id, new.head) for new in news])
        assert rival.calls[: 2 * number] == ["write"] * number + ["fdatasync"] * number
        assert kinds_of(answers) == [None] * (number - 1) + [LeaseLostError]


@NUMBERS
@KINDS
def test_one_that_cannot_be_looked_at_leaves_the_others(
    backend: FileBackend, disk: BadDisk, kind: Kind, number: int
) -> None:
    """I10: whether it has messages, or whose it is."""
    news = started(backend, number)
    saves = [kind(new.id, new.head) for new in news]
    disk.fail("stat", 1, errno.EIO)
    assert kinds_of(backend.commit(saves)) == [StoreUnavailableError] + [None] * (number - 1)
    done(backend, *saves)
    assert [loaded(backend, save.id).head for save in saves] == [save.head for save in saves]


@NUMBERS
@KINDS
def test_an_owner_that_is_not_sure_whether_it_is_one_acknowledges_nothing(
    backend: FileBackend, disk: BadDisk, kind: Kind, number: int
) -> None:
    """I10: it is durable, and done already when it is repeated."""
    news = started(backend, number)
    saves = [kind(new.id, new.head) for new in news]
    looks = 2 if kind is move else 3
    disk.fail("stat", looks * number, errno.EIO)
    answers = backend.commit(saves)
    assert kinds_of(answers).count(StoreUnavailableError) == 1
    done(backend, *saves)
    assert [loaded(backend, save.id).head for save in saves] == [save.head for save in saves]
    assert [[row.seq for row in backend.boundaries(save.id)] for save in saves] == [[1, 2]] * number


@NUMBERS
@KINDS
def test_one_of_an_id_that_was_used_anew_is_refused(path: Path, backend: FileBackend, kind: Kind, number: int) -> None:
    """I3: another execution has the name by now, with the same fence and as many writes."""
    news = started(backend, number)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("you", ids=("x0",), dead=frozenset({"me"})))
        done(other, end("x0", given.head))
        assert other.delete(["x0"]) == [True]
        created(other, anew := owned("x0"))
        answers = backend.commit([kind(new.id, new.head) for new in news])
        assert kinds_of(answers) == [LeaseLostError] + [None] * (number - 1)
        assert loaded(other, "x0").head == anew.head
        assert [row.seq for row in other.boundaries("x0")] == [1]


@NUMBERS
@KINDS
def test_one_of_what_was_deleted_is_told_so(path: Path, backend: FileBackend, kind: Kind, number: int) -> None:
    news = started(backend, number)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("you", ids=("x0",), dead=frozenset({"me"})))
        done(other, end("x0", given.head))
        assert other.delete(["x0"]) == [True]
        answers = backend.commit([kind(new.id, new.head) for new in news])
        assert kinds_of(answers) == [ExecutionNotFoundError] + [None] * (number - 1)


@KINDS
def test_the_order_within_a_batch_stays(backend: FileBackend, kind: Kind, long_way: list[str]) -> None:
    """The first of two writes with the same number counts, whatever way each of them takes."""
    a, b, c = started(backend, 3)
    named = step("x0", a.head, put={"e": b"1"})
    first = move("x1", b.head)
    batch: list[Write] = [named, kind("x0", a.head), first, step("x1", b.head, put={"e": b"1"}), kind("x2", c.head)]
    assert done(backend, *batch) == [None] * 5
    assert loaded(backend, "x0").entries == {"e": b"1"}
    assert (loaded(backend, "x1").head, loaded(backend, "x1").entries) == (first.head, {})
    assert long_way == ["x0", "x0", "x1"]


def test_a_life_in_one_batch(path: Path, backend: FileBackend) -> None:
    """Creation, moves, a save, a message and the end."""
    new = owned("a")
    one = move("a", new.head)
    two = step("a", one.head, put={"e": b"1"})
    three = move("a", two.head)
    last = end("a", three.head)
    assert done(backend, new, one, two, send("a"), three, last, last) == [True, None, None, 1, None, None, None]
    with opened(FileBackend(path)) as other:
        found = loaded(other, "a")
        assert (found.head, found.entries, found.messages) == (last.head, {}, ())
        assert [row.seq for row in other.boundaries("a")] == [1, 2, 3, 4, 5]
    assert done(backend, last) == [None]


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_what_comes_behind_one_that_failed_fails_with_it(backend: FileBackend, disk: BadDisk, call: str) -> None:
    """I7, I10: it is not judged by what is stored without the one before it."""
    a, b = started(backend, 2)
    first = move("x0", a.head)
    second = step("x0", first.head)
    third = move("x0", second.head)
    disk.fail(call, 1, errno.EIO)
    answers = backend.commit([first, move("x1", b.head), second, third])
    assert kinds_of(answers) == [StoreUnavailableError, None, StoreUnavailableError, StoreUnavailableError]
    assert done(backend, first, second, third) == [None, None, None]
    assert loaded(backend, "x0").head == third.head


def test_a_stale_fence_in_a_batch_is_refused_alone(backend: FileBackend, path: Path) -> None:
    """I3"""
    a, b, c = started(backend, 3)
    with opened(FileBackend(path)) as other:
        other.claim(claim("you", ids=("x1",), dead=frozenset({"me"})))
        first = move("x0", a.head)
        batch: list[Write] = [first, move("x1", b.head), end("x0", first.head), move("x2", c.head)]
        batch.append(move("x1", attrs.evolve(b.head, fence=7)))
        assert kinds_of(backend.commit(batch)) == [None, LeaseLostError, None, None, LeaseLostError]
        assert loaded(other, "x1").head.owner == "you"
        assert loaded(other, "x0").head.state is ExecutionState.COMPLETED


def test_an_end_with_messages_takes_them_along(backend: FileBackend, path: Path, long_way: list[str]) -> None:
    new = started(backend, 1)[0]
    done(backend, send("x0"))
    last = end("x0", new.head)
    done(backend, last)
    assert long_way == ["x0"]
    with opened(FileBackend(path)) as other:
        assert loaded(other, "x0").messages == ()
        assert other.messages("x0") == []


def test_a_move_that_gives_up_its_execution_can_be_claimed(backend: FileBackend, path: Path) -> None:
    """None is made so; but whoever writes one is believed."""
    new = started(backend, 1)[0]
    given_up = move("x0", attrs.evolve(new.head, owner=None))
    with opened(FileBackend(path)) as other:
        done(backend, given_up)
        assert loaded(backend, "x0").head == given_up.head
        (given,) = other.claim(claim("you"))
        assert given.head.revision == given_up.head.revision
        (answer,) = backend.commit([move("x0", given_up.head)])
        assert isinstance(answer, LeaseLostError)


def test_what_is_over_is_seen_by_others_at_once(backend: FileBackend, path: Path) -> None:
    """The bell is rung, and the journal no longer at hand."""
    news = started(backend, 2)
    with opened(FileBackend(path)) as other:
        owned_by_me = Query(owner="me")
        assert len(other.find(owned_by_me)) == 2
        done(backend, *[end(new.id, new.head) for new in news])
        assert other.wait(5.0)
        assert other.find(owned_by_me) == []
        assert backend.delete(["x0", "x1"]) == [True, True]


def test_an_execution_that_was_retried_takes_the_short_way_too(backend: FileBackend, long_way: list[str]) -> None:
    created(backend, create("a", ExecutionState.FAILED, head_fields={"error": "e", "ended": 1.0}))
    backend._open.writes.janitor.tidy()
    (given,) = backend.claim(claim("me", ids=("a",), states=frozenset({ExecutionState.FAILED})))
    again = change("a", given.head, head_fields={"state": ExecutionState.RUNNING, "error": None, "ended": None})
    done(backend, again)
    long_way.clear()
    moves = [move("a", again.head)]
    moves.append(move("a", moves[0].head))
    for one in moves:
        done(backend, one)
    done(backend, end("a", moves[-1].head))
    assert long_way == []
    backend._open.writes.janitor.tidy()
    assert loaded(backend, "a").head.state is ExecutionState.COMPLETED
