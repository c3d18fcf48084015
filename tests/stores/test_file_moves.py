"""Moves, which most saves are: whatever way they take, they are judged and stored as saves."""

from __future__ import annotations

from longrun.errors import LeaseLostError, WriteOrderError
from longrun.stored import Write
from longrun.stores._file.contents import INLINE_LIMIT
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, move, owned, send, step
from tests.stores.file_tools import created, done, loaded


def test_a_move_is_a_save_to_every_batch(backend: FileBackend, other: FileBackend) -> None:
    """Kinds of writes are done one by one; a move beside saves of its execution stays in their order."""
    first, second = owned("a"), owned("b")
    created(backend, first, second)
    one = move("a", first.head)
    two = step("a", one.head)
    three = move("a", two.head)
    four = step("a", three.head)
    last = move("b", second.head)
    batch: list[Write] = [one, two, send("a"), three, send("b"), four, last]
    assert done(backend, *batch) == [None, None, 1, None, 1, None, None]
    for id, head in (("a", four.head), ("b", last.head)):
        assert loaded(other, id).head == head
        assert [row.seq for row in other.boundaries(id)] == list(range(1, head.seq + 1))


def test_a_move_out_of_its_turn_is_judged_as_a_save_is(backend: FileBackend, other: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    first = move("a", new.head)
    skipping = move("a", move("a", first.head).head)
    assert isinstance(backend.commit([skipping])[0], WriteOrderError)
    assert done(backend, first, first) == [None, None]
    assert done(backend, first) == [None]
    other.claim(claim("you", ids=("a",), dead=frozenset({"me"})))
    (answer,) = backend.commit([move("a", first.head)])
    assert isinstance(answer, LeaseLostError)
    assert loaded(other, "a").head.seq == first.head.seq


def test_a_state_that_is_too_long_for_a_line_takes_the_long_way(backend: FileBackend, other: FileBackend) -> None:
    new = owned("a")
    created(backend, new)
    done(backend, move("a", new.head, data=b"1" * (INLINE_LIMIT + 1)))
    assert loaded(other, "a").boundary.size == INLINE_LIMIT + 1
