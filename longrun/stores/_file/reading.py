"""Where an execution's journal is, and what it says.

Place in the life of an execution: claim, and every look at it. Nothing here writes, but for copies of damaged bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import attrs

from longrun.errors import CorruptDataError, StoreUnavailableError
from longrun.stored import Definition, Head
from longrun.stores._file.contents import ABOUT, Contents, Mail, mail_from
from longrun.stores._file.disk import Folder, UnopenableError, UnreadableFileError, read_range
from longrun.stores._file.forms import definition_from, head_from
from longrun.stores._file.lines import (
    BrokenLineError,
    ForeignLineError,
    Identity,
    Line,
    all_fit,
    claims_to_be,
    fits,
    identity_of,
    pack,
    unpack,
    unpack_any,
)
from longrun.stores._file.place import KIND, Place, done_name, id_of, journal_name, parse_journal_name, stem_of

SMALL = 1 << 15
START_SIZE = 1 << 13
END_SIZE = 1 << 15
_LINE_START = b'{"crc":"'
_MOVED = b'"kind":"moved"'
"""Stands in every signpost, and hardly ever in another line."""


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
    return locate_stem(place, stem_of(id))


def locate_stem(place: Place, stem: str) -> Spot | None:
    for _ in range(100):  # it may move between live/ and done/ while we look
        gen = _start_generation(place, stem)
        if gen is None:
            if place.done.stat(done_name(stem)) is not None and (spot := done_spot(place, stem)) is not None:
                return spot
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
    raise StoreUnavailableError(KIND, f"the journal {stem!r} keeps moving")


def done_spot(place: Place, stem: str) -> Spot | None:
    name = done_name(stem)
    try:
        gen = _generation_in(place.done.read(name, 0, START_SIZE))
        if gen is None:  # its first line is damaged, or longer than that
            gen = _generation_in(place.done.read(name))
    except FileNotFoundError:
        return None
    except UnopenableError:
        gen = None
    return Spot(place.done, stem, gen or 0, name)  # reading it will say what is wrong


def _generation_in(data: bytes) -> int | None:
    """Which generation a journal in done/, whose name does not tell, is of; None if none of these lines fits."""
    for text in data.split(b"\n"):
        try:
            return identity_of(text).gen
        except BrokenLineError:
            continue
    return None


def _start_generation(place: Place, stem: str) -> int | None:
    """A generation from which on all later ones are there; None if nothing is in live/."""
    try:
        first = place.live.read(journal_name(stem, 0), 0, START_SIZE)
    except FileNotFoundError:
        return None
    except UnopenableError:
        first = b""
    try:
        return signposted(first) or 0
    except BrokenLineError:  # also a definition longer than what was read
        return max(_generations(place, stem), default=None)


def signposted(first: bytes) -> int | None:
    """Where the first line of generation 0 leads to; None if it is a journal still."""
    text = first.partition(b"\n")[0]
    if _MOVED not in text and fits(text):
        return None
    _, line = unpack_any(text)
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
        *lines, rest = data.split(b"\n")
        for line in lines:
            if not self._line(line):
                self._pieces(line)
        self.tail.end = len(data) - len(rest)
        if rest:
            self._rest(rest)
        return self.tail

    def _line(self, line: bytes) -> bool:
        """Apply a line; False if it is not a good one of this journal."""
        try:
            found = unpack(line, self.identity)
            n, tail = found.n, self.tail
            if n != tail.n + 1:
                if n <= tail.n:
                    return False
                if not self._gap:
                    self._tell(f"records {tail.n + 1} to {n - 1} of generation {self.identity.gen} are missing")
            self.contents.apply(found)
        except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError, IndexError):
            return False
        tail.n, self._gap = n, False
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


def _bytes_of(spot: Spot, id: str, limit: int | None = None) -> bytes:
    try:
        return spot.folder.read(spot.name, 0, limit)
    except UnopenableError as error:
        raise UnreadableFileError(id, error) from error


def with_next_step(place: Place, spot: Spot, error: CorruptDataError) -> CorruptDataError:
    """The error for callers: where the journal's bytes are kept, and what can be done about it."""
    if isinstance(error, UnreadableFileError):
        return error
    where = place.keep_aside(spot.name, spot.folder.read(spot.name))
    return CorruptDataError(error.what, f"{error.problem}; its bytes are {where}, and `delete` removes it")


def read_spot(place: Place, id: str, spot: Spot, limit: int | None = None) -> tuple[Contents, Tail]:
    """Everything in a journal, and in the generations before it as far as they are needed; not settled yet."""
    data, identity = _bytes_of(spot, id, limit), Identity(id, spot.gen)
    if spot.folder is place.done and not claims_to_be(data, identity) and (gen := _generation_in(data)) is not None:
        spot, identity = attrs.evolve(spot, gen=gen), Identity(id, gen)  # a retry has put another one there
    contents, tail = _replayed(place, spot, identity, data, Contents(id))
    if contents.complete or spot.gen == 0:
        return contents, tail
    earlier = Spot(place.live, spot.stem, spot.gen - 1, journal_name(spot.stem, spot.gen - 1))
    if place.live.stat(earlier.name) is None:
        if spot.folder is place.live and _is_bare(contents, tail) and _is_done(place, spot.stem):
            raise FileNotFoundError(errno.ENOENT, "the claim came too late, and is taken back", spot.name)
        if limit is None and (_bytes_of(spot, id) != data or place.live.stat(earlier.name) is not None):
            return read_spot(place, id, spot)  # it was completed in this moment, or what it claims came back
        return contents, tail
    try:
        before, _ = read_spot(place, id, earlier)
    except UnreadableFileError:
        raise
    except CorruptDataError as error:
        contents.damage.append(error.problem)
        return contents, tail
    if before.head is None:
        contents.damage += before.damage
        return contents, tail
    had_claim = contents.claimed
    before.whole = False
    before.damage += before.told
    if not had_claim:
        before.head = attrs.evolve(before.head, fence=before.head.fence + 1)
    return _replayed(place, spot, identity, data, before)


def read_settled(place: Place, id: str, spot: Spot) -> tuple[Contents, Tail]:
    """A journal as everybody may use it; if it cannot be, the error says what can be done."""
    try:
        contents, tail = read_spot(place, id, spot)
        contents.settle()
    except CorruptDataError as error:
        raise with_next_step(place, spot, error) from error
    return contents, tail


def read_done(place: Place, id: str, spot: Spot) -> Contents:
    """A journal in done/ holds an end: without that it says something that is no longer true."""
    contents, _ = read_settled(place, id, spot)
    try:
        ended(contents)
    except CorruptDataError as error:
        raise with_next_step(place, spot, error) from error
    return contents


def ended(contents: Contents) -> tuple[Head, Definition]:
    head, definition = contents.found()
    if not head.state.finished:
        problem = "; ".join(["its end is not readable", *contents.damage])
        raise CorruptDataError(f"execution {contents.id!r}", problem)
    return head, definition


def _replayed(place: Place, spot: Spot, identity: Identity, data: bytes, contents: Contents) -> tuple[Contents, Tail]:
    first = data.partition(b"\n")[0]
    try:
        doubtful = _MOVED in first or not claims_to_be(first, identity)
        if doubtful and unpack(first, identity).fields.get("kind") == "moved":
            raise FileNotFoundError(errno.ENOENT, "the journal is over in this moment", spot.name)
    except ForeignLineError as error:
        raise CorruptDataError(f"execution {identity.id!r}", f"its journal belongs to {error}") from None
    except BrokenLineError:
        pass  # the replay says so
    replay = Replay(contents, identity, lambda line: place.keep_aside(spot.name, line))
    return contents, replay.run(data)


def _is_bare(contents: Contents, tail: Tail) -> bool:
    """Whether a journal, read without those before it, is a claim and no more; a power cut may leave it empty."""
    return tail.n == int(contents.claimed) and tail.clean and not tail.broken


def _is_done(place: Place, stem: str) -> bool:
    newest = locate_stem(place, stem)
    return newest is not None and newest.folder is place.done


def is_bare_claim(place: Place, spot: Spot, id: str) -> bool:
    """Whether somebody claimed the generation before, and has written nothing yet."""
    return spot.gen > 0 and _is_bare(*_alone(place, spot, id))


def _alone(place: Place, spot: Spot, id: str) -> tuple[Contents, Tail]:
    return _replayed(place, spot, Identity(id, spot.gen), _bytes_of(spot, id), Contents(id))


def stands_alone(place: Place, spot: Spot, id: str) -> Contents | None:
    """What a journal says without those before it; None if it needs them."""
    contents, _ = _alone(place, spot, id)
    if not contents.complete:
        return None
    contents.settle()
    return contents


def id_in(spot: Spot) -> str:
    """The id that a journal says it belongs to; if no line tells, or it is another one's, the one in its name."""
    try:
        data = spot.folder.read(spot.name)
    except UnopenableError:
        data = b""
    for text in data.split(b"\n"):
        try:
            id = identity_of(text).id
        except BrokenLineError:
            continue
        return id if stem_of(id) == spot.stem else id_of(spot.stem)
    earlier = journal_name(spot.stem, spot.gen - 1)
    if spot.gen > 0 and spot.folder.stat(earlier) is not None:  # a claim that a power cut left empty
        return id_in(Spot(spot.folder, spot.stem, spot.gen - 1, earlier))
    return id_of(spot.stem)


def read_summary(place: Place, spot: Spot) -> Summary | None:
    """From the ends of a journal, without its states; None where only a full reading can tell. Whose it is, its first
    lines tell each time: a file system gives the inode of a deleted one to the next of the same name."""
    try:
        start, end, size = _ends(spot)
    except UnopenableError:
        return None
    whole = size <= SMALL
    try:
        id, born, definition = _first(start, spot)
        identity = Identity(id, spot.gen)
        if whole and not all_fit(end.split(b"\n")[:-1]):
            return None
        found, at, clean = _last_save(end, identity, whole=whole)
    except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
        return None
    if "total" in found.fields:
        definition = attrs.evolve(definition, **{name: found.fields[name] for name in ABOUT if name in found.fields})
    where = (0 if whole else size - len(end)) + at
    return Summary(
        definition, born, head_from(found.fields["head"]), mail_from(found.fields), Tail(found.n, where, clean)
    )


def _ends(spot: Spot) -> tuple[bytes, bytes, int]:
    """The first bytes of a journal, its last, and its size; of a small one, both are all."""
    folder = spot.folder
    with folder.opened(spot.name) as fd:
        size = folder.settled_size(fd)
        if size <= SMALL:
            data = read_range(folder.disk, fd, 0, size)
            return data, data, len(data)
        first = read_range(folder.disk, fd, 0, START_SIZE)
        return first, read_range(folder.disk, fd, size - END_SIZE, size), size


def born_in(start: bytes, spot: Spot) -> str | None:
    """The birth mark of the execution that a journal belongs to; None if its first lines do not tell."""
    try:
        return _first(start, spot)[1]
    except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
        return None


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
