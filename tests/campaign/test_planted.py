"""Every planted bug is caught by the test that is named for it. A few in every run; all of them with `--thorough`."""

from __future__ import annotations

import pytest

from tests.sabotage import bugs
from tests.sabotage.run import GREEN, run_green, run_planted

QUICK = [name for name, bug in bugs.BUGS.items() if bug.quick]
REST = [name for name, bug in bugs.BUGS.items() if not bug.quick]
pytestmark = pytest.mark.timeout(600)


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
