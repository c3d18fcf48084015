"""What several test files ask for: mostly those of the file store. Those of other stores make theirs themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from longrun.stores.file import FileBackend
from tests.servers import RedisServer, Source
from tests.stores.file_tools import opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[FileBackend]:
    with opened(FileBackend(path)) as backend:
        assert isinstance(backend, FileBackend)
        yield backend


@pytest.fixture
def other(path: Path) -> Iterator[FileBackend]:
    """Another object on the same files."""
    with opened(FileBackend(path)) as other:
        assert isinstance(other, FileBackend)
        yield other


@pytest.fixture
def client(redis_server: RedisServer | Source) -> Iterator[Any]:
    """For a look at the keys themselves."""
    assert redis_server.url is not None
    with redis.Redis.from_url(redis_server.url) as client:
        yield client
