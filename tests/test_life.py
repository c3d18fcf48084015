"""Who is alive: a death is seen at once when it is proved, and never guessed (the first half of I4)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from longrun import life as life_module
from longrun.errors import CorruptDataError, StoreUnavailableError
from longrun.life import Life, LifeLock, boot_id, is_dead, run_directory

IMPORT_PATH = os.pathsep.join([str(Path(life_module.__file__).resolve().parents[1]), *sys.path])
NOBODY = 65534

HOLD = """
import json, signal, sys
from longrun.life import LifeLock
lock = LifeLock.acquire()
print(json.dumps(lock.life.to_dict()), flush=True)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("LONGRUN_RUN_DIR", str(path))
    return path


@contextlib.contextmanager
def script(code: str, *arguments: str, counted: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own; it and what it left behind end when its standard input does. What forks while other
    threads run must not be counted for coverage: its children would wait for a lock that nobody gives back."""
    left_out = () if counted else ("COVERAGE_PROCESS_CONFIG",)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k not in left_out}, "PYTHONPATH": IMPORT_PATH},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def send_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def read_life(process: subprocess.Popen[str]) -> Life:
    return Life.from_dict(json.loads(read_line(process)))


def dead_life() -> Life:
    lock = LifeLock.acquire()
    lock.abandon()
    assert is_dead(lock.life)
    return lock.life


def lock_is_free(path: str | os.PathLike[str]) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


# -- the life and death of real processes ------------------------------------------------------------------------------


def test_a_killed_process_is_seen_as_dead_at_once():
    """I4: SIGKILL frees the lock; nobody waits for a lease."""
    with script(HOLD + "signal.pause()") as holder:
        life = read_life(holder)
        assert life.pid == holder.pid
        assert not is_dead(life)
        holder.kill()
        holder.wait()
        assert is_dead(life)


def test_a_process_that_exits_without_release_is_seen_as_dead():
    with script(HOLD + "sys.stdin.readline(); import os; os._exit(0)") as holder:
        life = read_life(holder)
        assert not is_dead(life)
        send_line(holder, "go")
        holder.wait()
        assert is_dead(life)


def test_a_stopped_process_is_not_dead():
    """It may go on at any time: only its lease and the fence can part it from its executions."""
    with script(HOLD + "signal.pause()") as holder:
        life = read_life(holder)
        holder.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(holder.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert not is_dead(life)


FORK = """
import os
from longrun.life import is_dead
if os.fork() == 0:
    before = lock.held
    lock.touch(); lock.release(); lock.abandon()
    own = LifeLock.acquire()
    print(before, is_dead(lock.life), os.path.exists(lock.life.path), own.held, own.life.pid == os.getpid(), flush=True)
    own.release()
    print(sys.stdin.readline().strip(), flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


def test_a_forked_child_neither_frees_its_parents_lock_nor_keeps_it():
    """The child's lock object is inert, it can take a lock of its own, and it outlives its parent without hiding it."""
    with script(HOLD + FORK) as parent:
        life = read_life(parent)
        held, dead, exists, own_held, own_pid = read_line(parent).split()
        assert (held, dead, exists, own_held, own_pid) == ("False", "False", "True", "True", "True")
        assert not is_dead(life)
        parent.kill()
        parent.wait()
        assert is_dead(life)
        send_line(parent, "the child lives")
        assert read_line(parent) == "the child lives"


FORK_STORM = """
import os, sys, threading
from longrun.life import LifeLock, is_dead

def lock_files_open():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += ".life" in os.readlink("/proc/self/fd/" + name)
        except FileNotFoundError:
            pass
    return found

ended = threading.Event()
def churn():
    while not ended.is_set():
        LifeLock.acquire().release()

kept = LifeLock.acquire()
assert lock_files_open() >= 1
thread = threading.Thread(target=churn)
thread.start()
leaks = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        leaked = lock_files_open()
        LifeLock.acquire().release()
        os._exit(1 if leaked else 0)
    leaks += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
ended.set()
thread.join()
print(leaks, is_dead(kept.life), flush=True)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted through /proc")
def test_a_fork_at_any_moment_leaves_no_descriptor_in_the_child():
    """A fork waits while another thread is between opening a lock file and noting its descriptor."""
    with script(FORK_STORM, "150", counted=False) as process:
        assert read_line(process) == "0 False"


def test_a_program_started_by_the_owner_does_not_inherit_the_lock():
    start = (
        "import subprocess; subprocess.Popen(['cat'], close_fds=False); print('started', flush=True); signal.pause()"
    )
    with script(HOLD + start) as holder:
        life = read_life(holder)
        assert read_line(holder) == "started"
        holder.kill()
        holder.wait()
        assert is_dead(life)
        send_line(holder, "the program lives")
        assert read_line(holder) == "the program lives"


# -- owners within one process -----------------------------------------------------------------------------------------


def test_owners_of_one_process_live_and_die_on_their_own():
    first, second = LifeLock.acquire(), LifeLock.acquire()
    assert first.life.owner != second.life.owner
    assert not is_dead(first.life)
    first.abandon()
    assert is_dead(first.life)
    assert not is_dead(second.life)
    second.release()


def test_release_removes_the_file_and_can_be_repeated(directory: Path):
    lock = LifeLock.acquire()
    assert [entry.name for entry in directory.iterdir()] == [f"{lock.life.owner}.life"]
    lock.release()
    lock.release()
    lock.abandon()
    assert not lock.held
    assert not lock.touch()
    assert list(directory.iterdir()) == []


def test_release_leaves_a_file_that_is_not_its_own():
    lock = LifeLock.acquire()
    path = Path(lock.life.path)
    path.unlink()
    path.write_text("another's")
    lock.release()
    assert path.read_text() == "another's"


def test_release_does_not_close_a_descriptor_number_that_was_given_out_again():
    lock = LifeLock.acquire()
    lock.abandon()
    with open(os.devnull) as other:
        lock.release()
        lock.abandon()
        os.fstat(other.fileno())


def test_an_owner_that_nothing_refers_to_any_more_is_dead():
    """An executor lost inside a living process does not hold its executions for ever; the loss is warned of."""
    lock = LifeLock.acquire()
    life = lock.life
    alone = [lock]
    del lock
    with pytest.warns(ResourceWarning, match=life.owner):
        alone.clear()
    assert is_dead(life)


def test_touch_renews_the_files_time_and_says_whether_it_is_there():
    lock = LifeLock.acquire()
    os.utime(lock.life.path, (0, 0))
    assert lock.touch()
    assert os.stat(lock.life.path).st_mtime > time.time() - 3600
    os.unlink(lock.life.path)
    assert not lock.touch()
    lock.release()
    assert not lock.held


def test_the_file_is_locked_whenever_it_has_its_name(monkeypatch: pytest.MonkeyPatch):
    """Locked before it gets its name, and still locked when it loses it."""
    seen: list[tuple[str, bool]] = []
    rename, unlink = os.rename, os.unlink

    def watch_rename(source: Path, target: Path) -> None:
        seen.append(("rename", lock_is_free(source)))
        assert not target.exists()
        rename(source, target)

    def watch_unlink(path: str) -> None:
        seen.append(("unlink", lock_is_free(path)))
        unlink(path)

    monkeypatch.setattr(os, "rename", watch_rename)
    monkeypatch.setattr(os, "unlink", watch_unlink)
    LifeLock.acquire().release()
    assert seen == [("rename", False), ("unlink", False)]


def test_a_failed_acquire_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    run_directory()
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        LifeLock.acquire()
    assert list(directory.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == before


def test_a_short_write_is_completed(monkeypatch: pytest.MonkeyPatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        lock = LifeLock.acquire()
    assert Path(lock.life.path).read_text() == lock.life.nonce
    lock.abandon()
    assert is_dead(lock.life)


# -- what proves nothing -----------------------------------------------------------------------------------------------


def test_a_missing_file_proves_nothing():
    life = dead_life()
    os.unlink(life.path)
    assert not is_dead(life)


def test_another_file_of_the_same_name_and_content_proves_nothing():
    life = dead_life()
    copy = Path(life.path + ".copy")
    copy.write_text(life.nonce)
    os.replace(copy, life.path)
    assert os.stat(life.path).st_ino != life.inode
    assert not is_dead(life)


@pytest.mark.parametrize("change", ["device", "inode"])
def test_another_device_or_inode_proves_nothing(change: str):
    life = dead_life()
    assert not is_dead(evolve(life, **{change: getattr(life, change) + 1}))


@pytest.mark.parametrize("content", ["", "0" * 32, "{nonce}0", "{short}"])
def test_another_nonce_proves_nothing(content: str):
    """A file system gives the inode of a removed file to the next one."""
    life = dead_life()
    Path(life.path).write_text(content.format(nonce=life.nonce, short=life.nonce[:-1]))
    assert os.stat(life.path).st_ino == life.inode
    assert not is_dead(life)
    assert not is_dead(evolve(life, nonce=""))


def test_another_boot_proves_nothing():
    """The record may be from another machine, or from a container with a boot id of its own."""
    life = dead_life()
    assert not is_dead(evolve(life, boot="00000000-0000-0000-0000-000000000000"))


def test_an_unknown_boot_proves_nothing(monkeypatch: pytest.MonkeyPatch):
    life = dead_life()
    monkeypatch.setattr(life_module, "boot_id", lambda: "")
    assert not is_dead(evolve(life, boot=""))


def test_a_planted_symbolic_link_proves_nothing():
    life = dead_life()
    moved = life.path + ".moved"
    os.rename(life.path, moved)
    os.symlink(moved, life.path)
    assert os.stat(life.path).st_ino == life.inode
    assert not is_dead(life)


def test_what_is_not_a_plain_file_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The path is stored data: to open a pipe could hang, to open a device could do harm."""
    life, pipe = dead_life(), tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    for path in (pipe, tmp_path):
        info = os.stat(path)
        assert not is_dead(evolve(life, path=str(path), device=info.st_dev, inode=info.st_ino))


@pytest.mark.parametrize("path", ["/a\0b", "/" + "x" * 300, "/\udcff", ""])
def test_an_impossible_path_proves_nothing(path: str):
    assert not is_dead(evolve(dead_life(), path=path))


PROBE = """
import json, os, sys
from longrun.life import Life, boot_id, is_dead
boot_id()
if sys.argv[2] != "-":
    os.setgroups([]); os.setuid(int(sys.argv[2]))
print(is_dead(Life.from_dict(json.loads(sys.argv[1]))), flush=True)
"""


def test_an_unreadable_file_proves_nothing():
    """Root reads every file, so there the question is put by another user."""
    life = dead_life()
    os.chmod(life.path, 0o000)
    user = str(NOBODY) if os.geteuid() == 0 else "-"
    with script(PROBE, json.dumps(life.to_dict()), user) as process:
        assert read_line(process) == "False"
    os.chmod(life.path, 0o600)
    with script(PROBE, json.dumps(life.to_dict()), "-") as process:
        assert read_line(process) == "True"


def test_those_who_look_at_the_same_moment_do_not_see_one_another():
    life = dead_life()
    with open(life.path) as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert is_dead(life)


def test_looking_leaves_no_descriptor_and_no_lock():
    living, life = LifeLock.acquire(), dead_life()
    before = len(os.listdir("/dev/fd"))
    for _ in range(9):
        assert is_dead(life)
        assert not is_dead(living.life)
        assert not is_dead(evolve(life, nonce="0" * 32))
    assert len(os.listdir("/dev/fd")) == before
    with open(life.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    living.release()


def test_looking_costs_microseconds():
    """A store asks this of every owner that it meets in a sweep; the best of many runs is about 10 µs."""
    life = dead_life()
    best = min(timeit.repeat(lambda: is_dead(life), number=100, repeat=20)) / 100
    assert best < 50e-6


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_record_names_its_owner_and_survives_json():
    lock = LifeLock.acquire()
    life = lock.life
    assert life_module._OWNER.fullmatch(life.owner)
    assert str(os.getpid()) in life.owner
    assert len(life.owner) < 64
    assert (life.host, life.pid, life.boot) == (socket.gethostname(), os.getpid(), boot_id())
    assert Life.from_dict(json.loads(json.dumps(life.to_dict()))) == life
    assert Life.from_dict({**life.to_dict(), "added": "by a later version"}) == life
    lock.release()


@pytest.mark.parametrize("host", ["", "...", "ünïcode.example", "a b/c\0d", "x" * 300])
def test_any_host_name_gives_a_usable_owner_id(host: str):
    owner = life_module._owner_id(host)
    assert life_module._OWNER.fullmatch(owner)
    assert owner[0].isalnum()
    assert len(owner) < 64
    assert owner != life_module._owner_id(host)


WRONG: dict[str, list[Any]] = {
    "owner": ["", "../../etc/passwd", "a\n", "x" * 129],
    "host": [None, "x" * 256],
    "pid": ["1", True, -1],
    "boot": [7],
    "path": ["relative", "/a\0b", ["/a"]],
    "device": [1.5],
    "inode": [None, 2**64],
    "nonce": ["", "Z" * 32],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_record_with_a_wrong_value_is_refused(key: str, value: Any):
    """Stored data is never trusted."""
    lock = LifeLock.acquire()
    lock.release()
    with pytest.raises(CorruptDataError, match=key):
        Life.from_dict({**lock.life.to_dict(), key: value})


@pytest.mark.parametrize("data", [None, [], "text", 7, {}])
def test_what_is_not_a_record_is_refused(data: object):
    with pytest.raises(CorruptDataError):
        Life.from_dict(data)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shows its boot id in /proc")
def test_the_boot_id_is_the_kernels():
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip() != ""


def test_a_boot_id_that_cannot_be_read_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(life_module, "_BOOT_ID_FILE", tmp_path / "missing")
    monkeypatch.setattr(sys, "platform", "other")
    assert boot_id.__wrapped__() == ""
