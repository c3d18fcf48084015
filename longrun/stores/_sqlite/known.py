"""What the writer knows of stored executions without reading it again.

Place in the life of an execution: claim, checkpoint. What an execution's row holds besides its head is small. Of those
owned here it is kept in memory from the claim on and between batches: others change it seldom, and whoever does says so
in the same transaction (`sql.TOUCH`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from longrun.stores._sqlite import sql

ROWS_REMEMBERED = 50_000


class Row:
    """What the writer must know of a stored execution to judge a write."""

    __slots__ = (
        *("key", "fence", "revision", "state", "owner"),
        *("ended", "woken", "wake", "kept", "messages", "last_message", "entries"),
    )

    def __init__(
        self,
        key: int,
        fence: int,
        revision: int,
        state: str,
        owner: str | None,
        ended: float | None = None,
        woken: bool = False,
        wake: float | None = 0.0,
        kept: int = 0,
        messages: int = 0,
        last_message: int = 0,
        entries: bool = False,
    ) -> None:
        self.key, self.fence, self.revision, self.state, self.owner = key, fence, revision, state, owner
        self.ended, self.woken, self.wake, self.kept = ended, woken, wake, kept
        self.messages, self.last_message = messages, last_message
        self.entries = entries
        """Whether there may be any."""

    def place(self) -> tuple[Any, ...]:
        """For `MOVE`."""
        woken = 1 if self.woken else 0
        messages = self.messages, self.last_message
        return self.key, self.state, self.fence, self.owner, self.ended, woken, *messages, self.wake


class Known:
    """The rows that a batch needs; those of executions owned here are remembered, as long as nobody else has touched
    any that he does not own."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.owners: set[str] = set()
        """Who writes through this connection."""
        self._version: int | None = None
        self._touched: int | None = None

    def refresh(self, connection: sqlite3.Connection, ids: set[str]) -> None:
        """Make sure that all that is stored of `ids` is in `rows`. Inside a write transaction."""
        self.look(connection)
        missing = [*ids.difference(self.rows)]
        if missing:
            one = len(missing) == 1
            asked = (sql.KNOWN_ONE, missing) if one else (sql.KNOWN, (json.dumps(missing),))
            for id, *values in connection.execute(*asked):
                self.rows[id] = Row(*values)

    def look(self, connection: sqlite3.Connection) -> None:
        """Forget what others may have changed. Inside a write transaction."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            (touched,) = connection.execute(sql.TOUCHED).fetchone() or (0,)
            if touched != self._touched:
                self.rows.clear()
            self._version, self._touched = version, touched
        if len(self.rows) > ROWS_REMEMBERED:
            self.rows.clear()

    def keep_owned(self, ids: Iterable[str]) -> None:
        """After a write: what is not owned here may be changed by anybody."""
        for id in ids:
            row = self.rows.get(id)
            if row is not None and row.owner not in self.owners:
                del self.rows[id]

    def clear(self) -> None:
        self.rows.clear()
        self._version = self._touched = None
