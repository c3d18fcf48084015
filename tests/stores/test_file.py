"""The file store keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrun.stores.file import FileCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance


class TestFileStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self) -> CheckpointStore:
        return FileCheckpointStore(self.path)
