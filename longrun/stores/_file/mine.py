"""The journals that this process owns: which they are, which of them are open, and how one is taken up again.

Place in the life of an execution: claim, checkpoint. All of it runs in the store's writer thread.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterable
from operator import attrgetter

from longrun.errors import ExecutionNotFoundError, LeaseLostError
from longrun.stored import Save
from longrun.stores._file.catalog import Catalog
from longrun.stores._file.contents import ABOUT
from longrun.stores._file.disk import make_room, write_all
from longrun.stores._file.done import Finished
from longrun.stores._file.entry import Entry
from longrun.stores._file.journal import Journal
from longrun.stores._file.lines import Identity, fits
from longrun.stores._file.moving import bring_back
from longrun.stores._file.place import Place
from longrun.stores._file.reading import Spot, locate, read_settled, read_summary

MANY = 32
"""With fewer files the table of descriptors, which has room for 64 at least, does not grow."""


class Journals:
    """Owned journals by the id of their execution; a bounded number of them is open."""

    def __init__(self, place: Place, catalog: Catalog, finished: Finished) -> None:
        self.place, self.catalog, self.finished = place, catalog, finished
        self._owned: dict[str, Journal] = {}
        self._open: dict[str, Journal] = {}
        self._rung: list[str] = []
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limit = max(16, min(1024, soft // 4))
        """How many may be open at once."""
        self._roomy = False
        catalog.in_place = self._in_place

    def _in_place(self, entry: Entry) -> bool:
        journal = self._owned.get(entry.id)
        try:
            return journal is None or journal.gen != entry.gen or journal.in_place()
        except OSError:
            return True  # the next save tells

    def expect(self, count: int) -> None:
        """So many are about to be opened. Room for all that may ever be is made aside: it takes longer than they do."""
        if self._roomy or count < MANY:
            return
        self._roomy = True
        with contextlib.suppress(RuntimeError):  # no more threads are to be had
            threading.Thread(target=make_room, args=(2 * self.limit,), name="longrun-room", daemon=True).start()

    def get(self, id: str) -> Journal | None:
        return self._owned.get(id)

    def close(self) -> None:
        for journal in self._owned.values():
            journal.close()
        self._owned.clear()
        self._open.clear()

    # what others should look at

    def changed(self, name: str) -> None:
        """A file of live/ that others should look at."""
        self._rung.append(f"live/{name}")

    def posted(self, name: str) -> None:
        """The same for an inbox."""
        self._rung.append(f"inbox/{name}")

    def ring(self) -> None:
        if self._rung:
            self.place.ring(dict.fromkeys(self._rung))
            self._rung.clear()

    # coming and going

    def adopt(self, journal: Journal, entry: Entry) -> None:
        """This process owns the execution from now on."""
        self.release(journal.id)
        self._owned[journal.id] = self._open[journal.id] = journal
        with self.catalog.lock:
            self.catalog.put(entry)
            self.catalog.mine.add(journal.stem)
        self.changed(journal.name)

    def release(self, id: str) -> None:
        journal = self._owned.pop(id, None)
        if journal is not None:
            self._open.pop(id, None)
            journal.close()
            with self.catalog.lock:
                self.catalog.mine.discard(journal.stem)
                journal.settled()

    def used(self, journals: Iterable[Journal]) -> None:
        """These were written to just now, or tried to be: some of them may have been opened for it."""
        if len(self._open) < len(self._owned):
            self._open.update({journal.id: journal for journal in journals if journal.fd >= 0})
            self.shrink()

    def shrink(self) -> None:
        """Keep the number of open files within its bound: what was written to last stays open."""
        if (over := len(self._open) - self.limit) > 0:
            for journal in sorted(self._open.values(), key=attrgetter("seen"))[:over]:
                del self._open[journal.id]
                journal.close()

    def attach(self, save: Save) -> Journal:
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
        self._owned[save.id] = journal
        with self.catalog.lock:
            self.catalog.find(save.id, spot.gen)
            self.catalog.mine.add(journal.stem)
        return journal

    def _attached(self, save: Save, spot: Spot, fd: int) -> Journal:
        summary = read_summary(self.place, spot)
        if summary is not None:
            head, mail, tail, born = summary.head, summary.mail, summary.tail, summary.born
            definition = summary.definition
        else:
            contents, tail = read_settled(self.place, save.id, spot)
            (head, definition), mail, born = contents.found(), contents.mail, contents.born
        if head.fence != save.head.fence:
            raise LeaseLostError(save.id, save.head.fence)
        size = tail.end if tail.clean else self._close_end(fd, spot, tail.end)
        identity, ino = Identity(save.id, spot.gen), self.place.disk.fstat(fd).st_ino
        journal = Journal(
            self.place, spot.stem, identity, fd, ino, born=born, head=head, mail=mail, n=tail.n, size=size
        )
        journal.about = {name: getattr(definition, name) for name in ABOUT}
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
