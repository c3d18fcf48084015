"""The orderly end of a crew: steps get their time to come to a point, and everything is given back.

Place in the life of an execution: leave. Nothing of this is stored as cancelled: whoever comes next goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from longrun.crew import Crew

SOON = 1.0
"""A drain that takes longer is worth a line in the log."""
LAST_WORDS = 5.0
"""How long a step may take to unwind after it was cancelled before it is reported."""


class Drain:
    """The end of one crew."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._turn = anyio.Lock()
        self._patience: anyio.CancelScope | None = None
        self._deadline: float | None = None
        self._hurried = self._is_done = False

    def left(self) -> float | None:
        """Seconds that steps still have; None while nobody is leaving."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def hurry(self) -> None:
        """Wait no longer for steps."""
        self._hurried = True
        if self._patience is not None:
            self._patience.cancel()

    async def run(self) -> None:
        """Let running steps come to a point, then cancel them."""
        async with self._turn:  # whoever comes second waits for the first, and takes over if that was cancelled
            if not self._is_done:
                await self._run()
                self._is_done = True

    async def _run(self) -> None:
        crew = self._crew
        if self._deadline is None:
            self._deadline = time.monotonic() + crew.config.drain_timeout
        crew.draining = True
        crew.stop_sweeping()
        for runner in list(crew.runners.values()):
            runner.drain()
        await self._give_time()
        claims = crew.sweeper.claims
        await claims.settle(LAST_WORDS)
        await self.cut_short()
        with anyio.move_on_after(LAST_WORDS):  # a store that does not answer: the end of the lock frees them
            for id, head in list(crew.resting.items()):
                await claims.release(id, head)

    async def _give_time(self) -> None:
        """Whoever sits before the terminal hears why the program does not end at once."""
        patience = self.left() or 0.0
        soon = min(SOON, patience)
        left = patience - soon
        if await self._until_empty(soon) or self._hurried or left <= 0:
            return
        self._crew.log.warning("executor.draining", executions=len(self._crew.runners), seconds_left=round(left, 1))
        await self._until_empty(left)

    async def cut_short(self) -> None:
        """Stop what still runs, at once, and wait for a moment until it has been given back."""
        crew = self._crew
        for runner in list(crew.runners.values()):
            runner.interrupt()
        if not await self._until_empty(LAST_WORDS):
            for runner in crew.runners.values():
                stuck = "step.does_not_stop" if runner.in_step else "store.does_not_answer"
                crew.log.error(stuck, execution=runner.id, step=runner.book.step_name)

    async def _until_empty(self, seconds: float) -> bool:
        crew = self._crew
        with anyio.move_on_after(seconds) as self._patience:
            while crew.runners or crew.starting:
                await crew.emptied.wait()
        return not crew.runners
