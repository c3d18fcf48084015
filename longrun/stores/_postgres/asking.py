"""Several statements as one transaction, with few journeys to the server and back.

Place in the life of an execution: claim. What is asked goes out together, and is waited for when the first answer is
read. On a connection of the store's own that is told to libpq directly: the driver's own pipeline costs several times
what such statements do.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from longrun.stores._postgres.arrays import bound
from longrun.stores._postgres.driver import Format, Transformer, psycopg
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.queries import Queries
from longrun.stores._postgres.writing import checked, room_for

Row = tuple[Any, ...]
Ask = Callable[..., Iterable[Row]]
"""Takes a statement's name and its parameters; its rows are there when they are asked for."""

_SNAPSHOT = " ISOLATION LEVEL REPEATABLE READ"


@contextmanager
def in_one(connection: Connection, queries: Queries, *, snapshot: bool = False) -> Iterator[Ask]:
    """One transaction, in which all statements see the same with `snapshot`. It is committed at the end of the block,
    and nothing of it is left after an error."""
    if isinstance(connection, OwnConnection) and psycopg.Pipeline.is_supported():
        with _Together(connection, queries, _SNAPSHOT if snapshot else "") as ask:
            yield ask
        return
    with connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext(), connection.transaction():
        if snapshot:
            connection.execute(f"SET TRANSACTION{_SNAPSHOT}".encode())
        yield partial(queries.run, connection)


class _Asked:
    """The rows of one statement."""

    __slots__ = ("_together", "result")

    def __init__(self, together: _Together) -> None:
        self._together = together
        self.result: Any = None

    def __iter__(self) -> Iterator[Row]:
        if self.result is None:
            self._together.read()
        return iter(self._together.rows(self.result))


class _Together:
    """Statements on their way. After an error the connection is closed: the server forgets what was not committed."""

    def __init__(self, connection: OwnConnection, queries: Queries, kind: str) -> None:
        self._connection, self._queries = connection, queries
        self._pgconn = connection.pgconn
        self._begin = f"BEGIN{kind}".encode()
        self._waiting: deque[_Asked | None] = deque()
        """Whose answers come next, in this order; None for what nobody reads."""
        self._poll = select.poll()

    def __enter__(self) -> _Together:
        self._pgconn.enter_pipeline_mode()
        self._say(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._say(b"COMMIT")
                self.read()
                self._pgconn.exit_pipeline_mode()
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            if kind is not None:
                self._connection.close()

    def __call__(self, name: str, /, **parameters: Any) -> _Asked:
        statement = self._queries.statement(name)
        oids, values = zip(*map(bound, statement.values(parameters)), strict=True)
        if statement.name not in self._connection.written:
            for oldest in room_for(self._connection, statement.name):
                self._say(b"DEALLOCATE " + oldest)
            self._pgconn.send_prepare(statement.name, statement.text, oids)
            self._waiting.append(None)
        self._pgconn.send_query_prepared(statement.name, values, [Format.BINARY] * len(values), Format.BINARY)
        asked = _Asked(self)
        self._waiting.append(asked)
        return asked

    def _say(self, command: bytes) -> None:
        self._pgconn.send_query_params(command, None)
        self._waiting.append(None)

    def read(self) -> None:
        """Have the answers to all that was asked so far. The server knows then that it is its client's turn, and waits
        for that as long as it may in a transaction; after a mere flush it would wait for ever, with all locks held."""
        self._pgconn.pipeline_sync()
        self._waiting.append(None)
        self._flush()
        while self._waiting:
            asked, result = self._waiting.popleft(), checked(self._next())
            if asked is not None:
                asked.result = result

    def rows(self, result: Any) -> list[Row]:
        transformer = Transformer(self._connection)
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)

    def _flush(self) -> None:
        while self._pgconn.flush():
            if self._ready(select.POLLIN | select.POLLOUT) & select.POLLIN:
                self._pgconn.consume_input()

    def _next(self) -> Any:
        """The next answer; between them comes None."""
        result = None
        while result is None:
            while self._pgconn.is_busy():
                self._ready(select.POLLIN)
                self._pgconn.consume_input()
            result = self._pgconn.get_result()
            if result is None and self._pgconn.status != psycopg.pq.ConnStatus.OK:
                raise psycopg.OperationalError("the connection is lost")
        return result

    def _ready(self, events: int) -> int:
        self._poll.register(self._pgconn.socket, events)
        return self._poll.poll()[0][1]
