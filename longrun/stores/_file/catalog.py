"""Keeps what is known of live executions up with what other processes do, without reading states.

Place in the life of an execution: claim, and every listing. Others ring the bell with the names of files that changed;
that is enough to claim by. Whoever lists looks at every file's size as well, and so does a claim now and then, since a
process may die between a write and the bell. Journals that this process owns need no look: it wrote them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import attrs

from longrun.errors import CorruptDataError
from longrun.logging import Log
from longrun.stored import Head, Message, Query
from longrun.stores._file.contents import Contents, Mail, remains
from longrun.stores._file.disk import UnreadableFileError
from longrun.stores._file.entries import Entries, is_about_records
from longrun.stores._file.entry import NO_INBOX, Entry, Inbox, Mark, changed_at, mark_of, may_leave
from longrun.stores._file.inbox import box_of, read_letters, read_tally
from longrun.stores._file.journal import Journal
from longrun.stores._file.place import EVERYTHING, Place, journal_name, parse_journal_name, stem_of
from longrun.stores._file.reading import (
    Spot,
    id_in,
    locate,
    locate_stem,
    read_settled,
    read_spot,
    read_summary,
    with_next_step,
)

LOOK_AGAIN = 2.0
"""Seconds after which a claim begins to look at every file, bell or not."""
SHARE = 20
"""Where there are so many files that this takes long: after so many times as long, so that it stays a small share."""
SLICE = 0.05
"""Seconds of it at once: what is due meanwhile need not wait until all files have been looked at."""


class Catalog:
    """All live executions. Every method is safe from any thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.lock = threading.RLock()
        self.entries = Entries()
        self.mine: set[str] = set()
        """Names of journals that this process writes to."""
        self.in_place: Callable[[Entry], bool] = lambda entry: True
        """Whether the journal of one of those is still the one that is written to."""
        self.finished: dict[str, Entry] = {}
        """Found finished, and not yet moved away."""
        self._told: set[tuple[str, int]] = set()
        """Journals that were reported as unreadable."""
        self._log = Log()
        self._heard = 0
        """How far the bell was read."""
        self._unheard: dict[str, None] = {}
        """Files that were rung for, or that we are not sure of, until they could be looked at."""
        self._look_at: float | None = None
        """When every file is to be looked at again; None before the first look."""
        self._looking: Iterator[None] | None = None
        """The look at every file that is under way."""
        self._looked = 0.0
        """Seconds that it has taken so far."""

    # keeping up

    def listen(self) -> None:
        """Take in what was rung; look at more of the files if that is due."""
        with self.lock:
            size = self._place.bell()
            if size < self._heard or self._look_at is None:
                self.look()
                return
            if time.monotonic() > self._look_at:
                self._look_on(SLICE)
            if size > self._heard:
                self._heard, names = self._place.rung(self._heard)
                self._unheard.update(dict.fromkeys(names))
            if EVERYTHING in self._unheard:
                self.look()
            for name in list(self._unheard):
                self._hear(name)
                del self._unheard[name]

    def doubt(self, name: str) -> None:
        """A journal may be there or not, since the disk failed: whoever asks next has it looked at first."""
        with self.lock:
            self._unheard[f"live/{name}"] = None

    def look_at(self, owner: str) -> None:
        """Compare the files of one owner, which rings no bell while it goes on owning them."""
        with self.lock:
            for entry in self.entries.owned_by(owner):
                self._update(entry.stem, entry.gen)

    def look_for(self, query: Query) -> None:
        """Be up to date for a listing. What the executors ask for again and again is told by the bell."""
        with self.lock:
            if query.owner is not None:
                self.listen()
                self.look_at(query.owner)
            elif is_about_records(query):
                self.listen()
            elif query.owned is not None:
                self.listen()
                for owner in self.entries.owners() if query.owned else ():
                    self.look_at(owner)
            else:
                self.look()

    def look(self) -> None:
        """Compare every file with what is known of it."""
        with self.lock:
            heard = self._place.bell()
            self._looking = None
            self._look_on(math.inf)
            self._heard = heard
            self._unheard.clear()

    def _look_on(self, seconds: float) -> None:
        """Begin to look at every file, or go on with it, for so long."""
        began = time.monotonic()
        if self._looking is None:
            self._looking, self._looked = self._look(), 0.0
        looking, self._looking = self._looking, None  # one that fails is not gone on with
        for _ in looking:
            if time.monotonic() - began > seconds:
                self._looked += time.monotonic() - began
                self._looking = looking
                return
        now = time.monotonic()
        self._look_at = now + max(LOOK_AGAIN, SHARE * (self._looked + now - began))

    def _look(self) -> Iterator[None]:
        """One file after the other. In between others may be heard of: what the names say may be out of date then."""
        newest: dict[str, int] = {}
        for name in self._place.live.names():
            parsed = parse_journal_name(name)
            if parsed is not None and newest.get(parsed[0], -1) < parsed[1]:
                newest[parsed[0]] = parsed[1]
            yield
        for stem, known in [(stem, known) for stem, known in self.entries.by_stem.items() if stem not in newest]:
            if self._place.live.stat(journal_name(stem, known.gen)) is None:
                self.forget(stem)
            yield
        for stem, gen in newest.items():
            self._update_newer(stem, gen)
            yield
        self._told = {(stem, gen) for stem, gen in self._told if stem in newest}
        self._look_at_inboxes()

    def _look_at_inboxes(self) -> None:
        found: set[str] = set()
        for name in self._place.inbox.names():
            stem = name.removesuffix(".jsonl")
            found.add(stem)
            self._update_inbox(stem)
        for entry in list(self.entries.by_stem.values()):
            if entry.inbox is not NO_INBOX and entry.stem not in found:
                self.entries.mailed(entry, NO_INBOX)

    def _hear(self, name: str) -> None:
        folder, _, name = name.partition("/")
        if folder == "inbox":
            self._update_inbox(name.removesuffix(".jsonl"))
        elif folder == "live" and (parsed := parse_journal_name(name)) is not None:
            self._update_newer(*parsed)
            self._update_inbox(parsed[0])

    def _update_newer(self, stem: str, gen: int) -> None:
        """As `_update`, where a newer generation than this one may be known already. If that is gone, it is deleted,
        also if it was ours, and this is a new one of its id."""
        known = self.entries.by_stem.get(stem)
        if known is not None and known.gen > gen:
            if self._place.live.stat(journal_name(stem, known.gen)) is not None:
                gen = known.gen
            else:
                self.forget(stem)
        self._update(stem, gen)

    def _update(self, stem: str, gen: int) -> Entry | None:
        """Read a journal's ends again if it changed."""
        known = self.entries.by_stem.get(stem)
        if known is not None and known.gen == gen and stem in self.mine and self.in_place(known):
            return known
        status = self._place.live.stat(journal_name(stem, gen))
        if status is None:
            if known is not None and known.gen == gen:
                self.forget(stem)
            return None
        mark = mark_of(status)
        if known is not None and known.gen == gen and known.mark == mark:
            return known
        self.mine.discard(stem)  # another generation, or another file: it changed hands
        spot = Spot(self._place.live, stem, gen, journal_name(stem, gen))
        try:
            entry = self._read(spot, mark)
        except FileNotFoundError:
            return self._follow(spot)
        self.put(entry)
        return entry

    def _follow(self, spot: Spot) -> Entry | None:
        """A journal was over, or gone, when it was to be read."""
        newest = locate_stem(self._place, spot.stem)
        if newest is None or newest.folder is not self._place.live:
            self.forget(spot.stem)
            return None
        return self._update(newest.stem, newest.gen) if newest.gen != spot.gen else None

    def _read(self, spot: Spot, mark: Mark) -> Entry:
        summary = read_summary(self._place, spot)
        if summary is not None:
            return Entry(spot.stem, spot.gen, (summary.born, summary.definition, summary.head), summary.mail, mark)
        contents = Contents(id_in(spot))
        try:
            contents, _ = read_spot(self._place, contents.id, spot)
            contents.settle()
        except CorruptDataError as error:
            return self._unreadable(spot, contents, error, mark)
        head, definition = contents.found()
        return Entry(spot.stem, spot.gen, (contents.born, definition, head), contents.mail, mark)

    def _unreadable(self, spot: Spot, contents: Contents, error: CorruptDataError, mark: Mark) -> Entry:
        """Nobody can go on with it, but it is not lost: it is listed, its bytes are kept, and it can be deleted. What
        only cannot be opened is tried again at every look."""
        closed = isinstance(error, UnreadableFileError)
        error = with_next_step(self._place, spot, error)
        if (spot.stem, spot.gen) not in self._told:
            self._told.add((spot.stem, spot.gen))
            self._log.error("store.unreadable", execution=contents.id, file=f"live/{spot.name}", problem=str(error))
        definition, head = remains(contents, str(error), changed_at(mark))
        known = None if closed else mark
        return Entry(spot.stem, spot.gen, (contents.born, definition, head), contents.mail, known, unreadable=True)

    def _update_inbox(self, stem: str) -> None:
        entry = self.entries.by_stem.get(stem)
        if entry is None or entry.unreadable:
            return
        box = box_of(self._place, stem, entry.id, entry.born)
        status = self._place.inbox.stat(box.name)
        if status is None:
            if entry.inbox is not NO_INBOX:
                self.entries.mailed(entry, NO_INBOX)
        elif mark_of(status) != entry.inbox.mark:
            try:
                tally = read_tally(self._place, box, status)
            except UnreadableFileError as error:
                self._tell_closed(entry, box.name, error)
                return
            self.entries.mailed(entry, Inbox(tuple(tally.numbers), mark_of(status, tally.size)))

    def _tell_closed(self, entry: Entry, name: str, error: UnreadableFileError) -> None:
        if entry.inbox.closed is None:
            self._log.error("store.unreadable", execution=entry.id, file=f"inbox/{name}", problem=str(error))
        self.entries.mailed(entry, Inbox(entry.inbox.letters, closed=str(error)))

    # what this process does itself

    def put(self, entry: Entry) -> None:
        with self.lock:
            self.entries.put(entry)
            if may_leave(entry) and not entry.unreadable:
                self.finished[entry.stem] = entry
            else:
                self.finished.pop(entry.stem, None)

    def forget(self, stem: str) -> None:
        with self.lock:
            self.entries.drop(stem)
            self.finished.pop(stem, None)
            self.mine.discard(stem)

    def moved(self, entry: Entry) -> None:
        """Its journal left live/, unless it changed hands meanwhile."""
        with self.lock:
            if self.entries.by_stem.get(entry.stem) is entry:
                self.forget(entry.stem)
            elif self.finished.get(entry.stem) is entry:
                del self.finished[entry.stem]

    def saved(self, journal: Journal, head: Head, mail: Mail, status: os.stat_result | None) -> None:
        """This process wrote a journal that it owned, and knows how it left the file. The caller holds the lock."""
        entry = self.entries.by_stem.get(journal.stem)
        if entry is None or entry.gen != journal.gen:
            return  # somebody took it over in this moment; the file was read again
        if journal.about:
            born, definition, before = entry.records
            if any(getattr(definition, name) != value for name, value in journal.about.items()):
                entry.records = (born, attrs.evolve(definition, **journal.about), before)
        self.entries.saved(entry, head, mail)
        entry.mark = None
        if head.owner is None and status is not None and status.st_size == journal.size:
            entry.mark = mark_of(status)  # until others write there, nothing need be read again
        if may_leave(head):
            self.finished[entry.stem] = entry
        elif self.finished:
            self.finished.pop(entry.stem, None)

    def went_on(self, journal: Journal) -> None:
        """The same where nothing but the head of an execution changed that it has already."""
        entry = self.entries.by_stem.get(journal.stem)
        if entry is None or entry.gen != journal.gen or not entry.goes_on(journal.head):
            self.saved(journal, journal.head, journal.mail, None)
        else:
            entry.mark = None

    def locate(self, id: str) -> Spot | None:
        """Where an execution's newest journal is; also one whose first journal is lost, which only a listing shows."""
        spot = locate(self._place, id)
        if spot is not None:
            return spot
        with self.lock:
            self.listen()
            entry = self.entries.by_stem.get(stem_of(id))
        if entry is None or self._place.live.stat(journal_name(entry.stem, entry.gen)) is None:
            return None
        return Spot(self._place.live, entry.stem, entry.gen, journal_name(entry.stem, entry.gen))

    def find(self, id: str, gen: int) -> Entry | None:
        """The entry of a journal that was located just now."""
        with self.lock:
            stem = stem_of(id)
            entry = self._update(stem, gen)
            if entry is not None:
                self._update_inbox(stem)
            return entry

    def current(self, id: str) -> Entry | None:
        """The entry of an execution whose journal is as it was when it was read, and the newest one; None where it must
        be located anew."""
        with self.lock:
            entry = self.entries.by_stem.get(stem_of(id))
            if entry is None or entry.mark is None or entry.id != id:
                return None
            live = self._place.live
            status = live.stat(journal_name(entry.stem, entry.gen))
            if status is None or mark_of(status) != entry.mark:
                return None
            if live.stat(journal_name(entry.stem, entry.gen + 1)) is not None:
                return None
            self._update_inbox(entry.stem)
            return entry

    def head(self, id: str) -> Head | None:
        """As a listing shows it; None where only a full reading can tell."""
        with self.lock:
            entry = self.current(id)
            if entry is None:
                spot = self.locate(id)
                entry = self.find(id, spot.gen) if spot is not None and spot.folder is self._place.live else None
            return None if entry is None or entry.unreadable or entry.inbox.closed is not None else entry.shown[1]

    def mail(self, id: str, spot: Spot) -> tuple[str, Mail]:
        """The birth mark of an execution that was located just now, and which of its messages were taken."""
        if spot.folder is self._place.live:
            entry = self.find(id, spot.gen)
            if entry is not None and not entry.unreadable:
                return entry.born, entry.mail
        contents, _ = read_settled(self._place, id, spot)
        return contents.born, contents.mail

    def letters(self, entry: Entry) -> list[Message]:
        return list(read_letters(self._place, box_of(self._place, entry.stem, entry.id, entry.born)).messages.values())
