"""The replicated store under a real executor, and how it is set up (I13)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from longrun import Executor, ExecutorConfig, StepContext, StepRegistry, open_store
from longrun.client import Client
from longrun.errors import ConfigError, RegistrationError
from longrun.seal import Seal
from longrun.stored import RECORDS
from longrun.stores.copy import copy_store
from longrun.stores.memory import MemoryCheckpointStore
from longrun.stores.replicated import ReplicatedCheckpointStore
from longrun.stores.sqlite import SQLiteCheckpointStore
from tests.stores.replicated_tools import PAIRS, PATIENCE, Pair, assert_equal, everything, opened


def test_bad_settings() -> None:
    one, two = MemoryCheckpointStore(), MemoryCheckpointStore()
    bad: list[dict[str, Any]] = [
        {"mode": "raft"},
        {"max_failovers": -1},
        {"queue_limit": 0},
        {"strikes": True},
        {"failback_after": -1.0},
        {"health_interval": "often"},
    ]
    for options in bad:
        with pytest.raises(ConfigError):
            ReplicatedCheckpointStore(one, two, **options)
    with pytest.raises(ConfigError, match="two different"):
        ReplicatedCheckpointStore(one, one)


def test_it_seals_as_the_primary_did(tmp_path: Path) -> None:
    """What one of the two would have encrypted never reaches the other in the open."""

    def key(_: str | None) -> tuple[str, bytes]:
        return "k", b"0" * 32

    sealed = SQLiteCheckpointStore(tmp_path / "a.db", seal=Seal(key=key))
    plain = SQLiteCheckpointStore(tmp_path / "b.db")
    assert ReplicatedCheckpointStore(sealed, plain).seal is sealed.seal
    with pytest.raises(ConfigError, match="seal"):
        ReplicatedCheckpointStore(plain, sealed)


@pytest.fixture
async def used(tmp_path: Path) -> str:
    """The URL of a pair with one finished execution and one that waits."""
    url = (
        f"replicated:?primary=file:{tmp_path / 'a'}&secondary=sqlite:///{tmp_path / 'b.db'}&witness={witness(tmp_path)}"
    )
    async with Client(url) as client:
        await client.submit("work", 1, id="x")
        await (await client.submit("work", 1, id="y")).cancel()
    return url


async def test_what_a_pair_keeps_for_itself_is_no_execution(used: str, tmp_path: Path) -> None:
    """Whoever opens one of the two, or the witness, and pauses, cancels or copies all there is, leaves it alone."""
    for url, ids in (
        (f"file:{tmp_path / 'a'}", "yx"),
        (f"sqlite:///{tmp_path / 'b.db'}", "yx"),
        (witness(tmp_path), ""),
    ):
        async with Client(url) as client:
            assert [one.id for one in await client.list()] == list(ids)
            assert sum((await client.count()).values()) == len(ids)
    registry = StepRegistry()
    for name in RECORDS:
        with pytest.raises(RegistrationError):
            registry.workflow(name, [])


async def test_who_runs_on_one_of_the_two_is_told(used: str, tmp_path: Path) -> None:
    """What he runs, the pair runs too. Of the pair itself nothing is said."""
    for url, told in ((used, 0), (f"file:{tmp_path / 'a'}", 1), (f"sqlite:///{tmp_path / 'b.db'}", 1)):
        with capture_logs() as lines:
            async with Executor(StepRegistry(), store=url):
                pass
        assert [line["event"] for line in lines].count("store.half_of_a_pair") == told


async def test_a_copy_of_one_of_the_two_leaves_the_pair_whole(used: str, tmp_path: Path) -> None:
    target = MemoryCheckpointStore()
    report = await copy_store(open_store(f"file:{tmp_path / 'a'}"), target)
    assert (sorted(report.copied), dict(report.skipped)) == (["x", "y"], {})
    async with Client(used) as client:
        assert len(await client.list()) == 2


def witness(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'w.db'}"


class Story:
    """Workflows that go on for as long as the test says, and what they did."""

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.ran: list[tuple[str, int]] = []
        self.reached = anyio.Event()
        self.go_on = anyio.Event()
        self.registry.workflow("long", [self._numbered(n) for n in range(8)])

    def _numbered(self, n: int) -> Any:
        async def step(ctx: StepContext, state: list[int]) -> list[int]:
            self.ran.append((ctx.execution_id, n))
            if n == 4:
                self.reached.set()
                await self.go_on.wait()
            return [*state, n]

        return self.registry.register(f"step{n}", step)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
async def test_a_primary_killed_during_a_run(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """I2, I13: writes go on, the primary returns, is brought up to date, is active again; both are equal."""
    for name in ("primary", "secondary"):
        (tmp_path / name).mkdir()
    pair = Pair(tmp_path, kinds, failback_after=0.0)
    story = Story()
    config = ExecutorConfig(heartbeat_interval=0.5, lease_ttl=30.0)
    async with pair.store as store, Executor(story.registry, store=store, config=config) as executor:
        old = await executor.start("long", [], id="old")
        runs = [await executor.start("long", [], id=f"run{n}") for n in range(10)]
        await story.reached.wait()
        pair.primary.down = True
        story.go_on.set()
        for run in runs:
            assert await run.result() == list(range(8))
        assert store.status().active == "secondary"
        late = await executor.start("long", [], id="late")
        assert await late.result() == list(range(8))
        assert await old.result() == list(range(8))
        await executor.delete("old")
        pair.primary.down = False
        await store.check()
        assert pair.parts == ("primary", "level")
        assert await (await executor.start("long", [], id="last")).result() == list(range(8))
    assert sorted(story.ran) == sorted(set(story.ran))
    pair.primary.open()
    pair.secondary.open()
    assert_equal(pair.primary, pair.secondary)
    found = everything(pair.primary)
    assert "old" not in found
    assert {"late", "last", *(f"run{n}" for n in range(10))} < set(found)
    pair.primary.close()
    pair.secondary.close()


def test_it_fails_over_when_nobody_calls(tmp_path: Path) -> None:
    """The thread that looks after the pair sees it."""
    pair = Pair(tmp_path, health_interval=0.02)
    with opened(pair.backend) as backend:
        written = threading.Event()
        pair.secondary.told = lambda call: written.set() if call == "commit" else None
        pair.primary.down = True
        assert written.wait(PATIENCE)
        with backend._gate:
            assert pair.parts == ("secondary", "behind")
