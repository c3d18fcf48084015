"""`longrun doctor`: is the store fit to be trusted with executions, and is anything left lying about?"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import attrs
import click
from attrs import frozen

from longrun import __version__, lease, schema
from longrun.cli._connect import go, make_store
from longrun.cli._errors import FAILED, OK, UNAVAILABLE, sentence
from longrun.cli._options import json_option, store_option
from longrun.cli._text import clean, duration, hide_secrets, json_text, number_of, out, status_text, table
from longrun.errors import LongrunError, StoreError
from longrun.records import UNFINISHED, ExecutionState
from longrun.stored import Owner, Query
from longrun.stores.store import CheckpointStore
from longrun.stranded import NEEDS_WORKER, PARKED, living, stranded

State = ExecutionState
RANK = {"ok": 0, "warn": 1, "fail": 2}
PROBE_TTL = 60.0
SKEW = 5.0
LITTLE_SPACE = 200 * 2**20
PAGE = 500
PAGES = 40
SIDES = ("primary", "secondary")


@frozen
class Check:
    name: str
    status: str
    """ok, warn or fail."""
    message: str


@click.command("doctor")
@store_option
@json_option
def doctor_command(store: str | None, as_json: bool) -> int:
    """Check the store: reachable, durable, versions, permissions, clock, orphaned owners, quarantine."""
    checks, reachable = go(_examine, make_store(store))
    worst = max((check.status for check in checks), key=RANK.__getitem__)
    if as_json:
        found = [attrs.asdict(check) for check in checks]
        out(json_text(schema.document("doctor", checks=found, worst=worst)))
    else:
        rows = [(status_text(one.status), one.name, clean(hide_secrets(one.message), limit=400)) for one in checks]
        for line in table(("status", "check", "finding"), rows):
            out(line)
    if not reachable:
        return UNAVAILABLE
    return FAILED if worst == "fail" else OK


async def _examine(store: CheckpointStore) -> tuple[list[Check], bool]:
    checks = [_versions(), _run_directory()]
    began = time.perf_counter()
    try:
        await store.open()
    except StoreError as error:
        return [*checks, Check("reachable", "fail", sentence(error))], False
    try:
        await store.ping()
        took = (time.perf_counter() - began) * 1000
        checks.append(Check("reachable", "ok", f"the {store.backend.kind} store answers, opened in {took:.0f} ms"))
        for examine in (_settings, _writes, _clock, _owners, _blocked, _stranded):
            checks += await _found(examine, store)
    except StoreError as error:
        return [*checks, Check("reachable", "fail", sentence(error))], False
    finally:
        await store.aclose()
    return checks, True


async def _found(examine: Callable[[CheckpointStore], Awaitable[list[Check]]], store: CheckpointStore) -> list[Check]:
    """What one examination says. That it cannot be made is a finding; a store that is away ends them all."""
    try:
        return await examine(store)
    except StoreError:
        raise
    except LongrunError as error:
        return [Check(examine.__name__.strip("_"), "fail", sentence(error))]


def _versions() -> Check:
    return Check("versions", "ok", f"longrun {__version__}, Python {platform.python_version()} on {platform.system()}")


def _run_directory() -> Check:
    """Where this host's lock files are: without it no death can be proved, and every take-over waits for a lease."""
    from longrun.life import boot_id, run_directory

    try:
        directory = run_directory()
    except LongrunError as error:
        return Check("run directory", "fail", sentence(error))
    if not boot_id():
        return Check("run directory", "warn", "this host does not tell its boot id: take-overs wait for the lease")
    return Check("run directory", "ok", f"{directory} on {socket.gethostname()}")


# --- what the store says of itself ------------------------------------------------------------------------------------


async def _settings(store: CheckpointStore) -> list[Check]:
    import anyio.to_thread

    facts = await anyio.to_thread.run_sync(store.backend.describe)
    if "standby" not in facts:
        return [*_durability(facts), *_place(facts), *_quarantine(facts)]
    found = list(_pair(facts))
    for name in SIDES:
        side = facts.get(name)
        if isinstance(side, Mapping):
            checks = [*_durability(side), *_place(side), *_quarantine(side)]
            found += [attrs.evolve(check, name=f"{name}: {check.name}") for check in checks]
    return found


def _pair(facts: Mapping[str, Any]) -> Iterator[Check]:
    """How two stores in step are doing."""
    away = [name for name in SIDES if name not in facts]
    told = f"the {facts['active']} is active, the standby is {facts['standby']}, {facts['mode']}"
    if away:
        yield Check("pair", "warn", f"{told}; the {away[0]} does not answer")
    else:
        yield Check("pair", "ok" if facts["standby"] == "level" else "warn", told)
    if not facts["automatic_failover"]:
        yield Check("failover", "warn", "no witness: if the active store dies, somebody has to call failover()")


def _durability(facts: Mapping[str, Any]) -> Iterator[Check]:
    faults = list(_faults(facts))
    yield from faults
    if not faults:
        told = [
            f"{name} {facts[name]}"
            for name in ("fsync", "journal_mode", "synchronous", "synchronous_commit")
            if name in facts
        ]
        yield Check("durable", "ok", "an acknowledged write survives" + (f" ({', '.join(told)})" if told else ""))
    if facts.get("fenced") is False:
        yield Check("fenced", "warn", "this store cannot fence: let one process alone use it")
    known = [f"{name} {facts[name]}" for name in ("server", "sqlite", "wal_reset", "format", "driver") if name in facts]
    if known:
        yield Check("store versions", "ok", ", ".join(known))


def _faults(facts: Mapping[str, Any]) -> Iterator[Check]:
    """The settings that make an acknowledgement worth less than it says."""
    if facts.get("durable") is False:
        yield Check("durable", "warn", "an acknowledged write does not survive: for tests, or see the settings")
    if facts.get("fsync") == "off":
        yield Check("durable", "fail", "fsync is off: a power cut loses or damages the database")
    if facts.get("synchronous_commit") == "off":
        yield Check("durable", "fail", "synchronous_commit is off: a crash of the server loses acknowledged writes")
    if facts.get("full_page_writes") == "off":
        yield Check("durable", "warn", "full_page_writes is off: a power cut can damage pages")
    if facts.get("read_only") in (True, "on", "t"):
        on_disk = "directory" in facts or "path" in facts
        only = "the file system is read-only" if on_disk else "the server only reads: it is a standby"
        yield Check("durable", "fail", only)
    warnings = facts.get("warnings") or ()
    for warning in [warnings] if isinstance(warnings, str) else warnings:
        yield Check("durable", "warn", str(warning))


def _place(facts: Mapping[str, Any]) -> Iterator[Check]:
    path = facts.get("directory") or facts.get("path")
    if isinstance(path, str) and os.path.lexists(path):
        info = os.lstat(path)
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o077:
            yield Check("permissions", "warn", f"{path} is open to others (mode {mode:04o}); it holds states")
        elif info.st_uid != os.geteuid():
            yield Check("permissions", "warn", f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
        else:
            yield Check("permissions", "ok", f"{path} is private (mode {mode:04o})")
    free = facts.get("free_bytes")
    if isinstance(free, int) and free < LITTLE_SPACE:
        yield Check("space", "warn", f"only {free // 2**20:,} MiB are free")


def _quarantine(facts: Mapping[str, Any]) -> Iterator[Check]:
    number = facts.get("quarantined")
    if not isinstance(number, int):
        yield Check("quarantine", "ok", "this store does not count what is in quarantine")
    elif number:
        yield Check(
            "quarantine",
            "warn",
            f"{number_of(number, 'damaged piece')} kept; longrun show says what it meant for each execution",
        )
    else:
        yield Check("quarantine", "ok", "empty: nothing damaged was found")


# --- what can be tried ------------------------------------------------------------------------------------------------


async def _writes(store: CheckpointStore) -> list[Check]:
    """Write something small and see it there: an owner of nothing, gone again at once. Not to a pair of which a store
    is away: whoever writes then leaves it behind, or fails over."""
    if await _half_away(store):
        return [Check("writable", "warn", "not tried, since a store of the pair does not answer")]
    probe = Owner(id=f"doctor-{secrets.token_hex(6)}", life={}, remaining=PROBE_TTL)
    try:
        await store.register(probe, PROBE_TTL)
        try:
            seen = [owner for owner in await store.owners() if owner.id == probe.id]
        finally:
            await store.unregister(probe.id)
    except StoreError as error:
        return [Check("writable", "fail", sentence(error))]
    if not seen:
        return [Check("writable", "fail", "what was written could not be read back")]
    drift = abs(PROBE_TTL - seen[0].remaining)
    if drift > SKEW:
        return [
            Check(
                "clock", "fail", f"a lease of {PROBE_TTL:g} s shows {seen[0].remaining:.0f} s left: the clocks disagree"
            )
        ]
    return [Check("writable", "ok", "a write was made, read back and removed")]


async def _half_away(store: CheckpointStore) -> bool:
    import anyio.to_thread

    facts = await anyio.to_thread.run_sync(store.backend.describe)
    return facts.get("standby", "behind") != "behind" and any(name not in facts for name in SIDES)


async def _clock(store: CheckpointStore) -> list[Check]:
    now = time.time()
    ahead = [
        max(one.definition.created, one.head.updated) - now
        for one in await store.find(Query(limit=PAGE))
        if max(one.definition.created, one.head.updated) > now + SKEW
    ]
    if ahead:
        return [
            Check(
                "clock", "warn", f"executions were written up to {duration(max(ahead))} in the future: clocks disagree"
            )
        ]
    return [Check("clock", "ok", "nothing stored is from the future")]


async def _owners(store: CheckpointStore) -> list[Check]:
    owners = await store.owners()
    alive = lease.alive(owners)
    orphans: dict[str, int] = {}
    query, pages = Query(states=UNFINISHED, owned=True, limit=PAGE), 0
    while pages < PAGES and (page := await store.find(query)):
        pages += 1
        query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        for one in page:
            if one.head.owner is not None and one.head.owner not in alive:
                orphans[one.head.owner] = orphans.get(one.head.owner, 0) + 1
    if orphans:
        number = sum(orphans.values())
        whose = f"{number_of(number, 'execution')} of {number_of(len(orphans), 'dead owner')}"
        text = f"{whose}, to be taken up by a program that knows the workflow"
        return [Check("owners", "warn", text)]
    stale = len(owners) - len(alive)
    note = f"; {stale:,} dead ones own nothing (longrun gc forgets them)" if stale else ""
    return [Check("owners", "ok", f"{len(alive):,} alive, no orphans{note}")]


async def _blocked(store: CheckpointStore) -> list[Check]:
    number = (await store.count(Query(states=frozenset({State.BLOCKED})))).get(State.BLOCKED, 0)
    if number:
        return [
            Check("blocked", "warn", f"{number_of(number, 'execution')} cannot go on as stored: longrun plan says why")
        ]
    return [Check("blocked", "ok", "no execution is blocked")]


async def _stranded(store: CheckpointStore) -> list[Check]:
    """Among the newest that nobody has, or somebody dead, while somebody works."""
    alive = [owner for owner in await living(store) if owner.workflows]
    if not alive:
        return [Check("stranded", "ok", "no worker is alive")]
    queries = [Query(states=states, owned=False, limit=PAGE) for states in (NEEDS_WORKER, PARKED)]
    dead = lease.gone(await store.owners())
    queries += [Query(states=NEEDS_WORKER | PARKED, owner=owner, limit=PAGE) for owner in sorted(dead)]
    found = [one for query in queries for one in await store.find(query)]
    now = time.time()
    waiting = [one for one in found if stranded(one.definition, one.head, alive, now) is not None]
    if waiting:
        names = sorted({one.definition.workflow for one in waiting})
        what = number_of(len(waiting), "execution")
        text = f"{what} of {', '.join(names)}: no worker that is alive knows the workflow and looks at the queue"
        return [Check("stranded", "warn", text)]
    return [Check("stranded", "ok", "nothing waits for a worker that is not there")]
