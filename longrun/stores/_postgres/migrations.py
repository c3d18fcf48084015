"""The schema: made when it is missing, brought up to date when it is old, refused when it is newer or not ours.

Place in the life of an execution: before its first claim. Several processes may come at once: an advisory lock lets
one of them work, and the others find it done.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from longrun.errors import NewerFormatError, StoreSettingsError, StoreUnavailableError
from longrun.stores._postgres.driver import psycopg
from longrun.stores._postgres.queries import KIND, Queries, migrations

LOCK_SPACE = 0x6C6F6E67
"""The first half of the advisory lock's key: "long" in ASCII. The second half is the schema's."""

TABLES = (
    *("heads", "definitions", "boundaries", "states", "blobs", "entries", "messages", "receipts", "owners"),
    "quarantine",
)
VERSION_TABLE = "longrun_version"
VERSION_COLUMNS = {"version": "integer", "name": "text", "applied": "timestamp with time zone"}


def migrate(connection: psycopg.Connection[Any], queries: Queries, *, create: bool = True) -> None:
    """Bring the schema to this version, in one transaction; unless `create`, it must be there in some version."""
    steps = migrations()
    newest = steps[-1][0]
    found = _version(connection, queries, newest)
    if found == newest:
        return
    if found is None and not create:
        raise StoreUnavailableError(
            KIND, f"there is none in schema {queries.schema!r}; `longrun store migrate` makes one"
        )
    with connection.transaction():
        # Another process may need its time for this, and what it did then must be seen.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute("SET LOCAL lock_timeout = 0")
        connection.execute("SET LOCAL statement_timeout = 0")
        connection.execute("SELECT pg_advisory_xact_lock(%s, %s)", (LOCK_SPACE, _lock_key(queries.schema)))
        version = _version(connection, queries, newest)
        if version is None:
            _begin(connection, queries)
        for number, name, text in steps:
            if number > (version or 0):
                connection.execute(text.replace("{schema}", queries.quoted).encode(), prepare=False)
                connection.execute(
                    f"INSERT INTO {queries.quoted}.{VERSION_TABLE} (version, name) VALUES (%s, %s)".encode(),
                    (number, name),
                )


def _lock_key(schema: str) -> int:
    return crc32(schema.encode()) - (1 << 31)


def _version(connection: psycopg.Connection[Any], queries: Queries, newest: int) -> int | None:
    """The newest migration that was applied; None where nothing of ours is there yet."""
    there = _relations(connection, queries.schema)
    if VERSION_TABLE not in there:
        _refuse_foreign(there.intersection(TABLES), queries.schema)
        return None
    if not VERSION_COLUMNS.items() <= _columns(connection, queries.schema).items():
        _refuse_foreign({VERSION_TABLE}, queries.schema)
    row = connection.execute(f"SELECT max(version) FROM {queries.quoted}.{VERSION_TABLE}".encode()).fetchone()
    version = row[0] if row else None
    if version is None:  # tables of ours come with their version, in one transaction
        _refuse_foreign(there.intersection(TABLES), queries.schema)
    elif version > newest:
        raise NewerFormatError(f"schema {queries.schema!r}", version, newest)
    missing = sorted(set(TABLES) - there) if version == newest else []
    if missing:
        raise StoreSettingsError(KIND, f"schema {queries.schema!r} has lost its table {missing[0]!r}")
    return version or 0


def _refuse_foreign(tables: set[str], schema: str) -> None:
    for name in sorted(tables):
        problem = f"schema {schema!r} has a table {name!r} that is not longrun's; give another schema="
        raise StoreSettingsError(KIND, problem)


def _relations(connection: psycopg.Connection[Any], schema: str) -> set[str]:
    rows = connection.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = ANY(%s)",
        (schema, [*TABLES, VERSION_TABLE]),
    )
    return {row[0] for row in rows}


def _columns(connection: psycopg.Connection[Any], schema: str) -> dict[str, str]:
    """Those of the table of versions, with their types."""
    rows = connection.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a"
        " JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
        (schema, VERSION_TABLE),
    )
    return dict(rows.fetchall())


def _begin(connection: psycopg.Connection[Any], queries: Queries) -> None:
    """The schema itself, unless it is there: then no right to create one is needed."""
    there = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (queries.schema,)).fetchone()
    if there is None:
        connection.execute(f"CREATE SCHEMA {queries.quoted}".encode())
    connection.execute(
        f"CREATE TABLE {queries.quoted}.{VERSION_TABLE} (version integer PRIMARY KEY, name text NOT NULL,"
        " applied timestamptz NOT NULL DEFAULT clock_timestamp())".encode()
    )
