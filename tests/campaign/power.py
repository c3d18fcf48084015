"""A disk that loses its power: what was not synced is gone, or half gone, as POSIX allows.

Everything goes to a real directory. Beside it the model remembers what each file held when it was last synced, and
which names each directory had. A cut writes another directory as the disk might have come back: of a file, what was
synced and some first part of what came after; of a directory, the names as of its last sync and some of the changes
since, in their order.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field

from longrun.stores._file.disk import FILE_MODE, FOLDER_MODE, Disk


@define
class _File:
    keep: int
    """A descriptor of the model's own, so that the kernel does not give the number of a removed file to another."""
    synced: bytes = b""

    def now(self) -> bytes:
        return os.pread(self.keep, os.fstat(self.keep).st_size, 0)


@define
class _Directory:
    path: Path
    """Below the top."""
    names: list[dict[str, int]] = field(factory=lambda: [{}])
    """Since the last sync; the first is durable."""

    def change(self, name: str, number: int | None) -> None:
        entries = dict(self.names[-1])
        if number is None:
            entries.pop(name, None)
        else:
            entries[name] = number
        self.names.append(entries)


class PowerDisk(Disk):
    """Real system calls, remembered. It begins with everything under `top` durable."""

    def __init__(self, top: Path) -> None:
        self._lock = threading.RLock()
        self._files: dict[int, _File] = {}
        self._directories: dict[int, _Directory] = {}
        for folder, _, names in os.walk(top):
            here = _Directory(Path(folder).relative_to(top))
            self._directories[os.stat(folder).st_ino] = here
            for name in names:
                here.names[0][name] = self._know(os.open(Path(folder, name), os.O_RDONLY), durable=True)

    def _know(self, fd: int, *, durable: bool = False) -> int:
        number = os.fstat(fd).st_ino
        if number in self._files:
            os.close(fd)
        else:
            found = self._files[number] = _File(fd)
            found.synced = found.now() if durable else b""
        return number

    def _at(self, dir_fd: int) -> _Directory:
        return self._directories[os.fstat(dir_fd).st_ino]

    def dispose(self) -> None:
        for file in self._files.values():
            os.close(file.keep)
        self._files.clear()

    # the calls that change something, or make it durable

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        with self._lock:
            fd = super().open(name, flags, dir_fd)
            if flags & os.O_CREAT and dir_fd is not None:
                again = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
                number = self._know(again)
                if self._at(dir_fd).names[-1].get(name) != number:
                    self._at(dir_fd).change(name, number)
            return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        with self._lock:
            return super().write(fd, data)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            file = self._files[os.fstat(fd).st_ino]
            file.synced = file.now()

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        for fd in fds:
            self.fdatasync(fd)
        return [None] * len(fds)

    def fsync(self, fd: int) -> None:
        with self._lock:
            directory = self._directories.get(os.fstat(fd).st_ino)
            if directory is None:
                self.fdatasync(fd)
            else:
                del directory.names[:-1]

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        with self._lock:
            super().rename(old, new, old_dir, new_dir)
            self._at(new_dir).change(new, self._at(old_dir).names[-1][old])
            self._at(old_dir).change(old, None)

    def link(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        with self._lock:
            super().link(old, new, old_dir, new_dir)
            self._at(new_dir).change(new, self._at(old_dir).names[-1][old])

    def unlink(self, name: str, dir_fd: int) -> None:
        with self._lock:
            super().unlink(name, dir_fd)
            self._at(dir_fd).change(name, None)

    # the cut

    def cut(self, to: Path, dice: random.Random) -> None:
        """Write to a new directory what the disk might hold after losing its power now."""
        with self._lock:
            contents = {number: _survives(file, dice) for number, file in self._files.items()}
            for directory in sorted(self._directories.values(), key=lambda one: len(one.path.parts)):
                place = to / directory.path
                place.mkdir(mode=FOLDER_MODE)
                last = dice.choice([0, len(directory.names) - 1, dice.randrange(len(directory.names))])
                for name, number in directory.names[last].items():
                    (place / name).touch(FILE_MODE)
                    (place / name).write_bytes(contents[number])


def _survives(file: _File, dice: random.Random) -> bytes:
    now = file.now()
    if not now.startswith(file.synced):  # it was cut shorter since: that may be durable, or not
        return dice.choice([file.synced, now])
    return now[: dice.choice([len(file.synced), len(now), dice.randint(len(file.synced), len(now))])]
