"""Claims: how one executor makes executions its own, and what becomes of those it has and cannot run.

Place in the life of an execution: claim. A claim is one atomic act of the store; within one program they are made one
after the other. One whose answer never came may have been made all the same: it is looked for afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import attrs

from longrun.errors import CodecError, ExecutionNotFoundError, KeyUnavailableError, LongrunError
from longrun.records import UNFINISHED, ExecutionState
from longrun.registry import AD_HOC
from longrun.stored import Claim, Definition, Head, Loaded, Query, Save, Stored

if TYPE_CHECKING:
    from longrun.crew import Crew

State = ExecutionState
BATCH = 500
"""So many are looked at, or asked for, at a time."""
SWEPT_STATES = frozenset({State.RUNNING, State.RESUMING, State.WAITING})
ASKED_STATES = frozenset({State.INITIALIZED, State.WAITING, State.RESUMING})
"""Nothing of that was cut short."""


class Claims:
    """The claims of one executor."""

    def __init__(self, executor: Crew, states: frozenset[ExecutionState]) -> None:
        self._executor = executor
        self._states = states
        self.lock = anyio.Lock()
        """Held by whoever claims, until what he got is run."""
        self.unsure = False
        """Whether something may be owned here that has no runner: a start or a claim whose answer never came."""
        self.waking: set[str] = set()
        """What the pass at start has asked for and not heard of: it goes on when it is found, also if it is paused."""
        self._strange: dict[str, int] = {}
        """Workflows made of steps of which some are not known here, and how many were known when that was found."""
        self._looked: dict[str | None, tuple[float, str]] = {}
        """How far `learn` has come with what each owner has, or nobody."""

    @property
    def states(self) -> frozenset[ExecutionState]:
        """What is taken up: without `auto_resume` only what was submitted; what was parked, which nobody else may be
        there to wake; and what somebody has resumed or retried who runs nothing."""
        return self._states if self._executor.takes_work else self._states & ASKED_STATES

    @property
    def left_states(self) -> frozenset[ExecutionState]:
        """What is taken from the dead: of what was resumed nobody can tell then whether it was interrupted."""
        return self.states if self._executor.takes_work else self.states - {State.RESUMING}

    def parts(self, claim: Claim) -> list[Claim]:
        """A claim of whatever is due, as it may be made: what the dead left is asked for on its own where less of it is
        taken."""
        left = claim.states & self.left_states
        if not claim.dead or left == claim.states:
            return [claim]
        return [attrs.evolve(claim, dead=frozenset()), attrs.evolve(claim, states=left)]

    def serves(self, definition: Definition) -> bool:
        """Whether its queue is one of those that are looked at here."""
        queues = self._executor.queues
        return queues is None or definition.queue in queues

    async def knows(self, stored: Stored) -> bool:
        """Whether its workflow is registered here, or all steps of one that was put together for it alone."""
        name = stored.definition.workflow
        if not name.startswith(AD_HOC):
            return self._executor.registry.knows(name)
        registry = self._executor.registry
        if name in self._executor.ad_hoc:
            return True
        if self._strange.get(name) == len(registry.by_name):
            return False
        try:
            loaded = await self._executor.store.load(stored.definition.id)
        except (CodecError, ExecutionNotFoundError, KeyUnavailableError):
            return False
        if not registry.knows(name, loaded.definition.steps):
            self._strange[name] = len(registry.by_name)
            return False
        self._executor.ad_hoc.add(name)
        return True

    async def learn(self, owner: str | None = None) -> bool:
        """Look at a page more of what somebody has, or nobody, for lists of steps that were started as they are: their
        names are not in the registry, and only what is known by name is asked for. True if there was one."""
        executor, known = self._executor, len(self._executor.ad_hoc)
        query = Query(states=self.states, owner=owner, owned=owner is not None, limit=BATCH)
        page = await executor.store.find(attrs.evolve(query, after=self._looked.pop(owner, None)))
        for stored in page:
            if stored.definition.workflow.startswith(AD_HOC):
                await self.knows(stored)
        if page:
            self._looked[owner] = page[-1].definition.created, page[-1].definition.id
        return len(executor.ad_hoc) > known

    async def take(self, ids: tuple[str, ...], states: frozenset[ExecutionState], dead: frozenset[str]) -> list[Loaded]:
        """Claim these, as far as they are in such states and free, or owned by one of the dead."""
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

    async def settle(self, seconds: float) -> None:
        """Return when no claim is under way, or after so many seconds."""
        with anyio.move_on_after(seconds):
            async with self.lock:
                pass

    async def find_lost(self) -> None:
        """Run what the store gave to this owner although the answer never came."""
        executor = self._executor
        self.unsure = False
        try:
            async with self.lock:
                await executor.store.settled()  # what was asked for and left may be on its way still
                query = Query(owner=executor.owner, states=UNFINISHED, limit=BATCH)
                owned = [stored async for stored in executor.store.find_all(query)]
                for stored in owned:
                    if not executor.has(stored.definition.id):
                        await self._find_one(stored)
        except BaseException:
            self.unsure = True
            raise

    async def _find_one(self, stored: Stored) -> None:
        executor = self._executor
        try:
            for loaded in await self.take((stored.definition.id,), UNFINISHED, frozenset([executor.owner])):
                self.take_up(loaded, wakes_paused=stored.definition.id in self.waking)
                self.waking.discard(stored.definition.id)
        except CodecError as error:
            await self.set_aside(stored.definition.id, str(error))
        except KeyUnavailableError as error:  # it stays in doubt, for the next sweep; the others do not wait for it
            executor.log.warning("execution.key_unavailable", execution=stored.definition.id, key=error.key_id)

    async def set_aside(self, id: str, reason: str) -> None:
        """What was claimed and cannot be read is blocked by its head alone."""
        store, owner = self._executor.store, self._executor.owner
        owned = store.find_all(Query(owner=owner, states=UNFINISHED, limit=BATCH))
        for stored in [stored async for stored in owned if stored.definition.id == id]:
            head = attrs.evolve(
                stored.head, state=State.BLOCKED, owner=None, reason=reason, revision=stored.head.revision + 1
            )
            await store.save(Save(id=id, head=head))
