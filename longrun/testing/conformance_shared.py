"""Two store objects on one place, as two processes have them; opening, closing, and waiting for each other.

Place in the life of an execution: claim, checkpoint. The other store is driven by a second thread where both race.
"""

from __future__ import annotations

import threading
import time

import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError
from longrun.records import ExecutionState
from longrun.stored import Head, Owner, Query, Write
from longrun.stores.base import StoreBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.conformance_base import (
    PATIENCE,
    ConformanceBase,
    beside,
    created,
    done,
    head_of,
    ids_of,
    loaded,
    opened,
    refused,
)
from longrun.testing.samples import NOW, boundary, change, claim, create, owned, send, step

EACH = 200
"""Executions for each of two racing claimers."""


class LifeContract(ConformanceBase):
    def test_it_declares_what_it_is(self, backend: StoreBackend) -> None:
        assert backend.kind
        assert (backend.durable, backend.fenced) == (self.durable, self.fenced)
        facts = backend.describe()
        assert facts["kind"] == backend.kind
        backend.ping()

    def test_closing_twice_is_safe(self, store: CheckpointStore) -> None:
        store.backend.open()
        store.backend.close()
        store.backend.close()

    def test_what_was_acknowledged_is_there_after_reopening(self, store: CheckpointStore) -> None:
        """I1: executions, boundaries, blobs, entries, messages, keys, owners."""
        self.needs("durable")
        with opened(store.backend) as backend:
            new = owned("a", blobs={"b": b"blob"}, metadata={"k": "v"})
            save = step("a", new.head, put={"e": b"1"}, boundaries=(boundary(2, blobs=("b",)),))
            done(backend, new, save, send("a", key="k", payload=b"p"), send("a"), create("w", ExecutionState.WAITING))
            done(backend, create("gone", ExecutionState.COMPLETED), send("w", key="w"))
            backend.delete(["gone"])
            backend.register(Owner(id="me", life={"pid": 1}, remaining=0), 1000.0)
            (taken,) = backend.claim(claim("you", ids=("w",)))
            done(backend, change("w", taken.head, take=(1,), head_fields={"owner": None, "due": NOW + 5}))
            before = {id: loaded(backend, id) for id in ("a", "w")}
            listed, rows = backend.find(Query()), backend.boundaries("a")
        with opened(self.second_store().backend) as again:
            assert {id: loaded(again, id) for id in ("a", "w")} == before
            assert (again.find(Query()), again.boundaries("a")) == (listed, rows)
            assert (again.load("gone"), again.next_due(), again.pending("me")) == (None, NOW + 5, ["a"])
            assert [(one.id, one.life, one.remaining > 900) for one in again.owners()] == [("me", {"pid": 1}, True)]
            assert done(again, send("a", key="k"), send("w", key="w"), step("a", save.head), send("a")) == [
                1,
                1,
                None,
                3,
            ]
            refused(again, change("w", attrs.evolve(taken.head, fence=0)), LeaseLostError)

    def test_a_write_repeated_after_reopening_is_done_already(self, store: CheckpointStore) -> None:
        """I9: the answer was lost with the process."""
        self.needs("durable")
        new = owned("a")
        save = step("a", new.head)
        with opened(store.backend) as backend:
            done(backend, new, save)
        with opened(self.second_store().backend) as again:
            assert again.commit([new, save]) == [False, None]
            assert [one.seq for one in again.boundaries("a")] == [1, 2]

    def test_a_store_can_be_closed_and_opened_again(self, store: CheckpointStore) -> None:
        self.needs("durable")
        new = owned("a")
        with opened(store.backend) as backend:
            created(backend, new)
        with opened(store.backend) as backend:
            assert done(backend, step("a", new.head)) == [None]
            assert head_of(backend, "a").seq == 2


class SharedContract(ConformanceBase):
    def test_what_others_do_to_an_execution_owned_here_is_noticed(
        self, backend: StoreBackend, other: StoreBackend
    ) -> None:
        """I3: however well an owner that has signed on knows its executions by heart."""
        backend.register(Owner(id="one", life={}, remaining=0), 1000.0)
        new, second = owned("a", "one"), owned("b", "one")
        later = step("b", second.head)
        done(backend, new, second, later)
        other.claim(claim("two", ids=("b",), dead=frozenset({"one"})))
        refused(backend, step("b", later.head), LeaseLostError)
        last = step("a", new.head)
        done(backend, last)
        assert done(other, send("a"), send("a")) == [1, 2]
        assert done(backend, send("a")) == [3]
        done(backend, change("a", last.head, head_fields={"owner": None, "state": ExecutionState.WAITING}))
        assert head_of(other, "a").woken

    def test_what_others_delete_is_gone_for_its_owner_too(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3: a failed one was claimed for a retry, and is deleted before that is written."""
        backend.register(Owner(id="one", life={}, remaining=0), 1000.0)
        created(backend, create("a", ExecutionState.FAILED))
        (taken,) = backend.claim(claim("one", ids=("a",), states=frozenset({ExecutionState.FAILED})))
        done(backend, send("a"))
        other.register(Owner(id="two", life={}, remaining=0), 1000.0)
        assert other.delete(["a"]) == [True]
        new = owned("b", "two")
        created(other, new)
        refused(backend, step("a", taken.head), ExecutionNotFoundError)
        assert loaded(other, "b").head == new.head

    def test_an_id_that_others_use_anew_is_the_new_one(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I1: for a sender who knew the old one."""
        created(backend, create("a", ExecutionState.FAILED))
        assert done(other, send("a")) == [1]
        assert backend.delete(["a"]) == [True]
        created(backend, create("a", ExecutionState.WAITING, head_fields={"signal": "go"}))
        assert done(other, send("a", payload=b"new")) == [1]
        assert [message.payload for message in backend.messages("a")] == [b"new"]
        assert ids_of(backend.claim(claim("two"))) == ["a"]

    def test_who_had_claimed_an_id_finds_the_new_one(self, backend: StoreBackend, other: StoreBackend) -> None:
        created(backend, create("a", ExecutionState.FAILED))
        backend.claim(claim("one", ids=("a",), states=frozenset({ExecutionState.FAILED})))
        assert other.delete(["a"]) == [True]
        created(other, create("a", ExecutionState.WAITING))
        assert [one.head.state for one in backend.find(Query())] == [ExecutionState.WAITING]
        assert ids_of(backend.claim(claim("two"))) == ["a"]

    def test_a_copy_put_right_by_others_is_noticed_by_its_owner(
        self, backend: StoreBackend, other: StoreBackend
    ) -> None:
        """I13: a replicated store ends, deletes and makes again what an owner elsewhere has here, and registers it. The
        owner goes on with the new one, or is told that it has lost the old one."""
        one = Owner(id="one", life={}, remaining=0)
        backend.register(one, 1000.0)
        new = owned("a", "one")
        second = step("a", new.head)
        done(backend, new, second)
        other.register_other(one, 1000.0)
        ended = {"state": ExecutionState.CANCELLED, "owner": None, "ended": NOW}
        done(other, change("a", second.head, head_fields=ended))
        assert other.delete(["a"]) == [True]
        done(other, owned("b", "two"), owned("a", "one"))
        done(other, send("a"))
        again = step("a", new.head, take=(1,))
        if isinstance(backend.commit([again])[0], LeaseLostError):
            assert loaded(other, "a").head == new.head
            return
        done(other, send("a"))
        resting = {"state": ExecutionState.WAITING, "signal": "go", "owner": None}
        done(backend, change("a", again.head, head_fields=resting))
        assert [found.seq for found in other.boundaries("a")] == [1, 2]
        assert [message.id for message in other.messages("a")] == [2]
        assert (loaded(other, "a").head.woken, loaded(other, "a").damage) == (True, ())

    def test_each_sees_what_the_other_wrote(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I1: at once, through every reader."""
        new = owned("a", "one", blobs={"b": b"x"})
        created(backend, new)
        assert loaded(other, "a") == loaded(backend, "a")
        assert other.commit([create("a")]) == [False]
        done(other, send("a", payload=b"p"))
        assert [message.payload for message in backend.messages("a")] == [b"p"]
        assert (backend.pending("one"), other.pending("one")) == (["a"], ["a"])
        done(backend, step("a", new.head, take=(1,)))
        assert (other.messages("a"), other.pending("one")) == ([], [])
        assert [one.seq for one in other.boundaries("a")] == [1, 2]
        assert other.find(Query()) == backend.find(Query())
        assert other.count(Query()) == {ExecutionState.RUNNING: 1}

    def test_message_ids_and_keys_are_common(self, backend: StoreBackend, other: StoreBackend) -> None:
        created(backend, create("a"))
        assert [done(one, send("a")) for one in (backend, other, backend, other)] == [[1], [2], [3], [4]]
        assert [done(one, send("a", key="k")) for one in (other, backend)] == [[5], [5]]

    def test_owners_are_common(self, backend: StoreBackend, other: StoreBackend) -> None:
        backend.register(Owner(id="one", life={}, remaining=0), 100.0)
        assert other.renew("one", 1000.0) is True
        assert [(owner.id, owner.remaining > 900) for owner in backend.owners()] == [("one", True)]
        other.unregister("one")
        assert (backend.owners(), backend.renew("one", 100.0)) == ([], False)

    def test_a_stale_owner_is_refused_after_a_takeover(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3, I9: its next write, and the one that it does not know to be stored."""
        self.needs("fenced")
        new = owned("a", "one")
        second = step("a", new.head)
        done(backend, new, second)
        (given,) = other.claim(claim("two", dead=frozenset({"one"})))
        assert given.head == attrs.evolve(second.head, fence=2, owner="two", crashes=1)
        for late in (second, step("a", second.head, put={"e": b""}), change("a", second.head, take=(1,))):
            refused(backend, late, LeaseLostError)
        assert loaded(backend, "a") == given
        done(other, step("a", given.head))
        refused(backend, step("a", second.head), LeaseLostError)
        assert [one.seq for one in backend.boundaries("a")] == [1, 2, 3]

    def test_only_the_stale_writes_of_a_batch_are_refused(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3."""
        self.needs("fenced")
        news = [owned(f"x{n}", "one") for n in range(10)]
        created(backend, *news)
        other.claim(claim("two", dead=frozenset({"one"}), ids=("x3", "x7")))
        answers = backend.commit([step(new.id, new.head) for new in news])
        assert [n for n, answer in enumerate(answers) if isinstance(answer, LeaseLostError)] == [3, 7]
        assert [answer for n, answer in enumerate(answers) if n not in (3, 7)] == [None] * 8
        assert [head_of(other, f"x{n}").seq for n in (2, 3, 7)] == [2, 1, 1]

    def test_a_takeover_and_back(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3: each claim shuts the other one out, and nothing that a store remembers may hide it."""
        self.needs("fenced")
        created(backend, create("a"))
        heads: dict[str, Head] = {}
        for turn in range(6):
            mine, me, they = (backend, "one", "two") if turn % 2 == 0 else (other, "two", "one")
            (given,) = mine.claim(claim(me, dead=frozenset({they})))
            assert given.head.fence == turn + 1
            saved = step("a", given.head)
            done(mine, saved)
            if turn:
                refused(other if turn % 2 == 0 else backend, step("a", heads[they]), LeaseLostError)
            heads[me] = saved.head
        assert [one.seq for one in other.boundaries("a")] == list(range(1, 8))

    def test_two_claimers_never_get_the_same(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3, I4: they race for everything; each execution is given once, and none is left."""
        self.needs("fenced")
        created(backend, *[create(f"x{n}", ExecutionState.INITIALIZED) for n in range(2 * EACH)])
        start = threading.Barrier(2)

        def take(store: StoreBackend, owner: str) -> list[str]:
            taken: list[str] = []
            start.wait(PATIENCE)
            while given := store.claim(claim(owner, limit=7, states=frozenset({ExecutionState.INITIALIZED}))):
                assert {(one.head.fence, one.head.owner) for one in given} == {(1, owner)}
                taken += ids_of(given)
                running = {"state": ExecutionState.RUNNING}
                done(store, *[change(one.definition.id, one.head, head_fields=running) for one in given])
            return taken

        with beside(lambda: take(other, "two")) as racing:
            mine = take(backend, "one")
            theirs = racing.result(PATIENCE)
        assert sorted(mine + theirs) == sorted(f"x{n}" for n in range(2 * EACH))
        assert backend.count(Query(owner="one")).get(ExecutionState.RUNNING, 0) == len(mine)
        assert backend.count(Query(owner="two")).get(ExecutionState.RUNNING, 0) == len(theirs)

    def test_two_claimers_of_one_id(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I3: whoever asks for the same id at the same moment, one gets it."""
        self.needs("fenced")
        ids = [f"x{n}" for n in range(40)]
        created(backend, *map(create, ids))
        start = threading.Barrier(2)

        def take(store: StoreBackend, owner: str) -> list[str]:
            taken: list[str] = []
            for id in ids:
                start.wait(PATIENCE)
                taken += ids_of(store.claim(claim(owner, ids=(id,))))
            return taken

        with beside(lambda: take(other, "two")) as racing:
            mine = take(backend, "one")
            theirs = racing.result(PATIENCE)
        assert sorted(mine + theirs) == sorted(ids)

    def test_a_takeover_while_the_owner_writes(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I1, I3: the new owner gets every write that was acknowledged, and none is acknowledged after it."""
        self.needs("fenced")
        new = owned("a", "one")
        created(backend, new)
        written = threading.Semaphore(0)

        def take_over() -> int:
            for _ in range(20):
                assert written.acquire(timeout=PATIENCE)
            while not (given := other.claim(claim("two", dead=frozenset({"one"})))):  # it passes over what is locked
                assert time.monotonic() < deadline
            head = given[0].head
            assert given[0].boundary.seq == head.seq == head.revision + 1
            return head.revision

        deadline = time.monotonic() + PATIENCE
        with beside(take_over) as racing:
            head, acknowledged = new.head, 0
            while time.monotonic() < deadline:
                save = step("a", head)
                (answer,) = backend.commit([save])
                if isinstance(answer, LeaseLostError):
                    break
                assert answer is None
                head, acknowledged = save.head, acknowledged + 1
                written.release()
            assert racing.result(PATIENCE) == acknowledged
        assert head_of(backend, "a").revision == acknowledged
        assert len(backend.boundaries("a", limit=acknowledged + 10)) == acknowledged + 1

    def test_two_create_one_id(self, backend: StoreBackend, other: StoreBackend) -> None:
        """Of two that start the same id at the same moment, one does."""
        start = threading.Barrier(2)

        def start_all(store: StoreBackend, owner: str) -> list[object]:
            answers: list[object] = []
            for n in range(40):
                start.wait(PATIENCE)
                answers += store.commit([owned(f"x{n}", owner)])
            return answers

        with beside(lambda: start_all(other, "two")) as racing:
            mine = start_all(backend, "one")
            theirs = racing.result(PATIENCE)
        assert all({a, b} == {True, False} for a, b in zip(mine, theirs, strict=True))
        owners = [head_of(backend, f"x{n}").owner for n in range(40)]
        assert owners == ["one" if created_here else "two" for created_here in mine]

    def test_messages_from_both_sides_while_the_owner_writes(self, backend: StoreBackend, other: StoreBackend) -> None:
        """I1: each message has an id of its own, and no save of the owner loses one."""
        new = owned("a", "one")
        created(backend, new)
        with beside(lambda: [done(other, send("a", payload=b"o"))[0] for _ in range(40)]) as racing:
            head, ids = new.head, []
            for _ in range(40):
                save = step("a", head)
                ids += done(backend, save, send("a", payload=b"b"))[1:]
                head = save.head
            theirs = racing.result(PATIENCE)
        assert sorted([*ids, *theirs]) == list(range(1, 81))  # type: ignore[type-var]
        messages = other.messages("a")
        assert [message.id for message in messages] == list(range(1, 81))
        assert [message.id for message in messages if message.payload == b"o"] == theirs
        assert head_of(other, "a").revision == 40

    def test_a_signal_is_never_lost_between_parking_and_sending(
        self, backend: StoreBackend, other: StoreBackend
    ) -> None:
        """I4: however the two meet, in the end the execution is woken."""
        news = [owned(f"x{n}", "one") for n in range(40)]
        created(backend, *news)
        start = threading.Barrier(2)
        parked = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}

        def signal_all() -> None:
            for new in news:
                start.wait(PATIENCE)
                done(other, send(new.id))

        with beside(signal_all) as racing:
            for new in news:
                start.wait(PATIENCE)
                done(backend, change(new.id, new.head, head_fields=parked))
            racing.result(PATIENCE)
        given = backend.claim(claim("one"))
        assert sorted(ids_of(given)) == sorted(new.id for new in news)
        assert {len(one.messages) for one in given} == {1}

    def test_opening_together(self, store: CheckpointStore, other_store: CheckpointStore) -> None:
        """Both find nothing there, and both make it ready."""
        start = threading.Barrier(2)

        def enter(backend: StoreBackend) -> None:
            start.wait(PATIENCE)
            backend.open()

        with beside(lambda: enter(other_store.backend)) as racing:
            enter(store.backend)
            racing.result(PATIENCE)
        try:
            created(store.backend, create("a"))
            assert loaded(other_store.backend, "a").boundary.data == b"state 1"
        finally:
            store.backend.close()
            other_store.backend.close()


class WaitContract(ConformanceBase):
    def hush(self, backend: StoreBackend) -> None:
        """Take in what was reported already, and what may come late of it: `wait` then says that there is nothing."""
        for _ in range(100):
            if backend.wait(0.05) is False:
                return
        pytest.fail("wait never stopped to say that something had changed")  # pragma: no cover -- a store that fails

    def test_silence_is_false_after_the_time_out(self, backend: StoreBackend) -> None:
        created(backend, create("a"))
        self.hush(backend)
        begin = time.monotonic()
        assert backend.wait(0.2) is False
        assert 0.1 < time.monotonic() - begin < PATIENCE

    @pytest.mark.parametrize("what", ["send", "create", "release", "finish"])
    def test_what_the_other_does_ends_the_wait(self, backend: StoreBackend, other: StoreBackend, what: str) -> None:
        new = owned("a", "two")
        created(other, new)
        end = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
        writes: dict[str, Write] = {
            "send": send("a"),
            "create": create("b"),
            "release": change("a", new.head, head_fields={"owner": None, "state": ExecutionState.RESUMING}),
            "finish": change("a", new.head, head_fields=end),
        }
        self.hush(backend)
        with beside(lambda: self.next_change(backend)) as waiting:
            done(other, writes[what])
            assert waiting.result(PATIENCE) < 5

    def next_change(self, backend: StoreBackend) -> float:
        """Seconds until `wait` said that something changed."""
        begin = time.monotonic()
        while not backend.wait(1.0):
            assert time.monotonic() - begin < PATIENCE
        return time.monotonic() - begin

    def test_what_happened_between_two_waits_is_reported(self, backend: StoreBackend, other: StoreBackend) -> None:
        created(backend, create("a"))
        self.hush(backend)
        done(other, send("a"))
        assert self.next_change(backend) < 5

    def test_waking_ends_the_wait(self, backend: StoreBackend) -> None:
        """Whether it comes before or in the middle of it."""
        self.hush(backend)
        begin = time.monotonic()
        with beside(lambda: backend.wait(PATIENCE)) as waiting:
            while not waiting.done():
                backend.wake()
                assert time.monotonic() - begin < PATIENCE / 2
            waiting.result(PATIENCE)
