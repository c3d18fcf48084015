"""The contract of what only reads, of retention and of `delete`.

Place in the life of an execution: look at it; finish.
"""

from __future__ import annotations

import random
import threading

import attrs
import pytest

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Boundary, Head, Query, Save
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import (
    PATIENCE,
    ConformanceBase,
    beside,
    created,
    done,
    ids_of,
    loaded,
    opened,
)
from longrun.testing.samples import EVERY_STATE, NOW, boundary, change, claim, create, owned, send, step


def rows(found: list[Boundary]) -> list[Boundary]:
    """Boundaries as a listing has them: it shows no state, and blob names only say something beside one."""
    return [attrs.evolve(one, data=None, blobs=()) for one in found]


class CheckpointContract(ConformanceBase):
    def walk(self, backend: StoreBackend, steps: int) -> Head:
        """An execution with this many boundaries; number n has a blob n of its own and shares blob "all"."""
        new = owned("a", blobs={"b1": b"blob 1", "all": b"shared"})
        writes: list[Save] = []
        head = new.head
        for seq in range(2, steps + 1):
            row = boundary(seq, blobs=(f"b{seq}", "all"))
            writes.append(step("a", head, boundaries=(row,), blobs={f"b{seq}": f"blob {seq}".encode()}))
            head = writes[-1].head
        done(backend, new, *writes)
        return head

    def test_boundaries_are_listed_in_pages_without_states(self, backend: StoreBackend) -> None:
        """I7."""
        self.walk(backend, 12)
        created(backend, create("ab"), create("b"))
        everything = backend.boundaries("a")
        assert [one.seq for one in everything] == list(range(1, 13))
        assert {one.data for one in everything} == {None}
        assert rows(everything)[1:] == rows([boundary(seq) for seq in range(2, 13)])
        assert [one.seq for one in backend.boundaries("a", limit=5)] == [1, 2, 3, 4, 5]
        assert [one.seq for one in backend.boundaries("a", after=5, limit=5)] == [6, 7, 8, 9, 10]
        assert [one.seq for one in backend.boundaries("a", after=10, limit=5)] == [11, 12]
        assert backend.boundaries("a", after=12) == []

    def test_each_checkpoint_has_its_state_and_blobs(self, backend: StoreBackend) -> None:
        self.walk(backend, 4)
        for seq in (2, 3, 4):
            found = backend.checkpoint("a", seq)
            assert found is not None
            assert found[0] == boundary(seq, blobs=(f"b{seq}", "all"))
            assert found[1] == {f"b{seq}": f"blob {seq}".encode(), "all": b"shared"}
        assert backend.checkpoint("a", 5) is None
        assert backend.checkpoint("a", 0) is None

    def test_retention_strips_states_and_keeps_rows(self, backend: StoreBackend) -> None:
        """I7, I16: only a prefix is stripped, and no row goes."""
        head = self.walk(backend, 5)
        before = backend.boundaries("a")
        done(backend, change("a", head, keep_from=4, drop_blobs=("b1", "b2", "b3", "never")))
        assert [backend.checkpoint("a", seq) for seq in (1, 2, 3)] == [None, None, None]
        kept = backend.checkpoint("a", 4)
        assert kept is not None
        assert (kept[0].data, kept[1]) == (b"state 4", {"b4": b"blob 4", "all": b"shared"})
        assert loaded(backend, "a").kept == ((4, ("b4", "all")), (5, ("b5", "all")))
        assert loaded(backend, "a").blobs == {"b5": b"blob 5", "all": b"shared"}
        assert rows(backend.boundaries("a")) == rows(before)

    def test_retention_and_a_new_boundary_in_one_write(self, backend: StoreBackend) -> None:
        head = self.walk(backend, 3)
        row = boundary(4, blobs=("all",))
        done(backend, step("a", head, boundaries=(row,), keep_from=4, drop_blobs=("b1", "b2", "b3")))
        found = loaded(backend, "a")
        assert (found.boundary, found.blobs, found.kept) == (row, {"all": b"shared"}, ((4, ("all",)),))

    def test_a_dropped_blob_can_be_stored_again(self, backend: StoreBackend) -> None:
        head = self.walk(backend, 2)
        dropped = change("a", head, keep_from=2, drop_blobs=("b1",))
        again = step("a", dropped.head, boundaries=(boundary(3, blobs=("b1",)),), blobs={"b1": b"anew"})
        done(backend, dropped, again)
        assert loaded(backend, "a").blobs == {"b1": b"anew"}

    def test_a_boundary_without_a_state_is_no_checkpoint(self, backend: StoreBackend) -> None:
        new = owned("a")
        done(backend, new, step("a", new.head, boundaries=(boundary(2, data=None),)))
        assert backend.checkpoint("a", 2) is None
        assert loaded(backend, "a").boundary.seq == 1

    def test_an_empty_state_is_a_state(self, backend: StoreBackend) -> None:
        new = owned("a")
        done(backend, new, step("a", new.head, boundaries=(boundary(2, data=b"", size=0),)))
        assert loaded(backend, "a").boundary.data == b""
        found = backend.checkpoint("a", 2)
        assert found is not None
        assert found[0].data == b""

    def test_size_grows_with_what_is_stored(self, backend: StoreBackend) -> None:
        noise = random.Random(1).randbytes
        new = owned("a", data=noise(2000))
        created(backend, new, owned("b", data=noise(90_000)))
        sizes = [backend.size("a")]
        head = new.head
        for fields in ({"blobs": {"b": noise(20_000)}}, {"put": {"e": noise(20_000)}}):
            save = change("a", head, **fields)
            done(backend, save)
            head = save.head
            sizes.append(backend.size("a"))
        assert sizes[0] >= 2000
        assert sizes[1] - sizes[0] >= 20_000
        assert sizes[2] - sizes[1] >= 20_000
        done(backend, send("a", payload=noise(20_000)))
        assert backend.size("a") - sizes[2] >= 20_000
        assert backend.size("b") >= 90_000

    def test_dropped_blobs_give_their_space_back(self, backend: StoreBackend) -> None:
        """I16: what an execution takes is bounded by what it keeps, sooner or later, not by what it has written."""
        noise = random.Random(2).randbytes
        new = owned("a", blobs={"b1": noise(20_000)})
        created(backend, new)
        head, written = new.head, 20_000
        for first in range(2, 302, 30):
            saves: list[Save] = []
            for seq in range(first, first + 30):
                row = boundary(seq, blobs=(f"b{seq}",))
                blobs, gone = {f"b{seq}": noise(20_000)}, (f"b{seq - 1}",)
                saves.append(step("a", head, boundaries=(row,), blobs=blobs, keep_from=seq, drop_blobs=gone))
                head, written = saves[-1].head, written + 20_000
            done(backend, *saves)
        assert backend.size("a") < written / 2

    def test_a_reader_never_sees_half_a_write(self, backend: StoreBackend) -> None:
        """`load` is consistent in itself while the owner writes and retention removes."""
        new = owned("a", blobs={"b1": b"1"})
        created(backend, new)
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                found = loaded(backend, "a")
                seq = found.head.seq
                assert (found.boundary.seq, found.head.revision) == (seq, seq - 1)
                assert found.blobs == {f"b{seq}": str(seq).encode()}
                assert found.entries == ({"e": str(seq).encode()} if seq > 1 else {})
                assert [number for number, _ in found.kept] == list(range(max(1, seq - 1), seq + 1))

        with beside(read, stop) as reading:
            head = new.head
            for seq in range(2, 80):
                data = str(seq).encode()
                save = step(
                    "a", head, boundaries=(boundary(seq, blobs=(f"b{seq}",)),), blobs={f"b{seq}": data}, clear=True,
                    put={"e": data}, keep_from=seq - 1, drop_blobs=(f"b{seq - 2}",),
                )  # fmt: skip
                done(backend, save)
                head = save.head
            stop.set()
            reading.result(PATIENCE)


class DeleteContract(ConformanceBase):
    def test_what_is_finished_is_removed_with_all_it_had(self, backend: StoreBackend) -> None:
        """I16."""
        new = owned("a", blobs={"b": b"x"}, metadata={"k": "v"})
        failed = {"state": ExecutionState.FAILED, "owner": None, "ended": NOW}
        failing = change("a", new.head, head_fields=failed, put={"e": b"1"})
        done(backend, new, send("a", key="k"), failing)
        assert backend.delete(["a"]) == [True]
        assert backend.load("a") is None
        assert backend.checkpoint("a", 1) is None
        assert (backend.boundaries("a"), backend.messages("a"), backend.size("a")) == ([], [], 0)
        assert (backend.find(Query()), backend.count(Query()), backend.sent("a")) == ([], {}, (0, {}))

    def test_a_removed_id_starts_over(self, backend: StoreBackend) -> None:
        """Nothing of the old one shows: no entry, no blob, no boundary, no key, no number."""
        new = owned("a", blobs={"b": b"x"})
        ended = {"state": ExecutionState.CANCELLED, "owner": None, "ended": NOW}
        second = step("a", new.head, put={"e": b"1"})
        done(backend, new, send("a", key="k"), send("a"), second, change("a", second.head, head_fields=ended))
        assert backend.delete(["a"]) == [True]
        again = create("a", ExecutionState.INITIALIZED, data=b"anew")
        created(backend, again)
        found = loaded(backend, "a")
        assert (found.head, found.boundary, found.kept) == (again.head, again.boundary, ((1, ()),))
        assert (found.entries, found.messages, found.blobs) == ({}, (), {})
        assert [one.seq for one in backend.boundaries("a")] == [1]
        assert done(backend, send("a", key="k")) == [1]

    @pytest.mark.parametrize("state", list(ExecutionState))
    def test_only_what_is_finished(self, backend: StoreBackend, state: ExecutionState) -> None:
        new = create("a", state)
        created(backend, new)
        assert backend.delete(["a"]) == [state.finished]
        assert (backend.load("a") is None) == state.finished

    def test_each_id_has_its_own_answer(self, backend: StoreBackend) -> None:
        created(backend, create("a", ExecutionState.COMPLETED), create("b"), create("c", ExecutionState.FAILED))
        assert backend.delete(["nowhere", "a", "b", "c"]) == [False, True, False, True]
        assert backend.delete(["a", "c"]) == [False, False]
        assert backend.delete([]) == []
        assert [one.definition.id for one in backend.find(Query())] == ["b"]

    @pytest.mark.parametrize("state", list(ExecutionState))
    def test_what_cannot_be_read_can_be_removed(self, state: ExecutionState) -> None:
        """I5: whatever state it was in, nobody can go on with it; nothing of it shows in another of the same id."""
        new = owned("a", state=state, blobs={"b": b"x"}, parent_id="p")
        with opened(self.make_store().backend) as backend:
            done(backend, new, send("a", key="k"), step("a", new.head, put={"e": b"1"}))
            created(backend, create("b"))
        self.damage_definition("a")
        with opened(self.second_store().backend) as backend:
            with pytest.raises(CorruptDataError):
                backend.load("a")
            assert backend.delete(["a", "b", "a"]) == [True, False, False]
            assert backend.delete(["a"]) == [False]
            assert [one.definition.id for one in backend.find(Query())] == ["b"]
            assert sum(backend.count(Query()).values()) == 1
            assert ids_of(backend.claim(claim("you", dead=frozenset({"me"}), states=EVERY_STATE))) == ["b"]
            created(backend, create("a", ExecutionState.INITIALIZED, data=b"anew"))
            found = loaded(backend, "a")
            assert (found.boundary.data, found.entries, found.messages, found.blobs) == (b"anew", {}, (), {})
            assert [one.seq for one in backend.boundaries("a")] == [1]
            assert done(backend, send("a", key="k")) == [1]
