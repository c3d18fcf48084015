"""Moving house: carry executions with their history from one store to another.

Place in the life of an execution: between two homes. Everything goes through the contract of the stores, so any pair
will do. Each execution is carried in this order, and can run in one of the two stores at any moment at most:

    claim it in the source            nobody else goes on with it there
    put all of it into the target     paused and held, with a note of what it was: nobody goes on with it there
    compare the two
    leave it in the source            paused and held, for good
    let it go in the target           what it was becomes true again

Parents and children move together: all of a family are claimed, the parents first, and then carried, the children
first. If one of them cannot be, those that have not moved yet are released and stay with it.

A copy can be interrupted anywhere and started again: what was let go is left alone, what had left the source is let
go, and anything less is thrown away and carried again. When all have been carried, the two stores are compared.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import attrs
from attrs import field, frozen

from longrun.errors import (
    CodecError,
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
    StoreError,
)
from longrun.lease import alive
from longrun.life import LifeLock
from longrun.queues import Gate, new_record, records
from longrun.records import UNFINISHED, ExecutionState
from longrun.stored import MOVED, Claim, Create, Head, Loaded, Message, Owner, Query, Save, Stored, was_moved
from longrun.stores import open_store
from longrun.stores._copy.family import CLEARED, Family, eldest_of, may_go_on
from longrun.stores._copy.picture import LATE, LET_GO, NOTE, Picture, is_same, same_position, take_picture
from longrun.stores.store import CheckpointStore

T = TypeVar("T")
State = ExecutionState
PAGE = 200
AT_ONCE = 16
LEASE = 600.0
LEASE_AGAIN = 60.0
MESSAGES = 1_000_000
ARRIVING = "being copied from another store"
ARRIVED = ("copied", "present")
GONE = "gone"
"""What becomes of an execution that is deleted in the source meanwhile."""
LOOKS = 3
"""How often is looked at what seems to differ, or to have no parent: it may have gone on while it was read."""


@frozen(kw_only=True)
class CopyReport:
    """What `copy_store` did: ids by what became of them."""

    copied: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Already there, whole."""
    skipped: Mapping[str, str] = field(factory=dict)
    """Left behind, and why: a living process still owns it, it cannot be read, the target has another execution of that
    id, or its parent or a child of it is left behind."""


async def copy_store(
    source: CheckpointStore | str, target: CheckpointStore | str, *, progress: Callable[[str], object] | None = None
) -> CopyReport:
    """Carry every execution of `source` to `target` with its history, messages and progress inside its step, and the
    limits of queues; then compare the two. Both are stores or their URLs, and opened for the time it takes.

    Unfinished executions stay behind paused and held: signals and orders for them are refused there from then on. What
    a living process runs is left where it is, and so are the parents and children of that; a later copy moves them
    together. What is submitted to the source meanwhile, or was on its way to an execution when that moved, may be
    missed: run it again. A difference found at the end raises `StoreError`; the source keeps everything.
    """
    here, there = (one if isinstance(one, CheckpointStore) else open_store(one) for one in (source, target))
    async with here, there:
        lock = LifeLock.acquire()
        try:
            return await _Copy(here, there, lock, progress).run()
        finally:
            with anyio.CancelScope(shield=True):
                await _sign_off(here, lock)


async def _sign_off(source: CheckpointStore, lock: LifeLock) -> None:
    try:
        if await source.count(Query(owner=lock.life.owner)):
            lock.abandon()  # it broke off: what it had claimed is freed by the lock; nobody asks for unknown owners
            return
        await source.unregister(lock.life.owner)
        lock.release()
    except LongrunError:
        lock.abandon()  # who finds the registration must see that its owner is gone


class _Copy:
    def __init__(
        self,
        source: CheckpointStore,
        target: CheckpointStore,
        lock: LifeLock,
        progress: Callable[[str], object] | None,
    ) -> None:
        self._source, self._target = source, target
        self._me = Owner(id=lock.life.owner, life=lock.life.to_dict(), remaining=LEASE)
        self._progress = progress
        self._became: dict[str, str] = {}
        """Every id: copied, present, gone, or why it was skipped."""
        self._claimed: dict[str, int] = {}
        """What is claimed and not yet carried, and the crashes that it had before."""
        self._families, self._members = anyio.CapacityLimiter(AT_ONCE), anyio.CapacityLimiter(AT_ONCE)
        self._registered = float("-inf")

    async def run(self) -> CopyReport:
        await self._register()
        if any(owner.id == self._me.id for owner in await self._target.owners()):
            raise StoreError("source and target are the same store; nothing was touched")
        await self._carry_queues()
        query = Query(limit=PAGE)
        while page := await self._source.find(query):
            await self._carry_page(page)
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        await self._compare()
        return self._report()

    def _report(self) -> CopyReport:
        found = self._became.items()
        return CopyReport(
            copied=tuple(id for id, became in found if became == "copied"),
            present=tuple(id for id, became in found if became == "present"),
            skipped={id: became for id, became in found if became not in (*ARRIVED, GONE)},
        )

    async def _register(self) -> None:
        if time.monotonic() > self._registered + LEASE_AGAIN:
            await self._source.register(self._me, LEASE)
            self._registered = time.monotonic()

    async def _each(
        self, ones: Sequence[T], function: Callable[[T], Any], limiter: anyio.CapacityLimiter | None = None
    ) -> None:
        """Some at once, so that the stores can gather their writes. The first error ends it."""
        for start in range(0, len(ones), PAGE):
            await self._register()
            await _some_at_once(ones[start : start + PAGE], function, limiter or self._members)

    # queues

    async def _carry_queues(self) -> None:
        """A limit that the target has already rules."""
        there = await records(self._target)
        for name, record in (await records(self._source)).items():
            limit, now = Gate.of(name, record.head).limit, time.time()
            if name not in there:
                await self._target.create(new_record(name, limit, now))
            elif limit is not None and Gate.of(name, there[name].head).limit is None:
                head, note = there[name].head, Gate.full(limit, now).to_text()
                await self._target.save(
                    Save(id=there[name].definition.id, head=attrs.evolve(head, revision=head.revision + 1, note=note))
                )

    # those that belong together

    async def _carry_page(self, page: list[Stored]) -> None:
        """All on it with their families, as far as they have not been carried with others before."""
        for _ in range(LOOKS):
            page = [stored for stored in page if stored.definition.id not in self._became]
            await self._each(await eldest_of(self._source, page), self._carry_family, self._families)
        for stored in page:
            self._became.setdefault(stored.definition.id, "its parent has changed again and again; copy once more")

    async def _carry_family(self, eldest: Stored) -> None:
        """A parent is claimed before its children are looked for, so that it starts no more of them."""
        family = Family()
        family.add(eldest)
        while generation := family.generations[-1]:
            family.generations.append([])
            await self._each(generation, partial(self._gather, family))
        await self._each(family.closed, partial(self._carry_member, family))
        for generation in reversed(family.generations):
            await self._each(generation, partial(self._carry_or_leave, family))

    async def _gather(self, family: Family, id: str) -> None:
        """Claim one of a family, and find its children."""
        try:
            here = await self._source.load(id)
            if not may_go_on(here.head):
                return  # it has changed since it was listed
            if not here.head.state.finished:
                why = await self._claim(here, family)
                family.stays |= {} if why is None else {id: why}
        except ExecutionNotFoundError:
            return
        except CodecError as error:
            family.stays[id] = _unreadable(error)
            return
        async for child in self._source.find_all(Query(parent_id=id, limit=PAGE)):
            family.add(child)

    async def _claim(self, here: Loaded, family: Family) -> str | None:
        """Make it our own, unless its family stays anyway; or why it cannot be had."""
        head, id = here.head, here.definition.id
        if head.owner in alive(await self._source.owners(), but=self._me.id) - {self._me.id}:
            return f"{head.owner} is running it; stop that process first"
        if family.stays:
            return None
        dead = frozenset() if head.owner is None else frozenset([head.owner])
        claim = Claim(owner=self._me.id, now=0.0, states=UNFINISHED, ids=(id,), dead=dead, limit=1)
        if not await self._source.claim(claim):
            return "somebody else claimed it"
        self._claimed[id] = head.crashes
        return None

    async def _carry_or_leave(self, family: Family, id: str) -> None:
        if family.stays:
            self._became[id] = family.why_it_stays(id)
        else:
            await self._carry_member(family, id)
        if self._claimed.pop(id, None) is not None and self._became[id] not in ("copied", GONE):
            await self._release(id)

    async def _carry_member(self, family: Family, id: str) -> None:
        await self._carry(id)
        if self._became[id] not in (*ARRIVED, GONE):
            family.stays[id] = self._became[id]

    async def _release(self, id: str) -> None:
        with contextlib.suppress(LeaseLostError, CodecError):  # what cannot be read is left to the lock
            head = (await self._source.load(id)).head
            if head.owner == self._me.id:
                await self._source.save(Save(id=id, head=attrs.evolve(head, owner=None, revision=head.revision + 1)))

    # one execution

    async def _carry(self, id: str) -> None:
        self._became[id] = "not reached"
        try:
            self._became[id] = await self._carried(id)
        except CodecError as error:
            self._became[id] = _unreadable(error)
        except LeaseLostError:
            self._became[id] = "somebody else claimed it while it was carried"
        except ExecutionNotFoundError:
            await self._forget(id)
        if self._became[id] == "copied" and self._progress is not None:
            self._progress(id)

    async def _forget(self, id: str) -> None:
        """It was deleted in the source meanwhile, as finished ones are; half of it in the target must not stay."""
        if await self._source.exists(id):
            raise StoreError(f"half of execution {id!r} is gone from the target, where somebody deletes")
        there = await self._at_target(id)
        if there is not None and there.head.reason == ARRIVING:
            await self._throw_away(there)
        self._became[id] = GONE

    async def _carried(self, id: str) -> str:
        here, there = await self._source.load(id), await self._at_target(id)
        _check_readable(here)
        if there is not None and not _same_origin(here, there):
            return "the target has another execution of that id, which was not touched"
        moved = was_moved(here.head)
        arriving = there is not None and there.head.reason == ARRIVING  # or about to be thrown away: see there
        if there is not None and not arriving:
            if not moved and not here.head.state.finished:
                return "it can go on in both stores; cancel one of them"
            return "present" if moved or _ended_alike(here.head, there.head) else "it has ended otherwise in the source"
        if moved and there is not None and NOTE in there.entries:
            await self._let_go(there)
            return "copied"
        if moved:
            return "it was moved to another store before; resume lets it go on here"
        if there is not None:
            await self._throw_away(there)
        return await self._carry_whole(here)

    async def _carry_whole(self, here: Loaded) -> str:
        id = here.definition.id
        if not here.head.state.finished:
            if here.head.owner != self._me.id:
                return "somebody else claimed it while it was carried"
            here = attrs.evolve(here, head=attrs.evolve(here.head, crashes=self._claimed[id]))
        picture = await take_picture(self._source, id, here)
        await self._send(picture)
        there = await take_picture(self._target, id)
        if not picture.arrived_as(there):
            raise StoreError(f"execution {id!r} did not arrive as it was sent; the source still has it")
        if not here.head.state.finished:
            await self._leave_behind(here)
        await self._let_go(there.loaded)
        return "copied"

    async def _at_target(self, id: str) -> Loaded | None:
        try:
            return await self._target.load(id)
        except ExecutionNotFoundError:
            return None

    async def _send(self, picture: Picture) -> None:
        """All of it, held."""
        loaded, id = picture.loaded, picture.loaded.definition.id
        first, *rest = picture.rows
        head = attrs.evolve(
            loaded.head,
            owner=None,
            revision=1,
            state=State.PAUSED,
            hold=True,
            reason=ARRIVING,
            ended=None,
            woken=False,
        )
        placeholder = first if first.data is not None else attrs.evolve(first, data=loaded.boundary.data or b"null")
        await self._target.create(
            Create(
                definition=loaded.definition,
                head=attrs.evolve(head, seq=first.seq),
                boundary=placeholder,
                blobs=picture.blobs,
            )
        )
        taken = await self._send_messages(loaded)
        oldest = next((row.seq for row in picture.rows if row.data is not None), loaded.head.seq)
        await self._target.save(
            Save(
                id=id,
                head=attrs.evolve(head, revision=2),
                boundaries=tuple(rest),
                put={**loaded.entries, NOTE: _note(loaded.head)},
                take=taken,
                keep_from=oldest,
            )
        )

    async def _send_messages(self, loaded: Loaded) -> tuple[int, ...]:
        """Those that wait, and a blank for every key that is remembered: the same signal sent again is still ignored.
        The numbers of the blanks, which are to be taken."""
        id = loaded.definition.id
        if loaded.head.state in CLEARED:
            return ()
        _, keys = await anyio.to_thread.run_sync(self._source.backend.sent, id)
        waiting = {message.id: message for message in loaded.messages}
        numbered = {number: Message(kind="signal", key=key, sent=0.0) for key, number in keys.items()} | waiting
        blanks: list[int] = []
        for number in sorted(numbered):
            sent = await self._target.send(id, attrs.evolve(numbered[number], id=0), limit=MESSAGES)
            if number not in waiting:
                blanks.append(sent)
        return tuple(blanks)

    async def _leave_behind(self, here: Loaded) -> None:
        head = here.head
        reason = f"{MOVED} ({self._target.backend.kind})"
        stays = attrs.evolve(head, owner=None, revision=head.revision + 1, state=State.PAUSED, hold=True, reason=reason)
        carried = max((message.id for message in here.messages), default=0)
        await self._source.save(Save(id=here.definition.id, head=stays, put={NOTE: str(carried).encode()}))

    async def _bring_late(self, id: str) -> None:
        """Messages that came between the last look at an execution and its being left behind."""
        here = await self._source.load(id)
        if not was_moved(here.head) or NOTE not in here.entries:
            return
        carried = int(here.entries[NOTE])
        late = [message for message in here.messages if message.id > carried]
        _check_readable(here)
        for message in late:
            key = message.key or f"{LATE}{message.id}"
            await self._target.send(id, attrs.evolve(message, id=0, key=key), limit=MESSAGES)
        if late:
            head = attrs.evolve(here.head, revision=here.head.revision + 1)
            await self._source.save(Save(id=id, head=head, put={NOTE: str(late[-1].id).encode()}))

    async def _let_go(self, there: Loaded) -> None:
        was = json.loads(there.entries[NOTE])
        head = attrs.evolve(
            there.head,
            revision=there.head.revision + 1,
            state=State(was["state"]),
            hold=was["hold"],
            reason=was["reason"],
            ended=was["ended"],
        )
        await self._target.save(Save(id=there.definition.id, head=head, drop=(NOTE,)))

    async def _throw_away(self, there: Loaded) -> None:
        """What an interrupted copy left. Nobody goes on with it: it is held, or ended when this was interrupted too."""
        head, id = there.head, there.definition.id
        if not head.state.finished:
            end = attrs.evolve(head, revision=head.revision + 1, state=State.CANCELLED, owner=None, ended=head.updated)
            await self._target.save(Save(id=id, head=end))
        if not (await self._target.delete([id]))[0]:
            raise StoreError(f"half of execution {id!r} is in the target and cannot be removed")

    # the end

    async def _compare(self) -> None:
        different: list[str] = []

        async def compare(id: str) -> None:
            for _ in range(LOOKS):
                if await self._looks_same(id):
                    return
            different.append(id)

        await self._each([id for id, became in self._became.items() if became in ARRIVED], compare)
        if different:
            shown = ", ".join(map(repr, sorted(different)[:5]))
            raise StoreError(
                f"{len(different)} executions are not the same in both stores ({shown} …); the source still has them"
            )

    async def _looks_same(self, id: str) -> bool:
        try:
            await self._bring_late(id)
            return await is_same(self._source, self._target, id)
        except CodecError:
            return False
        except ExecutionNotFoundError:
            return not await self._source.exists(id)  # deleted there since, as finished ones are


async def _some_at_once(ones: Sequence[T], function: Callable[[T], Any], limiter: anyio.CapacityLimiter) -> None:
    errors: list[LongrunError] = []

    async def call(one: T) -> None:
        async with limiter:
            try:
                await function(one)
            except LongrunError as error:
                errors.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for one in ones:
            tasks.start_soon(call, one, name="longrun-copy")
    if errors:
        raise errors[0]


def _check_readable(loaded: Loaded) -> None:
    """A message that cannot be read here could not be read there."""
    if not all(message.is_readable for message in loaded.messages):
        raise CorruptDataError(f"a message of execution {loaded.definition.id!r}", "it cannot be unsealed")


def _unreadable(error: CodecError) -> str:
    return f"it cannot be read: {error}"


def _note(head: Head) -> bytes:
    was = {"state": head.state.value, "hold": head.hold, "reason": head.reason, "ended": head.ended}
    return json.dumps(was).encode()


def _ended_alike(here: Head, there: Head) -> bool:
    """Whether the target has the end that the source has, or has gone on from it."""
    return there.revision > LET_GO or same_position(here, there)


def _same_origin(here: Loaded, there: Loaded) -> bool:
    one, other = here.definition, there.definition
    return (one.workflow, one.created) == (other.workflow, other.created)
