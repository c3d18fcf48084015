"""Answers that took long are kept for a while: looking never keeps a store busy, however large it is.

Place in the life of an execution: whenever somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

SLOW = 0.1
"""What took less than so many seconds is asked for again each time."""
KEEP_FACTOR = 20
"""For how many times as long as it took an answer is kept."""
REMEMBERED = 50

T = TypeVar("T")


class Kept(Generic[T]):
    """Slow answers, each by what was asked. Every answer is kept for `at_least` so many seconds."""

    def __init__(self, at_least: float = 0.0) -> None:
        self._at_least = at_least
        self._known: dict[Hashable, tuple[float, T]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer that is kept, or a new one."""
        began = time.monotonic()
        known = self._known.get(key)
        if known is not None and began < known[0]:
            return known[1]
        answer = await ask()
        took = time.monotonic() - began
        keep = max(self._at_least, took * KEEP_FACTOR if took > SLOW else 0.0)
        if keep:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = (began + took + keep, answer)
        return answer
