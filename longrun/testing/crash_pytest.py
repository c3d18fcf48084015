"""The crash matrix in pytest: one line in a test module, one test for each point.

    test_survives = crash_tests(registry, "crawl-site", {"url": "https://example.org"}, effects=effects)

The workflow runs once while the tests are collected, since only a run can tell its points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from longrun.registry import StepRegistry
from longrun.testing.crash import Course, CrashPlan, World, judge
from longrun.testing.points import CrashPoint


def crash_tests(
    registry: StepRegistry, workflow: Any, state: Any = None, *, loops: Sequence[str] = ("asyncio",), **options: Any
) -> Callable[..., None]:
    """A test for every crash point of a workflow. `options`: those of `crash_matrix`, but for `points` and `kill`."""
    plan = CrashPlan(registry=registry, workflow=workflow, state=state, **options)
    whole = {loop: anyio.run(World(plan).course, None, backend=loop) for loop in loops}
    cases = [pytest.param(loop, point, id=f"{loop}-{point}") for loop in loops for point in whole[loop].points]

    @pytest.mark.parametrize(("loop", "point"), cases)
    def test_crash(loop: str, point: CrashPoint) -> None:
        course: Course = anyio.run(World(plan).course, point, backend=loop)
        report = judge(plan, whole[loop], point, course)
        if report.missed:
            pytest.skip(f"this run did not come to the point again: {point}")
        report.check()

    return test_crash


def crash_points(registry: StepRegistry, workflow: Any, state: Any = None, **options: Any) -> tuple[CrashPoint, ...]:
    """Every point of a workflow, for `pytest.mark.parametrize("point", crash_points(registry, "name", state))`."""
    plan = CrashPlan(registry=registry, workflow=workflow, state=state, **options)
    course: Course = anyio.run(World(plan).course, None)
    return course.points
