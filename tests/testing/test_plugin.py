"""The pytest plugin gives a fixture on which a day passes at once; and the package exports what it says."""

from __future__ import annotations

import re
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


CRASHES = """
import os
import random

from longrun import StepContext, StepRegistry
from longrun.testing import Effects, crash_points, crash_tests

registry, effects = StepRegistry(), Effects()

@registry.step
async def mail(ctx: StepContext, state: dict) -> dict:
    names = ["ann", "bob", "cid", "dee"]
    random.Random(os.getpid()).shuffle(names)  # no two workers pass the points in one order
    for name in names:
        effects(f"mail {name}", key=name)
    return state

@registry.step
async def careless(state: dict) -> dict:
    effects("shout")
    return state

registry.workflow("mails", [mail])
registry.workflow("shouts", [careless])
test_mails = crash_tests(registry, "mails", {}, effects=effects)
"""


def test_the_fixture_works_in_a_users_test(tmp_path: Path) -> None:
    assert "2 passed" in users_pytest(tmp_path, TEST)


def users_pytest(place: Path, text: str, *arguments: str) -> str:
    """What pytest says to a user's test file."""
    (place / "test_user.py").write_text(text)
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    options = () if installed else ("-p", PLUGIN)  # an installed longrun brings it along
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-q", *arguments, "."]
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100, env=environment, check=False)
    return done.stdout + done.stderr


def test_a_point_that_is_not_survived_is_named_and_nothing_else(tmp_path: Path) -> None:
    text = CRASHES + "test_shouts = crash_tests(registry, 'shouts', {}, effects=effects)\n"
    said = users_pytest(tmp_path, text, "-k", "shouts and effect")
    assert "1 failed, 1 passed" in said, said
    assert "_ test_shouts[asyncio-after the effect 'shout'] _" in said
    assert "after the effect 'shout': 'shout' happened 2 times" in said
    assert "crash_pytest.py" not in said  # no line of ours, which the user could not change


def test_a_workflow_that_fails_by_itself_is_told_at_the_users_line(tmp_path: Path) -> None:
    """It fails after a crash as it does without, and passes: little is shown by that."""
    text = CRASHES + "@registry.step\nasync def fails(state: dict) -> dict:\n    raise ValueError('typo')\n"
    text += "registry.workflow('fails', [fails])\ntest_fails = crash_tests(registry, 'fails', {}, effects=effects)\n"
    said = users_pytest(tmp_path, text, "-k", "fails and after and start")
    assert re.search(r"test_user.py:\d+: UserWarning: fails: without any crash it ended failed: ValueError: typo", said)


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
