"""The judge of the kill storm sees each fault it is there for: one planted in a ledger, and the sentence to find."""

from __future__ import annotations

from typing import Any

import pytest

from longrun.stored import Boundary
from longrun.stores.memory import MemoryBackend
from tests.campaign.judge import _judge_rows, judge_records, judge_store
from tests.campaign.outside import Outside, Record, read

CREATED = {"fence": 1, "revision": 1, "seq": 1, "state": "running", "visit": 1, "attempt": 0, "put": []}


def ack(**changes: Any) -> Record:
    record = {"kind": "ack", "process": 1, "id": "0-calls", **CREATED, **changes}
    return {"rows": [[record["seq"], "step", 0, record["visit"]]], **record}


def note(kind: str, **fields: Any) -> Record:
    return {"kind": kind, "process": 1, "id": "0-calls", **fields}


BEGIN = note("begin", step="call_once", visit=1, attempt=1)
SECOND = ack(revision=2, seq=2, visit=2)

FAULTS = {
    "visit 1 of call_once began after": [ack(), BEGIN, SECOND, BEGIN],
    "attempt 1 of call_once began after its failure": [ack(), BEGIN, ack(revision=2, seq=1, attempt=1, rows=[]), BEGIN],
    "once:pay happened again": [
        ack(),
        ack(revision=2, rows=[], put=["once:pay"]),
        note("effect", visit=1, name="once:pay"),
    ],
    "item 1 came after item 2": [note("effect", visit=1, name=f"item/{n}") for n in (0, 1, 2, 1)],
    "fence 1 was acknowledged after fence 2": [ack(), ack(fence=2, revision=2, seq=2), ack(revision=3, seq=3)],
    "both held fence 1": [ack(), ack(revision=2, seq=2, process=2)],
    "claimed with fence 2, which was given before": [
        note("claim", fence=2, seq=1),
        note("claim", fence=2, seq=1),
    ],
    "revision 2 was acknowledged after 2": [ack(), SECOND, ack(revision=2, seq=3)],
    "revision 2 was acknowledged after 3": [ack(), ack(revision=3, seq=3), ack(revision=2, rows=[])],
    "boundary 2 (step) was acknowledged beside [2]": [ack(), SECOND, ack(revision=3, seq=2)],
    "boundary 3 (step) was acknowledged beside [1, 2]": [ack(), ack(revision=3, seq=2), ack(revision=2, seq=3)],
    "begin after it had completed": [ack(), ack(revision=2, seq=2, state="completed"), BEGIN],
    "told as completed before": [ack(), note("event", type="execution_completed", seq=None)],
    "told as checkpointed at 2 before": [ack(), note("event", type="checkpointed", seq=2)],
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_planted_fault_is_seen(sentence: str) -> None:
    found = judge_records(FAULTS[sentence])
    assert any(sentence in fault for fault in found), found


def test_an_undisturbed_course_has_no_fault() -> None:
    course = [
        ack(),
        BEGIN,
        note("effect", visit=1, name="once:pay"),
        ack(revision=2, rows=[], put=["once:pay"]),
        note("claim", fence=2, seq=1, process=2),
        ack(fence=2, revision=3, seq=2, visit=2, state="completed", process=2),
        note("event", type="execution_completed", seq=None),
    ]
    assert judge_records(course) == []


def test_a_write_that_is_handed_over_again_may_be_acknowledged_again() -> None:
    """The one before it had failed although it was stored, so that both go once more, in their order."""
    failed = note("refused", fence=1, revision=2)
    assert judge_records([ack(), failed, ack(revision=3, seq=3), SECOND, ack(revision=3, seq=3)]) == []


def test_an_execution_that_the_store_lost_is_a_fault() -> None:
    found = judge_store([ack()], MemoryBackend())
    assert "0-calls: lost" in found


@pytest.mark.parametrize(
    ("numbers", "acknowledged", "sentence"),
    [
        ((1, 3), {}, "its boundaries are [1, 3]"),
        ((1, 2, 2), {}, "its boundaries are [1, 2, 2]"),
        ((1, 2), {2: [2, "goto", 0, 1]}, "acknowledged [2, 'goto', 0, 1]"),
    ],
)
def test_a_gap_a_repeat_and_a_changed_row_are_faults(
    numbers: tuple[int, ...], acknowledged: dict[int, list[Any]], sentence: str
) -> None:
    rows = [Boundary(seq=n, kind="step", step=0, ended=0.0, next=1) for n in numbers]
    found = _judge_rows("x", rows, numbers[-1], acknowledged)
    assert any(sentence in fault for fault in found), found


def test_a_torn_record_hides_nothing_but_itself(tmp_path: Any) -> None:
    path = tmp_path / "ledger"
    outside = Outside(path, 1)
    outside.note("up")
    with path.open("ab") as file:
        file.write(b'\n{"kind": "to')
    outside.note("batch", number=0)
    outside.close()
    assert [record["kind"] for record in read(path)] == ["up", "batch"]
