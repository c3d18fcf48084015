"""The dead: whose lease has run out or whose process is gone, and what they leave to be taken.

Place in the life of an execution: claim. Any number of programs may find the same owner dead: each of his executions is
claimed by one of them, and whoever finds that nothing is left of him removes his name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from longrun import lease
from longrun.claims import BATCH, Claims
from longrun.errors import KeyUnavailableError
from longrun.gates import Gates
from longrun.life import Life, is_dead
from longrun.records import ExecutionState
from longrun.stored import Loaded, Query

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
NEIGHBOURS = 0.25
"""Seconds between two looks at whether the others on this machine still live."""
AT_ONCE = 16
"""So many of them in one look."""
PARKED_STATES = frozenset({State.WAITING, State.INITIALIZED})
STOPPED_STATES = frozenset({State.PAUSED, State.FAILED})
"""It goes on if somebody has asked for that. What has failed is owned only by somebody who was about to obey."""


class Dead:
    """Who has died, as one executor sees it."""

    def __init__(self, executor: Crew, claims: Claims, gates: Gates) -> None:
        self._executor, self._claims, self._gates = executor, claims, gates
        self._look_at = -1.0
        self.found: frozenset[str] = frozenset()
        """Who was dead at the last look."""
        self._neighbours: list[Life] = []
        """Who lives on this machine, as of the last look."""
        self.are_buried_later = False
        """Whether the pass at start is under way, which takes what they had and buries them itself in the end."""

    @property
    def are_taken_from(self) -> bool:
        """Whether the pass at start is taking what they had: the sweep would only stand in its way."""
        return self.are_buried_later and not self._executor.leaves_to_sweep

    async def owners(self) -> tuple[frozenset[str], frozenset[str]]:
        """Who lives, and who does not."""
        owners = await self._executor.store.owners()
        dead = lease.gone(owners, but=self._executor.owner)
        return frozenset(owner.id for owner in owners) - dead | {self._executor.owner}, dead

    async def may_take(self, owner: str | None) -> bool:
        """Whether what this owner has can be claimed: nobody has it, or somebody dead, or this executor itself."""
        if owner is None or owner == self._executor.owner:
            return True
        alive, _ = await self.owners()
        return owner not in alive

    async def look(self) -> frozenset[str]:
        """Owners whose executions may be taken. Looking costs a query, so the answer serves for half a heartbeat: not
        for a whole one, lest the sweep that comes with the next beat a moment early makes do with the last answer."""
        now = self._executor.clock.monotonic()
        if now >= self._look_at:
            owners = await self._executor.store.owners()
            self.found = lease.gone(owners, but=self._executor.owner)
            living = [owner for owner in owners if owner.id not in self.found]
            self._neighbours = lease.neighbours(living, but=self._executor.owner)
            self._look_at = now + self._executor.config.heartbeat_interval / 2
            if self.found and not self.are_buried_later:
                await self.bury(self.found)
        return self.found

    async def mind_neighbours(self) -> None:
        """Sweep as soon as somebody dies on this machine, and not only at the next heartbeat. A look is a few calls of
        the kernel for each, in real time whatever the clock."""
        while True:
            await anyio.sleep(NEIGHBOURS)
            looked_at, rest = self._neighbours[:AT_ONCE], self._neighbours[AT_ONCE:]
            self._neighbours = rest + looked_at
            if any(map(is_dead, looked_at)):
                self._neighbours, self._look_at = [], -1.0
                self._executor.stir()

    async def holders(self) -> frozenset[str]:
        """Who has parked executions. After a power cut the store may not know them any more, which means that they are
        dead, and nobody else would ask for what they held."""
        found: set[str] = set()
        query = Query(states=self._claims.states & PARKED_STATES, owned=True, limit=BATCH)
        while page := await self._executor.store.find(query):
            found.update([stored.head.owner for stored in page if stored.head.owner is not None])
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        return frozenset(found)

    async def bury(self, dead: frozenset[str]) -> None:
        """Take from the dead what they had only just claimed and was not due otherwise, or was to be retried, and free
        what was paused, which it stays; then forget those of whom nothing is left."""
        store, states = self._executor.store, self._claims.states & PARKED_STATES | STOPPED_STATES
        for owner in dead:
            await self._claims.learn(owner)
            page = await store.find(Query(owner=owner, states=states, limit=BATCH))
            wanted = [stored for stored in page if self._claims.serves(stored.definition)]
            ids = tuple([stored.definition.id for stored in wanted if await self._claims.knows(stored)])
            async with self._claims.lock:
                try:
                    claimed = await self._claims.take(ids, states, frozenset([owner]))
                except KeyUnavailableError:  # they are owned here now: the next sweep finds them, one by one
                    continue
                for loaded in claimed:
                    if self._is_free(loaded):
                        await self._claims.release(loaded.definition.id, loaded.head)
                    else:
                        self._claims.take_up(loaded)
            if not await store.count(Query(owner=owner)):
                await store.unregister(owner)

    def _is_free(self, loaded: Loaded) -> bool:
        """Whether it is given back: nobody has asked anything of it, and it is stopped, or waits for room."""
        if any(message.kind != "signal" for message in loaded.messages):
            return False
        waits = self._executor.leaves_to_sweep or self._gates.limits(loaded.definition.queue)
        return waits or loaded.head.state in STOPPED_STATES
