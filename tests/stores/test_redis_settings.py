"""What the Redis and Valkey store is told, by URL and by arguments: taken, or refused in one line when it is made."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from longrun.errors import ConfigError, StoreSettingsError
from longrun.records import ExecutionState
from longrun.stores import open_store
from longrun.stores.redis import RedisBackend, RedisCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import NOW, create

S = ExecutionState


@pytest.fixture
def prefix(redis_url: str) -> Iterator[str]:
    """One of the test's own; its keys are removed afterwards."""
    prefix = f"test:{uuid.uuid4().hex}"
    yield prefix
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(match=f"{{{prefix}}}:*"):
            client.delete(key)


def connection_of(store: CheckpointStore) -> dict[str, Any]:
    assert isinstance(store.backend, RedisBackend)
    found: dict[str, Any] = store.backend._link.client.get_connection_kwargs()
    return found


# --- parameters of a URL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://me:s3cret@h?bogus=1", "bogus"),
        ("redis://h/2?db=2&bogus=", "bogus"),
        ("redis://h?bogus", "bogus"),
        ("valkey://h?prefix=a&finished_tll=5", "finished_tll"),
        ("unix:///s?db=1&socket_keepalive=1", "socket_keepalive"),
        ("redis://h?ssl_ca_certs=/ca.pem", "ssl_ca_certs"),
        ("rediss://h?ssl_bogus=1", "ssl_bogus"),
        ("redis://h?connection_class=x", "connection_class"),
        ("redis://h?credential_provider=x", "credential_provider"),
        ("redis://h?retry_on_error=x", "retry_on_error"),
        ("redis://h?protocol=9", "protocol"),
    ],
)
def test_a_parameter_that_is_not_known_is_named(url: str, name: str) -> None:
    with pytest.raises(StoreSettingsError, match=f"parameter '{name}'") as caught:
        open_store(url)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)).replace(url, "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://me:hush?s3cret=1@host/0", "redis://h?password=hush&s3cret=1", "unix:///s?username=me&password=a&s3cret"],
)
def test_what_may_be_a_piece_of_a_password_is_not_named(url: str) -> None:
    with pytest.raises(StoreSettingsError) as caught:
        open_store(url)
    assert "s3cret" not in f"{caught.value}{caught.value.__cause__}"
    assert "hush" not in f"{caught.value}{caught.value.__cause__}"


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("redis://h?db=3&health_check_interval=10", {"db": 3, "health_check_interval": 10}),
        ("redis://h?username=me&password=p%40ss", {"username": "me", "password": "p@ss"}),
        ("redis://h?socket_timeout=7&retry_on_timeout=true", {"socket_timeout": 7.0, "retry_on_timeout": True}),
        ("rediss://h?ssl_cert_reqs=none&ssl_ca_certs=/ca.pem", {"ssl_cert_reqs": "none", "ssl_ca_certs": "/ca.pem"}),
        ("unix:///s?db=1&client_name=me", {"path": "/s", "db": 1, "client_name": "me"}),
    ],
)
def test_what_the_driver_knows_goes_to_the_driver(url: str, known: dict[str, object]) -> None:
    found = connection_of(open_store(url))
    assert {name: found.get(name) for name in known} == known


@pytest.mark.parametrize("make", [open_store, RedisCheckpointStore])
def test_a_url_holds_the_stores_own_options(redis_url: str, prefix: str, make: Any) -> None:
    mark = "&" if "?" in redis_url else "?"
    store = make(f"{redis_url}{mark}prefix={prefix}&finished_ttl=1000&timeout=3&connect_timeout=2.5&max_connections=3")
    kwargs = connection_of(store)
    assert (kwargs["socket_timeout"], kwargs["socket_connect_timeout"]) == (3, 2.5)
    pool = store.backend._link.client.connection_pool
    assert (pool.timeout, pool.max_connections, store.backend._link._most_kept) == (3, 3, 1)
    store.backend.open()
    assert store.backend.commit([create("a", S.COMPLETED, head_fields={"ended": NOW})]) == [True]
    with redis.Redis.from_url(redis_url) as client:
        assert 990_000 < int(client.pttl(f"{{{prefix}}}:x:a")) <= 1_000_000
    store.backend.close()


def test_an_argument_counts_more_than_the_url() -> None:
    url = "redis://h?finished_ttl=5&timeout=3&prefix=b"
    for store in (
        open_store(url, finished_ttl=7.0, timeout=4.0, prefix="a"),
        RedisCheckpointStore(url, finished_ttl=7.0, timeout=4.0, prefix="a"),
    ):
        assert isinstance(store.backend, RedisBackend)
        assert (store.backend._ttl, store.backend._prefix) == ("7000", "a")
        assert connection_of(store)["socket_timeout"] == 4.0


@pytest.mark.parametrize(
    "part",
    [
        *("finished_ttl=0", "finished_ttl=-1", "finished_ttl=nan", "finished_ttl=soon", "finished_ttl="),
        *("timeout=-1", "timeout=x", "timeout=inf", "connect_timeout=0"),
        *("max_connections=many", "max_connections=0", "prefix=a%20b"),
    ],
)
def test_options_in_a_url_are_checked_like_arguments(part: str) -> None:
    with pytest.raises(ConfigError, match=f"^{part.partition('=')[0]}="):
        open_store(f"redis://h?{part}")


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("finished_ttl", value) for value in ("5", True, float("inf"), 1e300)],
        *[("prefix", value) for value in (None, 5, b"a")],
        *[("timeout", value) for value in (-1, 0, "5", None, float("nan"), True)],
        *[("connect_timeout", value) for value in (-1, "5")],
        *[("max_connections", value) for value in (0, -1, "16", 2.5, True, None)],
    ],
)
def test_an_argument_that_can_never_work_is_refused(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        RedisCheckpointStore("redis://h", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", [None, 5, b"redis://h", redis.asyncio.Redis(), object()], ids=lambda s: type(s).__name__
)
def test_what_is_neither_url_nor_client_is_refused(source: Any) -> None:
    with pytest.raises(StoreSettingsError, match=r"a URL or a client of redis-py, redis\.Redis") as caught:
        RedisCheckpointStore(source)
    assert "\n" not in str(caught.value)


def test_an_asynchronous_client_is_told_apart() -> None:
    with pytest.raises(StoreSettingsError, match=r"not redis\.asyncio"):
        RedisCheckpointStore(redis.asyncio.Redis())  # type: ignore[arg-type]  # the mistake under test
