"""A store of each kind that needs no server, and the command line in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from click.testing import CliRunner, Result

from longrun import EventType, Executor, schema
from longrun.cli import main
from tests.cli.sample_app import config, registry

ROOT = Path(__file__).parent.parent.parent
APP = "tests.cli.sample_app:registry"
PATIENCE = 60.0
LOOK_AGAIN = 0.05


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings but the test's own, and no log configuration left behind."""
    for name in [name for name in os.environ if name.startswith("LONGRUN_") or name in ("NO_COLOR", "FORCE_COLOR")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(tmp_path / "run"))
    for name, value in (
        ("CHECKPOINT_INTERVAL", "0.05"),
        ("HEARTBEAT_INTERVAL", "0.2"),
        ("LEASE_TTL", "5"),
        ("DRAIN_TIMEOUT", "5"),
    ):
        monkeypatch.setenv(f"LONGRUN_{name}", value)
    monkeypatch.chdir(tmp_path)
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["file", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file:{tmp_path / 'store'}" if request.param == "file" else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'store'}"


def call(*words: str, code: int = 0, stdin: str | None = None) -> Result:
    """Run a command in this process; it must end with `code`, and never with a traceback."""
    result = CliRunner().invoke(main, list(words), input=stdin, prog_name="longrun")
    assert "Traceback" not in result.output, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}"
    return result


def read(*words: str, code: int = 0) -> dict[str, Any]:
    """The document that a command prints with `--json`, checked against the schema."""
    document: dict[str, Any] = json.loads(call(*words, "--json", code=code).stdout)
    assert schema.problems(document) == []
    return document


def prepare(url: str, *work: Callable[[Executor], Any]) -> None:
    """Let an executor do something to a store, and leave."""

    async def run() -> None:
        async with Executor(registry, store=url, config=config) as executor:
            for one in work:
                await one(executor)

    anyio.run(run)


def finished(workflow: str, state: Any, id: str) -> Callable[[Executor], Any]:
    async def run(executor: Executor) -> None:
        await (await executor.start(workflow, state, id=id)).wait("waiting")

    return run


def interrupted(id: str, at: int = 3) -> Callable[[Executor], Any]:
    """A crawl that was left when `at` of its 1000 pages were done."""

    async def run(executor: Executor) -> None:
        events = executor.events()
        await executor.start("site", {"pages": 1000, "pause": 0.001}, id=id)
        async for event in events:
            if event.type is EventType.PROGRESS and event.data["done"] >= at:
                break

    return run


def submitted(workflow: str, id: str, state: Any = None, **options: Any) -> Callable[[Executor], Any]:
    async def run(executor: Executor) -> None:
        await executor.submit(workflow, state or {}, id=id, **options)

    return run


# --- processes --------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**inherited, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **more}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command line in a process of its own; whatever is left of it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(), **options}
        made = subprocess.Popen([sys.executable, "-m", "longrun", *words], cwd=tmp_path, **options)
        started.append(made)
        return made

    yield start
    for one in started:
        if one.poll() is None:
            one.kill()
        one.communicate()


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Look until it is true, and give what it gave."""
    deadline = time.monotonic() + PATIENCE
    pace = threading.Event()  # never set: whoever is waited for needs the processor too
    while time.monotonic() < deadline:
        if found := condition():
            return found
        pace.wait(LOOK_AGAIN)
    raise AssertionError(f"it did not come to pass: {what}")


def shown(url: str, id: str) -> dict[str, Any]:
    """What `longrun show` says of an execution, or nothing if there is none yet."""
    result = CliRunner().invoke(main, ["show", id, "--store", url, "--json"], prog_name="longrun")
    return json.loads(result.stdout) if result.exit_code == 0 else {}


def progress_of(url: str, id: str) -> float:
    inside = (shown(url, id).get("execution") or {}).get("step_progress") or {}
    return float(inside.get("done", 0))
