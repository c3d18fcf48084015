"""Storms of other kinds: the server dies, the power goes, the clock is set wrong; and many executions at once.

What is promised is that of the kill storm (I1, I2, I3, I7, I8), and I12 for the clocks, I16 for the soak. The sizes are
small here; `python -m tests.campaign` runs the same with any. A run in which no fault fired is void, and fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import kinds
from tests.campaign.kinds import Kind, Task
from tests.campaign.skies import NoPowerError, in_order, until_cut
from tests.servers import find_postgres, find_redis


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))


def run(kind: Kind, task: Task) -> None:
    outcome = kind(task)
    print(outcome.text)
    assert outcome.fired, "no fault fired: this run has shown nothing"
    assert not outcome.faults, "\n".join(outcome.faults[:20])


@pytest.mark.parametrize("store", ["redis", "postgres"])
def test_a_server_that_is_killed_under_a_program_costs_nothing(
    store: str, tmp_path: Path, campaign_size: int, campaign_seed: int, request: pytest.FixtureRequest
) -> None:
    """I1, I9, I10."""
    if not (find_redis(local=True) if store == "redis" else find_postgres(local=True)):
        if request.config.getoption("--allow-missing-servers"):
            pytest.skip(f"no {store} that can be killed on this machine")
        pytest.fail(f"no {store} that can be killed on this machine", pytrace=False)
    run(kinds.servers_killed, Task(store, max(1, campaign_size // 5), campaign_seed, tmp_path))


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_a_power_cut_costs_nothing(store: str, tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    """I1: a real file system, whose every page that nobody had synced is gone."""
    try:
        run(kinds.power, Task(store, max(1, campaign_size // 5), campaign_seed, tmp_path))
    except NoPowerError as error:
        pytest.skip(f"no power cut on this machine: {error}")


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_a_clock_that_jumps_breaks_nothing(store: str, tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    """I12: two processes, each with a wall clock that jumps by up to a day, take executions from each other."""
    run(kinds.clocks, Task(store, 2 * campaign_size, campaign_seed, tmp_path))


def test_many_executions_at_once_are_neither_lost_nor_doubled(
    tmp_path: Path, campaign_size: int, campaign_seed: int
) -> None:
    """I1, I2, I4: with three kills on the way."""
    run(kinds.crowd, Task("file", 5 * campaign_size, campaign_seed, tmp_path))


def test_a_soak_leaves_nothing_behind(tmp_path: Path, campaign_seed: int) -> None:
    """I16: in the small a smoke test; the long one is run by hand."""
    run(kinds.soak, Task("file", 6, campaign_seed, tmp_path, tmp_path / "soak.svg"))
    assert (tmp_path / "soak.svg").read_text().startswith("<svg")


def test_a_write_that_is_told_late_goes_before_the_claim_that_overtook_it() -> None:
    claim = {"kind": "claim", "process": 2, "id": "a", "fence": 2, "revision": 3}
    late = {"kind": "ack", "process": 1, "id": "a", "fence": 1, "revision": 3}
    stale = {"kind": "ack", "process": 1, "id": "a", "fence": 1, "revision": 4}
    lost = {"kind": "effect", "process": 1, "id": "a", "visit": 1, "name": "x"}
    assert in_order([claim, late, lost]) == [late, claim]
    assert in_order([claim, stale]) == [claim, stale]


def test_what_a_process_tells_while_its_power_goes_is_no_acknowledgement() -> None:
    before, after = ({"kind": "ack", "process": 1, "id": id} for id in "ab")
    mark, result = {"kind": "cut", "process": 1}, {"kind": "result", "process": 1, "id": "b"}
    later = {"kind": "ack", "process": 2, "id": "c"}
    assert until_cut([before, mark, after, result, later]) == [before, result, later]
