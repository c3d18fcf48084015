"""`longrun show ID`: one execution in full. Here, and only here, its error and its state are shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import attrs
import click
from attrs import frozen

from longrun import plan, schema
from longrun.cli import _summaries as rows
from longrun.cli._connect import go, make_store, reading
from longrun.cli._options import json_option, store_option
from longrun.cli._text import age, clean, count, dim, duration, json_text, moment, out, rate, state_text, table
from longrun.desk import Desk
from longrun.records import Checkpoint, StepRecord, check_id, to_time
from longrun.stored import Loaded, Query
from longrun.stranded import living, may_be_stranded, stranded

CHILDREN = 100


@frozen(kw_only=True)
class Detail:
    """Everything that is shown of one execution."""

    loaded: Loaded
    summary: rows.Summary
    steps: list[StepRecord]
    left_out: int
    history: list[Checkpoint]
    children: list[rows.Summary]
    state: Any


@click.command("show")
@click.argument("id")
@click.option("--steps", type=click.IntRange(0), default=100, show_default=True, help="How many rows, the newest.")
@click.option("--state", "with_state", is_flag=True, help="Show the state too: what the next step receives.")
@store_option
@json_option
def show_command(id: str, steps: int, with_state: bool, store: str | None, as_json: bool) -> None:
    """Show one execution: its steps with durations, attempts and errors, its history and its progress."""
    detail = go(_read, make_store(store), check_id(id), steps, with_state)
    if as_json:
        out(json_text(_document(detail)))
        return
    for line in [*_head(detail), *_steps(detail), *_more(detail)]:
        out(line)


async def _read(store: Any, id: str, limit: int, with_state: bool) -> Detail:
    async with reading(store) as desk:
        loaded = await desk.store.load(id)
        forecaster = desk.forecaster
        head, now = loaded.head, desk.clock.now()
        if head.reason is None and may_be_stranded(head, now):
            head = attrs.evolve(head, reason=stranded(loaded.definition, head, await living(desk.store), now))
            loaded = attrs.evolve(loaded, head=head)
        after = max(0, head.seq - limit)
        children = await desk.store.find(Query(parent_id=id, limit=CHILDREN))
        return Detail(
            loaded=loaded,
            summary=await rows.summary(loaded.definition, head, forecaster),
            steps=await _newest(desk, id, after, limit),
            left_out=after,
            history=await desk.history(id),
            children=await rows.summaries(children, forecaster),
            state=_state(loaded) if with_state else None,
        )


async def _newest(desk: Desk, id: str, after: int, limit: int) -> list[StepRecord]:
    found: list[StepRecord] = []
    while len(found) < limit and (page := await desk.steps(id, after=found[-1].seq if found else after)):
        found += page
    return found


def _state(loaded: Loaded) -> Any:
    """The stored state as plain JSON data: tags and all, as it is stored."""
    from longrun.snapshot import restore_tree

    boundary = loaded.boundary
    return restore_tree(boundary.data or b"null", loaded.blobs, bool(boundary.blobs))


def _document(detail: Detail) -> dict[str, Any]:
    head, definition = detail.loaded.head, detail.loaded.definition
    return schema.document(
        "execution",
        execution=detail.summary.to_json(),
        error=head.error,
        reason=head.reason,
        step_names=list(definition.steps),
        steps=[schema.step(row) for row in detail.steps],
        steps_left_out=detail.left_out,
        checkpoints=[schema.checkpoint(one) for one in detail.history],
        inside=[
            {"kind": one.kind, "name": one.name, "done": one.done, "total": one.total}
            for one in plan.in_step(detail.loaded)
        ],
        messages=[
            {"kind": one.kind, "name": one.name, "sent": schema.time(to_time(one.sent))}
            for one in detail.loaded.messages
        ],
        children=[one.to_json() for one in detail.children],
        state=detail.state,
    )


# --- for people -------------------------------------------------------------------------------------------------------


def _head(detail: Detail) -> list[str]:
    execution, forecast = detail.summary.execution, detail.summary.forecast
    now = datetime.now(UTC)
    took = ((execution.end_time or now) - execution.start_time).total_seconds()
    pairs = [
        ("state", state_text(execution.state.value) + rows.aside(execution)),
        ("workflow", f"{clean(execution.name)} (version {clean(execution.version)})"),
        ("progress", f"{rows.bar(forecast.fraction, 20)} {rows.percent(forecast.fraction).strip()}{_left(detail)}"),
        ("started", f"{moment(execution.start_time)} ({age(execution.start_time, now)})"),
        (
            "ended" if execution.end_time else "so far",
            f"{moment(execution.end_time)}, " * bool(execution.end_time) + duration(took),
        ),
        ("queue", clean(execution.queue) + (f", priority {execution.priority}" if execution.priority else "")),
        ("owner", clean(execution.owner or "nobody")),
        ("position", _position(detail, now)),
    ]
    pairs += [(f"meta {clean(key, limit=40)}", clean(value, limit=200)) for key, value in execution.metadata.items()]
    for name, value in (("parent", execution.parent_id), ("reason", execution.reason), ("error", execution.error)):
        if value:
            pairs.append((name, clean(value, lines=True).replace("\n", "\n" + " " * 12)))
    return [click.style(clean(execution.id), bold=True), *(f"  {dim(f'{name:<9}')} {text}" for name, text in pairs)]


def _left(detail: Detail) -> str:
    execution, forecast = detail.summary.execution, detail.summary.forecast
    if execution.state.finished:
        return ""
    parts = [f"about {duration(forecast.remaining)} left"] if forecast.remaining is not None else []
    parts += [f"{rate(forecast.rate)}"] if forecast.rate else []
    return f", {', '.join(parts)}" if parts else ""


def _position(detail: Detail, now: datetime) -> str:
    """`last checkpoint 12 s ago, would resume at step 4 of 9 (crawl), pages: from item 312 of 1000`."""
    execution, loaded = detail.summary.execution, detail.loaded
    saved = f"last checkpoint {age(execution.last_update, now)}"
    if execution.state.finished:
        return saved
    steps = loaded.definition.steps
    if not steps:
        return f"{saved}, not begun"
    if execution.current_step >= len(steps):
        return f"{saved}, all steps done"
    where = f"step {execution.current_step + 1} of {len(steps)} ({clean(steps[execution.current_step], limit=60)})"
    inside = [clean(plan.describe(one), limit=80) for one in plan.in_step(loaded)]
    waits = f", waits for signal {clean(execution.waiting_for)!r}" if execution.waiting_for else ""
    due = f", due {moment(execution.due)}" if execution.due else ""
    return ", ".join([saved, f"would resume at {where}", *inside]) + waits + due


def _steps(detail: Detail) -> list[str]:
    if not detail.steps:
        return []
    found: list[tuple[str, ...]] = []
    for row in detail.steps:
        seconds = None if row.started is None else (row.ended - row.started).total_seconds()
        error = clean((row.error or "").split("\n", 1)[0], limit=100)
        name = clean(row.name or "–", limit=60)
        found.append(
            (
                str(row.seq),
                row.kind,
                str(row.step + 1),
                name,
                moment(row.ended),
                duration(seconds),
                str(row.attempts),
                error,
            )
        )
    head = detail.summary.execution
    if head.state.value == "running" and detail.loaded.head.started is not None:
        found.append(_in_flight(detail))
    headers = ("seq", "kind", "step", "name", "ended", "took", "attempts", "error")
    note = [dim(f"  {detail.left_out} older rows are left out; --steps shows more")] if detail.left_out else []
    return ["", *note, *(f"  {line}" for line in table(headers, found, right=(0, 2, 5, 6)))]


def _in_flight(detail: Detail) -> tuple[str, ...]:
    head, steps = detail.loaded.head, detail.loaded.definition.steps
    name = clean(steps[head.step], limit=60) if head.step < len(steps) else "–"
    seconds = datetime.now(UTC).timestamp() - (head.started or 0)
    inside = rows.items_text(detail.summary.execution.step_progress)
    note = clean(head.note or "", limit=60)
    return (
        "…",
        "in flight" if head.owner else "interrupted",
        str(head.step + 1),
        name,
        "–",
        duration(seconds),
        str(head.attempt + 1),
        f"{inside} {note}".strip(),
    )


def _more(detail: Detail) -> list[str]:
    lines: list[str] = []
    if detail.history:
        headers = ("checkpoint", "next step", "kind", "bytes", "time")
        found = [
            (str(one.seq), str(one.step + 1), one.kind, count(one.size), moment(one.timestamp))
            for one in detail.history
        ]
        lines += ["", *(f"  {line}" for line in table(headers, found, right=(0, 1, 3)))]
    if detail.loaded.messages:
        waiting = [f"{one.kind} {clean(one.name or '', limit=40)}".strip() for one in detail.loaded.messages]
        lines += ["", f"  {dim('messages that wait:')} {', '.join(waiting[:20])}"]
    if detail.loaded.damage:
        lines += ["", *(f"  damage: {clean(one)}" for one in detail.loaded.damage)]
    if detail.children:
        lines += ["", dim("  children"), *(f"  {line}" for line in rows.lines(detail.children))]
    if detail.state is not None:
        lines += ["", dim("  state"), json_text(detail.state, indent=2)]
    return lines
