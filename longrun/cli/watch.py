"""`longrun watch`: everything that runs, live. A table on a terminal, a line an execution elsewhere."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from itertools import compress
from typing import TYPE_CHECKING, Any

import attrs
import click

from longrun import schema
from longrun.cli import _summaries as rows
from longrun.cli._connect import go, make_store, reading
from longrun.cli._options import filters, json_option, query_of, store_option
from longrun.cli._text import STATES, clean, coloured, duration, json_text, moment, out, rate
from longrun.records import FINISHED, ExecutionState

if TYPE_CHECKING:
    from rich.table import Table

    from longrun.desk import Desk
    from longrun.stored import Query

State = ExecutionState
ACTIVE = frozenset(State) - FINISHED


@click.command("watch")
@filters
@click.option(
    "--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=30, show_default=True, help="How many at most.")
@click.option("--once", is_flag=True, help="Look once.")
@store_option
@json_option
def watch_command(store: str | None, as_json: bool, interval: float, limit: int, once: bool, **chosen: Any) -> None:
    """Watch what is unfinished, live: bars, rate, time left, age of the checkpoint, owner. Ctrl-C ends it."""
    query = query_of(chosen, limit=limit)
    if query.states is None:
        query = attrs.evolve(query, states=ACTIVE)
    go(_watch, make_store(store), query, interval, once, as_json)


async def _watch(store: Any, query: Query, interval: float, once: bool, as_json: bool) -> None:
    async with reading(store) as desk:
        if as_json:
            await _loop(_Documents(desk, query), interval, once)
        elif sys.stdout.isatty():
            await _live(desk, query, interval, once)
        else:
            await _loop(_Lines(desk, query), interval, once)


class _View:
    def __init__(self, desk: Desk, query: Query) -> None:
        self._desk, self._query = desk, query
        self._forecaster = desk.forecaster

    async def look(self) -> tuple[list[rows.Summary], dict[ExecutionState, int]]:
        found = await self._desk.store.find(self._query)
        everywhere = attrs.evolve(self._query, states=None)
        return await rows.summaries(found, self._forecaster, own=True), await self._desk.count(everywhere)

    async def show(self) -> None:
        raise NotImplementedError


class _Documents(_View):
    async def show(self) -> None:
        found, counts = await self.look()
        executions = [one.to_json() for one in found]
        now = schema.time(datetime.now(UTC))
        out(json_text(schema.document("running", executions=executions, counts=rows.counts_json(counts), time=now)))


class _Lines(_View):
    """A line for whatever has changed since the last look."""

    _shown: dict[str, str]

    def __init__(self, desk: Desk, query: Query) -> None:
        super().__init__(desk, query)
        self._shown = {}

    async def show(self) -> None:
        found, _ = await self.look()
        now = {one.execution.id: self._line(one) for one in found}
        for id in self._shown.keys() - now.keys():
            out(f"{moment(datetime.now(UTC))}  {clean(id)}  no longer in this view")
        for id, line in now.items():
            if self._shown.get(id) != line:
                out(f"{moment(datetime.now(UTC))}  {line}")
        self._shown = now

    @staticmethod
    def _line(one: rows.Summary) -> str:
        execution = one.execution
        percent = rows.percent(one.forecast.fraction).strip()
        return f"{clean(execution.id)}  {execution.state.value}  {percent}  step {rows.step_text(execution)}"


async def _loop(view: _View, interval: float, once: bool) -> None:
    import anyio

    while True:
        await view.show()
        sys.stdout.flush()
        if once:
            return
        await anyio.sleep(interval)


async def _live(desk: Desk, query: Query, interval: float, once: bool) -> None:
    import anyio
    from rich.console import Console
    from rich.live import Live

    view = _View(desk, query)
    console = Console(color_system="auto" if coloured(sys.stdout) else None, highlight=False)
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="ellipsis") as live:
        while True:
            live.update(_table(*await view.look(), console.width), refresh=True)
            if once:
                return
            await anyio.sleep(interval)


NARROW = 110
"""Below so many columns a terminal shows only what matters most."""
COLUMNS = {"state": True, "id": True, "workflow": False, "progress": True, "": True, "step": True}
COLUMNS |= {"rate": False, "left": True, "checkpoint": False, "owner": False}
"""The columns, and whether a narrow terminal has them too."""


def _table(found: list[rows.Summary], counts: dict[ExecutionState, int], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    chosen = [narrow or width >= NARROW for narrow in COLUMNS.values()]
    table = Table(box=None, padding=(0, 1), caption=rows.counts_line(counts), caption_justify="left", expand=False)
    for name in compress(COLUMNS, chosen):
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=12 if name == "id" else None)
    now = datetime.now(UTC)
    for one in found:
        table.add_row(*compress(_cells(one, now, 20 if width >= NARROW else 10), chosen))
    if not found:
        table.add_row(Text("nothing is under way here", style="dim"))
    return table


def _cells(one: rows.Summary, now: datetime, width: int) -> tuple[Any, ...]:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    execution, forecast = one.execution, one.forecast
    glyph, colour = STATES[execution.state.value]
    saved = duration((now - execution.last_update).total_seconds())
    cells = (
        clean(execution.id, limit=40),
        clean(execution.name, limit=24),
        rows.percent(forecast.fraction),
        rows.step_text(execution),
        rate(forecast.rate),
        "–" if execution.state.finished else duration(forecast.remaining),
        f"{saved} ago",
        clean(execution.owner or "–", limit=32),
    )
    name, workflow, percent, *rest = map(Text, cells)
    state = Text(f"{glyph} {execution.state.value}{rows.aside(execution)}", style=colour)
    return state, name, workflow, ProgressBar(total=1.0, completed=forecast.fraction, width=width), percent, *rest
