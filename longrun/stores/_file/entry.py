"""What this process knows of one execution in live/: definition, head and mail.

Place in the life of an execution: claim, and every listing. There may be a hundred thousand of them that sleep or wait,
so that one which nobody has is kept in little room, and its records are made when they are asked for.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from longrun.records import ExecutionState
from longrun.stored import Definition, Head
from longrun.stores._file.contents import Mail, blocked_head, woken_head
from longrun.stores._file.forms import definition_form, definition_from, head_form, head_from
from longrun.stores._file.lines import dumped, loaded

Mark = bytes
"""Size, time of change, inode, mode and user: what tells a file that changed from one that did not. Packed, since there
is one for every execution."""
_MARK = struct.Struct("=qqQHI")


def mark_of(status: os.stat_result, size: int | None = None) -> Mark:
    """With a `size`, as if the file had that."""
    size = status.st_size if size is None else size
    return _MARK.pack(size, status.st_mtime_ns, status.st_ino, status.st_mode, status.st_uid)


def changed_at(mark: Mark) -> float:
    return float(_MARK.unpack(mark)[1] / 1e9)


_METADATA = b'"metadata":'
"""In the text of records that hold something of a user's."""
_NAMES = "workflow version total created fence revision seq step visit updated due signal progress"
_WORDS = tuple((f'"{name}":'.encode(), bytes([code])) for code, name in enumerate(_NAMES.split(), start=1))
"""Names that the texts of most have, and the control character that stands for each: JSON has none of these."""
Records = tuple[str, Definition, Head]
"""Its birth mark, its definition without the steps, its head."""


class Inbox(NamedTuple):
    """What its inbox shows. Most have none."""

    letters: tuple[int, ...] = ()
    """Numbers of the messages in it, taken or not."""
    mark: Mark | None = None
    closed: str | None = None
    """Why it cannot be opened: until it can, nobody may go on without the messages in there."""


NO_INBOX = Inbox()


class Entry:
    """One execution, as its newest journal and its inbox show it."""

    __slots__ = (*("_records", "gen", "id", "inbox", "mail", "mark", "state", "stem", "unreadable", "wake"),)

    def __init__(
        self,
        stem: str,
        gen: int,
        records: Records,
        mail: Mail,
        mark: Mark | None = None,
        *,
        inbox: Inbox = NO_INBOX,
        unreadable: bool = False,
    ) -> None:
        self.id, self.state = records[1].id, records[2].state
        self.stem = self.id if stem == self.id else stem  # the same text: one string will do
        self.gen, self.mail, self.mark = gen, mail, mark
        self._records: Records | bytes = records
        self.inbox = inbox
        self.wake: float | None = None
        self.unreadable = unreadable
        """It cannot be gone on with: definition and head are what could be saved of them, or stand for them."""

    @property
    def records(self) -> Records:
        return self._unfolded(self._records) if isinstance(self._records, bytes) else self._records

    @records.setter
    def records(self, records: Records) -> None:
        self._records, self.state = records, records[2].state

    def goes_on(self, head: Head) -> bool:
        """Replace the head if its owner stays the same; False if there is none or it changes."""
        records = self._records
        if isinstance(records, bytes):
            return False
        born, definition, before = records
        if before.owner is None or before.owner != head.owner:
            return False
        self._records, self.state = (born, definition, head), head.state
        return True

    @property
    def owner(self) -> str | None:
        return None if isinstance(self._records, bytes) else self._records[2].owner

    @property
    def born(self) -> str:
        return self.records[0]

    @property
    def definition(self) -> Definition:
        return self.records[1]

    @property
    def head(self) -> Head:
        return self.records[2]

    def fold(self) -> None:
        """Nobody has it, and that may stay so for long: keep the records as text, which needs half the room."""
        born, definition, head = self.records
        form = head_form(head)
        del form["state"]  # it has that itself
        text = dumped([born, definition_form(definition), form], ours=not definition.metadata)
        for word, short in _WORDS:
            text = text.replace(word, short)
        self._records = bytes(memoryview(text))  # a copy: what orjson gives lies in more room than it needs

    def _unfolded(self, text: bytes) -> Records:
        for word, short in _WORDS:
            text = text.replace(short, word)
        born, definition, head = loaded(text, ours=_METADATA not in text)
        return born, definition_from(self.id, definition), head_from({**head, "state": self.state})

    @property
    def has_mail(self) -> bool:
        return any(map(self.mail.waits, self.inbox.letters))

    @property
    def shown(self) -> tuple[Definition, Head]:
        """Definition and head as a reader sees them."""
        _, definition, head = self.records
        letters, _, closed = self.inbox
        if closed is not None and not head.state.finished:
            return definition, blocked_head(head, closed)
        return definition, woken_head(head, self.has_mail) if letters and head.owner is None else head

    def may_be(self, states: frozenset[ExecutionState] | None) -> bool:
        """Whether a reader may see it in one of these states."""
        return states is None or self.state in states or self.inbox.closed is not None


def may_leave(one: Head | Entry) -> bool:
    """Whether a journal may be moved to done/: it has ended, and nobody has claimed it for a retry."""
    return one.owner is None and one.state.finished
