"""Claim: keep ownership alive, off the event loop's busy path.

Place in the life of an execution: from its claim to its end. One thread renews one lease, which is the lease of all the
executions of an executor, so that a blocked event loop does not lose them. Whether a lease is lost decides only when
to look, and that no step begins until then: what is refused is decided by the fence (I12).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import attrs

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import CodecError, ExecutionNotFoundError, LongrunError
from longrun.life import Life, LifeLock, boot_id, is_dead
from longrun.logging import Log
from longrun.loops import current_loop
from longrun.stored import Head, Owner
from longrun.stores.store import CheckpointStore

TOUCH_EVERY = 600.0


class LeaseKeeper:
    """Renews an owner's lease every `interval` seconds; calls `lost` in the loop when it may have run out."""

    def __init__(
        self,
        store: CheckpointStore,
        lock: LifeLock,
        *,
        interval: float,
        ttl: float,
        lost: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
        workflows: tuple[str, ...] = (),
        queues: tuple[str, ...] = (),
    ) -> None:
        self._store = store
        self._lock = lock
        self._interval, self._ttl = interval, ttl
        self._clock = clock
        self._lost = lost
        self._loop = current_loop()
        self._stopping = threading.Event()
        self._nudge = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longrun-lease", daemon=True)
        self.held_until = 0.0
        """By the monotonic clock: until then nobody takes what is owned here from somebody who lives. Later it may
        belong to others, and have ended there."""
        self._checking = False
        """Whether it is being found out what a lease that had run out has cost."""
        self._asking = False
        """Whether a renewal has no answer yet: while the store is away, others behind it would only pile up."""
        life = lock.life
        self.owner = Owner(id=life.owner, life=life.to_dict(), remaining=ttl, workflows=workflows, queues=queues)

    async def start(self) -> None:
        await self.hold()
        self._thread.start()

    async def hold(self) -> None:
        self.checked(await self.register())

    async def register(self) -> float:
        """Store the owner with a new lease; when that began."""
        asked = self._clock.monotonic()
        await self._store.register(self.owner, self._ttl)
        return asked

    async def show(self, workflows: tuple[str, ...]) -> None:
        """Let others know which workflows are known here, if there are more than at the start."""
        if len(workflows) != len(self.owner.workflows):
            self.owner = attrs.evolve(self.owner, workflows=workflows)
            await self.register()

    def checked(self, since: float) -> None:
        """What is still owned here has been so since then. If that could not be found out (minus infinity), it is asked
        again at the next beat."""
        self.held_until, self._checking = since + self._ttl, False

    def stop(self) -> None:
        self._stopping.set()
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        touched = 0.0
        now = self._clock.monotonic()
        while not self._stopping.is_set():
            wait = now + self._interval - self._clock.monotonic()
            if wait > 0 and self._clock.block(self._nudge, wait):
                return
            now = self._clock.monotonic()
            touched += self._interval
            if touched >= TOUCH_EVERY:
                touched = 0.0
                with contextlib.suppress(OSError):  # a cleaner may come then; the lease is renewed all the same
                    self._lock.touch()
            if self._asking:
                continue
            self._asking = True
            try:
                self._store.renew(self.owner.id, self._ttl, partial(self._renewed, now))
            except LongrunError:
                return  # the store is closed

    def _renewed(self, asked: float, answer: Any) -> None:
        """In the writer's thread. A store that is away is asked again at the next beat. A lease that had run out before
        it was renewed may have cost executions, although the store still knows its owner."""
        self._asking = False
        if isinstance(answer, LongrunError) or self._stopping.is_set():
            return
        if answer is not False and self._clock.monotonic() <= self.held_until:
            self.held_until = asked + self._ttl
            return
        self.held_until = -math.inf
        if not self._checking:
            self._checking = True
            self._loop.call_soon(self._lost)


class Holder(Protocol):
    """Whose executions a lease keeps."""

    store: CheckpointStore
    log: Log
    resting: dict[str, Head]

    @property
    def runners(self) -> Mapping[str, Held]: ...


class Held(Protocol):
    """An execution that runs here."""

    @property
    def head(self) -> Head: ...
    def lose(self) -> None: ...
    def nudge(self) -> None: ...


async def check_ownership(holder: Holder, keeper: LeaseKeeper) -> None:
    """After a lost lease: what is still ours goes on, the rest stops."""
    since = -math.inf
    try:
        asked = await keeper.register()
        for id, runner in list(holder.runners.items()):
            if not await _still_ours(holder.store, id, runner.head):
                runner.lose()
        for id, head in list(holder.resting.items()):
            if not await _still_ours(holder.store, id, head):
                holder.resting.pop(id, None)
        since = asked
    except LongrunError as error:
        holder.log.warning("lease.check_failed", problem=str(error))
    keeper.checked(since)
    for runner in holder.runners.values():
        runner.nudge()


async def _still_ours(store: CheckpointStore, id: str, head: Head) -> bool:
    """By the fence. Of one that cannot be read nobody can tell, so that its next write decides."""
    try:
        return (await store.load(id)).head.fence == head.fence
    except ExecutionNotFoundError:
        return False
    except CodecError:
        return True


def gone(owners: list[Owner], *, but: str | None = None) -> frozenset[str]:
    """The owners whose executions may be taken: proved dead by their kernel lock, or past their lease."""
    return frozenset(owner.id for owner in owners if owner.id != but and (owner.remaining < 0 or _proved(owner)))


def alive(owners: list[Owner], *, but: str | None = None) -> frozenset[str]:
    """All others; `but` is alive, whatever is said of it."""
    return frozenset(owner.id for owner in owners) - gone(owners, but=but)


def _proved(owner: Owner) -> bool:
    life = _life_of(owner)
    return life is not None and is_dead(life)


def neighbours(owners: list[Owner], *, but: str) -> list[Life]:
    """The lives of those whose death could be seen from here."""
    lives = [_life_of(owner) for owner in owners if owner.id != but]
    return [life for life in lives if life is not None and life.boot == boot_id()]


def _life_of(owner: Owner) -> Life | None:
    try:
        return Life.from_dict(dict(owner.life))
    except LongrunError:
        return None  # a record that says nothing usable proves nothing: the lease decides
