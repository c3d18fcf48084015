"""`longrun events ID [--follow]`: what happened, told from the rows that boundaries leave, and what happens now."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click

from longrun import schema
from longrun.cli._connect import go, make_store, reading
from longrun.cli._follow import Follower, View
from longrun.cli._options import json_option, store_option
from longrun.cli._text import clean, count, json_text, moment, out
from longrun.eta import Forecaster
from longrun.events import EventType, ExecutionEvent
from longrun.following import event_of
from longrun.records import check_id


@click.command("events")
@click.argument("id")
@click.option("--follow", "-f", is_flag=True, help="Go on until it ends, its progress inside a step included.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only what came behind this number.")
@store_option
@json_option
def events_command(id: str, follow: bool, after: int, store: str | None, as_json: bool) -> None:
    """What happened to an execution, oldest first."""
    go(_events, make_store(store), check_id(id), follow, after, _document if as_json else _line)


async def _events(store: Any, id: str, follow: bool, after: int, show: Any) -> None:
    async with reading(store) as desk:
        follower = Follower(desk.store, id, after=after)
        forecaster = desk.forecaster
        shown: object = None
        with follower.listening():
            while True:
                view = await follower.look()
                for row in view.rows:
                    out(show(event_of(id, row)))
                if follow and not view.rows and view.progress is not None and view.progress != shown:
                    shown = view.progress
                    out(show(await _progress(view, forecaster)))
                sys.stdout.flush()
                if not view.rows and (not follow or view.head.state.finished):
                    return
                if not view.rows:
                    await follower.wait(1.0)


async def _progress(view: View, forecaster: Forecaster) -> ExecutionEvent:
    """Progress inside the step in flight, as the store has it, with the forecast."""
    progress = view.progress
    forecast = await forecaster.of(view.definition, view.head, view.live)
    data = {} if progress is None else {"done": progress.done, "total": progress.total, "message": progress.message}
    return ExecutionEvent(
        type=EventType.PROGRESS,
        execution_id=view.definition.id,
        step=view.step_name,
        timestamp=datetime.now(UTC),
        attempt=view.head.attempt + 1,
        data={**data, **forecast.to_data()},
    )


def _document(event: ExecutionEvent) -> str:
    return json_text(schema.event(event))


def _line(event: ExecutionEvent) -> str:
    data = event.data
    parts = [moment(event.timestamp), f"{event.type.value:<19}"]
    if event.step is not None:
        parts.append(clean(event.step, limit=60))
    if event.type is EventType.PROGRESS:
        of = f"/{count(data['total'])}" if data.get("total") else ""
        parts.append(f"{count(data.get('done', 0))}{of} {clean(data.get('message') or '', limit=80)}".rstrip())
    elif event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if event.error:
        parts.append(clean(event.error, limit=200))
    return "  ".join(parts).rstrip()
