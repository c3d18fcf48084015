"""Run the named tests of a bug in a child pytest, with the bug planted or without."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from tests.sabotage.bug import Bug

ROOT = Path(__file__).parents[2]
PATIENCE = 25.0
"""Seconds for one test of the child: a planted bug may make it wait for ever, and that is seen too."""
GREEN, CAUGHT = 0, 1
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/\S+::\S+)", re.MULTILINE)
_STUCK = "+++ Timeout +++"


@frozen
class Outcome:
    code: int
    """pytest's own exit code: 0 all passed, 1 some failed, anything else is no answer."""
    by: str | None
    """The test that failed."""
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        return self.code == CAUGHT and self.by is not None


def run_planted(bug: Bug) -> Outcome:
    return _pytest([f"--sabotage={bug.name}", "-x", f"--timeout={PATIENCE}"], bug.tests)


def run_green(tests: Iterable[str]) -> Outcome:
    """Without any bug, and with the ordinary patience: a busy machine may be slow."""
    return _pytest([], sorted(set(tests)))


def _pytest(options: list[str], tests: Iterable[str]) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-p", "tests.sabotage.plant", *options, "-n0", "-v", "-rfE", "--tb=line"]
    command += ["-p", "no:cacheprovider", "--timeout-method=thread", "--thorough", *tests]
    began = time.monotonic()
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = child.stdout + child.stderr
    return Outcome(child.returncode, _failed(output), time.monotonic() - began, output)


def _failed(output: str) -> str | None:
    if failed := _FAILED.search(output):
        return failed[1]
    begun = _BEGUN.findall(output)
    return begun[-1] if _STUCK in output and begun else None
