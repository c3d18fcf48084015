"""Executions in the application's own task table, through the six methods of `TaskStoreAdapter`.

Place in the life of an execution: claim, checkpoint, finish::

    store = TaskCheckpointStore(SQLAlchemyTaskStore("postgresql://…"))     # or an adapter of the application's own

An execution is one `TaskRecord`, and every save replaces it whole: states, in-step progress, messages and all.
`status`, `progress` and `metadata` of the record are for the application's screens; only `data` counts.

What that costs: each save writes the whole record (its newest states included, old rows are moved out), and one commit
is one adapter call for each execution in it, several at a time. Finding, claiming and watching read the table with
`list_tasks`, unfinished tasks only if it takes `status=`; so they cost as much as there are tasks, not as is asked for.

With the seventh method, `replace_task`, several processes can share the table. Without it `fenced` is False: a stale
owner cannot be refused in one act, so only one store at a time may have the table open (`StoreSettingsError`).
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ConfigError, StoreUnavailableError
from longrun.records import UNFINISHED, ExecutionState
from longrun.seal import Seal
from longrun.stored import Boundary, Claim, Create, Loaded, Message, Owner, Query, Save, Send, Stored, Write
from longrun.stores._task.loop import OwnTaskLoop, TaskLoop, current_task_loop
from longrun.stores._task.records import STATUSES, FencedTaskStoreAdapter, TaskRecord, TaskStoreAdapter
from longrun.stores._task.single import SingleUser
from longrun.stores._task.table import TaskTable
from longrun.stores._task.work import TaskWork
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.choice import matches
from longrun.stores.rows import wake_at
from longrun.stores.store import CheckpointStore

__all__ = [
    "STATUSES",
    "FencedTaskStoreAdapter",
    "TaskBackend",
    "TaskCheckpointStore",
    "TaskRecord",
    "TaskStoreAdapter",
]

T = TypeVar("T")

CAN_BE_DUE = frozenset(
    {ExecutionState.INITIALIZED, ExecutionState.WAITING, ExecutionState.RESUMING, ExecutionState.RUNNING}
)
CONCURRENCY = 16
METHODS = ("save_task", "get_task", "list_tasks", "delete_task", "update_progress", "update_status")


class TaskBackend(StoreBackend):
    kind = "task"

    def __init__(
        self,
        adapter: TaskStoreAdapter,
        *,
        clock: Clock = SYSTEM_CLOCK,
        poll_interval: float = 0.25,
        timeout: float = 30.0,
        concurrency: int | None = None,
    ) -> None:
        if concurrency is None:
            concurrency = int(getattr(adapter, "concurrency", CONCURRENCY))
        _check(adapter, poll_interval, timeout, concurrency)
        self.poll_interval = poll_interval
        self._table = TaskTable(adapter, clock=clock, timeout=timeout, concurrency=concurrency)
        self._work = TaskWork(self._table)
        self.fenced = self._table.fenced
        self.durable = bool(getattr(adapter, "durable", True))
        self._single = SingleUser(self._table)
        self._loop: TaskLoop | None = None
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0
        self._seen = 0
        self._signs: frozenset[tuple[object, ...]] | None = None

    # life

    def borrow_loop(self) -> None:
        """Let the adapter's coroutines run in the loop that runs this code: its pools live there."""
        if self._loop is None or self._loop.gone:
            self._loop = current_task_loop()

    def open(self) -> None:
        if self._loop is None:
            self._loop = OwnTaskLoop()
        try:
            self._run(self._table.check)
            if not self.fenced:
                self._single.enter(self._run)
        except BaseException:
            self._end_loop()
            raise

    def close(self) -> None:
        if self._loop is None:
            return
        try:
            self._single.leave(self._run)
            closed = getattr(self._table.adapter, "store_closed", None)
            if closed is not None:
                self._run(closed)
        except StoreUnavailableError:
            pass  # the table or its loop is away: there is nothing left to give back
        finally:
            self._end_loop()
            self._work = TaskWork(self._table)

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def ping(self) -> None:
        self._run(self._table.get, "~ping~")

    def describe(self) -> Mapping[str, object]:
        adapter = self._table.adapter
        described = adapter.describe() if hasattr(adapter, "describe") else {}
        return {**super().describe(), "adapter": type(adapter).__name__, **described}

    def _run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        loop = self._loop
        if loop is None:
            raise StoreUnavailableError(self.kind, "it is not open")
        return loop.run(function, *args)

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        answers = self._run(self._work.commit, batch)
        if any(_others_may_wait(write) for write in batch):
            self._ring()
        return answers

    def claim(self, claim: Claim) -> list[Loaded]:
        return self._run(self._work.claim, claim)

    def register(self, owner: Owner, ttl: float) -> None:
        self._run(self._work.register, owner, ttl)
        self._run(self._single.renew)

    def renew(self, owner: str, ttl: float) -> bool:
        self._run(self._single.renew)
        return self._run(self._work.renew, owner, ttl)

    def unregister(self, owner: str) -> None:
        self._run(self._work.unregister, owner)

    def delete(self, ids: Sequence[str]) -> list[bool]:
        return self._run(self._work.delete, ids)

    # readers

    def load(self, id: str) -> Loaded | None:
        document = self._run(self._work.document, id)
        return None if document is None else document.loaded()

    def find(self, query: Query) -> list[Stored]:
        found = [p for p in self._run(self._work.peeks, query.states) if matches(p.definition, p.head, query)]
        found.sort(key=lambda p: p.position, reverse=True)
        after = query.after
        return [p.stored for p in found if after is None or p.position < after][: query.limit]

    def count(self, query: Query) -> dict[ExecutionState, int]:
        counts: dict[ExecutionState, int] = {}
        for found in self._run(self._work.peeks, query.states):
            if matches(found.definition, found.head, query):
                counts[found.head.state] = counts.get(found.head.state, 0) + 1
        return counts

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        return self._run(self._work.boundaries, id, after, limit)

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        document = self._run(self._work.document, id)
        return None if document is None else document.checkpoint(seq)

    def messages(self, id: str) -> list[Message]:
        document = self._run(self._work.document, id)
        return [] if document is None else [message for message, _ in document.messages.values()]

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        document = self._run(self._work.document, id)
        return (0, {}) if document is None else (document.last_message, dict(document.keys))

    def pending(self, owner: str) -> list[str]:
        found = self._run(self._work.peeks, UNFINISHED)
        return [p.definition.id for p in found if p.head.owner == owner and p.waiting]

    def owners(self) -> list[Owner]:
        return self._run(self._work.owners)

    def next_due(self) -> float | None:
        found = self._run(self._work.peeks, CAN_BE_DUE)
        moments = [wake_at(p.head) for p in found if p.head.owner is None]
        return min((moment for moment in moments if moment is not None), default=None)

    def size(self, id: str) -> int:
        return self._run(self._work.size, id)

    # the watcher

    def wait(self, timeout: float) -> bool:
        """What this process did is known at once; what others did, by looking every `poll_interval` seconds."""
        deadline = self._clock.monotonic() + timeout
        while True:
            left = deadline - self._clock.monotonic()
            with self._changed:
                if self._changes == self._seen and left > 0:
                    self._changed.wait(min(left, self.poll_interval))
                if self._changes != self._seen:
                    self._seen = self._changes
                    return True
            if self._others_changed():
                return True
            if left <= 0:
                return False

    def _others_changed(self) -> bool:
        signs = frozenset(found.sign for found in self._run(self._work.peeks, UNFINISHED))
        changed = signs != self._signs
        self._signs = signs
        return changed

    def wake(self) -> None:
        self._ring()

    def _ring(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()


class TaskCheckpointStore(CheckpointStore):
    """A store on the application's task table. The adapter's coroutines run in the loop that opens the store first."""

    def __init__(
        self,
        adapter: TaskStoreAdapter,
        *,
        seal: Seal | None = None,
        clock: Clock = SYSTEM_CLOCK,
        poll_interval: float = 0.25,
        timeout: float = 30.0,
        concurrency: int | None = None,
    ) -> None:
        """`timeout` bounds each adapter call, `concurrency` how many run at a time (else the adapter's own
        `concurrency`, else 16); `poll_interval` is how often to look for what other processes did."""
        self._tasks = TaskBackend(
            adapter, clock=clock, poll_interval=poll_interval, timeout=timeout, concurrency=concurrency
        )
        super().__init__(self._tasks, seal=seal)

    async def open(self) -> Self:
        self._tasks.borrow_loop()
        return await super().open()


def _others_may_wait(write: Write) -> bool:
    """A plain checkpoint interests nobody else, and telling them would make each of them list the table."""
    if isinstance(write, Save):
        return write.head.owner is None or write.head.state.finished
    return isinstance(write, Create | Send)


def _check(adapter: object, poll_interval: float, timeout: float, concurrency: int) -> None:
    missing = [name for name in METHODS if not callable(getattr(adapter, name, None))]
    if missing:
        raise ConfigError("adapter", type(adapter).__name__, f"it has no {', '.join(missing)}")
    for name, value in (("poll_interval", poll_interval), ("timeout", timeout), ("concurrency", concurrency)):
        if not value > 0:
            raise ConfigError(name, value, "give a number above 0")
