"""`longrun signal` and `longrun fork`: a message for an execution, and a new one from an old checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from longrun import schema
from longrun.cli._connect import controlling, go, make_store, value_argument
from longrun.cli._options import json_option, store_option
from longrun.cli._text import clean, json_text, out, say
from longrun.records import check_id

if TYPE_CHECKING:
    from longrun.client import Client


@click.command("signal")
@click.argument("id")
@click.argument("name")
@click.option("--payload", metavar="JSON|@FILE", help="What the step that waits for it receives.")
@click.option("--key", metavar="KEY", help="A repeat with the same key is ignored.")
@store_option
def signal_command(id: str, name: str, payload: str | None, key: str | None, store: str | None) -> None:
    """Send a signal to an execution; it is kept until a step waits for it."""
    value = None if payload is None else value_argument(payload, "--payload")
    go(_signal, make_store(store), check_id(id), name, value, key)
    out(f"{clean(id)}: signal {clean(name)} stored")


async def _signal(store: Any, id: str, name: str, payload: Any, key: str | None) -> None:
    async with controlling(store) as client:
        await client.signal(id, name, payload, key=key)


@click.command("fork")
@click.argument("id")
@click.option("--checkpoint", metavar="N", help="Its number, as `longrun show` lists them; the newest without.")
@click.option(
    "--from", "step", metavar="STEP", help="The newest checkpoint before this step: its name, or its number from 1."
)
@click.option("--set-state", "state", metavar="JSON|@FILE", help="Begin with this state instead of the stored one.")
@click.option("--new-id", metavar="ID", help="The id of the new execution.")
@store_option
@json_option
def fork_command(
    id: str,
    checkpoint: str | None,
    step: str | None,
    state: str | None,
    new_id: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Start a new execution from an old checkpoint, for any worker that knows the workflow. The old one stays."""
    if checkpoint is not None and step is not None:
        raise click.UsageError("give --checkpoint or --from, not both")
    more = {} if state is None else {"state": value_argument(state, "--set-state")}
    made = go(_fork, make_store(store), check_id(id), checkpoint, step, new_id, more)
    if as_json:
        out(json_text(schema.document("started", id=made)))
        return
    out(made)
    say(f"a worker that knows the workflow runs it, or: longrun run APP WORKFLOW --id {made}")


async def _fork(
    store: Any, id: str, checkpoint: str | None, step: str | None, new_id: str | None, more: dict[str, Any]
) -> str:
    async with controlling(store) as client:
        number: Any = checkpoint if step is None else await _before(client, id, step)
        handle = await client.fork(id, checkpoint=number, new_id=new_id, **more)
        return handle.id


async def _before(client: Client, id: str, step: str) -> int:
    """The number of the newest kept checkpoint at which a step comes next."""
    steps = (await client.get(id)).step_names
    is_number = step.isdecimal() and len(step) < 16
    wanted = {int(step) - 1} if is_number else {n for n, name in enumerate(steps) if name == step}
    kept = [one for one in await client.history(id) if one.step in wanted]
    if not kept:
        raise click.UsageError(f"no kept checkpoint stands before step {clean(step)!r}; `longrun show {id}` lists them")
    return kept[-1].seq
