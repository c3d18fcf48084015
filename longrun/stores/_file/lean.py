"""Moves and ends, which most saves are, to journals that are at hand as this process left them: in fewer steps.

Place in the life of an execution: checkpoint. Written one by one, synced together, acknowledged when the journal is
still ours, as `saves` does it; which is left whatever is not that simple.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TypeGuard

from longrun.errors import LongrunError
from longrun.moves import End, Move
from longrun.stored import Save
from longrun.stores._file.appends import Append, Item, StaleError
from longrun.stores._file.contents import INLINE_LIMIT, move_line
from longrun.stores._file.journal import Journal, failed
from longrun.stores._file.mine import Journals
from longrun.stores._file.syncing import SyncPool

Written = tuple[Item, Journal, int]
"""A move, its journal, and the size of its line."""
Made = tuple[Save, Journal, int, os.stat_result]
"""The same, and the file after it."""


class Lean:
    """The simple moves of one batch."""

    __slots__ = ("_journals", "_now", "_written", "made", "refused", "rest")

    def __init__(self, journals: Journals) -> None:
        self._journals, self._now = journals, time.monotonic()
        self._written: list[Written] = []
        """Nothing is known against these so far."""
        self.made: list[Made] = []
        self.refused: list[Append] = []
        self.rest: list[Item] = []
        """Saves that are not simple, or come behind such a one of their execution."""

    def make(self, batch: Sequence[Item], pool: SyncPool) -> None:
        try:
            self._write(batch)
            if self._written:
                self._sync(pool)
        except BaseException:  # what was written may not be durable, and must not be taken for it when it is read again
            for _, journal, _ in self._written:
                journal.bad = True
            raise
        self._confirm()

    def _write(self, batch: Sequence[Item]) -> None:
        behind: set[str] = set()
        for item in batch:
            save = item[1]
            journal = None if save.id in behind else self._journals.get(save.id)
            if journal is None or not self._append(item, journal):
                self.rest.append(item)
                behind.add(save.id)

    def _append(self, item: Item, journal: Journal) -> bool:
        """Write it; False if it is not simple."""
        save = item[1]
        try:
            if not is_simple(save, journal):
                return False
            if not journal.reopen():
                raise StaleError
            line = move_line(journal.identity, journal.n + 1, save, journal.mail, journal.about)
            journal.write(line, self._now)
        except (LongrunError, OSError, StaleError) as error:
            self.refused.append(refused(item, journal, error))
        else:
            self._written.append((item, journal, len(line)))
        return True

    def _sync(self, pool: SyncPool) -> None:
        """A journal for which that fails is bad, and never synced again."""
        errors = pool.sync([journal.fd for _, journal, _ in self._written])
        if any(errors):
            written, self._written = self._written, []
            for one, error in zip(written, errors, strict=True):
                if error is None:
                    self._written.append(one)
                else:
                    one[1].bad = True
                    self.refused.append(refused(one[0], one[1], error))

    def _confirm(self) -> None:
        """Only now that all of it is durable: look whether the journals are still ours."""
        for item, journal, size in self._written:
            try:
                status = journal.check_owned()
            except (LongrunError, OSError) as error:
                self.refused.append(refused(item, journal, error, durable=True))
            else:
                journal.seen = self._now
                self.made.append((item[1], journal, size, status))


def refused(
    item: Item, journal: Journal, error: LongrunError | OSError | StaleError, *, durable: bool = False
) -> Append:
    """What was to be written, and why it was not."""
    append = Append(journal)
    append.head, append.durable = item[1].head, durable
    append.saves.append(item)
    append.error = failed(error) if isinstance(error, OSError) else error
    return append


def is_simple(save: Save, journal: Journal) -> TypeGuard[Move]:
    """Whether it is a move that goes on from what the journal holds, and nothing is to be done before or besides."""
    stored, head = journal.head, save.head
    return (
        stored.revision == head.revision - 1
        and stored.fence == head.fence
        and (type(save) is Move or (type(save) is End and not journal.has_inbox()))
        and journal.fd >= 0
        and not journal.bad
        and len(save.data) <= INLINE_LIMIT
    )
