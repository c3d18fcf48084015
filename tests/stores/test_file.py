"""The file store keeps the contract."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from longrun.errors import LeaseLostError
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from longrun.testing.samples import claim, owned, step


class TestFileStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self) -> CheckpointStore:
        return FileCheckpointStore(self.path)

    def damage_definition(self, id: str) -> None:
        (journal,) = [*(self.path / "live").glob(f"{id}.*"), *(self.path / "done").glob(f"{id}.*")]
        journal.write_bytes(bytes(journal.stat().st_size))

    def test_a_takeover_while_the_owner_writes(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I1, I3: the new owner gets every write that was acknowledged, and none is acknowledged after it.

        One more write may be there than was acknowledged: the owner appends first and looks for a newer generation
        after that. It was told that it lost the execution, and the new owner goes on behind its last write."""
        new = owned("a", "one")
        backend.commit([new])
        written = threading.Semaphore(0)
        taken: list[int] = []

        def take_over() -> None:
            for _ in range(20):
                assert written.acquire(timeout=30)
            (given,) = other.claim(claim("two", dead=frozenset({"one"})))
            assert given.boundary.seq == given.head.seq == given.head.revision + 1
            taken.append(given.head.revision)

        thread = threading.Thread(target=take_over)
        thread.start()
        head, acknowledged = new.head, 0
        while True:
            save = step("a", head)
            (answer,) = backend.commit([save])
            if isinstance(answer, LeaseLostError):
                break
            assert answer is None
            head, acknowledged = save.head, acknowledged + 1
            written.release()
        thread.join(30)
        assert taken[0] in (acknowledged, acknowledged + 1)
        assert len(backend.boundaries("a")) == taken[0] + 1
