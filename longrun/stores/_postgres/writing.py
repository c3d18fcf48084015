"""Statements that write rows, in two forms: for one row of each part, and for many.

Place in the life of an execution: start, checkpoint, finish. Both forms come from one text, so that they cannot differ
in what they do. `unnest` of arrays takes any number of rows; for a single one the server would spend more on it than on
the write, so there the row stands in the statement. On a connection of the store's own, libpq is called directly: a
cursor of psycopg costs several times what the call itself does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longrun.stores._postgres.arrays import Column, Texts, length_of, texts_of
from longrun.stores._postgres.driver import ExecStatus, Format, errors, psycopg
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.queries import new_name, numbered

PREPARED = 100
"""Statements that a connection keeps prepared."""

_UNNEST = re.compile(r"unnest\(((?:[^()]|\(\w+\))*)\)")
_APPLIED = re.compile(r"\(\w+\.\w+ IN \(SELECT id FROM applied\)\) IS TRUE")
_NEWS = ("channel", "teller")
_GOOD = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.PIPELINE_SYNC)


class Writing:
    """One statement, for one schema and one set of parts."""

    def __init__(self, text: str, columns: Sequence[tuple[str, type[Column]]], *, single: bool, tell: bool) -> None:
        told = _NEWS if tell else ()
        names = [*(name for name, _ in columns), *told]
        if single:
            text = _APPLIED.sub("EXISTS (SELECT FROM applied)", _UNNEST.sub(r"(VALUES (\1))", text))
        self.text = numbered(text, names)
        self.name = new_name()
        self._kinds = [kind for _, kind in columns]
        self._oids = [kind.element if single else kind.array for kind in self._kinds] + [Texts.element] * len(told)
        self._binary = [1] * len(names)

    def one(self, connection: OwnConnection, values: Sequence[Any], news: Sequence[str]) -> list[str]:
        """Run it for one row of each part; answered are the ids for which it was done. The first column has them."""
        packed = [None if value is None else kind.one(value) for kind, value in zip(self._kinds, values, strict=True)]
        return _done(values[:1], self._run(connection, packed, news))

    def many(self, connection: Connection, columns: Sequence[tuple[Any, ...]], news: Sequence[str]) -> list[str]:
        """Run it for the rows of these columns."""
        packed = [kind(values) for kind, values in zip(self._kinds, columns, strict=True)]
        if isinstance(connection, OwnConnection):
            return _done(columns[0], self._run(connection, [column.data for column in packed], news))
        cursor = psycopg.RawCursor(connection)
        row = cursor.execute(self.text, [*packed, *news], prepare=True, binary=True).fetchone()
        return (row and row[0]) or []

    def _run(self, connection: OwnConnection, packed: Sequence[bytes | None], news: Sequence[str]) -> bytes | None:
        self._prepare(connection)
        values = [*packed, *map(str.encode, news)]
        result = _answer(connection.pgconn.exec_prepared, self.name, values, self._binary, Format.BINARY)
        data: bytes | None = result.get_value(0, 0)
        return data

    def _prepare(self, connection: OwnConnection) -> None:
        if self.name in connection.written:
            return
        for oldest in room_for(connection, self.name):
            _answer(connection.pgconn.exec_, b"DEALLOCATE " + oldest)
        _answer(connection.pgconn.prepare, self.name, self.text, self._oids)


def room_for(connection: OwnConnection, name: bytes) -> Iterator[bytes]:
    """Note that a statement is prepared on this connection; which one has to be forgotten before, if it has many."""
    known = connection.written
    if len(known) >= PREPARED:
        oldest = next(iter(known))
        del known[oldest]
        yield oldest
    known[name] = None


def _done(asked: Sequence[str], answered: bytes | None) -> list[str]:
    """Most often it was done for all of them, which is known without reading their names."""
    return list(asked) if length_of(answered) == len(asked) else texts_of(answered)


def _answer(ask: Callable[..., Any], *arguments: Any) -> Any:
    """The server's answer; an error is raised as a cursor would."""
    try:
        result = ask(*arguments)
    except MemoryError as lost:  # the driver's word for no answer at all
        raise psycopg.OperationalError("the connection is lost") from lost
    return checked(result)


def checked(result: Any) -> Any:
    if result.status in _GOOD:
        return result
    error = errors.error_from_result(result)
    raise error if error.sqlstate else psycopg.OperationalError(str(error))
