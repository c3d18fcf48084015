"""Queues and their limits: how many executions of a queue run at once, and how many begin in a period, in all workers.

Place in the life of an execution: before its claim. The limit of a queue is kept in the store itself, so that there is
one truth for all workers: in a record that looks like an execution and is never shown as one. Every queue that was ever
submitted to has such a record, limited or not; so a worker knows the names of all queues. `gates` obeys the limits.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from longrun.clock import Clock
from longrun.desk import check_name, random_start
from longrun.errors import ConfigError, CorruptDataError, NewerFormatError
from longrun.records import ExecutionState
from longrun.stored import QUEUE_WORKFLOW, Boundary, Create, Definition, Head, Query, Stored
from longrun.stores.store import CheckpointStore

if TYPE_CHECKING:
    from longrun.sweep import Sweeper

State = ExecutionState
FORMAT = 1
DEFAULT = "default"
"""The queue of what was started or submitted without naming one. It is always there."""
PAGE = 500
SKEW = 60.0
"""Seconds by which the clocks of two workers may differ at most before a bucket is begun anew."""
MOST = 1e9
"""What no limit reaches: more would be none, and stores have no room for every number that Python has."""
QUEUED = frozenset({State.INITIALIZED})
IN_STEPS = frozenset({State.RUNNING, State.RESUMING})


def _seconds(per: float | timedelta) -> float:
    return per.total_seconds() if isinstance(per, timedelta) else per


@frozen(kw_only=True)
class QueueLimit:
    """What all workers together keep to: `concurrency` executions in a step at once, `rate` starts in `per` seconds.

    `concurrency=0` lets nothing begin. The rate is that of a bucket of tokens: it holds `rate` of them (one at least)
    and is full at first, so that many may begin at once; then it fills evenly.
    """

    concurrency: int | None = field(default=None)
    """How many may be in a step at once; None: as many as there are."""
    rate: float | None = field(default=None)
    """How many may begin in `per` seconds; None: any number."""
    per: float = field(default=1.0, converter=_seconds)
    """Seconds, or a timedelta."""

    def __attrs_post_init__(self) -> None:
        if self.concurrency is None and self.rate is None:
            raise ConfigError("limit", None, "give a concurrency, a rate, or both")
        most = self.concurrency
        if most is not None and (not _is_number(most, int) or not 0 <= most < MOST):
            raise ConfigError("concurrency", most, "give a whole number of at least 0 and below 1e9, or None")
        if self.rate is not None and (not _is_number(self.rate, int | float) or not 0 < self.rate < MOST):
            raise ConfigError("rate", self.rate, "give a number above 0 and below 1e9, or None")
        if not _is_number(self.per, int | float) or not 0 < self.per < MOST:
            raise ConfigError("per", self.per, "give seconds above 0 and below 1e9, or a timedelta")

    @property
    def capacity(self) -> float:
        """How many tokens the bucket holds."""
        return max(1.0, float(self.rate or 0.0))


def _is_number(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@frozen(kw_only=True)
class QueueInfo:
    """A queue as `list_queues` shows it."""

    name: str
    limit: QueueLimit | None
    """What all workers keep to; None: no limit."""
    queued: int
    """Submitted, and not begun."""
    running: int
    """Owned by a worker and in a step, or about to be."""


@frozen(kw_only=True)
class Gate:
    """What a queue's record holds: its limit, its bucket, and what was let through and has not written a line since."""

    limit: QueueLimit | None = None
    tokens: float = 0.0
    at: float = 0.0
    """When the tokens were counted, by the clock of the worker that did."""
    granted: tuple[tuple[str, int, int], ...] = ()
    """Id, fence and revision of executions as they were claimed. Until its runner has saved it as running, nothing else
    tells one that is about to run from one that rests."""

    @classmethod
    def full(cls, limit: QueueLimit | None, now: float) -> Gate:
        return cls(limit=limit, tokens=limit.capacity if limit is not None else 0.0, at=now)

    def to_text(self) -> str:
        limit = None if self.limit is None else attrs.asdict(self.limit)
        fields = {"limit": limit, "tokens": self.tokens, "at": self.at, "granted": self.granted}
        return json.dumps({"format": FORMAT, **fields}, separators=(",", ":"))

    @classmethod
    def of(cls, queue: str, head: Head) -> Gate:
        what = f"the record of queue {queue!r}"
        try:
            fields = json.loads(head.note or "")
            if fields["format"] > FORMAT:
                raise NewerFormatError(what, fields["format"], FORMAT)
            return cls(
                limit=None if fields["limit"] is None else QueueLimit(**fields["limit"]),
                tokens=float(fields["tokens"]),
                at=float(fields["at"]),
                granted=tuple((str(id), int(fence), int(revision)) for id, fence, revision in fields["granted"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(what, "set its limit again, or take it off") from error

    def limited(self, limit: QueueLimit | None, now: float) -> Gate:
        """With another limit. Tokens that were used stay used, unless there was no rate before."""
        had_rate = self.limit is not None and self.limit.rate is not None
        if limit is None or limit.rate is None or not had_rate:
            return attrs.evolve(Gate.full(limit, now), granted=self.granted)
        return attrs.evolve(self, limit=limit, tokens=min(self.refilled(now).tokens, limit.capacity), at=now)

    def refilled(self, now: float) -> Gate:
        """With the tokens that have come since. Of two clocks that differ a little the one ahead counts; a clock that
        was put back further than that begins anew from where it is, so that nobody waits for the old time to come."""
        if self.limit is None or self.limit.rate is None:
            return self
        if now < self.at:
            return self if self.at - now <= SKEW else attrs.evolve(self, at=now)
        come = (now - self.at) * self.limit.rate / self.limit.per
        return attrs.evolve(self, tokens=min(self.limit.capacity, self.tokens + come), at=now)

    def starts(self, now: float) -> int | None:
        """How many may begin now; None for any number."""
        if self.limit is None or self.limit.rate is None:
            return None
        return int(self.refilled(now).tokens + 1e-9)

    def next_start(self, now: float) -> float:
        """The moment of the next token."""
        assert self.limit is not None
        assert self.limit.rate is not None
        then = self.refilled(now)
        return max(now, then.at) + max(0.0, 1.0 - then.tokens) * self.limit.per / self.limit.rate


def record_id(queue: str) -> str:
    """An id that no user can give, since theirs begin with a letter, a digit or _."""
    return f"@queue@{hashlib.blake2b(queue.encode(), digest_size=16).hexdigest()}"


def new_record(queue: str, limit: QueueLimit | None, now: float) -> Create:
    """Paused and held: no sweep, no pass at start and no retention takes it. Its age puts it behind every page."""
    return Create(
        definition=Definition(id=record_id(queue), workflow=QUEUE_WORKFLOW, queue=queue, created=0.0),
        head=Head(
            state=State.PAUSED,
            hold=True,
            fence=random_start(),
            revision=1,
            seq=1,
            updated=now,
            note=Gate.full(limit, now).to_text(),
        ),
        boundary=Boundary(seq=1, kind="start", step=0, next=0, ended=now, data=b"null", size=4),
    )


async def records(store: CheckpointStore) -> dict[str, Stored]:
    """The record of every queue, by its name."""
    return {stored.definition.queue: stored async for stored in store.find_all(_RECORDS)}


_RECORDS = Query(workflows=frozenset({QUEUE_WORKFLOW}), limit=PAGE)


async def list_queues(store: CheckpointStore) -> list[QueueInfo]:
    """Every queue by name: its limit, and how many wait in it and run."""
    found: dict[str, Stored | None] = {DEFAULT: None, **await records(store)}
    return [await _info(store, name, found[name]) for name in sorted(found)]


async def _info(store: CheckpointStore, name: str, record: Stored | None) -> QueueInfo:
    queued = await store.count(Query(queue=name, states=QUEUED, owned=False))
    running = await store.count(Query(queue=name, states=QUEUED | IN_STEPS, owned=True))
    limit = None if record is None else Gate.of(name, record.head).limit
    return QueueInfo(name=name, limit=limit, queued=sum(queued.values()), running=sum(running.values()))


class QueueDesk:
    """What executor and client can do with queues."""

    store: CheckpointStore
    clock: Clock
    sweeper: Sweeper

    async def limit_queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
    ) -> None:
        """Limit a queue for all workers: `concurrency` executions in a step at once, `rate` starts in `per` seconds.
        Without both, the limit goes. Durable on return; workers that run see it within about a second.

        What counts is what a worker owns and runs: an execution that sleeps, waits for a signal or is paused does not.
        When it goes on, it waits for room like any other. What is asked for by its id (`start`, `resume`, `retry`, a
        child that a step starts) in a process that runs it, or that owns it, runs at once and counts, so a queue can
        be above its limit for a while; otherwise such a call could wait for what itself holds the room. What a client
        resumes or retries and nobody owns waits for room, and for a token if it had not begun. A program that submits
        to its own limited queue and waits for the result inside a step gives nothing back meanwhile: use
        `start_child`, or another queue.

        Between its limited queues, and all that have no limit, a worker takes turns; priorities count within each.

        The executions of a dead worker do not count, and are taken over before or like new ones, as their priority and
        age say. One that is stopped past its lease and goes on counts as dead until it notices. The rate is measured by
        the workers' clocks: those that differ by more than a minute let more begin.
        """
        unlimited = concurrency is None and rate is None
        limit = None if unlimited else QueueLimit(concurrency=concurrency, rate=rate, per=per)
        await self.sweeper.gates.set_limit(check_name("name", name), limit)

    async def list_queues(self) -> list[QueueInfo]:
        """Every queue by name: its limit, and how many executions wait in it and run."""
        return await list_queues(self.store)

    async def note_queue(self, name: str) -> None:
        """A queue is about to be submitted to: from now on, every worker knows its name."""
        await self.sweeper.gates.note(name)
