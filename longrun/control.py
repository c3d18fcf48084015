"""Obey: what an owner does about the control messages of its execution.

Place in the life of an execution: between steps, and at the points inside them. Messages are obeyed in one durable write
that takes them, so that a request is either still waiting or already true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrun import codec
from longrun.book import Book
from longrun.errors import CodecError
from longrun.events import EventType
from longrun.records import ExecutionState
from longrun.stored import Head, Message

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState


def was_waiting(head: Head) -> bool:
    """Whether a paused execution was parked: it goes back to waiting, with the deadline it had."""
    return head.signal is not None or (head.due is not None and head.attempt == 0)


def stops_at_once(messages: dict[int, Message]) -> bool:
    """Whether a message asks to interrupt the step in flight."""
    return any(m.kind == "cancel" or (m.kind == "pause" and m.options.get("interrupt")) for m in messages.values())


def cancelling(messages: dict[int, Message]) -> bool:
    return any(m.kind == "cancel" for m in messages.values())


def needs_point(messages: dict[int, Message]) -> bool:
    """Whether a message has to be obeyed at the next point."""
    return any(m.kind != "signal" for m in messages.values())


class Obedience:
    """Applies control messages to one owned execution."""

    def __init__(self, executor: Crew, book: Book, *, controls_only: bool) -> None:
        self._executor, self._book = executor, book
        self._controls_only = controls_only
        """Whether the execution is only controlled here, not run: it goes on wherever its workflow is known."""

    async def obey(self, inbox: dict[int, Message]) -> bool:
        """Take every control message out of `inbox` and do what they ask; False if the execution stops here."""
        control = [m for m in inbox.values() if m.kind != "signal"]
        for message in control:
            del inbox[message.id]
        if not control:
            return True
        take = tuple(m.id for m in control)
        cancel = next((m for m in control if m.kind == "cancel"), None)
        if cancel is not None:
            await self._cancel(cancel, take)
            return False
        if not await self._replace_state(control):
            return False
        last = control[-1]
        if last.kind == "pause":
            await self._pause(last, take)
            return False
        await self._go_on(last, take)
        return True

    async def _cancel(self, message: Message, take: tuple[int, ...]) -> None:
        book = self._book
        reason = message.options.get("reason")
        boundary = book.boundary("cancel", error=reason)
        head = book.next(
            state=State.CANCELLED,
            owner=None,
            due=None,
            signal=None,
            reason=reason,
            ended=boundary.ended,
            attempt=book.head.attempt + 1 if book.head.started is not None else book.head.attempt,
        )
        event = (EventType.EXECUTION_CANCELLED, {"error": reason, "attempt": head.attempt})
        await book.cross(boundary, head, events=(event,), take=take)

    async def _pause(self, message: Message, take: tuple[int, ...]) -> None:
        book = self._book
        hold = bool(message.options.get("hold"))
        if book.head.state is State.PAUSED:
            await book.commit(book.next(hold=hold or book.head.hold), take=take)
            return
        keeps = self._executor.keeps_paused and not self._controls_only and not self._executor.draining
        head = book.next(
            state=State.PAUSED,
            hold=hold,
            reason=message.options.get("reason"),
            owner=book.head.owner if keeps else None,
        )
        event = (EventType.PAUSED, {"attempt": book.head.attempt + 1})
        await book.cross(book.boundary("pause"), head, events=(event,), take=take)

    async def _go_on(self, message: Message, take: tuple[int, ...]) -> None:
        """A resume or a retry. Where nothing has to change (a pause that never took effect), only the message goes."""
        book = self._book
        head = book.head
        if message.kind == "resume" and head.state is State.PAUSED and was_waiting(head):
            await book.commit(book.next(state=State.WAITING, hold=False, reason=None), take=take)
            return
        stopped = (State.FAILED,) if message.kind == "retry" else (State.PAUSED, State.BLOCKED)
        if head.state not in stopped:
            await book.commit(book.next(), take=take)
            return
        runs = not self._controls_only
        boundary = book.boundary(message.kind)
        resumed = book.next(
            state=State.RUNNING if runs else State.RESUMING,
            hold=False,
            reason=None,
            error=None,
            ended=None,
            crashes=0,
            attempt=0 if message.kind == "retry" else head.attempt,
            due=None,
            started=boundary.ended,
        )
        await book.cross(boundary, resumed, events=((EventType.RESUMED, {}),), take=take)

    async def _replace_state(self, control: list[Message]) -> bool:
        """`resume(state=…)`: a new boundary with the given state; the old one stays in the history."""
        message = next((m for m in reversed(control) if m.payload is not None), None)
        if message is None or message.payload is None:
            return True
        book = self._book
        kind = book.type_of(book.head.step)
        try:
            snapshot = book.snapshot(codec.decode(message.payload, kind), kind)
        except CodecError as error:
            await self.block(str(error), tuple(m.id for m in control))
            return False
        await book.cross(book.boundary("state", snapshot), book.next(), snapshot=snapshot)
        return True

    async def block(self, reason: str, take: tuple[int, ...] = ()) -> None:
        """It cannot go on as it is stored: visible, and free for the next pass or a resume."""
        book = self._book
        head = book.next(state=State.BLOCKED, owner=None, reason=reason)
        event = (EventType.EXECUTION_BLOCKED, {"error": reason})
        await book.cross(book.boundary("block", error=reason), head, events=(event,), take=take)
        self._executor.log.warning("execution.blocked", execution=book.id, workflow=book.definition.workflow)

    async def release(self) -> None:
        """Give the lease back: whoever comes next goes on at once."""
        await self._book.commit(self._book.next(owner=None))
