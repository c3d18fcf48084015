"""The contract of `commit` for `Create` and `Save`.

Place in the life of an execution: start, checkpoint, finish.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError, WriteOrderError
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Loaded, Query, Save
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import ConformanceBase, created, done, head_of, loaded, refused
from longrun.testing.samples import EVERY_STATE, NOW, boundary, change, claim, create, owned, send, signal, step

RUNNING = ExecutionState.RUNNING


class CreateContract(ConformanceBase):
    def test_a_created_execution_is_loaded_as_it_was_given(self, backend: StoreBackend) -> None:
        """I1: every field of definition, head, boundary and blobs comes back equal."""
        new = create(
            "a",
            ExecutionState.WAITING,
            head_fields={
                "fence": 3, "revision": 7, "owner": "me", "seq": 1, "step": 2, "visit": 4, "iteration": 5, "attempt": 6,
                "started": NOW - 0.125, "updated": NOW + 0.0000012, "ended": NOW + 3, "due": NOW + 1e9, "signal": "go",
                "woken": True, "hold": True, "crashes": 2, "error": "broke", "reason": "why", "progress": 0.1 + 0.2,
                "done": 3.5, "of": 7, "note": "half way",
            },
            blobs={"b1": b"one", "b2": b"two"},
            version="2", queue="q", priority=-5, metadata={"n": 1, "deep": {"list": [1, None, "x", 2.5, True]}},
            parent_id="p", created=NOW + 1e-6,
        )  # fmt: skip
        created(backend, new)
        found = loaded(backend, "a")
        assert found.definition == new.definition
        assert found.head == new.head
        assert found.boundary == new.boundary
        assert found.blobs == new.blobs
        assert found.kept == ((1, ("b1", "b2")),)
        assert (found.entries, found.messages) == ({}, ())

    @pytest.mark.parametrize("state", list(ExecutionState))
    def test_every_state_can_be_stored(self, backend: StoreBackend, state: ExecutionState) -> None:
        created(backend, create("a", state))
        assert head_of(backend, "a").state is state

    def test_a_taken_id_answers_false_and_changes_nothing(self, backend: StoreBackend) -> None:
        first = create("a", blobs={"b": b"first"})
        created(backend, first)
        again = create("a", ExecutionState.PAUSED, data=b"second", blobs={"b": b"second", "c": b""}, workflow="other")
        assert backend.commit([again]) == [False]
        found = loaded(backend, "a")
        assert (found.definition, found.head, found.boundary) == (first.definition, first.head, first.boundary)
        assert found.blobs == {"b": b"first"}
        assert [one.definition.workflow for one in backend.find(Query())] == ["flow"]

    @pytest.mark.parametrize("new", [create, owned])
    def test_an_id_twice_is_created_once(self, backend: StoreBackend, new: Callable[..., Create]) -> None:
        """In one batch or two: what is there stays as it is."""
        assert backend.commit([new("a", data=b"x"), new("b"), new("a", data=b"y")]) == [True, True, False]
        assert backend.commit([new("a", data=b"z"), new("c")]) == [False, True]
        assert loaded(backend, "a").boundary.data == b"x"

    def test_an_empty_batch_is_answered_with_nothing(self, backend: StoreBackend) -> None:
        assert backend.commit([]) == []

    def test_unknown_executions_are_not_there(self, backend: StoreBackend) -> None:
        assert backend.load("a") is None
        assert backend.checkpoint("a", 1) is None
        assert (backend.boundaries("a"), backend.messages("a"), backend.size("a")) == ([], [], 0)
        assert (backend.find(Query()), backend.count(Query()), backend.pending("me")) == ([], {}, [])
        assert (backend.owners(), backend.next_due(), backend.claim(claim())) == ([], None, [])


class SaveContract(ConformanceBase):
    def start(self, backend: StoreBackend, id: str = "a") -> Head:
        """An execution that "me" owns with fence 1."""
        new = owned(id)
        created(backend, new)
        return new.head

    def test_a_save_replaces_the_head_and_appends_its_boundary(self, backend: StoreBackend) -> None:
        """I1, I7."""
        first = self.start(backend)
        save = step("a", first, blobs={"b": b"blob"}, boundaries=(boundary(2, blobs=("b",)),), put={"e": b"1"})
        assert done(backend, save) == [None]
        found = loaded(backend, "a")
        assert found.head == save.head
        assert found.boundary == save.boundaries[0]
        assert (found.blobs, found.entries) == ({"b": b"blob"}, {"e": b"1"})
        assert found.kept == ((1, ()), (2, ("b",)))
        assert [one.seq for one in backend.boundaries("a")] == [1, 2]

    def test_every_field_of_a_boundary_is_kept(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        full = boundary(
            2, kind="repeat", step=7, name="näme", started=NOW + 0.1, ended=NOW + 0.7, attempts=3, error="oh",
            next=8, visit=9, iteration=4, data=b"\x00\x01", size=12345,
        )  # fmt: skip
        done(backend, step("a", first, boundaries=(full,)))
        assert loaded(backend, "a").boundary == full
        assert backend.checkpoint("a", 2) == (full, {})

    def test_every_field_of_the_head_is_replaced(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        there = change("a", first, head_fields={
            "step": 2, "visit": 3, "iteration": 4, "attempt": 5, "started": NOW + 1, "due": NOW + 2, "signal": "s",
            "hold": True, "crashes": 1, "error": "e", "reason": "r", "progress": 0.5, "done": 5, "of": 9.0, "note": "n",
        })  # fmt: skip
        done(backend, there)
        assert head_of(backend, "a") == there.head
        back = Save(id="a", head=attrs.evolve(first, revision=2))
        done(backend, back)
        assert head_of(backend, "a") == back.head

    def test_a_save_of_nothing_but_a_head_keeps_the_rest(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        second = step("a", first, put={"e": b"1"})
        done(backend, second, change("a", second.head, head_fields={"note": "working"}))
        found = loaded(backend, "a")
        assert (found.head.note, found.head.revision) == ("working", 2)
        assert (found.boundary.seq, found.entries) == (2, {"e": b"1"})

    def test_steps_can_be_set_by_a_save(self, backend: StoreBackend) -> None:
        """Who first runs what was submitted by name alone stores them; nothing else of the definition changes."""
        new = owned("a", steps=(), total=0, metadata={"k": "v"})
        first = step("a", new.head, steps=("one", "it's two"))
        done(backend, new, first, step("a", first.head))
        right = attrs.evolve(new.definition, steps=("one", "it's two"), total=2)
        assert loaded(backend, "a").definition == right
        assert backend.find(Query())[0].definition == attrs.evolve(right, steps=())
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        assert given.definition == right

    @pytest.mark.parametrize("version", ["2", "it's ü", ""])
    def test_a_version_can_be_set_with_the_steps(self, backend: StoreBackend, version: str) -> None:
        """Whoever submits by name does not know it. It stays, whoever writes next, and once the execution is over."""
        new, other = owned("a", steps=(), total=0), owned("b", steps=(), total=0)
        created(backend, new, other)
        first = step("a", new.head, steps=("one", "two"), version=version)
        done(backend, first, step("a", first.head))
        right = attrs.evolve(new.definition, steps=("one", "two"), total=2, version=version)
        shown = {"a": attrs.evolve(right, steps=()), "b": other.definition}
        assert loaded(backend, "a").definition == right
        assert {one.definition.id: one.definition for one in backend.find(Query())} == shown
        (given,) = backend.claim(claim("new", ids=("a",), dead=frozenset({"me"})))
        assert given.definition == right
        end = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
        done(backend, change("a", given.head, head_fields=end))
        assert loaded(backend, "a").definition == right
        assert {one.definition.id: one.definition for one in backend.find(Query())} == shown

    def test_a_refused_save_sets_no_steps(self, backend: StoreBackend) -> None:
        """I3."""
        new = owned("a")
        created(backend, new)
        refused(backend, change("a", attrs.evolve(new.head, fence=5), steps=("x",), version="x"), LeaseLostError)
        assert loaded(backend, "a").definition == new.definition

    def test_several_boundaries_are_saved_at_once(self, backend: StoreBackend) -> None:
        """Coalesced boundaries: every row is kept (I7), and the newest with a state is the one to go on from."""
        first = self.start(backend)
        rows = (boundary(2, data=None), boundary(3), boundary(4, data=None))
        done(backend, change("a", first, head_fields={"seq": 4}, boundaries=rows))
        found = loaded(backend, "a")
        assert (found.boundary, found.head.seq) == (rows[1], 4)
        assert [seq for seq, _ in found.kept] == [1, 3]
        assert [one.seq for one in backend.boundaries("a")] == [1, 2, 3, 4]

    def test_no_such_execution(self, backend: StoreBackend) -> None:
        save = step("a", owned("a").head)
        error = refused(backend, save, ExecutionNotFoundError)
        assert error.execution_id == "a"
        assert backend.load("a") is None
        assert backend.boundaries("a") == []

    @pytest.mark.parametrize("fence", [0, 1, 3])
    def test_another_fence_is_refused(self, backend: StoreBackend, fence: int) -> None:
        """I3: neither an older claim nor one that was never given may write."""
        new = create("a", head_fields={"owner": "me", "fence": 2})
        created(backend, new)
        before = loaded(backend, "a")
        error = refused(backend, step("a", attrs.evolve(new.head, fence=fence), put={"e": b""}), LeaseLostError)
        assert (error.execution_id, error.fence) == ("a", fence)
        assert loaded(backend, "a") == before

    def test_a_repeated_save_is_done_already(self, backend: StoreBackend) -> None:
        """I9: a write whose answer was lost is repeated, and changes nothing."""
        first = self.start(backend)
        second = step("a", first, put={"e": b"1"}, blobs={"b": b"1"})
        third = step("a", second.head, put={"e": b"2"})
        done(backend, second)
        assert done(backend, second, second) == [None, None]
        done(backend, third)
        before = loaded(backend, "a")
        assert done(backend, second, third) == [None, None]
        assert loaded(backend, "a") == before
        assert [one.seq for one in backend.boundaries("a")] == [1, 2, 3]

    def test_a_save_behind_a_missing_one_is_refused(self, backend: StoreBackend) -> None:
        """I9: it may be tried again once the write before it is there."""
        first = self.start(backend)
        second = step("a", first)
        third = step("a", second.head)
        before = loaded(backend, "a")
        error = refused(backend, third, WriteOrderError)
        assert (error.execution_id, error.stored, error.given) == ("a", 0, 2)
        assert loaded(backend, "a") == before
        assert done(backend, second, third) == [None, None]

    def test_the_fence_is_compared_before_the_revision(self, backend: StoreBackend) -> None:
        """I3, I9: a repetition by a stale owner is refused, though the very write is there."""
        first = self.start(backend)
        second = step("a", first)
        done(backend, second)
        backend.claim(claim("new", dead=frozenset({"me"})))
        refused(backend, second, LeaseLostError)
        refused(backend, step("a", second.head), LeaseLostError)
        refused(backend, change("a", attrs.evolve(second.head, revision=5)), LeaseLostError)

    def test_writes_of_a_batch_are_applied_in_order(self, backend: StoreBackend) -> None:
        new = owned("a")
        second = step("a", new.head, put={"e": b"2"})
        third = step("a", second.head, put={"e": b"3"})
        fourth = step("a", third.head, put={"f": b"4"}, take=(1,))
        assert done(backend, new, second, send("a"), third, fourth, send("a")) == [True, None, 1, None, None, 2]
        found = loaded(backend, "a")
        assert (found.head, found.boundary.seq) == (fourth.head, 4)
        assert found.entries == {"e": b"3", "f": b"4"}
        assert [message.id for message in found.messages] == [2]

    def test_one_refused_write_leaves_the_others_untouched(self, backend: StoreBackend) -> None:
        a, b, c = (self.start(backend, id) for id in "abc")
        stale = step("b", attrs.evolve(b, fence=9), put={"x": b""})
        early = change("c", attrs.evolve(c, revision=1))
        good = step("c", c)
        answers = backend.commit(
            [step("a", a), stale, early, good, step("no", a), send("no"), create("a"), create("d"), send("b")]
        )
        kinds = [type(answer) for answer in answers]
        assert kinds[1:3] == [LeaseLostError, WriteOrderError]
        assert kinds[4:6] == [ExecutionNotFoundError, ExecutionNotFoundError]
        assert (answers[0], answers[3], answers[6:]) == (None, None, [False, True, 1])
        assert head_of(backend, "a").seq == 2
        assert (head_of(backend, "b"), loaded(backend, "b").entries) == (b, {})
        assert head_of(backend, "c") == good.head
        assert loaded(backend, "d").boundary.data == b"state 1"

    def test_a_refused_write_holds_back_those_that_build_on_it(self, backend: StoreBackend) -> None:
        """I9: no write of the owner is applied over a gap."""
        new = owned("a")
        created(backend, new)
        second = step("a", new.head)
        third = step("a", second.head)
        answers = backend.commit([third, second, third])
        assert isinstance(answers[0], WriteOrderError)
        assert answers[1:] == [None, None]
        assert [one.seq for one in backend.boundaries("a")] == [1, 2, 3]

    def test_a_large_batch(self, backend: StoreBackend) -> None:
        """Thousands of executions in one commit, each with its own answer."""
        count = 1500
        news = [owned(f"x{n}") for n in range(count)]
        created(backend, *news)
        saves = [step(new.id, attrs.evolve(new.head, fence=1 + (n % 10 == 0))) for n, new in enumerate(news)]
        for n, answer in enumerate(backend.commit(saves)):
            assert (answer is None) == (n % 10 != 0)
        assert head_of(backend, "x1").seq == 2
        assert head_of(backend, "x10").seq == 1
        assert backend.count(Query()) == {RUNNING: count}


class EntryContract(ConformanceBase):
    def test_entries_are_cleared_then_dropped_then_put(self, backend: StoreBackend) -> None:
        new = owned("a")
        one = change("a", new.head, put={"a": b"1", "b": b"1", "c": b"1"})
        two = change("a", one.head, drop=("a", "b", "never"), put={"b": b"2", "d": b"2"})
        done(backend, new, one, two)
        assert loaded(backend, "a").entries == {"b": b"2", "c": b"1", "d": b"2"}
        three = change("a", two.head, clear=True, drop=("b",), put={"b": b"3", "e": b"3"})
        done(backend, three)
        assert loaded(backend, "a").entries == {"b": b"3", "e": b"3"}
        done(backend, change("a", three.head, clear=True))
        assert loaded(backend, "a").entries == {}

    def test_entries_belong_to_one_execution(self, backend: StoreBackend) -> None:
        a, b = owned("a"), owned("b")
        done(backend, a, b, change("a", a.head, put={"k": b"a"}), change("b", b.head, put={"k": b"b"}))
        second = head_of(backend, "a")
        done(backend, change("a", second, clear=True))
        assert loaded(backend, "b").entries == {"k": b"b"}

    def finish(self, backend: StoreBackend, state: ExecutionState) -> Loaded:
        """An execution with entries and messages that ended so."""
        new = owned("a")
        one = change("a", new.head, put={"k": b"v"})
        done(backend, new, one, send("a"), send("a"))
        end = step("a", one.head, put={"late": b""})
        end = attrs.evolve(end, head=attrs.evolve(end.head, state=state, owner=None, ended=NOW + 9))
        done(backend, end)
        found = loaded(backend, "a")
        assert found.head == end.head
        return found

    @pytest.mark.parametrize("state", [ExecutionState.COMPLETED, ExecutionState.CANCELLED])
    def test_the_end_removes_entries_and_messages(self, backend: StoreBackend, state: ExecutionState) -> None:
        """I16, I8."""
        found = self.finish(backend, state)
        assert (found.entries, found.messages, backend.messages("a")) == ({}, (), [])
        assert (backend.pending("me"), backend.next_due()) == ([], None)
        assert done(backend, send("a", limit=1)) == [3], "its queue is empty again"

    def test_a_failed_execution_keeps_entries_and_messages(self, backend: StoreBackend) -> None:
        """`retry` goes on from there; until then nothing wakes it."""
        found = self.finish(backend, ExecutionState.FAILED)
        assert found.entries == {"k": b"v", "late": b""}
        assert [message.id for message in found.messages] == [1, 2]
        assert (found.head.woken, backend.next_due(), backend.claim(claim(states=EVERY_STATE))) == (False, None, [])

    def test_a_message_that_crossed_the_release_wakes(self, backend: StoreBackend) -> None:
        """I4: an owner parks an execution and does not know of the message yet; it is due all the same."""
        new = owned("a")
        done(backend, new, send("a"))
        parked = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}
        park = change("a", new.head, head_fields=parked)
        done(backend, park)
        assert head_of(backend, "a") == attrs.evolve(park.head, woken=True)
        assert backend.next_due() == 0
        assert [one.head.woken for one in backend.claim(claim())] == [False]

    def test_nothing_wakes_where_every_message_was_taken(self, backend: StoreBackend) -> None:
        new = owned("a")
        done(backend, new, send("a"))
        parked = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}
        park = change("a", new.head, head_fields=parked, take=(1,))
        done(backend, park)
        assert head_of(backend, "a") == park.head
        assert backend.next_due() is None
        assert backend.claim(claim()) == []

    def test_a_message_does_not_wake_what_is_owned(self, backend: StoreBackend) -> None:
        new = owned("a")
        one = change("a", new.head)
        done(backend, new, send("a"), one)
        assert head_of(backend, "a") == one.head
        assert backend.messages("a") == [attrs.evolve(signal(), id=1)]
