"""Finished executions beside the others: whoever asks for something else does not pay for them."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longrun.records import ExecutionState
from longrun.stored import QUEUE_WORKFLOW, Owner, Query, Stored
from longrun.stores._file import done as index
from longrun.stores._file import removal, skim
from longrun.stores._file.disk import Disk, Folder, HeldFile, open_folder
from longrun.stores._file.lines import Identity, all_fit, pack
from longrun.stores._file.row import Row
from longrun.stores.file import FileBackend
from longrun.testing.samples import NOW, change, claim, create, owned
from tests.stores.file_tools import created, done, loaded, opened

COMPLETED, BLOCKED = ExecutionState.COMPLETED, ExecutionState.BLOCKED
ME = Owner(id="me", life={}, remaining=0)
INTERRUPTED = frozenset({ExecutionState.RUNNING, ExecutionState.RESUMING, ExecutionState.PAUSED, BLOCKED})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with finished executions, all moved away."""
    path = tmp_path / "store"
    with opened(FileBackend(path)) as backend:
        created(backend, *[create(f"x{n}", COMPLETED) for n in range(5)])
    assert len(list((path / "done").iterdir())) == 5
    return path


def found(backend: FileBackend, **fields: Any) -> list[str]:
    query = Query(**fields)
    ids = [one.definition.id for one in backend.find(query)]
    assert sum(backend.count(query).values()) == len(ids)
    return ids


@pytest.mark.parametrize(
    "query",
    [
        {"states": INTERRUPTED},
        {"workflows": frozenset({QUEUE_WORKFLOW})},
        {"workflows": frozenset({QUEUE_WORKFLOW, "other"}), "states": frozenset({COMPLETED})},
        {"owner": "me"},
        {"owned": True},
    ],
)
def test_the_index_is_not_taken_in_for_what_it_cannot_hold(
    path: Path, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    def never(line: bytes) -> None:
        raise AssertionError(f"parsed: {line!r}")

    monkeypatch.setattr(index, "unpack_any", never)
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, **query) == []
        created(backend, owned("here", workflow=QUEUE_WORKFLOW, state=ExecutionState.PAUSED))
        assert found(backend, **query) == (["here"] if COMPLETED not in query.get("states", ()) else [])


def test_what_others_finish_is_found_from_then_on(path: Path) -> None:
    late = frozenset({"late"})
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, workflows=late) == []
        with opened(FileBackend(path)) as other:
            created(other, create("y", COMPLETED, workflow="late"))
        assert not list((path / "live").iterdir())
        assert found(backend, workflows=late) == ["y"]
        assert found(backend, workflows=late, states=frozenset({BLOCKED})) == []
        assert backend.delete(["y"]) == [True]
        assert found(backend, workflows=late) == []


def test_a_name_that_json_spells_otherwise_is_found(path: Path) -> None:
    with opened(FileBackend(path)) as other:
        created(other, create("y", COMPLETED, workflow='déjà "vu"\n'))
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, workflows=frozenset({'déjà "vu"\n'})) == ["y"]


def damage(path: Path) -> None:
    """Both the journal of one and its line in the index."""
    (path / "done" / "x3.jsonl").write_bytes(b"")
    lines = (path / "finished.jsonl").read_bytes()
    (path / "finished.jsonl").write_bytes(lines.replace(b'"id":"x3"', b'"id":"x9"'))


def test_what_is_damaged_in_both_places_is_listed_as_blocked(path: Path) -> None:
    """I5: an index with a damaged line says nothing of what it does not hold."""
    damage(path)
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, states=frozenset({BLOCKED})) == ["x3"]
        assert sorted(found(backend)) == [f"x{n}" for n in range(5)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of the index that were compared with their checksums one by one; a note is left from the first on."""
    lines: list[bytes] = []
    original = all_fit

    def noted(some: list[bytes]) -> bool:
        lines.extend(some)
        return original(some)

    monkeypatch.setattr(skim, "all_fit", noted)
    monkeypatch.setattr(skim, "NOTE_OVER", 0)
    return lines


def look_for_nothing(path: Path, *, owns: bool = False) -> None:
    backend = FileBackend(path)
    with opened(backend):
        if owns:
            backend.register(ME, 60.0)
        assert found(backend, workflows=frozenset({QUEUE_WORKFLOW})) == []


def test_lines_of_the_index_are_compared_by_the_first_who_starts(path: Path, compared: list[bytes]) -> None:
    look_for_nothing(path)
    assert len(compared) == 6, "the header, and five that ended"
    look_for_nothing(path)
    assert len(compared) == 6
    with opened(FileBackend(path)) as other:
        created(other, create("y", COMPLETED))
    look_for_nothing(path)
    assert [b'"id":"y"' in line for line in compared[6:]] == [True]
    look_for_nothing(path)
    assert len(compared) == 7


@pytest.mark.parametrize("note", [b"", b"x", b'{"crc":"00000000","id":"","gen":0', None])
def test_a_note_on_the_index_may_be_lost_or_torn(path: Path, compared: list[bytes], note: bytes | None) -> None:
    look_for_nothing(path)
    if note is None:
        (path / "finished.sum").unlink()
        (path / "finished.sum").mkdir()  # it cannot be written again either
    else:
        (path / "finished.sum").write_bytes(note)
    look_for_nothing(path)
    assert len(compared) == 12


def noted(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "finished.sum").read_text())
    return {name: fields[name] for name in ("kind", "size", "sum", "end", "free")}


def note(path: Path, fields: dict[str, Any]) -> None:
    (path / "finished.sum").write_bytes(pack(Identity("", 0), 1, fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 10**18},
        {"size": "x"},
        {"size": -5, "sum": 0},
        {"size": 7, "sum": 0},
        {"end": None},
        {"free": None},
        {"free": ["x"]},
        {"free": {"x": "y"}},
        {"free": {"x": -1}},
        {"free": {"x": 10**18}},
    ],
)
@pytest.mark.parametrize("owns", [True, False])
def test_a_note_that_says_something_else_is_not_believed(
    path: Path, compared: list[bytes], fields: dict[str, Any], owns: bool
) -> None:
    look_for_nothing(path, owns=owns)
    note(path, noted(path) | fields)
    look_for_nothing(path, owns=owns)
    assert len(compared) == 12


@pytest.mark.parametrize("number", [1, None])
def test_whoever_only_looks_does_not_believe_a_checksum(path: Path, compared: list[bytes], number: int | None) -> None:
    look_for_nothing(path)
    note(path, noted(path) | {"sum": number})
    look_for_nothing(path)
    assert len(compared) == 12


@pytest.mark.usefixtures("compared")
def test_a_note_about_another_index_is_not_believed(path: Path, tmp_path: Path) -> None:
    """By whoever runs executions: the directory was brought back from a copy, say."""
    backend, late = FileBackend(path), frozenset({"late"})
    with opened(backend):
        assert found(backend, workflows=late) == []
    another = FileBackend(tmp_path / "another")
    with opened(another):
        created(another, create("z0", COMPLETED, workflow="late"))
    with opened(another):
        created(another, *[create(f"y{n}", COMPLETED) for n in range(9)])
    (tmp_path / "another" / "finished.sum").write_bytes((path / "finished.sum").read_bytes())
    with opened(another):
        another.register(ME, 60.0)
        assert found(another, workflows=late) == ["z0"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
def test_an_index_of_which_the_disk_says_nothing_is_not_left_open(tmp_path: Path) -> None:
    asked: list[int] = []

    class Dumb(Disk):
        def fstat(self, fd: int) -> os.stat_result:
            asked.append(fd)
            if len(asked) == 2:  # whoever opens a file asks what it is
                raise OSError(errno.EIO, "a fault")
            return super().fstat(fd)

    (tmp_path / "finished.jsonl").touch()
    held = HeldFile(open_folder(Dumb(), str(tmp_path)), "finished.jsonl")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="a fault"):
        held.look()
    assert len(os.listdir("/proc/self/fd")) == before
    assert held.fd == -1


class IndexDisk(Disk):
    """Counts the bytes of the index that are read."""

    def __init__(self) -> None:
        self.read = 0

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        data = super().pread(fd, size, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("finished.jsonl"):
            self.read += len(data)
        return data


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
def test_an_owner_starts_without_reading_what_was_noted(
    path: Path, compared: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skim, "END_SIZE", 10)
    look_for_nothing(path)
    disk = IndexDisk()
    backend = FileBackend(path, disk=disk)
    with opened(backend):
        backend.register(ME, 60.0)
        assert found(backend, workflows=frozenset({QUEUE_WORKFLOW})) == []
        assert disk.read == 10
        backend.renew(ME.id, 60.0)
        backend._open.writes.janitor.tidy()
        assert disk.read == 10 + (path / "finished.jsonl").stat().st_size
        backend.renew(ME.id, 60.0)
        backend._open.writes.janitor.tidy()
        assert disk.read == 10 + (path / "finished.jsonl").stat().st_size, "once is enough"
    assert len(compared) == 6


def test_what_an_owner_believed_is_compared_when_it_renews_its_lease(
    path: Path, compared: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5"""
    monkeypatch.setattr(skim, "END_SIZE", 10)
    backend, blocked = FileBackend(path), frozenset({BLOCKED})
    with opened(backend):
        assert found(backend, states=blocked) == []
    damage(path)
    with opened(backend):
        backend.register(ME, 60.0)
        assert found(backend, states=blocked) == [], "the answer was noted when it was true"
        backend.renew(ME.id, 60.0)
        backend._open.writes.janitor.tidy()
        assert found(backend, states=blocked) == ["x3"]
    assert list((path / "quarantine").iterdir())


def test_damage_in_what_was_noted_as_sound_is_found(path: Path, compared: list[bytes]) -> None:
    """I5"""
    look_for_nothing(path)
    test_what_is_damaged_in_both_places_is_listed_as_blocked(path)
    look_for_nothing(path)
    assert len(compared) > 12, "the new index was compared too"


def test_pages_of_what_is_finished_go_from_the_newest_to_the_oldest(path: Path) -> None:
    """Each is on one page, and whatever is asked for is counted."""
    with opened(FileBackend(path)) as other:
        created(other, *[create(f"z{n}", COMPLETED, created=NOW + n, metadata={"of": "z"}) for n in range(1, 6)])
    backend = FileBackend(path)
    with opened(backend):
        pages: list[list[str]] = []
        after: tuple[float, str] | None = None
        while page := backend.find(Query(limit=2, after=after)):
            pages.append([one.definition.id for one in page])
            after = page[-1].definition.created, page[-1].definition.id
        assert pages == [["z5", "z4"], ["z3", "z2"], ["z1", "x4"], ["x3", "x2"], ["x1", "x0"]]
        assert len(found(backend, metadata={"of": "z"})) == 5


def test_who_asks_for_the_children_of_one_does_not_pay_for_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those come back that were deleted, or whose id was used anew."""
    with opened(FileBackend(path)) as other:
        created(other, *[create(f"c{n}", COMPLETED, created=NOW + n, parent_id="x0") for n in range(4)])
    read: list[str] = []
    stored = index.Finished._stored

    def counted(self: index.Finished, fd: int, row: Row) -> Stored | None:
        read.append(row.id)
        return stored(self, fd, row)

    monkeypatch.setattr(index.Finished, "_stored", counted)
    backend = FileBackend(path)
    with opened(backend):
        assert [one.definition.id for one in backend.find(Query(parent_id="x0"))] == ["c3", "c2", "c1", "c0"]
        assert backend.find(Query(parent_id="x1")) == []
        assert read == ["c3", "c2", "c1", "c0"]
        assert backend.delete(["c1", "c2"]) == [True, True]
        created(backend, create("c2", COMPLETED))
        assert found(backend, parent_id="x0") == ["c3", "c0"]
    with opened(backend):
        assert found(backend, parent_id="x0") == ["c3", "c0"]


def test_the_index_is_written_anew_when_most_of_it_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16; and whoever knew the old one knows what is left."""
    monkeypatch.setattr(index, "GONE_LIMIT", 3)
    backend, other = FileBackend(path), FileBackend(path)
    with opened(backend), opened(other):
        assert len(found(other)) == 5
        before = (path / "finished.jsonl").stat()
        assert backend.delete([f"x{n}" for n in range(4)]) == [True] * 4
        after = (path / "finished.jsonl").stat()
        assert after.st_ino != before.st_ino
        assert after.st_size < before.st_size
        assert found(other) == found(backend) == ["x4"]
        created(other, create("x0", COMPLETED))
        other.close()
        other.open()
        assert sorted(found(backend)) == ["x0", "x4"]


def test_an_index_that_somebody_knows_is_never_taken_for_a_later_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system gives the inode of a file that is gone to the next one, which may have grown beyond it."""
    monkeypatch.setattr(index, "GONE_LIMIT", -100)  # with each that goes
    backend, other = FileBackend(path), FileBackend(path)
    ids = [f"x{n}" for n in range(5)]
    with opened(backend), opened(other):
        assert not found(other, states=frozenset({ExecutionState.FAILED}))
        assert sorted(found(other)) == ids
        known = (path / "finished.jsonl").stat().st_ino
        for n in range(8):
            created(backend, create(f"failed {n}", ExecutionState.FAILED))
            assert backend.delete([ids.pop(0)]) == [True]
            backend.close()  # what has ended moves away
            backend.open()
            ids.append(f"failed {n}")
            assert (path / "finished.jsonl").stat().st_ino != known
        assert sorted(found(other)) == sorted(ids)
        assert len(found(other, states=frozenset({ExecutionState.FAILED}))) == 5
    assert not list((path / "quarantine").iterdir())


def test_a_listing_misses_nothing_where_the_index_is_written_anew_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "GONE_LIMIT", -100)
    backend, other = FileBackend(path), FileBackend(path)
    original = index.Finished._ordered

    def overtaken(finished: index.Finished) -> list[Row]:
        rows = original(finished)
        assert other.delete(["x4", "x0", "x1"]) == [True] * 3
        return rows

    with opened(backend), opened(other):
        monkeypatch.setattr(index.Finished, "_ordered", overtaken)
        assert [one.definition.id for one in backend.find(Query())] == ["x4", "x3", "x2", "x1", "x0"]
        monkeypatch.undo()
        assert found(backend) == ["x3", "x2"]


@pytest.mark.parametrize("looked_up", [0, 1], ids=["first look", "later"])
def test_what_comes_back_while_it_is_listed_is_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch, looked_up: int
) -> None:
    """It was not in live/ when that was looked at, and is not in the index any more."""
    with opened(FileBackend(path)) as other:
        created(other, create("a", ExecutionState.FAILED))
    backend, other = FileBackend(path), FileBackend(path)
    ids = ["a", *(f"x{n}" for n in range(5))]
    original = FileBackend._live

    def overtaken(self: FileBackend, query: Query) -> Any:
        live = original(self, query)
        other.claim(claim("other", ids=("a",), states=frozenset({ExecutionState.FAILED})))
        return live

    with opened(backend), opened(other):
        for _ in range(looked_up):
            assert sorted(found(backend)) == ids
        monkeypatch.setattr(FileBackend, "_live", overtaken)
        assert sorted(one.definition.id for one in backend.find(Query())) == ids
        assert sum(backend.count(Query()).values()) == 6


@pytest.mark.parametrize("lost", ["the last newline", "half of it", "the first line", "a line in the middle", "all"])
def test_an_index_that_lost_lines_without_a_trace_is_made_anew(path: Path, lost: str) -> None:
    """I5: as where one was put back that is older than the journals. What was left of a line is kept aside."""
    lines = (path / "finished.jsonl").read_bytes().splitlines(keepends=True)
    data = b"".join(lines)
    left = {
        "the last newline": data[:-1],
        "half of it": data[: len(data) // 2],
        "the first line": b"".join([lines[0], *lines[2:]]),
        "a line in the middle": b"".join([*lines[:3], *lines[4:]]),
        "all": lines[0],
    }[lost]
    (path / "finished.jsonl").write_bytes(left)
    backend = FileBackend(path)
    with opened(backend):
        assert backend.count(Query()) == {COMPLETED: 5}
        assert sorted(found(backend)) == [f"x{n}" for n in range(5)]
    torn = left[left.rfind(b"\n") + 1 :]
    assert [file.read_bytes() for file in (path / "quarantine").iterdir()] == ([torn] if torn else [])
    assert sorted((path / "finished.jsonl").read_bytes().splitlines()) == sorted(data.splitlines())


FAILED = frozenset({ExecutionState.FAILED})


def states(backend: FileBackend) -> dict[str, ExecutionState]:
    shown = {one.definition.id: one.head.state for one in backend.find(Query())}
    assert backend.count(Query()) == Counter(shown.values())
    return shown


def go_on(backend: FileBackend, events: str) -> None:
    for event in events.split(", "):
        if event == "deleted":
            assert backend.delete(["x3"]) == [True]
        elif event == "retried":
            (given,) = backend.claim(claim("other", ids=("a",), states=FAILED))
            done(backend, change("a", given.head, head_fields={"state": COMPLETED, "owner": None, "ended": NOW + 9}))
        elif event == "used anew":
            assert backend.delete(["a"]) == [True]
            created(backend, create("a", COMPLETED, created=NOW + 5))
        else:
            created(backend, create(event, COMPLETED))


@pytest.mark.parametrize("since", ["deleted", "retried", "used anew", "new", "retried, new", "retried, deleted"])
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_an_older_index_that_was_put_back_is_made_anew(path: Path, since: str, is_open: bool) -> None:
    """I1: what was deleted is gone, what was retried is as it ended then; and a journal that cannot be read ended as
    the index says (I8)."""
    backend = FileBackend(path)
    with opened(backend):
        created(backend, create("a", ExecutionState.FAILED))
    (path / "done" / "x1.jsonl").write_bytes(b"")
    older = (path / "finished.jsonl").read_bytes()
    with opened(backend):
        go_on(backend, since)
    with opened(backend):
        expected = states(backend)
        assert expected["x1"] is COMPLETED
        if not is_open:
            backend.close()
        (path / "older").write_bytes(older)
        (path / "older").rename(path / "finished.jsonl")
        if not is_open:
            backend.open()
        assert states(backend) == expected
        made = (path / "finished.jsonl").stat().st_ino
    with opened(backend):
        assert states(backend) == expected
        assert (path / "finished.jsonl").stat().st_ino == made


def test_an_index_that_goes_on_while_it_is_listed_is_not_taken_for_an_older_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = FileBackend(path), FileBackend(path)

    def overtake(name: str) -> None:
        """Once, just before it is called for this one."""
        original = getattr(index.Finished, name)

        def overtaken(finished: index.Finished, stored: Stored, *rest: Any) -> Any:
            if finished is backend._open.finished and stored.definition.id == "a":
                monkeypatch.setattr(index.Finished, name, original)
                (given,) = other.claim(claim("other", ids=("a",), states=FAILED))
                done(other, change("a", given.head, head_fields={"owner": None, "ended": NOW + 9}))
                other.close()
                other.open()
            return original(finished, stored, *rest)

        monkeypatch.setattr(index.Finished, name, overtaken)

    with opened(other):
        created(other, create("a", ExecutionState.FAILED))
    with opened(other), opened(backend):
        made = (path / "finished.jsonl").stat().st_ino
        overtake("checked")
        overtake("_overtaken")
        assert [one.definition.id for one in backend.find(Query(states=FAILED))] == ["a"]
        assert loaded(other, "a").head.fence == 2
        assert found(backend, states=FAILED) == ["a"]
        assert (path / "finished.jsonl").stat().st_ino == made


@pytest.mark.parametrize("deleted", ["before", "after"])
def test_an_index_is_whole_while_a_journal_moves(path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str) -> None:
    """It is in done/ before it has its line, and deleted before it loses that: neither is a reason to begin anew."""
    backend, other = FileBackend(path), FileBackend(path)
    original = Folder.names

    def overtaken(folder: Folder) -> list[str]:
        if folder is not backend._open.place.done:
            return original(folder)
        names = original(folder) if deleted == "after" else []
        assert other.delete(["x0"]) == [True]
        return [*(names or original(folder)), "y.jsonl"]

    with opened(other):
        created(other, owned("y"))
        os.link(path / "live" / "y.0.jsonl", path / "done" / "y.jsonl")
        with opened(backend):
            before = (path / "finished.jsonl").stat()
            monkeypatch.setattr(Folder, "names", overtaken)
            assert [one.definition.id for one in backend.find(Query(states=frozenset({COMPLETED})))] == [
                "x4",
                "x3",
                "x2",
                "x1",
            ]
            monkeypatch.undo()
            assert (path / "finished.jsonl").stat().st_ino == before.st_ino


class CrashError(BaseException):
    """Nothing after this is done any more."""


def test_a_deletion_that_a_crash_cut_short_leaves_nothing_that_is_only_listed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown can be loaded, and what is gone is not counted: before and after the index is written anew."""

    def crash(finished: index.Finished, ids: list[str]) -> None:
        raise CrashError

    backend, other = FileBackend(path), FileBackend(path)
    with opened(other), opened(backend), monkeypatch.context() as patched:
        assert len(found(other)) == 5
        patched.setattr(index.Finished, "remove", crash)
        with pytest.raises(CrashError):
            backend.delete(["x0", "x3"])
        left = ["x4", "x2", "x1"]
        assert [other.load(id) for id in ("x0", "x3")] == [None, None]
        assert found(other) == found(other, states=frozenset({COMPLETED})) == left
    with opened(backend):
        assert found(backend) == left
        created(backend, create("x3", COMPLETED))
    with opened(backend):
        assert sorted(found(backend)) == ["x1", "x2", "x3", "x4"]
        monkeypatch.setattr(index, "GONE_LIMIT", -100)
        assert backend.delete(["x3"]) == [True]
        assert b'"going"' not in (path / "finished.jsonl").read_bytes()
        assert b'"id":"x0"' not in (path / "finished.jsonl").read_bytes()
        assert found(backend) == left


class Returning(Disk):
    """Stops where a journal has come back from done/ and has its line in the index still, until it is let go."""

    def __init__(self) -> None:
        self.back, self.go = threading.Event(), threading.Event()

    def rename(self, old: str, new: str, old_dir: int, new_dir: int) -> None:
        super().rename(old, new, old_dir, new_dir)
        if new == "a.0.jsonl":
            self.back.set()
            assert self.go.wait(20)


@pytest.mark.parametrize("cut_short", [False, True], ids=["", "after a deletion that was cut short"])
def test_what_comes_back_is_shown_at_every_moment(path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: bool) -> None:
    """I1: also where somebody had begun to delete it, and died before anything was gone."""

    def crash(*_: Any) -> None:
        raise CrashError

    failed = frozenset({ExecutionState.FAILED})
    with opened(FileBackend(path)) as other:
        created(other, create("a", ExecutionState.FAILED))
    with opened(FileBackend(path)) as other, monkeypatch.context() as patched:
        patched.setattr(removal, "_remove_all", crash)
        if cut_short:
            with pytest.raises(CrashError):
                other.delete(["a"])
    disk, backend = Returning(), FileBackend(path)
    original = FileBackend._live
    with opened(FileBackend(path, disk=disk)) as other, opened(backend):
        retrying = threading.Thread(target=other.claim, args=(claim("other", ids=("a",), states=failed),))

        def overtaken(self: FileBackend, query: Query) -> Any:
            live = original(self, query)
            if not retrying.ident:
                retrying.start()
                assert disk.back.wait(20)
            return live

        monkeypatch.setattr(FileBackend, "_live", overtaken)
        try:
            assert found(backend, states=failed) == ["a"]
        finally:
            disk.go.set()
            retrying.join()
        assert found(backend, states=failed) == ["a"]


def test_a_line_of_the_index_that_cannot_be_read_is_kept_aside(path: Path) -> None:
    lines = (path / "finished.jsonl").read_bytes()
    (path / "finished.jsonl").write_bytes(lines.replace(b'"id":"x3"', b'"id":"x9"'))
    backend = FileBackend(path)
    with opened(backend):
        assert sorted(found(backend)) == [f"x{n}" for n in range(5)]
    (kept,) = (path / "quarantine").iterdir()
    assert b'"id":"x9"' in kept.read_bytes()


@pytest.mark.parametrize("workflow", ["käse", "plain", 'quote"d', "\ud800", "\x7f"])
def test_what_ended_is_found_by_any_name_of_its_workflow(path: Path, workflow: str) -> None:
    with opened(FileBackend(path)) as backend:
        created(backend, create("here", COMPLETED, workflow=workflow))
    backend = FileBackend(path)
    with opened(backend):
        assert found(backend, workflows=frozenset({workflow})) == ["here"]
        assert found(backend, workflows=frozenset({workflow + "!"})) == []


class Vanishing(Disk):
    """A journal is deleted in the moment in which it is opened for the third time."""

    def __init__(self, journal: Path) -> None:
        self.journal, self.opened = journal, 0

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self.opened += name == self.journal.name
        if self.opened == 3:
            self.journal.unlink(missing_ok=True)
        return super().open(name, flags, dir_fd)


def test_a_journal_that_is_deleted_while_the_index_is_made_anew_is_left_out(path: Path) -> None:
    (path / "finished.jsonl").unlink()
    disk = Vanishing(path / "done" / "x3.jsonl")
    backend = FileBackend(path, disk=disk)
    with opened(backend):
        assert sorted(found(backend)) == ["x0", "x1", "x2", "x4"]
    assert disk.opened >= 3


def test_a_file_in_done_that_no_id_has_named_stops_no_listing(path: Path) -> None:
    """I5: it is shown, since nobody can say what it was; and the index is not made anew because of it each time."""
    (path / "done" / "%FF%C3.jsonl").write_bytes(b"junk\n")
    before = set[int]()
    for _ in range(3):
        backend = FileBackend(path)
        with opened(backend):
            assert sorted(found(backend)) == ["\\xff\\xc3", *(f"x{n}" for n in range(5))]
            before.add((path / "finished.jsonl").stat().st_ino)
    assert len(before) == 1


def test_a_lost_index_is_made_anew_whatever_the_ids_are(path: Path) -> None:
    """The name of a long one is cut, within a character perhaps."""
    ids = [f"{'a' * n}{'中' * 60}" for n in range(9)]
    with opened(FileBackend(path)) as other:
        created(other, *[create(id, COMPLETED) for id in ids])
    (path / "finished.jsonl").unlink()
    backend = FileBackend(path)
    with opened(backend):
        assert sorted(found(backend)) == sorted([*ids, *(f"x{n}" for n in range(5))])
