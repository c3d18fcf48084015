"""What this process knows of every execution in live/: definition, head and mail, and who could be claimed.

Place in the life of an execution: claim, and every listing. Pure bookkeeping in memory; `catalog` keeps it up to date.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import attrs

from longrun.records import ExecutionState
from longrun.stored import Claim, Definition, Head, Query
from longrun.stores._file.contents import Mail, woken_head
from longrun.stores.rows import wake_at

_NEEDS_DUE = frozenset({ExecutionState.INITIALIZED, ExecutionState.WAITING, ExecutionState.RESUMING})
Mark = tuple[int, int, int]
"""Size, time of change and inode: what tells a file that changed from one that did not."""


@attrs.define(eq=False)
class Entry:
    """One execution, as its newest journal and its inbox show it."""

    stem: str
    gen: int
    born: str
    definition: Definition
    head: Head
    mail: Mail
    mark: Mark | None = None
    letters: tuple[int, ...] = ()
    """Numbers of the messages in its inbox, taken or not."""
    inbox_mark: Mark | None = None
    wake: float | None = None

    @property
    def id(self) -> str:
        return self.definition.id

    @property
    def has_mail(self) -> bool:
        return any(map(self.mail.waits, self.letters))

    @property
    def effective(self) -> Head:
        """The head as a reader sees it."""
        head = self.head
        return woken_head(head, self.has_mail) if self.letters and head.owner is None else head


class Entries:
    """All entries, by name, by owner, and by when they are due."""

    def __init__(self) -> None:
        self.by_stem: dict[str, Entry] = {}
        self._by_owner: dict[str | None, dict[str, Entry]] = {}
        self._ready: dict[str, Entry] = {}
        self._timed: list[tuple[float, str]] = []
        self._posted: dict[str, Entry] = {}

    def put(self, entry: Entry) -> None:
        known = self.by_stem.get(entry.stem)
        if known is not None:
            if entry.inbox_mark is None and known.born == entry.born:
                entry.letters, entry.inbox_mark = known.letters, known.inbox_mark
            self._unindex(known)
        self.by_stem[entry.stem] = entry
        self._index(entry)

    def drop(self, stem: str) -> None:
        entry = self.by_stem.pop(stem, None)
        if entry is not None:
            self._unindex(entry)

    def saved(self, entry: Entry, head: Head, mail: Mail) -> None:
        """The owner wrote a new head. While it goes on owning it, no index changes."""
        before = entry.head
        if before.owner is not None and before.owner == head.owner:
            entry.head = head
            if entry.mail is not mail:
                entry.mail = mail
                self._post(entry)
            return
        self._unindex(entry)
        entry.head, entry.mail = head, mail
        self._index(entry)

    def mailed(self, entry: Entry, letters: tuple[int, ...], mark: Mark | None) -> None:
        self._unindex(entry)
        entry.letters, entry.inbox_mark = letters, mark
        self._index(entry)

    def _post(self, entry: Entry) -> None:
        if entry.has_mail:
            self._posted[entry.stem] = entry
        else:
            self._posted.pop(entry.stem, None)

    def _index(self, entry: Entry) -> None:
        self._by_owner.setdefault(entry.head.owner, {})[entry.stem] = entry
        self._post(entry)
        entry.wake = wake_at(entry.effective) if entry.head.owner is None else None
        if entry.wake == 0.0:
            self._ready[entry.stem] = entry
        elif entry.wake is not None:
            heapq.heappush(self._timed, (entry.wake, entry.stem))
            if len(self._timed) > 2 * len(self.by_stem) + 1000:  # mostly moments that no longer hold
                self._timed = [item for item in set(self._timed) if self._valid(*item)]
                heapq.heapify(self._timed)

    def _unindex(self, entry: Entry) -> None:
        owned = self._by_owner.get(entry.head.owner, {})
        owned.pop(entry.stem, None)
        if not owned:
            self._by_owner.pop(entry.head.owner, None)
        self._ready.pop(entry.stem, None)
        self._posted.pop(entry.stem, None)
        entry.wake = None

    # questions

    def pending(self, owner: str) -> list[str]:
        return [entry.id for entry in self._posted.values() if entry.head.owner == owner]

    def next_due(self) -> float | None:
        if self._ready:
            return 0.0
        while self._timed and not self._valid(*self._timed[0]):
            heapq.heappop(self._timed)
        return self._timed[0][0] if self._timed else None

    def _valid(self, moment: float, stem: str) -> bool:
        entry = self.by_stem.get(stem)
        return entry is not None and entry.wake == moment

    def due(self, claim: Claim) -> Iterator[Entry]:
        """What may be due for this claim: owned by nobody or by a dead one."""
        yield from list(self._ready.values())
        taken: list[tuple[float, str]] = []
        while self._timed and self._timed[0][0] <= claim.now:
            item = heapq.heappop(self._timed)
            if self._valid(*item) and item not in taken[-1:]:
                taken.append(item)
        for item in taken:
            heapq.heappush(self._timed, item)
        yield from [self.by_stem[stem] for _, stem in taken]
        for owner in claim.dead:
            yield from list(self._by_owner.get(owner, {}).values())


def free(head: Head, claim: Claim) -> bool:
    return head.owner is None or head.owner in claim.dead


def wanted(definition: Definition, head: Head, claim: Claim) -> bool:
    """Whether a claim asks for this one, whoever owns it."""
    if head.state not in claim.states:
        return False
    if claim.workflows is not None and definition.workflow not in claim.workflows:
        return False
    if claim.queues is not None and definition.queue not in claim.queues:
        return False
    if claim.ids is not None or head.state is ExecutionState.RUNNING:
        return True
    if head.state not in _NEEDS_DUE:
        return False
    if head.woken or (head.due is None and head.signal is None):
        return True
    return head.due is not None and head.due <= claim.now


def rank(definition: Definition) -> tuple[int, float, str]:
    """The oldest of the highest priority comes first."""
    return -definition.priority, definition.created, definition.id


def matches(definition: Definition, head: Head, query: Query) -> bool:
    return (
        (query.states is None or head.state in query.states)
        and (query.workflows is None or definition.workflow in query.workflows)
        and (query.queue is None or query.queue == definition.queue)
        and (query.owner is None or query.owner == head.owner)
        and (query.owned is None or query.owned == (head.owner is not None))
        and (query.parent_id is None or query.parent_id == definition.parent_id)
        and (query.created_after is None or definition.created >= query.created_after)
        and (query.created_before is None or definition.created < query.created_before)
        and (query.ended_before is None or (head.ended is not None and head.ended < query.ended_before))
        and all(definition.metadata.get(key) == value for key, value in query.metadata.items())
        and (query.text is None or _contains(definition, query.text.casefold()))
    )


def _contains(definition: Definition, text: str) -> bool:
    values = [definition.id, *map(str, definition.metadata.values())]
    return any(text in value.casefold() for value in values)
