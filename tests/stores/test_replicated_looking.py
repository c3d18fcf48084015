"""Whoever only looks at a pair of stores changes nothing of it, and makes none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import StoreSettingsError, StoreUnavailableError
from longrun.stores._replicated.term import Term, read_term, write_term
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore, StoreWitness
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import create, send
from tests.stores.replicated_tools import Switch, created, opened


class Looked:
    """A pair at which a worker works, and a second way to its stores."""

    def __init__(self, path: Path) -> None:
        self.stores = MemoryBackend(), MemoryBackend()
        self.path = path / "witness"
        self.worker: Any = self._pair(*self.stores)
        self.primary, self.secondary = Switch(self.stores[0]), Switch(self.stores[1])

    def _pair(self, primary: Any, secondary: Any, **options: Any) -> Any:
        settings = {"witness": DirectoryWitness(self.path), "health_interval": None, "failback_after": None, **options}
        return ReplicatedCheckpointStore(primary, secondary, **settings).backend

    def looking(self, **options: Any) -> Any:
        backend = self._pair(self.primary, self.secondary, **options)
        backend.creates = False
        return backend

    @property
    def terms(self) -> list[Term | None]:
        """What the witness and both stores have on record."""
        return [DirectoryWitness(self.path).read(), *(read_term(side) for side in self.worker._sides)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Looked]:
    made = Looked(tmp_path)
    with opened(made.worker):
        created(made.worker, create("a"))
        yield made


def test_no_pair_is_made(tmp_path: Path) -> None:
    one, two = MemoryBackend(), MemoryBackend()
    backend = ReplicatedCheckpointStore(one, two, witness=DirectoryWitness(tmp_path / "witness")).backend
    backend.creates = False
    with pytest.raises(StoreUnavailableError, match="no pair yet"):
        backend.open()
    assert not (tmp_path / "witness").exists()
    assert (one.load("longrun.replica.term"), two.load("longrun.replica.term")) == (None, None)


def test_no_store_and_no_witness_is_made(tmp_path: Path) -> None:
    witness = StoreWitness(SQLiteBackend(tmp_path / "w.db"))
    stores = SQLiteBackend(tmp_path / "a.db"), SQLiteBackend(tmp_path / "b.db")
    backend = ReplicatedCheckpointStore(*stores, witness=witness).backend
    backend.creates = False
    assert backend.creates is False
    with pytest.raises(StoreUnavailableError, match="neither the primary nor the secondary"):
        backend.open()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("side", ["primary", "secondary"])
def test_a_store_that_knows_nothing_of_the_pair_is_not_taken_in(pair: Looked, side: str) -> None:
    """It is empty since somebody mistyped its name."""
    before = pair.terms
    setattr(pair, side, Switch(MemoryBackend()))
    with pytest.raises(StoreSettingsError, match=f"the {side} is empty and knows nothing of this pair"):
        pair.looking().open()
    assert pair.terms == before
    assert getattr(pair, side).load("longrun.replica.term") is None


def test_who_looks_reads_from_a_standby_that_is_level_and_does_not_fail_over(pair: Looked) -> None:
    before = pair.terms
    with opened(pair.looking()) as backend:
        pair.primary.down = True
        assert backend.load("a") is not None
        backend.check()
        assert backend.load("a") is not None
    with opened(pair.looking()) as backend:
        assert backend.load("a") is not None
    assert pair.terms == before


def test_who_looks_does_not_read_from_one_that_is_behind(pair: Looked) -> None:
    pair.worker._council.propose("primary", "behind")
    with opened(pair.looking()) as backend:
        backend.check()
        assert backend.status().standby == "behind"
        pair.primary.down = True
        with pytest.raises(StoreUnavailableError, match="switched off"):
            backend.load("a")
        pair.worker.check()
        pair.worker.failover()
        assert backend.load("a") is not None
        assert backend.status().active == "secondary"


def test_a_standby_that_is_old_is_called_so_before_the_first_write(pair: Looked) -> None:
    old = pair.terms[0]
    assert old is not None
    newer = attrs.evolve(old, generation=old.generation + 1)
    assert DirectoryWitness(pair.path).propose(newer)
    write_term(pair.worker._sides[0], newer, 0.0)
    with opened(pair.looking()) as backend:
        assert backend.load("a") is not None
        assert pair.terms == [newer, newer, old]
        backend.commit([send("a")])
        assert backend.status().standby == "behind"
        assert pair.stores[1].messages("a") == []


@pytest.mark.parametrize("standby", ["level", "behind"])
def test_an_active_store_that_is_old_is_left_as_it_is(pair: Looked, standby: str) -> None:
    """Where only the witness knows the term, nothing was acknowledged under it: it can be read."""
    old = pair.terms[0]
    assert old is not None
    newer = attrs.evolve(old, generation=old.generation + 1, standby=standby)
    assert DirectoryWitness(pair.path).propose(newer)
    if standby == "level":
        write_term(pair.worker._sides[1], newer, 0.0)
    before = pair.terms
    with opened(pair.looking()) as backend:
        if standby == "level":
            with pytest.raises(StoreUnavailableError, match="older than generation"):
                backend.load("a")
        else:
            assert backend.load("a") is not None
    assert pair.terms == before


def test_nobody_is_told_of_a_new_witness_or_that_one_is_alone(pair: Looked, tmp_path: Path) -> None:
    before, new = pair.terms, DirectoryWitness(tmp_path / "new")
    new.open()
    for options in ({"witness": new}, {"witness": None, "single_process": True}):
        with opened(pair.looking(**options)) as backend:
            assert backend.load("a") is not None
    assert new.read() is None
    assert pair.terms == before
