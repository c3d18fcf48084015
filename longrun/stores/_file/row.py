"""What the index of done/ says of one execution, and what a query can be answered with that alone.

Place in the life of an execution: after its end, in listings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs

from longrun.records import FINISHED, ExecutionState
from longrun.stored import Query
from longrun.stores._file.lines import dumped

LISTED = FINISHED | {ExecutionState.BLOCKED}
"""Ends, and what is left of a journal that cannot be read and of which the index does not know how it ended."""


@attrs.frozen
class Row:
    """What the index says of one execution: enough to choose by; the rest is read where it is shown."""

    id: str
    created: float
    state: ExecutionState
    ended: float | None
    workflow: str
    queue: str
    parent: str | None
    start: int
    size: int


def newest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.created, row.id), reverse=True)


def may_match(row: Row, query: Query) -> bool:
    return (
        (query.states is None or row.state in query.states)
        and (query.workflows is None or row.workflow in query.workflows)
        and (query.queue is None or row.queue == query.queue)
        and (query.created_after is None or row.created >= query.created_after)
        and (query.created_before is None or row.created < query.created_before)
        and (query.ended_before is None or (row.ended is not None and row.ended < query.ended_before))
    )


def texts(query: Query) -> list[list[bytes]]:
    """Of each list, every line that matches must hold one."""
    found = []
    if query.states is not None:
        found.append([b'"state":"%b"' % state.value.encode() for state in query.states & LISTED])
    if query.workflows is not None:
        names = [(json.dumps(workflow).encode(), dumped(workflow, ours=True)) for workflow in query.workflows]
        found.append([b'"workflow":%b' % text for both in names for text in both])  # as either writer has it
    return found


def only_rows(query: Query) -> bool:
    """Whether the rows alone decide."""
    return (
        not query.metadata
        and query.text is None
        and query.owner is None
        and query.owned is None
        and query.parent_id is None
    )
