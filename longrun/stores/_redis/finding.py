"""Listings: the server narrows by state, workflow, queue, parent, owner, time and metadata; the rest is compared here.

Place in the life of an execution: look at many of them. Rows come in bounded pages, so neither side holds them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.stored import Query, Stored
from longrun.stores import rows
from longrun.stores._redis import wire
from longrun.stores._redis.link import Link
from longrun.stores._redis.reading import head_or_rest
from longrun.stores._redis.wire import DamagedError
from longrun.stores.choice import matches

PAGE = 500
SETS = 200
"""More sorted sets than this are not merged: one set for each state and a comparison of each row cost less."""
ENDED = 5000
"""Up to this many that ended before a moment are read by that; of more, many are on each page anyway."""


class Finder:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._log = get_logger()

    def find(self, query: Query) -> list[Stored]:
        found: list[Stored] = []
        for row in self._matching(query) if query.limit > 0 else ():
            found.append(row)
            if len(found) == query.limit:
                break
        return found

    def count(self, query: Query) -> dict[ExecutionState, int]:
        if _counted_by_sets(query) and (found := self._count_sets(query)) is not None:
            return found
        counts: dict[ExecutionState, int] = {}
        for row in self._matching(query, paged=False):
            counts[row.head.state] = counts.get(row.head.state, 0) + 1
        return counts

    def _count_sets(self, query: Query) -> dict[ExecutionState, int] | None:
        """None where the sets hold what expired, and the server takes no writes."""
        sets = [(state, name) for state in _states(query) for name in _set_names(query, state)]
        lowest = "-inf" if query.created_after is None else repr(query.created_after)
        highest = "+inf" if query.created_before is None else f"({query.created_before!r}"
        more, found = 1, list[int]()
        while more > 0:  # a call forgets a bounded number of those that expired
            more, *found = self._link.repeated("count", lowest, highest, *(name for _, name in sets))
        if more < 0:
            return None
        counts: dict[ExecutionState, int] = {}
        for (state, _), number in zip(sets, found, strict=True):
            if number:
                counts[state] = counts.get(state, 0) + number
        return counts

    def _matching(self, query: Query, *, paged: bool = True) -> Iterator[Stored]:
        """Every row that matches, newest first, from where the last page ended."""
        after = query.after if paged else None
        ids = self._few(query)
        candidates = self._all(query, after) if ids is None else self._named(ids)
        matching = (row for row in candidates if matches(row.definition, row.head, query))
        if ids is None:
            yield from matching
            return
        for row in sorted(matching, key=_position, reverse=True):
            if after is None or _position(row) < after:
                yield row

    def _few(self, query: Query) -> list[bytes] | None:
        """Ids of all candidates where an index by something else than the creation time knows that they are few."""
        if query.owner is not None:
            return self._owned(query.owner, query)
        if query.ended_before is not None:
            name = self._link.base + b"i:ended"
            found: list[bytes] = self._link.read(
                "ZRANGEBYSCORE", name, "-inf", f"({query.ended_before!r}", "LIMIT", 0, ENDED + 1
            )
            return found if len(found) <= ENDED else None
        return None

    def _owned(self, owner: str, query: Query) -> list[bytes]:
        found: list[bytes] = []
        for state in _states(query):
            key = self._link.base + b"i:owned:" + state.value.encode() + b":" + wire.owner_name(owner)
            found += [member[32:] for member in self._link.read("ZRANGE", key, 0, -1)]
        return found

    def _named(self, ids: list[bytes]) -> Iterator[Stored]:
        for at in range(0, len(ids), PAGE):
            flat: list[Any] = wire.unpacked(self._link.repeated("rows", *ids[at : at + PAGE]))
            for n in range(0, len(flat), 4):
                row = self._stored(flat[n].decode(), *flat[n + 1 : n + 4])
                if row is not None:
                    yield row

    def _all(self, query: Query, after: tuple[float, str] | None) -> Iterator[Stored]:
        sets = [name for state in _states(query) for name in _set_names(query, state)]
        sets = [f"i:child:{wire.named(query.parent_id)}"] if query.parent_id is not None else sets
        lowest = "-inf" if query.created_after is None else repr(query.created_after)
        under = "+inf" if query.created_before is None else repr(query.created_before)
        place: tuple[Any, Any] = ("", "") if after is None else (repr(after[0]), after[1])
        texts = [text for key, value in query.metadata.items() for text in _stored_as(key, value)]
        size = min(PAGE, query.limit)
        while sets:
            answer: list[Any] = wire.unpacked(
                self._link.repeated("page", size, *place, lowest, under, len(texts), *texts, *sets)
            )
            for n in range(2, len(answer), 5):
                row = self._stored(answer[n].decode(), *answer[n + 2 : n + 5])
                if row is not None:
                    yield row
            if not answer[0]:
                return
            place, size = (answer[0], answer[1]), PAGE

    def _stored(self, id: str, control: bytes, head: bytes | None, definition: bytes | None) -> Stored | None:
        try:
            found = wire.definition_from(id, definition)
        except DamagedError:  # nothing can be shown of it; `load` keeps the bytes and says so
            self._log.warning("store.unreadable", store=self._link.kind, execution=id)
            return None
        return Stored(definition=found, head=head_or_rest(id, control, head))


def _states(query: Query) -> list[ExecutionState]:
    return [state for state in ExecutionState if query.states is None or state in query.states]


def _set_names(query: Query, state: ExecutionState) -> list[str]:
    """The sorted sets that together hold every candidate in a state."""
    if query.workflows is not None and len(query.workflows) * len(_states(query)) <= SETS:
        return [f"i:flow:{state.value}:{wire.named(name)}" for name in sorted(query.workflows)]
    if query.queue is not None:
        return [f"i:queue:{state.value}:{wire.named(query.queue)}"]
    return [f"i:state:{state.value}"]


def _stored_as(key: str, value: Any) -> list[str]:
    """What the stored text of a definition must hold if it has this metadata. More may hold it: they are compared
    here."""
    if value is None:
        return []  # one that is missing counts as None
    name = rows.json_text(key)
    return [f"{name}:{rows.json_text(value)}" if isinstance(value, str | bool) else f"{name}:"]


def _counted_by_sets(query: Query) -> bool:
    """Whether the sizes of the sets are the answer: nothing is asked that only a row can tell."""
    by_row = (query.owner, query.owned, query.parent_id, query.text, query.ended_before)
    if query.metadata or any(asked is not None for asked in by_row):
        return False
    if query.workflows is None:
        return True
    return query.queue is None and len(query.workflows) * len(_states(query)) <= SETS


def _position(row: Stored) -> tuple[float, str]:
    return row.definition.created, row.definition.id
