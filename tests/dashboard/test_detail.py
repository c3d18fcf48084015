"""One execution in full: where it would resume, its rows, its states and what changed between them."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import Executor, ExecutorConfig, RetryPolicy, Sleep, StepContext, StepRegistry, WaitFor
from longrun.dashboard.diff import CHANGES, differences
from longrun.dashboard.timeline import FOLDS, ROWS, TAIL, Timeline, fold_size
from longrun.stored import Boundary
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import Browser
from tests.dashboard.samples import created, long_run

registry = StepRegistry()


@registry.step
async def fetch(state: dict[str, Any]) -> Any:
    return Sleep(0.01, {**state, "rows": [1, 2]})


@registry.step(retry=RetryPolicy(max_attempts=3, initial=0.001))
async def flaky(ctx: StepContext, state: dict[str, Any]) -> Any:
    if ctx.attempt < 3:
        raise ValueError("not yet")
    return WaitFor("go", {**state, "rows": [1, 2, 3], "tried": ctx.attempt})


@registry.step
async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for item in ctx.each("pages", range(5), every=1):
        ctx.progress(item, 5, "reading")
        if item == 3:
            await anyio.sleep_forever()
    return state


@registry.step
async def boom(state: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("the secret is 42")


registry.workflow("job", [fetch, flaky, crawl])
registry.workflow("bad", [boom])
CONFIG = ExecutorConfig(max_retries=0, checkpoint_interval=0, heartbeat_interval=0.05, lease_ttl=30, drain_timeout=0)


@pytest.fixture
async def job(store: CheckpointStore) -> Any:
    """`job` stands inside its last step, in front of its fourth item."""
    async with Executor(registry, store=store, config=CONFIG) as executor:
        run = await executor.start("job", {"n": 1}, id="job", metadata={"who": "ada"})
        await executor.signal("job", "go", {"ok": True})
        with anyio.fail_after(20):
            while (await store.load("job")).head.done != 3:
                await anyio.lowlevel.checkpoint()
        yield run


async def test_a_detail_says_where_a_resume_would_go_on(browser: Browser, job: Any) -> None:
    detail = (await browser.get("/api/executions/job")).json()
    assert detail["execution"]["state"] == "running"
    assert detail["execution"]["progress"]["fraction"] > 0.5
    assert detail["resume"]["step"] == 2
    assert detail["resume"]["total"] == 3
    assert detail["resume"]["name"] == "crawl"
    assert detail["resume"]["inside"] == ["pages: from item 4 of 5"]
    assert detail["in_flight"]["name"] == "crawl"
    assert detail["plan"]["owner_alive"] is True
    assert detail["execution"]["step_progress"]["message"] == "reading"


async def test_rows_show_attempts_and_waits_while_it_runs(browser: Browser, job: Any) -> None:
    answer = (await browser.get("/api/executions/job/timeline")).json()
    rows = answer["rows"]
    assert [row["kind"] for row in rows] == ["start", "sleep", "wait"]
    assert [row["attempts"] for row in rows] == [0, 1, 3]
    assert answer["pending"] == []
    assert answer["total"] == 3


async def test_a_row_has_what_went_in_and_what_came_out(browser: Browser, job: Any) -> None:
    answer = (await browser.get("/api/executions/job/checkpoints/3")).json()
    assert answer["step"]["name"] == "flaky"
    assert '"rows": [\n    1,\n    2\n  ]' in answer["input"]["text"]
    assert '"tried": 3' in answer["output"]["text"]
    assert answer["output"]["truncated"] is False
    assert (await browser.get("/api/executions/job/checkpoints/1")).json()["input"] is None
    assert (await browser.get("/api/executions/job/checkpoints/99")).status == 400


async def test_a_diff_names_what_changed_between_two_checkpoints(browser: Browser, job: Any) -> None:
    answer = (await browser.get("/api/executions/job/diff?from=2&to=3")).json()
    changes = [(one["path"], one["kind"], one["before"], one["after"]) for one in answer["changes"]]
    assert changes == [('state["rows"][2]', "added", None, "3"), ('state["tried"]', "added", None, "3")]
    assert (await browser.get("/api/executions/job/diff?from=2&to=99")).status == 400


async def test_the_error_stands_in_the_detail_and_in_its_row_alone(browser: Browser, store: CheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        run = await executor.start("bad", {}, id="bad")
        await run.wait("failed")
    assert "the secret is 42" in (await browser.get("/api/executions/bad")).json()["error"]
    rows = (await browser.get("/api/executions/bad/timeline")).json()["rows"]
    assert "the secret is 42" in rows[-1]["error"]
    row = (await browser.get(f"/api/executions/bad/checkpoints/{rows[-1]['seq']}")).json()
    assert row["input"]["text"] == row["output"]["text"] == "{}"
    for path in ("/api/executions", "/api/overview", "/api/workers", "/api/charts"):
        assert "the secret is 42" not in (await browser.get(path)).text


async def test_what_is_not_there_or_no_id_is_said_so(browser: Browser) -> None:
    for path in ("", "/timeline", "/diff?from=1&to=2"):
        assert (await browser.get(f"/api/executions/nobody{path}")).status in (400, 404)
    assert (await browser.get("/api/executions/nobody")).status == 404
    assert (await browser.get("/api/executions/no..body")).status == 400


@pytest.mark.parametrize("number", ["9" * 26, "9" * 5000, "-1", "x", "10000000000000"])
async def test_a_checkpoint_has_a_number_that_a_store_can_look_for(browser: Browser, job: Any, number: str) -> None:
    answer = await browser.get(f"/api/executions/job/checkpoints/{number}")
    assert answer.status == 400
    assert "whole number from 0 to" in answer.json()["error"]


async def test_it_says_when_no_worker_alive_could_take_it_up(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("new", state="initialized", workflow="job"))
    assert "none is alive" in (await browser.get("/api/executions/new")).json()["hint"]
    quiet = ExecutorConfig(auto_resume=False)
    async with Executor(registry, store=store, config=quiet):
        assert (await browser.get("/api/executions/new")).json()["hint"] is None


async def test_children_are_listed_with_their_parent(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("parent"))
    await store.create(created("child", parent_id="parent"))
    detail = (await browser.get("/api/executions/parent")).json()
    assert [one["id"] for one in detail["children"]] == ["child"]
    assert (await browser.get("/api/executions/child")).json()["execution"]["parent_id"] == "parent"


async def test_a_state_too_long_to_show_is_cut_off(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrun.dashboard.detail.STATE_TEXT", 10)
    long_run(store, "long", 5)
    output = (await browser.get("/api/executions/long/checkpoints/3")).json()["output"]
    assert output["truncated"] is True
    assert len(output["text"]) == 10 < output["size"]


async def test_workers_show_their_lease_and_what_they_hold(browser: Browser, job: Any) -> None:
    workers = (await browser.get("/api/workers")).json()["workers"]
    assert [one["status"] for one in workers] == ["alive"]
    assert 0 < workers[0]["lease_seconds"] <= 30
    assert workers[0]["executions"] == 1
    assert workers[0]["workflows"] == ["job", "bad"]


# --- folding ----------------------------------------------------------------------------------------------------------


async def test_a_short_run_is_not_folded_and_a_long_one_is(browser: Browser, store: CheckpointStore) -> None:
    long_run(store, "short", ROWS)
    long_run(store, "long", 3000)
    assert not any(row["fold"] for row in (await browser.get("/api/executions/short/timeline")).json()["rows"])
    rows = (await browser.get("/api/executions/long/timeline")).json()["rows"]
    folds = [row for row in rows if row["fold"]]
    assert len(rows) <= ROWS
    assert len(folds) <= FOLDS
    assert not any(row["fold"] for row in rows[-TAIL:])
    covered = [seq for row in rows for seq in (range(row["first"], row["last"] + 1) if row["fold"] else [row["seq"]])]
    assert covered == list(range(1, 3001))
    assert sum(fold["retried"] for fold in folds) >= 10
    assert sum(fold["waits"] for fold in folds) >= 25


@pytest.mark.parametrize(("rows", "reads"), [(10_000, 2), (120_000, 201)])
async def test_folds_are_read_many_at_a_time(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, rows: int, reads: int
) -> None:
    """A read of a file costs as much as the whole. Of large folds only the beginning and the end are read."""
    long_run(store, "long", rows)
    asked, read = [], store.boundaries

    async def boundaries(id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        asked.append((after, limit))
        return await read(id, after=after, limit=limit)

    monkeypatch.setattr(store, "boundaries", boundaries)
    timeline = Timeline(store)
    first = await timeline.between("long", 0.0, 0, rows)
    assert len(asked) <= reads
    assert sum(row["count"] for row in first if row["fold"]) + sum(not row["fold"] for row in first) == rows
    assert {row["examined"] for row in first if row["fold"]} == {100 if rows == 10_000 else 1000}
    asked.clear()
    assert await timeline.between("long", 0.0, 0, rows) == first
    assert len(asked) == 1, "the folds are remembered"


async def test_rows_that_are_known_are_not_read_again(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step goes on, each look costs one load."""
    long_run(store, "long", 700)
    first = (await browser.get("/api/executions/long")).json()
    assert len(first["checkpoints"]) == 50

    async def boundaries(id: str, **options: object) -> list[Boundary]:
        raise AssertionError("it was read again")

    monkeypatch.setattr(store, "boundaries", boundaries)
    assert (await browser.get("/api/executions/long")).json()["checkpoints"] == first["checkpoints"]


async def test_a_fold_can_be_opened(browser: Browser, store: CheckpointStore) -> None:
    long_run(store, "long", 3000)
    fold = (await browser.get("/api/executions/long/timeline")).json()["rows"][1]
    inside = await browser.get(f"/api/executions/long/timeline?after={fold['first'] - 1}&before={fold['last'] + 1}")
    assert [row["seq"] for row in inside.json()["rows"]] == list(range(fold["first"], fold["last"] + 1))


@pytest.mark.parametrize("rows", [1, 999, 1000, 1001, 12345, 1_000_000])
def test_folds_are_round_and_few(rows: int) -> None:
    size = fold_size(rows)
    assert rows / size <= FOLDS
    assert str(size).strip("0") in ("1", "5")


# --- differences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, [('state["a"]', "changed", "1", "2")]),
        ({"a": 1}, {"a": True}, [('state["a"]', "changed", "1", "true")]),
        ({"a": 1}, {}, [('state["a"]', "removed", "1", None)]),
        ([1, 2], [1], [("state[1]", "removed", "2", None)]),
        (None, [], [("state", "changed", "null", "[]")]),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, [('state["a"]["b"][0]', "changed", "1", "2")]),
        ({'"]<b>': 1}, {'"]<b>': 2}, [('state["\\"]<b>"]', "changed", "1", "2")]),
    ],
)
def test_a_difference_has_place_kind_and_both_values(before: Any, after: Any, expected: list[Any]) -> None:
    changes, more = differences(before, after)
    assert [(one.path, one.kind, one.before, one.after) for one in changes] == expected
    assert more is False


def test_differences_are_bounded() -> None:
    changes, more = differences([0] * 2000, [1] * 2000)
    assert (len(changes), more) == (CHANGES, True)
    (change,), _ = differences("x" * 9000, "y")
    assert len(change.before or "") == 2000
