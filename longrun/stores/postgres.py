"""Executions in PostgreSQL: one store for many machines. Needs the extra `postgres`.

Place in the life of an execution: claim, checkpoint, finish.

The execution's row is the queue's row: claim, lease, fence and checkpoint share one transaction, and there is no second
queue. Claims skip what others hold (`FOR UPDATE SKIP LOCKED`); `NOTIFY` wakes workers and carries pause, cancel and
signals; leases run by the server's clock. A lost connection is survived: every write can be repeated and finds out by
itself whether it was done (I9).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from longrun.errors import CorruptDataError, NotStorableError, StoreSettingsError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.seal import Seal
from longrun.stored import Boundary, Claim, Head, Loaded, Message, Owner, Query, Stored, Write
from longrun.stores import rows
from longrun.stores._postgres.arrays import Texts
from longrun.stores._postgres.asking import in_one
from longrun.stores._postgres.batch import Batch
from longrun.stores._postgres.claiming import Claiming
from longrun.stores._postgres.driver import errors, psycopg
from longrun.stores._postgres.links import Connection, Links, Pool
from longrun.stores._postgres.listening import Listener
from longrun.stores._postgres.listing import Conditions, stored_from
from longrun.stores._postgres.loading import Loader, set_aside_if_writable
from longrun.stores._postgres.migrations import migrate
from longrun.stores._postgres.queries import KIND, Queries
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.store import CheckpointStore

_UNSTORABLE = (UnicodeError, OverflowError, TypeError, ValueError, struct.error)
_REFUSED = (psycopg.DataError, psycopg.IntegrityError, errors.ProgramLimitExceeded)
"""The server's errors about one value, not about itself."""
_FULL_OF_NEWS = "NOTIFY"
"""What only that one among them mentions which is no value's fault: somebody has listened in a transaction for so long
that no notice can be queued behind him."""


class PostgresBackend(StoreBackend):
    kind = KIND

    def __init__(self, source: str | Pool, *, schema: str = "longrun") -> None:
        self._queries = Queries(schema)
        self._links = Links(source)
        self._listener: Listener | None = None

    def __repr__(self) -> str:
        return f"<PostgresBackend {self._links.place} schema={self._queries.schema}>"

    # life

    def open(self) -> None:
        self._links.open()
        self._queries.name_teller()
        try:
            self._links.once(lambda connection: migrate(connection, self._queries, create=self.creates))
            self._listener = Listener(*self._queries.news, self._links.listening)
        except StoreUnavailableError as error:
            self._links.close()
            hint = self._advice(error.__cause__)
            if hint is None:
                raise
            raise StoreSettingsError(KIND, f"{error.problem}; {hint}") from error.__cause__
        except BaseException:
            self._links.close()
            raise

    def _advice(self, refusal: BaseException | None) -> str | None:
        schema = self._queries.schema
        if isinstance(refusal, errors.InsufficientPrivilege):
            return f"let the role create schema {schema!r}, or own it"
        if isinstance(refusal, errors.DuplicateTable | errors.DuplicateObject):  # an index or a type, say
            return f"it is in schema {schema!r} and not longrun's; give another schema="
        return None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._links.close()

    def ping(self) -> None:
        self._links.read(lambda connection: connection.execute("SELECT 1").fetchone())

    def describe(self) -> Mapping[str, object]:
        ((version, fsync, commit, pages, recovering),) = self._rows("facts")
        return {
            **super().describe(),
            "place": self._links.place,
            "schema": self._queries.schema,
            "server": version,
            "fsync": fsync,
            "synchronous_commit": commit,
            "full_page_writes": pages,
            "read_only": recovering,
        }

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        try:
            return self._links.write(Batch(batch, self._queries).apply)
        except StoreUnavailableError as error:
            if not isinstance(error.__cause__, _REFUSED) or _FULL_OF_NEWS in str(error.__cause__):
                raise
            refusal: Exception = error.__cause__
        except _UNSTORABLE as error:
            refusal = error
        if len(batch) > 1:  # one value spoils the whole statement: find out whose it is
            half = len(batch) // 2
            return self.commit(batch[:half]) + self.commit(batch[half:])
        refused = NotStorableError(
            f"a value of execution {batch[0].id!r}", f"PostgreSQL refuses it ({type(refusal).__name__})"
        )
        refused.__cause__ = refusal
        return [refused]

    def claim(self, claim: Claim) -> list[Loaded]:
        return self._links.write(Claiming(claim, self._queries).take)

    def register(self, owner: Owner, ttl: float) -> None:
        parameters = {
            "id": owner.id,
            "life": rows.json_text(owner.life),
            "workflows": rows.json_text(owner.workflows),
            "queues": rows.json_text(owner.queues),
            "ttl": float(ttl),
        }
        self._links.write(lambda connection: self._queries.run(connection, "register", **parameters))

    def renew(self, owner: str, ttl: float) -> bool:
        found = self._links.write(
            lambda connection: self._queries.run(connection, "renew", id=owner, ttl=float(ttl)).fetchone()
        )
        return found is not None

    def unregister(self, owner: str) -> None:
        self._links.write(lambda connection: self._queries.run(connection, "unregister", id=owner))

    def delete(self, ids: Sequence[str]) -> list[bool]:
        found: set[str] = set()  # kept over repetitions: what a lost attempt removed is not there a second time
        self._links.write(partial(self._delete, ids, found))
        return [id in found and id not in ids[:place] for place, id in enumerate(ids)]

    def _delete(self, ids: Sequence[str], found: set[str], connection: Connection) -> None:
        with connection.transaction():
            removable = [id for (id,) in self._queries.run(connection, "lock_finished", ids=Texts(ids))]
            removable += self._set_unreadable_aside(connection, [id for id in ids if id not in removable])
            if removable:
                found.update(removable)
                self._queries.run(connection, "delete", ids=Texts(removable))

    def _set_unreadable_aside(self, connection: Connection, ids: Sequence[str]) -> list[str]:
        """Those of which nothing can be read; all there is of them is copied to the quarantine, so that they may go."""
        there = [id for (id,) in self._queries.run(connection, "lock_all", ids=Texts(ids))] if ids else []
        found = Loader(partial(self._queries.run, connection)).load(there) if there else {}
        unreadable = [id for id, one in found.items() if isinstance(one, CorruptDataError)]
        if unreadable:
            self._queries.run(connection, "set_all_aside", ids=Texts(unreadable))
        return unreadable

    # readers

    def _rows(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return self._links.read(lambda connection: self._queries.run(connection, name, **parameters).fetchall())

    def load(self, id: str) -> Loaded | None:
        return self._links.read(partial(self._load, id))

    def _load(self, id: str, connection: Connection) -> Loaded | None:
        with in_one(connection, self._queries, snapshot=True) as ask:
            found = Loader(ask).load([id]).get(id)
        if isinstance(found, CorruptDataError):
            raise found
        if found is None:
            return None
        if found.damaged:
            set_aside_if_writable(partial(self._queries.run, connection), id, found)
        return found.loaded

    def head(self, id: str) -> Head | None:
        found = self._links.read(lambda connection: Loader(partial(self._queries.run, connection)).head(id))
        return found or super().head(id)

    def find(self, query: Query) -> list[Stored]:
        return [stored_from(row) for row in self._listed("find", Conditions(query, page=True))]

    def count(self, query: Query) -> dict[ExecutionState, int]:
        conditions = Conditions(query, page=False)
        name = "count_with_definitions" if conditions.needs_definitions else "count"
        return rows.counts_from(self._listed(name, conditions))

    def _listed(self, name: str, conditions: Conditions) -> list[tuple[Any, ...]]:
        """Never prepared: the best index depends on the values that are asked for."""
        statement = self._queries.where(name, conditions.text)
        return self._links.read(
            lambda connection: statement.run(connection, conditions.parameters, prepare=False).fetchall()
        )

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        found = self._rows("boundaries", id=id, after=after, limit=limit)
        return [rows.boundary_from(row) for row in found]

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        return self._links.read(partial(self._checkpoint, id, seq))

    def _checkpoint(self, id: str, seq: int, connection: Connection) -> tuple[Boundary, Mapping[str, bytes]] | None:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return Loader(partial(self._queries.run, connection)).checkpoint(id, seq)

    def messages(self, id: str) -> list[Message]:
        return self._links.read(lambda connection: Loader(partial(self._queries.run, connection)).messages(id))

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        return rows.states_from(self._rows("states_of", ids=Texts([rows.clean(id) for id in ids])))

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        last = max((number for (number,) in self._rows("last_message", id=id)), default=0)
        return last, dict(self._rows("keys_of", id=id))

    def pending(self, owner: str) -> list[str]:
        return [id for (id,) in self._rows("pending", owner=owner)]

    def owners(self) -> list[Owner]:
        return [rows.owner_from(*row) for row in self._rows("owners")]

    def next_due(self) -> float | None:
        ((due,),) = self._rows("next_due")
        return None if due is None else float(due)

    def size(self, id: str) -> int:
        ((size,),) = self._rows("size", id=id)
        return int(size)

    # the watcher

    def wait(self, timeout: float) -> bool:
        if self._listener is None:
            raise StoreUnavailableError(KIND, "it is closed")
        return self._listener.wait(timeout)

    def wake(self) -> None:
        if self._listener is not None:
            self._listener.wake()


class PostgresCheckpointStore(CheckpointStore):
    """Executions in a PostgreSQL database.

    `url_or_pool` is a URL (`postgresql://user@host/database`) or a `psycopg_pool.ConnectionPool` that the application
    has already; the pool stays the application's to close. Behind a pooler that changes the server's connection between
    transactions (PgBouncer), make it with `prepare_threshold=None`; such a pooler does not carry notifications, so news
    is found by looking now and then. Tables live in `schema`, which is created when missing.
    """

    def __init__(self, url_or_pool: str | Pool, *, schema: str = "longrun", seal: Seal | None = None) -> None:
        super().__init__(PostgresBackend(url_or_pool, schema=schema), seal=seal)
