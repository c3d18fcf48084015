"""Which executions have to move together: one that may go on, the children that it may ask for, and theirs.

Place in the life of an execution: between two homes. A parent that does not find a child where it goes on starts it
again; one whose child went on elsewhere would wait for it in vain. No more than the ids of a family is kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from longrun.errors import CodecError, ExecutionNotFoundError
from longrun.records import ExecutionState
from longrun.stored import Head, Stored, was_moved
from longrun.stores.store import CheckpointStore

CLEARED = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
"""States in which nothing happens any more: of a failed execution a retry may come."""


@define
class Family:
    generations: list[list[str]] = field(factory=lambda: [[]])
    """Those that may go on, parents before their children."""
    closed: list[str] = field(factory=list)
    """Those that do not. They move whatever becomes of the others, and their own children are no part of the family."""
    stays: dict[str, str] = field(factory=dict)
    """Who cannot move, and why. Then none of the `generations` that has not moved yet may."""

    def add(self, one: Stored) -> None:
        """A member of the youngest generation."""
        (self.generations[-1] if may_go_on(one.head) else self.closed).append(one.definition.id)

    def why_it_stays(self, id: str) -> str:
        other, why = next(iter(self.stays.items()))
        return self.stays.get(id) or f"parent and child move together, and {other!r} stays: {why}"


async def eldest_of(store: CheckpointStore, page: Sequence[Stored]) -> list[Stored]:
    """The eldest of each family that somebody on this page belongs to."""
    known: dict[str, Stored | None] = {one.definition.id: None for one in page if not may_go_on(one.head)}
    found: dict[str, Stored] = {}
    for one in page:
        while (parent_id := one.definition.parent_id) is not None:
            if parent_id not in known:
                known[parent_id] = await _looked_up(store, parent_id)
            parent = known[parent_id]
            if parent is None:
                break
            one = parent
        found[one.definition.id] = one
    return list(found.values())


async def _looked_up(store: CheckpointStore, id: str) -> Stored | None:
    """As it is now, if it may go on."""
    try:
        loaded = await store.load(id)
    except (ExecutionNotFoundError, CodecError):
        return None
    return Stored(definition=loaded.definition, head=loaded.head) if may_go_on(loaded.head) else None


def may_go_on(head: Head) -> bool:
    """Whether an execution may go on in this store, and ask for its children there."""
    return head.state not in CLEARED and not was_moved(head)
