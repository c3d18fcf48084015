"""The process behind a test server: start, stop, kill, start again on the same data, never outlive the tests.

`tests/servers.py` says which servers there are and how each is run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Self

START_TIMEOUT = 60.0
STOP_TIMEOUT = 30.0
POLL = 0.02
SOCKET_PATH_LIMIT = 107

PREFIX = "longrun-test-"

# The kernel's "die with your parent" means the *thread* that started the child. A test may well start a server from a
# thread of a pool that ends soon, so one thread that lives as long as the process starts them all.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-spawner")
_server_pids: set[int] = set()


class ServerFailedError(Exception):
    """A server that did not start, did not stop, or cannot be run by its user."""


def server_pids() -> frozenset[int]:
    """The processes that belong to this module: no test leaked them."""
    return frozenset(_server_pids)


class Directory:
    """A directory for one server, locked while its owner lives, so that the next run can clear away a dead one's."""

    def __init__(self, owner: int) -> None:
        parent = _short_temporary_directory()
        _clear_abandoned(parent)
        made = Path(tempfile.mkdtemp(prefix="new-" + PREFIX, dir=parent))
        self._lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now does it get the name that the clearing looks for: nobody sees it unlocked.
        self.path = made.rename(made.with_name(made.name.removeprefix("new-")))
        os.chown(self.path, owner, -1)

    def remove(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def _short_temporary_directory() -> Path:
    usual = Path(tempfile.gettempdir())
    room = len(PREFIX) + len("new-12345678/.s.PGSQL.5432.lock")
    return usual if len(os.fsencode(usual)) + room < SOCKET_PATH_LIMIT else Path("/tmp")


def _clear_abandoned(parent: Path) -> None:
    for path in parent.glob(PREFIX + "*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or one that its owner removes just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            # Another run may be clearing the same one: what it removed first is no error.
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def children_of(pid: int) -> list[int]:
    """The living children of a process of this machine; only Linux tells."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            found.extend(int(word) for word in children.read_text().split())
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    """Whether it runs. One that ended and waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


class LocalServer:
    """One server on a data directory of its own, which outlives its process. Subclasses say how it is run."""

    death_signal: ClassVar[signal.Signals]
    """What the kernel sends when the test process dies."""

    def __init__(self, name: str, version: str, owner: int) -> None:
        self.name = name
        self.version = version
        self.owner = owner
        self._directory = Directory(owner)
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def directory(self) -> Path:
        return self._directory.path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether a client is served now."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailedError(f"{self} is not running")
        return self._process

    def start(self) -> None:
        """Start on the data there is, and return when clients are served."""
        if self._process is not None:
            raise ServerFailedError(f"{self.name} has been started already")
        self._process = _spawner.submit(self._spawn).result()
        _server_pids.add(self._process.pid)
        deadline = time.monotonic() + START_TIMEOUT
        while not self.answers():
            if self._ended_within(POLL):
                self._forget()
                raise ServerFailedError(f"{self} ended at its start:\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(f"{self} does not answer:\n{self.log.read_text()}")

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._started().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch_server.py"))]
        life = [str(os.getpid()), str(int(self.death_signal)), str(self.owner)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*launcher, *life, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop their servers in order
            )

    def end(self, number: signal.Signals) -> None:
        """Ask it to stop with a signal, and return when it has."""
        process = self._started()
        process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailedError(f"{self} did not stop:\n{self.log.read_text()}") from None
        self._forget()

    def kill(self) -> None:
        """SIGKILL to the server and to all its processes at once, as a power cut would."""
        process = self._started()
        process.send_signal(signal.SIGSTOP)  # so that it starts no more children
        children = children_of(process.pid)
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait(STOP_TIMEOUT)
        _wait_until_gone(children)
        self._forget()

    def _forget(self) -> None:
        _server_pids.discard(self._started().pid)
        self._process = None

    def close(self) -> None:
        """Stop it, whatever its state, and remove its data."""
        if self._process is not None:
            self.kill()
        self._directory.remove()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _wait_until_gone(pids: list[int]) -> None:
    """For processes that are no children of this one, where there is nothing to wait on."""
    if left := outlasting(pids, time.monotonic() + STOP_TIMEOUT):
        raise ServerFailedError(f"processes {left} do not end")


def outlasting(pids: Iterable[int], deadline: float) -> list[int]:
    """Those of the processes that are still there at the deadline. Reaping them is for whoever started them."""
    return sorted(pid for pid in pids if not _gone_by(pid, deadline))


def _gone_by(pid: int, deadline: float) -> bool:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        select.select([watched], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(watched)
    return not is_alive(pid)
