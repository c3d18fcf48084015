"""The connection to a Redis or Valkey server: scripts, errors in plain words, and repetition after a lost answer.

Place in the life of an execution: checkpoint. The driver's exceptions end here, and so do passwords.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen

from longrun.errors import ConfigError, MissingExtraError, StoreError, StoreSettingsError, StoreUnavailableError
from longrun.stores._redis.address import check_parameters
from longrun.stores.base import KEYS_REMEMBERED
from longrun.stores.store import READERS

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

OLDEST = (6, 2)
KEPT = 4
LEAST = 2
AT_ONCE = READERS + 2
"""Connections that a store uses at most: its readers, its writer and its watcher, one each."""
SENT_AT_ONCE = 1 << 20
"""Bytes that the system is asked to take from the writer in one piece: a batch of a thousand small steps."""
PAUSES = (0.05, 0.2, 0.5)
"""Seconds before each repetition when no answer came."""

_SCHEMES = {"valkey://": "redis://", "valkeys://": "rediss://", "redis+unix://": "unix://"}
"""Other names by which people know what the driver speaks."""
_DATABASE = re.compile(r"/?\d*")

_SENTENCES = {
    "READONLY": "the server is a read-only replica; give the URL of the primary",
    "OOM": "the server's memory is full (maxmemory) and it refuses writes",
    "LOADING": "the server is still loading its data",
    "MISCONF": "the server cannot write to its disk and refuses writes",
    "NOREPLICAS": "the server has too few replicas to accept writes",
    "MASTERDOWN": "the server is a replica without its primary",
    "BUSY": "the server is busy with a script that does not end",
    "CLUSTERDOWN": "the cluster is down",
    "MOVED": "another node of the cluster has these keys; give that node's URL or a client for it",
}
_USED_UP = ("Too many connections", "No connection available")
"""What the driver's pools say, of either kind and of any version."""
_SETTINGS = {
    "NOAUTH": "the server wants a password; put it into the URL",
    "WRONGPASS": "the server refuses this user name and password",
    "NOPERM": "this user may not run a command or use a key that the store needs",
    "WRONGTYPE": "a key under its prefix is not longrun's; give another prefix=",
}


_SHARED = {
    "commit": ("basics", "steps", "starts", "common"),
    "claim": ("basics", "common", "whole"),
    "load": ("basics", "common", "whole"),
}
"""What stands before a script that needs more than the others, or first."""


@lru_cache(64)
def script(name: str) -> tuple[str, str]:
    """A script of this package with what all of them share before it, and its SHA-1."""
    directory = importlib.resources.files("longrun.stores") / "lua"
    parts = (*_SHARED.get(name, ("basics", "common")), name)
    texts = [(directory / f"{part}.lua").read_text("utf-8") for part in parts]
    text = "".join([f"local KEYS_REMEMBERED = {KEYS_REMEMBERED}\n", *texts])
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_seconds(_: Options, attribute: Attribute[Any], value: object) -> None:
    if not is_seconds(value):
        raise ConfigError(attribute.name, value, "use seconds above 0")


def _check_count(_: Options, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(attribute.name, value, f"use a whole number of at least {LEAST}")


@frozen(kw_only=True)
class Options:
    """How to connect when a URL is given; a client brings its own."""

    timeout: float = field(default=5.0, validator=_check_seconds)
    connect_timeout: float = field(default=5.0, validator=_check_seconds)
    max_connections: int = field(default=16, validator=_check_count)


@frozen(kw_only=True)
class Server:
    """What the server says of itself. Settings that it does not tell are None."""

    name: str
    version: str
    appendonly: str | None = None
    appendfsync: str | None = None
    maxmemory: str | None = None
    maxmemory_policy: str | None = None
    silent_on: str | None = None
    """The channel of the store, if this user may not publish there."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Why an acknowledged write could be lost, a sentence each."""
        found = []
        if self.appendonly is None:
            found.append("the server does not tell whether it writes an append-only file")
        elif self.appendonly != "yes":
            found.append("appendonly is off: what was acknowledged is lost when the server stops")
        elif self.appendfsync != "always":
            found.append(f"appendfsync is {self.appendfsync}: a power failure loses what was acknowledged last")
        if self.maxmemory not in ("0", None) and self.maxmemory_policy != "noeviction":
            found.append(f"maxmemory-policy is {self.maxmemory_policy}: a full server deletes executions")
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What whoever runs the server should know, a sentence each."""
        return self.losses if self.silent_on is None else (*self.losses, self.silence)

    @property
    def silence(self) -> str:
        return f"this user may not publish on the channel {self.silent_on}: others see what it did only by looking"


class Link:
    """A pool of connections, shared by all threads of one store."""

    def __init__(self, url_or_client: str | redis.Redis, prefix: str, options: Options) -> None:
        self._driver = _driver()
        self.base = f"{{{prefix}}}:".encode()
        self.channel = self.base + b"changes"
        self.open()
        self.server = Server(name="Redis or Valkey", version="")
        self._own = isinstance(url_or_client, str)
        if not isinstance(url_or_client, str | self._driver.Redis):
            raise StoreSettingsError(
                "Redis", "give it a URL or a client of redis-py, redis.Redis and not redis.asyncio"
            )
        self._kept: list[Any] = []
        """Connections that nobody uses at the moment; the pool counts them as given away."""
        self._most_kept = min(KEPT, options.max_connections - 2)  # the watcher needs one, and so do plain commands
        self.client: Any = self._from_url(url_or_client, options) if isinstance(url_or_client, str) else url_or_client
        if self.client.get_connection_kwargs().get("decode_responses"):
            raise StoreSettingsError("Redis", "the client decodes answers; make it with decode_responses=False")
        self._check_pool(self.client.connection_pool)

    def open(self) -> None:
        """Be another caller to the scripts: processes that were forked since would get each other's answers."""
        self.name = os.urandom(8).hex()
        self._closed = False

    def _check_pool(self, pool: Any) -> None:
        """Where a pool lets callers wait for a connection, few will do."""
        most = getattr(pool, "max_connections", AT_ONCE)
        if most < LEAST:
            raise StoreSettingsError("Redis", "one connection is not enough: the store listens on one all the time")
        if most < AT_ONCE and not isinstance(pool, self._driver.BlockingConnectionPool):
            hint = f"use at least {AT_ONCE}, or a redis.BlockingConnectionPool"
            raise StoreSettingsError("Redis", f"the client's max_connections={most} is less than it needs; {hint}")

    def _from_url(self, url: str, options: Options) -> Any:
        # The driver would repeat a command by itself; here only `repeated` does, which knows what may be repeated.
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        for scheme, known in _SCHEMES.items():
            if url.startswith(scheme):
                url = known + url.removeprefix(scheme)
        try:
            if not url.startswith("unix:") and not _DATABASE.fullmatch(urlsplit(url).path):
                raise ValueError("the driver would take the first database")
            check_parameters(url, self._driver)
            pool = self._driver.BlockingConnectionPool.from_url(
                url,
                max_connections=options.max_connections,
                timeout=options.timeout,
                socket_timeout=options.timeout,
                socket_connect_timeout=options.connect_timeout,
                retry=Retry(NoBackoff(), 0),
                client_name="longrun",
            )
        except (ValueError, TypeError):
            # Without its cause: the driver's sentence can hold pieces of the URL, and so of a password.
            problem = (
                "the URL cannot be understood; it looks like redis://user:password@host:6379/0 or unix://path?db=0"
            )
            raise StoreSettingsError("Redis", problem) from None
        return self._driver.Redis(connection_pool=pool)

    @property
    def kind(self) -> str:
        """One word for the server: Valkey speaks the same, and is not Redis."""
        return "valkey" if self.server.name == "Valkey" else "redis"

    def place(self) -> str:
        """Where the server is; never a user name or a password."""
        kwargs = self.client.get_connection_kwargs()
        if "path" in kwargs:
            return f"unix:{kwargs['path']} db {kwargs.get('db', 0)}"
        return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)} db {kwargs.get('db', 0)}"

    def close(self) -> None:
        self._closed = True
        if self._own:
            self._drop_kept()
            self.client.close()
            self.client.connection_pool.disconnect()

    # calls

    def repeated(self, name: str, *args: Any) -> Any:
        """Run a script; if no answer comes, again. Only for what says by itself that it was done before."""
        text, sha = script(name)
        return self._repeat(lambda: self._evaluate(text, sha, args))

    def read(self, *args: Any) -> Any:
        """A command that only reads; if no answer comes, again."""
        return self._repeat(lambda: self.client.execute_command(*args))

    def once(self, function: Callable[[], T]) -> T:
        self._check_open()
        try:
            return function()
        except (self._driver.RedisError, OSError) as error:
            self._raise(error)

    def _check_open(self) -> None:
        """The driver would connect again, and nobody would close that connection."""
        if self._closed:
            raise StoreUnavailableError(self.server.name, "it is closed")

    def _repeat(self, function: Callable[[], T]) -> T:
        for pause in PAUSES:
            self._check_open()
            try:
                return function()
            except self._driver.AuthenticationError as error:
                self._raise(error)
            except (self._driver.ConnectionError, self._driver.TimeoutError, OSError):
                time.sleep(pause)  # the server's answer is unknown: ask again on a new connection
            except self._driver.RedisError as error:
                self._raise(error)
        return self.once(function)

    def _evaluate(self, text: str, sha: str, args: Sequence[Any]) -> Any:
        try:
            return self._ask("EVALSHA", sha, 1, self.base, *args)
        except self._driver.exceptions.NoScriptError:  # the server was restarted: it did nothing yet
            return self._ask("EVAL", text, 1, self.base, *args)

    def _ask(self, *command: Any) -> Any:
        """Send a command and wait for its answer, on a connection that is kept: to take one from the driver's pool and
        give it back costs more than the rest of a small call. An application's client is left to do it its own way."""
        if not self._own:
            return self.client.execute_command(*command)
        connection = self._take()
        try:
            # In one piece. While this thread sends, another takes the interpreter, and keeps it for milliseconds before
            # this one could send the next: for so long the server would wait for the end of its command.
            connection.send_packed_command([b"".join(connection.pack_command(*command))])
            answer = connection.read_response()
        except self._driver.ResponseError:
            self._keep(connection)
            raise
        except BaseException:  # there is no telling what comes next on it; and the others are most likely lost too
            connection.disconnect()
            self.client.connection_pool.release(connection)
            self._drop_kept()
            raise
        self._keep(connection)
        return answer

    def _take(self) -> Any:
        with suppress(IndexError):
            return self._kept.pop()
        pool = self.client.connection_pool
        try:
            connection = pool.get_connection()
        except TypeError:  # before redis-py 5.3 it asks what for
            connection = pool.get_connection("EVALSHA")
        if (taken := getattr(connection, "_sock", None)) is not None:
            with suppress(OSError):  # the system has a limit of its own
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_AT_ONCE)
        return connection

    def _keep(self, connection: Any) -> None:
        if len(self._kept) < self._most_kept:
            self._kept.append(connection)
        else:
            self.client.connection_pool.release(connection)

    def _drop_kept(self) -> None:
        with suppress(IndexError):
            while True:
                connection = self._kept.pop()
                connection.disconnect()
                self.client.connection_pool.release(connection)

    # errors

    def _raise(self, error: Exception) -> NoReturn:
        raise self._translated(error) from error

    def _translated(self, error: Exception) -> StoreError:
        text, name = str(error), self.server.name
        code = type(error).__name__
        words = {word.strip("-.,:") for word in text.split()[:12]}
        for known, sentence in _SETTINGS.items():
            if known in words or (known == "NOPERM" and code == "NoPermissionError"):
                return StoreSettingsError(name, sentence)
        if isinstance(error, self._driver.AuthenticationError | self._driver.exceptions.AuthorizationError):
            return StoreSettingsError(name, "the server refuses this user name and password, or wants one")
        for known, sentence in _CLASSES.items():
            if code == known:
                return StoreUnavailableError(name, sentence)
        for known, sentence in _SENTENCES.items():
            if known in words:
                return StoreUnavailableError(name, sentence)
        if text.startswith(_USED_UP):
            problem = f"all connections of its pool are in use; give it more max_connections: it needs up to {AT_ONCE}"
            return StoreUnavailableError(name, problem)
        if isinstance(error, self._driver.TimeoutError):
            return StoreUnavailableError(name, f"no answer from {self.place()} in time")
        if isinstance(error, self._driver.ConnectionError | OSError):
            return StoreUnavailableError(name, f"no connection to {self.place()}")
        return StoreUnavailableError(name, f"the server answers with an error ({code})")

    # what the server is

    def inspect(self) -> Server:
        """Ask the server for its name, version and the settings that decide whether it loses data."""
        info = self._repeat(lambda: self.client.info("server"))
        valkey = info.get("server_name") == "valkey" or "valkey_version" in info
        name = "Valkey" if valkey else "Redis"
        version = str(info.get("valkey_version") if valkey else info.get("redis_version", ""))
        if not valkey and _numbers(version) < OLDEST:
            raise StoreSettingsError(name, f"version {version} is too old: 6.2 is the oldest that will do")
        settings = self._settings()
        self.server = Server(
            name=name,
            version=version,
            appendonly=settings.get("appendonly"),
            appendfsync=settings.get("appendfsync"),
            maxmemory=settings.get("maxmemory"),
            maxmemory_policy=settings.get("maxmemory-policy"),
            silent_on=None if self._may_publish() else self.channel.decode(),
        )
        return self.server

    def _settings(self) -> Mapping[str, str]:
        """Empty where the server, or who runs it, does not allow to ask."""
        found: dict[str, str] = {}
        for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy"):
            try:
                answer = self._driver_config(name)
            except self._driver.ResponseError:
                return {}
            found.update(answer)
        return found

    def _may_publish(self) -> bool:
        """Found out by saying nothing, which nobody listens to."""
        try:
            self._repeat(lambda: self.client.publish(self.channel, b""))
        except StoreError as error:
            if not isinstance(error.__cause__, self._driver.ResponseError):
                raise
            return False
        return True

    def _driver_config(self, name: str) -> dict[str, str]:
        answer: Mapping[str, str] = self.client.config_get(name)
        return {str(key): str(value) for key, value in answer.items()}


_CLASSES = {
    "ReadOnlyError": _SENTENCES["READONLY"],
    "OutOfMemoryError": _SENTENCES["OOM"],
    "BusyLoadingError": _SENTENCES["LOADING"],
    "ClusterDownError": _SENTENCES["CLUSTERDOWN"],
    "MasterDownError": _SENTENCES["MASTERDOWN"],
}


def _driver() -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingExtraError("the Redis store", "redis") from error
    return redis


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
