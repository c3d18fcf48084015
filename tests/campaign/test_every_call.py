"""Every single system call of the file store fails once, in every way: EIO, ENOSPC, EINTR, a short write (I9, I10).

One life of a store, from an empty directory to a deletion, is lived once to count its calls, and then once for each of
them. Whatever fails, the store says so with an error of its own and keeps no descriptor; what it had acknowledged is
there; and what it refused goes through when it is asked again.
"""

from __future__ import annotations

import ast
import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs

import longrun.stores
from longrun.errors import LeaseLostError, StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Head, Loaded, Owner, Query, Save
from longrun.stores._file.disk import Disk
from longrun.stores.file import FileBackend
from longrun.testing.samples import EVERY_STATE, boundary, change, claim, create, end, move, owned, send, step
from tests.stores.file_tools import opened

T = TypeVar("T")
CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))
STORES = Path(longrun.stores.__file__).parent
TO_THE_DISK = ("fcntl", "io", "os", "pathlib", "shutil", "tempfile")
NO_CALL = ("PathLike", "fspath", "geteuid", "getpid", "path", "stat_result", "strerror", "urandom")
"""What the modules of the file store may have from there: nothing of it touches a file."""
CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR}
SHORT = "short"
EACH = 3
"""Faults for each of the campaign's size; from a size of some hundreds on, all there are."""


@attrs.frozen
class Fault:
    """The n-th call of a kind, and how it fails."""

    call: str
    nth: int
    how: str

    def __str__(self) -> str:
        return f"{self.how} at {self.call} no. {self.nth}"


class OneFault(Disk):
    """Counts the calls by their kind, and makes one of them fail. Nothing is synced: no power is cut here."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self.fired = False
        for call in CALLS:
            setattr(self, call, self._around(call, getattr(super(), call)))

    def _around(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls[call] += 1
            fault = self.fault
            if fault is None or (fault.call, fault.nth) != (call, self.calls[call]):
                return None if call in ("fsync", "fdatasync") else function(*args, **options)
            self.fired = True
            if fault.how == SHORT:
                fd, data = args
                return function(fd, data[: len(data) // 2] or data)
            if call == "close":
                function(*args)  # the descriptor is gone, whatever the kernel says
            raise OSError(CODES[fault.how], os.strerror(CODES[fault.how]))

        return counted


class Life:
    """Does everything that a store can be asked for. What is refused is asked for again; what is done is remembered."""

    def __init__(self, path: Path, disk: OneFault) -> None:
        self._path, self._disk = path, disk
        self.backend = FileBackend(path, disk=disk)
        self.heads: dict[str, Head] = {}
        self.waiting: dict[str, int] = {}

    def ask(self, function: Callable[..., T], *args: Any) -> T:
        """An error of the store's own is allowed where the fault fired, and nowhere else; nothing is lost by it."""
        before = self._disk.fired
        try:
            return function(*args)
        except StoreUnavailableError:
            assert self._disk.fired
            assert not before, "it fails although nothing is wrong any more"
        self.look()
        return function(*args)

    def write(self, *saves: Save) -> None:
        for answer in self.ask(self._answers, saves):
            assert answer is None
        for save in saves:
            self.heads[save.id] = save.head

    def _answers(self, writes: Any) -> list[Any]:
        answers = self.backend.commit(writes)
        for answer in answers:
            if isinstance(answer, StoreUnavailableError):
                raise answer
        return answers

    def look(self) -> None:
        """What another process finds: everything that was acknowledged, and at most one write more."""
        with opened(FileBackend(self._path)) as other:
            for id, head in self.heads.items():
                found = other.load(id)
                assert found is not None, f"{id} is gone"
                assert found.damage == ()
                assert head.fence <= found.head.fence <= head.fence + 1
                assert head.revision <= found.head.revision <= head.revision + 1
                assert head.seq <= found.head.seq <= head.seq + 1
                rows = [row.seq for row in other.boundaries(id)]
                assert rows == list(range(1, found.head.seq + 1))
                assert len(found.messages) >= self.waiting.get(id, 0)

    def live(self) -> None:
        self.ask(self.backend.open)
        self.begin()
        self.grow()
        self.change_hands()
        self.end_one()
        self.backend.close()
        self.tear()
        self.ask(self.backend.open)
        self.read()
        self.write(step("b", self.heads["b"]))
        self.bring_back()
        self.take_over()
        self.remove()
        self.backend.close()

    def begin(self) -> None:
        self.ask(self.backend.register, Owner(id="me", life={}, remaining=60.0), 60.0)
        news = [owned("a"), create("b", ExecutionState.INITIALIZED), owned("c")]
        for answer in self.ask(self._answers, news):
            assert answer in (True, False)  # False: it was there already, by a write whose answer was lost
        for new in news:
            self.heads[new.id] = new.head
        assert self.ask(self._answers, [send("a", key="k"), send("b", key="k")]) == [1, 1]
        self.waiting = {"a": 1, "b": 1}

    def grow(self) -> None:
        """Until the journal is written anew, and its old rows go to the history."""
        for n in range(6):
            head = self.heads["a"]
            row = boundary(head.seq + 1, blobs=("shared",) if n else ())
            save = step("a", head, boundaries=(row,), put={"e": b"e" * 60_000}, keep_from=head.seq)
            self.write(attrs.evolve(save, blobs={"shared": b'"blob"'}) if n == 1 else save)
        self.waiting["a"] = 0
        self.write(change("a", self.heads["a"], take=(1,)), step("c", self.heads["c"]))
        self.write(move("a", self.heads["a"]))
        self.write(move("a", self.heads["a"]), move("c", self.heads["c"]))

    def change_hands(self) -> None:
        given = self.take("b", "me")
        assert len(given.messages) == 1
        for _ in range(3):
            self.write(step("b", self.heads["b"]))
        assert self.ask(self.backend.renew, "me", 60.0)

    def take(self, id: str, owner: str, **fields: Any) -> Loaded:
        given = self.ask(self.backend.claim, claim(owner, ids=(id,), states=EVERY_STATE, **fields))
        assert [one.definition.id for one in given] == [id]
        self.heads[id] = given[0].head
        return given[0]

    def end_one(self) -> None:
        over = {"state": ExecutionState.FAILED, "owner": None, "error": "broken", "ended": 1.0}
        self.write(change("c", self.heads["c"], head_fields=over))

    def tear(self) -> None:
        """A write that a crash left half done, which its owner cuts off; and a mode that is put right."""
        with (self._path / "live" / "b.1.jsonl").open("ab") as file:
            file.write(b'{"half')
        (self._path / "done").chmod(0o755)

    def read(self) -> None:
        backend = self.backend
        for id, head in self.heads.items():
            found = self.ask(backend.load, id)
            assert found is not None
            assert attrs.evolve(found.head, woken=head.woken) == head
            rows = self.ask(backend.boundaries, id)
            assert [row.seq for row in rows] == list(range(1, head.seq + 1))
            assert self.ask(backend.checkpoint, id, head.seq) is not None
            assert len(self.ask(backend.messages, id)) == self.waiting.get(id, 0)
            assert self.ask(backend.size, id) > 0
        assert self.ask(backend.sent, "a") == (1, {"k": 1})
        assert {one.definition.id for one in self.ask(backend.find, Query())} == set(self.heads)
        assert sum(self.ask(backend.count, Query()).values()) == len(self.heads)
        failed = Query(states=frozenset({ExecutionState.FAILED}))
        assert [one.definition.id for one in self.ask(backend.find, failed)] == ["c"]
        assert self.ask(backend.pending, "me") == ["b"]
        assert [one.id for one in self.ask(backend.owners)] == ["me"]
        self.ask(backend.next_due)
        self.ask(backend.ping)
        self.ask(backend.describe)
        self.ask(backend.wait, 0.0)

    def bring_back(self) -> None:
        """A retry: what had moved away is claimed again."""
        self.take("c", "me")
        self.write(end("c", self.heads["c"]))

    def take_over(self) -> None:
        before = self.heads["a"]
        self.take("a", "you", dead=frozenset({"me"}))
        (stale,) = self.ask(self._answers, [step("a", before)])
        assert isinstance(stale, LeaseLostError)
        for _ in range(2):
            self.write(step("a", self.heads["a"]))
        self.write(end("a", self.heads["a"]), move("b", self.heads["b"]))

    def remove(self) -> None:
        del self.heads["c"]
        assert self.ask(self.backend.delete, ["c"]) in ([True], [False])  # False: it was gone all the same
        assert self.ask(self.backend.load, "c") is None
        self.ask(self.backend.unregister, "me")


def test_no_call_goes_round_the_disk() -> None:
    """Whatever module of the file store is new: it asks `Disk`, or this test says which line does not."""
    files = [file for file in sorted(STORES.glob("_file/*.py")) if file.name != "disk.py"]
    assert len(files) > 20
    found = [
        f"{file.name}:{node.lineno} {node.value.id}.{node.attr}"
        for file in [*files, STORES / "file.py"]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in TO_THE_DISK
        if not (node.attr.startswith("O_") or node.attr in NO_CALL)
    ]
    assert not found, found


def faults(path: Path) -> list[Fault]:
    """Every call of a life, in every way that it can fail."""
    disk = OneFault()
    life = Life(path, disk)
    life.live()
    life.look()
    assert set(disk.calls) == set(CALLS), "there is a call that no life makes"
    ways = {call: [*CODES, SHORT] if call == "write" else [*CODES] for call in CALLS}
    return [Fault(call, n, how) for call in CALLS for n in range(1, disk.calls[call] + 1) for how in ways[call]]


def test_every_call_may_fail(tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    """I10: those of the small run are drawn; each kind of call is among them, in each way that it can fail."""
    fired = fail_in_turn(tmp_path, EACH * campaign_size, campaign_seed)
    assert fired.total() > 0, "no fault fired"


def fail_in_turn(place: Path, size: int, seed: int) -> Counter[str]:
    """So many lives with a fault each, all of them if that is enough, and one of each kind in any case."""
    every = faults(place / "whole")
    random.Random(seed).shuffle(every)
    one_of_each = {(fault.call, fault.how): fault for fault in every}
    fired: Counter[str] = Counter()
    for n, fault in enumerate(dict.fromkeys([*one_of_each.values(), *every[:size]])):
        fired[fault.how] += one_life(place / str(n), fault)
        shutil.rmtree(place / str(n))
    return fired


def one_life(path: Path, fault: Fault) -> bool:
    disk = OneFault(fault)
    life = Life(path, disk)
    before = _descriptors()
    try:
        life.live()
        life.look()
    except Exception as error:
        raise AssertionError(f"{fault}: {type(error).__name__}: {error}") from error
    finally:
        life.backend.close()
    assert _descriptors() == before, f"{fault}: a descriptor is left open"
    return disk.fired


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
