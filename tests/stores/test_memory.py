"""The memory store keeps the contract. It is the readable form of it, so nothing else is tested here."""

from __future__ import annotations

from longrun.stores.memory import MemoryCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance


class TestMemoryStore(StoreConformance):
    durable = False

    def make_store(self) -> CheckpointStore:
        self.first = MemoryCheckpointStore()
        return self.first

    def second_store(self) -> CheckpointStore:
        """Its place is the backend itself: two stores on one are as near as memory comes to two processes."""
        return CheckpointStore(self.first.backend)
