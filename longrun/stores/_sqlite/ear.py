"""Hear what other processes announce: whoever has announced something touches a file, and the kernel tells who listens.

Place in the life of an execution: event. Linux tells so (inotify). Where nobody does, in the first moments, and for a
while after something was found that nobody had told of, whoever waits looks again and again instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path

SETTLING = 0.3
"""Seconds after which the kernel is asked to tell: a program that ends sooner can do without."""
LOOK_ANYWAY = 0.25
"""Seconds between two looks while nothing is told."""
DOUBT = 10.0
"""Seconds for which nobody relies on being told, after something was not."""
PACE = 0.01
"""Seconds between two looks at least, however much is told."""

_ATTRIB, _DONT_FOLLOW = 0x4, 0x02000000


class Ear:
    """For one thread that waits; `wake` and `close` come from others."""

    def __init__(self, path: Path, interval: float) -> None:
        """`interval` is that between two looks where nobody tells."""
        self._path, self._interval = path, interval
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._touched: int | None = None
        self._waker: int | None = None
        self._relies_from = time.monotonic() + SETTLING
        self._told = True
        self._heard_at = 0.0

    def wake(self) -> None:
        """End a wait in progress, or the next."""
        with self._lock:
            self._woken.set()
            if self._waker is not None:
                os.eventfd_write(self._waker, 1)

    def was_woken(self) -> bool:
        """Whether somebody has woken who waits, since this was last asked."""
        if not self._woken.is_set():
            return False
        self._woken.clear()
        return True

    def close(self) -> None:
        with self._lock:
            opened, self._touched, self._waker = (self._touched, self._waker), None, None
        for descriptor in opened:
            if descriptor is not None:
                os.close(descriptor)

    def listen(self, seconds: float) -> None:
        """Wait until it is time to look: something may have been announced, somebody woke us, or so long has passed."""
        now = time.monotonic()
        if now < self._relies_from:
            self._told = True  # so to say: nobody expects to be
            self._woken.wait(min(seconds, self._interval))
        elif self._touched is None:
            self._begin(now)  # and look: what was announced before it was not told
        else:
            self._told = self._hear(self._touched, min(seconds, LOOK_ANYWAY))

    def found(self) -> None:
        """A look has found something. If nobody had told of it, who announces it has no voice here, or has died."""
        if not self._told:
            self._relies_from = time.monotonic() + DOUBT

    def _begin(self, now: float) -> None:
        touched = _told_of(self._path)
        if touched is None:
            self._relies_from = now + 3600.0
            return
        with self._lock:
            self._touched, self._waker = touched, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _hear(self, touched: int, seconds: float) -> bool:
        assert self._waker is not None
        poll = select.poll()
        poll.register(touched, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(int(seconds * 1000) + 1)}
        if not ready:
            return False
        time.sleep(max(0.0, min(PACE, self._heard_at + PACE - time.monotonic())))
        self._heard_at = time.monotonic()
        for descriptor in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)
        return True


def _told_of(path: Path) -> int | None:
    """A descriptor that can be read when the file has been touched; None if the kernel does not tell."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if descriptor < 0:  # there are as many as a user may have
            return None
        if int(libc.inotify_add_watch(descriptor, os.fsencode(path), _ATTRIB | _DONT_FOLLOW)) < 0:
            os.close(descriptor)
            return None
    except (ImportError, OSError, AttributeError):
        return None
    return descriptor
