"""Options that many commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from longrun.cli._text import STATES, parse_duration, parse_json, parse_moment

if TYPE_CHECKING:
    from longrun.stored import Query

F = TypeVar("F", bound=Callable[..., Any])

store_option = click.option(
    "--store",
    metavar="URL",
    help="Where executions are kept: file:DIR, sqlite:///PATH, postgresql://…, redis://…, "
    "replicated:?primary=URL&secondary=URL, or module:name.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (one schema for all commands).")
loop_option = click.option("--loop", metavar="NAME", help="The event loop: asyncio or trio.")


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic for type checkers alone
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, datetime):
            return value
        try:
            return parse_moment(value)
        except (ValueError, OverflowError):
            self.fail("give a date, a date and time, or how long ago: 2026-01-31, 2026-01-31T12:00, 2h, 3d", param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic for type checkers alone
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_duration(value)
        except ValueError:
            self.fail("give a duration: 90s, 15m, 2h, 30d, 4w", param, ctx)


class FiniteRange(click.FloatRange):
    """Neither nan, which is in every range, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite", param, ctx)
        return number


class Pair(click.ParamType):  # type: ignore[type-arg]  # generic for type checkers alone
    """KEY=VALUE; a value that is JSON counts as such, anything else as a string."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not equals or not key:
            self.fail("give a key, an equals sign and a value", param, ctx)
        try:
            return key, parse_json(text)
        except ValueError:
            return key, text


FILTERS = (
    click.option(
        "--state", "states", multiple=True, type=click.Choice([*STATES]), help="Only in this state; may be given again."
    ),
    click.option(
        "--workflow", "workflows", multiple=True, metavar="NAME", help="Only of this workflow; may be given again."
    ),
    click.option("--queue", metavar="NAME", help="Only of this queue."),
    click.option("--text", metavar="TEXT", help="Only with this text in the id or in a metadata value."),
    click.option("--meta", "metadata", multiple=True, type=Pair(), help="Only with this metadata; may be given again."),
    click.option("--parent", "parent_id", metavar="ID", help="Only children of this execution."),
    click.option("--since", type=Moment(), help="Only begun since then: a date, a time, or how long ago (2h, 3d)."),
    click.option("--until", type=Moment(), help="Only begun before then."),
)
NAMES = ("states", "workflows", "queue", "text", "metadata", "parent_id", "since", "until")


def filters(function: F) -> F:
    """The options that choose executions."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(FILTERS), function)


def query_of(chosen: dict[str, Any], *, limit: int = 100) -> Query:
    """The query that the filter options of a command make; they are taken out of `chosen`."""
    from longrun.records import ExecutionState
    from longrun.stored import Query

    given = {name: chosen.pop(name) for name in NAMES}
    since, until = given["since"], given["until"]
    return Query(
        states=frozenset(map(ExecutionState, given["states"])) or None,
        workflows=frozenset(given["workflows"]) or None,
        queue=given["queue"],
        text=given["text"],
        metadata=dict(given["metadata"]),
        parent_id=given["parent_id"],
        created_after=None if since is None else since.timestamp(),
        created_before=None if until is None else until.timestamp(),
        limit=limit,
    )
