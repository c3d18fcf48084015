"""The writer's thread: it never dies of a job, answers every one, and makes those wait who write too much at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

from longrun.errors import StoreUnavailableError
from longrun.stored import Write
from longrun.stores import writer as module
from longrun.stores.base import Answer
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.stores.writer import Writer
from longrun.testing.samples import create


class Buggy(MemoryBackend):
    """A backend with a defect: it raises what no backend should."""

    broken = False

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        if self.broken:
            raise KeyError("a defect")
        return super().commit(batch)


@pytest.fixture
def backend() -> Iterator[Buggy]:
    made = Buggy()
    made.open()
    yield made
    made.close()


async def test_a_defect_of_a_backend_is_told_and_the_next_write_is_made(backend: Buggy) -> None:
    async with CheckpointStore(backend) as store:
        backend.broken = True
        with pytest.raises(StoreUnavailableError, match="KeyError in the backend") as caught:
            await store.create(create("a"))
        assert isinstance(caught.value.__cause__, KeyError)
        assert "a defect" not in str(caught.value)
        backend.broken = False
        assert await store.create(create("a"))


async def test_a_writer_that_is_far_ahead_of_its_store_waits(backend: Buggy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or refused by it: with room for one write, a hundred are made."""
    monkeypatch.setattr(module, "QUEUE_LIMIT", 1)
    monkeypatch.setattr(module, "BATCH_LIMIT", 1)
    async with CheckpointStore(backend) as store:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for n in range(100):
                    tasks.start_soon(store.create, create(f"run-{n}"))
        assert sum((await store.count()).values()) == 100


def test_a_writer_that_was_never_started_can_be_stopped_and_takes_nothing(backend: Buggy) -> None:
    made = Writer(backend, lambda write: write)
    made.stop()
    answers: list[Any] = []
    with pytest.raises(StoreUnavailableError, match="not open"):
        made.put(create("a"), answers.append, None)
    assert answers == []
