"""Pages of executions: filters, counts, order, and what a list never shows."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longrun import ExecutionState, schema
from longrun.dashboard.kept import KEEP_FACTOR, REMEMBERED, Kept
from longrun.records import to_time
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import Browser
from tests.dashboard.samples import created, many

NOW = time.time()


async def ids(browser: Browser, **filters: Any) -> list[str]:
    answer = await browser.get(f"/api/executions?{urlencode(filters, doseq=True)}")
    assert answer.status == 200, answer.text
    return [one["id"] for one in answer.json()["executions"]]


@pytest.fixture
async def some(store: CheckpointStore) -> None:
    for n, (state, workflow, queue, who) in enumerate(
        [
            ("completed", "import", "default", "Ada"),
            ("failed", "import", "slow", "Grace"),
            ("paused", "export", "default", "ada lovelace"),
            ("waiting", "export", "slow", "Linus"),
        ]
    ):
        await store.create(
            created(f"run-{n}", state=state, at=NOW - 1000 + n, workflow=workflow, queue=queue, metadata={"who": who})
        )


@pytest.mark.usefixtures("some")
async def test_executions_are_filtered_by_state_workflow_queue_text_and_time(browser: Browser) -> None:
    assert await ids(browser) == ["run-3", "run-2", "run-1", "run-0"]
    assert await ids(browser, state=["failed", "waiting"]) == ["run-3", "run-1"]
    assert await ids(browser, workflow="import") == ["run-1", "run-0"]
    assert await ids(browser, queue="slow") == ["run-3", "run-1"]
    assert await ids(browser, text="ADA") == ["run-2", "run-0"]
    assert await ids(browser, text="run-1") == ["run-1"]
    assert await ids(browser, since=998.5 + time.time() - NOW) == ["run-3", "run-2"]
    assert await ids(browser, since=10) == []
    middle = schema.time(to_time(NOW - 998.5))
    assert await ids(browser, **{"from": middle}) == ["run-3", "run-2"]
    assert await ids(browser, to=middle) == ["run-1", "run-0"]


@pytest.mark.usefixtures("some")
async def test_counts_are_those_of_all_states_whatever_state_is_chosen(browser: Browser) -> None:
    answer = (await browser.get("/api/executions?state=failed&workflow=import")).json()
    assert answer["total"] == 1
    assert answer["counts"]["failed"] == answer["counts"]["completed"] == 1
    assert answer["counts"]["paused"] == 0
    assert len(answer["counts"]) == 9
    uncounted = (await browser.get("/api/executions?counts=0")).json()
    assert uncounted["counts"] is uncounted["total"] is None
    assert len(uncounted["executions"]) == 4


async def test_pages_follow_each_other_without_gaps_or_repeats(browser: Browser, store: CheckpointStore) -> None:
    many(store, 25)
    seen: list[str] = []
    for sort in ("-created", "created", "-duration", "workflow", "progress", "state", "-updated"):
        seen = []
        after = ""
        while True:
            page = (await browser.get(f"/api/executions?limit=7&{urlencode({'sort': sort, 'after': after})}")).json()
            seen += [one["id"] for one in page["executions"]]
            after = page["next"]
            if after is None:
                break
        assert len(seen) == len(set(seen)) == 25, sort
    assert seen == sorted(seen, reverse=True)


async def test_other_orders_than_newest_first_sort_by_what_they_say(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("old", state="waiting", at=NOW - 5000, workflow="b"))
    await store.create(created("new", state="completed", at=NOW - 10, workflow="A"))
    assert await ids(browser, sort="created") == ["old", "new"]
    assert await ids(browser, sort="-duration") == ["old", "new"]
    assert await ids(browser, sort="workflow") == ["new", "old"]
    assert await ids(browser, sort="-progress") == ["new", "old"]


async def test_a_sort_over_more_than_it_looks_at_says_so(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(store, 12)
    monkeypatch.setattr("longrun.dashboard.listing.SORT_WINDOW", 10)
    answer = (await browser.get("/api/executions?sort=created&limit=5")).json()
    assert answer["sorted_among"] == 10
    assert answer["executions"][0]["id"] == "run-000002"
    assert (await browser.get("/api/executions?limit=5")).json()["sorted_among"] is None


async def test_a_row_is_a_summary_of_the_command_line_without_error_or_state(
    browser: Browser, store: CheckpointStore
) -> None:
    await store.create(created("bad", state="failed", error="ValueError: the secret is 42"))
    answer = await browser.get("/api/executions")
    assert "secret" not in answer.text
    assert schema.problems(answer.json()["executions"][0], "summary") == []


@pytest.mark.parametrize(
    "query",
    [
        "state=unknown",
        "limit=0",
        "limit=1000",
        "limit=x",
        "limit=²",
        "since=nan",
        "since=-1",
        "from=yesterday",
        "sort=password",
        "after=nonsense",
        "after=1",
        "sort=created&after=x",
        "text=" + "x" * 301,
        "wokflow=import",
        "meta=i=5",
        "State=failed",
    ],
)
async def test_a_filter_that_will_not_do_is_refused_with_a_sentence(browser: Browser, query: str) -> None:
    answer = await browser.get(f"/api/executions?{query}")
    assert answer.status == 400
    assert "will not do" in answer.json()["error"]


async def test_progress_that_is_no_number_does_not_break_the_list(browser: Browser, store: CheckpointStore) -> None:
    made = created("odd", state="waiting")
    await store.create(attrs.evolve(made, head=attrs.evolve(made.head, done=float("inf"), of=float("nan"))))
    answer = await browser.get("/api/executions")
    assert answer.json()["executions"][0]["step_progress"] == {"done": None, "total": None, "message": None}


@pytest.mark.usefixtures("some")
async def test_what_failed_has_no_time_left(browser: Browser) -> None:
    found = (await browser.get("/api/executions")).json()["executions"]
    assert {one["state"]: one["progress"]["remaining_seconds"] for one in found} == {
        "completed": 0.0,
        "failed": None,
        "paused": None,
        "waiting": None,
    }


async def test_only_slow_answers_are_kept_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("longrun.dashboard.kept.time.monotonic", lambda: now)
    asked: list[float] = []

    async def ask(seconds: float) -> int:
        nonlocal now
        now += seconds
        asked.append(seconds)
        return len(asked)

    kept = Kept[int]()
    assert [await kept.get("quick", lambda: ask(0.01)) for _ in range(2)] == [1, 2]
    assert [await kept.get("slow", lambda: ask(1.0)) for _ in range(3)] == [3, 3, 3]
    now += KEEP_FACTOR + 0.1
    assert await kept.get("slow", lambda: ask(1.0)) == 4
    for n in range(2 * REMEMBERED):
        await kept.get(n, lambda: ask(1.0))
    assert len(kept._known) <= REMEMBERED
    a_while = Kept[int](at_least=3.0)
    assert await a_while.get("quick", lambda: ask(0.01)) == await a_while.get("quick", lambda: ask(0.01))


async def test_suggestions_come_from_what_is_stored(browser: Browser, store: CheckpointStore) -> None:
    many(store, 12)
    answer = (await browser.get("/api/overview")).json()
    assert answer["workflows"] == ["export", "import", "report"]
    assert answer["queues"] == ["default", "slow"]
    assert answer["store"] == "memory"


async def test_a_chart_counts_by_when_executions_were_created(browser: Browser, store: CheckpointStore) -> None:
    now = time.time()
    for n, state in enumerate(["completed", "completed", "failed", "cancelled", "waiting"]):
        await store.create(created(f"run-{n}", state=state, at=now - 60, workflow="a" if n else "b"))
    await store.create(created("long-ago", at=now - 7200, workflow="a"))
    buckets = (await browser.get("/api/charts?hours=1")).json()["buckets"]
    sums = {
        kind: sum(bucket[kind] for bucket in buckets) for kind in ("completed", "failed", "cancelled", "unfinished")
    }
    assert sums == {"completed": 2, "failed": 1, "cancelled": 1, "unfinished": 1}
    only = (await browser.get("/api/charts?hours=1&workflow=b")).json()["buckets"]
    assert sum(bucket["completed"] for bucket in only) == 1
    assert sum(bucket["completed"] for bucket in (await browser.get("/api/charts?hours=24")).json()["buckets"]) == 3


async def test_prometheus_reads_executions_by_state_and_workers_by_status(
    browser: Browser, store: CheckpointStore
) -> None:
    for n, state in enumerate(("failed", "failed", "waiting")):
        await store.create(created(f"run-{n}", state=state))
    answer = await browser.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {one.name: one.samples for one in text_string_to_metric_families(answer.body.decode())}
    counts = {one.labels["state"]: one.value for one in families["longrun_executions"]}
    assert {state: number for state, number in counts.items() if number} == {"failed": 2, "waiting": 1}
    assert counts.keys() == {state.value for state in ExecutionState}
    assert {one.labels["status"]: one.value for one in families["longrun_workers"]} == dict.fromkeys(schema.STATUSES, 0)


@pytest.mark.parametrize("since", ["soon", "-1", "nan", "inf"])
async def test_a_number_that_is_none_is_refused(browser: Browser, since: str) -> None:
    answer = await browser.get(f"/api/executions?since={since}")
    assert (answer.status, "at least 0" in answer.text) == (400, True)


@pytest.mark.usefixtures("some")
async def test_counts_that_took_long_are_kept_for_a_while_but_not_without_end(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrun.dashboard.kept.SLOW", -1.0)
    monkeypatch.setattr("longrun.dashboard.kept.KEEP_FACTOR", 1e9)
    monkeypatch.setattr("longrun.dashboard.kept.REMEMBERED", 2)

    async def total(text: str) -> int:
        return int((await browser.get(f"/api/executions?text={text}")).json()["total"])

    assert [await total("ada"), await total("linus")] == [2, 1]
    await store.create(created("run-9", at=NOW, metadata={"who": "Ada"}))
    assert await total("ada") == 2, "it is the answer from before"
    assert await total("grace") == 1  # one too many: all are forgotten
    assert await total("ada") == 3


async def test_charts_are_kept_for_a_while_but_not_without_end(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrun.dashboard.kept.REMEMBERED", 1)

    async def number(workflow: str) -> int:
        chart = (await browser.get(f"/api/charts?workflow={workflow}")).json()
        return sum(sum(value for key, value in one.items() if key != "start") for one in chart["buckets"])

    assert await number("import") == 0
    await store.create(created("run-9", at=time.time(), workflow="import"))
    assert await number("import") == 0, "it is the chart from before"
    assert await number("export") == 0
    assert await number("import") == 1
