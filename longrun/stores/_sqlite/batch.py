"""A batch of writes: judged one by one against what is stored, gathered, and written with few statements.

Place in the life of an execution: checkpoint. Runs in the writer's thread, inside one transaction that nobody else
can write beside, so comparing a fence in Python and writing afterwards is one atomic act.

What an execution's row holds besides its head is small, and kept in memory between batches (`Known`). That memory is
exact as long as no other connection has committed, which `PRAGMA data_version` tells; otherwise it is read anew.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from sqlite3 import SQLITE_LIMIT_VARIABLE_NUMBER
from typing import Any
from zlib import crc32

from longrun.errors import (
    ExecutionNotFoundError,
    LeaseLostError,
    NotStorableError,
    SignalQueueFullError,
    WriteOrderError,
)
from longrun.records import ExecutionState
from longrun.stored import Create, Head, Message, Save, Send, Write
from longrun.stores import rows
from longrun.stores._sqlite import pack, sql
from longrun.stores._sqlite.file import KIND
from longrun.stores.assemble import fits
from longrun.stores.base import Answer

GROUPS = (256, 64, 16, 4)
"""How many rows are inserted by one statement: few different sizes, so that the statements are prepared once."""
KEYS_REMEMBERED = 1024
ROWS_REMEMBERED = 50_000
ENDED = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
_FINISHED = frozenset(state.value for state in ExecutionState if state.finished)
_WAKES = frozenset({"initialized", "waiting", "resuming", "running"})
"""States in which a message makes an execution due."""
_UNSTORABLE = (UnicodeError, OverflowError, struct.error, TypeError, ValueError)


class Row:
    """What the writer must know of a stored execution to judge a write."""

    __slots__ = (
        *("key", "fence", "revision", "state", "owner"),
        *("ended", "woken", "wake", "kept", "messages", "last_message", "place"),
    )

    def __init__(self, key: int, fence: int, revision: int, state: str, owner: str | None, *rest: Any) -> None:
        self.key, self.fence, self.revision, self.state, self.owner = key, fence, revision, state, owner
        self.ended: float | None
        self.woken: bool
        self.wake: float | None
        self.kept: int
        self.messages: int
        self.last_message: int
        self.ended, self.woken, self.wake, self.kept, self.messages, self.last_message = rest
        self.place: tuple[str, str | None, int] | None = None
        """The state and owner of the last head that had no words, and what its checksum began with: mostly the next
        one has the same."""


class Known:
    """The rows that this connection has seen, as long as nobody else writes."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._version: int | None = None

    def refresh(self, connection: sqlite3.Connection, ids: Iterable[str]) -> None:
        """Make sure that all that is stored of `ids` is in `rows`. Inside a write transaction."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version or len(self.rows) > ROWS_REMEMBERED:
            self.rows.clear()
            self._version = version
        missing = [id for id in ids if id not in self.rows]
        if missing:
            one = len(missing) == 1
            asked = (sql.KNOWN_ONE, missing) if one else (sql.KNOWN, (json.dumps(missing),))
            for id, *values in connection.execute(*asked):
                self.rows[id] = Row(*values)

    def clear(self) -> None:
        self.rows.clear()
        self._version = None


Part = tuple[int, bytes]
"""A checksum and what it is of."""


class Parts:
    """What a batch does to the blobs or the entries of one execution; later writes win."""

    __slots__ = ("cleared", "values")

    def __init__(self) -> None:
        self.cleared = False
        self.values: dict[str, Part | None] = {}

    def clear(self) -> None:
        self.cleared = True
        self.values.clear()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.values[name] = None


class Batch:
    """One commit in the making: `answer` each write in order, then `write` everything."""

    def __init__(self, connection: sqlite3.Connection, known: Known) -> None:
        self._connection = connection
        self._known = known.rows
        self._next_key: int | None = None
        self._creates: list[tuple[Any, ...]] = []
        self._new_heads: list[tuple[Any, ...]] = []
        self._steps: list[tuple[Any, ...]] = []
        self._set_steps: list[tuple[int, int, str, int]] = []
        self._heads: dict[int, tuple[Row, bytes, str | None, int]] = {}
        self._moved: dict[int, Row] = {}
        self._boundaries: list[tuple[Any, ...]] = []
        self._strips: list[tuple[int, int, int]] = []
        self._blobs: dict[int, Parts] = {}
        self._entries: dict[int, Parts] = {}
        self.announce = False
        """Whether others may want to know: something was sent, created, released, finished."""

    def answer(self, write: Write) -> Answer:
        try:
            if isinstance(write, Save):
                return self._save(write)
            return self._create(write) if isinstance(write, Create) else self._send(write)
        except _UNSTORABLE as error:  # raised before anything of this write was gathered
            refusal = NotStorableError(f"a write of execution {write.id!r}", f"{type(error).__name__}: {error}")
            refusal.__cause__ = error
            return refusal

    # judging

    def _save(self, save: Save) -> Answer:
        row = self._known.get(save.id)
        if row is None:
            return ExecutionNotFoundError(save.id)
        head = save.head
        if row.fence != head.fence:
            return LeaseLostError(save.id, head.fence)
        if row.revision >= head.revision:
            return None
        if row.revision != head.revision - 1:
            return WriteOrderError(KIND, save.id, row.revision, head.revision)
        state, numbers, words = head.state._value_, pack.head_numbers(head), pack.head_words(head)
        crc = crc32(numbers, _place_of(row, save.id, state, head, words))
        boundaries = [pack.boundary_row(row.key, save.id, boundary) for boundary in save.boundaries]
        steps = None if save.steps is None else _steps_row(row.key, save.id, save.steps)
        puts = _checked(save.id, save.put, rows.entry_crc) if save.put else {}
        blobs = _checked(save.id, save.blobs, rows.blob_crc) if save.blobs else {}
        self._boundaries += boundaries
        if steps is not None:
            self._set_steps.append(steps)
        self._heads[row.key] = row, numbers, words, crc
        if save.clear or save.put or save.drop or head.state in ENDED:
            self._change_entries(row, save, puts)
        if blobs or save.drop_blobs:
            parts = self._parts(self._blobs, row.key)
            parts.values.update(blobs)
            parts.drop(save.drop_blobs)
        if save.take:
            self._take(row, save.take)
        if save.keep_from is not None and save.keep_from > row.kept:
            self._strips.append((row.key, row.kept, save.keep_from))
            row.kept = save.keep_from
        self._move(row, head, state)
        return None

    def _move(self, row: Row, head: Head, state: str) -> None:
        """Bring the row up to the new head, and see whether a column changes that an index holds."""
        row.revision = head.revision
        if head.state in ENDED and row.messages:
            self._connection.execute(sql.TAKE_ALL_KEYED, (row.key,))
            self._connection.execute(sql.TAKE_ALL_PLAIN, (row.key,))
            row.messages = 0
            self._moved[row.key] = row
        woken = head.woken or (head.owner is None and row.messages > 0 and state not in _FINISHED)
        wake = 0.0 if state == "running" or (woken and state in _WAKES) else _wake(head)
        if (
            state == row.state
            and head.owner == row.owner
            and head.ended == row.ended
            and woken == row.woken
            and wake == row.wake
        ):
            return
        self._moved[row.key] = row
        row.state, row.owner, row.ended, row.woken, row.wake = state, head.owner, head.ended, woken, wake
        self.announce = True

    def _create(self, create: Create) -> bool:
        if create.id in self._known:
            return False
        head, definition = create.head, rows.definition_values(create.definition)
        state, numbers, words = head.state._value_, pack.head_numbers(head), pack.head_words(head)
        crc = crc32(numbers, pack.head_place(create.id, state, head.fence, head.owner, words))
        names = rows.steps_text(create.definition.steps)
        definition_crc, names_crc = rows.definition_crc(definition), rows.steps_crc(create.id, names)
        boundary = pack.boundary_row(0, create.id, create.boundary)
        blobs = _checked(create.id, create.blobs, rows.blob_crc) if create.blobs else {}
        key, wake = self._new_key(), _wake(head)
        row = Row(key, head.fence, head.revision, state, head.owner, head.ended, head.woken, wake, 0, 0, 0)
        self._creates.append((key, *definition, definition_crc, *_place(row)[:-1]))
        self._new_heads.append((head.revision, 0, numbers, words, crc, key))
        self._steps.append((key, names, names_crc))
        self._boundaries.append((key, *boundary[1:]))
        if blobs:
            self._parts(self._blobs, row.key).values.update(blobs)
        self._known[create.id] = row
        self.announce = True
        return True

    def _new_key(self) -> int:
        if self._next_key is None:
            (self._next_key,) = self._connection.execute(sql.LAST_KEY).fetchone()
        self._next_key += 1
        return self._next_key

    def _change_entries(self, row: Row, save: Save, puts: Mapping[str, Part]) -> None:
        entries = self._parts(self._entries, row.key)
        if save.clear:
            entries.clear()
        entries.drop(save.drop)
        entries.values.update(puts)
        if save.head.state in ENDED:
            entries.clear()

    @staticmethod
    def _parts(parts: dict[int, Parts], key: int) -> Parts:
        found = parts.get(key)
        if found is None:
            found = parts[key] = Parts()
        return found

    # messages: seldom enough to be written at once

    def _take(self, row: Row, numbers: Sequence[int]) -> None:
        pairs = [(row.key, number) for number in numbers]
        for statement in (sql.TAKE_KEYED, sql.TAKE_PLAIN):
            row.messages -= self._connection.executemany(statement, pairs).rowcount
        self._moved[row.key] = row

    def _send(self, send: Send) -> Answer:
        row = self._known.get(send.id)
        if row is None:
            return ExecutionNotFoundError(send.id)
        message = send.message
        if message.key is not None:
            seen = self._connection.execute(sql.MESSAGE_OF_KEY, (row.key, message.key)).fetchone()
            if seen is not None:
                return int(seen[0])
        if row.messages >= send.limit:
            return SignalQueueFullError(send.id, send.limit)
        self._add_message(row, send.id, message)
        if row.owner is None and row.state not in _FINISHED:
            row.woken = True
            row.wake = 0.0 if row.state in _WAKES else row.wake
        self._moved[row.key] = row
        self.announce = True
        return row.last_message

    def _add_message(self, row: Row, id: str, message: Message) -> None:
        values = (row.last_message + 1, *rows.message_values(message)[1:])
        self._connection.execute(sql.ADD_MESSAGE, (row.key, *values, rows.message_crc(id, values)))
        row.last_message += 1
        row.messages += 1
        if message.key is not None and row.last_message > KEYS_REMEMBERED:
            self._connection.execute(sql.FORGET_KEYS, (row.key, row.key, KEYS_REMEMBERED))

    # writing

    def write(self) -> None:
        if self._creates:
            self._insert(sql.CREATE, self._creates)
            self._insert(sql.CREATE_HEAD, self._new_heads)
            self._insert(sql.ADD_STEPS, self._steps)
        for key, total, names, crc in self._set_steps:
            self._write_steps(key, total, names, crc)
        self._write_heads()
        self._write_boundaries()
        self._many(sql.STRIP, self._strips)
        if self._blobs:
            self._write_parts(self._blobs, sql.DROP_BLOB, sql.ADD_BLOB)
        if self._entries:
            self._many(sql.CLEAR_ENTRIES, [(key,) for key, parts in self._entries.items() if parts.cleared])
            self._write_parts(self._entries, sql.DROP_ENTRY, sql.ADD_ENTRY)
        if self.announce:
            self._connection.execute(sql.ANNOUNCE)

    def _write_steps(self, key: int, total: int, names: str, crc: int) -> None:
        """Steps that came later than their definition. A definition that is damaged stays so: its checksum too."""
        stored_crc, *values = self._connection.execute(sql.DEFINITION_OF, (key,)).fetchone()
        if fits(lambda: rows.definition_crc(values), stored_crc):
            values[rows.DEFINITION_COLUMNS.index("total")] = total
            self._connection.execute(sql.SET_TOTAL, (total, rows.definition_crc(values), key))
        self._connection.execute(sql.SET_STEPS, (names, crc, key))

    def _write_heads(self) -> None:
        heads = [(row.revision, row.kept, *packed, key) for key, (row, *packed) in self._heads.items()]
        self._insert(sql.SAVE_HEAD, heads)
        self._many(sql.MOVE, [_place(row) for row in self._moved.values()])

    def _write_boundaries(self) -> None:
        try:
            self._insert(sql.ADD_BOUNDARY, self._boundaries)
        except sqlite3.IntegrityError:  # a number that is there already: only after damage; the later row counts
            self._insert(sql.REPLACE_BOUNDARY, self._boundaries)

    def _write_parts(self, parts: Mapping[int, Parts], drop: str, add: str) -> None:
        dropped: list[tuple[Any, ...]] = []
        added: list[tuple[Any, ...]] = []
        for key, part in parts.items():
            for name, value in part.values.items():
                if value is not None:
                    added.append((key, name, *value))
                elif not part.cleared:
                    dropped.append((key, name))
        self._many(drop, dropped)
        self._insert(add, added)

    def _insert(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """Many rows with each statement: while it runs the interpreter is free for the steps, which it is not in
        between two rows that are inserted one by one."""
        done, left = 0, len(values)
        for size in GROUPS:
            if left >= size and size * len(values[0]) <= self._connection.getlimit(SQLITE_LIMIT_VARIABLE_NUMBER):
                many = sql.for_many(statement, size)
                while left >= size:
                    self._connection.execute(many, list(chain.from_iterable(values[done : done + size])))
                    done, left = done + size, left - size
        for row in values[done:]:
            self._connection.execute(statement, row)

    def _many(self, statement: str, values: list[Any]) -> None:
        if values:
            self._connection.executemany(statement, values)


def _place_of(row: Row, id: str, state: str, head: Head, words: str | None) -> int:
    """What the checksum of a head begins with."""
    known, owner = row.place, head.owner
    if words is None and known is not None and known[0] == state and known[1] == owner:
        return known[2]
    place = pack.head_place(id, state, head.fence, owner, words)
    if words is None:
        row.place = state, owner, place
    return place


def _wake(head: Head) -> float | None:
    """As `rows.wake_at`, never negative: 0 is the mark of what is due at once."""
    moment = rows.wake_at(head)
    return None if moment is None else max(0.0, moment)


def _steps_row(key: int, id: str, steps: tuple[str, ...]) -> tuple[int, int, str, int]:
    names = rows.steps_text(steps)
    return key, len(steps), names, rows.steps_crc(id, names)


def _checked(id: str, values: Mapping[str, bytes], crc: Callable[[str, str, bytes], int]) -> dict[str, Part]:
    return {name: (crc(id, name, data), data) for name, data in values.items()}


def _place(row: Row) -> tuple[Any, ...]:
    """For `MOVE`."""
    wake = row.wake
    return (
        *(row.state, row.fence, row.owner, row.ended, row.woken, row.messages, row.last_message, wake),
        row.key,
    )
