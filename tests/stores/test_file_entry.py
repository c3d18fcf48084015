"""What the file store remembers of an execution: of one that nobody has, as text, from which its records come back."""

from __future__ import annotations

from typing import Any

import pytest

from longrun.records import ExecutionState
from longrun.stored import Definition, Head
from longrun.stores._file.contents import NO_MAIL
from longrun.stores._file.entries import Entries
from longrun.stores._file.entry import Entry

WAITING = Head(state=ExecutionState.WAITING, fence=1 << 47, revision=3, updated=1.5, due=1e12, note="n\udc80 é")


def entry(head: Head, **fields: Any) -> Entry:
    definition = Definition(id="a", workflow="flow", created=0.1, **fields)
    return Entry("a", 0, ("born", definition, head), NO_MAIL)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"n": 1 << 70, "f": 0.1, "nested": {"metadata": [None, True]}},
        {"odd": float("inf")},
        {"no Unicode": "\udc80"},
        {"due": 1, 'x"due":': '"due":\x01\x0b', "\x01": [{"signal": None}]},
    ],
    ids=["none", "large number", "infinite", "no Unicode", "names of ours"],
)
def test_records_come_back_from_text_as_they_were(metadata: dict[str, Any]) -> None:
    one = entry(WAITING, metadata=metadata, parent_id="p", priority=7, total=3)
    before = one.records
    one.fold()
    assert one.records is not before
    assert one.records == before
    assert (one.owner, one.state) == (None, ExecutionState.WAITING)


@pytest.mark.parametrize(
    ("head", "folded"),
    [
        (WAITING, True),
        (Head(state=ExecutionState.WAITING, signal="go", updated=0.0), True),
        (Head(state=ExecutionState.PAUSED, updated=0.0), True),
        (Head(state=ExecutionState.RUNNING, owner="me", updated=0.0), False),
        (Head(state=ExecutionState.INITIALIZED, updated=0.0), False),
        (Head(state=ExecutionState.COMPLETED, ended=1.0, updated=0.0), False),
    ],
)
def test_only_what_nobody_needs_soon_is_kept_as_text(head: Head, folded: bool) -> None:
    """What runs changes with every step; what is due is compared by every claim; what has ended moves away."""
    entries, one = Entries(), entry(head)
    before = one.records
    entries.put(one)
    assert (one.records is not before) is folded
    assert one.records == before
    running = Head(state=ExecutionState.RUNNING, owner="another", updated=2.0)
    entries.saved(one, running, NO_MAIL)
    assert (one.head, entries.owned_by("another")) == (running, [one])
    entries.saved(one, head, NO_MAIL)
    assert (one.records, entries.owned_by("another")) == (before, [])
