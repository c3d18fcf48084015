"""Pages of executions: which, in what order, and how many there are.

Place in the life of an execution: whenever somebody looks at many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import attrs
from attrs import frozen
from starlette.datastructures import QueryParams

from longrun import schema, views
from longrun.dashboard.kept import Kept
from longrun.desk import check_states
from longrun.errors import ConfigError
from longrun.eta import Forecaster
from longrun.records import ExecutionState
from longrun.stored import Query, Stored
from longrun.stores.store import CheckpointStore

SORT_WINDOW = 5000
"""How many executions are read to be sorted otherwise than newest first."""
PAGE = 50
PAGE_LIMIT = 200
NEWEST_FIRST = "-created"
CRITERIA = ("state", "workflow", "queue", "text", "since", "from", "to")
"""What a query says of which executions are meant."""
SHAPE = ("sort", "limit", "after", "counts")
"""What a query says of how they are shown."""

SORTS: Mapping[str, Callable[[Stored, float], Any]] = {
    "created": lambda one, now: one.definition.created,
    "updated": lambda one, now: one.head.updated,
    "duration": lambda one, now: (one.head.ended or now) - one.definition.created,
    "progress": lambda one, now: one.head.progress,
    "workflow": lambda one, now: one.definition.workflow.casefold(),
    "state": lambda one, now: list(ExecutionState).index(one.head.state),
}


@frozen(kw_only=True)
class Filters:
    """What a listing is asked for, checked."""

    states: frozenset[ExecutionState] | None = None
    workflow: str | None = None
    queue: str | None = None
    text: str | None = None
    since: float | None = None
    created_after: float | None = None
    created_before: float | None = None
    sort: str = NEWEST_FIRST
    limit: int = PAGE
    after: str | None = None
    counted: bool = True

    @classmethod
    def read(cls, given: QueryParams) -> Filters:
        for name in given:
            if name not in CRITERIA + SHAPE:
                raise ConfigError("filter", name[:40], f"give only {', '.join(CRITERIA + SHAPE)}")
        return cls(
            states=check_states([one for one in given.getlist("state") if one] or None),
            workflow=_text(given, "workflow"),
            queue=_text(given, "queue"),
            text=_text(given, "text"),
            since=_number(given, "since"),
            created_after=_moment(given, "from"),
            created_before=_moment(given, "to"),
            sort=_sort(given.get("sort") or NEWEST_FIRST),
            limit=whole(given, "limit", PAGE, 1, PAGE_LIMIT),
            after=_text(given, "after"),
            counted=given.get("counts") != "0",
        )

    @property
    def chooses(self) -> bool:
        """Whether anything is said of which executions are meant."""
        bounds = (self.since, self.created_after, self.created_before)
        chosen = (self.states, self.workflow, self.queue, self.text, *bounds)
        return any(one is not None for one in chosen)

    def query(self, now: float) -> Query:
        """The first page of what matches, newest first."""
        after = self.created_after if self.since is None else max(self.created_after or 0.0, now - self.since)
        return Query(
            states=self.states,
            workflows=None if self.workflow is None else frozenset({self.workflow}),
            queue=self.queue,
            text=self.text,
            created_after=after,
            created_before=self.created_before,
            limit=self.limit,
        )


def _text(given: QueryParams, name: str) -> str | None:
    value = given.get(name) or None
    if value is not None and len(value) > 300:
        raise ConfigError(name, value[:20] + "…", "give at most 300 characters")
    return value


def _number(given: QueryParams, name: str) -> float | None:
    text = given.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(name, text[:40], "give a number of at least 0")
    return value


def whole(given: Mapping[str, str], name: str, default: int, minimum: int, maximum: int) -> int:
    """A whole number from a query or a path, between its bounds."""
    text = given.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and minimum <= int(text) <= maximum):
        raise ConfigError(name, text[:40], f"give a whole number from {minimum} to {maximum}")
    return int(text)


def _moment(given: QueryParams, name: str) -> float | None:
    text = given.get(name)
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(name, text[:40], "give a time such as 2026-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _sort(text: str) -> str:
    if text.removeprefix("-") not in SORTS:
        raise ConfigError("sort", text[:40], f"give one of {', '.join(SORTS)}, with - in front to go down")
    return text


class Listing:
    """Makes pages."""

    def __init__(self, store: CheckpointStore, forecaster: Forecaster, now: Callable[[], float]) -> None:
        self._store, self._forecaster, self._now = store, forecaster, now
        self._counts: Kept[dict[ExecutionState, int]] = Kept()

    async def page(self, filters: Filters) -> dict[str, Any]:
        found, follows = await self.find(filters)
        counts = await self._count(filters) if filters.counted else None
        total = None if counts is None else sum(counts[state] for state in filters.states or counts)
        return {
            "executions": [await self.summary(one) for one in found],
            "counts": None if counts is None else {state.value: number for state, number in counts.items()},
            "total": total,
            "next": follows,
            "sorted_among": SORT_WINDOW if filters.sort != NEWEST_FIRST and (total or 0) > SORT_WINDOW else None,
        }

    async def _count(self, filters: Filters) -> dict[ExecutionState, int]:
        """How many match, by state, whichever states are chosen. What took long to count is kept for a while: a text
        is looked for in every execution."""
        key = attrs.evolve(filters, states=None, sort=NEWEST_FIRST, limit=PAGE, after=None)
        found = await self._counts.get(key, lambda: self._store.count(key.query(self._now())))
        return {state: found.get(state, 0) for state in ExecutionState}

    async def find(self, filters: Filters) -> tuple[list[Stored], str | None]:
        """A page, and where the next one begins."""
        if filters.sort != NEWEST_FIRST:
            return await self._sorted(filters)
        query = attrs.evolve(filters.query(self._now()), after=_place(filters.after), limit=filters.limit + 1)
        found = await self._store.find(query)
        page, last = found[: filters.limit], found[filters.limit - 1 : filters.limit]
        more = len(found) > filters.limit
        return page, f"{last[0].definition.created!r},{last[0].definition.id}" if more else None

    async def _sorted(self, filters: Filters) -> tuple[list[Stored], str | None]:
        now = self._now()
        found = await self._store.find(attrs.evolve(filters.query(now), limit=SORT_WINDOW))
        key = SORTS[filters.sort.removeprefix("-")]
        found.sort(key=lambda one: key(one, now), reverse=filters.sort.startswith("-"))
        start = _offset(filters.after)
        end = start + filters.limit
        return found[start:end], f"{end}" if end < len(found) else None

    async def summary(self, one: Stored) -> dict[str, Any]:
        """An execution as a list may show it."""
        forecast = await self._forecaster.of(one.definition, one.head)
        return schema.summary(views.execution(one.definition, one.head), forecast)


def _place(after: str | None) -> tuple[float, str] | None:
    if after is None:
        return None
    created, comma, id = after.partition(",")
    try:
        if not comma:
            raise ValueError
        return float(created), id
    except ValueError:
        raise ConfigError("after", after[:40], "give the `next` of the page before") from None


def _offset(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and len(after) < 8):
        raise ConfigError("after", after[:40], "give the `next` of the page before")
    return int(after)
