"""A small pool of threads for waiting on the disk: the file system groups syncs that are asked for together.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from longrun.stores._file.disk import Disk

T = TypeVar("T")

SIZE = 16


class SyncPool:
    """The caller works too; for a single item no thread is needed at all."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._pool = ThreadPoolExecutor(SIZE - 1, thread_name_prefix="longrun-file-sync")  # threads start when needed

    def sync(self, fds: Sequence[int]) -> list[OSError | None]:
        """Make what was written to these files durable, and answer for each: all at once where the disk can."""
        if len(fds) == 1:
            return [self._sync(fds[0])]
        answers: list[OSError | None] = []
        try:
            while len(answers) < len(fds) and (more := self._disk.sync_all(fds[len(answers) :])):
                answers += more
        except OSError as error:
            return [error] * len(fds)
        rest = range(len(answers), len(fds))
        answers += [None] * len(rest)

        def sync(n: int) -> None:
            answers[n] = self._sync(fds[n])

        self.run(sync, rest)
        return answers

    def _sync(self, fd: int) -> OSError | None:
        try:
            self._disk.fdatasync(fd)
        except OSError as error:
            return error
        return None

    def run(self, function: Callable[[T], object], items: Sequence[T]) -> None:
        """Call `function` with each item, several at a time. If a call raises, so does this, when all have ended."""
        if len(items) == 1:
            function(items[0])
        elif items:
            self._run(function, items)

    def _run(self, function: Callable[[T], object], items: Sequence[T]) -> None:
        round = _Round(function, items)
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: those that there are do it
            for _ in range(min(SIZE, len(items)) - 1):
                self._pool.submit(round.work)
        round.work()
        round.end()

    def close(self) -> None:
        self._pool.shutdown()


class _Round(Generic[T]):
    """Items that several threads work at. It waits for the threads that have begun, and not for what was asked of the
    pool: that may begin late, or, where a thread could not be started, without anybody's knowing."""

    def __init__(self, function: Callable[[T], object], items: Sequence[T]) -> None:
        self._function, self._todo = function, deque(items)
        self._changed = threading.Condition()
        self._at_work, self._over = 0, False
        self._error: BaseException | None = None

    def work(self) -> None:
        with self._changed:
            if self._over:
                return
            self._at_work += 1
        try:
            while self._todo:
                try:
                    item = self._todo.popleft()
                except IndexError:  # another was quicker
                    return
                self._function(item)
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Return when nobody is at work any more; raise what one of them has raised."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._at_work)
        if self._error is not None:
            raise self._error
