"""The replicated store fails over, brings the lost store up to date, and hands back (I13)."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import CorruptDataError, LeaseLostError, StoreSettingsError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Owner, Query
from longrun.stores._file.disk import Disk
from longrun.stores._replicated.term import write_term
from longrun.stores.file import FileBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import ReplicatedCheckpointStore
from longrun.testing import ManualClock
from longrun.testing.samples import NOW, change, claim, create, owned, send, step
from tests.stores.replicated_tools import (
    PAIRS,
    Pair,
    assert_equal,
    created,
    done,
    opened,
    refused,
)


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    for name in ("primary", "secondary"):
        (tmp_path / name).mkdir()
    return Pair(tmp_path, request.param, failback_after=None)


@pytest.fixture
def quick(tmp_path: Path) -> Callable[..., Pair]:
    """In memory, for what does not depend on the kinds."""
    return lambda **options: Pair(tmp_path, **options)


def finish(id: str, head: Any) -> Any:
    return change(id, head, head_fields={"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW})


def test_both_have_every_acknowledged_write(pair: Pair) -> None:
    """I13"""
    with opened(pair.backend) as backend:
        new = owned("a", blobs={"b": b"x"})
        save = step("a", new.head, put={"e": b"1"}, take=(1,))
        done(backend, new, send("a", key="k"), save, send("a"), create("w", ExecutionState.INITIALIZED))
        backend.register(Owner(id="me", life={}, remaining=0), 100.0)
        backend.claim(claim("you", ids=("w",)))
        assert_equal(pair.primary, pair.secondary)
        assert pair.parts == ("primary", "level")


def test_the_secondary_goes_on_when_the_primary_dies(pair: Pair) -> None:
    """I13: the same owner goes on with the same fence, and nothing acknowledged is missing."""
    with opened(pair.backend) as backend:
        new = owned("a")
        saved = step("a", new.head)
        done(backend, new, send("a", key="k"), saved)
        pair.primary.down = True
        after = step("a", saved.head, take=(1,))
        assert done(backend, after, send("a", key="k"), send("a")) == [None, 1, 2]
        refused(backend, step("a", attrs.evolve(after.head, fence=9)), LeaseLostError)
        assert [row.seq for row in backend.boundaries("a")] == [1, 2, 3]
        assert pair.parts == ("secondary", "behind")
        assert pair.store.status().failovers == 1


@pytest.mark.parametrize(
    "call", ["load", "head", "find", "count", "messages", "owners", "ping", "claim", "renew", "delete"]
)
def test_every_call_fails_over(quick: Callable[..., Pair], call: str) -> None:
    """The seed failed over on save and load alone."""
    pair = quick()
    with opened(pair.backend) as backend:
        created(backend, create("a"), create("z", ExecutionState.FAILED))
        backend.register(Owner(id="me", life={}, remaining=0), 100.0)
        pair.primary.down = True
        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: backend.load("a").definition.id,
            "head": lambda: backend.head("a").state,
            "find": lambda: [row.definition.id for row in backend.find(Query())],
            "count": lambda: sum(backend.count(Query()).values()),
            "messages": lambda: backend.messages("a"),
            "owners": lambda: [owner.id for owner in backend.owners()],
            "ping": backend.ping,
            "claim": lambda: [one.definition.id for one in backend.claim(claim("me"))],
            "renew": lambda: backend.renew("me", 10.0),
            "delete": lambda: backend.delete(["a", "z"]),
        }
        expected: dict[str, Any] = {
            "load": "a",
            "head": ExecutionState.RUNNING,
            "find": ["z", "a"],
            "count": 2,
            "messages": [],
            "owners": ["me"],
            "ping": None,
            "claim": ["a"],
            "renew": True,
            "delete": [False, True],
        }
        assert calls[call]() == expected[call]
        assert pair.parts == ("secondary", "behind")


def test_not_found_is_an_answer(quick: Callable[..., Pair]) -> None:
    pair = quick()
    with opened(pair.backend) as backend:
        assert backend.load("nobody") is None
        backend.commit([step("nobody", owned("nobody").head), send("nobody")])
        assert backend.delete(["nobody"]) == [False]
        assert (pair.parts, pair.store.status().failovers) == (("primary", "level"), 0)


@pytest.mark.parametrize("call", ["commit", "claim", "delete", "register"])
def test_a_lost_answer_is_not_a_second_write(quick: Callable[..., Pair], call: str) -> None:
    """I9: the primary made the write, nobody heard it, and the secondary goes on."""
    pair = quick(failback_after=0.0)
    with opened(pair.backend) as backend:
        new = owned("a")
        done(backend, new, create("i", ExecutionState.INITIALIZED), create("z", ExecutionState.FAILED))
        pair.primary.deaf = call
        saved = step("a", new.head)
        if call == "commit":
            assert done(backend, saved, send("a"), saved) == [None, 1, None]
        elif call == "claim":
            assert [one.head.fence for one in backend.claim(claim("me"))] == [1]
        elif call == "delete":
            assert backend.delete(["z"]) == [True]
        else:
            backend.register(Owner(id="me", life={}, remaining=0), 10.0)
        assert pair.parts == ("secondary", "behind")
        assert len(backend.boundaries("a")) == len(backend.messages("a")) + 1
        pair.primary.down = False
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def test_what_comes_back_old_is_brought_up_to_date(pair: Pair) -> None:
    """I13: changes, new ones, deletions, claims, messages with their numbers and keys, owners."""
    with opened(pair.backend) as backend:
        news = [owned(f"x{n}") for n in range(6)]
        done(backend, *news, create("parked", ExecutionState.WAITING, head_fields={"signal": "go"}))
        done(backend, finish("x0", news[0].head), finish("x1", news[1].head))
        backend.register(Owner(id="old", life={}, remaining=0), 100.0)
        pair.primary.down = True
        saved = step("x2", news[2].head, put={"e": b"1"}, keep_from=2)
        done(backend, saved, send("x2", key="k"), send("x2"), owned("new"), send("parked"))
        done(backend, change("x2", saved.head, take=(1,)), send("x3", key="waits"))
        assert backend.delete(["x0"]) == [True]
        (given,) = backend.claim(claim("taker", ids=("x4",), dead=frozenset({"me"})))
        done(backend, finish("x4", given.head))
        backend.unregister("old")
        backend.register(Owner(id="young", life={"pid": 1}, remaining=0), 100.0)
        pair.primary.down = False
        backend.check()
        assert pair.parts == ("secondary", "level")
        assert_equal(pair.primary, pair.secondary)
        assert pair.primary.load("x0") is None
        assert done(backend, send("x2", key="k"), send("x2"), send("x3", key="waits")) == [1, 3, 1]
        backend.failover()
        assert pair.parts == ("primary", "level")
        assert done(backend, send("x2", key="k"), send("x2"), send("x3", key="waits")) == [1, 4, 1]
        assert_equal(pair.primary, pair.secondary)


def test_a_standby_that_dies_stops_nothing(pair: Pair) -> None:
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.secondary.down = True
        saved = step("a", new.head)
        done(backend, saved, owned("b"))
        assert pair.parts == ("primary", "behind")
        pair.secondary.down = False
        done(backend, step("a", saved.head), finish("b", owned("b").head))
        backend.delete(["b"])
        backend.check()
        assert pair.parts == ("primary", "level")
        assert_equal(pair.primary, pair.secondary)


def test_a_standby_that_is_behind_does_not_take_over(quick: Callable[..., Pair]) -> None:
    """I13: better no answer than an old one."""
    pair = quick()
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.secondary.down = True
        created(backend, create("b"))
        pair.secondary.down, pair.primary.down = False, True
        with pytest.raises(StoreUnavailableError):
            backend.load("b")
        with pytest.raises(StoreUnavailableError):
            backend.commit([create("c")])
        with pytest.raises(StoreUnavailableError, match="behind"):
            backend.failover()
        backend.failover(force=True)
        assert (backend.load("a") is None, backend.load("b")) == (False, None)


def test_failover_is_bounded_and_the_count_resets(quick: Callable[..., Pair]) -> None:
    clock = ManualClock()
    pair = quick(clock=clock, max_failovers=2, failover_reset=100.0, failback_after=10.0)
    with opened(pair.backend) as backend:

        def lose_and_return() -> None:
            pair.primary.down = True
            backend.ping()
            assert pair.parts == ("secondary", "behind")
            pair.primary.down = False
            backend.check()
            assert pair.parts == ("secondary", "level")
            clock.advance(10.0)
            backend.check()
            assert pair.parts == ("primary", "level")

        lose_and_return()
        lose_and_return()
        assert pair.store.status().failovers == 2
        pair.primary.down = True
        with pytest.raises(StoreUnavailableError, match="2 times"):
            backend.ping()
        pair.primary.down = False
        clock.advance(99.0)
        backend.check()
        assert pair.store.status().failovers == 2
        clock.advance(1.0)
        backend.check()
        assert pair.store.status().failovers == 0
        lose_and_return()


def test_failback_waits_for_its_delay_and_for_the_copy(quick: Callable[..., Pair]) -> None:
    clock = ManualClock()
    pair = quick(clock=clock, failback_after=60.0)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.primary.down = True
        created(backend, create("b"))
        clock.advance(1000.0)
        backend.check()
        assert pair.parts == ("secondary", "behind")
        pair.primary.down = False
        pair.primary.full = True
        with pytest.raises(StoreUnavailableError):
            backend.check()
        assert pair.store.status().active == "secondary"
        pair.primary.full = False
        backend.check()
        assert pair.parts == ("secondary", "level")
        clock.advance(59.0)
        backend.check()
        assert pair.store.status().active == "secondary"
        clock.advance(1.0)
        backend.check()
        assert pair.parts == ("primary", "level")
        assert_equal(pair.primary, pair.secondary)


def test_a_full_disk_is_lost_after_some_strikes(quick: Callable[..., Pair]) -> None:
    """I10: it pings and reads, and every write fails. Until then each failure is told, and repeating is safe (I9)."""
    pair = quick(strikes=3)
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.primary.full = True
        saved = step("a", new.head)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="full"):
                backend.commit([saved])
            assert pair.parts == ("primary", "level")
        done(backend, saved)
        assert pair.parts == ("secondary", "behind")
        assert [row.seq for row in backend.boundaries("a")] == [1, 2]


class Full(Disk):
    full = False

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


def test_a_store_that_answers_each_write_with_its_full_disk_is_lost_too(
    quick: Callable[..., Pair], tmp_path: Path
) -> None:
    """I10: that of files raises nothing: it refuses every write of a batch by itself."""
    disk = Full()
    pair = quick(strikes=3)
    pair.primary.inner = FileBackend(tmp_path / "store", disk=disk)
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        disk.full = True
        saved = step("a", new.head)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="No space left"):
                backend.commit([saved])
            assert pair.parts == ("primary", "level")
        done(backend, saved)
        assert pair.parts == ("secondary", "behind")
        assert [row.seq for row in backend.boundaries("a")] == [1, 2]


def damaged(call: str) -> None:
    raise CorruptDataError("the database", "it is malformed")


@pytest.mark.parametrize(
    ("name", "parts"), [("primary", ("secondary", "behind")), ("secondary", ("primary", "behind"))]
)
def test_a_store_that_is_damaged_as_a_whole_is_lost(
    quick: Callable[..., Pair], name: str, parts: tuple[str, str]
) -> None:
    """I13: no call of it works, and the other one is well."""
    pair = quick()
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        side = pair.primary if name == "primary" else pair.secondary
        side.told = damaged
        saved = step("a", new.head)
        done(backend, saved, create("b"))
        backend.check()
        done(backend, step("a", saved.head))
        assert pair.parts == parts
        assert not getattr(pair.store.status(), name).healthy
        side.told = lambda call: None
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def garble(file: Path) -> None:
    """Whatever a table or an index of this SQLite database begins with can no longer be read."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        ((size,),) = connection.execute("PRAGMA page_size")
        pages = [page for (page,) in connection.execute("SELECT rootpage FROM sqlite_schema WHERE rootpage > 0")]
    data = bytearray(file.read_bytes())
    for page in pages:
        data[(page - 1) * size : page * size] = b"#" * size
    file.write_bytes(data)


def test_a_pair_opens_with_a_standby_whose_database_is_damaged(tmp_path: Path) -> None:
    """I13: what was acknowledged is on the other one, which goes on."""
    for name in ("primary", "secondary"):
        (tmp_path / name).mkdir()
    pair = Pair(tmp_path, ("file", "sqlite"))
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.secondary.down = True
        done(backend, step("a", new.head))
    pair.secondary.down = False
    garble(tmp_path / "secondary" / "store.db")
    pair.store = pair.again()
    with opened(pair.backend) as backend:
        assert pair.parts == ("primary", "behind")
        created(backend, create("b"))
        assert [row.seq for row in backend.boundaries("a")] == [1, 2]
        assert "malformed" in str(pair.store.status().secondary.problem)


def test_what_only_the_standby_took_is_compared_before_it_is_written_again(quick: Callable[..., Pair]) -> None:
    """I9: the owner may have more to say when it repeats a write whose outcome it does not know."""
    pair = quick(strikes=10)
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.primary.full = True
        with pytest.raises(StoreUnavailableError):
            backend.commit([step("a", new.head, put={"e": b"1"}), send("a")])
        pair.primary.full = False
        done(backend, step("a", new.head, put={"e": b"2"}))
        assert_equal(pair.primary, pair.secondary)
        pair.primary.full = True
        with pytest.raises(StoreUnavailableError):
            backend.commit([send("a")])
        pair.primary.full = False
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def test_an_old_primary_is_refused_by_its_generation(quick: Callable[..., Pair]) -> None:
    """I13: a new process finds both, and the primary is older."""
    pair = quick(failback_after=None)
    with opened(pair.backend) as backend:
        created(backend, create("a", ExecutionState.FAILED), create("b"))
        pair.primary.down = True
        backend.delete(["a"])
        done(backend, send("b"))
        generation = pair.store.status().generation
    pair.primary.down = False
    again = pair.again()
    with opened(again.backend) as backend:
        assert again.status().active == "secondary"
        assert again.status().generation > generation
        assert (backend.load("a"), len(backend.messages("b"))) == (None, 1)
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def test_a_primary_that_lost_its_disk_is_refused(quick: Callable[..., Pair]) -> None:
    """It comes back empty, and the record says that it is active: somebody has to say that it is the right one."""
    pair = quick(failback_after=None)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
    pair.primary.inner = MemoryBackend()
    again = pair.again()
    with pytest.raises(StoreSettingsError, match="the primary is empty and knows nothing of this pair"):
        again.backend.open()
    again.backend.replace("primary", force=True)
    with opened(again.backend) as backend:
        assert again.status().active == "secondary"
        assert backend.load("a") is not None
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def test_by_hand_an_old_primary_waits_for_a_word(quick: Callable[..., Pair]) -> None:
    """Neither a witness nor a single process: nobody but the caller may decide."""
    pair = quick(failback_after=None, single_process=False)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.primary.down = True
        with pytest.raises(StoreUnavailableError, match="failover"):
            backend.load("a")
        assert pair.parts == ("primary", "level")
        term = backend._council.term
        write_term(backend._sides[1], attrs.evolve(term, generation=term.generation + 1), 0.0)
    pair.primary.down = False
    again = pair.again()
    with opened(again.backend) as backend:
        assert again.status().active is None
        with pytest.raises(StoreUnavailableError, match="older"):
            backend.load("a")
        backend.failover()
        assert backend.load("a") is not None
        backend.check()
        assert_equal(pair.primary, pair.secondary)


def test_one_store_alone_at_the_start_may_be_the_older_one(quick: Callable[..., Pair]) -> None:
    """I13: a process that starts while the other store is away waits, and goes on by itself when it is back."""
    pair = quick(failback_after=None)
    with opened(pair.backend) as backend:
        created(backend, create("a"))
        pair.primary.down = True
        created(backend, create("b"))
    pair.primary.down, pair.secondary.down = False, True
    again = pair.again()
    with opened(again.backend) as backend:
        assert again.status().active is None
        with pytest.raises(StoreUnavailableError, match="secondary"):
            backend.load("a")
        pair.secondary.down = False
        backend.check()
        assert again.status().active == "secondary"
        assert backend.load("b") is not None
        assert_equal(pair.primary, pair.secondary)


def test_who_was_alone_before_may_start_alone(quick: Callable[..., Pair]) -> None:
    """The record says that the other one is behind: nobody can have gone on with it."""
    pair = quick(failback_after=None)
    with opened(pair.backend) as backend:
        pair.primary.down = True
        created(backend, create("b"))
    with opened(pair.again().backend) as backend:
        assert backend.load("b") is not None


def test_a_first_secondary_must_be_empty(quick: Callable[..., Pair]) -> None:
    """The two stores in the wrong order would otherwise empty the full one."""
    pair = quick()
    pair.secondary.inner.commit([create("precious")])
    with pytest.raises(StoreSettingsError, match="empty"):
        pair.backend.open()
    assert pair.secondary.inner.load("precious") is not None


def test_a_store_of_another_pair_is_refused(quick: Callable[..., Pair]) -> None:
    one, two = quick(), quick()
    for pair in (one, two):
        with opened(pair.backend) as backend:
            created(backend, create("a"))
    mixed = ReplicatedCheckpointStore(one.primary, two.secondary, health_interval=None)
    with pytest.raises(StoreSettingsError, match="another pair"):
        mixed.backend.open()


def test_a_full_primary_gets_an_empty_secondary(pair: Pair) -> None:
    """Replication can begin late: the secondary is copied first."""
    news = [owned(f"x{n}") for n in range(20)]
    with opened(pair.primary) as alone:
        done(alone, *news, *[step(new.id, new.head) for new in news])
    with opened(pair.backend) as backend:
        assert pair.parts == ("primary", "behind")
        backend.check()
        assert pair.parts == ("primary", "level")
        assert_equal(pair.primary, pair.secondary)


def test_its_own_records_are_never_shown(quick: Callable[..., Pair]) -> None:
    pair = quick()
    with opened(pair.backend) as backend:
        pair.secondary.down = True
        done(backend, *[create(f"x{n}", ExecutionState.PAUSED, created=float(n - 3)) for n in range(7)])
        backend.delete(["x1"])
        assert [row.definition.id for row in backend.find(Query())] == [f"x{n}" for n in reversed(range(7))]
        pages, query = [], Query(limit=2)
        while page := backend.find(query):
            pages.append([row.definition.id for row in page])
            last = page[-1].definition
            query = Query(limit=2, after=(last.created, last.id))
        assert pages == [["x6", "x5"], ["x4", "x3"], ["x2", "x1"], ["x0"]]
        assert backend.count(Query()) == {ExecutionState.PAUSED: 7}
        assert (backend.load("longrun.replica.term"), backend.boundaries("longrun.replica.term")) == (None, [])


def test_it_says_what_it_is(quick: Callable[..., Pair]) -> None:
    pair = quick()
    with opened(pair.backend) as backend:
        facts = backend.describe()
        assert (facts["mode"], facts["active"], facts["automatic_failover"]) == ("sync", "primary", True)
        assert isinstance(facts["primary"], dict)
        status = pair.store.status()
        assert (status.mode, status.primary.healthy, status.lag, status.reason) == ("sync", True, 0, None)
    assert pair.store.status().reason == "it is closed"


def test_a_copy_that_comes_late_does_not_go_back(tmp_path: Path) -> None:
    """It waits for its next try, or is under way, while the two exchange their parts: the store that it was for is the
    active one by then, and has what was acknowledged since."""
    pair = Pair(tmp_path, mode="async", single_process=False, failback_after=None)
    with opened(pair.backend) as backend:
        late: list[Callable[[], None]] = []
        backend._lag.put = lambda weight, copy: late.append(copy)
        new = owned("a")
        created(backend, new)
        backend.failover()
        assert pair.parts == ("secondary", "level")
        saved = step("a", new.head)
        done(backend, saved)
        late[0]()
        assert backend.load("a").head == saved.head
        late[1]()
        assert_equal(pair.primary, pair.secondary)
