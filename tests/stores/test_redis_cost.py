"""What a batch costs a Redis or Valkey server: each index is written once, and no string looks like all others."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from longrun.errors import CorruptDataError, StoreError
from longrun.records import ExecutionState
from longrun.stored import Query
from longrun.stores._redis import wire
from longrun.stores.redis import RedisBackend
from longrun.testing.conformance_base import created, done, loaded, opened
from longrun.testing.samples import boundary, change, create, head, owned, send, step
from tests.servers import RedisServer, Source

S = ExecutionState
ENDS: dict[str, Any] = {"state": S.COMPLETED, "owner": None, "ended": 5.0}
NAMES = ["a", "step", "a step with a name of some length", "n" * 60, "n" * 100]


@pytest.fixture
def backend(redis_server: RedisServer | Source, client: Any) -> Iterator[RedisBackend]:
    assert redis_server.url is not None
    prefix = f"test:{uuid.uuid4().hex}"
    with opened(RedisBackend(redis_server.url, prefix=prefix)) as backend:
        assert isinstance(backend, RedisBackend)
        yield backend
    for key in client.scan_iter(match=f"{{{prefix}}}*", count=1000):
        client.delete(key)


def index(backend: RedisBackend, rest: str) -> bytes:
    return backend._link.base + rest.encode()


def hashed(text: bytes) -> int:
    """A string's hash in Lua 5.1, which every script interns it by."""
    found = size = len(text)
    step = (size >> 5) + 1
    for at in range(size, step - 1, -step):
        found ^= ((found << 5) + (found >> 2) + text[at - 1]) & 0xFFFFFFFF
    return found & 0xFFFFFFFF


def distinct(values: Iterable[bytes]) -> float:
    """The share of values that no other one is taken for at first sight."""
    every = set(values)
    return len({hashed(value) for value in every}) / len(every)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_values_of_one_moment_differ_where_a_script_looks(name: str | None) -> None:
    moments = [1_700_000_000 + n * 0.00037 for n in range(2000)]
    heads = [
        wire.head_bytes(b"x%d" % n, head(owner="me", revision=5, seq=5, updated=at, started=at))
        for n, at in enumerate(moments)
    ]
    rows = [
        wire.row_bytes(b"x%d" % n, boundary(5, name=name, started=at - 0.01, ended=at)) for n, at in enumerate(moments)
    ]
    assert distinct(heads) > 0.5
    assert distinct(rows) > 0.5


def test_heads_of_either_form_are_read() -> None:
    """Those that were stored before have nothing behind their numbers."""
    one = head(owner="me", fence=2, started=3.0)
    value = wire.head_bytes(b"x", one)
    control = wire.control_from("x", wire.control_bytes(b"x", one))
    older = value[4:].removesuffix(wire.WITHOUT_TEXTS)
    assert wire.head_from("x", control, value) == one
    assert wire.head_from("x", control, wire.framed(b"x", older)) == one


@pytest.mark.parametrize("metadata", [{}, {"a": 1}])
@pytest.mark.parametrize("priority", [1, 2**40])
@pytest.mark.parametrize("at", [5, 5.0, 1e300, -0.25])
def test_definitions_come_back(metadata: dict[str, Any], priority: int, at: float) -> None:
    one = create("x", metadata=metadata, priority=priority, created=at, parent_id="p").definition
    found = wire.definition_from("x", wire.definition_bytes(one), one.steps)
    assert (found, type(found.created)) == (one, type(at))


def test_each_index_is_written_once(backend: RedisBackend, client: Any) -> None:
    before = client.info("commandstats").get("cmdstat_zadd", {"calls": 0})["calls"]
    created(backend, *(owned(f"x{n}") for n in range(50)))
    assert client.info("commandstats")["cmdstat_zadd"]["calls"] - before <= 10


def test_the_last_of_several_writes_decides(backend: RedisBackend, client: Any) -> None:
    """One batch starts, ends and starts what follows: the indexes are as if each had come alone."""
    news = [owned(f"x{n}") for n in range(3)]
    ends = [change(new.id, new.head, head_fields=ENDS) for new in news[:2]]
    fails = change("x2", news[2].head, head_fields=ENDS | {"state": S.FAILED})
    again = change("x2", fails.head, head_fields={"state": S.RUNNING, "owner": "me", "ended": None})
    done(backend, *news, *ends, fails, again)
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.COMPLETED: 2, S.RUNNING: 1}
    assert sorted(client.zrange(index(backend, "i:ended"), 0, -1)) == [b"x0", b"x1"]
    assert client.zcard(index(backend, "i:owned:running:=me")) == 1
    assert client.exists(index(backend, "i:state:failed")) == 0


def test_an_index_that_is_none_refuses_what_it_should_hold(backend: RedisBackend, client: Any) -> None:
    """Nothing is acknowledged that a listing or a claim would not find; what does not need that index is done."""
    one, other = owned("one"), owned("other")
    created(backend, one, other)
    client.set(index(backend, "i:ended"), "somebody else's")
    answers = backend.commit([step("other", other.head), change("one", one.head, head_fields=ENDS)])
    assert answers[0] is None
    assert isinstance(answers[1], CorruptDataError)
    assert loaded(backend, "other").head.seq == 2


def test_what_was_written_before_an_error_is_in_its_indexes(backend: RedisBackend, client: Any) -> None:
    """The server refuses one write of a batch for a reason of its own: the writes before it stay, whole."""
    one, other = owned("one"), owned("other")
    created(backend, one)
    client.hset(
        index(backend, "x:full"), mapping={"c": wire.control_bytes(b"full", head(owner="me")), "m": str(2**63 - 1)}
    )
    with pytest.raises(StoreError):
        backend.commit([other, change("one", one.head, head_fields=ENDS), send("full")])
    client.delete(index(backend, "x:full"))
    assert {state: count for state, count in backend.count(Query()).items() if count} == {S.COMPLETED: 1, S.RUNNING: 1}
    assert client.zrange(index(backend, "i:ended"), 0, -1) == [b"one"]
