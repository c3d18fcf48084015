"""Who is active: terms are read, proposed and followed here, and nowhere else.

Place in the life of an execution: between a store that died and the one that goes on. A term changes only with the
witness's consent, where there is a witness. Every term is written to the side that is active in it before anything is
acknowledged under it; so whoever reads that side sees it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable

import attrs

from longrun.clock import Clock
from longrun.errors import StoreSettingsError, StoreUnavailableError
from longrun.logging import get_logger
from longrun.stores._replicated.founding import KIND, Founding
from longrun.stores._replicated.members import (
    is_member,
    is_needed,
    same_origin,
    used_alone,
    what_is_wrong,
)
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.survey import BOTH_NEEDED, Surveyor
from longrun.stores._replicated.term import (
    BEHIND,
    JOINING,
    LEVEL,
    Term,
    being_mended,
    read_term,
    write_term,
)
from longrun.stores._replicated.witness import Witness

OVERTAKEN = "another process changed the parts of the two stores meanwhile"


@attrs.frozen(kw_only=True)
class Rules:
    """What the user decided."""

    asynchronous: bool
    alone: bool
    """Nobody but this process uses the pair."""
    max_failovers: int
    strikes: int
    """Failed writes in a row after which a side that still answers a ping counts as lost."""


class Council:
    """The parts of the two sides. Its caller holds the gate while a term may change."""

    def __init__(self, sides: tuple[Side, Side], witness: Witness | None, rules: Rules, clock: Clock) -> None:
        self.sides = {side.name: side for side in sides}
        self.rules = rules
        self.term: Term | None = None
        self.name = uuid.uuid4().hex
        self.trouble = "it is closed"
        """Why there is no term, or why the standby is not brought up to date."""
        self.company = False
        """This process took itself to be alone and is not: it may not decide anything before it is opened again."""
        self.looks = False
        """This process only looks at the pair, or writes a little to it: it decides nothing before it writes."""
        self._owed = False
        """It has seen that the standby is not what the term says, and has to say so before it writes."""
        self._doubted: set[Side] = set()
        """What was found to have forgotten the pair, and may have something by now that it was not to be given."""
        self._met = ""
        """The pair of which both sides are known to be."""
        self.failovers = 0
        self.since = 0.0
        """When the last term began, by the monotonic clock."""
        self._noted = 0
        """The newest term that is known to be stored on the side that is active in it."""
        self.before_switch: Callable[[], None] = lambda: None
        """Brings over what waits to be copied, or raises."""
        self.compared: Callable[[], None] = lambda: None
        """Another process compares the two sides, or has: what waits to be copied need not be."""
        self._witness = witness
        self._clock = clock
        self._founding = Founding(self.sides, witness, clock, self.name)
        self.surveyor = Surveyor(self.sides, witness, self._founding)
        self._log = get_logger(store=KIND)

    @property
    def automatic(self) -> bool:
        return self._witness is not None or self.rules.alone

    @property
    def generation(self) -> int:
        return self._ruling().generation

    @property
    def active(self) -> Side:
        return self.sides[self._ruling().active]

    @property
    def standby(self) -> Side:
        return self._other(self.active)

    @property
    def mirrors(self) -> bool:
        """Whether the standby is written to."""
        return self._ruling().standby != BEHIND

    @property
    def in_step(self) -> bool:
        """Whether it is written to before anything is acknowledged. In asynchronous mode too while the two are being
        compared: what another process has in its queue comes over then, and nothing new may wait in one."""
        standby = self._ruling().standby
        return standby == JOINING or (standby == LEVEL and not self.rules.asynchronous)

    @property
    def joins(self) -> bool:
        """Whether the two are being compared, by this process or another."""
        return self._ruling().standby == JOINING

    def _ruling(self) -> Term:
        if self.term is None:
            raise StoreUnavailableError(KIND, self.trouble)
        return self.term

    def _other(self, side: Side) -> Side:
        return next(one for one in self.sides.values() if one is not side)

    # which term it is

    def decide(self) -> None:
        """At the start, and until it is known: find the newest term. Without one the store waits, and says why."""
        if self.company:
            raise StoreUnavailableError(KIND, self.trouble)
        newest, found, strange = self.surveyor.agreed(looks=self.looks)
        records, told = found.records, found.told
        unseen = [name for name in self.sides if name not in records]
        lonely = newest.standby != LEVEL and newest.active in records
        if unseen and not told and not lonely:
            self._wait(f"the {unseen[0]} does not answer and may be the newer one; failover() with force=True decides")
            return
        if not unseen and not self.looks:
            self._founding.introduce(newest)
        self._follow(newest)
        self.trouble, self._met = strange, "" if unseen or strange else newest.pair
        with contextlib.suppress(LostError):  # a side that is away is looked at again when it is back
            self._refuse_old(newest, records)

    def announce(self) -> None:
        """A term of this process's own, so that a second one that takes itself to be alone is found out."""
        alone = self.rules.alone and not self.looks
        if alone and self.term is not None and all(side.healthy for side in self.sides.values()):
            self.propose(self.term.active, self.term.standby)

    def _wait(self, trouble: str) -> None:
        self.term, self.trouble = None, trouble
        self._log.warning("replica.undecided")

    def _refuse_old(self, newest: Term, records: dict[str, Term | None]) -> None:
        """A side with an older term, or with none, missed something: it is not used before it is brought up to date."""
        current = {name for name, record in records.items() if record and record.generation == newest.generation}
        active, standby = self.sides[newest.active], self._other(self.sides[newest.active])
        if newest.active in records and newest.active not in current:
            self._log.warning("replica.old", side=active.name, generation=newest.generation)
            if standby.name not in current or newest.standby != LEVEL:
                self._rewrite(active, newest, records)
            elif self.automatic and not self.looks:
                self.propose(standby.name, BEHIND)
            else:
                self._wait(f"the {active.name} is older than generation {newest.generation}; call failover()")
        elif standby.name in records and standby.name not in current and newest.standby == LEVEL:
            self._log.warning("replica.old", side=standby.name, generation=newest.generation)
            if self.looks:
                self._owed = True
            else:
                self.propose(active.name, BEHIND)

    def _rewrite(self, active: Side, newest: Term, records: dict[str, Term | None]) -> None:
        """The witness knows a term that was not written down before a crash: nothing was acknowledged under it."""
        record = records[active.name]
        if record is not None and newest.generation - record.generation == 1:
            if self.looks:  # `note` does it before a write
                return
            if newest.standby == LEVEL and used_alone(active):
                self.propose(active.name, BEHIND)
            elif record.generation == 0:  # the other one may not know yet that it is in a pair
                self._wait(BOTH_NEEDED)
            else:
                write_term(active, newest, self._clock.now())
        else:
            self._wait(f"the {active.name} is older than generation {newest.generation}; failover() with force decides")

    # changes made elsewhere

    def newest(self) -> Term | None:
        """What the witness and the sides say now of this pair, as far as they answer."""
        found, term = [self.surveyor.told()], self.term
        for side in self.sides.values():
            with contextlib.suppress(LostError):
                found.append(read_term(side))
        ours = [one for one in found if one is not None and (term is None or same_origin(one, term))]
        return max(ours, key=lambda one: one.generation, default=None)

    def overtaken(self, active: Side) -> bool:
        """Whether this side is not active any more, or there is a newer term than the one that is followed here. Any
        thread may ask."""
        return not self.leads(active) or (not self.rules.alone and self._newer() is not None)

    def leads(self, side: Side) -> bool:
        """Whether it is the active one, as far as this process knows. Any thread may ask."""
        term = self.term
        return term is not None and term.active == side.name

    def _newer(self) -> Term | None:
        newest, term = self.newest(), self.term
        newer = newest is not None and term is not None and newest.generation > term.generation
        return newest if newer else None

    def follow(self) -> bool:
        """Take over a newer term; True if there is one."""
        newest = self._newer()
        if newest is None:
            return False
        self._refuse_company(newest)
        with contextlib.suppress(LostError):  # whoever writes sees to it first
            self.meet(newest)
        self._follow(newest)
        return True

    def meet(self, term: Term) -> None:
        """See that the sides which a term needs are those that it means: others may have replaced one of them. One
        that is not is not used any more."""
        if term.pair == self._met:
            return
        for side in self.sides.values():
            if is_needed(side.name, term) and not is_member(side.name, record := read_term(side), term):
                self._wait(what_is_wrong(side, record, term))
                raise StoreUnavailableError(KIND, self.trouble)
        if term.standby != BEHIND:
            self._met = term.pair

    def admit(self, side: Side) -> None:
        """Before a store that was away is written to again: it must be the one that went."""
        record = read_term(side)
        if not is_member(side.name, record, self._ruling()) or used_alone(side):
            self.trouble = what_is_wrong(side, record, self._ruling())
            raise StoreSettingsError(KIND, self.trouble)

    def vouch_for(self, side: Side) -> None:
        """Raise if a store that the term needs knows nothing of the pair any more: it was emptied, or has begun anew
        without its data, and what it says of executions is not the truth."""
        if self.term is not None:
            self._vouch_for_needed((side,), self.term)

    def _vouch_for_needed(self, sides: Iterable[Side], term: Term) -> None:
        for side in sides:
            if is_needed(side.name, term) and read_term(side) is None:
                self._doubted.add(side)
                raise LostError(side, StoreUnavailableError(KIND, what_is_wrong(side, None, term)))
            self._doubted.discard(side)

    def see_members(self, sides: Iterable[Side]) -> None:
        """Go on without a store for which nobody can vouch."""
        for side in tuple(sides):
            try:
                self.vouch_for(side)
            except LostError as lost:
                self.without(lost)

    def _has_forgotten(self, side: Side) -> bool:
        try:
            self.vouch_for(side)
        except LostError:
            return True
        return False

    def _refuse_company(self, newest: Term) -> None:
        """A second process that takes itself to be alone has made a newer term: this one does nothing more."""
        if self.rules.alone and newest.by != self.name:
            self.company = True
            self._wait("another process uses this pair, and single_process=True said that none does; open it again")
            raise StoreUnavailableError(KIND, self.trouble)

    def follow_active(self) -> bool:
        """The same, as far as the active side knows: cheap enough for every commit to that side alone."""
        if self.rules.alone:
            return False
        newest = read_term(self.active)
        if newest is None or newest.generation <= self._ruling().generation:
            return False
        with contextlib.suppress(LostError):
            self.meet(newest)
        self._follow(newest)
        return True

    def superseded(self, active: Side) -> bool:
        """Whether another process, which can reach both sides, compares them or has done so: it sees to whatever a
        queue still holds. Any thread may ask."""
        if self.rules.alone:
            return False
        newest, term = read_term(active), self.term
        return bool(newest and term and newest.generation > term.generation and newest.standby != BEHIND)

    def note(self) -> None:
        """Before a write: a term of which only the witness knows, since it could not be written down, or since whoever
        proposed it has died, is stored on its active side."""
        if self._owed:
            self.propose(self.active.name, BEHIND)
        self.see_members(self._doubted)
        if self.term is not None and self.mirrors:
            try:
                self.meet(self.term)
            except LostError as lost:
                self.without(lost)
        term = self.term
        if term is None or term.generation <= self._noted:
            return
        try:
            self.vouch_for(self.active)
            stored = write_term(self.active, term, self._clock.now())
        except LostError as lost:
            self.lost(lost)
            return
        self._noted = stored.generation
        if stored.generation > term.generation:
            self.follow()

    def take(self, term: Term) -> None:
        """Go by this term, on the word of whoever has looked at both sides."""
        if self.term not in (None, term):
            self._refuse_company(term)
        self._follow(term)

    def _follow(self, term: Term) -> None:
        if term.by != self.name and term.standby != BEHIND:
            self.compared()
        self.term, self.trouble, self.since, self._owed = term, "", self._clock.monotonic(), False
        self._log.info("replica.term", generation=term.generation, active=term.active, standby=term.standby)

    # changes made here

    def propose(self, active: str, standby: str, *, tail: bool | None = None, pair: str | None = None) -> bool:
        """A new term; False if another process was faster, whose term is then followed."""
        old = self._ruling()
        kept = old.tail if tail is None else tail
        new = Term(
            generation=old.generation + 1,
            pair=pair or old.pair,
            active=active,
            standby=standby,
            tail=kept,
            by=self.name,
        )
        self._vouch_for_needed(self.sides.values(), new)
        if self._witness is not None:
            if self._witness.read() is None:  # a directory that is not mounted, say: it would consent to anything
                raise StoreUnavailableError(KIND, "the witness has forgotten this pair; see that it is what it was")
            if not self._witness.propose(new):
                self.follow()
                return False
            self._follow(new)
        stored = write_term(self.sides[active], new, self._clock.now())
        self._refuse_company(stored)
        if stored != new:
            with contextlib.suppress(LostError):
                self.meet(stored)
        self._follow(stored)
        self._noted = stored.generation
        if stored == new and standby != BEHIND:
            write_term(self._other(self.sides[active]), new, self._clock.now())
        return stored == new

    def without(self, lost: LostError) -> None:
        """A side does not answer: go on with the other one, or raise."""
        if lost.side is self.active:
            self.lost(lost)
        else:
            self.dropped(lost)

    def lost(self, lost: LostError) -> None:
        """The active side does not answer: return when the other one is active; raise if it must not be."""
        side = lost.side
        if self.term is None:
            raise lost.error
        if side is not self.active or (self.follow() and side is not self.active):
            return
        if side.answers() and side.strikes < self.rules.strikes and not self._has_forgotten(side):
            raise lost.error
        other = self._other(side)
        if self._ruling().standby != LEVEL or not other.answers() or self._has_forgotten(other):
            raise lost.error
        if not self.automatic:
            raise StoreUnavailableError(KIND, f"{lost.error.problem}; failover() makes the {other.name} active")
        if self.failovers >= self.rules.max_failovers:
            raise StoreUnavailableError(KIND, f"it failed over {self.failovers} times; failover() does it once more")
        self.refuse_mended(other)
        self._switch_to(other, lost)

    def instead(self, lost: LostError) -> Side:
        """Who answers a reader whom the active side does not. For whoever only looks that is a standby that is level,
        as it is: nobody fails over because of a look."""
        if not self.looks:
            self.lost(lost)
            return self.active
        self.follow()
        if lost.side is self.active and self._ruling().standby != LEVEL:
            raise lost.error
        return self.standby if lost.side is self.active else self.active

    def refuse_mended(self, side: Side) -> None:
        """A copy that was being replaced when its process died lacks what was acknowledged."""
        if not self.rules.asynchronous and (ids := being_mended(side)):
            raise StoreUnavailableError(
                KIND,
                f"the {side.name} has no whole copy of {min(ids)!r}, of {len(ids)} in all; failover() with force"
                " goes on without them",
            )

    def marks(self) -> bool:
        """Whether the standby may become active as it is. In asynchronous mode a failover may lose what is on its way,
        and whoever opens the pair compares everything."""
        return not self.rules.asynchronous and self._ruling().standby == LEVEL

    def _switch_to(self, other: Side, lost: LostError) -> None:
        self.before_switch()
        try:
            won = self.propose(other.name, BEHIND, tail=self.rules.asynchronous)
        except LostError as second:
            raise second.error from None
        if won:
            self.failovers += 1
            self._log.warning("replica.failover", active=other.name, generation=self._ruling().generation)
        elif lost.side is self.active:
            raise lost.error

    def dropped(self, lost: LostError) -> None:
        """The standby does not answer: go on without it, if that is allowed."""
        if self.follow() or not self.mirrors:
            return
        self.vouch_for(self.active)
        self.propose(self.active.name, BEHIND)
        self._log.warning("replica.behind", side=self.standby.name, generation=self._ruling().generation)

    def exchanges(self) -> bool:
        """Whether the two must be compared before they exchange their parts: in asynchronous mode another process may
        have acknowledged what the standby has not got yet."""
        term = self.term
        if term is None or not self.rules.asynchronous or self.rules.alone or term.standby != LEVEL:
            return False
        return self.active.answers() and not self._has_forgotten(self.active) and self.standby.answers()

    def exchange(self, joined: Term) -> None:
        """The end of such a comparison, if nobody has changed the term since it began."""
        if self.follow() or self.term != joined:
            raise StoreUnavailableError(KIND, OVERTAKEN)
        self.propose(self.standby.name, LEVEL, tail=False)
        self._log.warning("replica.failover", active=self.active.name, generation=self._ruling().generation)

    def hand_over(self, *, force: bool) -> None:
        """By hand, or back to the primary: the standby becomes active, unless another process was faster."""
        if self.term is None:
            self._force(force)
            return
        new = self.standby
        if self.follow() and new is self.active:
            return
        old = self.active
        if self._ruling().standby != LEVEL and not force:
            raise StoreUnavailableError(KIND, f"the {new.name} is {self._ruling().standby}, not level: it lacks data")
        if not force:
            self.refuse_mended(new)
        self.vouch_for(new)
        stays = self._ruling().standby == LEVEL and old.answers() and not self._has_forgotten(old)
        if stays:
            self.before_switch()
        self.propose(new.name, LEVEL if stays else BEHIND, tail=self.rules.asynchronous and not stays)
        self.failovers = 0
        self._log.warning("replica.failover", active=new.name, generation=self._ruling().generation)

    def _force(self, force: bool) -> None:
        """There is no term: somebody says which side it is. The one that answers, or the one with the newer record."""
        records = {name: read_term(side) for name, side in self.sides.items() if side.answers()}
        known = {name: term for name, term in records.items() if term is not None}
        if not known:
            raise StoreUnavailableError(KIND, "neither side that answers has a record of this pair")
        name, newest = max(known.items(), key=lambda pair: pair[1].generation)
        if self.company or (len(known) < 2 and not force):
            raise StoreUnavailableError(KIND, f"{self.trouble}")
        self._follow(newest)
        self.propose(name, BEHIND, tail=self.rules.asynchronous)


__all__ = ["BEHIND", "JOINING", "LEVEL", "Council", "Rules"]
