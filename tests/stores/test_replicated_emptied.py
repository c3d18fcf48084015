"""A store of a pair that loses everything while the pair is at work: a Redis that kept nothing on disk and was started
again, a database that was dropped. It answers, and what it says is not the truth (I13)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longrun.errors import StoreSettingsError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Owner, Query
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import read_term
from longrun.stores.memory import MemoryBackend
from longrun.testing.samples import claim, create, owned, send, step
from tests.stores.replicated_tools import Pair, Switch, assert_equal, created, done, opened

READS = ["load", "head", "find", "count", "boundaries", "checkpoint", "messages", "owners"]


@pytest.fixture
def quick(tmp_path: Path) -> Callable[..., Pair]:
    return lambda **options: Pair(tmp_path, **{"failback_after": None, **options})


def emptied(store: Switch) -> None:
    store.inner = MemoryBackend()
    store.inner.open()


def ids(store: Switch) -> list[str]:
    return sorted(row.definition.id for row in store.find(Query()))


def knows_the_pair(name: str, store: Switch) -> bool:
    side = Side(name, store)
    side.open()
    return read_term(side) is not None


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("call", [*READS, "commit", "check"])
def test_the_secondary_goes_on_when_the_primary_was_emptied(quick: Callable[..., Pair], mode: str, call: str) -> None:
    pair = quick(mode=mode)
    with opened(pair.backend) as backend:
        new = owned("a")
        done(backend, new, send("a"), create("z", ExecutionState.FAILED))
        backend.register(Owner(id="me", life={}, remaining=0), 100.0)
        backend._lag.drain()
        emptied(pair.primary)
        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: backend.load("a").definition.id,
            "head": lambda: backend.head("a").fence,
            "find": lambda: [row.definition.id for row in backend.find(Query())],
            "count": lambda: sum(backend.count(Query()).values()),
            "boundaries": lambda: len(backend.boundaries("a")),
            "checkpoint": lambda: backend.checkpoint("a", 1)[0].seq,
            "messages": lambda: len(backend.messages("a")),
            "owners": lambda: [owner.id for owner in backend.owners()],
            "commit": lambda: done(backend, step("a", new.head)),
        }
        expected = [1, 1, "a", ["z", "a"], 2, 1, 1, ["me"], [None]]
        if call == "check":
            with pytest.raises(StoreSettingsError, match="the primary is empty and knows nothing of this pair"):
                backend.check()
        else:
            assert calls[call]() in expected
        assert pair.parts == ("secondary", "behind")
        assert [backend.load(id) is not None for id in ("a", "z")] == [True, True]
        assert ids(pair.primary) == []
        backend.replace("primary")
        backend.check()
        assert pair.parts == ("secondary", "level")
        assert_equal(pair.primary, pair.secondary)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("call", ["commit", "check"])
def test_a_secondary_that_was_emptied_is_not_level(quick: Callable[..., Pair], mode: str, call: str) -> None:
    """Nothing is copied to it either before somebody has said that it is the right one."""
    pair = quick(mode=mode)
    with opened(pair.backend) as backend:
        new = owned("a")
        done(backend, new, create("z", ExecutionState.FAILED))
        backend._lag.drain()
        emptied(pair.secondary)
        if call == "commit":
            done(backend, step("a", new.head))
            backend._lag.drain()
        with pytest.raises(StoreSettingsError, match="the secondary is empty and knows nothing of this pair"):
            backend.check()
        assert pair.parts == ("primary", "behind")
        assert "longrun store replace secondary" in (pair.store.status().reason or "")
        assert ids(pair.secondary) == []
        backend.replace("secondary")
        backend.check()
        assert pair.parts == ("primary", "level")
        assert_equal(pair.primary, pair.secondary)


def test_what_an_emptied_secondary_got_before_that_was_seen_keeps_nobody_from_going_on(
    quick: Callable[..., Pair],
) -> None:
    """It is not empty then, and has no part in the pair: whoever starts next goes on with the primary alone."""
    pair = quick()
    with opened(pair.backend) as backend:
        emptied(pair.secondary)
        created(backend, create("a"))
        with pytest.raises(StoreSettingsError):
            backend.check()
    again = pair.again()
    with opened(again.backend) as backend:
        assert (again.status().active, again.status().standby) == ("primary", "behind")
        created(backend, create("b"))
        with pytest.raises(StoreSettingsError, match="the secondary has executions of its own"):
            backend.check()
    assert ids(pair.secondary) == ["a"]


def test_by_hand_nobody_takes_an_emptied_store_for_the_truth(quick: Callable[..., Pair]) -> None:
    """Without a witness, and with other processes, calls fail until somebody has decided; nothing is lost by then."""
    pair = quick(single_process=False)
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        emptied(pair.primary)
        with pytest.raises(StoreUnavailableError, match=r"failover\(\) makes the secondary active"):
            backend.load("a")
        with pytest.raises(StoreUnavailableError, match="the primary is empty"):
            backend.commit([step("a", new.head)])
        with pytest.raises(StoreUnavailableError, match=r"failover\(\) makes the secondary active"):
            backend.check()
        assert ids(pair.secondary) == ["a", "longrun.replica.term"]
        backend.failover()
        assert pair.parts == ("secondary", "behind")
        assert not knows_the_pair("primary", pair.primary)
        done(backend, step("a", new.head))
        assert len(backend.boundaries("a")) == 2


def test_an_emptied_store_does_not_become_active(quick: Callable[..., Pair]) -> None:
    pair = quick(single_process=False)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        emptied(pair.secondary)
        with pytest.raises(StoreUnavailableError, match="the secondary is empty"):
            backend.failover()
        assert pair.parts == ("primary", "level")
        assert backend.load("a") is not None


def test_a_comparison_with_an_emptied_store_removes_nothing(quick: Callable[..., Pair]) -> None:
    pair = quick(single_process=False)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        emptied(pair.primary)
        with pytest.raises(StoreUnavailableError, match="the primary is empty"):
            backend.resync()
    assert ids(pair.secondary) == ["a", "longrun.replica.term"]


@pytest.mark.parametrize("other", ["emptied", "down"])
def test_an_emptied_store_is_not_made_a_member_again_because_the_other_is_lost(
    quick: Callable[..., Pair], other: str
) -> None:
    pair = quick()
    with opened(pair.backend) as backend:
        created(backend, create("i"))
        emptied(pair.primary)
        if other == "down":
            pair.secondary.down = True
        else:
            emptied(pair.secondary)
        with pytest.raises(StoreUnavailableError):
            backend.load("i")
        with pytest.raises(StoreUnavailableError):
            backend.commit([send("i")])
        assert not knows_the_pair("primary", pair.primary)


# --- before anybody has looked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_store_gets_no_record_of_the_pair_by_the_way(quick: Callable[..., Pair], mode: str) -> None:
    """The first write of a process that has only read so far would write the term down; on an emptied store that would
    make it a member again, and what it lacks would be deleted on the other one."""
    pair = quick(single_process=False, mode=mode)
    with opened(pair.backend) as backend:
        new = owned("a")
        done(backend, new, create("z", ExecutionState.FAILED))
        backend._lag.drain()
        with opened(pair.again().backend) as other:
            emptied(pair.primary)
            for write in (send("a"), step("a", new.head), create("b")):
                with pytest.raises(StoreUnavailableError, match="the primary"):
                    other.commit([write])
            with pytest.raises(StoreUnavailableError, match="the primary"):
                other.check()
            assert not knows_the_pair("primary", pair.primary)
            assert [ids(pair.secondary), ids(pair.primary)] == [["a", "longrun.replica.term", "z"], []]


def test_a_failover_by_hand_away_from_an_emptied_store_loses_nothing(quick: Callable[..., Pair]) -> None:
    """In asynchronous mode the two are compared before they exchange their parts, if both have something to say."""
    pair = quick(single_process=False, mode="async")
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        backend._lag.drain()
        emptied(pair.primary)
        backend.failover()
        assert pair.parts == ("secondary", "behind")
        assert [one.definition.id for one in backend.find(Query())] == ["a"]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("behind", [True, False])
def test_comparing_by_hand_deletes_nothing_for_an_emptied_store(
    quick: Callable[..., Pair], mode: str, *, behind: bool
) -> None:
    pair = quick(mode=mode)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        backend._lag.drain()
        if behind:
            pair.secondary.down = True
            done(backend, send("a"))
            backend._lag.drain()
            backend.check()
            pair.secondary.down = False
        emptied(pair.primary)
        with pytest.raises(StoreUnavailableError, match="the primary is empty and knows nothing of this pair"):
            backend.resync()
        assert "a" in ids(pair.secondary)
        assert not knows_the_pair("primary", pair.primary)


def test_a_standby_that_was_emptied_when_nearly_all_was_compared_is_not_level(quick: Callable[..., Pair]) -> None:
    pair = quick()
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.secondary.down = True
        created(backend, create("b"))
        pair.secondary.down = False

        def told(call: str) -> None:
            if call == "owners":  # the last that is compared
                emptied(pair.secondary)

        pair.secondary.told = told
        with pytest.raises(StoreUnavailableError, match="the secondary is empty"):
            backend.check()
        assert pair.parts == ("primary", "behind")
        assert ids(pair.secondary) == []


def test_an_emptied_store_does_not_become_active_by_force(quick: Callable[..., Pair]) -> None:
    pair = quick(single_process=False)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.secondary.down = True
        created(backend, create("b"))
        pair.secondary.down = False
        emptied(pair.secondary)
        with pytest.raises(StoreUnavailableError, match="the secondary is empty"):
            backend.failover(force=True)
        assert "a" in ids(pair.primary)


def test_what_has_ended_is_not_begun_anew_on_an_emptied_store(quick: Callable[..., Pair]) -> None:
    """In asynchronous mode the active store alone says whether an id is taken."""
    pair = quick(mode="async")
    with opened(pair.backend) as backend:
        created(backend, create("a", ExecutionState.COMPLETED))
        backend._lag.drain()
        emptied(pair.primary)
        assert backend.commit([create("a")]) == [False]
        assert pair.parts == ("secondary", "behind")


def test_what_an_emptied_store_got_by_mistake_is_not_run(quick: Callable[..., Pair]) -> None:
    """Nor by another process, while nobody has decided which of the two it is."""
    pair = quick(mode="async", single_process=False)
    with opened(pair.backend) as backend, opened(pair.again().backend) as other:
        created(backend, create("a", ExecutionState.COMPLETED))
        backend._lag.drain()
        emptied(pair.primary)
        calls: list[Callable[[], Any]] = [
            lambda: backend.commit([create("a")]),
            lambda: backend.commit([create("a")]),
            lambda: backend.claim(claim("me")),
            lambda: other.claim(claim("you")),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match=r"failover\(\) makes the secondary active"):
                call()


def test_an_id_that_is_taken_is_so_in_the_same_call(quick: Callable[..., Pair]) -> None:
    """In synchronous mode the other one says so, and is asked whom to believe."""
    pair = quick()
    with opened(pair.backend) as backend:
        created(backend, create("a", ExecutionState.COMPLETED))
        emptied(pair.primary)
        assert backend.commit([create("a")]) == [False]
        assert pair.parts == ("secondary", "behind")
        assert backend.load("a").head.state is ExecutionState.COMPLETED
