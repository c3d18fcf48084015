"""What measurements become: rows with medians, spread and ratios, judged by goals; a table, and JSON.

Place in the life of a measurement: after it. Ratios are taken round by round, between processes that ran one after the
other, so that a neighbour's load on the machine falls on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

Figures = dict[str, float]
"""What one child reports: numbers by name."""

GUARD_SLACK = 0.7
"""The short form runs small sizes on a busy machine: its guards stand this far from the goals."""


@frozen
class Goal:
    """A limit on a ratio or on a value."""

    limit: float
    at_most: bool = False
    on_ratio: bool = True

    def met(self, found: float) -> bool:
        return found <= self.limit if self.at_most else found >= self.limit

    def guard(self) -> Goal:
        limit = self.limit / GUARD_SLACK if self.at_most else self.limit * GUARD_SLACK
        return Goal(limit, self.at_most, self.on_ratio)

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {show(self.limit)}{'' if self.on_ratio else ' abs'}"


def at_least(limit: float) -> Goal:
    """A ratio that must not be smaller."""
    return Goal(limit)


def at_most(limit: float) -> Goal:
    """A ratio that must not be larger."""
    return Goal(limit, at_most=True)


def value_at_least(limit: float) -> Goal:
    return Goal(limit, on_ratio=False)


def value_at_most(limit: float) -> Goal:
    return Goal(limit, at_most=True, on_ratio=False)


@frozen(kw_only=True)
class Row:
    """One line of the table. `ours` and `bare` hold one figure a round, in the same order."""

    job: str
    store: str
    what: str
    unit: str
    ours: Sequence[float]
    bare: Sequence[float] = ()
    bare_name: str = ""
    """What stands on the other side, where it is not the bare loop."""
    goal: Goal | None = None
    durable: str = ""
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.ours, self.bare, strict=False) if other]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def judged(self) -> float | None:
        if self.goal is None:
            return None
        return self.ratio if self.goal.on_ratio else statistics.median(self.ours)

    def ok(self, *, short: bool = False) -> bool | None:
        """Whether the goal is met; None without one. The short form looks at ratios alone, with some slack."""
        if self.goal is None or self.judged is None or (short and not self.goal.on_ratio):
            return None
        return (self.goal.guard() if short else self.goal).met(self.judged)


@frozen(kw_only=True)
class Trouble:
    """A measurement that gave no figure."""

    job: str
    store: str
    role: str
    text: str = field(repr=False)


def show(value: float) -> str:
    """Three digits that matter, thousands with a comma."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    return f"{show(min(values))}-{show(max(values))}"


def verdict(ok: bool | None) -> str:
    return {True: "ok", False: "NOT OK", None: ""}[ok]


HEAD = ("job", "store", "what", "longrun", "bare", "ratio", "goal", "", "spread", "durable")


def cells(row: Row, *, short: bool = False) -> tuple[str, ...]:
    other = f"{show(statistics.median(row.bare))}" if row.bare else ""
    if row.bare and row.bare_name:
        other += f" ({row.bare_name})"
    goal = row.goal
    if goal is not None and short:
        goal = goal.guard() if goal.on_ratio else None
    return (
        row.job,
        row.store,
        f"{row.what}, {row.unit}",
        show(statistics.median(row.ours)),
        other,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if goal is None else str(goal),
        verdict(row.ok(short=short)),
        spread(row.ours),
        row.durable + (f"; {row.note}" if row.note else ""),
    )


def table(rows: Sequence[Row], *, short: bool = False) -> str:
    lines = [HEAD, *(cells(row, short=short) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    padded = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([padded[0], "-" * max(map(len, padded)), *padded[1:]])


def as_json(rows: Sequence[Row], troubles: Sequence[Trouble], machine: Mapping[str, str], *, short: bool) -> Any:
    """Everything that was found, single figures included, for `--json`."""
    return {
        "machine": dict(machine),
        "short": short,
        "rows": [_row_as_json(row, short=short) for row in rows],
        "troubles": [{"job": t.job, "store": t.store, "role": t.role, "text": t.text} for t in troubles],
    }


def _row_as_json(row: Row, *, short: bool) -> dict[str, Any]:
    return {
        "job": row.job,
        "store": row.store,
        "what": row.what,
        "unit": row.unit,
        "longrun": list(row.ours),
        "other": list(row.bare),
        "other_name": row.bare_name or ("bare" if row.bare else ""),
        "ratios": row.ratios,
        "ratio": row.ratio,
        "goal": None if row.goal is None else str(row.goal),
        "ok": row.ok(short=short),
        "durable": row.durable,
        "note": row.note,
    }
