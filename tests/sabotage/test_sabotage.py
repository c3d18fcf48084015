"""Every planted bug has its place in the library. That its test catches it: tests/campaign/test_planted.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sabotage import bugs
from tests.sabotage.run import ROOT


def test_there_are_enough_of_them() -> None:
    assert len(bugs.BUGS) >= 25
    assert all(bug.says and bug.tests for bug in bugs.BUGS.values())


def test_every_bug_can_be_planted() -> None:
    """So that a rename in the library is noticed at once, and not by the next long run."""
    command = [sys.executable, "-m", "tests.sabotage", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_bug_that_has_lost_its_place_is_an_error() -> None:
    """A rename in the library is told, and never passes for a bug that was caught."""
    with pytest.raises(bugs.NothingToPlantError):
        bugs.replace("longrun.outbox", "Outbox.gone", lambda original: original)
    with pytest.raises(bugs.NothingToPlantError):
        bugs.edit("longrun.outbox", "Outbox.push", "no such line", "")
