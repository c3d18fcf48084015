"""The short ways of the SQLite store for starts, moves and ends: each leaves behind what the long way leaves."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
    WriteOrderError,
)
from longrun.moves import Move, begun, opening
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Owner, Write
from longrun.stores._sqlite import pack, ready, sql
from longrun.stores._sqlite.batch import Batch
from longrun.stores._sqlite.ready import ReadyCreate
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.conformance_move import as_save
from longrun.testing.samples import NOW, change, claim, create, end, move, owned, send, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[SQLiteBackend]:
    with contextlib.closing(SQLiteBackend(path)) as backend:
        backend.open()
        yield backend


@pytest.fixture
def backend(path: Path) -> Iterator[SQLiteBackend]:
    with opened(path) as backend:
        signed_on(backend, "me")
        yield backend


def signed_on(backend: SQLiteBackend, *owners: str) -> None:
    for owner in owners:
        backend.register(Owner(id=owner, life={}, remaining=0), 1000.0)


def rows(path: Path) -> dict[str, list[Any]]:
    """Every row of every execution."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in sql.TABLES}


def said(path: Path) -> dict[str, list[Any]]:
    """The same, with what is packed taken apart, and each checksum of that compared."""
    found = rows(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        owned_by = "SELECT key, id, state, fence, owner FROM execution"
        executions: dict[int, tuple[str, str, int, str | None]] = {
            key: (id, state, fence, owner) for key, id, state, fence, owner in connection.execute(owned_by)
        }
    found["head"] = [
        (key, revision, kept, repr(pack.head_numbers(numbers)), words)
        for key, revision, kept, numbers, words, crc in found["head"]
        if pack.head_fits(*executions[key], (revision, numbers, words, crc))
    ]
    found["boundary"] = [
        (number, key, seq, repr(pack.boundary_numbers(numbers)), words, *state)
        for number, key, seq, numbers, words, crc, *state in found["boundary"]
        if pack.boundary_fits(executions[key][0], seq, numbers, words, crc)
    ]
    return found


def head_of(backend: SQLiteBackend, id: str) -> Head:
    found = backend.load(id)
    assert found is not None
    assert found.damage == ()
    return found.head


def started(id: str, owner: str = "me", *, data: bytes = b"{}", **fields: Any) -> Create:
    """A new execution as the executor makes it."""
    head = begun(1, owner, NOW)
    return attrs.evolve(owned(id, owner, data=data, **fields), head=head, boundary=opening(head, data))


A = started("a")
ONE = move("a", A.head)
TWO = move("a", ONE.head, keep_from=2)
END = end("a", TWO.head, keep_from=3)
NOTED = change("a", A.head, put={"e": b"1", "f": b"2"})
AFTER = move("a", NOTED.head)
LAST = end("a", NOTED.head)
SHOWN = change("a", TWO.head, head_fields={"note": "half"})
WOKEN = create("a", head_fields={"owner": "me", "fence": 1, "woken": True})
ELSEWHERE = started("a", "you")

RUNS: dict[str, list[list[Write]]] = {
    "a commit each": [[A], [ONE], [TWO], [END]],
    "all at once": [[A, ONE, TWO, END]],
    "created and ended at once": [[A, end("a", A.head)]],
    "ended twice": [[A], [end("a", A.head), end("a", A.head)]],
    "ended and ended again": [[A], [end("a", A.head), end("a", attrs.evolve(end("a", A.head).head))]],
    "a start that is refused": [[A, started("a", data=b"other"), ONE]],
    "the same in a later commit": [[A], [started("a", data=b"other"), ONE]],
    "a message before the end": [[A, ONE, TWO], [send("a"), END]],
    "one that waited": [[A, send("a", key="k")], [ONE, TWO, END]],
    "a message behind the end": [[A, ONE, TWO], [END, send("a")]],
    "an end, and what comes of it": [[A, ONE, TWO], [END], [send("a", key="k")]],
    "entries": [[A, NOTED], [LAST]],
    "entries at once": [[A, NOTED, LAST]],
    "entries of a step": [[A, NOTED, AFTER], [end("a", AFTER.head)]],
    "entries cleared": [[A, NOTED], [step("a", NOTED.head, clear=True)]],
    "entries cleared, and others": [[A, NOTED], [step("a", NOTED.head, clear=True, put={"g": b"3"})]],
    "entries dropped": [[A, NOTED], [change("a", NOTED.head, drop=("e",))], [end("a", attrs.evolve(LAST.head))]],
    "a save that is no move": [[A, ONE, TWO], [SHOWN, end("a", SHOWN.head, keep_from=4)]],
    "woken": [[WOKEN], [end("a", WOKEN.head)]],
    "somebody else's": [[ELSEWHERE], [end("a", ELSEWHERE.head)]],
    "nobody's": [[create("a")], [end("a", create("a").head)]],
    "with a parent": [[started("a", parent_id="p")], [ONE]],
    "with no name of a parent": [[started("a", parent_id="")], [ONE]],
    "with metadata": [[started("a", metadata={"k": 1})], [ONE]],
    "with a head like any other": [[owned("a"), owned("b")], [ONE]],
    "with a state like any other": [[attrs.evolve(A, boundary=owned("a").boundary)], [ONE]],
    "with no state to speak of": [[started("a", data=b"")], [ONE]],
    "with a large state": [[started("a", data=bytes(range(256)) * 300)], [ONE]],
    "with other letters": [[started("a", "Ich 🙂", workflow="Ablauf »ß« 步")], [ONE]],
    "waiting": [[owned("a", state=ExecutionState.WAITING)], [ONE, TWO], [END]],
}


def as_long(write: Write) -> Write:
    return as_save(write) if isinstance(write, Move) else write


@pytest.mark.parametrize("run", RUNS)
def test_the_short_way_leaves_what_the_long_way_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Row by row, and answer by answer."""
    found: list[Any] = []
    for name, way in (("short", lambda write: write), ("long", as_long)):
        place = tmp_path / f"{name}.db"
        with opened(place) as backend:
            signed_on(backend, "me")
            if name == "long":
                monkeypatch.setitem(ready._WAYS, Create, ReadyCreate)
            for batch in RUNS[run]:
                answers = backend.commit([way(write) for write in batch])
                found.append(([repr(answer) for answer in answers], said(place)))
    commits = len(RUNS[run])
    assert found[:commits] == found[commits:]


def test_starts_and_ends_of_many_are_one_batch(backend: SQLiteBackend) -> None:
    """More than one statement takes, and of every size."""
    new = [started(f"x{n}") for n in range(300)]
    ends = [end(one.id, one.head) for one in new]
    assert backend.commit(new[:299]) == [True] * 299
    assert backend.commit([new[299], *ends]) == [True, *[None] * 300]
    assert [head_of(backend, one.id) for one in ends] == [one.head for one in ends]
    assert backend._known.rows == {}, "I16: what is over is not remembered"


def test_one_id_is_created_once_in_a_batch(backend: SQLiteBackend) -> None:
    first, second = started("a", data=b"first"), started("a", data=b"second")
    assert backend.commit([first, second, owned("b"), first]) == [True, False, True, False]
    assert backend.commit([move("a", first.head)]) == [None]
    found = backend.checkpoint("a", 1)
    assert found is not None
    assert found[0].data == b"first"


def refusals(answers: Sequence[object]) -> list[type | None]:
    return [type(answer) if isinstance(answer, Exception) else None for answer in answers]


@pytest.mark.parametrize("kind", [move, end])
def test_a_refusal_in_the_middle_of_a_batch_is_one_alone(
    path: Path, backend: SQLiteBackend, kind: Callable[..., Move]
) -> None:
    """I3: what is refused leaves no row and no memory behind; the owner goes on from what is stored."""
    a, b, c, d = (owned(id) for id in "abcd")
    backend.commit([a, b, c, d])
    stale, early = attrs.evolve(b.head, fence=0), attrs.evolve(c.head, revision=4)
    before = rows(path)
    batch = [kind("a", a.head), kind("b", stale), kind("c", early), kind("none", a.head), kind("d", d.head)]
    answers = backend.commit(batch)
    assert refusals(answers) == [None, LeaseLostError, WriteOrderError, ExecutionNotFoundError, None]
    after = rows(path)
    for table in ("execution", "head", "boundary"):
        ours = 1 if table == "boundary" else 0
        assert [row for row in after[table] if row[ours] in (2, 3)] == [
            row for row in before[table] if row[ours] in (2, 3)
        ]
    assert backend.commit([kind("b", b.head), kind("c", c.head)]) == [None, None]
    assert [head_of(backend, id).seq for id in "abcd"] == [2, 2, 2, 2]


def test_what_cannot_be_stored_is_refused_alone_among_starts_moves_and_ends(backend: SQLiteBackend) -> None:
    a, b = owned("a"), owned("b")
    backend.commit([a, b])
    unfit = [owned("c", workflow="\ud800"), owned("d", owner="\ud800"), owned("e", priority=1 << 70)]
    answers = backend.commit([move("a", a.head), *unfit, end("b", b.head), owned("f")])
    assert refusals(answers) == [None, *[NotStorableError] * 3, None, None]
    assert [backend.load(one.id) for one in unfit] == [None] * 3
    assert head_of(backend, "b").state is ExecutionState.COMPLETED
    assert head_of(backend, "f").state is ExecutionState.RUNNING


class Failing:
    """Lets a transaction fail when all is written: before its end, or as that."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: SQLiteBackend, at_commit: bool) -> None:
        once = Batch.write

        def failing(batch: Batch) -> None:
            once(batch)
            if not at_commit:
                raise sqlite3.OperationalError("no more")
            batch._connection.execute("ROLLBACK")  # so that COMMIT finds no transaction, and fails

        patch.setattr(Batch, "write", failing)


@pytest.mark.parametrize("at_commit", [False, True])
def test_a_transaction_that_failed_leaves_no_memory(
    path: Path, backend: SQLiteBackend, monkeypatch: pytest.MonkeyPatch, at_commit: bool
) -> None:
    """I9, I10: neither of a start, a move, an end, nor of entries that are gone; all of it can be written again."""
    a, b, c = owned("a"), owned("b"), owned("c")
    noted = change("c", c.head, put={"e": b"1"})
    backend.commit([a, b, c, noted])
    before = rows(path)
    new = owned("n")
    batch: list[Write] = [move("a", a.head), end("b", b.head), end("c", noted.head), new, move("n", new.head)]
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError):
        Failing(patch, backend, at_commit)
        backend.commit(batch)
    assert rows(path) == before
    assert backend._known.rows == {}
    again = [move("b", b.head), *batch[:1], *batch[2:]]
    assert backend.commit(again) == [None, None, None, True, None]
    assert backend.commit([end("b", move("b", b.head).head)]) == [None]
    assert [head_of(backend, id).seq for id in "abcn"] == [2, 3, 2, 2]
    assert rows(path)["entry"] == []


def test_a_transaction_that_found_the_database_locked_is_made_again(
    backend: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same rows, made ready once."""
    new = [owned(f"x{n}") for n in range(5)]
    backend.commit([owned("y")])
    once, turns = Batch.write, []

    def busy(batch: Batch) -> None:
        once(batch)
        turns.append(1)
        if len(turns) == 1:
            error = sqlite3.OperationalError("locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error

    monkeypatch.setattr(Batch, "write", busy)
    ends = [end(one.id, one.head) for one in new]
    assert backend.commit([*new, *ends]) == [*[True] * 5, *[None] * 5]
    assert len(turns) == 2
    assert [head_of(backend, one.id) for one in ends] == [one.head for one in ends]


@pytest.mark.parametrize("last", [end("a", NOTED.head), as_save(LAST), step("a", NOTED.head, clear=True)])
@pytest.mark.parametrize("at_once", [True, False])
def test_entries_go_with_the_step(path: Path, backend: SQLiteBackend, last: Write, at_once: bool) -> None:
    batches: list[list[Write]] = [[A, NOTED, last]] if at_once else [[A], [NOTED], [last]]
    for batch in batches:
        assert refusals(backend.commit(batch)) == [None] * len(batch)
    assert rows(path)["entry"] == []


def test_entries_that_another_process_wrote_go_with_the_end(path: Path, backend: SQLiteBackend) -> None:
    """Whoever takes an execution over does not know of them."""
    new = owned("a")
    backend.commit([new])
    with opened(path) as other:
        signed_on(other, "you")
        (taken,) = other.claim(claim("you", dead=frozenset({"me"})))
        noted = change("a", taken.head, put={"e": b"1"})
        parked = change("a", noted.head, head_fields={"owner": None})
        assert other.commit([noted, parked]) == [None, None]
    (back,) = backend.claim(claim("me"))
    assert back.entries == {"e": b"1"}
    assert backend.commit([end("a", back.head)]) == [None]
    assert rows(path)["entry"] == []
    assert head_of(backend, "a").state is ExecutionState.COMPLETED


def test_entries_that_a_replica_wrote_for_its_owner_go_with_the_end(path: Path, backend: SQLiteBackend) -> None:
    """Somebody who does not own an execution writes for him who does, and says so."""
    new = owned("a")
    noted = change("a", new.head, put={"e": b"1"})
    backend.commit([new])
    with opened(path) as other:
        assert other.commit([noted]) == [None]
    assert backend.commit([end("a", noted.head)]) == [None]
    assert rows(path)["entry"] == []


def test_an_end_that_somebody_else_wrote_is_heard_of(path: Path, backend: SQLiteBackend) -> None:
    """I8, I9: whoever owns it here does not go on from what he remembers."""
    new = owned("a")
    backend.commit([new])
    last = end("a", new.head)
    with opened(path) as other:
        assert other.commit([last]) == [None]
        assert other._known.rows == {}
    assert backend.commit([move("a", new.head)]) == [None], "that very revision is stored already"
    assert head_of(backend, "a") == last.head


def test_a_message_sent_elsewhere_goes_with_the_end(path: Path, backend: SQLiteBackend) -> None:
    new = owned("a")
    backend.commit([new])
    with opened(path) as other:
        assert other.commit([send("a"), send("a", key="k")]) == [1, 2]
    assert backend.commit([end("a", new.head)]) == [None]
    assert backend.messages("a") == []
    assert backend.pending("me") == []
    assert backend.sent("a") == (2, {"k": 2})
    assert backend.claim(claim("you", dead=frozenset({"me"}))) == []


def test_an_end_takes_the_place_of_a_damaged_boundary_with_its_number(path: Path, backend: SQLiteBackend) -> None:
    """I5: the later row counts."""
    new = owned("a")
    backend.commit([new])
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        values = (1, 2, b"?", "?", 0, None, None, None)
        connection.execute(sql.ADD_BOUNDARY, values)
    last = end("a", new.head)
    assert backend.commit([last, owned("b")]) == [None, True]
    assert [row.seq for row in backend.boundaries("a")] == [1, 2]
    assert head_of(backend, "a") == last.head


def test_steps_that_come_later_are_those_of_each_execution(path: Path, backend: SQLiteBackend) -> None:
    """I5: also beside one whose definition is damaged, which stays so and is told of."""
    ids = [f"x{number}" for number in range(50)]
    new = [owned(id) for id in ids]
    backend.commit(new)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE execution SET workflow = 'another' WHERE id = 'x7'")
    named = [
        change(one.id, one.head, steps=(f"first of {one.id}", *["next"] * n), version=f"v{n}")
        for n, one in enumerate(new)
    ]
    assert backend.commit(named) == [None] * len(ids)
    for n, id in enumerate(ids):
        if id == "x7":
            with pytest.raises(CorruptDataError):
                backend.load(id)
            continue
        loaded = backend.load(id)
        assert loaded is not None
        found = loaded.definition
        assert (found.steps[0], found.total, found.version) == (f"first of {id}", n + 1, f"v{n}")


def test_of_two_lists_of_steps_in_a_batch_the_later_one_counts(backend: SQLiteBackend) -> None:
    new = owned("a")
    first = change("a", new.head, steps=("one",))
    backend.commit([new, first, change("a", first.head, steps=("one", "two"))])
    loaded = backend.load("a")
    assert loaded is not None
    assert loaded.definition.steps == ("one", "two")
    assert loaded.definition.total == 2


def test_many_that_change_hands_in_a_batch_each_come_to_their_place(path: Path, backend: SQLiteBackend) -> None:
    new = [owned(f"x{number}") for number in range(50)]
    backend.commit(new)
    states = [ExecutionState.WAITING, ExecutionState.PAUSED, ExecutionState.FAILED]
    saves = [
        change(one.id, one.head, head_fields={"state": states[n % 3], "owner": None, "due": float(n)})
        for n, one in enumerate(new)
    ]
    assert backend.commit(saves) == [None] * len(new)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT id, state, owner, wake FROM execution ORDER BY key").fetchall()
    assert found == [(one.id, states[n % 3].value, None, float(n) if n % 3 == 0 else None) for n, one in enumerate(new)]


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("FINISH", "execution"),
        ("MOVE", "execution"),
        ("GIVE", "execution"),
        ("SET_NAMED", "execution"),
        ("SET_STEPS", "steps"),
    ],
)
def test_what_is_written_for_many_is_found_by_its_key(
    path: Path, backend: SQLiteBackend, statement: str, table: str
) -> None:
    """I16: whatever statistics somebody had made when there was little."""
    backend.commit([owned(id) for id in "abc"])
    text = getattr(sql, statement)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ANALYZE")
        plan = connection.execute(f"EXPLAIN QUERY PLAN {sql.for_many(text, 2)}", [1] * 2 * text.count("?")).fetchall()
    assert [row[3] for row in plan if table in row[3]] == [f"SEARCH {table} USING INTEGER PRIMARY KEY (rowid=?)"]
