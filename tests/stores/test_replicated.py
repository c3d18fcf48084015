"""The replicated store keeps the contract, whatever two stores it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrun.stores.file import FileCheckpointStore
from longrun.stores.memory import MemoryCheckpointStore
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore
from longrun.stores.sqlite import SQLiteCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance


class TestTwoMemoryStores(StoreConformance):
    durable = False

    def make_store(self) -> CheckpointStore:
        self.pair = MemoryCheckpointStore(), MemoryCheckpointStore()
        return self.second_store()

    def second_store(self) -> CheckpointStore:
        return ReplicatedCheckpointStore(*self.pair, health_interval=None)


class TestTwoSQLiteStores(StoreConformance):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_store(self) -> CheckpointStore:
        return ReplicatedCheckpointStore(
            SQLiteCheckpointStore(self.path / "primary.db"),
            SQLiteCheckpointStore(self.path / "secondary.db"),
            witness=DirectoryWitness(self.path / "witness"),
            health_interval=None,
        )


class TestFilesAndSQLite(StoreConformance):
    """Two kinds of store, with the thread that looks after them at work."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_store(self) -> CheckpointStore:
        return ReplicatedCheckpointStore(
            SQLiteCheckpointStore(self.path / "primary.db"),
            FileCheckpointStore(self.path / "secondary"),
            health_interval=0.05,
        )
