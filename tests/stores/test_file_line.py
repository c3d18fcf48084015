"""The line of the file store: who is claimed next, at a price that does not depend on how many wait."""

from __future__ import annotations

import random
from typing import Any

import attrs

from longrun.records import ExecutionState
from longrun.stores._file.contents import NO_MAIL
from longrun.stores._file.entries import Entries
from longrun.stores._file.entry import Entry
from longrun.stores._file.line import Line, rank
from longrun.testing.samples import claim, create

S = ExecutionState


def entry(id: str, state: ExecutionState = S.INITIALIZED, **fields: Any) -> Entry:
    made = create(id, state)
    definition = attrs.evolve(made.definition, **fields)
    one = Entry(id, 0, ("born", definition, made.head), NO_MAIL)
    one.wake = 0.0
    return one


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


def test_places_of_those_who_have_left_do_not_pile_up() -> None:
    line, one = Line(), entry("a")
    for _ in range(10_000):
        line.join(one)
    assert sum(map(len, line._heaps.values())) < 2_000
    assert line.first(claim(), 5, everybody) == [one]


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
