"""The file store and a power cut: what was acknowledged is there, whatever the disk had not synced yet (I1).

The cut is a model, so that every run can have many of them; `tests/campaign/test_skies.py` cuts a real file system.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.records import ExecutionState
from longrun.stored import Head
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.testing.samples import change, claim, create, end, move, owned, send, step
from tests.campaign.power import PowerDisk
from tests.stores.file_tools import done, opened

CUTS = 2
"""For each of the campaign's size."""


class Life:
    """Does something to the store, and remembers what it was told is done."""

    def __init__(self, backend: StoreBackend, dice: random.Random) -> None:
        self._backend, self._dice = backend, dice
        self._owner = 0
        self.heads: dict[str, Head] = {}
        self.messages: dict[str, int] = {}

    def act(self) -> None:
        alive = [id for id, head in self.heads.items() if not head.state.finished]
        if not alive or self._dice.random() < 0.15:
            self._create()
            return
        id = self._dice.choice(alive)
        head = self.heads[id]
        act = self._dice.choice([self._save, self._save, self._save, self._send, self._take, self._end])
        if head.owner is None:
            act = self._take
        act(id, head)

    def _create(self) -> None:
        new = create(f"x{len(self.heads)}", ExecutionState.INITIALIZED) if self._dice.random() < 0.3 else None
        new = new or owned(f"x{len(self.heads)}", f"o{self._owner}")
        assert done(self._backend, new) == [True]
        self.heads[new.id] = new.head

    def _save(self, id: str, head: Head) -> None:
        entry = b"1" * self._dice.randint(1, 40_000)
        save = self._dice.choice([move(id, head), step(id, head, put={"e": entry}, clear=True)])
        done(self._backend, save)
        self.heads[id] = save.head

    def _send(self, id: str, head: Head) -> None:
        (number,) = done(self._backend, send(id, limit=10**6))
        assert isinstance(number, int)
        self.messages[id] = number

    def _take(self, id: str, head: Head) -> None:
        self._owner += 1
        dead = frozenset() if head.owner is None else frozenset({head.owner})
        states = frozenset(ExecutionState)
        (given,) = self._backend.claim(claim(f"o{self._owner}", ids=(id,), dead=dead, states=states))
        self.heads[id] = given.head

    def _end(self, id: str, head: Head) -> None:
        over = {"state": ExecutionState.COMPLETED, "owner": None, "ended": 1.0}
        save = self._dice.choice([end(id, head), change(id, head, head_fields=over)])
        done(self._backend, save)
        self.heads[id] = save.head
        self.messages.pop(id, None)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[PowerDisk]:
    with opened(FileBackend(tmp_path / "store")):
        pass
    disk = PowerDisk(tmp_path / "store")
    yield disk
    disk.dispose()


def test_what_was_acknowledged_survives_a_power_cut(
    tmp_path: Path, disk: PowerDisk, campaign_size: int, campaign_seed: int
) -> None:
    """I1, I7: creations, saves, messages, claims and ends, in any order, with a cut after any of them."""
    dice = random.Random(campaign_seed)
    with opened(FileBackend(tmp_path / "store", disk=disk)) as backend:
        life = Life(backend, dice)
        for n in range(CUTS * campaign_size):
            for _ in range(dice.randint(1, 6)):
                life.act()
            disk.cut(tmp_path / f"after-{n}", dice)
            look(tmp_path / f"after-{n}", life)


def look(path: Path, life: Life) -> None:
    with opened(FileBackend(path)) as backend:
        for id, head in life.heads.items():
            found = backend.load(id)
            assert found is not None, f"{id} is gone"
            assert found.damage == ()
            assert (found.head.fence, found.head.revision) == (head.fence, head.revision), id
            assert found.head.state is head.state
            assert [row.seq for row in backend.boundaries(id)] == list(range(1, head.seq + 1))
            if id in life.messages:
                assert max((message.id for message in found.messages), default=0) >= life.messages[id]
