"""Keeps what is known of live executions up with what other processes do, without reading states.

Place in the life of an execution: claim, and every listing. Others ring the bell with the names of files that changed;
that is enough to claim by. Whoever lists looks at every file's size as well, and so does a claim now and then, since a
process may die between a write and the bell. Journals that this process owns need no look: it wrote them.
"""

from __future__ import annotations

import os
import threading
import time

import attrs

from longrun.errors import CorruptDataError
from longrun.stored import Head, Message
from longrun.stores._file.contents import Mail
from longrun.stores._file.entries import Entries, Entry, Mark
from longrun.stores._file.inbox import box_of, read_letters
from longrun.stores._file.journal import Journal
from longrun.stores._file.lines import BrokenLineError, identity_of
from longrun.stores._file.place import EVERYTHING, Place, journal_name, parse_journal_name, stem_of
from longrun.stores._file.reading import Spot, read_spot, read_summary

LOOK_AGAIN = 2.0
"""Seconds after which a claim looks at every file, bell or not."""


def mark_of(status: os.stat_result) -> Mark:
    return status.st_size, status.st_mtime_ns, status.st_ino


class Catalog:
    """All live executions. Every method is safe from any thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.lock = threading.RLock()
        self.entries = Entries()
        self.mine: set[str] = set()
        """Names of journals that this process writes to."""
        self.finished: dict[str, Entry] = {}
        """Found finished, and not yet moved away."""
        self._unreadable: dict[str, tuple[int, Mark]] = {}
        self._heard = 0
        self._looked = 0.0

    # keeping up

    def listen(self) -> None:
        """Take in what was rung; look at everything if that is due."""
        with self.lock:
            size, _ = self._place.bell()
            if size < self._heard or time.monotonic() - self._looked > LOOK_AGAIN:
                self.look()
                return
            if size > self._heard:
                self._heard, names = self._place.rung(self._heard)
                if EVERYTHING in names:
                    self.look()
                    return
                for name in dict.fromkeys(names):
                    self._hear(name)

    def look(self) -> None:
        """Compare every file with what is known of it."""
        with self.lock:
            self._heard, _ = self._place.bell()
            newest: dict[str, int] = {}
            for name in self._place.live.names():
                parsed = parse_journal_name(name)
                if parsed is not None and newest.get(parsed[0], -1) < parsed[1]:
                    newest[parsed[0]] = parsed[1]
            for stem in [stem for stem in self.entries.by_stem if stem not in newest]:
                self.forget(stem)
            for stem, gen in newest.items():
                self._update(stem, gen)
            self._look_at_inboxes()
            self._looked = time.monotonic()

    def _look_at_inboxes(self) -> None:
        found: set[str] = set()
        for name in self._place.inbox.names():
            stem = name.removesuffix(".jsonl")
            found.add(stem)
            self._update_inbox(stem)
        for entry in [entry for entry in self.entries.by_stem.values() if entry.letters and entry.stem not in found]:
            self.entries.mailed(entry, (), None)

    def _hear(self, name: str) -> None:
        folder, _, name = name.partition("/")
        if folder == "inbox":
            self._update_inbox(name.removesuffix(".jsonl"))
        elif folder == "live" and (parsed := parse_journal_name(name)) is not None:
            stem, gen = parsed
            known = self.entries.by_stem.get(stem)
            self._update(stem, gen if known is None else max(gen, known.gen))
            self._update_inbox(stem)

    def _update(self, stem: str, gen: int) -> Entry | None:
        """Read a journal's ends again if it changed."""
        known = self.entries.by_stem.get(stem)
        if known is not None and known.gen == gen and stem in self.mine:
            return known
        status = self._place.live.stat(journal_name(stem, gen))
        if status is None:
            if known is not None and known.gen == gen:
                self.forget(stem)
            return None
        mark = mark_of(status)
        if known is not None and known.gen == gen and known.mark == mark:
            return known
        if self._unreadable.get(stem) == (gen, mark):
            return None
        self.mine.discard(stem)  # another generation, or another file: it changed hands
        try:
            same = known if known is not None and known.mark is not None and known.mark[2] == mark[2] else None
            entry = self._read(Spot(self._place.live, stem, gen, journal_name(stem, gen)), same)
        except FileNotFoundError:
            return None
        except CorruptDataError:
            self._unreadable[stem] = (gen, mark)
            self.forget(stem)
            return None
        entry.mark = mark
        self.put(entry)
        return entry

    def _read(self, spot: Spot, known: Entry | None) -> Entry:
        """`known` is what was read in the same file before; the id of another one may have been started anew."""
        whose = None if known is None else (known.id, known.born, known.definition)
        summary = read_summary(self._place, spot, whose)
        if summary is not None:
            return Entry(spot.stem, spot.gen, summary.born, summary.definition, summary.head, summary.mail)
        contents, _ = read_spot(self._place, self._id_in(spot), spot)
        contents.settle()
        head, definition = contents.found()
        return Entry(spot.stem, spot.gen, contents.born, definition, head, contents.mail)

    def _id_in(self, spot: Spot) -> str:
        """The id that a journal says it belongs to; it must be the one that gives the file its name."""
        data = spot.folder.read(spot.name)
        for text in data.split(b"\n"):
            try:
                id = identity_of(text).id
            except BrokenLineError:
                continue
            if stem_of(id) == spot.stem:
                return id
            break
        else:
            earlier = journal_name(spot.stem, spot.gen - 1)
            if spot.gen > 0 and spot.folder.stat(earlier) is not None:  # a claim that a power cut left empty
                return self._id_in(Spot(spot.folder, spot.stem, spot.gen - 1, earlier))
        self._place.keep_aside(spot.name, data)
        raise CorruptDataError(f"the journal {spot.name!r}", "it does not belong to the execution of that name")

    def _update_inbox(self, stem: str) -> None:
        entry = self.entries.by_stem.get(stem)
        if entry is None:
            return
        box = box_of(self._place, stem, entry.id, entry.born)
        status = self._place.inbox.stat(box.name)
        mark = None if status is None else mark_of(status)
        if mark != entry.inbox_mark:
            letters = read_letters(self._place, box) if mark is not None else None
            self.entries.mailed(entry, tuple(letters.messages) if letters else (), mark)

    # what this process does itself

    def put(self, entry: Entry) -> None:
        with self.lock:
            self.entries.put(entry)
            if entry.head.state.finished:
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

    def saved(self, journal: Journal, head: Head, mail: Mail, total: int | None = None) -> None:
        """This process wrote a journal that it owns. The caller holds the lock."""
        entry = self.entries.by_stem.get(journal.stem)
        if entry is None or entry.gen != journal.gen:
            return  # somebody took it over in this moment; the file was read again
        self.entries.saved(entry, head, mail)
        if total is not None:
            entry.definition = attrs.evolve(entry.definition, total=total)
        entry.mark = None
        if head.state.finished:
            self.finished[entry.stem] = entry
        elif self.finished:
            self.finished.pop(entry.stem, None)

    def find(self, id: str, gen: int) -> Entry | None:
        """The entry of a journal that was located just now."""
        with self.lock:
            stem = stem_of(id)
            entry = self._update(stem, gen)
            if entry is not None:
                self._update_inbox(stem)
            return entry

    def letters(self, entry: Entry) -> list[Message]:
        return list(read_letters(self._place, box_of(self._place, entry.stem, entry.id, entry.born)).messages.values())
