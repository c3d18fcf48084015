"""A batch of writes: judged one by one against what is stored, gathered, and written with few statements.

Place in the life of an execution: checkpoint. Runs in the writer's thread, inside one transaction that nobody else
can write beside, so comparing a fence in Python and writing afterwards is one atomic act.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from longrun.errors import (
    ExecutionNotFoundError,
    LeaseLostError,
    SignalQueueFullError,
    WriteOrderError,
)
from longrun.moves import End
from longrun.records import ExecutionState
from longrun.stored import Head, Message, Save, Send
from longrun.stores import rows
from longrun.stores._sqlite import pack, sql
from longrun.stores._sqlite.file import KIND
from longrun.stores._sqlite.known import Known, Row
from longrun.stores._sqlite.many import MOST_ONCE, MOST_ROWS, insert
from longrun.stores._sqlite.ready import (
    OF_BOUNDARY,
    OF_HEAD,
    OF_START,
    OF_STEPS,
    UNSTORABLE,
    Part,
    Ready,
    ReadyCreate,
    ReadySave,
    ReadyStart,
    Unfit,
    wake_of,
)
from longrun.stores.assemble import fits
from longrun.stores.base import KEYS_REMEMBERED, Answer

ENDED = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
_FINISHED = frozenset(state.value for state in ExecutionState if state.finished)
_TUPLE = frozenset({tuple})
_WAKES = frozenset({"initialized", "waiting", "resuming", "running"})
"""States in which a message makes an execution due."""


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
        self._known, self._owners = known.rows, known.owners
        self._next_key: int | None = None
        self._creates: list[Any] = []
        """As all that is inserted: the columns of one row after the other, since a tuple for each row would be one more
        thing that the garbage collector looks at."""
        self._starts: list[Any] = []
        self._new_heads: list[Any] = []
        self._steps: list[Any] = []
        self._set_steps: dict[int, tuple[Save, str, int]] = {}
        self._heads: list[Any] = []
        self._ended: list[Any] = []
        self._moved: dict[int, Row] = {}
        self._boundaries: list[Any] = []
        self._strips: list[tuple[int, int, int]] = []
        self._blobs: dict[int, Parts] = {}
        self._entries: dict[int, Parts] = {}
        self.loose: list[str] = []
        """What may not be owned here when all is written: what was refused too."""
        self.announce = False
        """Whether others may want to know: something was sent, created, released, finished."""

    def answer(self, readied: Sequence[Ready]) -> list[Answer]:
        of_moves = _TUPLE.issuperset(map(type, readied))
        return list(map(self._pass if of_moves else self._answer, readied))  # type: ignore[arg-type]

    def _answer(self, ready: Ready) -> Answer:
        if isinstance(ready, tuple):
            return self._pass(ready)
        if isinstance(ready, ReadySave):
            return self._save(ready)
        if isinstance(ready, ReadyStart):
            return self._start(ready)
        if isinstance(ready, ReadyCreate):
            return self._create(ready)
        if isinstance(ready, Unfit):
            return self._refuse(ready)
        try:
            return self._send(ready)
        except UNSTORABLE as error:  # raised before anything of it was written
            return Unfit(ready, error).refusal

    # judging

    def _pass(self, ready: pack.ReadyMove) -> Answer:
        """As `_save`, without all that a move or an end cannot have."""
        move, numbers, crc, seq, passed, words, words_crc, state_crc, blobs, data = ready
        head, row = move.head, self._known.get(move.id)
        revision, owner = head.revision, head.owner
        if row is None or row.fence != head.fence or row.revision != revision - 1:
            self.loose.append(move.id)
            answer = self._judge(move)
            assert not isinstance(answer, Row)
            return answer
        key, keep_from = row.key, move.keep_from
        self._boundaries += (key, seq, passed, words, words_crc, state_crc, blobs, data)
        if keep_from is not None and keep_from > row.kept:
            self._strips.append((key, row.kept, keep_from))
            row.kept = keep_from
        self._heads += (revision, row.kept, numbers, "", crc, key)
        if row.owner in self._owners and row.state == "running" and not row.woken:
            if owner == row.owner:
                row.revision = revision
                return None
            if type(move) is End and not row.messages and not row.entries:
                self._end(row, move)
                return None
        self.loose.append(move.id)
        self._say_if_foreign(row.owner, owner)
        self._change_entries(row, move, {})
        self._move(row, head, head.state._value_)
        return None

    def _end(self, row: Row, end: End) -> None:
        """As `_change_entries` and `_move`, where there is nothing to be cleared away. What comes later in the batch
        is written later (`_moved`)."""
        self.loose.append(end.id)
        self._ended += (row.key, end.head.ended)
        row.revision, row.state, row.owner = end.head.revision, "completed", None
        row.ended, row.wake = end.head.ended, None
        self.announce = True

    def _save(self, ready: ReadySave) -> Answer:
        save = ready.save
        self.loose.append(save.id)
        row = self._judge(save)
        if not isinstance(row, Row):
            return row
        key, head = row.key, save.head
        if row.owner not in self._owners or head.owner not in self._owners:
            self._say_if_foreign(row.owner, head.owner)
        columns = ready.boundaries
        for start in range(0, len(columns), pack.BOUNDARY_WIDTH):
            columns[start] = key
        self._boundaries += columns
        if ready.steps is not None:
            self._set_steps[key] = save, *ready.steps
        self._change_entries(row, save, ready.put)
        if ready.blobs or save.drop_blobs:
            parts = self._parts(self._blobs, key)
            parts.values.update(ready.blobs)
            parts.drop(save.drop_blobs)
        if save.take:
            self._take(row, save.take)
        if save.keep_from is not None and save.keep_from > row.kept:
            self._strips.append((key, row.kept, save.keep_from))
            row.kept = save.keep_from
        self._heads += (head.revision, row.kept, ready.numbers, ready.words, ready.crc, key)
        self._move(row, head, ready.state)
        return None

    def _say_if_foreign(self, *owners: str | None) -> None:
        """What somebody has who writes elsewhere is remembered there. A replicated store puts such a copy right."""
        if any(owner is not None and owner not in self._owners for owner in owners):
            self._connection.execute(sql.TOUCH)

    def _judge(self, save: Save) -> Row | Answer:
        """The row that a save is to be written to, or its answer."""
        row, head = self._known.get(save.id), save.head
        if row is None:
            return ExecutionNotFoundError(save.id)
        if row.fence != head.fence:
            return LeaseLostError(save.id, head.fence)
        if row.revision >= head.revision:
            return None
        if row.revision != head.revision - 1:
            return WriteOrderError(KIND, save.id, row.revision, head.revision)
        return row

    def _refuse(self, unfit: Unfit) -> Answer:
        write = unfit.write
        self.loose.append(write.id)
        if isinstance(write, Save):
            answer = self._judge(write)
            return unfit.refusal if isinstance(answer, Row) else answer
        return False if write.id in self._known else unfit.refusal

    def _move(self, row: Row, head: Head, state: str) -> None:
        """Bring the row up to the new head, and see whether a column changes that an index holds."""
        row.revision = head.revision
        same = state == row.state and head.owner == row.owner and head.ended == row.ended
        if same and state == "running" and row.owner is not None and not head.woken and not row.woken:
            return  # from step to step
        if head.state in ENDED and row.messages:
            self._connection.execute(sql.TAKE_ALL_KEYED, (row.key,))
            self._connection.execute(sql.TAKE_ALL_PLAIN, (row.key,))
            row.messages = 0
            self._moved[row.key] = row
        woken = head.woken or (head.owner is None and row.messages > 0 and state not in _FINISHED)
        wake = 0.0 if state == "running" or (woken and state in _WAKES) else wake_of(head)
        if same and woken == row.woken and wake == row.wake:
            return
        self._moved[row.key] = row
        row.state, row.owner, row.ended, row.woken, row.wake = state, head.owner, head.ended, woken, wake
        self.announce = True

    def _start(self, ready: ReadyStart) -> bool:
        id, head = ready.create.id, ready.create.head
        if (key := self._key_for(id, head.owner)) is None:
            return False
        columns = ready.columns
        self._starts.append(key)
        self._starts += columns[OF_START]
        self._new_heads.append(key)
        self._new_heads += columns[OF_HEAD]
        self._steps.append(key)
        self._steps += columns[OF_STEPS]
        self._boundaries.append(key)
        self._boundaries += columns[OF_BOUNDARY]
        self._known[id] = Row(key, head.fence, head.revision, "running", head.owner)
        return True

    def _create(self, ready: ReadyCreate) -> bool:
        id, head = ready.create.id, ready.create.head
        if (key := self._key_for(id, head.owner)) is None:
            return False
        ready.columns[0] = ready.head[0] = ready.steps[0] = ready.boundary[0] = key
        self._creates += ready.columns
        self._new_heads += ready.head
        self._steps += ready.steps
        self._boundaries += ready.boundary
        if ready.blobs:
            self._parts(self._blobs, key).values.update(ready.blobs)
        self._known[id] = Row(
            key, head.fence, head.revision, ready.state, head.owner, head.ended, head.woken, ready.wake
        )
        return True

    def _key_for(self, id: str, owner: str | None) -> int | None:
        """The key of a new execution; None if its id is taken."""
        if id in self._known:
            self.loose.append(id)
            return None
        if owner not in self._owners:
            self.loose.append(id)
            self._say_if_foreign(owner)
        self.announce = True
        return self._new_key()

    def _new_key(self) -> int:
        if self._next_key is None:
            (self._next_key,) = self._connection.execute(sql.LAST_KEY).fetchone()
        self._next_key += 1
        return self._next_key

    def _change_entries(self, row: Row, save: Save, puts: Mapping[str, Part]) -> None:
        ended = save.head.state in ENDED
        if not puts and not (row.entries and (save.clear or save.drop or ended)):
            return
        entries = self._parts(self._entries, row.key)
        if save.clear:
            entries.clear()
        entries.drop(save.drop)
        entries.values.update(puts)
        if ended:
            entries.clear()
        row.entries = not entries.cleared or bool(entries.values)

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
        self.loose.append(send.id)
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
        elif row.owner is not None and row.owner not in self._owners:
            self._connection.execute(sql.TOUCH)
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
        self._insert(sql.START, self._starts, MOST_ONCE)
        self._insert(sql.CREATE, self._creates, MOST_ONCE)
        self._insert(sql.CREATE_HEAD, self._new_heads, MOST_ONCE)
        self._insert(sql.ADD_STEPS, self._steps, MOST_ONCE)
        if self._set_steps:
            self._write_steps()
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

    def _write_steps(self) -> None:
        """Steps that came later than their definitions. A definition that is damaged stays so: its checksum too."""
        named: list[Any] = []
        steps: list[Any] = []
        stored = self._connection.execute(sql.DEFINITIONS_OF, (json.dumps([*self._set_steps]),))
        for key, stored_crc, *values in stored.fetchall():
            save, names, crc = self._set_steps[key]
            steps += (key, names, crc)
            if fits(partial(rows.definition_crc, values), stored_crc):
                version, total = rows.set_named(values, save)
                named += (key, version, total, rows.definition_crc(values))
        self._insert(sql.SET_NAMED, named, MOST_ONCE)
        self._insert(sql.SET_STEPS, steps, MOST_ONCE)

    def _write_heads(self) -> None:
        self._insert(sql.SAVE_HEAD, self._heads)
        self._insert(sql.FINISH, self._ended, MOST_ONCE)
        self._insert(sql.MOVE, [column for row in self._moved.values() for column in row.place()], MOST_ONCE)

    def _write_boundaries(self) -> None:
        try:
            self._insert(sql.ADD_BOUNDARY, self._boundaries)
        except sqlite3.IntegrityError:  # a number that is there already: only after damage; the later row counts
            self._insert(sql.REPLACE_BOUNDARY, self._boundaries)

    def _write_parts(self, parts: Mapping[int, Parts], drop: str, add: str) -> None:
        dropped: list[tuple[Any, ...]] = []
        added: list[Any] = []
        for key, part in parts.items():
            for name, value in part.values.items():
                if value is not None:
                    added += (key, name, *value)
                elif not part.cleared:
                    dropped.append((key, name))
        self._many(drop, dropped)
        self._insert(add, added)

    def _insert(self, statement: str, values: list[Any], most_rows: int = MOST_ROWS) -> None:
        insert(self._connection, statement, values, most_rows)

    def _many(self, statement: str, values: list[Any]) -> None:
        if values:
            self._connection.executemany(statement, values)
