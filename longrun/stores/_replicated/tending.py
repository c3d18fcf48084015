"""Looking after the pair: health, bringing a store that was away up to date, and handing back.

Place in the life of an execution: beside it. One round (`check`) asks both sides how they are and does what is due. A
standby that was away is first joined, so that every write from then on reaches it too, in this process and in others;
then everything on the two sides is compared, and only when nothing differs any more may it take over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs

from longrun.errors import LongrunError, StoreUnavailableError
from longrun.stored import Query, Stored
from longrun.stores._replicated.backend import ReplicatedBackend
from longrun.stores._replicated.copying import CLEARED
from longrun.stores._replicated.council import OVERTAKEN
from longrun.stores._replicated.mirror import MovedError
from longrun.stores._replicated.replacing import replace
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.status import ReplicationStatus, SideStatus
from longrun.stores._replicated.term import (
    BEHIND,
    JOINING,
    LEVEL,
    RESERVED,
    Marks,
    forget,
    last_sign,
    marks_of,
    mended,
    sign_of_life,
    tombstones,
)

PAGE = 500
JOIN_PATIENCE = 30.0
"""Seconds without a sign of life after which a join that another process began is taken to be abandoned. It is safe to
be wrong: of two that compare, the one that began earlier gives way."""
JOIN_SIGN = 5.0
"""Seconds between two signs of life."""

Pair = tuple[Stored | None, Stored | None]


@attrs.frozen(kw_only=True)
class Times:
    """Seconds. They decide when something is tried, never whether it is safe."""

    health_interval: float | None
    failover_reset: float
    failback_after: float | None


class TendedBackend(ReplicatedBackend):
    """The whole backend: with a thread that looks after the pair."""

    _times: Times

    def __init__(self, *args: object, times: Times, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]  # as declared there
        self._times = times
        self._nudge = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._tending = threading.Lock()

    def open(self) -> None:
        super().open()
        self._stopping = False
        if self._times.health_interval is not None:
            self._thread = threading.Thread(target=self._run, name="longrun-replica", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._nudge.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        super().close()
        self._nudge.clear()

    def _run(self) -> None:
        assert self._times.health_interval is not None
        while not self._stopping:
            try:
                self.check()
            except LongrunError as error:
                self._log.warning("replica.check_failed", error=type(error).__name__)
            except Exception as error:  # a defect of ours must not end the care for the pair
                self._log.exception("replica.defect", error=type(error).__name__)
            self._clock.block(self._nudge, self._times.health_interval)

    def status(self) -> ReplicationStatus:
        council, term = self._council, self._council.term
        primary, secondary = (
            SideStatus(kind=side.backend.kind, healthy=side.healthy, problem=side.problem) for side in self._sides
        )
        return ReplicationStatus(
            mode="async" if self._rules.asynchronous else "sync",
            active=None if term is None else term.active,
            standby=None if term is None else term.standby,
            generation=0 if term is None else term.generation,
            failovers=council.failovers,
            automatic=council.automatic,
            lag=self._lag.depth,
            errors=self._lag.errors,
            unreadable=tuple(sorted(self._mirror.unreadable)),
            primary=primary,
            secondary=secondary,
            reason=council.trouble or None,
        )

    # a round

    def check(self) -> None:
        """Ask both sides how they are, and do what is due: fail over, join, hand back. Whoever only looks follows."""
        with self._tending:
            health = [side.answers() for side in self._sides]
            with self._at_the_gate():
                if self._council.term is None:
                    self._council.decide()
                self._council.follow()
            if self._council.term is None or self._council.looks:
                return
            if not self._council.active.healthy:
                self._look_at_active()
            with self._at_the_gate():
                if all(health):
                    self._council.see_members(self._sides)
                self._go_on_copying()
            if all(health) and self._due_to_join():
                self._resync()
            elif all(health):
                self._mend()
            self._look_back()

    def _mend(self) -> None:
        """Single executions about which the sides may not agree: after a write that one of them did not answer, and
        after the death of a process that replaced a copy."""
        with self._at_the_gate():
            council = self._council
            left = marks_of(council.standby) if council.marks() else Marks()
            if ids := self._suspects | left.ids:
                self._agree_again(sorted(ids))
            if left.keys and council.marks():
                mended(council.standby, left.keys, self._clock.now())

    def _look_at_active(self) -> None:
        side = self._council.active
        trouble = StoreUnavailableError(side.backend.kind, side.problem or "it does not answer")
        with self._at_the_gate():
            self._council.lost(LostError(side, trouble))

    def _look_back(self) -> None:
        """What is due when all has been well for a while."""
        term, times = self._council.term, self._times
        if term is None or term.standby != LEVEL or not all(side.healthy for side in self._sides):
            return
        quiet = self._clock.monotonic() - self._council.since
        if quiet >= times.failover_reset:
            self._council.failovers = 0
        if term.active != "primary" and times.failback_after is not None and quiet >= times.failback_after:
            failovers = self._council.failovers
            self._hand_over(force=False)
            self._council.failovers = failovers

    def failover(self, *, force: bool = False) -> None:
        """By hand: the standby becomes active. `force` makes one active that is not level: what it lacks is lost."""
        with self._tending:
            self._hand_over(force=force)

    def _hand_over(self, *, force: bool) -> None:
        with self._at_the_gate():
            compares = not force and self._council.exchanges()
            if not compares:
                self._council.hand_over(force=force)
        if compares:
            self._resync(exchange=True)

    def replace(self, part: str, *, force: bool = False) -> None:
        """By hand: take the store that is given as `part`, which is new and empty, into the pair in the place of one
        that is lost. Only that one is made if there is none."""
        makes = [side.backend.creates for side in self._sides]
        for side in self._sides:
            side.backend.creates = side.name == part
        try:
            with self._tending, self._at_the_gate(), self._for_a_moment():
                replace(self._council, part, self._clock, force=force)
        finally:
            for side, made in zip(self._sides, makes, strict=True):
                side.backend.creates = made

    # bringing the standby up to date

    def _due_to_join(self) -> bool:
        term = self._council.term
        if term is None:
            return False
        if term.standby == JOINING:
            if self._rules.alone or term.by == self._council.name:
                return True
            with self._raising():
                return self._clock.now() - last_sign(self._council.active) >= JOIN_PATIENCE
        return term.standby == BEHIND or self._recheck

    def resync(self) -> None:
        """By hand: compare the two sides now, and make the standby equal."""
        with self._tending:
            self._resync()

    def _resync(self, *, exchange: bool = False) -> None:
        """Make the standby equal. To `exchange` their parts, every write of every process goes to both meanwhile."""
        with self._at_the_gate():
            council = self._council
            active, standby = council.active, council.standby
            joins = council.term is not None and (exchange or council.term.standby != LEVEL)
            council.vouch_for(active)
            if joins:
                council.admit(standby)
            if council.term is None or (joins and not council.propose(active.name, JOINING)):
                return
            if council.term.standby == JOINING:
                self._lag.clear()
            joined, tail = council.term, council.term.tail
        try:
            with self._raising():
                marks = [(side, marks_of(side).keys) for side in (active, standby)]
                self._compare(active, standby, adopt=tail)
        except MovedError:  # another process changed the term: the next round sees what is due
            if exchange:
                raise StoreUnavailableError(self.kind, OVERTAKEN) from None
            return
        except LongrunError:
            self._leave_behind(standby)
            raise
        with self._at_the_gate():
            if exchange:
                council.exchange(joined)
                council.failovers = 0
            elif council.follow() or council.term != joined:
                return
            elif joined.standby == JOINING:
                self._now_level(active)
            forget(active, tombstones(active), self._clock.now())
            for side, left in marks:
                mended(side, left, self._clock.now())
        self._recheck = False
        self._suspects.clear()
        self._log.info("replica.level", side=standby.name)

    def _now_level(self, active: Side) -> None:
        try:
            self._council.propose(active.name, LEVEL, tail=False)
        except LostError as lost:  # it was emptied when nearly all was compared
            self._council.without(lost)
            raise

    def _leave_behind(self, standby: Side) -> None:
        with self._at_the_gate():
            if self._council.term is not None and self._council.term.standby == JOINING:
                trouble = StoreUnavailableError(standby.backend.kind, "it could not be brought up to date")
                self._council.dropped(LostError(standby, trouble))

    def _compare(self, active: Side, standby: Side, *, adopt: bool) -> None:
        """Every execution of either side, while both are in use; one at a time waits at the gate."""
        gone = tombstones(active)
        for id in sorted(gone):
            self._make_equal(active, standby, id)
        shown = self._clock.monotonic()
        for ours, theirs in _pairs(active, standby):
            if self._clock.monotonic() >= shown + JOIN_SIGN:
                shown = self._clock.monotonic()
                with self._gate:
                    sign_of_life(active, self._clock.now())
            one = ours or theirs
            assert one is not None
            id = one.definition.id
            if self._stopping:
                raise StoreUnavailableError(self.kind, "it is closing")
            if ours is None and adopt and id not in gone:
                with self._gate:
                    self._mirror.adopt(standby, active, id)
            elif not _equal(active, standby, ours, theirs):
                self._make_equal(active, standby, id)
        with self._gate:
            self._mirror.owners(active, standby)

    def _make_equal(self, active: Side, standby: Side, id: str) -> None:
        with self._gate:
            if self._council.active is not active:
                raise MovedError
            self._mirror.agree(active, standby, [id])
            self._watched = None


def _pairs(one: Side, two: Side) -> Iterator[Pair]:
    """Every execution of either side once, beside what the other has of it."""
    left, right = _rows(one), _rows(two)
    a, b = next(left, None), next(right, None)
    while a is not None or b is not None:
        here, there = _place(a), _place(b)
        yield a if here >= there else None, b if there >= here else None
        if here >= there:
            a = next(left, None)
        if there >= here:
            b = next(right, None)


def _place(row: Stored | None) -> tuple[float, str]:
    """Listings are newest first; behind the end comes nothing."""
    return (float("-inf"), "") if row is None else (row.definition.created, row.definition.id)


def _rows(side: Side) -> Iterator[Stored]:
    query = Query(limit=PAGE)
    while page := side.read("find", query):
        for row in page:
            if row.definition.id not in RESERVED:
                yield row
        last = page[-1].definition
        query = attrs.evolve(query, after=(last.created, last.id))


def _equal(active: Side, standby: Side, ours: Stored | None, theirs: Stored | None) -> bool:
    """Fence and revision name a state of an execution; messages are the one thing that others change."""
    if ours is None or theirs is None or ours != theirs:
        return False
    if ours.head.state in CLEARED:
        return True
    id = ours.definition.id
    return bool(active.read("messages", id) == standby.read("messages", id))
