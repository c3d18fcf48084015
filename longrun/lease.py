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
        self.held_until = -math.inf
        """By the monotonic clock: until then nobody takes what is owned here from somebody who lives. Later it may
        belong to others, and have ended there."""
        self._until = -math.inf
        """The same for the lease alone, whatever it has cost that it had run out."""
        self._lapses = 0
        """How often it has run out."""
        self._mutex = threading.Lock()
        self._checking = False
        """Whether it is being found out what that has cost."""
        self._asking = False
        """Whether a renewal has no answer yet: while the store is away, others behind it would only pile up."""
        life = lock.life
        self.owner = Owner(id=life.owner, life=life.to_dict(), remaining=ttl, workflows=workflows, queues=queues)

    async def start(self) -> None:
        await self.hold()
        self._thread.start()

    async def hold(self) -> None:
        await self.begin_anew()
        self.held_until = self._until

    async def begin_anew(self) -> int:
        """Store the owner with a new lease; how often one has run out before."""
        asked, lapses = self._clock.monotonic(), self._lapses
        await self._register()
        self._until = asked + self._ttl
        return lapses

    async def _register(self) -> None:
        await self._store.register(self.owner, self._ttl)

    async def show(self, workflows: tuple[str, ...]) -> None:
        """Let others know which workflows are known here, if there are more than at the start."""
        if len(workflows) != len(self.owner.workflows):
            self.owner = attrs.evolve(self.owner, workflows=workflows)
            await self._register()

    def checked(self, lapses: int | None) -> None:
        """What is owned here now has been so since the lease ran out for the last time, which was known to be so often;
        or that could not be found out (None), and is tried again at the next beat."""
        with self._mutex:
            self._checking = False
            if lapses is None:
                self._until = -math.inf
            elif lapses == self._lapses:
                self.held_until = self._until
            else:
                self._doubt()

    def _doubt(self) -> None:
        self.held_until = -math.inf
        if not self._checking:
            self._checking = True
            self._loop.call_soon(self._lost)

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
        with self._mutex:
            lapsed = answer is False or self._clock.monotonic() > self._until
            self._until = asked + self._ttl
            if lapsed:
                self._lapses += 1
                self._doubt()
            elif not self._checking:
                self.held_until = self._until


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
    known: int | None = None
    try:
        lapses = await keeper.begin_anew()
        for id, runner in list(holder.runners.items()):
            if not await _still_ours(holder.store, id, runner.head):
                runner.lose()
        for id, head in list(holder.resting.items()):
            if not await _still_ours(holder.store, id, head):
                holder.resting.pop(id, None)
        known = lapses
    except LongrunError as error:
        holder.log.warning("lease.check_failed", problem=str(error))
    except Exception as error:  # a defect, of a store's perhaps, must not take the executions along
        holder.log.exception("lease.check_defect", error_type=type(error).__name__)
    finally:
        keeper.checked(known)
        for runner in holder.runners.values():
            runner.nudge()


async def _still_ours(store: CheckpointStore, id: str, head: Head) -> bool:
    """By the fence, for which no key is needed. Of one that cannot be read nobody can tell: its next write decides."""
    try:
        return (await store.head(id)).fence == head.fence
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
