"""What this process knows of every execution in live/: definition, head and mail, and who could be claimed.

Place in the life of an execution: claim, and every listing. Pure bookkeeping in memory; `catalog` keeps it up to date.
"""

from __future__ import annotations

import heapq
import os
import struct
from collections.abc import Iterator

import attrs

from longrun.stored import RECORDS, Claim, Definition, Head, Query
from longrun.stores._file.contents import Mail, blocked_head, woken_head
from longrun.stores.rows import wake_at

Mark = bytes
"""Size, time of change, inode, mode and user: what tells a file that changed from one that did not. Packed, since there
is one for every execution."""
_MARK = struct.Struct("=qqQII")


def mark_of(status: os.stat_result, size: int | None = None) -> Mark:
    """With a `size`, as if the file had that."""
    size = status.st_size if size is None else size
    return _MARK.pack(size, status.st_mtime_ns, status.st_ino, status.st_mode, status.st_uid)


def is_same_file(one: Mark | None, other: Mark) -> bool:
    return one is not None and _MARK.unpack(one)[2] == _MARK.unpack(other)[2]


def changed_at(mark: Mark) -> float:
    return float(_MARK.unpack(mark)[1] / 1e9)


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
    unreadable: bool = False
    """It cannot be gone on with: definition and head are what could be saved of them, or stand for them."""
    closed_inbox: str | None = None
    """Why its inbox cannot be opened: until it can, nobody may go on without the messages in there."""

    def __attrs_post_init__(self) -> None:
        if self.stem == self.id:
            self.stem = self.id  # the same text: one string will do

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
        if self.closed_inbox is not None and not head.state.finished:
            return blocked_head(head, self.closed_inbox)
        return woken_head(head, self.has_mail) if self.letters and head.owner is None else head


def may_leave(head: Head) -> bool:
    """Whether a journal may be moved to done/: it has ended, and nobody has claimed it for a retry."""
    return head.state.finished and head.owner is None


class Entries:
    """All entries, by name, by owner, and by when they are due."""

    def __init__(self) -> None:
        self.by_stem: dict[str, Entry] = {}
        self._by_owner: dict[str, dict[str, Entry]] = {}
        self._ready: dict[str, Entry] = {}
        self._timed: list[tuple[float, str]] = []
        self._posted: dict[str, Entry] = {}
        self._records: dict[str, Entry] = {}
        self._children: dict[str, dict[str, Entry]] = {}

    def put(self, entry: Entry) -> None:
        known = self.by_stem.get(entry.stem)
        if known is not None:
            if entry.inbox_mark is None and known.born == entry.born:
                entry.letters, entry.inbox_mark = known.letters, known.inbox_mark
                entry.closed_inbox = known.closed_inbox
            self._remove(known)
        self.by_stem[entry.stem] = entry
        if entry.definition.workflow in RECORDS:
            self._records[entry.stem] = entry
        if entry.definition.parent_id is not None:
            self._children.setdefault(entry.definition.parent_id, {})[entry.stem] = entry
        self._index(entry)

    def drop(self, stem: str) -> None:
        entry = self.by_stem.pop(stem, None)
        if entry is not None:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._unindex(entry)
        self._records.pop(entry.stem, None)
        if entry.definition.parent_id is not None:
            _take_out(self._children, entry.definition.parent_id, entry.stem)

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

    def mailed(self, entry: Entry, letters: tuple[int, ...], mark: Mark | None, *, closed: str | None = None) -> None:
        self._unindex(entry)
        entry.letters, entry.inbox_mark, entry.closed_inbox = letters, mark, closed
        self._index(entry)

    def _post(self, entry: Entry) -> None:
        if entry.has_mail:
            self._posted[entry.stem] = entry
        else:
            self._posted.pop(entry.stem, None)

    def _index(self, entry: Entry) -> None:
        owner = entry.head.owner
        if owner is not None:
            self._by_owner.setdefault(owner, {})[entry.stem] = entry
        self._post(entry)
        entry.wake = wake_at(entry.effective) if owner is None else None
        if entry.wake == 0.0:
            self._ready[entry.stem] = entry
        elif entry.wake is not None:
            heapq.heappush(self._timed, (entry.wake, entry.stem))
            if len(self._timed) > 2 * len(self.by_stem) + 1000:  # mostly moments that no longer hold
                self._timed = [item for item in set(self._timed) if self._valid(*item)]
                heapq.heapify(self._timed)

    def _unindex(self, entry: Entry) -> None:
        if entry.head.owner is not None:
            _take_out(self._by_owner, entry.head.owner, entry.stem)
        self._ready.pop(entry.stem, None)
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
            yield from self.owned_by(owner)


def is_about_records(query: Query) -> bool:
    return query.workflows is not None and query.workflows <= RECORDS


def _take_out(index: dict[str, dict[str, Entry]], name: str, stem: str) -> None:
    part = index.get(name, {})
    part.pop(stem, None)
    if not part:
        index.pop(name, None)


def rank(definition: Definition) -> tuple[int, float, str]:
    """The oldest of the highest priority comes first."""
    return -definition.priority, definition.created, definition.id
