"""Executions as lists show them: a record and a forecast each, as rows of a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from attrs import frozen

from longrun import schema, views
from longrun.cli._text import age, clean, count, duration, number_of, state_text, table
from longrun.records import Execution, ExecutionState, Forecast, Progress

if TYPE_CHECKING:
    from longrun.eta import Forecaster
    from longrun.stored import Definition, Head, Stored

BAR = 10
ASIDES = {ExecutionState.RUNNING: " (interrupted)", ExecutionState.RESUMING: " (no worker yet)"}
"""For those that nobody owns."""


@frozen
class Summary:
    """One execution as a list shows it."""

    execution: Execution
    forecast: Forecast

    def to_json(self) -> dict[str, Any]:
        return schema.summary(self.execution, self.forecast)


async def summaries(found: Sequence[Stored], forecaster: Forecaster) -> list[Summary]:
    """A page of executions, with the forecast that `show` has of each."""
    return [await summary(one.definition, one.head, forecaster) for one in found]


async def summary(definition: Definition, head: Head, forecaster: Forecaster, live: Progress | None = None) -> Summary:
    return Summary(views.execution(definition, head, live), await forecaster.of(definition, head, live))


def lines(found: Sequence[Summary]) -> list[str]:
    """A table of executions."""
    headers = ("state", "id", "workflow", "progress", "step", "left", "started", "updated", "owner")
    now = datetime.now(UTC)
    return table(headers, [_row(one, now) for one in found])


def _row(one: Summary, now: datetime) -> tuple[str, ...]:
    execution, forecast = one.execution, one.forecast
    return (
        state_text(execution.state.value) + aside(execution),
        clean(execution.id),
        clean(execution.name, limit=40),
        f"{bar(forecast.fraction)} {percent(forecast.fraction)}",
        step_text(execution),
        "–" if execution.state.finished else duration(forecast.remaining),
        age(execution.start_time, now),
        age(execution.last_update, now),
        clean(execution.owner or "–", limit=40),
    )


def aside(execution: Execution) -> str:
    """What the state alone does not say: that it is held, or that nobody runs what says it runs."""
    if execution.hold:
        return " (held)"
    return ASIDES.get(execution.state, "") if execution.owner is None else ""


def bar(fraction: float, width: int = BAR) -> str:
    """A bar of characters, for where nothing moves."""
    full = min(width, max(0, int(fraction * width + 1e-9)))
    return "█" * full + "░" * (width - full)


def percent(fraction: float) -> str:
    """Rounded down: nothing is at 100 % before it is done."""
    return f"{int(fraction * 100 + 1e-9):3}%"


def step_text(execution: Execution) -> str:
    """`4/9 (312/1,000)`: the step in flight, and how far it is."""
    if not execution.total_steps:
        return "–"
    text = f"{min(execution.current_step + 1, execution.total_steps)}/{execution.total_steps}"
    inside = items_text(execution.step_progress)
    return f"{text} ({inside})" if inside and not execution.state.finished else text


def items_text(progress: Progress | None) -> str:
    if progress is None or not (progress.done or progress.total):
        return ""
    return count(progress.done) + (f"/{count(progress.total)}" if progress.total else "")


def counts_json(counts: Mapping[ExecutionState, int]) -> dict[str, int]:
    """Every state, those with none too."""
    return {state.value: counts.get(state, 0) for state in ExecutionState}


def counts_line(counts: Mapping[ExecutionState, int]) -> str:
    total = sum(counts.values())
    parts = [f"{number:,} {state.value}" for state in ExecutionState if (number := counts.get(state, 0))]
    return number_of(total, "execution") + (f": {', '.join(parts)}" if parts else "")
