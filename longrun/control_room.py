"""Control from anywhere: durable requests, and waiting for their effect.

Place in the life of an execution: beside it. What runs in this program is told so, and mostly obeys at once: one
write. Any other request is stored first; then whoever owns the execution obeys it, and if nobody alive does, this
program claims the execution and obeys it itself. `Executor` and `Client` are both control rooms; they differ in what
they do with an execution they have claimed.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import anyio
import attrs
from attrs import frozen

from longrun import codec, views
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.desk import UNCHANGED, Desk, check_name, check_timeout, encode_payload
from longrun.errors import (
    ConfigError,
    ExecutionNotFoundError,
    InvalidStateError,
    LongrunError,
    StepMisuseError,
    StoreUnavailableError,
)
from longrun.events import Bus, ExecutionEvent
from longrun.following import RowEvents
from longrun.outbox import back_off
from longrun.records import FINISHED, UNFINISHED, Execution, ExecutionState, check_id
from longrun.registry import StepRegistry
from longrun.stored import Head, Loaded, Message, Query, is_due, was_moved
from longrun.stores.store import CheckpointStore

State = ExecutionState
T = TypeVar("T")
SIGNAL_LIMIT = 1000
BETWEEN = "\x1f"
"""Between a signal's name and its key, which are printable both."""
COST_OF_A_LOOK = 0.0005
HINTS = {
    ("resume", State.FAILED): "use retry",
    ("resume", State.CANCELLED): "use fork, which makes another one of it",
    ("retry", State.CANCELLED): "use fork, which makes another one of it",
    ("retry", State.COMPLETED): "use fork, which makes another one of it",
}
"""What to do instead."""
ELSEWHERE = "it was moved to another store, where it goes on: ask there"
LOOK_AGAIN = 1.0
"""How long to wait for a change before looking anyway, should a notification be lost."""

PAUSABLE = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING, State.WAITING, State.PAUSED})
RESUMABLE = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING, State.WAITING, State.PAUSED, State.BLOCKED})
GOES_ON = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING, State.WAITING})
"""Where nothing has to be asked for: it goes on when it is due and somebody has it."""
EFFECTS = {
    "pause": frozenset[ExecutionState](),
    "resume": FINISHED,
    "cancel": frozenset({State.CANCELLED}),
    "retry": FINISHED,
}
"""The ends after which a request has certainly been answered: what was to go on has gone on. In any other end it came
too late, unless a row says that it took effect before."""


inside: ContextVar[str | None] = ContextVar("longrun_execution", default=None)
"""The execution whose step runs here. It may ask things of itself, but not wait for itself."""


@frozen
class Ended:
    """The end of an execution that ran here."""

    value: Any


class ControlRoom(Desk, abc.ABC):
    """Pause, resume, cancel, signal and retry any execution of a store."""

    runs_here = True
    """Whether what is claimed or forked here also runs here."""

    def __init__(self, store: CheckpointStore, registry: StepRegistry | None, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(store, registry, clock)
        clock.heed(store)
        self.closed = False
        """Whether it has been left: nobody is there any more to see to anything."""
        self.bus = Bus()
        self._changes: dict[str, anyio.Event] = {}
        self._look_at = 0.0

    @property
    def known(self) -> StepRegistry | None:
        return self._known

    def look_here(self, id: str) -> Execution | None:
        """What is known of an execution without asking the store: nothing, unless it runs here."""
        return None

    # requests

    async def pause(
        self, id: str, *, hold: bool = False, interrupt: bool = False, timeout: float | None = None
    ) -> None:
        """Stop at the step's end or its next checkpoint, or at once with `interrupt`. `hold` survives restarts. A step
        may pause its own execution: the call returns at once, and takes effect when the step comes to a point."""
        options = {"hold": bool(hold), "interrupt": bool(interrupt)}
        await self._request(id, "pause", PAUSABLE, options=options, timeout=timeout)

    async def resume(self, id: str, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        """Go on: in the living owner, else here. `state` replaces the state of a paused or blocked execution, and
        leaves what the step in flight has got done, its cursors and memos, as it is."""
        if state is not UNCHANGED:
            current = (await self.store.peek(check_id(id))).head.state
            if current not in (State.PAUSED, State.BLOCKED):
                raise InvalidStateError(id, current, "replace the state of", "pause it first")
        payload = await self._state_payload(id, state)
        await self._request(id, "resume", RESUMABLE, payload=payload, timeout=timeout)

    async def cancel(
        self, id: str, reason: str | None = None, *, children: bool = False, timeout: float | None = None
    ) -> None:
        """End it now, for good. With `children`, everything it started too."""
        if reason is not None and not isinstance(reason, str):
            raise ConfigError("reason", reason, "give a string or None")
        try:
            await self._request(id, "cancel", UNFINISHED, options={"reason": reason}, timeout=timeout)
        finally:  # after the parent, which could start more of them; also if it has ended in its own way
            if children:
                await self._cancel_children(id, reason, timeout)

    async def _cancel_children(self, id: str, reason: str | None, timeout: float | None) -> None:
        parents, failure = [check_id(id)], None
        while parents:  # no recursion: a chain of children can be as long as it likes
            query = Query(parent_id=parents.pop(), limit=500)
            while page := await self.store.find(query):
                last = page[-1].definition
                query = attrs.evolve(query, after=(last.created, last.id))
                for child in page:
                    parents.append(child.definition.id)
                    try:
                        await self.cancel(child.definition.id, reason, timeout=timeout)
                    except (InvalidStateError, ExecutionNotFoundError):
                        pass  # it has ended: its own children may not have
                    except (LongrunError, TimeoutError) as error:  # the others are cancelled all the same
                        failure = failure or error
        if failure is not None:
            raise failure

    async def signal(
        self, id: str, name: str, payload: Any = None, *, key: str | None = None, timeout: float | None = None
    ) -> None:
        """Store a signal, durable on return; a `WaitFor` of that name takes the oldest. A `key` that is repeated for
        one name is ignored, also after the end; the 1,024 newest that were taken are remembered."""
        check_name("name", name)
        if key is not None:
            check_name("key", key)
        check_timeout(timeout)
        head = await self.store.head(check_id(id))
        known = None if key is None else f"{name}{BETWEEN}{key}"
        if head.state.finished:
            if known is not None and await self.store.was_sent(id, known):
                return  # whose answer was lost, perhaps: it may have ended of that very signal
            raise InvalidStateError(id, head.state, "signal")
        if was_moved(head):
            raise InvalidStateError(id, head.state, "signal", ELSEWHERE)
        data = None if payload is None else encode_payload(payload, "payload")
        message = Message(kind="signal", name=name, key=known, payload=data, sent=self.clock.now())
        with anyio.fail_after(timeout):
            await self.store.send(id, message, limit=SIGNAL_LIMIT)

    async def retry(self, id: str, *, state: Any = UNCHANGED, timeout: float | None = None) -> None:
        """Run a failed execution again at the step that failed, with its progress inside the step."""
        payload = await self._state_payload(id, state)
        await self._request(id, "retry", frozenset({State.FAILED}), payload=payload, timeout=timeout)

    async def _state_payload(self, id: str, state: Any) -> bytes | None:
        if state is UNCHANGED:
            return None
        loaded = await self.store.peek(check_id(id))
        return self.encode_state(loaded, state)

    def encode_state(self, loaded: Loaded, state: Any) -> bytes:
        """A state given from outside, in the place of the one that is stored."""
        return codec.encode(state, views.state_type(loaded.definition.steps, loaded.boundary, self._known))

    async def _request(
        self,
        id: str,
        kind: str,
        allowed: frozenset[ExecutionState],
        *,
        options: dict[str, Any] | None = None,
        payload: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        message = Message(kind=kind, options=options or {}, payload=payload, sent=self.clock.now())
        within = check_timeout(timeout)
        deadline = math.inf if within is None else anyio.current_time() + within
        told = self.tell(check_id(id), message, allowed)
        if told is not None and await self.obeyed_soon(id, told, deadline):
            return
        loaded = await self.store.peek(id)
        if kind == "cancel" and loaded.head.state is State.CANCELLED:
            return
        if loaded.head.state not in allowed:
            raise InvalidStateError(id, loaded.head.state, kind, HINTS.get((kind, loaded.head.state), ""))
        if kind != "resume" and was_moved(loaded.head):
            raise InvalidStateError(id, loaded.head.state, kind, ELSEWHERE)
        message = attrs.evolve(message, id=await self.store.send(id, message, limit=SIGNAL_LIMIT * 2))
        if told is not None:
            self.told_and_stored(id, told, message)
        if kind == "pause" and inside.get() == id and not message.options.get("interrupt"):
            await self.deliver(id)  # its own step asks: it takes effect when the step comes to a point
            return
        if not await self._effect(id, message, loaded.head.seq, deadline):
            raise TimeoutError(f"{kind} of {id!r} is stored and has not taken effect within {timeout} s")

    async def _effect(self, id: str, message: Message, since: int, deadline: float) -> bool:
        """Wait until a request was obeyed; False if it was not by then. If nobody alive owns the execution, see to it
        here, also where there is no time to wait for that: nobody else would."""
        while True:
            changed = self.change_of(id)
            with anyio.CancelScope(deadline=deadline) as waiting:
                if await self.obeyed_here(id, message):
                    return True
            if waiting.cancelled_caught:
                return False
            loaded = await self.store.peek(id)
            state = loaded.head.state
            waits = any(one.id == message.id for one in loaded.messages)
            retries = waits and message.kind == "retry"
            if state.finished and not retries:
                if state in EFFECTS[message.kind] or await self._took_effect(id, message.kind, since):
                    return True
                raise InvalidStateError(id, state, message.kind)
            if not waits:
                return True
            states = frozenset({State.FAILED}) if message.kind == "retry" else UNFINISHED
            if not await self.take_over(loaded, states):
                with anyio.CancelScope(deadline=deadline) as waiting:
                    await self.await_change(changed)
                if waiting.cancelled_caught:
                    return False

    async def _took_effect(self, id: str, kind: str, since: int) -> bool:
        return any(row.kind == kind for row in await self.store.boundaries(id, after=since))

    # waiting

    async def until(self, id: str, states: frozenset[ExecutionState], *, wakes: bool = False) -> Loaded:
        """Wait until an execution is in one of `states`, or has ended. With `wakes`, it is taken up here when it could
        go on and nobody alive has it: the room in its queue may be held by whoever waits."""
        known = self.runs_here
        while True:
            changed = self.change_of(check_id(id))
            loaded = await self.patiently(partial(self.store.load, id), known)
            known = True
            if loaded.head.state in states or loaded.head.state.finished:
                return loaded
            if was_moved(loaded.head):
                raise InvalidStateError(id, loaded.head.state, "wait for", ELSEWHERE)
            refuse_inside(id)
            if wakes and self._is_left(loaded.head):
                await self.patiently(partial(self.take_over, loaded, GOES_ON), known)
            await self.await_change(changed)

    def _is_left(self, head: Head) -> bool:
        """Whether it could go on and nobody alive has it."""
        nobodys = head.owner is None or self.is_known_dead(head.owner)
        return nobodys and head.state in GOES_ON and is_due(head, self.clock.now())

    async def patiently(self, ask: Callable[[], Awaitable[T]], known: bool) -> T:
        """What the store answers. One that is `known` to have answered before is asked again until it does: it is not
        the business of who waits for an execution, least of all of a step, that the store is away for a while."""
        tries = 0
        while True:
            try:
                return await ask()
            except StoreUnavailableError:
                if self.closed or not known:
                    raise
            tries += 1
            await self.clock.sleep(back_off(tries))

    async def await_change(self, changed: anyio.Event) -> None:
        if self.closed:
            raise StoreUnavailableError(self.store.backend.kind, "the executor that was asked has been left")
        with anyio.move_on_after(LOOK_AGAIN):
            await changed.wait()

    def change_of(self, id: str) -> anyio.Event:
        """Set when an execution may have changed. To be asked for before looking, so that no change is missed."""
        return self._changes.setdefault(id, anyio.Event())

    def look(self, id: str | None = None) -> None:
        """An execution may have changed, or any: let who waits for it look. Where very many wait, and somebody else
        changes one, they take turns with other work: each look is a read."""
        if id is not None:
            changed = self._changes.pop(id, None)
            if changed is not None:
                changed.set()
            return
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + len(self._changes) * COST_OF_A_LOOK
            changes, self._changes = self._changes, {}
            for changed in changes.values():
                changed.set()

    # what differs between an executor and a client

    def away(self) -> AbstractAsyncContextManager[Any] | None:
        """What to enter while waiting for another execution, if anything."""
        return None

    async def deliver(self, id: str) -> None:
        """Hand the messages of an execution to its runner, if it runs here."""

    def tell(self, id: str, order: Message, allowed: frozenset[ExecutionState]) -> int | None:
        """Tell a runner of this program, without a stored request; the order's number there, or None without one."""
        return None

    async def obeyed_soon(self, id: str, number: int, deadline: float) -> bool:
        """Whether an order that was told is obeyed soon. If not it is stored, and obeyed together with that."""
        return False

    def told_and_stored(self, id: str, number: int, message: Message) -> None:
        """An order that was told is stored by now: these are one."""

    async def obeyed_here(self, id: str, message: Message) -> bool:
        """Wait for a request to be obeyed by a runner of this program; False if none runs it, or it ends without."""
        return False

    def is_known_dead(self, owner: str) -> bool:
        """Whether somebody was found dead when it was last looked for the dead, if that is done here."""
        return False

    @abc.abstractmethod
    async def take_over(self, loaded: Loaded, states: frozenset[ExecutionState] = UNFINISHED) -> bool:
        """Claim an execution that nobody alive owns, if it is in `states`, and obey its messages; False if it cannot be
        had."""

    async def ended_here(self, id: str) -> Ended | None:
        """Wait for the end of an execution that runs here; None if it does not, or ends without a result."""
        return None

    def events_of(self, id: str) -> AsyncIterator[ExecutionEvent]:
        """The events of one execution from now on, told from its stored rows."""
        return RowEvents(self, id)


def refuse_inside(id: str) -> None:
    if inside.get() == id:
        raise StepMisuseError(f"a step of execution {id!r} cannot wait for that execution itself: it would for ever")
