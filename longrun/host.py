"""What the attempts of a step ask of the execution that they belong to: `attempt.Host`, as far as it needs no task.

Place in the life of an execution: run a step, checkpoint. Contexts of steps, and threads that steps have left behind,
come here; what they see is the book, the inbox and the crew of a runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from longrun.control import goes_on_anyway, orders_in
from longrun.control_room import inside
from longrun.events import EventType
from longrun.inbox import Inbox
from longrun.ledger import Ledger
from longrun.port import StepInfo
from longrun.records import Progress
from longrun.registry import Step

if TYPE_CHECKING:
    from longrun.attempt import Attempt
    from longrun.book import Book
    from longrun.crew import Crew


class StepHost:
    """The side of a runner that its attempts see."""

    id: str
    crew: Crew
    book: Book
    inbox: Inbox
    attempt: Attempt | None
    """The step in flight, while it can be stopped."""

    def step_info(self, step: Step) -> StepInfo:
        return self.book.step_info(step.name)

    def stop_here(self) -> bool:
        orders = orders_in(self.inbox)
        asked = bool(orders) and not goes_on_anyway(orders)
        return asked or self.crew.draining or self.book.outbox.lost is not None

    @property
    def in_its_task(self) -> bool:
        return inside.get() == self.id

    @property
    def goes_on(self) -> bool:
        return self.crew.tasks_go_on

    @property
    def ledger(self) -> Ledger:
        return self.book.ledger

    @property
    def unsaved(self) -> bool:
        return self.book.unsaved

    def save_progress(self, done: Callable[[Any], object]) -> None:
        self._note_progress()
        self.book.submit(done)

    async def commit_progress(self) -> None:
        self._note_progress()
        await self.book.save_progress()

    def _note_progress(self) -> None:
        if self.attempt is not None:
            self.book.progress = self.attempt.progress

    def show_progress(self, progress: Progress) -> None:
        if self.crew.bus.audience:
            self.book.tell_if_quiet(EventType.PROGRESS, data=self.forecast(progress))

    def forecast(self, progress: Progress | None) -> dict[str, Any]:
        return self.crew.forecaster.tell(self.book.definition, self.book.head, progress, self.crew.spawn)

    def shutdown_left(self) -> float | None:
        return self.crew.shutdown_left()
