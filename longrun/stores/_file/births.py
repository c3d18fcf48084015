"""New executions, and messages for old ones, on their way to the disk.

Place in the life of an execution: start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from longrun.errors import CorruptDataError, LongrunError, StoreUnavailableError
from longrun.stored import Create, Save, Send
from longrun.stores._file.contents import NO_MAIL, Mail, birth_line, first_lines, save_lines
from longrun.stores._file.disk import close_all
from longrun.stores._file.entry import Entry, mark_of
from longrun.stores._file.forms import with_steps
from longrun.stores._file.inbox import Box, send
from longrun.stores._file.journal import Journal, failed
from longrun.stores._file.lines import Identity
from longrun.stores._file.place import Place, done_name, journal_name
from longrun.stores.base import Answer


class Birth:
    """A new execution on its way into live/."""

    __slots__ = ("born", "create", "entry", "error", "fd", "journal", "lines", "size", "stem", "temporary", "where")

    entry: Entry
    """What is known of it once it is there."""

    def __init__(self, where: int, create: Create, stem: str) -> None:
        self.where, self.create, self.stem = where, create, stem
        self.born = os.urandom(8).hex()
        self.temporary, self.fd = "", -1
        self.lines = self.size = 0
        self.error: LongrunError | None = None
        self.journal: Journal | None = None

    def write(self, place: Place) -> None:
        """Write the complete journal under a temporary name."""
        lines = self._lines()
        data = b"".join(lines)
        self.lines, self.size = len(lines), len(data)
        try:
            self.temporary, self.fd = place.temporary(data, sync=False)
        except OSError as error:
            self.error = failed(error)

    def _lines(self) -> list[bytes]:
        create, definition = self.create, self.create.definition
        identity = Identity(definition.id, 0)
        lines = first_lines(identity, definition, self.born)
        n = len(lines) + 1
        if (line := birth_line(identity, n, create)) is not None:
            return [*lines, line]
        save = Save(id=definition.id, head=create.head, boundaries=(create.boundary,), blobs=create.blobs)
        return lines + save_lines(identity, n, save, NO_MAIL, whole=True)

    def fail(self, place: Place, error: OSError) -> None:
        """It could not be made durable."""
        self.error = failed(error)
        self.abandon(place)

    def publish(self, place: Place) -> bool | LongrunError:
        """Let it appear, unless the id is taken."""
        if self.error is not None:
            return self.error
        try:
            if place.done.stat(done_name(self.stem)) is not None:
                place.drop_temporary(self.temporary)
                return False
            if not place.publish(self.temporary, place.live, journal_name(self.stem, 0)):
                return False
            self._appear(place, place.disk.fstat(self.fd))
            return True
        except OSError as error:
            return failed(error)
        finally:
            self._close(place)

    def _appear(self, place: Place, status: os.stat_result) -> None:
        head, definition = self.create.head, self.create.definition
        owned = head.owner is not None and not head.state.finished
        records = (self.born, with_steps(definition, ()), head)
        self.entry = Entry(self.stem, 0, records, NO_MAIL, None if owned else mark_of(status))
        if owned:
            self.journal = Journal(
                place,
                self.stem,
                Identity(definition.id, 0),
                self.fd,
                status.st_ino,
                born=self.born,
                head=head,
                mail=NO_MAIL,
                n=self.lines,
                size=self.size,
            )
            self.fd = -1

    def abandon(self, place: Place) -> None:
        """Something has failed on the way: nothing of it is left."""
        if self.journal is not None:
            self.journal.close()
        if self.fd >= 0:
            self._close(place)
            place.drop_temporary(self.temporary)

    def _close(self, place: Place) -> None:
        if self.fd >= 0:
            close_all(place.disk, (self.fd,))
            self.fd = -1


@attrs.define(eq=False)
class Post:
    """Messages for one execution."""

    box: Box
    sends: list[tuple[int, Send]]
    mail: Mail
    new: bool
    answers: Sequence[Answer] = ()

    def deliver(self, place: Place) -> None:
        try:
            self.answers = send(place, self.box, [one for _, one in self.sends], self.mail)
        except (StoreUnavailableError, CorruptDataError) as error:
            self.answers = [error] * len(self.sends)
