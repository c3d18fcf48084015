"""The contract of `find` and `count`.

Place in the life of an execution: look at many of them.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from longrun.records import ExecutionState
from longrun.stored import Query, Stored
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import ConformanceBase, created, done, head_of
from longrun.testing.samples import NOW, change, create, owned

S = ExecutionState


def found(backend: StoreBackend, **fields: Any) -> str:
    """The ids of a listing in alphabetical order, joined; its count must agree."""
    query = Query(**fields)
    page = backend.find(query)
    assert sum(backend.count(query).values()) == len(page)
    return " ".join(sorted(one.definition.id for one in page))


class FindContract(ConformanceBase):
    def test_a_listing_shows_all_but_steps(self, backend: StoreBackend) -> None:
        new = owned("a", metadata={"k": [1, "x"]}, queue="q", priority=3, parent_id="p", version="7")
        created(backend, new)
        (one,) = backend.find(Query())
        assert one == Stored(definition=attrs.evolve(new.definition, steps=()), head=new.head)
        assert one.definition.total == 3
        done(backend, change("a", new.head, head_fields={"note": "on", "error": "e"}))
        assert backend.find(Query())[0].head == head_of(backend, "a")

    def test_the_newest_come_first(self, backend: StoreBackend) -> None:
        created(backend, *[create(id, created=NOW + age) for id, age in {"a": 1, "b": 3, "c": 2, "d": -1}.items()])
        assert [one.definition.id for one in backend.find(Query())] == ["b", "c", "a", "d"]
        assert [one.definition.id for one in backend.find(Query(limit=2))] == ["b", "c"]

    @pytest.mark.parametrize("limit", [1, 2, 3, 100])
    def test_pages_follow_each_other_over_equal_times(self, backend: StoreBackend, limit: int) -> None:
        """Every row once, by creation time and then id, both descending; ids as code points sort."""
        ids = ["a", "B", "a-b", "a_b", "a.b", "a:b", "ab", "Z9", "z", "A~", "_", "0"]
        news = [create(id, created=NOW + n // 5) for n, id in enumerate(ids)]
        created(backend, *news)
        expected = sorted(((new.definition.created, new.id) for new in news), reverse=True)
        rows: list[tuple[float, str]] = []
        after = None
        while page := backend.find(Query(after=after, limit=limit)):
            assert len(page) <= limit
            rows += [(one.definition.created, one.definition.id) for one in page]
            after = rows[-1]
        assert rows == expected

    def test_a_page_goes_on_where_the_last_one_ended_whatever_was_removed(self, backend: StoreBackend) -> None:
        created(backend, *[create(id, S.COMPLETED) for id in "abcd"])
        backend.delete(["c"])
        assert [one.definition.id for one in backend.find(Query(after=(NOW, "c")))] == ["b", "a"]
        assert backend.find(Query(after=(NOW - 1, "z"))) == []

    def test_by_state(self, backend: StoreBackend) -> None:
        created(backend, *[create(str(state), state) for state in S])
        for state in S:
            assert found(backend, states=frozenset({state})) == str(state)
        assert found(backend, states=frozenset({S.PAUSED, S.FAILED})) == "failed paused"
        assert found(backend, states=frozenset()) == ""

    def test_a_state_that_changed(self, backend: StoreBackend) -> None:
        new = owned("a")
        created(backend, new)
        done(backend, change("a", new.head, head_fields={"state": S.COMPLETED, "owner": None, "ended": NOW}))
        assert found(backend, states=frozenset({S.RUNNING})) == ""
        assert found(backend, states=frozenset({S.COMPLETED})) == "a"
        assert (found(backend, owner="me"), found(backend, owned=True), found(backend, owned=False)) == ("", "", "a")

    def test_by_workflow_queue_and_parent(self, backend: StoreBackend) -> None:
        created(backend, create("a", workflow="v", queue="p", parent_id="x"), create("b", workflow="w", queue="q"))
        created(backend, create("c", workflow="V", queue="P", parent_id="y"))
        assert found(backend, workflows=frozenset({"v"})) == "a"
        assert found(backend, workflows=frozenset({"v", "w", "u"})) == "a b"
        assert found(backend, workflows=frozenset()) == ""
        assert (found(backend, queue="p"), found(backend, queue="q"), found(backend, queue="")) == ("a", "b", "")
        assert (found(backend, parent_id="x"), found(backend, parent_id="z")) == ("a", "")

    def test_by_owner(self, backend: StoreBackend) -> None:
        created(backend, owned("a", "me"), owned("b", "you"), create("c"))
        assert (found(backend, owner="me"), found(backend, owner="m")) == ("a", "")
        assert (found(backend, owned=True), found(backend, owned=False)) == ("a b", "c")
        assert (found(backend, owner="me", owned=True), found(backend, owner="me", owned=False)) == ("a", "")

    def test_by_time(self, backend: StoreBackend) -> None:
        """From `created_after` on, before `created_before`; only what has ended is before `ended_before`."""
        created(backend, *[create(f"c{n}", created=NOW + n) for n in range(4)])
        assert found(backend, created_after=NOW + 2) == "c2 c3"
        assert found(backend, created_before=NOW + 2) == "c0 c1"
        assert found(backend, created_after=NOW + 1, created_before=NOW + 3) == "c1 c2"
        created(backend, *[create(f"e{n}", S.FAILED, head_fields={"ended": NOW + n}) for n in range(3)])
        assert found(backend, ended_before=NOW + 2) == "e0 e1"

    def test_filters_are_all_needed(self, backend: StoreBackend) -> None:
        created(backend, create("a", queue="q", metadata={"k": "v"}), create("b", S.PAUSED, queue="q"), create("c"))
        assert found(backend, queue="q", states=frozenset({S.RUNNING})) == "a"
        assert found(backend, queue="q", metadata={"k": "v"}, text="A", owned=False) == "a"
        assert found(backend, queue="q", metadata={"k": "v"}, text="b") == ""

    def test_states_by_their_ids(self, backend: StoreBackend) -> None:
        new = owned("a")
        created(backend, new, *[create(f"x:{state}", state) for state in S])
        done(backend, change("a", new.head, head_fields={"state": S.FAILED, "owner": None}))
        expected = {"a": S.FAILED} | {f"x:{state}": state for state in S}
        assert dict(backend.states_of([*expected, "b", "a"])) == expected
        assert dict(backend.states_of([])) == {}

    def test_counting_by_state(self, backend: StoreBackend) -> None:
        """States with none are left out; a page's limit and place do not count."""
        created(backend, *[create(f"r{n}", queue="q") for n in range(3)], create("p", S.PAUSED), create("f", S.FAILED))
        assert backend.count(Query()) == {S.RUNNING: 3, S.PAUSED: 1, S.FAILED: 1}
        assert backend.count(Query(limit=1, after=(NOW, "p"))) == {S.RUNNING: 3, S.PAUSED: 1, S.FAILED: 1}
        assert backend.count(Query(queue="q")) == {S.RUNNING: 3}
        assert backend.count(Query(states=frozenset({S.FAILED, S.BLOCKED}))) == {S.FAILED: 1}


class SearchContract(ConformanceBase):
    def metadata(self, backend: StoreBackend, *values: dict[str, Any]) -> None:
        """Executions m0, m1, … with these metadata."""
        created(backend, *[create(f"m{n}", metadata=value) for n, value in enumerate(values)])

    @pytest.mark.parametrize(
        ("value", "others"),
        [
            ("v", ("V", "vv", "", " v", 1, None)),
            ("", (" ", "x", None, 0)),
            ("1", (1, 11, "11")),
            ("true", (True, "True", "tru")),
            ("null", (None, "nul")),
            ("a\0b", ("a", "ab", "a\0", "b")),
            ("\ud800", ("?", "\ud801", "")),
            (7, ("7", 8, 70, -7)),
            (0, ("0", "", None, 1, False)),
            (1, ("1", True, 1.5)),
            (-3, (3, "-3")),
            (2**53, (2**53 - 1, str(2**53))),
            (2.5, ("2.5", 2, 3)),
            (True, (False, "True", "true", None, 1)),
            (False, (True, "False", "", None, 0)),
            (
                [1, {"a": True}],
                ([1, {"a": 1}], [1], [True, {"a": True}], [1, {"a": True}, 2], [1, {"a": True, "b": 1}]),
            ),
            (None, ("None", "null", "", 0)),
        ],
        ids=repr,
    )
    def test_metadata_by_equality(self, backend: StoreBackend, value: object, others: tuple[object, ...]) -> None:
        self.metadata(backend, {"k": value}, {"other": value}, *({"k": other} for other in others))
        if value is None:
            assert "m0" in found(backend, metadata={"k": None}).split()
            assert not set(found(backend, metadata={"k": None}).split()) & {f"m{n + 2}" for n in range(len(others))}
        else:
            assert found(backend, metadata={"k": value}) == "m0"

    def test_metadata_under_any_name(self, backend: StoreBackend) -> None:
        self.metadata(backend, {"a\0b": "x"}, {"a": "x"}, {"\ud800": 1}, {"\ud801": 1})
        assert (found(backend, metadata={"a\0b": "x"}), found(backend, metadata={"\ud800": 1})) == ("m0", "m2")

    def test_several_metadata_must_all_be_equal(self, backend: StoreBackend) -> None:
        self.metadata(backend, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 1})
        assert found(backend, metadata={"a": 1, "b": "x"}) == "m0"
        assert found(backend, metadata={"a": 1}) == "m0 m1 m3"
        assert found(backend, metadata={"c": 1}) == ""

    def test_text_is_part_of_the_id_or_of_a_value(self, backend: StoreBackend) -> None:
        created(backend, create("Report-2024"), create("x1", metadata={"city": "Zürich", "n": 4711}))
        created(backend, create("x2", metadata={"city": "BERLIN", "more": "annual report"}))
        for text in ("report", "REPORT", "ePoR"):
            assert found(backend, text=text) == "Report-2024 x2"
        assert (found(backend, text="berl"), found(backend, text="zürich"), found(backend, text="rich")) == (
            "x2",
            "x1",
            "x1",
        )
        assert (found(backend, text="471"), found(backend, text="2024")) == ("x1", "Report-2024")
        assert found(backend, text="city") == ""
        assert found(backend, text="flow") == ""
        assert found(backend, text="nothing like it") == ""

    def test_letters_beyond_ascii_have_two_cases_too(self, backend: StoreBackend) -> None:
        self.metadata(backend, {"city": "Älmhult"}, {"city": "ОДЕСА"}, {"city": "Almhult"})
        assert (found(backend, text="äLM"), found(backend, text="одеса")) == ("m0", "m1")

    @pytest.mark.parametrize(
        "text", ["%", "_", "100%", "a_b", "'", '"', "''", "\\", "\\%", "*", "?", "[a]", "\\\\", "é", "\ud800"]
    )
    def test_no_character_of_a_text_is_special(self, backend: StoreBackend, text: str) -> None:
        self.metadata(backend, {"k": f"x{text}y"}, {"k": "x100 ab aXb y"}, {"k": "plain"})
        assert found(backend, text=text) == "m0"

    def test_text_spans_no_two_values(self, backend: StoreBackend) -> None:
        self.metadata(backend, {"a": "one", "b": "two"})
        assert [found(backend, text=text) for text in ("onetwo", "one two", "m0one", "e\nt", ", ", "{", ":")] == [
            ""
        ] * 7
