"""Putting a new, empty store in the place of a lost one, on the word of whoever asks for it.

Place in the life of an execution: beside it. The pair gets a new name, which the store that stays and the new one keep;
the one that was replaced has the old name, and is refused wherever it turns up.
"""

from __future__ import annotations

from longrun.clock import Clock
from longrun.errors import ConfigError, StoreSettingsError, StoreUnavailableError
from longrun.stores._replicated.council import OVERTAKEN, Council
from longrun.stores._replicated.founding import KIND
from longrun.stores._replicated.members import is_empty, is_member, renamed, what_is_wrong
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.survey import Survey
from longrun.stores._replicated.term import BEHIND, LEVEL, Term, read_term, write_term


def replace(council: Council, part: str, clock: Clock, *, force: bool) -> None:
    """Take the store that is given as `part` into the pair, behind the other one."""
    if part not in council.sides:
        raise ConfigError("part", part, "give 'primary' or 'secondary'")
    new = council.sides[part]
    stays = next(side for side in council.sides.values() if side is not new)
    if stays.answers() and not read_term(stays):  # before the new one is made
        raise StoreSettingsError(KIND, f"the {stays.name} is in no pair: there is nothing to replace")
    found = council.surveyor.survey()
    if len(found.records) < 2:
        raise StoreUnavailableError(KIND, "both stores must answer when one is replaced")
    newest = found.newest
    if newest is None:
        raise StoreSettingsError(KIND, "the two are no pair yet: there is nothing to replace")
    _check_both(newest, found.records, new, stays)
    if not force:
        _check_whole(council, found, newest, stays)
    council.take(newest)
    if not council.propose(stays.name, BEHIND, tail=False, pair=renamed(newest.pair)):
        raise StoreUnavailableError(KIND, OVERTAKEN)
    assert council.term is not None
    write_term(new, council.term, clock.now(), first=True)


def _check_both(newest: Term, records: dict[str, Term | None], new: Side, stays: Side) -> None:
    if not is_member(stays.name, records[stays.name], newest):
        raise StoreSettingsError(KIND, what_is_wrong(stays, records[stays.name], newest))
    if is_member(new.name, records[new.name], newest):
        raise StoreSettingsError(KIND, f"the {new.name} is in this pair already: there is nothing to replace")
    if records[new.name] is not None or not is_empty(new):
        raise StoreSettingsError(
            KIND, f"the {new.name} was used before; give an empty store in the place of the lost one"
        )


def _check_whole(council: Council, found: Survey, newest: Term, stays: Side) -> None:
    """Whether the store that stays has everything, as far as it can be known without the one that is lost."""
    record = found.records[stays.name]
    alone = newest.active == stays.name and newest.standby != LEVEL
    level = found.told is not None and record is not None and record.generation == newest.generation
    if newest.active != stays.name:
        level = level and newest.standby == LEVEL
    if not alone and not level:
        raise StoreUnavailableError(
            KIND, f"the store that is lost may have had more than the {stays.name}; force goes on without that"
        )
    if newest.active != stays.name:
        try:
            council.refuse_mended(stays)
        except LostError as lost:
            raise lost.error from None
