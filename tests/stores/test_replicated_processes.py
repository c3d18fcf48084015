"""Several processes on one pair of stores: the witness, partitions, and repairs while others write (I3, I13)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from longrun.errors import ConfigError, LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stores._replicated.tending import JOIN_PATIENCE, JOIN_SIGN
from longrun.stores._replicated.term import Term
from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend, MemoryCheckpointStore
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore, StoreWitness, Witness
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing import ManualClock
from longrun.testing.samples import claim, create, owned, send, step
from tests.stores.replicated_tools import (
    PATIENCE,
    Switch,
    Unreachable,
    assert_equal,
    beside,
    created,
    done,
    head_of,
    opened,
    refused,
)


class Process:
    """One process's own way to the two stores and the witness, each of which can be cut."""

    def __init__(self, stores: tuple[StoreBackend, StoreBackend], witness: Witness | None, **options: Any) -> None:
        self.primary, self.secondary = Switch(stores[0]), Switch(stores[1])
        self.witness = None if witness is None else Unreachable(witness)
        settings = {"health_interval": None, "failback_after": None, **options}
        self.store = ReplicatedCheckpointStore(self.primary, self.secondary, witness=self.witness, **settings)
        self.backend = self.store.backend

    @property
    def parts(self) -> tuple[str | None, str | None]:
        status = self.store.status()
        return status.active, status.standby


@pytest.fixture(params=["directory", "store"])
def witness(request: pytest.FixtureRequest, tmp_path: Path) -> Witness:
    if request.param == "directory":
        return DirectoryWitness(tmp_path / "witness")
    return StoreWitness(SQLiteBackend(tmp_path / "witness.db"), name="pair")


@pytest.fixture
def stores() -> tuple[StoreBackend, StoreBackend]:
    return MemoryBackend(), MemoryBackend()


Two = tuple[Process, Process]


@pytest.fixture
def two(stores: tuple[StoreBackend, StoreBackend], tmp_path: Path) -> Any:
    witness = DirectoryWitness(tmp_path / "witness")
    one, other = Process(stores, witness), Process(stores, witness)
    with opened(one.backend), opened(other.backend):
        yield one, other


def test_of_those_who_propose_a_term_one_wins(witness: Witness) -> None:
    """Whoever asks, however often: the same one."""
    witness.open()
    winner = None
    for generation in range(1, 8):
        terms = [Term(generation=generation, pair="p", active="primary", standby="level", by=f"{n}") for n in range(8)]
        start = threading.Barrier(len(terms))

        def propose(term: Term, start: threading.Barrier = start) -> bool:
            start.wait(PATIENCE)
            return witness.propose(term)

        if isinstance(witness, DirectoryWitness):
            with ThreadPoolExecutor(len(terms)) as pool:
                answers = list(pool.map(propose, terms))
        else:
            answers = [witness.propose(term) for term in terms]
        (winner,) = [term for term, won in zip(terms, answers, strict=True) if won]
        assert witness.read() == winner
        assert [witness.propose(term) for term in terms] == answers
    old = Term(generation=2, pair="p", active="secondary", standby="behind", by="late")
    assert witness.propose(old) is False
    assert witness.read() == winner
    witness.close()


def test_a_witness_survives_its_process(tmp_path: Path) -> None:
    term = Term(generation=1, pair="p", active="primary", standby="level", by="me")
    for make in (
        lambda: DirectoryWitness(tmp_path / "w"),
        lambda: StoreWitness(SQLiteBackend(tmp_path / "w.db")),
    ):
        first: Witness = make()
        first.open()
        assert first.read() is None
        assert first.propose(term)
        first.close()
        second: Witness = make()
        second.open()
        assert (second.read(), second.propose(term)) == (term, True)
        second.close()


def test_two_pairs_share_a_witness_store() -> None:
    backend = MemoryBackend()
    one, two = StoreWitness(backend, name="one"), StoreWitness(backend, name="two")
    term = Term(generation=1, pair="p", active="primary", standby="level", by="me")
    assert one.propose(term)
    assert two.read() is None


def test_a_store_that_cannot_be_shared_is_no_witness() -> None:
    backend = MemoryBackend()
    backend.fenced = False
    with pytest.raises(ConfigError, match="witness"):
        StoreWitness(backend)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"failover_reset": None}, "a number of seconds"),
        ({"failover_reset": -1.0}, "a number of seconds"),
        ({"failover_reset": float("inf")}, "a number of seconds"),
        ({"failback_after": float("nan")}, "a number of seconds"),
        ({"failback_after": 1e12}, "a number of seconds, 0 or more and at most"),
        ({"health_interval": 0}, "a number of seconds, more than 0 and at most"),
        ({"health_interval": float("inf")}, "a number of seconds"),
        ({"health_interval": float("nan")}, "a number of seconds"),
        ({"health_interval": 1e12}, "a number of seconds"),
        ({"health_interval": True}, "a number of seconds"),
        ({"max_failovers": -1}, "from 0 on"),
        ({"strikes": 0}, "from 1 on"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReplicatedCheckpointStore(MemoryBackend(), MemoryBackend(), single_process=True, **options)


def test_a_join_whose_process_died_is_begun_anew_by_another(
    stores: tuple[StoreBackend, StoreBackend], tmp_path: Path
) -> None:
    """While its process lives it is left to it, however long it takes."""
    witness, clock = DirectoryWitness(tmp_path / "witness"), ManualClock()
    one, other = Process(stores, witness, clock=clock), Process(stores, witness, clock=clock)
    with opened(one.backend), opened(other.backend):
        created(one.backend, *[create(f"x{n}") for n in range(10)])
        one.secondary.down = True
        created(one.backend, create("late"))
        one.secondary.down = False
        looks: list[tuple[str | None, str | None]] = []

        def pass_time(call: str) -> None:
            """A comparison that takes hours: beside each thing that it reads, another process looks at the pair."""
            if call == "messages":
                clock.advance(JOIN_SIGN)
                other.backend.check()
                looks.append(other.parts)

        one.secondary.told = pass_time
        one.backend.check()
        assert looks == [("primary", "joining")] * len(looks)
        assert len(looks) * JOIN_SIGN > JOIN_PATIENCE
        assert one.parts == ("primary", "level")

        one.secondary.down = True
        created(one.backend, create("later"))
        one.secondary.down = False
        one.secondary.told = lambda call: _die() if call == "find" else None
        with pytest.raises(KeyboardInterrupt):
            one.backend.check()
        other.backend.check()
        assert other.parts == ("primary", "joining")
        clock.advance(JOIN_PATIENCE)
        other.backend.check()
        assert other.parts == ("primary", "level")
    assert_equal(*stores)


def _die() -> None:
    raise KeyboardInterrupt  # as good as a SIGKILL: nothing catches it


def test_a_witness_that_has_forgotten_the_pair_consents_to_nothing(
    stores: tuple[StoreBackend, StoreBackend], tmp_path: Path
) -> None:
    """An empty directory is what is left of a share that is not mounted; on another machine it is another one."""
    process = Process(stores, DirectoryWitness(tmp_path / "witness"))
    with opened(process.backend):
        for file in (tmp_path / "witness").iterdir():
            file.unlink()
        process.primary.down = True
        with pytest.raises(StoreUnavailableError, match="the witness has forgotten this pair"):
            process.backend.commit([create("a")])
        with pytest.raises(StoreUnavailableError, match="the witness has forgotten this pair"):
            process.backend.failover(force=True)
        assert process.parts == ("primary", "level")


def test_a_witness_can_be_given_to_a_pair_of_long_standing(
    stores: tuple[StoreBackend, StoreBackend], tmp_path: Path
) -> None:
    before = Process(stores, None)
    with opened(before.backend):
        before.backend.failover()
    process = Process(stores, DirectoryWitness(tmp_path / "witness"))
    with opened(process.backend):
        process.secondary.down = True
        created(process.backend, create("a"))
        assert process.parts == ("primary", "behind")


def test_the_others_follow(two: Two) -> None:
    """One process loses the primary and fails over; the other, which still reaches both, loses nothing (I3)."""
    one, other = two
    new = owned("a", "one")
    created(one.backend, new)
    mine = owned("b", "two")
    created(other.backend, mine)
    one.primary.down = True
    saved = step("a", new.head)
    done(one.backend, saved)
    assert one.parts == ("secondary", "behind")
    after = step("b", mine.head)
    done(other.backend, after, send("a"))
    assert head_of(one.backend, "b") == after.head
    assert len(one.backend.messages("a")) == 1
    other.backend.check()
    assert other.parts[0] == "secondary"
    (given,) = other.backend.claim(claim("two", ids=("a",), dead=frozenset({"one"})))
    assert given.head.revision == saved.head.revision
    refused(one.backend, step("a", saved.head), LeaseLostError)


def test_a_stale_claimer_gets_nothing_from_an_old_primary(two: Two) -> None:
    """I3: it has not heard of the failover, and its primary shows an execution as free that is not."""
    one, other = two
    created(one.backend, create("a", ExecutionState.INITIALIZED))
    one.primary.down = True
    (given,) = one.backend.claim(claim("one"))
    saved = step("a", given.head)
    done(one.backend, saved)
    assert other.backend.claim(claim("two")) == []
    assert other.parts[0] == "secondary"
    done(one.backend, step("a", saved.head))


def test_a_stale_owner_is_refused_although_the_old_primary_takes_its_write(two: Two) -> None:
    """I3: it was taken over at the secondary, and has not heard of the failover."""
    one, other = two
    new = owned("a", "two")
    created(other.backend, new)
    one.primary.down = True
    (given,) = one.backend.claim(claim("one", dead=frozenset({"two"})))
    refused(other.backend, step("a", new.head), LeaseLostError)
    assert other.parts[0] == "secondary"
    done(one.backend, step("a", given.head))
    one.primary.down = False
    one.backend.check()
    assert_equal(one.primary, one.secondary)


def test_of_two_halves_one_goes_on(two: Two) -> None:
    """I3: one reaches only the primary, the other only the secondary."""
    one, other = two
    new = owned("a", "one")
    created(one.backend, new)
    one.secondary.down, other.primary.down = True, True
    created(one.backend, create("here"))
    with pytest.raises(StoreUnavailableError):
        other.backend.commit([create("there")])
    with pytest.raises(StoreUnavailableError):
        other.backend.load("a")
    done(one.backend, step("a", new.head))
    one.secondary.down = other.primary.down = False
    other.backend.check()
    one.backend.check()
    assert one.parts == other.parts == ("primary", "level")
    assert other.backend.load("there") is None
    assert_equal(one.primary, one.secondary)


def test_without_the_witness_nothing_changes(two: Two) -> None:
    """Both stores answer: work goes on. One does not: nobody may decide."""
    one, _ = two
    assert one.witness is not None
    one.witness.down = True
    created(one.backend, create("a"))
    for side in (one.primary, one.secondary):
        side.down = True
        with pytest.raises(StoreUnavailableError):
            one.backend.commit([create("b")])
        side.down = False
    assert one.parts == ("primary", "level")
    created(one.backend, create("c"))
    one.witness.down, one.primary.down = False, True
    created(one.backend, create("d"))
    assert one.parts == ("secondary", "behind")


def test_failing_over_by_hand_is_followed(stores: tuple[StoreBackend, StoreBackend]) -> None:
    one, other = Process(stores, None), Process(stores, None)
    with opened(one.backend), opened(other.backend):
        created(one.backend, create("a"))
        one.primary.down = other.primary.down = True
        for process in (one, other):
            with pytest.raises(StoreUnavailableError, match=r"failover\(\)"):
                process.backend.load("a")
        one.backend.failover()
        assert other.backend.load("a") is not None
        done(other.backend, send("a"))
        assert other.parts == ("secondary", "behind")
        one.primary.down = other.primary.down = False
        one.backend.check()
        done(other.backend, send("a"))
        assert other.parts == one.parts == ("secondary", "level")
        assert_equal(one.primary, one.secondary)


def test_who_goes_on_alone_notices_that_the_other_store_is_back(two: Two) -> None:
    """I13: acknowledged is only what both have again, although this process had not heard of it."""
    one, other = two
    new = owned("a", "one")
    created(one.backend, new)
    one.secondary.down = True
    saved = step("a", new.head)
    done(one.backend, saved)
    other.backend.check()
    assert (one.parts, other.parts) == (("primary", "behind"), ("primary", "level"))
    one.secondary.down = False
    done(one.backend, step("a", saved.head), send("a", key="k"), create("b"))
    assert one.parts == ("primary", "level")
    one.backend.delete(["b"])
    assert_equal(one.primary, one.secondary)


def test_a_second_single_process_is_found_out(stores: tuple[StoreBackend, StoreBackend]) -> None:
    one, other = Process(stores, None, single_process=True), Process(stores, None, single_process=True)
    with opened(one.backend), opened(other.backend):
        created(other.backend, create("a"))
        for _ in range(3):  # it does not forget
            with pytest.raises(StoreUnavailableError, match="single_process"):
                one.backend.check()
            with pytest.raises(StoreUnavailableError, match="single_process"):
                one.backend.commit([create("b")])
        for force in (False, True):
            with pytest.raises(StoreUnavailableError, match="single_process"):
                one.backend.failover(force=force)
        created(other.backend, create("c"))
    with opened(one.backend):
        created(one.backend, create("b"))


def test_a_single_process_finds_a_second_one_when_it_changes_the_term(
    stores: tuple[StoreBackend, StoreBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its next round, since a store is away."""
    one, other = Process(stores, None, single_process=True), Process(stores, None, single_process=True)
    with opened(one.backend):
        monkeypatch.setattr(one.backend._council, "newest", lambda: None)  # the other comes just after it has looked
        with opened(other.backend):
            one.secondary.down = True
            with pytest.raises(StoreUnavailableError, match="single_process"):
                one.backend.commit([create("b")])
            monkeypatch.undo()
            one.secondary.down = False
            with pytest.raises(StoreUnavailableError, match="single_process"):
                one.backend.check()
            created(other.backend, create("c"))


def test_it_is_brought_up_to_date_while_everybody_writes(two: Two) -> None:
    """I13: saves, messages and new executions of two processes go on during the comparison; in the end all is equal."""
    one, other = two
    news = {name: [owned(f"{name}{n}", name) for n in range(15)] for name in ("one", "two")}
    for process, name in ((one, "one"), (other, "two")):
        created(process.backend, *news[name])
    one.secondary.down = other.secondary.down = True
    done(one.backend, *[step(new.id, new.head) for new in news["one"]])
    done(other.backend, send("one1", key="early"))
    one.secondary.down = other.secondary.down = False
    stop = threading.Event()

    def work(process: Process, name: str, skip: int) -> int:
        heads = {new.id: new.head for new in news[name]}
        if skip:
            heads = {id: step(id, head).head for id, head in heads.items()}
        rounds = 0
        while not stop.is_set() and rounds < 200:
            saves = [step(id, head) for id, head in heads.items()]
            done(process.backend, *saves, send("two3", key=f"{name}{rounds}"), send("one2"))
            done(process.backend, owned(f"{name}-new{rounds}", name))
            heads = {save.id: save.head for save in saves}
            rounds += 1
        return rounds

    with beside(lambda: work(one, "one", 1), stop) as first, beside(lambda: work(other, "two", 0), stop) as second:
        other.backend.check()
        assert other.parts == ("primary", "level")
        stop.set()
        assert first.result(PATIENCE) + second.result(PATIENCE) > 0
    one.backend.check()
    assert one.parts == ("primary", "level")
    assert_equal(one.primary, one.secondary)


def test_a_repair_that_is_cut_off_is_made_again(stores: tuple[StoreBackend, StoreBackend]) -> None:
    """A crash in the middle of bringing a store up to date, after each of its writes in turn."""
    process = Process(stores, None, single_process=True)
    with opened(process.backend) as backend:
        new = owned("a", blobs={"b": b"x"})
        saved = step("a", new.head, put={"e": b"1"})
        done(backend, new, send("a", key="k"), saved, create("z", ExecutionState.FAILED))
        process.secondary.down = True
        after = step("a", saved.head, take=(1,), keep_from=3)
        done(backend, after, send("a"), create("c"))
        backend.delete(["z"])
    for fuse in range(1, 40):
        process.secondary.down, process.secondary.fuse = False, fuse
        with opened(Process((stores[0], process.secondary), None, single_process=True).backend) as again:
            try:
                again.check()
            except StoreUnavailableError:
                continue
            if again.status().standby == "level" and not process.secondary.down:
                break
    else:
        pytest.fail("it never came to an end")
    assert fuse > 5
    assert_equal(*stores)


def test_the_witness_may_be_any_store(tmp_path: Path) -> None:
    made: list[Callable[[], Witness]] = [
        lambda: StoreWitness(MemoryCheckpointStore()),
        lambda: DirectoryWitness(str(tmp_path / "w")),
    ]
    for make in made:
        process = Process((MemoryBackend(), MemoryBackend()), make())
        with opened(process.backend) as backend:
            created(backend, create("a"))
            process.primary.down = True
            assert backend.load("a") is not None
            assert process.store.status().automatic
