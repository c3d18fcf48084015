"""The database file: made, checked, locked between processes, and opened with the settings that make it durable.

Place in the life of an execution: checkpoint.

Whoever writes holds a lock on a file beside the database, for two reasons. SQLite before 3.51.3 can damage a database
when connections reset its write-ahead log (WAL) at the same moment; under this lock no process of ours folds the WAL
back (a "checkpoint" in SQLite's words) while another one writes. And a writer that waits here waits its turn, instead
of failing with "database is locked".

The database file itself is never opened and closed by other means than SQLite in a process that may have it open:
closing it would drop the locks that SQLite holds on it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longrun.errors import (
    ConfigError,
    CorruptDataError,
    LongrunError,
    NewerFormatError,
    StoreReadOnlyError,
    StoreSettingsError,
    StoreUnavailableError,
)
from longrun.stores._sqlite import sql
from longrun.stores.rows import FORMAT

KIND = "sqlite"
OLDEST_SQLITE = (3, 35)
SAFE_RESET_SQLITE = (3, 51, 3)
"""From this version on SQLite itself keeps apart those who reset the WAL."""
LOCK_POLL = 0.0005
WAL_LIMIT = 64 << 20
"""Bytes from which on the WAL file is cut back, not only used again from its beginning."""

_FULL = sqlite3.SQLITE_FULL
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PARAMETERS = re.compile(r"\?\w+=")
_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock between processes (flock) and threads. It ends with the process that holds it."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._timeout = timeout
        self._thread_lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        _locks.add(self)

    def __enter__(self) -> None:
        if not self._thread_lock.acquire(timeout=self._timeout):
            raise _lock_taken(self._timeout)
        try:
            if not self._try():
                self._wait()
        except BaseException:
            self._thread_lock.release()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._try():
            if time.monotonic() > deadline:
                raise _lock_taken(self._timeout)
            time.sleep(LOCK_POLL)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def touch(self) -> None:
        """Let the kernel tell whoever listens. Who is not told looks now and then: nothing depends on it."""
        with suppress(OSError):
            os.utime(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _forget_locks() -> None:
    """A forked child shares the lock's descriptor: held there, it would outlive the process that took it."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget_locks)


def _checked_name(path: object) -> str:
    """The path as text. A text that other programs take for more than a path is refused: it would be a file's name."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise StoreSettingsError(KIND, f"give the path of a file, and not {path!r}")
    if os.path.basename(name) == ":memory:":
        raise StoreSettingsError(KIND, "a store in memory is memory: or MemoryCheckpointStore()")
    if isinstance(path, str) and _PARAMETERS.search(name):
        problem = "its URL takes no parameters: write sqlite:///PATH, and give timeout= and others as an argument"
        raise StoreSettingsError(KIND, problem)
    return name


def _checked_timeout(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ConfigError("timeout", seconds, "give seconds of at least 0")
    return seconds


class DatabaseFile:
    """One database file: `prepare` once, then `connect` as often as needed, then `close`."""

    def __init__(self, path: str | os.PathLike[str], timeout: float) -> None:
        try:
            self.path = Path(os.path.abspath(_checked_name(path)))  # not resolve(): a symbolic link is refused
        except FileNotFoundError as error:
            raise StoreSettingsError(KIND, "the working directory is gone; give an absolute path") from error
        self._name = str(self.path)
        self.lock_path = self.path.with_name(self.path.name + "-lock")
        self.timeout = _checked_timeout(timeout)
        self.lock: FileLock | None = None
        self.read_only = False
        """Whether the file is on a medium that takes no writes: a backup, a snapshot."""
        self._place: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Create what is missing; refuse what is newer or not ours. Processes that do this at once take turns."""
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreSettingsError(KIND, f"SQLite {sqlite3.sqlite_version} is too old; it takes 3.35 or later")
        try:
            self.read_only = _is_on_read_only(self.path)
            if self.read_only:
                _refuse_strange(self.path, os.R_OK)
                self._find_place()
                self._check_written()
                return
            _make_directory(self.path.parent)
            _refuse_strange(self.path, os.R_OK | os.W_OK)
            self.lock = FileLock(self.lock_path, self.timeout)
            with self.lock:
                self._create()
                self._initialise()
        except OSError as error:
            raise StoreSettingsError(KIND, f"{self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def touch(self) -> None:
        """Something was announced, durably: let the other processes hear of it."""
        if self.lock is not None:
            self.lock.touch()

    def connect(self, *, reader: bool = False) -> sqlite3.Connection:
        """A connection with settings that were seen to take effect. It may be used by one thread at a time."""
        self.check_place()
        if self.read_only:
            return self._connect_read_only()
        connection = self._open("rw")
        try:
            _configure(connection, reader)
        except BaseException:
            connection.close()
            raise
        return connection

    def check_place(self) -> None:
        """Raise if the file is not the one that was opened: a write to a removed file would be lost."""
        try:
            found = os.stat(self._name)
        except OSError as error:
            raise StoreUnavailableError(KIND, f"{self.path}: {error.strerror or error}") from error
        if self._place != (found.st_dev, found.st_ino):
            raise StoreUnavailableError(KIND, f"{self.path} was replaced by another file; open the store again")

    def wal_size(self) -> int:
        return _size_of(f"{self._name}-wal")

    def _create(self) -> None:
        """An empty file that nobody else can read, its name durable. SQLite gives the WAL the same mode."""
        with suppress(FileExistsError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.close(fd)
        _sync_directory(self.path.parent)
        self._find_place()

    def _find_place(self) -> None:
        found = os.stat(self.path)
        self._place = found.st_dev, found.st_ino

    def check_writable(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(KIND, f"{self.path} is on a read-only file system")

    def print_of(self) -> tuple[int, ...] | None:
        """What changes when somebody writes to a database that is read without locks, by another way to the same file.
        None where it is read with locks, which leave nothing to compare."""
        if not self.read_only or self._has_log():
            return None
        found = os.stat(self._name)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _has_log(self) -> bool:
        """Whether committed writes stand beside the database, where somebody is writing or was when he died."""
        return any(_size_of(f"{self._name}-{suffix}") for suffix in ("wal", "journal"))

    def _connect_read_only(self) -> sqlite3.Connection:
        """With a WAL beside the database, SQLite reads both. Without one nothing is missing, and it must be told that
        it cannot make one (`immutable`): with one, that would hide what was acknowledged last."""
        if self._has_log():
            if not os.path.lexists(f"{self._name}-shm"):
                problem = f"{self.path}-wal holds writes, and SQLite cannot read it there without {self.path.name}-shm"
                raise StoreSettingsError(KIND, f"{problem}: copy both files to where it can write, and look there")
            connection = self._open("ro")
        else:
            connection = self._open("ro&immutable=1")
        try:
            _configure_for_reading(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_written(self) -> None:
        try:
            connection = self._connect_read_only()
            try:
                if _is_new(connection, self.path):
                    raise StoreSettingsError(KIND, f"{self.path} is empty, and on a read-only file system")
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreSettingsError(KIND, f"{self.path}: {error}") from error

    def _open(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}",
            uri=True,
            timeout=self.timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.text_factory = _decode
        return connection

    def _initialise(self) -> None:
        try:
            connection = self._open("rw")
        except sqlite3.Error as error:
            raise StoreSettingsError(KIND, f"{self.path}: {error}") from error
        try:
            new = _is_new(connection, self.path)
            _configure(connection, reader=False)
            connection.execute("BEGIN IMMEDIATE")
            if new:
                for statement in sql.SCHEMA.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {sql.APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if _code(error) in _BUSY or _code(error) == _FULL:
                raise translate(error) from error
            raise StoreSettingsError(KIND, f"{self.path}: {error}") from error
        finally:
            connection.close()


def translate(error: sqlite3.Error) -> LongrunError:
    """The error of the library that says what SQLite's error means."""
    code = _code(error)
    if code in _DAMAGED:
        return CorruptDataError("the SQLite database", str(error))
    if code == _FULL:
        return StoreUnavailableError(KIND, "the disk is full")
    if code in _BUSY:
        return StoreUnavailableError(KIND, "another program keeps the database locked")
    return StoreUnavailableError(KIND, str(error))


def is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in _BUSY


def fold_wal(connection: sqlite3.Connection, file: DatabaseFile) -> None:
    """Copy the WAL into the database, as far as readers let it. For the holder of the lock, outside a transaction."""
    mode = "TRUNCATE" if file.wal_size() > WAL_LIMIT else "PASSIVE"
    connection.execute("PRAGMA busy_timeout = 0")  # a reader in the way is no reason to wait: there is a next time
    try:
        connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(file.timeout * 1000)}")


def _code(error: sqlite3.Error) -> int:
    """The primary result code; an error that comes from Python's module alone has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _decode(text: bytes) -> str:
    """Damaged text must reach the checksum, not stop the reading of the row."""
    return text.decode("utf-8", "surrogateescape")


def _lock_taken(timeout: float) -> StoreUnavailableError:
    return StoreUnavailableError(KIND, f"another process has been writing for {timeout:g} s without an end")


def _make_directory(directory: Path) -> None:
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """A new name survives a power cut only after this."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, and so need not
            raise
    finally:
        os.close(fd)


def _is_on_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        return False


def _size_of(name: str) -> int:
    try:
        return os.stat(name).st_size
    except FileNotFoundError:
        return 0


def _refuse_strange(path: Path, access: int) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise StoreSettingsError(KIND, f"{path} is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        raise StoreSettingsError(KIND, f"{path} is not a plain file")
    if not os.access(path, access):
        how = "read and written" if access & os.W_OK else "read"
        raise StoreSettingsError(KIND, f"{path} cannot be {how} by this user")


def _is_new(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database is empty; raises if it is not ours or newer. Changes nothing."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == sql.APPLICATION_ID:
        if version > FORMAT:
            raise NewerFormatError(str(path), version, FORMAT)
        return False
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise StoreSettingsError(KIND, f"{path} is the database of another program; name another file")
    return True


def _configure(connection: sqlite3.Connection, reader: bool) -> None:
    checks: list[tuple[str, str, Callable[[object], bool]]] = [
        ("journal_mode", "WAL", lambda found: found == "wal"),
        ("synchronous", "FULL", lambda found: found == 2),
        ("wal_autocheckpoint", "0", lambda found: found == 0),
    ]
    for name, wanted, fits in checks:
        connection.execute(f"PRAGMA {name} = {wanted}").fetchone()
        (found,) = connection.execute(f"PRAGMA {name}").fetchone()
        if not fits(found):
            raise StoreSettingsError(
                KIND, f"PRAGMA {name} stays at {found!r}; the file must be on a local file system that can do {wanted}"
            )
    if reader:
        _configure_for_reading(connection)
    else:
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute("PRAGMA temp_store = MEMORY")


def _configure_for_reading(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA cache_size = -4000")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA query_only = ON")
