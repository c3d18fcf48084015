"""Executions in a notebook: how they look as the value of a cell, and a bar that moves.

Place in the life of an execution: whenever somebody looks. `await show(run)` works with a notebook's top-level `await`;
outside of one it prints lines. No error's text and no state appears here: notebooks are saved and passed on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any

import anyio

from longrun.records import Execution, ExecutionState

if TYPE_CHECKING:
    from longrun.handle import ExecutionHandle

State = ExecutionState
STANDING = frozenset({State.PAUSED, State.BLOCKED})
COLOURS = {
    State.RUNNING: "#2563eb",
    State.RESUMING: "#2563eb",
    State.COMPLETED: "#15803d",
    State.FAILED: "#dc2626",
    State.BLOCKED: "#dc2626",
    State.CANCELLED: "#6b7280",
}
OTHER = "#b45309"


async def show(run: ExecutionHandle, *, interval: float = 0.25) -> Execution:
    """Show an execution until it has ended, or stands still (paused, blocked); how it stood then.

    In a notebook a bar that is updated in its place; elsewhere a line on standard output whenever something changed.
    """
    display = _displayed() or _printed()
    while True:
        found = await run.info()
        display(found)
        if found.state.finished or found.state in STANDING:
            return found
        await anyio.sleep(interval)


def _displayed() -> Callable[[Execution], object] | None:
    """Shows an execution in the running cell; None where there is no notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    display: Any = importlib.import_module("IPython.display").display
    cell: Any = None

    def update(execution: Execution) -> None:
        nonlocal cell
        if cell is None:
            cell = display(execution, display_id=True)
        else:
            cell.update(execution)

    return update


def _printed() -> Callable[[Execution], object]:
    shown = ""

    def update(execution: Execution) -> None:
        nonlocal shown
        if (line := text(execution)) != shown:
            shown = line
            print(line, flush=True)

    return update


def text(execution: Execution) -> str:
    """An execution in a line."""
    parts = (execution.id, execution.name, execution.state.value, f"{_percent(execution)}%", _where(execution))
    return "  ".join(parts)


def html(execution: Execution) -> str:
    """An execution as a notebook shows it. Everything in it is escaped: names and messages come from programs."""
    colour = COLOURS.get(execution.state, OTHER)
    percent = _percent(execution)
    bar = (
        '<div style="background:#8884;border-radius:4px;height:8px;max-width:32em;margin:4px 0">'
        f'<div style="background:{colour};border-radius:4px;height:8px;width:{percent}%"></div></div>'
    )
    return (
        f'<div role="group" aria-label="{escape(text(execution))}" style="font-family:sans-serif;font-size:13px">'
        f"<b>{escape(execution.id)}</b> {escape(execution.name)} "
        f'<span style="color:{colour}">{execution.state.value}</span>'
        f"{bar}{percent}% · {escape(_where(execution))}</div>"
    )


def unknown(id: str) -> str:
    """A handle of which nothing is known without asking a store, which a cell's value cannot wait for."""
    return (
        f'<div style="font-family:sans-serif;font-size:13px"><b>{escape(id)}</b> '
        "<code>await run.info()</code> or <code>await longrun.notebook.show(run)</code> look at it</div>"
    )


def _percent(execution: Execution) -> int:
    """Rounded down: nothing is at 100 % before it is done."""
    forecast = execution.forecast
    fraction = execution.progress if forecast is None else forecast.fraction
    return min(100, max(0, int(fraction * 100 + 1e-9)))


def _where(execution: Execution) -> str:
    """`step 2/3 crawl, 25/100 pages, 0:01:10 left`."""
    step, total = execution.current_step, execution.total_steps
    if execution.state.finished:
        took = (execution.end_time or execution.last_update) - execution.start_time
        return f"{total} step{'' if total == 1 else 's'}, {_clock(took.total_seconds())}"
    name = execution.step_names[step] if step < len(execution.step_names) else ""
    parts = [f"step {min(step + 1, total)}/{total} {name}".rstrip()]
    if (inside := execution.step_progress) is not None:
        of = "" if inside.total is None else f"/{inside.total:g}"
        parts.append(f"{inside.done:g}{of} {inside.message or ''}".rstrip())
    forecast = execution.forecast
    if forecast is not None and forecast.remaining is not None:
        parts.append(f"{_clock(forecast.remaining)} left")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
