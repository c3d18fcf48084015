"""A dashboard of a store in memory, and somebody who asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from longrun import MemoryCheckpointStore
from longrun.dashboard import DashboardApp, create_app
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import TOKEN, Browser


@pytest.fixture
async def store() -> AsyncIterator[CheckpointStore]:
    async with MemoryCheckpointStore() as store:
        yield store


@pytest.fixture
async def app(store: CheckpointStore) -> AsyncIterator[DashboardApp]:
    async with create_app(store, token=TOKEN, allow_control=True) as app:
        yield app


@pytest.fixture
def browser(app: DashboardApp) -> Browser:
    return Browser(app)
