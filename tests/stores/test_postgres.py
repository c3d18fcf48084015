"""The PostgreSQL store keeps the contract, from a URL and from a pool that the application has."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg_pool
import pytest

from longrun.stores.postgres import PostgresCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from tests.servers import PostgresServer, Source


class TestPostgresStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, postgres_server: PostgresServer | Source, postgres_schema: str) -> None:
        assert postgres_server.url is not None
        self.url, self.schema = postgres_server.url, postgres_schema

    def make_store(self) -> CheckpointStore:
        return PostgresCheckpointStore(self.url, schema=self.schema)
