"""Secrets that sing: a password, a state and the text of an exception, and every place where they must not be heard.

Allowed are `Execution.error`, the error of `result()`, `show` and the dashboard's detail. Logs at every level, `repr`,
lists, `doctor`, metrics and the dashboard's other pages are not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from click.testing import CliRunner

from longrun import ExecutionFailedError, Executor, ExecutorConfig, RetryPolicy, StepContext, StepRegistry, open_store
from longrun.cli import main
from longrun.dashboard import create_app
from longrun.stored import Query
from tests import servers
from tests.dashboard.asgi import TOKEN, Browser
from tests.servers import PostgresServer, RedisServer, Source

STATE, ERROR, LOCAL, SIGNAL, MEMO = "canary-state", "canary-error", "canary-local", "canary-signal", "canary-memo"
CANARIES = (STATE, ERROR, LOCAL, SIGNAL, MEMO)
PASSWORD = "canary-s3cret"
CONFIG = ExecutorConfig(heartbeat_interval=0.1, checkpoint_interval=0.01)


class Ear(logging.Handler):
    """Hears every record of every logger, with its fields, its exception and its arguments."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"{record.getMessage()} {vars(record)!r}")
        if record.exc_info:
            self.heard.append(logging.Formatter().formatException(record.exc_info))


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    root = logging.getLogger()
    before = root.level
    root.addHandler(ear)
    root.setLevel(logging.DEBUG)
    yield ear
    root.removeHandler(ear)
    root.setLevel(before)


def registry(ready: anyio.Event | None = None) -> StepRegistry:
    """A workflow that sings of everything it knows; where `ready` is given, not before that."""
    registry = StepRegistry()

    @registry.step
    async def keep(ctx: StepContext, state: dict[str, str]) -> dict[str, str]:
        if ready is not None:
            await ready.wait()
        ctx.local["x"] = LOCAL
        await ctx.checkpoint(force=True)
        await ctx.once("memo", _memo)
        return {"secret": STATE}

    @registry.step(retry=RetryPolicy(max_attempts=2, initial=0.001))
    async def fail(state: dict[str, str]) -> dict[str, str]:
        raise RuntimeError(f"{ERROR} {state}")

    registry.workflow("sing", [keep, fail])
    return registry


async def _memo() -> str:
    return MEMO


def quiet(where: str, text: str, *allowed: str) -> None:
    for canary in (*CANARIES, PASSWORD):
        if canary not in allowed:
            assert canary not in text, f"{canary} in {where}: {text[:2000]}"


async def test_states_and_errors_are_heard_only_where_that_is_allowed(tmp_path: Path, ear: Ear) -> None:
    url, events, signalled = f"file:{tmp_path / 'store'}", list[Any](), anyio.Event()
    async with Executor(registry(signalled), store=url, config=CONFIG, on_event=events.append) as executor:
        run = await executor.start("sing", {"first": STATE}, id="a")
        await run.signal("later", {"payload": SIGNAL})
        signalled.set()
        with pytest.raises(ExecutionFailedError, match=ERROR):
            await run.result()
        info = await run.info()
        assert info.error is not None
        assert ERROR in info.error
        listed = await executor.list()
        history = await executor.history("a")
        raw = await executor.store.load("a")
        found = await executor.store.find(Query())
        for where, thing in {
            "Execution": info,
            "list()": listed,
            "history()": history,
            "handle": run,
            "Executor": executor,
            "store": executor.store,
            "Loaded": raw,
            "Stored": found,
            "events": events,
        }.items():
            quiet(f"repr of {where}", repr(thing))
    quiet("the logs", "\n".join(ear.heard))
    await check_dashboard(url)
    await anyio.to_thread.run_sync(check_commands, url)


async def check_dashboard(url: str) -> None:
    async with open_store(url) as store, create_app(store, token=TOKEN) as app:
        browser = Browser(app)
        for path in ("/", "/api/overview", "/api/executions", "/api/workers", "/api/charts", "/metrics"):
            answer = await browser.get(path)
            assert answer.status == 200, path
            quiet(f"the dashboard's {path}", answer.text)
        detail = await browser.get("/api/executions/a")
        assert ERROR in detail.text


def check_commands(url: str) -> None:
    for words in (["list"], ["list", "--json"], ["workers"], ["doctor"], ["doctor", "--json"], ["store", "info"]):
        result = CliRunner().invoke(main, [*words, "--store", url])
        quiet(" ".join(words), result.output)
    assert ERROR in CliRunner().invoke(main, ["show", "a", "--store", url]).output


@pytest.mark.parametrize("kind", ["postgres", "redis"])
async def test_the_password_of_a_store_that_works_is_heard_nowhere(
    kind: str, request: pytest.FixtureRequest, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the URL, and in the environment, of a server that takes it."""
    url = server_url(kind, request)
    assert PASSWORD in url
    async with Executor(registry(), store=url, config=CONFIG) as executor:
        run = await executor.start("sing", {})
        with pytest.raises(ExecutionFailedError):
            await run.result()
        quiet("repr", repr([executor, executor.store, executor.store.backend, run, executor.config]))
        quiet("describe()", json.dumps(dict(executor.store.backend.describe()), default=str))
    async with open_store(url) as store, create_app(store, token=TOKEN) as app:
        for path in ("/api/overview", "/api/workers", "/metrics"):
            quiet(f"the dashboard's {path}", (await Browser(app).get(path)).text)
    monkeypatch.setenv("LONGRUN_STORE", url)
    for words in (["list"], ["doctor"], ["doctor", "--json"], ["store", "info"], ["show", "nothing"], ["-v", "list"]):
        result = await anyio.to_thread.run_sync(CliRunner().invoke, main, words)
        quiet(" ".join(words), result.output)
    quiet("the logs", "\n".join(ear.heard))


def server_url(kind: str, request: pytest.FixtureRequest) -> str:
    if kind == "postgres":
        server: PostgresServer | Source = request.getfixturevalue("postgres_server")
        assert server.url is not None
        joint = "&" if "?" in server.url else "?"
        return f"{server.url}{joint}password={PASSWORD}"
    locked: RedisServer = request.getfixturevalue("locked_redis")
    return f"{locked.url}&password={PASSWORD}"


@pytest.fixture
def locked_redis() -> Iterator[RedisServer]:
    found = servers.find_redis(local=True)
    if not found:
        pytest.skip("no Redis or Valkey that can be started here")
    with RedisServer(found[0]) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", PASSWORD)
        yield server
        with redis.Redis.from_url(server.url, password=PASSWORD) as client:
            client.config_set("requirepass", "")
