"""Claiming: take what is due, skip what others hold, raise the fence and load, in one transaction.

Place in the life of an execution: claim.
"""

from __future__ import annotations

import secrets
from typing import Any

import attrs

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Claim, Head, Loaded
from longrun.stores._postgres.arrays import Texts, columns
from longrun.stores._postgres.links import Connection, in_one
from longrun.stores._postgres.loading import Loader, readable, repair
from longrun.stores._postgres.parts import HEAD_KINDS, HEAD_NAMES, head_row
from longrun.stores._postgres.queries import Queries

_CRASHED = frozenset({ExecutionState.RUNNING, ExecutionState.RESUMING})


class Claiming:
    """One claim. It can be repeated after a lost connection: what the first attempt took is found by its token (I9)."""

    def __init__(self, claim: Claim, queries: Queries) -> None:
        self._claim = claim
        self._queries = queries
        self._token = secrets.randbits(63)
        self._tried = False

    def take(self, connection: Connection) -> list[Loaded]:
        if self._claim.limit < 1 or self._claim.ids == ():
            return []
        with in_one(connection):
            self._queries.run(connection, "claim_lock", token=self._token)
            if self._tried:
                found = self._queries.run(connection, "claimed_by", owner=self._claim.owner, token=self._token)
                taken = [id for (id,) in found]
                if taken:
                    return list(readable(Loader(connection, self._queries).load(taken)))
            self._tried = True
            ids = self._chosen(connection)
            return self._give(connection, ids) if ids else []

    def _chosen(self, connection: Connection) -> list[str]:
        """Ids in their order, each row locked; what is locked beyond the limit is let go with the transaction."""
        claim = self._claim
        parameters: dict[str, Any] = {
            "states": Texts([state.value for state in claim.states]),
            "workflows": None if claim.workflows is None else Texts(claim.workflows),
            "queues": None if claim.queues is None else Texts(claim.queues),
            "owners": Texts(claim.dead),
            "limit": claim.limit,
        }
        if claim.ids is not None:
            found = self._queries.run(connection, "claim_these", ids=Texts(claim.ids), **parameters)
        else:
            found = self._queries.run(connection, "claim_due", now=float(claim.now), **parameters)
        best = sorted(found, key=lambda row: (-row[1], row[2], row[0]))[: claim.limit]
        return [row[0] for row in best]

    def _give(self, connection: Connection, ids: list[str]) -> list[Loaded]:
        given: list[Loaded] = []
        values: list[tuple[Any, ...]] = []
        for id, found in Loader(connection, self._queries).load(ids).items():
            if isinstance(found, CorruptDataError):
                self._queries.run(connection, "block", id=id, reason=str(found))
                continue
            if found.loaded.damage:
                repair(connection, self._queries, id, found)
            head = self._claimed(found.loaded.head)
            given.append(attrs.evolve(found.loaded, head=head))
            values.append(head_row(id, head))
        if values:
            heads = columns(HEAD_NAMES, HEAD_KINDS, values)
            self._queries.run(connection, "claim", token=self._token, **heads)
        return given

    def _claimed(self, head: Head) -> Head:
        crashed = head.owner not in (None, self._claim.owner) and head.state in _CRASHED
        return attrs.evolve(
            head, fence=head.fence + 1, owner=self._claim.owner, woken=False, crashes=head.crashes + crashed
        )
