"""The judge of a kill storm: holds what the ledger saw against what the library promises and what the store kept.

Each rule is a small class fed with the records in their order. What breaks a promise becomes a sentence; the verdict is
all of them. The rules know nothing of the executor: they see effects, acknowledgements and the store's own rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from attrs import frozen

from longrun import ExecutionState
from longrun.snapshot import decode_state
from longrun.stored import Boundary, Loaded
from longrun.stores.base import StoreBackend
from tests.campaign import work
from tests.campaign.outside import Record

FINISHED = {str(state) for state in ExecutionState if state.finished}


@frozen
class Verdict:
    """What the judge found; empty is good."""

    faults: tuple[str, ...]
    executions: int
    acknowledged: int

    def __str__(self) -> str:
        head = f"{self.executions} executions, {self.acknowledged} acknowledged writes, {len(self.faults)} faults"
        return "\n  ".join([head, *self.faults[:20]])


class Rule(Protocol):
    def see(self, record: Record) -> Iterable[str]:
        """The faults that this record shows."""


class NothingAcknowledgedRunsAgain:
    """I2: no step visit, attempt, memo or branch begins again once the store has acknowledged its end."""

    def __init__(self) -> None:
        self._visit: dict[str, int] = defaultdict(int)
        self._attempt: dict[tuple[str, int], int] = defaultdict(int)
        self._memos: set[tuple[str, int, str]] = set()

    def see(self, record: Record) -> Iterable[str]:
        id = record.get("id", "")
        if record["kind"] == "ack":
            visit = record["visit"]
            self._visit[id] = max(self._visit[id], visit)
            self._attempt[id, visit] = max(self._attempt[id, visit], record["attempt"])
            self._memos |= {(id, visit, name) for name in record["put"]}
        elif record["kind"] == "begin":
            if record["visit"] < self._visit[id]:
                yield f"{id}: visit {record['visit']} of {record['step']} began after {self._visit[id]} was stored"
            if record["attempt"] <= self._attempt[id, record["visit"]]:
                yield f"{id}: attempt {record['attempt']} of {record['step']} began after its failure was stored"
        elif record["kind"] == "effect" and (id, record["visit"], record["name"]) in self._memos:
            yield f"{id}: {record['name']} happened again although its result was stored"


class ItemsGoForward:
    """`every=1`: an item that begins shows that all before it are durable, so none of those comes again."""

    def __init__(self) -> None:
        self._item: dict[tuple[str, int], int] = {}

    def see(self, record: Record) -> Iterable[str]:
        if record["kind"] != "effect" or not record["name"].startswith("item/"):
            return
        key, item = (record["id"], record["visit"]), int(record["name"].partition("/")[2])
        if item < self._item.get(key, 0):
            yield f"{record['id']}: item {item} came after item {self._item[key]}, which made it durable"
        self._item[key] = item


class FenceGrows:
    """I3: each claim raises the fence, each fence belongs to one process, and no write with an older one is taken."""

    def __init__(self) -> None:
        self._fence: dict[str, int] = defaultdict(int)
        self._holder: dict[tuple[str, int], int] = {}
        self._revision: dict[str, int] = defaultdict(int)
        self._failed: set[tuple[str, int, int]] = set()

    def see(self, record: Record) -> Iterable[str]:
        if record["kind"] == "refused" and "revision" in record:
            self._failed.add((record["id"], record["fence"], record["revision"]))
        if record["kind"] not in ("ack", "claim"):
            return
        id, fence, process = record["id"], record["fence"], record["process"]
        if record["kind"] == "claim" and fence <= self._fence[id] and (id, fence) in self._holder:
            yield f"{id}: claimed with fence {fence}, which was given before"
        if fence < self._fence[id]:
            yield f"{id}: fence {fence} was acknowledged after fence {self._fence[id]}"
        self._fence[id] = max(fence, self._fence[id])
        if self._holder.setdefault((id, fence), process) != process:
            yield f"{id}: processes {self._holder[id, fence]} and {process} both held fence {fence}"
        if record["kind"] == "ack":
            # A write that failed and was stored all the same is answered as done when it is handed over again: once.
            mark = (id, fence, record["revision"])
            again = mark in self._failed
            self._failed.discard(mark)
            if again:  # with it goes again, once, what had been handed over behind it
                self._failed |= {(id, fence, n) for n in range(record["revision"] + 1, self._revision[id] + 1)}
            if record["revision"] <= self._revision[id] and record["revision"] and not again:
                yield f"{id}: revision {record['revision']} was acknowledged after {self._revision[id]}"
            self._revision[id] = max(record["revision"], self._revision[id])


class NumbersGrow:
    """I7, as acknowledged: each boundary's number is higher than those of all writes before it. The order of the writes
    is that of their revisions; whether one may be acknowledged late, or again, is `FenceGrows`' concern."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """For each execution the revisions, in order, and the numbers that came with them."""

    def see(self, record: Record) -> Iterable[str]:
        for seq, kind, *_ in record.get("rows", ()):
            known, row = self._rows[record["id"]], (record["revision"], seq)
            place = bisect_left(known, row)
            if row in known[place : place + 1]:
                continue
            around = known[max(0, place - 1) : place + 1]
            if any((other < row) != (other[1] < seq) for other in around):
                yield f"{record['id']}: boundary {seq} ({kind}) was acknowledged beside {[n for _, n in around]}"
            known.insert(place, row)


class OneEnd:
    """I8: behind an acknowledged end nothing is acknowledged, and no step begins."""

    def __init__(self) -> None:
        self._ended: dict[str, str] = {}

    def see(self, record: Record) -> Iterable[str]:
        id = record.get("id", "")
        if id in self._ended and record["kind"] in ("ack", "claim", "begin", "effect"):
            yield f"{id}: {record['kind']} after it had {self._ended[id]}"
        if record["kind"] == "ack" and record["state"] in FINISHED:
            self._ended[id] = record["state"]


class EventsFollowFacts:
    """An event is told after its fact is durable, never before."""

    def __init__(self) -> None:
        self._seq: dict[str, int] = defaultdict(int)
        self._completed: set[str] = set()

    def see(self, record: Record) -> Iterable[str]:
        if record["kind"] in ("ack", "claim"):  # a claim shows what an earlier process had stored without being told so
            self._seq[record["id"]] = max(self._seq[record["id"]], record["seq"])
            if record.get("state") == "completed":
                self._completed.add(record["id"])
        elif record["kind"] == "event":
            if record["type"] == "execution_completed" and record["id"] not in self._completed:
                yield f"{record['id']}: told as completed before it was stored"
            if record["seq"] is not None and record["seq"] > self._seq[record["id"]]:
                yield f"{record['id']}: told as checkpointed at {record['seq']} before that was stored"


RULES = (NothingAcknowledgedRunsAgain, ItemsGoForward, FenceGrows, NumbersGrow, OneEnd, EventsFollowFacts)


def judge_records(records: Sequence[Record]) -> list[str]:
    """What the ledger alone shows."""
    rules: list[Rule] = [rule() for rule in RULES]
    return [fault for record in records for rule in rules for fault in rule.see(record)]


def judge_store(records: Sequence[Record], backend: StoreBackend) -> list[str]:
    """What the store kept, against what it had acknowledged and what the program must have come to (I1, I7)."""
    rows: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    effects: dict[str, set[str]] = defaultdict(set)
    results: dict[str, Any] = {}
    for record in records:
        if record["kind"] == "ack":
            rows[record["id"]].update({row[0]: row for row in record["rows"]})
        elif record["kind"] == "effect":
            effects[record["id"]].add(record["name"])
        elif record["kind"] == "result":
            results[record["id"]] = record["result"]
    faults: list[str] = []
    for id in _expected_ids(records):
        faults += _judge_one(id, backend, rows[id], effects[id])
        if "~" not in id and results.get(id) != work.expected_result(id):
            faults.append(f"{id}: result() gave {results.get(id)!r}")
    return faults


def _expected_ids(records: Sequence[Record]) -> list[str]:
    started = {record["id"] for record in records if record["kind"] in ("started", "ack")}
    last = max((record["number"] for record in records if record["kind"] == "batch"), default=-1)
    for batch in range(last + 1):
        started |= {f"{batch}-{workflow}" for workflow in work.WORKFLOWS}
    return sorted(started | {child for id in started for child in work.children_of(id)})


def _judge_one(id: str, backend: StoreBackend, rows: dict[int, list[Any]], effects: set[str]) -> list[str]:
    loaded = backend.load(id)
    if loaded is None:
        return [f"{id}: lost"]
    faults: list[str] = []
    if loaded.damage:
        faults.append(f"{id}: damaged: {loaded.damage}")
    if loaded.head.state is not ExecutionState.COMPLETED:
        faults.append(f"{id}: it is {loaded.head.state}, not completed: {loaded.head.error or loaded.head.reason}")
    elif _result(loaded) != work.expected_result(id):
        faults.append(f"{id}: ended with {_result(loaded)!r}")
    if missing := work.expected_effects(id) - effects:
        faults.append(f"{id}: never did {sorted(missing)}")
    return faults + _judge_rows(id, backend.boundaries(id, limit=100_000), loaded.head.seq, rows)


def _judge_rows(id: str, stored: list[Boundary], last: int, acknowledged: dict[int, list[Any]]) -> list[str]:
    faults: list[str] = []
    numbers = [boundary.seq for boundary in stored]
    if numbers != list(range(1, last + 1)):
        faults.append(f"{id}: its boundaries are {numbers}, its head says {last}")
    kept = {boundary.seq: [boundary.seq, boundary.kind, boundary.step, boundary.visit] for boundary in stored}
    faults += [
        f"{id}: acknowledged {row}, kept {kept.get(seq)}" for seq, row in acknowledged.items() if kept.get(seq) != row
    ]
    return faults


def _result(loaded: Loaded) -> Any:
    return decode_state(loaded.boundary.data or b"null", loaded.blobs, bool(loaded.boundary.blobs), Any)


def judge(records: Sequence[Record], backend: StoreBackend) -> Verdict:
    faults = judge_records(records) + judge_store(records, backend)
    acknowledged = sum(record["kind"] == "ack" for record in records)
    return Verdict(tuple(faults), len(_expected_ids(records)), acknowledged)
