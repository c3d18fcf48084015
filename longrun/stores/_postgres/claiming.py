"""Claiming: take what is due, skip what others hold, raise the fence and load, in one transaction.

Place in the life of an execution: claim.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Claim, Head, Loaded
from longrun.stores import rows
from longrun.stores._postgres.arrays import Ints, Texts, columns
from longrun.stores._postgres.asking import Ask, Row, in_one
from longrun.stores._postgres.links import Connection, OwnConnection
from longrun.stores._postgres.loading import Loader, readable, repair
from longrun.stores._postgres.queries import Queries

_CHANGED = ("id", "fence", "crashes", "crc")
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
        with in_one(connection, self._queries) as ask:
            ask("claim_lock", token=self._token)
            if self._tried:
                taken = [id for (id,) in ask("claimed_by", owner=self._claim.owner, token=self._token)]
                if taken:
                    return list(readable(Loader(ask).load(taken)))
            self._tried = True
            if not isinstance(connection, OwnConnection):
                ask("claim_plans")
            return self._give(ask)

    def _chosen(self, ask: Ask) -> Iterable[Row]:
        """One row with the ids in their order, each locked; what is locked beyond the limit is let go with the
        transaction."""
        claim = self._claim
        parameters: dict[str, Any] = {
            "states": Texts([state.value for state in claim.states]),
            "workflows": None if claim.workflows is None else Texts(claim.workflows),
            "queues": None if claim.queues is None else Texts(claim.queues),
            "owners": Texts(claim.dead),
            "limit": claim.limit,
        }
        if claim.ids is not None:
            return ask("claim_these", ids=Texts(claim.ids), **parameters)
        return ask("claim_due", now=float(claim.now), **parameters)

    def _give(self, ask: Ask) -> list[Loaded]:
        given: list[Loaded] = []
        values: list[tuple[Any, ...]] = []
        for id, found in Loader(ask).load_claimed(self._chosen(ask)).items():
            if isinstance(found, CorruptDataError):
                ask("block", id=id, reason=str(found))
                continue
            if found.loaded.damage:
                repair(ask, id, found)
            head = found.loaded.head
            self._give_to(head)
            given.append(found.loaded)
            values.append((id, head.fence, head.crashes, rows.head_crc(id, rows.head_values(head))))
        if values:
            changed = columns(_CHANGED, (Texts, Ints, Ints, Ints), values)
            ask("claim", owner=self._claim.owner, token=self._token, **changed)
        return given

    def _give_to(self, head: Head) -> None:
        """Change a head that was only just read, and that nobody else has."""
        owner = self._claim.owner
        head.crashes += head.owner not in (None, owner) and head.state in _CRASHED
        head.fence += 1
        head.owner, head.woken = owner, False
