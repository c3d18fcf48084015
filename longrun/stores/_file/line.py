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
Place = tuple[Rank, int, Entry]
"""With a number of its own: the same entry may have several, of which one counts."""


def rank(definition: Definition) -> Rank:
    """The oldest of the highest priority comes first."""
    return -definition.priority, definition.created, definition.id


class Line:
    """Who waits. Whoever leaves is only struck off; his place in the heap is found empty when its turn comes."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        """Of everybody who waits, by the name of his journal."""
        self._heaps: dict[Kind, list[Place]] = {}
        self._tickets = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def join(self, entry: Entry) -> None:
        definition = entry.definition
        kind = self._kinds[entry.stem] = (definition.queue, definition.workflow, entry.state)
        heap = self._heaps.setdefault(kind, [])
        heapq.heappush(heap, (rank(definition), next(self._tickets), entry))
        if len(heap) > 2 * len(self._kinds) + 1000:  # mostly places of those who have left
            heap[:] = {place[2].stem: place for place in heap if self._waits(place[2], kind)}.values()
            heapq.heapify(heap)

    def leave(self, entry: Entry) -> None:
        self._kinds.pop(entry.stem, None)

    def _waits(self, entry: Entry, kind: Kind) -> bool:
        return self._kinds.get(entry.stem) == kind and entry.wake == 0.0

    def first(self, claim: Claim, number: int, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """The first so many that a claim asks for."""
        heads = [
            (heap[0][:2], kind)
            for kind, heap in self._heaps.items()
            if heap
            and kind[2] in claim.states
            and (claim.queues is None or kind[0] in claim.queues)
            and (claim.workflows is None or kind[1] in claim.workflows)
        ]
        heapq.heapify(heads)
        found: dict[str, Entry] = {}
        passed: list[tuple[Kind, Place]] = []
        while heads and len(found) < number:
            _, kind = heapq.heappop(heads)
            heap = self._heaps[kind]
            place = heapq.heappop(heap)
            entry = place[2]
            if self._waits(entry, kind) and entry.stem not in found:
                passed.append((kind, place))
                if wanted(entry):
                    found[entry.stem] = entry
            if heap:
                heapq.heappush(heads, (heap[0][:2], kind))
            else:
                del self._heaps[kind]
        for kind, place in passed:
            heapq.heappush(self._heaps.setdefault(kind, []), place)
        return list(found.values())
