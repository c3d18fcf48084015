"""States as they are stored: large values apart, so that what did not change is not written again."""

from __future__ import annotations

from typing import Any

import pytest

from longrun.errors import CorruptDataError
from longrun.snapshot import Snapshots, decode_state, restore_tree

BIG = "x" * 200_000


def test_a_large_value_that_stays_is_written_once() -> None:
    snapshots = Snapshots(history=3)
    first = snapshots.take({"page": BIG, "n": 1}, Any, 1)
    second = snapshots.take({"page": BIG, "n": 2}, Any, 2)
    assert list(first.new) == ["1.0"]
    assert (second.names, second.new) == (("1.0",), {})
    assert decode_state(second.data, first.new, True, Any) == {"page": BIG, "n": 2}


@pytest.mark.parametrize("small", [{"page": "short", "n": 2}, [1, 2], "text", None])
def test_a_state_that_has_become_small_is_stored_whole(small: Any) -> None:
    """Whether it is still a dict or not; and what was large before is not referred to any more."""
    snapshots = Snapshots(history=3)
    snapshots.take({"page": BIG}, Any, 1)
    snapshot = snapshots.take(small, Any, 2)
    assert (snapshot.names, snapshot.new) == ((), {})
    assert decode_state(snapshot.data, {}, False, Any) == small
    again = snapshots.take({"page": BIG}, Any, 3)
    assert list(again.new) == ["3.0"], "its old blob may be gone by now"


def test_a_state_whose_blob_is_missing_is_damaged_and_names_it() -> None:
    snapshot = Snapshots(history=3).take({"page": BIG}, Any, 1)
    with pytest.raises(CorruptDataError, match=r"blob 1\.0 is missing") as caught:
        restore_tree(snapshot.data, {}, True)
    assert caught.value.what == "state['page']"
