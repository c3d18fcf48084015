"""The crash matrix with real kills: each program is a child process, and each crash a SIGKILL."""

from __future__ import annotations

import re
from pathlib import Path

from longrun.testing import CrashPoint, crash_matrix
from tests.testing.test_plugin import CRASHES, users_pytest
from tests.testing.workflows import MAILS, effects, in_sqlite, registry


async def test_an_effect_that_never_happens_after_a_crash_is_found() -> None:
    """What was to be done later stood in a variable, and died with its process."""
    point = CrashPoint("after", "the checkpoint of crash-test: step at step 0 'queue_mail'")
    report = await crash_matrix(registry, "queues", {}, effects=effects, points=[point], kill=True)
    assert [(one.name, one.times) for one in report.lost_effects] == [("mail", 0)]
    assert not report.ok
    assert "an effect was lost: 1" in str(report)
    tolerant = await crash_matrix(registry, "queues", {}, effects=effects, points=[point], kill=True, tolerate=["mail"])
    assert tolerant.ok


async def test_a_real_kill_in_a_child_is_survived() -> None:
    """The same points, each a SIGKILL (I1, I2)."""
    chosen = [
        CrashPoint("before", "the checkpoint of crash-test: step at step 0 'fetch'"),
        CrashPoint("after", "the checkpoint of crash-test: step at step 0 'fetch'"),
        CrashPoint("after", "the effect 'mail'"),
    ]
    report = await crash_matrix(registry, "mails", {}, effects=effects, points=chosen, kill=True)
    assert not report.missed, str(report)
    assert not report.failures, str(report)
    assert [one.point for one in report.doubled_effects] == [chosen[2]]


async def test_the_store_can_be_ones_own() -> None:
    """As `write a store` says: it is opened by one program after the other, and has what the dead one left."""
    report = await crash_matrix(registry, "mails", {}, effects=effects, points=MAILS, store=in_sqlite, kill=True)
    assert not report.missed, str(report)
    assert not report.failures, str(report)
    assert [one.point for one in report.doubled_effects] == [MAILS[1]]


def test_one_line_can_kill_for_each_point(tmp_path: Path) -> None:
    """The children import the test module, and learn no points of their own."""
    text = CRASHES + "test_shouts = crash_tests(registry, 'shouts', {}, effects=effects, kill=True)\n"
    text += "points = crash_points(registry, 'shouts', {}, effects=effects)\n"
    said = users_pytest(tmp_path, text, "-k", "shouts and effect")
    assert "1 failed, 1 passed" in said, said
    assert "after the effect 'shout': 'shout' happened 2 times" in said


def test_workers_of_xdist_agree_on_the_crash_points(tmp_path: Path) -> None:
    """Each learns them by a run of its own, and all must collect the same tests."""
    said = users_pytest(tmp_path, CRASHES, "-n", "2")
    assert re.search(r"^\d\d passed", said, re.MULTILINE), said
    assert not list(tmp_path.glob("longrun-points-*"))
