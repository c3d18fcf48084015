"""A batch of writes: creations, saves and messages, each made durable before it is acknowledged.

Place in the life of an execution: start, checkpoint, finish. All of it runs in the store's writer thread, which keeps
the journals that this process owns; only the waiting for the disk is spread over the crew.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import attrs

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LeaseLostError,
    LongrunError,
    StoreUnavailableError,
    WriteOrderError,
)
from longrun.stored import Create, Head, Save, Send
from longrun.stores._file import inbox
from longrun.stores._file.births import Birth, Post
from longrun.stores._file.catalog import Catalog
from longrun.stores._file.contents import CLEARED, Mail, save_lines
from longrun.stores._file.crew import Crew
from longrun.stores._file.disk import Folder, UnreadableFileError, write_all
from longrun.stores._file.done import Finished, bring_back, move_away
from longrun.stores._file.entries import Entry
from longrun.stores._file.journal import Journal, Over, failed, remove_locked, remove_older
from longrun.stores._file.lines import fits
from longrun.stores._file.place import KIND, Place, done_name, journal_name, stem_of
from longrun.stores._file.reading import Spot, locate, read_settled, read_summary
from longrun.stores.base import Answer

ROUNDS = 3
"""How often a save is tried anew because its journal was moved in that moment."""
CREATE_CHUNK = 128
COMPACT_AT_ONCE = 32
TIDY_OVER = 64
MOVE_CHUNK = 64

Answers = list[Answer]


class _StaleError(Exception):
    """The file is not as this process left it: read it again."""


@attrs.define(eq=False)
class _Append:
    """What one journal gets in this batch."""

    journal: Journal
    head: Head
    mail: Mail
    n: int
    lines: list[bytes] = attrs.field(factory=list)
    saves: list[tuple[int, Save]] = attrs.field(factory=list)
    rings: bool = False
    size: int = 0
    total: int | None = None
    """How many steps there are, where a save of this batch names them."""
    error: LongrunError | _StaleError | None = None


class Writes:
    """The journals that this process owns, and what it does to them."""

    def __init__(self, place: Place, catalog: Catalog, finished: Finished) -> None:
        self.place, self.catalog, self.finished = place, catalog, finished
        self.crew = Crew()
        self._journals: dict[str, Journal] = {}
        self._open: OrderedDict[str, Journal] = OrderedDict()
        self._over: dict[str, Over] = {}
        self._grown: dict[str, Journal] = {}
        self._janitor = ThreadPoolExecutor(1, thread_name_prefix="longrun-file-tidy")
        self._tidying: Future[None] | None = None
        self._rung: list[str] = []
        self._doubtful: set[Folder] = set()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open_limit = max(16, min(1024, soft // 4))

    @property
    def chunk(self) -> int:
        """How many journals may be opened at once."""
        return self._open_limit

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        self._open.clear()
        self._janitor.shutdown()
        self.crew.close()

    def changed(self, name: str) -> None:
        """Others should look at this journal."""
        self._rung.append(f"live/{name}")

    def ring(self) -> None:
        self.place.ring(dict.fromkeys(self._rung))
        self._rung.clear()

    def _sync_names(self, *folders: Folder) -> None:
        """Make new names durable. Where that failed once, nothing is acknowledged until it has worked."""
        self._doubtful.update(folders)
        for folder in list(self._doubtful):
            folder.sync()
            self._doubtful.discard(folder)

    # journals

    def adopt(self, journal: Journal, entry: Entry) -> None:
        """This process owns the execution from now on."""
        self.release(journal.id)
        self._journals[journal.id] = self._open[journal.id] = journal
        with self.catalog.lock:
            self.catalog.put(entry)
            self.catalog.mine.add(journal.stem)
        self._rung.append(f"live/{journal.name}")

    def release(self, id: str) -> None:
        journal = self._journals.pop(id, None)
        if journal is not None:
            self._open.pop(id, None)
            journal.close()
            with self.catalog.lock:
                self.catalog.mine.discard(journal.stem)
                journal.settled()

    def shrink(self) -> None:
        """Keep the number of open files within its bound."""
        while len(self._open) > self._open_limit:
            self._open.popitem(last=False)[1].close()

    def _attach(self, save: Save) -> Journal:
        """Open the journal of an execution that this process owns and has not written to yet."""
        spot = locate(self.place, save.id)
        if spot is not None and spot.folder is self.place.done:
            self.bring_back(save.id)
            spot = locate(self.place, save.id)
        if spot is None:
            raise ExecutionNotFoundError(save.id)
        fd = self.place.live.open(spot.name, os.O_RDWR | os.O_APPEND)
        try:
            journal = self._attached(save, spot, fd)
        except BaseException:
            self.place.disk.close(fd)
            raise
        self._journals[save.id] = journal
        with self.catalog.lock:
            self.catalog.find(save.id, spot.gen)
            self.catalog.mine.add(journal.stem)
        return journal

    def _attached(self, save: Save, spot: Spot, fd: int) -> Journal:
        summary = read_summary(self.place, spot, None)
        if summary is not None:
            head, mail, tail, born = summary.head, summary.mail, summary.tail, summary.born
            definition = summary.definition
        else:
            contents, tail = read_settled(self.place, save.id, spot)
            (head, definition), mail, born = contents.found(), contents.mail, contents.born
        if head.fence != save.head.fence:
            raise LeaseLostError(save.id, save.head.fence)
        size = tail.end if tail.clean else self._close_end(fd, spot, tail.end)
        journal = Journal(self.place, save.id, spot.gen, fd, born=born, head=head, mail=mail, n=tail.n, size=size)
        journal.total = definition.total
        return journal

    def _close_end(self, fd: int, spot: Spot, end: int) -> int:
        """Cut off a write that a crash left half done; one that only lacks its newline gets it."""
        rest = spot.folder.read(spot.name, end)
        if fits(rest):
            write_all(self.place.disk, fd, b"\n")
            return end + len(rest) + 1
        whole = rest[:-1] + b"\n" if fits(rest[:-1]) else b""
        self.place.disk.truncate(fd, end)
        write_all(self.place.disk, fd, whole)
        return end + len(whole)

    def bring_back(self, id: str) -> None:
        with self.place.locked():
            spot = locate(self.place, id)
            if spot is not None and spot.folder is self.place.done:
                bring_back(self.place, self.finished, id, spot.gen)

    # saves

    def save(self, batch: Sequence[tuple[int, Save]], answers: Answers) -> None:
        todo = batch
        self._sync_names()
        for _ in range(ROUNDS):
            appends = self._prepare(todo, answers)
            for start in range(0, len(appends), self._open_limit):
                chunk = appends[start : start + self._open_limit]
                self.crew.run(self._flush, chunk)
                self._opened(chunk)
            todo = self._settle(appends, answers)
            if not todo:
                break
        for place, save in todo:
            answers[place] = StoreUnavailableError(KIND, f"the journal of execution {save.id!r} keeps changing")
        self._compact()

    def _prepare(self, batch: Sequence[tuple[int, Save]], answers: Answers) -> list[_Append]:
        """Compare each save with what is stored, and lay out its lines. Nothing is written yet."""
        appends: dict[str, _Append] = {}
        for place, save in batch:
            append = appends.get(save.id)
            if append is None or append.head.fence != save.head.fence:
                try:
                    journal = self._journals.get(save.id)
                    if journal is None or journal.head.fence != save.head.fence:
                        self._check_fence(journal, save)
                        journal = self._attach(save)
                except LongrunError as error:
                    answers[place] = error
                    continue
                except OSError as error:
                    answers[place] = failed(error)
                    continue
                append = _Append(journal, journal.head, journal.mail, journal.n, total=journal.total)
                append = appends.setdefault(save.id, append)
            self._lay_out(append, place, save, answers)
        return list(appends.values())

    def _check_fence(self, journal: Journal | None, save: Save) -> None:
        """A journal of another generation is at hand: either the save is stale, or the journal is."""
        if journal is not None:
            try:
                journal.check_owned()
            except LeaseLostError:
                self.release(save.id)
            else:
                raise LeaseLostError(save.id, save.head.fence)

    def _lay_out(self, append: _Append, place: int, save: Save, answers: Answers) -> None:
        stored, head = append.head.revision, save.head
        if stored < head.revision - 1:
            answers[place] = self._out_of_order(append.journal, save, stored)
            return
        append.saves.append((place, save))
        if stored >= head.revision:
            return  # done already; the fence is still to be compared
        if save.take or head.state in CLEARED:
            append.mail = append.mail.copy()
            append.mail.take(save.take)
            if head.state in CLEARED:
                append.mail.take_all(self._last_message(append.journal))
            append.rings = True
        if save.steps is not None:
            append.total = len(save.steps)
        lines = save_lines(append.journal.identity, append.n + 1, save, append.mail, total=append.total)
        append.lines += lines
        append.n += len(lines)
        append.head = head
        append.rings = append.rings or head.owner is None

    def _out_of_order(self, journal: Journal, save: Save, stored: int) -> LongrunError:
        """A write is missing before this one; but that its owner has lost the execution would count first."""
        try:
            try:
                journal.check_owned()
            except LeaseLostError:
                self.release(save.id)
                stored = self._attach(save).head.revision
        except LongrunError as error:
            return error
        except OSError as error:
            return failed(error)
        return WriteOrderError(KIND, save.id, stored, save.head.revision)

    def _last_message(self, journal: Journal) -> int:
        if self.place.inbox.stat(f"{journal.stem}.jsonl") is None:
            return 0
        with self.catalog.lock:
            entry = self.catalog.entries.by_stem[journal.stem]
        try:
            return inbox.read_letters(self.place, inbox.box_of(self.place, entry.stem, entry.id, entry.born)).last
        except UnreadableFileError:  # it ends all the same
            return max(entry.letters, default=0)

    def _flush(self, append: _Append) -> None:
        """Write, sync, and only then look whether the journal is still ours. Runs in a thread of the crew."""
        journal = append.journal
        try:
            if not journal.reopen():
                raise _StaleError
            if journal.bad:
                journal.mend()
            if append.lines:
                journal.check_newest()
                data = b"".join(append.lines)
                append.size = len(data)
                journal.append(data)
            journal.check_owned()
        except (LongrunError, _StaleError) as error:
            append.error = error
        except OSError as error:
            append.error = failed(error)

    def _opened(self, chunk: Iterable[_Append]) -> None:
        for append in chunk:
            id = append.journal.id
            if append.journal.fd >= 0:
                self._open[id] = append.journal
                self._open.move_to_end(id)
        self.shrink()

    def _settle(self, appends: list[_Append], answers: Answers) -> list[tuple[int, Save]]:
        """Answer what was written; the saves that must be tried anew."""
        again: list[tuple[int, Save]] = []
        with self.catalog.lock:
            for append in appends:
                if append.error is not None:
                    again += self._refuse(append, answers)
                elif append.lines:
                    self._written(append)
                elif append.journal.head.owner is None:
                    self.release(append.journal.id)  # opened to compare, and not ours
        return again

    def _written(self, append: _Append) -> None:
        journal, head = append.journal, append.head
        took = append.mail is not journal.mail
        journal.head, journal.mail, journal.n, journal.total = head, append.mail, append.n, append.total
        journal.size += append.size
        journal.saves += len(append.saves)
        self.catalog.saved(journal, head, append.mail, append.total)
        journal.settled()  # not before: a reader sees what a listing says
        if journal.gen > 0 and journal.saves >= 2 and journal.saves - len(append.saves) < 2:
            self._over[journal.id] = Over(journal.id, journal.gen, journal.ino)
        if append.rings:
            self._rung.append(f"live/{journal.name}")
        if took and not head.state.finished:
            self._compact_inbox(journal)
        if head.owner is None or head.state.finished:
            self.release(journal.id)
        elif journal.size > journal.limit:
            self._grown[journal.id] = journal

    def _refuse(self, append: _Append, answers: Answers) -> list[tuple[int, Save]]:
        journal, error = append.journal, append.error
        if isinstance(error, StoreUnavailableError):
            for place, _ in append.saves:
                answers[place] = error
            return []
        self.release(journal.id)
        spot = locate(self.place, journal.id)
        try:
            if spot is not None and spot.gen == journal.gen and self._mail(journal.id, spot)[0] == journal.born:
                return append.saves  # another hand moved the file, or wrote to it: read it again
        except CorruptDataError as damage:  # for this one alone; the others of the batch go on
            for place, _ in append.saves:
                answers[place] = damage
            return []
        if spot is not None and spot.folder is self.place.live:
            self.catalog.find(journal.id, spot.gen)
        for place, save in append.saves:
            answers[place] = (
                ExecutionNotFoundError(save.id) if spot is None else LeaseLostError(save.id, save.head.fence)
            )
        return []

    def _compact_inbox(self, journal: Journal) -> None:
        entry = self.catalog.entries.by_stem.get(journal.stem)
        if entry is not None:
            with contextlib.suppress(OSError, StoreUnavailableError):  # it stays long; the next message tries again
                inbox.compact(self.place, inbox.box_of(self.place, entry.stem, entry.id, entry.born), journal.mail)

    def _compact(self) -> None:
        grown = [self._grown.popitem()[1] for _ in range(min(COMPACT_AT_ONCE, len(self._grown)))]
        self.crew.run(_try_to_compact, [journal for journal in grown if journal.fd >= 0 and not journal.bad])

    # creations

    def create(self, batch: Sequence[tuple[int, Create]], answers: Answers) -> None:
        fresh: dict[str, tuple[int, Create]] = {}
        for place, create in batch:
            if create.id in fresh or self._taken(create.id):
                answers[place] = False
            else:
                fresh[create.id] = (place, create)
        items = list(fresh.values())
        size = min(CREATE_CHUNK, self._open_limit)
        for start in range(0, len(items), size):
            self._create_chunk([Birth(*item) for item in items[start : start + size]], answers)
        if items:
            self._sync_names(self.place.live)

    def _taken(self, id: str) -> bool:
        """Whether an execution has the id; clears away what a crash in the middle of its deletion left."""
        stem = stem_of(id)
        if self.place.live.stat(journal_name(stem, 0)) is None:
            return self.place.done.stat(done_name(stem)) is not None
        if locate(self.place, id) is not None:
            return True
        with self.place.locked():
            return locate(self.place, id) is not None or not remove_locked(self.place, stem, 0)

    def _create_chunk(self, births: list[Birth], answers: Answers) -> None:
        self.crew.run(lambda birth: birth.prepare(self.place), births)
        with self.place.locked(shared=True):
            for birth in births:
                answers[birth.where] = birth.publish(self.place)
        for birth in births:
            if birth.journal is not None and answers[birth.where] is True:
                self.adopt(birth.journal, birth.entry)
            elif answers[birth.where] is True:
                self.catalog.put(birth.entry)
                self._rung.append(f"live/{journal_name(birth.entry.stem, 0)}")
        self.shrink()

    # messages

    def send(self, batch: Sequence[tuple[int, Send]], answers: Answers) -> None:
        by_id: dict[str, list[tuple[int, Send]]] = {}
        for place, send in batch:
            by_id.setdefault(send.id, []).append((place, send))
        with self.place.locked(shared=True):
            posts = [post for id, sends in by_id.items() if (post := self._address(id, sends, answers)) is not None]
            self.crew.run(lambda post: post.deliver(self.place), posts)
            self._sync_names(*[post.box.folder for post in posts if post.new])
        for post in posts:
            for (where, _), answer in zip(post.sends, post.answers, strict=True):
                answers[where] = answer
            self._rung.append(f"inbox/{post.box.name}")

    def _address(self, id: str, sends: list[tuple[int, Send]], answers: Answers) -> Post | None:
        try:
            spot = locate(self.place, id)
            if spot is None:
                raise ExecutionNotFoundError(id)
            born, mail = self._mail(id, spot)
            box = inbox.box_of(self.place, spot.stem, id, born, done=spot.folder is self.place.done)
            status = box.folder.stat(box.name)
            return Post(box, sends, mail, status is None or status.st_size == 0)
        except LongrunError as error:
            for where, _ in sends:
                answers[where] = error
        except OSError as error:
            for where, _ in sends:
                answers[where] = failed(error)
        return None

    def _mail(self, id: str, spot: Spot) -> tuple[str, Mail]:
        if spot.folder is self.place.live:
            entry = self.catalog.find(id, spot.gen)
            if entry is not None and not entry.unreadable:
                return entry.born, entry.mail
        contents, _ = read_settled(self.place, id, spot)
        return contents.born, contents.mail

    # what can wait

    def tidy_soon(self, *, least: int = TIDY_OVER) -> None:
        """Start tidying in a thread of its own, when enough has come together."""
        if len(self._over) < least and len(self.catalog.finished) < least:
            return
        if self._tidying is None or self._tidying.done():
            over, self._over = self._over, {}
            self._tidying = self._janitor.submit(self._tidy, over)

    def tidy(self) -> None:
        """Do all of it now."""
        if self._tidying is not None:
            self._tidying.result()
        over, self._over = self._over, {}
        self._tidy(over)

    def _tidy(self, over: dict[str, Over]) -> None:
        """Remove old generations and move finished journals away. What fails stays where it is, for another time."""
        with contextlib.suppress(OSError, LongrunError):
            if over:
                with self.place.locked(shared=True):
                    remove_older(self.place, self.crew, over.values())
            with self.catalog.lock:
                ended = list(self.catalog.finished.values())
            for start in range(0, len(ended), MOVE_CHUNK):
                for entry in move_away(self.place, self.crew, self.finished, ended[start : start + MOVE_CHUNK]):
                    self.catalog.moved(entry)


def _try_to_compact(journal: Journal) -> None:
    with contextlib.suppress(OSError, LongrunError):  # it stays long and whole; the next save tells if it is lost
        journal.compact()
