"""The contract of `Send`, and of what becomes of messages.

Place in the life of an execution: signals and control requests, from anybody, at any time.
"""

from __future__ import annotations

import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, SignalQueueFullError
from longrun.records import ExecutionState
from longrun.stored import Head, Message, Send, Write
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import ConformanceBase, created, done, head_of, loaded, refused
from longrun.testing.samples import NOW, change, claim, create, owned, send


class MessageContract(ConformanceBase):
    def start(self, backend: StoreBackend) -> Head:
        new = owned("a")
        created(backend, new)
        return new.head

    def ids(self, backend: StoreBackend) -> list[int]:
        found = backend.messages("a")
        assert loaded(backend, "a").messages == tuple(found)
        return [message.id for message in found]

    def test_a_message_is_kept_as_it_was_sent(self, backend: StoreBackend) -> None:
        """I1."""
        self.start(backend)
        full = Message(
            kind="pause",
            name="näme",
            key="k",
            payload=b"\x00\xff",
            options={"hold": True, "n": [1, {"x": None}]},
            sent=NOW + 0.1,
        )
        bare = Message(kind="cancel", sent=NOW)
        assert done(backend, Send(id="a", message=full), Send(id="a", message=bare)) == [1, 2]
        assert backend.messages("a") == [attrs.evolve(full, id=1), attrs.evolve(bare, id=2)]
        assert self.ids(backend) == [1, 2]

    def test_the_head_is_told_without_the_messages(self, backend: StoreBackend) -> None:
        assert backend.head("a") is None
        self.start(backend)
        done(backend, send("a"), send("a"))
        assert backend.head("a") == loaded(backend, "a").head

    @pytest.mark.parametrize("state", [ExecutionState.WAITING, ExecutionState.PAUSED, ExecutionState.COMPLETED])
    def test_the_head_alone_is_the_one_that_load_tells(self, backend: StoreBackend, state: ExecutionState) -> None:
        """Also that a message has woken what nobody owns."""
        created(backend, create("a", state, head_fields={"signal": "go", "reason": "é", "note": "n", "of": 2.0}))
        assert backend.head("a") == loaded(backend, "a").head
        done(backend, send("a"))
        assert backend.head("a") == loaded(backend, "a").head
        done(backend, send("a", payload=b"x" * 50_000))
        assert backend.head("a") == loaded(backend, "a").head

    def test_an_empty_payload_is_not_a_missing_one(self, backend: StoreBackend) -> None:
        self.start(backend)
        done(backend, send("a", payload=b""), send("a", payload=None))
        assert [message.payload for message in backend.messages("a")] == [b"", None]

    def test_ids_grow_and_are_never_used_again(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        assert done(backend, send("a"), send("a"), send("a")) == [1, 2, 3]
        taken = change("a", first, take=(1, 3))
        done(backend, taken)
        assert self.ids(backend) == [2]
        assert done(backend, send("a")) == [4]
        done(backend, change("a", taken.head, take=(2, 4)))
        assert done(backend, send("a")) == [5]

    def test_many_messages_keep_their_order(self, backend: StoreBackend) -> None:
        self.start(backend)
        done(backend, *[send("a", payload=str(n).encode()) for n in range(120)])
        assert [message.payload for message in backend.messages("a")] == [str(n).encode() for n in range(120)]
        assert self.ids(backend) == list(range(1, 121))

    def test_taking_what_is_not_there_is_nothing(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        done(backend, send("a"), change("a", first, take=(1, 7)))
        assert self.ids(backend) == []

    def test_a_refused_save_takes_nothing(self, backend: StoreBackend) -> None:
        """I3."""
        first = self.start(backend)
        done(backend, send("a"))
        backend.commit([change("a", attrs.evolve(first, fence=9), take=(1,))])
        assert self.ids(backend) == [1]

    def test_a_message_to_nobody(self, backend: StoreBackend) -> None:
        error = refused(backend, send("a"), ExecutionNotFoundError)
        assert error.execution_id == "a"
        created(backend, create("a"))
        assert backend.messages("a") == []

    def test_a_key_is_accepted_once(self, backend: StoreBackend) -> None:
        self.start(backend)
        assert done(backend, send("a", key="k", payload=b"1"), send("a"), send("a", key="k", payload=b"2")) == [1, 2, 1]
        assert done(backend, send("a", key="k"), send("a", key="l")) == [1, 3]
        assert [message.payload for message in backend.messages("a")] == [b"1", None, None]

    def test_a_key_is_remembered_after_its_message_was_taken(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        done(backend, *[send("a", key=f"k{n}") for n in range(20)])
        taken = change("a", first, take=tuple(range(1, 21)))
        done(backend, taken)
        assert done(backend, *[send("a", key=f"k{n}") for n in range(20)]) == list(range(1, 21))
        assert backend.messages("a") == []
        assert done(backend, send("a", key="new")) == [21]

    def test_a_key_taken_in_the_same_batch_is_remembered(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        writes: list[Write] = [send("a", key="k"), change("a", first, take=(1,)), send("a", key="k")]
        assert done(backend, *writes) == [1, None, 1]
        assert backend.messages("a") == []

    def test_a_key_is_remembered_after_the_end(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        ended = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
        done(backend, send("a", key="k"), change("a", first, head_fields=ended))
        assert done(backend, send("a", key="k")) == [1]
        assert backend.messages("a") == []

    def test_a_key_belongs_to_one_execution(self, backend: StoreBackend) -> None:
        created(backend, create("a"), create("b"))
        assert done(backend, send("a"), send("a", key="k"), send("b", key="k")) == [1, 2, 1]

    def test_what_was_sent_is_told_when_it_was_taken(self, backend: StoreBackend) -> None:
        """A replicated store copies it: the next number, and every key that is known again."""
        assert backend.sent("a") == (0, {})
        first = self.start(backend)
        assert backend.sent("a") == (0, {})
        keys = ["k", "", "a b", "=", "é", "x" * 200]
        done(backend, *[send("a", key=key) for key in keys], send("a"), send("a"))
        known = {key: number for number, key in enumerate(keys, 1)}
        assert self.sent(backend) == (8, known)
        taken = change("a", first, take=(1, 2, 5, 6, 8))
        done(backend, taken)
        assert self.sent(backend) == (8, known)
        ended = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
        done(backend, change("a", taken.head, head_fields=ended))
        assert self.sent(backend) == (8, known)
        done(backend, send("a", key="late"))
        assert self.sent(backend) == (9, known | {"late": 9})

    def sent(self, backend: StoreBackend) -> tuple[int, dict[str, int]]:
        last, keys = backend.sent("a")
        return last, dict(keys)

    def test_a_full_queue_refuses(self, backend: StoreBackend) -> None:
        """I16. A repeated key is answered all the same, and a taken message makes room."""
        first = self.start(backend)
        done(backend, send("a", limit=2, key="k"), send("a", limit=2))
        error = refused(backend, send("a", limit=2), SignalQueueFullError)
        assert (error.execution_id, error.limit) == ("a", 2)
        refused(backend, send("a", limit=2, key="new"), SignalQueueFullError)
        assert done(backend, send("a", limit=2, key="k")) == [1]
        assert self.ids(backend) == [1, 2]
        done(backend, change("a", first, take=(1,)))
        (answer,) = done(backend, send("a", limit=2, key="new"))
        assert isinstance(answer, int)
        assert answer > 2
        assert len(self.ids(backend)) == 2

    def test_a_queue_that_fills_up_within_a_batch_refuses(self, backend: StoreBackend) -> None:
        self.start(backend)
        answers = backend.commit([send("a", limit=3) for _ in range(5)])
        assert answers[:3] == [1, 2, 3]
        assert all(isinstance(answer, SignalQueueFullError) for answer in answers[3:])
        assert self.ids(backend) == [1, 2, 3]

    @pytest.mark.parametrize(
        "state", [ExecutionState.INITIALIZED, ExecutionState.WAITING, ExecutionState.PAUSED, ExecutionState.BLOCKED]
    )
    def test_a_message_wakes_what_nobody_owns(self, backend: StoreBackend, state: ExecutionState) -> None:
        """I4."""
        new = create("a", state, head_fields={"signal": "go", "due": NOW + 1e6})
        created(backend, new)
        done(backend, send("a", "something else"))
        assert head_of(backend, "a") == attrs.evolve(new.head, woken=True)

    def test_a_message_leaves_the_head_of_what_is_owned(self, backend: StoreBackend) -> None:
        """It does not change the revision either: the owner's next write fits."""
        first = self.start(backend)
        done(backend, send("a"))
        assert head_of(backend, "a") == first
        done(backend, change("a", first))

    @pytest.mark.parametrize("state", [ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED])
    def test_a_message_to_what_is_finished_is_kept_and_wakes_nothing(
        self, backend: StoreBackend, state: ExecutionState
    ) -> None:
        """I8: whoever retries a failed execution finds it; nobody is sent to work for it."""
        new = create("a", state, head_fields={"ended": NOW})
        created(backend, new)
        assert done(backend, send("a")) == [1]
        assert head_of(backend, "a") == new.head
        assert self.ids(backend) == [1]
        assert (backend.next_due(), backend.claim(claim())) == (None, [])

    def test_pending_names_the_owners_executions_with_messages(self, backend: StoreBackend) -> None:
        a = owned("a")
        created(backend, a, owned("b"), owned("c"), owned("d", "other"), create("e"))
        assert backend.pending("me") == []
        done(backend, *[send(id) for id in "aabdee"])
        assert sorted(backend.pending("me")) == ["a", "b"]
        assert backend.pending("other") == ["d"]
        assert backend.pending("nobody") == []
        done(backend, change("a", a.head, take=(1, 2)))
        assert backend.pending("me") == ["b"]
        backend.claim(claim("new", dead=frozenset({"me"})))
        assert backend.pending("me") == []
        assert sorted(backend.pending("new")) == ["b", "e"]

    def test_pending_forgets_what_was_released(self, backend: StoreBackend) -> None:
        first = self.start(backend)
        done(backend, send("a"), change("a", first, head_fields={"owner": None, "state": ExecutionState.RESUMING}))
        assert backend.pending("me") == []
