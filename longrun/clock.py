"""Time, through one seam, so that tests can drive it.

Place in the life of an execution: everywhere that a moment is written down or waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import anyio

from longrun.loops import Awaited


class Works(Protocol):
    """Somebody whose answer may still come: a store."""

    @property
    def at_work(self) -> bool: ...


class Clock:
    """The system's clocks. `now` is for what is stored, `monotonic` for how long something took."""

    now: Callable[[], float] = staticmethod(time.time)
    """Seconds since the epoch. Like `monotonic` it is asked at every step: no method of ours stands between."""
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(max(0.0, seconds))

    async def wait(self, event: Awaited, seconds: float | None) -> bool:
        """Wait until `event` is set, at most `seconds`; True if it was."""
        if seconds is None:
            await event.wait()
        else:
            with anyio.move_on_after(max(0.0, seconds)):
                await event.wait()
        return event.is_set()

    def busy(self) -> AbstractContextManager[None]:
        """Enter it while looking what is due: a clock that jumps by itself stands still meanwhile."""
        return nullcontext()

    def heed(self, whom: Works) -> None:
        """Whose answers are waited for here: a clock that jumps by itself stands still while they are at work."""

    def block(self, event: threading.Event, seconds: float) -> bool:
        """The same for a thread: block until `event` is set, at most `seconds`; True if it was."""
        return event.wait(seconds)


SYSTEM_CLOCK = Clock()
