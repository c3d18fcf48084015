"""The pytest plugin gives a fixture on which a day passes at once; and the package exports what it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import longrun.testing
from longrun import Sleep, StepRegistry
from longrun.testing.plugin import LongrunFixture

ROOT = Path(__file__).parents[2]
PLUGIN = "longrun.testing.plugin"

TEST = """
import pytest
from longrun import Sleep, StepRegistry

registry = StepRegistry()

@registry.step
async def nap(state: dict) -> Sleep:
    return Sleep(24 * 3600, state)

registry.workflow("naps", [nap])

@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param

@pytest.mark.anyio
async def test_it(longrun):
    async with longrun.executor(registry) as executor:
        run = await executor.start("naps", {"a": 1})
        assert await run.result() == {"a": 1}
"""


def test_the_fixture_works_in_a_users_test(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(TEST)
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    options = () if installed else ("-p", PLUGIN)  # an installed longrun brings it along
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-q", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


async def test_strict_shows_what_a_crash_would_change() -> None:
    """A tuple inside an untyped list is a tuple again; an object that two steps share is not shared any more."""
    registry = StepRegistry()
    kept: list[dict[str, Any]] = []

    @registry.step
    async def give(state: dict[str, Any]) -> dict[str, Any]:
        kept.append(state)
        return state

    @registry.step
    async def change(state: dict[str, Any]) -> dict[str, Any]:
        kept[0]["changed"] = True
        return state

    registry.workflow("shares", [give, change])
    results = []
    for strict in (False, True):
        kept.clear()
        async with LongrunFixture().executor(registry, strict=strict) as executor:
            results.append(await (await executor.start("shares", {})).result())
    assert results == [{"changed": True}, {}]


async def test_executors_of_one_fixture_share_the_store() -> None:
    fixture = LongrunFixture()
    registry = StepRegistry()

    @registry.step
    async def nap(state: dict[str, Any]) -> Sleep:
        return Sleep(5, state)

    registry.workflow("naps", [nap])
    async with fixture.executor(registry) as one, fixture.executor(registry, store=fixture.faulty()) as two:
        await one.start("naps", {"a": 1}, id="x")
        run = await two.start("naps", {"a": 1}, id="x")
        assert await run.result() == {"a": 1}


@pytest.mark.parametrize("name", longrun.testing.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(longrun.testing, name) is not None


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        longrun.testing.nonsense  # noqa: B018
