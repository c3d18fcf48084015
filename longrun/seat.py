"""One execution's place among those that run, and its trial when it was there at too many crashes.

Place in the life of an execution: before a step runs. Whoever waits for a place obeys a pause or a cancel meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio

from longrun.places import Ticket

if TYPE_CHECKING:
    from longrun.book import Book
    from longrun.crew import Crew

PATIENCE = 5.0
"""How long the trial of one waits for the others to be heard: a write of theirs may never be answered."""
SUSPECT = 2
"""From this many crashes on, executions run one at a time until they have made progress."""


class Sitter(Protocol):
    """What a seat needs from the runner. It keeps none, so that a runner that has ended is let go at once."""

    attention: bool

    def nudge(self) -> None:
        """Something has happened to the execution."""

    async def nudged(self) -> None:
        """Wait until something happens to the execution, a grant of a place included."""


class Seat:
    # What stands here costs nothing until it is set.
    place: Ticket | None = None
    """Among those that run, or in the queue for that."""
    accused = 0
    """The crashes that are held against it once its trial begins."""
    _trial: Ticket | None = None
    _absences = 0
    _closed = False

    def __init__(self, crew: Crew, book: Book) -> None:
        self._crew, self._book = crew, book

    def take_at_once(self, sitter: Sitter) -> bool:
        """Whether there is a place to run steps, and nothing to be done first."""
        if self.place is None:
            if self._trial is not None:
                return False
            self.place = self._crew.places.ask(sitter.nudge)
        return self.place.granted

    async def take(self, sitter: Sitter) -> bool:
        """Wait for a place to run steps; False if something has to be obeyed first."""
        if self._trial is not None and self.accused:
            if not await _granted(self._trial, sitter) or not await self._all_heard(sitter):
                return False
            await self._book.commit({"crashes": self.accused})
            self.accused = 0
        if self.place is None:
            self.place = self._crew.places.ask(sitter.nudge)
        return await _granted(self.place, sitter)

    async def _all_heard(self, sitter: Sitter) -> bool:
        """No trial begins while others that were claimed along with this one still bear a crash they may not have
        caused: were this one to end the process now, they would be blamed for it."""
        with anyio.move_on_after(PATIENCE):
            while self._crew.accused and not sitter.attention:
                await sitter.nudged()
        return not sitter.attention

    @property
    def is_away(self) -> bool:
        """Whether the step waits for a child, which may have to be claimed before it goes on."""
        return self._absences > 0

    def leave(self) -> None:
        if self.place is not None:
            self._crew.places.give_back(self.place)
            self.place = None

    def close(self) -> None:
        """The execution runs no more here. A task that its step has left behind may still come back from a child."""
        self._closed = True
        self.leave()
        self.acquit()

    async def suspect(self, sitter: Sitter) -> None:
        """What was in flight at several crashes runs alone until it has got somewhere. Until its turn has come a death
        of the process says nothing about it, so the one that its next claim would count is taken off."""
        crashes = self._book.head.crashes
        if crashes >= SUSPECT:
            self._trial = self._crew.suspects.ask(sitter.nudge)
            self._book.on_progress = self.acquit
            self.accused = crashes
            await self._book.commit({"crashes": crashes - 1})
        self._crew.heard(self._book.id)

    def acquit(self) -> None:
        if self._trial is not None:
            self._crew.suspects.give_back(self._trial)
            self._trial = self._book.on_progress = None

    @asynccontextmanager
    async def away(self, sitter: Sitter) -> AsyncIterator[None]:
        """While the step waits for a child, another execution may run in its place: even the child of a suspect."""
        self._absences += 1
        self.leave()
        self.acquit()
        sitter.nudge()  # another task of the step may wait for the place that was just given up
        try:
            yield
        except Exception:  # the step may go on all the same
            await self._back(sitter)
            raise
        except BaseException:  # cancelled, perhaps by a time-out of the step's own: there is no waiting here
            self._ask_again(sitter)
            raise
        await self._back(sitter)

    def _ask_again(self, sitter: Sitter) -> None:
        self._absences -= 1
        if self._absences == 0 and self.place is None and not self._closed:
            self.place = self._crew.places.ask(sitter.nudge)

    async def _back(self, sitter: Sitter) -> None:
        """Wait for the place, unless another task of the step is away, or has gone away again: then there is none."""
        self._ask_again(sitter)
        while self.place is not None and not self.place.granted and not sitter.attention:
            await sitter.nudged()


async def _granted(ticket: Ticket | None, sitter: Sitter) -> bool:
    while ticket is not None and not ticket.granted:
        if sitter.attention:
            return False
        await sitter.nudged()
    return True
