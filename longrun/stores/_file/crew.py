"""A small pool of threads for waiting on the disk: the file system groups syncs that are asked for together.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from longrun.stores._file.disk import Disk

T = TypeVar("T")

SIZE = 16


class Crew:
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
        todo = deque(items)

        def work() -> None:
            while True:
                try:
                    item = todo.popleft()
                except IndexError:
                    return
                function(item)

        others: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads are to be had: those that there are do it
                others.extend(self._pool.submit(work) for _ in range(min(SIZE, len(items)) - 1))
            work()
        finally:
            wait(others)  # nobody may be at work any more when this is over
            todo.clear()
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()
