"""Journals of finished executions on their way to done/, and back.

Place in the life of an execution: finish, and a retry after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from longrun.errors import CorruptDataError
from longrun.stores._file.done import Finished
from longrun.stores._file.entry import Entry, mark_of, may_leave
from longrun.stores._file.journal import remove_between, remove_locked
from longrun.stores._file.place import Place, done_inbox_name, done_name, journal_name, stem_of
from longrun.stores._file.reading import START_SIZE, Spot, born_in, read_summary, signpost, stands_alone

LOCKED_CHUNK = 64
"""So many leave live/ at once: whoever wants to create or to send meanwhile waits no longer."""


def move_away(place: Place, finished: Finished, ended: Iterable[Entry]) -> Iterator[Entry]:
    """Move journals of finished executions to done/; tells of those that moved. One in use stays for another time.

    The new name is durable before any old one goes; old generations go before the newest leaves live/. From the line in
    the index to the removal the lock is held: whoever creates an id or sends to it holds it too, and sees the journal
    in one place or in both; and what somebody deletes meanwhile does not come back into the index."""
    finished.begin()
    moves = [_Move(place, entry) for entry in ended]
    for move in moves:
        move.link()
    place.done.sync()
    for start in range(0, len(moves), LOCKED_CHUNK):
        with place.locked():
            ready = [move for move in moves[start : start + LOCKED_CHUNK] if move.linked and move.ready()]
            finished.add([move.entry for move in ready])
            for move in ready:
                move.unlink()
        yield from [move.entry for move in ready if move.moved]


class _Move:
    """One journal. What is true of it is asked of the file again before each step that cannot be taken back."""

    __slots__ = ("done", "entry", "linked", "live", "moved", "place", "status")

    status: os.stat_result
    """The file that was seen to be finished."""

    def __init__(self, place: Place, entry: Entry) -> None:
        self.place, self.entry = place, entry
        self.live, self.done = journal_name(entry.stem, entry.gen), done_name(entry.stem)
        self.linked = self.moved = False

    def link(self) -> None:
        """Give the journal its name in done/, if it is the one that was seen to be finished. If another process moves
        it, or what stands in its way is not ours, it stays; the others go."""
        try:
            self.linked = self._is_there() and self._link()
        except OSError:
            self.linked = False

    def _is_there(self) -> bool:
        """Whether the journal is in live/, and finished."""
        place, entry = self.place, self.entry
        status = place.live.stat(self.live)
        if status is None:
            return False
        self.status = status
        return self._ended(Spot(place.live, entry.stem, entry.gen, self.live))

    def _link(self) -> bool:
        """Whether it has the name now. If another file took its place in live/ meanwhile, `ready` will see that."""
        place = self.place
        try:
            place.disk.link(self.live, self.done, place.live.fd, place.done.fd)
        except FileExistsError:
            there = place.done.stat(self.done)
            if there is not None and there.st_ino == self.status.st_ino:
                return True
            if there is not None and not self._cleared(self.status.st_ino):
                return False
            place.disk.link(self.live, self.done, place.live.fd, place.done.fd)
        return True

    def _cleared(self, ino: int) -> bool:
        """Remove what a crash on the way back has left in done/: the one in live/ counts. Under the lock, since others
        may have brought that one over meanwhile, and then it is the only one."""
        place = self.place
        with place.locked():
            if not self._is_there() or self.status.st_ino != ino:
                return False
            there = place.done.stat(self.done)
            if there is not None and there.st_ino != ino:
                place.done.remove(self.done)
        return True

    def _ended(self, spot: Spot) -> bool:
        """Whether the journal itself says so, without those before it, which will be gone."""
        try:
            if spot.gen == 0 and self.entry.mark == mark_of(self.status):  # as it was when it was known to have ended
                return born_in(spot.folder.read(spot.name, 0, START_SIZE), spot) == self.entry.born
            found = read_summary(self.place, spot)
            if found is not None:
                return found.born == self.entry.born and may_leave(found.head)
            contents = stands_alone(self.place, spot, self.entry.id)
        except (FileNotFoundError, CorruptDataError):
            return False
        return contents is not None and contents.born == self.entry.born and may_leave(contents.found()[0])

    def ready(self) -> bool:
        """Under the lock: whether it is still as it was seen to be finished, nobody else's, and in done/ too: another
        process may have moved it meanwhile, and a third one back."""
        place, entry = self.place, self.entry
        status, there = place.live.stat(self.live), place.done.stat(self.done)
        if status is None or status.st_ino != self.status.st_ino or there is None or there.st_ino != status.st_ino:
            return False
        next_name = journal_name(entry.stem, entry.gen + 1)
        if status.st_size != self.status.st_size or place.live.stat(next_name) is not None:
            place.done.remove(self.done)  # it goes on in this moment
            return False
        return True

    def unlink(self) -> None:
        """Under the lock: take the old names away. What fails stays; the others go."""
        try:
            self.moved = self._unlink()
        except OSError:
            self.moved = False

    def _unlink(self) -> bool:
        place, stem, gen = self.place, self.entry.stem, self.entry.gen
        if not remove_between(place, stem, gen) or not self.ready():
            return False
        inbox = f"{stem}.jsonl"
        if place.inbox.stat(inbox) is not None:
            place.disk.rename(inbox, done_inbox_name(stem), place.inbox.fd, place.done.fd)
        return remove_locked(place, stem, gen, ino=self.status.st_ino)


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
    finished.give_back(id)
