"""A store on a file system that is mounted read-only: a backup, a snapshot. It can be looked at; nothing is written."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from longrun import Client, ExecutionState, Executor, StepRegistry, client_sync
from longrun.errors import CorruptDataError, NewerFormatError, StoreError, StoreReadOnlyError, StoreSettingsError
from longrun.stored import Owner, Query
from longrun.stores import open_store
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import change, claim, create, owned, send, step

ROOT = Path(__file__).parents[2]
URLS = {"file": "file:{}/store", "sqlite": "sqlite:///{}/runs.db"}
BACKENDS: dict[str, Callable[[Path], StoreBackend]] = {
    "file": lambda place: FileBackend(place / "store"),
    "sqlite": lambda place: SQLiteBackend(place / "runs.db"),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of its own, which `read_only` can change."""
    where = tmp_path / "place"
    where.mkdir()
    if os.geteuid() != 0 or subprocess.run(_mount("--bind", where, where), capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a directory read-only here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def _mount(*words: object) -> list[str]:
    return ["mount", *map(str, words)]


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    subprocess.run(_mount("-o", "remount,ro,bind", place), check=True)
    try:
        yield
    finally:
        subprocess.run(_mount("-o", "remount,rw,bind", place), check=True)


@contextmanager
def opened(backend: StoreBackend) -> Iterator[StoreBackend]:
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def _contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("kind", BACKENDS)
def test_it_is_read_and_refuses_every_write(place: Path, kind: str) -> None:
    """Each refusal says that it is read-only, and that is not that it does not answer."""
    with opened(BACKENDS[kind](place)) as backend:
        a, b = owned("a"), owned("b")
        backend.register(Owner(id="me", life={}, remaining=60.0), 60.0)
        assert backend.commit([a, b, send("b", key="k")]) == [True, True, 1]
        over = change("a", a.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None})
        assert backend.commit([over]) == [None]
    before = _contents(place)
    with read_only(place):
        with opened(BACKENDS[kind](place)) as backend:
            backend.ping()
            assert backend.describe()["read_only"] is True
            assert {one.definition.id for one in backend.find(Query())} == {"a", "b"}
            assert backend.count(Query()) == {ExecutionState.COMPLETED: 1, ExecutionState.RUNNING: 1}
            found = backend.load("b")
            assert found is not None
            assert [message.key for message in found.messages] == ["k"]
            assert [one.seq for one in backend.boundaries("a")]
            assert [one.id for one in backend.owners()] == ["me"]
            assert backend.states_of(["a"]) == {"a": ExecutionState.COMPLETED}
            assert backend.size("b") > 0
            backend.wait(0)
            assert not backend.wait(0)
            for write in (
                lambda: backend.commit([step("b", b.head)]),
                lambda: backend.commit([create("c")]),
                lambda: backend.claim(claim("me", ids=("b",), dead=("me",))),
                lambda: backend.register(Owner(id="you", life={}, remaining=60.0), 60.0),
                lambda: backend.renew("me", 60.0),
                lambda: backend.unregister("me"),
                lambda: backend.delete(["a"]),
            ):
                with pytest.raises(StoreReadOnlyError, match=r"can only be read: .* is on a read-only file system"):
                    write()
        assert _contents(place) == before
    with opened(BACKENDS[kind](place)) as backend:
        assert backend.commit([step("b", b.head)]) == [None]


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_is_not_there_is_not_made(place: Path, kind: str) -> None:
    with read_only(place), pytest.raises(StoreSettingsError, match="Read-only file system"):
        BACKENDS[kind](place).open()


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.anyio
async def test_a_client_looks_and_is_told_what_it_cannot_do(place: Path, kind: str) -> None:
    registry = StepRegistry()

    @registry.step()
    def one(state: int) -> int:
        return state + 1

    registry.workflow("w", ["one"])
    url = URLS[kind].format(place)
    async with Executor(registry, store=open_store(url)) as executor:
        assert await (await executor.start("w", 1, id="a")).result() == 2
    with read_only(place):
        async with Client(url) as client:
            assert [found.id for found in await client.list()] == ["a"]
            assert (await client.get("a")).state is ExecutionState.COMPLETED
            assert await client.history("a")
            with pytest.raises(StoreReadOnlyError):
                await client.submit("w", 1, id="b")
            with pytest.raises(StoreReadOnlyError):
                await client.delete("a")
        with pytest.raises(StoreReadOnlyError):
            async with Executor(registry, store=open_store(url)):
                pass
    async with Client(url) as client:
        await client.submit("w", 1, id="b")


@pytest.mark.parametrize("kind", URLS)
def test_the_command_line_looks_and_says_in_one_line_what_it_cannot_do(place: Path, kind: str) -> None:
    with client_sync(URLS[kind].format(place)) as client:
        client.submit("w", 1, id="a")

    def longrun(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "longrun", *words, "--store", URLS[kind].format(place)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    with read_only(place):
        for words in (("list",), ("show", "a")):
            done = longrun(*words)
            assert done.returncode == 0, done.stderr
            assert "a" in done.stdout
        done = longrun("cancel", "a")
        assert done.returncode != 0
        assert "is on a read-only file system" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        done = longrun("doctor")
        assert "the file system is read-only" in done.stdout


def test_a_line_of_an_older_index_gives_way_to_the_journal(place: Path) -> None:
    """As in a copy that read the index first."""
    failed, store = frozenset({ExecutionState.FAILED}), place / "store"
    with opened(FileBackend(store)) as backend:
        assert backend.commit([create("a", ExecutionState.FAILED)]) == [True]
    older = (store / "finished.jsonl").read_bytes()
    with opened(FileBackend(store)) as backend:
        (given,) = backend.claim(claim("me", ids=("a",), states=failed))
        over = {"state": ExecutionState.COMPLETED, "owner": None}
        assert backend.commit([change("a", given.head, head_fields=over)]) == [None]
    (store / "finished.jsonl").write_bytes(older)
    with read_only(place), opened(FileBackend(store)) as backend:
        assert [one.head.state for one in backend.find(Query())] == [ExecutionState.COMPLETED]


def test_a_lost_index_is_told_and_the_rest_is_shown(place: Path) -> None:
    """It would be made anew from the journals; to leave the finished ones out would be a lie."""
    with opened(FileBackend(place / "store")) as backend:
        a, b = owned("a"), owned("b")
        backend.commit([a, b])
        backend.commit([change("a", a.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None})])
    (place / "store" / "finished.jsonl").unlink()
    with read_only(place), opened(FileBackend(place / "store")) as backend:
        running = Query(states=frozenset({ExecutionState.RUNNING}))
        assert [one.definition.id for one in backend.find(running)] == ["b"]
        assert backend.load("a") is not None
        with pytest.raises(CorruptDataError, match=r"finished\.jsonl is damaged: .* read-only file system"):
            backend.find(Query())


# --- the WAL of a database --------------------------------------------------------------------------------------------


def _left_by_a_crash(place: Path) -> None:
    """A database whose last commits are in its WAL: its writer was killed."""
    script = f"""
import os, signal
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import create
backend = SQLiteBackend({str(place / "runs.db")!r})
backend.open()
assert backend.commit([create("a")]) == [True]
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (place / "runs.db-wal").stat().st_size


def test_what_a_crash_left_in_the_wal_is_read(place: Path) -> None:
    _left_by_a_crash(place)
    with read_only(place), opened(SQLiteBackend(place / "runs.db")) as backend:
        assert [one.definition.id for one in backend.find(Query())] == ["a"]
        assert not backend.wait(0) or not backend.wait(0)


def test_a_wal_that_cannot_be_read_is_told_and_not_ignored(place: Path) -> None:
    """Without the file of its index SQLite cannot, and to leave out what was acknowledged would be a lie."""
    _left_by_a_crash(place)
    (place / "runs.db-shm").unlink()
    with read_only(place), pytest.raises(StoreSettingsError, match=r"db-wal holds writes.*copy both files"):
        SQLiteBackend(place / "runs.db").open()
    with opened(SQLiteBackend(place / "runs.db")) as backend:
        assert [one.definition.id for one in backend.find(Query())] == ["a"]


def test_who_reads_without_locks_sees_what_others_write(place: Path, tmp_path: Path) -> None:
    """The mount is read-only; the file behind it need not be."""
    other = tmp_path / "other"
    other.mkdir()
    with opened(SQLiteBackend(place / "runs.db")) as backend:
        backend.commit([create("a")])
    subprocess.run(_mount("--bind", place, other), check=True)
    try:
        with read_only(other), opened(SQLiteBackend(other / "runs.db")) as reader:
            assert {one.definition.id for one in reader.find(Query())} == {"a"}
            reader.wait(0)
            assert not reader.wait(0)
            with opened(SQLiteBackend(place / "runs.db")) as writer:
                writer.commit([create("b")])
                assert {one.definition.id for one in reader.find(Query())} == {"a", "b"}
                assert reader.wait(0)
            assert {one.definition.id for one in reader.find(Query())} == {"a", "b"}
            with opened(SQLiteBackend(place / "runs.db")) as writer:
                writer.commit([create("c")])
            assert {one.definition.id for one in reader.find(Query())} == {"a", "b", "c"}
            assert reader.wait(0)
    finally:
        subprocess.run(["umount", str(other)], check=True)


def test_a_read_only_database_that_is_newer_or_not_ours_is_refused(place: Path) -> None:
    with opened(SQLiteBackend(place / "runs.db")):
        pass
    shutil.copy(place / "runs.db", place / "newer.db")
    with closing(sqlite3.connect(place / "newer.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with closing(sqlite3.connect(place / "strange.db")) as connection:
        connection.execute("CREATE TABLE t (a)")
    (place / "empty.db").touch()
    refusals: dict[str, type[Exception]] = {"newer": NewerFormatError, "strange": StoreError, "empty": StoreError}
    with read_only(place):
        for name, refusal in refusals.items():
            with pytest.raises(refusal):
                SQLiteBackend(place / f"{name}.db").open()
