"""What the parts of the conformance suite share: the hooks that a subclass gives, and the fixtures made of them."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from longrun.stored import Create, Head, Loaded, Write
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.store import CheckpointStore

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds after which a test gives up waiting for a thread of its own."""

LOOPS = ["asyncio"] + (["trio"] if importlib.util.find_spec("trio") else [])


class ConformanceBase:
    """The hooks. A subclass overrides `make_store`, and whatever of the rest is not true of its store."""

    durable: bool = True
    """What the store acknowledged is there after it was closed and opened again."""
    fenced: bool = True
    """A stale owner in another process is refused."""
    shared: bool = True
    """Several store objects, in one process or in many, can use the place at the same time."""

    def make_store(self) -> CheckpointStore:
        """A new store object on this test's own place, which is empty. It is neither opened nor closed here.

        Where the place is comes from a fixture: give the class one with `autouse=True` that puts it on `self`."""
        raise NotImplementedError("a subclass of StoreConformance says how its store is made: override make_store")

    def second_store(self) -> CheckpointStore:
        """Another store object on the same place, as another process would have it. Only called after `make_store`."""
        return self.make_store()

    def damage_definition(self, id: str) -> None:
        """Change the stored definition of an execution so that it cannot be read, as a bad disk would. Called while no
        store is open. Whoever does not override it has not shown what becomes of such a one."""
        pytest.skip("this store does not say how it could be damaged")

    # fixtures

    @pytest.fixture(params=LOOPS)
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def store(self) -> CheckpointStore:
        return self.make_store()

    @pytest.fixture
    def other_store(self, store: CheckpointStore) -> CheckpointStore:
        """A second store object beside the first one."""
        self.needs("shared")
        return self.second_store()

    @pytest.fixture
    def backend(self, store: CheckpointStore) -> Iterator[StoreBackend]:
        """The store's backend, open."""
        with opened(store.backend) as backend:
            yield backend

    @pytest.fixture
    def other(self, backend: StoreBackend, other_store: CheckpointStore) -> Iterator[StoreBackend]:
        """The second store's backend, open beside the first one."""
        with opened(other_store.backend) as other:
            yield other

    def needs(self, flag: str) -> None:
        if not getattr(self, flag):
            pytest.skip(f"this store is not {flag}")


@contextlib.contextmanager
def opened(backend: StoreBackend) -> Iterator[StoreBackend]:
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


@contextlib.contextmanager
def beside(function: Callable[[], T], stop: threading.Event | None = None) -> Iterator[Future[T]]:
    """Run `function` in a thread of its own next to the body; `stop` is set in the end, however the body ends."""
    with ThreadPoolExecutor(1, "conformance") as pool:
        try:
            yield pool.submit(function)
        finally:
            if stop is not None:
                stop.set()


def done(backend: StoreBackend, *writes: Write) -> list[Answer]:
    """Commit as one batch; none of the writes may be refused."""
    answers = backend.commit(writes)
    assert len(answers) == len(writes)
    for answer in answers:
        assert not isinstance(answer, Exception), answer
    return answers


def refused(backend: StoreBackend, write: Write, kind: type[Exception]) -> Any:
    """Commit one write, which must be refused; the error."""
    (answer,) = backend.commit([write])
    assert isinstance(answer, kind), answer
    return answer


def created(backend: StoreBackend, *creates: Create) -> None:
    assert done(backend, *creates) == [True] * len(creates)


def loaded(backend: StoreBackend, id: str) -> Loaded:
    found = backend.load(id)
    assert found is not None
    assert found.damage == ()
    return found


def head_of(backend: StoreBackend, id: str) -> Head:
    return loaded(backend, id).head


def ids_of(found: list[Loaded]) -> list[str]:
    return [one.definition.id for one in found]
