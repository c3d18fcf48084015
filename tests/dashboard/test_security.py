"""Who may ask, and from where: every route and method, without a token, with a wrong one, from elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from longrun import ConfigError, MemoryCheckpointStore
from longrun.dashboard import DashboardApp, create_app
from longrun.stores.store import CheckpointStore
from tests.dashboard.asgi import HOST, TOKEN, Browser
from tests.dashboard.samples import created

PATHS = sorted(
    {
        route.path.replace("{id}", "one").replace("{seq}", "1").replace("{verb}", "pause").replace("{name}", "main.js")
        for route in DashboardApp(MemoryCheckpointStore(), token=TOKEN).routes
    }
    | {"/api/nothing-here"}
)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
EVERYTHING = list(itertools.product(PATHS, METHODS))
STRANGERS: dict[str, dict[str, str | None]] = {
    "no token": {"authorization": None},
    "a wrong token": {"authorization": "Bearer not-the-token-at-all"},
    "an empty token": {"authorization": "Bearer "},
    "a wrong cookie": {"authorization": None, "cookie": "longrun_000000000000=a-token-for-the-tests"},
    "another scheme": {"authorization": f"Basic {TOKEN}"},
}
ELSEWHERE: dict[str, dict[str, str | None]] = {
    "a foreign Host": {"host": "evil.example"},
    "a foreign Host with our name in it": {"host": "127.0.0.1.evil.example:8765"},
    "no Host": {"host": None},
    "a Host with a path": {"host": "127.0.0.1:8765/x"},
    "a foreign Origin": {"origin": "https://evil.example"},
    "the Origin of another port": {"origin": "http://127.0.0.1:9999"},
    "an opaque Origin": {"origin": "null"},
    "an Origin that is no address": {"origin": "http://[::1"},
    "an Origin with brackets around anything": {"origin": "http://[zz]"},
    "an Origin with a path": {"origin": f"http://{HOST}/x"},
    "another site": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    "another port of this machine": {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
}


def test_the_list_of_routes_is_the_whole_application(store_free_app: DashboardApp) -> None:
    """Should a route be added, the tests below ask it too."""
    assert {"/", "/api/executions", "/api/executions/one/pause", "/api/bulk/pause", "/api/live/workers"} <= set(PATHS)
    assert len(PATHS) == len(store_free_app.routes) + 1


@pytest.fixture
def store_free_app() -> DashboardApp:
    return DashboardApp(MemoryCheckpointStore(), token=TOKEN)


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_no_route_answers_without_the_token(app: DashboardApp, stranger: str) -> None:
    browser = Browser(app)
    for path, method in EVERYTHING:
        answer = await browser.ask(method, path, headers={"x-longrun": "1", **STRANGERS[stranger]})
        assert answer.status == 401, (path, method)
        assert TOKEN not in answer.text + str(answer.headers)


@pytest.mark.parametrize("place", ELSEWHERE)
async def test_no_route_answers_another_site_even_with_the_token(app: DashboardApp, place: str) -> None:
    browser = Browser(app)
    for path, method in EVERYTHING:
        answer = await browser.ask(method, path, headers={"x-longrun": "1", **ELSEWHERE[place]})
        assert answer.status == 403, (path, method)


async def test_no_write_passes_without_the_header_that_other_sites_cannot_send(
    app: DashboardApp, store: CheckpointStore
) -> None:
    await store.create(created("one", state="paused"))
    for path, method in EVERYTHING:
        if method in ("GET", "HEAD"):
            continue
        answer = await Browser(app).ask(method, path)
        assert answer.status == 403, (path, method)
    assert (await store.load("one")).messages == ()


async def test_other_methods_than_the_documented_are_not_there(browser: Browser) -> None:
    for path, method in EVERYTHING:
        if method in ("PUT", "PATCH", "DELETE", "OPTIONS"):
            answer = await browser.ask(method, path, headers={"x-longrun": "1"})
            assert answer.status in (404, 405), (path, method)


async def test_a_dashboard_is_read_only_unless_control_is_allowed(store: CheckpointStore) -> None:
    await store.create(created("one", state="paused"))
    async with create_app(store, token=TOKEN) as app:
        browser = Browser(app)
        assert (await browser.get("/api/overview")).json()["control"] is False
        for verb in ("pause", "resume", "cancel", "retry", "signal", "fork"):
            answer = await browser.post(f"/api/executions/one/{verb}", {"name": "go"})
            assert answer.status == 403
            assert "--allow-control" in answer.json()["error"]
        assert (await browser.post("/api/bulk/cancel", {"ids": ["one"]})).status == 403
    assert (await store.load("one")).messages == ()
    assert (await store.owners()) == []


async def test_the_address_with_the_token_sets_a_strict_cookie_which_then_opens_everything(app: DashboardApp) -> None:
    stranger = Browser(app, headers={"authorization": ""})
    answer = await stranger.get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert answer.status == 200
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert TOKEN not in answer.text
    assert 'content="0; url=./"' in answer.text
    entered = {"cookie": cookie.split(";")[0]}
    assert (await stranger.get("/", **entered)).text.startswith("<!doctype html>")
    assert (await stranger.get("/api/overview", **entered)).status == 200


async def test_a_wrong_token_in_the_address_is_refused_and_only_the_page_takes_one(app: DashboardApp) -> None:
    stranger = Browser(app, headers={"authorization": ""})
    for path in ("/?token=wrong", "/?token=", f"/api/overview?token={TOKEN}", f"/static/main.js?token={TOKEN}"):
        answer = await stranger.get(path)
        assert answer.status == 401, path
        assert "set-cookie" not in answer.headers


async def test_a_link_from_another_site_may_open_the_page_but_nothing_else(browser: Browser) -> None:
    link: dict[str, Any] = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await browser.get("/", **link)).status == 200
    assert (await browser.get("/api/overview", **link)).status == 403


async def test_our_own_page_passes(browser: Browser) -> None:
    ours = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert (await browser.get("/api/overview", **ours)).status == 200
    assert (await browser.post("/api/bulk/pause", {"ids": []}, **ours)).status == 200


async def test_every_answer_is_strict_with_the_browser(browser: Browser) -> None:
    for path in ("/", "/static/main.js", "/api/overview", "/api/executions/nobody", "/api/nothing-here"):
        headers = (await browser.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] in ("no-store", "no-cache")


async def test_the_page_holds_no_inline_script_or_style_and_nothing_from_elsewhere(browser: Browser) -> None:
    page = (await browser.get("/")).text
    assert "<script>" not in page
    assert "style=" not in page
    assert "http" not in page
    assert page.count("<script") == 1


async def test_no_file_outside_the_static_ones_can_be_had(browser: Browser) -> None:
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "nothing.js", "", ".", "a" * 300 + ".js"):
        assert (await browser.get(f"/static/{name}")).status == 404, name


async def test_a_websocket_is_closed_at_once(app: DashboardApp) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/", "headers": []}, _nothing, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def _nothing() -> Any:
    raise AssertionError


async def test_it_works_mounted_under_a_path_of_another_application_by_names_that_are_allowed(
    store: CheckpointStore,
) -> None:
    await store.create(created("one"))
    dashboard = create_app(store, token=TOKEN, hosts=["ops.example.com"])
    outer = Starlette(routes=[Mount("/longrun", app=dashboard)])
    async with dashboard:
        browser = Browser(outer, headers={"host": "ops.example.com"})
        entered = await browser.get(f"/longrun/?token={TOKEN}", authorization=None)
        assert "Path=/longrun" in entered.headers["set-cookie"]
        assert (await browser.get("/longrun/")).status == 200
        assert (await browser.get("/longrun/api/executions/one")).json()["execution"]["id"] == "one"
        assert (await browser.get("/longrun/", host="127.0.0.1:8000")).status == 200
        assert (await browser.get("/longrun/", host="other.example.com")).status == 403


async def test_mounted_without_its_lifespan_it_opens_its_store_at_the_first_request() -> None:
    dashboard = create_app("memory:", token=TOKEN)
    assert (await Browser(dashboard).get("/api/overview")).status == 200
    await dashboard.__aexit__(None, None, None)


async def test_a_request_that_comes_late_does_not_open_the_store_again() -> None:
    """Nobody would close it; entered once more, it answers."""
    dashboard = create_app("memory:", token=TOKEN)
    async with dashboard:
        assert (await Browser(dashboard).get("/api/overview")).status == 200
    assert (await Browser(dashboard).get("/api/overview")).status == 503
    async with dashboard:
        assert (await Browser(dashboard).get("/api/overview")).status == 200


@pytest.mark.parametrize("token", ["short", "with space in the middle", "ümlaut-ümlaut-ümlaut", "x" * 201])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_app("memory:", token=token)
    assert token not in str(caught.value)


def test_every_application_without_a_token_makes_its_own() -> None:
    first, second = create_app("memory:").token, create_app("memory:").token
    assert first != second
    assert len(first) >= 40
    assert first not in repr(create_app("memory:", token=first))
