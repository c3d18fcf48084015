"""`longrun plan [ID]...`: what a resume would do. Exit code 1 if anything would be blocked: for use before a deploy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from longrun import schema
from longrun.cli._connect import go, load_registry, make_store, reading
from longrun.cli._errors import FAILED, OK
from longrun.cli._options import json_option, store_option
from longrun.cli._settings import settings
from longrun.cli._text import clean, dim, duration, json_text, number_of, out, say, state_text

if TYPE_CHECKING:
    from longrun.plan import ResumePlan

UNCHECKED = "the code was not checked: --app module:registry tells missing steps and states that no longer fit"
GLYPHS = {"block": ("✗", "red"), "leave": ("–", "bright_black"), "stay": ("‖", "yellow"), "wait": ("◷", "cyan")}


@click.command("plan")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--app", metavar="APP", help="The registry of the code to check against: app:registry.")
@click.option("--blocked", "only_blocked", is_flag=True, help="Show only what would be blocked.")
@store_option
@json_option
def plan_command(ids: tuple[str, ...], app: str | None, only_blocked: bool, store: str | None, as_json: bool) -> int:
    """Say what a resume would do, without running anything: of the given executions, or of all that are unfinished."""
    named = settings().get("app", app)
    registry = None if named is None else load_registry(named)
    plans = go(_plans, make_store(store), registry, ids)
    blocked = [one for one in plans if one.blocked]
    shown = blocked if only_blocked else plans
    if as_json:
        unchecked = [] if registry is not None else [UNCHECKED]
        found = [schema.plan(one) for one in shown]
        out(json_text(schema.document("plans", plans=found, blocked=len(blocked), unchecked=unchecked)))
    else:
        for one in shown:
            for line in _lines(one):
                out(line)
        if registry is None:
            say(dim(UNCHECKED))
        say(f"{number_of(len(plans), 'execution')}, {len(blocked):,} would be blocked")
    return FAILED if blocked else OK


async def _plans(store: Any, registry: Any, ids: tuple[str, ...]) -> list[ResumePlan]:
    from longrun.plan import Planner

    config = settings().config()
    async with reading(store) as desk:
        planner = Planner(desk.store, registry, config)
        return [one async for one in (planner.some(ids) if ids else planner.all())]


def _lines(one: ResumePlan) -> list[str]:
    glyph, colour = GLYPHS.get(one.action, ("▸", "green"))
    action = click.style(f"{glyph} {one.action}", fg=colour)
    lines = [f"{action}  {clean(one.id)}  {clean(one.workflow, limit=40)}  {state_text(one.state.value)}"]
    lines.append(f"    {clean(one.reason, limit=400)}")
    if one.skipped and not one.state.finished:
        names = ", ".join(clean(name, limit=40) for name in one.skipped[-5:])
        more = "…, " if len(one.skipped) > 5 else ""
        lines.append(dim(f"    skips {number_of(len(one.skipped), 'finished step')}: {more}{names}"))
    if one.owner is not None:
        lines.append(dim(f"    owner {clean(one.owner)} ({'alive' if one.owner_alive else 'dead or unknown'})"))
    if one.at_risk is not None:
        lines.append(dim(f"    a crash now would cost the work of the last {duration(one.at_risk)}"))
    return lines + [dim(f"    note: {clean(note, limit=200)}") for note in one.notes]
