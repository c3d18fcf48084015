"""The replicated store keeps the contract, and its two stores are equal after every test.

On two databases, and on files and a database: `tests/campaign/test_replicated_contract.py`.
"""

from __future__ import annotations

import pytest

from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend
from tests.stores.replicated_contract import Replicated


class TestTwoMemoryStores(Replicated):
    durable = False

    @pytest.fixture(autouse=True)
    def memory(self, equal_afterwards: None) -> None:
        self.pair = MemoryBackend(), MemoryBackend()

    def backends(self) -> tuple[StoreBackend, StoreBackend]:
        return self.pair
