"""A program that is killed at any moment and at any call of its store, again and again, loses and repeats nothing.

I1, I2, I3, I7 and I8, judged from outside: by a ledger that the program writes before and after everything it does, and
by what the store has kept. A storm in which no kill fired has shown nothing, and fails.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.campaign.forks import Forks
from tests.campaign.outside import read
from tests.campaign.storm import PROGRAM, Storm
from tests.servers import PostgresServer, RedisServer, Source


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of the killed processes stay within the test."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))


@pytest.fixture
def file_storm(tmp_path: Path, run_directory: None) -> Storm:
    return Storm(f"file:{tmp_path / 'store'}", tmp_path)


@pytest.fixture
def sqlite_storm(tmp_path: Path, run_directory: None) -> Storm:
    return Storm(f"sqlite:///{tmp_path / 'store.db'}", tmp_path)


@pytest.fixture
def postgres_storm(
    tmp_path: Path, run_directory: None, postgres_server: PostgresServer | Source, postgres_schema: str
) -> Storm:
    assert postgres_server.url is not None
    return Storm(postgres_server.url, tmp_path, {"schema": postgres_schema})


@pytest.fixture
def redis_storm(tmp_path: Path, run_directory: None, redis_server: RedisServer | Source) -> Iterator[Storm]:
    assert redis_server.url is not None
    prefix = f"test:{uuid.uuid4().hex}"
    yield Storm(redis_server.url, tmp_path, {"prefix": prefix})
    with redis.Redis.from_url(redis_server.url) as client:
        for key in client.scan_iter(match=f"{{{prefix}}}*", count=1000):
            client.delete(key)


def rage(storm: Storm, kills: int, seed: int) -> None:
    verdict = storm.rage(kills, seed)
    print(f"{storm.kills} kills: {verdict}")
    assert storm.kills == kills, "a storm without its kills shows nothing"
    assert verdict.acknowledged > 0
    assert not verdict.faults, str(verdict)


def test_nothing_is_lost_or_repeated_on_files(file_storm: Storm, campaign_size: int, campaign_seed: int) -> None:
    rage(file_storm, campaign_size, campaign_seed)


def test_nothing_is_lost_or_repeated_on_sqlite(sqlite_storm: Storm, campaign_size: int, campaign_seed: int) -> None:
    rage(sqlite_storm, campaign_size, campaign_seed)


def test_nothing_is_lost_or_repeated_on_postgres(postgres_storm: Storm, campaign_size: int, campaign_seed: int) -> None:
    rage(postgres_storm, campaign_size, campaign_seed)


def test_nothing_is_lost_or_repeated_on_redis(redis_storm: Storm, campaign_size: int, campaign_seed: int) -> None:
    rage(redis_storm, campaign_size, campaign_seed)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_each_write_of_the_store_is_survived(
    tmp_path: Path, run_directory: None, campaign_size: int, when: str
) -> None:
    """Every call that changes the store is a kill of its own, on a store of its own; in small runs, some of them."""
    (tmp_path / "stop").touch()
    whole = Storm(f"file:{tmp_path / 'whole'}", tmp_path)
    with Forks(PROGRAM) as forks:
        whole.finish(forks)
        calls = max(record["calls"] for record in read(whole.ledger) if record["kind"] == "batch")
        step = max(1, 2 * calls // campaign_size)
        fired = 0
        for n in range(1 + (0 if when == "before" else step // 2), calls + 1, step):
            place = tmp_path / str(n)
            place.mkdir()
            (place / "stop").touch()
            storm = Storm(f"file:{place / 'store'}", place)
            fired += _killed_at(storm, forks, n, when)
    assert fired > 0, "no kill fired"


def _killed_at(storm: Storm, forks: Forks, n: int, when: str) -> bool:
    """Die at the n-th write, go on, and be judged. The last writes vary with the timing: some are not reached."""
    storm.spawn(forks, {"call": "any", "n": n, "when": when})
    end = forks.end(20.0)
    assert end is not None
    assert end.code in (0, -9), f"ended with {end.code}"
    storm.finish(forks)
    verdict = storm.verdict()
    assert not verdict.faults, f"killed {when} write {n}: {verdict}"
    return end.killed
