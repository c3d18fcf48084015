"""New executions, and messages for old ones, on their way to the disk.

Place in the life of an execution: start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from longrun.errors import CorruptDataError, LongrunError, StoreUnavailableError
from longrun.stored import Create, Save, Send
from longrun.stores._file.contents import NO_MAIL, Mail, first_lines, save_lines
from longrun.stores._file.disk import close_all
from longrun.stores._file.entry import Entry, Mark, mark_of
from longrun.stores._file.inbox import Box, send
from longrun.stores._file.journal import Journal, failed
from longrun.stores._file.lines import Identity
from longrun.stores._file.place import Place, done_name, journal_name, stem_of
from longrun.stores.base import Answer


@attrs.define(eq=False)
class Birth:
    """A new execution on its way into live/."""

    where: int
    create: Create
    born: str = attrs.field(factory=lambda: os.urandom(8).hex())
    temporary: str = ""
    fd: int = -1
    data: bytes = b""
    lines: int = 0
    error: LongrunError | None = None
    journal: Journal | None = None
    mark: Mark | None = None

    def write(self, place: Place) -> None:
        """Write the complete journal under a temporary name."""
        create = self.create
        identity = Identity(create.id, 0)
        lines = first_lines(identity, create.definition, self.born)
        save = Save(id=create.id, head=create.head, boundaries=(create.boundary,), blobs=create.blobs)
        lines += save_lines(identity, len(lines) + 1, save, NO_MAIL, whole=True)
        self.data, self.lines = b"".join(lines), len(lines)
        try:
            self.temporary, self.fd = place.temporary(self.data, sync=False)
        except OSError as error:
            self.error = failed(error)

    def fail(self, place: Place, error: OSError) -> None:
        """It could not be made durable."""
        self.error = failed(error)
        self.abandon(place)

    def publish(self, place: Place) -> bool | LongrunError:
        """Let it appear, unless the id is taken."""
        if self.error is not None:
            return self.error
        stem = stem_of(self.create.id)
        try:
            if place.done.stat(done_name(stem)) is not None:
                place.drop_temporary(self.temporary)
                return False
            if not place.publish(self.temporary, place.live, journal_name(stem, 0)):
                return False
            self.mark = mark_of(place.disk.fstat(self.fd))
            head = self.create.head
            if head.owner is not None and not head.state.finished:
                self.journal = Journal(
                    place,
                    self.create.id,
                    0,
                    self.fd,
                    born=self.born,
                    head=head,
                    mail=NO_MAIL,
                    n=self.lines,
                    size=len(self.data),
                )
                self.fd = -1
            return True
        except OSError as error:
            return failed(error)
        finally:
            self._close(place)

    def abandon(self, place: Place) -> None:
        """Something has failed on the way: nothing of it is left."""
        if self.journal is not None:
            self.journal.close()
        if self.fd >= 0:
            self._close(place)
            place.drop_temporary(self.temporary)

    def _close(self, place: Place) -> None:
        if self.fd >= 0:
            close_all(place.disk, [self.fd])
            self.fd = -1

    @property
    def entry(self) -> Entry:
        create = self.create
        definition = attrs.evolve(create.definition, steps=())
        return Entry(stem_of(create.id), 0, (self.born, definition, create.head), NO_MAIL, self.mark)


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
