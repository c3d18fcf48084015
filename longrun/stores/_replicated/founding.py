"""Two stores become a pair, once; and whenever they are opened it is seen that they are the two of it.

Place in the life of an execution: before a store is written to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from longrun.clock import Clock
from longrun.errors import StoreSettingsError, StoreUnavailableError
from longrun.logging import get_logger
from longrun.stores._replicated.members import (
    is_empty,
    is_member,
    is_needed,
    new_name,
    used_alone,
    what_is_wrong,
)
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import BEHIND, LEVEL, Term, read_term, write_term
from longrun.stores._replicated.witness import Witness

KIND = "replicated"


class Founding:
    """The first term of a pair, written by the process called `by`."""

    def __init__(self, sides: Mapping[str, Side], witness: Witness | None, clock: Clock, by: str) -> None:
        self._sides = sides
        self._witness = witness
        self._clock = clock
        self._by = by
        self._log = get_logger(store=KIND)

    def found(self) -> None:
        """The first time: the primary is active, and the secondary must be empty. The primary is given the name of the
        pair first and the term last: until then it is known that nothing is on the two."""
        primary, secondary = self._sides["primary"], self._sides["secondary"]
        if not is_empty(secondary):
            if read_term(secondary) is not None:  # another process has made the pair meanwhile
                return
            raise StoreSettingsError(
                KIND, "the secondary has executions that were never replicated; give an empty store"
            )
        state = LEVEL if is_empty(primary) else BEHIND
        named = Term(generation=0, pair=new_name(), active="primary", standby=state, by=self._by)
        named = write_term(primary, named, self._clock.now(), first=True)
        if named.generation == 0:
            self._begin(attrs.evolve(named, generation=1, standby=state, by=self._by))

    def _begin(self, first: Term) -> None:
        if self._witness is not None and not self._witness.propose(first):
            told = self._witness.read() or first
            if told.pair != first.pair:
                raise StoreSettingsError(KIND, "the witness is that of another pair of stores")
            first = told
        self.finish(first)

    def finish(self, first: Term) -> dict[str, Term | None]:
        """Both sides get the first term; the primary last. If that was begun long ago, and the primary was used on its
        own since then, it is the second: the secondary is not level with it."""
        if first.standby == LEVEL and used_alone(self._sides["primary"]):
            first = self._behind(first)
        first = write_term(self._sides["secondary"], first, self._clock.now(), first=True)
        return {"secondary": first, "primary": write_term(self._sides["primary"], first, self._clock.now())}

    def _behind(self, first: Term) -> Term:
        second = attrs.evolve(first, generation=first.generation + 1, standby=BEHIND, by=self._by)
        if self._witness is not None and not self._witness.propose(second):
            return self._witness.read() or second  # another process has found the same
        return second

    def introduce(self, newest: Term) -> None:
        """A witness that was given to a pair of long standing: both sides answer, so this is what there is to know."""
        if self._witness is not None:
            with contextlib.suppress(StoreUnavailableError):
                if self._witness.read() is None:
                    self._witness.propose(newest)

    def check(self, newest: Term, records: Mapping[str, Term | None]) -> str:
        """Refuse a store that is none of the two. A standby that is not in use, and knows no pair, is only left out:
        the other one goes on alone, and this is why."""
        if not any(records.values()) and len(records) == 2:
            raise StoreSettingsError(
                KIND,
                "neither store knows the pair that the witness knows: give the two that it is about, or a new witness"
                " for a new pair",
            )
        strange = ""
        for name, record in records.items():
            if not is_member(name, record, newest):
                strange = what_is_wrong(self._sides[name], record, newest)
                if record is not None or is_needed(name, newest):
                    raise StoreSettingsError(KIND, strange)
                self._log.warning("replica.stranger", side=name)
        return strange
