"""The Redis and Valkey store keeps the contract, on every server found."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from longrun.stores.redis import RedisCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing import StoreConformance
from tests.servers import RedisServer, Source


class TestRedisStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def place(self, redis_server: RedisServer | Source) -> Iterator[None]:
        """A prefix of the test's own; what was written under it is removed after the test."""
        assert redis_server.url is not None
        self.url, self.prefix = redis_server.url, f"test:{uuid.uuid4().hex}"
        yield
        with redis.Redis.from_url(self.url) as client:
            if keys := list(client.scan_iter(match=f"{{{self.prefix}}}*", count=1000)):
                client.unlink(*keys)

    def make_store(self) -> CheckpointStore:
        return RedisCheckpointStore(self.url, prefix=self.prefix)

    def damage_definition(self, id: str) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.hset(f"{{{self.prefix}}}:x:{id}", "d", b"changed")
