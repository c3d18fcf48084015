"""Records as the file store writes them. Some are written out by hand: no field may be forgotten there."""

from __future__ import annotations

from typing import Any

import attrs

from longrun.records import ExecutionState
from longrun.stored import Boundary, Head
from longrun.stores._file.forms import boundary_form, boundary_from, head_form, head_from


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
