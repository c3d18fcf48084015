"""A batch of saves: laid out and written one by one, synced together, acknowledged when the journal is still ours.

Place in the life of an execution: checkpoint, finish. The system calls that do not wait (write, and the looks at names)
stay in the writer's thread, one after another for the whole batch: handing the interpreter from thread to thread costs
more than they do. Writing everything before the first sync also lets the file system commit it in few goes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
    StoreUnavailableError,
    WriteOrderError,
)
from longrun.moves import Move
from longrun.records import ExecutionState
from longrun.stored import Save
from longrun.stores._file import inbox
from longrun.stores._file.contents import CLEARED, INLINE_LIMIT, move_line, save_lines
from longrun.stores._file.disk import UnreadableFileError
from longrun.stores._file.journal import Journal, failed
from longrun.stores._file.mine import Journals
from longrun.stores._file.place import KIND
from longrun.stores._file.reading import locate
from longrun.stores._file.syncing import SyncPool
from longrun.stores._file.tidying import Janitor
from longrun.stores.base import Answer

RUNNING = ExecutionState.RUNNING

ROUNDS = 3
"""How often a save is tried anew because its journal was moved in that moment."""
COMPACT_AT_ONCE = 32


class _StaleError(Exception):
    """The file is not as this process left it: read it again."""


class _Append:
    """What one journal gets in this batch."""

    __slots__ = (
        "about",
        "durable",
        "error",
        "head",
        "journal",
        "lines",
        "mail",
        "n",
        "rings",
        "saves",
        "size",
        "status",
    )

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.head, self.mail, self.n, self.about = journal.head, journal.mail, journal.n, journal.about
        self.lines: list[bytes] = []
        self.saves: list[tuple[int, Save]] = []
        self.size = 0
        self.rings = self.durable = False
        self.status: os.stat_result | None = None
        """The file after all of this."""
        self.error: LongrunError | _StaleError | None = None

    def mend(self) -> None:
        """Put the file right where an earlier write or sync has failed."""
        try:
            if not self.journal.reopen():
                self.error = _StaleError()
            elif self.journal.bad:
                self.journal.mend()
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)

    def write(self, now: float) -> bool:
        """Whether there is something to sync now."""
        journal, lines = self.journal, self.lines
        try:
            if not journal.reopen():
                self.error = _StaleError()
            elif lines:
                data = lines[0] if len(lines) == 1 else b"".join(lines)
                self.size = len(data)
                journal.write(data, now)
                return True
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)
        return False

    def confirm(self, now: float) -> None:
        """Only now that all of it is durable: look whether the journal is still ours."""
        self.durable = bool(self.lines)
        try:
            self.status = self.journal.check_owned()
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)
        else:
            self.journal.seen = now


class Saves:
    """Writes the saves of a batch to the journals that this process owns."""

    def __init__(self, journals: Journals, pool: SyncPool, janitor: Janitor) -> None:
        self._journals, self._pool, self._janitor = journals, pool, janitor
        self._place, self._catalog = journals.place, journals.catalog
        self._grown: dict[str, Journal] = {}

    def save(self, batch: Sequence[tuple[int, Save]], answers: list[Answer]) -> None:
        todo = batch
        self._place.sync_names()
        limit = self._journals.limit
        for _ in range(ROUNDS):
            appends = self._prepare(todo, answers)
            for start in range(0, len(appends), limit):
                self._flush(appends[start : start + limit])
            todo = self._settle(appends, answers)
            if not todo:
                break
        for place, save in todo:
            answers[place] = StoreUnavailableError(KIND, f"the journal of execution {save.id!r} keeps changing")
        self._compact()

    # what is to be written

    def _prepare(self, batch: Sequence[tuple[int, Save]], answers: list[Answer]) -> list[_Append]:
        """Compare each save with what is stored, and lay out its lines. Nothing is written yet."""
        appends: dict[str, _Append] = {}
        for item in batch:
            place, save = item
            append = appends.get(save.id)
            try:
                if append is None or append.head.fence != save.head.fence:
                    append = appends.setdefault(save.id, _Append(self._owned(save)))
                self._lay_out(append, item)
            except LongrunError as error:
                answers[place] = error
            except OSError as error:
                answers[place] = failed(error)
        return list(appends.values())

    def _owned(self, save: Save) -> Journal:
        """The journal of the generation that the save means. One of another is at hand: either of the two is stale."""
        journal = self._journals.get(save.id)
        if journal is not None:
            if journal.head.fence == save.head.fence:
                return journal
            try:
                journal.check_owned()
            except LeaseLostError:
                self._journals.release(save.id)
            else:
                raise LeaseLostError(save.id, save.head.fence)
        return self._journals.attach(save)

    def _lay_out(self, append: _Append, item: tuple[int, Save]) -> None:
        save = item[1]
        stored, head = append.head.revision, save.head
        if stored < head.revision - 1:
            raise self._out_of_order(append.journal, save, stored)
        if stored >= head.revision:
            append.saves.append(item)  # done already; the fence is still to be compared
            return
        if type(save) is Move and len(save.data) <= INLINE_LIMIT:
            append.n += 1
            append.lines.append(move_line(append.journal.identity, append.n, save, append.mail, append.about))
        else:
            self._lay_out_fully(append, save)
        append.saves.append(item)
        append.head = head
        if head.owner is None:
            append.rings = True

    def _lay_out_fully(self, append: _Append, save: Save) -> None:
        cleared = save.head.state in CLEARED
        if save.take or cleared:
            mail = append.mail.copy()
            mail.take(save.take)
            if cleared:
                mail.take_all(self._last_message(append.journal))
            append.mail, append.rings = mail, True
        if save.steps is not None:
            append.about = {"total": len(save.steps), "version": save.version}
        lines = save_lines(append.journal.identity, append.n + 1, save, append.mail, about=append.about)
        append.lines += lines
        append.n += len(lines)

    def _out_of_order(self, journal: Journal, save: Save, stored: int) -> WriteOrderError:
        """A write is missing before this one; but that its owner has lost the execution would count first."""
        try:
            journal.check_owned()
        except LeaseLostError:
            self._journals.release(save.id)
            stored = self._journals.attach(save).head.revision
        return WriteOrderError(KIND, save.id, stored, save.head.revision)

    def _last_message(self, journal: Journal) -> int:
        if self._place.inbox.stat(f"{journal.stem}.jsonl") is None:
            return 0
        try:
            return inbox.read_letters(self._place, _box(journal)).last
        except UnreadableFileError:  # it ends all the same
            with self._catalog.lock:
                entry = self._catalog.entries.by_stem.get(journal.stem)
                return 0 if entry is None else max(entry.inbox.letters, default=0)

    # to the disk

    def _flush(self, chunk: list[_Append]) -> None:
        """Write everything, sync everything, and only then look whether the journals are still ours."""
        now = time.monotonic()
        if bad := [append for append in chunk if append.journal.bad]:
            self._pool.run(_Append.mend, bad)
        try:
            self._sync([append for append in chunk if append.error is None and append.write(now)])
        except BaseException:  # what was written may not be durable, and must not be taken for it when it is read again
            for append in chunk:
                append.journal.bad = append.journal.bad or bool(append.lines)
            raise
        for append in chunk:
            if append.error is None:
                append.confirm(now)
        self._journals.used(append.journal for append in chunk)

    def _sync(self, written: list[_Append]) -> None:
        """A journal for which that fails is bad, and never synced again."""
        if not written:
            return
        errors = self._pool.sync([append.journal.fd for append in written])
        for append, error in zip(written, errors, strict=True):
            if error is not None:
                append.journal.bad = True
                append.error = failed(error)

    # what came of it

    def _settle(self, appends: list[_Append], answers: list[Answer]) -> list[tuple[int, Save]]:
        """Answer what was written; the saves that must be tried anew."""
        again: list[tuple[int, Save]] = []
        with self._catalog.lock:
            for append in appends:
                if append.error is not None:
                    again += self._refuse(append, answers)
                elif append.lines:
                    self._written(append)
                elif append.journal.head.owner is None:
                    self._journals.release(append.journal.id)  # opened to compare, and not ours
        return again

    def _written(self, append: _Append) -> None:
        journal, head = append.journal, append.head
        took = append.mail is not journal.mail
        journal.head, journal.mail, journal.n, journal.about = head, append.mail, append.n, append.about
        journal.size += append.size
        before = journal.saves
        journal.saves = before + len(append.saves)
        self._catalog.saved(journal, head, append.mail, append.status)
        journal.settled()  # not before: a reader sees what a listing says
        if before < 2 <= journal.saves and journal.gen > 0:
            self._janitor.supersedes(journal)
        if append.rings:
            self._journals.changed(journal.name)
        if took and not head.state.finished:
            self._compact_inbox(journal)
        if head.owner is None or (head.state is not RUNNING and head.state.finished):
            self._journals.release(journal.id)
        elif journal.size > journal.limit:
            self._grown[journal.id] = journal

    def _refuse(self, append: _Append, answers: list[Answer]) -> list[tuple[int, Save]]:
        journal, error = append.journal, append.error
        if isinstance(error, StoreUnavailableError):
            for place, _ in append.saves:
                answers[place] = error
            return []
        self._journals.release(journal.id)
        try:
            spot = locate(self._place, journal.id)
            if spot is not None and spot.gen == journal.gen and self._catalog.mail(journal.id, spot)[0] == journal.born:
                return append.saves  # another hand moved the file, or wrote to it: read it again
            if spot is not None and spot.folder is self._place.live:
                self._catalog.find(journal.id, spot.gen)
        except (CorruptDataError, OSError) as trouble:  # for this one alone; the others of the batch go on
            for place, _ in append.saves:
                answers[place] = failed(trouble) if isinstance(trouble, OSError) else trouble
            return []
        if append.durable and append.head.owner is None and journal.was_read(append.head.revision):
            self._journals.changed(journal.name)
            return []  # given back, and taken up from there before the answer came
        for place, save in append.saves:
            answers[place] = (
                ExecutionNotFoundError(save.id) if spot is None else LeaseLostError(save.id, save.head.fence)
            )
        return []

    # journals that grew

    def _compact_inbox(self, journal: Journal) -> None:
        with contextlib.suppress(OSError, StoreUnavailableError):  # it stays long; the next message tries again
            inbox.compact(self._place, _box(journal), journal.mail)

    def _compact(self) -> None:
        if not self._grown:
            return
        grown = [self._grown.popitem()[1] for _ in range(min(COMPACT_AT_ONCE, len(self._grown)))]
        self._pool.run(_try_to_compact, [journal for journal in grown if journal.fd >= 0 and not journal.bad])


def _box(journal: Journal) -> inbox.Box:
    return inbox.box_of(journal.place, journal.stem, journal.id, journal.born)


def _try_to_compact(journal: Journal) -> None:
    with contextlib.suppress(OSError, LongrunError):  # it stays long and whole; the next save tells if it is lost
        journal.compact()
