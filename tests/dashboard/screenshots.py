"""Makes the two pictures of the README: a store that looks like a working day, in a real browser.

python -m tests.dashboard.screenshots
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from playwright.async_api import async_playwright

from longrun import Executor, ExecutorConfig, NonRetryable, RetryPolicy, Sleep, StepContext, StepRegistry, WaitFor
from longrun.dashboard import create_app
from tests.dashboard.asgi import TOKEN
from tests.dashboard.chromium import FLAGS, HOW, find_chromium
from tests.dashboard.served import Served

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
WINDOW: Any = {"width": 1180, "height": 800}
SCREENS: Any = (("light", "", "a.id"), ("dark", "#/run/import-2026-11-16", ".gantt li"))
IMPORTS = (("us-east", 400, 0.1), ("eu-west", 900, 0.05), ("eu-west", 1200, 0.12))
"""Region, pages, and seconds for each page."""
CONFIG = ExecutorConfig(checkpoint_interval=0.1, heartbeat_interval=0.5, drain_timeout=0)
STEPS = ("fetch", "parse", "enrich", "cool_down", "validate", "crawl", "load", "report", "notify")
registry = StepRegistry()


async def work(state: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep(state["pace"])
    return state


async def enrich(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep(state["pace"])
    if ctx.attempt < 3 and state["pace"]:
        raise ConnectionError("the directory did not answer")
    return state


async def cool_down(state: dict[str, Any]) -> Sleep:
    return Sleep(3 * state["pace"], state)


async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for page in ctx.each("pages", range(state["pages"]), every=1):
        ctx.progress(page + 1, state["pages"], f"fetching page {page + 1}")
        await anyio.sleep(state["pause"])
    return state


async def approve(state: dict[str, Any]) -> WaitFor:
    return WaitFor("approve", state)


async def charge(state: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep(0.3)
    if state.get("broke"):
        raise NonRetryable("the card was refused")
    return state


own: dict[str, Any] = {"enrich": enrich, "cool_down": cool_down, "crawl": crawl}
for name in STEPS:
    registry.register(name, own.get(name, work), retry=RetryPolicy(initial=0.2, jitter=False))
registry.register("approve", approve)
registry.register("charge", charge)
registry.workflow("nightly-import", STEPS)
registry.workflow("approval", ["fetch", "approve", "report"])
registry.workflow("invoice", ["fetch", "parse", "charge", "notify"])


async def a_day(executor: Executor) -> None:
    """What the list shows: imports that run, one on hold, approvals that wait, invoices that failed."""
    quick = {"pace": 0.0, "pages": 20, "pause": 0.0}
    for n in range(8):
        await (await executor.start("nightly-import", quick, id=f"import-2026-11-{n + 6:02}")).result()
    for n in range(5):
        state = {"pace": 0.1, "broke": n % 2 == 0}
        run = await executor.start("invoice", state, id=f"invoice-2026-{n}", metadata={"customer": "Müller & Söhne"})
        await run.wait()
    for n in range(2):
        await executor.start("approval", quick, id=f"approval-{n}", metadata={"asked_by": "payments"})
    for n, (region, pages, pause) in enumerate(IMPORTS):
        day = f"2026-11-{n + 14}"
        state = {"pace": 0.7, "pages": pages, "pause": pause}
        await executor.start("nightly-import", state, id=f"import-{day}", metadata={"day": day, "region": region})
    await anyio.sleep(16)
    await executor.pause("import-2026-11-14", hold=True)


async def photograph(address: str) -> None:
    async with async_playwright() as driver:
        path = find_chromium(driver.chromium.executable_path)
        if path is None:
            raise SystemExit(HOW)
        browser = await driver.chromium.launch(executable_path=path, args=FLAGS)
        for scheme, place, sign in SCREENS:
            context = await browser.new_context(locale="en-GB", color_scheme=scheme, viewport=WINDOW)
            page = await context.new_page()
            await page.goto(f"{address}?token={TOKEN}")
            await page.wait_for_selector("a.id")
            await page.goto(f"{address}{place}")
            await page.wait_for_selector(sign)
            await anyio.sleep(1.5)  # the first live update
            await page.screenshot(path=IMAGES / f"dashboard-{scheme}.png")
            await context.close()
        await browser.close()


async def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        async with Executor(registry, store=f"sqlite:///{place}/day.db", config=CONFIG) as executor:
            await a_day(executor)
            async with create_app(executor.store, token=TOKEN, allow_control=True) as app:
                with Served(app) as served:
                    await photograph(served.address)
    print(f"made in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    anyio.run(main)
