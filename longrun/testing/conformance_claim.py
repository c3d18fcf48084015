"""The contract of `claim`, of owners and of `next_due`.

Place in the life of an execution: claim.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

from longrun.errors import LeaseLostError
from longrun.records import FINISHED, ExecutionState
from longrun.stored import Owner
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import PATIENCE, ConformanceBase, created, done, head_of, ids_of, loaded, refused
from longrun.testing.samples import EVERY_STATE, NOW, boundary, change, claim, create, owned, send, step

S = ExecutionState


class ClaimContract(ConformanceBase):
    def test_a_claim_gives_everything_that_belongs_to_it(self, backend: StoreBackend) -> None:
        """I3: one fence more, the new owner, and all that is needed to go on."""
        new = owned("a", blobs={"b": b"blob"}, metadata={"n": 1})
        saved = step("a", new.head, put={"e": b"1"}, blobs={"c": b"c"}, boundaries=(boundary(2, blobs=("b", "c")),))
        done(backend, new, saved, send("a", payload=b"hello"))
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        assert given.head == attrs.evolve(saved.head, fence=2, owner="new", crashes=1)
        assert (given.definition, given.boundary) == (new.definition, saved.boundaries[0])
        assert (given.blobs, given.entries) == ({"b": b"blob", "c": b"c"}, {"e": b"1"})
        assert [(message.id, message.payload) for message in given.messages] == [(1, b"hello")]
        assert given.kept == ((1, ("b",)), (2, ("b", "c")))
        assert given.damage == ()
        assert loaded(backend, "a") == given

    def test_the_new_owner_writes_and_the_old_one_does_not(self, backend: StoreBackend) -> None:
        """I3."""
        new = owned("a")
        created(backend, new)
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        refused(backend, step("a", new.head), LeaseLostError)
        assert done(backend, step("a", given.head)) == [None]
        refused(backend, step("a", new.head), LeaseLostError)

    @pytest.mark.parametrize("state", list(S))
    def test_only_the_states_asked_for_are_given(self, backend: StoreBackend, state: ExecutionState) -> None:
        created(backend, *[create(f"x-{one}", one) for one in S])
        ids = tuple(f"x-{one}" for one in S)
        given = backend.claim(claim(states=frozenset({state}), ids=ids))
        assert ids_of(given) == [f"x-{state}"]
        assert given[0].head.state is state
        assert backend.claim(claim(states=frozenset(), ids=ids)) == []

    @pytest.mark.parametrize("state", [S.PAUSED, S.BLOCKED, *sorted(FINISHED)])
    def test_what_rests_is_only_given_by_id(self, backend: StoreBackend, state: ExecutionState) -> None:
        """I6, I8: not even a message, a due time or a dead owner makes it due."""
        created(backend, create("a", state), create("b", state, head_fields={"due": NOW - 9, "woken": True}))
        created(backend, owned("c", "dead", state))
        everything = claim(states=EVERY_STATE, dead=frozenset({"dead"}))
        assert backend.claim(everything) == []
        given = backend.claim(attrs.evolve(everything, ids=("a", "b", "c")))
        assert sorted(ids_of(given)) == ["a", "b", "c"]
        assert [one.head.crashes for one in given] == [0, 0, 0]

    @pytest.mark.parametrize("state", [S.INITIALIZED, S.WAITING, S.RESUMING])
    def test_when_it_is_due(self, backend: StoreBackend, state: ExecutionState) -> None:
        """`woken`, or neither `due` nor `signal`, or `due` reached."""
        cases: dict[str, tuple[dict[str, Any], bool]] = {
            "free": ({}, True),
            "past": ({"due": NOW - 0.5}, True),
            "now": ({"due": NOW}, True),
            "later": ({"due": NOW + 0.001}, False),
            "signal": ({"signal": "s"}, False),
            "deadline-past": ({"signal": "s", "due": NOW - 1}, True),
            "deadline-later": ({"signal": "s", "due": NOW + 1}, False),
            "woken": ({"woken": True}, True),
            "woken-later": ({"woken": True, "due": NOW + 1}, True),
            "woken-signal": ({"woken": True, "signal": "s"}, True),
        }
        created(backend, *[create(id, state, head_fields=fields) for id, (fields, _) in cases.items()])
        given = backend.claim(claim(states=EVERY_STATE))
        assert sorted(ids_of(given)) == sorted(id for id, (_, due) in cases.items() if due)
        assert not any(one.head.woken for one in given)
        rest = tuple(id for id, (_, due) in cases.items() if not due)
        assert sorted(ids_of(backend.claim(claim(ids=rest)))) == sorted(rest)

    def test_running_is_always_due(self, backend: StoreBackend) -> None:
        created(
            backend, create("a", head_fields={"due": NOW + 9}), create("b", head_fields={"signal": "s"}), create("c")
        )
        assert sorted(ids_of(backend.claim(claim()))) == ["a", "b", "c"]

    def test_what_another_living_owner_has_is_not_given(self, backend: StoreBackend) -> None:
        """I3: by id neither, whatever the state."""
        created(backend, *[owned(f"x-{state}", "other", state) for state in S])
        before = [head_of(backend, f"x-{state}") for state in S]
        everything = claim(states=EVERY_STATE, dead=frozenset({"somebody", "othe", "other2"}))
        assert backend.claim(everything) == []
        assert backend.claim(attrs.evolve(everything, ids=tuple(f"x-{state}" for state in S))) == []
        assert [head_of(backend, f"x-{state}") for state in S] == before

    def test_crashes_count_the_unclean_deaths_of_others(self, backend: StoreBackend) -> None:
        """I11."""
        fields = {"owner": "dead", "fence": 1, "crashes": 2}
        created(backend, *[create(f"x-{state}", state, head_fields=fields) for state in S])
        created(backend, create("free", head_fields={"crashes": 2}))
        created(backend, create("own", head_fields=fields | {"owner": "me"}))
        ids = (*(f"x-{state}" for state in S), "free", "own")
        given = backend.claim(claim(states=EVERY_STATE, dead=frozenset({"dead", "me"}), ids=ids))
        crashes = {one.definition.id: one.head.crashes for one in given}
        counted = {"x-running", "x-resuming"}
        assert crashes == {id: 3 if id in counted else 2 for id in ids}
        assert {one.head.fence for one in given} == {1, 2}

    def test_what_the_claimer_owns_is_not_given_again(self, backend: StoreBackend) -> None:
        """A claim for more work never takes the executions in hand away from their runners."""
        new = owned("a")
        created(backend, new)
        assert backend.claim(claim(dead=frozenset({"other"}))) == []
        assert backend.claim(claim(ids=("a",))) == []
        assert head_of(backend, "a") == new.head
        assert done(backend, step("a", new.head)) == [None]

    @pytest.mark.parametrize("ids", [None, ("a",)])
    def test_a_claimer_that_names_itself_gets_its_own(self, backend: StoreBackend, ids: tuple[str, ...] | None) -> None:
        """With a new fence, and no crash: it was not another owner's death."""
        new = owned("a")
        created(backend, new)
        (given,) = backend.claim(claim(ids=ids, dead=frozenset({"me"})))
        assert given.head == attrs.evolve(new.head, fence=2)
        refused(backend, step("a", new.head), LeaseLostError)

    def test_several_dead_owners(self, backend: StoreBackend) -> None:
        created(backend, owned("a", "x"), owned("b", "y"), owned("c", "z"))
        assert sorted(ids_of(backend.claim(claim(dead=frozenset({"x", "z"}))))) == ["a", "c"]

    def test_ids_narrow_it(self, backend: StoreBackend) -> None:
        created(backend, create("a"), create("b"), create("c"))
        assert backend.claim(claim(ids=())) == []
        assert sorted(ids_of(backend.claim(claim(ids=("c", "nowhere", "a"))))) == ["a", "c"]
        assert head_of(backend, "b").fence == 0

    def test_an_id_named_twice_is_given_once(self, backend: StoreBackend) -> None:
        created(backend, create("a"))
        (given,) = backend.claim(claim(ids=("a", "a")))
        assert given.head.fence == 1

    @pytest.mark.parametrize("by_id", [False, True])
    def test_workflows_and_queues_narrow_it(self, backend: StoreBackend, by_id: bool) -> None:
        kinds = [(workflow, queue) for workflow in ("v", "w") for queue in ("p", "q")]
        created(backend, *[create(w + q, workflow=w, queue=q) for w, q in kinds])
        ids = tuple(w + q for w, q in kinds) if by_id else None

        def ask(workflows: set[str] | None, queues: set[str] | None) -> list[str]:
            fits: dict[str, Any] = {
                "workflows": None if workflows is None else frozenset(workflows),
                "queues": None if queues is None else frozenset(queues),
            }
            given = backend.claim(claim(ids=ids, dead=frozenset({"me"}), **fits))
            return sorted(ids_of(given))

        assert ask({"w"}, {"q"}) == ["wq"]
        assert ask({"w", "unknown"}, None) == ["wp", "wq"]
        assert ask(None, {"p"}) == ["vp", "wp"]
        assert (ask(set(), None), ask(None, set())) == ([], [])
        assert ask({"v", "w"}, {"p", "q"}) == ["vp", "vq", "wp", "wq"]

    def test_the_oldest_of_the_highest_priority_comes_first(self, backend: StoreBackend) -> None:
        ranks = {"low": (-1, 0.0), "old": (0, 1.0), "young": (0, 3.0), "urgent": (5, 4.0), "urgent-old": (5, 2.0)}
        created(backend, *[create(id, priority=p, created=NOW + age) for id, (p, age) in ranks.items()])
        assert ids_of(backend.claim(claim(limit=2))) == ["urgent-old", "urgent"]
        assert ids_of(backend.claim(claim("you", limit=2))) == ["old", "young"]
        assert ids_of(backend.claim(claim("they", limit=2))) == ["low"]

    def test_order_and_limit_hold_across_states_and_ids(self, backend: StoreBackend) -> None:
        states = (S.WAITING, S.RUNNING, S.INITIALIZED, S.RESUMING)
        created(backend, *[create(f"x{n}", states[n % 4], created=NOW - n) for n in range(12)])
        assert ids_of(backend.claim(claim(limit=5))) == ["x11", "x10", "x9", "x8", "x7"]
        rest = tuple(f"x{n}" for n in range(7))
        assert ids_of(backend.claim(claim(ids=rest, limit=3))) == ["x6", "x5", "x4"]

    def test_what_was_claimed_is_gone_for_others(self, backend: StoreBackend) -> None:
        created(backend, *[create(f"x{n}", S.INITIALIZED) for n in range(10)])
        first = ids_of(backend.claim(claim("one", limit=6)))
        second = ids_of(backend.claim(claim("two", limit=6)))
        assert sorted(first + second) == sorted(f"x{n}" for n in range(10))
        assert backend.claim(claim("three")) == []

    def test_a_claimed_execution_can_be_released_and_claimed_again(self, backend: StoreBackend) -> None:
        """Release, claim, release …: the fence grows, the revision goes on, no crash is counted."""
        created(backend, create("a", S.INITIALIZED))
        for turn in range(1, 4):
            (given,) = backend.claim(claim(f"owner{turn}"))
            assert (given.head.fence, given.head.revision, given.head.crashes) == (turn, turn - 1, 0)
            done(backend, change("a", given.head, head_fields={"owner": None, "state": S.RESUMING}))

    def test_a_large_claim_loads_each_with_its_own(self, backend: StoreBackend) -> None:
        count = 300
        done(backend, *[owned(f"x{n}", "dead", blobs={"b": f"blob {n}".encode()}) for n in range(count)])
        done(backend, *[change(f"x{n}", owned("x", "dead").head, put={"e": f"{n}".encode()}) for n in range(count)])
        done(backend, *[send(f"x{n}", payload=f"m{n}".encode()) for n in range(0, count, 7)])
        given = backend.claim(claim(dead=frozenset({"dead"}), limit=count))
        assert len(given) == count
        for one in given:
            n = int(one.definition.id[1:])
            assert (one.blobs, one.entries) == ({"b": f"blob {n}".encode()}, {"e": f"{n}".encode()})
            assert [m.payload for m in one.messages] == ([f"m{n}".encode()] if n % 7 == 0 else [])


class OwnerContract(ConformanceBase):
    def owner(self, id: str = "me", **fields: Any) -> Owner:
        values: dict[str, Any] = {"life": {"pid": 42, "boot": "x", "host": None}, "remaining": 0.0}
        return Owner(id=id, **(values | fields))

    def only(self, backend: StoreBackend) -> Owner:
        (found,) = backend.owners()
        return found

    def test_a_registered_owner_is_listed_with_what_is_left(self, backend: StoreBackend) -> None:
        """I12: what is left is a difference by the store's own clock."""
        full = self.owner(workflows=("v", "w"), queues=("q",))
        backend.register(full, 100.0)
        found = self.only(backend)
        assert attrs.evolve(found, remaining=0.0) == full
        assert 90 < found.remaining <= 100.5

    def test_registering_again_replaces(self, backend: StoreBackend) -> None:
        backend.register(self.owner(queues=("p",)), 100.0)
        backend.register(self.owner(life={"pid": 43}, queues=("q",)), 500.0)
        found = self.only(backend)
        assert (found.life, found.queues) == ({"pid": 43}, ("q",))
        assert 490 < found.remaining <= 500.5

    def test_renewing_extends(self, backend: StoreBackend) -> None:
        backend.register(self.owner("other"), 100.0)
        backend.register(self.owner(queues=("q",)), 100.0)
        assert backend.renew("me", 1000.0) is True
        left = {owner.id: owner.remaining for owner in backend.owners()}
        assert left["me"] > 900 > left["other"] > 90
        assert [owner.queues for owner in backend.owners() if owner.id == "me"] == [("q",)]

    def test_renewing_an_unknown_owner_is_false(self, backend: StoreBackend) -> None:
        assert backend.renew("me", 100.0) is False
        assert backend.owners() == []
        backend.register(self.owner(), 100.0)
        backend.unregister("me")
        assert backend.renew("me", 100.0) is False
        assert backend.owners() == []

    def test_a_lease_that_ran_out_is_listed_as_negative(self, backend: StoreBackend) -> None:
        """It is for those who look to decide; a renewal brings it back (I12)."""
        backend.register(self.owner(), 0.001)
        deadline = time.monotonic() + PATIENCE
        while self.only(backend).remaining >= 0:
            assert time.monotonic() < deadline
        assert self.only(backend).remaining < 0
        assert backend.renew("me", 100.0) is True
        assert self.only(backend).remaining > 90

    def test_an_unregistered_owner_keeps_its_executions(self, backend: StoreBackend) -> None:
        backend.register(self.owner("gone"), 100.0)
        backend.register(self.owner("stays"), 100.0)
        created(backend, owned("a", "gone"))
        backend.unregister("gone")
        backend.unregister("never was")
        assert [owner.id for owner in backend.owners()] == ["stays"]
        assert head_of(backend, "a").owner == "gone"
        assert backend.claim(claim()) == []
        assert ids_of(backend.claim(claim(dead=frozenset({"gone"})))) == ["a"]

    def test_owning_needs_no_registration(self, backend: StoreBackend) -> None:
        """The lease decides who may take over, never whether a write is good (I12): the fence does."""
        backend.register(self.owner(), 0.001)
        new = owned("a")
        created(backend, new)
        assert done(backend, change("a", new.head)) == [None]


class DueContract(ConformanceBase):
    def due(self, backend: StoreBackend, **fields: Any) -> float | None:
        """What `next_due` says when this is the only one that could be due."""
        state = fields.pop("state", S.WAITING)
        created(backend, create("only", state, head_fields=fields))
        return backend.next_due()

    def test_it_is_the_earliest_moment(self, backend: StoreBackend) -> None:
        """I4."""
        for n, state in enumerate((S.WAITING, S.INITIALIZED, S.RESUMING)):
            created(backend, create(f"x{n}", state, head_fields={"due": NOW + 10 - n}))
            assert backend.next_due() == NOW + 10 - n
        backend.claim(claim(ids=("x2",)))
        assert backend.next_due() == NOW + 9

    def test_past_moments_count(self, backend: StoreBackend) -> None:
        assert self.due(backend, due=NOW - 1e8) == NOW - 1e8

    def test_a_wait_without_a_deadline_is_never_due(self, backend: StoreBackend) -> None:
        assert self.due(backend, signal="s") is None
        done(backend, send("only"))
        assert backend.next_due() == 0

    def test_a_wait_with_a_deadline_is_due_then(self, backend: StoreBackend) -> None:
        assert self.due(backend, signal="s", due=NOW + 5) == NOW + 5

    def test_what_waits_for_nothing_is_due(self, backend: StoreBackend) -> None:
        assert self.due(backend, state=S.INITIALIZED) == 0

    def test_a_running_one_that_nobody_owns_is_due(self, backend: StoreBackend) -> None:
        """I4: as for `claim`, whatever its `due` says."""
        assert self.due(backend, state=S.RUNNING, due=NOW + 9) == 0

    def test_a_woken_one_is_due(self, backend: StoreBackend) -> None:
        assert self.due(backend, woken=True, due=NOW + 9, signal="s") == 0

    @pytest.mark.parametrize("state", [S.PAUSED, S.BLOCKED, *sorted(FINISHED)])
    def test_what_rests_is_never_due(self, backend: StoreBackend, state: ExecutionState) -> None:
        assert self.due(backend, state=state, due=NOW, woken=True) is None

    def test_what_is_owned_is_its_owners_business(self, backend: StoreBackend) -> None:
        created(backend, *[owned(f"x-{state}", state=state) for state in S])
        assert backend.next_due() is None
        done(backend, send("x-waiting"))
        assert backend.next_due() is None

    def test_a_release_makes_it_due(self, backend: StoreBackend) -> None:
        new = owned("a")
        created(backend, new)
        done(backend, change("a", new.head, head_fields={"owner": None, "state": S.WAITING, "due": NOW + 7}))
        assert backend.next_due() == NOW + 7
