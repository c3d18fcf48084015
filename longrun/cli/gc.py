"""`longrun gc`: remove finished executions of some age, and owners that are dead and own nothing."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from longrun import schema
from longrun.cli._connect import go, make_store
from longrun.cli._errors import FAILED, OK
from longrun.cli._options import Duration, json_option, store_option
from longrun.cli._settings import settings
from longrun.cli._text import duration, json_text, number_of, out, say


@click.command("gc")
@click.option("--older-than", type=Duration(), metavar="DURATION", help="Finished longer ago than this: 12h, 30d.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@store_option
@json_option
def gc_command(older_than: float | None, dry_run: bool, yes: bool, store: str | None, as_json: bool) -> int:
    """Remove finished executions older than --older-than (or the setting `max_age`), and dead owners of nothing.

    What runs, waits or is paused is never touched, and neither are its children.
    """
    seconds = settings().max_age(older_than)
    if seconds is None:
        raise click.UsageError("how old? give --older-than 30d, or set max_age")
    opened = make_store(store)
    number, owners = (0, 0) if yes and not dry_run else go(_count, opened, seconds)
    if not dry_run and number and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this would delete {number_of(number, 'execution')}; add --yes to do it")
        if not click.confirm(
            f"delete {number_of(number, 'execution')} that ended {duration(seconds)} ago or earlier?", err=True
        ):
            say("nothing was removed")
            return FAILED
    if not dry_run:
        number, owners = go(_collect, opened, seconds)
    if as_json:
        out(json_text(schema.document("collected", executions=number, owners=owners, dry_run=dry_run)))
    else:
        would = "would be " if dry_run else ""
        out(f"{number_of(number, 'execution')} and {number_of(owners, 'dead owner')} {would}removed")
    return OK


async def _count(store: Any, seconds: float) -> tuple[int, int]:
    from longrun.records import RetentionPolicy

    async with store:
        found = await store.gc(RetentionPolicy(max_age=seconds), time.time(), dry_run=True)
        return found, len(await _dead(store))


async def _collect(store: Any, seconds: float) -> tuple[int, int]:
    from longrun.records import RetentionPolicy

    async with store:
        removed = await store.gc(RetentionPolicy(max_age=seconds), time.time())
        dead = await _dead(store)
        for owner in dead:
            await store.unregister(owner)
        return removed, len(dead)


async def _dead(store: Any) -> list[str]:
    from longrun import lease
    from longrun.stored import Query

    gone = lease.gone(await store.owners())
    return [owner for owner in sorted(gone) if not await store.count(Query(owner=owner))]
