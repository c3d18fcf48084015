"""A store that misbehaves when it is told to: it fails, is slow, or does what was asked and loses the answer.

Place in the life of an execution: claim, checkpoint, finish.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import define

from longrun.errors import ConfigError, StoreUnavailableError
from longrun.stores.base import StoreBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.interposed import READS, WRITES, InterposedBackend

T = TypeVar("T")
CALLS = frozenset(WRITES + READS)


@define
class _Fault:
    call: str
    skip: int
    times: int | None
    """How many calls it still meets; None for every one until `heal`."""
    how: str
    seconds: float = 0.0
    error: Exception | None = None

    def meets(self, call: str) -> bool:
        if self.call not in (call, "any") or self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultyBackend(InterposedBackend):
    def __init__(self, inner: StoreBackend) -> None:
        super().__init__(inner)
        self.faults: list[_Fault] = []
        self.calls: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        with self._lock:
            self.calls[call] += 1
            fault = next((fault for fault in self.faults if fault.meets(call)), None)
            if fault is not None:
                self.fired[call] += 1
        if fault is None:
            return function(*args, **options)
        if fault.how == "delay":
            time.sleep(fault.seconds)
            return function(*args, **options)
        if fault.how == "lose":
            function(*args, **options)
        raise fault.error or StoreUnavailableError("tested", f"{call} was told to {fault.how}")


class FaultyStore(CheckpointStore):
    """A `CheckpointStore` in front of another one's backend.

    `call` is the name of a backend's method (`commit`, `claim`, `load` …) or "any"; `nth` counts from the next one.
    """

    backend: FaultyBackend

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__(FaultyBackend(store.backend), seal=store.seal)

    def fail(
        self, call: str = "commit", nth: int = 1, *, times: int | None = 1, error: Exception | None = None
    ) -> None:
        """The n-th call fails and does nothing; `times` in a row, None until `heal`."""
        self._plan(_Fault(call, nth - 1, times, "fail", error=error))

    def lose_answer(self, call: str = "commit", nth: int = 1, *, times: int | None = 1) -> None:
        """The n-th call does its work, and whoever asked gets an error: the connection broke on the way back (I9)."""
        self._plan(_Fault(call, nth - 1, times, "lose"))

    def delay(self, call: str = "commit", nth: int = 1, *, seconds: float, times: int | None = 1) -> None:
        """The n-th call takes so many real seconds longer."""
        self._plan(_Fault(call, nth - 1, times, "delay", seconds=seconds))

    def heal(self) -> None:
        """Forget every fault."""
        self.backend.faults.clear()

    @property
    def calls(self) -> Counter[str]:
        """How often each method was called."""
        return self.backend.calls

    @property
    def fired(self) -> Counter[str]:
        """How many of those met a fault. A test in which none did has shown nothing."""
        return self.backend.fired

    def _plan(self, fault: _Fault) -> None:
        if fault.call not in CALLS | {"any"}:
            raise ConfigError("call", fault.call, f"give one of any, {', '.join(sorted(CALLS))}")
        if fault.skip < 0:
            raise ConfigError("nth", fault.skip + 1, "give a whole number of at least 1")
        if fault.times is not None and fault.times < 1:
            raise ConfigError("times", fault.times, "give a whole number of at least 1, or None until `heal`")
        if fault.seconds < 0:
            raise ConfigError("seconds", fault.seconds, "give none below zero")
        self.backend.faults.append(fault)
