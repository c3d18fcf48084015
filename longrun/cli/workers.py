"""`longrun workers`: the processes that may own executions, and whether they live."""

from __future__ import annotations

from typing import Any

import click

from longrun import schema
from longrun.cli._connect import go, make_store, reading
from longrun.cli._options import json_option, store_option
from longrun.cli._text import clean, duration, json_text, out, say, table

COLOURS = {"alive": "green", "expired": "yellow", "dead": "red"}
GLYPHS = {"alive": "✓", "expired": "!", "dead": "✗"}


@click.command("workers")
@store_option
@json_option
def workers_command(store: str | None, as_json: bool) -> None:
    """The processes that run executions: alive, dead (their lock is free) or expired (their lease ran out)."""
    found = go(_workers, make_store(store))
    if as_json:
        out(json_text(schema.document("workers", workers=found)))
        return
    if not found:
        say("no process is registered in this store")
        return
    headers = ("status", "id", "host", "pid", "lease", "executions", "queues", "workflows")
    for line in table(headers, [_row(one) for one in found], right=(3, 5)):
        out(line)


async def _workers(store: Any) -> list[dict[str, Any]]:
    from longrun.stored import Query

    async with reading(store) as desk:
        shown = []
        for owner in await desk.store.owners():
            number = sum((await desk.store.count(Query(owner=owner.id))).values())
            shown.append(schema.worker(owner, number))
    return sorted(shown, key=lambda one: (one["status"], one["id"]))


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    left = one["lease_seconds"]
    return (
        click.style(f"{GLYPHS[one['status']]} {one['status']}", fg=COLOURS[one["status"]]),
        clean(one["id"], limit=60),
        clean(one["host"] or "–", limit=40),
        str(one["pid"] or "–"),
        f"{duration(left)} left" if left >= 0 else f"over {duration(-left)} ago",
        str(one["executions"]),
        clean(", ".join(one["queues"]) or "all", limit=40),
        clean(", ".join(one["workflows"]) or "–", limit=60),
    )
