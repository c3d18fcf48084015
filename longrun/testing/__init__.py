"""For tests of longrun and of what is built on it. Nothing here is imported by the library itself.

Names are imported on first use, so that one of them does not need what another one needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrun.testing.clock import ManualClock as ManualClock
    from longrun.testing.conformance import StoreConformance as StoreConformance
    from longrun.testing.crash import CrashReport as CrashReport
    from longrun.testing.crash import crash_matrix as crash_matrix
    from longrun.testing.crash_pytest import crash_points as crash_points
    from longrun.testing.crash_pytest import crash_tests as crash_tests
    from longrun.testing.effects import Effects as Effects
    from longrun.testing.faulty import FaultyStore as FaultyStore
    from longrun.testing.points import CrashPoint as CrashPoint
    from longrun.testing.settings import CALM as CALM
    from longrun.testing.steps import StepRun as StepRun
    from longrun.testing.steps import run_step as run_step

_HOMES = {
    "CALM": "longrun.testing.settings",
    "CrashPoint": "longrun.testing.points",
    "CrashReport": "longrun.testing.crash",
    "Effects": "longrun.testing.effects",
    "FaultyStore": "longrun.testing.faulty",
    "ManualClock": "longrun.testing.clock",
    "StepRun": "longrun.testing.steps",
    "StoreConformance": "longrun.testing.conformance",
    "crash_matrix": "longrun.testing.crash",
    "crash_points": "longrun.testing.crash_pytest",
    "crash_tests": "longrun.testing.crash_pytest",
    "run_step": "longrun.testing.steps",
}

__all__ = [
    "CALM",
    "CrashPoint",
    "CrashReport",
    "Effects",
    "FaultyStore",
    "ManualClock",
    "StepRun",
    "StoreConformance",
    "crash_matrix",
    "crash_points",
    "crash_tests",
    "run_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
