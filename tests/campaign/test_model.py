"""Every store behaves as the memory store does, whatever is done to it in whatever order."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from psycopg.sql import SQL, Identifier

from longrun.errors import LongrunError
from longrun.stored import Claim, Loaded, Save, Write
from longrun.stores.base import Answer
from longrun.stores.memory import MemoryBackend, _Record
from longrun.stores.store import CheckpointStore
from tests.campaign.model import NewPlace, StoreMachine


def memory(request: pytest.FixtureRequest) -> NewPlace:
    """Against itself: what fails here is wrong in the machine."""

    def new_place() -> Callable[[], CheckpointStore]:
        backend = MemoryBackend()
        return lambda: CheckpointStore(backend)

    return new_place


def on_disk(module: str, name: str) -> Callable[[pytest.FixtureRequest], NewPlace]:
    """A store whose first argument is a path: a new one below the test's directory for every run."""

    def places(request: pytest.FixtureRequest) -> NewPlace:
        make = getattr(importlib.import_module(module), name)
        directory: Path = request.getfixturevalue("tmp_path")
        numbers = itertools.count()

        def new_place() -> Callable[[], CheckpointStore]:
            return functools.partial(make, directory / f"place{next(numbers)}")

        return new_place

    return places


def postgres(request: pytest.FixtureRequest) -> NewPlace:
    """A schema of its own for every run, below the name of the test's, which is dropped with them."""
    server, schema = request.getfixturevalue("postgres_server"), request.getfixturevalue("postgres_schema")
    from longrun.stores.postgres import PostgresCheckpointStore

    names: list[str] = []

    def new_place() -> Callable[[], CheckpointStore]:
        names.append(f"{schema}_{len(names)}")
        return functools.partial(PostgresCheckpointStore, server.url, schema=names[-1])

    def drop() -> None:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SET client_min_messages = warning")
            for name in names:
                connection.execute(SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(Identifier(name)))

    request.addfinalizer(drop)
    return new_place


def redis(request: pytest.FixtureRequest) -> NewPlace:
    """A prefix of its own for every run, on a server that was started for the tests and ends with them."""
    from longrun.stores.redis import RedisCheckpointStore

    url, numbers = request.getfixturevalue("redis_url"), itertools.count()

    def new_place() -> Callable[[], CheckpointStore]:
        return functools.partial(RedisCheckpointStore, url, prefix=f"model{next(numbers)}")

    return new_place


PLACES: dict[str, Callable[[pytest.FixtureRequest], NewPlace]] = {
    "memory": memory,
    "file": on_disk("longrun.stores.file", "FileCheckpointStore"),
    "sqlite": on_disk("longrun.stores.sqlite", "SQLiteCheckpointStore"),
    "postgres": postgres,
}


@pytest.fixture(params=list(PLACES))
def new_place(request: pytest.FixtureRequest) -> NewPlace:
    return PLACES[request.param](request)


def run(new_place: NewPlace, **options: Any) -> None:
    """Without shrinking: on a real store it takes minutes, and the steps of the failure are printed anyway."""
    checks = settings(
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        **options,
    )
    run_state_machine_as_test(functools.partial(StoreMachine, new_place), settings=checks)  # type: ignore[arg-type]


def test_a_store_does_as_the_memory_store_does(new_place: NewPlace, campaign_size: int) -> None:
    """I1, I3, I7, I9."""
    run(new_place, max_examples=max(5, campaign_size // 2))


def test_redis_does_as_the_memory_store_does(
    redis_server: object, request: pytest.FixtureRequest, campaign_size: int
) -> None:
    """I1, I3, I7, I9, on every Redis and Valkey that is here."""
    run(redis(request), max_examples=max(5, campaign_size // 2))


# The machine can fail: each of these is a store with one mistake.


class NoFence(MemoryBackend):
    def _save(self, record: _Record, save: Save) -> Answer:
        return super()._save(record, attrs.evolve(save, head=attrs.evolve(save.head, fence=record.head.fence)))


class NoOrder(MemoryBackend):
    """Takes a write over a missing one."""

    def _save(self, record: _Record, save: Save) -> Answer:
        if record.head.fence == save.head.fence and record.head.revision < save.head.revision:
            record.head = attrs.evolve(record.head, revision=save.head.revision - 1)
        return super()._save(record, save)


class Twice(MemoryBackend):
    """Applies a repeated write again."""

    def _save(self, record: _Record, save: Save) -> Answer:
        if record.head.fence == save.head.fence and record.head.revision >= save.head.revision:
            record.head = attrs.evolve(record.head, revision=save.head.revision - 1)
        return super()._save(record, save)


class ForgetsKeys(MemoryBackend):
    def _save(self, record: _Record, save: Save) -> Answer:
        answer = super()._save(record, save)
        record.keys = {key: number for key, number in record.keys.items() if number in record.messages}
        return answer


class NoWaking(MemoryBackend):
    """Loses the message that crossed a release."""

    def _save(self, record: _Record, save: Save) -> Answer:
        answer = super()._save(record, save)
        if record.head.revision == save.head.revision:
            record.head = attrs.evolve(record.head, woken=save.head.woken)
        return answer


class SameFence(MemoryBackend):
    """Gives an execution without shutting out the one that had it."""

    def claim(self, claim: Claim) -> list[Loaded]:
        given = super().claim(claim)
        for one in given:
            head = self._records[one.definition.id].head
            self._records[one.definition.id].head = attrs.evolve(head, fence=head.fence - 1)
        return given


class DeletesAll(MemoryBackend):
    def delete(self, ids: Sequence[str]) -> list[bool]:
        return [self._records.pop(id, None) is not None for id in ids]


class WholeBatch(MemoryBackend):
    """One refused write takes those behind it along."""

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        answers: list[Answer] = []
        for write in batch:
            refused = answers and isinstance(answers[-1], LongrunError)
            answers += [answers[-1]] if refused else super().commit([write])
        return answers


MISTAKES = [NoFence, NoOrder, Twice, ForgetsKeys, NoWaking, SameFence, DeletesAll, WholeBatch]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_found(kind: type[MemoryBackend]) -> None:
    def new_place() -> Callable[[], CheckpointStore]:
        backend = kind()
        return lambda: CheckpointStore(backend)

    with pytest.raises(AssertionError):
        run(new_place, max_examples=300, derandomize=True)
