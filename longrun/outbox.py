"""The writes of one execution on their way to the store: in order, none lost, none doubled.

Place in the life of an execution: checkpoint. Each write stays here until the store has answered. When the store is
away they are handed over again with back-off, in the same order and with the same revisions; a write that had been
applied although its answer was lost is recognised by its revision. Nothing is acknowledged meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from longrun.clock import Clock
from longrun.errors import LongrunError, StoreSettingsError, StoreUnavailableError
from longrun.loops import Loop, Waiter
from longrun.records import RetryPolicy
from longrun.stored import Save
from longrun.stores.store import CheckpointStore

if TYPE_CHECKING:
    from longrun.telemetry import Watch

BACKOFF = RetryPolicy(initial=0.05, factor=2.0, maximum=5.0, jitter=True)
MAY_PASS = (StoreUnavailableError, StoreSettingsError)
"""What somebody may put right while executions run: a server that comes back, a password or a right that is given
again."""

Done = Callable[[LongrunError | None], object]
QUIET: Any = object()
"""What is pushed along with a write of which there is nothing to tell."""


def back_off(tries: int) -> float:
    """Seconds to wait for a store that was away so many times. Drawn, so that not everybody comes back at once."""
    return BACKOFF.delay(tries, random.random())


class Courier(Protocol):
    """What an outbox needs from the executor."""

    store: CheckpointStore
    clock: Clock
    telemetry: Watch | None

    def spawn(self, function: Callable[[], Awaitable[Any]], *, name: str) -> None: ...

    def store_failed(self, execution_id: str, error: LongrunError, tries: int) -> None: ...


class Teller(Protocol):
    """Whom an outbox tells."""

    def tell(self, save: Save, told: Any) -> None:
        """A write has become durable; `told` was pushed along with it."""


class _Nobody:
    def tell(self, save: Save, told: Any) -> None:
        """For what is over: its outbox keeps nobody in memory."""


_NOBODY = _Nobody()


class Outbox:
    def __init__(self, courier: Courier, execution_id: str, loop: Loop, teller: Teller) -> None:
        """`teller` hears of every write that has become durable, unless `QUIET` was pushed along with it."""
        self._courier = courier
        self._loop = loop
        self._id = execution_id
        self._teller = teller
        self._pending: list[tuple[Save, Any, Done]] = []
        self.lost: LongrunError | None = None
        """Why nothing can be written any more: the lease is lost, or the store refuses for good."""
        self._failure: LongrunError | None = None
        self._flying = self._tries = 0

    def push(self, save: Save, told: Any, done: Done) -> None:
        """Hand a write over; `done` gets None when it is durable, or why it never will be."""
        if self.lost is not None:
            done(self.lost)
            return
        if self._courier.telemetry is not None:
            done = self._courier.telemetry.timed(save, done)
        self._pending.append((save, told, done))
        if self._failure is not None:
            return
        self._flying += 1
        try:
            self._courier.store.submit(save, self, self._loop)
        except LongrunError as error:  # the store is closed
            self(error)

    def settled(self) -> Waiter | None:
        """What to await until everything handed over so far is durable: it gets None, or why it never will be."""
        if not self._pending:
            return None
        waiter = self._loop.waiter()
        save, told, done = self._pending[-1]

        def both(error: LongrunError | None) -> None:
            done(error)
            waiter(error)

        self._pending[-1] = (save, told, both)
        return waiter

    def _submit(self, save: Save) -> None:
        self._flying += 1
        try:
            self._courier.store.submit(save, self, self._loop)
        except LongrunError as error:  # the store is closed
            self(error)

    def __call__(self, error: LongrunError | None) -> None:
        """The store's answer to the oldest write in flight. Called itself: a method of it would be one more object for
        every write."""
        self._flying -= 1
        if self.lost is not None:
            return
        if error is None and self._failure is None:
            if self._tries:
                self._tries = 0
            save, told, done = self._pending.pop(0)
            if told is not QUIET:
                self._teller.tell(save, told)
            done(None)
        elif error is None or isinstance(error, MAY_PASS):
            self._retry_later(error)
        else:
            self.give_up(error)

    def _retry_later(self, error: LongrunError | None) -> None:
        """The first failure decides; answers to what was handed over behind it are waited for, then all go again."""
        self._failure = self._failure or error
        if self._flying == 0 and self._failure is not None:
            self._tries += 1
            self._courier.store_failed(self._id, self._failure, self._tries)
            self._courier.spawn(self._retry, name="longrun-retry-write")

    async def _retry(self) -> None:
        await self._courier.clock.sleep(back_off(self._tries))
        self._failure = None
        for save, _, _ in list(self._pending):
            if self._failure is None:  # a store that was closed answers at once
                self._submit(save)

    def give_up(self, error: LongrunError) -> None:
        """Nothing more can be written: tell everybody who waits."""
        self.lost = self.lost or error
        self._teller = _NOBODY
        pending, self._pending = self._pending, []
        for _, _, done in pending:
            done(error)
