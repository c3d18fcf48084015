"""Claims of the SQLite store: what they give is what the slower way reads, and what they know is what is stored."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.errors import LeaseLostError
from longrun.records import ExecutionState
from longrun.stored import Create, Loaded, Owner, Query, Write
from longrun.stores._sqlite import load, sql
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import NOW, boundary, change, claim, create, move, owned, send, step

DEAD = frozenset({"dead"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@contextlib.contextmanager
def opened(path: Path, owner: str) -> Iterator[SQLiteBackend]:
    with contextlib.closing(SQLiteBackend(path)) as backend:
        backend.open()
        backend.register(Owner(id=owner, life={}, remaining=0), 1000.0)
        yield backend


@pytest.fixture
def backend(path: Path) -> Iterator[SQLiteBackend]:
    with opened(path, "me") as backend:
        yield backend


@contextlib.contextmanager
def statements(backend: SQLiteBackend) -> Iterator[list[str]]:
    assert backend._writer is not None
    said: list[str] = []
    backend._writer.set_trace_callback(said.append)
    yield said
    backend._writer.set_trace_callback(None)


A = owned("a", "dead")
BLOBS = owned("a", "dead", blobs={"b": b"blob", "c": b"other"})
NEXT_BLOB = boundary(2, blobs=("c", "d"))
WAITS = ExecutionState.WAITING

KINDS: dict[str, list[Write]] = {
    "just started": [A],
    "after some steps": [A, move("a", A.head), move("a", move("a", A.head).head, keep_from=2)],
    "with blobs": [BLOBS, step("a", BLOBS.head, boundaries=(NEXT_BLOB,), blobs={"d": b"new"})],
    "with entries": [A, change("a", A.head, put={"e": b"1", "f": b"2"})],
    "with messages": [A, send("a", payload=b"1"), send("a", key="k", options={"x": 1})],
    "with metadata and a parent": [
        owned("a", "dead", metadata={"k": [1, None]}, parent_id="p", priority=-3, queue="q")
    ],
    "with words": [A, change("a", A.head, head_fields={"error": "no", "note": "half", "of": 4.0, "hold": True})],
    "with a boundary that says why": [A, step("a", A.head, boundaries=(boundary(2, error="no \ud800", kind="fail"),))],
    "with boundaries of which one has its state": [
        A,
        change("a", A.head, head_fields={"seq": 3}, boundaries=(boundary(2, data=None), boundary(3))),
    ],
    "with the newest without its state": [
        A,
        change("a", A.head, head_fields={"seq": 3}, boundaries=(boundary(2), boundary(3, data=None))),
    ],
    "without steps": [owned("a", "dead", steps=(), total=0)],
    "waiting": [create("a", WAITS, head_fields={"due": NOW - 1, "signal": "go"})],
    "woken": [create("a", WAITS, head_fields={"due": NOW + 9, "signal": "go"}), send("a")],
}


def given(backend: SQLiteBackend) -> Loaded:
    (found,) = backend.claim(claim("me", dead=DEAD))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_gives_what_the_slower_way_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And leaves the same rows."""
    found = []
    for name in ("short", "long"):
        if name == "long":
            monkeypatch.setattr(load, "read_sound", lambda connection, listed: {})
        with opened(tmp_path / f"{name}.db", "me") as backend:
            backend.commit(KINDS[kind])
            before = backend.load("a")
            taken = given(backend)
            with contextlib.closing(sqlite3.connect(tmp_path / f"{name}.db")) as other:
                stored = [other.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in sql.TABLES]
            found.append((before, taken, backend.load("a"), stored))
    assert found[0] == found[1]
    assert found[0][1] == found[0][2], "what is given is what is stored"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_claim_is_what_is_stored(backend: SQLiteBackend, kind: str) -> None:
    backend.commit(KINDS[kind])
    given(backend)
    known = backend._known.rows.pop("a")
    assert backend._writer is not None
    backend._known.refresh(backend._writer, {"a"})
    stored = backend._known.rows["a"]
    assert {name: getattr(known, name) for name in known.__slots__} == {
        name: getattr(stored, name) for name in stored.__slots__
    }


def test_the_first_save_after_a_claim_reads_nothing_again(backend: SQLiteBackend) -> None:
    backend.commit([owned(id, "dead") for id in "abc"])
    taken = backend.claim(claim("me", dead=DEAD))
    with statements(backend) as said:
        assert backend.commit([move(one.definition.id, one.head) for one in taken]) == [None] * 3
    assert not [text for text in said if "SELECT" in text], said


def test_what_was_claimed_and_taken_by_another_is_refused(path: Path, backend: SQLiteBackend) -> None:
    """I3: what is known of a claim counts only as long as nobody else has touched it."""
    backend.commit([owned("a", "dead")])
    mine = given(backend)
    with opened(path, "you") as other:
        (theirs,) = other.claim(claim("you", dead=frozenset({"me"})))
        (refusal,) = backend.commit([move("a", mine.head)])
        assert isinstance(refusal, LeaseLostError)
        assert other.commit([move("a", theirs.head)]) == [None]


def test_a_message_that_comes_behind_a_claim_is_kept_in_mind(path: Path, backend: SQLiteBackend) -> None:
    """It was sent by another process: what is given back then is due at once."""
    backend.commit([owned("a", "dead")])
    mine = given(backend)
    with opened(path, "you") as other:
        assert other.commit([send("a")]) == [1]
    free = {"owner": None, "state": WAITS, "signal": "go"}
    assert backend.commit([change("a", mine.head, head_fields=free)]) == [None]
    assert backend.next_due() == 0.0


def test_of_a_claim_for_somebody_who_writes_elsewhere_nothing_is_kept(backend: SQLiteBackend) -> None:
    backend.commit([owned("a", "dead")])
    assert len(backend.claim(claim("you", dead=DEAD))) == 1
    assert backend._known.rows == {}


def test_nothing_is_kept_of_what_a_claim_found_unreadable(path: Path, backend: SQLiteBackend) -> None:
    """It is stored as blocked, with a fence of its own: its owner is refused."""
    new: Create = owned("a")
    backend.commit([new])
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE execution SET priority = 7")
    assert backend.claim(claim("me", dead=frozenset({"me"}))) == []
    (refusal,) = backend.commit([move("a", new.head)])
    assert isinstance(refusal, LeaseLostError)
    assert backend.count(Query()) == {ExecutionState.BLOCKED: 1}


def test_many_of_every_size_are_claimed_at_once(backend: SQLiteBackend) -> None:
    """More than one statement takes; one of them is damaged and goes another way."""
    backend.commit([owned(f"x{n:03}", "dead") for n in range(299)])
    assert backend._writer is not None
    backend._writer.execute("UPDATE head SET crc = crc + 1 WHERE execution = 7")
    taken = backend.claim(claim("me", dead=DEAD, limit=500))
    assert [one.definition.id for one in taken] == [f"x{n:03}" for n in range(299)]
    assert [bool(one.damage) for one in taken].index(True) == 6
    assert {(one.head.owner, one.head.fence) for one in taken} == {("me", 2)}
    assert backend.commit([move(one.definition.id, one.head) for one in taken]) == [None] * 299


def test_claims_are_read_and_written_by_their_key(path: Path, backend: SQLiteBackend) -> None:
    """I16: whatever statistics somebody had made when there was little."""
    backend.commit([owned(id) for id in "abc"])
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("ANALYZE")
        read = other.execute(f"EXPLAIN QUERY PLAN {sql.LOAD_WHOLE}", ("[1, 2]",)).fetchall()
        given = other.execute(f"EXPLAIN QUERY PLAN {sql.for_many(sql.GIVE, 2)}", (1, 2, "me", 0, 0.0) * 2).fetchall()
    scanned = [text for *_, text in read + given if text.startswith("SCAN")]
    assert {text.split()[1] for text in scanned} == {"json_each", "one", "2"}, scanned
