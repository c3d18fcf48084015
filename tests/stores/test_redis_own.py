"""What is special to the Redis and Valkey store: damage, keys that expire, and how little a step costs the server."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import attrs
import pytest
import redis

from longrun.errors import (
    ConfigError,
    CorruptDataError,
    LeaseLostError,
    NewerFormatError,
    StoreSettingsError,
    StoreUnavailableError,
    WriteOrderError,
)
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Loaded, Owner, Query, Write
from longrun.stores import open_store
from longrun.stores._redis import wire
from longrun.stores._redis.link import AT_ONCE, LEAST, Options
from longrun.stores._redis.reading import Reader
from longrun.stores._redis.wire import rank
from longrun.stores.redis import RedisBackend, RedisCheckpointStore
from longrun.testing.samples import NOW, boundary, change, claim, create, owned, send, step
from tests.servers import RedisServer, Source

PATIENCE = 30.0
S = ExecutionState


class Keys:
    """The keys of one store, as somebody with redis-cli sees them."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client: Any = client  # its annotations are those of its asynchronous twin too
        self.prefix = prefix

    def name(self, rest: str) -> str:
        return f"{{{self.prefix}}}:{rest}"

    def damage(self, rest: str, field: str, at: int = -1) -> bytes:
        """Change one bit of a value; the damaged bytes."""
        value = bytearray(self.client.hget(self.name(rest), field))
        value[at] ^= 1
        self.client.hset(self.name(rest), field, bytes(value))
        return bytes(value)

    def quarantine(self) -> dict[str, bytes]:
        found = self.client.hgetall(self.name("quarantine"))
        return {field.decode(): value for field, value in found.items()}

    def all(self) -> list[str]:
        return sorted(key.decode() for key in self.client.scan_iter(match=self.name("*"), count=1000))


@pytest.fixture
def keys(redis_server: RedisServer | Source) -> Iterator[Keys]:
    assert redis_server.url is not None
    with redis.Redis.from_url(redis_server.url) as client:
        keys = Keys(client, f"test:{uuid.uuid4().hex}")
        yield keys
        if left := keys.all():
            client.delete(*left)


@pytest.fixture
def opened(redis_server: RedisServer | Source, keys: Keys) -> Iterator[Callable[..., RedisBackend]]:
    """Makes and opens a store on the test's own prefix, and closes it after the test."""
    made: list[RedisBackend] = []

    def make(**options: Any) -> RedisBackend:
        assert redis_server.url is not None
        backend = RedisBackend(redis_server.url, prefix=keys.prefix, **options)
        made.append(backend)
        backend.open()
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def backend(opened: Callable[..., RedisBackend]) -> RedisBackend:
    return opened()


def done(backend: RedisBackend, *writes: Write) -> list[object]:
    """Commit as one batch; none of the writes may be refused."""
    answers = backend.commit(writes)
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    return list(answers)


def created(backend: RedisBackend, *creates: Create) -> None:
    assert done(backend, *creates) == [True] * len(creates)


def ids_of(found: list[Loaded]) -> list[str]:
    return [one.definition.id for one in found]


def load(backend: RedisBackend, id: str = "a") -> Loaded:
    found = backend.load(id)
    assert found is not None
    return found


def test_a_closed_store_connects_no_more(backend: RedisBackend, keys: Keys) -> None:
    """Nobody would close that connection."""
    created(backend, create("a"))
    connected = _connected(keys)
    backend.close()
    for call in (lambda: backend.load("a"), backend.ping, lambda: backend.find(Query()), lambda: backend.wait(0.0)):
        with pytest.raises(StoreUnavailableError, match="it is closed"):
            call()
    while (left := _connected(keys)) == connected:
        pass  # the server has not seen yet that we hung up
    assert left < connected
    backend.open()
    assert load(backend).definition.id == "a"


def _connected(keys: Keys) -> set[str]:
    return {client["id"] for client in keys.client.client_list()}


def test_texts_that_are_no_unicode(backend: RedisBackend) -> None:
    """They are Python's strings all the same, and come back as they were."""
    half = "\ud800"
    new = owned("a")
    save = change("a", new.head, put={half: b"2"}, head_fields={"note": half})
    done(backend, new, send("a", key=half), save)
    found = load(backend)
    assert (found.head, found.entries) == (save.head, {half: b"2"})
    assert [message.key for message in found.messages] == [half]
    assert backend.sent("a") == (1, {half: 1})


def test_ranks_sort_by_priority_and_age_however_far_they_are() -> None:
    times = [-1e300, -1.0, -0.0, 1e-300, NOW, 1e300]
    priorities = [2**70, 2**63, 2**63 - 1, 1, 0, -1, -(2**63), -(2**70)]
    ranks = [[rank(create("a", priority=p, created=t).definition) for t in times] for p in priorities]
    for one in ranks:
        assert one == sorted(set(one))
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[-1] == ranks[-2]
    assert [one[0] for one in ranks[2:-1]] == sorted({one[0] for one in ranks[2:-1]})


def test_indexes_hold_nothing_of_what_was_taken(backend: RedisBackend, keys: Keys) -> None:
    """I16: neither an entry nor the name of a group that is empty."""
    created(backend, create("a"), create("b", queue="other"))
    assert len(keys.client.smembers(keys.name("i:groups"))) == 2
    assert ids_of(backend.claim(claim())) == ["a", "b"]
    assert keys.client.smembers(keys.name("i:groups")) == set()
    assert not [key for key in keys.all() if ":i:ready:" in key or key.endswith((":i:due", ":i:timed"))]


def test_plain_steps_let_old_states_go(backend: RedisBackend) -> None:
    """The short way of a save is for those that keep everything."""
    new = owned("a")
    second = step("a", new.head)
    third = step("a", second.head, keep_from=2)
    for write in (new, second, third):
        done(backend, write)
    assert load(backend).kept == ((2, ()), (3, ()))
    assert backend.checkpoint("a", 1) is None


def test_a_checkpoint_with_very_many_blobs(backend: RedisBackend) -> None:
    blobs = {f"b{n}": b"%d" % n for n in range(2500)}
    created(backend, owned("a", blobs=blobs))
    found = load(backend)
    assert (found.blobs, found.damage) == (blobs, ())


def test_very_many_rows_come_in_order(backend: RedisBackend) -> None:
    new = owned("a")
    rows = tuple([boundary(seq, data=None) for seq in range(2, 1200)] + [boundary(1200)])
    done(backend, new, change("a", new.head, head_fields={"seq": 1200}, boundaries=rows))
    assert [row.seq for row in backend.boundaries("a", limit=10_000)] == list(range(1, 1201))
    assert [row.seq for row in backend.boundaries("a", after=700, limit=3)] == [701, 702, 703]


def test_a_row_takes_room_too(backend: RedisBackend) -> None:
    new = owned("a")
    created(backend, new)
    before = backend.size("a")
    done(backend, step("a", new.head, boundaries=(boundary(2, data=None),)))
    assert backend.size("a") > before


def test_the_messages_of_what_was_deleted_wait_for_nobody(backend: RedisBackend) -> None:
    """It had been claimed for a retry."""
    created(backend, create("a", S.FAILED))
    assert ids_of(backend.claim(claim("me", ids=("a",), states=frozenset({S.FAILED})))) == ["a"]
    done(backend, send("a"))
    assert backend.pending("me") == ["a"]
    assert backend.delete(["a"]) == [True]
    assert backend.pending("me") == []


def test_leases_go_by_the_clock_of_the_server(backend: RedisBackend, keys: Keys) -> None:
    """To the fraction of a second."""

    def now() -> float:
        seconds, micros = keys.client.time()
        return float(seconds) + float(micros) / 1e6

    before = now()
    backend.register(Owner(id="me", life={}, remaining=50.0), 50.0)
    after = now()
    ((_, until),) = keys.client.zrange(keys.name("leases"), 0, -1, withscores=True)
    assert before - 1e-5 <= until - 50.0 <= after + 1e-5


def test_pages_by_owner_and_by_end(backend: RedisBackend) -> None:
    """Each row is on one page, the newest first."""
    created(backend, *[owned(f"o{n}", created=NOW + n) for n in range(4)])
    ended = {"owner": None, "ended": NOW}
    created(backend, *[create(f"e{n}", S.COMPLETED, head_fields=ended, created=NOW + n) for n in range(4)])
    for query, letter in ((Query(owner="me", limit=2), "o"), (Query(ended_before=NOW + 1, limit=2), "e")):
        pages: list[list[str]] = []
        while page := backend.find(query):
            pages.append([one.definition.id for one in page])
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        assert pages == [[f"{letter}3", f"{letter}2"], [f"{letter}1", f"{letter}0"]]


class TestDamage:
    """I5: found by its checksum, kept in quarantine, and the newest readable checkpoint is used."""

    def three(self, backend: RedisBackend) -> Head:
        """An execution with three checkpoints, a blob of its own each, and an entry."""
        new = owned("a", blobs={"b1": b"1"})
        second = step("a", new.head, boundaries=(boundary(2, blobs=("b2",)),), blobs={"b2": b"22"})
        third = step("a", second.head, boundaries=(boundary(3, blobs=("b3",)),), blobs={"b3": b"33"}, put={"e": b"e"})
        done(backend, new, second, third)
        return third.head

    @pytest.mark.parametrize(("kind", "field"), [("x", "s3"), ("b", "3"), ("o", "b3")])
    def test_a_damaged_checkpoint(self, backend: RedisBackend, keys: Keys, kind: str, field: str) -> None:
        head = self.three(backend)
        bad = keys.damage(f"{kind}:a", field)
        found = load(backend)
        assert (found.boundary.seq, found.boundary.data, found.blobs) == (2, b"state 2", {"b2": b"22"})
        assert found.head == attrs.evolve(head, step=1, visit=2, iteration=0, attempt=0, seq=3)
        assert found.entries == {}
        assert found.damage
        assert bad in keys.quarantine().values()
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        assert (given.head.step, given.head.fence, given.boundary.seq) == (1, 2, 2)
        after = step("a", given.head)
        assert done(backend, after) == [None]
        assert (load(backend).boundary.seq, load(backend).damage) == (4, ())

    @pytest.mark.parametrize("at", [0, 10, -1])
    def test_a_damaged_head(self, backend: RedisBackend, keys: Keys, at: int) -> None:
        head = self.three(backend)
        bad = keys.damage("x:a", "h", at)
        found = load(backend)
        assert (found.boundary.seq, found.head.step, found.head.visit) == (3, 2, 3)
        assert (found.head.fence, found.head.revision, found.head.seq, found.head.owner) == (1, 2, 3, "me")
        assert keys.quarantine()["a head"] == bad
        assert backend.head("a") == found.head
        assert [one.head.revision for one in backend.find(Query())] == [2]
        assert done(backend, step("a", found.head)) == [None]
        assert load(backend).damage == ()
        assert head.seq == 3

    @pytest.mark.parametrize("at", [0, 9, 11, -1])
    def test_a_damaged_control_record(self, backend: RedisBackend, keys: Keys, at: int) -> None:
        """I3: whose it was cannot be believed. It is claimed anew, and the former owner is refused."""
        head = self.three(backend)
        keys.damage("x:a", "c", at)
        assert load(backend).damage
        assert backend.head("a") == load(backend).head
        (given,) = backend.claim(claim("new", dead=frozenset({"me"})))
        assert (given.head.owner, given.head.revision, given.head.step) == ("new", 2, head.step)
        assert given.head.fence > 1_000_000
        (answer,) = backend.commit([step("a", head)])
        assert isinstance(answer, LeaseLostError)
        assert done(backend, step("a", given.head)) == [None]
        assert backend.count(Query()) == {S.RUNNING: 1}

    def test_the_head_alone_is_read_without_the_rest(
        self, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = self.three(backend)
        monkeypatch.setattr(Reader, "loads", lambda *_: pytest.fail("everything of it is read"))
        assert backend.head("a") == head

    def test_a_damaged_control_record_in_a_listing(self, backend: RedisBackend, keys: Keys) -> None:
        """What the rest of the head tells: whose it is and with which fence cannot be believed."""
        head = self.three(backend)
        keys.damage("x:a", "c")
        (found,) = backend.find(Query())
        assert found.head == attrs.evolve(head, fence=0, owner=None)

    def test_rows_that_are_gone(self, backend: RedisBackend, keys: Keys) -> None:
        self.three(backend)
        keys.client.delete(keys.name("b:a"))
        with pytest.raises(CorruptDataError):
            backend.load("a")

    def test_head_and_control_record_both_damaged(self, backend: RedisBackend, keys: Keys) -> None:
        """The listing still knows the state."""
        new = create("a", S.WAITING, head_fields={"due": NOW})
        created(backend, new)
        keys.damage("x:a", "c", 10)
        keys.damage("x:a", "h")
        (given,) = backend.claim(claim("new", ids=("a",)))
        assert (given.head.state, given.head.owner, given.boundary.data) == (S.WAITING, "new", b"state 1")
        assert given.damage
        assert backend.next_due() is None

    def test_a_damaged_control_record_of_what_was_woken(self, backend: RedisBackend, keys: Keys) -> None:
        """Nothing in the indexes says that it is due once somebody has it."""
        created(backend, create("a", S.WAITING, head_fields={"signal": "go"}))
        done(backend, send("a"))
        assert backend.next_due() == 0.0
        keys.damage("x:a", "c", 0)
        assert ids_of(backend.claim(claim("new", ids=("a",)))) == ["a"]
        assert backend.next_due() is None

    def test_a_damaged_entry_discredits_all_of_them(self, backend: RedisBackend, keys: Keys) -> None:
        new = owned("a")
        done(backend, new, change("a", new.head, put={"e": b"1", "f": b"2"}))
        keys.damage("e:a", "e")
        found = load(backend)
        assert (found.entries, found.boundary.seq) == ({}, 1)
        assert found.damage

    def test_a_damaged_message_leaves_the_queue(self, backend: RedisBackend, keys: Keys) -> None:
        done(backend, owned("a"), send("a", payload=b"1"), send("a", payload=b"2"))
        bad = keys.damage("m:a", "1")
        assert [message.id for message in backend.messages("a")] == [2]
        assert keys.quarantine() == {"a message/1": bad}
        assert load(backend).damage == ()
        keys.damage("m:a", "2")
        assert load(backend).messages == ()
        assert backend.pending("me") == []

    def test_what_strayed_from_elsewhere_is_found_out(self, backend: RedisBackend, keys: Keys) -> None:
        """A checksum covers whose a value is."""
        new = owned("b", data=b"other")
        created(backend, new)
        self.three(backend)
        keys.client.hset(keys.name("x:a"), "s3", keys.client.hget(keys.name("x:b"), "s1"))
        assert load(backend).boundary.seq == 2
        keys.client.hset(keys.name("x:a"), "s2", keys.client.hget(keys.name("x:a"), "s1"))
        assert load(backend).boundary.seq == 1

    def test_a_damaged_definition_blocks_what_is_claimed(self, backend: RedisBackend, keys: Keys) -> None:
        """There is no second copy of it. The others go on."""
        created(backend, create("a"), create("b"))
        bad = keys.damage("x:a", "d")
        with pytest.raises(CorruptDataError):
            backend.load("a")
        assert keys.quarantine()["a definition"] == bad
        assert ids_of(backend.claim(claim())) == ["b"]
        assert backend.count(Query()) == {S.RUNNING: 1, S.BLOCKED: 1}
        assert backend.claim(claim("you")) == []

    def test_nothing_readable_at_all(self, backend: RedisBackend, keys: Keys) -> None:
        created(backend, create("a"))
        keys.damage("x:a", "s1")
        with pytest.raises(CorruptDataError):
            backend.load("a")
        with pytest.raises(CorruptDataError):
            backend.checkpoint("a", 1)

    def test_a_damaged_row_is_left_out_of_the_history(self, backend: RedisBackend, keys: Keys) -> None:
        self.three(backend)
        keys.damage("b:a", "2")
        assert [row.seq for row in backend.boundaries("a")] == [1, 3]

    def test_an_index_that_lies_is_not_believed(self, backend: RedisBackend, keys: Keys) -> None:
        """An entry that its execution does not bear out is removed on sight."""
        new = owned("a", "other")
        created(backend, new)
        member = keys.client.zrange(keys.name("i:owned:running:=other"), 0, 0)[0]
        keys.client.zadd(keys.name("i:owned:running:=dead"), {member: 0})
        assert backend.claim(claim(dead=frozenset({"dead"}))) == []
        assert keys.client.zcard(keys.name("i:owned:running:=dead")) == 0


END: dict[str, Any] = {"state": S.COMPLETED, "owner": None, "ended": NOW}


class TestExpiry:
    def test_only_what_is_finished_expires(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        """I16: all its keys at one moment; what runs, waits or is paused never."""
        backend = opened(finished_ttl=1000.0)
        a = owned("a", blobs={"b": b"1"})
        first = change("a", a.head, put={"e": b"1"})
        done(backend, a, first, send("a", key="k"), *[create(f"x-{state}", state) for state in S if not state.finished])
        assert {keys.client.pttl(key) for key in keys.all() if ":last:" not in key} == {-1}
        done(backend, change("a", first.head, head_fields=END | {"state": S.FAILED}), send("a"))
        moments = {keys.client.pttl(keys.name(f"{kind}:a")) for kind in "xboemk"}
        assert all(0 < left <= 1_000_000 for left in moments)
        assert {keys.client.pttl(key) for key in keys.all() if ":x:x-" in key} == {-1}

    def test_what_is_retried_does_not_expire(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        backend = opened(finished_ttl=1000.0)
        new = owned("a")
        failed = change("a", new.head, head_fields=END | {"state": S.FAILED})
        again = change("a", failed.head, head_fields={"state": S.RESUMING, "ended": None})
        done(backend, new, failed, again)
        assert {keys.client.pttl(keys.name(f"{kind}:a")) for kind in "xb"} == {-1}
        assert keys.client.zcard(keys.name("i:gone")) == keys.client.hlen(keys.name("i:gone:facts")) == 0

    def test_what_expired_leaves_no_trace(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        backend = opened(finished_ttl=0.02)
        news = [owned(f"x{n}", parent_id="p") for n in range(300)]
        done(backend, *news, owned("stays"))
        done(backend, *[change(new.id, new.head, head_fields=END) for new in news])
        deadline = time.monotonic() + PATIENCE
        while backend.count(Query()) != {S.RUNNING: 1}:
            assert time.monotonic() < deadline
        assert [one.definition.id for one in backend.find(Query())] == ["stays"]
        assert backend.find(Query(parent_id="p")) == []
        assert [key for key in keys.all() if ":i:" in key and b"x1" in b"".join(_members(keys, key))] == []

    def test_an_id_that_expired_can_be_used_again(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        """It is listed once, by what it is now, whether or not the indexes were swept."""
        backend = opened(finished_ttl=0.001)
        created(backend, create("a", S.FAILED, workflow="old", parent_id="p"))
        deadline = time.monotonic() + PATIENCE
        while keys.client.exists(keys.name("x:a")):
            assert time.monotonic() < deadline
        created(backend, create("a", S.WAITING))
        assert [one.head.state for one in backend.find(Query())] == [S.WAITING]
        assert backend.find(Query(parent_id="p")) == backend.find(Query(workflows=frozenset({"old"}))) == []
        assert keys.client.pttl(keys.name("x:a")) == -1

    @pytest.mark.parametrize("end", ["finished", "deleted"])
    def test_a_child_expires_when_its_parent_has_ended(
        self, opened: Callable[..., RedisBackend], keys: Keys, end: str
    ) -> None:
        """A parent that still runs may ask for it again. More of them end than one script lets go."""
        backend = opened(finished_ttl=1000.0)
        parent, children = owned("p:1"), [owned(f"c{n}", parent_id="p:1") for n in range(450)]
        done(backend, parent, *children, owned("alone"))
        done(backend, *[change(new.id, new.head, head_fields=END) for new in children])
        assert _lasting(keys, children) == 450
        if end == "deleted":  # with nothing that it could be ended by: nobody can read it
            keys.client.hset(keys.name("x:p:1"), mapping={"d": b"", "c": b""})
            assert backend.delete(["p:1"]) == [True]
        else:
            done(backend, change("p:1", parent.head, head_fields=END))
            assert keys.client.pttl(keys.name("x:p:1")) > 0
        assert 0 < _lasting(keys, children) < 450
        assert backend.claim(claim()) == []
        assert backend.find(Query(states=frozenset({S.PAUSED}))) == []
        assert _lasting(keys, children) == 0
        assert [key for key in keys.all() if ":i:kept" in key or ":i:freed" in key] == []

    @pytest.mark.parametrize("first", ["children", "parent"])
    @pytest.mark.parametrize("ttl", [1000.0, None], ids=["expires", "stays"])
    @pytest.mark.parametrize("end", ["completed", "deleted"])
    def test_children_stay_while_their_parent_can_be_retried(
        self, opened: Callable[..., RedisBackend], keys: Keys, first: str, ttl: float | None, end: str
    ) -> None:
        """As with `gc`: it asks for them again. Whoever ended first, and whether or not the parent itself expires."""
        backend, parents = opened(finished_ttl=1000.0), opened(finished_ttl=ttl)
        parent, children = owned("p"), [owned(f"c{n}", parent_id="p") for n in range(150)]
        ends = [change(new.id, new.head, head_fields=END) for new in children]
        failed = change("p", parent.head, head_fields=END | {"state": S.FAILED})
        done(backend, parent, *children)
        if first == "parent":
            done(parents, failed)
            done(backend, *ends)
        else:
            done(backend, *ends)
            done(parents, failed)
        assert backend.claim(claim()) == []
        assert _lasting(keys, children) == 150
        assert (keys.client.pttl(keys.name("x:p")) > 0) == (ttl is not None)
        if end == "deleted":
            assert backend.delete(["p"]) == [True]
        else:
            again = change("p", failed.head, head_fields={"state": S.RESUMING, "ended": None})
            done(parents, again)
            assert backend.claim(claim(ids=("nobody",))) == []
            assert _lasting(keys, children) == 150
            done(parents, change("p", again.head, head_fields=END))
        assert backend.claim(claim(ids=("nobody",))) == []
        assert _lasting(keys, children) == 0
        assert [key for key in keys.all() if ":i:kept" in key or ":i:freed" in key] == []

    def test_children_expire_after_a_failed_parent_that_expired(
        self, opened: Callable[..., RedisBackend], keys: Keys
    ) -> None:
        """Nobody can retry it any more. Who looks sees to that, for a bounded number of them at a time."""
        backend = opened(finished_ttl=1000.0)
        children = self.failed_and_gone(opened, keys, 450)
        assert _lasting(keys, children) == 450
        assert backend.claim(claim()) == []
        assert _lasting(keys, children) == 250
        for _ in range(2):
            backend.count(Query())
        assert _lasting(keys, children) == 0
        assert {keys.client.zcard(keys.name("i:gone")), keys.client.hlen(keys.name("i:gone:facts"))} == {450}
        assert [key for key in keys.all() if ":i:kept" in key or ":i:freed" in key] == []

    def test_children_are_there_for_a_parent_that_is_made_again(
        self, opened: Callable[..., RedisBackend], keys: Keys
    ) -> None:
        """Of the id of one that failed and expired, whether or not somebody has looked since."""
        backend = opened(finished_ttl=1000.0)
        children = self.failed_and_gone(opened, keys, 3)
        again = owned("p")
        created(backend, again)
        backend.count(Query())
        assert _lasting(keys, children) == 3
        done(backend, change("p", again.head, head_fields=END))
        assert _lasting(keys, children) == 0

    def failed_and_gone(self, opened: Callable[..., RedisBackend], keys: Keys, number: int) -> list[Create]:
        """So many finished children of a failed parent that has expired."""
        parent, children = owned("p"), [owned(f"c{n}", parent_id="p") for n in range(number)]
        backend = opened(finished_ttl=1000.0)
        done(backend, parent, *children)
        done(backend, *[change(new.id, new.head, head_fields=END) for new in children])
        done(opened(finished_ttl=0.001), change("p", parent.head, head_fields=END | {"state": S.FAILED}))
        deadline = time.monotonic() + PATIENCE
        while keys.client.exists(keys.name("x:p")):
            assert time.monotonic() < deadline
        return children

    def test_what_was_to_expire_stays_when_its_parent_may_ask_again(
        self, opened: Callable[..., RedisBackend], keys: Keys
    ) -> None:
        backend = opened(finished_ttl=1000.0)
        parent, children = owned("p"), [owned(f"c{n}", parent_id="p") for n in range(300)]
        over = change("p", parent.head, head_fields=END)
        done(backend, parent, *children)
        done(backend, *[change(new.id, new.head, head_fields=END) for new in children], over)
        assert 0 < _lasting(keys, children) < 300
        again = change("p", over.head, head_fields={"state": S.RESUMING, "ended": None})
        done(backend, again)
        backend.count(Query())
        assert _lasting(keys, children) == 300
        assert keys.client.zcard(keys.name("i:gone")) == keys.client.hlen(keys.name("i:gone:facts")) == 0
        done(backend, change("p", again.head, head_fields=END))
        backend.count(Query())
        assert _lasting(keys, children) == 0

    def test_a_child_that_is_retried_does_not_expire_with_its_parent(
        self, opened: Callable[..., RedisBackend], keys: Keys
    ) -> None:
        backend = opened(finished_ttl=1000.0)
        parent, child, other = owned("p"), owned("c", parent_id="p"), owned("d", parent_id="p")
        failed = change("c", child.head, head_fields=END | {"state": S.FAILED})
        again = change("c", failed.head, head_fields={"state": S.RESUMING, "ended": None})
        done(backend, parent, child, other, failed, change("d", other.head, head_fields=END), again)
        assert backend.delete(["d"]) == [True]
        done(backend, change("p", parent.head, head_fields=END))
        assert keys.client.pttl(keys.name("x:c")) == -1
        done(backend, change("c", again.head, head_fields=END))
        assert keys.client.pttl(keys.name("x:c")) > 0
        assert [key for key in keys.all() if ":i:kept" in key or ":i:freed" in key] == []

    @pytest.mark.parametrize("state", [S.RUNNING, S.FAILED])
    def test_a_child_that_comes_before_its_parent_stays(
        self, opened: Callable[..., RedisBackend], keys: Keys, state: S
    ) -> None:
        """As copies do, which are made from the newest to the oldest."""
        backend = opened(finished_ttl=1000.0)
        child, parent = create("c", S.FAILED, parent_id="p@1"), create("p@1", state)
        created(backend, child)
        assert keys.client.pttl(keys.name("x:c")) > 0
        created(backend, parent)
        assert keys.client.pttl(keys.name("x:c")) == -1
        done(opened(), change("p@1", parent.head, head_fields=END))  # by one that keeps what is finished
        assert keys.client.pttl(keys.name("x:p@1")) == -1
        assert keys.client.pttl(keys.name("x:c")) > 0

    def test_a_count_leaves_out_all_that_expired(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        _expired(opened(finished_ttl=0.5), keys, 900)
        assert keys.client.zcard(keys.name("i:gone")) > 200, "more than one script forgets"
        assert opened().count(Query()) == {}
        assert [key for key in keys.all() if ":i:" in key] == []

    def test_each_that_is_to_expire_makes_room_for_itself(
        self, opened: Callable[..., RedisBackend], keys: Keys
    ) -> None:
        """I16: the indexes shrink while more end, though nobody looks."""
        _expired(opened(finished_ttl=0.05), keys, 300)
        backend = opened(finished_ttl=1000.0)
        for n in range(100):
            created(backend, create(f"new{n}", S.COMPLETED))
        assert keys.client.zcard(keys.name("i:gone")) == keys.client.hlen(keys.name("i:gone:facts")) == 100
        assert keys.client.zcard(keys.name("i:state:completed")) == 100

    def test_who_claims_forgets_what_expired(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        backend = opened(finished_ttl=0.05)
        _expired(backend, keys, 300)
        for _ in range(2):
            assert backend.claim(claim()) == []
        assert [key for key in keys.all() if ":i:" in key] == []

    def test_without_it_what_is_finished_stays(self, backend: RedisBackend, keys: Keys) -> None:
        new = owned("a")
        done(backend, new, change("a", new.head, head_fields=END))
        assert keys.client.pttl(keys.name("x:a")) == -1


def _lasting(keys: Keys, children: list[Create]) -> int:
    """How many of them are there and do not expire."""
    return [keys.client.pttl(keys.name(f"x:{child.id}")) for child in children].count(-1)


def _expired(backend: RedisBackend, keys: Keys, number: int) -> None:
    """Have so many end at once, and wait until the server has let all of them expire."""
    created(backend, *[create(f"x{n}", S.COMPLETED, parent_id="p") for n in range(number)])
    deadline = time.monotonic() + PATIENCE
    while any(keys.client.exists(keys.name(f"x:x{n}")) for n in range(number)):
        assert time.monotonic() < deadline


def _members(keys: Keys, key: str) -> list[bytes]:
    if keys.client.type(key) == b"zset":
        return list(keys.client.zrange(key, 0, -1))
    if keys.client.type(key) == b"hash":
        return list(keys.client.hkeys(key))
    return list(keys.client.smembers(key))


class TestCost:
    """What a step asks of the server. Counted by the server itself."""

    def calls(self, keys: Keys, function: Callable[[], object]) -> dict[str, int]:
        keys.client.config_resetstat()
        function()
        stats = keys.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}

    def test_a_batch_of_steps_is_one_call_and_touches_no_index(self, backend: RedisBackend, keys: Keys) -> None:
        news = [owned(f"x{n}") for n in range(500)]
        done(backend, *news)
        done(backend, *[step(new.id, new.head) for new in news])  # the server has the script now
        seconds = [step(new.id, step(new.id, new.head).head) for new in news]
        calls = self.calls(keys, lambda: done(backend, *seconds))
        assert calls["evalsha"] == 1
        assert (calls["hget"], calls["hset"]) == (500, 1000)
        assert not {"zadd", "zrem", "sadd", "publish", "hgetall", "set"} & set(calls)

    def test_a_large_batch_is_split(self, backend: RedisBackend, keys: Keys) -> None:
        """No call holds the server for long: by number, and by bytes."""
        news = [owned(f"x{n}") for n in range(2500)]
        assert self.calls(keys, lambda: done(backend, *news))["evalsha"] == 3
        large = [step(new.id, new.head, put={"e": bytes(3 << 20)}) for new in news[:8]]
        assert self.calls(keys, lambda: done(backend, *large))["evalsha"] == 3

    def test_large_states_are_loaded_in_several_calls(self, backend: RedisBackend, keys: Keys) -> None:
        news = [owned(f"x{n}", "dead", data=bytes(3 << 20)) for n in range(8)]
        done(backend, *news)
        given: list[Loaded] = []
        calls = self.calls(keys, lambda: given.extend(backend.claim(claim(dead=frozenset({"dead"})))))
        assert [one.boundary.data for one in given] == [bytes(3 << 20)] * 8
        assert calls["evalsha"] == 3

    @pytest.mark.parametrize(("number", "expected"), [(1, 1), (200, 1), (450, 3)])
    def test_a_claim_reads_what_it_gives(self, backend: RedisBackend, keys: Keys, number: int, expected: int) -> None:
        """As many as one call may read; the others need further calls."""
        news = [owned(f"x{n:03}", "dead", blobs={"b": b"blob"}) for n in range(number)]
        done(backend, *news)
        done(backend, *[change(new.id, new.head, put={"e": b"1"}) for new in news], send("x000"))
        backend.claim(claim(dead=frozenset({"nobody"})))  # the server has the scripts now
        list(backend._reader.loads(["x000"]))
        given: list[Loaded] = []
        calls = self.calls(keys, lambda: given.extend(backend.claim(claim(dead=frozenset({"dead"}), limit=500))))
        assert calls["evalsha"] == expected
        assert given == [backend.load(new.id) for new in news]
        assert {(one.head.fence, one.head.owner, len(one.blobs), len(one.entries)) for one in given} == {
            (2, "me", 1, 1)
        }
        assert [len(one.messages) for one in given] == [1, *[0] * (number - 1)]

    def test_a_claim_does_not_look_at_what_is_finished(self, backend: RedisBackend, keys: Keys) -> None:
        done(backend, *[create(f"f{n}", S.COMPLETED, head_fields={"ended": NOW}) for n in range(1000)])
        done(backend, create("a", S.WAITING))
        calls = self.calls(keys, lambda: backend.claim(claim()))
        assert calls["hmget"] < 10

    def test_a_claim_does_not_look_at_other_workflows(self, backend: RedisBackend, keys: Keys) -> None:
        done(backend, *[create(f"f{n}", S.WAITING, workflow="other") for n in range(1000)])
        done(backend, create("a", S.WAITING))
        calls = self.calls(keys, lambda: backend.claim(claim(workflows=frozenset({"flow"}))))
        assert calls["hmget"] < 10


def test_a_step_that_is_not_plain_among_those_that_are(backend: RedisBackend) -> None:
    """Plain steps at the front are done before the rest of the script is defined; the answers are the same."""
    news = {id: owned(id) for id in "abcdefg"}
    created(backend, *news.values())
    first = {id: step(id, new.head) for id, new in news.items()}
    done(backend, *first.values())
    heads = {id: save.head for id, save in first.items()}
    heads |= {"b": attrs.evolve(heads["b"], fence=9), "d": attrs.evolve(heads["d"], revision=7)}
    saves = {id: step(id, head) for id, head in heads.items()}
    saves["e"] = attrs.evolve(saves["e"], keep_from=3)
    waits = attrs.evolve(saves["f"].head, state=S.WAITING, due=NOW + 60)
    saves["f"] = attrs.evolve(saves["f"], head=waits)
    batch = [saves["a"], saves["b"], first["c"], saves["c"], saves["d"], saves["e"], saves["f"], saves["g"]]
    kinds = [type(answer) for answer in backend.commit(batch)]
    nothing = type(None)
    refused = [nothing, LeaseLostError, nothing, nothing, WriteOrderError, nothing, nothing, nothing]
    assert kinds == refused
    expected = {id: (first if id in "bd" else saves)[id].head for id in news}
    assert {id: load(backend, id).head for id in news} == expected
    assert load(backend, "e").kept == ((3, ()),)
    assert [one.definition.id for one in backend.find(Query(states=frozenset({S.WAITING})))] == ["f"]


class TestLife:
    def test_a_newer_format_is_refused(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        keys.client.set(keys.name("format"), "2")
        with pytest.raises(NewerFormatError):
            opened()

    def test_what_is_not_ours_is_refused(self, opened: Callable[..., RedisBackend], keys: Keys) -> None:
        keys.client.set(keys.name("format"), "hello")
        with pytest.raises(StoreSettingsError, match="prefix"):
            opened()

    @pytest.mark.parametrize("prefix", ["", "a{b", "a b", "x" * 101, "ü"])
    def test_a_prefix_that_could_be_misread_is_refused(self, prefix: str) -> None:
        with pytest.raises(ConfigError):
            RedisBackend("redis://localhost", prefix=prefix)

    def test_prefixes_keep_stores_apart(self, redis_url: str, keys: Keys, backend: RedisBackend) -> None:
        other = RedisBackend(redis_url, prefix=keys.prefix + "2")
        other.open()
        created(backend, create("a"))
        assert (other.load("a"), other.find(Query()), other.claim(claim())) == (None, [], [])
        for key in keys.client.scan_iter(match=f"{{{keys.prefix}2}}*"):
            keys.client.delete(key)
        other.close()

    @pytest.mark.parametrize(
        "url", ["redis://host/mine", "redis://me:12/s3cret@host/0", "redis://me:s3c/ret@host/0", "redis://host:s3cret"]
    )
    def test_a_url_that_would_be_misread_is_refused(self, url: str) -> None:
        with pytest.raises(StoreSettingsError, match="cannot be understood") as caught:
            RedisBackend(url)
        assert "s3c" not in f"{caught.value}{caught.value.__cause__}"

    def test_a_server_has_several_names(self, redis_server: RedisServer | Source, keys: Keys) -> None:
        assert redis_server.url is not None
        if redis_server.url.startswith("unix://"):
            backend = open_store(redis_server.url.replace("unix://", "redis+unix://"), prefix=keys.prefix).backend
            backend.open()
            backend.close()
        for scheme, place in (("valkey", "h:1 db 2"), ("valkeys", "h:1 db 2")):
            assert RedisBackend(f"{scheme}://h:1/2")._link.place() == place

    def test_a_url_names_its_prefix(self, redis_url: str, keys: Keys, backend: RedisBackend) -> None:
        created(backend, create("a"))
        mark = "&" if "?" in redis_url else "?"
        other = open_store(f"{redis_url}{mark}prefix={keys.prefix}").backend
        other.open()
        assert other.load("a") is not None
        other.close()
        with pytest.raises(ConfigError, match="prefix"):
            open_store("redis://h?prefix=a%20b&db=3")

    def test_a_store_made_before_a_fork_is_another_one_in_each_process(self, redis_url: str, keys: Keys) -> None:
        """I1: what one of them writes is not answered with what another one wrote."""
        program = (
            "import os, sys\n"
            "from longrun.stores.redis import RedisBackend\n"
            "from longrun.testing.samples import create\n"
            "backend = RedisBackend(sys.argv[1], prefix=sys.argv[2])\n"
            "for id in 'ab':\n"
            "    if not os.fork():\n"
            "        backend.open()\n"
            "        os._exit(backend.commit([create(id)]) != [True] or backend.load(id) is None)\n"
            "    assert os.wait()[1] == 0, id\n"
        )
        subprocess.run([sys.executable, "-c", program, redis_url, keys.prefix], check=True, timeout=60)

    def test_a_client_that_was_given_stays_open(self, keys: Keys) -> None:
        store = RedisBackend(keys.client, prefix=keys.prefix)
        store.open()
        created(store, create("a"))
        store.close()
        assert keys.client.ping()

    def test_two_connections_are_enough_and_one_is_not(self, redis_server: RedisServer | Source, keys: Keys) -> None:
        assert redis_server.url is not None
        with pytest.raises(StoreSettingsError, match="one connection is not enough"):
            RedisBackend(redis_server.url, options=Options(max_connections=1))
        pool = redis.BlockingConnectionPool.from_url(redis_server.url, max_connections=1)
        with pytest.raises(StoreSettingsError, match="one connection is not enough"):
            RedisBackend(redis.Redis(connection_pool=pool))
        backend = RedisBackend(redis_server.url, prefix=keys.prefix, options=Options(max_connections=2, timeout=1.0))
        backend.open()
        backend.wait(0.0)  # takes one of them, and keeps it
        created(backend, create("a"))
        backend.ping()
        assert backend.sent("a") == (0, {})
        backend.close()

    @pytest.mark.parametrize(("kind", "most"), [(redis.ConnectionPool, AT_ONCE), (redis.BlockingConnectionPool, LEAST)])
    async def test_a_pool_that_is_large_enough_is_never_used_up(
        self,
        redis_url: str,
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
        kind: type[redis.ConnectionPool],
        most: int,
        anyio_backend: str,
    ) -> None:
        """Every thread of the store uses it at once: here all readers are held up, and so is the writer."""
        monkeypatch.setattr("longrun.stores._redis.link.PAUSES", ())
        pool = kind.from_url(redis_url, max_connections=most)
        async with RedisCheckpointStore(redis.Redis(connection_pool=pool), prefix=keys.prefix) as store:
            changed = anyio.Event()
            ignore = store.watch(changed.set)
            await changed.wait()
            keys.client.client_pause(200)
            async with anyio.create_task_group() as tasks:
                for _ in range(2 * AT_ONCE):
                    tasks.start_soon(store.count)
                    tasks.start_soon(store.unregister, "nobody")
            ignore()
        pool.disconnect()

    def test_a_pool_that_makes_nobody_wait_must_be_large_enough(self, redis_url: str) -> None:
        pool = redis.ConnectionPool.from_url(redis_url, max_connections=AT_ONCE - 1)
        with pytest.raises(StoreSettingsError, match=f"max_connections={AT_ONCE - 1} is less than it needs"):
            RedisBackend(redis.Redis(connection_pool=pool))

    def test_a_client_that_decodes_is_refused(self, redis_server: RedisServer | Source) -> None:
        assert redis_server.url is not None
        with (
            redis.Redis.from_url(redis_server.url, decode_responses=True) as client,
            pytest.raises(StoreSettingsError, match="decode_responses"),
        ):
            RedisBackend(client)

    def test_what_became_due_by_another_clock_is_not_given_early(self, backend: RedisBackend) -> None:
        """A claimer whose clock runs ahead does not make it due for the others."""
        created(backend, create("a", S.WAITING, head_fields={"due": NOW + 5}))
        assert backend.claim(claim(now=NOW + 9, workflows=frozenset({"none"}))) == []
        assert backend.claim(claim()) == []
        assert backend.next_due() == NOW + 5
        assert ids_of(backend.claim(claim(now=NOW + 5))) == ["a"]

    def test_many_that_ended_are_paged_through(self, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """Above a number of them the listing is read instead of the index of ends; both give the same."""
        done(backend, *[create(f"f{n:03}", S.FAILED, head_fields={"ended": NOW + n % 7}) for n in range(100)])
        query = Query(ended_before=NOW + 3, limit=200)
        few = backend.find(query)
        monkeypatch.setattr("longrun.stores._redis.finding.ENDED", 10)
        assert backend.find(query) == few
        assert len(few) == len([n for n in range(100) if n % 7 < 3])

    def test_the_server_leaves_out_what_has_other_metadata(
        self, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of thousands only those that fit cross the wire, and no call keeps the server from others for long."""
        many = [create(f"x{n:04}", metadata={"team": "a" if n % 1500 else 'b"é', "n": n}) for n in range(4500)]
        done(backend, *many)
        crossed: list[int] = []
        unpacked = wire.unpacked

        def counted(reply: Any) -> Any:
            values = unpacked(reply)
            crossed.append((len(values) - 2) // 5)
            return values

        monkeypatch.setattr(wire, "unpacked", counted)
        found = backend.find(Query(metadata={"team": 'b"é'}, limit=100))
        assert [one.definition.id for one in found] == ["x3000", "x1500", "x0000"]
        assert sum(crossed) == 3
        assert len(crossed) == 3, "4,500 rows take three calls of at most 2,000"
        assert [one.definition.id for one in backend.find(Query(metadata={"n": 7.0}))] == ["x0007"]
        assert backend.find(Query(metadata={"team": "nobody"})) == []
        assert backend.count(Query(metadata={"team": 'b"é'})) == {many[0].head.state: 3}
