"""What an application's task table is to longrun: one record, six methods, and an optional seventh.

Place in the life of an execution: checkpoint. `task.py` keeps executions through these; an application implements them.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
from attrs import field, frozen

from longrun.errors import StoreSettingsError
from longrun.records import ExecutionState

KIND = "task"

STATUSES: Mapping[ExecutionState, str] = {
    ExecutionState.INITIALIZED: "pending",
    ExecutionState.RUNNING: "running",
    ExecutionState.RESUMING: "running",
    ExecutionState.PAUSED: "paused",
    ExecutionState.WAITING: "waiting",
    ExecutionState.BLOCKED: "blocked",
    ExecutionState.COMPLETED: "completed",
    ExecutionState.FAILED: "failed",
    ExecutionState.CANCELLED: "cancelled",
}
"""The `status` of a task, by the state of its execution. It is for people; what counts stands in `data`."""

INTERNAL = "longrun"
"""The `status` of records that are no executions. Their ids begin with `~`, as no execution's id can."""


@frozen
class TaskRecord:
    """One row of the application's task table. An execution is exactly one of these; each save replaces it whole."""

    id: str
    status: str
    """One of `STATUSES`, or `INTERNAL`."""
    progress: float
    """0.0 to 1.0."""
    data: bytes = field(repr=False)
    """Everything that is stored of the execution. These very bytes must come back: not as text, not as base64."""
    metadata: Mapping[str, str] = field(factory=dict)
    """Texts for the application's own screens: workflow, state, queue, owner … and `revision`."""

    @property
    def revision(self) -> int:
        """How often the record was written, from its metadata; what `replace_task` compares."""
        return int(self.metadata.get("revision", "0"))


@runtime_checkable
class TaskStoreAdapter(Protocol):
    """The application's task table. All methods run in the event loop in which the store was opened.

    When `save_task` or `replace_task` returns, the record is durable, whole or not at all. Any exception of an adapter
    means that the store does not answer; the call is then taken as unknown and compared before it is repeated.

    An adapter that can should also have the seventh method, `FencedTaskStoreAdapter.replace_task`.
    """

    async def save_task(self, record: TaskRecord) -> None:
        """Store the record under its id; replace the one that is there."""

    async def get_task(self, task_id: str) -> TaskRecord | None:
        """The record, or None."""

    async def list_tasks(self, *, status: str | None = None) -> list[TaskRecord]:
        """Every record, or those with that status, in any order. Tasks that are not longrun's may be among them."""

    async def delete_task(self, task_id: str) -> Any:
        """Remove the record; nothing happens if there is none. With an `expected_revision` keyword, see below."""

    async def update_progress(self, task_id: str, progress: float) -> None:
        """Set the progress alone. For the application: longrun never calls it, since each save carries the progress."""

    async def update_status(self, task_id: str, status: str) -> None:
        """Set the status alone. Called only for a record whose data cannot be read, which then stay untouched."""


class FencedTaskStoreAdapter(TaskStoreAdapter, Protocol):
    """With the seventh method, several processes can share the table, and a stale owner is refused (I3)."""

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        """Store the record if the stored one has `expected_revision`, or if there is none and that is None.

        Compare and write in one atomic act; False, and nothing changed, if it does not fit. The new revision is
        `record.revision`."""

    async def delete_task(self, task_id: str, *, expected_revision: int | None = None) -> Any:
        """With `expected_revision`: remove only that one. An adapter that has no such keyword works too, except that
        an id must not be created anew by one process while another one is still deleting it."""


def takes(method: Any, keyword: str) -> bool:
    """Whether an adapter's method has this optional keyword."""
    return keyword in inspect.signature(method).parameters


async def check_adapter(adapter: Any) -> None:
    """Write, replace, list and remove a small record; raise `StoreSettingsError` if it does not come back as it was.

    An adapter that turns bytes into text, or keeps two records for one id, would otherwise be found out by the first
    crash. It runs whenever a store is opened.
    """
    id = f"~probe~{secrets.token_hex(8)}"
    first = TaskRecord(id, INTERNAL, 0.0, bytes(range(256)), {"longrun": "probe", "revision": "1"})
    second = attrs.evolve(first, progress=0.5, data=b"\xff\x00second", metadata={"longrun": "probe", "revision": "2"})
    try:
        await adapter.save_task(first)
        _same(await adapter.get_task(id), first, "get_task after save_task")
        if hasattr(adapter, "replace_task"):
            await _check_replace(adapter, first, second)
        else:
            await adapter.save_task(second)
        _same(await adapter.get_task(id), second, "get_task after a second save")
        listed = adapter.list_tasks(status=INTERNAL) if takes(adapter.list_tasks, "status") else adapter.list_tasks()
        found = [record for record in await listed if record.id == id]
        if len(found) != 1:
            raise StoreSettingsError(KIND, f"list_tasks shows {len(found)} records for one id that was saved twice")
        _same(found[0], second, "list_tasks")
    finally:
        await adapter.delete_task(id)
    if await adapter.get_task(id) is not None:
        raise StoreSettingsError(KIND, "get_task still finds a record after delete_task")


async def _check_replace(adapter: Any, first: TaskRecord, second: TaskRecord) -> None:
    for wrong in (None, 0, 7):
        if await adapter.replace_task(second, expected_revision=wrong):
            raise StoreSettingsError(KIND, f"replace_task took a record with revision 1 for revision {wrong}")
    _same(await adapter.get_task(first.id), first, "get_task after a refused replace_task")
    if not await adapter.replace_task(second, expected_revision=1):
        raise StoreSettingsError(KIND, "replace_task refused the right revision; it is record.metadata['revision']")


def _same(found: Any, given: TaskRecord, where: str) -> None:
    if found is None:
        raise StoreSettingsError(KIND, f"{where} finds nothing")
    if not isinstance(found.data, bytes):
        raise StoreSettingsError(
            KIND, f"{where} gives `data` back as {type(found.data).__name__}: bytes must stay bytes"
        )
    for name in ("id", "status", "progress", "data"):
        if getattr(found, name) != getattr(given, name):
            raise StoreSettingsError(KIND, f"{where} gives `{name}` back changed")
    if dict(found.metadata) != dict(given.metadata):
        raise StoreSettingsError(KIND, f"{where} gives `metadata` back changed")
