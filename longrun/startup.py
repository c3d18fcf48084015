"""The pass at start: take up every execution that was interrupted, and say what became of each.

Place in the life of an execution: claim. Many processes may do it at once, beside others that sweep; one that dies in
the middle of it leaves nothing half done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, field

from longrun.book import MISSING
from longrun.claims import BATCH, Claims
from longrun.dead import Dead
from longrun.errors import CodecError, ExecutionNotFoundError, KeyUnavailableError
from longrun.fitness import unusable
from longrun.gates import Gates
from longrun.queues import IN_STEPS
from longrun.records import ExecutionState, ResumeReport
from longrun.stored import REPLICA_RECORD, Claim, Definition, Loaded, Query, Stored, blocked_for_good

if TYPE_CHECKING:
    from longrun.crew import Crew
    from longrun.runner import Runner

State = ExecutionState
STARTUP_STATES = IN_STEPS | {State.PAUSED, State.BLOCKED}


@define
class _Report:
    resumed: list[str] = field(factory=list)
    skipped: dict[str, str] = field(factory=dict)
    blocked: dict[str, str] = field(factory=dict)


class Startup:
    """One pass over what is stored, for one executor."""

    def __init__(self, executor: Crew, claims: Claims, gates: Gates, dead: Dead) -> None:
        self._executor, self._claims, self._gates, self._dead = executor, claims, gates, dead
        self._report = _Report()
        self._left: list[Runner] = []
        """Of what the dead had left in a step."""

    async def run(self) -> ResumeReport:
        """Take up every interrupted execution of a workflow known here; the report says what became of each."""
        if await self._executor.store.exists(REPLICA_RECORD):
            self._executor.log.warning("store.half_of_a_pair", advice="open the pair: it runs what runs here")
        self._dead.are_buried_later = True
        dead: frozenset[str] = frozenset()
        try:
            await self._gates.look()
            alive, dead = await self._dead.owners()
            states = STARTUP_STATES - IN_STEPS if await self._take_left(dead) else STARTUP_STATES
            await self._take_pages(alive, dead, states)
        finally:
            self._dead.are_buried_later = False
            if dead:
                self._executor.stir()  # the sweep has left them to us, and may have room for what we leave to it
        holders = await self._dead.holders()
        alive, dead = await self._dead.owners()
        await self._dead.bury(dead | holders - alive)
        found = self._report
        return ResumeReport(resumed=tuple(found.resumed), skipped=found.skipped, blocked=found.blocked)

    async def _take_left(self, dead: frozenset[str]) -> bool:
        """What the dead left in a step is asked for as it is: to look at it before would cost half as much again. True
        if nothing else is in a step, and nothing of that is to be looked at."""
        executor = self._executor
        if not dead or executor.leaves_to_sweep:
            return False
        in_steps = await self._count()
        claim = Claim(
            owner=executor.owner,
            now=executor.clock.now(),
            states=IN_STEPS,
            workflows=executor.known_workflows(),
            queues=executor.queues,
            dead=dead,
            limit=BATCH,
        )
        for part in [part for queue, part in self._gates.split(claim) if queue is None]:
            taken = BATCH
            while taken == BATCH:
                taken = await self._take_some(part)
                if len(self._left) >= in_steps and await self._runs_all():
                    return True
        return False

    async def _take_some(self, claim: Claim) -> int:
        async with self._claims.lock:
            try:
                taken = await self._claims.ask(claim)
            except (CodecError, KeyUnavailableError):
                await self._take_lost()
                return 0
            for loaded in taken:
                await self._take(loaded)
                if (runner := self._executor.runners.get(loaded.definition.id)) is not None:
                    self._left.append(runner)
        return len(taken)

    async def _take_lost(self) -> None:
        """One of those that were asked for cannot be read. They may be owned here all the same, and are taken one by
        one; if they are not, they are found with the pages."""
        executor = self._executor
        query = Query(owner=executor.owner, states=IN_STEPS, limit=BATCH)
        owned = [stored.definition.id async for stored in executor.store.find_all(query)]
        for id in owned:
            if not executor.has(id):
                await self._take_one(id, frozenset([executor.owner]))

    async def _runs_all(self) -> bool:
        """Whether all that is in a step runs here. Only what was in one when it was claimed, and has not said otherwise
        since, is sure to be among those that are counted."""
        in_steps, runners = await self._count(), self._executor.runners
        here = [one for one in self._left if runners.get(one.id) is one and one.head.state in IN_STEPS]
        return in_steps <= len(here)

    async def _count(self) -> int:
        return sum((await self._executor.store.count(Query(states=IN_STEPS))).values())

    async def _take_pages(self, alive: frozenset[str], dead: frozenset[str], states: frozenset[ExecutionState]) -> None:
        query = Query(states=states, limit=BATCH)
        known = {*self._report.resumed, *self._report.skipped, *self._report.blocked}
        while page := await self._executor.store.find(query):
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id))
            if not {stored.head.owner for stored in page} <= alive | dead | {None}:
                alive, dead = await self._dead.owners()  # somebody may have come since they were asked for
            wanted: list[Stored] = []
            for stored in [one for one in page if one.definition.id not in known]:
                reason = await self._not_ours(stored, alive, dead)
                if reason is None:
                    wanted.append(stored)
                elif stored.definition.id not in self._executor.runners:
                    self._report.skipped[stored.definition.id] = reason
            await self._take_all(wanted, dead)

    async def _not_ours(self, stored: Stored, alive: frozenset[str], dead: frozenset[str]) -> str | None:
        """Why an execution is left as it is; None if it is to be taken up."""
        head = stored.head
        if not stored.definition.workflow:
            return None  # damaged so that nobody can say whose it is: it is told here too
        if not await self._claims.knows(stored):
            return "not registered here"
        if not self._claims.serves(stored.definition):
            return f"its queue {stored.definition.queue!r} is not looked at here"
        if head.state is State.PAUSED and head.hold and not await self._is_resumed(stored):
            return "held: it stays paused until it is resumed"
        if head.owner in alive:
            return f"owned by {head.owner}, which is alive"
        swept = head.state in (self._claims.states if head.owner is None else self._claims.left_states)
        swept = swept and (head.owner is None or head.owner in dead)
        return self._for_room(stored.definition) if swept else None

    async def _is_resumed(self, stored: Stored) -> bool:
        """Whether somebody has asked for that, and was not there any more to see to it."""
        if not stored.head.woken:
            return False
        return any(message.kind == "resume" for message in await self._executor.store.messages(stored.definition.id))

    async def _take_all(self, wanted: list[Stored], dead: frozenset[str]) -> None:
        """Claim what was found, all together; if one of them cannot be read, one by one."""
        dead = dead | {stored.head.owner for stored in wanted if stored.head.owner is not None}
        async with self._claims.lock:  # which the sweep had meanwhile, and may have taken some of them
            ids = tuple([one.definition.id for one in wanted if one.definition.id not in self._executor.runners])
            self._claims.waking.update(ids)
            try:
                taken = await self._claims.take(ids, STARTUP_STATES, dead)
                self._claims.waking.difference_update(ids)
                for loaded in taken:
                    await self._take(loaded)
            except (CodecError, KeyUnavailableError):
                for id in ids:
                    await self._take_one(id, dead | {self._executor.owner})
            else:
                await self._tell_unreadable(set(ids) - {loaded.definition.id for loaded in taken})

    async def _tell_unreadable(self, missing: set[str]) -> None:
        """A store gives nobody what it cannot read: it shows it as blocked, and loading it says why (I5). Most of what
        is missing was simply taken by somebody else, and there may be many of those."""
        store = self._executor.store
        if not missing:
            return
        blocked = store.find_all(Query(states=frozenset({State.BLOCKED}), limit=BATCH))
        for id in [stored.definition.id async for stored in blocked if stored.definition.id in missing]:
            try:
                await store.load(id)
            except CodecError as error:
                self._unreadable(id, error)
            except ExecutionNotFoundError:
                pass  # it was deleted meanwhile

    async def _take_one(self, id: str, dead: frozenset[str]) -> None:
        if id in self._executor.runners:
            return
        try:
            taken = await self._claims.take((id,), STARTUP_STATES, dead)
            self._claims.waking.discard(id)
            for loaded in taken:
                await self._take(loaded)
        except CodecError as error:
            self._claims.waking.discard(id)
            await self._claims.set_aside(id, str(error))
            self._unreadable(id, error)
        except KeyUnavailableError as error:  # looked at again by the sweep, which knows that something is left
            self._report.skipped[id] = str(error)

    def _unreadable(self, id: str, error: CodecError) -> None:
        self._report.blocked[id] = str(error)
        self._executor.log.error("execution.unreadable", execution=id, error_type=type(error).__name__)

    async def _take(self, loaded: Loaded) -> None:
        reason, value = self._in_the_way(loaded)
        id = loaded.definition.id
        if reason is None and (waits := self._is_swept(loaded)):
            self._report.skipped[id] = waits
            await self._executor.queue_up(loaded)
        elif reason is None:
            self._report.resumed.append(id)
            self._claims.take_up(loaded, value=value, wakes_paused=True)
        else:
            self._report.blocked[id] = reason
            await self._executor.block(loaded, reason)

    def _in_the_way(self, loaded: Loaded) -> tuple[str | None, Any]:
        """Why it cannot go on here (None if it can), and its decoded state. Somebody may have resumed it, and not been
        there any more to see to it."""
        if not blocked_for_good(loaded.head):
            return unusable(self._executor, loaded)
        asked = any(message.kind == "resume" for message in loaded.messages)
        return None if asked else loaded.head.reason or "it is blocked", MISSING

    def _is_swept(self, loaded: Loaded) -> str | None:
        """Why the sweep has to take up what was claimed; None if it runs at once, as when somebody asked for it."""
        if State.RUNNING not in self._claims.states or any(message.kind != "signal" for message in loaded.messages):
            return None
        return self._for_room(loaded.definition)

    def _for_room(self, definition: Definition) -> str | None:
        """What an execution waits for that only the sweep has; None if it need not wait."""
        if self._gates.limits(definition.queue):
            return f"its queue {definition.queue!r} is limited: it is taken up when there is room"
        return "it is taken up when there is room" if self._executor.leaves_to_sweep else None
