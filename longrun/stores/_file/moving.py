"""Journals of finished executions on their way to done/, and back.

Place in the life of an execution: finish, and a retry after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import attrs

from longrun.errors import CorruptDataError
from longrun.stores._file.done import Finished
from longrun.stores._file.entry import Entry, may_leave
from longrun.stores._file.journal import remove_between, remove_locked
from longrun.stores._file.place import Place, done_inbox_name, done_name, journal_name, stem_of
from longrun.stores._file.reading import Spot, read_summary, signpost, stands_alone


def move_away(place: Place, finished: Finished, ended: Iterable[Entry]) -> list[Entry]:
    """Move journals of finished executions to done/; those that moved. One in use stays for another time.

    The new name is durable before any old one goes; old generations go before the newest leaves live/. From the line in
    the index to the removal the lock is held: whoever creates an id or sends to it holds it too, and sees the journal
    in one place or in both; and what somebody deletes meanwhile does not come back into the index."""
    finished.begin()
    moves = [_Move(place, entry) for entry in ended]
    for move in moves:
        with contextlib.suppress(OSError):  # it stays; the others go
            move.link()
    place.done.sync()
    with place.locked():
        ready = [move for move in moves if move.ino >= 0 and move.ready()]
        finished.add([move.entry for move in ready])
        for move in ready:
            with contextlib.suppress(OSError):
                move.unlink()
    return [move.entry for move in moves if move.moved]


@attrs.define(eq=False)
class _Move:
    place: Place
    entry: Entry
    ino: int = -1
    size: int = -1
    moved: bool = False

    def link(self) -> None:
        """Give the journal its name in done/, if it is the one that was seen to be finished."""
        place, stem, gen = self.place, self.entry.stem, self.entry.gen
        live, done = journal_name(stem, gen), done_name(stem)
        status = place.live.stat(live)
        if status is None or not self._ended(Spot(place.live, stem, gen, live)):
            return
        there = place.done.stat(done)
        try:
            if there is not None and there.st_ino != status.st_ino and not self._cleared(status.st_ino):
                return
            if there is None or there.st_ino != status.st_ino:
                place.disk.link(live, done, place.live.fd, place.done.fd)
        except (FileExistsError, FileNotFoundError):
            return  # another process moves it
        except (IsADirectoryError, PermissionError):
            return  # what stands in its way is not ours
        there = place.done.stat(done)
        if there is not None and there.st_ino == status.st_ino:
            self.ino, self.size = status.st_ino, status.st_size

    def _cleared(self, ino: int) -> bool:
        """Remove what a crash on the way back has left in done/: the one in live/ counts. Under the lock, since others
        may have brought that one over meanwhile, and then it is the only one."""
        place, stem, gen = self.place, self.entry.stem, self.entry.gen
        live = journal_name(stem, gen)
        with place.locked():
            status = place.live.stat(live)
            if status is None or status.st_ino != ino or not self._ended(Spot(place.live, stem, gen, live)):
                return False
            there = place.done.stat(done_name(stem))
            if there is not None and there.st_ino != ino:
                place.done.remove(done_name(stem))
        return True

    def _ended(self, spot: Spot) -> bool:
        """Whether the journal itself says so, without those before it, which will be gone."""
        try:
            found = read_summary(self.place, spot)
            if found is not None:
                return found.born == self.entry.born and may_leave(found.head)
            contents = stands_alone(self.place, spot, self.entry.id)
        except (FileNotFoundError, CorruptDataError):
            return False
        return contents is not None and contents.born == self.entry.born and may_leave(contents.found()[0])

    def ready(self) -> bool:
        """Under the lock: whether it is still as it was seen to be finished, and nobody else's."""
        place, stem, gen = self.place, self.entry.stem, self.entry.gen
        status = place.live.stat(journal_name(stem, gen))
        if status is None or status.st_ino != self.ino:
            return False
        if status.st_size != self.size or place.live.stat(journal_name(stem, gen + 1)) is not None:
            place.done.remove(done_name(stem))  # it goes on in this moment
            return False
        return True

    def unlink(self) -> None:
        """Under the lock: take the old names away."""
        place, stem, gen = self.place, self.entry.stem, self.entry.gen
        if not remove_between(place, stem, gen) or not self.ready():
            return
        inbox = f"{stem}.jsonl"
        if place.inbox.stat(inbox) is not None:
            place.disk.rename(inbox, done_inbox_name(stem), place.inbox.fd, place.done.fd)
        self.moved = remove_locked(place, stem, gen, ino=self.ino)


def bring_back(place: Place, finished: Finished, id: str, gen: int) -> None:
    """The way back: a failed execution is to be claimed for a retry."""
    stem = stem_of(id)
    if gen > 0:
        temporary, fd = place.temporary(signpost(id, gen), sync=True)
        place.disk.close(fd)
        place.publish(temporary, place.live, journal_name(stem, 0))
    if place.done.stat(done_inbox_name(stem)) is not None:
        place.disk.rename(done_inbox_name(stem), f"{stem}.jsonl", place.done.fd, place.inbox.fd)
    place.disk.rename(done_name(stem), journal_name(stem, gen), place.done.fd, place.live.fd)
    place.live.sync()
    place.inbox.sync()
    finished.remove([id])
