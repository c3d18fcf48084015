"""A copy that is being replaced when its process dies is not taken for whole (I13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longrun.errors import StoreUnavailableError
from longrun.records import ExecutionState
from longrun.stores._replicated.term import being_mended
from longrun.testing.samples import create, send
from tests.stores.replicated_tools import Pair, assert_equal, created, opened


class KilledError(BaseException):
    """Stands for SIGKILL: nobody in the library catches it."""


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    for name in ("primary", "secondary"):
        (tmp_path / name).mkdir()
    return Pair(tmp_path, ("sqlite", "file"), failback_after=None)


@pytest.fixture
def cut_off(pair: Pair) -> Iterator[Pair]:
    """The sides did not agree about a waiting execution, and whoever made them equal died when its copy was gone."""
    calls: list[str] = []

    def told(call: str) -> None:
        calls.append(call)
        if calls[-2:] == ["delete", "commit"]:
            raise KilledError

    with opened(pair.backend) as backend:
        created(backend, create("w", ExecutionState.WAITING, head_fields={"signal": "go"}))
        pair.primary.full = True
        with pytest.raises(StoreUnavailableError):
            backend.commit([send("w")])
        pair.primary.full = False
        pair.secondary.told = told
        with pytest.raises(KilledError):
            backend.check()
        pair.secondary.told = lambda call: None
        assert pair.secondary.load("w") is None
        assert pair.parts == ("primary", "level")
        yield pair


def test_a_standby_with_half_a_copy_does_not_become_active_by_itself(cut_off: Pair) -> None:
    cut_off.primary.down = True
    with pytest.raises(StoreUnavailableError, match="no whole copy of 'w'"):
        cut_off.backend.load("w")
    with pytest.raises(StoreUnavailableError, match="no whole copy of 'w'"):
        cut_off.backend.failover()
    cut_off.primary.down = False
    assert cut_off.backend.load("w") is not None


def test_whoever_must_can_go_on_without_it(cut_off: Pair) -> None:
    cut_off.primary.down = True
    cut_off.backend.failover(force=True)
    assert cut_off.parts == ("secondary", "behind")
    assert cut_off.backend.load("w") is None


def test_the_next_look_makes_it_whole(cut_off: Pair) -> None:
    cut_off.backend.close()
    with opened(cut_off.again().backend) as backend:
        backend.check()
        assert_equal(cut_off.primary, cut_off.secondary)
        assert being_mended(backend._council.standby) == frozenset()
        cut_off.primary.down = True
        assert backend.load("w") is not None
