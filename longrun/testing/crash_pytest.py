"""The crash matrix in pytest: one line in a test module, one test for each point.

    test_survives = crash_tests(registry, "crawl-site", {"url": "https://example.org"}, effects=effects)

The workflow runs once while the tests are collected, since only a run can tell its points.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from longrun.registry import StepRegistry
from longrun.testing.agreement import agreed
from longrun.testing.crash import Course, CrashPlan, judge, runner_of, shortfall
from longrun.testing.plugin import PLACE
from longrun.testing.points import CrashPoint
from longrun.testing.settings import in_child


def crash_tests(
    registry: StepRegistry,
    workflow: Any,
    state: Any = None,
    *,
    loops: Sequence[str] = ("asyncio",),
    points: Sequence[CrashPoint] | None = None,
    kill: bool = False,
    **options: Any,
) -> Callable[..., None]:
    """A test for every crash point of a workflow, or for `points`. `options`: those of `crash_matrix`."""
    plan = CrashPlan(registry=registry, workflow=workflow, state=state, **options)
    module = sys._getframe(1).f_code.co_filename
    whole: dict[str, Course] = {}
    for loop in () if in_child() else loops:
        whole[loop] = _learn(plan, loop, kill)
    learned = {loop: _agreed(module, f"{_name(plan)}-{loop}", course.points) for loop, course in whole.items()}
    chosen = [(loop, point) for loop in learned for point in (learned[loop] if points is None else points)]
    cases = [pytest.param(loop, point, id=f"{loop}-{point}") for loop, point in chosen]

    @pytest.mark.parametrize(("loop", "point"), cases)
    def test_crash(loop: str, point: CrashPoint) -> None:
        run = runner_of(plan, kill=kill)
        report = anyio.run(judge, plan, run, whole[loop], (point,), backend=loop)
        if report.missed:
            pytest.skip(f"this run did not come to the point again: {point}")
        if not report.ok:
            pytest.fail(str(report), pytrace=False)

    return test_crash


def crash_points(
    registry: StepRegistry, workflow: Any, state: Any = None, *, kill: bool = False, **options: Any
) -> tuple[CrashPoint, ...]:
    """Every point of a workflow, for `pytest.mark.parametrize("point", crash_points(registry, "name", state))`."""
    plan = CrashPlan(registry=registry, workflow=workflow, state=state, **options)
    if in_child():
        return ()
    return _agreed(sys._getframe(1).f_code.co_filename, _name(plan), _learn(plan, "asyncio", kill).points)


def _learn(plan: CrashPlan, loop: str, kill: bool) -> Course:
    whole: Course = anyio.run(runner_of(plan, kill=kill), None, backend=loop)
    for note in shortfall(whole):
        warnings.warn(f"{_name(plan)}: {note}", stacklevel=3)  # where the user's line is
    return whole


def _name(plan: CrashPlan) -> str:
    return plan.registry.resolve(plan.workflow).name


def _agreed(module: str, workflow: str, points: Sequence[CrashPoint]) -> tuple[CrashPoint, ...]:
    return agreed(os.environ.get(PLACE), module, workflow, points)
