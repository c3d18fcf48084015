"""Places: how many executions run steps at once, handed on in the order in which they were asked for.

Place in the life of an execution: before a step runs. Whoever waits for a place must still obey a pause or a cancel, so
asking never blocks: a `Ticket` wakes its holder when it has become a place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Ticket:
    """A place, or the wait for one."""

    __slots__ = ("granted", "wake")

    def __init__(self, wake: Callable[[], object]) -> None:
        self.wake = wake
        self.granted = False


def _nobody() -> None:
    """Nobody waits for what there is any number of."""


class Places:
    """A number of places; None for any number."""

    def __init__(self, count: int | None) -> None:
        self._free = count
        self._queue: deque[Ticket] = deque()
        self._any = Ticket(_nobody)
        """Where there is any number of places, all have the same."""
        self._any.granted = True

    def ask(self, wake: Callable[[], object]) -> Ticket:
        if self._free is None:
            return self._any
        ticket = Ticket(wake)
        if self._free > 0:
            self._free -= 1
            ticket.granted = True
        else:
            self._queue.append(ticket)
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Leave a place, or the queue for one."""
        if ticket is self._any:
            return
        if not ticket.granted:
            self._queue.remove(ticket)
        else:
            self._hand_on()
        ticket.granted = False

    def _hand_on(self) -> None:
        if self._queue:
            first = self._queue.popleft()
            first.granted = True
            first.wake()
        elif self._free is not None:
            self._free += 1
