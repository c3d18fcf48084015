"""Every planted bug is caught by the test that is named for it. A few in every run; all of them with `--thorough`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sabotage import bugs
from tests.sabotage.run import GREEN, ROOT, run_green, run_planted

QUICK = [name for name, bug in bugs.BUGS.items() if bug.quick]
REST = [name for name, bug in bugs.BUGS.items() if not bug.quick]
pytestmark = pytest.mark.timeout(600)


def test_there_are_enough_of_them() -> None:
    assert len(bugs.BUGS) >= 25
    assert all(bug.says and bug.tests for bug in bugs.BUGS.values())


def test_every_bug_can_be_planted() -> None:
    """So that a rename in the library is noticed at once, and not by the next long run."""
    command = [sys.executable, "-m", "tests.sabotage", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    _catch(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REST)
def test_every_planted_bug_is_caught(name: str) -> None:
    _catch(name)


def _catch(name: str) -> None:
    outcome = run_planted(bugs.BUGS[name])
    assert outcome.caught, f"nobody noticed {name}:\n{outcome.output}"


@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="quick"), pytest.param(REST, id="rest", marks=pytest.mark.thorough)]
)
def test_without_a_bug_the_same_tests_pass(names: list[str]) -> None:
    outcome = run_green(test for name in names for test in bugs.BUGS[name].tests)
    assert outcome.code == GREEN, outcome.output


def test_a_bug_that_has_lost_its_place_is_an_error() -> None:
    """A rename in the library is told, and never passes for a bug that was caught."""
    with pytest.raises(bugs.NothingToPlantError):
        bugs.replace("longrun.outbox", "Outbox.gone", lambda original: original)
    with pytest.raises(bugs.NothingToPlantError):
        bugs.edit("longrun.outbox", "Outbox.push", "no such line", "")
