"""Executions change hands: generation N+1 appears first, and N is read after that.

Place in the life of an execution: claim. Whoever links the next generation has won; nobody else can, and from then on
no write to N is acknowledged. A claim that turns out to be wrong (N was over already, or is not to be had any more) is
taken back by removing N+1 before anybody was told of it.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable

import attrs

from longrun.clock import Clock
from longrun.errors import CorruptDataError
from longrun.stored import Claim, Head, Loaded, Save
from longrun.stores._file.contents import (
    NO_MAIL,
    Contents,
    blocked_head,
    claim_line,
    claimed_head,
    save_lines,
    snapshot_lines,
    woken_head,
)
from longrun.stores._file.disk import UnopenableError, UnreadableFileError, close_all, write_all
from longrun.stores._file.entry import NO_INBOX, Entry, Inbox
from longrun.stores._file.history import move_history
from longrun.stores._file.inbox import Letters, box_of, read_letters, sure_box
from longrun.stores._file.journal import Journal, failed, remove_locked
from longrun.stores._file.line import rank
from longrun.stores._file.lines import Identity
from longrun.stores._file.mine import Journals
from longrun.stores._file.place import journal_name
from longrun.stores._file.reading import Spot, locate, read_done, read_spot, with_next_step
from longrun.stores._file.syncing import SyncPool
from longrun.stores.choice import is_free, is_wanted

ROWS_CARRIED = 100
"""Old rows that a claim copies into the new generation; with more, they go to the history."""


@attrs.define(eq=False)
class _Taken:
    """An execution whose next generation is ours."""

    journal: Journal
    contents: Contents
    letters: Letters


class _UnreadableError(Exception):
    """An execution that was to be taken cannot be read."""

    def __init__(self, stored: bool) -> None:
        super().__init__()
        self.stored = stored
        """Whether it is blocked durably by now."""


Made = tuple[str, int, int]
"""A new generation: name without its number, number, inode."""


class Claims:
    """Gives executions to owners."""

    def __init__(self, journals: Journals, pool: SyncPool, clock: Clock) -> None:
        self._journals, self._pool, self._clock = journals, pool, clock
        self._place, self._catalog = journals.place, journals.catalog

    def claim(self, claim: Claim) -> list[Loaded]:
        if claim.ids is None:
            with self._catalog.lock:
                self._catalog.listen()
                for owner in claim.dead:
                    self._catalog.look_at(owner)
            named = None
        else:
            named = sorted(self._named(claim, claim.ids), key=lambda entry: rank(entry.definition))
        given: list[Loaded] = []
        tried: set[str] = set()
        while (room := min(claim.limit - len(given), self._journals.limit)) > 0:
            chosen = self._due(claim, room, tried) if named is None else named[:room]
            if not chosen:
                break
            given += self._take_all(chosen, claim)
            if named is not None:
                del named[:room]
        return given

    def _due(self, claim: Claim, number: int, tried: set[str]) -> list[Entry]:
        """The next so many. What was tried and could not be had, since somebody else was quicker, is not again."""
        with self._catalog.lock:
            entries = self._catalog.entries
            found = entries.due(claim, number, lambda entry: entry.id not in tried and _is_asked_for(entry, claim))
            tried.update(entry.id for entry in found)
            return found

    def _named(self, claim: Claim, ids: Iterable[str]) -> list[Entry]:
        found: list[Entry] = []
        for id in dict.fromkeys(ids):
            entry = self._catalog.current(id) or self._located(claim, id)
            if entry is None or entry.unreadable or entry.inbox.closed is not None:
                continue  # it is listed as blocked; `load` says why
            if _is_asked_for(entry, claim):
                found.append(entry)
        return found

    def _located(self, claim: Claim, id: str) -> Entry | None:
        spot = self._catalog.locate(id)
        if spot is not None and spot.folder is self._place.done:
            spot = self._from_done(claim, id, spot)
        return None if spot is None else self._catalog.find(id, spot.gen)

    def _from_done(self, claim: Claim, id: str, spot: Spot) -> Spot | None:
        """A finished one comes back into live/ if it is to be had."""
        try:
            contents = read_done(self._place, id, spot)
        except (CorruptDataError, FileNotFoundError):
            return None
        head, definition = contents.found()
        if not (is_free(head, claim) and is_wanted(definition, head, claim)):
            return None
        self._journals.bring_back(id)
        return locate(self._place, id)

    def _take_all(self, entries: list[Entry], claim: Claim) -> list[Loaded]:
        taken: list[_Taken] = []
        errors: list[OSError | None] = []
        self._journals.expect(len(entries))
        try:
            with self._place.locked(shared=True) if _wants_ended(claim) else contextlib.nullcontext():
                for entry in entries:
                    one = self._take(entry, claim)
                    if one is not None:
                        taken.append(one)
            errors = self._pool.sync([one.journal.fd for one in taken])
            if taken:
                self._place.live.sync()
        except BaseException:
            self._give_back(taken)
            raise
        given = [one for one, error in zip(taken, errors, strict=True) if error is None]
        for one in given:
            self._journals.adopt(one.journal, _entry(one))
        self._journals.shrink()
        self._give_back([one for one, error in zip(taken, errors, strict=True) if error is not None])
        for error in errors:
            if error is not None and not given:
                raise failed(error)
        for one in given:
            one.contents.damage += one.letters.damage
        return [one.contents.loaded(one.letters.messages.values()) for one in given]

    def _give_back(self, taken: list[_Taken]) -> None:
        try:
            self._remove([(one.journal.stem, one.journal.gen, one.journal.ino) for one in taken])
        finally:
            for one in taken:
                one.journal.close()

    def _take_back(self, made: Made, fd: int) -> None:
        """The file is closed last: while it is open, no other has its inode."""
        try:
            self._remove([made])
        finally:
            close_all(self._place.disk, [fd])

    def _remove(self, made: Iterable[Made]) -> None:
        """Nobody was told of these generations: as if they had never been. Each by its inode, since its name may be of
        another by now. Where that fails, the error makes the owner ask what it has, and it gets to know."""
        problem: OSError | None = None
        for stem, gen, ino in made:
            try:
                if not remove_locked(self._place, stem, gen, ino=ino) and self._is_there(stem, gen, ino):
                    raise BlockingIOError(errno.EBUSY, "somebody holds the file")
            except OSError as error:
                self._catalog.doubt(journal_name(stem, gen))
                problem = error
        if problem is not None:
            raise problem

    def _is_there(self, stem: str, gen: int, ino: int) -> bool:
        status = self._place.live.stat(journal_name(stem, gen))
        return status is not None and status.st_ino == ino

    def _take(self, entry: Entry, claim: Claim) -> _Taken | None:
        """Create the next generation, then read this one; None if somebody else was quicker or it is not to be had."""
        gen = entry.gen + 1
        if self._place.live.stat(journal_name(entry.stem, entry.gen)) is None:
            self._again(entry)  # a claim without it would look like one whose journal was lost
            return None
        if _wants_ended(claim):  # on its way to done/ perhaps, which its messages reach first
            sure_box(self._place, box_of(self._place, entry.stem, entry.id, entry.born), entry.stem, done=False)
        identity = Identity(entry.id, gen)
        first = claim_line(identity, claim.owner, self._clock.now())
        temporary, fd = self._place.temporary(first, sync=False)
        name = journal_name(entry.stem, gen)
        try:
            made = entry.stem, gen, self._place.disk.fstat(fd).st_ino
            if not self._place.publish(temporary, self._place.live, name):
                close_all(self._place.disk, [fd])
                self._catalog.find(entry.id, gen)
                return None
        except OSError:
            close_all(self._place.disk, [fd])
            raise
        try:
            taken = self._read(entry, claim, identity, fd, made[2], len(first))
        except _UnreadableError as error:
            if error.stored:
                close_all(self._place.disk, [fd])
            else:
                self._take_back(made, fd)
            self._journals.changed(name)
            self._again(entry)
            return None
        except BaseException:
            self._take_back(made, fd)
            raise
        if taken is None:
            self._take_back(made, fd)
            self._again(entry)
        return taken

    def _read(self, entry: Entry, claim: Claim, identity: Identity, fd: int, ino: int, size: int) -> _Taken | None:
        place = self._place
        before = Spot(place.live, entry.stem, entry.gen, journal_name(entry.stem, entry.gen))
        contents = Contents(entry.id)
        try:
            letters = read_letters(place, box_of(place, entry.stem, entry.id, entry.born))
            contents, _ = read_spot(place, entry.id, before)
            contents.settle()
        except FileNotFoundError:
            return None
        except UnreadableFileError as error:  # it may be mended: nothing of it is changed
            raise _UnreadableError(stored=False) from error
        except CorruptDataError as error:
            damage = with_next_step(place, before, error)
            raise _UnreadableError(self._block(contents.head or entry.head, claim, identity, fd, damage)) from error
        head, definition = contents.found()
        if contents.born != entry.born:
            letters = read_letters(place, box_of(place, entry.stem, entry.id, contents.born))
        effective = woken_head(head, bool(letters.waiting(contents.mail)))
        if not (is_free(head, claim) and is_wanted(definition, effective, claim)):
            return None
        head = contents.head = claimed_head(head, claim.owner)
        if len(contents.old_rows()) > ROWS_CARRIED:
            with contextlib.suppress(UnopenableError):  # they stay in the journal, then
                move_history(place, entry.stem, contents)
        lines = snapshot_lines(identity, contents, 2)
        data = b"".join(lines)
        write_all(place.disk, fd, data)
        n, size = 1 + len(lines), size + len(data)
        journal = Journal(
            place, entry.stem, identity, fd, ino, born=contents.born, head=head, mail=contents.mail, n=n, size=size
        )
        return _Taken(journal, contents, letters)

    def _block(self, head: Head, claim: Claim, identity: Identity, fd: int, error: CorruptDataError) -> bool:
        """What cannot be read is given to nobody. The new generation stays: by it everybody sees it blocked, and
        whoever had it is shut out. False if it was not to be had."""
        if not is_free(head, claim) or head.state.finished:
            return False
        blocked = attrs.evolve(
            blocked_head(head, str(error)), fence=head.fence + 1, revision=head.revision + 1, updated=self._clock.now()
        )
        write_all(self._place.disk, fd, b"".join(save_lines(identity, 2, Save(id=identity.id, head=blocked), NO_MAIL)))
        self._place.disk.fdatasync(fd)
        self._place.live.sync()
        return True

    def _again(self, entry: Entry) -> None:
        """What was known of it was wrong: look again."""
        with self._catalog.lock:
            spot = locate(self._place, entry.id)
            self._catalog.forget(entry.stem)
            if spot is not None and spot.folder is self._place.live:
                self._catalog.doubt(spot.name)


def _wants_ended(claim: Claim) -> bool:
    """Whether it may take what has ended by now. Such journals move to done/, and while one is taken that must wait."""
    return any(state.finished for state in claim.states)


def _is_asked_for(entry: Entry, claim: Claim) -> bool:
    return is_free(entry.head, claim) and is_wanted(*entry.shown, claim)


def _entry(taken: _Taken) -> Entry:
    journal, contents = taken.journal, taken.contents
    head, definition = contents.found()
    records = (contents.born, definition, head)
    letters = tuple(taken.letters.messages)
    return Entry(journal.stem, journal.gen, records, contents.mail, inbox=Inbox(letters) if letters else NO_INBOX)
