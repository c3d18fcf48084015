"""Claim: who is alive. Whether an execution's owner is known to be dead, so that nobody has to wait for its lease.

Every owner (an executor or a worker; a process may hold several) keeps an exclusive `flock` on a file of its own in the
run directory of its host. The kernel frees it when the process ends, however it ends, so a free lock proves death,
which a process id cannot. The proof counts only if boot id, device, inode and the nonce in the file are all as the
owner's record has them. Otherwise the answer is "not proved", and the lease decides. A clean release removes the file.

A wrong answer would cost time, never data: the fencing number of the claim keeps a stale owner from committing.

The run directory must be on a local file system. On a network file system a lock can be lost while its holder lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from attrs import asdict, fields, frozen

from longrun import chance
from longrun.errors import CorruptDataError, StoreSettingsError, StoreUnavailableError

_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_STORE: Final = "run-directory"
_REMEDY: Final = "set LONGRUN_RUN_DIR to a local directory that only you can write to"

_SUFFIX: Final = ".life"
_DRAFT_SUFFIX: Final = ".life.new"
_OWNER: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NONCE: Final = re.compile(r"[0-9a-f]{32}")
_PART_OF_NONCE: Final = re.compile(rb"[0-9a-f]{0,32}")
STALE: Final = 6 * 3600.0
"""Seconds after which a lock file that nobody touched is looked at: its owner touches it more often."""
LOOKED_AT: Final = 1024
"""So many files in one sweep, by chance: a crowded directory costs little, and none of its files hides another."""

# O_NONBLOCK: opening a planted pipe must not hang.
_PROBE_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


# -- this host ---------------------------------------------------------------------------------------------------------


@functools.cache
def boot_id() -> str:
    """Names the running kernel's current boot; empty where that cannot be learnt, which means that nothing is proved.

    Another boot id under the same /etc/machine-id is no proof of death: container images share one machine id.
    """
    try:
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return _sysctl_boot_id() if sys.platform == "darwin" else ""


def _sysctl_boot_id() -> str:  # pragma: no cover -- runs on macOS alone
    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=5, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def run_directory() -> Path:
    """The directory of this user's lock files on this host: private, made when it is missing.

    `LONGRUN_RUN_DIR` if set, else `$XDG_RUNTIME_DIR/longrun`, else `longrun-<uid>` where temporary files go.
    """
    named = os.environ.get("LONGRUN_RUN_DIR")
    directory = Path(os.path.abspath(named)) if named else _default_directory()
    try:
        str(directory).encode()
        _make_private(directory)
        _check_private(directory, mend=not named)
    except UnicodeEncodeError as error:
        raise StoreSettingsError(_STORE, f"the name {directory!a} is not UTF-8; {_REMEDY}") from error
    except OSError as error:
        raise StoreSettingsError(_STORE, f"{directory}: {error.strerror}; {_REMEDY}") from error
    return directory


def _default_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime) and _is_own_directory(runtime):
        return Path(runtime, "longrun")
    try:
        return Path(os.path.abspath(tempfile.gettempdir()), f"longrun-{os.geteuid()}")
    except FileNotFoundError as error:
        raise StoreSettingsError(_STORE, f"no temporary directory can be written to; {_REMEDY}") from error


def _is_own_directory(path: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _make_private(directory: Path) -> None:
    """Makes the directory and what is missing above it, each 0700 whatever the umask."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_private(directory.parent)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            return
        except FileNotFoundError as error:
            raise StoreSettingsError(_STORE, f"{directory} cannot be made; {_REMEDY}") from error
    os.chmod(directory, 0o700)


def _check_private(directory: Path, *, mend: bool) -> None:
    """Refuses what others could tamper with. Only a directory that longrun named itself has its mode mended:
    one that the user named may be meant for others too, and be as important as /tmp."""
    info = os.lstat(directory)
    if stat.S_ISLNK(info.st_mode):
        raise StoreSettingsError(_STORE, f"{directory} is a symbolic link; {_REMEDY}")
    if not stat.S_ISDIR(info.st_mode):
        raise StoreSettingsError(_STORE, f"{directory} is not a directory; {_REMEDY}")
    if info.st_uid != os.geteuid():
        raise StoreSettingsError(_STORE, f"{directory} belongs to user {info.st_uid}, not {os.geteuid()}; {_REMEDY}")
    if mend and info.st_mode & 0o077:
        _mend_mode(directory)
    elif info.st_mode & 0o022:
        mode = stat.S_IMODE(info.st_mode)
        raise StoreSettingsError(_STORE, f"{directory} can be written to by others (mode {mode:04o}); {_REMEDY}")


def _mend_mode(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


# -- the record --------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Life:
    """What an owner leaves in the store, for others to tell whether it still lives."""

    owner: str
    host: str
    pid: int
    boot: str
    path: str
    device: int
    inode: int
    nonce: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Life:
        """Stored data is never trusted: what does not fit raises `CorruptDataError`; unknown keys are left out."""
        if not isinstance(data, dict):
            raise CorruptDataError("an owner record", f"it is a {type(data).__name__}, not an object")
        values: dict[str, Any] = {}
        for field in fields(cls):
            fits, expected = _CHECKS[field.name]
            if not fits(data.get(field.name)):
                raise CorruptDataError("an owner record", f"{field.name!r} is not {expected}")
            values[field.name] = data[field.name]
        return cls(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 255


def _is_path(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 4096 and value.startswith("/") and "\0" not in value


def _matches(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_CHECKS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "owner": (_matches(_OWNER), "an owner id"),
    "host": (_is_text, "a short text"),
    "pid": (_is_number, "a whole number"),
    "boot": (_is_text, "a short text"),
    "path": (_is_path, "an absolute path"),
    "device": (_is_number, "a whole number"),
    "inode": (_is_number, "a whole number"),
    "nonce": (_matches(_NONCE), "32 hexadecimal digits"),
}


# -- being alive -------------------------------------------------------------------------------------------------------


class LifeLock:
    """Held, it says that its owner lives. It ends with `release`, with the process, or when nothing refers to it."""

    def __init__(self, life: Life, descriptor: int) -> None:
        self.life = life
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls) -> LifeLock:
        directory = run_directory()
        try:
            return cls._create(directory)
        except OSError as error:
            raise StoreUnavailableError(_STORE, f"no lock file in {directory}: {error.strerror}") from error

    @classmethod
    def _create(cls, directory: Path) -> LifeLock:
        """The file gets its name only once it is complete and locked: nobody ever finds a nonce without its lock."""
        host, nonce = socket.gethostname(), secrets.token_hex(16)
        owner = _owner_id(host)
        path, draft = directory / (owner + _SUFFIX), directory / (owner + _DRAFT_SUFFIX)
        with _guard:  # a fork now would leave the child a descriptor that nobody closes
            descriptor = os.open(draft, _CREATE_FLAGS, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(descriptor, 0o600)
                _write_whole(descriptor, nonce.encode())
                os.rename(draft, path)
                info = os.fstat(descriptor)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft)
                os.close(descriptor)
                raise
            life = Life(
                owner=owner,
                host=host,
                pid=os.getpid(),
                boot=boot_id(),
                path=str(path),
                device=info.st_dev,
                inode=info.st_ino,
                nonce=nonce,
            )
            return cls(life, descriptor)

    @property
    def held(self) -> bool:
        """False after `release` and `abandon`, and in a forked child: the lock is its parent's."""
        return self._descriptor is not None

    def release(self) -> None:
        """Removes the file, then frees the lock. Others cannot prove this death: give the leases back first."""
        with _guard:
            if self._descriptor is None:
                return
            try:
                if _is_linked(self.life.path, self._descriptor):
                    os.unlink(self.life.path)
            except FileNotFoundError:
                pass  # a cleaner was quicker
            finally:
                self._close()

    def abandon(self) -> None:
        """Frees the lock and leaves the file: what a crash leaves."""
        with _guard:
            self._close()

    def touch(self) -> bool:
        """Keeps cleaners of temporary files away. False if one has come already: then only the lease can tell."""
        with _guard:
            if self._descriptor is None:
                return False
            os.utime(self._descriptor)
            return _is_linked(self.life.path, self._descriptor)

    def _close(self) -> None:
        # Closed, never unlocked: an unlock in a forked child would free the parent's lock as well.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.abandon()  # before the warning, which may be an error
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<LifeLock {self.life.owner} {'held' if self.held else 'not held'}>"


def _owner_id(host: str) -> str:
    short = re.sub(r"[^A-Za-z0-9._-]", "-", host)[:32].strip("._-") or "host"
    return f"{short}-{os.getpid()}-{secrets.token_hex(6)}"


def _write_whole(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _is_linked(path: str, descriptor: int) -> bool:
    """Whether the path still leads to the file that is open."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# -- forks -------------------------------------------------------------------------------------------------------------

# A forked child that kept the descriptor would keep the lock, and its dead parent would look alive. The guard is
# re-entrant because the garbage collector may close one lock in the middle of another's call.
_held: weakref.WeakSet[LifeLock] = weakref.WeakSet()
_guard = threading.RLock()


def _before_fork() -> None:
    _guard.acquire()


def _after_fork_in_parent() -> None:
    _guard.release()


def _after_fork_in_child() -> None:
    global _guard  # noqa: PLW0603 -- threads that wait for the old one do not exist in the child
    _guard = threading.RLock()
    for lock in list(_held):
        lock._close()
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# -- being dead --------------------------------------------------------------------------------------------------------


def is_dead(life: Life) -> bool:
    """True only if the death is proved; False says nothing, and the lease decides. Takes some microseconds.

    The lock belongs to an open file, not to a process: this process's own locks are seen as held, like any other's.
    """
    if not life.boot or not life.nonce or life.boot != boot_id():
        return False
    try:
        if not _is_same_file(life, os.lstat(life.path)):  # the path is stored data: look before opening, say, a device
            return False
        descriptor = os.open(life.path, _PROBE_FLAGS)
    except (OSError, ValueError):
        return False
    try:
        return (
            _is_same_file(life, os.fstat(descriptor))
            and os.read(descriptor, len(life.nonce) + 1) == life.nonce.encode()
            and _is_lock_free(descriptor)
        )
    except (OSError, ValueError):
        return False
    finally:
        os.close(descriptor)


def _is_same_file(life: Life, info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_ino == life.inode and info.st_dev == life.device


def _is_lock_free(descriptor: int) -> bool:
    """Takes the lock to find out. Shared, so that those who look at the same moment do not see one another."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep_run_directory(*, older_than: float = STALE, limit: int = 256) -> int:
    """Removes lock files of the dead that nobody touched for `older_than` seconds; at most `limit` files are opened.

    The age leaves others the time to see the death by the file; after that the lease has long expired. Safe to run
    in many processes at once. Returns how many files it removed.
    """
    directory = run_directory()
    before = time.time() - older_than
    try:
        names = [name for name in os.listdir(directory) if name.endswith((_SUFFIX, _DRAFT_SUFFIX))]
    except OSError as error:
        raise StoreUnavailableError(_STORE, f"{directory} cannot be listed: {error.strerror}") from error
    some = [os.path.join(directory, name) for name in chance.sample(names, min(len(names), LOOKED_AT))]
    stale = (path for path in some if _is_stale(path, before))
    return sum(_remove_if_dead(path) for path in islice(stale, limit))


def _is_stale(path: str, before: float) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_mtime < before


def _remove_if_dead(path: str) -> bool:
    try:
        descriptor = os.open(path, _PROBE_FLAGS)
    except OSError:
        return False  # gone, replaced or not ours to read: nothing to tidy here
    try:
        if not _is_ours(descriptor) or not _is_lock_free(descriptor) or not _is_linked(path, descriptor):
            return False
        os.unlink(path)
    except OSError:
        return False  # another sweep was quicker, or the directory cannot be written to: the next sweep sees it again
    finally:
        os.close(descriptor)
    return True


def _is_ours(descriptor: int) -> bool:
    """Whether it holds a nonce, or what a crash has left of one: a directory that the user named may hold other files
    of such a name."""
    return _PART_OF_NONCE.fullmatch(os.read(descriptor, 33)) is not None
