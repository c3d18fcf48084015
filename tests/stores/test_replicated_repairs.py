"""Another process repairs the standby between the two writes of a synchronous pair: nothing is lost (I13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stored import Save
from longrun.stores._replicated.term import being_mended, marks_of
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore
from longrun.testing.samples import create, owned, send, step
from tests.stores.replicated_tools import PATIENCE, Switch, assert_equal, beside, created, done, head_of, opened

NEW = owned("x")
WRITES: dict[str, Callable[[Any], object]] = {
    "a checkpoint": lambda backend: done(backend, step("x", NEW.head)),
    "the end": lambda backend: done(backend, completes()),
    "a signal": lambda backend: done(backend, send("x")),
    "a deletion": lambda backend: backend.delete(["old"]),
}


def completes() -> Save:
    saved = step("x", NEW.head)
    saved.head = attrs.evolve(saved.head, state=ExecutionState.COMPLETED, owner=None, ended=9.0)
    return saved


class Neighbour:
    """One process's own way to the two stores."""

    def __init__(self, stores: tuple[MemoryBackend, MemoryBackend], witness: Path) -> None:
        self.primary, self.secondary = Switch(stores[0]), Switch(stores[1])
        self.store = ReplicatedCheckpointStore(
            self.primary,
            self.secondary,
            witness=DirectoryWitness(witness),
            health_interval=None,
            failback_after=None,
        )
        self.backend: Any = self.store.backend


class Street:
    """Three of them on one pair: one writes, the others repair."""

    def __init__(self, path: Path) -> None:
        self.stores = MemoryBackend(), MemoryBackend()
        self.writer, self.repairer, self.third = (Neighbour(self.stores, path) for _ in range(3))
        self.all = self.writer, self.repairer, self.third

    def differ(self) -> None:
        """The repairer has a write on the standby that the active side refused: its next round makes them equal."""
        self.repairer.primary.full = True
        with pytest.raises(StoreUnavailableError):
            self.repairer.backend.commit([send("x", name="refused")])
        self.repairer.primary.full = False

    def assert_level(self) -> None:
        assert_equal(*self.stores)
        assert self.writer.store.status().standby == "level"
        assert being_mended(self.writer.backend._council.standby) == frozenset()


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    made = Street(tmp_path / "witness")
    with ExitStack() as stack:
        for one in made.all:
            stack.enter_context(opened(one.backend))
        created(made.writer.backend, NEW, create("old", ExecutionState.FAILED))
        yield made


def once(side: Switch, calls: tuple[str, ...], act: Callable[[], object], skip: int = 0) -> None:
    """Do something just before the side gets such a call."""
    left = [None] * skip

    def told(call: str) -> None:
        if call in calls and left:
            left.pop()
        elif call in calls:
            side.told = lambda call: None
            act()

    side.told = told


def held(side: Switch, calls: tuple[str, ...], skip: int = 0) -> tuple[threading.Event, threading.Event]:
    """Stop just before the side gets such a call: set when it is there, and to be set when it may go on."""
    there, go = threading.Event(), threading.Event()

    def act() -> None:
        there.set()
        assert go.wait(PATIENCE)

    once(side, calls, act, skip)
    return there, go


@pytest.mark.parametrize("how", ["by hand", "after a refusal"])
@pytest.mark.parametrize("what", WRITES)
def test_a_repair_between_the_two_writes_is_noticed(street: Street, what: str, how: str) -> None:
    """It saw the standby ahead, and set it back to what the active side had."""

    def repair() -> None:
        if how == "after a refusal":
            street.differ()
            street.repairer.backend.check()
        else:
            street.repairer.backend.resync()

    once(street.writer.primary, ("commit", "delete"), repair)
    WRITES[what](street.writer.backend)
    street.assert_level()


@pytest.mark.parametrize("what", WRITES)
def test_a_repair_that_is_not_over_when_both_were_written_is_noticed(street: Street, what: str) -> None:
    if what == "a deletion":  # nothing has to be removed first; the first two make the mark
        there, go = held(street.repairer.secondary, ("commit",), skip=2)
    else:
        there, go = held(street.repairer.secondary, ("delete",))
    arrived, on = held(street.writer.primary, ("commit", "delete"))
    with beside(lambda: WRITES[what](street.writer.backend), on) as writing:
        assert arrived.wait(PATIENCE)
        with beside(street.repairer.backend.resync, go) as repairing:
            assert there.wait(PATIENCE)
            on.set()
            writing.result(PATIENCE)
            go.set()
            repairing.result(PATIENCE)
    street.assert_level()


@pytest.mark.parametrize("what", WRITES)
def test_the_repair_of_a_join_is_noticed(street: Street, what: str) -> None:
    """The standby was away, and everything on the two is compared while others write."""
    street.repairer.secondary.down = True
    created(street.repairer.backend, create("y"))
    street.repairer.secondary.down = False
    arrived, on = held(street.writer.primary, ("commit", "delete"))
    writing: list[Future[object]] = []
    with ExitStack() as stack:

        def begin() -> None:
            street.writer.backend.check()
            assert street.writer.store.status().standby == "joining"
            writing.append(stack.enter_context(beside(lambda: WRITES[what](street.writer.backend), on)))
            assert arrived.wait(PATIENCE)

        once(street.repairer.secondary, ("find",), begin)
        street.repairer.backend.check()
        assert street.repairer.store.status().standby == "level"
        on.set()
        writing[0].result(PATIENCE)
    street.assert_level()


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_repair_that_began_before_the_two_writes_is_noticed(
    street: Street, monkeypatch: pytest.MonkeyPatch, dead: bool, late: bool
) -> None:
    """The writer has seen its mark at the write before. Or not: a third process has made the execution equal meanwhile,
    and has removed the mark of a repairer that was only slow."""
    street.differ()
    there, go = held(street.repairer.secondary, ("delete",))
    mirror = street.repairer.backend._mirror
    compared = mirror._marked_again
    with beside(street.repairer.backend.check, go) as repairing:
        assert there.wait(PATIENCE)
        if dead:
            street.third.backend.check()
            street.assert_level()
        done(street.writer.backend, send("old"))  # the writer has seen the marks as they are now
        arrived, on = held(street.writer.primary, ("commit",))
        with beside(lambda: done(street.writer.backend, completes()), on) as writing:
            assert arrived.wait(PATIENCE)

            def and_written(*args: Any) -> Any:
                """When the repairer has compared: before or after it sees to its marks."""
                monkeypatch.undo()
                left = None if late else compared(*args)
                on.set()
                writing.result(PATIENCE)
                return compared(*args) if late else left

            monkeypatch.setattr(mirror, "_marked_again", and_written)
            go.set()
            repairing.result(PATIENCE)
    street.assert_level()


@pytest.mark.parametrize("what", ["a checkpoint", "a deletion"])
def test_what_may_have_been_replaced_is_not_acknowledged_after_a_failover(street: Street, what: str) -> None:
    """The standby is active now, and nobody can say what it had: whoever wrote it does it again (I9)."""

    def repair_and_die() -> None:
        street.repairer.backend.resync()
        for one in street.all:
            one.primary.down = True

    once(street.writer.primary, ("commit", "delete"), repair_and_die)
    with pytest.raises(StoreUnavailableError):
        WRITES[what](street.writer.backend)
    WRITES[what](street.writer.backend)
    assert street.writer.store.status().active == "secondary"
    third = street.third.backend
    assert (third.load("old") is None) if what == "a deletion" else (head_of(third, "x").revision == 1)


@pytest.mark.parametrize("what", WRITES)
def test_a_standby_whose_marks_cannot_be_read_is_left_behind(street: Street, what: str) -> None:
    def repair_and_lose() -> None:
        street.repairer.backend.resync()
        street.writer.secondary.down = True

    once(street.writer.primary, ("commit", "delete"), repair_and_lose)
    WRITES[what](street.writer.backend)
    assert street.writer.store.status().standby == "behind"
    street.writer.secondary.down = False
    street.writer.backend.check()
    street.assert_level()


def test_a_write_costs_the_standby_one_look(street: Street) -> None:
    """And a new execution none: the active side has it first."""
    calls: list[str] = []
    done(street.writer.backend, send("x"))
    street.writer.secondary.told = calls.append
    done(street.writer.backend, send("x"), step("x", NEW.head))
    assert calls == ["commit", "load"]
    created(street.writer.backend, create("z"))
    assert calls == ["commit", "load", "commit"]
    assert marks_of(street.writer.backend._council.standby).number == -1
