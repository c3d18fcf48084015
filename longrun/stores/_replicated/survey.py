"""What can be known of a pair: the terms that its two sides and the witness have on record.

Place in the life of an execution: none; it is asked when a replicated store is opened, and while nobody knows more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from longrun.errors import StoreSettingsError, StoreUnavailableError
from longrun.stores._replicated.founding import KIND, Founding
from longrun.stores._replicated.members import unfinished
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.term import Term, read_term
from longrun.stores._replicated.witness import Witness

BOTH_NEEDED = "both stores must answer when they become a pair"


@attrs.frozen(kw_only=True)
class Survey:
    """What can be known of a pair now."""

    records: dict[str, Term | None]
    """What each side that answers has on record."""
    told: Term | None
    """What the witness says."""

    @property
    def newest(self) -> Term | None:
        """None if the two are no pair yet."""
        found = [term for term in (*self.records.values(), self.told) if term is not None and term.generation > 0]
        return max(found, key=lambda term: term.generation, default=None)


class Surveyor:
    """Asks both sides and the witness."""

    def __init__(self, sides: Mapping[str, Side], witness: Witness | None, founding: Founding) -> None:
        self._sides, self._witness, self._founding = sides, witness, founding

    def survey(self) -> Survey:
        """Now."""
        records: dict[str, Term | None] = {}
        for name, side in self._sides.items():
            with contextlib.suppress(LostError):
                if side.answers():
                    records[name] = read_term(side)
        return Survey(records=records, told=self.told())

    def told(self) -> Term | None:
        """What the witness says, if there is one and it answers."""
        if self._witness is None:
            return None
        with contextlib.suppress(StoreUnavailableError):
            return self._witness.read()
        return None

    def agreed(self, *, looks: bool) -> tuple[Term, Survey, str]:
        """The newest term of the pair, what can be known of it, and why the standby is left out, if it is. What was
        asked one after the other need not fit together while another process makes the pair: it is asked again before
        a store is refused. Who only `looks` changes nothing for that."""
        before: Survey | None = None
        while True:
            newest, found = self._of_pair(looks)
            try:
                strange = self._founding.check(newest, found.records)
                if not strange or found == before:
                    return newest, found, strange
            except StoreSettingsError:
                if found == before:
                    raise
            before = found

    def _of_pair(self, looks: bool) -> tuple[Term, Survey]:
        """The two become a pair if they are none."""
        found = self.survey()
        if not found.records:
            raise StoreUnavailableError(KIND, "neither the primary nor the secondary answers")
        if found.newest is None:
            self._make_pair(found.records, looks)
            found = self.survey()
        newest = found.newest
        if newest is None:
            raise StoreUnavailableError(KIND, BOTH_NEEDED)
        if unfinished(found.records, newest) and not looks:
            found = attrs.evolve(found, records=self._founding.finish(newest))
        return found.newest or newest, found

    def _make_pair(self, records: dict[str, Term | None], looks: bool) -> None:
        if looks:
            raise StoreUnavailableError(KIND, "the two stores are no pair yet")
        if len(records) < 2:
            raise StoreUnavailableError(KIND, BOTH_NEEDED)
        self._founding.found()
