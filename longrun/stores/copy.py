"""Moving house: carry executions with their history from one store to another.

Place in the life of an execution: between two homes. Everything goes through the contract of the stores, so any pair
will do. A copy can be interrupted and started again: what has arrived whole is left alone, what is half there is
completed. Live executions are claimed while they are carried, and stay behind paused and held, so that nobody runs them
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from attrs import field, frozen

from longrun.errors import ExecutionNotFoundError, LeaseLostError, StoreError
from longrun.lease import gone
from longrun.life import LifeLock
from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Create, Head, Loaded, Owner, Query, Save
from longrun.stores.store import CheckpointStore

State = ExecutionState
PAGE = 200
LEASE = 600.0


@frozen(kw_only=True)
class CopyReport:
    """What `copy_store` did: ids by what became of them."""

    copied: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Already there, whole."""
    skipped: Mapping[str, str] = field(factory=dict)
    """Left behind, and why: a living process still owns it, or the target has another execution of that id."""


async def copy_store(
    source: CheckpointStore, target: CheckpointStore, *, progress: Callable[[str], object] | None = None
) -> CopyReport:
    """Carry every execution of `source` to `target`, then compare the two. Both are opened for the time it takes."""
    async with source, target:
        lock = LifeLock.acquire()
        try:
            return await _Copy(source, target, lock, progress).run()
        finally:
            await source.unregister(lock.life.owner)
            lock.release()


class _Copy:
    def __init__(
        self,
        source: CheckpointStore,
        target: CheckpointStore,
        lock: LifeLock,
        progress: Callable[[str], object] | None,
    ) -> None:
        self._source, self._target = source, target
        self._life = lock.life
        self._progress = progress
        self._copied: list[str] = []
        self._present: list[str] = []
        self._skipped: dict[str, str] = {}

    async def run(self) -> CopyReport:
        me = Owner(id=self._life.owner, life=self._life.to_dict(), remaining=LEASE)
        await self._source.register(me, LEASE)
        query = Query(limit=PAGE)
        while page := await self._source.find(query):
            for stored in page:
                await self._source.register(me, LEASE)
                await self._carry(stored.definition.id)
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        return CopyReport(copied=tuple(self._copied), present=tuple(self._present), skipped=self._skipped)

    async def _carry(self, id: str) -> None:
        loaded = await self._claimed(id)
        if loaded is None:
            return
        moved_before = loaded.head.reason == self._mark and loaded.head.state is State.PAUSED
        if await self._arrived(loaded) or moved_before:
            self._present.append(id)
        else:
            await self._send(loaded)
            await self._verify(loaded)
            self._copied.append(id)
            if self._progress is not None:
                self._progress(id)
        if not loaded.head.state.finished:
            await self._leave_behind(loaded)

    @property
    def _mark(self) -> str:
        return f"moved to another store ({self._target.backend.kind})"

    async def _claimed(self, id: str) -> Loaded | None:
        """A finished execution as it is; a live one under our own claim; None if somebody alive has it."""
        loaded = await self._source.load(id)
        head = loaded.head
        if head.state.finished:
            return loaded
        owners = await self._source.owners()
        alive = {owner.id for owner in owners} - gone(owners, but=self._life.owner)
        if head.owner in alive and head.owner != self._life.owner:
            self._skipped[id] = f"{head.owner} is running it; stop that process first"
            return None
        dead = frozenset() if head.owner is None else frozenset([head.owner])
        claim = Claim(owner=self._life.owner, now=0.0, states=frozenset(State), ids=(id,), dead=dead, limit=1)
        taken = await self._source.claim(claim)
        if not taken:
            self._skipped[id] = "somebody else claimed it"
            return None
        return attrs.evolve(taken[0], head=attrs.evolve(taken[0].head, crashes=head.crashes))

    async def _arrived(self, loaded: Loaded) -> bool:
        """Whether the target has it whole. Another execution under the same id is an error to see, not to overwrite."""
        id = loaded.definition.id
        try:
            there = await self._target.load(id)
        except ExecutionNotFoundError:
            return False
        if (there.definition.workflow, there.definition.created) != (
            loaded.definition.workflow,
            loaded.definition.created,
        ):
            raise StoreError(f"the target already has another execution {id!r}; nothing of it was touched")
        return there.head.revision > 1

    async def _send(self, loaded: Loaded) -> None:
        id = loaded.definition.id
        boundaries = await self._boundaries(loaded)
        first, *rest = [boundary for boundary, _ in boundaries]
        blobs = {name: data for _, more in boundaries for name, data in more.items()}
        at_first = attrs.evolve(loaded.head, owner=None, revision=1, seq=first.seq, state=State.PAUSED, hold=True)
        create = Create(definition=loaded.definition, head=at_first, boundary=first, blobs=blobs)
        await self._target.create(create)
        for message in loaded.messages:
            await self._target.send(id, attrs.evolve(message, id=0), limit=100_000)
        head = self._final(loaded.head)
        await self._target.save(Save(id=id, head=head, boundaries=tuple(rest), put=dict(loaded.entries)))

    def _final(self, head: Head) -> Head:
        return attrs.evolve(head, owner=None, revision=2)

    async def _boundaries(self, loaded: Loaded) -> list[tuple[Boundary, Mapping[str, bytes]]]:
        """Every boundary, those whose state is kept with their state and blobs."""
        id = loaded.definition.id
        kept = {seq for seq, _ in loaded.kept}
        found: list[tuple[Boundary, Mapping[str, bytes]]] = []
        after = 0
        while rows := await self._source.boundaries(id, after=after):
            after = rows[-1].seq
            for row in rows:
                whole = await self._source.checkpoint(id, row.seq) if row.seq in kept else None
                found.append(whole or (attrs.evolve(row, data=None, blobs=()), {}))
        return found

    async def _verify(self, loaded: Loaded) -> None:
        id = loaded.definition.id
        there = await self._target.load(id)
        same_head = attrs.evolve(there.head, woken=False) == attrs.evolve(self._final(loaded.head), woken=False)
        same = (
            same_head
            and there.definition == loaded.definition
            and there.boundary == loaded.boundary
            and dict(there.blobs) == dict(loaded.blobs)
            and dict(there.entries) == dict(loaded.entries)
            and [m.payload for m in there.messages] == [m.payload for m in loaded.messages]
            and there.kept == loaded.kept
        )
        if not same:
            raise StoreError(f"execution {id!r} did not arrive as it was sent; the source still has it")

    async def _leave_behind(self, loaded: Loaded) -> None:
        head = loaded.head
        stays = attrs.evolve(
            head, owner=None, revision=head.revision + 1, state=State.PAUSED, hold=True, reason=self._mark
        )
        try:
            await self._source.save(Save(id=loaded.definition.id, head=stays))
        except LeaseLostError:
            self._skipped[loaded.definition.id] = "somebody else claimed it while it was carried"
