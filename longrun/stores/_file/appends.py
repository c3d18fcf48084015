"""What one journal gets in a batch: laid out, written, and looked after until it is acknowledged.

Place in the life of an execution: checkpoint, finish.
"""

from __future__ import annotations

import os

from longrun.errors import LongrunError
from longrun.stored import Save
from longrun.stores._file.journal import Journal, failed

Item = tuple[int, Save]
"""A save, and where in the batch its answer goes."""


class StaleError(Exception):
    """The file is not as this process left it: read it again."""


class Append:
    """What one journal gets in this batch."""

    __slots__ = (
        "about",
        "durable",
        "error",
        "head",
        "journal",
        "lines",
        "mail",
        "n",
        "rings",
        "saves",
        "size",
        "status",
    )

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.head, self.mail, self.n, self.about = journal.head, journal.mail, journal.n, journal.about
        self.lines: list[bytes] = []
        self.saves: list[Item] = []
        self.size = 0
        self.rings = self.durable = False
        self.status: os.stat_result | None = None
        """The file after all of this."""
        self.error: LongrunError | StaleError | None = None

    def mend(self) -> None:
        """Put the file right where an earlier write or sync has failed."""
        try:
            if not self.journal.reopen():
                self.error = StaleError()
            elif self.journal.bad:
                self.journal.mend()
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)

    def write(self, now: float) -> bool:
        """Whether there is something to sync now."""
        journal, lines = self.journal, self.lines
        try:
            if not journal.reopen():
                self.error = StaleError()
            elif lines:
                data = lines[0] if len(lines) == 1 else b"".join(lines)
                self.size = len(data)
                journal.write(data, now)
                return True
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)
        return False

    def confirm(self, now: float) -> None:
        """Only now that all of it is durable: look whether the journal is still ours."""
        self.durable = bool(self.lines)
        try:
            self.status = self.journal.check_owned()
        except LongrunError as error:
            self.error = error
        except OSError as error:
            self.error = failed(error)
        else:
            self.journal.seen = now
