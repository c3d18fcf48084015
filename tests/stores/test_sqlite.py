"""The SQLite store: the whole contract, and what is special to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrun.stores.sqlite import SQLiteCheckpointStore
from longrun.testing.conformance import StoreConformance


class TestSQLite(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "runs.db"

    def make_store(self) -> SQLiteCheckpointStore:
        return SQLiteCheckpointStore(self.path)
