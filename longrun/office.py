"""What an executor and a client have in common: they are entered and left, and take in new executions.

Place in the life of an execution: start, and leaving.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import anyio

from longrun import pipe
from longrun.crew import Crew
from longrun.desk import UNCHANGED, check_delay, check_name, check_priority
from longrun.errors import ConfigError, ExecutionExistsError, NonRetryable
from longrun.events import Listener
from longrun.handle import ExecutionHandle
from longrun.queues import QueueDesk
from longrun.records import Checkpoint, ExecutionState
from longrun.registry import Workflow


class Office(QueueDesk, Crew, abc.ABC):
    """A crew with a door."""

    _on_event: Listener | None = None
    _entered = False

    @abc.abstractmethod
    def find_workflow(self, workflow: Any) -> Workflow:
        """What `submit` was given, as a workflow; raise if it cannot be one."""

    async def __aenter__(self) -> Self:
        if pipe.loading_main:
            raise NonRetryable(
                "a child process loads this program to find its step and must not run it: "
                "put what runs it under `if __name__ == '__main__':`"
            )
        if self._entered:
            raise ConfigError(type(self).__name__.lower(), "entered", "it can be entered once; make another one")
        self._entered = True
        await self.store.open()
        try:
            await self.sign_on(self._on_event)
        except BaseException:
            await self.store.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Shielded: what is unfinished must be written down and given back even when the program is being cancelled.
            with anyio.CancelScope(shield=True):
                try:
                    await self.drain()
                except BaseException:  # a second Ctrl-C: no more patience, but what was begun is still given back
                    await self.cut_short()
                    raise
                finally:
                    await self.give_back()
        finally:
            self.closed = True
            self.look()
            try:
                await self.sign_off()
            finally:
                await self.store.aclose()

    async def submit(
        self,
        workflow: Any,
        state: Any = None,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float | timedelta | None = None,
    ) -> ExecutionHandle:
        """Store a new execution for any worker that knows the workflow. An `id` given before returns its handle."""
        seconds = check_delay(delay)
        due = None if seconds is None else self.clock.now() + seconds
        head = self.first_head(ExecutionState.INITIALIZED, due=due)
        found = self.find_workflow(workflow)
        check_name("queue", queue)
        check_priority(priority)
        made = self.new(found, state, head, id=id, metadata=metadata, queue=queue, priority=priority)
        await self.note_queue(queue)
        if not await self.create(made):
            await self.find_or_create(made, found)
        return ExecutionHandle(self, made.id)

    async def fork(
        self,
        id: str,
        *,
        checkpoint: Checkpoint | int | str | None = None,
        state: Any = UNCHANGED,
        new_id: str | None = None,
    ) -> ExecutionHandle:
        """A new execution from an old boundary, without its signals, children and in-step data. From the one at which
        the old execution waits, the new one waits too; from one whose wait is over, it goes on at once. A copy of what
        was submitted with a delay that is not over is submitted with the rest of it."""
        self.check_signed_on()
        made = await self.forked(id, checkpoint, state, new_id, owner=self.owner if self.runs_here else None)
        await self.note_queue(made.definition.queue)
        if not await self.create(made, {"forked_from": id}):
            taken = await self.store.load(made.id)
            raise ExecutionExistsError(made.id, taken.definition.workflow)
        return ExecutionHandle(self, made.id)
