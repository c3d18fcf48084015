"""A state machine that does the same to a store and to the memory backend, and compares all that can be seen.

The store is used through two objects on one place, as two processes would use it. A fence belongs to the one that
created or claimed the execution; what the other saves is stale, and must be refused. A save keeps the owner or names
none: only a claim gives an execution to another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longrun.moves import is_passing
from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Create, Head, Loaded, Owner, Query, Save, Send, Write
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import NOW, boundary, create, end, move, owned, send

NewPlace = Callable[[], Callable[[], CheckpointStore]]
"""Makes an empty place, and gives what makes store objects on it."""

IDS = ["a", "A", "a:b", "x" * 40]
OWNERS = ["one", "two", "it's three"]
WORKFLOWS = ["flow", "Flow%"]
QUEUES = ["default", "q_q"]
KEYS = ["k", "k'"]
ENTRIES = ["e", "f:g"]

ids = st.sampled_from(IDS)
owners = st.sampled_from(OWNERS)
states = st.sampled_from([*ExecutionState, *[ExecutionState.RUNNING, ExecutionState.WAITING] * 4])
"""Any, and more often those in which things happen."""
payloads = st.sampled_from([b"", b"\x00\x01", b"plain", b"\xff" * 30])
moments = st.none() | st.integers(-3, 3).map(lambda n: NOW + n)
metadata = st.fixed_dictionaries(
    {}, optional={"text": st.sampled_from(["Red", "r%d", "red_1"]), "n": st.integers(1, 3)}
)
sides = st.sampled_from([0, 1])


@st.composite
def head_changes(draw: st.DrawFn) -> dict[str, Any]:
    """What a write makes of the fields that steer claims and listings."""
    state = draw(states)
    return {
        "state": state,
        "owner": None if state.finished else draw(st.none() | owners),
        "due": draw(moments),
        "signal": draw(st.none() | st.just("go")),
        "woken": draw(st.booleans()),
        "ended": NOW + draw(st.integers(0, 3)) if state.finished else None,
        "crashes": draw(st.integers(0, 2)),
        "note": draw(st.none() | st.just("näher")),
    }


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    def some(of: list[str]) -> frozenset[str]:
        return draw(st.frozensets(st.sampled_from(of)))

    return Claim(
        owner=draw(owners),
        now=NOW + draw(st.integers(-2, 2)),
        states=draw(st.frozensets(states, min_size=3)),
        ids=draw(st.none() | st.lists(ids, max_size=4).map(tuple)),
        workflows=draw(st.none() | st.just(some(WORKFLOWS))),
        queues=draw(st.none() | st.just(some(QUEUES))),
        dead=some(OWNERS),
        limit=draw(st.integers(1, 5)),
    )


@st.composite
def queries(draw: st.DrawFn) -> Query:
    return Query(
        states=draw(st.none() | st.frozensets(states)),
        workflows=draw(st.none() | st.frozensets(st.sampled_from(WORKFLOWS))),
        queue=draw(st.none() | st.sampled_from(QUEUES)),
        owner=draw(st.none() | owners),
        owned=draw(st.none() | st.booleans()),
        parent_id=draw(st.none() | ids),
        metadata=draw(st.just({}) | metadata),
        text=draw(st.none() | st.sampled_from(["red", "RED", "%", "_", "x", "A:", "'"])),
        created_after=draw(moments),
        created_before=draw(moments),
        ended_before=draw(moments),
        after=draw(st.none() | st.tuples(st.integers(-5, 5).map(lambda n: NOW + n), ids)),
        limit=draw(st.integers(1, 6)),
    )


@attrs.define
class Step:
    """What one save does, before it is known to which execution."""

    fields: dict[str, Any]
    fence: int
    revision: int
    rows: list[tuple[bytes | None, bool]]
    put: dict[str, bytes]
    drop: list[str]
    clear: bool
    take: int
    keep: int | None
    steps: tuple[str, ...] | None
    version: str


steps = st.builds(
    Step,
    fields=head_changes(),
    fence=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
    revision=st.sampled_from([1, 1, 1, 1, 1, 0, -1, 2, 3]),
    rows=st.lists(st.tuples(st.none() | payloads, st.booleans()), max_size=3),
    put=st.dictionaries(st.sampled_from(ENTRIES), payloads),
    drop=st.lists(st.sampled_from(ENTRIES), max_size=2),
    clear=st.booleans(),
    take=st.sampled_from([0, 1, 4]),
    keep=st.none() | st.integers(0, 3),
    steps=st.sampled_from([None, None, None, ("it's", "new"), ()]),
    version=st.sampled_from(["1", "2", ""]),
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, new_place: NewPlace) -> None:
        super().__init__()
        self.make = new_place()
        self.model = MemoryBackend()
        self.sides: list[StoreBackend] = []
        self.born = 0
        self.blobs = 0
        self.holders: dict[str, int] = {}

    @initialize()
    def open(self) -> None:
        for _ in range(2):
            backend = self.make().backend
            backend.open()
            self.sides.append(backend)
        for side, owner in enumerate(OWNERS[:2]):  # a store may remember what its own owners have written
            for one in (self.sides[side], self.model):
                one.register(Owner(id=owner, life={"pid": side}, remaining=0.0), 1000.0)

    def teardown(self) -> None:
        for backend in self.sides:
            backend.close()

    # what happens

    @rule(side=sides, data=st.data(), size=st.integers(1, 8))
    def commit(self, side: int, data: st.DataObject, size: int) -> None:
        """A batch: each write is made for the model as it is after the one before."""
        batch: list[Write] = []
        expected: list[Answer] = []
        for _ in range(size):
            write = data.draw(self.writes(side))
            batch.append(write)
            expected += self.model.commit([write])
            if isinstance(write, Create) and expected[-1] is True:
                self.holders[write.id] = side
        answers = self.sides[side].commit(batch)
        assert len(answers) == len(expected)
        for n, (answer, right) in enumerate(zip(answers, expected, strict=True)):
            assert _plain(answer) == _plain(right), (n, [(type(write).__name__, write.id) for write in batch])

    @rule(side=sides, data=st.data(), size=st.integers(1, 8))
    def commit_more(self, side: int, data: st.DataObject, size: int) -> None:
        """The same once more: rules are drawn evenly, and this one matters most."""
        self.commit(side, data, size)

    @rule(side=sides, claim=claims())
    def claim(self, side: int, claim: Claim) -> None:
        given = self.model.claim(claim)
        assert self.sides[side].claim(claim) == given
        self.holders.update({one.definition.id: side for one in given})

    @rule(side=sides, chosen=st.lists(ids, max_size=4))
    def delete(self, side: int, chosen: list[str]) -> None:
        assert self.sides[side].delete(chosen) == self.model.delete(chosen)

    @rule(side=sides, owner=owners, what=st.sampled_from(["register", "renew", "unregister"]), pid=st.integers(1, 3))
    def lease(self, side: int, owner: str, what: str, pid: int) -> None:
        """An owner lives in one process; others may remove what it has left."""
        answers: list[object] = []
        if what != "unregister":
            side = OWNERS.index(owner) % 2
        for backend in (self.sides[side], self.model):
            if what == "register":
                full = Owner(id=owner, life={"pid": pid}, remaining=0.0, queues=("q",) * pid)
                answers.append(backend.register(full, 1000.0))
            elif what == "renew":
                answers.append(backend.renew(owner, 1000.0))
            else:
                answers.append(backend.unregister(owner))
        assert answers[0] == answers[1]

    @rule(side=sides)
    def reopen(self, side: int) -> None:
        """The process ends, and another one comes."""
        if self.sides[side].durable:
            self.sides[side].close()
            self.sides[side] = self.make().backend
            self.sides[side].open()

    # what is seen

    @rule(side=sides, query=queries())
    def find(self, side: int, query: Query) -> None:
        assert self.sides[side].find(query) == self.model.find(query)
        assert self.sides[side].count(query) == self.model.count(query)

    @rule(side=sides, id=ids, after=st.integers(0, 6), limit=st.integers(1, 4))
    def look(self, side: int, id: str, after: int, limit: int) -> None:
        found, expected = (b.boundaries(id, after=after, limit=limit) for b in (self.sides[side], self.model))
        assert _rows(found) == _rows(expected)
        for row in expected:
            assert self.sides[side].checkpoint(id, row.seq) == self.model.checkpoint(id, row.seq)

    @invariant()
    def everything_is_equal(self) -> None:
        for backend in self.sides[:1]:
            for id in IDS:
                found, expected = backend.load(id), self.model.load(id)
                assert found == expected
                assert backend.messages(id) == self.model.messages(id)
            assert backend.find(Query()) == self.model.find(Query())
            assert backend.next_due() == self.model.next_due()

    @invariant()
    def owners_are_equal(self) -> None:
        for backend in self.sides[1:]:
            assert _owners(backend) == _owners(self.model)
            for owner in OWNERS:
                assert sorted(backend.pending(owner)) == sorted(self.model.pending(owner))

    # making writes

    def writes(self, side: int) -> st.SearchStrategy[Write]:
        """Mostly to what is there."""
        there = [stored.definition.id for stored in self.model.find(Query())]
        known = st.sampled_from(there * 5 + IDS)
        kinds: dict[str, st.SearchStrategy[Write]] = {
            "new": st.builds(
                self.new, ids, head_changes(), st.sampled_from(WORKFLOWS), st.sampled_from(QUEUES), metadata
            ),
            "start": st.builds(self.start, ids, st.just(OWNERS[side])),
            "save": st.builds(self.save, known, steps, st.just(side)),
            "move": st.builds(self.move, known, steps, st.just(side), st.sampled_from([False, False, False, True])),
            "send": st.builds(
                self.send, known, payloads | st.none(), st.sampled_from([None, *KEYS]), st.integers(2, 4)
            ),
        }
        weights = {"new": 1 if there else 5, "start": 1 if there else 5, "save": 3, "move": 5, "send": 3}
        chosen = st.sampled_from([kind for kind, weight in weights.items() for _ in range(weight)])
        return chosen.flatmap(kinds.__getitem__)

    def new(self, id: str, fields: dict[str, Any], workflow: str, queue: str, metadata: dict[str, Any]) -> Create:
        self.born += 1
        rank = {
            "created": NOW + self.born * (-1) ** self.born,
            "priority": self.born % 3,
            "parent_id": IDS[self.born % 4],
        }
        new = create(id, workflow=workflow, queue=queue, metadata=metadata, blobs={"b0": b"first"}, **rank)
        return attrs.evolve(new, head=attrs.evolve(new.head, **fields))

    def start(self, id: str, owner: str) -> Create:
        """As the executor makes most of them."""
        self.born += 1
        return owned(id, owner, created=NOW + self.born, priority=self.born % 3)

    def send(self, id: str, payload: bytes | None, key: str | None, limit: int) -> Send:
        return send(id, payload=payload, key=key, limit=limit)

    def save(self, id: str, step: Step, side: int) -> Save:
        found = self.model.load(id)
        if found is None:
            return Save(id=id, head=Head(state=ExecutionState.RUNNING, revision=1, updated=NOW))
        rows, blobs = self.rows(found, step)
        head = attrs.evolve(
            found.head,
            **{name: value for name, value in step.fields.items() if name != "owner"},
            owner=found.head.owner if step.fields["owner"] else None,
            fence=found.head.fence + self.shift(found.head, step.fence, self.holders[id] == side),
            revision=max(1, found.head.revision + step.revision),
            seq=found.head.seq + len(rows),
        )
        keep_from, dropped = _retention(found, rows, step.keep)
        return Save(
            id=id,
            head=head,
            boundaries=tuple(rows),
            blobs=blobs,
            clear=step.clear,
            put=step.put,
            drop=tuple(step.drop),
            take=tuple(message.id for message in found.messages[: step.take]),
            keep_from=keep_from,
            drop_blobs=dropped,
            steps=step.steps,
            version=step.version,
        )

    def move(self, id: str, step: Step, side: int, ends: bool) -> Save:
        """From a step to the next, or to the end, where that is all that is to be said."""
        found = self.model.load(id)
        if found is None or found.head.owner is None or not is_passing(found.head):
            return self.save(id, step, side)
        head = attrs.evolve(
            found.head,
            fence=found.head.fence + self.shift(found.head, step.fence, self.holders[id] == side),
            revision=max(0, found.head.revision + step.revision - 1),
        )
        keep = None if any(names for _, names in found.kept) else step.keep
        keep_from, _ = _retention(found, [boundary(head.seq + 1)], keep)
        return (end if ends else move)(id, head, keep_from=keep_from)

    def shift(self, head: Head, wanted: int, holds: bool) -> int:
        """How far off the fence of a save is: never below 0, and never right for a side that does not hold it."""
        if head.fence + wanted < 0 or (wanted == 0 and not holds):
            return 1
        return wanted

    def rows(self, found: Loaded, step: Step) -> tuple[list[Boundary], dict[str, bytes]]:
        """The new boundaries; one with a state shares the newest one's blobs or has a new one."""
        rows: list[Boundary] = []
        blobs: dict[str, bytes] = {}
        for n, (data, shares) in enumerate(step.rows):
            names: tuple[str, ...] = ()
            if data is not None and shares:
                names = found.boundary.blobs
            elif data is not None:
                self.blobs += 1
                names = (f"b{self.blobs}",)
                blobs[names[0]] = str(self.blobs).encode()
            rows.append(boundary(found.head.seq + 1 + n, data=data, blobs=names))
        return rows, blobs


def _retention(found: Loaded, rows: list[Boundary], keep: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Keep the newest few states and the blobs they need."""
    if keep is None:
        return None, ()
    kept = [*found.kept, *((row.seq, row.blobs) for row in rows if row.data is not None)]
    staying = kept[-1 - keep :]
    needed = {name for _, names in staying for name in names}
    return staying[0][0], tuple({name for _, names in kept for name in names} - needed)


def _plain(answer: Answer) -> object:
    """An error by its kind and what it is about: its sentence names the store."""
    return (type(answer), getattr(answer, "execution_id", None)) if isinstance(answer, Exception) else answer


def _rows(found: list[Boundary]) -> list[Boundary]:
    return [attrs.evolve(row, blobs=()) for row in found]


def _owners(backend: StoreBackend) -> list[Owner]:
    return sorted((attrs.evolve(owner, remaining=0.0) for owner in backend.owners()), key=lambda owner: owner.id)
