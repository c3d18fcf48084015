"""Limits of queues, obeyed by four workers together on every store. Memory and SQLite: `tests/test_queues.py`."""

from __future__ import annotations

from pathlib import Path

from longrun import (
    ExecutorConfig,
    ReplicatedCheckpointStore,
    SQLAlchemyTaskStore,
    SQLiteCheckpointStore,
    TaskCheckpointStore,
)
from tests.limited import keeps_to_its_limit
from tests.servers import PostgresServer, Source


async def test_four_workers_keep_to_a_limit_on_files(tmp_path: Path) -> None:
    await keeps_to_its_limit(f"file:{tmp_path / 'store'}")


async def test_four_workers_keep_to_a_limit_on_postgres(
    postgres_server: PostgresServer | Source, postgres_schema: str
) -> None:
    assert postgres_server.url is not None
    await keeps_to_its_limit(postgres_server.url, schema=postgres_schema)


async def test_four_workers_keep_to_a_limit_on_redis(redis_url: str, redis_prefix: str) -> None:
    await keeps_to_its_limit(redis_url, prefix=redis_prefix.rstrip(":"))


async def test_four_workers_keep_to_a_limit_on_tasks_of_an_application(tmp_path: Path) -> None:
    """A store that knows nothing of queues but the contract."""
    store = TaskCheckpointStore(SQLAlchemyTaskStore(f"sqlite:///{tmp_path / 'tasks.db'}"))
    await keeps_to_its_limit(store, number=12, config=ExecutorConfig())


async def test_four_workers_keep_to_a_limit_on_a_replicated_store(tmp_path: Path) -> None:
    first, second = (SQLiteCheckpointStore(tmp_path / f"{name}.db") for name in ("a", "b"))
    await keeps_to_its_limit(ReplicatedCheckpointStore(first, second))
