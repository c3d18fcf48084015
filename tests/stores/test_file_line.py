"""The line of the file store: who is claimed next, at a price that does not depend on how many wait."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.records import ExecutionState
from longrun.stores._file.contents import NO_MAIL
from longrun.stores._file.entries import Entries
from longrun.stores._file.entry import Entry
from longrun.stores._file.line import SPARE, Line, Place, rank
from longrun.stores.file import FileBackend
from longrun.testing.samples import NOW, change, claim, create
from tests.stores.file_tools import created, done, opened

S = ExecutionState


def entry(id: str, state: ExecutionState = S.INITIALIZED, **fields: Any) -> Entry:
    made = create(id, state)
    definition = attrs.evolve(made.definition, **fields)
    return Entry(id, 0, ("born", definition, made.head), NO_MAIL)


def everybody(one: Entry) -> bool:
    return True


def test_the_oldest_of_the_highest_priority_comes_first_whatever_queue_it_is_in() -> None:
    line, drawn = Line(), random.Random(7)
    entries = [
        entry(f"x{n}", queue=drawn.choice("ab"), priority=drawn.randrange(3), created=float(drawn.randrange(50)))
        for n in range(200)
    ]
    for one in entries:
        line.join(one)
    expected = sorted(entries, key=lambda one: rank(one.definition))
    for number in (1, 7, 200, 500):
        assert line.first(claim(), number, everybody) == expected[:number]
    of_a = [one for one in expected if one.definition.queue == "a"]
    assert line.first(claim(queues=frozenset({"a"})), 500, everybody) == of_a


def test_who_is_not_asked_for_is_passed_and_keeps_its_place() -> None:
    line = Line()
    for n, (workflow, state) in enumerate([("a", S.INITIALIZED), ("b", S.INITIALIZED), ("a", S.RUNNING)]):
        line.join(entry(f"x{n}", state, workflow=workflow, created=float(n)))
    asked = claim(workflows=frozenset({"a"}), states=frozenset({S.RUNNING}))
    assert [one.id for one in line.first(asked, 5, everybody)] == ["x2"]
    assert [one.id for one in line.first(claim(), 5, lambda one: one.id != "x0")] == ["x1", "x2"]
    assert [one.id for one in line.first(claim(), 5, everybody)] == ["x0", "x1", "x2"]


def test_who_has_left_is_not_found_and_who_comes_again_is_found_once() -> None:
    line, one = Line(), entry("a")
    for _ in range(3):
        line.join(one)
    assert line.first(claim(), 5, everybody) == [one]
    line.leave(one)
    assert not line
    assert line.first(claim(), 5, everybody) == []
    again = entry("a", S.RUNNING)
    line.join(again)
    assert line.first(claim(), 5, everybody) == [again]


def places(line: Line) -> int:
    return sum(map(len, line._heaps.values()))


def test_places_of_those_who_have_left_do_not_pile_up() -> None:
    """I16: also where nobody ever claims, which would find them empty. What is waited for no more needs no room."""
    line, drawn = Line(), random.Random(7)
    waiting: dict[str, Entry] = {}
    for _ in range(5_000):
        one = entry(f"x{drawn.randrange(300)}", queue=drawn.choice("abc"), created=float(drawn.randrange(50)))
        line.leave(one)
        waiting.pop(one.id, None)
        if drawn.random() < 0.5:
            line.join(one)
            waiting[one.id] = one
        assert places(line) <= 2 * len(waiting) + 3 * SPARE
    expected = sorted(waiting.values(), key=lambda one: rank(one.definition))
    assert line.first(claim(), 5_000, everybody) == expected
    for one in expected:
        line.leave(one)
    assert (places(line), line._heaps, line._waiting) == (0, {}, {})


def test_one_that_comes_again_and_again_has_one_place() -> None:
    line, one = Line(), entry("a")
    for _ in range(1_000):
        line.join(one)
    assert places(line) == 1
    assert line.first(claim(), 5, everybody) == [one]


def test_who_leaves_pays_for_itself_and_not_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    line, looked, usual = Line(), list[Place](), Line._is_taken

    def looks(self: Line, place: Place) -> bool:
        looked.append(place)
        return usual(self, place)

    monkeypatch.setattr(Line, "_is_taken", looks)
    entries = [entry(f"x{n}") for n in range(5_000)]
    for one in entries:
        line.join(one)
    for one in entries:
        line.leave(one)
    assert len(looked) <= 2 * len(entries)


def test_who_only_submits_keeps_nothing_of_what_others_have_run(tmp_path: Path) -> None:
    """I16: it claims nothing, and hears by the bell that somebody else did."""
    with opened(FileBackend(tmp_path)) as front, opened(FileBackend(tmp_path)) as worker:
        assert isinstance(front, FileBackend)
        for n in range(5):
            created(front, *[create(f"x{n}.{m}", queue=f"tenant-{n}") for m in range(10)])
            for taken in worker.claim(claim()):
                ended = {"state": S.COMPLETED, "owner": None, "ended": NOW}
                done(worker, change(taken.definition.id, taken.head, head_fields=ended))
            assert front.next_due() is None
            line = front._open.catalog.entries._ready
            assert (places(line), line._heaps) == (0, {})


def test_a_claim_looks_at_what_it_takes_and_not_at_all_who_wait() -> None:
    entries, looked = Entries(), list[str]()
    for n in range(5_000):
        entries.put(entry(f"x{n}", created=float(n)))

    def looks(one: Entry) -> bool:
        looked.append(one.id)
        return True

    found = entries.due(claim(), 5, looks)
    assert [one.id for one in found] == [f"x{n}" for n in range(5)]
    assert len(looked) == 5
