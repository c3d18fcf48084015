"""What several test files ask for, of the file store, of Redis and of PostgreSQL. The others make theirs themselves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from longrun.stores._postgres import migrations
from longrun.stores.file import FileBackend
from longrun.stores.postgres import PostgresBackend
from tests.servers import PostgresServer, RedisServer, Source
from tests.stores.file_tools import opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    """Another object on the same files."""
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


@pytest.fixture
def client(redis_server: RedisServer | Source) -> Iterator[Any]:
    """For a look at the keys themselves."""
    assert redis_server.url is not None
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def server_url(postgres_server: PostgresServer | Source) -> str:
    assert postgres_server.url is not None
    return postgres_server.url


@pytest.fixture(scope="session")
def spare_schemas(postgres_server: PostgresServer | Source) -> Iterator[list[str]]:
    """Schemas that a store has made its tables in, and that are empty again."""
    assert postgres_server.url is not None
    spare: list[str] = []
    yield spare
    for name in spare:
        with psycopg.connect(postgres_server.url, autocommit=True) as connection:
            connection.execute(f"SET client_min_messages = warning; DROP SCHEMA {name} CASCADE".encode())


@pytest.fixture
def empty_schema(server_url: str, spare_schemas: list[str]) -> Iterator[str]:
    """The tables of a store with nothing in them: to make them takes longer than most tests. Emptying it fails if the
    test left a transaction open on it; then nobody else gets it."""
    if not spare_schemas:
        spare_schemas.append(f"test_{uuid.uuid4().hex}")
        with opened(PostgresBackend(server_url, schema=spare_schemas[0])):
            pass
    name = spare_schemas.pop()
    yield name
    tables = [f"{name}.{table}" for table in migrations.TABLES]
    with psycopg.connect(server_url, options="-c lock_timeout=5s") as connection:
        connection.execute(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE".encode())
        connection.execute("; ".join(f"DELETE FROM {table}" for table in tables).encode())
    spare_schemas.append(name)
