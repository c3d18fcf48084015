"""A backend in front of a backend: every call passes one method, which a test can count, fail, delay or cut off.

Place in the life of an execution: claim, checkpoint, finish; between the shared `CheckpointStore` and what it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Head, Loaded, Message, Owner, Query, Stored, Write
from longrun.stores.base import Answer, StoreBackend

T = TypeVar("T")

WRITES = ("commit", "claim", "register", "renew", "unregister", "delete")
"""The calls that change something."""
READS = (
    *("load", "head", "find", "count", "boundaries", "checkpoint", "messages"),
    *("states_of", "sent", "pending", "owners", "next_due", "size", "ping"),
)


class InterposedBackend(StoreBackend):
    """Passes everything on. Override `around`."""

    kind = "tested"

    def __init__(self, inner: StoreBackend) -> None:
        self.inner = inner
        self.durable = inner.durable
        self.fenced = inner.fenced
        self.poll_interval = inner.poll_interval

    def __repr__(self) -> str:
        return f"<{type(self).__name__} before {self.inner!r}>"

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """One call of the backend, by name."""
        return function(*args, **options)

    # life

    def open(self) -> None:
        self.inner.open()

    def close(self) -> None:
        self.inner.close()

    def ping(self) -> None:
        self.around("ping", self.inner.ping)

    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        return self.around("commit", self.inner.commit, batch)

    def claim(self, claim: Claim) -> list[Loaded]:
        return self.around("claim", self.inner.claim, claim)

    def register(self, owner: Owner, ttl: float) -> None:
        self.around("register", self.inner.register, owner, ttl)

    def register_other(self, owner: Owner, ttl: float) -> None:
        self.around("register", self.inner.register_other, owner, ttl)

    def renew(self, owner: str, ttl: float) -> bool:
        return self.around("renew", self.inner.renew, owner, ttl)

    def unregister(self, owner: str) -> None:
        self.around("unregister", self.inner.unregister, owner)

    def delete(self, ids: Sequence[str]) -> list[bool]:
        return self.around("delete", self.inner.delete, ids)

    # readers

    def load(self, id: str) -> Loaded | None:
        return self.around("load", self.inner.load, id)

    def head(self, id: str) -> Head | None:
        return self.around("head", self.inner.head, id)

    def find(self, query: Query) -> list[Stored]:
        return self.around("find", self.inner.find, query)

    def count(self, query: Query) -> dict[ExecutionState, int]:
        return self.around("count", self.inner.count, query)

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        return self.around("boundaries", self.inner.boundaries, id, after=after, limit=limit)

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        return self.around("checkpoint", self.inner.checkpoint, id, seq)

    def messages(self, id: str) -> list[Message]:
        return self.around("messages", self.inner.messages, id)

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        return self.around("states_of", self.inner.states_of, ids)

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        return self.around("sent", self.inner.sent, id)

    def pending(self, owner: str) -> list[str]:
        return self.around("pending", self.inner.pending, owner)

    def owners(self) -> list[Owner]:
        return self.around("owners", self.inner.owners)

    def next_due(self) -> float | None:
        return self.around("next_due", self.inner.next_due)

    def size(self, id: str) -> int:
        return self.around("size", self.inner.size, id)

    # the watcher

    def wait(self, timeout: float) -> bool:
        return self.inner.wait(timeout)

    def wake(self) -> None:
        self.inner.wake()
