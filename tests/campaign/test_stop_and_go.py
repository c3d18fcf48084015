"""An owner that was stopped past its lease and goes on finds every write refused and its steps cut off (I3, I12).

On files, SQLite and PostgreSQL it stops itself between two writes: one that stands still while it holds a lock of the
store keeps others waiting, which no lease can change. On Redis it is stopped from outside, wherever it is.
"""

from __future__ import annotations

import random
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis

from longrun import MemoryCheckpointStore
from longrun.lease import LeaseKeeper
from longrun.life import LifeLock
from longrun.testing import ManualClock
from tests.campaign import duel
from tests.campaign.forks import Forks
from tests.campaign.outside import Reader, Record, read
from tests.servers import PostgresServer, RedisServer, Source

PATIENCE = 20.0
CREWS = ("executor", "worker")
SHARE = 20
"""One takeover for so many of the campaign's size: each takes longer than a lease."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))
    return tmp_path


def test_a_stopped_owner_is_refused_on_files(place: Path, campaign_size: int, campaign_seed: int) -> None:
    fight(place, f"file:{place / 'store'}", {}, campaign_size, campaign_seed)


def test_a_stopped_owner_is_refused_on_sqlite(place: Path, campaign_size: int, campaign_seed: int) -> None:
    fight(place, f"sqlite:///{place / 'store.db'}", {}, campaign_size, campaign_seed)


def test_a_stopped_owner_is_refused_on_postgres(
    place: Path, postgres_server: PostgresServer | Source, postgres_schema: str, campaign_size: int, campaign_seed: int
) -> None:
    assert postgres_server.url is not None
    fight(place, postgres_server.url, {"schema": postgres_schema}, campaign_size, campaign_seed)


@pytest.fixture
def redis_place(redis_server: RedisServer | Source) -> Iterator[tuple[str, dict[str, Any]]]:
    assert redis_server.url is not None
    prefix = f"test:{uuid.uuid4().hex}"
    yield redis_server.url, {"prefix": prefix}
    with redis.Redis.from_url(redis_server.url) as client:
        for key in client.scan_iter(match=f"{{{prefix}}}*", count=1000):
            client.delete(key)


def test_a_stopped_owner_is_refused_on_redis(
    place: Path, redis_place: tuple[str, dict[str, Any]], campaign_size: int, campaign_seed: int
) -> None:
    fight(place, *redis_place, campaign_size, campaign_seed)


def fight(place: Path, url: str, options: dict[str, Any], size: int, seed: int) -> None:
    dice = random.Random(seed)
    with Forks("tests.campaign.duel") as ours, Forks("tests.campaign.duel") as theirs:
        for number in range(max(len(CREWS), size // SHARE)):
            ledger, crew = str(place / f"ledger-{number}"), CREWS[number % len(CREWS)]
            settings = {"url": url, "options": options, "ledger": ledger, "round": number, "crew": crew}
            duel_once(ours, theirs, settings, dice)


def duel_once(ours: Forks, theirs: Forks, settings: dict[str, Any], dice: random.Random) -> None:
    ledger = Path(settings["ledger"])
    ids = {f"{settings['round']}-{name}" for name in duel.WORKFLOWS}
    loops = dice.sample(["asyncio", "trio"], 2)
    stops_itself = not settings["url"].startswith(("redis", "unix", "valkey"))
    stop = {"call": "commit", "n": dice.randint(8, 25), "when": "after", "signal": signal.SIGSTOP}
    trap = stop if stops_itself else None
    ours.spawn(**settings, process=1, first=True, loop=loops[0], trap=trap)
    until(ledger, lambda seen: {r["id"] for r in seen if r["kind"] == "started"} == ids, "both have started")
    theirs.spawn(**settings, process=2, first=False, loop=loops[1], trap=None)
    until(ledger, lambda seen: any(r["kind"] == "effect" for r in seen), "the first works")
    if not stops_itself:
        assert ours.end(dice.uniform(0.0, 0.15), kill=False) is None, "the first ended before it was stopped"
        ours.signal(signal.SIGSTOP)
    until(ledger, lambda seen: taken(seen) == ids, "the second has taken both over")
    ours.signal(signal.SIGCONT)
    until(ledger, lambda seen: {r["id"] for r in seen if r["kind"] == "cut"} == ids, "both steps of the first are cut")
    for forks in (ours, theirs):
        end = forks.end(PATIENCE)
        assert end is not None
        assert end.code == 0, f"ended with {end.code}"
    faults = judge(read(ledger), ids)
    assert not faults, "\n".join(faults)


def taken(seen: list[Record]) -> set[str]:
    return {record["id"] for record in seen if record["kind"] == "claim" and record["process"] == 2}


def judge(seen: list[Record], ids: set[str]) -> list[str]:
    faults: list[str] = []
    claims: dict[str, Record] = {}
    after: dict[str, int] = dict.fromkeys(ids, 0)
    results: dict[tuple[int, str], Any] = {}
    for record in seen:
        id = record.get("id", "")
        if record["kind"] == "claim" and record["process"] == 2:
            claims.setdefault(id, record)
        elif record["process"] == 1 and id in claims:
            if record["kind"] == "ack" and record["revision"] > claims[id]["revision"]:
                faults.append(
                    f"{id}: revision {record['revision']} of the first was acknowledged after it was taken over"
                )
            after[id] += record["kind"] == "effect"
        if record["kind"] == "result":
            results[record["process"], id] = record["result"]
    faults += [f"{id}: {n} effects of the first after it was taken over" for id, n in after.items() if n > 1]
    for process in (1, 2):
        for id in ids:
            if results.get((process, id)) != duel.expected_result(id):
                faults.append(f"{id}: process {process} got {results.get((process, id))!r}")
    return faults


def until(ledger: Path, true: Callable[[list[Record]], bool], what: str) -> None:
    with Reader(ledger) as reader:
        if not reader.until(true, PATIENCE):
            pytest.fail(f"waited in vain: {what}\n" + "\n".join(map(str, reader.records()[-20:])))


async def test_a_renewal_that_came_too_late_is_not_trusted() -> None:
    """I3: it was asked for in time and made after the lease had run out, by a process that was stopped in between. The
    store still knew the owner; what it owned may be somebody else's by now."""
    clock = ManualClock()
    lost = anyio.Event()
    lock = LifeLock.acquire()
    try:
        async with MemoryCheckpointStore(clock=clock) as store:
            keeper = LeaseKeeper(store, lock, interval=1.0, ttl=5.0, clock=clock, lost=lost.set)
            await keeper.hold()
            clock.advance(1.0)
            asked = clock.monotonic()
            keeper._renewed(asked, True)
            await anyio.wait_all_tasks_blocked()
            assert not lost.is_set()
            clock.advance(5.5)
            keeper._renewed(asked + 1.0, True)
            with anyio.fail_after(PATIENCE):
                await lost.wait()
    finally:
        lock.release()
