"""Finished executions: their journals move to done/, lazily, and one index keeps a summary of each.

Place in the life of an execution: finish. Claims never look here; a listing reads what the index has grown by. A
summary is durable in the index before its journal moves, and a journal in live/ counts before one in the index, so a
crash in between shows every execution once. An index that is damaged or missing is made anew from the journals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import attrs

from longrun.errors import CorruptDataError
from longrun.logging import Log
from longrun.records import ExecutionState
from longrun.stored import Definition, Head, Query, Stored
from longrun.stores._file.contents import Contents, remains
from longrun.stores._file.disk import HeldFile, UnreadableFileError, close_all, read_range, write_all
from longrun.stores._file.entry import Entry, Mark, mark_of
from longrun.stores._file.forms import definition_form, definition_from, head_form, head_from
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, pack, unpack_any
from longrun.stores._file.place import FINISHED_INDEX, FINISHED_NOTE, Place, done_name, id_of, journal_name, stem_of
from longrun.stores._file.reading import (
    Spot,
    Summary,
    done_spot,
    ended,
    id_in,
    locate,
    read_done,
    read_spot,
    read_summary,
    with_next_step,
)
from longrun.stores._file.row import LISTED, Row, may_match, newest_first, only_rows, texts
from longrun.stores._file.skim import Skim
from longrun.stores.choice import matches

GONE_LIMIT = 1000
"""Lines of removed executions that the index may hold, beside as many others, before it is written anew."""

GOOD_LIMIT = 10_000
"""Journals of which is remembered that they were looked at and found whole."""

_HEADER = pack(Identity("", 0), 1, {"kind": "index"})
"""The first line of a complete index. One that was lost and begun anew by whoever moved a journal has none."""


class Finished:
    """The index of done/, read as far as it has grown. Safe from any thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._file = HeldFile(place.top, FINISHED_INDEX)
        self._rows: dict[str, Row] = {}
        self._order: list[Row] | None = []
        self._children: dict[str, dict[str, Row]] = {}
        """By their parent: whoever asks for those of one should not pay for all that ever ended."""
        self._ino = -1
        self._end = 0
        self._gone = 0
        self._broken = False
        self._compared = False
        """Whether the names in done/ were compared with it: a line may be lost, or of long ago, without a trace."""
        self._outdated = False
        """Whether the journals know better: no line counts of one that can be read."""
        self._going: set[str] = set()
        """Of these somebody began the deletion: they are there as long as their journals are."""
        self.returned = 0
        """Changes when one was found to have come back into live/, or may have."""
        self._names: dict[str, str] = {}
        self._good: dict[str, Mark] = {}
        self._skim = Skim(place, FINISHED_INDEX, FINISHED_NOTE, _HEADER)
        self._log = Log()

    def close(self) -> None:
        with self._lock:
            self._file.close()
        self._skim.close()

    # reading

    def find(self, query: Query, live: set[str]) -> Iterator[Stored]:
        """What matches and is not in live/, newest first."""
        self._mend()
        with self._lock:
            self._refresh()
            rows = self._ordered() if query.parent_id is None else self._children_of(query.parent_id)
            if not rows:
                return
            fd = self._place.disk.again(self._file.fd)  # the rows are of this one, whatever others put in its place
        after = query.after
        try:
            for row in rows:
                if (
                    row.id in live
                    or (after is not None and (row.created, row.id) >= after)
                    or not may_match(row, query)
                    or self._is_gone(row.id)
                ):
                    continue
                stored = self._stored(fd, row)
                if stored is not None and matches(stored.definition, stored.head, query):
                    yield stored
        finally:
            close_all(self._place.disk, (fd,))

    def count(self, query: Query, live: set[str]) -> dict[ExecutionState, int]:
        counts: dict[ExecutionState, int] = {}
        if only_rows(query):
            self._mend()
            with self._lock:
                self._refresh()
                rows = list(self._rows.values())
            for row in rows:
                if row.id not in live and may_match(row, query) and not self._is_gone(row.id):
                    counts[row.state] = counts.get(row.state, 0) + 1
            return counts
        for stored in self.find(attrs.evolve(query, after=None), live):
            counts[stored.head.state] = counts.get(stored.head.state, 0) + 1
        return counts

    def has_none(self, query: Query) -> bool:
        """Whether nothing here can match, told without taking in the index: whoever starts and looks for what was
        interrupted should not pay for all that ever ended."""
        if query.owner is not None or query.owned:
            return True  # what is owned stays in live/
        if query.states is not None and not query.states & LISTED:
            return True
        return self._skim.lacks(texts(query))

    def believe_notes(self) -> None:
        """Whoever runs executions starts at once, and has `prove` called when there is time for it."""
        self._skim.believes = True

    @property
    def is_proven(self) -> bool:
        return self._skim.is_proven

    def prove(self) -> None:
        """Compare with its checksum what a note told of the index, and make anew what does not fit."""
        if not self._skim.prove():
            self._mend()

    def checked(self, stored: Stored) -> Stored:
        """What the index says of one that is shown. If its journal cannot be read, its reason is what `load` raises."""
        id = stored.definition.id
        stem = stem_of(id)
        status = self._place.done.stat(done_name(stem))
        if status is None or self._good.get(id) == mark_of(status):
            return stored
        try:
            spot = done_spot(self._place, stem)
            if spot is None:
                return stored
            summary = read_summary(self._place, spot)
            if summary is None or not summary.head.state.finished:
                self.read(id, spot)
        except FileNotFoundError:
            return stored
        except CorruptDataError as error:
            return attrs.evolve(stored, head=attrs.evolve(stored.head, reason=str(error)))
        if summary is not None and not stored.head.state.finished:
            return self._readable_again(stored, summary, spot)
        if summary is not None and _moment(summary) != _moment(stored):
            return self._overtaken(stored, summary)
        if len(self._good) >= GOOD_LIMIT:
            self._good.clear()
        self._good[id] = mark_of(status)
        return stored

    def _readable_again(self, stored: Stored, summary: Summary, spot: Spot) -> Stored:
        """The index was made anew while the journal could not be opened."""
        if self._place.read_only:
            return Stored(definition=summary.definition, head=summary.head)
        with self._place.locked(shared=True):
            if spot.folder.stat(spot.name) is None:
                return stored
            self._append([_line(summary.definition, summary.born, spot.gen, summary.head)])
        return Stored(definition=summary.definition, head=summary.head)

    def _overtaken(self, stored: Stored, summary: Summary) -> Stored:
        """The journal is another one than the index said when the listing began. If that is behind it still, it is from
        before the journals, and whoever lists looks again."""
        if self._place.read_only:
            return Stored(definition=summary.definition, head=summary.head)
        with self._lock:
            self._refresh()
            row = self._rows.get(stored.definition.id)
            now = None if row is None else self._stored(self._file.fd, row)
            if now is not None and _moment(now) < _moment(summary):
                self._broken = self._outdated = True
                self.returned += 1
        return stored

    def read(self, id: str, spot: Spot) -> Contents:
        """A journal in done/. If it cannot be read, the error says at least how the execution ended (I8)."""
        try:
            return read_done(self._place, id, spot)
        except UnreadableFileError:
            raise
        except CorruptDataError as error:
            with self._lock:
                self._refresh()
                row = self._rows.get(id)
            if row is None or not row.state.finished:
                raise
            raise CorruptDataError(error.what, f"it is {row.state.value}, but {error.problem}") from error

    def lists(self, id: str) -> bool:
        """Whether the index names it."""
        return self.state_of(id) is not None

    def state_of(self, id: str) -> ExecutionState | None:
        """How it ended, as the index has it."""
        with self._lock:
            self._refresh()
            row = self._rows.get(id)
            return None if row is None else row.state

    def _is_gone(self, id: str) -> bool:
        """Whether a crash cut its deletion short when only its line was left. What is whole may be retried."""
        return id in self._going and locate(self._place, id) is None

    def _stored(self, fd: int, row: Row) -> Stored | None:
        try:
            identity, line = unpack_any(self._place.disk.pread(fd, row.size, row.start))
        except (BrokenLineError, ForeignLineError):
            return None  # it was damaged since
        return Stored(definition=_definition(identity.id, line.fields), head=head_from(line.fields["head"]))

    def _ordered(self) -> list[Row]:
        if self._order is None:
            self._order = newest_first(self._rows.values())
        return self._order

    def _children_of(self, parent: str) -> list[Row]:
        return newest_first(self._children.get(parent, {}).values())

    def _refresh(self) -> None:
        place, status = self._place, self._file.look()
        if status is None:
            self._start_over(-1, broken=self._any_journal())
            return
        if status.st_ino != self._ino or status.st_size < self._end:
            first = place.disk.pread(self._file.fd, len(_HEADER), 0)
            self._start_over(status.st_ino, broken=first != _HEADER)
            self._end = len(_HEADER) if first == _HEADER else 0
        if status.st_size > self._end:
            self._take_in(read_range(place.disk, self._file.fd, self._end))

    def _start_over(self, ino: int, *, broken: bool) -> None:
        self.returned += self._ino >= 0
        self._rows, self._order, self._children, self._end, self._gone = {}, None, {}, 0, 0
        self._going = set()
        self._ino, self._broken, self._compared, self._outdated = ino, broken, False, False
        self._good.clear()

    def _any_journal(self) -> bool:
        return any(name.endswith(".jsonl") for name in self._place.done.names())

    def _is_older(self) -> bool:
        """Whether a journal in done/ has no line, or a line no journal. What moves just now is in live/ until it has
        one, and what somebody deletes has one until it is gone: so the order counts."""
        place, known = self._place, {done_name(stem_of(id)): id for id in self._rows}
        names = {name for name in place.done.names() if name.endswith(".jsonl")}
        strange = [name.removesuffix(".jsonl") for name in names - known.keys()]
        strange = [stem for stem in strange if place.live.stat(journal_name(stem, 0)) is None]
        lost = {known[name] for name in known.keys() - names}
        lost = {id for id in lost if locate(place, id) is None}
        if strange or lost:
            self._refresh()
        for stem in strange:
            id = self._id_in(stem)
            if id is not None and id not in self._rows:
                return True
            lost.discard(id)  # a file whose name no id has is listed by the id that its name tells
        return any(id in self._rows and id not in self._going for id in lost)

    def _id_in(self, stem: str) -> str | None:
        try:
            spot = done_spot(self._place, stem)
            return None if spot is None else id_in(spot)
        except FileNotFoundError:
            return None

    def _mend(self) -> None:
        """Make a damaged, missing or outdated index anew."""
        with self._lock:
            self._refresh()
            if not self._broken and not self._compared:
                self._broken = self._outdated = self._is_older()
                self._compared = True
            broken = self._broken
        if broken:
            if self._place.read_only:
                problem = "it is damaged or missing, and a read-only file system lets nobody make it anew from done/"
                raise CorruptDataError(FINISHED_INDEX, f"{problem}: list a copy that can be written to")
            with self._place.locked(shared=True):  # nothing is deleted while its journal is read
                self.tidy()

    def _take_in(self, data: bytes) -> None:
        position = 0
        while (end := data.find(b"\n", position)) != -1:
            text = data[position:end]
            try:
                identity, line = unpack_any(text)
                self._take_line(identity.id, line.fields, self._end + position, len(text))
            except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
                self._place.keep_aside(FINISHED_INDEX, text)
                self._broken = True
            position = end + 1
        self._end += position
        self._order = None

    def _take_line(self, id: str, fields: dict[str, object], start: int, size: int) -> None:
        if fields["kind"] == "going":
            self._gone += 1
            self._going.add(id)
            return
        self._going.discard(id)
        known = self._rows.pop(id, None)
        if known is not None:
            self._gone += 1
            self._children.get(known.parent or "", {}).pop(id, None)
        if fields["kind"] == "gone":
            self._gone += 1
            self.returned += "back" in fields
            return
        definition, head = _definition(id, fields), head_from(fields["head"])  # type: ignore[arg-type]  # JSON of ours
        workflow = self._names.setdefault(definition.workflow, definition.workflow)
        queue = self._names.setdefault(definition.queue, definition.queue)
        parent = definition.parent_id
        row = Row(id, definition.created, head.state, head.ended, workflow, queue, parent, start, size)
        self._rows[id] = row
        if parent is not None:
            self._children.setdefault(parent, {})[id] = row

    # writing

    def begin(self) -> None:
        """Make the index before the first journal comes to done/: one that is begun after it counts as incomplete."""
        status = self._place.top.stat(FINISHED_INDEX)
        if status is None or status.st_size == 0:
            self._append([b""])

    def add(self, ended: Iterable[Entry]) -> None:
        self._append(
            [_line(definition, born, entry.gen, head) for entry in ended for born, definition, head in [entry.records]]
        )

    def remove_soon(self, ids: Iterable[str]) -> None:
        """Their journals are about to go. Whoever dies in the middle of that leaves lines of what is not there."""
        self._append([pack(Identity(id, 0), 1, {"kind": "going"}) for id in ids])

    def remove(self, ids: Iterable[str]) -> None:
        self._append([pack(Identity(id, 0), 1, {"kind": "gone"}) for id in ids])

    def give_back(self, id: str) -> None:
        """It is in live/ again."""
        self._append([pack(Identity(id, 0), 1, {"kind": "gone", "back": True})])

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        place = self._place
        fd = place.open_locked(place.top, FINISHED_INDEX)
        try:
            size = place.disk.fstat(fd).st_size
            if size == 0 and not self._any_journal():
                lines = [_HEADER, *lines]
            if size and place.disk.pread(fd, 1, size - 1) != b"\n":
                lines = [b"\n", *lines]
            write_all(place.disk, fd, b"".join(lines))
            place.disk.fdatasync(fd)
        finally:
            place.disk.close(fd)
        if size == 0:
            place.top.sync()

    def tidy(self) -> None:
        """Write the index anew where much of it is of no use any more, or where a line of it was damaged."""
        place = self._place
        with self._lock:
            self._refresh()
            if self._gone <= GONE_LIMIT + len(self._rows) and not self._broken:
                return
            fd = place.open_locked(place.top, FINISHED_INDEX)
            try:
                self._refresh()
                if torn := read_range(place.disk, fd, self._end):
                    place.keep_aside(FINISHED_INDEX, torn)
                stems = [name.removesuffix(".jsonl") for name in place.done.names() if name.endswith(".jsonl")]
                lines = self._good_lines(set(stems))
                known = {stem_of(id) for id in lines}
                for stem in stems:
                    if self._outdated or stem not in known:
                        lines.update(self._from_journal(stem, listed=stem in known))
                temporary, new = place.temporary(b"".join([_HEADER, *lines.values()]), sync=True)
                place.disk.close(new)
                place.replace(temporary, place.top, FINISHED_INDEX)
                place.top.sync()
            finally:
                place.disk.close(fd)
            self._refresh()

    def _good_lines(self, stems: set[str]) -> dict[str, bytes]:
        """Those of what is in done/: under the lock, nothing else has one but what was left by a crash, or long ago."""
        if not self._rows:
            return {}
        data = self._place.top.read(FINISHED_INDEX)
        rows = [row for row in self._rows.values() if stem_of(row.id) in stems]
        return {row.id: data[row.start : row.start + row.size] + b"\n" for row in rows}

    def _from_journal(self, stem: str, *, listed: bool) -> Iterator[tuple[str, bytes]]:
        """The line of one that has none, or an old one: that stays where the journal cannot be read (I8)."""
        spot = done_spot(self._place, stem)
        if spot is None:
            return
        contents = Contents(id_of(stem))
        try:
            contents = Contents(id_in(spot))
            found = read_summary(self._place, spot)
            if found is not None and found.head.state.finished:
                yield contents.id, _line(found.definition, found.born, spot.gen, found.head)
                return
            contents, _ = read_spot(self._place, contents.id, spot)
            contents.settle()
            head, definition = ended(contents)
        except FileNotFoundError:
            return
        except CorruptDataError as error:
            if listed:
                return
            definition, head = self._unreadable(spot, contents, error)
        yield contents.id, _line(definition, contents.born, spot.gen, head)

    def _unreadable(self, spot: Spot, contents: Contents, error: CorruptDataError) -> tuple[Definition, Head]:
        """The journal is damaged, and so was its line in the index: it is listed all the same."""
        error = with_next_step(self._place, spot, error)
        self._log.error("store.unreadable", execution=contents.id, file=f"done/{spot.name}", problem=str(error))
        status = spot.folder.stat(spot.name)
        return remains(contents, str(error), 0.0 if status is None else status.st_mtime)


def _line(definition: Definition, born: str, gen: int, head: Head) -> bytes:
    fields = {"kind": "finished", "born": born, "definition": definition_form(definition), "head": head_form(head)}
    return pack(Identity(definition.id, gen), 1, fields)


def _definition(id: str, fields: dict[str, object]) -> Definition:
    return definition_from(id, fields["definition"])  # type: ignore[arg-type]  # JSON of ours, checked by its checksum


def _moment(one: Stored | Summary) -> tuple[float, int, int]:
    """What grows with a retry of an execution, and where its id is used anew."""
    return one.definition.created, one.head.fence, one.head.revision
