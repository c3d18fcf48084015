"""The directory of the file store: who may use it, what is in it, and how it stays small and fast."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import attrs
import pytest

from longrun.errors import CorruptDataError, LeaseLostError, NewerFormatError, StoreSettingsError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Head, Query
from longrun.stores import open_store
from longrun.stores._file import inbox, mine, place, removal
from longrun.stores._file.disk import Disk
from longrun.stores._file.journal import remove_locked
from longrun.stores._file.place import Place, stem_of
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend, FileCheckpointStore
from longrun.testing.samples import NOW, boundary, change, claim, create, owned, send, step
from tests.crashing import PATIENCE
from tests.stores.file_tools import CountingDisk, created, done, ids_of, loaded, opened

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(path: Path) -> Iterator[StoreBackend]:
    with opened(FileBackend(path)) as backend:
        yield backend


def finish(backend: StoreBackend, id: str, head: Head, state: ExecutionState = ExecutionState.COMPLETED) -> None:
    done(backend, change(id, head, head_fields={"state": state, "owner": None, "ended": NOW}))


# who may use it


def test_the_format_is_written_down(path: Path, backend: StoreBackend) -> None:
    """I14."""
    assert json.loads((path / "longrun.json").read_text()) == {"store": "file", "format": 1}
    assert backend.describe()["directory"] == str(path)


def test_a_newer_format_is_refused(path: Path) -> None:
    """I14."""
    path.mkdir()
    (path / "longrun.json").write_text('{"store": "file", "format": 2}')
    with pytest.raises(NewerFormatError):
        FileBackend(path).open()


@pytest.mark.parametrize(
    "marker", ["", "[]", "{}", '{"format": 1, "store": "sqlite"}', '{"format": "x", "store": "file"}']
)
def test_a_marker_that_is_not_ours_is_refused(path: Path, marker: str) -> None:
    path.mkdir()
    (path / "longrun.json").write_text(marker)
    with pytest.raises(StoreSettingsError):
        FileBackend(path).open()


def test_a_directory_of_something_else_is_refused(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("data")
    with pytest.raises(StoreSettingsError, match="something else"):
        FileBackend(path).open()
    assert [file.name for file in path.iterdir()] == ["precious"]


def test_a_store_without_its_marker_says_what_is_missing_and_works_once_that_is_mended(path: Path) -> None:
    """I14: it is not made anew by itself, since it alone tells the format; the line to write is in the message."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"))
    marker = path / "longrun.json"
    marker.unlink()
    with pytest.raises(StoreSettingsError, match=r"a store whose longrun\.json is gone") as raised:
        FileBackend(path).open()
    assert not marker.exists()
    marker.write_text(str(raised.value).partition("with the line ")[2])
    with opened(FileBackend(path)) as backend:
        assert loaded(backend, "a").boundary.seq == 1


def test_a_file_is_no_directory(path: Path) -> None:
    path.write_text("data")
    with pytest.raises(StoreSettingsError):
        FileBackend(path).open()
    with pytest.raises(StoreSettingsError):
        FileBackend(path / "below").open()


def test_a_directory_made_before_is_used(path: Path) -> None:
    """Also one that is reached through a symbolic link: the user gave that name."""
    path.mkdir()
    (path / ".hidden").write_text("")
    link = path.with_name("link")
    link.symlink_to(path)
    with opened(FileBackend(link)) as backend:
        created(backend, create("a"))
    with opened(FileBackend(path)) as backend:
        assert loaded(backend, "a").definition.id == "a"


def test_it_does_not_answer_when_it_is_closed_or_gone(path: Path) -> None:
    backend = FileBackend(path)
    with pytest.raises(StoreUnavailableError):
        backend.ping()
    with opened(backend):
        path.rename(path.with_name("moved"))
        with pytest.raises(StoreUnavailableError):
            backend.ping()
    with pytest.raises(StoreUnavailableError):
        backend.commit([create("a")])


async def test_the_store_is_named_by_a_url(path: Path) -> None:
    async with open_store(f"file:{path}") as store:
        assert isinstance(store, FileCheckpointStore)
        assert await store.create(create("a"))
    assert (path / "live" / "a.0.jsonl").exists()


# security


def test_everything_is_private_whatever_the_umask(path: Path) -> None:
    """Directories 0700, files 0600."""
    code = """
import os, sys
os.umask(int(sys.argv[2], 8))
from longrun.stores.file import FileBackend
from longrun.stored import Owner
from longrun.records import ExecutionState
from longrun.testing.samples import claim, create, owned, send
backend = FileBackend(sys.argv[1])
backend.open()
new = owned("a")
backend.commit([new, send("a"), create("b", ExecutionState.COMPLETED)])
backend.register(Owner(id="me", life={}, remaining=0), 10.0)
(given,) = backend.claim(claim("you", dead=frozenset({"me"})))
backend.close()
"""
    for umask in ("000", "077", "022"):
        where = path.with_name(f"store{umask}")
        subprocess.run([sys.executable, "-c", code, str(where), umask], check=True, cwd=ROOT)
        for folder, folders, files in os.walk(where):
            assert os.stat(folder).st_mode & 0o777 == 0o700, folder
            for name in files:
                assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600, name
            assert len(folders) in (0, 7)


def test_ids_never_become_paths() -> None:
    """I15: an id is checked elsewhere; here it is quoted all the same, and no two share a name."""
    ids = [
        "../x",
        "/etc/passwd",
        "a/b",
        "a%2Fb",
        "..",
        ".",
        "",
        "a\0b",
        "x" * 200,
        "x" * 199 + "y",
        "é" * 100,
        "\ud800",
    ]
    names = [stem_of(id) for id in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert "/" not in name
        assert "\0" not in name
        assert len(f"{name}.1000000.jsonl".encode()) < 255


@pytest.mark.parametrize("what", ["live/a.0.jsonl", "inbox/a.jsonl", "bell", "finished.jsonl"])
def test_no_symbolic_link_is_followed(path: Path, tmp_path: Path, what: str) -> None:
    """A link in place of a file is an error, of its execution or of all; what it leads to is not read nor changed."""
    with opened(FileBackend(path)) as backend:
        done(backend, create("a"), send("a"))
    target = tmp_path / "target"
    target.write_text("secret")
    (path / what).unlink(missing_ok=True)
    (path / what).symlink_to(target)
    other = FileBackend(path)
    with pytest.raises((StoreUnavailableError, StoreSettingsError, CorruptDataError)):
        other.open()
        other.find(Query())
        other.commit([send("a")])
        other.load("a")
    other.close()
    assert target.read_text() == "secret"


def test_a_folder_that_is_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    with opened(FileBackend(path)):
        pass
    (tmp_path / "elsewhere").mkdir()
    (path / "live").rmdir()
    (path / "live").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreSettingsError):
        FileBackend(path).open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(path: Path, tmp_path: Path) -> None:
    """It can neither read the files nor bring a directory of its own into the store's place."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"))
    for folder in (path, *path.parents):
        if folder == tmp_path.parents[2]:
            break
        folder.chmod(0o755)
    code = """
import os, sys
from longrun.errors import StoreSettingsError
from longrun.stores.file import FileBackend
os.setgid(65534); os.setuid(65534)
try:
    open(os.path.join(sys.argv[1], "live", "a.0.jsonl"))
except PermissionError:
    print("not read")
try:
    FileBackend(sys.argv[1]).open()
except StoreSettingsError as error:
    print("refused")
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.split("\n")[:2] == ["not read", "refused"]


# it stays small


def test_a_long_journal_is_compacted_and_no_row_is_lost(path: Path, backend: StoreBackend) -> None:
    """I7, I16: its size follows the kept states, not the number of steps; the rows are in the history."""
    new = owned("a", blobs={"b": b"blob"})
    created(backend, new)
    head = new.head
    for _ in range(40):
        saves = []
        for _ in range(50):
            row = boundary(head.seq + 1, blobs=("b",), data=b'{"x": "%b"}' % (b"y" * 200))
            saves.append(step("a", head, boundaries=(row,), keep_from=head.seq - 3, put={"e": b"1"}))
            head = saves[-1].head
        done(backend, *saves)
    journal = path / "live" / "a.0.jsonl"
    assert journal.stat().st_size < 500_000
    assert (path / "history" / "a.jsonl").exists()
    rows = backend.boundaries("a", limit=10_000)
    assert [row.seq for row in rows] == list(range(1, 2002))
    assert [row.seq for row in backend.boundaries("a", after=1000, limit=3)] == [1001, 1002, 1003]
    found = loaded(backend, "a")
    assert (found.head, found.blobs, found.entries) == (head, {"b": b"blob"}, {"e": b"1"})
    assert [seq for seq, _ in found.kept] == [1997, 1998, 1999, 2000, 2001]
    with opened(FileBackend(path)) as other:
        assert loaded(other, "a") == found
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
        assert given.boundary == found.boundary
        done(other, step("a", given.head))
        assert len(other.boundaries("a", limit=10_000)) == 2002


def test_taken_messages_do_not_pile_up(path: Path, backend: StoreBackend) -> None:
    """I16: the inbox is compacted when most of it was taken; keys stay."""
    new = owned("a")
    created(backend, new)
    head = new.head
    last = 0
    for n in range(30):
        numbers = done(backend, *[send("a", key=f"{n}-{m}", payload=b"x" * 200) for m in range(20)])
        assert numbers == list(range(last + 1, last + 21))
        last += 20
        save = change("a", head, take=tuple(range(last - 19, last if n == 29 else last + 1)))
        done(backend, save)
        head = save.head
    assert (path / "inbox" / "a.jsonl").stat().st_size < 80_000
    assert [message.id for message in backend.messages("a")] == [last]
    assert done(backend, send("a", key="0-0"), send("a", key="29-19"), send("a")) == [1, last, last + 1]


def test_a_compacted_inbox_remembers_what_waits_the_newest_keys_and_the_last_number(
    path: Path, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "COMPACT_OVER", 100)
    monkeypatch.setattr(inbox, "KEYS_REMEMBERED", 10)
    new = owned("a")
    created(backend, new)
    done(backend, *[send("a", key=f"k{n}") for n in range(1, 41)])
    first = change("a", new.head, take=(*range(1, 39),))
    done(backend, first)
    assert [message.id for message in backend.messages("a")] == [39, 40]
    assert done(backend, *[send("a", key=f"k{n}") for n in range(29, 41)]) == [*range(29, 41)]
    assert done(backend, send("a", key="k28")) == [41]
    done(backend, change("a", first.head, take=(40, 41)))
    with opened(FileBackend(path)) as other:
        for one in (backend, other):
            assert [message.id for message in loaded(one, "a").messages] == [39]
        assert done(other, send("a")) == [42]


def test_files_that_are_no_journals_are_left_alone(path: Path, backend: StoreBackend) -> None:
    """A backup program or an editor may have put them there."""
    created(backend, create("a"))
    for name in ("a.txt", "a.jsonl", "a.x.jsonl", "a.0.jsonl~"):
        (path / "live" / name).touch()
    with opened(FileBackend(path)) as other:
        assert [one.definition.id for one in other.find(Query())] == ["a"]


def test_what_a_dead_process_left_in_the_middle_of_a_write_goes_in_time(path: Path) -> None:
    """I16: after an hour; another process may be writing what is younger."""
    with opened(FileBackend(path)):
        pass
    old, young = path / "tmp" / ".1-old", path / "tmp" / ".1-young"
    old.touch()
    young.touch()
    os.utime(old, (1.0, 1.0))
    with opened(FileBackend(path)):
        assert [file.name for file in (path / "tmp").iterdir()] == [".1-young"]


def test_others_hear_of_many_changes_at_once(
    path: Path, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "BELL_NAMES", 2)
    with opened(FileBackend(path)) as other:
        assert other.next_due() is None
        created(backend, *[create(f"x{n}") for n in range(4)])
        assert (path / "bell").read_text() == "*\n"
        assert len(other.claim(claim("you"))) == 4


def test_a_directory_that_stays_locked_keeps_no_save_from_being_stored(
    path: Path, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message needs that lock; the saves that are committed along with it do not."""
    monkeypatch.setattr(place, "LOCK_PATIENCE", 0.05)
    new = owned("a")
    created(backend, new, create("b"))
    with (path / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused, saved = backend.commit([send("b"), step("a", new.head)])
        assert isinstance(refused, StoreUnavailableError)
        assert saved is None
    assert loaded(backend, "a").head.revision == new.head.revision + 1


def test_the_bell_does_not_grow_for_ever(path: Path, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16."""
    monkeypatch.setattr(place, "BELL_LIMIT", 100)
    for n in range(50):
        created(backend, create(f"x{n}"))
        assert (path / "bell").stat().st_size < 200


def test_a_directory_that_stays_locked_is_said_and_nothing_is_left_of_the_attempt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was stopped in the middle of tidying."""
    monkeypatch.setattr(place, "LOCK_PATIENCE", 0.05)
    disk = CountingDisk()
    with opened(FileBackend(path, disk=disk)) as backend:
        created(backend, create("a"))
        before = set(disk.left)
        with (path / "lock").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for answer in backend.commit([create("b"), create("c")]):
                assert isinstance(answer, StoreUnavailableError)
                assert "stays locked" in str(answer)
        assert disk.left == before
        assert list((path / "tmp").iterdir()) == []
        created(backend, create("b"), create("c"))


def test_a_disk_that_writes_nothing_is_an_error_and_not_waited_for_for_ever(path: Path) -> None:
    class Deaf(Disk):
        def write(self, fd: int, data: bytes | memoryview) -> int:
            return 0

    with opened(FileBackend(path)):
        pass
    backend = FileBackend(path, disk=Deaf())
    backend.open()
    (answer,) = backend.commit([create("a")])
    assert isinstance(answer, StoreUnavailableError)
    backend.close()


def test_what_a_closed_store_says_of_itself(path: Path) -> None:
    assert FileBackend(path).describe()["directory"] == str(path)


class Moving(Disk):
    """A journal comes back from done/ in the moment in which it is looked for there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stat(self, name: str, dir_fd: int | None = None) -> os.stat_result:
        if name == "a.jsonl" and (self.path / "done" / name).exists():
            (self.path / "done" / name).rename(self.path / "live" / "a.0.jsonl")
        return super().stat(name, dir_fd)


def test_what_moves_while_it_is_looked_for_is_found(path: Path) -> None:
    """I1: neither look alone would find it."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a", ExecutionState.FAILED))
    assert (path / "done" / "a.jsonl").exists()
    with opened(FileBackend(path, disk=Moving(path))) as backend:
        assert done(backend, send("a")) == [1]
        assert loaded(backend, "a").head.state is ExecutionState.FAILED


def test_what_is_finished_moves_away(path: Path) -> None:
    """I16: live/ holds what lives. A finished one is found, loaded, sent to, retried and deleted as before."""
    with opened(FileBackend(path)) as backend:
        news = [owned(f"x{n}", metadata={"n": n}) for n in range(100)]
        done(backend, *news, send("x7", key="k"))
        for new in news:
            finish(backend, new.id, new.head, ExecutionState.FAILED)
        listed = backend.find(Query(limit=1000))
    assert list((path / "live").iterdir()) == []
    with opened(FileBackend(path)) as backend:
        assert backend.find(Query(limit=1000)) == listed
        assert [one.definition.id for one in backend.find(Query(limit=3))] == ["x99", "x98", "x97"]
        assert backend.find(Query(metadata={"n": 5}))[0].definition.id == "x5"
        assert backend.count(Query()) == {ExecutionState.FAILED: 100}
        assert [message.id for message in backend.messages("x7")] == [1]
        assert done(backend, send("x7", key="k"), send("x7"), send("x8")) == [1, 2, 1]
        assert backend.commit([create("x7")]) == [False]
        assert backend.next_due() is None
        (given,) = backend.claim(claim("new", ids=("x7",), states=frozenset({ExecutionState.FAILED})))
        assert ([message.id for message in given.messages], given.head.fence) == ([1, 2], 2)
        done(backend, change("x7", given.head, head_fields={"state": ExecutionState.RUNNING}))
        assert backend.count(Query()) == {ExecutionState.FAILED: 99, ExecutionState.RUNNING: 1}
        assert backend.delete(["x7", "x8", "x9", "x9"]) == [False, True, True, False]
        assert backend.count(Query()) == {ExecutionState.FAILED: 97, ExecutionState.RUNNING: 1}
        assert backend.load("x9") is None
        created(backend, create("x9"))
        assert backend.messages("x8") == []


def test_a_late_save_to_what_moved_away(path: Path) -> None:
    """I9: the answer to the last save was lost; it is repeated after the journal has moved."""
    new = owned("a")
    end = change("a", new.head, head_fields={"state": ExecutionState.FAILED, "owner": None, "ended": NOW})
    with opened(FileBackend(path)) as backend:
        done(backend, new, end)
    with opened(FileBackend(path)) as backend:
        assert (path / "done" / "a.jsonl").exists()
        assert backend.commit([end]) == [None]
        assert loaded(backend, "a").head == end.head


def test_old_generations_go(path: Path, backend: StoreBackend) -> None:
    """I16: whatever the number of claims, two files are left: the newest generation and the signpost."""
    created(backend, create("a"))
    for turn in range(10):
        (given,) = backend.claim(claim(f"o{turn}", ids=("a",)))
        save = step("a", given.head)
        done(backend, save, step("a", save.head))
        backend.renew("nobody", 1.0)
        done(backend, change("a", loaded(backend, "a").head, head_fields={"owner": None}))
    backend.close()
    assert sorted(file.name for file in (path / "live").iterdir()) == ["a.0.jsonl", "a.10.jsonl"]
    backend.open()
    assert loaded(backend, "a").head.seq == 21


def test_a_thousand_executions_need_few_descriptors(path: Path) -> None:
    """I16: 1,024 is a common limit for a whole process."""
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from longrun.stores.file import FileBackend
from longrun.testing.samples import claim, owned, step
backend = FileBackend(sys.argv[1])
backend.open()
news = [owned(f"x{n}") for n in range(300)]
assert backend.commit(news) == [True] * 300
saves = [step(new.id, new.head) for new in news]
assert backend.commit(saves) == [None] * 300
given = backend.claim(claim("new", dead=frozenset({"me"}), limit=300))
assert len(given) == 300
assert backend.commit([step(one.definition.id, one.head) for one in given]) == [None] * 300
backend.close()
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 100
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=ROOT)


def test_room_for_many_descriptors_is_made_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever starts so many at once or takes them over, and by nobody else."""
    asked: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(mine, "make_room", asked.put)
    with opened(FileBackend(path)) as backend:
        created(backend, *[owned(f"few{n}") for n in range(20)])
    with opened(FileBackend(path)) as backend:
        created(backend, *[owned(f"x{n}") for n in range(40)])
        created(backend, *[owned(f"y{n}") for n in range(40)])
        assert asked.get(timeout=PATIENCE) > 100
    with opened(FileBackend(path)) as backend:
        assert len(backend.claim(claim("you", dead=frozenset({"me"}), limit=100))) == 100
        assert asked.get(timeout=PATIENCE) > 100
    assert asked.empty()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the size of the table")
def test_room_for_descriptors_is_there_at_once_and_none_stays_open() -> None:
    """Nor does it matter that there are not so many to be had."""
    code = """
import os, resource
from longrun.stores._file.disk import make_room
def size():
    return int(open("/proc/self/status").read().split("FDSize:")[1].split()[0])
before, names = size(), os.listdir("/proc/self/fd")
make_room(4 * before)
assert size() == 4 * before, size()
resource.setrlimit(resource.RLIMIT_NOFILE, (4 * before, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
make_room(4 * before + 1)
assert size() == 4 * before, size()
assert os.listdir("/proc/self/fd") == names
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_closing_leaves_no_descriptor_open(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with opened(FileBackend(path)) as backend:
        done(backend, *[owned(f"x{n}") for n in range(20)], send("x1"))
        ids_of(backend.claim(claim("new", dead=frozenset({"me"}))))
        backend.find(Query())
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_deletion_that_a_crash_cut_short_can_be_finished(path: Path) -> None:
    """Only the signpost is left: the id is free again."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"))
        (given,) = backend.claim(claim("me"))
        save = step("a", given.head)
        done(backend, save, step("a", save.head))
    (path / "live" / "a.1.jsonl").unlink()
    with opened(FileBackend(path)) as backend:
        assert backend.load("a") is None
        assert backend.delete(["a"]) == [False]
        created(backend, create("a", data=b"anew"))
        assert loaded(backend, "a").boundary.data == b"anew"


def test_numbers_that_json_does_not_know_are_kept(path: Path, backend: StoreBackend) -> None:
    """A total of infinity is a user's right."""
    new = create("a", head_fields={"of": float("inf"), "due": float("inf"), "done": float("-inf")})
    created(backend, new)
    assert loaded(backend, "a").head == new.head
    text = create("b", head_fields={"error": "\ud800", "note": "x"})
    created(backend, attrs.evolve(text, head=attrs.evolve(text.head, state=ExecutionState.WAITING)))
    assert loaded(backend, "b").head.error == "\ud800"
    created(backend, create("c", metadata={"large": 2**70 + 1}))
    with opened(FileBackend(path)) as other:
        assert loaded(other, "c").definition.metadata == {"large": 2**70 + 1}


def test_a_late_tidier_does_not_lead_back(path: Path, backend: StoreBackend) -> None:
    """I3: two processes tidy one execution in the wrong order; the newest generation is found all the same."""
    created(backend, create("a"))
    with opened(FileBackend(path)) as late:
        for turn, one in enumerate((late, backend)):
            (given,) = one.claim(claim(f"o{turn}", ids=("a",), dead=frozenset({"o0"})))
            save = step("a", given.head)
            done(one, save, step("a", save.head))
        backend.close()
        backend.open()
    assert sorted(file.name for file in (path / "live").iterdir()) == ["a.0.jsonl", "a.2.jsonl"]
    assert loaded(backend, "a").head.owner == "o1"


def test_what_was_tidied_and_has_ended_can_be_deleted_at_once(path: Path, backend: StoreBackend) -> None:
    """Its signpost stands already."""
    created(backend, create("a"))
    (given,) = backend.claim(claim())
    save = step("a", given.head)
    done(backend, save, last := step("a", save.head))
    backend.close()
    backend.open()
    done(backend, change("a", last.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None}))
    assert backend.delete(["a"]) == [True]
    assert list((path / "live").iterdir()) == []


def test_what_another_process_holds_just_now_is_not_deleted(
    path: Path, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "TRIES", 2)
    created(backend, create("a", ExecutionState.COMPLETED))
    with (path / "live" / "a.0.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match="in use by another process"):
            backend.delete(["a"])
    assert backend.delete(["a"]) == [True]


class Replacing(Disk):
    """Somebody replaces a journal in the moment before it is locked."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal

    def lock(self, fd: int, *, wait: bool, shared: bool = False) -> bool:
        if os.path.samestat(os.fstat(fd), self.journal.stat()):
            new = self.journal.with_suffix(".new")
            new.write_bytes(self.journal.read_bytes())
            new.rename(self.journal)
        return super().lock(fd, wait=wait, shared=shared)


def test_only_the_very_file_that_was_meant_is_removed(path: Path) -> None:
    """I1: one that took its name meanwhile may hold an acknowledged write."""
    with opened(FileBackend(path)) as backend:
        created(backend, create("a"))
    journal = path / "live" / "a.0.jsonl"
    here = Place(str(path), Replacing(journal))
    try:
        assert not remove_locked(here, "a", 0)
        here.disk = here.live.disk = Disk()
        assert not remove_locked(here, "a", 0, ino=journal.stat().st_ino + 1)
        assert journal.exists()
        assert remove_locked(here, "a", 0, ino=journal.stat().st_ino)
        assert not journal.exists()
    finally:
        here.close()


def test_what_was_deleted_and_started_anew_stays_where_it_is(path: Path, backend: StoreBackend) -> None:
    """A process that still knows the finished one of that id does not move the new one away."""
    new = owned("a")
    created(backend, new)
    finish(backend, "a", new.head)
    with opened(FileBackend(path)) as other:
        assert other.delete(["a"]) == [True]
        created(other, owned("a", "other", data=b"anew"))
        backend.close()
        assert [file.name for file in (path / "live").iterdir()] == ["a.0.jsonl"]
        assert list((path / "done").iterdir()) == []
        assert loaded(other, "a").boundary.data == b"anew"
        backend.open()
        assert backend.count(Query()) == {ExecutionState.RUNNING: 1}


def test_a_stale_owner_of_an_id_that_was_started_anew_is_refused(path: Path, backend: StoreBackend) -> None:
    """I3: the same id, fence and revision do not make it the same execution."""
    new = owned("a")
    created(backend, new)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("two", dead=frozenset({"me"})))
        finish(other, "a", given.head)
        assert other.delete(["a"]) == [True]
        created(other, owned("a"))
        (answer,) = backend.commit([step("a", new.head)])
        assert isinstance(answer, LeaseLostError)
        assert loaded(other, "a").head.revision == 0
