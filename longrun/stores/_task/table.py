"""An adapter, asked with care: a time limit, errors wrapped at the edge, bytes checked, and every write one record.

Place in the life of an execution: checkpoint. Runs in the adapter's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import anyio

from longrun.clock import Clock
from longrun.errors import CorruptDataError, LongrunError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stores._task import lines
from longrun.stores._task.document import Document, Page, quarantine_id
from longrun.stores._task.records import INTERNAL, KIND, STATUSES, TaskRecord, check_adapter, takes
from longrun.stores.rows import clean

T = TypeVar("T")

LIST_ALL_EVERY = 60.0
"""Seconds after which a listing looks at every task again, whatever its status says."""


class TaskTable:
    """The application's table, through its adapter."""

    def __init__(self, adapter: Any, *, clock: Clock, timeout: float, concurrency: int) -> None:
        self.adapter = adapter
        self.fenced = callable(getattr(adapter, "replace_task", None))
        self.clock = clock
        self._timeout = timeout
        self._concurrency = concurrency
        self._narrows = takes(adapter.list_tasks, "status")
        self._deletes_exactly = takes(adapter.delete_task, "expected_revision")
        self._listed_all = float("-inf")

    async def check(self) -> None:
        async with self._edge("the check"):
            await check_adapter(self.adapter)

    async def get(self, id: str) -> TaskRecord | None:
        async with self._edge("get_task"):
            record: TaskRecord | None = await self.adapter.get_task(id)
        return None if record is None else _checked(record)

    async def put(self, record: TaskRecord, expected: int | None) -> bool:
        """Write one record, whole. False if another one than `expected` is there: only a fenced table can tell."""
        if not self.fenced:
            async with self._edge("save_task"):
                await self.adapter.save_task(record)
            return True
        async with self._edge("replace_task"):
            return bool(await self.adapter.replace_task(record, expected_revision=expected))

    async def delete(self, id: str, revision: int | None = None) -> None:
        async with self._edge("delete_task"):
            if self._deletes_exactly and revision is not None:
                await self.adapter.delete_task(id, expected_revision=revision)
            else:
                await self.adapter.delete_task(id)

    async def list(self, statuses: Collection[str] | None = None) -> list[TaskRecord]:
        """Records with one of these statuses, and perhaps others too.

        A status is only a hint, which an application may have changed: now and then every task is looked at."""
        now = self.clock.monotonic()
        if statuses is None or not self._narrows or now - self._listed_all >= LIST_ALL_EVERY:
            self._listed_all = now
            async with self._edge("list_tasks"):
                return [_checked(record) for record in await self.adapter.list_tasks()]
        found: dict[str, TaskRecord] = {}
        for status in sorted(statuses):
            async with self._edge("list_tasks"):
                records = await self.adapter.list_tasks(status=status)
            for record in records:
                if record.id not in found or record.revision > found[record.id].revision:
                    found[record.id] = _checked(record)
        return list(found.values())

    async def quarantine(self, id: str, data: bytes, *, readable: bool) -> None:
        """Keep damaged bytes. If nothing in them can be used, the application's screens should show that."""
        metadata = {"longrun": "damaged", "revision": "1", "of": id}
        copy = TaskRecord(quarantine_id(id, data), INTERNAL, 0.0, data, metadata)
        await self.put(copy, None)  # one that is there already holds the same bytes
        if not readable:
            async with self._edge("update_status"):
                await self.adapter.update_status(id, STATUSES[ExecutionState.BLOCKED])

    async def put_page(self, id: str, page: Page) -> None:
        metadata = {"longrun": "history", "revision": "1", "of": id}
        await self.put(TaskRecord(page.id, INTERNAL, 0.0, lines.document(id, page.lines), metadata), None)

    async def each(self, items: Collection[T], function: Callable[[T], Awaitable[None]]) -> None:
        """Call the function for every item, several at a time; after a failure no new call begins."""
        left = iter(items)
        errors: list[LongrunError] = []

        async def work() -> None:
            for item in left:
                try:
                    await function(item)
                except LongrunError as error:
                    errors.append(error)
                if errors:
                    return

        async with anyio.create_task_group() as group:
            for number in range(min(self._concurrency, len(items))):
                group.start_soon(work, name=f"longrun task table {number}")
        if errors:
            raise errors[0]

    @asynccontextmanager
    async def _edge(self, call: str) -> AsyncIterator[None]:
        try:
            with anyio.fail_after(self._timeout):
                yield
        except LongrunError:
            raise
        except TimeoutError as error:
            raise StoreUnavailableError(KIND, f"{call} took longer than {self._timeout:g} s") from error
        except Exception as error:
            raise StoreUnavailableError(KIND, f"{call} of the adapter raised {type(error).__name__}") from error


def _checked(record: TaskRecord) -> TaskRecord:
    data: object = record.data
    if not isinstance(data, bytes):
        problem = f"the adapter gave its data as {type(data).__name__}: bytes must stay bytes"
        raise CorruptDataError(f"task {record.id!r}", problem)
    return record


def execution_record(document: Document, revision: int) -> TaskRecord:
    """The one record that an execution is."""
    definition, head = document.definition, document.head
    metadata = {
        "longrun": "execution",
        "revision": str(revision),
        "workflow": definition.workflow,
        "version": definition.version,
        "queue": definition.queue,
        "state": head.state.value,
        "step": str(head.step),
        "steps": str(definition.total),
        "checkpoints": str(head.seq),
        "created": _moment(definition.created),
        "updated": _moment(head.updated),
        "fence": str(head.fence),
        "saves": str(head.revision),
    }
    if head.owner is not None:
        metadata["owner"] = head.owner
    if definition.parent_id is not None:
        metadata["parent"] = definition.parent_id
    texts = {key: clean(value) or "" for key, value in metadata.items()}
    progress = min(1.0, max(0.0, float(head.progress)))
    return TaskRecord(document.id, STATUSES[head.state], progress, document.encode(), texts)


def tombstone(document: Document, revision: int) -> TaskRecord:
    """What stands in the place of an execution while it is being deleted: only which pages have to go too."""
    metadata = {"longrun": "deleted", "revision": str(revision)}
    return TaskRecord(document.id, INTERNAL, 0.0, lines.document(document.id, [document.history_line()]), metadata)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
