"""Pause, resume, cancel, retry, signal and fork through the dashboard, on executions that run and that nobody runs."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from longrun import (
    ConfigError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    StepContext,
    StepRegistry,
    StoreUnavailableError,
    WaitFor,
    codec,
)
from longrun.dashboard import DashboardApp
from longrun.dashboard.actions import body_of
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import Browser
from tests.dashboard.samples import created, many

registry = StepRegistry()
CONFIG = ExecutorConfig(max_retries=0, checkpoint_interval=0, heartbeat_interval=0.05, lease_ttl=30, drain_timeout=0)


@registry.step
async def ask(state: dict[str, Any]) -> Any:
    return WaitFor("go", state)


@registry.step
async def done(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    if state.get("fail"):
        raise ValueError("as told")
    return {**state, "signal": ctx.signal}


@registry.step
async def spin(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    while True:
        await ctx.checkpoint()
        await anyio.sleep(0.01)


registry.workflow("ask", [ask, done])
registry.workflow("spin", [spin])


@pytest.fixture
async def executor(store: CheckpointStore) -> Any:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        yield executor


async def test_a_running_execution_is_paused_with_hold_resumed_and_cancelled(
    browser: Browser, executor: Executor, store: CheckpointStore
) -> None:
    run = await executor.start("spin", {}, id="spin")
    assert (await browser.post("/api/executions/spin/pause")).json() == {"done": True}
    head = (await store.load("spin")).head
    assert (head.state, head.hold) == ("paused", True)
    assert (await browser.post("/api/executions/spin/resume")).json() == {"done": True}
    await run.wait("running")
    answer = await browser.post("/api/executions/spin/cancel", {"reason": "enough"})
    assert answer.json() == {"done": True}
    assert (await store.load("spin")).head.reason == "enough"


async def test_a_signal_carries_its_json_to_the_step(browser: Browser, executor: Executor) -> None:
    run = await executor.start("ask", {}, id="ask")
    await run.wait("waiting")
    answer = await browser.post("/api/executions/ask/signal", {"name": "go", "payload": {"yes": [1, None]}})
    assert answer.status == 200
    assert (await run.result())["signal"] == {"yes": [1, None]}


async def test_a_number_of_many_digits_arrives_as_it_was_sent(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("one", state="waiting"))
    wrote = {"x-longrun": "1"}
    order = 123456789012345678901234567890
    sent = b'{"name": "go", "payload": {"order": %d}}' % order
    assert (await browser.ask("POST", "/api/executions/one/signal", body=sent, headers=wrote)).status == 200
    assert codec.decode((await store.load("one")).messages[0].payload or b"") == {"order": order}
    state = b'{"checkpoint": 1, "new_id": "two", "state": {"order": %d}}' % order
    assert (await browser.ask("POST", "/api/executions/one/fork", body=state, headers=wrote)).status == 200
    assert codec.decode((await store.load("two")).boundary.data or b"") == {"order": order}


async def test_a_failed_execution_is_retried_with_another_state(browser: Browser, executor: Executor) -> None:
    run = await executor.start("ask", {"fail": True}, id="ask")
    await executor.signal("ask", "go")
    await run.wait("failed")
    assert (await browser.post("/api/executions/ask/retry", {"state": {"fail": False}})).status == 200
    assert (await run.result())["fail"] is False


async def test_a_fork_begins_at_the_checkpoint_that_was_chosen(
    browser: Browser, executor: Executor, store: CheckpointStore
) -> None:
    run = await executor.start("ask", {"n": 1}, id="ask")
    await executor.signal("ask", "go")
    await run.result()
    answer = await browser.post("/api/executions/ask/fork", {"checkpoint": 2, "new_id": "again", "state": {"n": 2}})
    assert answer.json() == {"done": True, "id": "again"}
    loaded = await store.load("again")
    assert (loaded.head.step, loaded.definition.metadata["forked_from"]) == (1, "ask@2")
    assert (await browser.post("/api/executions/ask/fork", {"checkpoint": 99})).status == 400
    assert (await browser.post("/api/executions/ask/fork", {"checkpoint": 2, "new_id": "again"})).status == 409


async def test_what_nobody_runs_is_changed_here_and_no_owner_stays_behind(
    browser: Browser, store: CheckpointStore
) -> None:
    await store.create(created("one", state="waiting"))
    assert (await browser.post("/api/executions/one/pause")).status == 200
    assert (await store.load("one")).head.state == "paused"
    assert (await store.load("one")).head.owner is None
    assert await store.owners() == []


async def test_a_request_whose_effect_takes_longer_is_stored_and_says_so(
    browser: Browser, executor: Executor, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrun.dashboard.actions.WAIT", 0.0)
    await executor.start("spin", {}, id="spin")
    events = executor.events()  # before it is asked: it may take effect while the answer is on its way
    answer = await browser.post("/api/executions/spin/pause")
    assert answer.status == 202
    assert answer.json()["done"] is False
    async for event in events:
        if event.type == "paused":
            break


async def test_a_signal_that_the_store_does_not_answer_is_not_called_stored(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(created("one", state="waiting"))
    answered = threading.Event()

    def away(batch: object) -> list[object]:
        assert answered.wait(60)
        raise StoreUnavailableError("tested", "the connection is lost")

    monkeypatch.setattr(store.backend, "commit", away)
    monkeypatch.setattr("longrun.dashboard.actions.WAIT", 0.05)
    monkeypatch.setattr("longrun.crew.LAST_WORDS", 0.05)  # of the client, which the store does not answer either
    try:
        answer = await browser.post("/api/executions/one/signal", {"name": "go"})
    finally:
        answered.set()
    assert answer.status == 503
    assert "may or may not be stored" in answer.json()["error"]
    assert await store.messages("one") == []


async def test_what_the_state_forbids_is_a_conflict(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("one", state="completed"))
    for verb, body in (("pause", {}), ("resume", {}), ("retry", {}), ("signal", {"name": "go"}), ("cancel", {})):
        answer = await browser.post(f"/api/executions/one/{verb}", body)
        assert answer.status == 409, verb
        assert answer.json()["kind"] == "InvalidStateError"
    assert (await browser.post("/api/executions/nobody/pause")).status == 404
    assert (await browser.post("/api/executions/one/explode")).status == 404


NAN = b'{"name": "go", "payload": NaN}'


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b"[" * 100_000, b'{"name": 5}', b'{"name": ""}', NAN])
async def test_a_body_that_will_not_do_is_refused(browser: Browser, store: CheckpointStore, body: bytes) -> None:
    await store.create(created("one", state="waiting"))
    answer = await browser.ask("POST", "/api/executions/one/signal", body=body, headers={"x-longrun": "1"})
    assert answer.status == 400
    assert (await store.load("one")).messages == ()


async def test_a_body_that_is_too_long_is_refused(browser: Browser) -> None:
    body = b'{"name": "' + b"x" * 1_000_000 + b'"}'
    answer = await browser.ask("POST", "/api/executions/one/signal", body=body, headers={"x-longrun": "1"})
    assert answer.status == 413


async def test_several_are_changed_at_once_and_each_refusal_is_told(browser: Browser, store: CheckpointStore) -> None:
    for id, state in (("a", "waiting"), ("b", "waiting"), ("c", "completed")):
        await store.create(created(id, state=state))
    answer = (await browser.post("/api/bulk/cancel", {"ids": ["a", "b", "c", "a"], "reason": "cleaning"})).json()
    assert answer["done"] == 2
    assert [one["id"] for one in answer["refused"]] == ["c"]
    assert (await store.load("a")).head.reason == "cleaning"


async def test_everything_a_filter_matches_is_changed_page_by_page(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrun.dashboard.actions.BULK_PAGE", 4)
    many(store, 200)
    after, done, asked = None, 0, 0
    while asked == 0 or after is not None:
        body = {"filter": "state=waiting&after=ignored&sort=-duration", "after": after}
        answer = (await browser.post("/api/bulk/pause", body)).json()
        after, done, asked = answer["next"], done + answer["done"], asked + 1
    assert (done, asked) == (10, 3)
    counts = await store.count()
    assert counts[ExecutionState.PAUSED] == 20
    assert counts[ExecutionState.COMPLETED] == 140


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"ids": ["a"] * 201},
        {"ids": ["a"], "filter": "state=waiting"},
        {"ids": ["../x"]},
        {"ids": "a"},
        {"filter": ""},
        {"filter": "wokflow=nothing-like-this"},
        {"filter": "state=waiting&wokflow=nothing-like-this"},
        {"filter": "workflow=&sort=created&limit=5&counts=0"},
        {"filter": "state=waiting", "all": True},
        {"ids": ["a"], "all": True},
        {"all": False},
        {"all": 1},
    ],
)
async def test_a_bulk_request_says_exactly_whom_it_means(
    browser: Browser, store: CheckpointStore, body: dict[str, Any]
) -> None:
    await store.create(created("a", state="waiting"))
    assert (await browser.post("/api/bulk/cancel", body)).status == 400
    assert (await browser.post("/api/bulk/retry", body)).status == 404
    assert (await store.load("a")).head.state == "waiting"


async def test_everything_there_is_must_be_asked_for_by_that_name(browser: Browser, store: CheckpointStore) -> None:
    for id in ("a", "b"):
        await store.create(created(id, state="waiting"))
    assert (await browser.post("/api/bulk/pause", {"all": True})).json()["done"] == 2
    assert (await store.count())[ExecutionState.PAUSED] == 2


async def test_looking_makes_no_owner(app: DashboardApp, browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("one"))
    for path in ("/api/executions", "/api/executions/one", "/api/workers", "/api/charts"):
        assert (await browser.get(path)).status == 200
    assert await store.owners() == []


def test_a_request_carries_an_object_or_nothing() -> None:
    assert body_of(b"") == {}
    assert body_of(b'{"hold": true}') == {"hold": True}
    for data in (b"[1]", b"{", b"[" * 100_000, b'{"state": NaN}', b'{"state": -Infinity}', b"\xff"):
        with pytest.raises(ConfigError, match="JSON object"):
            body_of(data)


async def test_who_leaves_in_the_middle_of_a_request_is_no_defect(browser: Browser) -> None:
    assert (await browser.leave("/api/executions/x/pause")).status == 400
