"""Workers in processes of their own on every shared store: killed, limited, paused from outside, and very busy.

The outside ledger is the judge: it has what each step did and what the store acknowledged, in the order of time.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis

from longrun.client import Client
from longrun.control_room import LOOK_AGAIN
from tests.campaign import work
from tests.campaign.fleet import PATIENCE, Shared, fleet, in_order, sail
from tests.campaign.forks import Forks
from tests.campaign.judge import judge
from tests.campaign.outside import Outside, Record
from tests.servers import PostgresServer, RedisServer, Source

pytestmark = pytest.mark.xdist_group("worker-processes")  # one fleet for all of them


@pytest.fixture(scope="module")
def ships(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Forks]]:
    directory = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGRUN_RUN_DIR", str(directory))
        with fleet() as parents:
            yield parents


@pytest.fixture
def on_files(tmp_path: Path) -> Shared:
    return Shared(f"file:{tmp_path / 'store'}", tmp_path / "ledger", {})


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Shared:
    return Shared(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "ledger", {})


@pytest.fixture
def on_postgres(tmp_path: Path, postgres_server: PostgresServer | Source, postgres_schema: str) -> Shared:
    assert postgres_server.url is not None
    return Shared(postgres_server.url, tmp_path / "ledger", {"schema": postgres_schema})


@pytest.fixture
def on_redis(tmp_path: Path, redis_server: RedisServer | Source) -> Iterator[Shared]:
    assert redis_server.url is not None
    prefix = f"test:{uuid.uuid4().hex}"
    yield Shared(redis_server.url, tmp_path / "ledger", {"prefix": prefix})
    with redis.Redis.from_url(redis_server.url) as client:
        for key in client.scan_iter(match=f"{{{prefix}}}*", count=1000):
            client.delete(key)


def run_home(ships: list[Forks]) -> None:
    """SIGTERM: they drain, give their leases back, and end well."""
    for ship in ships:
        ship.signal(signal.SIGTERM)
    for ship in ships:
        end = ship.end(PATIENCE)
        assert end is not None
        assert end.code == 0, f"a worker ended with {end.code}; killed for its slowness: {end.by_us}"


async def signed_on(client: Client, number: int) -> None:
    """So many workers are there, besides the client itself."""
    with anyio.fail_after(PATIENCE):
        while len(await client.store.owners()) <= number:
            pass  # each look is a read: they sign on in their own processes


# --- one of four is killed ------------------------------------------------------------------------------------------

BATCHES = 6


def kill_one_of_four(ships: list[Forks], shared: Shared) -> None:
    """Every workflow of the campaign, some of each; one worker dies at its work, and three end it all."""
    anyio.run(_kill_one, ships, shared)
    run_home(ships[1:])
    records = shared.records()
    with shared.backend() as backend:
        verdict = judge(in_order(records), backend)
    assert not verdict.faults, str(verdict)
    assert verdict.executions >= BATCHES * len(work.WORKFLOWS)
    assert any(record["process"] == 1 and record["kind"] == "ack" for record in records), "the killed one did nothing"
    assert len({record["process"] for record in records if record["kind"] == "claim"}) > 1


async def _kill_one(ships: list[Forks], shared: Shared) -> None:
    outside = Outside(shared.ledger, 0)
    ids = [f"{batch}-{workflow}" for batch in range(BATCHES) for workflow in work.WORKFLOWS]
    async with Client(shared.open()) as client:
        for id in ids:
            await client.submit(work.workflow_of(id), work.first_state(id), id=id)
            outside.note("started", id=id)
        sail(ships[:1], shared, concurrency=5)
        await shared.until(lambda seen: _acknowledged(seen, 1) >= 5, "the first has done something")
        sail(ships[1:], shared, concurrency=5, first=2)
        await shared.until(lambda seen: sum(r["kind"] == "up" for r in seen) == len(ships), "all four are there")
        ships[0].signal(signal.SIGKILL)
        end = ships[0].end(PATIENCE)
        assert end is not None
        assert end.killed
        with anyio.fail_after(PATIENCE):
            for id in ids:
                if id.endswith("-waits"):
                    await client.signal(id, "go", work.first_state(id), key="go")
            for id in ids:
                outside.note("result", id=id, result=await client.handle(id).result())
    outside.close()


def _acknowledged(records: list[Record], process: int) -> int:
    return sum(record["kind"] == "ack" and record["process"] == process for record in records)


def test_one_of_four_is_killed_on_files(ships: list[Forks], on_files: Shared) -> None:
    """I1, I2, I3, I4."""
    kill_one_of_four(ships, on_files)


def test_one_of_four_is_killed_on_sqlite(ships: list[Forks], on_sqlite: Shared) -> None:
    """I1, I2, I3, I4."""
    kill_one_of_four(ships, on_sqlite)


def test_one_of_four_is_killed_on_postgres(ships: list[Forks], on_postgres: Shared) -> None:
    """I1, I2, I3, I4."""
    kill_one_of_four(ships, on_postgres)


def test_one_of_four_is_killed_on_redis(ships: list[Forks], on_redis: Shared) -> None:
    """I1, I2, I3, I4, on every Redis and Valkey found."""
    kill_one_of_four(ships, on_redis)


def test_only_what_a_claim_had_seen_is_told_before_it() -> None:
    """So the judge still hears of a write that was acknowledged after its execution had passed to another process."""
    claim = {"kind": "claim", "process": 2, "id": "x", "fence": 6, "revision": 4}
    seen = {"kind": "ack", "process": 1, "id": "x", "fence": 5, "revision": 4}
    unseen = {**seen, "revision": 5}
    other = {**seen, "id": "y"}
    assert in_order([claim, other, seen]) == [seen, claim, other]
    assert in_order([claim, unseen]) == [claim, unseen]


# --- a limited queue ------------------------------------------------------------------------------------------------

LIMIT = 3


def keep_to_a_limit(ships: list[Forks], shared: Shared) -> None:
    anyio.run(_limited, ships, shared)
    run_home(ships)
    inside: set[str] = set()
    entered: list[str] = []
    for record in shared.records():
        if record["kind"] == "enter":
            inside.add(record["id"])
            entered.append(record["id"])
            assert len(inside) <= LIMIT, f"{inside} at once"
        elif record["kind"] == "leave":
            inside.remove(record["id"])
    assert len(entered) == len(set(entered)) == 40
    assert len({record["process"] for record in shared.records() if record["kind"] == "enter"}) > 1


async def _limited(ships: list[Forks], shared: Shared) -> None:
    async with Client(shared.open()) as client:
        await client.limit_queue("few", concurrency=LIMIT)
        sail(ships, shared, telling=False)
        await signed_on(client, len(ships))
        runs = [await client.submit("counted", n, queue="few") for n in range(40)]
        with anyio.fail_after(PATIENCE):
            assert [await run.result() for run in runs] == [*range(40)]


def test_four_processes_keep_to_a_limit_on_sqlite(ships: list[Forks], on_sqlite: Shared) -> None:
    keep_to_a_limit(ships, on_sqlite)


def test_four_processes_keep_to_a_limit_on_postgres(ships: list[Forks], on_postgres: Shared) -> None:
    keep_to_a_limit(ships, on_postgres)


@pytest.mark.thorough
def test_four_processes_keep_to_a_limit_on_files(ships: list[Forks], on_files: Shared) -> None:
    keep_to_a_limit(ships, on_files)


@pytest.mark.thorough
def test_four_processes_keep_to_a_limit_on_redis(ships: list[Forks], on_redis: Shared) -> None:
    keep_to_a_limit(ships, on_redis)


# --- many, submitted by one process and run by four others -----------------------------------------------------------


def run_many(ships: list[Forks], shared: Shared, number: int) -> None:
    began = time.perf_counter()
    sail(ships, shared, telling=False, concurrency=100)
    anyio.run(_submit_many, shared, number)
    seconds = time.perf_counter() - began
    run_home(ships)
    begun = [(r["id"], r["step"], r["visit"]) for r in shared.records() if r["kind"] == "begin"]
    shares = {n: sum(r["kind"] == "begin" and r["process"] == n for r in shared.records()) for n in (1, 2, 3, 4)}
    print(
        f"{number} executions of two steps in {seconds:.2f} s on {shared.url.partition(':')[0]}; steps each: {shares}"
    )
    assert len(begun) == len(set(begun)) == 2 * number, "each step of each began once"
    assert all(shares.values()), f"one of four had nothing to do: {shares}"


async def _submit_many(shared: Shared, number: int) -> None:
    ids = [f"{n}-leaf" for n in range(number)]
    async with Client(shared.open()) as client, anyio.create_task_group() as tasks:
        await signed_on(client, 4)
        limiter = anyio.CapacityLimiter(50)

        async def one(id: str) -> None:
            async with limiter:
                await client.submit("leaf", work.first_state(id), id=id)

        async with anyio.create_task_group() as submitting:
            for id in ids:
                submitting.start_soon(one, id)
        with anyio.fail_after(PATIENCE * 2):
            for id in ids:
                assert await client.handle(id).result() == work.expected_result(id)
        tasks.cancel_scope.cancel()


def test_many_executions_of_one_process_are_run_by_four_others(ships: list[Forks], on_sqlite: Shared) -> None:
    run_many(ships, on_sqlite, 400)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_thousand_on_sqlite(ships: list[Forks], on_sqlite: Shared) -> None:
    run_many(ships, on_sqlite, 2000)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_thousand_on_files(ships: list[Forks], on_files: Shared) -> None:
    run_many(ships, on_files, 2000)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_thousand_on_postgres(ships: list[Forks], on_postgres: Shared) -> None:
    run_many(ships, on_postgres, 2000)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_thousand_on_redis(ships: list[Forks], on_redis: Shared) -> None:
    run_many(ships, on_redis, 2000)


# --- paused from another process ------------------------------------------------------------------------------------

GENEROUS = 5.0
"""Seconds. What is measured is printed; a busy machine must not fail the test."""


def pause_from_outside(ships: list[Forks], shared: Shared) -> None:
    """I6: when `pause` has returned, the step does nothing more; it is obeyed at its next checkpoint."""
    sail(ships[:1], shared, telling=False)
    taken = anyio.run(_pause_again_and_again, shared)
    run_home(ships[:1])
    shown = f"{statistics.median(taken) * 1000:.0f} ms in the middle, {max(taken) * 1000:.0f} ms at most"
    print(f"pause from another process on {shared.url.partition(':')[0]}: {shown}")
    assert max(taken) < GENEROUS
    assert min(taken) < LOOK_AGAIN, "whoever asked was not told, and looked again by itself"


async def _pause_again_and_again(shared: Shared) -> list[float]:
    taken: list[float] = []
    async with Client(shared.open()) as client:
        await client.submit("endless", id="x")
        for _ in range(5):
            seen = len(shared.records())
            await shared.until(lambda records: _alive(records) > _alive(records[:seen]) + 3, "it goes round")  # noqa: B023
            began = time.perf_counter()
            await client.pause("x", timeout=PATIENCE)
            taken.append(time.perf_counter() - began)
            at_rest = len(shared.records())
            assert (await client.get("x")).state == "paused"
            assert len(shared.records()) == at_rest, "it went on although the pause was acknowledged"
            await client.resume("x", timeout=PATIENCE)
        await client.cancel("x", timeout=PATIENCE)
    return taken


def _alive(records: list[Record]) -> int:
    return sum(record["kind"] == "alive" for record in records)


def test_a_pause_takes_effect_at_the_next_checkpoint_on_files(ships: list[Forks], on_files: Shared) -> None:
    pause_from_outside(ships, on_files)


def test_a_pause_takes_effect_at_the_next_checkpoint_on_sqlite(ships: list[Forks], on_sqlite: Shared) -> None:
    pause_from_outside(ships, on_sqlite)


def test_a_pause_takes_effect_at_the_next_checkpoint_on_postgres(ships: list[Forks], on_postgres: Shared) -> None:
    pause_from_outside(ships, on_postgres)


def test_a_pause_takes_effect_at_the_next_checkpoint_on_redis(ships: list[Forks], on_redis: Shared) -> None:
    pause_from_outside(ships, on_redis)


# --- what a worker does not know, in processes of their own -----------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_nobody_knows_keeps_no_worker_busy(ships: list[Forks], on_sqlite: Shared) -> None:
    """A workflow that is due for ever and that this worker does not know: it looks now and then, and rests between."""
    anyio.run(_strangers, on_sqlite)
    sail(ships[:1], on_sqlite, telling=False)
    used: Any = anyio.run(_cpu_while_idle, ships[0], on_sqlite)
    run_home(ships[:1])
    assert used < 0.35, f"{used:.2f} s of processor time in a second and a half of rest"


async def _strangers(shared: Shared) -> None:
    async with Client(shared.open()) as client:
        for n in range(20):
            await client.submit("of-another-program", id=f"stranger-{n}")


async def _cpu_while_idle(ship: Forks, shared: Shared) -> float:
    assert ship.pid is not None
    async with Client(shared.open()) as client:
        with anyio.fail_after(PATIENCE):
            await (await client.submit("leaf", {"n": 1}, id="1-leaf")).result()
        before = cpu_seconds(ship.pid)
        await anyio.sleep(1.5)  # what is measured is time
        assert {one.state for one in await client.list(workflow="of-another-program")} == {"initialized"}
        return cpu_seconds(ship.pid) - before
