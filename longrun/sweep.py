"""The sweep: again and again, take up what has become due or free, and deliver what was sent.

Place in the life of an execution: claim. Many processes may sweep at once, and one that dies in the middle of it leaves
nothing half done.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING

import anyio
import attrs

from longrun.claims import BATCH, SWEPT_STATES, Claims
from longrun.dead import Dead
from longrun.errors import CodecError, ExecutionNotFoundError, KeyUnavailableError, LongrunError
from longrun.fitness import SecondLook
from longrun.gates import Gates
from longrun.records import UNFINISHED, ExecutionState, ResumeReport
from longrun.startup import Startup
from longrun.stored import Claim, Head, Loaded

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
SHORTEST = 0.02
"""A sweep follows another after this many seconds at the earliest, however much changes and as long as it goes on."""
AT_ONCE = 5
"""So many may follow each other at once after a rest of as many times that: a change alone is not kept waiting."""
HIDDEN = 1.0
"""How long to wait at most while something is due that is not taken here: what becomes due behind it is not seen."""


class Sweeper:
    """Looks for executions to run, for one executor."""

    def __init__(self, executor: Crew, states: frozenset[ExecutionState] = SWEPT_STATES) -> None:
        self._executor = executor
        self.claims = Claims(executor, states)
        self.gates = Gates(executor, self.claims)
        self.dead = Dead(executor, self.claims, self.gates)
        self._second_look = SecondLook(executor, self.claims, self.gates)
        self.passes = False
        """Whether the pass at start is still to be made, and here: nobody waits for it."""
        self._timers: list[tuple[float, str]] = []
        self._learn_at = -1.0
        self._breaks = executor.store.breaks
        self._spare = float(AT_ONCE)
        """How many sweeps may do without a breath after them."""

    async def resume_all(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here; the report says what became of each."""
        return await Startup(self._executor, self.claims, self.gates, self.dead).run()

    async def run(self) -> None:
        """Sweep whenever something changed, something is due, and every heartbeat."""
        executor = self._executor
        while True:
            changed, began = executor.stirred, executor.clock.monotonic()
            with executor.clock.busy():
                seconds = await self._sweep()
                await self._breathe()
            rests = time.monotonic()
            await executor.clock.wait(changed, began + seconds - executor.clock.monotonic())
            self._spare = min(AT_ONCE, self._spare + (time.monotonic() - rests) / SHORTEST)
            if executor.stirred.is_set():
                executor.stirred = anyio.Event()

    async def _breathe(self) -> None:
        """A breath for the machine: real time, whatever the clock. What was spared of it at rest is taken off."""
        spared = self._spare >= 1
        self._spare -= spared
        await anyio.sleep(0 if spared else SHORTEST)

    async def _sweep(self) -> float:
        """One sweep; in how many seconds the next one is due, whatever happens."""
        executor, now = self._executor, self._executor.clock.now()
        try:
            seconds = 0.0
            while seconds == 0.0:
                taken = await self.once()
                if self.passes:
                    await self.resume_all()
                    self.passes = False
                seconds = await self._until_due(executor.config.heartbeat_interval, now, taken)
            return seconds
        except LongrunError as error:
            executor.log.warning("sweep.failed", error_type=type(error).__name__)
        except Exception as error:  # a defect of ours must not take the executions along
            executor.log.exception("sweep.defect", error_type=type(error).__name__)
        return executor.config.heartbeat_interval

    async def _until_due(self, seconds: float, now: float, taken: int) -> float:
        """How long to wait: until the next moment, or for a while if what is due is for others to take, or waits for
        room in its queue. Not at all if it is of a kind that has only now become known."""
        due = await self._executor.store.next_due()
        moments = []
        if due is not None and (taken or due > now):
            moments.append(due)
        elif due is not None and self._executor.registry.by_name:
            if await self._learns():
                return 0.0
            moments.append(now + HIDDEN)
        if self._timers:
            moments.append(self._timers[0][0])
        if self.gates.moment is not None:
            moments.append(self.gates.moment)
        return min([seconds, *(max(SHORTEST, moment - now) for moment in moments)])

    async def _learns(self) -> bool:
        """Whether what is due and was not taken here is of a kind that could be: looked for now and then, since it may
        as well wait for room, or for somebody else, and so may many sweeps."""
        now = self._executor.clock.monotonic()
        if now < self._learn_at:
            return False
        learned = await self.claims.learn()
        self._learn_at = -1.0 if learned else now + HIDDEN
        return learned

    async def once(self) -> int:
        """Deliver messages to what is owned here, and take up what is due and free; how many were taken."""
        executor = self._executor
        executor.look()
        knows_any = bool(executor.registry.by_name)
        if knows_any:
            await executor.show_workflows()
            await self.gates.look()
        if self.claims.unsure or self._breaks != executor.store.breaks:
            self._breaks = executor.store.breaks
            await self.claims.find_lost()
        if executor.runners or executor.resting:
            for id in await executor.store.pending(executor.owner):
                await self._deliver(id)
        await self._ring()
        room = executor.room_for()
        dead = await self.dead.look()
        if room <= 0 or executor.draining or not knows_any:
            return 0
        claim = Claim(
            owner=executor.owner,
            now=executor.clock.now(),
            states=self.claims.states,
            workflows=executor.known_workflows(),
            queues=executor.queues,
            dead=frozenset() if self.dead.are_taken_from else dead,
            limit=min(room, BATCH),
        )
        taken = await self._take_due(claim)
        return taken + await self._second_look.take(attrs.evolve(claim, limit=claim.limit - taken))

    async def _take_due(self, claim: Claim) -> int:
        """Take what is due and free, from limited queues only what they have room for; how many were taken."""
        taken = 0
        parts = [(queue, part) for queue, whole in self.gates.split(claim) for part in self.claims.parts(whole)]
        for queue, part in parts:
            if taken >= claim.limit:
                break
            part = attrs.evolve(part, limit=claim.limit - taken)
            taken += await (self._take_open(part) if queue is None else self.gates.take(queue, part))
        return taken

    async def _take_open(self, claim: Claim) -> int:
        async with self.claims.lock:
            taken = await self.claims.ask(claim)
            for loaded in taken:
                self.claims.take_up(loaded)
        return len(taken)

    async def _deliver(self, id: str) -> None:
        try:
            await self._executor.deliver(id)
        except LongrunError as error:  # one that cannot be read does not keep the others from their messages
            self._executor.log.warning("deliver.failed", execution=id, error_type=type(error).__name__)

    # one execution

    async def take_over(self, loaded: Loaded, states: frozenset[ExecutionState] = UNFINISHED) -> bool:
        """Claim an execution that nobody alive runs, and run it here; False if it belongs to somebody else."""
        executor, id, owner = self._executor, loaded.definition.id, loaded.head.owner
        async with self.claims.lock:
            if id in executor.runners:
                return True
            if executor.draining or id in executor.starting or not await self.dead.may_take(owner):
                return False
            if self._waits_at_gate(loaded):
                return await self._leave_at_gate(id)
            dead = frozenset() if owner is None else frozenset([owner])
            for taken in await self.claims.take((id,), states, dead):
                self.claims.take_up(taken)
                return True
            return False

    def _waits_at_gate(self, loaded: Loaded) -> bool:
        """Whether it rests here, its signal or its time has come, and its queue is limited: it waits for room like any
        other. What it was asked to do is done at once."""
        resting = loaded.definition.id in self._executor.resting and loaded.head.state is State.WAITING
        asked = any(message.kind != "signal" for message in loaded.messages)
        return resting and not asked and self.gates.limits(loaded.definition.queue)

    async def _leave_at_gate(self, id: str) -> bool:
        released = await self.claims.release(id, self._executor.resting[id])
        self._executor.resting.pop(id, None)
        self._executor.stir()
        return released

    def set_timer(self, head: Head, id: str) -> None:
        """Something parked here has to be looked at then."""
        if head.due is not None:
            heapq.heappush(self._timers, (head.due, id))
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
