"""The replicated store keeps the contract on stores that are durable; and they are equal after every test."""

from __future__ import annotations

import pytest

from longrun.stores.replicated import DirectoryWitness, Witness
from tests.stores.replicated_contract import Replicated


class TestTwoSQLiteStores(Replicated):
    def witness(self) -> Witness | None:
        return DirectoryWitness(self.path / "witness")


@pytest.mark.thorough
class TestFilesAndSQLite(Replicated):
    """With the thread that looks after them at work."""

    kinds = ("file", "sqlite")
    health_interval = 0.05
