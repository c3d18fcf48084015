"""Executions in an SQLite file: many of them on one machine, shared by several processes.

Place in the life of an execution: claim, checkpoint, finish.

One connection writes, in the writer's thread, under a lock between processes (see `_sqlite.file`); each commit is one
transaction, durable when it returns (WAL, `synchronous=FULL`). Readers have connections of their own and never wait for
the writer. A counter in the database, looked at when `PRAGMA data_version` moves, tells one process that another has
sent, created, released or finished something; steps that merely go on do not count. Whoever has moved it touches the
lock file, so that the others need not look all the time (see `_sqlite.ear`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import CorruptDataError, LongrunError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.seal import Seal
from longrun.stored import Boundary, Claim, Head, Loaded, Message, Owner, Query, Stored, Write
from longrun.stores import rows
from longrun.stores._sqlite import find as finding
from longrun.stores._sqlite import sql
from longrun.stores._sqlite.batch import Batch
from longrun.stores._sqlite.claims import Given, give, repair, set_aside_unreadable
from longrun.stores._sqlite.ear import Ear
from longrun.stores._sqlite.file import KIND, SAFE_RESET_SQLITE, DatabaseFile, fold_wal, is_busy, translate
from longrun.stores._sqlite.known import Known
from longrun.stores._sqlite.load import Found, load_all, read_boundaries, read_checkpoint, read_head, read_messages
from longrun.stores._sqlite.ready import all_ready
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.store import CheckpointStore

T = TypeVar("T")

_ID = attrgetter("id")
IDLE_READERS = 8
FOLD_AFTER = 1000
"""Pages, roughly, that go to the WAL before it is folded back into the database. Then it is written from its beginning
again, into space that the file has already, which is synced in much less time than space that is new."""


class SQLiteBackend(StoreBackend):
    kind = KIND

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 30.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._file = DatabaseFile(path, timeout)
        self._timeout = timeout
        self._clock = clock
        self._writer: sqlite3.Connection | None = None
        self._known = Known()
        self._pages = 0
        self._readers: list[sqlite3.Connection] = []
        self._readers_lock = threading.Lock()
        self._open = False
        self._watcher: sqlite3.Connection | None = None
        self._watched: tuple[int, int] | None = None
        self._announced = 0
        """How many of the changes that the database counts were made here. One of ours is counted here before it is
        there: see `_changed`."""
        self._print: tuple[int, ...] | None = None
        """Of the database that the readers of a read-only file opened: one that has changed is opened anew."""
        self._ear = self._new_ear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._file.path}>"

    # life

    def open(self) -> None:
        if not self.creates and not os.path.lexists(self._file.path):
            raise StoreUnavailableError(self.kind, f"there is none at {str(self._file.path)!r}")
        self._file.prepare()
        self._open = True
        try:
            self._writer = None if self._file.read_only else self._connect(reader=False)
            self._watched, self._announced = None, 0
            self._print = None
            self._ear = self._new_ear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._open = False
        with self._readers_lock:
            connections, self._readers = [*self._readers, self._watcher, self._writer], []
        self._watcher = self._writer = None
        self._known.clear()
        with self._last_turn():  # the last connection to a database folds the WAL as it closes
            for connection in connections:
                if connection is not None:
                    connection.close()
        self._ear.close()
        self._file.close()

    def _new_ear(self) -> Ear:
        return Ear(self._file.lock_path, self.poll_interval)

    @contextlib.contextmanager
    def _last_turn(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._file.lock is not None:
                with contextlib.suppress(StoreUnavailableError):  # closing is more important than folding
                    stack.enter_context(self._file.lock)
            yield

    def ping(self) -> None:
        self._read(lambda connection: connection.execute(sql.CHANGES).fetchone())

    def describe(self) -> Mapping[str, object]:
        count = "SELECT count(*) FROM quarantine"
        kept = self._read(lambda connection: connection.execute(count).fetchone()[0]) if self._open else None
        return {
            **super().describe(),
            "path": str(self._file.path),
            "quarantined": kept,
            "sqlite": sqlite3.sqlite_version,
            "journal_mode": "wal",
            "synchronous": "full",
            "wal_reset": "safe" if sqlite3.sqlite_version_info >= SAFE_RESET_SQLITE else "kept apart by a lock file",
            "format": rows.FORMAT,
            "read_only": self._file.read_only,
        }

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        if not batch:
            return []

        ids, readied = set(map(_ID, batch)), all_ready(batch)
        announced = self._announced

        def work(connection: sqlite3.Connection) -> tuple[list[Answer], list[str]]:
            self._announced = announced
            self._known.refresh(connection, ids)
            gathered = Batch(connection, self._known)
            answers = gathered.answer(readied)
            gathered.write()
            self._announced += gathered.announce
            return answers, gathered.loose

        try:
            answers, loose = self._write(work)
        except BaseException:
            self._announced = announced
            self._ear.wake()
            raise
        if self._announced != announced:
            self._file.touch()
        self._known.keep_owned(loose)
        return answers

    def claim(self, claim: Claim) -> list[Loaded]:
        known = self._known

        def work(connection: sqlite3.Connection) -> Given:
            known.look(connection)
            return give(connection, claim, self._clock.now())

        given = self._write(work)
        for id in given.blocked:
            known.rows.pop(id, None)
        known.rows |= given.rows
        known.keep_owned(given.rows)
        return given.loaded

    def register(self, owner: Owner, ttl: float) -> None:
        self.register_other(owner, ttl)
        self._known.owners.add(owner.id)

    def register_other(self, owner: Owner, ttl: float) -> None:
        values = owner.id, rows.json_text(owner.life), json.dumps(owner.workflows), json.dumps(owner.queues)
        self._write(lambda connection: connection.execute(sql.REGISTER, (*values, self._clock.now() + ttl)))

    def renew(self, owner: str, ttl: float) -> bool:
        renewed = self._write(lambda c: c.execute(sql.RENEW, (self._clock.now() + ttl, owner)).rowcount > 0)
        if renewed:
            self._known.owners.add(owner)
        return renewed

    def unregister(self, owner: str) -> None:
        self._known.owners.discard(owner)
        self._write(lambda connection: connection.execute(sql.UNREGISTER, (owner,)))

    def delete(self, ids: Sequence[str]) -> list[bool]:
        def work(connection: sqlite3.Connection) -> dict[str, int]:
            keys = dict(connection.execute(sql.FINISHED, (json.dumps(list(ids)),)).fetchall())
            unreadable = set_aside_unreadable(connection, [id for id in ids if id not in keys], self._clock.now())
            keys |= unreadable
            if keys:
                connection.execute(sql.TOUCH)
            listed = json.dumps(list(keys.values()))
            for statement in sql.DELETE:
                connection.execute(statement, (listed,))
            return keys

        removed = self._write(work) if ids else {}
        for id in removed:
            self._known.rows.pop(id, None)
        return [removed.pop(id, None) is not None for id in ids]

    # readers

    def load(self, id: str) -> Loaded | None:
        def work(connection: sqlite3.Connection) -> Found | None:
            key = connection.execute(sql.LOAD_KEY, (id,)).fetchone()
            return next(iter(load_all(connection, key)), None) if key else None

        found = self._read(work)
        if found is None:
            return None
        if isinstance(found.assembled, CorruptDataError):
            raise found.assembled
        if found.assembled.damaged and not self._file.read_only:
            self._quarantine(found)
        return found.assembled.loaded

    def head(self, id: str) -> Head | None:
        found = self._read(lambda connection: read_head(connection, id))
        return found or super().head(id)

    def _quarantine(self, found: Found) -> None:
        """A reader found damage: copy it by a connection of its own, and leave the repair to the next claim."""
        assert self._file.lock is not None
        with _translated(), self._file.lock, contextlib.closing(self._file.connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            repair(connection, found, self._clock.now(), copy_only=True)
            connection.execute("COMMIT")

    def find(self, query: Query) -> list[Stored]:
        return self._read(lambda connection: finding.find(connection, query))

    def count(self, query: Query) -> dict[ExecutionState, int]:
        return self._read(lambda connection: finding.count(connection, query))

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        return self._read(lambda connection: list(read_boundaries(connection, id, after, limit)))

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        return self._read(lambda connection: read_checkpoint(connection, id, seq))

    def messages(self, id: str) -> list[Message]:
        return self._read(lambda connection: read_messages(connection, id))

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        asked = (json.dumps(list(ids)),)
        return rows.states_from(self._read(lambda connection: connection.execute(sql.STATES, asked).fetchall()))

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        def work(connection: sqlite3.Connection) -> tuple[int, Mapping[str, int]]:
            last = connection.execute(sql.LAST_MESSAGE, (id,)).fetchone()
            return (0, {}) if last is None else (last[0], dict(connection.execute(sql.KEYS_OF, (id,)).fetchall()))

        return self._read(work)

    def pending(self, owner: str) -> list[str]:
        return [id for (id,) in self._read(lambda connection: connection.execute(sql.PENDING, (owner,)).fetchall())]

    def owners(self) -> list[Owner]:
        found = self._read(lambda connection: connection.execute(sql.OWNERS).fetchall())
        now = self._clock.now()
        return [
            rows.owner_from(str(id), life, workflows, queues, _moment(expires) - now)
            for id, life, workflows, queues, expires in found
        ]

    def next_due(self) -> float | None:
        def work(connection: sqlite3.Connection) -> float | None:
            if connection.execute(sql.READY_NOW).fetchone():
                return 0.0
            moment: float | None = connection.execute(sql.NEXT_TIMED).fetchone()[0]
            return moment

        return self._read(work)

    def size(self, id: str) -> int:
        found = self._read(lambda connection: connection.execute(sql.SIZE, (id,)).fetchone())
        return int(found[0]) if found else 0

    # the watcher

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            with _translated():
                changed = self._changed()
            if changed:
                self._ear.found()
            if self._ear.was_woken() or changed:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._ear.listen(left)

    def wake(self) -> None:
        self._ear.wake()

    def _changed(self) -> bool:
        """Whether others have moved the counter of changes since the last look. While a commit of ours is under way it
        seems too low: that is no news and may hide some, but the end of the commit lets us look again."""
        if not self._open:
            raise StoreUnavailableError(KIND, "it is closed")
        if self._file.read_only:  # who reads without locks is told nothing: it is asked for each time
            (changes,) = self._read(lambda connection: connection.execute(sql.CHANGES).fetchone())
            seen, self._watched = self._watched, (0, changes)
            return seen != self._watched
        if self._watcher is None:
            self._watcher = self._connect(reader=True)
        (version,) = self._watcher.execute("PRAGMA data_version").fetchone()
        if self._watched is not None and self._watched[0] == version:
            return False
        (changes,) = self._watcher.execute(sql.CHANGES).fetchone()
        made_elsewhere: int = changes - self._announced
        before = -1 if self._watched is None else self._watched[1]
        self._watched = (version, max(before, made_elsewhere))
        return made_elsewhere > before

    # connections

    def _connect(self, *, reader: bool) -> sqlite3.Connection:
        with _translated():
            connection = self._file.connect(reader=reader)
            if reader:
                finding.add_functions(connection)
        return connection

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one durable transaction. After a failure the connection is opened anew."""
        self._file.check_writable()
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._transaction(work)
            except BaseException as error:
                self._known.clear()
                if isinstance(error, sqlite3.Error):
                    if is_busy(error) and time.monotonic() < deadline:
                        continue  # another program than ours; SQLite has waited for it already
                    self._drop_writer()
                    raise translate(error) from error
                if not isinstance(error, LongrunError):
                    self._drop_writer()
                raise

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._file.lock is None or not self._open:
            raise StoreUnavailableError(KIND, "it is closed")
        with self._file.lock:
            self._file.check_place()
            if self._writer is None:
                self._writer = self._connect(reader=False)
            connection = self._writer
            if self._pages > FOLD_AFTER:
                self._pages = 0
                fold_wal(connection, self._file)
            before = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell of
                        connection.execute("ROLLBACK")
                raise
            self._pages += 4 + (connection.total_changes - before) // 4
            return result

    def _drop_writer(self) -> None:
        connection, self._writer = self._writer, None
        if connection is not None:
            connection.close()

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on one snapshot of the database."""
        if not self._file.read_only:
            return self._read_once(work)
        while True:
            found = self._file.print_of()
            if found != self._print:
                self._print = found
                self._drop_readers()
            try:
                result = self._read_once(work)
            except LongrunError:
                if self._file.print_of() == found:
                    raise
            else:
                if self._file.print_of() == found:
                    return result

    def _drop_readers(self) -> None:
        with self._readers_lock:
            readers, self._readers = self._readers, []
        for connection in readers:
            connection.close()

    def _read_once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._take_reader()
        try:
            with _translated():
                connection.execute("BEGIN")
                result = work(connection)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        with self._readers_lock:
            if self._open and len(self._readers) < IDLE_READERS:
                self._readers.append(connection)
                return result
        connection.close()
        return result

    def _take_reader(self) -> sqlite3.Connection:
        if not self._open:
            raise StoreUnavailableError(KIND, "it is closed")
        self._file.check_place()
        with self._readers_lock:
            if self._readers:
                return self._readers.pop()
        return self._connect(reader=True)


class SQLiteCheckpointStore(CheckpointStore):
    """Keeps executions in one SQLite file, for many executions and several processes on one machine.

    `timeout` is how long a write waits for other processes before it fails with `StoreUnavailableError`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 30.0,
        seal: Seal | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(SQLiteBackend(path, timeout=timeout, clock=clock), seal=seal)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error) from error


def _moment(value: object) -> float:
    """The end of a lease. One that cannot be read has run out: whoever still holds it renews it."""
    return float(value) if isinstance(value, int | float) else 0.0
