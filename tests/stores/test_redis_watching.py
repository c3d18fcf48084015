"""What a Redis or Valkey store hears of others, and that it does not hear itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from longrun.errors import StoreUnavailableError
from longrun.stores.redis import RedisBackend
from longrun.testing.conformance_base import created
from longrun.testing.samples import owned, send
from tests.servers import RedisServer, Source

CLIENTS: dict[str, dict[str, int]] = {
    "RESP2": {"protocol": 2},
    "RESP3": {"protocol": 3},
    "with health checks": {"health_check_interval": 1},
}


@pytest.fixture(params=CLIENTS)
def backend(redis_server: RedisServer | Source, request: pytest.FixtureRequest) -> Iterator[RedisBackend]:
    assert redis_server.url is not None
    with redis.Redis.from_url(redis_server.url, **CLIENTS[request.param]) as client:
        backend = RedisBackend(client, prefix=f"test:{uuid.uuid4().hex}")
        backend.open()
        while backend.wait(0.1):
            pass
        yield backend
        backend.close()
        client.delete(*client.scan_iter(match=backend._link.base + b"*", count=1000))


def test_what_it_writes_itself_is_no_news(backend: RedisBackend) -> None:
    for n in range(30):
        created(backend, owned(f"x{n}"))
    assert not backend.wait(0.2)


def test_who_hears_nothing_asks_nothing(backend: RedisBackend) -> None:
    """But for the health checks that were asked for, one a second, whose answers are no news."""
    client = backend._link.client
    before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]
    assert not backend.wait(2.5)
    assert client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"] - before <= 6


def test_what_another_writes_among_that_is_news(backend: RedisBackend) -> None:
    other = RedisBackend(backend._link.client, prefix=backend._prefix)
    other.open()
    created(backend, owned("mine"))
    created(other, owned("theirs"))
    backend.commit([send("mine")])
    assert backend.wait(0.2)
    assert not backend.wait(0.2)


def test_what_comes_in_pieces_is_put_together(backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's message may be cut anywhere; what others said in front of a piece or behind it is heard."""
    watch = backend._watch
    for own in watch._no_news[:2]:
        theirs = own.replace(backend._link.name.encode(), b"somebody else...")
        for at in range(len(own)):
            assert heard(watch, monkeypatch, own + own[:at], own[at:]) == [False, False]
            assert heard(watch, monkeypatch, own + theirs + own) == [True]
            assert heard(watch, monkeypatch, own[:at], own[at:] + theirs) == [False, True]


def heard(watch: Any, monkeypatch: pytest.MonkeyPatch, *pieces: bytes) -> list[bool]:
    left = iter(pieces)
    monkeypatch.setattr(watch, "_received", lambda: next(left))
    return [watch._heard() for _ in pieces]


def test_a_connection_that_is_cut_is_told(backend: RedisBackend, redis_server: RedisServer | Source) -> None:
    """And then it listens anew."""
    assert redis_server.url is not None
    with redis.Redis.from_url(redis_server.url) as client:
        client.client_kill_filter(_type="pubsub")
    with pytest.raises(StoreUnavailableError):
        backend.wait(1.0)
    assert backend.wait(1.0)
    created(backend, owned("a"))
    assert not backend.wait(0.2)
