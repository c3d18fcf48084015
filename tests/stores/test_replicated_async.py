"""Asynchronous replication: a bounded queue that keeps the order, makes writers wait, and drops nothing (I13)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Owner, Save
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from longrun.testing.samples import change, claim, create, owned, send, signal, step
from tests.stores.replicated_tools import (
    PATIENCE,
    Switch,
    Unreachable,
    assert_equal,
    beside,
    created,
    done,
    head_of,
    make,
    opened,
)


@pytest.mark.thorough
class TestAsynchronous(StoreConformance):
    """The active side alone answers; everything else is the same."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        for name in ("primary", "secondary"):
            (tmp_path / name).mkdir()
        self.path = tmp_path

    def make_store(self) -> CheckpointStore:
        primary, secondary = make("sqlite", self.path / "primary"), make("sqlite", self.path / "secondary")
        return ReplicatedCheckpointStore(primary, secondary, mode="async", health_interval=None)


class Pair:
    def __init__(self, backends: tuple[MemoryBackend, MemoryBackend] | None = None, **options: Any) -> None:
        first, second = backends or (MemoryBackend(), MemoryBackend())
        self.primary, self.secondary = Switch(first), Switch(second)
        self.options = {"mode": "async", "single_process": True, "health_interval": None, **options}
        self.store = self.again()
        self.backend = self.store.backend

    def again(self) -> ReplicatedCheckpointStore:
        return ReplicatedCheckpointStore(self.primary, self.secondary, **self.options)


def test_the_queue_keeps_the_order_of_every_execution() -> None:
    """Saves, messages, claims and deletions come over as they were made; nothing has to be repaired."""
    pair = Pair()
    with opened(pair.backend) as backend:
        heads = {}
        for n in range(20):
            new = owned(f"x{n}")
            created(backend, new)
            heads[new.id] = new.head
        for _ in range(10):
            saves = [step(id, head) for id, head in heads.items()]
            done(backend, *saves, *[send(save.id) for save in saves])
            heads = {save.id: save.head for save in saves}
        backend.claim(claim("you", ids=("x1",), dead=frozenset({"me"})))
        done(backend, change("x2", heads["x2"], head_fields={"state": ExecutionState.FAILED, "owner": None}))
        backend.delete(["x2"])
        backend.register(Owner(id="me", life={}, remaining=0), 100.0)
    assert_equal(pair.primary, pair.secondary)
    assert pair.backend._mirror.copied == 0
    assert pair.store.status().lag == 0


def test_a_full_queue_makes_writers_wait() -> None:
    """And nothing is dropped; `lag` says how much is not copied yet."""
    pair = Pair(queue_limit=10)
    with opened(pair.backend) as backend:
        pair.secondary.open_gate.clear()
        for n in range(10):
            created(backend, create(f"x{n}"))
        assert pair.store.status().lag == 10
        started = threading.Event()

        def one_more() -> None:
            started.set()
            created(backend, create("late"))

        with beside(one_more, pair.secondary.open_gate) as waiting:
            assert started.wait(PATIENCE)
            assert not waiting.done()
            assert pair.secondary.load("late") is None
            pair.secondary.open_gate.set()
            waiting.result(PATIENCE)
    assert_equal(pair.primary, pair.secondary)


def test_a_copy_that_fails_is_tried_again() -> None:
    """Errors are counted, and the order stays."""
    pair = Pair(strikes=1000)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.backend._lag.drain()
        tries = threading.Semaphore(0)
        pair.secondary.told = lambda call: tries.release() if call == "commit" else None
        pair.secondary.down = True
        done(backend, send("a"), send("a"), create("b"))
        for _ in range(3):
            assert tries.acquire(timeout=PATIENCE)
        assert pair.store.status().errors >= 2
        assert pair.store.status().lag == 3
        pair.secondary.down = False
    assert_equal(pair.primary, pair.secondary)


def test_a_standby_that_stays_away_is_left_behind() -> None:
    """Work goes on without it; what was queued comes over when it is back, with the rest."""
    pair = Pair(strikes=2, queue_limit=5)
    with opened(pair.backend) as backend:
        created(backend, create("a", ExecutionState.FAILED))
        pair.backend._lag.drain()
        pair.secondary.down = True
        for n in range(30):
            created(backend, create(f"x{n}"))
        backend.delete(["a"])
        status = pair.store.status()
        assert (status.active, status.standby, status.lag) == ("primary", "behind", 0)
        assert status.errors >= 2
        pair.secondary.down = False
        backend.check()
        assert pair.store.status().standby == "level"
    assert_equal(pair.primary, pair.secondary)


def test_failing_over_brings_the_queue_along() -> None:
    """I13: while this process lives, not even the lag is lost."""
    pair = Pair()
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.secondary.open_gate.clear()
        saved = step("a", new.head)
        done(backend, saved, send("a", key="k"), create("b"))
        pair.primary.down = True
        pair.secondary.open_gate.set()
        assert backend.load("a").head == saved.head
        assert done(backend, send("a", key="k"), step("a", saved.head)) == [1, None]
        assert pair.store.status().active == "secondary"


def test_what_only_the_old_primary_has_is_taken_back() -> None:
    """The process died with its queue, the secondary went on. New executions come back, deleted ones do not."""
    pair = Pair(failback_after=None)
    with opened(pair.backend) as backend:
        created(backend, create("old", ExecutionState.FAILED), create("both"))
    pair.primary.inner.commit([create("never copied"), send("both", payload=b"lost")])
    with opened(pair.again().backend) as backend:
        pair.primary.down = True
        assert backend.delete(["old"]) == [True]
        done(backend, send("both", payload=b"kept"))
        pair.primary.down = False
        backend.check()
        assert backend.load("never copied") is not None
        assert backend.load("old") is None
        assert [message.payload for message in backend.messages("both")] == [b"kept"]
    assert_equal(pair.primary, pair.secondary)


def test_what_was_queued_at_a_crash_is_copied_at_the_next_start() -> None:
    """Deletions too: the active side rules."""
    pair = Pair()
    with opened(pair.backend) as backend:
        created(backend, create("a", ExecutionState.FAILED), create("b"))
    pair.primary.inner.commit([create("queued"), send("b")])
    pair.primary.inner.delete(["a"])
    again = pair.again()
    with opened(again.backend) as backend:
        backend.check()
        assert pair.secondary.load("queued") is not None
    assert_equal(pair.primary, pair.secondary)


async def test_closing_drains_and_may_be_done_twice() -> None:
    pair = Pair(queue_limit=1000)
    async with pair.store as store:
        pair.secondary.open_gate.clear()
        for n in range(100):
            await store.create(create(f"x{n}"))
        await store.send("x1", signal())
        assert store.status().lag == 101
        threading.Timer(0.1, pair.secondary.open_gate.set).start()
    assert_equal(pair.primary, pair.secondary)
    await store.aclose()
    pair.backend.close()
    with pytest.raises(StoreUnavailableError):
        await store.create(create("late"))


def broken(pair: Pair) -> Any:
    """An open pair with one write in a queue that has given up: the standby is away."""
    backend = pair.backend
    backend.check()  # everything is compared once, at the start
    created(backend, create("a"))
    assert backend._lag.drain() is None
    pair.secondary.down = True
    created(backend, create("late"))
    assert backend._lag.drain() is not None
    return backend


def test_a_queue_that_gave_up_goes_on_when_the_standby_is_back() -> None:
    """With nothing written meanwhile: the next round sees to it."""
    pair = Pair(strikes=2)
    with opened(pair.backend):
        backend = broken(pair)
        pair.secondary.down = False
        backend.check()
        assert backend._lag.drain() is None
        assert (pair.store.status().standby, pair.store.status().lag) == ("level", 0)
        assert pair.secondary.load("late") is not None


def test_a_standby_that_a_round_finds_away_is_not_called_level() -> None:
    pair = Pair(strikes=2)
    with opened(pair.backend):
        broken(pair).check()
        assert (pair.store.status().standby, pair.store.status().lag) == ("behind", 0)


def test_a_standby_that_answers_and_takes_nothing_is_left_behind() -> None:
    """A full disk pings and reads: the queue is tried once more, and then given up."""
    pair = Pair(strikes=2)
    with opened(pair.backend):
        backend = broken(pair)
        pair.secondary.down, pair.secondary.full = False, True
        backend.check()
        assert backend._lag.drain() is not None
        with pytest.raises(StoreUnavailableError):  # it is joined at once, and cannot be told so
            backend.check()
        assert (pair.store.status().standby, pair.store.status().lag) == ("joining", 0)


def test_closing_copies_what_a_standby_that_is_back_lacks() -> None:
    pair = Pair(strikes=2)
    with opened(pair.backend):
        broken(pair)
        pair.secondary.down = False
    assert_equal(pair.primary, pair.secondary)


def test_a_standby_that_is_away_at_the_end_does_not_become_active_afterwards(tmp_path: Path) -> None:
    """I13: what it lacks was acknowledged, and the store was closed in good order."""
    pair = Pair(strikes=2, single_process=False, witness=DirectoryWitness(tmp_path / "witness"))
    with opened(pair.backend):
        broken(pair)
    pair.secondary.down, pair.primary.down = False, True
    with opened(pair.again().backend) as backend:
        with pytest.raises(StoreUnavailableError, match="not open"):
            backend.load("late")
        pair.primary.down = False
        backend.check()
        assert backend.load("late") is not None
    assert_equal(pair.primary, pair.secondary)


@pytest.mark.parametrize("looks", [True, False])
def test_a_queue_that_gave_up_needs_no_witness_to_go_on(tmp_path: Path, looks: bool) -> None:
    """Both stores answer again, so work goes on, whether a round comes first or a write."""
    witness = Unreachable(DirectoryWitness(tmp_path / "witness"))
    pair = Pair(strikes=2, single_process=False, witness=witness)
    with opened(pair.backend):
        backend = broken(pair)
        pair.secondary.down, witness.down = False, True
        if looks:
            backend.check()
        created(backend, create("more"))
        assert backend._lag.drain() is None
        assert pair.secondary.load("more") is not None
        witness.down = False
    assert_equal(pair.primary, pair.secondary)


def test_closing_says_what_neither_the_standby_nor_the_witness_could_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Unreachable(DirectoryWitness(tmp_path / "witness"))
    pair = Pair(strikes=2, single_process=False, witness=witness)
    with opened(pair.backend):
        broken(pair)
        witness.down = True
    assert "replica.not_copied" in caplog.text


class Neighbours:
    """Two processes with an asynchronous pair between them. The first has a long way to the secondary: it can be held
    up there, while what it does is acknowledged."""

    def __init__(self, path: Path) -> None:
        stores = MemoryBackend(), MemoryBackend()
        self.slow, self.quick = self._process(stores, path, None), self._process(stores, path, 0.0)
        self.far = self.slow.secondary
        self.stores = stores

    def _process(self, stores: tuple[MemoryBackend, MemoryBackend], path: Path, failback: float | None) -> Pair:
        return Pair(backends=stores, single_process=False, witness=DirectoryWitness(path), failback_after=failback)


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[Neighbours]:
    made = Neighbours(tmp_path / "witness")
    with opened(made.slow.backend) as slow, opened(made.quick.backend) as quick:
        for backend in (slow, quick):
            backend.check()
        yield made
        made.far.open_gate.set()


def test_what_another_process_has_in_its_queue_comes_over_before_the_parts_are_exchanged(
    neighbours: Neighbours,
) -> None:
    """I1, I3: by hand, with both stores well: nobody takes up what that process has, in a state that it had before."""
    slow, quick = neighbours.slow.backend, neighbours.quick.backend
    new = owned("a")
    created(slow, new, create("b"))
    slow._lag.drain()
    neighbours.far.open_gate.clear()
    saved = step("a", new.head)
    done(slow, saved)
    assert [one.definition.id for one in slow.claim(claim(owner="slow", ids=("b",)))] == ["b"]
    assert neighbours.slow.store.status().lag > 0
    quick.failover()
    assert quick.claim(claim(owner="quick", ids=("b",))) == []
    assert head_of(quick, "a") == saved.head
    neighbours.far.open_gate.set()
    done(slow, step("a", saved.head))
    assert neighbours.slow.store.status().active == "secondary"
    assert head_of(quick, "a").revision == saved.head.revision + 1


def test_what_a_process_acknowledges_before_it_has_seen_the_exchange_is_not_lost(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: also when it dies, with whatever is in its queue, before anybody else looks."""
    slow, quick = neighbours.slow.backend, neighbours.quick.backend
    created(slow, create("first"))
    quick.failover()
    monkeypatch.setattr(slow._lag, "put", lambda weight, copy: None)  # it dies before its turn comes
    created(slow, *[create(f"x{n}") for n in range(10)])
    quick.resync()
    assert [quick.load(f"x{n}") is not None for n in range(10)] == [True] * 10


def test_a_copy_that_waited_in_a_queue_at_the_exchange_is_not_made_behind_it(neighbours: Neighbours) -> None:
    """A claim that waits in a queue, and is over by then, must not be made again."""
    slow, quick = neighbours.slow.backend, neighbours.quick.backend
    created(slow, create("a", ExecutionState.INITIALIZED))
    slow._lag.drain()
    neighbours.far.open_gate.clear()
    created(slow, create("b"))  # its copy is on its way
    [taken] = slow.claim(claim(owner="slow", ids=("a",)))
    given_back = attrs.evolve(taken.head, owner=None, revision=taken.head.revision + 1)
    done(slow, Save(id="a", head=given_back))
    quick.failover()
    neighbours.far.open_gate.set()
    slow._lag.drain()
    assert head_of(quick, "a") == given_back


def test_the_parts_are_exchanged_back_in_the_same_way(neighbours: Neighbours) -> None:
    slow, quick = neighbours.slow.backend, neighbours.quick.backend
    quick.failover()
    slow.check()
    neighbours.slow.primary.open_gate.clear()
    created(slow, create("a"))
    assert neighbours.slow.store.status().lag == 1
    quick.check()
    assert neighbours.quick.store.status().active == "primary"
    assert neighbours.stores[0].load("a") is not None
    neighbours.slow.primary.open_gate.set()
