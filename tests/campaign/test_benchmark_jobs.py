"""Every job of the benchmarks does what it says, in its smallest form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.child import MODULES
from tests.test_benchmarks import measured, small


def jobs() -> list[object]:
    """All of them; the ones that start many processes only when asked for."""
    slow = [pytest.mark.thorough]
    return [pytest.param(name, marks=slow if name in ("J4", "J5", "J6", "J7", "J9") else []) for name in MODULES]


@pytest.mark.parametrize("name", jobs())
def test_every_job_checks_its_answer_and_gives_rows(name: str, tmp_path: Path):
    """Each job runs in child processes of its own, finds the stored rows it expects, and cleans its place up."""
    rows, troubles = measured(small(name), "file" if name in ("J4", "J5") else "sqlite", tmp_path)

    assert [trouble.text for trouble in troubles] == []
    assert {found.job for found in rows} == {name}
    assert all(found.ours for found in rows)
    assert list(tmp_path.iterdir()) == []
    if name == "J4":  # what was finished before the kill did not run again (I2)
        assert [list(found.ours) for found in rows if found.unit == "steps"] == [[0, 0]]
