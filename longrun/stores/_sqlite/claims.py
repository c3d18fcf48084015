"""A claim: find what is due, load it, and write down its new owner, all in one transaction.

Place in the life of an execution: claim. What is found damaged is copied to the quarantine here, and mended.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import attrs

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Claim, Head, Loaded
from longrun.stores._sqlite import pack, sql
from longrun.stores._sqlite.known import Row
from longrun.stores._sqlite.load import Found, load_all
from longrun.stores._sqlite.many import MOST_ONCE, insert
from longrun.stores._sqlite.ready import wake_of
from longrun.stores.assemble import Assembled, quarantined

_STARTED = frozenset({ExecutionState.RUNNING, ExecutionState.RESUMING})


class Given:
    """What a claim gives, and what it has to write for that."""

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self.rows: dict[str, Row] = {}
        """What the writer knows of these from now on."""
        self.blocked: list[str] = []
        """What cannot be read at all is not given: it is stored as blocked, so that it can be seen and stands in no
        way."""
        self._heads: list[Any] = []
        self._owners: list[Any] = []
        self._moved: list[Any] = []

    def add(self, found: Found, loaded: Loaded, owner: str) -> None:
        head = loaded.head
        _give_to(owner, head)
        row = self._changed(found, head, len(loaded.messages))
        row.entries = bool(loaded.entries)
        if loaded.damage:
            self._moved += row.place()
        else:
            self._owners += (row.key, row.fence, owner, row.messages, row.wake)
        self.loaded.append(loaded)
        self.rows[found.id] = row

    def block(self, found: Found, head: Head, messages: int) -> None:
        self._moved += self._changed(found, head, messages).place()
        self.blocked.append(found.id)

    def _changed(self, found: Found, head: Head, messages: int) -> Row:
        state, *columns = pack.head_columns(found.id, head)
        self._heads += (head.revision, found.kept, *columns, found.key)
        return Row(
            found.key,
            head.fence,
            head.revision,
            state,
            head.owner,
            head.ended,
            head.woken,
            wake_of(head),
            found.kept,
            messages,
            found.last_message,
        )

    def write(self, connection: sqlite3.Connection) -> None:
        insert(connection, sql.SAVE_HEAD, self._heads)
        insert(connection, sql.GIVE, self._owners, MOST_ONCE)
        insert(connection, sql.MOVE, self._moved, MOST_ONCE)


def give(connection: sqlite3.Connection, claim: Claim, now: float) -> Given:
    given = Given()
    for found in load_all(connection, _candidates(connection, claim)):
        if isinstance(found.assembled, CorruptDataError):
            _block(connection, given, found, found.assembled, now)
            continue
        if found.assembled.damaged:
            repair(connection, found, now)
        given.add(found, found.assembled.loaded, claim.owner)
    given.write(connection)
    if (given.rows or given.blocked) and claim.dead:
        connection.execute(sql.TOUCH)
    return given


def repair(connection: sqlite3.Connection, found: Found, now: float, *, copy_only: bool = False) -> None:
    """Copy every damaged row to the quarantine; then take out of the way what would be found again."""
    assert isinstance(found.assembled, Assembled)
    for damaged in found.assembled.damaged:
        connection.execute(sql.QUARANTINE, (found.id, damaged.part, now, damaged.content))
        if copy_only:
            continue
        kind, _, name = damaged.part.partition("/")
        if kind in ("boundary", "state"):
            connection.execute(sql.STRIP_ONE, (found.key, int(name)))
        elif kind == "message":
            connection.execute(sql.DROP_MESSAGE, (found.key, int(name)))
    if found.assembled.entries_dropped and not copy_only:
        connection.execute(sql.CLEAR_ENTRIES, (found.key,))


def set_aside_unreadable(connection: sqlite3.Connection, ids: list[str], now: float) -> dict[str, int]:
    """Id and key of each that cannot be read at all; every row of it is copied to the quarantine, so that it may go."""
    keys = [key for _, key in connection.execute(sql.KEYS, (json.dumps(ids),))] if ids else []
    found = [one for one in load_all(connection, keys) if isinstance(one.assembled, CorruptDataError)]
    for one in found:
        for table, statement in sql.ALL_OF.items():
            for row in connection.execute(statement, (one.key,)).fetchall():
                connection.execute(sql.QUARANTINE, (one.id, f"deleted/{table}", now, quarantined(row)))
    return {one.id: one.key for one in found}


def _give_to(owner: str, head: Head) -> None:
    """Change a head that was only just read, and that nobody else has."""
    head.crashes += head.owner not in (None, owner) and head.state in _STARTED
    head.fence += 1
    head.owner, head.woken = owner, False


def _block(connection: sqlite3.Connection, given: Given, found: Found, error: CorruptDataError, now: float) -> None:
    if found.raw_head is not None:
        connection.execute(sql.QUARANTINE, (found.id, "head", now, found.raw_head))
    fence, revision, messages = connection.execute(sql.NUMBERS, (found.key,)).fetchone()
    head = found.head or Head(state=ExecutionState.BLOCKED, revision=revision, updated=now)
    blocked = attrs.evolve(
        head,
        state=ExecutionState.BLOCKED,
        fence=fence + 1,
        owner=None,
        due=None,
        signal=None,
        woken=False,
        reason=str(error),
    )
    given.block(found, blocked, messages)


def _candidates(connection: sqlite3.Connection, claim: Claim) -> list[int]:
    values: dict[str, Any] = {
        "states": json.dumps([state.value for state in claim.states]),
        "owners": json.dumps([*claim.dead]),
        "now": max(0.0, claim.now),
        "limit": claim.limit,
    }
    narrow = [sql.NARROW_STATES]
    if claim.workflows is not None:
        narrow.append(sql.NARROW_WORKFLOWS)
        values["workflows"] = json.dumps([*claim.workflows])
    if claim.queues is not None:
        narrow.append(sql.NARROW_QUEUES)
        values["queues"] = json.dumps([*claim.queues])
    parts = []
    for n, start in enumerate(_starts(claim, values)):
        parts.append(f"SELECT * FROM ({' AND '.join([start, *narrow])} {sql.CLAIM_ORDER}) AS part{n}")
    if not parts:
        return []
    statement = f"SELECT key FROM ({' UNION ALL '.join(parts)}) {sql.CLAIM_ORDER}"
    return [key for (key,) in connection.execute(statement, values)]


def _starts(claim: Claim, values: dict[str, Any]) -> list[str]:
    """The kinds of candidates, each a select over an index of its own."""
    if claim.ids is not None:
        values["ids"] = json.dumps(claim.ids)
        return [sql.CLAIM_IDS]
    if claim.queues is None:
        ready = [sql.CLAIM_READY]
    else:
        ready = []
        for n, queue in enumerate(sorted(claim.queues)):
            values[f"queue{n}"] = queue
            ready.append(sql.CLAIM_READY_QUEUE.format(n=n))
    return [*ready, sql.CLAIM_TIMED, sql.CLAIM_OWNED]
