"""Claim: take up what nobody alive is running. At start for everything; then again and again for what becomes free.

Place in the life of an execution: claim. Many processes may sweep at once: a claim is one atomic act of the store, and
a sweep that dies in the middle leaves nothing half done. Within one program, claims are made one after the other.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from attrs import define, field

from longrun import lease
from longrun.book import MISSING
from longrun.errors import (
    CodecError,
    ExecutionNotFoundError,
    KeyUnavailableError,
    LongrunError,
    RegistrationError,
    UnknownStepError,
)
from longrun.gates import Gates
from longrun.life import Life, is_dead
from longrun.records import FINISHED, ExecutionState, ResumeReport
from longrun.registry import AD_HOC
from longrun.snapshot import decode_state
from longrun.stored import Claim, Head, Loaded, Query, Save, Stored

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
BATCH = 500
SHORTEST = 0.02
"""A sweep follows another after this many seconds at the earliest, however much changes."""
NEIGHBOURS = 0.25
"""Seconds between two looks at whether the others on this machine still live."""
AT_ONCE = 16
"""So many of them in one look."""
STARTUP_STATES = frozenset({State.RUNNING, State.RESUMING, State.PAUSED, State.BLOCKED})
SWEPT_STATES = frozenset({State.RUNNING, State.RESUMING, State.WAITING})
PARKED_STATES = frozenset({State.WAITING, State.INITIALIZED})
UNFINISHED = frozenset(State) - FINISHED
HIDDEN = 1.0
"""How long to wait at most while something is due that is not taken here: what becomes due behind it is not seen."""


@define
class _Report:
    resumed: list[str] = field(factory=list)
    skipped: dict[str, str] = field(factory=dict)
    blocked: dict[str, str] = field(factory=dict)


class Sweeper:
    """Looks for executions to run, for one executor, and makes its claims."""

    def __init__(self, executor: Crew, states: frozenset[ExecutionState] = SWEPT_STATES) -> None:
        self._executor = executor
        self._states = states
        self._dead_at = -1.0
        self._dead: frozenset[str] = frozenset()
        self._neighbours: list[Life] = []
        """Who lives on this machine, as of the last look."""
        self._claiming = anyio.Lock()
        self.gates = Gates(executor, self, self._claiming)
        self._timers: list[tuple[float, str]] = []
        self.unsure = False
        """Whether something may be owned here that has no runner: a start or a claim whose answer never came."""

    # one execution

    async def take_over(self, loaded: Loaded, states: frozenset[ExecutionState] = UNFINISHED) -> bool:
        """Claim an execution that nobody alive runs, and run it here; False if it belongs to somebody else."""
        executor, id, owner = self._executor, loaded.definition.id, loaded.head.owner
        async with self._claiming:
            if id in executor.runners:
                return True
            if executor.draining or id in executor.starting or not await self._may_take(owner):
                return False
            if self._waits_at_gate(loaded):
                return await self._leave_at_gate(id)
            dead = frozenset() if owner is None else frozenset([owner])
            for taken in await self._claim((id,), states, dead):
                self.take_up(taken)
                return True
            return False

    def _waits_at_gate(self, loaded: Loaded) -> bool:
        """Whether it rests here, its signal or its time has come, and its queue is limited: it waits for room like any
        other. What it was asked to do is done at once."""
        resting = loaded.definition.id in self._executor.resting and loaded.head.state is State.WAITING
        asked = any(message.kind != "signal" for message in loaded.messages)
        return resting and not asked and self.gates.limits(loaded.definition.queue)

    async def _leave_at_gate(self, id: str) -> bool:
        released = await self.release(id, self._executor.resting[id])
        self._executor.resting.pop(id, None)
        self._executor.stir()
        return released

    async def release(self, id: str, head: Head) -> bool:
        """Give back what is owned here and has no runner; False if it cannot be."""
        self._executor.heard(id)
        try:
            await self._executor.store.save(
                Save(id=id, head=attrs.evolve(head, owner=None, revision=head.revision + 1))
            )
        except LongrunError as error:
            self._executor.log.warning("execution.not_released", execution=id, error_type=type(error).__name__)
            return False
        return True

    async def _may_take(self, owner: str | None) -> bool:
        if owner is None or owner == self._executor.owner:
            return True
        owners = await self._executor.store.owners()
        return owner not in {one.id for one in owners} - lease.gone(owners)

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
            dead=dead,
            limit=len(ids),
        )
        return await self.ask(claim)

    async def ask(self, claim: Claim) -> list[Loaded]:
        try:
            claimed = await self._executor.store.claim(claim)
        except BaseException as error:  # cancelled or failed: the claim may have been made all the same
            self.unsure = True
            if claim.owner not in claim.dead or not isinstance(error, KeyUnavailableError):
                self._executor.stir()  # else it is known by now whose key it is: no reason to ask without a break
            raise
        self._executor.accuse(claimed)
        return claimed

    def take_up(self, loaded: Loaded, **how: Any) -> None:
        """Run what was claimed, if it is known here; otherwise only obey its messages."""
        known = self._executor.registry.knows(loaded.definition.workflow, loaded.definition.steps)
        self._executor.run(loaded, controls_only=not known, **how)

    def set_timer(self, head: Head, id: str) -> None:
        """Something parked here has to be looked at then."""
        if head.due is not None:
            heapq.heappush(self._timers, (head.due, id))
        self._executor.stir()

    # the pass at start

    async def resume_all(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here; the report says what became of each."""
        report = _Report()
        await self.gates.look()
        query = Query(states=STARTUP_STATES, limit=BATCH)
        alive, dead = await self._owners()
        while page := await self._executor.store.find(query):
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id))
            if not {stored.head.owner for stored in page} <= alive | dead | {None}:
                alive, dead = await self._owners()  # somebody may have come since they were asked for
            wanted: list[Stored] = []
            for stored in page:
                reason = await self._not_ours(stored, alive, dead)
                if reason is None:
                    wanted.append(stored)
                elif stored.definition.id not in self._executor.runners:
                    report.skipped[stored.definition.id] = reason
            await self._take_all(wanted, dead, report)
        holders = await self._holders()
        alive, dead = await self._owners()
        await self._bury(dead | holders - alive)
        return ResumeReport(resumed=tuple(report.resumed), skipped=report.skipped, blocked=report.blocked)

    async def _owners(self) -> tuple[frozenset[str], frozenset[str]]:
        """Who lives, and who does not."""
        owners = await self._executor.store.owners()
        dead = lease.gone(owners, but=self._executor.owner)
        return frozenset(owner.id for owner in owners) - dead | {self._executor.owner}, dead

    async def _not_ours(self, stored: Stored, alive: frozenset[str], dead: frozenset[str]) -> str | None:
        """Why an execution is left as it is; None if it is to be taken up."""
        head = stored.head
        if not stored.definition.workflow:
            return None  # damaged so that nobody can say whose it is: it is told here too
        if not await self._knows(stored):
            return "not registered here"
        if head.state is State.PAUSED and head.hold:
            return "held: it stays paused until it is resumed"
        if head.owner in alive:
            return f"owned by {head.owner}, which is alive"
        queue, swept = stored.definition.queue, head.owner is None or head.owner in dead
        if self.gates.limits(queue) and head.state in self.states and swept:
            return f"its queue {queue!r} is limited: it is taken up when there is room"
        return None

    async def _knows(self, stored: Stored) -> bool:
        name = stored.definition.workflow
        if not name.startswith(AD_HOC):
            return self._executor.registry.knows(name)
        if name in self._executor.ad_hoc:
            return True
        try:
            loaded = await self._executor.store.load(stored.definition.id)
        except (CodecError, ExecutionNotFoundError, KeyUnavailableError):
            return False
        if not self._executor.registry.knows(name, loaded.definition.steps):
            return False
        self._executor.ad_hoc.add(name)
        return True

    async def _take_all(self, wanted: list[Stored], dead: frozenset[str], report: _Report) -> None:
        """Claim what was found, all together; if one of them cannot be read, one by one."""
        ids = tuple(stored.definition.id for stored in wanted)
        dead = dead | {stored.head.owner for stored in wanted if stored.head.owner is not None}
        async with self._claiming:
            try:
                taken = await self._claim(ids, STARTUP_STATES, dead)
                for loaded in taken:
                    await self._take(loaded, report)
            except (CodecError, KeyUnavailableError):
                for id in ids:
                    await self._take_one(id, dead | {self._executor.owner}, report)
            else:
                for id in set(ids) - {loaded.definition.id for loaded in taken}:
                    await self._tell_unreadable(id, report)

    async def _tell_unreadable(self, id: str, report: _Report) -> None:
        """A store gives nobody what it cannot read: it shows it as blocked, and loading it says why (I5)."""
        try:
            await self._executor.store.load(id)
        except CodecError as error:
            self._unreadable(id, error, report)
        except ExecutionNotFoundError:
            pass  # it was deleted meanwhile

    async def _take_one(self, id: str, dead: frozenset[str], report: _Report) -> None:
        if id in self._executor.runners:
            return
        try:
            for loaded in await self._claim((id,), STARTUP_STATES, dead):
                await self._take(loaded, report)
        except CodecError as error:
            await self._set_aside(id, str(error))
            self._unreadable(id, error, report)
        except KeyUnavailableError as error:  # looked at again by the sweep, which knows that something is left
            report.skipped[id] = str(error)

    def _unreadable(self, id: str, error: CodecError, report: _Report) -> None:
        report.blocked[id] = str(error)
        self._executor.log.error("execution.unreadable", execution=id, error_type=type(error).__name__)

    async def _take(self, loaded: Loaded, report: _Report) -> None:
        reason, value = self.unusable(loaded)
        id = loaded.definition.id
        if reason is None:
            report.resumed.append(id)
            self.take_up(loaded, value=value, wakes_paused=True)
        else:
            report.blocked[id] = reason
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
        except (CodecError, RegistrationError) as error:
            return str(error), MISSING

    async def _holders(self) -> frozenset[str]:
        """Who has parked executions. After a power cut the store may not know them any more, which means that they are
        dead, and nobody else would ask for what they held."""
        found: set[str] = set()
        query = Query(states=self.states & PARKED_STATES, owned=True, limit=BATCH)
        while page := await self._executor.store.find(query):
            found.update([stored.head.owner for stored in page if stored.head.owner is not None])
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        return frozenset(found)

    async def _bury(self, dead: frozenset[str]) -> None:
        """Take from the dead what they had only just claimed and was not due otherwise; then forget those of whom
        nothing is left."""
        store, states = self._executor.store, self.states & PARKED_STATES
        for owner in dead:
            page = await store.find(Query(owner=owner, states=states, limit=BATCH))
            ids = tuple([stored.definition.id for stored in page if await self._knows(stored)])
            async with self._claiming:
                try:
                    claimed = await self._claim(ids, states, frozenset([owner]))
                except KeyUnavailableError:  # they are owned here now: the next sweep finds them, one by one
                    continue
                for loaded in claimed:
                    if self.gates.limits(loaded.definition.queue):
                        await self.release(loaded.definition.id, loaded.head)
                    else:
                        self.take_up(loaded)
            if not await store.count(Query(owner=owner)):
                await store.unregister(owner)

    # the sweep that goes on

    @property
    def states(self) -> frozenset[ExecutionState]:
        """What is taken up: without `auto_resume` only what was parked, which nobody else may be there to wake."""
        return self._states if self._executor.takes_work else self._states & {State.WAITING}

    async def run(self) -> None:
        """Sweep whenever something changed, something is due, and every heartbeat."""
        executor = self._executor
        while True:
            changed, began = executor.stirred, executor.clock.monotonic()
            with executor.clock.busy():
                seconds = await self._sweep()
                await anyio.sleep(SHORTEST)  # a breath for the machine: real time, whatever the clock
            await executor.clock.wait(changed, began + seconds - executor.clock.monotonic())
            if executor.stirred.is_set():
                executor.stirred = anyio.Event()

    async def _sweep(self) -> float:
        """One sweep; in how many seconds the next one is due, whatever happens."""
        executor, now = self._executor, self._executor.clock.now()
        try:
            taken = await self.once()
            return await self._until_due(executor.config.heartbeat_interval, now, taken)
        except LongrunError as error:
            executor.log.warning("sweep.failed", error_type=type(error).__name__)
        except Exception as error:  # a defect of ours must not take the executions along
            executor.log.exception("sweep.defect", error_type=type(error).__name__)
        return executor.config.heartbeat_interval

    async def _until_due(self, seconds: float, now: float, taken: int) -> float:
        """How long to wait: until the next moment, or for a while if what is due is for others to take, or waits for
        room in its queue."""
        due = await self._executor.store.next_due()
        moments = []
        if due is not None and (taken or due > now):
            moments.append(due)
        elif due is not None and self._executor.known_workflows():
            moments.append(now + HIDDEN)
        if self._timers:
            moments.append(self._timers[0][0])
        if self.gates.moment is not None:
            moments.append(self.gates.moment)
        return min([seconds, *(max(SHORTEST, moment - now) for moment in moments)])

    async def once(self) -> int:
        """Deliver messages to what is owned here, and take up what is due and free; how many were taken."""
        executor = self._executor
        executor.look()
        knows_any = bool(executor.known_workflows())
        if knows_any:
            await executor.show_workflows()
            await self.gates.look()
        if self.unsure:
            await self._find_lost()
        if executor.runners or executor.resting:
            for id in await executor.store.pending(executor.owner):
                await self._deliver(id)
        await self._ring()
        room = executor.room_for()
        dead = await self._look_for_dead()
        if room <= 0 or executor.draining or not knows_any:
            return 0
        claim = Claim(
            owner=executor.owner,
            now=executor.clock.now(),
            states=self.states,
            workflows=executor.known_workflows(),
            queues=executor.queues,
            dead=dead,
            limit=min(room, BATCH),
        )
        return await self._take_due(claim)

    async def _take_due(self, claim: Claim) -> int:
        """Take what is due and free, from limited queues only what they have room for; how many were taken."""
        taken = 0
        for queue, part in self.gates.split(claim):
            if taken >= claim.limit:
                break
            part = attrs.evolve(part, limit=claim.limit - taken)
            taken += await (self._take_open(part) if queue is None else self.gates.take(queue, part))
        return taken

    async def _take_open(self, claim: Claim) -> int:
        async with self._claiming:
            taken = await self.ask(claim)
            for loaded in taken:
                self.take_up(loaded)
        return len(taken)

    async def _deliver(self, id: str) -> None:
        try:
            await self._executor.deliver(id)
        except LongrunError as error:  # one that cannot be read does not keep the others from their messages
            self._executor.log.warning("deliver.failed", execution=id, error_type=type(error).__name__)

    async def claims_made(self, seconds: float) -> None:
        """Return when no claim is under way, or after so many seconds."""
        with anyio.move_on_after(seconds):
            async with self._claiming:
                pass

    async def _look_for_dead(self) -> frozenset[str]:
        """Owners whose executions may be taken. Looking costs a query, so the answer serves for half a heartbeat: not
        for a whole one, lest the sweep that comes with the next beat a moment early makes do with the last answer."""
        now = self._executor.clock.monotonic()
        if now >= self._dead_at:
            owners = await self._executor.store.owners()
            self._dead = lease.gone(owners, but=self._executor.owner)
            living = [owner for owner in owners if owner.id not in self._dead]
            self._neighbours = lease.neighbours(living, but=self._executor.owner)
            self._dead_at = now + self._executor.config.heartbeat_interval / 2
            if self._dead:
                await self._bury(self._dead)
        return self._dead

    async def mind_neighbours(self) -> None:
        """Sweep as soon as somebody dies on this machine, and not only at the next heartbeat. A look is a few calls of
        the kernel for each, in real time whatever the clock."""
        while True:
            await anyio.sleep(NEIGHBOURS)
            looked_at, rest = self._neighbours[:AT_ONCE], self._neighbours[AT_ONCE:]
            self._neighbours = rest + looked_at
            if any(map(is_dead, looked_at)):
                self._neighbours, self._dead_at = [], -1.0
                self._executor.stir()

    async def _ring(self) -> None:
        """The time has come for something that rests here; what was given back is claimed like anybody's. Nobody else
        would wake it: a timer goes only when that is done."""
        now, rung = self._executor.clock.now(), []
        try:
            while self._timers and self._timers[0][0] <= now:
                rung.append(heapq.heappop(self._timers))
                if await self._woken(rung[-1][1]):
                    rung.pop()
        finally:
            for timer in rung:
                heapq.heappush(self._timers, timer)

    async def _woken(self, id: str) -> bool:
        """Run what rests here; True also if it no longer does, or cannot be read. False: not now."""
        resting = self._executor.resting
        if id not in resting:
            return True
        try:
            loaded = await self._executor.store.load(id)
            if loaded.head.owner != self._executor.owner:
                resting.pop(id, None)
            return await self.take_over(loaded) or id not in resting
        except (CodecError, ExecutionNotFoundError) as error:
            self._executor.log.warning("deliver.failed", execution=id, error_type=type(error).__name__)
            return True
        except KeyUnavailableError:
            heapq.heappush(self._timers, (self._executor.clock.now() + HIDDEN, id))
            return True  # not now, and no reason to keep the others waiting

    async def _find_lost(self) -> None:
        """Run what the store gave to this owner although the answer never came."""
        executor = self._executor
        self.unsure = False
        try:
            async with self._claiming:
                page = await executor.store.find(Query(owner=executor.owner, states=UNFINISHED, limit=10_000))
                for stored in page:
                    if not executor.has(stored.definition.id):
                        await self._find_one(stored)
        except BaseException:
            self.unsure = True
            raise

    async def _find_one(self, stored: Stored) -> None:
        executor = self._executor
        try:
            for loaded in await self._claim((stored.definition.id,), UNFINISHED, frozenset([executor.owner])):
                self.take_up(loaded)
        except CodecError as error:
            await self._set_aside(stored.definition.id, str(error))
        except KeyUnavailableError as error:  # it stays in doubt, for the next sweep; the others do not wait for it
            executor.log.warning("execution.key_unavailable", execution=stored.definition.id, key=error.key_id)

    async def _set_aside(self, id: str, reason: str) -> None:
        """What was claimed and cannot be read is blocked by its head alone."""
        store, owner = self._executor.store, self._executor.owner
        for stored in await store.find(Query(owner=owner, states=UNFINISHED, limit=10_000)):
            if stored.definition.id == id:
                head = attrs.evolve(
                    stored.head, state=State.BLOCKED, owner=None, reason=reason, revision=stored.head.revision + 1
                )
                await store.save(Save(id=id, head=head))
