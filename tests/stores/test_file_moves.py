"""Moves, which most saves are: whatever way they take, they are judged and stored as saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.errors import LeaseLostError, WriteOrderError
from longrun.stored import Write, moving
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, owned, send, step
from tests.stores.file_tools import created, done, loaded, opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


def test_a_move_is_a_save_to_every_batch(backend: FileBackend, other: FileBackend) -> None:
    """Kinds of writes are done one by one; a move beside saves of its execution stays in their order."""
    first, second = owned("a"), owned("b")
    created(backend, first, second)
    saves = [step("a", first.head)]
    for _ in range(3):
        saves.append(step("a", saves[-1].head))
    moves = [moving(one.id, one.head, one.boundaries[0], None) for one in saves]
    last = step("b", second.head)
    other_move = moving("b", last.head, last.boundaries[0], None)
    batch: list[Write] = [moves[0], saves[1], send("a"), moves[2], send("b"), saves[3], other_move]
    assert done(backend, *batch) == [None, None, 1, None, 1, None, None]
    for id, head in (("a", saves[3].head), ("b", last.head)):
        assert loaded(other, id).head == head
        assert [row.seq for row in other.boundaries(id)] == list(range(1, head.seq + 1))


def test_a_move_out_of_its_turn_is_judged_as_a_save_is(backend: FileBackend, other: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    save = step("a", new.head)
    late = step("a", step("a", save.head).head)
    move, skipping = (moving("a", one.head, one.boundaries[0], None) for one in (save, late))
    assert isinstance(backend.commit([skipping])[0], WriteOrderError)
    assert done(backend, move, move) == [None, None]
    assert done(backend, move) == [None]
    other.claim(claim("you", ids=("a",), dead=frozenset({"me"})))
    after = step("a", save.head)
    (answer,) = backend.commit([moving("a", after.head, after.boundaries[0], None)])
    assert isinstance(answer, LeaseLostError)
    assert loaded(other, "a").head.seq == save.head.seq
