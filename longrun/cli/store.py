"""`longrun store info`, `store migrate`, `store copy`, `store failover` and `store replace`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from longrun import schema
from longrun.cli._connect import go, make_store, reading
from longrun.cli._errors import FAILED, OK
from longrun.cli._options import json_option, store_option
from longrun.cli._summaries import counts_json, counts_line
from longrun.cli._text import clean, hide_secrets, json_text, out, say


@click.group("store")
def store_command() -> None:
    """Look at a store, migrate it, copy it to another, or see to a pair: switch to the other one, replace one."""


@store_command.command("info", short_help="What kind of store it is, and what is in it.")
@store_option
@json_option
def info_command(store: str | None, as_json: bool) -> None:
    """What kind of store it is, its settings, and how many executions it has."""
    _show(*go(_info, make_store(store)), as_json)


@store_command.command("migrate", short_help="Bring it to the format of this version.")
@store_option
@json_option
def migrate_command(store: str | None, as_json: bool) -> None:
    """Bring the store to the format of this version; make it, if there is none. Opening it does the same by itself."""
    _show(*go(_info, make_store(store, create=True)), as_json)


async def _info(store: Any) -> tuple[dict[str, object], Any]:
    import anyio

    async with reading(store) as desk:
        await desk.store.ping()
        return plain_facts(await anyio.to_thread.run_sync(desk.store.backend.describe)), await desk.count()


def plain_facts(facts: Any) -> dict[str, object]:
    """What a backend says of itself, as JSON values without a password; of a pair, what each of the two says."""
    found: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{one}": fact for one, fact in plain_facts(value).items()}
        else:
            found[str(name)] = value if isinstance(value, bool | int | float | type(None)) else _plain(value)
    return found


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [hide_secrets(str(one)) for one in value]
    return hide_secrets(str(value))


def _show(facts: dict[str, object], counts: Any, as_json: bool) -> None:
    if as_json:
        out(json_text(schema.document("store", facts=facts, counts=counts_json(counts))))
        return
    for name, value in facts.items():
        shown = "; ".join(map(str, value)) or "none" if isinstance(value, list) else value
        out(f"{clean(name):<20} {clean(shown, limit=400)}")
    out(f"{'executions':<20} {counts_line(counts)}")


@store_command.command("failover", short_help="Make the standby of a pair active, by hand.")
@click.option("--force", is_flag=True, help="Also one that is not level, or may not be: what it lacks is lost.")
@store_option
def failover_command(force: bool, store: str | None) -> None:
    """Make the standby of a pair of stores active. Where there is a witness, that happens by itself.

    Whoever calls it says that no process still writes to the store that was active; the others follow.
    """
    status = go(_failover, make_store(store), force)
    out(f"the {status.active} is active now, the standby is {status.standby}")


async def _failover(store: Any, force: bool) -> Any:
    async with _pair(store) as pair:
        await pair.failover(force=force)
        return pair.status()


@store_command.command("replace", short_help="Put an empty store in the place of a lost one of a pair.")
@click.argument("part", type=click.Choice(["primary", "secondary"]))
@click.option("--force", is_flag=True, help="Also if the lost store may have had more than the other: that is lost.")
@store_option
def replace_command(part: str, force: bool, store: str | None) -> None:
    """Put the store that the URL names as PART, new and empty, in the place of the one that was PART of the pair.

    Whoever calls it says that the old one is lost, and that no process uses it any more. The other one is active then,
    and the workers bring the new one up to date.
    """
    go(_replace, make_store(store), part, force)
    out(f"the {part} is a new store now, and is brought up to date when a worker uses the pair")


async def _replace(store: Any, part: str, force: bool) -> None:
    await _pair(store).replace(part, force=force)


def _pair(store: Any) -> Any:
    from longrun.stores.replicated import ReplicatedCheckpointStore

    if not isinstance(store, ReplicatedCheckpointStore):
        raise click.UsageError("that is no pair of stores; give --store 'replicated:?primary=URL&secondary=URL'")
    return store


@store_command.command("copy", short_help="Carry everything to another store.")
@click.argument("source")
@click.argument("target")
@json_option
def copy_command(source: str, target: str, as_json: bool) -> int:
    """Carry every execution of SOURCE to TARGET, with its history; both are URLs or module:name.

    It can be interrupted and started again. What is unfinished stays behind paused and held; what a living process
    runs is left where it is, with its parents and children, and the exit code is 1 then.
    """
    made = make_store(target, create=True)
    if made.backend.kind == "memory":
        raise click.UsageError("a store in memory ends with this command: give the URL of another TARGET")
    report = go(_copy, make_store(source), made, not as_json)
    if as_json:
        found = {"copied": list(report.copied), "present": list(report.present), "skipped": dict(report.skipped)}
        out(json_text(schema.document("copied", **found)))
    else:
        for id, why in report.skipped.items():
            say(f"left behind: {clean(id)}: {clean(why)}")
        out(
            f"{len(report.copied):,} copied, {len(report.present):,} there already, {len(report.skipped):,} left behind"
        )
    return FAILED if report.skipped else OK


async def _copy(source: Any, target: Any, show: bool) -> Any:
    from longrun.stores.copy import copy_store

    done = 0

    def progress(id: str) -> None:
        nonlocal done
        done += 1
        if show and sys.stderr.isatty():
            click.echo(f"\r{done:,} copied", nl=False, err=True)

    report = await copy_store(source, target, progress=progress)
    if show and done and sys.stderr.isatty():
        say()
    return report
