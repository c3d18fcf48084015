"""What a workflow does to the outside world, written down, so that a test can see what happened twice.

Place in the life of an execution: run a step. Call the recorder where the real thing would be done.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

Effect = tuple[str, str | None]
"""A name and, if the outside would recognise a repetition, the key that it recognises it by."""


class Effects:
    """Records effects: `effects("charge", key=ctx.idempotency_key)`.

    An effect with a key counts once, however often it is repeated with the same key: whoever receives it can tell. One
    without a key counts every time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Effect] = []
        self._watch: Callable[[str, str | None], object] | None = None

    def __call__(self, name: str, *, key: str | None = None) -> None:
        with self._lock:
            watch = self._watch
            if watch is None:
                self._seen.append((name, key))
        if watch is not None:
            watch(name, key)

    def __iter__(self) -> Iterator[Effect]:
        return iter(list(self._seen))

    def __len__(self) -> int:
        return len(self._seen)

    def clear(self) -> None:
        with self._lock:
            self._seen.clear()

    @property
    def counts(self) -> Counter[str]:
        """How often each happened, repetitions with the same key left out."""
        return count(self._seen)

    def watched(self, watch: Callable[[str, str | None], object] | None) -> None:
        """Hand effects to somebody else instead of keeping them."""
        with self._lock:
            self._watch = watch


def count(effects: list[Effect]) -> Counter[str]:
    """How often each name happened, repetitions with the same key left out."""
    unkeyed = [name for name, key in effects if key is None]
    keyed = {(name, key) for name, key in effects if key is not None}
    return Counter(unkeyed) + Counter(name for name, _ in keyed)
