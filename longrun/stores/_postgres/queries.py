"""The store's statements, read once from `sql/postgres` and bound to one schema.

Place in the life of an execution: claim, checkpoint, finish.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from longrun.errors import StoreSettingsError
from longrun.stores._postgres.driver import psycopg

Cursor = psycopg.RawCursor[tuple[Any, ...]]
KIND = "postgres"
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_PARAMETER = re.compile(r"%\((\w+)\)s")
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


def quoted_schema(schema: object) -> str:
    """The schema as an identifier; only plain names are taken."""
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema) or schema.lower().startswith("pg_"):
        problem = f"schema={schema!r} is no plain name: letters, digits and _, at most 63, not beginning with pg_"
        raise StoreSettingsError(KIND, problem)
    return f'"{schema}"'


@cache
def _texts() -> dict[str, str]:
    text = files("longrun.stores").joinpath("sql", "postgres", "queries.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def numbered(text: str, names: Sequence[str]) -> bytes:
    """SQL with its parameters as the server wants them: by number, in the order of these names."""
    numbers = {name: f"${n}" for n, name in enumerate(names, 1)}
    return _PARAMETER.sub(lambda match: numbers[match[1]], text).encode()


def new_name() -> bytes:
    """What a prepared statement is called on connections of the store's own. No other process calls one so: behind a
    pooler that is in the way, theirs must not be taken for ours."""
    return b"longrun_" + secrets.token_hex(8).encode()


class Statement:
    """SQL with its parameters by number. psycopg does not keep such a translation for long statements, and making it
    anew would cost more than the rest of a small commit."""

    __slots__ = ("_names", "name", "text")

    def __init__(self, text: str) -> None:
        self._names = tuple(dict.fromkeys(_PARAMETER.findall(text)))
        self.text = numbered(text, self._names)
        self.name = new_name()

    def values(self, parameters: Mapping[str, Any]) -> list[Any]:
        """In the order of their numbers."""
        return [parameters[name] for name in self._names]

    def run(
        self, connection: psycopg.Connection[Any], parameters: Mapping[str, Any], *, prepare: bool = True
    ) -> Cursor:
        cursor = psycopg.RawCursor(connection)
        return cursor.execute(self.text, self.values(parameters), prepare=prepare, binary=True)


class Queries:
    """Statements by name, for one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.quoted = quoted_schema(schema)
        self.channel = f"longrun.{schema}"[:63]
        self.news = self.channel, ""
        """Where a notification goes, and what it says: who told."""
        self._texts = {name: text.replace("{schema}", self.quoted) for name, text in _texts().items()}
        self._statements: dict[str, Statement] = {}

    def name_teller(self) -> None:
        """A new name for whoever tells, by which a store knows what it told itself. To be chosen when it is opened:
        processes that were forked before that are many stores."""
        self.news = self.channel, secrets.token_hex(8)

    def joined(self, names: Iterable[str]) -> str:
        """The text of a statement that has several parts, in this order."""
        return "\n".join(self._texts[name] for name in names)

    def text(self, name: str) -> str:
        return self._texts[name]

    def where(self, name: str, conditions: str) -> Statement:
        """A statement with conditions that were put together for this one time."""
        return Statement(self._texts[name].replace("{conditions}", conditions))

    def run(self, connection: psycopg.Connection[Any], name: str, /, **parameters: Any) -> Cursor:
        return self.statement(name).run(connection, parameters)

    def statement(self, name: str) -> Statement:
        statement = self._statements.get(name)
        if statement is None:
            statement = self._statements[name] = Statement(self._texts[name])
        return statement


def migrations() -> list[tuple[int, str, str]]:
    """Number, file name and text of every migration, in order."""
    found = []
    for file in files("longrun.stores").joinpath("sql", "postgres").iterdir():
        match = _MIGRATION.fullmatch(file.name)
        if match:
            found.append((int(match[1]), file.name, file.read_text("utf-8")))
    return sorted(found)
