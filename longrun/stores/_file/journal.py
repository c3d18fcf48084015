"""One journal that this process owns: append to it, replace it; and the removal of those that are over.

Place in the life of an execution: claim, checkpoint. The fence is the generation in a journal's name. A taker creates
generation N+1, *then* reads N; the owner appends to N, syncs, *then* looks that N+1 is absent and that N is still the
file it wrote to, before it acknowledges (I3). Old generations are removed oldest first, under a lock on their file
that also a replacement of the file takes; so N+1 cannot have come and gone while N is there, and N cannot come back.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from longrun.errors import LeaseLostError, StoreUnavailableError
from longrun.stored import EMPTY, Head
from longrun.stores._file.contents import Contents, Mail, snapshot_lines
from longrun.stores._file.disk import UnopenableError, close_all, read_range, write_all
from longrun.stores._file.history import move_history
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, unpack
from longrun.stores._file.place import KIND, Place, journal_name, stem_of, unavailable
from longrun.stores._file.reading import START_SIZE, Replay, Spot, born_in, read_spot, signpost, signposted

GROWTH = 1 << 18
"""Bytes that a journal may grow, beyond twice its snapshot, before it is compacted."""
FRESH = 1.0
"""Seconds for which an owner that found no newer generation looks for one only after it has written, not before."""


class Journal:
    """A journal that this process may append to: it owns the execution."""

    __slots__ = (
        *("about", "bad", "born", "fd", "gen", "head", "id", "identity", "ino", "limit", "mail", "n", "name"),
        *("next_name", "place", "saves", "seen", "size", "stem"),
    )

    def __init__(
        self,
        place: Place,
        stem: str,
        identity: Identity,
        fd: int,
        ino: int,
        *,
        born: str,
        head: Head,
        mail: Mail,
        n: int,
        size: int,
    ) -> None:
        id, gen = identity.id, identity.gen
        self.place, self.id, self.gen, self.fd, self.ino, self.born = place, id, gen, fd, ino, born
        self.stem, self.name, self.next_name = stem, journal_name(stem, gen), journal_name(stem, gen + 1)
        self.identity, self.head, self.mail, self.n, self.size = identity, head, mail, n, size
        self.seen = time.monotonic()
        self.saves = 0
        self.bad = False
        self.about: Mapping[str, Any] = EMPTY
        """Of the definition, if a save named the steps: its first line does not know yet, so every save says it."""
        self.set_limit()

    def set_limit(self) -> None:
        """Journals that began together do not all grow too large in the same moment."""
        self.limit = 2 * self.size + int(GROWTH * (0.75 + random.random() / 2))

    def close(self) -> None:
        if self.fd >= 0:
            close_all(self.place.disk, (self.fd,))
            self.fd = -1

    def reopen(self) -> bool:
        """Make sure of an open descriptor on the file as we left it; False if it is another one now."""
        if self.fd < 0:
            try:
                self.fd = self.place.live.open(self.name, os.O_RDWR | os.O_APPEND)
            except FileNotFoundError:
                return False
            if not self._is_born(self.fd) or self.place.disk.fstat(self.fd).st_ino != self.ino:
                return False
        return self.bad or self.place.disk.size(self.fd) == self.size

    def _is_born(self, fd: int) -> bool:
        """Whether a file is of our execution. Its inode proves that only while we have it open: the id may have been
        deleted and used anew, and the inode with it."""
        start = read_range(self.place.disk, fd, 0, START_SIZE)
        return born_in(start, Spot(self.place.live, self.stem, self.gen, self.name)) in (None, self.born)

    def in_place(self) -> bool:
        """Whether the file of this name is ours still."""
        status = self.place.live.stat(self.name)
        if status is None or status.st_ino != self.ino:
            return False
        if self.fd >= 0:
            return True
        with contextlib.suppress(FileNotFoundError), self.place.live.opened(self.name) as fd:
            return self._is_born(fd)
        return False

    def write(self, data: bytes, now: float) -> None:
        """Append, or leave no trace; a journal that may have one is marked as bad. Readers see it after `settled`.

        A stale owner should not even try. That decides nothing, so that one look serves for a while."""
        if now > self.seen + FRESH:
            self.check_newest()
        disk = self.place.disk
        self.place.live.unsettled[self.ino] = self.size
        try:
            write_all(disk, self.fd, data)
        except OSError:
            self.bad = True
            disk.truncate(self.fd, self.size)
            self.bad = False  # nothing of it is left, and no sync has failed
            self.settled()
            raise
        except BaseException:
            self.bad = True
            raise

    def sync(self) -> None:
        """Make it durable. A journal for which that fails is bad, and never synced again."""
        try:
            self.place.disk.fdatasync(self.fd)
        except BaseException:
            self.bad = True
            raise

    def settled(self) -> None:
        """All of the file is durable and acknowledged, or no longer ours."""
        self.place.live.unsettled.pop(self.ino, None)

    def has_inbox(self) -> bool:
        """Whether there are messages, taken or not."""
        return self.place.inbox.stat(f"{self.stem}.jsonl") is not None

    def check_newest(self) -> None:
        """Raise if a newer generation is there."""
        if self.place.live.stat(self.next_name) is not None:
            raise LeaseLostError(self.id, self.head.fence)

    def check_owned(self) -> os.stat_result:
        """Raise unless this generation is the newest one: only then may a write be acknowledged. The order counts."""
        live = self.place.live
        if live.stat(self.next_name) is None:
            status = live.stat(self.name)
            if status is not None and status.st_ino == self.ino:
                return status
        raise LeaseLostError(self.id, self.head.fence)

    def was_read(self, revision: int) -> bool:
        """Whether the next generation began with what this one held up to that write: the first thing that a taker
        writes down is what it has read. Where that is gone or not there yet, nobody can say so."""
        identity = Identity(self.id, self.gen + 1)
        try:
            for n, text in enumerate(self.place.live.read(self.next_name).split(b"\n")[:-1]):
                fields = unpack(text, identity).fields
                if (fields["kind"] == "claim") != (n == 0):
                    return False  # it was compacted since
                if fields["kind"] == "definition" and fields["born"] != self.born:
                    return False  # another execution has the id by now
                if fields["kind"] == "save":
                    return bool(fields["head"].get("revision", 0) == revision)
        except (OSError, BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
            return False
        return False

    def mend(self) -> None:
        """After a failed write or sync: carry what was acknowledged over to a new file, and leave the old one."""
        data = self.place.live.read(self.name, 0, self.size)
        contents = Contents(self.id)
        tail = Replay(contents, self.identity, lambda _: "").run(data)
        if len(data) != self.size or tail.end != self.size or contents.damage:
            raise StoreUnavailableError(KIND, f"the journal of execution {self.id!r} cannot be read back")
        self._replace(data)
        self._sync_name()

    def compact(self) -> None:
        """Replace the journal by its snapshot; rows of old checkpoints go to the history first."""
        spot = Spot(self.place.live, self.stem, self.gen, self.name)
        contents, tail = read_spot(self.place, self.id, spot, self.size)
        self.limit = 2 * self.limit
        if contents.damage or tail.end != self.size:
            return  # the owner's next claim sorts that out; until then every byte stays
        move_history(self.place, self.stem, contents)
        lines = snapshot_lines(self.identity, contents, 1)
        data = b"".join(lines)
        self._replace(data)
        self.n, self.size = len(lines), len(data)
        self.set_limit()
        self._sync_name()

    def _sync_name(self) -> None:
        """Until the new file has the name for good, nothing in it may be acknowledged."""
        self.bad = True
        self.place.live.sync()
        self.bad = False

    def _replace(self, data: bytes) -> None:
        place = self.place
        temporary, fd = place.temporary(data, sync=True)
        try:
            if not place.disk.lock(self.fd, wait=False):
                raise LeaseLostError(self.id, self.head.fence)  # it is being removed: a newer generation is complete
            status = place.live.stat(self.name)
            if status is None or status.st_ino != self.ino:
                raise LeaseLostError(self.id, self.head.fence)
            ino = place.disk.fstat(fd).st_ino
            place.replace(temporary, place.live, self.name)
        except BaseException:
            place.disk.close(fd)
            place.drop_temporary(temporary)
            raise
        self.close()
        self.settled()
        self.fd, self.ino = fd, ino


@attrs.frozen
class Over:
    """A journal that made the generations before it superfluous."""

    id: str
    gen: int
    ino: int


def remove_older(place: Place, over: Iterable[Over]) -> set[str]:
    """Put a signpost in generation 0 and remove the others before the given one; the ids for which that could be done.

    Signposts are durable before what they lead past is gone: no power cut can bring an old generation to the front. The
    caller holds the place's lock, shared at least: no id is deleted and created anew meanwhile."""
    ready = [one for one in over if one.gen > 0 and _put_signpost(place, one)]
    if ready:
        place.live.sync()
    return {one.id for one in ready if remove_between(place, stem_of(one.id), one.gen, lowest=1)}


def _put_signpost(place: Place, over: Over) -> bool:
    """Signposts only ever lead forward, and only to a journal that is the very one that was meant."""
    stem = stem_of(over.id)
    status = place.live.stat(journal_name(stem, over.gen))
    if status is None or status.st_ino != over.ino:
        return False

    def stands_before(first: bytes) -> bool:
        try:
            to = signposted(first)
        except BrokenLineError:
            return True
        return to is None or to <= over.gen

    return remove_locked(place, stem, 0, instead=signpost(over.id, over.gen), only_if=stands_before)


def remove_between(place: Place, stem: str, gen: int, *, lowest: int = 0) -> bool:
    """Remove the generations from `lowest` to before `gen`, oldest first; False if somebody is at one just now."""
    older = gen - 1
    while older > 0 and place.live.stat(journal_name(stem, older)) is not None:
        older -= 1
    numbers = [0, *range(older + 1, gen)] if older >= 0 else []
    return all(remove_locked(place, stem, number) for number in dict.fromkeys(numbers) if lowest <= number < gen)


def remove_locked(
    place: Place,
    stem: str,
    gen: int,
    *,
    ino: int | None = None,
    instead: bytes | None = None,
    only_if: Callable[[bytes], bool] | None = None,
) -> bool:
    """Unlink a generation, or put something in its stead, while nobody replaces it; False if that cannot be done now.

    With `ino`, only that very file; with `only_if`, only if it says so of the file's first bytes."""
    name = journal_name(stem, gen)
    try:
        fd = place.live.open(name)
    except FileNotFoundError:
        return True
    except UnopenableError:
        return False
    try:
        if not place.disk.lock(fd, wait=False):
            return False
        status, ours = place.live.stat(name), place.disk.fstat(fd).st_ino
        if status is None or status.st_ino != ours or ino not in (None, ours):
            return False
        if only_if is not None and not only_if(place.disk.pread(fd, START_SIZE, 0)):
            return False
        if instead is None:
            place.live.remove(name)
        else:
            temporary, new = place.temporary(instead, sync=False)
            place.disk.close(new)
            place.replace(temporary, place.live, name)
    finally:
        place.disk.close(fd)
    return True


def failed(error: OSError) -> StoreUnavailableError:
    return unavailable(error, "a journal cannot be written")
