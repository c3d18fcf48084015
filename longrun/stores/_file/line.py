"""The line in which executions wait to be claimed: by priority and age, for whoever asks for some of them.

Place in the life of an execution: claim. A claim costs by what it takes, not by how many wait: there is a heap for each
queue, workflow and state, which is all that a claim asks for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from longrun.records import ExecutionState
from longrun.stored import Claim, Definition
from longrun.stores._file.entry import Entry

Kind = tuple[str, str, ExecutionState]
"""Queue, workflow and state."""
Rank = tuple[int, float, str]
Place = tuple[Rank, int, Entry, Kind]
"""With a number of its own: no two are compared beyond that."""
SPARE = 16
"""Places of those who have left that a heap may hold beyond as many as there are of those who wait."""


def rank(definition: Definition) -> Rank:
    """The oldest of the highest priority comes first."""
    return -definition.priority, definition.created, definition.id


class Line:
    """Who waits. Whoever leaves is struck off; his place in the heap goes at its turn, or when most are such."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        """Of everybody who waits, by the name of his journal."""
        self._waiting: dict[Kind, int] = {}
        """How many of each kind wait."""
        self._heaps: dict[Kind, list[Place]] = {}
        """Of the same kinds."""
        self._tickets = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(self, entry: Entry) -> None:
        self.leave(entry)
        definition = entry.definition
        kind = (definition.queue, definition.workflow, entry.state)
        place = self._places[entry.stem] = (rank(definition), next(self._tickets), entry, kind)
        self._waiting[kind] = self._waiting.get(kind, 0) + 1
        heapq.heappush(self._heaps.setdefault(kind, []), place)

    def leave(self, entry: Entry) -> None:
        place = self._places.pop(entry.stem, None)
        if place is None:
            return
        kind = place[3]
        self._waiting[kind] -= 1
        if self._waiting[kind] == 0:
            del self._waiting[kind], self._heaps[kind]
        elif len(self._heaps[kind]) > 2 * self._waiting[kind] + SPARE:
            self._heaps[kind] = [place for place in self._heaps[kind] if self._is_taken(place)]
            heapq.heapify(self._heaps[kind])

    def _is_taken(self, place: Place) -> bool:
        """Whether somebody still waits there."""
        return self._places.get(place[2].stem) is place

    def first(self, claim: Claim, number: int, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """The first so many that a claim asks for."""
        heads = [
            (heap[0][:2], kind)
            for kind, heap in self._heaps.items()
            if kind[2] in claim.states
            and (claim.queues is None or kind[0] in claim.queues)
            and (claim.workflows is None or kind[1] in claim.workflows)
        ]
        heapq.heapify(heads)
        found: list[Entry] = []
        passed: list[Place] = []
        while heads and len(found) < number:
            _, kind = heapq.heappop(heads)
            heap = self._heaps[kind]
            place = heapq.heappop(heap)
            if self._is_taken(place):
                passed.append(place)
                if wanted(place[2]):
                    found.append(place[2])
            if heap:
                heapq.heappush(heads, (heap[0][:2], kind))
        for place in passed:
            heapq.heappush(self._heaps[place[3]], place)
        return found
