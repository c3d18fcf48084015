"""`longrun queues` and `longrun queues limit`: what waits in each queue, and what all workers keep to."""

from __future__ import annotations

from typing import Any

import click

from longrun import schema
from longrun.cli._connect import controlling, go, make_store, reading
from longrun.cli._options import json_option, store_option
from longrun.cli._text import clean, json_text, out, parse_duration, table


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic for type checkers alone
    """So many in a time: 10/60s, 100/1h; 5 alone is 5 a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        number, slash, time = value.partition("/")
        try:
            return float(number), parse_duration(time) if slash else 1.0
        except ValueError:
            self.fail("give so many in a time: 10/60s, 100/1h", param, ctx)


@click.group("queues", invoke_without_command=True)
@store_option
@json_option
@click.pass_context
def queues_command(context: click.Context, store: str | None, as_json: bool) -> None:
    """What waits and runs in each queue, and its limits."""
    if context.invoked_subcommand is None:
        _show(go(_queues, make_store(store)), as_json)
    elif store is not None or as_json:
        raise click.UsageError(f"give the options behind {context.invoked_subcommand}")


@queues_command.command("limit")
@click.argument("queue")
@click.option("--concurrency", type=click.IntRange(0), help="How many executions at once, in all workers; 0 for none.")
@click.option("--rate", type=Rate(), help="How many may begin in a time, in all workers: 10/60s, 100/1h.")
@click.option("--off", is_flag=True, help="Let the limit go.")
@store_option
@json_option
def limit_command(
    queue: str,
    concurrency: int | None,
    rate: tuple[float, float] | None,
    off: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Limit QUEUE for all workers. What runs already goes on; workers see it within about a second."""
    given = concurrency is not None or rate is not None
    if off == given:
        raise click.UsageError("give --concurrency, --rate or both; or --off to let the limit go")
    number, per = (None, 1.0) if rate is None else rate
    found = go(_limit, make_store(store, create=True), queue, concurrency, number, per)
    _show([one for one in found if one.name == queue], as_json)


async def _queues(store: Any) -> Any:
    from longrun.queues import list_queues

    async with reading(store) as desk:
        return await list_queues(desk.store)


async def _limit(store: Any, queue: str, concurrency: int | None, rate: float | None, per: float) -> Any:
    async with controlling(store) as client:
        await client.limit_queue(queue, concurrency=concurrency, rate=rate, per=per)
        return await client.list_queues()


def _show(found: Any, as_json: bool) -> None:
    if as_json:
        out(json_text(schema.document("queues", queues=[schema.queue(one) for one in found])))
        return
    headers = ("queue", "queued", "running", "at once", "starts")
    for line in table(headers, [_row(one) for one in found], right=(1, 2, 3)):
        out(line)


def _row(one: Any) -> tuple[str, ...]:
    most = "any" if one.limit is None or one.limit.concurrency is None else f"{one.limit.concurrency:,}"
    rate = "any" if one.limit is None or one.limit.rate is None else f"{one.limit.rate:g} in {one.limit.per:g} s"
    return clean(one.name, limit=60), f"{one.queued:,}", f"{one.running:,}", most, rate
