"""`longrun watch`: everything that runs, live. A table on a terminal, a line an execution elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs
import click
from attrs import frozen

from longrun import schema
from longrun.cli import _summaries as rows
from longrun.cli._bars import bar
from longrun.cli._connect import go, make_store, reading
from longrun.cli._options import FiniteRange, filters, json_option, query_of, store_option
from longrun.cli._text import STATES, clean, coloured, duration, json_text, moment, out, rate
from longrun.records import UNFINISHED, ExecutionState

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from longrun.desk import Desk
    from longrun.stored import Query

State = ExecutionState


@click.command("watch")
@filters
@click.option("--interval", type=FiniteRange(0.2), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--limit", type=click.IntRange(1, 1000), default=30, show_default=True, help="How many at most.")
@click.option("--once", is_flag=True, help="Look once.")
@store_option
@json_option
def watch_command(store: str | None, as_json: bool, interval: float, limit: int, once: bool, **chosen: Any) -> None:
    """Watch what is unfinished, live: bars, rate, time left, age of the checkpoint, owner. Ctrl-C ends it."""
    query = query_of(chosen, limit=limit)
    if query.states is None:
        query = attrs.evolve(query, states=UNFINISHED)
    go(_watch, make_store(store), query, interval, once, as_json)


async def _watch(store: Any, query: Query, interval: float, once: bool, as_json: bool) -> None:
    import anyio

    display = _Documents() if as_json else _Table() if sys.stdout.isatty() else _Lines()
    async with reading(store) as desk:
        with display:
            while True:
                display.show(await _look(desk, query))
                if once:
                    return
                await anyio.sleep(interval)


@frozen
class _Look:
    """What one look at the store found."""

    found: list[rows.Summary]
    counts: dict[ExecutionState, int]
    moment: datetime


async def _look(desk: Desk, query: Query) -> _Look:
    found = await rows.summaries(await desk.store.find(query), desk.forecaster)
    return _Look(found, await desk.count(attrs.evolve(query, states=None)), datetime.now(UTC))


# --- three ways to show it --------------------------------------------------------------------------------------------


class _Documents(AbstractContextManager[None]):
    """A document a look, a line each."""

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, look: _Look) -> None:
        executions, counts = [one.to_json() for one in look.found], rows.counts_json(look.counts)
        out(json_text(schema.document("running", executions=executions, counts=counts, time=schema.time(look.moment))))


class _Lines(AbstractContextManager[None]):
    """A line for whatever has changed since the last look."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, look: _Look) -> None:
        now = {one.execution.id: self._line(one) for one in look.found}
        for id in self._shown.keys() - now.keys():
            out(f"{moment(look.moment)}  {clean(id)}  no longer in this view")
        for id, line in now.items():
            if self._shown.get(id) != line:
                out(f"{moment(look.moment)}  {line}")
        self._shown = now

    @staticmethod
    def _line(one: rows.Summary) -> str:
        execution = one.execution
        percent = rows.percent(one.forecast.fraction).strip()
        return f"{clean(execution.id)}  {execution.state.value}  {percent}  step {rows.step_text(execution)}"


class _Table(AbstractContextManager[None]):
    """A table that is drawn anew in its place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(color_system="auto" if coloured(sys.stdout) else None, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, screen=False, vertical_overflow="ellipsis")

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, look: _Look) -> None:
        self._live.update(_table(look, self._console.width), refresh=True)


GAP = 2
BAR = 20
SMALL_BAR = 10
DROPPED = ("workflow", "owner", "rate", "checkpoint")
"""The columns that a narrow terminal does without, the first of them first."""


def _table(look: _Look, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    lines = [_cells(one, look.moment) for one in look.found]
    length, columns = _fitting(lines, width)
    table = Table(box=None, padding=(0, 1), caption=rows.counts_line(look.counts), caption_justify="left", expand=False)
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for one, cells in zip(look.found, lines, strict=True):
        _, colour = STATES[one.execution.state.value]
        drawn: dict[str, Any] = {**cells, "progress": bar(one.forecast.fraction, length, colour=colour, full=colour)}
        table.add_row(*(drawn[name] for name in columns))
    if not look.found:
        table.add_row(Text("nothing is under way here", style="dim"))
    return table


def _fitting(lines: list[dict[str, Text]], width: int) -> tuple[int, list[str]]:
    """How wide the bars are, and which columns there is room for."""
    widths = {name: max(len(name), *(line[name].cell_len for line in lines)) + GAP for name in (lines or [{}])[0]}
    length = BAR if sum(widths.values()) + BAR + GAP <= width else SMALL_BAR
    for name in DROPPED:
        if sum(widths.values()) + length + GAP > width:
            widths.pop(name, None)
    names = list(widths)
    place = names.index("%") if "%" in names else 0
    return length, [*names[:place], "progress", *names[place:]]


def _cells(one: rows.Summary, now: datetime) -> dict[str, Text]:
    """What the columns show of an execution; the bar comes between them."""
    from rich.text import Text

    execution, forecast = one.execution, one.forecast
    glyph, colour = STATES[execution.state.value]
    saved = duration((now - execution.last_update).total_seconds())
    return {
        "state": Text(f"{glyph} {execution.state.value}{rows.aside(execution)}", style=colour),
        "id": Text(clean(execution.id, limit=40)),
        "workflow": Text(clean(execution.name, limit=24)),
        "%": Text(rows.percent(forecast.fraction)),
        "step": Text(rows.step_text(execution)),
        "rate": Text(rate(forecast.rate)),
        "left": Text("–" if execution.state.finished else duration(forecast.remaining)),
        "checkpoint": Text(f"{saved} ago"),
        "owner": Text(clean(execution.owner or "–", limit=32)),
    }
