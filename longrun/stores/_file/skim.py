"""The index of finished executions as bytes: enough to tell that it holds nothing of a kind.

Place in the life of an execution: claim. Every process that starts asks for what was interrupted, which an index of all
that ever ended says nothing of; to find that out, its lines are compared with their checksums and searched, not parsed.
Whoever has gone through many leaves a note: how far the index is sound, one checksum of all of that, and which texts it
does not hold. Lines are only ever added behind it, so the next one has that answer without reading any of them. Whether
they still fit the checksum is compared before that answer is given, or, by an owner, who is in a hurry, a little later.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import attrs

from longrun.stores._file.disk import READ_SIZE, HeldFile, read_range
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, all_fit, pack, unpack
from longrun.stores._file.place import Place

NOTE_OVER = 1 << 20
"""Bytes that were gone through, beyond which a note is left."""
NOTED_TEXTS = 64
"""So many texts a note names at most, the last ones that were asked for."""
END_SIZE = 1 << 12
"""A note shows by so many bytes before its end that it is about this file, and not about one that was there before."""
_NOBODY = Identity("", 0)


@attrs.frozen
class Note:
    """What somebody found out about the first `size` bytes."""

    size: int
    crc: int
    """Of all of them."""
    end: int
    """The checksum of the last of them."""
    free: dict[bytes, int]


class Skim:
    """Remembers how far the file is sound, and which texts it does not hold. Safe from any thread."""

    def __init__(self, place: Place, name: str, note: str, header: bytes) -> None:
        self._place, self._name, self._note, self._header = place, name, note, header
        self._lock = threading.Lock()
        self._file = HeldFile(place.top, name)
        self._ino = -1
        self._sound = self._crc = 0
        """How far every line was found to fit, and the checksum of all of that."""
        self._free: dict[bytes, int] = {}
        """Up to where the file is free of a text."""
        self._read = 0
        """Bytes that were gone through since a note was read or left."""
        self._believed: Note | None = None
        """A note whose checksum is still to be compared."""
        self.believes = False
        """Whether the checksum of a note is left to be compared by `prove`."""

    def lacks(self, texts: Iterable[Iterable[bytes]]) -> bool:
        """Whether the file is whole and sound, and no line of it can hold one of each of the lists."""
        with self._lock:
            status = self._file.look()
            if status is None:
                return False
            fd = self._file.fd
            self._notice(fd, status)
            lacks = any(all(self._is_free(fd, one) for one in some) for some in texts) and self._is_sound(fd)
            if lacks and self._read > NOTE_OVER:
                self._leave_note(fd)
            return lacks

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @property
    def is_proven(self) -> bool:
        return self._believed is None

    def prove(self) -> bool:
        """Compare with its checksum what was believed, in nobody's way; False if it does not fit, and is forgotten."""
        with self._lock:
            note, ino = self._believed, self._ino
        if note is None:
            return True
        with self._place.top.opened(self._name) as fd:
            another = self._place.disk.fstat(fd).st_ino != ino  # of which nothing is believed yet
            fits = another or self._sum(fd, note.size) == note.crc
        with self._lock:
            if self._believed is note:
                self._believed = None
                if not fits:
                    self._start_over(ino)
        return fits

    def _notice(self, fd: int, status: os.stat_result) -> None:
        """Forget what was remembered if it is another file now; somebody else may know that one."""
        if status.st_ino == self._ino and status.st_size >= max([self._sound, *self._free.values()]):
            return
        self._start_over(status.st_ino)
        note = self._noted(fd, status.st_size)
        if note is not None and (self.believes or self._sum(fd, note.size) == note.crc):
            self._sound, self._crc, self._free = note.size, note.crc, note.free
            self._believed = note if self.believes else None

    def _start_over(self, ino: int) -> None:
        self._ino, self._sound, self._crc, self._free, self._read, self._believed = ino, 0, 0, {}, 0, None

    def _is_sound(self, fd: int) -> bool:
        if self._sound == 0 and self._place.disk.pread(fd, len(self._header), 0) != self._header:
            return False
        for position, lines in self._blocks(fd, self._sound):
            if not all_fit(lines.split(b"\n")[:-1]):
                return False
            self._sound, self._crc = position, crc32(lines, self._crc)
        return True

    def _is_free(self, fd: int, text: bytes) -> bool:
        for position, lines in self._blocks(fd, self._free.get(text, 0)):
            if text in lines:
                return False
            self._free[text] = position
        return True

    def _blocks(self, fd: int, position: int) -> Iterator[tuple[int, bytes]]:
        """Whole lines from a position on, and where they end; a line that is not complete yet is nobody's."""
        size = READ_SIZE
        while True:
            data = read_range(self._place.disk, fd, position, position + size)
            end = data.rfind(b"\n") + 1
            if end:
                position, size = position + end, READ_SIZE
                self._read += end
                yield position, data[:end]
            elif len(data) == size:
                size *= 2  # one very long line
            else:
                return

    # the note

    def _noted(self, fd: int, size: int) -> Note | None:
        """What somebody noted, if it is about this file."""
        try:
            fields = unpack(self._place.top.read(self._note)[:-1], _NOBODY).fields
            free = {text.encode(): int(position) for text, position in fields["free"].items()}
            note = Note(int(fields["size"]), fields["sum"], fields["end"], free)
        except (OSError, BrokenLineError, ForeignLineError, AttributeError, KeyError, TypeError, ValueError):
            return None
        fits = 0 < note.size <= size and all(0 <= position <= note.size for position in free.values())
        return note if fits and self._end(fd, note.size) == note.end else None

    def _leave_note(self, fd: int) -> None:
        """Only to save time: where it is lost or torn, lines are gone through again."""
        texts = list(self._free.items())[-NOTED_TEXTS:]
        fields: dict[str, Any] = {
            "kind": "sound",
            "size": self._sound,
            "sum": self._crc,
            "end": self._end(fd, self._sound),
            "free": {text.decode(): min(position, self._sound) for text, position in texts},
        }
        with contextlib.suppress(OSError):
            temporary, new = self._place.temporary(pack(_NOBODY, 1, fields), sync=False)
            self._place.disk.close(new)
            self._place.replace(temporary, self._place.top, self._note)
        self._read = 0

    def _sum(self, fd: int, size: int) -> int:
        crc = 0
        for start in range(0, size, READ_SIZE):
            crc = crc32(read_range(self._place.disk, fd, start, min(size, start + READ_SIZE)), crc)
        return crc

    def _end(self, fd: int, size: int) -> int:
        return crc32(read_range(self._place.disk, fd, max(0, size - END_SIZE), size))
