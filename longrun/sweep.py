"""Claim: take up what nobody alive is running. At start for everything; then again and again for what becomes free.

Place in the life of an execution: claim. Many processes may sweep at once: a claim is one atomic act of the store, and a
sweep that dies in the middle leaves nothing half done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import attrs

from longrun import lease
from longrun.book import MISSING
from longrun.errors import CodecError, LongrunError, UnknownStepError
from longrun.records import ExecutionState, ResumeReport
from longrun.registry import AD_HOC
from longrun.snapshot import decode_state
from longrun.stored import Claim, Loaded, Query, Stored

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
BATCH = 500
SHORTEST = 0.02
"""A sweep follows another after this many seconds at the earliest, however much changes."""
STARTUP_STATES = frozenset({State.RUNNING, State.RESUMING, State.PAUSED, State.BLOCKED})
SWEPT_STATES = frozenset({State.RUNNING, State.RESUMING, State.WAITING})


class Sweeper:
    """Looks for executions to run, for one executor."""

    def __init__(self, executor: Crew, states: frozenset[ExecutionState] = SWEPT_STATES) -> None:
        self._executor = executor
        self._states = states
        self._dead_at = -1.0
        self._dead: frozenset[str] = frozenset()

    async def dead(self, *, fresh: bool = False) -> frozenset[str]:
        """Owners whose executions may be taken. Looking costs a query, so the answer serves for one heartbeat."""
        now = self._executor.clock.monotonic()
        if fresh or now >= self._dead_at:
            owners = await self._executor.store.owners()
            self._dead = lease.gone(owners, but=self._executor.owner)
            self._dead_at = now + self._executor.config.heartbeat_interval
        return self._dead

    # the pass at start

    async def resume_all(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here; the report says what became of each."""
        resumed: list[str] = []
        skipped: dict[str, str] = {}
        blocked: dict[str, str] = {}
        dead = await self.dead(fresh=True)
        registered = frozenset(owner.id for owner in await self._executor.store.owners())
        query = Query(states=STARTUP_STATES, limit=BATCH)
        while page := await self._executor.store.find(query):
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id))
            wanted: list[str] = []
            unregistered: set[str] = set()
            for stored in page:
                reason = await self._not_ours(stored, dead, registered)
                if reason is None:
                    wanted.append(stored.definition.id)
                    if stored.head.owner is not None:
                        unregistered.add(stored.head.owner)
                elif stored.definition.id not in self._executor.runners:
                    skipped[stored.definition.id] = reason
            for loaded in await self._claim(tuple(wanted), STARTUP_STATES, dead | unregistered):
                await self._take(loaded, resumed, blocked)
        await self._forget(dead)
        return ResumeReport(resumed=tuple(resumed), skipped=skipped, blocked=blocked)

    async def _not_ours(self, stored: Stored, dead: frozenset[str], registered: frozenset[str]) -> str | None:
        """Why an execution is left as it is; None if it is to be taken up."""
        definition, head = stored.definition, stored.head
        if not await self._knows(stored):
            return "not registered here"
        if head.state is State.PAUSED and head.hold:
            return "held: it stays paused until it is resumed"
        owner = head.owner
        if owner == self._executor.owner or (owner is not None and owner in registered and owner not in dead):
            return f"owned by {owner}, which is alive"
        if definition.id in self._executor.runners:
            return "it runs here"
        return None

    async def _knows(self, stored: Stored) -> bool:
        name = stored.definition.workflow
        if not name.startswith(AD_HOC):
            return self._executor.registry.knows(name)
        loaded = await self._executor.store.load(stored.definition.id)
        if not self._executor.registry.knows(name, loaded.definition.steps):
            return False
        self._executor.ad_hoc.add(name)
        return True

    async def _claim(
        self, ids: tuple[str, ...], states: frozenset[ExecutionState], dead: frozenset[str]
    ) -> list[Loaded]:
        if not ids:
            return []
        claim = Claim(
            owner=self._executor.owner,
            now=self._executor.clock.now(),
            states=states,
            ids=ids,
            dead=dead - {self._executor.owner},
            limit=len(ids),
        )
        return await self._executor.claim(claim)

    async def _take(self, loaded: Loaded, resumed: list[str], blocked: dict[str, str]) -> None:
        reason, value = self.unusable(loaded)
        id = loaded.definition.id
        if reason is None:
            resumed.append(id)
            self._executor.run(loaded, value=value)
        else:
            blocked[id] = reason
            await self._executor.block(loaded, reason)

    def unusable(self, loaded: Loaded) -> tuple[str | None, Any]:
        """Why a claimed execution cannot go on here (None if it can), and its decoded state."""
        head, steps = loaded.head, loaded.definition.steps
        if head.crashes >= self._executor.config.max_crashes:
            return f"its process died {head.crashes} times without progress; resume frees it", MISSING
        if loaded.damage and self._executor.config.on_corruption == "block":
            return "; ".join(loaded.damage), MISSING
        if head.step >= len(steps):
            return None, MISSING
        step = self._executor.registry.get(steps[head.step])
        if step is None:
            return str(UnknownStepError(steps[head.step])), MISSING
        boundary = loaded.boundary
        try:
            return None, decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), step.state_type)
        except CodecError as error:
            return str(error), MISSING

    async def _forget(self, dead: frozenset[str]) -> None:
        """Forget dead owners of whom nothing is left to take."""
        for owner in dead:
            if not await self._executor.store.count(Query(owner=owner)):
                await self._executor.store.unregister(owner)

    # the sweep that goes on

    async def run(self) -> None:
        """Sweep whenever something changed, something is due, and every heartbeat."""
        executor = self._executor
        while True:
            seconds = executor.config.heartbeat_interval
            changed = executor.stirred
            try:
                taken = await self.once()
                due = await executor.store.next_due()
                if due is not None and (taken or due > executor.clock.now()):
                    seconds = min(seconds, max(SHORTEST, due - executor.clock.now()))
            except LongrunError as error:
                executor.log.warning("sweep.failed", error_type=type(error).__name__)
            await executor.clock.sleep(SHORTEST)
            await executor.clock.wait(changed, seconds)
            executor.stirred = anyio.Event() if executor.stirred.is_set() else executor.stirred

    async def once(self) -> int:
        """Deliver messages to what is owned here, and take up what is due and free; how many were taken."""
        executor = self._executor
        for id in await executor.store.pending(executor.owner):
            await executor.deliver(id)
        if not executor.takes_work:
            return 0
        dead = await self.dead()
        room = executor.room_for()
        if room <= 0:
            return 0
        claim = Claim(
            owner=executor.owner,
            now=executor.clock.now(),
            states=self._states,
            workflows=executor.known_workflows(),
            queues=executor.queues,
            dead=dead,
            limit=min(room, BATCH),
        )
        taken = await executor.claim(claim)
        for loaded in taken:
            executor.run(loaded)
        return len(taken)
