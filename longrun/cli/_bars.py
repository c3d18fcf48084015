"""How a run shows itself on standard error: bars a step on a terminal, plain lines elsewhere.

Both are given a `View` and a `Forecast` a few times a second; the rows in the view say what has ended since.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from longrun.cli._summaries import items_text, percent
from longrun.cli._text import clean, coloured, duration, rate, say, state_text

if TYPE_CHECKING:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    from longrun.cli._follow import View
    from longrun.records import Forecast
    from longrun.stored import Boundary

SHOWN_STEPS = 12
"""A workflow with more steps than this shows only those around the one in flight."""
BAR = 30
FOLD = 20
PROGRESS_EVERY = 10.0
ENDS = frozenset({"step", "goto", "repeat", "sleep", "wait", "finish"})


def row_line(row: Boundary, total: int) -> str | None:
    """A line about a boundary, for people."""
    name = clean(row.name or "", limit=60)
    where = f"step {min(row.step + 1, total)}/{total} {name}".rstrip()
    tries = f", {row.attempts} attempts" if row.attempts > 1 else ""
    took = f" in {duration(row.ended - row.started)}" if row.started is not None else ""
    if row.kind in ENDS and row.name is not None:
        return f"{click.style('✓', fg='green')} {where}{took}{tries}"
    if row.kind == "fail":
        return f"{click.style('✗', fg='red')} {where} failed{tries}"
    if row.kind in ("pause", "resume", "retry", "block", "cancel"):
        return f"{where}: {row.kind}"
    return None


class Lines:
    """Plain lines: one when a step ends, is tried again or waits, and one every ten seconds of progress."""

    def __init__(self) -> None:
        self._attempt = 0
        self._visit = 0
        self._progress_at = time.monotonic() + PROGRESS_EVERY
        self._waiting: tuple[str | None, float | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)

    def update(self, view: View, forecast: Forecast) -> None:
        for line in self._news(view):
            self.say(line)
        if time.monotonic() >= self._progress_at and view.head.state == "running":
            self._progress_at = time.monotonic() + PROGRESS_EVERY
            self.say(summary_line(view, forecast))

    def _news(self, view: View) -> list[str]:
        head, total = view.head, view.definition.total
        lines = [line for row in view.rows if (line := row_line(row, total)) is not None]
        if len(lines) > FOLD:  # quick steps: one look has many of them
            lines = [f"✓ {len(lines) - 3:,} steps", *lines[-3:]]
        if head.visit != self._visit:
            self._visit, self._attempt = head.visit, head.attempt
        elif head.attempt > self._attempt and head.state == "running":
            self._attempt = head.attempt
            kind = clean((head.error or "").partition(":")[0], limit=60)
            wait = max(0.0, (head.due or 0.0) - time.time())
            lines.append(f"{step_line(view)}: attempt {head.attempt} failed ({kind}), again in {duration(wait)}")
        waiting = (head.signal, head.due) if head.state == "waiting" else None
        if waiting is not None and waiting != self._waiting:
            lines.append(f"{state_text('waiting')} {waits_for(view)}")
        self._waiting = waiting
        return lines


def step_line(view: View) -> str:
    head, total = view.head, view.definition.total
    return f"step {min(head.step + 1, total)}/{total} {clean(view.step_name or '', limit=60)}".rstrip()


def summary_line(view: View, forecast: Forecast) -> str:
    parts = [percent(forecast.fraction).strip(), step_line(view)]
    if inside := items_text(view.progress):
        parts.append(inside)
    if forecast.rate:
        parts.append(rate(forecast.rate))
    if forecast.remaining is not None:
        parts.append(f"about {duration(forecast.remaining)} left")
    return ", ".join(parts)


def waits_for(view: View) -> str:
    head = view.head
    if head.signal is not None:
        name = clean(head.signal)
        return f"for signal {name!r}: longrun signal {clean(view.definition.id)} {name}"
    return f"for {duration(max(0.0, (head.due or 0) - time.time()))}"


def bar(fraction: float, width: int, *, colour: str = "blue", full: str = "green", pulse: bool = False) -> ProgressBar:
    """A bar in the colours of the states: rich's own is red until it is full, and red is for what failed."""
    from rich.progress_bar import ProgressBar

    return ProgressBar(
        total=1.0,
        completed=fraction,
        width=width,
        pulse=pulse,
        complete_style=colour,
        finished_style=full,
        pulse_style=colour,
        animation_time=time.monotonic(),
    )


class Bars(Lines):
    """A bar for the whole, and one for each step (of a long workflow, for those around the one in flight)."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, color_system="auto" if coloured(sys.stderr) else None, highlight=False)
        redirect = sys.stdout.isatty()  # what steps print goes above the bars; into a file, it goes there untouched
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=redirect)
        self._took: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        from rich.text import Text

        self._live.console.print(Text.from_ansi(text), soft_wrap=True)

    def update(self, view: View, forecast: Forecast) -> None:
        for row in view.rows:
            if row.started is not None and row.kind in ENDS:
                self._took[row.step] = self._took.get(row.step, 0.0) + row.ended - row.started
        total = view.definition.total
        for line in self._news(view):
            if total > SHOWN_STEPS or "✓" not in line:  # a short workflow keeps a bar for each step: no line needed
                self.say(line)
        self._live.update(self._table(view, forecast), refresh=True)

    def _table(self, view: View, forecast: Forecast) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        whole = bar(forecast.fraction, BAR)
        known = forecast.remaining is not None and not view.head.state.finished
        left = f"about {duration(forecast.remaining)} left" if known else ""
        title = Text(clean(view.definition.id, limit=40), style="bold")
        table.add_row(title, whole, percent(forecast.fraction), Text(left or self._status(view)))
        for index in self._window(view):
            table.add_row(*self._step(view, forecast, index))
        return table

    @staticmethod
    def _status(view: View) -> str:
        return (
            waits_for(view)
            if view.head.state == "waiting"
            else ""
            if view.head.state == "running"
            else view.head.state.value
        )

    @staticmethod
    def _window(view: View) -> range:
        total, here = view.definition.total, view.head.step
        if total <= SHOWN_STEPS:
            return range(total)
        first = max(0, min(here - 2, total - 5))
        return range(first, min(total, first + 5))

    def _step(self, view: View, forecast: Forecast, index: int) -> tuple[Any, ...]:
        from rich.text import Text

        head = view.head
        name = Text(f"  {index + 1}/{view.definition.total} {clean(view.definition.steps[index], limit=32)}")
        if index < head.step:
            took = duration(self._took[index]) if index in self._took else ""
            return name, bar(1.0, BAR), Text("✓", style="green"), Text(took, style="dim")
        if index > head.step or head.state.finished:
            return Text(name.plain, style="dim"), bar(0.0, BAR), "", ""
        progress = view.progress
        known = progress is not None and bool(progress.total)
        inside = bar(progress.fraction if progress else 0.0, BAR, pulse=not known and head.state == "running")
        parts = [
            items_text(progress),
            rate(forecast.rate) if forecast.rate else "",
            clean((progress and progress.message) or "", limit=40),
        ]
        if head.attempt:
            parts.append(f"attempt {head.attempt + 1}")
        return name, inside, Text("▸", style="blue"), Text("  ".join(part for part in parts if part))
