"""Which executions a claim or a listing asks for, told in Python, for stores that cannot leave it to a server.

Place in the life of an execution: claim, and whenever somebody looks.
"""

from __future__ import annotations

from longrun.records import ExecutionState
from longrun.stored import Claim, Definition, Head, Query, same_value, searched_texts
from longrun.stores.rows import wake_at


def is_free(head: Head, claim: Claim) -> bool:
    return head.owner is None or head.owner in claim.dead


def is_wanted(definition: Definition, head: Head, claim: Claim) -> bool:
    """Whether a claim asks for this one, whoever owns it."""
    if head.state not in claim.states:
        return False
    if claim.workflows is not None and definition.workflow not in claim.workflows:
        return False
    if claim.queues is not None and definition.queue not in claim.queues:
        return False
    if claim.ids is not None:
        return True
    due = wake_at(head)
    return due is not None and (due <= claim.now or head.state is ExecutionState.RUNNING)


def matches(definition: Definition, head: Head, query: Query) -> bool:
    """Whether a listing shows this one, wherever its page begins and ends."""
    equal = (
        (query.queue, definition.queue),
        (query.owner, head.owner),
        (query.parent_id, definition.parent_id),
        (query.owned, head.owner is not None),
    )
    return (
        all(asked is None or asked == found for asked, found in equal)
        and (query.states is None or head.state in query.states)
        and (query.workflows is None or definition.workflow in query.workflows)
        and (query.created_after is None or definition.created >= query.created_after)
        and (query.created_before is None or definition.created < query.created_before)
        and (query.ended_before is None or (head.ended is not None and head.ended < query.ended_before))
        and all(same_value(definition.metadata.get(key), value) for key, value in query.metadata.items())
        and (query.text is None or _contains(definition, query.text.casefold()))
    )


def _contains(definition: Definition, text: str) -> bool:
    return any(text in value.casefold() for value in searched_texts(definition.id, definition.metadata))
