"""What every test can ask for: both event loops, real servers, and a check that nothing is left running."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import psycopg
import psycopg.sql
import pytest
import redis
import structlog

from tests import servers
from tests.server_process import children_of, outlasting, server_pids
from tests.servers import PostgresServer, RedisServer, Source

LEAK_PATIENCE = 3.0
"""Seconds that a thread or a child process may take to end after its test."""

CAMPAIGN = Path(__file__).with_name("campaign")
"""What plain `pytest` leaves out, and `pytest tests/campaign` runs."""

OWN_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that the standard library starts once and keeps for the life of the process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("longrun")
    group.addoption(
        "--campaign-size",
        type=int,
        default=12,
        metavar="N",
        help="how many kills, faults or rounds each campaign test makes (default: %(default)s)",
    )
    group.addoption(
        "--allow-missing-servers",
        action="store_true",
        help="skip tests whose server is not on this machine; without it they fail",
    )
    group.addoption(
        "--thorough",
        action="store_true",
        help="run the tests marked `thorough` too: whole suites on further combinations of what is tested already",
    )


def pytest_configure() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and every child would be so too. And until all tests
    are collected nothing of them is garbage: looking for it would take half as long again. Nor shall every worker and
    every child compile all over again what the last one compiled."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    servers.remove_clusters()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The campaign takes long: it runs where it is named."""
    if collection_path != CAMPAIGN:
        return None
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in named) else True


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """A whole class that is marked `thorough` is not looked through in vain, by every worker."""
    marks = getattr(obj, "pytestmark", []) if isinstance(obj, type) else []
    left_out = any(mark.name == "thorough" for mark in marks) and not collector.config.getoption("--thorough")
    return [] if left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests stay to the end: the garbage collector need not look through them each time, and in a worker,
    which ends then, not at the end either."""
    gc.freeze()
    gc.enable()
    try:
        return (yield)
    finally:
        if not hasattr(session.config, "workerinput"):
            gc.unfreeze()


def pytest_report_header() -> list[str]:
    return servers.describe()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a Redis runs on every one found, or once, to say that there is none."""
    for fixture, local in (("redis_source", False), ("redis_local_source", True)):
        if fixture in metafunc.fixturenames:
            found = servers.find_redis(local=local)
            values: list[Source | None] = [*found] or [None]
            ids = [source.id for source in found] or ["missing"]
            metafunc.parametrize(fixture, values, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every asynchronous test runs on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def campaign_size(request: pytest.FixtureRequest) -> int:
    size = int(request.config.getoption("--campaign-size"))
    if size < 1:
        raise pytest.UsageError("--campaign-size must be at least 1")
    return size


# --- servers --------------------------------------------------------------------------------------------------------


def missing(request: pytest.FixtureRequest, what: str) -> NoReturn:
    """Skip or fail a test whose server is not here, as the run was told to."""
    if request.config.getoption("--allow-missing-servers"):
        pytest.skip(f"no {what} on this machine")
    pytest.fail(f"no {what} on this machine; --allow-missing-servers skips what needs it", pytrace=False)


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[PostgresServer | Source]:
    """The worker's PostgreSQL, or the one that a URL names. To stop it: `disposable_postgres`."""
    source = servers.find_postgres()
    if source is None:
        missing(request, "PostgreSQL")
    if source.url is not None:
        yield source
        return
    with PostgresServer(source) as server:
        yield server


@pytest.fixture
def postgres_schema(postgres_server: PostgresServer | Source) -> Iterator[str]:
    """The name of a new, empty schema. Dropping it fails if the test left a transaction open on it."""
    assert postgres_server.url is not None
    name = f"test_{uuid.uuid4().hex}"
    identifier = psycopg.sql.Identifier(name)
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(identifier))
    yield name
    with psycopg.connect(postgres_server.url, autocommit=True, options="-c lock_timeout=5s") as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(psycopg.sql.SQL("DROP SCHEMA {} CASCADE").format(identifier))


@pytest.fixture
def postgres_url(postgres_server: PostgresServer | Source, postgres_schema: str) -> str:
    """A URL whose connections see only the test's own schema."""
    assert postgres_server.url is not None
    joint = "&" if "?" in postgres_server.url else "?"
    return f"{postgres_server.url}{joint}options={quote(f'-csearch_path={postgres_schema}')}"


@pytest.fixture
def disposable_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server of the test's own, with fsync on, to be stopped, killed and restarted."""
    source = servers.find_postgres(local=True)
    if source is None:
        missing(request, "PostgreSQL that can be killed")
    with PostgresServer(source, fsync=True) as server:
        yield server


@pytest.fixture(scope="session")
def redis_source(request: pytest.FixtureRequest) -> Source:
    """One of the Redis and Valkey servers found, in turn."""
    if request.param is None:
        missing(request, "Redis or Valkey")
    source: Source = request.param
    return source


@pytest.fixture(scope="session")
def redis_server(redis_source: Source) -> Iterator[RedisServer | Source]:
    """The worker's Redis or Valkey, or the one that a URL names. To stop it: `disposable_redis`."""
    if redis_source.url is not None:
        yield redis_source
        return
    with RedisServer(redis_source) as server:
        yield server


@pytest.fixture
def redis_prefix(redis_server: RedisServer | Source) -> Iterator[str]:
    """A new prefix for keys; what was written under it is removed after the test."""
    assert redis_server.url is not None
    prefix = f"test:{uuid.uuid4().hex}:"
    yield prefix
    with redis.Redis.from_url(redis_server.url) as client:
        if keys := list(client.scan_iter(match=f"{prefix}*", count=1000)):
            client.unlink(*keys)


@pytest.fixture
def redis_url(redis_server: RedisServer | Source) -> str:
    """The server's URL. One that was started here is empty; one from outside is left as it is: use `redis_prefix`."""
    assert redis_server.url is not None
    if isinstance(redis_server, RedisServer):
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def redis_local_source(request: pytest.FixtureRequest) -> Source:
    """One of the Redis and Valkey servers that can be started here, in turn."""
    if request.param is None:
        missing(request, "Redis or Valkey that can be killed")
    source: Source = request.param
    return source


@pytest.fixture
def disposable_redis(redis_local_source: Source) -> Iterator[RedisServer]:
    """A server of the test's own, `appendfsync always`, to be stopped, killed and restarted."""
    with RedisServer(redis_local_source) as server:
        yield server


# --- leaks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`capture_logs` leaves structlog configured, and a test after it would look for lines where none come."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fails a test that leaves a thread of the library or a child process behind (a warning fails it by itself)."""
    threads, children = set(_library_threads()), set(_children())
    yield
    deadline = time.monotonic() + LEAK_PATIENCE
    while (new := [thread for thread in _library_threads() if thread not in threads]) and time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):  # listed, and not started yet
            new[0].join(max(0.0, deadline - time.monotonic()))  # one that ends may be followed by another: look again
    left = [f"thread {thread.name}{_where(thread)}" for thread in new]
    left += [f"process {pid}: {_command_line(pid)}" for pid in outlasting(set(_children()) - children, deadline)]
    if left:
        pytest.fail("left running: " + ", ".join(left), pytrace=False)


def _library_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("longrun-")]


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "\n" + "".join(traceback.format_stack(frame))


def _children() -> list[int]:
    mine = set(children_of(os.getpid())) - server_pids()
    return [pid for pid in mine if not any(helper in _command_line(pid) for helper in OWN_HELPERS)]


def _command_line(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
