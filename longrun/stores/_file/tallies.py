"""What this process remembers of inboxes: which messages are in there, and which keys came, but not what they say.

Place in the life of an execution: signals and control requests. A thousand messages may wait in an inbox, and each one
that is added would have all of them parsed again. What was read once is believed as long as the bytes are the same: by
the mark of the file where nobody but us has written there since, and else by their checksum.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from zlib import crc32

import attrs

from longrun.stored import Message
from longrun.stores._file.contents import Mail
from longrun.stores._file.entry import Mark

MOST = 64
"""Inboxes that are remembered: those that were looked at last."""


@attrs.define
class Tally:
    """What an inbox holds, taken or not, without the messages themselves."""

    numbers: list[int] = attrs.field(factory=list)
    keys: dict[str, int] = attrs.field(factory=dict)
    last: int = 0
    end: int = 0
    """Behind the last line that has its newline."""
    size: int = 0
    """How many bytes were read: an append that was not settled then is still to come."""

    @property
    def clean(self) -> bool:
        return self.end == self.size

    def add(self, message: Message) -> None:
        self.numbers.append(message.id)
        self.last = max(self.last, message.id)
        if message.key is not None:
            self.keys[message.key] = message.id

    def count(self, mail: Mail) -> int:
        """How many wait."""
        return sum(map(mail.waits, self.numbers))

    def copy(self) -> Tally:
        """Of the lines that have their newline, where nothing of another one was taken in."""
        return Tally(self.numbers.copy(), self.keys.copy(), self.last, self.end, self.end)


@attrs.frozen
class Known:
    """What the first bytes of an inbox were found to say."""

    born: str
    """Of the execution whose messages count."""
    tally: Tally
    """Of these bytes, up to its `end`. Shared, so nobody changes it."""
    crc: int
    mark: Mark | None = None
    """Of the file when it held these bytes and nothing else, if that is known."""

    def begins(self, data: bytes) -> bool:
        """Whether an inbox that holds this now still begins with what was read."""
        end = self.tally.end
        return end <= len(data) and crc32(memoryview(data)[:end]) == self.crc


NOTHING = Known("", Tally(), 0)


class Tallies:
    """The tallies of some inboxes, by whatever tells them apart. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[object, Known] = OrderedDict()

    def get(self, box: object, born: str) -> Known:
        with self._lock:
            known = self._known.get(box)
            if known is None or known.born != born:
                return NOTHING
            self._known.move_to_end(box)
            return known

    def put(self, box: object, known: Known) -> None:
        with self._lock:
            self._known[box] = known
            self._known.move_to_end(box)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
