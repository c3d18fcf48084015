"""Executions in memory: for tests, and as the readable specification of `StoreBackend`. Nothing survives the process.

Place in the life of an execution: claim, checkpoint, finish.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import attrs
from attrs import define, field

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ExecutionNotFoundError, LeaseLostError, SignalQueueFullError, WriteOrderError
from longrun.records import ExecutionState
from longrun.stored import (
    Boundary,
    Claim,
    Create,
    Definition,
    Head,
    Loaded,
    Message,
    Owner,
    Query,
    Save,
    Send,
    Stored,
    Write,
    named,
)
from longrun.stores.base import KEYS_REMEMBERED, Answer, StoreBackend
from longrun.stores.choice import is_free, is_wanted, matches
from longrun.stores.rows import wake_at
from longrun.stores.store import CheckpointStore


@define
class _Record:
    definition: Definition
    head: Head
    boundaries: list[Boundary]
    blobs: dict[str, bytes]
    entries: dict[str, bytes] = field(factory=dict)
    messages: dict[int, Message] = field(factory=dict)
    keys: dict[str, int] = field(factory=dict)
    last_message: int = 0


class MemoryBackend(StoreBackend):
    kind = "memory"
    durable = False

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._owners: dict[str, tuple[Owner, float]] = {}
        self._changed = threading.Condition()
        self._changes = 0
        self._seen = 0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def ping(self) -> None:
        pass

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        with self._changed:
            answers = [self._apply(write) for write in batch]
            self._ring()
            return answers

    def _apply(self, write: Write) -> Answer:
        if isinstance(write, Create):
            return self._create(write)
        record = self._records.get(write.id)
        if record is None:
            return ExecutionNotFoundError(write.id)
        return self._save(record, write) if isinstance(write, Save) else self._send(record, write)

    def _create(self, create: Create) -> bool:
        if create.id in self._records:
            return False
        self._records[create.id] = _Record(create.definition, create.head, [create.boundary], dict(create.blobs))
        return True

    def _save(self, record: _Record, save: Save) -> Answer:
        if record.head.fence != save.head.fence:
            return LeaseLostError(save.id, save.head.fence)
        if record.head.revision >= save.head.revision:
            return None
        if record.head.revision != save.head.revision - 1:
            return WriteOrderError(self.kind, save.id, record.head.revision, save.head.revision)
        record.head = save.head
        record.boundaries += save.boundaries
        record.blobs.update(save.blobs)
        if save.clear:
            record.entries.clear()
        for key in save.drop:
            record.entries.pop(key, None)
        record.entries.update(save.put)
        for number in save.take:
            record.messages.pop(number, None)
        if save.keep_from is not None:
            record.boundaries = [
                b if b.seq >= save.keep_from or b.data is None else attrs.evolve(b, data=None, blobs=())
                for b in record.boundaries
            ]
        for name in save.drop_blobs:
            record.blobs.pop(name, None)
        if save.steps is not None:
            record.definition = named(record.definition, save.steps, save.version)
        if save.head.state in (ExecutionState.COMPLETED, ExecutionState.CANCELLED):
            record.entries.clear()
            record.messages.clear()
        elif save.head.owner is None and record.messages and not save.head.state.finished:
            record.head = attrs.evolve(save.head, woken=True)
        return None

    def _send(self, record: _Record, send: Send) -> Answer:
        key = send.message.key
        if key is not None and key in record.keys:
            return record.keys[key]
        if len(record.messages) >= send.limit:
            return SignalQueueFullError(send.id, send.limit)
        record.last_message += 1
        record.messages[record.last_message] = attrs.evolve(send.message, id=record.last_message)
        if key is not None:
            record.keys[key] = record.last_message
            while len(record.keys) > KEYS_REMEMBERED + len(record.messages):
                del record.keys[next(iter(record.keys))]
        if record.head.owner is None and not record.head.state.finished:
            record.head = attrs.evolve(record.head, woken=True)
        return record.last_message

    def claim(self, claim: Claim) -> list[Loaded]:
        with self._changed:
            chosen = [
                r for r in self._candidates(claim) if is_free(r.head, claim) and is_wanted(r.definition, r.head, claim)
            ]
            chosen.sort(key=lambda r: (-r.definition.priority, r.definition.created, r.definition.id))
            for record in chosen[: claim.limit]:
                head = record.head
                crashed = head.owner not in (None, claim.owner) and head.state in (
                    ExecutionState.RUNNING,
                    ExecutionState.RESUMING,
                )
                record.head = attrs.evolve(
                    head, fence=head.fence + 1, owner=claim.owner, woken=False, crashes=head.crashes + crashed
                )
            return [_loaded(record) for record in chosen[: claim.limit]]

    def _candidates(self, claim: Claim) -> list[_Record]:
        if claim.ids is None:
            return list(self._records.values())
        return [self._records[id] for id in dict.fromkeys(claim.ids) if id in self._records]

    def register(self, owner: Owner, ttl: float) -> None:
        with self._changed:
            self._owners[owner.id] = (owner, self._clock.now() + ttl)

    def renew(self, owner: str, ttl: float) -> bool:
        with self._changed:
            if owner not in self._owners:
                return False
            self._owners[owner] = (self._owners[owner][0], self._clock.now() + ttl)
            return True

    def unregister(self, owner: str) -> None:
        with self._changed:
            self._owners.pop(owner, None)

    def delete(self, ids: Sequence[str]) -> list[bool]:
        with self._changed:
            return [
                id in self._records and self._records[id].head.state.finished and self._records.pop(id) is not None
                for id in ids
            ]

    # readers

    def load(self, id: str) -> Loaded | None:
        with self._changed:
            record = self._records.get(id)
            return None if record is None else _loaded(record)

    def head(self, id: str) -> Head | None:
        with self._changed:
            record = self._records.get(id)
            return None if record is None else record.head

    def find(self, query: Query) -> list[Stored]:
        with self._changed:
            rows = [r for r in self._records.values() if matches(r.definition, r.head, query)]
            rows.sort(key=_position, reverse=True)
            if query.after is not None:
                rows = [r for r in rows if _position(r) < query.after]
            return [Stored(definition=attrs.evolve(r.definition, steps=()), head=r.head) for r in rows[: query.limit]]

    def count(self, query: Query) -> dict[ExecutionState, int]:
        counts: dict[ExecutionState, int] = {}
        with self._changed:
            for record in self._records.values():
                if matches(record.definition, record.head, query):
                    counts[record.head.state] = counts.get(record.head.state, 0) + 1
        return counts

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        with self._changed:
            record = self._records.get(id)
            rows = [] if record is None else [b for b in record.boundaries if b.seq > after][:limit]
            return [attrs.evolve(b, data=None) for b in rows]

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        with self._changed:
            record = self._records.get(id)
            for boundary in record.boundaries if record else ():
                if record and boundary.seq == seq and boundary.data is not None:
                    return boundary, {name: record.blobs[name] for name in boundary.blobs}
            return None

    def messages(self, id: str) -> list[Message]:
        with self._changed:
            record = self._records.get(id)
            return [] if record is None else list(record.messages.values())

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        with self._changed:
            return {id: self._records[id].head.state for id in ids if id in self._records}

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        with self._changed:
            record = self._records.get(id)
            return (0, {}) if record is None else (record.last_message, dict(record.keys))

    def pending(self, owner: str) -> list[str]:
        with self._changed:
            return [id for id, record in self._records.items() if record.head.owner == owner and record.messages]

    def owners(self) -> list[Owner]:
        with self._changed:
            now = self._clock.now()
            return [attrs.evolve(owner, remaining=until - now) for owner, until in self._owners.values()]

    def next_due(self) -> float | None:
        with self._changed:
            moments = [wake_at(r.head) for r in self._records.values() if r.head.owner is None]
        return min((m for m in moments if m is not None), default=None)

    def size(self, id: str) -> int:
        with self._changed:
            record = self._records.get(id)
            if record is None:
                return 0
            states = sum(len(b.data) for b in record.boundaries if b.data)
            letters = sum(len(message.payload or b"") for message in record.messages.values())
            return states + letters + sum(map(len, record.blobs.values())) + sum(map(len, record.entries.values()))

    # the watcher

    def wait(self, timeout: float) -> bool:
        with self._changed:
            if self._changes == self._seen:
                self._changed.wait(timeout)
            changed = self._changes != self._seen
            self._seen = self._changes
            return changed

    def wake(self) -> None:
        with self._changed:
            self._ring()

    def _ring(self) -> None:
        self._changes += 1
        self._changed.notify_all()


class MemoryCheckpointStore(CheckpointStore):
    """A store for tests. It does not survive the process."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(MemoryBackend(clock))


def _position(record: _Record) -> tuple[float, str]:
    return record.definition.created, record.definition.id


def _loaded(record: _Record) -> Loaded:
    boundary = next(b for b in reversed(record.boundaries) if b.data is not None)
    return Loaded(
        definition=record.definition,
        head=record.head,
        boundary=boundary,
        blobs={name: record.blobs[name] for name in boundary.blobs},
        entries=dict(record.entries),
        messages=tuple(record.messages.values()),
        kept=tuple((b.seq, b.blobs) for b in record.boundaries if b.data is not None),
    )
