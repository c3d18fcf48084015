"""The contract of all stores, for two stores that are one: each test file says which two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.stores.base import StoreBackend
from longrun.stores.replicated import ReplicatedCheckpointStore, Witness
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from tests.stores.replicated_tools import assert_equal, make, opened


class Replicated(StoreConformance):
    """Two stores and what is asked of them."""

    kinds = ("sqlite", "sqlite")
    health_interval: float | None = None

    @pytest.fixture(autouse=True)
    def equal_afterwards(self, tmp_path: Path) -> Iterator[None]:
        """I13: whatever a test did, through however many store objects, both have it."""
        for name in ("primary", "secondary"):
            (tmp_path / name).mkdir()
        self.path = tmp_path
        yield
        one, two = self.backends()
        with opened(one), opened(two):
            assert_equal(one, two)

    def backends(self) -> tuple[StoreBackend, StoreBackend]:
        return make(self.kinds[0], self.path / "primary"), make(self.kinds[1], self.path / "secondary")

    def witness(self) -> Witness | None:
        return None

    def make_store(self) -> CheckpointStore:
        return ReplicatedCheckpointStore(*self.backends(), witness=self.witness(), health_interval=self.health_interval)
