"""Terms while others change them: what another process does between any two calls of ours is not undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.clock import SYSTEM_CLOCK
from longrun.stores._replicated.council import LEVEL, Council, Rules
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import Term, read_term, sign_of_life, write_term
from longrun.stores._replicated.witness import DirectoryWitness
from longrun.stores.memory import MemoryBackend
from longrun.testing.interposed import InterposedBackend

OLD = Term(generation=1, pair="p", active="primary", standby=LEVEL, by="us")
NEW = attrs.evolve(OLD, generation=2, by="others")
CALLS = range(12)
"""More than any of what is tried here makes."""


class Others:
    """Somebody who does something behind the call of this number, once."""

    def __init__(self, behind: int, deed: Callable[[], object]) -> None:
        self.behind, self._deed = behind, deed
        self._calls = 0
        self.acted = False

    def called(self) -> None:
        self._calls += 1
        if self._calls == self.behind + 1:
            self._deed()
            self.acted = True


class Shared(InterposedBackend):
    """A store that others use too."""

    others: Others | None = None

    def around(self, call: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        answer = function(*args, **options)
        if self.others is not None:
            self.others.called()
        return answer


def opened_side(name: str, backend: Any) -> Side:
    side = Side(name, backend)
    side.open()
    return side


def council_of(primary: Any, secondary: Any, witness: DirectoryWitness | None) -> Council:
    sides = opened_side("primary", primary), opened_side("secondary", secondary)
    rules = Rules(asynchronous=False, alone=False, max_failovers=3, strikes=2)
    return Council(sides, witness, rules, SYSTEM_CLOCK)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("behind", CALLS)
def test_a_newer_term_is_never_overwritten(behind: int, known: bool) -> None:
    memory = MemoryBackend()
    shared = Shared(memory)
    theirs, ours = opened_side("primary", memory), opened_side("primary", shared)
    if known:
        write_term(theirs, attrs.evolve(OLD, generation=0), 0.0, first=True)
    shared.others = Others(behind, lambda: write_term(theirs, NEW, 0.0, first=not known))
    stored = write_term(ours, OLD, 0.0, first=not known)
    assert stored in (OLD, NEW)
    assert read_term(theirs) == (NEW if shared.others.acted else OLD)


@pytest.mark.parametrize("behind", CALLS)
def test_a_sign_of_life_brings_no_old_term_back(behind: int) -> None:
    memory = MemoryBackend()
    shared = Shared(memory)
    theirs, ours = opened_side("primary", memory), opened_side("primary", shared)
    write_term(theirs, OLD, 0.0, first=True)
    shared.others = Others(behind, lambda: write_term(theirs, NEW, 0.0))
    sign_of_life(ours, 1.0)
    assert read_term(theirs) == (NEW if shared.others.acted else OLD)


@pytest.mark.parametrize("witnessed", [True, False])
@pytest.mark.parametrize("behind", [*CALLS, *range(12, 30)])
def test_two_processes_that_make_the_pair_at_once_come_to_the_same(
    tmp_path: Path, behind: int, witnessed: bool
) -> None:
    """The other one makes it between two calls of ours, whichever these are."""
    stores = MemoryBackend(), MemoryBackend()
    witness = DirectoryWitness(tmp_path) if witnessed else None
    theirs = council_of(*stores, witness)
    primary, secondary = Shared(stores[0]), Shared(stores[1])
    ours = council_of(primary, secondary, witness)
    primary.others = secondary.others = Others(behind, theirs.decide)
    ours.decide()
    theirs.decide()
    assert ours.term == theirs.term
    assert ours.term is not None
    assert ours.term.generation == 1
