"""Executions in an application's own task table: with `replace_task`, shared and fenced; without, one user at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.stores.store import CheckpointStore
from longrun.stores.task import TaskCheckpointStore, TaskRecord
from longrun.testing import StoreConformance


class SixMethods:
    """The least that an application has to write. Its rows are text where text is, and bytes where bytes are."""

    def __init__(self) -> None:
        self.rows: dict[str, TaskRecord] = {}
        self.calls: list[str] = []

    async def save_task(self, record: TaskRecord) -> None:
        self.calls.append("save_task")
        self.rows[record.id] = record

    async def get_task(self, task_id: str) -> TaskRecord | None:
        self.calls.append("get_task")
        return self.rows.get(task_id)

    async def list_tasks(self) -> list[TaskRecord]:
        self.calls.append("list_tasks")
        return list(self.rows.values())

    async def delete_task(self, task_id: str) -> None:
        self.calls.append("delete_task")
        self.rows.pop(task_id, None)

    async def update_progress(self, task_id: str, progress: float) -> None:
        self.calls.append("update_progress")
        self.rows[task_id] = attrs.evolve(self.rows[task_id], progress=progress)

    async def update_status(self, task_id: str, status: str) -> None:
        self.calls.append("update_status")
        self.rows[task_id] = attrs.evolve(self.rows[task_id], status=status)


class SevenMethods(SixMethods):
    """With the seventh, and with `list_tasks` by status."""

    async def replace_task(self, record: TaskRecord, *, expected_revision: int | None) -> bool:
        self.calls.append("replace_task")
        stored = self.rows.get(record.id)
        if (None if stored is None else stored.revision) != expected_revision:
            return False
        self.rows[record.id] = record
        return True

    async def list_tasks(self, *, status: str | None = None) -> list[TaskRecord]:
        self.calls.append("list_tasks")
        return [record for record in self.rows.values() if status in (None, record.status)]


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "run"))
    yield


class TestFencedTaskStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.adapter = SevenMethods()

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(self.adapter)


class TestTaskStoreOfSixMethods(StoreConformance):
    fenced = False
    shared = False

    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.adapter = SixMethods()

    def make_store(self) -> CheckpointStore:
        return TaskCheckpointStore(self.adapter)
