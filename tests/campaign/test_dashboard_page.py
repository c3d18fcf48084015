"""The page in a real browser: what it shows, what it does, and what it never does with hostile text."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import attrs
import pytest

from longrun import (
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    WaitFor,
)
from longrun.dashboard import DashboardApp, create_app
from longrun.errors import StoreUnavailableError
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import TOKEN
from tests.dashboard.chromium import FLAGS, HOW, find_chromium
from tests.dashboard.samples import created, long_run, many
from tests.dashboard.served import Served

playwright = pytest.importorskip("playwright.async_api", reason="pip install 'playwright>=1.50,<1.65'")

pytestmark = [pytest.mark.xdist_group("dashboard-page"), pytest.mark.timeout(90)]  # one browser for all of them
HOSTILE = "<img src=x onerror=alert(1)>\"'&<script>alert(2)</script>"
WAIT = 30_000
registry = StepRegistry()


@registry.step
async def fetch(state: dict[str, Any]) -> Any:
    return Sleep(0.05, {**state, "rows": [1, 2]})


@registry.step(retry=RetryPolicy(max_attempts=3, initial=0.01))
async def flaky(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    if ctx.attempt < 3:
        raise ValueError("not yet")
    return {**state, "rows": [1, 2, 3]}


@registry.step
async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for page in ctx.each("pages", range(state["pages"]), every=1):
        ctx.progress(page + 1, state["pages"], f"page {page + 1}")
        await anyio.sleep(0.05)
    return state


@registry.step
async def ask(state: dict[str, Any]) -> Any:
    return WaitFor("go", state)


@registry.step
async def done(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "signal": ctx.signal}


registry.workflow("job", [fetch, flaky, crawl, done])
registry.workflow("ask", [ask, done])
CONFIG = ExecutorConfig(checkpoint_interval=0.05, heartbeat_interval=0.1, lease_ttl=30, drain_timeout=0)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Playwright knows asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        path = find_chromium(driver.chromium.executable_path)
        if path is None:
            pytest.skip(HOW)
        browser = await driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
async def tab(chromium: Any) -> AsyncIterator[Any]:
    """One tab for all: a new one for each test would take longer than the test."""
    context = await chromium.new_context(locale="en-GB")
    tab = await context.new_page()
    tab.set_default_timeout(WAIT)
    yield tab
    await context.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as server:
        yield server


class Visit:
    """A page that is open on a dashboard, and everything its console said."""

    def __init__(self, page: Any, served: Served) -> None:
        self.page, self.served = page, served
        self.trouble: list[str] = []
        self._ears = {
            "pageerror": lambda error: self.trouble.append(str(error)),
            "dialog": lambda dialog: self.trouble.append(f"dialog: {dialog.message}"),
            "console": self._heard,
        }
        for name, ear in self._ears.items():
            page.on(name, ear)

    async def leave(self) -> None:
        """Nothing of this visit is left for the next."""
        for name, ear in self._ears.items():
            self.page.remove_listener(name, ear)
        await self.page.goto("about:blank")
        await self.page.context.clear_cookies()

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and "net::ERR" not in message.text:
            self.trouble.append(message.text)

    async def enter(self, place: str = "") -> Any:
        await self.page.goto(f"{self.served.address}?token={TOKEN}")
        await self.page.wait_for_selector("#nav a")
        if place:
            await self.go(place)
        return self.page

    async def go(self, place: str) -> None:
        await self.page.evaluate("place => { location.hash = place }", place)

    async def press(self, selector: str) -> None:
        """Put the mouse's button down on something and keep it there; once more if it moved away from the mouse."""
        while True:
            await self.page.hover(selector)
            await self.page.mouse.down()
            if await self.page.locator(selector).evaluate("one => one.matches(':active')"):
                return
            await self.page.mouse.up()

    async def see(self, selector: str, text: str) -> None:
        await self.page.locator(selector).filter(has_text=text).first.wait_for()


@pytest.fixture
async def store() -> AsyncIterator[CheckpointStore]:
    async with MemoryCheckpointStore() as store:
        yield store


@pytest.fixture
async def served(server: Served, store: CheckpointStore) -> AsyncIterator[Served]:
    async with create_app(store, token=TOKEN, allow_control=True) as server.app:
        yield server


@pytest.fixture
async def visit(tab: Any, served: Served) -> AsyncIterator[Visit]:
    await tab.set_viewport_size({"width": 1200, "height": 900})
    visit = Visit(tab, served)
    yield visit
    await visit.leave()
    assert visit.trouble == []


async def ids(page: Any) -> list[str]:
    found: list[str] = await page.locator("table.runs a.id").all_inner_texts()
    return found


# --- the list ---------------------------------------------------------------------------------------------------------


async def test_an_empty_store_says_how_to_begin_and_fills_by_itself(visit: Visit, store: CheckpointStore) -> None:
    page = await visit.enter()
    await visit.see(".empty", "Nothing here yet")
    await store.create(created("first"))
    await page.wait_for_selector("a.id")
    assert await ids(page) == ["first"]
    assert await page.locator(".empty").count() == 0


async def test_filters_counts_and_order_stand_in_the_address(visit: Visit, store: CheckpointStore) -> None:
    many(store, 120)
    page = await visit.enter()
    await visit.see(".pages", "1–50 of 120")
    await visit.see(".chip.failed", "18")
    await page.click(".chip.failed")
    await visit.see(".pages", "1–18 of 18")
    assert "state=failed" in page.url
    await page.fill("input[type=search]", "run-00001")
    await visit.see(".pages", "1–3 of 3")
    assert await ids(page) == ["run-000016", "run-000015", "run-000014"]
    await page.click(".chip.failed")
    await page.fill("input[type=search]", "")
    await page.click("th button:has-text('Started')")
    await visit.see("tbody tr:first-child a.id", "run-000000")
    assert "sort=created" in page.url
    await page.reload()
    await visit.see("tbody tr:first-child a.id", "run-000000")
    await visit.see(".pages", "Next →")
    assert await page.locator("button:has-text('Older')").count() == 0, "what comes next is not older in this order"


async def test_nothing_moves_and_no_press_is_lost_while_matches_are_counted(
    visit: Visit, store: CheckpointStore
) -> None:
    """A press is a button that goes down and comes up on the same thing, wherever an answer comes in between."""
    many(store, 120)
    page = await visit.enter()
    await visit.see(".pages", "1–50 of 120")
    counted = anyio.Event()

    async def hold(request: Any) -> None:
        await counted.wait()
        await request.continue_()

    await page.route("**/api/live/executions*", hold)
    await page.fill("input[type=search]", "run-00001")
    await visit.see(".pages", "1–10 of …")
    pressed = ".chip, .actions button, th button, .pages"
    places = f"() => [...document.querySelectorAll('{pressed}')].map(one => one.offsetTop)"
    before = await page.evaluate(places)
    assert await page.locator(".actions button:not([disabled])").count() == 0, "how many it would be is not known yet"
    await visit.press(".chip.failed")
    counted.set()
    await visit.see(".pages", "1–10 of 10")
    assert await page.evaluate(places) == before
    await page.mouse.up()
    await visit.see(".pages", "1–3 of 3")
    await page.unroute_all()


async def test_two_states_chosen_at_once_are_both_chosen(visit: Visit, store: CheckpointStore) -> None:
    many(store, 120)
    page = await visit.enter()
    await visit.see(".pages", "1–50 of 120")
    await page.evaluate("['failed', 'cancelled'].forEach(name => document.querySelector(`.chip.${name}`).click())")
    assert await page.locator(".chip[aria-pressed=true]").count() == 2, "before the answer has come"
    assert "state=failed&state=cancelled" in page.url


async def test_pages_go_on_and_back_and_a_filter_without_matches_offers_to_be_cleared(
    visit: Visit, store: CheckpointStore
) -> None:
    many(store, 120)
    page = await visit.enter()
    await visit.see(".pages", "1–50 of 120")
    await page.click("button:has-text('Older')")
    await visit.see(".pages", "51–100 of 120")
    await page.click("button:has-text('Older')")
    await visit.see(".pages", "101–120 of 120")
    assert await page.locator("button:has-text('Older')").is_disabled()
    await page.click("button:has-text('Newer')")
    await visit.see(".pages", "51–100 of 120")
    await visit.go("#/?text=nothing-like-it")
    await visit.see(".empty", "No execution matches")
    await page.click("button:has-text('Clear the filters')")
    await visit.see(".pages", "of 120")


async def test_hostile_text_is_shown_as_text_everywhere(visit: Visit, store: CheckpointStore) -> None:
    made = created("evil", state="failed", workflow=HOSTILE, queue=HOSTILE, metadata={HOSTILE: HOSTILE}, error=HOSTILE)
    named = attrs.evolve(made, definition=attrs.evolve(made.definition, steps=(HOSTILE, HOSTILE, HOSTILE)))
    await store.create(named)
    page = await visit.enter()
    await visit.see("td.name", HOSTILE)
    await page.click("a.id")
    await visit.see("pre.bad", HOSTILE)
    await visit.see("dd", HOSTILE)
    await visit.go("#/charts")
    await page.wait_for_selector("svg.chart")
    assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0


async def test_several_are_cancelled_at_once_after_a_confirmation(visit: Visit, store: CheckpointStore) -> None:
    for n in range(3):
        await store.create(created(f"run-{n}", state="waiting"))
    page = await visit.enter()
    await page.check("input[aria-label='Choose run-0']")
    await page.check("input[aria-label='Choose run-2']")
    await visit.see(".actions", "2 chosen")
    await page.click(".actions button.danger")
    await visit.see("dialog h2", "Cancel 2 executions?")
    await page.click("dialog button.danger")
    await visit.see(".toast", "cancel: 2 done")
    await visit.see(".chip.cancelled", "2")
    assert (await store.load("run-1")).head.state == "waiting"
    await page.click(".actions button:has-text('Pause')")
    await visit.see("dialog h2", "Pause 3 executions?")
    await page.click("dialog button[type=submit]")
    await visit.see(".toast", "pause: 1 done, 2 left as they are")
    await page.click(".chip.paused")
    await visit.see(".actions", "all 1 that match")
    await page.click(".actions button:has-text('Resume')")
    await page.click("dialog button[type=submit]")
    await visit.see(".toast", "resume: 1 done")
    assert (await store.load("run-1")).head.state != "paused"


async def test_an_address_with_a_filter_that_does_not_exist_shows_nothing(visit: Visit, store: CheckpointStore) -> None:
    await store.create(created("run"))
    page = await visit.enter("#/?wokflow=import")
    await visit.see(".empty.bad", "wokflow")
    assert await ids(page) == []
    visit.trouble = [line for line in visit.trouble if "400" not in line]


# --- one execution ----------------------------------------------------------------------------------------------------


async def test_a_running_execution_is_followed_live_to_its_end(visit: Visit, store: CheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        run = await executor.start("job", {"pages": 60}, id="job", metadata={"who": "ada"})
        page = await visit.enter("#/run/job")
        await visit.see(".title .badge", "running")
        await visit.see(".resume", "would resume at step 3 of 4 (crawl), pages: from item")
        await visit.see(".resume", "Last checkpoint")
        await visit.see(".big", "/60")
        await visit.see(".big", "left")
        await visit.see(".gantt .now", "crawl")
        assert await page.locator(".gantt .flight").count() == 1
        assert await page.locator(".gantt li.sleep rect.wait").count() == 1
        assert await page.locator(".gantt li[data-row='3'] rect").count() == 3  # three attempts
        await visit.see(".gantt .pending", "done")
        await run.result()
        await visit.see(".title .badge", "completed")
        assert await page.locator(".gantt .flight").count() == 0
        await visit.see(".big", "100%")


async def test_a_row_shows_its_input_and_output_and_two_checkpoints_their_difference(
    visit: Visit, store: CheckpointStore
) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        await (await executor.start("job", {"pages": 1}, id="job")).result()
    page = await visit.enter("#/run/job")
    await page.click(".gantt li[data-row='3'] button")
    await visit.see(".panel h3", "#3 step of flaky")
    await visit.see(".panel", "3 attempts")
    before, after = await page.locator(".panel pre").all_inner_texts()
    assert "3" not in before.replace("pages", "")
    assert "3" in after
    await page.check("input[aria-label='from checkpoint 1']")
    await page.check("input[aria-label='to checkpoint 3']")
    await page.click("button:has-text('Show what changed')")
    await visit.see(".diff", 'state["rows"]')
    await visit.see(".diff ins", "[1, 2, 3]")


async def test_it_is_paused_resumed_and_signalled_with_json(visit: Visit, store: CheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        run = await executor.start("ask", {}, id="ask")
        page = await visit.enter("#/run/ask")
        await visit.see(".title .badge", "waiting")
        await page.click("button:has-text('Pause')")
        await visit.see(".title .badge", "paused (held)")
        await page.click("button:has-text('Resume')")
        await visit.see(".title .badge", "waiting")
        await page.click("button:has-text('Signal')")
        assert await page.input_value("dialog input") == "go"
        await page.fill("dialog textarea", "{nonsense")
        await page.click("dialog button[type=submit]")
        await visit.see(".complaint", "is no JSON")
        await page.fill("dialog textarea", '{"answer": 42}')
        await page.click("dialog button[type=submit]")
        await visit.see(".title .badge", "completed")
        assert (await run.result())["signal"] == {"answer": 42}


ORDER = 1234567890123456789
"""More digits than a number of JavaScript has."""


async def test_large_numbers_are_sent_digit_by_digit(visit: Visit, store: CheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        run = await executor.start("ask", {}, id="ask")
        page = await visit.enter("#/run/ask")
        await page.click("button:has-text('Signal')")
        await page.fill("dialog textarea", f'{{"order": {ORDER}, "rate": 1.0}}')
        await page.click("dialog button[type=submit]")
        await visit.see(".title .badge", "completed")
        assert (await run.result())["signal"] == {"order": ORDER, "rate": 1.0}
    await page.locator(".states tbody tr", has_text="#2").locator("button").click()
    await page.fill("dialog input", "second-try")
    await page.fill("dialog textarea", f'{{"order": {ORDER}}}')
    await page.click("dialog button[type=submit]")
    await visit.see("h1", "second-try")
    assert b"%d" % ORDER in ((await store.load("second-try")).boundary.data or b"")


async def test_a_wait_is_drawn_once_and_what_nobody_runs_is_called_interrupted(
    visit: Visit, store: CheckpointStore
) -> None:
    await store.create(created("left", state="running"))
    async with Executor(registry, store=store, config=CONFIG) as executor:
        await (await executor.start("ask", {}, id="asks")).wait("waiting")
        page = await visit.enter("#/run/asks")
        await visit.see(".gantt li", "waits for go")
        assert await page.locator(".gantt .what", has_text="done").count() == 1
        assert await page.locator(".gantt rect.wait").count() == 1
    await visit.go("#/run/left")
    await visit.see(".title .badge", "running (interrupted)")
    await visit.see(".gantt li.now", "interrupted")
    await visit.go("#/")
    await visit.see("td.state .badge", "running (interrupted)")


async def test_a_fork_from_a_checkpoint_opens_the_new_execution(visit: Visit, store: CheckpointStore) -> None:
    async with Executor(registry, store=store, config=CONFIG) as executor:
        await (await executor.start("job", {"pages": 1}, id="job")).result()
    page = await visit.enter("#/run/job")
    await page.locator(".states tbody tr", has_text="#2").locator("button").click()
    await page.fill("dialog input", "second-try")
    await page.click("dialog button[type=submit]")
    await visit.see("h1", "second-try")
    await visit.see(".hint", "none is alive")
    assert (await store.load("second-try")).head.step == 1


async def test_without_control_nothing_can_be_pressed(visit: Visit, store: CheckpointStore) -> None:
    await store.create(created("one", state="waiting"))
    async with create_app(store, token=TOKEN) as visit.served.app:
        page = await visit.enter()
        await visit.see("#mode", "read-only")
        await visit.see("td.name", "one")
        assert await page.locator(".actions button, input[type=checkbox]").count() == 0
        await visit.go("#/run/one")
        await visit.see(".title .badge", "waiting")
        assert await page.locator(".actions button:not(:has-text('Show'))").count() == 0
        await page.goto("about:blank")  # before its dashboard is gone


async def test_a_run_of_ten_thousand_steps_is_drawn_folded_and_stays_quick(
    visit: Visit, store: CheckpointStore
) -> None:
    long_run(store, "long", 10_000)
    page = await visit.enter("#/run/long")
    await visit.see(".gantt .fold", "rows 1–")
    assert await page.locator(".gantt li").count() <= 500
    await visit.see(".resume", "step 10,000 of 10,000")
    await visit.press(".gantt .fold >> nth=0 >> button")
    await page.wait_for_timeout(1100)  # it grows every second, and a slow click must not be lost by that
    await page.mouse.up()
    await visit.see(".gantt li", "step-3")
    worst = await page.evaluate(
        """async () => {
            let worst = 0, last = performance.now();
            for (let n = 0; n < 60; n += 1) {
                await new Promise(requestAnimationFrame);
                const now = performance.now();
                worst = Math.max(worst, now - last);
                last = now;
            }
            return worst;
        }"""
    )
    assert worst < 1000


# --- the connection ---------------------------------------------------------------------------------------------------


async def test_it_rests_while_the_tab_is_hidden_and_catches_up_after(visit: Visit, store: CheckpointStore) -> None:
    page = await visit.enter()
    await visit.see("#link", "live")
    hide = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    await page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')) }", True)
    await visit.see("#link", "paused")
    await store.create(created("meanwhile"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.wait_for_timeout(1200)  # what must not happen has no event to wait for
    assert asked == []
    assert await ids(page) == []
    await page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')) }", False)
    await visit.see("a.id", "meanwhile")
    await visit.see("#link", "live")


async def test_it_finds_back_to_a_server_that_was_restarted(visit: Visit, store: CheckpointStore) -> None:
    await visit.enter()
    await visit.see("#link", "live")
    visit.served.stop()
    await visit.see("#link", "reconnecting")
    await store.create(created("meanwhile"))
    visit.served.start()
    await visit.see("a.id", "meanwhile")
    await visit.see("#link", "live")


async def test_a_server_with_another_token_is_explained(visit: Visit) -> None:
    await visit.enter()
    await visit.see("#link", "live")
    visit.served.stop()
    mine, visit.served.app = visit.served.app, DashboardApp(MemoryCheckpointStore(), token="another-token-than-before")
    visit.served.start()
    await visit.see(".empty.bad", "The token is missing")
    visit.served.app = mine
    visit.trouble = [line for line in visit.trouble if "401" not in line]


async def test_what_is_not_there_is_explained(visit: Visit) -> None:
    await visit.enter("#/run/nobody")
    await visit.see(".empty", "It is not there")
    await visit.see(".empty", "no execution 'nobody'")
    visit.trouble = [line for line in visit.trouble if "404" not in line]


@pytest.mark.parametrize("place", ["#/run/%E0%A4%A", "#/run/"])
async def test_an_address_that_names_nothing_is_explained(visit: Visit, place: str) -> None:
    await visit.enter(place)
    await visit.see(".empty", "It is not there")


@pytest.mark.parametrize("place", ["#/", "#/run/one", "#/workers"])
@pytest.mark.parametrize("asked", ["overview", "page"])
async def test_a_page_that_found_no_store_comes_back_by_itself(
    visit: Visit, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, place: str, asked: str
) -> None:
    await store.create(created("one", state="waiting"))
    page = await visit.enter("#/charts")
    await visit.see(".empty, figure", "start")

    async def away(*args: object, **options: object) -> Any:
        raise StoreUnavailableError("tested", "the connection is lost")

    with monkeypatch.context() as patched:
        for name in ("find", "load", "owners", "count"):
            patched.setattr(store, name, away)
        await visit.go(place)
        if asked == "overview":
            await page.reload()
        await visit.see(".empty.bad", "the connection is lost")
        await visit.see("#link", "not connected")
    await visit.see("main", "No process is registered" if place == "#/workers" else "one")
    await page.locator(".empty.bad").wait_for(state="detached")
    visit.trouble = [line for line in visit.trouble if "503" not in line]


async def test_workers_and_charts_have_their_pages(visit: Visit, store: CheckpointStore) -> None:
    many(store, 200, age=3000.0)
    page = await visit.enter("#/workers")
    await visit.see(".empty", "No process is registered")
    async with Executor(registry, store=store, config=CONFIG):
        await visit.see(".workers .badge", "alive")
        await visit.see(".workers .lease", "left")
        await page.set_viewport_size({"width": 360, "height": 800})
        for name, title in (("count", '"executions: "'), ("queues", '"queues: "')):
            label = f"getComputedStyle(document.querySelector('.workers td.{name}'), '::before').content"
            assert await page.evaluate(label) == title, "where there is no head, each value says what it is"
    await visit.go("#/charts?hours=1")
    await visit.see("figcaption", "200 in all")
    await visit.see("figcaption", "30 of 180")
    assert await page.locator("svg.chart rect.failed").count() > 5


# --- every screen -----------------------------------------------------------------------------------------------------


SCREENS = [("light", 360), ("dark", 360), ("dark", 768), ("light", 1280)]
PLACES = {"#/": "a.id", "#/run/long": ".gantt li", "#/workers": "h1", "#/charts": "svg.chart"}
HIDDEN = "Math.max(0, ...[...document.querySelectorAll('.scroll')].map(one => one.scrollWidth - one.clientWidth))"
"""How much of a table stands behind the edge of its place."""
PAPER = {"light": "rgb(246, 247, 249)", "dark": "rgb(14, 17, 22)"}


async def test_no_page_is_wider_than_its_screen(visit: Visit, store: CheckpointStore) -> None:
    now = time.time()
    for n, state in enumerate(("running", "failed", "paused", "waiting", "completed", "blocked", "initialized")):
        id = f"a-rather-long-name-of-an-execution-{state}-{n}" * 2
        await store.create(created(id, state=state, at=now - n, metadata={"note": "word " * 30}, error="bad\n" * 3))
    long_run(store, "long", 700)
    page = await visit.enter()
    for scheme, width in SCREENS:
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size({"width": width, "height": 800})
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[scheme]
        for place, sign in PLACES.items():
            await visit.go(place)
            await page.wait_for_selector(sign)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, (place, scheme, width)
            assert await page.evaluate(HIDDEN) == 0, (place, scheme, width)
            await photograph(page, f"{scheme}-{width}-{place.strip('#/').replace('/', '-') or 'list'}")
    await page.emulate_media(color_scheme="light")


async def photograph(page: Any, name: str) -> None:
    """For people to look at, if they say where to put it."""
    if shots := os.environ.get("LONGRUN_SCREENSHOTS"):
        await page.screenshot(path=f"{shots}/{name}.png")
