"""Every system call of the file store goes through `Disk`, so that tests can make any of them fail.

Place in the life of an execution: checkpoint. Above it stands `Folder`, a directory held by its descriptor: names are
looked up in it and nowhere else, no symbolic link is followed, and what it creates is private whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence

from longrun.errors import CorruptDataError

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a file's place must not keep us waiting
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
FILE_MODE = 0o600
FOLDER_MODE = 0o700
READ_SIZE = 1 << 20
_THIS_FILE_ONLY = {
    errno.EACCES: os.strerror(errno.EACCES),
    errno.EPERM: os.strerror(errno.EPERM),
    errno.EISDIR: "it is a directory",
    errno.ELOOP: "it is a symbolic link",
    errno.ENXIO: "it is no regular file",
}
"""Why one file cannot be opened while the disk is well: whatever else goes wrong concerns all of them."""


class UnopenableError(OSError):
    """One file that may not be opened, or that is no regular file."""

    def __init__(self, code: int, problem: str, file: str) -> None:
        super().__init__(code, problem)
        self.file, self.problem = file, problem


class UnreadableFileError(CorruptDataError):
    """An execution with such a file. Nothing is known to be damaged: once the file can be opened, it goes on."""

    def __init__(self, id: str, error: UnopenableError) -> None:
        super().__init__(
            f"execution {id!r}", f"{error.file} cannot be opened ({error.problem}); it goes on once that is mended"
        )
        self.args = (f"{self.what} cannot be read: {self.problem}",)


class Disk:
    """The system calls, as they are. A test overrides one and counts, fails or shortens it."""

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return os.open(name, flags | _SAFE, FILE_MODE, dir_fd=dir_fd)

    def folder(self, path: str, dir_fd: int | None = None, *, follow: bool = False) -> int:
        """A directory's descriptor."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(path, flags if follow else flags | os.O_NOFOLLOW, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def again(self, fd: int) -> int:
        """Another descriptor of an open file."""
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def chmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def fdatasync(self, fd: int) -> None:
        if _FULL_SYNC is not None:  # the drive keeps its cache otherwise
            fcntl.fcntl(fd, _FULL_SYNC)
        else:
            os.fdatasync(fd)

    def sync_all(self, fds: Sequence[int]) -> list[OSError | None]:
        """Fdatasync many files with one call, and answer for each of the first so many that it was done for. If it
        raises, none of them is known to be durable. Not every system has such a call: `queue` looks for it."""
        return []

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def link(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        os.link(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir, follow_symlinks=False)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def size(self, fd: int) -> int:
        """Of a file that is only appended to or read at given places: it moves the position to the end."""
        return os.lseek(fd, 0, os.SEEK_END)

    def utime(self, name: str, moment: float, dir_fd: int) -> None:
        os.utime(name, (moment, moment), dir_fd=dir_fd, follow_symlinks=False)

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        os.mkdir(name, FOLDER_MODE, dir_fd=dir_fd)

    def parents(self, path: str) -> None:
        """Make the directories above one; their modes are the umask's."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)

    def space(self, fd: int) -> os.statvfs_result:
        return os.fstatvfs(fd)

    def names(self, dir_fd: int) -> list[str]:
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=dir_fd)  # two threads must not share a position
        try:
            return os.listdir(own)
        finally:
            os.close(own)

    def lock(self, fd: int, *, wait: bool, shared: bool = False) -> bool:
        """Take the flock of an open file; False if somebody else has it and `wait` is false."""
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, how if wait else how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def write_all(disk: Disk, fd: int, data: bytes) -> None:
    """Write every byte: one call may write less than it was given, and may be interrupted."""
    left: bytes | memoryview = data
    while left:
        try:
            written = disk.write(fd, left)
        except InterruptedError:
            continue
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        if written == len(left):
            return
        left = memoryview(left)[written:]


def read_range(disk: Disk, fd: int, start: int, end: int | None = None) -> bytes:
    """The bytes from `start` to `end` or to the end of the file, whichever comes first."""
    parts: list[bytes] = []
    while end is None or start < end:
        part = disk.pread(fd, READ_SIZE if end is None else min(READ_SIZE, end - start), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Folder:
    """A directory, held open. Every name given to it is one path component."""

    def __init__(self, disk: Disk, fd: int, path: str) -> None:
        self.disk, self.fd, self.path = disk, fd, path
        self.unsettled: dict[int, int] = {}
        """By inode: the size up to which a file that we are writing to is durable and ours. Readers see no more."""
        self.torn: set[str] = set()
        """Names of files that could not be made durable: they, or something at their end that could not be cut off."""

    def names(self) -> list[str]:
        return self.disk.names(self.fd)

    def stat(self, name: str) -> os.stat_result | None:
        """None if there is no such file; any other trouble is raised, never taken for absence."""
        try:
            return self.disk.stat(name, self.fd)
        except FileNotFoundError:
            return None

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A regular file's descriptor; `UnopenableError` if this one file cannot be had, whatever the others do."""
        try:
            fd = self.disk.open(name, flags, self.fd)
        except OSError as error:
            if error.errno not in _THIS_FILE_ONLY or flags & os.O_CREAT:
                raise
            raise UnopenableError(error.errno, _THIS_FILE_ONLY[error.errno], f"{self.path}/{name}") from error
        try:
            mode = self.disk.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
                raise UnopenableError(code, _THIS_FILE_ONLY[code], f"{self.path}/{name}")
        except BaseException:
            self.disk.close(fd)
            raise
        return fd

    def settled_size(self, fd: int) -> int:
        """How much of an open file may be shown. The order counts: what was written meanwhile is not in `status`, and
        what was being written before is either settled by now or known as unsettled."""
        status = self.disk.fstat(fd)
        return min(status.st_size, self.unsettled.get(status.st_ino, status.st_size))

    @contextlib.contextmanager
    def opened(self, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
        fd = self.open(name, flags)
        try:
            yield fd
        finally:
            self.disk.close(fd)

    def create(self, name: str, flags: int = os.O_RDWR) -> int:
        """A new file, empty and private; `FileExistsError` if the name is taken."""
        fd = self.disk.open(name, flags | os.O_CREAT | os.O_EXCL, self.fd)
        try:
            if stat.S_IMODE(self.disk.fstat(fd).st_mode) != FILE_MODE:  # an odd umask
                self.disk.chmod(fd, FILE_MODE)
        except OSError:
            self.disk.close(fd)
            raise
        return fd

    def open_or_create(self, name: str, flags: int = os.O_RDWR | os.O_APPEND) -> tuple[int, bool]:
        """The file's descriptor, and whether it was made just now."""
        while True:
            try:
                return self.open(name, flags), False
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # somebody was quicker: open theirs
                    return self.create(name, flags), True

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with self.opened(name) as fd:
            size = self.settled_size(fd)
            return read_range(self.disk, fd, start, size if end is None else min(size, end))

    def remove(self, name: str) -> bool:
        """Unlink; False if there was nothing."""
        try:
            self.disk.unlink(name, self.fd)
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        """Make created, renamed and removed names durable."""
        self.disk.fsync(self.fd)


class HeldFile:
    """A file that is added to, and now and then replaced by another one. It is held open: what was read of it is true
    of the file of that inode only as long as no other one can get that."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self.fd = self._ino = -1

    def look(self) -> os.stat_result | None:
        """Have the file open that has the name now; None if there is none."""
        status = self._folder.stat(self._name)
        if status is not None and status.st_ino == self._ino:
            return status
        try:
            fd = self._folder.open(self._name)
        except FileNotFoundError:
            self.close()
            return None
        self.close()
        try:
            status = self._folder.disk.fstat(fd)
        except OSError:
            close_all(self._folder.disk, (fd,))
            raise
        self.fd, self._ino = fd, status.st_ino
        return status

    def close(self) -> None:
        if self.fd >= 0:
            close_all(self._folder.disk, (self.fd,))
        self.fd = self._ino = -1


def open_folder(disk: Disk, path: str, dir_fd: int | None = None, *, follow: bool = False) -> Folder:
    """Open a directory; only the store's own top may be reached through a symbolic link."""
    return Folder(disk, disk.folder(path, dir_fd, follow=follow), path)


def close_all(disk: Disk, fds: Sequence[int]) -> None:
    for fd in fds:
        try:  # noqa: SIM105  # in fewer steps: one is closed at every end
            disk.close(fd)
        except OSError:  # nothing is pending on it: what was acknowledged has been synced
            pass


def make_room(count: int) -> None:
    """Have the table of descriptors grow at once for that many. Linux doubles it each time that it is full, and as soon
    as there are threads whoever opens a file then waits for 10 or 20 ms."""
    with contextlib.suppress(OSError):  # there are fewer to be had: it grows as it is needed
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, count - 1))
        finally:
            os.close(fd)
