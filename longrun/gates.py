"""Claim from a limited queue: one worker at a time looks how much room there is, and takes no more than that.

Place in the life of an execution: claim. Who wants to take from a limited queue first claims the queue's own record, as
any execution is claimed by its id: one atomic act of the store, with a fencing number. Holding it, a worker counts what
runs, takes what there is room and what there are tokens for, and writes the record back, free. The record of a worker
that died is free as its executions are; one that was stopped in between and goes on finds its write refused, and
gives back what it took, unrun. Queues without a limit need none of this: their records are read now and then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from longrun import lease
from longrun.errors import CodecError, ExecutionNotFoundError, LeaseLostError, LongrunError, StoreUnavailableError
from longrun.queues import DEFAULT, IN_STEPS, PAGE, Gate, QueueLimit, new_record, record_id, records
from longrun.records import UNFINISHED, ExecutionState
from longrun.stored import Claim, Head, Loaded, Query, Save, is_due

if TYPE_CHECKING:
    from longrun.claims import Claims
    from longrun.crew import Crew

State = ExecutionState
REFRESH = 1.0
"""While no queue is limited, the records are read again after so many seconds at the earliest."""
AGAIN = 0.03
"""When to try again for a record that another worker holds, should its release not be heard of."""
GLANCE = 100
"""How many of a queue's executions are looked at to see whether one of them is due."""
LAST_WORDS = 5.0
"""How long to try to write a record back when the program is being ended."""
CLOSED = QueueLimit(concurrency=0)
"""What an unreadable record is taken for: nothing begins until somebody sets the limit again."""


class Gates:
    """Keeps to the limits of all queues, for the claims of one executor."""

    def __init__(self, executor: Crew, claims: Claims) -> None:
        self._executor, self._claims = executor, claims
        self.wanted: dict[str, QueueLimit] = {}
        """Limits to be set before anything is claimed."""
        self.moment: float | None = None
        """When to look again: a token will have come, or a record may be free."""
        self._names = frozenset[str]()
        self._limited: dict[str, Gate] = {}
        self._read_at = float("-inf")
        self._noted = {DEFAULT}
        self._turn = 0
        self._tried: dict[str, float] = {}
        self._flowing: set[str] = set()
        """Queues that gave something when they were last asked: there is likely more."""
        self._granted: set[tuple[str, int, int]] = set()
        """What was let through here: for these the runners of this program tell more than the store."""
        self._held: set[str] = set()
        """Queues whose records are held here, or may be."""

    # limits

    def limits(self, queue: str) -> bool:
        return queue in self._limited

    async def look(self) -> None:
        """Read the limits, if it is time to."""
        self.moment = None
        if self._held:
            await self._let_go()
        for name, limit in list(self.wanted.items()):
            await self.set_limit(name, limit)
            self.wanted.pop(name, None)
        now = time.monotonic()  # real time, whatever the clock: what others have set shall be seen
        if self._limited or now >= self._read_at:
            await self._read()
            self._read_at = now + REFRESH

    async def _read(self) -> None:
        found = await records(self._executor.store)
        gates = {name: self._gate(name, stored.head) for name, stored in found.items()}
        self._names = frozenset(found)
        self._limited = {name: gate for name, gate in gates.items() if gate.limit is not None}

    def _gate(self, name: str, head: Head) -> Gate:
        try:
            return Gate.of(name, head)
        except CodecError as error:
            self._executor.log.error("queue.unreadable", queue=name, problem=str(error))  # noqa: TRY400 -- it says it all
            return Gate(limit=CLOSED)

    async def note(self, name: str) -> None:
        """Let every worker know that there is a queue of this name."""
        if name not in self._noted:
            await self._executor.store.create(new_record(name, None, self._executor.clock.now()))
            self._noted.add(name)

    async def set_limit(self, name: str, limit: QueueLimit | None) -> None:
        store, clock = self._executor.store, self._executor.clock
        found = await records(store)
        if limit is not None and not any(self._gate(name, one.head).limit for name, one in found.items()):
            await self._note_all(frozenset(found))
        if name in found and self._gate(name, found[name].head).limit == limit:
            return
        if not await store.create(new_record(name, limit, clock.now())):
            while not await self._set(name, limit):  # noqa: ASYNC110 -- another process holds it
                await anyio.sleep(AGAIN)
        async with self._claims.lock:
            await self._read()
        self._executor.stir()

    async def _set(self, name: str, limit: QueueLimit | None) -> bool:
        """Write a limit into the queue's record; False if another process holds that."""
        async with self._claims.lock:
            record = await self._enter(name)
            if record is not None:
                gate = self._gate(name, record.head).limited(limit, self._executor.clock.now())
                await self._leave(record, gate, must=True)
        return record is not None

    async def _note_all(self, known: frozenset[str]) -> None:
        """Before the first limit: what was stored without `note` must not be left out when queues are taken by name."""
        query = Query(states=UNFINISHED, limit=PAGE)
        names = {stored.definition.queue async for stored in self._executor.store.find_all(query)}
        for name in sorted(names - known):
            await self.note(name)

    # claims

    def split(self, claim: Claim) -> list[tuple[str | None, Claim]]:
        """A claim of whatever is due as claims of the open queues together, and of each limited one. The turns change,
        so that where there is little room no queue waits for another for ever."""
        asked = self._limited.keys() if claim.queues is None else self._limited.keys() & claim.queues
        if not asked:
            return [(None, claim)]
        limited: list[tuple[str | None, Claim]] = [
            (name, attrs.evolve(claim, queues=frozenset([name]))) for name in sorted(asked)
        ]
        others = ((self._names | {DEFAULT}) if claim.queues is None else claim.queues) - asked
        parts = [*limited, (None, attrs.evolve(claim, queues=others))] if others else limited
        self._turn = (self._turn + 1) % len(parts)
        return parts[self._turn :] + parts[: self._turn]

    async def take(self, name: str, claim: Claim, **how: Any) -> int:
        """Take what a limited queue has room for, and run it; how many. What is claimed by its id is known to be
        there."""
        if claim.ids is None and not await self._promising(name, claim):
            return 0
        async with self._claims.lock:
            record = None if self._executor.draining else await self._enter(name)
            if record is None:
                self._look_again(self._executor.clock.now() + AGAIN)
                return 0
            taken = await self._take_within(record, claim, **how)
        if taken:
            self._flowing.add(name)
        else:
            self._flowing.discard(name)
        return taken

    async def _take_within(self, record: Loaded, claim: Claim, **how: Any) -> int:
        name = record.definition.queue
        gate = self._gate(name, record.head)
        taken: list[Loaded] = []
        left = False
        try:
            running, gate = await self._count(name, gate)
            taken, gate = await self._let_through(claim, gate, running)
        finally:
            left = await self._leave(record, gate)
        if not left:
            await self._give_back(taken)
            return 0
        for loaded in taken:
            self._granted.add(_mark(loaded))
            self._claims.take_up(loaded, **how)
        return len(taken)

    async def _promising(self, name: str, claim: Claim) -> bool:
        """Whether it is worth the writes to look behind the gate: there seems to be room, and something to take."""
        gate, now, store = self._limited.get(name, Gate()), self._executor.clock.now(), self._executor.store
        most = gate.limit.concurrency if gate.limit is not None else None
        left_by_dead = await self._left_by(claim, name)
        if most is not None and not left_by_dead:
            rows = await store.find(Query(queue=name, states=IN_STEPS, owned=True, limit=max(1, most)))
            if most == 0 or (len(rows) >= most and {stored.head.owner for stored in rows} <= await self._alive()):
                return False
        states = claim.states
        if gate.starts(now) == 0:
            states -= {State.INITIALIZED}
            if states != claim.states:
                self._look_again(gate.next_start(now))
        if left_by_dead or name in self._flowing:
            return True
        page = await store.find(Query(queue=name, states=states, workflows=claim.workflows, owned=False, limit=GLANCE))
        return any(is_due(stored.head, now) for stored in page) or (len(page) == GLANCE and self._may_try(name))

    async def _left_by(self, claim: Claim, name: str) -> bool:
        for owner in claim.dead:
            query = Query(owner=owner, queue=name, states=claim.states, workflows=claim.workflows)
            if await self._executor.store.count(query):
                return True
        return False

    def _may_try(self, name: str) -> bool:
        """Among very many that are not due there may be one that is: to be tried, not all the time."""
        now = self._executor.clock.monotonic()
        if now < self._tried.get(name, float("-inf")) + REFRESH:
            return False
        self._tried[name] = now
        return True

    def _look_again(self, moment: float) -> None:
        self.moment = moment if self.moment is None else min(moment, self.moment)

    # behind the gate

    async def _alive(self) -> frozenset[str]:
        """The living owners. To be asked for after what they own was read: one that is new since then lives too."""
        owner = self._executor.owner
        return lease.alive(await self._executor.store.owners(), but=owner) | {owner}

    async def _enter(self, name: str) -> Loaded | None:
        """Hold a queue's record; None if another living worker does. Ours is given again: its answer may be lost."""
        stored = (await records(self._executor.store)).get(name)
        holder = None if stored is None else stored.head.owner
        if holder is not None and holder != self._executor.owner and holder in await self._alive():
            return None
        claim = Claim(
            owner=self._executor.owner,
            now=self._executor.clock.now(),
            states=frozenset({State.PAUSED}),
            ids=(record_id(name),),
            dead=frozenset() if holder is None else frozenset([holder]),
            limit=1,
        )
        self._held.add(name)  # before it is: the answer may be lost
        record = next(iter(await self._executor.store.claim(claim)), None)
        if record is None:
            self._held.discard(name)
        return record

    async def _let_go(self) -> None:
        """Free the records that could not be written back when they were held: while this process lives, nobody else
        could take from their queues."""
        async with self._claims.lock:
            for name, stored in (await records(self._executor.store)).items():
                if name not in self._held:
                    continue
                mine = stored.head.owner == self._executor.owner
                record = await self._enter(name) if mine else None
                if record is not None and not await self._leave(record, self._gate(name, record.head)):
                    return
            self._held.clear()

    async def _leave(self, record: Loaded, gate: Gate, *, must: bool = False) -> bool:
        """Write the record back, free; False if it was not ours any more or cannot be written."""
        head = attrs.evolve(
            record.head,
            owner=None,
            revision=record.head.revision + 1,
            updated=self._executor.clock.now(),
            note=gate.to_text(),
        )
        id = record.definition.id
        # Shielded: others wait for it, and what was taken behind it must not be left in doubt.
        with anyio.move_on_after(LAST_WORDS, shield=True):
            queue = record.definition.queue
            try:
                await self._executor.store.save(Save(id=id, head=head))
                self._held.discard(queue)
            except LongrunError as error:
                if isinstance(error, LeaseLostError):
                    self._held.discard(queue)
                    if await self._is_stored(id, head):
                        return True
                if must:
                    raise
                self._executor.log.warning("queue.not_released", queue=queue, error_type=type(error).__name__)
                return False
            return True
        if must:
            raise StoreUnavailableError(self._executor.store.backend.kind, f"no answer in {LAST_WORDS:g} s")
        return False

    async def _is_stored(self, id: str, head: Head) -> bool:
        """Whether a write that was refused had been made: somebody may have taken the record between it and its answer.
        A write that changed nothing looks as if it had: then nothing was taken either."""
        stored = (await self._executor.store.load(id)).head
        return stored.revision == head.revision and stored.note == head.note

    async def _count(self, name: str, gate: Gate) -> tuple[int, Gate]:
        """How many executions of living workers are in a step or about to be, and the gate without those that no longer
        are about to."""
        most = None if gate.limit is None else gate.limit.concurrency
        if most is None:
            return 0, attrs.evolve(gate, granted=())
        # Every page: the dead may have left so many that the living are not on the first.
        query = Query(queue=name, states=IN_STEPS, owned=True, limit=most + PAGE)
        owners = {stored.definition.id: stored.head.owner async for stored in self._executor.store.find_all(query)}
        coming = {mark: await self._owner_of(mark) for mark in gate.granted if mark[0] not in owners}
        self._granted &= {*gate.granted}
        alive = await self._alive()
        left = tuple(mark for mark, owner in coming.items() if owner in alive)
        return sum(owner in alive for owner in owners.values()) + len(left), attrs.evolve(gate, granted=left)

    async def _owner_of(self, mark: tuple[str, int, int]) -> str | None:
        """Who is about to run what was let through; None if it has gone on since, or away."""
        id, fence, revision = mark
        if mark in self._granted:
            return self._executor.owner if id in self._executor.runners else None
        try:
            head = (await self._executor.store.load(id)).head
        except (ExecutionNotFoundError, CodecError):
            return None
        same = head.fence == fence and (head.state in IN_STEPS or head.revision == revision)
        return head.owner if same else None

    async def _let_through(self, claim: Claim, gate: Gate, running: int) -> tuple[list[Loaded], Gate]:
        """Claim what there is room and tokens for; the gate after that."""
        now = self._executor.clock.now()
        most = None if gate.limit is None else gate.limit.concurrency
        room = claim.limit if most is None else min(claim.limit, most - running)
        starts = gate.starts(now)
        taken: list[Loaded] = []
        if starts is None or starts >= room:
            taken += await self._claim(claim, claim.states, room)
        else:
            taken += await self._claim(claim, claim.states - {State.INITIALIZED}, room)
            taken += await self._claim(claim, claim.states & {State.INITIALIZED}, min(starts, room - len(taken)))
        began = sum(_begins(loaded) for loaded in taken)
        gate = gate.refilled(now)
        granted = (*gate.granted, *(_mark(loaded) for loaded in taken if loaded.head.state not in IN_STEPS))
        return taken, attrs.evolve(gate, tokens=max(0.0, gate.tokens - began), granted=granted if most else ())

    async def _claim(self, claim: Claim, states: frozenset[ExecutionState], limit: int) -> list[Loaded]:
        if limit <= 0 or not states:
            return []
        return await self._claims.ask(attrs.evolve(claim, states=states, limit=limit))

    async def _give_back(self, taken: list[Loaded]) -> None:
        """Another worker has looked behind the gate meanwhile: what was taken here may be too much."""
        for loaded in taken:
            if not await self._claims.release(loaded.definition.id, loaded.head):
                self._claims.unsure = True


def _mark(loaded: Loaded) -> tuple[str, int, int]:
    return loaded.definition.id, loaded.head.fence, loaded.head.revision


def _begins(loaded: Loaded) -> bool:
    """Whether it was submitted and begins now. One that somebody has paused or cancelled meanwhile does not: it takes
    no token."""
    orders = [message.kind for message in loaded.messages if message.kind != "signal"]
    stopped = "cancel" in orders or orders[-1:] == ["pause"]
    return loaded.head.state is State.INITIALIZED and not stopped
