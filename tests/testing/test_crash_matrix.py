"""`crash_matrix` finds every point at which a workflow can crash, and names those where a crash changes something.

With a real kill at each point: `tests/campaign/test_crash_kills.py`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from longrun import ExecutionHandle, ExecutorConfig, RetryPolicy, SQLiteCheckpointStore, StepRegistry
from longrun.errors import ConfigError, NotStorableError, UnknownWorkflowError
from longrun.testing import CrashPoint, Effects, crash_child, crash_matrix, crash_points, crash_tests
from longrun.testing.crash import CrashPlan, World, ending_of
from tests.testing.workflows import MAILS, answer, effects, in_sqlite, registry

test_one_line_gives_a_test_for_each_point = crash_tests(registry, "awaits", {"a": 1}, loops=("asyncio", "trio"))
test_or_for_those_that_are_given = crash_tests(
    registry, "awaits", {"a": 1}, points=[CrashPoint("after", "the start of crash-test")]
)


async def test_a_sound_workflow_survives_its_points(anyio_backend: str, campaign_size: int) -> None:
    """All of them, or in a small run every third, which differ between the loops."""
    points = await learn("sound", drive=answer)
    chosen = points[anyio_backend == "trio" :: max(1, 60 // campaign_size)]
    report = await crash_matrix(registry, "sound", {"a": 1}, effects=effects, drive=answer, points=chosen)
    assert report.ok, str(report)
    assert not report.missed, str(report)
    assert "all survived" in str(report)


async def learn(workflow: str, **options: Any) -> tuple[CrashPoint, ...]:
    plan = CrashPlan(registry=registry, workflow=workflow, state={}, effects=effects, **options)
    return (await World(plan).course(None)).points


async def test_every_kind_of_point_is_there() -> None:
    points = await learn("sound", drive=answer, awaits=True)
    text = "\n".join(map(str, points))
    for kind in (
        "before the start of",
        "after the start of",
        "before the checkpoint of .* step at step 0 'fetch'",
        "after the checkpoint of .* finish at step 4 'note'",
        "failed attempt 1",
        "after a claim",
        "at the event step_completed of .* 'fetch'",
        "at an item of 'pages' .*no. 3",
        "at an item of 'people'",
        "after the effect 'charge'",
    ):
        assert re.search(kind, text), f"{kind}\n{text}"


async def test_every_run_comes_to_the_same_points() -> None:
    """In whatever order: branches of a map share writes as it happens, and trio mixes them on purpose."""
    learned = {frozenset(await learn("awaits")) for _ in range(8)}
    assert len(learned) == 1


async def test_a_crash_at_each_await_of_a_step_is_survived() -> None:
    points = [point for point in await learn("awaits", awaits=True) if "an await in" in point.what]
    assert len([point for point in points if "in a branch of '_doubled'" in point.what]) == 2
    assert len(points) >= 5
    report = await crash_matrix(registry, "awaits", {}, awaits=True, points=points)
    assert report.ok, str(report)
    assert not report.missed


async def test_an_effect_without_a_key_is_seen_twice() -> None:
    report = await crash_matrix(registry, "mails", {}, effects=effects)
    assert not report.ok
    assert not report.failures
    doubled = {str(one.point): one.times for one in report.doubled_effects}
    assert doubled["after the effect 'mail'"] == 2
    assert "before the effect 'mail'" not in doubled
    assert "'mail' happened 2 times" in str(report)
    with pytest.raises(AssertionError, match="mail"):
        report.check()


@pytest.mark.parametrize("kill", [False, True])
async def test_a_program_that_comes_to_no_end_says_where_it_is(kill: bool) -> None:
    with pytest.raises((TimeoutError, RuntimeError), match="waits for the signal 'word': give a `drive`"):
        await crash_matrix(registry, "waits", {}, timeout=1.0, kill=kill)


async def test_a_step_that_takes_too_long_is_named() -> None:
    own = StepRegistry()

    async def stay(state: dict[str, Any]) -> dict[str, Any]:
        await anyio.sleep_forever()
        return state

    own.workflow("stays", [own.register("stay", stay)])
    config = ExecutorConfig(drain_timeout=0.0)
    with pytest.raises(TimeoutError, match=r"after 0.5 s the execution is running at step 0 'stay'"):
        await crash_matrix(own, "stays", {}, timeout=0.5, config=config)


@pytest.mark.parametrize("names", [["mail"], "mail"])
async def test_an_effect_may_be_tolerated(names: str | list[str]) -> None:
    point = CrashPoint("after", "the effect 'mail'")
    report = await crash_matrix(registry, "mails", {}, effects=effects, tolerate=names, points=[point])
    assert report.ok, str(report)


async def test_what_cannot_be_started_is_refused_at_once() -> None:
    """By the error that `start` would raise, not by a group of errors from inside a program."""
    with pytest.raises(UnknownWorkflowError, match="mailz"):
        await crash_matrix(registry, "mailz", {})
    with pytest.raises(NotStorableError, match=r"state\['client'\]"):
        await crash_matrix(registry, "mails", {"client": object()})


@pytest.mark.parametrize("workflow", ["forgetful", "miscounts"])
async def test_what_is_kept_outside_the_state_is_found(workflow: str) -> None:
    report = await crash_matrix(registry, workflow, {})
    assert report.failures
    assert "undisturbed completed with" in str(report.failures[0])


async def test_only_the_points_asked_for_are_crashed() -> None:
    point = CrashPoint("after", "the start of crash-test")
    report = await crash_matrix(registry, "mails", {}, points=[point])
    assert report.points == (point,)
    assert report.ok


async def test_a_point_that_is_never_reached_is_no_success() -> None:
    report = await crash_matrix(registry, "mails", {}, points=[CrashPoint("after", "the end of time")])
    assert report.missed
    assert not report.ok


async def test_a_workflow_that_fails_must_fail_in_the_same_way() -> None:
    own = StepRegistry()

    async def breaks(state: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("always")

    own.register("breaks", breaks, retry=RetryPolicy(max_attempts=1))
    own.workflow("breaks", ["breaks"])
    report = await crash_matrix(own, "breaks", {})
    assert report.ok, str(report)
    assert "without any crash it ended failed: ValueError: always" in str(report)
    with pytest.warns(UserWarning, match="breaks: without any crash it ended failed"):
        await anyio.to_thread.run_sync(crash_points, own, "breaks", {})


async def test_a_result_that_changes_by_itself_is_told_apart() -> None:
    own = StepRegistry()
    numbers = itertools.count()

    async def draw(state: dict[str, Any]) -> dict[str, Any]:
        return {"number": next(numbers)}

    own.workflow("draws", [own.register("draw", draw)])
    points = [CrashPoint("after", "the start of crash-test")]
    report = await crash_matrix(own, "draws", {}, points=points)
    assert len(report.failures) == 1
    assert "without any crash it ended differently a second time" in str(report)
    steady = await crash_matrix(own, "draws", {}, points=points, same=lambda one, other: one.keys() == other.keys())
    assert steady.ok
    assert not steady.notes


async def test_the_store_can_be_ones_own() -> None:
    """As `write a store` says: it is opened by one program after the other, and has what the dead one left."""
    places: list[Path] = []

    def noted(place: Path) -> SQLiteCheckpointStore:
        places.append(place)
        return in_sqlite(place)

    report = await crash_matrix(registry, "mails", {}, effects=effects, points=MAILS, store=noted)
    assert not report.missed, str(report)
    assert not report.failures, str(report)
    assert [one.point for one in report.doubled_effects] == [MAILS[1]]
    assert len(set(places)) == 3


async def test_a_child_must_be_able_to_find_the_registry() -> None:
    with pytest.raises(ConfigError, match="registry"):
        await crash_matrix(_hidden(), "w", {}, kill=True)


def _hidden() -> StepRegistry:
    own = StepRegistry()

    async def only(state: dict[str, Any]) -> dict[str, Any]:
        return state

    own.workflow("w", [only])
    return own


async def test_a_child_needs_a_workflow_with_a_name() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        await crash_matrix(registry, ["fetch"], {}, kill=True)


async def test_a_child_that_fails_by_itself_is_no_crash() -> None:
    """Its exit is neither the end of the workflow nor the SIGKILL that was asked for: what it said is shown."""
    with pytest.raises(RuntimeError, match=r"a child of the crash matrix failed(.|\n)*told to fail"):
        await crash_matrix(registry, "mails", {}, drive=fails, kill=True, points=[])


async def fails(run: ExecutionHandle) -> None:
    raise RuntimeError("told to fail")


async def test_an_error_that_is_not_the_crash_is_not_taken_for_one() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await crash_matrix(registry, "mails", {}, drive=fails)
    assert caught.group_contains(RuntimeError, match="told to fail")


def test_a_child_loads_a_module_by_its_name_or_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are often not on the path, and what was `__main__` must not run as a program again."""
    file = tmp_path / "somewhere_else.py"
    file.write_text("name = __name__\n")
    assert crash_child._load(None) is None
    assert crash_child._load(["somewhere_else", str(file), "name"]) == "somewhere_else"
    assert crash_child._load(["__main__", str(file), "name"]) == "longrun_crash_main"
    for name in ("somewhere_else", "longrun_crash_main"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert crash_child._load(["somewhere_else", str(file), "name"]) == "somewhere_else"
    monkeypatch.delitem(sys.modules, "somewhere_else")
    with pytest.raises(ImportError, match="cannot be imported"):
        crash_child._load(["no.such.package", str(tmp_path / "data.txt"), "name"])


SCRIPT = """
import anyio
from longrun import StepRegistry
from longrun.testing import CrashPoint, Effects, crash_matrix

registry, effects = StepRegistry(), Effects()

@registry.step
async def mail(state: dict) -> dict:
    effects("mail")
    return state

registry.workflow("mails", [mail])

async def main():
    point = CrashPoint("after", "the effect 'mail'")
    print(await crash_matrix(registry, "mails", {}, effects=effects, points=[point], kill=True))

"""


def test_a_script_can_be_its_own_module(tmp_path: Path) -> None:
    """The child imports it once: the effects that it watches are those of the steps."""
    said = run_script(tmp_path, SCRIPT + 'if __name__ == "__main__":\n    anyio.run(main)\n')
    assert "after the effect 'mail': 'mail' happened 2 times" in said, said


def test_a_script_that_crashes_itself_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    """Each child would start another one, without end."""
    said = run_script(tmp_path, SCRIPT + "anyio.run(main)\n")
    assert "put the call behind `if __name__ ==" in said, said


def run_script(place: Path, text: str) -> str:
    (place / "script.py").write_text(text)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(place)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done.stdout + done.stderr


def test_an_execution_that_the_store_has_lost_is_an_ending_too() -> None:
    """So that a store that loses everything changes the result instead of breaking the report."""
    assert str(ending_of(None)) == "lost: the store does not have it"


def test_the_points_can_be_listed() -> None:
    points = crash_points(registry, "mails", {})
    assert CrashPoint("before", "the start of crash-test") in points


def test_an_effect_with_a_key_counts_once() -> None:
    recorder = Effects()
    for _ in range(2):
        recorder("pay", key="one")
        recorder("log")
    assert recorder.counts == {"pay": 1, "log": 2}
    assert len(recorder) == 4
    recorder.clear()
    assert list(recorder) == []
