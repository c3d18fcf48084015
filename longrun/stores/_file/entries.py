"""What this process knows of all executions in live/, and who could be claimed.

Place in the life of an execution: claim, and every listing. Pure bookkeeping in memory; `catalog` keeps it up to date.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from longrun.stored import RECORDS, Claim, Head, Query
from longrun.stores._file.contents import Mail
from longrun.stores._file.entry import Entry, Inbox
from longrun.stores._file.line import Line, rank
from longrun.stores.rows import wake_at


class Entries:
    """All entries, by name, by owner, and by when they are due."""

    def __init__(self) -> None:
        self.by_stem: dict[str, Entry] = {}
        self._by_owner: dict[str, dict[str, Entry]] = {}
        self._ready = Line()
        self._timed: list[tuple[float, str]] = []
        self._posted: dict[str, Entry] = {}
        self._records: dict[str, Entry] = {}
        self._children: dict[str, dict[str, Entry]] = {}

    def put(self, entry: Entry) -> None:
        known = self.by_stem.get(entry.stem)
        if known is not None:
            if entry.inbox.mark is None and known.born == entry.born:
                entry.inbox = known.inbox
            self._remove(known)
        self.by_stem[entry.stem] = entry
        definition = entry.definition
        if definition.workflow in RECORDS:
            self._records[entry.stem] = entry
        if definition.parent_id is not None:
            self._children.setdefault(definition.parent_id, {})[entry.stem] = entry
        self._index(entry)

    def drop(self, stem: str) -> None:
        entry = self.by_stem.pop(stem, None)
        if entry is not None:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._unindex(entry)
        self._records.pop(entry.stem, None)
        if (parent_id := entry.definition.parent_id) is not None:
            _take_out(self._children, parent_id, entry.stem)

    def saved(self, entry: Entry, head: Head, mail: Mail) -> None:
        """The owner wrote a new head. While it goes on owning it, no index changes."""
        if entry.goes_on(head):
            if entry.mail is not mail:
                entry.mail = mail
                self._post(entry)
            return
        born, definition, _ = entry.records
        self._unindex(entry)
        entry.records, entry.mail = (born, definition, head), mail
        self._index(entry)

    def mailed(self, entry: Entry, inbox: Inbox) -> None:
        self._unindex(entry)
        entry.inbox = inbox
        self._index(entry)

    def _post(self, entry: Entry) -> None:
        if entry.has_mail:
            self._posted[entry.stem] = entry
        else:
            self._posted.pop(entry.stem, None)

    def _index(self, entry: Entry) -> None:
        owner = entry.owner
        self._post(entry)
        if owner is not None:
            self._by_owner.setdefault(owner, {})[entry.stem] = entry
            entry.wake = None
            return
        entry.wake = wake_at(entry.shown[1])
        if entry.wake == 0.0:
            self._ready.join(entry)
            return
        if not entry.state.finished:
            entry.fold()
        if entry.wake is not None:
            heapq.heappush(self._timed, (entry.wake, entry.stem))
            if len(self._timed) > 2 * len(self.by_stem) + 1000:  # mostly moments that no longer hold
                self._timed = [item for item in set(self._timed) if self._valid(*item)]
                heapq.heapify(self._timed)

    def _unindex(self, entry: Entry) -> None:
        if (owner := entry.owner) is not None:
            _take_out(self._by_owner, owner, entry.stem)
        self._ready.leave(entry)
        self._posted.pop(entry.stem, None)
        entry.wake = None

    # questions

    def candidates(self, query: Query) -> list[Entry]:
        """Among these is all that matches: told by the narrowest of the indexes."""
        if query.owner is not None:
            return self.owned_by(query.owner)
        if query.owned:
            return [entry for owned in self._by_owner.values() for entry in owned.values()]
        if query.parent_id is not None:
            return list(self._children.get(query.parent_id, {}).values())
        if is_about_records(query):
            return list(self._records.values())
        return list(self.by_stem.values())

    def owned_by(self, owner: str) -> list[Entry]:
        return list(self._by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        return list(self._by_owner)

    def pending(self, owner: str) -> list[str]:
        return [entry.id for entry in self._posted.values() if entry.owner == owner]

    def next_due(self) -> float | None:
        if self._ready:
            return 0.0
        while self._timed and not self._valid(*self._timed[0]):
            heapq.heappop(self._timed)
        return self._timed[0][0] if self._timed else None

    def _valid(self, moment: float, stem: str) -> bool:
        entry = self.by_stem.get(stem)
        return entry is not None and entry.wake == moment

    def due(self, claim: Claim, number: int, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """The first so many that are due for this claim, owned by nobody or by a dead one, and wanted."""
        found = {entry.stem: entry for entry in self._ready.first(claim, number, wanted)}
        found |= {entry.stem: entry for entry in self._also_due(claim) if wanted(entry)}
        return sorted(found.values(), key=lambda entry: rank(entry.definition))[:number]

    def _also_due(self, claim: Claim) -> Iterator[Entry]:
        """What has been waiting for its time, and what the dead have left."""
        taken: list[tuple[float, str]] = []
        while self._timed and self._timed[0][0] <= claim.now:
            item = heapq.heappop(self._timed)
            if self._valid(*item) and item not in taken[-1:]:
                taken.append(item)
        for item in taken:
            heapq.heappush(self._timed, item)
        yield from [self.by_stem[stem] for _, stem in taken]
        for owner in claim.dead:
            yield from self.owned_by(owner)


def is_about_records(query: Query) -> bool:
    return query.workflows is not None and query.workflows <= RECORDS


def _take_out(index: dict[str, dict[str, Entry]], name: str, stem: str) -> None:
    part = index.get(name, {})
    part.pop(stem, None)
    if not part:
        index.pop(name, None)
