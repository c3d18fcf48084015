"""The index of finished executions as bytes: enough to tell that it holds nothing of a kind.

Place in the life of an execution: claim. Every process that starts asks for what was interrupted, which an index of all
that ever ended says nothing of; to find that out, its lines are compared with their checksums and searched, not parsed.
Whoever has compared many leaves a note with one checksum of all of them, which the next one compares instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from zlib import crc32

from longrun.stores._file.disk import READ_SIZE, read_range
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, all_fit, pack, unpack
from longrun.stores._file.place import Place

NOTE_OVER = 1 << 20
"""Bytes that were compared line by line, beyond which a note is left."""
_NOBODY = Identity("", 0)


class Skim:
    """Remembers how far the file is sound, and which texts it does not hold. Safe from any thread."""

    def __init__(self, place: Place, name: str, note: str, header: bytes) -> None:
        self._place, self._name, self._note, self._header = place, name, note, header
        self._lock = threading.Lock()
        self._ino = -1
        self._sound = self._crc = 0
        """How far every line was found to fit, and the checksum of all of that."""
        self._free: dict[bytes, int] = {}
        """Up to where the file is free of a text."""

    def lacks(self, texts: Iterable[Iterable[bytes]]) -> bool:
        """Whether the file is whole and sound, and no line of it can hold one of each of the lists."""
        try:
            with self._lock, self._place.top.opened(self._name) as fd:
                self._notice(fd)
                return any(all(self._is_free(fd, one) for one in some) for some in texts) and self._is_sound(fd)
        except FileNotFoundError:
            return False

    def _notice(self, fd: int) -> None:
        """Forget what was remembered if it is another file now."""
        status = self._place.disk.fstat(fd)
        if status.st_ino != self._ino or status.st_size < max([self._sound, *self._free.values()]):
            self._ino, self._sound, self._crc, self._free = status.st_ino, 0, 0, {}

    def _is_sound(self, fd: int) -> bool:
        if self._sound == 0:
            if self._place.disk.pread(fd, len(self._header), 0) != self._header:
                return False
            self._sound, self._crc = self._noted(fd)
        known = self._sound
        for position, lines in self._blocks(fd, known):
            if not all_fit(lines.split(b"\n")[:-1]):
                return False
            self._sound, self._crc = position, crc32(lines, self._crc)
        if self._sound - known > NOTE_OVER:
            self._leave_note()
        return True

    def _noted(self, fd: int) -> tuple[int, int]:
        """How much of the file is as it was when somebody found it sound, and its checksum; nothing if it is not."""
        try:
            fields = unpack(self._place.top.read(self._note)[:-1], _NOBODY).fields
            size, noted = int(fields["size"]), fields["sum"]
        except (OSError, BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
            return 0, 0
        if not 0 < size <= self._place.disk.fstat(fd).st_size:
            return 0, 0
        crc = 0
        for start in range(0, size, READ_SIZE):
            crc = crc32(read_range(self._place.disk, fd, start, min(size, start + READ_SIZE)), crc)
        return (size, crc) if crc == noted else (0, 0)

    def _leave_note(self) -> None:
        """Only to save time: where it is lost or torn, lines are compared again."""
        line = pack(_NOBODY, 1, {"kind": "sound", "size": self._sound, "sum": self._crc})
        with contextlib.suppress(OSError):
            temporary, new = self._place.temporary(line, sync=False)
            self._place.disk.close(new)
            self._place.replace(temporary, self._place.top, self._note)

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
                yield position, data[:end]
            elif len(data) == size:
                size *= 2  # one very long line
            else:
                return
