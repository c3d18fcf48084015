"""The messages that wait for one execution, as its owner knows them: what to obey, and what has been obeyed.

Place in the life of an execution: control, signal. Most come from the store. An order from this program itself comes by
word of mouth: it has a number like the others, but no store has to let it go.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import attrs

from longrun.loops import RUNG, Bell
from longrun.stored import Message

BY_WORD = 1 << 62
"""The numbers from here on are of orders that no store has."""

_words = itertools.count(BY_WORD)


def by_word(order: Message) -> Message:
    """The order with a number of its own, for an execution that runs in this program."""
    return attrs.evolve(order, id=next(_words))


def stored_numbers(orders: Iterable[Message]) -> tuple[int, ...]:
    """What a store must let go when these have been obeyed."""
    return tuple([order.id for order in orders if order.id < BY_WORD])


class Inbox(dict[int, Message]):
    """Messages by their number, in the order in which they came."""

    # Most executions never get a message: what stands here costs nothing until it is set.
    taken: frozenset[int] = frozenset()
    """The orders that have been obeyed, durably."""
    waved: frozenset[int] = frozenset()
    """What comes to nothing and is on its way to be taken."""
    obeying: tuple[int, ...] = ()
    """What is being obeyed, or was last: its write is on its way."""
    _changed: Bell = RUNG
    _readers: int = 0
    _consumed: frozenset[int] = frozenset()
    """Signals that were taken while somebody read the store, who may find them there still."""

    def add(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.id not in self.taken and message.id not in self._consumed:
                self.setdefault(message.id, message)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While this lasts, messages are read from the store that are added afterwards."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._consumed = frozenset()

    def have_taken(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.pop(number, None)
        self.taken |= frozenset(numbers)
        self.stir()

    def wave_through(
        self, orders: list[Message], take: Callable[[tuple[int, ...], Callable[[object], None]], None]
    ) -> None:
        """Let `take` have what changes nothing, without troubling the step in flight."""
        new = [message for message in orders if message.id not in self.waved]
        numbers = frozenset([message.id for message in new])
        self.waved |= numbers

        def taken(error: object) -> None:
            if error is None:
                self.have_taken(numbers)

        if stored := stored_numbers(new):
            take(stored, taken)
        else:
            taken(None)

    def consume(self, signal: Message) -> None:
        """A signal was taken, durably. There may be signals without end: no more is remembered than must be."""
        self.pop(signal.id, None)
        if self._readers:
            self._consumed |= {signal.id}

    def signal(self, name: str | None) -> Message | None:
        """The oldest signal of that name."""
        fitting = [number for number, message in self.items() if message.kind == "signal" and message.name == name]
        return self[min(fitting)] if fitting and name is not None else None

    def stir(self) -> None:
        """Let those who wait look again."""
        self._changed.set()

    async def obeyed(self, number: int, ended: Bell) -> bool:
        """Wait until a message was obeyed; False if it is not here, or the runner ends without obeying it."""
        while number in self and not ended.is_set():
            if self._changed.is_set():
                self._changed = Bell()
            await self._changed.wait()
        return number in self.taken
