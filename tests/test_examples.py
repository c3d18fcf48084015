"""Every file in examples/ runs, as the README says, and a second run finds its work done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest

from longrun import FileCheckpointStore, LongrunError

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
EXPECTED = {
    "crawler": "'pages': 40",
    "agent": "10 messages for 10 paid calls",
    "batch": "58 done, unreadable: [13, 38]",
    "approval": "'outcome': 'approved', 'by': 'chief'",
}


def run(example: str, directory: Path) -> str:
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), str(directory)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "service"}


@pytest.mark.parametrize("example", EXPECTED)
def test_it_runs_and_a_second_run_finds_its_work_done(example: str, tmp_path: Path) -> None:
    assert EXPECTED[example] in run(example, tmp_path / "store")
    assert EXPECTED[example] in run(example, tmp_path / "store")


def pages_done(directory: Path) -> int:
    """How far the crawler's cursor has come."""

    async def look() -> int:
        try:
            async with FileCheckpointStore(directory) as store:
                entries = (await store.load("crawl-1")).entries
        except LongrunError:  # it is not there yet
            return 0
        return int(json.loads(entries.get("each:pages", b'{"n": 0}'))["n"])

    return anyio.run(look)


def test_the_crawler_survives_the_kill_that_it_invites(tmp_path: Path) -> None:
    for wanted in (3, 12):
        crawler = subprocess.Popen([sys.executable, str(EXAMPLES / "crawler.py"), str(tmp_path)], env=ENVIRONMENT)
        while pages_done(tmp_path) < wanted:
            assert crawler.poll() is None, "it was too fast, or failed"
        crawler.kill()
        crawler.wait()
    assert pages_done(tmp_path) < 40
    assert EXPECTED["crawler"] in run("crawler", tmp_path)


def call(base: str, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(base + path, method=method), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def serve(directory: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, str(EXAMPLES / "service.py"), str(directory), "0"]
    server = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def test_the_service_pauses_and_resumes_through_its_routes_and_across_a_restart(tmp_path: Path) -> None:
    server, base = serve(tmp_path / "store")
    with server:
        assert call(base, "/jobs/a") == (404, {"error": "there is no execution 'a' in this store"})
        assert call(base, "/jobs/a", "POST")[1]["state"] == "running"
        assert call(base, "/jobs/a/pause", "POST")[1]["state"] == "paused"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    server, base = serve(tmp_path / "store")
    with server:
        assert call(base, "/jobs/a")[1]["state"] == "paused"
        assert call(base, "/jobs/a/resume", "POST")[1]["state"] == "running"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
