"""The reading half of `ReplicatedBackend`, its life, and the gate that all changes pass.

Place in the life of an execution: claim, checkpoint, finish. Reads go to the active side. "Not found" is an answer;
only a store that does not answer makes the other one active.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from longrun.clock import Clock
from longrun.errors import LongrunError, StoreUnavailableError
from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.stored import REPLICA_WORKFLOW, Boundary, Head, Loaded, Message, Owner, Query, Stored
from longrun.stores._replicated.council import Council, Rules
from longrun.stores._replicated.founding import KIND
from longrun.stores._replicated.lag import Lag
from longrun.stores._replicated.mirror import Mirror
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.term import RESERVED, Marks
from longrun.stores._replicated.witness import DirectoryWitness, StoreWitness, Witness
from longrun.stores.base import StoreBackend

FINDS = frozenset({"load", "head", "find", "count", "boundaries", "checkpoint", "messages", "owners"})
"""What tells whether there is something. A store that has lost everything would say no."""


class ReadingBackend(StoreBackend):
    kind = KIND

    def __init__(
        self,
        primary: StoreBackend,
        secondary: StoreBackend,
        *,
        witness: Witness | None,
        rules: Rules,
        queue_limit: int,
        clock: Clock,
    ) -> None:
        self._sides = Side("primary", primary), Side("secondary", secondary)
        self._witness, self._rules, self._clock = witness, rules, clock
        self._council = Council(self._sides, witness, rules, clock)
        self._council.before_switch = self._bring_over
        council = self._council
        self._mirror = Mirror(council.name, council.overtaken, council.marks, council.vouch_for, clock)
        self._lag = Lag(queue_limit, rules.strikes)
        self._council.compared = self._lag.clear
        self._gate = threading.RLock()
        self._opened = False
        self._recheck = False
        """The two sides must be compared, although the term says that they are level."""
        self._switching = False
        self._suspects: set[str] = set()
        """What the standby has and the active side refused to answer for: compared before it is written again."""
        self._watched: tuple[int, Marks] | None = None
        """The marks of the standby when they were last seen, and the generation in which that was."""
        self._log = get_logger(store=KIND)
        self.durable = primary.durable and secondary.durable
        self.fenced = primary.fenced and secondary.fenced
        self.poll_interval = min(primary.poll_interval, secondary.poll_interval)

    # life

    @property
    def creates(self) -> bool:
        """Of whoever says no, neither a store nor the witness is made where there is none, and the pair stays as it is
        until something is written."""
        return not self._council.looks

    @creates.setter
    def creates(self, creates: bool) -> None:
        self._council.looks = not creates
        for side in self._sides:
            side.backend.creates = creates
        if isinstance(self._witness, DirectoryWitness | StoreWitness):
            self._witness.creates = creates

    def open(self) -> None:
        with self._gate:
            self._open_witness()
            try:
                with self._raising():
                    self._council.company = False
                    self._council.decide()
                    self._council.announce()
            except LongrunError:
                self._close_sides()
                raise
            self.durable = all(side.backend.durable for side in self._sides)
            self._opened = True
            if self._rules.asynchronous:
                self._recheck = True  # what was queued when the process died is not there any more
                self._lag.start()

    def close(self) -> None:
        """What is queued is copied first; a standby that cannot be given it is `behind`."""
        if not self._opened:
            return
        self._opened = False
        self._finish_copying()
        self._lag.stop()
        with self._gate:
            self._close_sides()
            self._council.term, self._council.trouble = None, "it is closed"

    @contextlib.contextmanager
    def _for_a_moment(self) -> Iterator[None]:
        """The two in use, also while the pair is closed."""
        if self._opened:
            yield
            return
        self._open_witness()
        try:
            yield
        finally:
            self._close_sides()
            self._council.term, self._council.trouble = None, "it is closed"

    def _open_witness(self) -> None:
        if self._witness is not None:
            with contextlib.suppress(StoreUnavailableError):
                self._witness.open()

    def _close_sides(self) -> None:
        for side in self._sides:
            side.close()
        if self._witness is not None:
            self._witness.close()

    def ping(self) -> None:
        self._read("ping")

    def describe(self) -> Mapping[str, object]:
        term = self._council.term
        return {
            **super().describe(),
            "mode": "async" if self._rules.asynchronous else "sync",
            "automatic_failover": self._council.automatic,
            "active": None if term is None else term.active,
            "standby": None if term is None else term.standby,
            "generation": None if term is None else term.generation,
            **{side.name: dict(side.backend.describe()) for side in self._sides if side.healthy},
        }

    # the gate

    @contextlib.contextmanager
    def _at_the_gate(self) -> Iterator[None]:
        with self._gate, self._raising():
            yield

    @contextlib.contextmanager
    def _to_write(self) -> Iterator[None]:
        """The same for whoever changes something."""
        with self._at_the_gate():
            self._council.note()
            yield

    @staticmethod
    @contextlib.contextmanager
    def _raising() -> Iterator[None]:
        """A side that is lost, and could not be replaced, is an error like any store's."""
        try:
            yield
        except LostError as lost:
            raise lost.error from lost.error.__cause__

    def _bring_over(self) -> None:
        """Before the standby becomes active: it gets what waits in this process's queue."""
        if not self._rules.asynchronous:
            return
        self._switching = True
        try:
            self._lag.resume()
            lost = self._lag.drain()
        finally:
            self._switching = False
        if lost is not None:
            raise lost

    def _go_on_copying(self) -> bool:
        """Whether the queue goes on. One that is broken does if the side that was lost answers again; it is given up,
        together with the standby, if that did not help before: a standby that lacks something is not level for long."""
        lost = self._lag.broken
        if lost is None:
            return True
        if self._lag.resumed or not lost.side.answers():
            self._leave_out(lost)
            return False
        self._lag.resume()
        return True

    def _leave_out(self, lost: LostError) -> None:
        self._council.dropped(lost)
        self._lag.clear()

    def _finish_copying(self) -> None:
        """At the end: the standby gets what is queued, or the term says that it has not got it."""
        if self._lag.drain() is None:
            return
        self._lag.resume()
        lost = self._lag.drain()
        if lost is None:
            return
        try:
            with self._at_the_gate():
                self._leave_out(lost)
        except LongrunError as error:  # nobody can be told: the next to open the pair compares everything
            self._log.warning("replica.not_copied", writes=self._lag.depth, error=type(error).__name__)

    # readers

    def _read(self, call: str, *args: Any, **options: Any) -> Any:
        side = self._council.active
        try:
            answer = side.read(call, *args, **options)
            if not answer and call in FINDS:
                self._council.vouch_for(side)
            return answer
        except LostError as lost:
            with self._at_the_gate():
                side = self._council.instead(lost)
        with self._raising():
            return side.read(call, *args, **options)

    def load(self, id: str) -> Loaded | None:
        found: Loaded | None = None if id in RESERVED else self._read("load", id)
        return found

    def head(self, id: str) -> Head | None:
        found: Head | None = None if id in RESERVED else self._read("head", id)
        return found

    def find(self, query: Query) -> list[Stored]:
        """Without the records that the pair keeps for itself; the page is as full as it can be all the same."""
        found: list[Stored] = []
        while True:
            page: list[Stored] = self._read("find", query)
            found += [row for row in page if row.definition.id not in RESERVED]
            hidden = sum(row.definition.id in RESERVED for row in page)
            if not hidden or len(page) < query.limit:
                return found
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id), limit=hidden)

    def count(self, query: Query) -> dict[ExecutionState, int]:
        counts: dict[ExecutionState, int] = dict(self._read("count", query))
        if query.workflows is None or REPLICA_WORKFLOW in query.workflows:
            own = attrs.evolve(query, workflows=frozenset({REPLICA_WORKFLOW}))
            for state, number in self._read("count", own).items():
                counts[state] -= number
        return {state: number for state, number in counts.items() if number}

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        rows: list[Boundary] = [] if id in RESERVED else self._read("boundaries", id, after=after, limit=limit)
        return rows

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        found: tuple[Boundary, Mapping[str, bytes]] | None = self._read("checkpoint", id, seq)
        return found

    def messages(self, id: str) -> list[Message]:
        found: list[Message] = self._read("messages", id)
        return found

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        found: Mapping[str, ExecutionState] = self._read("states_of", [id for id in ids if id not in RESERVED])
        return found

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        found: tuple[int, Mapping[str, int]] = self._read("sent", id)
        return found

    def pending(self, owner: str) -> list[str]:
        found: list[str] = self._read("pending", owner)
        return found

    def owners(self) -> list[Owner]:
        found: list[Owner] = self._read("owners")
        return found

    def next_due(self) -> float | None:
        found: float | None = self._read("next_due")
        return found

    def size(self, id: str) -> int:
        return int(self._read("size", id))

    # the watcher

    def wait(self, timeout: float) -> bool:
        with self._raising():
            return bool(self._council.active.read("wait", timeout))

    def wake(self) -> None:
        for side in self._sides:
            side.wake()
