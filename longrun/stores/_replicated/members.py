"""Which stores are the two of a pair: each keeps the name of the pair and its part in it, and a term names the pair.

Place in the life of an execution: before a store is written to. When a store is replaced the pair gets a new name, so
that the one that was there before, wherever it turns up, is known for what it is.
"""

from __future__ import annotations

import uuid

from longrun.stored import Query
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import BEHIND, RESERVED, Term, read_term


def new_name() -> str:
    return uuid.uuid4().hex


def renamed(pair: str) -> str:
    """The same pair after one of its stores was replaced."""
    return f"{_origin(pair)}.{new_name()}"


def same_origin(one: Term, two: Term) -> bool:
    """Whether they are terms of one pair, before and after a store of it was replaced."""
    return _origin(one.pair) == _origin(two.pair)


def _origin(pair: str) -> str:
    return pair.partition(".")[0]


def is_member(name: str, record: Term | None, term: Term) -> bool:
    """Whether the store with this record is the one that the term means. The active side may have missed the very term
    that renamed the pair: only the witness knows it, and nothing was acknowledged under it."""
    if record is None:
        return False
    missed = name == term.active and record.generation == term.generation - 1 and same_origin(record, term)
    return record.pair == term.pair or missed


def is_needed(name: str, term: Term) -> bool:
    """Whether the term has this side written to or read from."""
    return name == term.active or term.standby != BEHIND


def unfinished(records: dict[str, Term | None], newest: Term) -> bool:
    """Whether the two became a pair, and whoever made it has died before both stores knew: it has written nothing to
    them yet. The second term is one of those that a pair is made with, see `Founding.finish`."""
    primary = records.get("primary")
    begun = len(records) == 2 and primary is not None and primary.generation == 0
    return begun and newest.active == "primary" and newest.generation <= 2


def used_alone(side: Side) -> bool:
    """Whether somebody has used a store on its own since the pair was begun, and before it heard that it was made."""
    if not _only_begun(read_term(side)) or is_empty(side):
        return False
    return _only_begun(read_term(side))  # asked for last: what a pair that is made by now has written is nobody else's


def _only_begun(record: Term | None) -> bool:
    return record is not None and record.generation == 0


def what_is_wrong(side: Side, record: Term | None, term: Term) -> str:
    """Why a store is none of the two, and what to do."""
    name = side.name
    if record is None and not is_empty(side):
        return f"the {name} has executions of its own and knows nothing of this pair; give an empty store"
    if record is None:
        return (
            f"the {name} is empty and knows nothing of this pair: give the store that was its {name}; if that one is"
            f" lost, `longrun store replace {name}` puts this one in its place"
        )
    if record.pair == term.pair:
        return (
            f"the {name} was used on its own before the pair was made, which went on without it: copy what it has"
            " to where it is missing, and give an empty store"
        )
    if same_origin(record, term):
        return f"the {name} is not in the pair any more, another store has taken its place: give that one"
    return f"the {name} belongs to another pair of stores"


def is_empty(side: Side) -> bool:
    rows = side.read("find", Query(limit=len(RESERVED) + 1))
    return all(row.definition.id in RESERVED for row in rows)
