"""Thousands of schedules of several workers on one store, each given by its seed: nothing is lost, repeated or stuck.

I1 to I4, I7, I8 and I12 under every order of events that the seeds make, with kills, failing and late answers and
workers that stand still past their lease. A failure names the seed of its schedule; the environment variable
LONGRUN_CAMPAIGN_SEED with that seed and `--campaign-size=1` plays it again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.campaign.simulation import Simulation


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path))
    tmp_path.chmod(0o700)


def test_schedules_keep_the_promises(campaign_size: int, campaign_seed: int) -> None:
    fired: Counter[str] = Counter()
    for seed in range(campaign_seed, campaign_seed + campaign_size):
        simulation = Simulation(seed)
        try:
            faults = simulation.run()
        except BaseException as error:
            error.add_note(f"LONGRUN_CAMPAIGN_SEED={seed}")
            raise
        assert not faults, f"LONGRUN_CAMPAIGN_SEED={seed}\n" + "\n".join(faults[:20])
        fired += simulation.fired
    print(dict(fired))
    assert fired.total() > 0 or campaign_size == 1, "no fault fired"


def test_a_seed_gives_the_same_course_again(campaign_seed: int) -> None:
    courses = []
    for _ in range(2):
        simulation = Simulation(campaign_seed)
        simulation.run()
        courses.append(simulation.records)
    assert courses[0] == courses[1]
