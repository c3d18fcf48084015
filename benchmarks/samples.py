"""Figures by role, turned into the columns of a row.

Place in the life of a measurement: between the children's answers and the table.
"""

from __future__ import annotations

from benchmarks.orders import Samples


def column(samples: Samples, role: str, name: str, scale: float = 1.0) -> list[float]:
    """One figure of every round."""
    return [figures[name] * scale for figures in samples.get(role, ())]
