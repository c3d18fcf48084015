"""The queue of asynchronous replication: bounded, in order, and never dropped.

Place in the life of an execution: checkpoint; after the acknowledgement, before the copy. Whoever adds to a full queue
waits. A copy that fails is tried again; after some tries the queue is `broken`. Whoever holds the gate then goes on
with it if the standby answers again, and takes the standby out of the pair if it does not, or if that did not help:
everything in the queue comes over when it is brought up to date.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from longrun.logging import get_logger
from longrun.stores._replicated.side import LostError

PAUSE = 0.02
PAUSE_LIMIT = 1.0

Item = tuple[int, Callable[[], None]]
"""How many writes it stands for, and what makes the copy."""


class Lag:
    """One thread that copies what the active side has acknowledged."""

    def __init__(self, limit: int, tries: int) -> None:
        self._limit, self._tries = limit, tries
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger(store="replicated")
        self.depth = 0
        """Writes that are acknowledged and not copied yet."""
        self.errors = 0
        self.broken: LostError | None = None
        self.resumed = False
        """It was broken, and nothing has been copied since it was told to go on."""

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="longrun-replica-lag", daemon=True)
        self._thread.start()

    def put(self, weight: int, copy: Callable[[], None]) -> LostError | None:
        """Add; wait while the queue is full. Not added if the standby is lost, which is then the answer."""
        with self._changed:
            self._changed.wait_for(lambda: self.depth < self._limit or self.broken)
            if self.broken is None:
                self._items.append((weight, copy))
                self.depth += weight
                self._changed.notify_all()
            return self.broken

    def drain(self) -> LostError | None:
        """Wait until everything is copied; the loss that prevents it, if one does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._items or self.broken or self._thread is None)
            return self.broken

    def resume(self) -> None:
        """Try again what could not be copied."""
        with self._changed:
            self.broken, self.resumed = None, self.resumed or self.broken is not None
            self._changed.notify_all()

    def clear(self) -> None:
        """The standby is out of the pair: what is queued will come over with the rest."""
        with self._changed:
            self._items.clear()
            self.depth, self.broken, self.resumed = 0, None, False
            self._changed.notify_all()

    def stop(self) -> None:
        """Copy what is queued, then end the thread. Whoever calls has seen to what cannot be copied."""
        if self._thread is None:
            return
        self.drain()
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: (self._items and not self.broken) or self._stopping.is_set())
                if self._stopping.is_set():
                    return
                item = self._items[0]
            lost = self._copied(item[1])
            with self._changed:
                if lost is not None:
                    self.broken = lost
                elif self._items and self._items[0] is item:  # unless the queue was cleared meanwhile
                    self._items.popleft()
                    self.depth -= item[0]
                    self.resumed = False
                self._changed.notify_all()

    def _copied(self, copy: Callable[[], None]) -> LostError | None:
        for tries in range(1, self._tries + 1):
            try:
                copy()
                return None
            except LostError as lost:
                self.errors += 1
                self._log.warning("replica.copy_failed", side=lost.side.name, tries=tries)
                if tries == self._tries or self._stopping.wait(min(PAUSE_LIMIT, PAUSE * 2**tries)):
                    return lost
        return None
