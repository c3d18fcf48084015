"""What the task store does, in the adapter's event loop: apply writes, claim, delete, read.

Place in the life of an execution: claim, checkpoint, finish.

Every write is: take the document (the one this process wrote last, or what is stored), change a copy, and replace the
record if it still is the one that was taken; otherwise look again. So the fence is compared and the write made in one
act, the adapter's `replace_task` (I3). Without that method nobody else may write, which `single.py` sees to.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import attrs
from attrs import frozen

from longrun.errors import (
    CodecError,
    CorruptDataError,
    ExecutionExistsError,
    ExecutionNotFoundError,
    LongrunError,
    StoreUnavailableError,
)
from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Create, Definition, Head, Loaded, Owner, Save, Write
from longrun.stores._task import lines
from longrun.stores._task.document import Document, decode, page_id
from longrun.stores._task.listing import Peek, is_execution, peek
from longrun.stores._task.records import INTERNAL, KIND, STATUSES, TaskRecord
from longrun.stores._task.table import TaskTable, execution_record, tombstone
from longrun.stores.base import Answer
from longrun.stores.choice import is_free, is_wanted

ATTEMPTS = 100
"""How often a write is tried while others keep changing the same record. Each time, another one got through."""

OWNER = "~owner~"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,128}")


@frozen
class _Taken:
    """An execution as it was found. `revision` is the record's, None if there is none."""

    document: Document | None = None
    revision: int | None = None
    foreign: bool = False
    """The id belongs to a task of the application."""
    fresh: bool = False
    """Read from the table just now, not remembered."""


class TaskWork:
    """Executions and owners in a task table."""

    def __init__(self, table: TaskTable) -> None:
        self.table = table
        self._known: dict[str, _Taken] = {}
        """What owners of this process run, as it was last written. Bounded by what runs here (I16)."""
        self._owners: set[str] = set()
        self._unsure: dict[str, str] = {}
        """Ids that an owner may have been given without being told: the answer of the table was lost (I9)."""

    # writes

    async def commit(self, batch: Sequence[Write]) -> list[Answer]:
        places: dict[str, list[int]] = {}
        for place, write in enumerate(batch):
            places.setdefault(write.id, []).append(place)
        answers: list[Answer] = [None] * len(batch)

        async def one(id: str) -> None:
            writes = [batch[place] for place in places[id]]
            for place, answer in zip(places[id], await self._answers(id, writes), strict=True):
                answers[place] = answer

        await self.table.each(places, one)
        return answers

    async def _answers(self, id: str, writes: list[Write]) -> list[Answer]:
        """All writes of one execution, as one record. If that fails, the others of the batch do not."""
        try:
            return await self._write(id, writes)
        except LongrunError as error:
            self._known.pop(id, None)
            return [error] * len(writes)

    async def _write(self, id: str, writes: list[Write]) -> list[Answer]:
        taken = self._known.get(id)
        if taken is None and self.table.fenced and isinstance(writes[0], Create):
            taken = _Taken()  # most likely it is new; the table compares
        for _ in range(ATTEMPTS):
            taken = taken or await self._take(id)
            document, answers, changed = _apply(taken, writes)
            if document is not None and changed:
                if await self._replace(taken, document):
                    return answers
            elif taken.fresh:
                return answers
            taken = None
        raise StoreUnavailableError(KIND, f"execution {id!r} is changed too quickly by others")

    async def _take(self, id: str) -> _Taken:
        record = await self.table.get(id)
        return _Taken(fresh=True) if record is None else await self._read(record)

    async def _read(self, record: TaskRecord) -> _Taken:
        if record.metadata.get("longrun") == "deleted":
            await self._bury(record)  # what a crash has left
            return await self._take(record.id)
        if not is_execution(record):
            return _Taken(revision=record.revision, foreign=True, fresh=True)
        try:
            document = decode(record.id, record.data, record.metadata)
        except CorruptDataError:
            await self.table.quarantine(record.id, record.data, readable=False)
            raise
        if document.found_damaged:
            await self.table.quarantine(record.id, record.data, readable=True)
        return _Taken(document, record.revision, fresh=True)

    async def _replace(self, taken: _Taken, document: Document) -> bool:
        page = document.turn_page(taken.document)
        if page is not None:
            await self.table.put_page(document.id, page)
        revision = (taken.revision or 0) + 1
        if not await self.table.put(execution_record(document, revision), taken.revision):
            return False
        if document.head.owner in self._owners and not document.head.state.finished:
            self._known[document.id] = _Taken(document, revision)
        else:
            self._known.pop(document.id, None)
        return True

    # claims

    async def claim(self, claim: Claim) -> list[Loaded]:
        self._owners.add(claim.owner)
        found = await self._candidates(claim)
        wanted = [p for p in found if self._may_have(claim, p.definition, p.head)]
        wanted.sort(key=lambda p: p.rank)
        given: dict[str, Loaded] = {}
        errors: list[LongrunError] = []

        async def give(candidate: Peek) -> None:
            try:
                loaded = await self._give(claim, candidate.record)
            except LongrunError as error:
                errors.append(error)
            else:
                if loaded is not None:
                    given[candidate.definition.id] = loaded

        while wanted and len(given) < claim.limit:
            missing = claim.limit - len(given)
            turn, wanted = wanted[:missing], wanted[missing:]
            await self.table.each(turn, give)
        if errors and not given and not all(isinstance(error, CodecError) for error in errors):
            raise errors[0]
        return [given[p.definition.id] for p in sorted(found, key=lambda p: p.rank) if p.definition.id in given]

    async def _candidates(self, claim: Claim) -> list[Peek]:
        if claim.ids is None:
            return await self.peeks(claim.states)
        records: list[TaskRecord] = []

        async def one(id: str) -> None:
            record = await self.table.get(id)
            if record is not None:
                records.append(record)

        await self.table.each(dict.fromkeys(claim.ids), one)
        return _peeked(records)

    async def _give(self, claim: Claim, record: TaskRecord) -> Loaded | None:
        """None if somebody else was quicker."""
        taken = await self._read(record)
        for _ in range(ATTEMPTS):
            if taken.document is None or not self._may_have(claim, taken.document.definition, taken.document.head):
                self._unsure.pop(record.id, None)
                return None
            document = taken.document.copy()
            document.give(claim)
            loaded = document.loaded()
            self._unsure[record.id] = claim.owner
            replaced = await self._replace(taken, document)
            del self._unsure[record.id]
            if replaced:
                return loaded
            taken = await self._take(record.id)
        raise StoreUnavailableError(KIND, f"execution {record.id!r} is changed too quickly by others")

    def _may_have(self, claim: Claim, definition: Definition, head: Head) -> bool:
        """Whether it is free and wanted; or was given to this owner already, which does not know."""
        if head.owner is not None and head.owner == claim.owner == self._unsure.get(definition.id):
            return claim.ids is None or definition.id in claim.ids
        return is_free(head, claim) and is_wanted(definition, head, claim)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        deleted: dict[str, bool] = {}

        async def one(id: str) -> None:
            deleted[id] = await self._delete(id)

        await self.table.each(dict.fromkeys(ids), one)
        return [deleted.pop(id, False) for id in ids]

    async def _delete(self, id: str) -> bool:
        """Mark it, so that nobody can claim it any more, then remove it."""
        try:
            taken = await self._take(id)
        except CorruptDataError:  # nothing of it can be read, and its bytes are in quarantine by now
            return await self._discard(id)
        document = taken.document
        if document is None or not document.head.state.finished:
            return False
        return await self._remove(tombstone(document, (taken.revision or 0) + 1), taken.revision)

    async def _discard(self, id: str) -> bool:
        record = await self.table.get(id)
        if record is None:
            return False
        metadata = {"longrun": "deleted", "revision": str(record.revision + 1)}
        return await self._remove(TaskRecord(id, INTERNAL, 0.0, record.data, metadata), record.revision)

    async def _remove(self, mark: TaskRecord, expected: int | None) -> bool:
        if not await self.table.put(mark, expected):
            return False
        self._known.pop(mark.id, None)
        await self._bury(mark)
        return True

    async def _bury(self, mark: TaskRecord) -> None:
        parts, _, _ = lines.read_document(mark.id, mark.data)
        for kind, history, _ in parts:
            for first, _ in history["pages"] if kind == "history" else ():
                await self.table.delete(page_id(history["serial"], first))
        await self.table.delete(mark.id, mark.revision)

    # owners

    async def register(self, owner: Owner, ttl: float) -> None:
        self._owners.add(owner.id)
        await self._lease(owner.id, ttl, owner)

    async def renew(self, owner: str, ttl: float) -> bool:
        return await self._lease(owner, ttl, None)

    async def _lease(self, name: str, ttl: float, owner: Owner | None) -> bool:
        """Without an `owner`, the one that is stored; False if there is none."""
        id = _owner_id(name)
        for _ in range(ATTEMPTS):
            stored = await self.table.get(id)
            leased = owner or (None if stored is None else self._owner(stored))
            if leased is None:
                return False
            until = self.table.clock.now() + ttl
            text = lines.document(id, [lines.line(id, "owner", lines.owner_out(leased, until))])
            expected = None if stored is None else stored.revision
            metadata = {"longrun": "owner", "revision": str((expected or 0) + 1)}
            if await self.table.put(TaskRecord(id, INTERNAL, 0.0, text, metadata), expected):
                return True
        raise StoreUnavailableError(KIND, f"owner {name!r} is changed too quickly by others")

    async def unregister(self, owner: str) -> None:
        self._owners.discard(owner)
        self._unsure = {id: name for id, name in self._unsure.items() if name != owner}
        for id in [id for id, taken in self._known.items() if taken.document and taken.document.head.owner == owner]:
            del self._known[id]
        await self.table.delete(_owner_id(owner))

    async def owners(self) -> list[Owner]:
        found = [self._owner(record) for record in await self.table.list([INTERNAL])]
        return [owner for owner in found if owner is not None]

    def _owner(self, record: TaskRecord) -> Owner | None:
        """A damaged one counts as not registered, which costs a take-over, never data: the fence decides (I12)."""
        if not record.id.startswith(OWNER):
            return None
        parts, _, _ = lines.read_document(record.id, record.data)
        now = self.table.clock.now()
        return next((lines.owner_in(value, now) for kind, value, _ in parts if kind == "owner"), None)

    # reads

    async def document(self, id: str) -> Document | None:
        return (await self._take(id)).document

    async def peeks(self, states: Iterable[ExecutionState] | None = None) -> list[Peek]:
        """Every execution that is in one of the states; perhaps others too."""
        statuses = None if states is None else {STATUSES[state] for state in states}
        return _peeked(await self.table.list(statuses))

    async def boundaries(self, id: str, after: int, limit: int) -> list[Boundary]:
        document = await self.document(id)
        if document is None:
            return []
        rows: dict[int, Boundary] = {}
        for first, last in document.pages:
            if last > after and len(rows) < limit:
                page = await self._page(id, page_id(document.serial, first))
                rows |= {seq: row for seq, row in page.items() if seq > after}
        rows |= {seq: row for seq, (row, _) in document.boundaries.items() if seq > after}
        return [attrs.evolve(rows[seq], data=None) for seq in sorted(rows)][:limit]

    async def _page(self, id: str, page: str) -> dict[int, Boundary]:
        record = await self.table.get(page)
        if record is None:
            return {}  # the execution is being deleted
        parts, damaged, _ = lines.read_document(id, record.data)
        if damaged:
            await self.table.quarantine(page, record.data, readable=True)
        rows = [lines.boundary_in(value) for kind, value, _ in parts if kind == "boundary"]
        return {row.seq: row for row in rows}

    async def size(self, id: str) -> int:
        record = await self.table.get(id)
        document = None if record is None else (await self._read(record)).document
        if record is None or document is None:
            return 0
        pages = [await self.table.get(page_id(document.serial, first)) for first, _ in document.pages]
        return len(record.data) + sum(len(page.data) for page in pages if page is not None)


def _owner_id(name: str) -> str:
    """A record's id is short and plain, whatever an owner is called."""
    return OWNER + (name if _PLAIN.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest())


def _peeked(records: Iterable[TaskRecord]) -> list[Peek]:
    return [found for found in map(peek, records) if found is not None]


def _apply(taken: _Taken, writes: list[Write]) -> tuple[Document | None, list[Answer], bool]:
    """The document after all of them, each one's answer, and whether anything changed."""
    document = None if taken.document is None else taken.document.copy()
    answers: list[Answer] = []
    changed = False
    for write in writes:
        answer: Answer
        done = False
        try:
            if isinstance(write, Create):
                answer, document, done = _created(write, document, foreign=taken.foreign)
            elif document is None:
                answer = ExecutionNotFoundError(write.id)
            elif isinstance(write, Save):
                answer, done = document.save(write)
            else:
                answer, done = document.send(write)
        except CodecError as error:  # it cannot be stored
            answer = error
        answers.append(answer)
        changed = changed or done
    return document, answers, changed


def _created(write: Create, document: Document | None, *, foreign: bool) -> tuple[Answer, Document | None, bool]:
    if foreign:
        return ExecutionExistsError(write.id, "the application's own tasks", write.definition.workflow), document, False
    if document is not None:
        return False, document, False
    return True, Document.create(write), True
