"""The contract of `commit` for `Move` and `End`: the saves of which there are most, and which a store may make shorter.

Place in the life of an execution: checkpoint, finish.
"""

from __future__ import annotations

import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError, WriteOrderError
from longrun.moves import End, Move
from longrun.stored import Head, Loaded, Save
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import ConformanceBase, created, done, head_of, loaded, refused
from longrun.testing.samples import EVERY_STATE, change, claim, end, move, owned, send, step


def as_save(move: Move) -> Save:
    """The save that a move is."""
    return Save(id=move.id, head=_plain(move.head), boundaries=move.boundaries, keep_from=move.keep_from)


def _plain(head: Head) -> Head:
    return Head(**{field.name: getattr(head, field.name) for field in attrs.fields(Head)})


def started(backend: StoreBackend, *ids: str) -> list[Head]:
    """Executions that "me" owns with fence 1."""
    new = [owned(id) for id in ids or ("a",)]
    created(backend, *new)
    return [one.head for one in new]


class MoveContract(ConformanceBase):
    def test_a_move_is_stored_as_the_save_that_it_is(self, backend: StoreBackend) -> None:
        """I1, I7: every field of head and boundaries, whichever of the two was written."""
        a, b = started(backend, "a", "b")
        moves = [move("a", a)]
        for seq in (3, 4):
            moves.append(move("a", moves[-1].head, keep_from=seq - 1))
        moves.append(end("a", moves[-1].head))
        for one in moves:
            done(backend, one, as_save(one)) if one is moves[0] else done(backend, one)
            done(backend, attrs.evolve(as_save(one), id="b", head=_plain(one.head)))
            assert _told(loaded(backend, "a")) == _told(loaded(backend, "b"))
            assert head_of(backend, "a") == one.head
            assert loaded(backend, "a").boundary == one.boundary
        assert backend.boundaries("a") == backend.boundaries("b")
        assert [seq for seq, _ in loaded(backend, "a").kept] == [3, 4, 5]
        assert b.seq == 1

    def test_moves_of_many_are_one_batch(self, backend: StoreBackend) -> None:
        heads = started(backend, *(f"x{n}" for n in range(40)))
        moves = [move(f"x{n}", head) for n, head in enumerate(heads)]
        assert done(backend, *moves) == [None] * 40
        assert [head_of(backend, one.id) for one in moves] == [one.head for one in moves]

    def test_the_writes_of_one_execution_keep_their_order(self, backend: StoreBackend) -> None:
        """Moves, saves, messages and the end, all in one batch."""
        (first,) = started(backend)
        one = move("a", first)
        two = step("a", one.head, put={"e": b"1"})
        three = step("a", two.head, clear=True)
        four = move("a", three.head)
        assert done(backend, one, send("a"), two, three, four) == [None, 1, None, None, None]
        found = loaded(backend, "a")
        assert (found.head, found.entries, len(found.messages)) == (four.head, {}, 1)
        assert [row.seq for row in backend.boundaries("a")] == [1, 2, 3, 4, 5]
        last = end("a", four.head)
        assert done(backend, last) == [None]
        assert head_of(backend, "a") == last.head
        assert backend.claim(claim("other", states=EVERY_STATE)) == []

    def test_a_bad_move_fails_alone(self, backend: StoreBackend) -> None:
        """I3: what is not there, an older claim, a write that is missing; the others are made."""
        a, b, c = started(backend, "a", "b", "c")
        late = move("c", attrs.evolve(c, revision=5))
        answers = backend.commit([move("a", a), move("none", a), move("b", attrs.evolve(b, fence=7)), late])
        kinds = [None if answer is None else type(answer) for answer in answers]
        assert kinds == [None, ExecutionNotFoundError, LeaseLostError, WriteOrderError]
        assert [head_of(backend, id).seq for id in "abc"] == [2, 1, 1]
        assert [[row.seq for row in backend.boundaries(id)] for id in "abc"] == [[1, 2], [1], [1]]

    @pytest.mark.parametrize("kind", [move, end])
    def test_one_whose_answer_was_lost_is_done_already(self, backend: StoreBackend, kind: type) -> None:
        """I9."""
        (first,) = started(backend)
        save = kind("a", first)
        done(backend, save)
        before = loaded(backend, "a")
        assert done(backend, save, as_save(save), save) == [None, None, None]
        assert loaded(backend, "a") == before
        assert [row.seq for row in backend.boundaries("a")] == [1, 2]

    def test_who_was_taken_over_moves_nothing(self, backend: StoreBackend) -> None:
        """I3."""
        (first,) = started(backend)
        done(backend, move("a", first))
        (taken,) = backend.claim(claim("new", dead=frozenset({"me"})))
        stale = move("a", move("a", first).head)
        refused(backend, stale, LeaseLostError)
        refused(backend, end("a", move("a", first).head), LeaseLostError)
        going_on = move("a", taken.head)
        assert done(backend, going_on) == [None]
        assert head_of(backend, "a") == going_on.head

    def test_a_move_makes_an_execution_run_that_was_not(self, backend: StoreBackend) -> None:
        """What its head says counts, whatever was stored before."""
        (first,) = started(backend)
        shown = change("a", first, head_fields={"note": "half", "done": 1.0, "of": 2.0, "crashes": 2, "progress": 0.1})
        on = move("a", shown.head)
        done(backend, shown, on)
        assert head_of(backend, "a") == on.head

    def test_the_last_one_leaves_nobody_as_its_owner(self, backend: StoreBackend) -> None:
        (first,) = started(backend)
        noted = change("a", first, put={"e": b"1"})
        last: End = end("a", noted.head)
        done(backend, noted, last)
        found = loaded(backend, "a")
        assert (found.head, found.entries) == (last.head, {})
        assert found.head.owner is None
        assert backend.delete(["a"]) == [True]


def _told(found: Loaded) -> tuple[object, ...]:
    return found.head, found.boundary, found.blobs, found.entries, found.messages, found.kept
