"""One journal: read it, append to it, replace it.

Place in the life of an execution: claim, checkpoint. The fence is the generation in a journal's name. A taker creates
generation N+1, *then* reads N; the owner appends to N, syncs, *then* looks that N+1 is absent and that N is still the
file it wrote to, before it acknowledges (I3). Old generations are removed oldest first, under a lock on their file
that also a replacement of the file takes; so N+1 cannot have come and gone while N is there, and N cannot come back.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterable

import attrs

from longrun.errors import CorruptDataError, LeaseLostError, StoreUnavailableError
from longrun.stored import Definition, Head
from longrun.stores._file.contents import Contents, Mail, mail_from, snapshot_lines
from longrun.stores._file.crew import Crew
from longrun.stores._file.disk import Folder, read_range, write_all
from longrun.stores._file.forms import definition_from, head_from
from longrun.stores._file.lines import (
    BrokenLineError,
    ForeignLineError,
    Identity,
    Line,
    identity_of,
    pack,
    unpack,
    unpack_any,
)
from longrun.stores._file.place import KIND, Place, done_name, journal_name, parse_journal_name, stem_of, unavailable

GROWTH = 1 << 18
"""Bytes that a journal may grow, beyond twice its snapshot, before it is compacted."""
SMALL = 1 << 15
START_SIZE = 1 << 13
END_SIZE = 1 << 15
_LINE_START = b'{"crc":"'


@attrs.frozen
class Spot:
    """Where the newest journal of an execution is."""

    folder: Folder
    stem: str
    gen: int
    name: str


@attrs.define
class Tail:
    """How far a journal was read: the last record's number, and the end of the last good line."""

    n: int = 0
    end: int = 0
    clean: bool = True
    """Nothing stands behind `end`."""
    broken: bool = False


@attrs.frozen
class Summary:
    """What a listing needs to know of a journal, from its first and last lines."""

    definition: Definition
    born: str
    head: Head
    mail: Mail
    tail: Tail


# finding


def locate(place: Place, id: str) -> Spot | None:
    """The newest journal of an execution, by a few look-ups and no listing; None if there is no such execution."""
    stem = stem_of(id)
    for _ in range(100):  # it may move between live/ and done/ while we look
        gen = _start_generation(place, stem)
        if gen is None:
            if place.done.stat(done_name(stem)) is not None:
                return done_spot(place, stem)
            if _start_generation(place, stem) is None and place.done.stat(done_name(stem)) is None:
                return None
            continue
        while place.live.stat(journal_name(stem, gen + 1)) is not None:
            gen += 1
        if place.live.stat(journal_name(stem, gen)) is not None:
            return Spot(place.live, stem, gen, journal_name(stem, gen))
        if (spot := done_spot(place, stem)) is not None:
            return spot
        gen = max(_generations(place, stem), default=0)
        if gen > 0 and place.live.stat(journal_name(stem, gen)) is not None:
            return Spot(place.live, stem, gen, journal_name(stem, gen))
        if gen == 0:
            return None  # it was being deleted when a crash came: only the signpost is left
    raise StoreUnavailableError(KIND, f"the journal of execution {id!r} keeps moving")


def done_spot(place: Place, stem: str) -> Spot | None:
    try:
        first = place.done.read(done_name(stem), 0, START_SIZE)
    except FileNotFoundError:
        return None
    try:
        gen = identity_of(first.partition(b"\n")[0]).gen
    except BrokenLineError:
        gen = 0  # reading it will say what is wrong
    return Spot(place.done, stem, gen, done_name(stem))


def _start_generation(place: Place, stem: str) -> int | None:
    """A generation from which on all later ones are there; None if nothing is in live/."""
    try:
        first = place.live.read(journal_name(stem, 0), 0, START_SIZE)
    except FileNotFoundError:
        return None
    try:
        return _signposted(first) or 0
    except BrokenLineError:  # also a definition longer than what was read
        return max(_generations(place, stem), default=None)


def _signposted(first: bytes) -> int | None:
    """Where the first line of generation 0 leads to; None if it is a journal still."""
    _, line = unpack_any(first.partition(b"\n")[0])
    return int(line.fields["to"]) if line.fields["kind"] == "moved" else None


def _generations(place: Place, stem: str) -> list[int]:
    return [found[1] for name in place.live.names() if (found := parse_journal_name(name)) and found[0] == stem]


def signpost(id: str, gen: int) -> bytes:
    """What stands in generation 0 once it is over."""
    return pack(Identity(id, 0), 1, {"kind": "moved", "to": gen})


# reading


class Replay:
    """Applies the lines of one journal to `contents`; what cannot be read goes to quarantine and is told."""

    def __init__(self, contents: Contents, identity: Identity, aside: Callable[[bytes], str]) -> None:
        self.contents, self.identity, self.aside = contents, identity, aside
        self.tail = Tail()
        self._gap = False

    def run(self, data: bytes) -> Tail:
        position = 0
        while position < len(data):
            end = data.find(b"\n", position)
            if end == -1:
                self._rest(data[position:])
                break
            if not self._line(data[position:end]):
                self._pieces(data[position:end])
            position = end + 1
            self.tail.end = position
        return self.tail

    def _line(self, line: bytes) -> bool:
        """Apply a line; False if it is not a good one of this journal."""
        try:
            found = unpack(line, self.identity)
            if found.n <= self.tail.n:
                return False
            if found.n != self.tail.n + 1 and not self._gap:
                self._tell(f"records {self.tail.n + 1} to {found.n - 1} of generation {self.identity.gen} are missing")
            self.contents.apply(found)
        except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError, IndexError):
            return False
        self.tail.n, self._gap = found.n, False
        return True

    def _pieces(self, line: bytes) -> None:
        """A damaged line; it may be two good ones whose newline was lost."""
        cut = line.find(_LINE_START, 1)
        while cut != -1:
            if self._line(line[: cut - 1]):
                self._tell("a line's end was damaged")
                if not self._line(line[cut:]):
                    self._pieces(line[cut:])
                return
            cut = line.find(_LINE_START, cut + 1)
        self._gap = True
        self.tail.broken = True
        where = self.aside(line)
        self._tell(f"record {self.tail.n + 1} of generation {self.identity.gen} is damaged, its bytes are {where}")

    def _rest(self, rest: bytes) -> None:
        """Bytes behind the last newline: usually a write that a crash cut short, which nobody was told of."""
        self.tail.clean = False
        if self._line(rest) or self._line(rest[:-1]):
            return

    def _tell(self, sentence: str) -> None:
        self.contents.shaken = True
        self.contents.damage.append(sentence)


def read_spot(place: Place, id: str, spot: Spot, limit: int | None = None) -> tuple[Contents, Tail]:
    """Everything in a journal, and in the generations before it as far as they are needed; not settled yet."""
    identity = Identity(id, spot.gen)
    data = spot.folder.read(spot.name, 0, limit)
    contents, tail = _replayed(place, spot, identity, data, Contents(id))
    if contents.whole and contents.newest() is not None:
        return contents, tail
    earlier = Spot(place.live, spot.stem, spot.gen - 1, journal_name(spot.stem, spot.gen - 1))
    if spot.gen == 0 or place.live.stat(earlier.name) is None:
        return contents, tail
    before, _ = read_spot(place, id, earlier)
    if before.head is None:
        return contents, tail
    had_claim = contents.claimed
    before.whole = False
    before.damage += before.told
    if not had_claim:
        before.head = attrs.evolve(before.head, fence=before.head.fence + 1)
    return _replayed(place, spot, identity, data, before)


def _replayed(place: Place, spot: Spot, identity: Identity, data: bytes, contents: Contents) -> tuple[Contents, Tail]:
    first = data.partition(b"\n")[0]
    try:
        unpack(first, identity)
    except ForeignLineError as error:
        where = place.keep_aside(spot.stem, data)
        problem = f"its journal belongs to {error}; the bytes are {where}"
        raise CorruptDataError(f"execution {identity.id!r}", problem) from None
    except BrokenLineError:
        pass  # the replay says so
    replay = Replay(contents, identity, lambda line: place.keep_aside(spot.name, line))
    return contents, replay.run(data)


def read_summary(place: Place, spot: Spot, known: tuple[str, str, Definition] | None) -> Summary | None:
    """From the ends of a journal, without its states; None where only a full reading can tell.

    `known` are id, birth mark and definition of an execution that was met before."""
    with spot.folder.opened(spot.name) as fd:
        size = place.disk.fstat(fd).st_size
        if size <= SMALL:
            start = end = read_range(place.disk, fd, 0)
            whole = True
        else:
            start = read_range(place.disk, fd, 0, START_SIZE) if known is None else b""
            end = read_range(place.disk, fd, size - END_SIZE)
            whole = False
            size = size - END_SIZE + len(end)
    try:
        if known is None:
            known = _first(start, spot)
        identity = Identity(known[0], spot.gen)
        found, at, clean = _last_save(end, identity, whole=whole)
    except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
        return None
    _, born, definition = known
    where = (0 if whole else size - len(end)) + at
    return Summary(
        definition, born, head_from(found.fields["head"]), mail_from(found.fields), Tail(found.n, where, clean)
    )


def _first(start: bytes, spot: Spot) -> tuple[str, str, Definition]:
    """Id, birth mark and definition, from the first lines."""
    for line in start.split(b"\n")[:-1][:2]:
        identity = identity_of(line)
        if stem_of(identity.id) != spot.stem or identity.gen != spot.gen:
            raise BrokenLineError
        fields = unpack(line, identity).fields
        if fields["kind"] == "definition":
            return identity.id, fields["born"], definition_from(identity.id, fields["definition"])
    raise BrokenLineError


def _last_save(end: bytes, identity: Identity, *, whole: bool) -> tuple[Line, int, bool]:
    """The last save in a file's end, where it ends in there, and whether nothing stands behind it."""
    stop = end.rfind(b"\n") + 1
    clean = stop == len(end)
    if not clean:
        raise BrokenLineError  # a torn end, or a damaged one: a full reading tells
    start = end.rfind(b"\n", 0, stop - 1) + 1
    if start == 0 and not whole:
        raise BrokenLineError  # the line began before
    found = unpack(end[start : stop - 1], identity)
    if found.fields["kind"] != "save":
        raise BrokenLineError
    return found, stop, clean


# writing


class Journal:
    """A journal that this process may append to: it owns the execution."""

    __slots__ = (
        *("bad", "born", "fd", "gen", "head", "id", "identity", "ino", "limit", "mail", "n", "name", "next_name"),
        *("place", "saves", "size", "stem"),
    )

    def __init__(
        self, place: Place, id: str, gen: int, fd: int, *, born: str, head: Head, mail: Mail, n: int, size: int
    ) -> None:
        self.place, self.id, self.gen, self.fd, self.born = place, id, gen, fd, born
        self.stem = stem_of(id)
        self.name, self.next_name = journal_name(self.stem, gen), journal_name(self.stem, gen + 1)
        self.identity = Identity(id, gen)
        self.head, self.mail, self.n, self.size = head, mail, n, size
        self.ino = place.disk.fstat(fd).st_ino
        self.saves = 0
        self.bad = False
        self.set_limit()

    def set_limit(self) -> None:
        """Journals that began together do not all grow too large in the same moment."""
        self.limit = 2 * self.size + int(GROWTH * random.uniform(0.75, 1.25))

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # all that was acknowledged is synced
                self.place.disk.close(self.fd)
            self.fd = -1

    def reopen(self) -> bool:
        """Make sure of an open descriptor on the file as we left it; False if it is another one now."""
        if self.fd < 0:
            try:
                self.fd = self.place.live.open(self.name, os.O_RDWR | os.O_APPEND)
            except FileNotFoundError:
                return False
        status = self.place.disk.fstat(self.fd)
        return status.st_ino == self.ino and (self.bad or status.st_size == self.size)

    def append(self, data: bytes) -> None:
        """Write and sync, or leave no trace; a journal that may have one is marked as bad and never synced again."""
        disk = self.place.disk
        try:
            write_all(disk, self.fd, data)
        except OSError:
            self.bad = True
            disk.truncate(self.fd, self.size)
            self.bad = False  # nothing of it is left, and no sync has failed
            raise
        try:
            disk.fdatasync(self.fd)
        except OSError:
            self.bad = True
            raise

    def check_newest(self) -> None:
        """Raise if a newer generation is there: for a stale owner that should not even try. It decides nothing."""
        if self.place.live.stat(self.next_name) is not None:
            raise LeaseLostError(self.id, self.head.fence)

    def check_owned(self) -> None:
        """Raise unless this generation is the newest one: only then may a write be acknowledged. The order counts."""
        self.check_newest()
        status = self.place.live.stat(self.name)
        if status is None or status.st_ino != self.ino:
            raise LeaseLostError(self.id, self.head.fence)

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
        self.fd, self.ino = fd, ino


def move_history(place: Place, stem: str, contents: Contents) -> None:
    """Append the old rows to the history, durably, and take them out of `contents`."""
    rows = contents.old_rows()
    if not rows:
        return
    identity = Identity(contents.id, 0)
    lines = [pack(identity, row["seq"], {"kind": "row", "born": contents.born, "row": row}) for row in rows]
    fd, new = place.history.open_or_create(f"{stem}.jsonl")
    try:
        size = place.disk.fstat(fd).st_size
        torn = size > 0 and place.disk.pread(fd, 1, size - 1) != b"\n"
        write_all(place.disk, fd, b"".join([b"\n" if torn else b"", *lines]))
        place.disk.fdatasync(fd)
    finally:
        place.disk.close(fd)
    if new:
        place.history.sync()
    contents.drop_old_rows()


def read_history(place: Place, stem: str, id: str, born: str) -> dict[int, dict[str, object]]:
    """Rows by number; a crash may have written some twice, and torn the last."""
    try:
        data = place.history.read(f"{stem}.jsonl")
    except FileNotFoundError:
        return {}
    identity = Identity(id, 0)
    rows: dict[int, dict[str, object]] = {}
    for text in data.split(b"\n"):
        if text:
            try:
                fields = unpack(text, identity).fields
            except (BrokenLineError, ForeignLineError):
                place.keep_aside(f"{stem}.history", text)
                continue
            if fields["born"] == born:
                rows[fields["row"]["seq"]] = fields["row"]
    return rows


@attrs.frozen
class Over:
    """A journal that made the generations before it superfluous."""

    id: str
    gen: int
    ino: int


def remove_older(place: Place, crew: Crew, over: Iterable[Over]) -> set[str]:
    """Put a signpost in generation 0 and remove the others before the given one; the ids for which that could be done.

    Signposts are durable before what they lead past is gone: no power cut can bring an old generation to the front. The
    caller holds the place's lock, shared at least: no id is deleted and created anew meanwhile."""
    ready: list[Over] = []
    done: set[str] = set()

    def point(one: Over) -> None:
        if _put_signpost(place, one):
            ready.append(one)

    def remove(one: Over) -> None:
        if remove_between(place, stem_of(one.id), one.gen, lowest=1):
            done.add(one.id)

    crew.run(point, [one for one in over if one.gen > 0])
    if ready:
        place.live.sync()
    crew.run(remove, ready)
    return done


def _put_signpost(place: Place, over: Over) -> bool:
    """Signposts only ever lead forward, and only to a journal that is the very one that was meant."""
    stem = stem_of(over.id)
    status = place.live.stat(journal_name(stem, over.gen))
    if status is None or status.st_ino != over.ino:
        return False

    def stands_before(first: bytes) -> bool:
        try:
            to = _signposted(first)
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
