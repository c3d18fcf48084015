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
from longrun.stores._file.appends import Append, Item
from longrun.stores._file.contents import CLEARED, INLINE_LIMIT, move_line, save_lines
from longrun.stores._file.disk import UnreadableFileError
from longrun.stores._file.journal import Journal, failed
from longrun.stores._file.lean import Lean, is_simple, refused
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


class Saves:
    """Writes the saves of a batch to the journals that this process owns."""

    def __init__(self, journals: Journals, pool: SyncPool, janitor: Janitor) -> None:
        self._journals, self._pool, self._janitor = journals, pool, janitor
        self._place, self._catalog = journals.place, journals.catalog
        self._grown: dict[str, Journal] = {}

    def save(self, batch: Sequence[Item], answers: list[Answer]) -> None:
        self._place.sync_names()
        if len(batch) > 1 or not self._move_one(batch[0], answers):
            todo = self._move(batch, answers)
            if todo:
                self._save(todo, answers)
        if self._grown:
            self._compact()

    def _move_one(self, item: Item, answers: list[Answer]) -> bool:
        """All of it in one go, for a simple move that has come alone; False if it is not done with."""
        move = item[1]
        journal = self._journals.get(move.id)
        if journal is None or not is_simple(move, journal):
            return False
        now, durable = time.monotonic(), False
        line = move_line(journal.identity, journal.n + 1, move, journal.mail, journal.about)
        try:
            if not journal.reopen():
                return False
            journal.write(line, now)
            journal.sync()
            durable = True
            status = journal.check_owned()
        except (LongrunError, OSError) as error:
            with self._catalog.lock:
                return not self._refuse(refused(item, journal, error, durable=durable), answers)
        journal.seen = now
        with self._catalog.lock:
            self._made(move, journal, len(line), status)
        return True

    def _move(self, batch: Sequence[Item], answers: list[Answer]) -> list[Item]:
        """Make the simple moves; what is left to do, in its order."""
        lean = Lean(self._journals)
        lean.make(batch, self._pool)
        with self._catalog.lock:
            for made in lean.made:
                self._made(*made)
            return self._again(lean, answers) if lean.refused else lean.rest

    def _made(self, move: Save, journal: Journal, size: int, status: os.stat_result) -> None:
        journal.head = head = move.head
        journal.n += 1
        journal.size += size
        if head.owner is not None:
            self._catalog.went_on(journal)
            self._settled(journal, 1)
        else:
            self._catalog.saved(journal, head, journal.mail, status)
            self._settled(journal, 1)
            self._journals.changed(journal.name)
            self._journals.release(journal.id)

    def _again(self, lean: Lean, answers: list[Answer]) -> list[Item]:
        """What was refused takes with it what comes behind it."""
        again: list[Item] = []
        for append in lean.refused:
            behind = [item for item in lean.rest if item[1].id == append.journal.id]
            lean.rest = [item for item in lean.rest if item not in behind]
            append.saves += behind
            again += self._refuse(append, answers)
        return again + lean.rest

    def _save(self, todo: Sequence[Item], answers: list[Answer]) -> None:
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

    # what is to be written

    def _prepare(self, batch: Sequence[Item], answers: list[Answer]) -> list[Append]:
        """Compare each save with what is stored, and lay out its lines. Nothing is written yet."""
        appends: dict[str, Append] = {}
        for item in batch:
            place, save = item
            append = appends.get(save.id)
            try:
                if append is None or append.head.fence != save.head.fence:
                    append = appends.setdefault(save.id, Append(self._owned(save)))
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

    def _lay_out(self, append: Append, item: Item) -> None:
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

    def _lay_out_fully(self, append: Append, save: Save) -> None:
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
        if not journal.has_inbox():
            return 0
        try:
            return inbox.read_letters(self._place, _box(journal)).last
        except UnreadableFileError:  # it ends all the same
            with self._catalog.lock:
                entry = self._catalog.entries.by_stem.get(journal.stem)
                return 0 if entry is None else max(entry.inbox.letters, default=0)

    # to the disk

    def _flush(self, chunk: list[Append]) -> None:
        """Write everything, sync everything, and only then look whether the journals are still ours."""
        now = time.monotonic()
        if bad := [append for append in chunk if append.journal.bad]:
            self._pool.run(Append.mend, bad)
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

    def _sync(self, written: list[Append]) -> None:
        """A journal for which that fails is bad, and never synced again."""
        if not written:
            return
        errors = self._pool.sync([append.journal.fd for append in written])
        for append, error in zip(written, errors, strict=True):
            if error is not None:
                append.journal.bad = True
                append.error = failed(error)

    # what came of it

    def _settle(self, appends: list[Append], answers: list[Answer]) -> list[Item]:
        """Answer what was written; the saves that must be tried anew."""
        again: list[Item] = []
        with self._catalog.lock:
            for append in appends:
                if append.error is not None:
                    again += self._refuse(append, answers)
                elif append.lines:
                    self._written(append)
                elif append.journal.head.owner is None:
                    self._journals.release(append.journal.id)  # opened to compare, and not ours
        return again

    def _written(self, append: Append) -> None:
        journal, head = append.journal, append.head
        took = append.mail is not journal.mail
        journal.head, journal.mail, journal.n, journal.about = head, append.mail, append.n, append.about
        journal.size += append.size
        self._catalog.saved(journal, head, append.mail, append.status)
        self._settled(journal, len(append.saves))
        if append.rings:
            self._journals.changed(journal.name)
        if took and not head.state.finished:
            self._compact_inbox(journal)
        if head.owner is None or (head.state is not RUNNING and head.state.finished):
            self._journals.release(journal.id)

    def _settled(self, journal: Journal, saves: int) -> None:
        """Only now that a listing says so, readers see it too."""
        journal.settled()
        before = journal.saves
        journal.saves = before + saves
        if before < 2 <= journal.saves and journal.gen > 0:
            self._janitor.supersedes(journal)
        if journal.size > journal.limit:
            self._grown[journal.id] = journal

    def _refuse(self, append: Append, answers: list[Answer]) -> list[Item]:
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
        grown = [self._grown.popitem()[1] for _ in range(min(COMPACT_AT_ONCE, len(self._grown)))]
        self._pool.run(_try_to_compact, [journal for journal in grown if journal.fd >= 0 and not journal.bad])


def _box(journal: Journal) -> inbox.Box:
    return inbox.box_of(journal.place, journal.stem, journal.id, journal.born)


def _try_to_compact(journal: Journal) -> None:
    with contextlib.suppress(OSError, LongrunError):  # it stays long and whole; the next save tells if it is lost
        journal.compact()
