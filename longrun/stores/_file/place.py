"""The directory of a file store: what it is made of, how files are named, and what all processes on it share.

Place in the life of an execution: before all of it. ::

    longrun.json     the format; whoever opens the directory checks it
    live/            one journal an execution and claim: NAME.GENERATION.jsonl. Generation 0 stays for the execution's
                     life: it says that the id is taken and, once it is over, where to look for the newest one
    done/            NAME.jsonl, the last journal of what is finished; NAME.inbox, its messages
    finished.jsonl   a summary of each journal in done/
    finished.sum     how much of that was found sound, a checksum of it, and what it does not hold; may be missing
    history/         rows of old checkpoints, moved out of journals that grew
    inbox/           messages that wait
    owners/          one file a process; its time of change is the moment its lease runs out
    quarantine/      bytes that did not fit their checksum
    tmp/             files that are not complete yet
    bell             grows when something changed that others wait for: the names of the files

A name is an execution's id, quoted; a long one is cut and ends in a hash. The id inside the file rules.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote
from zlib import crc32

from longrun.errors import NewerFormatError, StoreReadOnlyError, StoreSettingsError, StoreUnavailableError
from longrun.stores._file.disk import FOLDER_MODE, Disk, Folder, close_all, open_folder, read_range, write_all
from longrun.stores._file.tallies import Tallies

KIND = "file"
FORMAT = 1
MARKER = "longrun.json"
BELL = "bell"
LOCK = "lock"
FINISHED_INDEX = "finished.jsonl"
FINISHED_NOTE = "finished.sum"
BELL_LIMIT = 1 << 18
BELL_NAMES = 500
EVERYTHING = "*"
"""Rung instead of names where there are too many of them."""
NAME_LIMIT = 160
_PLAIN = re.compile(rf"[A-Za-z0-9_.~-]{{1,{NAME_LIMIT}}}")
"""An id that is its own name: quoting leaves all of these as they are."""
LOCK_PATIENCE = 10.0
STALE_TEMPORARY = 3600.0
_FOLDERS = ("live", "done", "history", "inbox", "owners", "quarantine", "tmp")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)


def stem_of(id: str) -> str:
    """The file name of an id, or of an owner: never a path, never two ids on one name."""
    if _PLAIN.fullmatch(id):
        return id
    name = quote(id, safe="", errors="surrogatepass")
    if len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    return f"{name[: NAME_LIMIT - 42]}%h{digest}"  # no quoted name holds %h


def id_of(stem: str) -> str:
    """The id that a file's name tells; of a long one, which was cut, only its beginning and the hash."""
    try:
        return unquote(stem, errors="surrogatepass")
    except UnicodeDecodeError:  # cut within a character, or no name of ours
        return unquote(stem, errors="backslashreplace")


def journal_name(stem: str, gen: int) -> str:
    return f"{stem}.{gen}.jsonl"


def done_name(stem: str) -> str:
    return f"{stem}.jsonl"


def done_inbox_name(stem: str) -> str:
    return f"{stem}.inbox"


def parse_journal_name(name: str) -> tuple[str, int] | None:
    """Stem and generation; None for a file that is no journal."""
    if not name.endswith(".jsonl"):
        return None
    stem, dot, number = name[:-6].rpartition(".")
    if not dot or not number.isascii() or not number.isdigit():
        return None
    return stem, int(number)


def unavailable(error: OSError, doing: str) -> StoreUnavailableError:
    """The error for callers; file names stay out of it, the cause keeps them."""
    wrapped = StoreUnavailableError(KIND, f"{doing}: {error.strerror or type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


class Place:
    """The open directory."""

    def __init__(self, path: str, disk: Disk) -> None:
        self.path, self.disk = path, disk
        self._numbers = itertools.count()
        self._nonce = os.urandom(6).hex()
        self.tallies = Tallies()
        self._doubtful: set[Folder] = set()
        self._held: list[int] = []
        self.read_only = False
        """Whether the file system takes no writes: a backup, a snapshot. Then everything can be looked at."""
        self.top = self._hold(_open_top(disk, path))
        try:
            _check_marker(self.top, path, self.temporary_name())
            self.live, self.done, self.history, self.inbox, self.owners, self.quarantine, self.tmp = (
                self._hold(_subfolder(self.top, name)) for name in _FOLDERS
            )
            self._bell = self._open_bell()
            self._ringing, self._rung_here = threading.Lock(), 0
            self._held.append(self._bell)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _settings(path, error) from error
            raise

    def _hold(self, folder: Folder) -> Folder:
        self._held.append(folder.fd)
        return folder

    def _open_bell(self) -> int:
        """The first file that is opened to be written to, and so where it shows whether that can be."""
        try:
            return self.top.open_or_create(BELL)[0]
        except OSError as error:
            if error.errno != errno.EROFS or self.top.stat(BELL) is None:
                raise
            self.read_only = True
            return self.top.open(BELL)

    def check_writable(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(KIND, f"{self.path!r} is on a read-only file system")

    def close(self) -> None:
        close_all(self.disk, self._held)
        self._held = []

    def ping(self) -> None:
        try:
            here, there = self.top.stat(MARKER), self.disk.stat(os.path.join(self.path, MARKER))
        except OSError as error:
            raise unavailable(error, "the directory cannot be read") from error
        if here is None or here.st_ino != there.st_ino:
            raise StoreUnavailableError(KIND, "the directory was replaced by another one")

    # files that appear complete

    def temporary_name(self) -> str:
        return f".{os.getpid()}-{self._nonce}-{next(self._numbers)}"

    def temporary(self, data: bytes, *, sync: bool) -> tuple[str, int]:
        """A new file in tmp/ with these bytes: its name, and its descriptor, which is the caller's to close."""
        name = self.temporary_name()
        fd = self.tmp.create(name, os.O_RDWR | os.O_APPEND)
        try:
            write_all(self.disk, fd, data)
            if sync:
                self.disk.fsync(fd)
        except BaseException:
            self.disk.close(fd)
            self.drop_temporary(name)
            raise
        return name, fd

    def drop_temporary(self, name: str) -> None:
        try:  # noqa: SIM105  # in fewer steps: there is one at every start
            self.disk.unlink(name, self.tmp.fd)
        except OSError:  # it is gone, or swept at some later opening
            pass

    def publish(self, temporary: str, folder: Folder, name: str) -> bool:
        """Give a temporary file its name by link(2); False if the name is taken."""
        try:
            self.disk.link(temporary, name, self.tmp.fd, folder.fd)
        except FileExistsError:
            return False
        finally:
            self.drop_temporary(temporary)
        return True

    def replace(self, temporary: str, folder: Folder, name: str) -> None:
        try:
            self.disk.rename(temporary, name, self.tmp.fd, folder.fd)
        except BaseException:
            self.drop_temporary(temporary)
            raise

    def sweep(self) -> None:
        """Remove temporary files that a dead process left behind, long ago."""
        if self.read_only:
            return
        for name in self.tmp.names():
            status = self.tmp.stat(name)
            if status is not None and time.time() - status.st_mtime > STALE_TEMPORARY:
                self.tmp.remove(name)

    def sync_names(self, *folders: Folder) -> None:
        """Make new names durable. Where that failed once, nothing is acknowledged until it has worked."""
        self._doubtful.update(folders)
        for folder in list(self._doubtful):
            folder.sync()
            self._doubtful.discard(folder)

    # what processes share

    def ring(self, names: Iterable[str]) -> None:
        """Tell everybody on this directory which files changed. Only a hint: nothing is lost when it is."""
        changed = list(names)
        if not changed:
            return
        data = "".join(f"{name}\n" for name in (changed if len(changed) <= BELL_NAMES else [EVERYTHING])).encode()
        with contextlib.suppress(OSError), self._ringing:  # what it tells of is durable; others find it when they look
            if self.bell() > BELL_LIMIT:
                self.disk.truncate(self._bell, 0)
            write_all(self.disk, self._bell, data)
            self._rung_here += len(data)

    def bell(self) -> int:
        """How far it was rung, by anybody."""
        return self.disk.fstat(self._bell).st_size

    def bell_of_others(self) -> int:
        """A number that changes when others ring, and now and then without that."""
        with self._ringing:
            return self.bell() - self._rung_here

    def rung(self, since: int) -> tuple[int, list[str]]:
        """Where the bell stands, and what was rung behind `since`."""
        data = read_range(self.disk, self._bell, since)
        end = data.rfind(b"\n") + 1
        return since + end, data[:end].decode("ascii", "replace").split("\n")[:-1]

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Keeps journals from leaving live/ or done/ (shared), or lets one process make them leave."""
        fd, _ = self.top.open_or_create(LOCK, os.O_RDONLY if shared else os.O_RDWR)
        try:
            self._take_lock(fd, "the directory", shared=shared)
            yield
        finally:
            close_all(self.disk, [fd])

    def open_locked(self, folder: Folder, name: str) -> int:
        """Open or make a file to append to, locked, and sure to be the one that has the name now."""
        while True:
            fd, _ = folder.open_or_create(name)
            try:
                self._take_lock(fd, "a file")
                status = folder.stat(name)
                if status is not None and status.st_ino == self.disk.fstat(fd).st_ino:
                    return fd
            except BaseException:
                self.disk.close(fd)
                raise
            self.disk.close(fd)

    def _take_lock(self, fd: int, what: str, *, shared: bool = False) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE
        while not self.disk.lock(fd, wait=False, shared=shared):
            if time.monotonic() > deadline:
                raise StoreUnavailableError(KIND, f"{what} stays locked by another process, perhaps a stopped one")
            time.sleep(0.001)

    def keep_aside(self, stem: str, data: bytes) -> str:
        """Copy damaged bytes to quarantine/, once; a few words on where they are."""
        try:
            return f"kept in quarantine/{self.set_aside(stem, data)}"
        except OSError as error:
            return f"they could not be copied to quarantine: {error.strerror}"

    def set_aside(self, stem: str, data: bytes) -> str:
        """The same where the bytes go after this: the name of the copy, or an error."""
        name = f"{stem}.{len(data)}.{crc32(data):08x}"
        if self.quarantine.stat(name) is None:
            temporary, fd = self.temporary(data, sync=True)
            self.disk.close(fd)
            self.quarantine.torn.add(name)  # until its name is durable too
            self.publish(temporary, self.quarantine, name)
        if name in self.quarantine.torn:
            self.quarantine.sync()
            self.quarantine.torn.discard(name)
        return name


def _settings(path: str, error: OSError) -> StoreSettingsError | StoreUnavailableError:
    if error.errno in _REFUSED:
        return StoreSettingsError(KIND, f"{path!r} cannot be used as a directory of ours: {error.strerror}")
    return unavailable(error, "the directory cannot be opened")


def _open_top(disk: Disk, path: str) -> Folder:
    try:
        try:
            disk.parents(path)
            disk.mkdir(path)
        except FileExistsError:
            return open_folder(disk, path, follow=True)
        return _made_private(open_folder(disk, path, follow=True))
    except OSError as error:
        raise _settings(path, error) from error


@contextlib.contextmanager
def _unless_read_only() -> Iterator[None]:
    """What a read-only file system refuses is left as it is."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def _subfolder(top: Folder, name: str) -> Folder:
    with contextlib.suppress(FileExistsError), _unless_read_only():
        top.disk.mkdir(name, top.fd)
        top.sync()
    return _made_private(open_folder(top.disk, name, top.fd), name)


def _made_private(folder: Folder, name: str | None = None) -> Folder:
    """The folder, with its mode put right; one of ours, by its name, must not belong to somebody else."""
    try:
        status = folder.disk.fstat(folder.fd)
        if name is not None and os.geteuid() not in (0, status.st_uid):
            raise PermissionError(errno.EPERM, f"{name}/ in it belongs to another user")
        if status.st_mode & 0o777 != FOLDER_MODE:
            with _unless_read_only():
                folder.disk.chmod(folder.fd, FOLDER_MODE)
    except BaseException:
        close_all(folder.disk, [folder.fd])
        raise
    return folder


def _check_marker(top: Folder, path: str, temporary: str) -> None:
    """Read the marker, or make it if the directory is empty."""
    if top.stat(MARKER) is None:
        if any(not name.startswith(".") and name != MARKER for name in top.names()) and top.stat(MARKER) is None:
            raise StoreSettingsError(KIND, f"{path!r} {_strange(top)}")
        _make_marker(top, temporary)
    text = top.read(MARKER)
    try:
        marker = json.loads(text)
        found = marker["format"]
        ours = marker["store"] == KIND
    except (ValueError, KeyError, TypeError):
        raise StoreSettingsError(KIND, f"{MARKER} in {path!r} cannot be read") from None
    if not ours or not isinstance(found, int):
        raise StoreSettingsError(KIND, f"{path!r} belongs to another kind of store")
    if found > FORMAT:
        raise NewerFormatError(f"the directory {path!r}", found, FORMAT)


def _strange(top: Folder) -> str:
    """What a directory without a marker is. The marker is not made anew: a newer longrun may have written there."""
    if not {"live", "done", "inbox"} <= set(top.names()):
        return "holds files of something else; give it a directory of its own"
    return (
        f"looks like a store whose {MARKER} is gone: restore that file, or, if no newer longrun has written there, "
        f"make it anew with the line {_marker_line().decode()}"
    )


def _marker_line() -> bytes:
    return json.dumps({"store": KIND, "format": FORMAT}).encode()


def _make_marker(top: Folder, temporary: str) -> None:
    fd = top.create(temporary)
    try:
        write_all(top.disk, fd, _marker_line() + b"\n")
        top.disk.fsync(fd)
        with contextlib.suppress(FileExistsError):  # another process opens the same directory for the first time
            top.disk.link(temporary, MARKER, top.fd, top.fd)
        top.sync()
    finally:
        top.disk.close(fd)
        top.remove(temporary)
