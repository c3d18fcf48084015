"""The benchmarks measure what they say: small sizes, real child processes, no word about speed."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from benchmarks import bare, instructions, page, pages, plots, race
from benchmarks.__main__ import main
from benchmarks.child import MODULES, job_of
from benchmarks.orders import Job, Order
from benchmarks.peers.catalogue import PEERS, Installed, peer_rows
from benchmarks.places import Places, available
from benchmarks.results import HEAD, Row, Trouble, at_least, at_most, cells, table, value_at_most
from benchmarks.run import run_jobs
from benchmarks.workers import queue
from longrun.client import Client
from longrun.stored import Owner

SMALL: dict[str, dict[str, int]] = {
    "J1": {"executions": 1, "steps": 5},
    "J1x10": {"executions": 1, "steps": 3},
    "J2": {"executions": 4, "steps": 3},
    "J2x5": {"executions": 2, "steps": 5},
    "J3": {"kib_steps": 3, "mib_steps": 2},
    "J4": {"executions": 4, "beside": 6},
    "J5": {"times": 1},
    "J6": {"many": 12, "few": 6, "wakes": 2},
    "J7": {"times": 3, "across": 2, "pauses": 2, "idle_seconds": 1},
    "J8": {"items": 2000, "branches": 40},
    "J9": {"executions": 20, "few": 900, "many": 950, "claimers": 2, "turns": 3},
}


def small(name: str) -> Job:
    return attrs.evolve(job_of(name), full=SMALL[name], timeout=60)


def measured(job: Job, store: str, directory: Path) -> tuple[list[Row], list[Trouble]]:
    with Places(directory) as places:
        return run_jobs([job], (store,), places, rounds=1, short=False, say=lambda text: None)


def row(**changes: object) -> Row:
    given = {"job": "J1", "store": "sqlite", "what": "steps", "unit": "steps/s", "ours": (50.0,), "bare": (100.0,)}
    return Row(**{**given, **changes})  # type: ignore[arg-type]  # the keywords above


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
    told = capsys.readouterr().out
    assert "1 × 300 steps, steps/s" in told
    assert "the store alone" not in told  # no goal is on it, and the short form has no time for it


@pytest.mark.parametrize("arguments", [["J0"], ["--store", "tape"], ["--rounds", "0"]])
def test_what_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error" in capsys.readouterr().err


# --- nothing to measure, nowhere to keep it -------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, *drivers: str) -> None:
    """As on a machine where these are not installed."""
    for driver in drivers:
        monkeypatch.setitem(sys.modules, driver, None)
    monkeypatch.delitem(sys.modules, "tests.servers", raising=False)  # it was imported with them


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--short J5 --store sqlite", "J5: on file alone in the short form"),
        ("--short J6 J9 --store file,sqlite", "J6, J9: not in the short form"),
        ("--short J5 J6 --store sqlite", "J5: on file alone in the short form; J6: not in the short form"),
        ("J9 --store file", "J9: on postgres, sqlite alone"),
    ],
)
def test_a_run_that_measures_nothing_says_why_and_fails(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments.split()) == 2

    told = capsys.readouterr()
    assert told.err == f"nothing is left to measure: {reason}\n"
    assert told.out == ""


def test_a_run_whose_drivers_are_all_missing_names_each_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "psycopg", "redis")

    assert main(["J1", "--store", "postgres,redis"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert "postgres: its driver psycopg cannot be imported: pip install" in line
    assert "redis: its driver redis cannot be imported: pip install" in line


def test_each_store_that_is_missing_names_its_own_driver(monkeypatch: pytest.MonkeyPatch):
    without(monkeypatch, "psycopg", "redis")

    stores, missing = available(("sqlite", "postgres", "redis", "valkey"))

    assert stores == ("sqlite",)
    assert {store: reason.partition(" cannot be imported: pip install ")[0] for store, reason in missing.items()} == {
        "postgres": "its driver psycopg",
        "redis": "its driver redis",
        "valkey": "its driver redis",
    }


def test_a_store_whose_driver_is_there_says_what_its_server_needs(monkeypatch: pytest.MonkeyPatch):
    """`tests/servers.py` imports all drivers: without psycopg no server of Redis is run either."""
    without(monkeypatch, "psycopg")

    _, missing = available(("redis",))

    assert missing["redis"].startswith("tests/servers.py, which runs its server, needs psycopg: pip install ")


@pytest.mark.parametrize(
    ("option", "target", "reason"),
    [
        ("--json", "nowhere/x.json", "nowhere is no directory"),
        ("--json", "", "is a directory"),
        ("--page", "nowhere/x.md", "cannot be read"),
        ("--page", "", "cannot be read"),
        ("--page", "binary.md", "cannot be read"),
        ("--page", "plain.md", "has no place for the table"),
        ("--plots", "plain.md", "plain.md is no directory"),
        ("--plots", "plain.md/below", "plain.md is no directory"),
        ("--directory", "nowhere", "nowhere is no directory"),
        ("--directory", "plain.md", "plain.md is no directory"),
    ],
)
def test_where_nothing_can_be_kept_is_refused_before_anything_is_measured(
    option: str,
    target: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    if option == "--plots":
        pytest.importorskip("matplotlib")
    tmp_path.joinpath("plain.md").write_text("# No marks\n")
    tmp_path.joinpath("binary.md").write_bytes(b"\xff\xfe")
    monkeypatch.setattr("benchmarks.__main__.run_jobs", lambda *_, **__: pytest.fail("it measured"))

    with pytest.raises(SystemExit, match="2"):
        main(["J1", "--store", "sqlite", option, str(tmp_path / target)])

    last = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {option}: " in last
    assert reason in last


def test_figures_go_where_they_can_be_kept_and_charts_into_directories_that_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("benchmarks.__main__.run_jobs", lambda *_, **__: ([row(goal=at_least(0.4))], []))
    kept, drawn = tmp_path / "x.json", tmp_path / "new" / "plots"

    code = main(["J1", "--store", "sqlite", "--json", str(kept), "--plots", str(drawn), "--directory", str(tmp_path)])

    assert code == 0
    assert json.loads(kept.read_text())["rows"][0]["ratio"] == 0.5
    assert drawn.joinpath("ratios.svg").exists()


# --- rows -----------------------------------------------------------------------------------------------------------


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


# --- the page -------------------------------------------------------------------------------------------------------

EMPTY = f"# Before\n{page.BEGIN}\nold\n{page.END}\nafter\n"


def put(text: str, *rows: Row, python: str = "3.11") -> str:
    return page.put_into(text, rows, {"python": python, "cores": "2"}, tuple(MODULES))


def lines_of(text: str) -> list[tuple[str, ...]]:
    """Job, store, what and longrun's figure of each line of a page's table."""
    _, _, held = text.partition(page.BEGIN)
    return [tuple(line[2:].split(" | ")[:4]) for line in held.splitlines() if line.startswith("| J")]


def test_a_page_gets_the_table_and_keeps_what_is_around_it():
    once = put(EMPTY, row())

    assert page.has_marks(EMPTY)
    assert not page.has_marks("# Before\n")
    assert once == "\n".join(
        [
            f"# Before\n{page.BEGIN}\n",
            "python 3.11, cores 2\n",
            f"| {' | '.join(HEAD)} |",
            "|" + "---|" * len(HEAD),
            f"| {' | '.join(cells(row()))} |",
            f"\n{page.END}\nafter\n",
        ]
    )
    assert put(once, row()) == once


def test_a_run_of_some_jobs_replaces_their_rows_and_keeps_the_others_in_the_order_of_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """J2 was measured on one store, where it now has another row; nothing else on the page is touched."""
    old = [row(job="J5", store=""), row(job="J5"), row(job="J2", store="file"), row(job="J2"), row(job="J1x10"), row()]
    target = tmp_path / "page.md"
    target.write_text(put(EMPTY, *old))
    new = [row(job="J2", ours=(70.0,)), row(job="J2", what="memory", ours=(80.0,))]
    monkeypatch.setattr("benchmarks.__main__.run_jobs", lambda *_, **__: (new, []))

    assert main(["J2", "--store", "sqlite", "--page", str(target)]) == 0

    assert lines_of(target.read_text()) == [
        ("J1", "sqlite", "steps, steps/s", "50"),
        ("J1x10", "sqlite", "steps, steps/s", "50"),
        ("J2", "sqlite", "steps, steps/s", "70"),
        ("J2", "sqlite", "memory, steps/s", "80"),
        ("J2", "file", "steps, steps/s", "50"),
        ("J5", "sqlite", "steps, steps/s", "50"),
        ("J5", "", "steps, steps/s", "50"),
    ]


def test_rows_that_stay_keep_their_cells_as_they_stand():
    kept = row(bare_name="burr", goal=at_least(0.9), durable="WAL, FULL", note="a note")
    line = f"| {' | '.join(cells(kept))} |"

    assert line in put(put(EMPTY, kept), row(job="J2")).splitlines()


def test_the_page_says_which_rows_are_of_another_run():
    """The line without names is about all that no other line names; a row that is measured again changes its line."""
    first = put(EMPTY, row(), row(job="J2"), row(job="J5", store=""))

    second = put(first, row(job="J2"), row(job="J5", store=""), python="3.12")
    third = put(second, row(job="J2"), python="3.13")
    last = put(third, row(), row(job="J2"), row(job="J5", store=""), python="3.14")

    assert circumstances(first) == ["python 3.11, cores 2"]
    assert circumstances(second) == ["python 3.11, cores 2", "J2 sqlite, J5: python 3.12, cores 2"]
    assert circumstances(third)[1:] == ["J5: python 3.12, cores 2", "J2 sqlite: python 3.13, cores 2"]
    assert circumstances(last) == ["python 3.14, cores 2"]


def circumstances(text: str) -> Sequence[str]:
    return [line for line in text.splitlines() if "cores" in line]


def test_a_run_whose_measurements_all_failed_leaves_the_page_alone():
    assert put(EMPTY) == EMPTY


def test_a_line_that_strayed_into_the_table_does_not_stay():
    once = put(EMPTY, row())
    strayed = once.replace(f"\n\n{page.END}", f"\n| J6 | 100,000 parked executions |\n\n{page.END}")
    assert "parked" in strayed

    assert "parked" not in put(strayed, row(job="J2"))


def test_the_table_of_the_documentation_holds_rows_of_jobs_alone():
    text = Path(__file__).parent.parent.joinpath("docs", "performance.md").read_text()
    held = text.partition(page.BEGIN)[2].partition(page.END)[0]

    assert page.has_marks(text)
    assert {line.count(" | ") for line in held.splitlines() if line.startswith("| J")} == {len(HEAD) - 1}
    assert {line[0] for line in lines_of(text)} == set(MODULES)


# --- what ratios are taken against ----------------------------------------------------------------------------------


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


# --- what is asked of much that is queued ---------------------------------------------------------------------------


def queued(directory: Path, count: int, **sizes: int) -> Order:
    """A measurement of J9 on a store that has so many in its queue."""
    url = f"sqlite:///{directory}/store.db"
    order = Order(job="J9", role="many", store="sqlite", url=url, sizes=sizes, asked=0)
    asyncio.run(queue(order, count))
    return order


def test_pages_are_timed_if_they_hold_the_newest_and_those_of_the_state(tmp_path: Path):
    order = queued(tmp_path, 60)

    found = asyncio.run(pages.look(order.url))

    assert found.keys() == {"newest_ms", "rare_ms"}
    assert all(figure > 0 for figure in found.values())


def test_a_page_that_lacks_the_newest_is_no_figure(tmp_path: Path):
    order = queued(tmp_path, 60)

    async def run() -> None:
        async with Client(order.url) as client:
            listed = await client.list(limit=pages.PAGE + 1)
            await pages.check(client, listed[:-1])
            with pytest.raises(AssertionError, match="are as new as"):
                await pages.check(client, listed[1:])

    asyncio.run(run())


def test_a_page_that_is_not_full_is_no_figure(tmp_path: Path):
    async def run() -> None:
        async with Client(f"sqlite:///{tmp_path}/store.db") as client:
            await client.submit("steps", {"n": 0})
            await pages.timed(client, None)

    with pytest.raises(AssertionError, match="1 listed instead of 50"):
        asyncio.run(run())


def test_claimers_are_counted_as_short_where_the_queue_is_not(tmp_path: Path):
    """Where one waits for the other, nobody goes short; and a queue that all of them together empty is no measure."""
    order = queued(tmp_path, 2 * 2 * race.EACH + 1, claimers=2, turns=2)

    assert race.race(order) == {"short_percent": 0.0}
    with pytest.raises(AssertionError, match="too little was queued"):
        race.race(order)


def test_what_two_claimers_were_given_is_no_figure(tmp_path: Path):
    """The store knows one owner of each: the other was given it too."""
    order = queued(tmp_path, 3)

    async def claim() -> None:
        async with Client(order.url) as client:
            await client.store.register(Owner(id="second", life={}, remaining=60.0), 60.0)
            await client.store.claim(race.wanted("second"))

    async def run() -> None:
        await claim()
        with pytest.raises(AssertionError, match="first was given 1 and has 0"):
            await race.check(order, {"second": 3, "first": 1})

    asyncio.run(run())


def test_contention_has_a_row_where_claimers_pass_over_what_others_hold():
    queues = {role: [{"us": 1.0, "newest_ms": 1.0, "rare_ms": 1.0, "short_percent": 12.5}] for role in ("many", "few")}
    crews = {role: [{"steps_per_s": 1.0}] for role in ("one worker", "two workers", "four workers")}
    job = job_of("J9")

    found = {store: job.rows(store, {**queues, **crews}, job.full) for store in job.stores}
    (short,) = [one for one in found["postgres"] if "came back short" in one.what]

    assert (short.judged, short.ok()) == (12.5, False)
    assert [one.what for one in found["sqlite"]] == [one.what for one in found["postgres"] if one is not short]
    assert [one.ratio for one in found["sqlite"] if "a page of 50 with 100,000" in one.what] == [1.0, 1.0]


# --- across processes -----------------------------------------------------------------------------------------------


def test_a_pause_from_another_process_tells_its_slowest_too():
    here = {"start_ms": 1.0, "start_p99_ms": 1.0, "pause_ms": 1.0, "cancel_ms": 1.0}
    there = {"across_ms": 3.0, "across_max_ms": 9.0, "paused_ms": 210.0, "paused_max_ms": 340.0, "idle_percent": 0.1}
    samples = {"longrun": [here], "store": [{"ms": 1.0}], "bare": [{"ms": 1.0}], "across": [there]}

    rows = job_of("J7").rows("redis", samples, job_of("J7").full)
    (found,) = [one for one in rows if one.what.startswith("pause from another process")]

    assert (found.judged, found.ok(), found.note) == (210.0, False, "slowest 340 ms")


# --- instructions ---------------------------------------------------------------------------------------------------


def test_what_a_process_costs_anyway_is_in_no_price() -> None:
    found = instructions.prices(lambda executions, steps: 1_000_000 + 700 * executions + 30 * executions * steps, 10)
    assert found == instructions.Prices(step=30, execution=700)


def test_without_valgrind_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        instructions.main([])
    assert "valgrind is not installed" in capsys.readouterr().err
