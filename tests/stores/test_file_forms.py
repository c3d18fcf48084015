"""Records as the file store writes them. Some are written out by hand: no field may be forgotten there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from longrun.moves import Move, ending, passing
from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Create, Definition, Head, Save, copied
from longrun.stores._file.contents import INLINE_LIMIT, NO_MAIL, Mail, birth_line, move_line, save_lines
from longrun.stores._file.forms import (
    boundary_form,
    boundary_from,
    definition_form,
    definition_from,
    head_form,
    head_from,
    with_steps,
)
from longrun.stores._file.lines import Identity, pack, unpack, unpack_any
from longrun.testing.samples import NOW, boundary, definition, head


def changed(kind: type, **fields: Any) -> Any:
    """A record of which no field has its default value; but where that is None, it has one that is as good as false."""
    values = {one.name: 0 if one.default is None else 2 for one in attrs.fields(kind)}
    return kind(**values | fields)


def names_of(kind: type) -> set[str]:
    return {one.name for one in attrs.fields(kind)}


def test_every_field_of_a_head_comes_back() -> None:
    head = changed(Head, state=ExecutionState.PAUSED, woken=True, hold=True)
    assert set(head_form(head)) == names_of(Head)
    assert head_from(head_form(head)) == head


def test_every_field_of_a_row_comes_back() -> None:
    row = changed(Boundary, data=b"1", blobs=("one",))
    assert set(boundary_form(row)) == names_of(Boundary) - {"data"}
    assert boundary_from(boundary_form(row), row.data) == row


def test_what_has_its_default_value_is_left_out() -> None:
    assert head_form(Head(state=ExecutionState.RUNNING, updated=0.0)) == {"state": "running", "updated": 0.0}
    row = Boundary(seq=1, kind="start", step=0, ended=0.0, next=0)
    assert boundary_form(row) == {"seq": 1, "kind": "start", "step": 0, "ended": 0.0, "next": 0}


def test_every_field_of_a_definition_comes_back() -> None:
    one = changed(Definition, id="a", steps=("one", "two"), metadata={"n": 1})
    assert set(definition_form(one)) == names_of(Definition) - {"id", "steps"}
    assert definition_from("a", definition_form(one), one.steps) == one
    assert with_steps(one, ("three",)) == attrs.evolve(one, steps=("three",))


def as_save(move: Move) -> Save:
    return Save(id=move.id, head=copied(move.head), boundaries=(move.boundary,), keep_from=move.keep_from)


@pytest.mark.parametrize("kind", [passing, ending])
@pytest.mark.parametrize("data", [b'{"n":1}', b"\x01\x02", b"{\n}", b"", b"1" * INLINE_LIMIT])
@pytest.mark.parametrize(
    "fields",
    [{}, {"fence": 0}, {"owner": None}, {"started": NOW}, {"seq": 7, "step": 6}, {"started": NOW, "seq": 7, "step": 6}],
)
def test_a_move_is_written_as_the_save_that_it_is(
    kind: Callable[..., Move], data: bytes, fields: dict[str, Any]
) -> None:
    identity, taken = Identity("a", 3), Mail(2, {4})
    for keep_from, mail, about in ((None, NO_MAIL, EMPTY), (2, taken, {"total": 3, "version": "2"})):
        before = attrs.evolve(head(owner="me", fence=3), **fields)
        move = kind("a", before, "é", NOW, data, 9, keep_from)
        line = move_line(identity, 7, move, mail, about)
        assert [line] == save_lines(identity, 7, as_save(move), mail, about=about)


@pytest.mark.parametrize("data", [b'{"n":1}', b"", None, b"1" * (INLINE_LIMIT + 1)])
@pytest.mark.parametrize("fields", [{}, {"progress": float("inf")}, {"error": "é\ud800"}])
def test_a_birth_is_written_as_the_save_that_it_is(data: bytes | None, fields: dict[str, Any]) -> None:
    identity, first = Identity("a", 0), boundary(1, data=data)
    one = Create(definition=definition("a"), head=head(owner="me", fence=3, **fields), boundary=first)
    line = birth_line(identity, 2, one)
    if data is None or len(data) > INLINE_LIMIT:
        assert line is None
    else:
        save = Save(id="a", head=one.head, boundaries=(first,))
        assert [line] == save_lines(identity, 2, save, NO_MAIL, whole=True)


@pytest.mark.parametrize("id", ["a", "a'b\\", 'quote"d', "é\ud800", "\x7f"])
def test_whose_a_line_is_can_be_read_back(id: str) -> None:
    identity, line = unpack_any(pack(Identity(id, 4), 2, {"kind": "steps", "steps": []})[:-1])
    assert (identity.id, identity.gen, line.n) == (id, 4, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 2**70},
        {"priority": -(2**70)},
        {"workflow": "käse\x7f\u2028"},
        {"workflow": "\ud800"},
        {"metadata": {"n": 2**70, "odd": float("inf")}},
        {"metadata": {"n": 2**70}, "priority": 2**70},
        {"created": 1e300, "queue": '"metadata":'},
    ],
)
def test_what_is_a_users_in_a_definition_comes_back_whoever_wrote_the_line(fields: dict[str, Any]) -> None:
    identity, one = Identity("a", 0), definition("a", steps=(), **fields)
    for kind in ("definition", "finished"):
        line = pack(identity, 1, {"kind": kind, "definition": definition_form(one)})
        assert definition_from("a", unpack(line[:-1], identity).fields["definition"]) == one
