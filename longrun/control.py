"""Obey: what an owner does about the control messages of its execution.

Place in the life of an execution: between steps, and at the points inside them. Messages are obeyed in one durable
write that takes them, so that a request is either still waiting or already true.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from longrun import codec
from longrun.book import Book
from longrun.errors import (
    CodecError,
    ExecutionBlockedError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
)
from longrun.events import EventType
from longrun.inbox import stored_numbers
from longrun.outbox import back_off
from longrun.records import ExecutionState
from longrun.stored import Head, Message, blocked_for_good, was_queued, was_waiting

if TYPE_CHECKING:
    from longrun.crew import Crew
    from longrun.runner import Runner

State = ExecutionState
STOPPED = frozenset({State.PAUSED, State.BLOCKED, State.FAILED})
"""States that a resume or a retry ends, and in which the state can be replaced."""


def stops_at_once(messages: Mapping[int, Message]) -> bool:
    """Whether a message asks to interrupt the step in flight."""
    return any(m.kind == "cancel" or (m.kind == "pause" and m.options.get("interrupt")) for m in messages.values())


def cancelling(messages: Mapping[int, Message]) -> bool:
    return any(m.kind == "cancel" for m in messages.values())


def goes_on_anyway(orders: list[Message]) -> bool:
    """Whether what was asked comes to nothing for an execution that runs: a second resume, a pause taken back."""
    return bool(orders) and orders[-1].kind == "resume" and not any(message.kind == "cancel" for message in orders)


def orders_in(messages: Mapping[int, Message]) -> list[Message]:
    """The control messages, in the order in which they came."""
    return [message for message in messages.values() if message.kind != "signal"]


class Obedience:
    """Applies control messages to one owned execution."""

    def __init__(self, executor: Crew, book: Book, *, controls_only: bool) -> None:
        self._executor, self._book = executor, book
        self._controls_only = controls_only
        """Whether the execution is only controlled here, not run: it goes on wherever its workflow is known."""

    async def obey(self, orders: list[Message]) -> bool:
        """Do what the messages ask, in one write that takes them; False if the execution stops here."""
        take = stored_numbers(orders)
        if self._book.head.state is State.FAILED:
            orders = _from_retry_on(orders)
        if not orders:
            await self._book.commit({}, take=take)
            return True
        cancel = next((m for m in orders if m.kind == "cancel"), None)
        if cancel is not None:
            await self._cancel(cancel, take)
            return False
        if not await self._replace_state(orders, take):
            return False
        if orders[-1].kind == "pause":
            await self._pause(_pauses_at_end(orders), take)
            return False
        await self._go_on(orders[-1], take)
        return True

    async def _cancel(self, message: Message, take: tuple[int, ...]) -> None:
        book = self._book
        head, reason = book.head, message.options.get("reason")
        boundary = book.boundary("cancel", error=reason)
        attempt = head.attempt + 1 if self._has_begun() else head.attempt
        changes = {
            "state": State.CANCELLED,
            "owner": None,
            "due": None,
            "signal": None,
            "hold": False,
            "reason": reason,
            "ended": boundary.ended,
            "attempt": attempt,
        }
        event = (EventType.EXECUTION_CANCELLED, {"error": reason, "attempt": attempt})
        await book.cross(boundary, changes, events=(event,), take=take)

    def _has_begun(self) -> bool:
        """Whether there is an attempt behind those that have failed: not before its time has come."""
        head = self._book.head
        backs_off = head.attempt > 0 and head.due is not None and head.due > self._executor.clock.now()
        return head.started is not None and not backs_off

    async def _pause(self, pauses: list[Message], take: tuple[int, ...]) -> None:
        book = self._book
        hold = any(message.options.get("hold") for message in pauses)
        if book.head.state is State.PAUSED:
            await book.commit({"hold": hold or book.head.hold}, take=take)
            return
        keeps = self._executor.keeps_paused and not self._controls_only and not self._executor.draining
        changes = {
            "state": State.PAUSED,
            "hold": hold,
            "reason": None,
            "owner": book.head.owner if keeps else None,
        }
        event = (EventType.PAUSED, {"attempt": book.head.attempt + 1, "data": {"hold": hold}})
        await book.cross(book.boundary("pause"), changes, events=(event,), take=take)

    async def _go_on(self, message: Message, take: tuple[int, ...]) -> None:
        """A resume or a retry. Where nothing has to change (a pause that never took effect), only the message goes."""
        book = self._book
        head = book.head
        owner = None if self._controls_only else head.owner
        if (rests := self._goes_back_to(head)) is not None:
            changes = {"state": rests, "hold": False, "reason": None, "owner": owner, "crashes": 0}
            await book.cross(book.boundary(message.kind), changes, events=((EventType.RESUMED, {}),), take=take)
            return
        if head.state not in STOPPED:
            await book.commit({"owner": owner}, take=take)
            return
        boundary = book.boundary(message.kind)
        again = message.kind == "retry"
        resumed = {
            "state": State.RESUMING if self._controls_only else State.RUNNING,
            "owner": owner,
            "hold": False,
            "reason": None,
            "error": None,
            "ended": None,
            "crashes": 0,
            "attempt": 0 if again else head.attempt,
            "due": head.due if head.attempt and not again else None,
            "started": boundary.ended,
        }
        await book.cross(boundary, resumed, events=((EventType.RESUMED, {}),), take=take)

    def _goes_back_to(self, head: Head) -> ExecutionState | None:
        """The state in which what is resumed waits as it did before it was stopped; None if it goes on at once. What
        had only been submitted goes back into its queue, to be counted there when it begins; where it was asked for by
        its id and can run, only if it is not due yet."""
        if was_queued(head) and (self._controls_only or (head.due is not None and self._takes_queued)):
            return State.INITIALIZED
        return State.WAITING if was_waiting(head) else None

    @property
    def _takes_queued(self) -> bool:
        return State.INITIALIZED in self._executor.sweeper.claims.states

    async def _replace_state(self, orders: list[Message], take: tuple[int, ...]) -> bool:
        """`resume(state=…)`: a new boundary with the given state; the old one stays in the history. By the time it is
        obeyed somebody else may have resumed the execution: what runs keeps its state."""
        message = next((m for m in reversed(orders) if m.payload is not None), None)
        book = self._book
        if message is None or message.payload is None or book.head.state not in STOPPED:
            return True
        kind = book.state_type
        try:
            snapshot = book.snapshot(codec.decode(message.payload, kind), kind)
        except CodecError as error:
            await self.block(str(error), take)
            return False
        boundary = book.boundary("state", snapshot, name=book.step_name or book.last_step)
        await book.cross(boundary, {}, snapshot=snapshot)
        return True

    async def block(self, reason: str, take: tuple[int, ...] = (), *, hold: bool = False) -> None:
        """It cannot go on as it is stored: visible, and free for the next pass or, with `hold`, for a resume alone."""
        book = self._book
        changes = {"state": State.BLOCKED, "owner": None, "reason": reason, **({"hold": True} if hold else {})}
        event = (EventType.EXECUTION_BLOCKED, {"error": reason})
        await book.cross(book.boundary("block", error=reason), changes, events=(event,), take=take)
        self._executor.log.warning(
            "execution.blocked", execution=book.id, workflow=book.definition.workflow, reason=reason
        )

    async def face(self, damage: tuple[str, ...], messages: Mapping[int, Message]) -> bool:
        """Part of it is broken; False if it stays blocked for that. What is to be cancelled is no matter any more, and
        who resumes what was blocked for that has seen it."""
        if cancelling(messages):
            return True
        if not blocked_for_good(self._book.head):
            return await self.accept(damage)
        if any(message.kind == "resume" for message in messages.values()):
            await self.settle_for_less()
        return True

    async def accept(self, damage: tuple[str, ...]) -> bool:
        """Something stored was broken and an older checkpoint took its place: go on from there, and say so (I5). Or
        stay blocked, whoever comes by, until somebody has seen it."""
        reason = "; ".join(damage)
        if self._executor.config.on_corruption == "block":
            await self.block(reason, hold=True)
            return False
        self._executor.log.warning("execution.damaged", execution=self._book.id, reason=reason)
        await self._book.commit({"reason": reason})
        return True

    async def settle_for_less(self) -> None:
        """Somebody has seen the damage and says that it shall go on: what could be read becomes the newest checkpoint,
        so that nobody stumbles over the same damage again."""
        book = self._book
        try:
            snapshot = book.snapshot_again()
        except CodecError:  # nothing could be: whoever resumes it may bring another state
            return
        boundary = book.boundary("state", snapshot, name=book.step_name or book.last_step)
        await book.cross(boundary, {}, snapshot=snapshot)

    async def queue_up(self) -> None:
        """Let it go on when there is room: what is stopped, as if somebody had resumed it who runs nothing."""
        head = self._book.head
        if head.state in STOPPED:
            state = State.WAITING if was_waiting(head) else State.RESUMING
            if was_queued(head) and self._takes_queued:
                state = State.INITIALIZED
            await self._book.commit({"state": state, "owner": None, "hold": False, "reason": None})
        else:
            await self.release()

    async def release(self) -> None:
        """Give the lease back: whoever comes next goes on at once."""
        if self._book.head.owner is not None:
            await self._book.commit({"owner": None})


def _from_retry_on(orders: list[Message]) -> list[Message]:
    """What was sent to an execution before it was retried came too late for the run that failed: it does not count."""
    first = next((n for n, message in enumerate(orders) if message.kind == "retry"), len(orders))
    return orders[first:]


def _pauses_at_end(orders: list[Message]) -> list[Message]:
    others = [n for n, message in enumerate(orders) if message.kind != "pause"]
    return orders[others[-1] + 1 :] if others else orders


async def put_aside(executor: Crew, runner: Runner, reason: str) -> None:
    """It cannot go on here and must not be taken up again at once: blocked, where it can be seen. While that cannot be
    stored it stays here: nobody else could take it, and nobody here would."""
    runner.book.outbox.give_up(ExecutionBlockedError(runner.id, error=reason))
    for tries in itertools.count(1):
        try:
            await _block(executor, runner, reason)
        except LongrunError as error:
            executor.log.error("execution.not_put_aside", execution=runner.id, error_type=type(error).__name__)  # noqa: TRY400 -- a traceback may quote a state
            if executor.draining or isinstance(error, (LeaseLostError, ExecutionNotFoundError)):
                return
        else:
            return
        await runner.linger(back_off(tries))


async def _block(executor: Crew, runner: Runner, reason: str) -> None:
    """Behind what it has written itself: else one of the two would have the number of the other, and count as made."""
    await executor.store.settled()
    try:
        loaded = await executor.store.peek(runner.id)
    except CodecError:
        await executor.sweeper.claims.set_aside(runner.id, reason)
        return
    if loaded.head.owner == executor.owner and loaded.head.fence == runner.head.fence:
        await executor.block(loaded, reason)
