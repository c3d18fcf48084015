"""Connections: one for the writer, a few for readers, from a URL or from a pool that the application has already.

Place in the life of an execution: claim, checkpoint, finish. A lost connection is replaced here and the work repeated,
a bounded number of times; whoever gives work to `Links` makes sure that repeating it is safe (I9). Passwords stay
inside: no message and no `repr` shows one.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote

from longrun.errors import StoreReadOnlyError, StoreSettingsError, StoreUnavailableError
from longrun.stores._postgres.arrays import teach
from longrun.stores._postgres.driver import conninfo_to_dict, errors, psycopg, tuple_row
from longrun.stores._postgres.queries import KIND

T = TypeVar("T")
Connection = psycopg.Connection[Any]

WRITE_PAUSES = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Seconds before each repetition of a write; then `StoreUnavailableError`."""
READ_PAUSES = (0.0, 0.1, 0.4)
IDLE_READERS = 4

WRITER_SETTINGS = {
    "synchronous_commit": "on",  # whoever turned it off for speed did not mean checkpoints
    # Who waits for a lock here looks again when he has it, and would be refused by a server that is strict by default.
    "default_transaction_isolation": "read committed",
    # Every statement of the writer goes by an index, whatever the planner thinks of tables that were empty a moment
    # ago; so one plan does for all times, and planning would cost as much as a small commit.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    # Until the server has counted its rows it would rather sort all that is queued than read the first few from their
    # index, and would compile what takes it longer to compile than to run.
    "enable_sort": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    # A connection that broke in the middle of a transaction leaves its locks behind until the server notices; whoever
    # repeats the work waits for that, and not for ever.
    "idle_in_transaction_session_timeout": "5s",
    "lock_timeout": "10s",
}
READER_SETTINGS = {"plan_cache_mode": "force_custom_plan"}
"""For connections that are made here. Those of an application's pool keep the application's settings."""

_PASSING = (
    *(errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow, errors.TooManyConnections),
    *(errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable),
    *(errors.IdleInTransactionSessionTimeout, errors.IdleSessionTimeout),
    *(errors.ConnectionException, errors.ConnectionDoesNotExist, errors.ConnectionFailure, errors.ProtocolViolation),
)
_LOST_STATEMENTS = (errors.DuplicatePreparedStatement, errors.InvalidSqlStatementName)
_POOLED = (
    "; if a pooler changes the server's connection between transactions, give a psycopg_pool.ConnectionPool with"
    " kwargs={'prepare_threshold': None} instead of a URL"
)
ENCODING = "UTF8"
"""What `arrays` packs texts in, and so what they must be read in."""
_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "longrun",
    # A peer that vanished without a word is noticed in half a minute, not in two hours.
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class OwnConnection(psycopg.Connection[Any]):
    """One that was made here, so that nobody else prepares or forgets statements on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written: dict[bytes, None] = {}
        """Names of the prepared statements that write rows, oldest first."""


@runtime_checkable
class Pool(Protocol):
    """What is needed of a `psycopg_pool.ConnectionPool`."""

    conninfo: Any
    kwargs: Any

    def connection(self) -> AbstractContextManager[Connection]: ...


def unavailable(error: Exception) -> StoreUnavailableError:
    """The driver's error as the library's own, in one line."""
    words = str(error).strip().splitlines()
    kind = StoreReadOnlyError if isinstance(error, errors.ReadOnlySqlTransaction) else StoreUnavailableError
    problem = words[0] if words else type(error).__name__
    failed = kind(KIND, problem + _POOLED if isinstance(error, _LOST_STATEMENTS) else problem)
    failed.__cause__ = error
    return failed


def may_pass(error: psycopg.Error) -> bool:
    """Whether a new connection or another try may help: the connection is gone, or the server was busy with itself."""
    if isinstance(error, _PASSING):
        return True
    if type(error).__module__.startswith("psycopg_pool"):
        return False  # the pool had its own patience
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and error.sqlstate is None


class Links:
    """Every connection of one store but the listening one, which `listening` makes and its user keeps."""

    def __init__(self, source: object) -> None:
        self._pool: Pool | None = None
        self._settings: dict[str, Any] = {}
        if isinstance(source, str):
            self._settings = _parse(source)
        elif isinstance(source, Pool) and not inspect.iscoroutinefunction(getattr(source, "getconn", None)):
            self._pool = source
        else:
            raise StoreSettingsError(KIND, f"give a URL or a psycopg_pool.ConnectionPool, not {type(source).__name__}")
        self._writer: Connection | None = None
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._taught: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closing = threading.Event()

    def open(self) -> None:
        self._closing.clear()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._drop_writer()

    @property
    def place(self) -> str:
        """Where the server is, without the password."""
        shown = self._settings if self._pool is None else _known(self._pool)
        host = shown.get("host") or shown.get("hostaddr") or "local"
        return f"{shown.get('user', '')}@{host}:{shown.get('port', 5432)}/{shown.get('dbname', '')}"

    # work

    def write(self, work: Callable[[Connection], T]) -> T:
        """Do `work` on the writer's connection; after a lost connection again, on a new one."""
        try:
            return self._persist(work, self._writing, WRITE_PAUSES)
        except StoreUnavailableError as error:
            if not isinstance(error.__cause__, errors.InsufficientPrivilege):
                raise
            raise StoreReadOnlyError(KIND, error.problem) from error.__cause__

    def read(self, work: Callable[[Connection], T]) -> T:
        """Do `work` on a reader's connection, from any thread."""
        return self._persist(work, self._reading, READ_PAUSES)

    def once(self, work: Callable[[Connection], T]) -> T:
        """Do `work` on the writer's connection, without patience: what fails now is the caller's to know."""
        return self._persist(work, self._writing, ())

    def _persist(
        self,
        work: Callable[[Connection], T],
        borrow: Callable[[], AbstractContextManager[Connection]],
        pauses: tuple[float, ...],
    ) -> T:
        for pause in (*pauses, None):
            try:
                with borrow() as connection:
                    return work(connection)
            except psycopg.Error as error:
                if pause is None or not may_pass(error) or self._closing.wait(pause):
                    raise unavailable(error) from error
        raise AssertionError("the last pause is None")

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self._pool is not None:
            with self._borrowed(self._pool) as connection:
                yield connection
            return
        if self._writer is None or self._writer.closed:
            self._writer = self._connect(WRITER_SETTINGS)
        try:
            yield self._writer
        except BaseException:  # after a rollback the driver makes the server forget every prepared statement
            self._drop_writer()
            raise

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._pool is not None:
            with self._borrowed(self._pool) as connection:
                yield connection
            return
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        connection = self._connect(READER_SETTINGS) if idle is None else idle
        try:
            yield connection
        except psycopg.Error:
            connection.close()
            self._forget_idle()
            raise
        finally:
            self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_READERS and not connection.closed and not self._closing.is_set():
                self._idle.append(connection)
                return
        connection.close()

    def _forget_idle(self) -> None:
        """After one lost connection the others are most likely lost too."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # connections

    def _connect(self, settings: dict[str, str]) -> Connection:
        connection = OwnConnection.connect(autocommit=True, **self._settings)
        try:
            teach(connection)
            if settings:
                calls = ", ".join(["set_config(%s, %s, false)"] * len(settings))
                connection.execute(f"SELECT {calls}".encode(), [word for pair in settings.items() for word in pair])
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _borrowed(self, pool: Pool) -> Iterator[Connection]:
        """A connection of the application's pool, given back as it was."""
        with pool.connection() as connection:
            if connection not in self._taught:
                teach(connection)
                self._taught.add(connection)
            before = connection.autocommit
            habits = connection.row_factory, connection.cursor_factory, connection.isolation_level
            if not before:
                connection.set_autocommit(True)
            connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
            connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            encoding = connection.info.parameter_status("client_encoding")
            try:
                if encoding != ENCODING:
                    _encode(connection, ENCODING)
                yield connection
            finally:
                if encoding != ENCODING and not connection.closed:
                    _encode(connection, encoding)
                connection.row_factory, connection.cursor_factory = habits[:2]
                if not connection.closed:
                    connection.set_isolation_level(habits[2])
                    connection.set_autocommit(before)

    def listening(self) -> Connection:
        """A new connection of its own, which nobody else uses."""
        try:
            if self._pool is None:
                return self._connect({})
            kwargs = {**_called(self._pool.kwargs or {}), "autocommit": True}
            kind = getattr(self._pool, "connection_class", psycopg.Connection)  # which may know how to log in
            connection: Connection = kind.connect(_called(self._pool.conninfo), **kwargs)
            return connection
        except psycopg.Error as error:
            raise unavailable(error) from error


def _encode(connection: Connection, encoding: str | None) -> None:
    connection.execute("SELECT set_config('client_encoding', %s, false)", (encoding,))


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _known(pool: Pool) -> dict[str, Any]:
    try:
        return {**conninfo_to_dict(_called(pool.conninfo)), **_called(pool.kwargs or {})}
    except psycopg.Error:
        return {}


def _parse(url: str) -> dict[str, Any]:
    """The URL's parts. A driver's message about a bad one quotes it, so neither it nor its cause is passed on."""
    with suppress(psycopg.Error):
        found = conninfo_to_dict(url)
        if not _is_cut(url, found):
            return _DEFAULTS | dict(found) | {"client_encoding": ENCODING}
        problem = "its URL is cut in a wrong place; in a user name or password write %40 for @, %2F for / and %3A for :"
        raise StoreSettingsError(KIND, problem)
    unknown = _unknown_parameter(url)
    problem = "its URL cannot be read" if unknown is None else f"{unknown} of its URL is not known"
    raise StoreSettingsError(KIND, f"{problem}; write postgresql://user@host:5432/database")


def _unknown_parameter(url: str) -> str | None:
    """The first that the driver does not know; by its name only where that cannot be a piece of a password."""
    query = url.partition("?")[2]
    names = [unquote(part.partition("=")[0]) for part in query.split("&") if "=" in part]
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()} | {"ssl"}
    for name in names:
        if name not in known:
            return "a parameter" if "@" in query or "password" in names else f"the parameter {name!r}"
    return None


def _is_cut(url: str, found: dict[str, Any]) -> bool:
    """Whether a piece of a password stands where host, port or database are, and would be shown with them."""
    authority, _, path = url.partition("://")[2].partition("?")[0].partition("/")
    ports = str(found.get("port") or "").split(",")
    return (
        ("@" in path and "@" not in authority)
        or any("@" in host[1:] for host in str(found.get("host") or "").split(","))
        or not all(port == "" or port.isdigit() for port in ports)
    )
