"""The SQLite store: the whole contract, and what is special to a file: damage, other programs, full disks, kills."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun import Executor, StepRegistry
from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    NewerFormatError,
    NotStorableError,
    StoreSettingsError,
    StoreUnavailableError,
)
from longrun.records import ExecutionState
from longrun.stored import Owner, Query
from longrun.stores._sqlite import sql
from longrun.stores._sqlite.batch import Batch
from longrun.stores._sqlite.file import DatabaseFile, FileLock, fold_wal, is_busy, translate
from longrun.stores._sqlite.known import Known
from longrun.stores.sqlite import SQLiteBackend, SQLiteCheckpointStore
from longrun.testing import StoreConformance
from longrun.testing.samples import NOW, boundary, change, claim, create, end, move, owned, send, step

ROOT = Path(__file__).parents[2]


class TestSQLiteStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "runs.db"

    def make_store(self) -> SQLiteCheckpointStore:
        return SQLiteCheckpointStore(self.path)

    def damage_definition(self, id: str) -> None:
        spoil(self.path, "UPDATE execution SET version = 'changed' WHERE id = ?", id)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def backend(path: Path) -> Iterator[SQLiteBackend]:
    backend = SQLiteBackend(path, timeout=5.0)
    backend.open()
    yield backend
    backend.close()


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """The database as any other program sees it."""
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        yield connection


def spoil(path: Path, statement: str, *values: Any) -> None:
    with raw(path) as connection:
        assert connection.execute(statement, values).rowcount == 1


def walk(backend: SQLiteBackend, id: str = "a", steps: int = 3, **last: Any) -> None:
    """An execution of "me" with this many boundaries, each with a blob of its own."""
    new = owned(id, blobs={"b1": b"blob 1"})
    writes: list[Any] = [new]
    head = new.head
    for seq in range(2, steps + 1):
        more = last if seq == steps else {}
        row = boundary(seq, blobs=(f"b{seq}",))
        writes.append(step(id, head, boundaries=(row,), blobs={f"b{seq}": f"blob {seq}".encode()}, **more))
        head = writes[-1].head
    assert not any(isinstance(answer, Exception) for answer in backend.commit(writes))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_files_and_new_directories_are_the_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask says."""
    before = os.umask(0)
    try:
        backend = SQLiteBackend(tmp_path / "one" / "two" / "runs.db")
        backend.open()
    finally:
        os.umask(before)
    try:
        backend.commit([create("a")])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "one" / "two").iterdir()}
        assert modes == dict.fromkeys(["runs.db", "runs.db-wal", "runs.db-shm", "runs.db-lock"], 0o600)
        assert [stat.S_IMODE((tmp_path / d).stat().st_mode) for d in ("one", "one/two")] == [0o700, 0o700]
    finally:
        backend.close()


def test_settings_that_decide_durability_are_in_force(backend: SQLiteBackend) -> None:
    """I1: as they were seen, not as they were asked for."""
    assert backend._writer is not None
    found = [backend._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert found == ["wal", 2]
    facts = backend.describe()
    assert (facts["journal_mode"], facts["synchronous"], facts["sqlite"]) == ("wal", "full", sqlite3.sqlite_version)


def refused(path: Path, error: type[Exception] = StoreSettingsError) -> str:
    backend = SQLiteBackend(path)
    with pytest.raises(error) as caught:
        backend.open()
    backend.close()
    return str(caught.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path)


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert "not a plain file" in refused(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    content = b"dear diary, " * 1000
    path.write_bytes(content)
    assert str(path) in refused(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "foreign",
    ["CREATE TABLE execution (id)", "CREATE TABLE notes (id)", "PRAGMA application_id = 7", "PRAGMA user_version = 3"],
)
def test_the_database_of_another_program_is_refused_and_left_alone(path: Path, foreign: str) -> None:
    with raw(path) as connection:
        connection.execute(foreign)
    before = path.read_bytes()
    assert "another program" in refused(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(path: Path, backend: SQLiteBackend) -> None:
    """I14."""
    backend.close()
    with raw(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "upgrade longrun" in refused(path, NewerFormatError)


def test_what_this_user_may_not_write_is_refused() -> None:
    """A file or directory that is read-only for somebody without privileges."""
    script = """
import os, sys
from longrun.errors import StoreSettingsError
from longrun.stores.sqlite import SQLiteBackend
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        SQLiteBackend(path).open()
    except StoreSettingsError as error:
        print(error)
"""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        backend = SQLiteBackend(place / "runs.db")
        backend.open()
        backend.close()
        (place / "runs.db").chmod(0o444)
        place.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", script, str(place / "runs.db"), str(place / "new.db")],
            env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        place.chmod(0o700)
    assert len(done.stdout.splitlines()) == 2


def test_a_file_that_was_removed_is_noticed(path: Path, backend: SQLiteBackend) -> None:
    """I10: a write to it would be lost with the process."""
    backend.commit([create("a")])
    os.rename(path, path.with_name("elsewhere"))
    with pytest.raises(StoreUnavailableError):
        backend.commit([create("b")])
    with pytest.raises(StoreUnavailableError):
        backend.load("a")
    os.rename(path.with_name("elsewhere"), path)
    assert backend.commit([create("b")]) == [True]
    assert backend.load("a") is not None


def test_a_closed_backend_says_so(backend: SQLiteBackend) -> None:
    backend.close()
    for call in (lambda: backend.commit([create("a")]), backend.ping, lambda: backend.wait(0)):
        with pytest.raises(StoreUnavailableError, match="closed"):
            call()


# --- failures ---------------------------------------------------------------------------------------------------------


def test_the_keys_of_messages_taken_long_ago_are_forgotten(backend: SQLiteBackend, monkeypatch) -> None:
    """I16"""
    monkeypatch.setattr("longrun.stores._sqlite.batch.KEYS_REMEMBERED", 3)
    new = owned("a")
    backend.commit([new])
    before = new.head
    for number in range(1, 9):
        save = change("a", before, take=(number,))
        assert backend.commit([send("a", key=f"key {number}"), save]) == [number, None]
        before = save.head
    last, keys = backend.sent("a")
    assert last == 8
    assert keys == {f"key {number}": number for number in range(5, 9)}, "three, and the one that was taken since"


def test_a_full_disk_is_an_error_and_nothing_is_lost(backend: SQLiteBackend) -> None:
    """I10: SQLite's own SQLITE_FULL; the batch is not there in part, and work goes on when there is room."""
    new = owned("a")
    backend.commit([new])
    assert backend._writer is not None
    backend._writer.execute("PRAGMA max_page_count = 1")
    large = step("a", new.head, put={"e": b"x" * 500_000})
    with pytest.raises(StoreUnavailableError, match="full") as caught:
        backend.commit([create("b"), large])
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    found = backend.load("a")
    assert found is not None
    assert (found.head, backend.load("b")) == (new.head, None)
    assert backend.commit([create("b"), large]) == [True, None]


def test_another_program_that_writes_is_waited_for(path: Path, backend: SQLiteBackend) -> None:
    """No "database is locked" reaches anybody while there is time left."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        timer.start()
        assert backend.commit([create("a")]) == [True]
        timer.join()


def test_another_program_that_never_ends_is_an_error(path: Path) -> None:
    backend = SQLiteBackend(path, timeout=0.2)
    backend.open()
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="locked"):
                backend.commit([create("a")])
            assert backend.load("a") is None, "readers go on meanwhile"
        assert backend.commit([create("a")]) == [True]
    finally:
        backend.close()


def test_another_program_in_the_way_of_the_opening_is_no_wrong_setting(path: Path, backend: SQLiteBackend) -> None:
    backend.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            SQLiteBackend(path, timeout=0.2).open()
    backend.open()


def test_a_database_that_cannot_be_opened_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: DatabaseFile, mode: str) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(DatabaseFile, "_open", closed)
    assert "unable to open" in refused(path)


@pytest.mark.parametrize(
    ("code", "error", "word"),
    [
        (sqlite3.SQLITE_BUSY, StoreUnavailableError, "locked"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StoreUnavailableError, "locked"),
        (sqlite3.SQLITE_FULL, StoreUnavailableError, "full"),
        (sqlite3.SQLITE_CORRUPT_INDEX, CorruptDataError, "SQLite database"),
        (sqlite3.SQLITE_IOERR, StoreUnavailableError, "its own words"),
    ],
)
def test_what_an_error_of_sqlite_means(code: int, error: type[Exception], word: str) -> None:
    problem = sqlite3.OperationalError("its own words")
    problem.sqlite_errorcode = code
    assert type(translate(problem)) is error
    assert word in str(translate(problem))
    assert is_busy(problem) is (word == "locked")


def test_a_sqlite_that_is_too_old_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    assert "too old" in refused(path)


class Folding:
    """A connection whose WAL cannot be folded just now."""

    def __init__(self, code: int) -> None:
        self.error = sqlite3.OperationalError("its own words")
        self.error.sqlite_errorcode = code
        self.statements: list[str] = []

    def execute(self, statement: str) -> None:
        self.statements.append(statement)
        if "wal_checkpoint" in statement:
            raise self.error


def test_a_reader_in_the_way_of_folding_is_no_error(path: Path) -> None:
    """There is a next time; whatever else is wrong is said, and the connection is as patient as before."""
    file = DatabaseFile(path, 2.5)
    busy, broken = Folding(sqlite3.SQLITE_BUSY), Folding(sqlite3.SQLITE_IOERR)
    fold_wal(busy, file)  # type: ignore[arg-type]  # as much of a connection as it needs
    with pytest.raises(sqlite3.OperationalError):
        fold_wal(broken, file)  # type: ignore[arg-type]  # the same
    assert busy.statements[-1] == broken.statements[-1] == "PRAGMA busy_timeout = 2500"


@pytest.mark.parametrize(("code", "opens"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_directory_that_cannot_be_synced(path: Path, monkeypatch: pytest.MonkeyPatch, code: int, opens: bool) -> None:
    """Some file systems cannot, and need not; a disk that fails is said."""

    def failing(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    backend = SQLiteBackend(path)
    if opens:
        backend.open()
    else:
        with pytest.raises(StoreSettingsError, match="Input/output error"):
            backend.open()
    backend.close()


def test_threads_of_one_process_wait_for_the_lock_as_long_as_others(path: Path) -> None:
    lock = FileLock(path.with_name("lock"), 0.05)
    try:
        with lock, ThreadPoolExecutor(1) as other, pytest.raises(StoreUnavailableError, match="another process"):
            other.submit(lock.__enter__).result()
    finally:
        lock.close()
        lock.close()


def test_new_names_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: the database and each directory that was made for it."""
    synced: list[Path] = []
    usual = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        usual(fd)

    monkeypatch.setattr(os, "fsync", noted)
    backend = SQLiteBackend(tmp_path / "one" / "two" / "runs.db")
    backend.open()
    backend.close()
    assert {tmp_path, tmp_path / "one", tmp_path / "one" / "two"} <= set(synced)


def test_a_process_that_keeps_the_lock_is_an_error(path: Path) -> None:
    backend = SQLiteBackend(path, timeout=0.2)
    backend.open()
    lock = FileLock(path.with_name("runs.db-lock"), 1)
    try:
        with lock, pytest.raises(StoreUnavailableError, match="another process"):
            backend.commit([create("a")])
        assert backend.commit([create("a")]) == [True]
    finally:
        lock.close()
        backend.close()


def test_a_write_that_cannot_be_stored_is_refused_alone(backend: SQLiteBackend) -> None:
    answers = backend.commit([create("a", priority=1 << 70), create("b"), create("c", workflow="\ud800")])
    assert [type(answer) for answer in answers] == [NotStorableError, bool, NotStorableError]
    assert [one.definition.id for one in backend.find(Query())] == ["b"]


def test_odd_text_of_an_error_is_stored_escaped(backend: SQLiteBackend) -> None:
    new = owned("a")
    saved = change("a", new.head, head_fields={"error": "no file b\udcff\0", "due": float("inf")})
    assert backend.commit([new, saved]) == [True, None]
    found = backend.load("a")
    assert found is not None
    assert (found.head.error, found.head.due) == ("no file b\\udcff\\x00", float("inf"))


def test_a_version_that_is_no_unicode_is_refused_alone(backend: SQLiteBackend) -> None:
    new, other = owned("a", steps=(), total=0), owned("b", steps=(), total=0)
    assert backend.commit([new, other]) == [True, True]
    odd = change("a", new.head, steps=("one",), version="\udcff")
    refusal, answer = backend.commit([odd, change("b", other.head, steps=("one",), version="2")])
    assert (type(refusal), answer) == (NotStorableError, None)
    assert [found.definition.version for id in "ab" if (found := backend.load(id))] == ["1", "2"]


def test_steps_that_come_later_keep_the_definition_whole(path: Path, backend: SQLiteBackend) -> None:
    """In one batch with the creation or after it; a damaged definition is not made to look whole by them."""
    new = owned("a", steps=(), total=0)
    first = change("a", new.head, steps=("one", "two"))
    assert backend.commit([new, first]) == [True, None]
    found = backend.load("a")
    assert found is not None
    assert (found.definition.steps, found.definition.total, found.damage) == (("one", "two"), 2, ())
    spoil(path, "UPDATE execution SET priority = 7")
    assert backend.commit([change("a", first.head, steps=("three",))]) == [None]
    with pytest.raises(CorruptDataError):
        backend.load("a")


# --- damage -----------------------------------------------------------------------------------------------------------

FLIP = "UPDATE {} SET {} = ? WHERE execution = 1"


def quarantine(path: Path) -> dict[str, str]:
    with raw(path) as connection:
        return dict(connection.execute("SELECT part, content FROM quarantine").fetchall())


def goes_back(path: Path, backend: SQLiteBackend, to: int, *parts: str, dropped: bool = True) -> None:
    """Loading and claiming agree on the checkpoint, keep the bytes, and the numbering goes on behind the highest."""
    found = backend.load("a")
    assert found is not None
    assert (found.boundary.seq, found.boundary.data) == (to, f"state {to}".encode())
    assert (found.head.step, found.head.visit, found.head.seq) == (found.boundary.next, found.boundary.visit, 3)
    assert found.blobs == {f"b{to}": f"blob {to}".encode()}
    assert all(any(part in sentence for sentence in found.damage) for part in parts)
    assert set(quarantine(path)) == set(parts)
    (given,) = backend.claim(claim("you", dead=frozenset({"me"})))
    assert (given.boundary, given.damage, bool(given.entries)) == (found.boundary, found.damage, not dropped)
    assert backend.commit([step("a", given.head, boundaries=(boundary(4),))]) == [None]
    again = backend.load("a")
    assert again is not None
    assert (again.boundary.seq, again.damage, again.head.fence) == (4, (), 2)


def test_a_damaged_state_gives_way_to_the_one_before(path: Path, backend: SQLiteBackend) -> None:
    """I5, I7."""
    walk(backend, put={"e": b"1"})
    spoil(path, "UPDATE boundary SET data = ? WHERE seq = 3", b"state 4")
    with pytest.raises(CorruptDataError):
        backend.checkpoint("a", 3)
    goes_back(path, backend, 2, "state/3")
    assert b"state 4".hex() in quarantine(path)["state/3"]


def test_damaged_names_of_blobs_give_way_to_the_checkpoint_before(path: Path, backend: SQLiteBackend) -> None:
    """I5."""
    walk(backend)
    spoil(path, "UPDATE boundary SET blobs = '[' WHERE seq = 3")
    goes_back(path, backend, 2, "state/3")


def test_a_damaged_boundary_gives_way_to_the_one_before(path: Path, backend: SQLiteBackend) -> None:
    """I5."""
    walk(backend)
    spoil(path, "UPDATE boundary SET words = ? WHERE seq = 3", "[")
    assert [one.seq for one in backend.boundaries("a")] == [1, 2]
    goes_back(path, backend, 2, "boundary/3")


def test_a_damaged_blob_gives_way_to_the_checkpoint_before(path: Path, backend: SQLiteBackend) -> None:
    """I5."""
    walk(backend)
    spoil(path, "UPDATE blob SET data = ? WHERE name = 'b3'", b"blob 4")
    with pytest.raises(CorruptDataError):
        backend.checkpoint("a", 3)
    goes_back(path, backend, 2, "blob/b3")


def test_a_boundary_that_is_gone_is_noticed(path: Path, backend: SQLiteBackend) -> None:
    """I5: the head knows that there was one."""
    walk(backend)
    spoil(path, "DELETE FROM boundary WHERE seq = 3")
    found = backend.load("a")
    assert found is not None
    assert (found.boundary.seq, found.head.seq, found.head.step) == (2, 3, 1)
    assert found.damage


@pytest.mark.parametrize(("column", "value"), [("numbers", b"x" * 113), ("words", "nonsense"), ("crc", 1)])
def test_a_damaged_head_is_made_from_the_newest_checkpoint(
    path: Path, backend: SQLiteBackend, column: str, value: object
) -> None:
    """I5."""
    walk(backend)
    spoil(path, FLIP.format("head", column), value)
    goes_back(path, backend, 3, "head")


def test_a_damaged_owner_lets_no_stale_writer_in(path: Path, backend: SQLiteBackend) -> None:
    """I3, I5: the fence that is stored rules, also where another column of the head is wrong."""
    walk(backend)
    found = backend.load("a")
    assert found is not None
    spoil(path, "UPDATE execution SET owner = 'nobody'")
    (given,) = backend.claim(claim("you", dead=frozenset({"nobody"})))
    assert (given.head.fence, bool(given.damage)) == (2, True)
    (answer,) = backend.commit([step("a", found.head)])
    assert isinstance(answer, LeaseLostError)


def test_one_damaged_entry_discredits_all(path: Path, backend: SQLiteBackend) -> None:
    """I5: they were captured together, so the step starts over."""
    walk(backend, put={"one": b"1", "two": b"2"})
    spoil(path, "UPDATE entry SET data = x'33' WHERE key = 'one'")
    found = backend.load("a")
    assert found is not None
    assert (found.boundary.seq, found.entries, len(found.damage)) == (3, {}, 2)
    (given,) = backend.claim(claim(dead=frozenset({"me"})))
    assert given.entries == {}
    again = backend.load("a")
    assert again is not None
    assert (again.entries, again.damage, set(quarantine(path))) == ({}, (), {"entry/one"})


@pytest.mark.parametrize("mark", ["x''", "''"])
def test_a_damaged_mark_spoils_no_write(path: Path, backend: SQLiteBackend, mark: str) -> None:
    """I5: `woken` follows from the messages, and no checksum covers it."""
    walk(backend)
    walk(backend, "b")
    spoil(path, f"UPDATE execution SET woken = {mark} WHERE id = 'a'")
    assert backend.commit([send("b"), send("a")]) == [1, 1]


def test_a_damaged_message_is_left_out(path: Path, backend: SQLiteBackend) -> None:
    """I5."""
    walk(backend)
    backend.commit([send("a", payload=b"one"), send("a", payload=b"two")])
    spoil(path, "UPDATE message SET payload = x'00' WHERE id = 1")
    (given,) = backend.claim(claim(dead=frozenset({"me"})))
    assert [message.payload for message in given.messages] == [b"two"]
    assert backend.messages("a") == list(given.messages)
    assert set(quarantine(path)) == {"message/1"}


@pytest.mark.parametrize(
    "statement",
    [
        "boundary SET data = x'00' WHERE seq = 3",
        "boundary SET words = '[' WHERE seq = 3",
        "message SET payload = x'00'",
    ],
)
def test_what_a_claim_has_told_is_not_found_again(path: Path, backend: SQLiteBackend, statement: str) -> None:
    """I5: whoever has it knows; its bytes are in the quarantine."""
    walk(backend)
    backend.commit([send("a", payload=b"one")])
    spoil(path, f"UPDATE {statement}")
    (given,) = backend.claim(claim(dead=frozenset({"me"})))
    assert given.damage
    found = backend.load("a")
    assert found is not None
    assert (found.damage, found.boundary, found.messages) == ((), given.boundary, given.messages)


@pytest.mark.parametrize("signed_on", [False, True])
def test_what_cannot_be_read_keeps_its_place_and_shuts_its_owner_out(
    path: Path, backend: SQLiteBackend, signed_on: bool
) -> None:
    """I3, I5: blocked under a new fence; nothing but that is changed in its head."""
    new = owned("a")
    last = step("a", new.head)
    if signed_on:  # then its rows are known by heart
        backend.register(Owner(id="me", life={}, remaining=0), 1000.0)
    backend.commit([new, last, send("a")])
    with raw(path) as connection:
        connection.execute("UPDATE boundary SET data = x'00'")
    backend.commit([create("b", ExecutionState.PAUSED)])  # takes notice of that other connection
    assert backend.claim(claim("you", ids=("a",), dead=frozenset({"me"}))) == []
    (stored,) = [one for one in backend.find(Query()) if one.definition.id == "a"]
    reason = stored.head.reason
    assert stored.head == attrs.evolve(last.head, state=ExecutionState.BLOCKED, fence=2, owner=None, reason=reason)
    assert backend.next_due() is None
    (answer,) = backend.commit([step("a", last.head)])
    assert isinstance(answer, LeaseLostError)


def test_an_owner_notices_that_its_unreadable_execution_was_deleted(path: Path, backend: SQLiteBackend) -> None:
    new = owned("a")
    last = step("a", new.head)
    backend.register(Owner(id="me", life={}, remaining=0), 1000.0)
    backend.commit([new, last])
    with raw(path) as connection:
        connection.execute("UPDATE boundary SET data = x'00'")
    other = SQLiteBackend(path)
    other.open()
    assert other.delete(["a"]) == [True]
    other.close()
    (answer,) = backend.commit([step("a", last.head)])
    assert isinstance(answer, ExecutionNotFoundError)


def test_what_this_process_announces_does_not_wake_it(backend: SQLiteBackend, path: Path) -> None:
    """A watcher that ran at every start and end would stand in the way of the steps that it tells of."""
    backend.commit([create("a")])
    backend.wait(0.0)
    backend.commit([create("b"), send("a")])
    assert not backend.wait(0.0)
    other = SQLiteBackend(path)
    other.open()
    other.commit([create("c")])
    other.close()
    assert backend.wait(0.0)


def test_a_look_in_the_middle_of_an_announcement_does_not_wake_it(
    backend: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit before it has changed the database, and this one counts here already, and not yet there."""
    backend.commit([create("a")])
    backend.wait(0.0)
    backend.commit([create("b")])
    once, seen = backend._transaction, []

    def looking(work: Callable[[sqlite3.Connection], Any]) -> Any:
        def looked(connection: sqlite3.Connection) -> Any:
            result = work(connection)
            seen.append(backend.wait(0.0))
            return result

        return once(looked)

    monkeypatch.setattr(backend, "_transaction", looking)
    backend.commit([create("c")])
    assert [*seen, backend.wait(0.0)] == [False, False]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_look_in_the_middle_of_an_announcement_hides_nobody_elses(
    backend: SQLiteBackend, path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """I4: whatever the watcher takes its own process's change for, that of another is noticed at the next look."""
    other = SQLiteBackend(path)
    other.open()
    backend.commit([create("a")])
    backend.wait(0.0)
    holder, name = (Batch, "write") if moment == "before" else (Known, "keep_owned")
    once = getattr(holder, name)

    def looking(self: Any, *args: Any) -> None:
        once(self, *args)
        monkeypatch.setattr(holder, name, once)
        backend.wait(0.0)

    monkeypatch.setattr(holder, name, looking)
    backend.commit([create("b")])
    other.commit([create("c")])
    assert backend.wait(0.0)
    backend.wait(0.0)
    assert not backend.wait(0.0)
    other.commit([create("d")])
    assert backend.wait(0.0)
    other.close()


def test_an_announcement_that_failed_is_not_counted(
    backend: SQLiteBackend, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SQLiteBackend(path)
    other.open()
    backend.commit([create("a")])
    backend.wait(0.0)
    once = Batch.write

    def failing(self: Batch) -> None:
        once(self)
        raise sqlite3.OperationalError("no more")

    with monkeypatch.context() as broken, pytest.raises(StoreUnavailableError):
        broken.setattr(Batch, "write", failing)
        backend.commit([create("b")])
    backend.wait(0.0)
    assert not backend.wait(0.0)
    other.commit([create("c")])
    assert backend.wait(0.0)
    other.close()


def test_metadata_with_large_numbers_is_found(backend: SQLiteBackend) -> None:
    numbers = [2**63, 2**63 - 1, -(2**63), -(2**63) - 1, 2**70]
    backend.commit([create(f"n{n}", metadata={"n": number}) for n, number in enumerate(numbers)])
    for n, number in enumerate(numbers):
        assert [one.definition.id for one in backend.find(Query(metadata={"n": number}))] == [f"n{n}"]


def test_the_blobs_of_each_kept_checkpoint_are_named(backend: SQLiteBackend) -> None:
    new = owned("a")
    row = boundary(2, blobs=("b",))
    backend.commit([new, step("a", new.head, boundaries=(row,), blobs={"b": b"1"})])
    found = backend.load("a")
    assert found is not None
    assert found.kept == ((1, ()), (2, ("b",)))


def test_a_row_of_another_execution_does_not_fit(path: Path, backend: SQLiteBackend) -> None:
    """I5: the checksum covers whose row it is."""
    walk(backend, "a")
    walk(backend, "b")
    with raw(path) as connection:
        connection.execute("UPDATE boundary SET execution = 9 WHERE execution = 1 AND seq = 3")
        connection.execute("UPDATE boundary SET execution = 1 WHERE execution = 2 AND seq = 3")
    found = backend.load("a")
    assert found is not None
    assert (found.boundary.seq, bool(found.damage)) == (2, True)


@pytest.mark.parametrize("statement", ["UPDATE boundary SET data = x'00'", "UPDATE steps SET names = '[]'"])
def test_what_cannot_be_read_at_all_is_blocked_and_the_others_go_on(
    path: Path, backend: SQLiteBackend, statement: str
) -> None:
    """I5: it stands in nobody's way, not even at the head of the queue."""
    backend.commit([create("a", priority=9), create("b")])
    spoil(path, f"{statement} WHERE execution = 1")
    with pytest.raises(CorruptDataError):
        backend.load("a")
    assert backend.claim(claim(limit=1)) == []
    assert [one.definition.id for one in backend.claim(claim(limit=1))] == ["b"]
    assert backend.count(Query()) == {ExecutionState.BLOCKED: 1, ExecutionState.RUNNING: 1}
    (stored,) = backend.find(Query(states=frozenset({ExecutionState.BLOCKED})))
    assert stored.head.reason is not None
    assert "damaged" in stored.head.reason


def test_a_listing_shows_what_is_damaged_beside_the_others(path: Path, backend: SQLiteBackend) -> None:
    backend.commit([create("a"), create("b"), create("c")])
    spoil(path, "UPDATE head SET numbers = x'00' WHERE execution = 1")
    spoil(path, "UPDATE execution SET state = 'rumming' WHERE id = 'b'")
    shown = {one.definition.id: one.head.state for one in backend.find(Query())}
    assert shown == {"a": ExecutionState.BLOCKED, "b": ExecutionState.BLOCKED, "c": ExecutionState.RUNNING}
    assert backend.count(Query()) == {ExecutionState.RUNNING: 2, ExecutionState.BLOCKED: 1}
    assert {one.definition.created for one in backend.find(Query())} == {NOW}


@pytest.mark.parametrize(
    "damage",
    ["life = '{\"owner'", "life = x'ff'", "life = '[1]'", "workflows = '['", "workflows = '\"w\"'", "queues = '[1]'"],
)
def test_of_an_owner_that_cannot_be_read_the_lease_is_left(path: Path, backend: SQLiteBackend, damage: str) -> None:
    for id in ("a", "b"):
        backend.register(Owner(id=id, life={"pid": 1}, remaining=0.0, workflows=("w",), queues=("q",)), 100.0)
    spoil(path, f"UPDATE owner SET {damage} WHERE id = 'a'")
    damaged, sound = backend.owners()
    assert (damaged.id, damaged.life, damaged.workflows, damaged.queues) == ("a", {}, (), ())
    assert 90 < damaged.remaining <= 100
    assert (sound.id, sound.life, sound.workflows, sound.queues) == ("b", {"pid": 1}, ("w",), ("q",))


def test_a_lease_that_cannot_be_read_has_run_out_until_it_is_renewed(path: Path, backend: SQLiteBackend) -> None:
    backend.register(Owner(id="a", life={"pid": 1}, remaining=0.0), 100.0)
    spoil(path, "UPDATE owner SET expires = 'x'")
    (owner,) = backend.owners()
    assert (owner.life, owner.remaining < 0) == ({"pid": 1}, True)
    assert backend.renew("a", 100.0)
    (owner,) = backend.owners()
    assert owner.remaining > 90


async def test_an_unreadable_owner_keeps_no_executor_from_its_work(path: Path) -> None:
    registry = StepRegistry()

    @registry.step
    async def same(state: int) -> int:
        return state

    registry.workflow("w", [same])
    async with SQLiteCheckpointStore(path):
        spoil(path, "INSERT INTO owner VALUES ('gone', '{\"owner', '[]', '[]', 0.0)")
    async with Executor(registry, store=SQLiteCheckpointStore(path)) as executor:
        assert await (await executor.start("w", 1)).result() == 1


@pytest.mark.parametrize(
    ("table", "column"),
    [("head", "numbers"), ("boundary", "numbers"), ("boundary", "words"), ("boundary", "data"), ("blob", "data")],
)
def test_no_flipped_byte_goes_unnoticed(path: Path, backend: SQLiteBackend, table: str, column: str) -> None:
    """I5: every byte of what a step writes."""
    walk(backend)
    where = "execution = 1" if table == "head" else f"rowid = (SELECT max(rowid) FROM {table})"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (value,) = connection.execute(f"SELECT CAST({column} AS BLOB) FROM {table} WHERE {where}").fetchone()
        cast = "CAST(? AS TEXT)" if column == "words" else "?"
        for place in range(len(value)):
            broken = value[:place] + bytes([value[place] ^ 1 << place % 8]) + value[place + 1 :]
            connection.execute(f"UPDATE {table} SET {column} = {cast} WHERE {where}", (broken,))
            found = backend.load("a")
            assert found is not None
            assert found.damage, place


# --- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import sys
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import owned, step
backend = SQLiteBackend(sys.argv[1]); backend.open()
id = sys.argv[2]
new = owned(id, "owner-" + id)
backend.commit([new])
head = new.head
for _ in range(int(sys.argv[3])):
    save = step(id, head)
    (answer,) = backend.commit([save])
    assert answer is None, answer
    head = save.head
    print(head.revision, flush=True)
backend.close()
"""


@contextlib.contextmanager
def child(path: Path, id: str, steps: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), id, str(steps)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_what_a_killed_process_had_acknowledged_is_there(path: Path, backend: SQLiteBackend) -> None:
    """I1: SIGKILL in the middle of its commits; and its lock does not outlive it."""
    for kill in range(3):
        id = f"x{kill}"
        with child(path, id, 1_000_000) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(20 * (kill + 1))]
            process.send_signal(signal.SIGKILL)
            seen += [int(line) for line in process.stdout if line.endswith("\n")]
        found = backend.load(id)
        assert found is not None
        assert seen[-1] <= found.head.revision <= seen[-1] + 1
        assert found.boundary.seq == found.head.seq == found.head.revision + 1
        (given,) = backend.claim(claim("me", ids=(id,), dead=frozenset({f"owner-{id}"})))
        assert given.head.fence == 2


def test_processes_that_write_at_once_all_succeed(path: Path, backend: SQLiteBackend) -> None:
    """I3: each with its own executions, none with an error."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(child(path, f"x{n}", 60)) for n in range(3)]
        for n in range(60):
            assert backend.commit([create(f"mine{n}")]) == [True]
        for process in processes:
            assert process.stdout is not None
            assert [int(line) for line in process.stdout] == list(range(1, 61))
            assert process.wait() == 0
    assert [len(backend.boundaries(f"x{n}")) for n in range(3)] == [61, 61, 61]
    assert backend.count(Query(owned=False)) == {ExecutionState.RUNNING: 60}


FORKING = """
import os, sys
from pathlib import Path
from longrun.stores._sqlite.file import FileLock
with FileLock(Path(sys.argv[1]), 1):
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
    os._exit(0)
"""


def test_a_forked_child_does_not_keep_the_lock(path: Path) -> None:
    """It inherits the descriptor; left open there, the lock would outlive the process that took it."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        assert parent.wait(30) == 0
        lock = FileLock(path, 5)
        try:
            with lock:
                pass
        finally:
            lock.close()


def test_folding_the_log_keeps_everything(path: Path, backend: SQLiteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The WAL is folded back between commits, past a reader with an old snapshot, and does not grow for ever."""
    monkeypatch.setattr("longrun.stores.sqlite.FOLD_AFTER", 50)
    new = owned("a")
    backend.commit([new])
    head = new.head
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM execution").fetchone()
        for turn in range(400):
            if turn == 100:
                reader.execute("COMMIT")
            save = step("a", head)
            assert backend.commit([save]) == [None]
            head = save.head
    assert len(backend.boundaries("a")) == 401
    assert path.with_name("runs.db-wal").stat().st_size < 4 << 20
    assert path.stat().st_size > 40_000


# --- cost -------------------------------------------------------------------------------------------------------------


def plans(backend: SQLiteBackend, call: Callable[[], object]) -> list[str]:
    """How SQLite goes about every SELECT that `call` makes."""
    traced: list[str] = []
    assert backend._writer is not None
    backend.find(Query(limit=1))
    for connection in (backend._writer, *backend._readers):
        connection.set_trace_callback(traced.append)
    call()
    for connection in (backend._writer, *backend._readers):
        connection.set_trace_callback(None)
    steps = []
    for statement in traced:
        if statement.lstrip().startswith("SELECT"):
            steps += [row[3] for row in backend._writer.execute(f"EXPLAIN QUERY PLAN {statement}")]
    assert steps
    return steps


RUNNING = frozenset({ExecutionState.RUNNING, ExecutionState.WAITING})


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.claim(claim()),
        lambda b: b.claim(claim(queues=frozenset({"p", "q"}), workflows=frozenset({"w"}), dead=frozenset({"x"}))),
        lambda b: b.claim(claim(ids=("a", "b"))),
        lambda b: b.next_due(),
        lambda b: b.pending("me"),
        lambda b: b.load("a"),
        lambda b: b.messages("a"),
        lambda b: b.find(Query()),
        lambda b: b.find(Query(states=RUNNING)),
        lambda b: b.find(Query(states=RUNNING, queue="q", workflows=frozenset({"w"}), after=(5.0, "a"))),
        lambda b: b.find(Query(workflows=frozenset({"w"}))),
        lambda b: b.find(Query(queue="q", created_after=5.0)),
        lambda b: b.find(Query(parent_id="p")),
        lambda b: b.find(Query(owner="me")),
        lambda b: b.count(Query(states=RUNNING)),
    ],
)
def test_no_query_reads_the_whole_table(backend: SQLiteBackend, call: Callable[[SQLiteBackend], object]) -> None:
    """I16: what is finished costs nothing to those who ask for something else."""
    backend.commit([create("a"), create("b", ExecutionState.COMPLETED)])
    scans = [
        step for step in plans(backend, lambda: call(backend)) if step.startswith("SCAN") and "json_each" not in step
    ]
    ordered = "SCAN execution USING INDEX execution_"
    allowed = (
        f"{ordered}created",
        f"{ordered}ready",
        f"{ordered}timed",
        "SCAN part",
        "SCAN (subquery",
        "SCAN CONSTANT",
    )
    assert [step for step in scans if not step.startswith(allowed)] == []


def test_quarantined_rows_are_readable_json(path: Path, backend: SQLiteBackend) -> None:
    """I5: the bytes are kept, and once, however often the damage is met."""
    walk(backend)
    spoil(path, "UPDATE boundary SET data = x'ff00' WHERE seq = 3")
    backend.load("a")
    backend.load("a")
    with raw(path) as connection:
        ((content,),) = connection.execute("SELECT content FROM quarantine").fetchall()
    assert {"hex": "ff00"} in json.loads(content)


def test_every_table_is_emptied_by_delete(path: Path, backend: SQLiteBackend) -> None:
    """I16."""
    new = owned("a", blobs={"b": b"x"})
    failed = {"state": ExecutionState.FAILED, "owner": None, "ended": 5.0}
    backend.commit([new, send("a", key="k"), change("a", new.head, head_fields=failed, put={"e": b"1"})])
    assert backend.delete(["a"]) == [True]
    with raw(path) as connection:
        for table in ("execution", "head", "steps", "boundary", "blob", "entry", "message"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    assert sql.APPLICATION_ID == 0x6C6F6E67


@pytest.mark.parametrize("refused", ["create", "save", "move", "end", "unfit create", "unfit save", "send"])
def test_what_was_refused_is_not_remembered(backend: SQLiteBackend, path: Path, refused: str) -> None:
    """I3, I8: its owner writes elsewhere, and says nothing of what is his; the next who writes here reads it anew."""
    backend.register(Owner(id="me", life={}, remaining=0), 1000.0)
    other = SQLiteBackend(path)
    other.open()
    other.register(Owner(id="you", life={}, remaining=0), 1000.0)
    new = owned("a", "you")
    other.commit([new])
    stale = attrs.evolve(new.head, fence=0, owner="me")
    write: Any = {
        "create": owned("a"),
        "save": step("a", stale),
        "move": move("a", stale),
        "end": end("a", stale),
        "unfit create": create("a", workflow="\ud800"),
        "unfit save": step("a", stale, steps=("\ud800",)),
        "send": send("a", limit=0),
    }[refused]
    backend.commit([write])
    parked = change("a", new.head, head_fields={"state": ExecutionState.WAITING, "owner": None, "signal": "go"})
    other.commit([parked])
    assert backend.commit([send("a")]) == [1]
    other.close()
    found = backend.load("a")
    assert found is not None
    assert (found.head, found.damage) == (attrs.evolve(parked.head, woken=True), ())


def signed_on(backend: SQLiteBackend, *owners: str) -> None:
    for owner in owners:
        backend.register(Owner(id=owner, life={}, remaining=0), 1000.0)


def columns(path: Path, names: str) -> tuple[Any, ...]:
    with raw(path) as connection:
        asked = f"SELECT {names} FROM execution JOIN head ON head.execution = execution.key"
        found: tuple[Any, ...] = connection.execute(asked).fetchone()
    return found


def test_moves_let_go_of_states_once_and_for_all(path: Path, backend: SQLiteBackend) -> None:
    """From which number on they are kept is stored, and never goes back."""
    signed_on(backend, "me")
    new = owned("a")
    first = move("a", new.head, keep_from=2)
    backend.commit([new, first])
    assert columns(path, "kept") == (2,)
    backend.commit([move("a", first.head, keep_from=1)])
    assert columns(path, "kept") == (2,)


@pytest.mark.parametrize(
    "fields", [{"owner": "you"}, {"state": ExecutionState.INITIALIZED}, {"woken": True}, {"ended": None}]
)
def test_what_a_move_says_counts_whatever_was_known(path: Path, backend: SQLiteBackend, fields: dict[str, Any]) -> None:
    signed_on(backend, "me", "you")
    new = create("a", head_fields={"owner": "me", "fence": 1})
    new.head = attrs.evolve(new.head, **fields)
    on = move("a", attrs.evolve(new.head, owner="me"))
    backend.commit([new])
    backend.commit([on])
    assert columns(path, "state, owner, woken") == ("running", "me", 0)
    found = backend.load("a")
    assert found is not None
    assert (found.head, found.damage) == (on.head, ())


def test_a_move_for_somebody_who_writes_elsewhere_is_said_and_forgotten(path: Path, backend: SQLiteBackend) -> None:
    """I9: he hears of it before his own next write, and nobody here takes what is his for known."""
    signed_on(backend, "me")
    new = owned("a")
    first, second = move("a", new.head), move("a", move("a", new.head).head)
    backend.commit([new])
    other = SQLiteBackend(path)
    other.open()
    assert other.commit([first]) == [None]
    assert "a" not in other._known.rows
    other.close()
    assert backend.commit([second]) == [None]
    found = backend.load("a")
    assert found is not None
    assert found.head == second.head


@pytest.mark.parametrize("most", [1, 2, 5, 32_000])
@pytest.mark.parametrize("rows", [0, 1, 3, 700])
def test_rows_are_inserted_within_the_limits_of_the_library(most: int, rows: int) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE t (a, b)")
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, max(most, 2))
        Batch(connection, Known())._insert("INSERT INTO t (a, b) VALUES (?, ?)", list(range(2 * rows)))
        assert connection.execute("SELECT * FROM t").fetchall() == [(2 * n, 2 * n + 1) for n in range(rows)]
