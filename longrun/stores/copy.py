"""Moving house: carry executions with their history from one store to another.

Place in the life of an execution: between two homes. Everything goes through the contract of the stores, so any pair
will do. Each execution is carried in this order, and can run in one of the two stores at any moment at most:

    claim it in the source            nobody else goes on with it there
    put all of it into the target     paused and held, with a note of what it was: nobody goes on with it there
    compare the two
    leave it in the source            paused and held, for good
    let it go in the target           what it was becomes true again

A copy can be interrupted anywhere and started again: what was let go is left alone, what had left the source is let
go, and anything less is thrown away and carried again. When all have been carried, the two stores are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread
import attrs
from attrs import field, frozen

from longrun.errors import CodecError, ExecutionNotFoundError, LeaseLostError, LongrunError, StoreError
from longrun.lease import alive
from longrun.life import LifeLock
from longrun.queues import Gate, new_record, records
from longrun.records import ExecutionState
from longrun.stored import MOVED, Boundary, Claim, Create, Head, Loaded, Message, Owner, Query, Save, was_moved
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore

State = ExecutionState
PAGE = 200
AT_ONCE = 16
LEASE = 600.0
LEASE_AGAIN = 60.0
MESSAGES = 1_000_000
NOTE = "~copy"
"""The entry of an execution that has arrived and waits to be let go: the state, hold, reason and end that it had. Of
one that was left behind: the number of the last message that was carried."""
LATE = "~copy-"
"""The key that a message without one is given which came too late to be carried with the rest, before its number: who
is interrupted brings it again."""
ARRIVING = "being copied from another store"
LET_GO = 3
"""The revision of an execution in the target that nobody has gone on with."""
CLEARED = frozenset({State.COMPLETED, State.CANCELLED})
POSITION = ("seq", "step", "visit", "iteration", "attempt", "started", "due", "signal", "progress", "done", "of")


@frozen(kw_only=True)
class CopyReport:
    """What `copy_store` did: ids by what became of them."""

    copied: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    """Already there, whole."""
    skipped: Mapping[str, str] = field(factory=dict)
    """Left behind, and why: a living process still owns it, it cannot be read, or the target has another execution of
    that id."""


async def copy_store(
    source: CheckpointStore | str, target: CheckpointStore | str, *, progress: Callable[[str], object] | None = None
) -> CopyReport:
    """Carry every execution of `source` to `target` with its history, messages and progress inside its step, and the
    limits of queues; then compare the two. Both are stores or their URLs, and opened for the time it takes.

    Unfinished executions stay behind paused and held: signals and orders for them are refused there from then on. What
    a living process runs is left where it is. What is submitted to the source meanwhile, or was on its way to an
    execution when that moved, may be missed: run it again. A difference found at the end raises `StoreError`; the
    source keeps everything.
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


@frozen
class _Picture:
    """Everything of an execution; the boundaries that still have their state with it."""

    loaded: Loaded
    rows: tuple[Boundary, ...]
    blobs: Mapping[str, bytes]

    def contents(self) -> tuple[Any, ...]:
        """All but the head and the messages, as it must be found in the target."""
        loaded = self.loaded
        entries = {key: data for key, data in loaded.entries.items() if key != NOTE}
        return loaded.definition, self.rows, dict(self.blobs), entries

    def messages(self) -> list[Message]:
        """Those that wait, as the other store must have them: with others perhaps, which came to that one."""
        if self.loaded.head.state in CLEARED:
            return []
        return [attrs.evolve(one, id=0, key=_own_key(one)) for one in self.loaded.messages]

    def arrived_as(self, other: _Picture) -> bool:
        missing = self.messages()
        for message in other.messages():
            if missing and message == missing[0]:
                missing.pop(0)
        return not missing and self.contents() == other.contents()

    def shape(self) -> list[Boundary]:
        """The rows without their states, which may be fewer where it has gone on."""
        return [attrs.evolve(row, data=None, blobs=()) for row in self.rows]


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
        """Every id, in the order of the listing: copied, present, or why it was skipped."""
        self._registered = float("-inf")

    async def run(self) -> CopyReport:
        await self._register()
        if any(owner.id == self._me.id for owner in await self._target.owners()):
            raise StoreError("source and target are the same store; nothing was touched")
        await self._carry_queues()
        query = Query(limit=PAGE)
        while page := await self._source.find(query):
            await self._register()
            await self._each([stored.definition.id for stored in page], self._carry)
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))
        await self._compare()
        return self._report()

    def _report(self) -> CopyReport:
        found = self._became.items()
        return CopyReport(
            copied=tuple(id for id, became in found if became == "copied"),
            present=tuple(id for id, became in found if became == "present"),
            skipped={id: became for id, became in found if became not in ("copied", "present")},
        )

    async def _register(self) -> None:
        if time.monotonic() > self._registered + LEASE_AGAIN:
            await self._source.register(self._me, LEASE)
            self._registered = time.monotonic()

    async def _each(self, ids: list[str], function: Callable[[str], Any]) -> None:
        """Some at once, so that the stores can gather their writes. The first error ends it."""
        errors: list[LongrunError] = []
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def one(id: str) -> None:
            async with limiter:
                try:
                    await function(id)
                except LongrunError as error:
                    errors.append(error)
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for id in ids:
                tasks.start_soon(one, id, name=f"longrun-copy-{id}")
        if errors:
            raise errors[0]

    # queues

    async def _carry_queues(self) -> None:
        """A limit that the target has already rules."""
        there = await records(self._target)
        for name, record in (await records(self._source)).items():
            limit, now = Gate.from_text(record.head.note).limit, time.time()
            if name not in there:
                await self._target.create(new_record(name, limit, now))
            elif limit is not None and Gate.from_text(there[name].head.note).limit is None:
                head, note = there[name].head, Gate.full(limit, now).to_text()
                await self._target.save(
                    Save(id=there[name].definition.id, head=attrs.evolve(head, revision=head.revision + 1, note=note))
                )

    # one execution

    async def _carry(self, id: str) -> None:
        self._became[id] = "not reached"
        try:
            self._became[id] = await self._carried(id)
        except CodecError as error:
            self._became[id] = f"it cannot be read: {error}"
        except LeaseLostError:
            self._became[id] = "somebody else claimed it while it was carried"
        except ExecutionNotFoundError:
            await self._forget(id)
        if self._became.get(id) == "copied" and self._progress is not None:
            self._progress(id)

    async def _forget(self, id: str) -> None:
        """It was deleted in the source meanwhile, as finished ones are; half of it in the target must not stay."""
        if await self._source.exists(id):
            raise StoreError(f"half of execution {id!r} is gone from the target, where somebody deletes")
        there = await self._at_target(id)
        if there is not None and there.head.reason == ARRIVING:
            await self._throw_away(there)
        self._became.pop(id, None)

    async def _carried(self, id: str) -> str:
        here, there = await self._source.load(id), await self._at_target(id)
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
            claimed = await self._claimed(here)
            if isinstance(claimed, str):
                return claimed
            here = claimed
        picture = await _picture(self._source, id, here)
        await self._send(picture)
        there = await _picture(self._target, id)
        if not picture.arrived_as(there) or not _same_position(here.head, there.loaded.head):
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

    async def _claimed(self, here: Loaded) -> Loaded | str:
        """A live execution under our own claim; or why it cannot be had."""
        head, id = here.head, here.definition.id
        owners = await self._source.owners()
        if head.owner in alive(owners, but=self._me.id) - {self._me.id}:
            return f"{head.owner} is running it; stop that process first"
        dead = frozenset() if head.owner is None else frozenset([head.owner])
        claim = Claim(owner=self._me.id, now=0.0, states=frozenset(State), ids=(id,), dead=dead, limit=1)
        for taken in await self._source.claim(claim):
            return attrs.evolve(taken, head=attrs.evolve(taken.head, crashes=head.crashes))
        return "somebody else claimed it"

    async def _send(self, picture: _Picture) -> None:
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
            try:
                await self._bring_late(id)
                same = await self._is_same(id)
            except CodecError:
                same = False
            except ExecutionNotFoundError:
                same = not await self._source.exists(id)  # deleted there since, as finished ones are
            if not same:
                different.append(id)

        arrived = [id for id, became in self._became.items() if became in ("copied", "present")]
        for start in range(0, len(arrived), PAGE):
            await self._each(arrived[start : start + PAGE], compare)
        if different:
            shown = ", ".join(map(repr, sorted(different)[:5]))
            raise StoreError(
                f"{len(different)} executions are not the same in both stores ({shown} …); the source still has them"
            )

    async def _is_same(self, id: str) -> bool:
        here, there = await _picture(self._source, id), await _picture(self._target, id)
        if there.loaded.damage:
            return False
        if there.loaded.head.revision == LET_GO:
            return here.arrived_as(there) and _same_position(here.loaded.head, there.loaded.head)
        shape = here.shape()  # it has gone on in the target
        return here.loaded.definition == there.loaded.definition and there.shape()[: len(shape)] == shape


async def _picture(store: CheckpointStore, id: str, loaded: Loaded | None = None) -> _Picture:
    loaded = await store.load(id) if loaded is None else loaded
    kept = {seq for seq, _ in loaded.kept}
    rows: list[Boundary] = []
    blobs: dict[str, bytes] = dict(loaded.blobs)
    while page := await store.boundaries(id, after=rows[-1].seq if rows else 0):
        for row in page:
            whole = await store.checkpoint(id, row.seq) if row.seq in kept else None
            rows.append(attrs.evolve(row, data=None, blobs=()) if whole is None else whole[0])
            blobs |= {} if whole is None else whole[1]
    if not rows:
        raise ExecutionNotFoundError(id)  # deleted since it was loaded
    return _Picture(loaded, tuple(rows), blobs)


def _note(head: Head) -> bytes:
    was = {"state": head.state.value, "hold": head.hold, "reason": head.reason, "ended": head.ended}
    return json.dumps(was).encode()


def _own_key(message: Message) -> str | None:
    return None if message.key is not None and message.key.startswith(LATE) else message.key


def _ended_alike(here: Head, there: Head) -> bool:
    """Whether the target has the end that the source has, or has gone on from it."""
    return there.revision > LET_GO or _same_position(here, there)


def _same_origin(here: Loaded, there: Loaded) -> bool:
    one, other = here.definition, there.definition
    return (one.workflow, one.created) == (other.workflow, other.created)


def _same_position(here: Head, there: Head) -> bool:
    return all(getattr(here, name) == getattr(there, name) for name in POSITION)
