"""Hearing of what other processes announce: told by the kernel where it tells, found by looking where it does not."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.stores._sqlite import ear as hearing
from longrun.stores._sqlite.ear import Ear
from longrun.stores._sqlite.file import FileLock
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import create, owned, step
from tests.crashing import PATIENCE

NEVER = 3600.0
told = pytest.mark.skipif(sys.platform != "linux", reason="nobody tells")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "SETTLING", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def backend(path: Path) -> Iterator[SQLiteBackend]:
    backend = SQLiteBackend(path)
    backend.open()
    yield backend
    backend.close()


@pytest.fixture
def other(backend: SQLiteBackend, path: Path) -> Iterator[SQLiteBackend]:
    other = SQLiteBackend(path)
    other.open()
    yield other
    other.close()


def listening(backend: SQLiteBackend) -> None:
    """Let it know all that there is, and rely on being told of more."""
    backend.wait(0.0)
    while backend._ear._touched is None:
        backend.wait(0.01)


def looks(monkeypatch: pytest.MonkeyPatch, backend: SQLiteBackend) -> list[bool]:
    """What each look from now on finds."""
    found: list[bool] = []
    look = backend._changed

    def looking() -> bool:
        found.append(look())
        return found[-1]

    monkeypatch.setattr(backend, "_changed", looking)
    return found


@told
def test_who_waits_is_told_and_need_not_look(
    backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    listening(backend)
    found = looks(monkeypatch, backend)
    timer = threading.Timer(0.3, other.commit, [[create("a")]])
    timer.start()
    assert backend.wait(PATIENCE)
    timer.join()
    assert found == [False, True]


@told
def test_what_was_announced_before_the_wait_is_found(
    backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    listening(backend)
    other.commit([create("a")])
    assert backend.wait(PATIENCE)


@told
def test_steps_that_go_on_wake_nobody(
    backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = owned("a", "one")
    other.commit([new])
    listening(backend)
    found = looks(monkeypatch, backend)
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    timer = threading.Timer(0.1, other.commit, [[step("a", new.head)]])
    timer.start()
    assert not backend.wait(0.5)
    timer.join()
    assert found == [False, False]


@told
def test_what_nobody_tells_of_is_found_all_the_same_and_looked_for_more_often_then(
    backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: whoever announced it may have died before it could touch anything, or touches what is not heard here."""
    listening(backend)
    monkeypatch.setattr(FileLock, "touch", lambda lock: None)
    other.commit([create("a")])
    assert backend.wait(PATIENCE)
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    for id in ("b", "c"):
        other.commit([create(id)])
        assert backend.wait(PATIENCE)


@told
def test_doubt_does_not_last(backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    listening(backend)
    monkeypatch.setattr(hearing, "DOUBT", 0.1)
    with monkeypatch.context() as dumb:
        dumb.setattr(FileLock, "touch", lambda lock: None)
        other.commit([create("a")])
        assert backend.wait(PATIENCE)
    backend.wait(0.3)
    found = looks(monkeypatch, backend)
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    timer = threading.Timer(0.3, other.commit, [[create("b")]])
    timer.start()
    assert backend.wait(PATIENCE)
    timer.join()
    assert len(found) < 5


@pytest.mark.parametrize("why", ["platform", "limit", "library"])
def test_where_nobody_tells_it_looks_again_and_again(
    backend: SQLiteBackend, other: SQLiteBackend, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "platform":
        monkeypatch.setattr(sys, "platform", "other")
    elif why == "limit":
        monkeypatch.setattr("ctypes.CDLL", lambda name: Full())
    else:
        monkeypatch.setitem(sys.modules, "ctypes", None)
    backend.wait(0.0)
    assert not backend.wait(0.1)
    assert backend._ear._touched is None
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    other.commit([create("a")])
    assert backend.wait(PATIENCE)


class Full:
    """A kernel in which a user has all the watches that he may have."""

    @staticmethod
    def inotify_init1(flags: int) -> int:
        return -1


@told
def test_a_file_that_is_not_there_is_not_listened_to(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    assert hearing._told_of(tmp_path / "missing") is None
    assert os.listdir("/proc/self/fd") == before


@told
def test_a_flood_of_announcements_is_heard_at_a_pace(path: Path) -> None:
    path.touch()
    ear = Ear(path, 0.001)
    ear.listen(1.0)
    began, heard = time.monotonic(), 0
    while time.monotonic() - began < 0.3:
        os.utime(path)
        ear.listen(1.0)
        heard += 1
    ear.close()
    assert 1 < heard <= 0.3 / hearing.PACE + 2


@told
def test_closing_gives_everything_back(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        backend = SQLiteBackend(path)
        backend.open()
        listening(backend)
        backend.close()
    assert os.listdir("/proc/self/fd") == before


@told
def test_it_is_woken_while_it_listens(backend: SQLiteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "LOOK_ANYWAY", NEVER)
    listening(backend)
    timer = threading.Timer(0.2, backend.wake)
    timer.start()
    assert backend.wait(PATIENCE)
    timer.join()
    backend.wake()
    assert backend.wait(0.0)
    assert not backend.wait(0.0)
