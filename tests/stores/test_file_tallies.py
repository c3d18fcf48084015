"""What a file store remembers of inboxes: a message costs what it adds, and nothing is believed that has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.records import ExecutionState
from longrun.stores import file
from longrun.stores._file import inbox, tallies
from longrun.stores._file.entry import mark_of
from longrun.stores._file.lines import Identity, Line, unpack
from longrun.stores.file import FileBackend
from longrun.testing.samples import NOW, change, create, owned, send
from tests.stores.file_tools import created, done, opened

WAITING, COMPLETED = ExecutionState.WAITING, ExecutionState.COMPLETED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path, backend: FileBackend) -> Iterator[FileBackend]:
    """As another process has it."""
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of inboxes that were parsed."""
    lines: list[bytes] = []

    def noting(line: bytes, identity: Identity) -> Line:
        lines.append(line)
        return unpack(line, identity)

    monkeypatch.setattr(inbox, "unpack", noting)
    return lines


def test_who_sends_parses_nothing_of_what_it_has_sent(path: Path, backend: FileBackend, parsed: list[bytes]) -> None:
    created(backend, create("a", WAITING))
    for n in range(1, 21):
        assert backend.head("a") is not None
        assert done(backend, send("a", key=f"k{n}")) == [n]
    assert done(backend, send("a", key="k7"), send("a")) == [7, 21]
    assert parsed == []
    assert backend.head("a") is not None
    entry = backend._open.catalog.entries.by_stem["a"]
    assert entry.inbox.mark == mark_of((path / "inbox" / "a.jsonl").stat()), "nor is it looked at before it changes"
    assert [message.id for message in backend.messages("a")] == [*range(1, 22)]


def test_of_what_others_add_only_that_is_parsed(backend: FileBackend, other: FileBackend, parsed: list[bytes]) -> None:
    created(backend, create("a", WAITING))
    for n in range(1, 21):
        sender = (backend, other)[n % 2]
        assert sender.head("a") is not None
        assert done(sender, send("a", key=f"k{n}")) == [n]
    assert len(parsed) == 19, "each but the last, by whoever of the two has not sent it"
    for one in (backend, other):
        assert done(one, *[send("a", key=f"k{n}") for n in range(1, 21)]) == [*range(1, 21)]


def test_the_head_is_told_without_the_states(backend: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    created(backend, create("a", WAITING, data=b'"%b"' % (b"x" * 50_000)))
    found = backend.load("a")
    assert found is not None
    monkeypatch.setattr(file, "read_settled", lambda *_: pytest.fail("all of it is read"))
    assert backend.head("a") == found.head


def test_what_was_seen_and_taken_back_is_not_known(path: Path, backend: FileBackend, other: FileBackend) -> None:
    """Whoever sent it may have found that it could not be made durable; another message has its place now."""
    created(backend, create("a", WAITING))
    done(backend, send("a", key="k1"))
    size = (path / "inbox" / "a.jsonl").stat().st_size
    done(backend, send("a", key="k2"))
    assert other.head("a") is not None
    os.truncate(path / "inbox" / "a.jsonl", size)
    with opened(FileBackend(path)) as third:
        assert done(third, send("a", key="k3")) == [2]
    assert (path / "inbox" / "a.jsonl").stat().st_size == 2 * size
    assert done(other, send("a", key="k2"), send("a", key="k3"), send("a", key="k1")) == [3, 2, 1]


@pytest.mark.parametrize("newline", [True, False])
def test_an_end_that_was_torn_is_not_known(path: Path, backend: FileBackend, other: FileBackend, newline: bool) -> None:
    created(backend, create("a", WAITING))
    done(backend, send("a", key="k1"), send("a", key="k2"))
    end = (path / "inbox" / "a.jsonl").stat().st_size
    os.truncate(path / "inbox" / "a.jsonl", end - (1 if newline else 20))
    assert other.head("a") is not None
    last = 2 if newline else 1
    assert done(other, send("a", key="k3"), send("a", key="k1")) == [last + 1, 1]
    assert done(backend, send("a", key="k3"), send("a")) == [last + 1, last + 2]
    for one in (backend, other):
        assert [message.id for message in one.messages("a")] == [*range(1, last + 3)]


def test_a_compacted_inbox_is_read_anew(
    backend: FileBackend, other: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "COMPACT_OVER", 100)
    new = owned("a")
    created(backend, new)
    done(other, *[send("a", key=f"k{n}") for n in range(1, 11)])
    first = change("a", new.head, take=tuple(range(1, 10)))
    done(backend, first)
    assert done(other, send("a", key="k11"), send("a", key="k3"), send("a", limit=3)) == [11, 3, 12]
    done(backend, change("a", first.head, take=(10, 11)))
    assert done(other, send("a", key="k11"), send("a", limit=2)) == [11, 13]
    assert [message.id for message in backend.messages("a")] == [12, 13]


def test_another_execution_of_the_same_id_begins_anew(backend: FileBackend, other: FileBackend) -> None:
    for _ in range(2):
        new = owned("a")
        created(backend, new)
        assert done(other, send("a", key="k"), send("a")) == [1, 2]
        assert done(backend, send("a", key="l"), send("a", key="k")) == [3, 1]
        done(backend, change("a", new.head, head_fields={"state": COMPLETED, "owner": None, "ended": NOW}))
        assert done(other, send("a", key="k"), send("a", key="m")) == [1, 4]
        assert backend.delete(["a"]) == [True]


def test_of_more_inboxes_than_are_remembered_each_is_right(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "MOST", 2)
    ids = [f"x{n}" for n in range(5)]
    created(backend, *[create(id, WAITING) for id in ids])
    for n in range(1, 4):
        assert done(backend, *[send(id, key=f"k{n}") for id in ids]) == [n] * 5
    assert done(backend, *[send(id, key="k2") for id in ids]) == [2] * 5
    assert len(backend._open.place.tallies._known) == 2
