"""`serve`: on this machine alone, with a token that is kept, and gone when it is told to."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longrun import (
    ConfigError,
    ExecutionNotFoundError,
    MemoryCheckpointStore,
    StoreSettingsError,
    StoreUnavailableError,
)
from longrun.dashboard import create_app, server
from longrun.dashboard.app import status_of_error
from longrun.errors import CorruptDataError, InvalidStateError, LongrunError
from longrun.testing.samples import create

PROGRAM = """
import sys
from longrun.dashboard import serve
serve("memory:", port=int(sys.argv[1]), allow_control=False)
"""


class Running:
    """A dashboard in a process of its own."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        environment = {**os.environ, "LONGRUN_RUN_DIR": str(directory)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port)], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        self.address = next(line.strip() for line in lines if "http" in line)
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", self.address)
        assert found is not None
        self.port, self.token = int(found[1]), found[2]

    @contextlib.contextmanager
    def asking(self, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as answer:
                yield answer

    def ask(self, path: str, **headers: str) -> tuple[int, str]:
        """The status of an answer, and the cookie it sets."""
        with self.asking(path, **headers) as answer:
            return answer.status, (answer.getheader("set-cookie") or "").split(";")[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


@pytest.fixture
def running(directory: Path) -> Iterator[Running]:
    dashboard = Running(directory)
    try:
        yield dashboard
    finally:
        dashboard.stop(signal.SIGKILL)


def test_it_prints_the_address_that_opens_it_and_needs_its_token(running: Running) -> None:
    assert running.ask("/") == (401, "")
    status, cookie = running.ask(f"/?token={running.token}")
    assert status == 200
    assert running.ask("/api/overview", cookie=cookie) == (200, "")
    assert running.ask("/api/overview", cookie=cookie, host="evil.example") == (403, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_soon_after_it_is_told_to_with_a_stream_open(running: Running, number: int) -> None:
    with running.asking("/api/live/executions", authorization=f"Bearer {running.token}") as stream:
        assert stream.status == 200
        assert stream.readline().startswith(b"event: data")
        assert running.stop(number) in (0, -number)


def test_restarted_on_the_same_port_it_takes_the_same_token(running: Running, directory: Path) -> None:
    running.stop()
    again = Running(directory, running.port)
    try:
        assert again.token == running.token
    finally:
        again.stop()


def test_the_token_is_kept_where_only_its_owner_can_read_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))
    token = server.kept_token()
    (path,) = directory.iterdir()
    assert path.read_text() == token == server.kept_token()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_that_others_could_read_or_plant_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(directory))
    path = directory / server.TOKEN_FILE
    path.write_text("planted-by-somebody-else")
    path.chmod(0o644)
    with pytest.raises(StoreSettingsError, match="others can read"):
        server.kept_token()
    path.chmod(0o600)
    path.write_text("bad token")
    with pytest.raises(StoreSettingsError, match="damaged"):
        server.kept_token()
    path.unlink()
    path.symlink_to(directory / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        server.kept_token()


def test_a_port_in_use_is_said_so(running: Running) -> None:
    with pytest.raises(ConfigError, match="choose another --port"):
        server.serve("memory:", port=running.port, token="a-token-for-the-tests")


@pytest.mark.parametrize(("host", "port"), [("a" * 300, 0), ("127.0.0.1", 999_999), ("127.0.0.1", -1)])
def test_an_address_that_cannot_be_is_said_so(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="choose another"):
        server.serve("memory:", host=host, port=port, token="a-token-for-the-tests")


def test_the_browser_is_opened_with_the_token_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("longrun.dashboard.server.webbrowser.open", opened.append)
    monkeypatch.setattr("longrun.dashboard.server.anyio.run", lambda *args: None)
    server.serve("memory:", port=0, token="a-token-for-the-tests", open_browser=True)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=a-token-for-the-tests", opened[0])


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_the_address_shown_is_one_that_a_browser_can_open(host: str, shown: str) -> None:
    assert server._address(host, 80, "t") == f"http://{shown}:80/?token=t"


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True), ("localhost", False)])
def test_an_address_that_others_can_reach_is_warned_of(
    host: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    server._tell(create_app("memory:"), host, "http://…")
    assert ("can be reached from other machines" in capsys.readouterr().err) == warned


def test_the_command_serves_it(directory: Path, tmp_path: Path) -> None:
    """`longrun dashboard`, until it is told to end."""
    command = [sys.executable, "-m", "longrun", "dashboard", "--no-open", "--port", "0", "--store", "memory:"]
    environment = {**os.environ, "LONGRUN_RUN_DIR": str(directory), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "read-only" in process.stderr.readline()
        assert any("http://127.0.0.1:" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_without_its_extra_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['sse_starlette'] = None; import longrun.dashboard"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "pip install 'longrun[web]'" in done.stderr


async def test_an_asgi_server_opens_and_closes_the_store_with_its_own_life() -> None:
    store = MemoryCheckpointStore()
    app = create_app(store, token="a-token-for-the-tests")
    waiting = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        if len(waiting) == 1:
            assert await store.count() == {}, "it is open"
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.create(create("a"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ExecutionNotFoundError("a"), 404),
        (ConfigError("limit", 0, "give more"), 400),
        (InvalidStateError("a", "failed", "pause"), 409),
        (StoreUnavailableError("redis", "gone"), 503),
        (CorruptDataError("a", "damaged"), 422),
        (LongrunError("anything else"), 500),
    ],
)
def test_every_kind_of_error_has_its_status(error: LongrunError, status: int) -> None:
    assert status_of_error(error) == status
