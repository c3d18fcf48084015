"""Finished executions beside the others: whoever asks for something else does not pay for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrun.records import ExecutionState
from longrun.stored import QUEUE_WORKFLOW, Query
from longrun.stores._file import done as index
from longrun.stores.file import FileBackend
from longrun.testing.samples import create, owned
from tests.stores.file_tools import created, opened

COMPLETED, BLOCKED = ExecutionState.COMPLETED, ExecutionState.BLOCKED
INTERRUPTED = frozenset({ExecutionState.RUNNING, ExecutionState.RESUMING, ExecutionState.PAUSED, BLOCKED})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with finished executions, all moved away."""
    path = tmp_path / "store"
    with opened(FileBackend(path)) as backend:
        created(backend, *[create(f"x{n}", COMPLETED) for n in range(5)])
    assert len(list((path / "done").iterdir())) == 5
    return path


def found(backend: FileBackend, **fields: Any) -> list[str]:
    query = Query(**fields)
    ids = [one.definition.id for one in backend.find(query)]
    assert sum(backend.count(query).values()) == len(ids)
    return ids


@pytest.mark.parametrize(
    "query",
    [
        {"states": INTERRUPTED},
        {"workflows": frozenset({QUEUE_WORKFLOW})},
        {"workflows": frozenset({QUEUE_WORKFLOW, "other"}), "states": frozenset({COMPLETED})},
        {"owner": "me"},
        {"owned": True},
    ],
)
def test_the_index_is_not_taken_in_for_what_it_cannot_hold(
    path: Path, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    def never(line: bytes) -> None:
        raise AssertionError(f"parsed: {line!r}")

    monkeypatch.setattr(index, "unpack_any", never)
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, **query) == []
        created(backend, owned("here", workflow=QUEUE_WORKFLOW, state=ExecutionState.PAUSED))
        assert found(backend, **query) == (["here"] if COMPLETED not in query.get("states", ()) else [])


def test_what_others_finish_is_found_from_then_on(path: Path) -> None:
    late = frozenset({"late"})
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, workflows=late) == []
        with opened(FileBackend(path)) as other:
            created(other, create("y", COMPLETED, workflow="late"))
        assert not list((path / "live").iterdir())
        assert found(backend, workflows=late) == ["y"]
        assert found(backend, workflows=late, states=frozenset({BLOCKED})) == []
        assert backend.delete(["y"]) == [True]
        assert found(backend, workflows=late) == []


def test_a_name_that_json_spells_otherwise_is_found(path: Path) -> None:
    with opened(FileBackend(path)) as other:
        created(other, create("y", COMPLETED, workflow='déjà "vu"\n'))
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, workflows=frozenset({'déjà "vu"\n'})) == ["y"]


def test_what_is_damaged_in_both_places_is_listed_as_blocked(path: Path) -> None:
    """I5: an index with a damaged line says nothing of what it does not hold."""
    (path / "done" / "x3.jsonl").write_bytes(b"")
    lines = (path / "finished.jsonl").read_bytes()
    (path / "finished.jsonl").write_bytes(lines.replace(b'"id":"x3"', b'"id":"x9"'))
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, states=frozenset({BLOCKED})) == ["x3"]
        assert sorted(found(backend)) == [f"x{n}" for n in range(5)]
