"""One user at a time, for a task table that cannot compare and write in one act.

Place in the life of an execution: before its first claim, once for each store that is opened.

The user's name stands in the table, with the kernel lock by which others on its machine see whether it lives, and with
a lease for those who cannot see that. Looking and writing are two calls, so on one machine a second lock keeps others
from doing both at the same time. Between machines nothing can: that is what `fenced=False` means.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from longrun.errors import CorruptDataError, StoreSettingsError, StoreUnavailableError
from longrun.life import Life, LifeLock, boot_id, is_dead, run_directory
from longrun.stores._task import lines
from longrun.stores._task.records import INTERNAL, KIND, TaskRecord
from longrun.stores._task.table import TaskTable

T = TypeVar("T")

USER = "~user~"
LEASE = 60.0
_GATE = "task-stores.lock"

Run = Callable[..., Any]
"""Runs a coroutine function in the adapter's loop."""


class SingleUser:
    """The right to use a table alone."""

    def __init__(self, table: TaskTable) -> None:
        self._table = table
        self._lock: LifeLock | None = None

    def enter(self, run: Callable[[Callable[..., Awaitable[Any]]], Any]) -> None:
        """Raise `StoreSettingsError` if somebody else uses the table, as far as can be seen."""
        lock = LifeLock.acquire()
        try:
            with _gate():
                run(self._refuse_others)
                self._lock = lock
                run(self.renew)
        except BaseException:
            self._lock = None
            lock.release()
            raise

    def leave(self, run: Callable[[Callable[..., Awaitable[Any]]], Any]) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            run(self._forget)
        except StoreUnavailableError:
            lock.abandon()  # the name stays in the table, and the free lock proves that nobody is behind it
            raise
        lock.release()

    async def _refuse_others(self) -> None:
        record = await self._table.get(USER)
        if record is None:
            return
        life, until = _read(record)
        if life is not None and _is_alive(life):
            who = f"process {life.pid} on {life.host}"
        elif until > self._table.clock.now() and not (life is not None and is_dead(life)):
            who = "a process whose lease has not run out"
        else:
            return
        problem = f"{who} uses it, and an adapter without replace_task admits one at a time"
        raise StoreSettingsError(KIND, problem)

    async def renew(self) -> None:
        if self._lock is None:
            return
        value = {"life": self._lock.life.to_dict(), "until": self._table.clock.now() + LEASE}
        text = lines.document(USER, [lines.line(USER, "user", value)])
        await self._table.put(TaskRecord(USER, INTERNAL, 0.0, text, {"longrun": "user", "revision": "1"}), None)

    async def _forget(self) -> None:
        await self._table.delete(USER)


def _read(record: TaskRecord) -> tuple[Life | None, float]:
    parts, _, _ = lines.read_document(USER, record.data)
    for kind, value, _ in parts:
        if kind == "user":
            try:
                return Life.from_dict(value["life"]), float(value["until"])
            except CorruptDataError:
                break
    return None, 0.0


def _is_alive(life: Life) -> bool:
    """True only if the life is proved: its lock file is here, the very one, and it is held."""
    if not life.boot or life.boot != boot_id() or is_dead(life):
        return False
    try:
        info = os.lstat(life.path)
    except OSError:
        return False
    return (info.st_dev, info.st_ino) == (life.device, life.inode)


@contextmanager
def _gate() -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(run_directory() / _GATE, flags, 0o600)
    except OSError as error:
        raise StoreUnavailableError(KIND, f"no lock file: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
