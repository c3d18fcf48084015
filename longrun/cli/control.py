"""`longrun pause`, `resume`, `cancel`, `retry` and `delete`: by id, or by filter, with a count and a confirmation."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click
from attrs import field, frozen

from longrun import schema
from longrun.cli._connect import controlling, go, make_store, reading, value_argument
from longrun.cli._errors import FAILED, OK, code_of, sentence
from longrun.cli._options import Duration, filters, json_option, query_of, store_option
from longrun.cli._text import clean, dim, json_text, number_of, out, say
from longrun.errors import LongrunError
from longrun.records import FINISHED, UNFINISHED, ExecutionState, check_id

if TYPE_CHECKING:
    from longrun.client import Client
    from longrun.stored import Query

State = ExecutionState
F = TypeVar("F", bound=Callable[..., Any])
AT_ONCE = 16
"""How many executions are asked at the same time: each may take until its next checkpoint."""


@frozen(kw_only=True)
class Verb:
    """What a command does to each of its executions."""

    name: str
    done: str
    """The word for it once it is done."""
    states: frozenset[ExecutionState]
    """In which it can be done: a filter chooses only among these."""
    act: Callable[[Client, str], Awaitable[None]] = field(repr=False)
    timeout: float | None = None
    note: str = ""
    """What happens next, for whoever reads it."""


GOES_ON = "each goes on in the process that has it, else in the next worker, or with: longrun run APP WORKFLOW --id ID"


def _choosing(function: F) -> F:
    options = (
        click.argument("ids", nargs=-1, metavar="[ID]..."),
        filters,
        click.option("--yes", "-y", is_flag=True, help="Do not ask."),
        store_option,
        json_option,
    )
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), function)


timeout_option = click.option(
    "--timeout",
    type=Duration(),
    default="60s",
    show_default=True,
    help="How long to wait for the effect; the request stays.",
)
state_option = click.option("--set-state", "state", metavar="JSON|@FILE", help="Replace the state by this one.")


@click.command("pause")
@_choosing
@click.option("--interrupt", is_flag=True, help="Stop the step in flight at once, not at its next checkpoint.")
@click.option("--no-hold", is_flag=True, help="Let the next start of a program that knows the workflow resume it.")
@timeout_option
def pause_command(interrupt: bool, no_hold: bool, timeout: float, **chosen: Any) -> int:
    """Pause executions: they stay so through restarts, until somebody resumes them."""

    async def act(client: Client, id: str) -> None:
        await client.pause(id, hold=not no_hold, interrupt=interrupt, timeout=timeout)

    states = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING, State.WAITING})
    return _command(Verb(name="pause", done="paused", states=states, act=act, timeout=timeout), chosen)


@click.command("resume")
@_choosing
@state_option
@timeout_option
def resume_command(state: str | None, timeout: float, **chosen: Any) -> int:
    """Let paused or blocked executions go on: in the process that has them, else in the next that knows them."""
    more = {} if state is None else {"state": value_argument(state, "--set-state")}

    async def act(client: Client, id: str) -> None:
        await client.resume(id, timeout=timeout, **more)

    verb = Verb(
        name="resume", done="resumed", states=frozenset({State.PAUSED, State.BLOCKED}), act=act, timeout=timeout
    )
    return _command(attrs.evolve(verb, note=GOES_ON), chosen)


@click.command("cancel")
@_choosing
@click.option("--reason", metavar="TEXT", help="Why, for whoever looks at it later.")
@click.option("--children", is_flag=True, help="Everything that they started, too.")
@timeout_option
def cancel_command(reason: str | None, children: bool, timeout: float, **chosen: Any) -> int:
    """End executions, for good. A step in flight is interrupted."""

    async def act(client: Client, id: str) -> None:
        await client.cancel(id, reason, children=children, timeout=timeout)

    states = UNFINISHED
    return _command(Verb(name="cancel", done="cancelled", states=states, act=act, timeout=timeout), chosen)


@click.command("retry")
@_choosing
@state_option
@timeout_option
def retry_command(state: str | None, timeout: float, **chosen: Any) -> int:
    """Run failed executions again, at the step that failed, with its progress inside the step."""
    more = {} if state is None else {"state": value_argument(state, "--set-state")}

    async def act(client: Client, id: str) -> None:
        await client.retry(id, timeout=timeout, **more)

    verb = Verb(name="retry", done="to be retried", states=frozenset({State.FAILED}), act=act, timeout=timeout)
    return _command(attrs.evolve(verb, note=GOES_ON), chosen)


@click.command("delete")
@_choosing
def delete_command(**chosen: Any) -> int:
    """Remove finished executions with everything that belongs to them."""

    async def act(client: Client, id: str) -> None:
        await client.delete(id)

    return _command(Verb(name="delete", done="deleted", states=FINISHED, act=act), chosen)


# --- the same for all of them -----------------------------------------------------------------------------------------


def _command(verb: Verb, chosen: dict[str, Any]) -> int:
    ids, yes, as_json = chosen.pop("ids"), chosen.pop("yes"), chosen.pop("as_json")
    store = make_store(chosen.pop("store"))
    query = query_of(chosen, limit=500)
    filtered = attrs.evolve(query, limit=1) != _NO_FILTER()
    if bool(ids) == filtered:
        raise click.UsageError("give ids, or choose by --workflow, --state, --queue …" + (", not both" if ids else ""))
    if filtered:
        ids = go(_matching, store, query, verb.states)
        if not _agreed(verb, len(ids), yes):
            say("nothing was changed")
            return FAILED
    for id in ids:
        check_id(id)
    changes = go(_change_all, store, verb, list(dict.fromkeys(ids)))
    return _told(verb, changes, as_json)


def _NO_FILTER() -> Query:  # noqa: N802 -- a constant whose class is imported late
    from longrun.stored import Query

    return Query(limit=1)


async def _matching(store: Any, query: Query, states: frozenset[ExecutionState]) -> list[str]:
    """The ids that a filter chooses, among those to which the verb can be applied. What was moved to another store goes
    on there: to take it up here again is said by its id."""
    from longrun.stored import was_moved

    query = attrs.evolve(query, states=states if query.states is None else states & query.states)
    found: list[str] = []
    async with reading(store) as desk:
        while query.states and (page := await desk.store.find(query)):
            found += [one.definition.id for one in page if not was_moved(one.head)]
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
    return found


def _agreed(verb: Verb, number: int, yes: bool) -> bool:
    if yes or not number:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError(f"this would {verb.name} {number_of(number, 'execution')}; add --yes to do it")
    return click.confirm(f"{verb.name} {number_of(number, 'execution')}?", err=True)


async def _change_all(store: Any, verb: Verb, ids: list[str]) -> dict[str, BaseException | None]:
    import anyio

    changes: dict[str, BaseException | None] = dict.fromkeys(ids)
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def change(client: Client, id: str) -> None:
        async with limiter:
            try:
                await verb.act(client, id)
            except (LongrunError, TimeoutError) as error:
                changes[id] = error

    if ids:
        async with controlling(store) as client, anyio.create_task_group() as tasks:
            for id in ids:
                tasks.start_soon(change, client, id)
    return changes


def _told(verb: Verb, changes: dict[str, BaseException | None], as_json: bool) -> int:
    failures = [error for error in changes.values() if error is not None]
    if as_json:
        shown = [
            {"id": id, "ok": error is None, "error": None if error is None else sentence(error)}
            for id, error in changes.items()
        ]
        out(json_text(schema.document("changes", verb=verb.name, changes=shown)))
    else:
        for id, error in changes.items():
            if error is None:
                out(f"{clean(id)}: {verb.done}")
            else:
                say(f"longrun: {sentence(error)}")
        if len(changes) != 1:
            say(f"{len(changes) - len(failures):,} {verb.done}" + (f", {len(failures):,} not" if failures else ""))
        if verb.note and len(failures) < len(changes):
            say(dim(verb.note))
    if not failures:
        return OK
    return code_of(failures[0]) or FAILED if len(changes) == 1 else FAILED
