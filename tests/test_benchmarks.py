"""The benchmarks measure what they say: small sizes, real child processes, no word about speed."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import attrs
import pytest

from benchmarks import bare, instructions, plots
from benchmarks.__main__ import main
from benchmarks.child import MODULES, job_of
from benchmarks.orders import Job
from benchmarks.peers.catalogue import PEERS, Installed, peer_rows
from benchmarks.places import Places
from benchmarks.results import BEGIN, END, Row, Trouble, at_least, at_most, has_marks, put_into, table, value_at_most
from benchmarks.run import run_jobs

SMALL: dict[str, dict[str, int]] = {
    "J1": {"executions": 1, "steps": 5},
    "J1x10": {"executions": 1, "steps": 3},
    "J2": {"executions": 4, "steps": 3},
    "J3": {"kib_steps": 3, "mib_steps": 2},
    "J4": {"executions": 4, "beside": 6},
    "J5": {"times": 1},
    "J6": {"many": 12, "few": 6, "wakes": 2},
    "J7": {"times": 3, "across": 2, "idle_seconds": 1},
    "J8": {"items": 2000, "branches": 40},
    "J9": {"executions": 20, "few": 500, "many": 501},
}


def small(name: str) -> Job:
    return attrs.evolve(job_of(name), full=SMALL[name], timeout=60)


def measured(job: Job, store: str, directory: Path) -> tuple[list[Row], list[Trouble]]:
    with Places(directory) as places:
        return run_jobs([job], (store,), places, rounds=1, short=False, say=lambda text: None)


def row(**changes: object) -> Row:
    given = {"job": "J1", "store": "sqlite", "what": "steps", "unit": "steps/s", "ours": (50.0,), "bare": (100.0,)}
    return Row(**{**given, **changes})  # type: ignore[arg-type]  # the keywords above


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


def test_a_measurement_that_fails_is_told_with_its_words(tmp_path: Path):
    """Sizes that lack what the job needs: no row, and what the child said."""
    broken = attrs.evolve(job_of("J1"), full={"executions": 1})

    rows, troubles = measured(broken, "sqlite", tmp_path)

    assert rows == []
    assert {trouble.role for trouble in troubles} == {"longrun", "store", "bare"}
    assert all("KeyError: 'steps'" in trouble.text for trouble in troubles)


def test_the_command_prints_a_table_writes_json_and_fails_only_for_a_missed_guard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The exit code of the short form is what its rows say."""
    target = tmp_path / "figures.json"

    code = main(["J1", "--short", "--store", "sqlite", "--rounds", "1", "--json", str(target), "--quiet"])

    found = json.loads(target.read_text())
    assert code == (1 if any(line["ok"] is False for line in found["rows"]) else 0)
    assert found["rows"][0]["ratio"] == pytest.approx(found["rows"][0]["longrun"][0] / found["rows"][0]["other"][0])
    assert {"python", "cores", "file system", "orjson"} <= found["machine"].keys()
    assert "1 × 300 steps, steps/s" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["J0"], ["--store", "tape"], ["--rounds", "0"]])
def test_what_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds():
    """Round by round, not median by median: a slow round is slow for both sides."""
    found = row(ours=(10.0, 40.0, 90.0), bare=(10.0, 80.0, 100.0))

    assert found.ratios == [1.0, 0.5, 0.9]
    assert found.ratio == 0.9


@pytest.mark.parametrize(
    ("goal", "full", "short"),
    [
        (at_least(0.5), True, True),
        (at_least(0.6), False, True),  # the short form leaves some room
        (at_least(0.9), False, False),
        (at_most(0.4), False, True),
        (at_most(0.2), False, False),
        (value_at_most(40), False, None),  # never seconds, never megabytes
        (None, None, None),
    ],
)
def test_goals_are_judged_and_the_short_form_looks_at_ratios_alone(goal: object, full: object, short: object):
    judged = row(goal=goal)

    assert judged.ok() is full
    assert judged.ok(short=True) is short


def test_a_missed_goal_stands_out_in_the_table():
    lines = table([row(goal=at_least(0.9)), row(goal=at_least(0.1))]).splitlines()

    assert "NOT OK" in lines[2]
    assert " ok " in lines[3]


def test_a_page_gets_the_newest_table_and_keeps_the_rest():
    page = f"# Before\n{BEGIN}\nold\n{END}\nafter\n"

    once = put_into(page, "new")

    assert has_marks(page)
    assert not has_marks("# Before\n")
    assert once == f"# Before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert put_into(once, "new") == once


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_a_bare_loop_keeps_the_newest_state_of_each_execution(store: str, tmp_path: Path):
    """What the ratios are taken against does store what it claims: seen by a second sink on the same place."""
    url = f"file:{tmp_path}/bare" if store == "file" else f"sqlite:///{tmp_path}/bare.db"

    async def run() -> list[int]:
        with bare.opened(store, url) as group:
            return await asyncio.gather(*(bare.execute(group, f"x{number}", {"n": 0}, 4) for number in range(40)))

    done = asyncio.run(run())
    again = bare.SINKS[store](url)
    try:
        stored = again.load()
    finally:
        again.close()
    assert done == [4] * 40
    assert stored == {f"x{number}": (4, bare.dumps({"n": 4})) for number in range(40)}


def test_peers_that_are_not_installed_are_listed_and_take_no_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "benchmarks.peers.catalogue.PEERS", (attrs.evolve(PEERS[0], package="a_package_that_nobody_has"),)
    )

    installed = Installed(None)

    assert installed.missing == {PEERS[0].name: "not installed"}
    assert installed.roles("J1", "sqlite") == ()


def test_a_peer_that_does_not_sync_says_so_and_has_no_goal():
    """Equal durability only: such a row is for looking at."""
    samples = {"longrun": [{"steps_per_s": 100.0}], "peer pydantic-graph": [{"steps_per_s": 10.0}]}

    (found,) = peer_rows("J1", "file", samples, {"executions": 1, "steps": 1000})

    assert (found.durable, found.goal, found.ratio) == ("NO FSYNC", None, 10.0)


def test_the_pictures_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")

    drawn = plots.draw([row(goal=at_least(0.4)), row(store="file", goal=at_most(0.2))], tmp_path / "plots")

    assert [path.name for path in drawn] == ["j1.svg", "ratios.svg"]
    assert all(path.read_text().startswith("<?xml") for path in drawn)


# --- instructions ---------------------------------------------------------------------------------------------------


def test_what_a_process_costs_anyway_is_in_no_price() -> None:
    found = instructions.prices(lambda executions, steps: 1_000_000 + 700 * executions + 30 * executions * steps, 10)
    assert found == instructions.Prices(step=30, execution=700)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions, and is not installed")
def test_the_instructions_of_a_run_are_counted_and_its_answer_checked(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        assert instructions.counted("bare", "sqlite", places)(1, 2) > 100_000


def test_without_valgrind_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        instructions.main([])
    assert "valgrind is not installed" in capsys.readouterr().err
