"""`longrun list`: a page of executions, newest first, and how many there are in each state."""

from __future__ import annotations

from typing import Any

import attrs
import click

from longrun import schema
from longrun.cli import _summaries as rows
from longrun.cli._connect import go, make_store, reading
from longrun.cli._options import filters, json_option, query_of, store_option
from longrun.cli._text import dim, json_text, out, say
from longrun.records import check_id


@click.command("list")
@filters
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many at most.")
@click.option("--after", metavar="ID", help="The page behind this execution, the last of the page before.")
@store_option
@json_option
def list_command(store: str | None, as_json: bool, limit: int, after: str | None, **chosen: Any) -> None:
    """List executions, newest first."""
    go(_list, make_store(store), query_of(chosen, limit=limit), after, as_json)


async def _list(store: Any, query: Any, after: str | None, as_json: bool) -> None:
    async with reading(store) as desk:
        if after is not None:
            last = await desk.store.load(check_id(after))
            query = attrs.evolve(query, after=(last.definition.created, last.definition.id))
        found = await desk.store.find(query)
        shown = await rows.summaries(found, desk.forecaster)
        counts = await desk.count(query)
    more = shown[-1].execution.id if len(shown) == query.limit else None
    if as_json:
        executions = [one.to_json() for one in shown]
        out(json_text(schema.document("executions", executions=executions, counts=rows.counts_json(counts), next=more)))
        return
    for line in rows.lines(shown) if shown else ():
        out(line)
    say(
        dim(
            rows.counts_line(counts)
            + (f"; the next page: --after {more}" if more and sum(counts.values()) > len(shown) else "")
        )
    )
