"""For tests of longrun and of what is built on it. Nothing here is imported by the library itself.

Names are imported on first use, so that one of them does not need what another one needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrun.testing.clock import ManualClock as ManualClock
    from longrun.testing.conformance import StoreConformance as StoreConformance

_HOMES = {
    "ManualClock": "longrun.testing.clock",
    "StoreConformance": "longrun.testing.conformance",
}

__all__ = ["ManualClock", "StoreConformance"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
