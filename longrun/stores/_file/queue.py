"""Many files made durable by two calls of the kernel, where it has them: Linux, from 4.18 on.

Place in the life of an execution: checkpoint. An fdatasync that is asked for on its own needs a thread that waits, and
each thread that has waited needs the interpreter, which the event loop has. Here `io_submit(2)` takes all of them at
once and `io_getevents(2)` waits for all of them; meanwhile the interpreter is free. The kernel does the same for each
file as fdatasync(2) does, and says the same about it.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence

from longrun.stores._file.disk import Disk

CAPACITY = 256
"""How many the kernel is given at once: a small share of what it has for all processes (`fs.aio-max-nr`)."""
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""By machine: the system calls io_setup, io_destroy, io_submit and io_getevents, which the C library does not offer."""
_FDSYNC = 3
_REQUEST = 16
"""Words of 32 bits in a `struct iocb`; the first is handed back, the fifth is what to do, the sixth the descriptor."""
_EVENT = 4
"""Words of 64 bits in a `struct io_event`: the first is what was handed over, the third how it went."""


class QueueDisk(Disk):
    """The system calls as they are, and this one more."""

    def __init__(self) -> None:
        self._queue: SyncQueue | None = None
        self._usable = sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in _NUMBERS

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        if not self._usable:
            return []
        try:
            if self._queue is None:
                self._queue = SyncQueue()
            return self._queue.sync(fds[:CAPACITY])
        except UnusableError:
            self._usable = False
            return []
        except OSError:  # what it was given may still end: an answer that comes late must not be taken for another's
            self._usable, self._queue = False, None
            raise


class UnusableError(Exception):
    """The kernel takes no syncs, or no more of them: nothing was done."""


class SyncQueue:
    """A queue of the kernel's. For one thread at a time."""

    def __init__(self) -> None:
        setup, destroy, self._submit, self._getevents = _NUMBERS[platform.machine()]
        self._call = _system_call()
        place = array("Q", [0])
        if self._call(setup, CAPACITY, place.buffer_info()[0]) < 0:
            raise UnusableError
        self._context = place[0]
        weakref.finalize(self, self._call, destroy, self._context).atexit = False
        self._requests = array("I", bytes(4 * _REQUEST * CAPACITY))
        self._requests[0::_REQUEST] = array("I", range(CAPACITY))
        self._requests[4::_REQUEST] = array("I", [_FDSYNC] * CAPACITY)
        first = self._requests.buffer_info()[0]
        self._pointers = array("Q", range(first, first + 4 * _REQUEST * CAPACITY, 4 * _REQUEST))
        self._events = array("q", bytes(8 * _EVENT * CAPACITY))

    def sync(self, fds: Sequence[int]) -> list[OSError | None]:
        """Sync these files, or the first so many of them, and answer for each."""
        self._requests[5 : _REQUEST * len(fds) : _REQUEST] = array("I", fds)
        taken = self._call(self._submit, self._context, len(fds), self._pointers.buffer_info()[0])
        if taken <= 0:
            raise UnusableError
        answers: list[OSError | None] = [None] * taken
        left = taken
        while left:
            left -= self._wait(left, answers)
        return answers

    def _wait(self, count: int, answers: list[OSError | None]) -> int:
        """Wait until that many have ended; how many have, if a signal came first."""
        found = self._call(self._getevents, self._context, count, count, self._events.buffer_info()[0])
        if found == -errno.EINTR:
            return 0
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        results = self._events[2 : _EVENT * found : _EVENT]
        if any(results):
            for number, result in zip(self._events[0 : _EVENT * found : _EVENT], results, strict=True):
                if result < 0:
                    answers[number] = OSError(-result, os.strerror(-result))
        return found


def _system_call() -> Callable[..., int]:
    """A system call by its number, with up to five whole numbers; what it returns, or its error code below zero."""
    try:
        import ctypes  # only for whoever has many files
    except ImportError as error:  # a Python that was built without libffi
        raise UnusableError from error

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes, syscall.restype = [ctypes.c_long] * 6, ctypes.c_long

    def call(number: int, *args: int) -> int:
        result: int = syscall(number, *args, *[0] * (5 - len(args)))
        return -ctypes.get_errno() if result == -1 else result

    return call
