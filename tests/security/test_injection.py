"""Values are data to every store, in every filter and every id: no SQL, no Lua, no pattern, no key of another."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from longrun.records import ExecutionState
from longrun.stored import Query
from longrun.stores import open_store
from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend
from longrun.testing.samples import claim, create, owned, send, step
from tests.servers import PostgresServer, RedisServer, Source

HOSTILE = (
    "x'; DROP TABLE heads; --",
    "x' OR '1'='1",
    'x" OR ""="',
    "x') UNION SELECT * FROM definitions --",
    "%' OR id LIKE '%",
    "$1",
    "%(id)s",
    "{schema}",
    ":states",
    "]] redis.call('FLUSHALL') [[",
    "x\r\nFLUSHALL\r\n",
    "*",
    "[^x]*",
    "h?llo",
    "a\x1fb",
    "\\x00",
    "=me",
)
"""Each is the value of one execution, and then the value of every filter in turn."""


@pytest.fixture(params=["file", "sqlite", "postgres", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBackend]:
    url, options = place_of(request, request.param, tmp_path)
    backend = open_store(url, **options).backend
    backend.open()
    yield backend
    backend.close()
    if request.param == "redis":
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(match=f"{{{options['prefix']}}}*", count=1000):
                client.delete(key)


def place_of(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if kind == "file":
        return f"file:{tmp_path / 'store'}", {}
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}", {}
    if kind == "postgres":
        server: PostgresServer | Source = request.getfixturevalue("postgres_server")
        assert server.url is not None
        return server.url, {"schema": request.getfixturevalue("postgres_schema")}
    one: RedisServer | Source = request.getfixturevalue("a_redis")
    assert one.url is not None
    return one.url, {"prefix": uuid.uuid4().hex}


@pytest.fixture(scope="module")
def a_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer | Source]:
    from tests import servers

    found = servers.find_redis()
    if not found:
        pytest.skip("no Redis or Valkey on this machine")
    if found[0].url is not None:
        yield found[0]
        return
    with RedisServer(found[0]) as server:
        yield server


def fill(backend: StoreBackend) -> None:
    for n, text in enumerate(HOSTILE):
        fields: dict[str, Any] = {
            "workflow": text,
            "queue": text,
            "parent_id": f"p{n}",
            "metadata": {text: text, "n": n},
        }
        new = owned(f"x{n}", f"o{n}", created=float(n), **fields)
        assert backend.commit([new]) == [True]
        assert backend.commit([step(new.id, new.head, put={text: b"1"}), send(new.id, text, key=text)]) == [None, 1]
    backend.commit([create("innocent", created=0.0)])


def test_filters_find_what_they_name_and_nothing_else(backend: StoreBackend) -> None:
    """The memory store, which has no language to inject into, says what is right."""
    memory = MemoryBackend()
    fill(memory)
    fill(backend)
    for text in HOSTILE:
        for query in (
            Query(workflows=frozenset({text})),
            Query(queue=text),
            Query(owner=text),
            Query(parent_id=text),
            Query(text=text),
            Query(metadata={text: text}),
            Query(metadata={"n": text}),
            Query(after=(5.0, text)),
            Query(workflows=frozenset({text, "other"}), states=frozenset({ExecutionState.RUNNING})),
        ):
            assert ids(backend, query) == ids(memory, query), query
            assert backend.count(query) == memory.count(query), query


def test_claims_and_owners_with_hostile_names_touch_nothing_else(backend: StoreBackend) -> None:
    fill(backend)
    for text in HOSTILE:
        assert backend.claim(claim(text, queues=frozenset({text}))) == []
        assert backend.claim(claim("me", workflows=frozenset({text}), dead=frozenset({text}))) == []
        assert backend.pending(text) == []
        assert backend.renew(text, 1.0) is False
        backend.unregister(text)
        assert backend.delete([f"x{HOSTILE.index(text)}"]) == [False]
    for n, text in enumerate(HOSTILE):
        found = backend.load(f"x{n}")
        assert found is not None
        assert (found.damage, found.entries, found.definition.workflow) == ((), {text: b"1"}, text)
        assert [(m.name, m.key) for m in found.messages] == [(text, text)]
    assert len(backend.find(Query(limit=1000))) == len(HOSTILE) + 1


def ids(backend: StoreBackend, query: Query) -> list[str]:
    return [stored.definition.id for stored in backend.find(query)]
