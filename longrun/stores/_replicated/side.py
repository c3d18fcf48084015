"""One of the two stores of a pair: its backend, whether it answers, and the lock that its writers share.

Place in the life of an execution: claim, checkpoint, finish, below the replicated store.
"""

from __future__ import annotations

import threading
from typing import Any

from longrun.errors import CorruptDataError, StoreUnavailableError, WriteOrderError
from longrun.stores.base import StoreBackend


class LostError(Exception):
    """A side did not answer. `error` is what its backend said; what it was asked to do is unknown."""

    def __init__(self, side: Side, error: StoreUnavailableError) -> None:
        self.side, self.error = side, error
        super().__init__(f"the {side.name} does not answer")


class Side:
    """A backend under its name in the pair, `primary` or `secondary`. Any thread may call; its writers take turns."""

    def __init__(self, name: str, backend: StoreBackend) -> None:
        self.name, self.backend = name, backend
        self.problem: str | None = "it was not opened yet"
        """Why it cannot be used; None while it answers."""
        self.strikes = 0
        """Failed writes since the last one that was answered: a full disk still pings and reads."""
        self._opened = False
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<{self.name} {self.backend.kind}>"

    @property
    def healthy(self) -> bool:
        return self.problem is None

    def wake(self) -> None:
        if self._opened:
            self.backend.wake()

    def open(self) -> bool:
        """Open it if it is not open; False if it does not answer. What can never work is raised."""
        with self._lock:
            if self._opened:
                return True
            try:
                self.backend.open()
            except (StoreUnavailableError, CorruptDataError) as error:
                self.problem = error.problem
                return False
            self._opened, self.problem, self.strikes = True, None, 0
            return True

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, False
            self.problem = "it is closed"
            if opened:
                self.backend.close()

    def answers(self) -> bool:
        """Whether it answers now."""
        try:
            if self.open():
                self.read_whole("ping")
        except LostError:
            return False
        return self.problem is None

    def write(self, call: str, *args: Any) -> Any:
        """A call that changes something: one at a time."""
        with self._lock:
            try:
                answer = self._written(call, *args)
            except LostError:
                self.strikes += 1
                raise
            self.strikes = 0
            return answer

    def _written(self, call: str, *args: Any) -> Any:
        """A store that refuses every write of a batch, as with a full disk, is a side that does not answer. What
        concerns one execution alone is among the answers."""
        answer = self.read_whole(call, *args)
        if call == "commit" and answer and all(map(_is_away, answer)):
            raise self._lost(answer[0])
        return answer

    def read_whole(self, call: str, *args: Any) -> Any:
        """A call that is about no execution of a user's: damage means that the store itself cannot be used."""
        try:
            return self.read(call, *args)
        except CorruptDataError as error:
            lost = StoreUnavailableError(self.backend.kind, str(error))
            lost.__cause__ = error
            raise self._lost(lost) from error

    def _lost(self, error: StoreUnavailableError) -> LostError:
        self.problem = error.problem
        return LostError(self, error)

    def read(self, call: str, *args: Any, **options: Any) -> Any:
        if not self._opened:
            raise LostError(self, StoreUnavailableError(self.backend.kind, f"the {self.name} is not open"))
        try:
            answer = getattr(self.backend, call)(*args, **options)
        except StoreUnavailableError as error:
            raise self._lost(error) from error
        self.problem = None
        return answer


def _is_away(answer: object) -> bool:
    return isinstance(answer, StoreUnavailableError) and not isinstance(answer, WriteOrderError)
