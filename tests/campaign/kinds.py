"""The campaigns by name, each a function from a task to an outcome. The tests run the same, smaller."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import frozen

from tests import servers
from tests.campaign.crowd import Crowd
from tests.campaign.rain import rain
from tests.campaign.simulation import Simulation
from tests.campaign.skies import ClockStorm, Mortal, PowerStorm, ServerStorm, volume
from tests.campaign.soak import Soak
from tests.campaign.storm import Storm
from tests.campaign.test_every_call import fail_in_turn
from tests.campaign.test_illness import suffer
from tests.campaign.test_stop_and_go import SHARE, fight
from tests.servers import PostgresServer, RedisServer


@frozen
class Task:
    store: str
    size: int
    seed: int
    place: Path
    plot: Path | None = None


@frozen
class Outcome:
    text: str
    faults: tuple[str, ...]
    fired: int
    """Faults that were made. A run without any is void."""


Kind = Callable[[Task], Outcome]


@contextmanager
def store_of(task: Task) -> Iterator[tuple[str, dict[str, Any], Mortal | None]]:
    """The URL of a new, empty store, options for it, and its server if it has one."""
    if task.store == "file":
        yield f"file:{task.place / 'store'}", {}, None
    elif task.store == "sqlite":
        yield f"sqlite:///{task.place / 'store.db'}", {}, None
    elif task.store == "postgres":
        source = servers.find_postgres(local=True)
        if source is None:
            raise SystemExit("no PostgreSQL that can be started here")
        with PostgresServer(source, fsync=True) as postgres:
            yield postgres.url, {}, postgres
    else:
        found = servers.find_redis(local=True)
        if not found:
            raise SystemExit("no Redis or Valkey that can be started here")
        with RedisServer(found[-1]) as redis:
            yield redis.url, {"prefix": uuid.uuid4().hex}, redis


def kills(task: Task) -> Outcome:
    """SIGKILL at random moments, and before and after random calls of the store."""
    with store_of(task) as (url, options, _):
        storm = Storm(url, task.place, options)
        verdict = storm.rage(task.size, task.seed)
    return Outcome(f"{storm.kills} SIGKILLs, {_counted(verdict)}", verdict.faults, storm.kills)


def servers_killed(task: Task) -> Outcome:
    """The server is killed under a program that goes on."""
    with store_of(task) as (url, options, server):
        if server is None:
            raise SystemExit(f"the {task.store} store has no server")
        storm = ServerStorm(url, task.place, options)
        verdict = storm.rage_at(server, task.size, task.seed)
    return Outcome(f"{storm.kills} server kills, {_counted(verdict)}", verdict.faults, storm.kills)


def power(task: Task) -> Outcome:
    """The power of a loop-mounted ext4 is cut under the program."""
    with volume(task.place) as disk:
        url = f"file:{disk.path / 'store'}" if task.store == "file" else f"sqlite:///{disk.path / 'store.db'}"
        storm = PowerStorm(url, task.place)
        verdict = storm.rage_on(disk, task.size, task.seed)
    return Outcome(f"{storm.kills} power cuts, {_counted(verdict)}", verdict.faults, storm.kills)


def clocks(task: Task) -> Outcome:
    """Two processes whose wall clocks jump by up to a day."""
    with store_of(task) as (url, options, _):
        storm = ClockStorm(url, task.place, options)
        verdict = storm.rage_for(task.size)
    return Outcome(f"{storm.kills} clock jumps, {_counted(verdict)}", verdict.faults, storm.kills)


def takeovers(task: Task) -> Outcome:
    """An owner is stopped past its lease and goes on when another has taken over."""
    with store_of(task) as (url, options, _):
        fight(task.place, url, options, task.size * SHARE, task.seed)
    return Outcome(f"{task.size} takeovers of a stopped owner", (), task.size)


def damage(task: Task) -> Outcome:
    """Flips, truncations and blanked ranges in the files of a store."""
    counts = rain(task.place, task.size, task.seed)
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    told = sum(count for name, count in counts.items() if name.endswith("told"))
    return Outcome(f"{counts.total()} damages ({text})", (), told)


def calls(task: Task) -> Outcome:
    """One system call after the other of the file store fails, in every way."""
    fired = fail_in_turn(task.place, task.size, task.seed)
    text = ", ".join(f"{count} {name}" for name, count in sorted(fired.items()))
    return Outcome(f"{fired.total()} failing system calls ({text})", (), fired.total())


def illness(task: Task) -> Outcome:
    """Workflows on a store whose calls fail at random, on files the system calls under it."""
    with store_of(task) as (url, options, _):
        fired, faults = anyio.run(suffer, task.place, url, options, task.size, task.seed)
    return Outcome(f"{task.size} batches of workflows, {fired} failing calls", faults, fired)


def schedules(task: Task) -> Outcome:
    """Simulated schedules of several workers on one store."""
    fired: Counter[str] = Counter()
    faults: list[str] = []
    for seed in range(task.seed, task.seed + task.size):
        simulation = Simulation(seed)
        try:
            found = simulation.run()
        except AssertionError as error:
            found = [str(error)]
        faults += [f"LONGRUN_CAMPAIGN_SEED={seed}: {fault}" for fault in found]
        fired += simulation.fired
        if faults:
            break
    text = ", ".join(f"{count} {name}" for name, count in sorted(fired.items()))
    return Outcome(f"{task.size} schedules ({text})", tuple(faults), fired.total())


def crowd(task: Task) -> Outcome:
    """So many executions at once, twenty steps each, with three kills on the way."""
    with store_of(task) as (url, options, _):
        one = Crowd(url, task.place, task.size, options=options)
        faults = one.run(3, task.seed, within=3600.0)
    text = f"{one.executions} executions x {one.steps} steps, {one.kills} kills, {one.acknowledged} acknowledged writes"
    return Outcome(text, tuple(faults), one.kills)


def soak(task: Task) -> Outcome:
    """So many seconds of work, and what they take of memory, descriptors and disk."""
    with store_of(task) as (url, _, _):
        one = Soak(url, task.place / "store")
        anyio.run(one.run, float(task.size), max(0.5, task.size / 200))
    if task.plot is not None:
        task.plot.write_text(one.plot())
    first, last = one.samples[len(one.samples) // 2], one.samples[-1]
    slopes = {name: one.slope(name) for name in ("rss", "descriptors", "threads", "disk")}
    text = (
        f"{one.done} executions; memory {first.rss:.1f} to {last.rss:.1f} MB ({slopes['rss']:+.2f} MB/h), descriptors"
        f" {first.descriptors} to {last.descriptors} ({slopes['descriptors']:+.1f}/h), threads {last.threads}, disk"
        f" {first.disk:.1f} to {last.disk:.1f} MB ({slopes['disk']:+.2f} MB/h)"
    )
    return Outcome(text, one.faults(), one.done)


def _counted(verdict: Any) -> str:
    return f"{verdict.executions} executions, {verdict.acknowledged} acknowledged writes"


KINDS: dict[str, Kind] = {
    "calls": calls,
    "clocks": clocks,
    "crowd": crowd,
    "damage": damage,
    "illness": illness,
    "kills": kills,
    "power": power,
    "schedules": schedules,
    "servers": servers_killed,
    "soak": soak,
    "takeovers": takeovers,
}
