"""The pictures that go with the table: rates side by side, and every ratio beside its goal. Needs the extra `bench`.

Place in the life of a measurement: after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.alone import ALONE
from benchmarks.results import Row, show

COLOURS = {"longrun": "#2563eb", "alone": "#93c5fd", "bare": "#9ca3af", "missed": "#dc2626", "goal": "#111827"}
RATES = {"J1": "one execution", "J2": "many executions at once"}


def draw(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write the charts that these rows give; their paths."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "longrun"  # so that the same figures give the same file
    pyplot: Any = import_module("matplotlib.pyplot")
    directory.mkdir(parents=True, exist_ok=True)
    drawn = [_rates(pyplot, rows, job, directory) for job in RATES]
    return [path for path in [*drawn, _ratios(pyplot, rows, directory)] if path is not None]


def _rates(pyplot: Any, rows: Sequence[Row], job: str, directory: Path) -> Path | None:
    """longrun, the bare loop, the store alone and the peers, store by store."""
    chosen = [row for row in rows if row.job == job and row.unit == "steps/s" and row.bare]
    if not chosen:
        return None
    bars: list[tuple[str, float, str]] = []
    for store in dict.fromkeys(row.store for row in chosen):
        of_store = [row for row in chosen if row.store == store]
        bars.append((f"longrun, {store}", statistics.median(of_store[0].ours), COLOURS["longrun"]))
        for row in of_store:
            if row.what.endswith(ALONE):
                bars.append((f"the store alone, {store}", statistics.median(row.ours), COLOURS["alone"]))
                continue
            name = row.bare_name or "bare loop"
            bars.append((f"{name}, {store}", statistics.median(row.bare), COLOURS["bare"]))
    bars.reverse()
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.32 * len(bars)), layout="constrained")
    drawn = axes.barh([name for name, _, _ in bars], [value for _, value, _ in bars], color=[bar[2] for bar in bars])
    axes.bar_label(drawn, [show(value) for _, value, _ in bars], padding=3)
    axes.set_xscale("log")
    axes.set_xlabel("durable steps a second, more is better (log scale)")
    axes.set_title(f"{job}: {RATES[job]}")
    axes.margins(x=0.15)
    return _saved(pyplot, figure, directory / f"{job.lower()}.svg")


def _ratios(pyplot: Any, rows: Sequence[Row], directory: Path) -> Path | None:
    """Each ratio as a share of its goal: at 1 and beyond it is met."""
    bars: list[tuple[str, float]] = []
    for row in rows:
        if row.goal is None or not row.goal.on_ratio or row.ratio is None or not row.goal.limit or not row.ratio:
            continue
        share = row.goal.limit / row.ratio if row.goal.at_most else row.ratio / row.goal.limit
        bars.append((f"{row.job} {row.store}: {row.what}", share))
    if not bars:
        return None
    bars.reverse()
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.28 * len(bars)), layout="constrained")
    colours = [COLOURS["longrun"] if share >= 1 else COLOURS["missed"] for _, share in bars]
    axes.barh([name for name, _ in bars], [share for _, share in bars], color=colours)
    axes.axvline(1, color=COLOURS["goal"], linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("how far the goal is met: 1 is the goal, more is better (log scale)")
    axes.set_title("Ratios beside their goals")
    return _saved(pyplot, figure, directory / "ratios.svg")


def _saved(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
