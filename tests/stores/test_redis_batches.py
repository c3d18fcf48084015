"""However writes are batched, a Redis or Valkey server holds the same: the short ways of starts, steps, stops and ends
leave what the long one leaves, in the order of the batch."""

from __future__ import annotations

import hashlib
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from longrun.errors import CorruptDataError, LeaseLostError, StoreError
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Query, Save, Write
from longrun.stores._redis import link
from longrun.stores.redis import RedisBackend
from longrun.testing.conformance_base import created, done, loaded
from longrun.testing.conformance_move import as_save
from longrun.testing.samples import NOW, boundary, change, claim, create, end, move, owned, send, step
from tests.servers import RedisServer, Source

S = ExecutionState
SHORT = ("save_plain", "end_plain", "stop_plain", "create_plain")
Opened = Callable[..., RedisBackend]


@pytest.fixture
def opened(redis_server: RedisServer | Source, client: Any) -> Iterator[Opened]:
    """Makes stores, each with a prefix of its own."""
    made: list[RedisBackend] = []

    def make(**options: Any) -> RedisBackend:
        assert redis_server.url is not None
        backend = RedisBackend(redis_server.url, prefix=f"test:{uuid.uuid4().hex}", **options)
        made.append(backend)
        backend.open()
        return backend

    yield make
    for backend in made:
        backend.close()
        client.delete("nothing", *client.scan_iter(match=backend._link.base + b"*", count=1000))


def without_short_ways(backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> RedisBackend:
    """The same store, that leaves everything to the long way."""
    text, _ = link.script("commit")
    for name in SHORT:
        start = f"local function {name}(at)\n"
        assert start in text
        text = text.replace(start, f"{start}  if true then return nil end\n")
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    repeated = backend._link.repeated

    def with_its_own(name: str, *args: Any) -> Any:
        if name != "commit":
            return repeated(name, *args)
        return backend._link._repeat(lambda: backend._link._evaluate(text, sha, args))

    monkeypatch.setattr(backend._link, "repeated", with_its_own)
    return backend


def held(client: Any, backend: RedisBackend) -> dict[bytes, Any]:
    """All that a store holds, but for the answers that it remembers."""
    base = backend._link.base
    keys = [key for key in client.scan_iter(match=base + b"*", count=1000) if not key.startswith(base + b"last:")]
    read = client.pipeline()
    for key, kind in zip(keys, _each(client, "TYPE", keys), strict=True):
        read.execute_command(*COMMANDS[kind](key))
    return {key.removeprefix(base): value for key, value in zip(keys, read.execute(), strict=True)}


COMMANDS: dict[bytes, Callable[[bytes], tuple[Any, ...]]] = {
    b"hash": lambda key: ("HGETALL", key),
    b"zset": lambda key: ("ZRANGE", key, 0, -1, "WITHSCORES"),
    b"set": lambda key: ("SMEMBERS", key),
    b"string": lambda key: ("GET", key),
}


def _each(client: Any, command: str, keys: list[bytes]) -> list[bytes]:
    read = client.pipeline()
    for key in keys:
        read.execute_command(command, key)
    return list(read.execute())


def ended(id: str, before: Head) -> Save:
    """The end as a save like others."""
    return as_save(end(id, before))


def paused(id: str, before: Head, **fields: Any) -> Save:
    return stop(id, before, S.PAUSED, **fields)


def cancelled(id: str, before: Head, **fields: Any) -> Save:
    return stop(id, before, S.CANCELLED, owner=None, ended=NOW + 3.0, **fields)


def failed(id: str, before: Head, **fields: Any) -> Save:
    return stop(id, before, S.FAILED, owner=None, ended=NOW + 4.0, error="boom", **fields)


def stop(id: str, before: Head, state: ExecutionState, *, keep_from: int | None = None, **head_fields: Any) -> Save:
    """A boundary without a state of its own, as an owner makes it who pauses, cancels or gives up."""
    seq = before.seq + 1
    row = boundary(seq, kind=state.value, data=None, size=0)
    changed = {"state": state, "seq": seq, "updated": NOW + seq, **head_fields}
    return change(id, before, head_fields=changed, boundaries=(row,), keep_from=keep_from)


class Writes:
    """What owners, senders and those who are late might write, in some order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.heads: dict[str, Head] = {}
        self.last: list[Save] = []

    def next(self) -> Write:
        id = f"x/{self.chance.randrange(7)}"
        before = self.heads.get(id)
        if before is None or self.chance.random() < 0.03:
            return self.new(id)
        if self.chance.random() < 0.15:
            return send(id, key=self.chance.choice([None, "key"]))
        if self.last and self.chance.random() < 0.05:
            return self.chance.choice(self.last)  # again, or late
        return self.save(id, before)

    def new(self, id: str) -> Create:
        kinds: list[dict[str, Any]] = [
            *[{"head_fields": {"owner": "me", "fence": 1}}] * 4,
            {"head_fields": {"owner": "me", "fence": 1}, "blobs": {"b": b"1"}},
            {"head_fields": {"owner": "me", "fence": 1}, "parent_id": "x/0"},
            {"state": S.INITIALIZED},
            {"state": S.WAITING, "head_fields": {"due": NOW + 5.0}},
        ]
        flow, queue = self.chance.choice("ab"), self.chance.choice(["default", "a queue"])
        made = create(id, workflow=flow, queue=queue, priority=self.chance.randrange(2), **self.chance.choice(kinds))
        self.heads.setdefault(id, made.head)
        return made

    def save(self, id: str, before: Head) -> Save:
        keep = self.chance.choice([None, None, None, before.seq])
        if before.owner is None:
            return change(id, attrs.evolve(before, fence=before.fence + 7))  # somebody else's
        made = self.chance.choice(
            [
                *[lambda: move(id, before, keep_from=keep)] * 8,
                *[lambda: end(id, before, keep_from=keep)] * 2,
                *[lambda: paused(id, before, keep_from=keep)] * 2,
                lambda: cancelled(id, before, keep_from=keep),
                lambda: failed(id, before, keep_from=keep),
                lambda: step(id, before, put={"e": b"1"}),
                lambda: step(id, before, clear=True, take=(1,)),
                lambda: change(id, before, head_fields={"state": S.WAITING, "owner": None, "due": NOW + 9.0}),
                lambda: change(id, before, head_fields={"state": S.FAILED, "owner": None, "ended": NOW + 3.0}),
                lambda: move(id, attrs.evolve(before, fence=before.fence + 7)),
                lambda: end(id, attrs.evolve(before, revision=before.revision + 3)),
            ]
        )()
        if (made.head.fence, made.head.revision) == (before.fence, before.revision + 1):
            self.heads[id] = made.head
        self.last.append(made)
        return made


@pytest.mark.parametrize("seed", range(8))
def test_batches_leave_what_single_writes_by_the_long_way_leave(
    opened: Opened, client: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    batched, single = opened(), without_short_ways(opened(), monkeypatch)
    writes = Writes(seed)
    for _ in range(16):
        batch = [writes.next() for _ in range(writes.chance.choice([1, 3, 12]))]
        ours = [str(answer) for answer in batched.commit(batch)]
        theirs = [str(single.commit([write])[0]) for write in batch]
        assert ours == theirs
        assert held(client, batched) == held(client, single)
        if writes.chance.random() < 0.2:
            given, others = ((one.claim(claim("me", now=NOW + 6.0, limit=3))) for one in (batched, single))
            assert given == others
            writes.heads |= {one.definition.id: one.head for one in given}


@pytest.mark.parametrize("kind", [paused, cancelled, failed, end])
def test_what_stops_takes_the_short_way(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str, Head], Save]
) -> None:
    backend = opened()
    text, _ = link.script("commit")
    short = text[: text.index("-- A batch of writes, in order.")] + "error('the long way')"
    sha = hashlib.sha1(short.encode(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(link, "script", lambda _: (short, sha))
    one, other = owned("one"), owned("other", workflow="another", owner="you")
    created(backend, one, other)
    done(backend, kind("one", one.head), kind("other", other.head))
    monkeypatch.undo()
    assert loaded(backend, "one").head.state is kind("one", one.head).head.state


def test_all_of_an_execution_in_one_batch(opened: Opened, client: Any) -> None:
    """Its start, its steps, a message, its end, and what comes too late."""
    backend, alone = opened(), opened()
    new = owned("a")
    one = move("a", new.head)
    two = step("a", one.head, put={"e": b"1"})
    three = move("a", two.head)
    last = end("a", three.head, keep_from=3)
    stale = move("a", attrs.evolve(three.head, fence=0))
    batch: list[Write] = [owned("b"), new, one, send("a"), two, owned("a"), stale, three, last, three, send("a")]
    answers = backend.commit(batch)
    assert isinstance(answers.pop(6), LeaseLostError)
    assert answers == [True, True, None, 1, None, False, None, None, None, 2]
    for write in batch:
        alone.commit([write])
    assert held(client, backend) == held(client, alone)
    assert loaded(backend, "a").head == last.head
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.COMPLETED: 1, S.RUNNING: 1}


def test_short_and_long_ways_of_one_execution_in_turn(opened: Opened, client: Any) -> None:
    """What the one adds to an index and the other removes is gone, whichever comes first."""
    backend, alone = opened(), opened()
    batch: list[Write] = []
    for new in (owned("a", blobs={"b": b"1"}), owned("b")):
        last = end(new.id, new.head)
        failed = change(new.id, last.head, head_fields={"state": S.FAILED})
        again = change(new.id, failed.head, head_fields={"state": S.RUNNING, "owner": "me", "ended": None})
        batch += [new, last, failed, again, end(new.id, again.head)]
    other = owned("c", blobs={"b": b"1"})
    last = end("c", other.head)
    batch += [other, last, change("c", last.head, head_fields={"state": S.FAILED})]
    done(backend, *batch)
    for write in batch:
        done(alone, write)
    assert held(client, backend) == held(client, alone)
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.COMPLETED: 2, S.FAILED: 1}


def test_an_id_that_expired_is_used_again(opened: Opened) -> None:
    backend = opened(finished_ttl=0.05)
    new = owned("a")
    done(backend, new, end("a", new.head))
    time.sleep(0.2)
    created(backend, owned("a"))
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.RUNNING: 1}


def test_an_error_of_the_server_leaves_starts_and_ends_in_their_indexes(opened: Opened, client: Any) -> None:
    backend = opened()
    one = owned("one")
    created(backend, one)
    full = {"c": b"0" * 8 + b" 0 0 0 1 0 running 0 =me", "m": str(2**63 - 1)}
    client.hset(backend._link.base + b"x:full", mapping=full)
    with pytest.raises(StoreError):
        backend.commit([owned("other"), end("one", one.head), send("full"), owned("never")])
    client.delete(backend._link.base + b"x:full")
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.COMPLETED: 1, S.RUNNING: 1}
    assert client.zrange(backend._link.base + b"i:owned:running:=me", 0, -1)[0].endswith(b"other")
    assert backend.load("never") is None


@pytest.mark.parametrize("kind", [move, end, ended, step, paused, cancelled])
def test_a_row_that_cannot_be_written_refuses_the_whole_save(
    opened: Opened, client: Any, kind: Callable[[str, Head], Save]
) -> None:
    """I5: the head does not say of a boundary that it is there when it is not."""
    backend = opened()
    one, other = owned("one"), owned("other")
    created(backend, one, other)
    name = backend._link.base + b"b:one"
    rows = client.dump(name)
    client.delete(name)
    client.set(name, "somebody else's")
    first, second = backend.commit([kind("one", one.head), kind("other", other.head)])
    assert isinstance(first, CorruptDataError)
    assert second is None
    client.restore(name, 0, rows, replace=True)
    assert loaded(backend, "one").head == one.head
    done(backend, kind("one", one.head))


def test_a_start_whose_row_cannot_be_written_is_none(opened: Opened, client: Any) -> None:
    backend = opened()
    client.set(backend._link.base + b"b:one", "somebody else's")
    answers = backend.commit([owned("one"), owned("other")])
    assert isinstance(answers[0], CorruptDataError)
    assert answers[1] is True
    assert backend.load("one") is None
    assert backend.count(Query())[S.RUNNING] == 1


@pytest.mark.parametrize("kind", [end, ended, paused, cancelled])
def test_an_index_record_that_is_damaged_refuses_only_its_own_end(
    opened: Opened, client: Any, kind: Callable[[str, Head], Save]
) -> None:
    """Where a moment should stand there is none: the server would refuse it, and with it all others of the batch."""
    backend = opened()
    one, other = owned("one"), owned("other")
    created(backend, one, other)
    name = backend._link.base + b"x:one"
    record = client.hget(name, "g")
    client.hset(name, "g", record[:33] + b"x" + record[34:])
    answers = backend.commit([kind("one", one.head), kind("other", other.head)])
    assert isinstance(answers[0], CorruptDataError)
    assert answers[1] is None
    state = kind("other", other.head).head.state
    assert loaded(backend, "other").head.state is state
    assert backend.count(Query())[state] == 1


def test_scripts_that_are_forgotten_between_two_calls(opened: Opened, client: Any) -> None:
    """A batch of several calls: what was done is not done again, and the rest is."""
    backend = opened()
    asked = backend._link._ask

    def forgetful(*command: Any) -> Any:
        client.script_flush()
        return asked(*command)

    backend._link._ask = forgetful  # type: ignore[method-assign]
    news = [owned(f"x{n}") for n in range(1500)]
    created(backend, *news)
    done(backend, *(move(new.id, new.head) for new in news))
    done(backend, *(end(new.id, move(new.id, new.head).head) for new in news))
    assert backend.count(Query())[S.COMPLETED] == 1500


def submitted(**fields: Any) -> Create:
    return create("a", S.INITIALIZED, steps=(), total=0, **fields)


def test_what_was_claimed_is_not_read_again_to_name_its_steps(opened: Opened, client: Any) -> None:
    """A submission is one round trip nearer to its first step; what is stored is the same."""
    backend = opened()
    new = submitted(metadata={"k": "v"})
    created(backend, new)
    (given,) = backend.claim(claim("me"))
    client.config_resetstat()
    done(backend, change("a", given.head, steps=("one", "two"), version="3"))
    assert "cmdstat_hget" not in client.info("commandstats")
    right = attrs.evolve(new.definition, steps=("one", "two"), total=2, version="3")
    assert loaded(backend, "a").definition == right


def test_a_start_takes_the_place_of_what_was_claimed(opened: Opened) -> None:
    backend, other = opened(), opened()
    other._link.base = backend._link.base
    created(backend, submitted(metadata={"k": "old"}))
    backend.claim(claim("me"))
    (taken,) = other.claim(claim("other", dead=frozenset({"me"}), states=frozenset({S.INITIALIZED})))
    done(other, end("a", taken.head))
    assert other.delete(["a"]) == [True]
    new = owned("a", steps=(), total=0, metadata={"k": "new"})
    created(backend, new)
    done(backend, change("a", new.head, steps=("one",)))
    assert loaded(backend, "a").definition.metadata == {"k": "new"}


class Recorded:
    """A socket that notes what is sent through it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sent: list[int] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(len(data))
        self._real.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_batch_leaves_in_one_piece(opened: Opened) -> None:
    """In between two pieces another thread may take the interpreter, and the server waits for the second one."""
    backend = opened()
    starts = [owned(f"x{n}") for n in range(300)]
    created(backend, *starts)
    (connection,) = backend._link._kept
    connection._sock = recorded = Recorded(connection._sock)
    done(backend, *(move(one.id, one.head, data=b'"%b"' % (b"." * 200)) for one in starts))
    (size,) = recorded.sent
    assert size > 300 * 200
    assert recorded.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > size
