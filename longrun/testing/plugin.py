"""The pytest plugin: the fixture `longrun`, with a store in memory and a clock that the test drives; and a place where
the workers of pytest-xdist agree on crash points.

async def test_it(longrun):
    async with longrun.executor(registry) as executor:
        run = await executor.start("crawl-site", {"url": "https://example.org"})
        assert await run.result() == {...}
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from longrun.executor import Executor
    from longrun.registry import StepRegistry
    from longrun.stores.memory import MemoryCheckpointStore
    from longrun.testing.clock import ManualClock
    from longrun.testing.faulty import FaultyStore


_PLACE = pytest.StashKey[str]()
PLACE = "LONGRUN_CRASH_POINTS"
"""Where the workers of pytest-xdist agree on crash points: a directory, by a variable of their environment."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A hook of pytest-xdist, in the process that starts the workers."""
    stash = node.config.stash
    if _PLACE not in stash:
        stash[_PLACE] = tempfile.mkdtemp(prefix="longrun-points-")
    node.workerinput[PLACE] = stash[_PLACE]


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop(PLACE, None)  # that of a run around this one
    place = getattr(config, "workerinput", {}).get(PLACE, "")
    if os.path.isdir(place):  # not on another machine
        os.environ[PLACE] = place


def pytest_unconfigure(config: pytest.Config) -> None:
    if _PLACE in config.stash:
        shutil.rmtree(config.stash[_PLACE], ignore_errors=True)


class LongrunFixture:
    """A store and a clock for one test. Executors made here share both, as programs on one store would."""

    def __init__(self) -> None:
        from longrun.stores.memory import MemoryCheckpointStore
        from longrun.testing.clock import ManualClock

        self.clock: ManualClock = ManualClock(autojump=True)
        self.store: MemoryCheckpointStore = MemoryCheckpointStore(clock=self.clock)

    def executor(self, registry: StepRegistry, *, strict: bool = True, **options: Any) -> Executor:
        """An executor on the store and the clock. `strict` passes every state through the codec between steps, so that
        what would differ after a crash differs in the test."""
        from longrun.executor import Executor
        from longrun.testing.settings import CALM

        options.setdefault("config", CALM)
        options.setdefault("store", self.store)
        return Executor(registry, clock=self.clock, strict=strict, **options)

    def faulty(self) -> FaultyStore:
        """The store with faults in front of it: `executor(registry, store=longrun.faulty())`."""
        from longrun.testing.faulty import FaultyStore

        return FaultyStore(self.store)


@pytest.fixture
def longrun() -> LongrunFixture:
    """A store in memory and a clock on which sleeps, back-offs and timers pass at once."""
    return LongrunFixture()
