"""`SQLAlchemyTaskStore` on a real SQLite file and a real PostgreSQL, through the whole contract of all stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrun.stores.sqlalchemy_tasks import SQLAlchemyTaskStore
from longrun.stores.store import CheckpointStore
from longrun.stores.task import TaskCheckpointStore
from longrun.testing import StoreConformance


class TestOnSQLite(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.url = f"sqlite:///{tmp_path / 'tasks.db'}"

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(SQLAlchemyTaskStore(self.url))


class TestOnPostgres(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, postgres_url: str) -> None:
        self.url = postgres_url

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(SQLAlchemyTaskStore(self.url))
