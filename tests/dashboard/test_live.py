"""Server-sent events: told when something changed, seldom enough, and again when the store is back."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from longrun.dashboard import DashboardApp, live
from longrun.errors import StoreUnavailableError
from longrun.stored import Query
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import Browser
from tests.dashboard.samples import created, long_run

pytestmark = pytest.mark.timeout(30)


async def test_a_list_is_told_again_when_something_changes(browser: Browser, store: CheckpointStore) -> None:
    async with browser.stream("/api/live/executions") as events:
        name, data = await anext(events)
        assert (name, data["total"]) == ("data", 0)
        await store.create(created("one"))
        name, data = await anext(events)
        assert [one["id"] for one in data["executions"]] == ["one"]
        assert data["now"]


async def test_what_did_not_change_is_not_told_and_changes_come_at_most_four_times_a_second(
    store: CheckpointStore,
) -> None:
    looks = 0
    told: list[float] = []

    async def look() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return {"looks": looks // 2}

    ring = None

    class Loud:
        """A store whose watcher rings all the time."""

        def watch(self, changed: Any) -> Any:
            nonlocal ring
            ring = changed
            return lambda: None

    stream: Any = live.changes(Loud(), look, lambda: "now")  # type: ignore[arg-type]
    began = time.monotonic()
    async for _ in stream:
        told.append(time.monotonic())
        assert ring is not None
        ring()
        if len(told) == 3:
            break
    await stream.aclose()
    assert looks == 4  # twice the same in between, and only changes told
    assert told[-1] - began >= 3 * live.SHORTEST


async def test_a_slow_store_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        raise EOFError

    class Quiet:
        def watch(self, changed: Any) -> Any:
            return lambda: None

    async def look() -> dict[str, Any]:
        with anyio.move_on_after(0.2):
            await anyio.Event().wait()
        return {}

    monkeypatch.setattr("longrun.dashboard.live.anyio.sleep", nap)
    stream: Any = live.changes(Quiet(), look, lambda: "now")  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        async for _ in stream:
            pass
    assert naps[0] >= 0.2 * live.SHARE


async def test_one_execution_brings_its_new_rows_and_its_detail(browser: Browser, store: CheckpointStore) -> None:
    long_run(store, "long", 10)
    async with browser.stream("/api/live/executions/long?after=7") as events:
        _, data = await anext(events)
        assert [row["seq"] for row in data["rows"]] == [8, 9, 10]
        assert data["detail"]["resume"]["step"] == 9
        assert data["refold"] is False


async def test_one_that_went_on_far_meanwhile_asks_to_be_folded_anew(browser: Browser, store: CheckpointStore) -> None:
    long_run(store, "long", 400)
    async with browser.stream("/api/live/executions/long?after=7") as events:
        _, data = await anext(events)
        assert (data["rows"], data["refold"]) == ([], True)


async def test_an_execution_that_is_deleted_ends_its_stream(browser: Browser, store: CheckpointStore) -> None:
    await store.create(created("one"))
    async with browser.stream("/api/live/executions/one") as events:
        await anext(events)
        await store.delete(["one"])
        name, data = await anext(events)
        assert name == "gone"
        assert "no execution" in data["error"]
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_store_that_is_away_is_told_of_and_the_stream_goes_on_when_it_is_back(
    browser: Browser, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store.backend

    def away(query: Query) -> Any:
        raise StoreUnavailableError(backend.kind, "the disk is on fire")

    monkeypatch.setattr(live, "IDLE", 0.05)  # nothing announces it: the next look finds it
    async with browser.stream("/api/live/executions") as events:
        await anext(events)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "find", away)
            name, data = await anext(events)
            assert name == "problem"
            assert "the disk is on fire" in data["error"]
            assert (await browser.get("/api/executions")).status == 503
        assert (await anext(events))[0] == "data"


async def test_workers_are_told_live(browser: Browser, app: DashboardApp) -> None:
    async with browser.stream("/api/live/workers") as events:
        assert (await anext(events))[1]["workers"] == []


async def test_a_bad_filter_is_refused_before_the_stream_begins(browser: Browser) -> None:
    assert (await browser.get("/api/live/executions?state=nonsense")).status == 400
    assert (await browser.get("/api/live/executions/no..body")).status == 400


async def test_a_head_request_of_a_stream_ends(browser: Browser) -> None:
    with anyio.fail_after(5):
        answer = await browser.ask("HEAD", "/api/live/executions")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body == b""
