"""Executions in a directory of files, the default store: readable with `cat` and `jq`, for a local file system.

Place in the life of an execution: claim, checkpoint, finish. Each execution has one append-only journal of JSON lines,
and a checkpoint is one append and one fdatasync whatever came before. `_file/place.py` shows the directory,
`_file/journal.py` says how two processes are kept apart, `_file/contents.py` what a journal's lines mean.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import CorruptDataError, StoreSettingsError, StoreUnavailableError
from longrun.moves import End, Move
from longrun.records import ExecutionState
from longrun.seal import Seal
from longrun.stored import (
    Boundary,
    Claim,
    Create,
    Head,
    Loaded,
    Message,
    Owner,
    Query,
    Save,
    Send,
    Stored,
    Write,
)
from longrun.stores._file import owners
from longrun.stores._file.catalog import Catalog
from longrun.stores._file.claims import Claims
from longrun.stores._file.contents import Contents
from longrun.stores._file.disk import Disk, UnreadableFileError
from longrun.stores._file.done import Finished
from longrun.stores._file.forms import boundary_from
from longrun.stores._file.history import read_history
from longrun.stores._file.inbox import box_of, parse_letters, read_box
from longrun.stores._file.place import FORMAT, KIND, Place, done_inbox_name, unavailable
from longrun.stores._file.queue import QueueDisk
from longrun.stores._file.reading import Spot, read_settled
from longrun.stores._file.removal import delete
from longrun.stores._file.writes import Writes
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.choice import matches
from longrun.stores.store import CheckpointStore

T = TypeVar("T")
W = TypeVar("W", Create, Save, Send)
_SAVES = frozenset({Save, Move, End})

TRIES = 50
"""How often a reader starts over because a file moved under its hands."""


class FileBackend(StoreBackend):
    kind = KIND

    def __init__(
        self, directory: str | os.PathLike[str], *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        try:
            self._path = os.path.abspath(os.fspath(directory))
        except FileNotFoundError as error:
            raise StoreSettingsError(KIND, "the working directory is gone; give an absolute path") from error
        self._clock = clock
        self._disk = disk or QueueDisk()
        self._parts: _Parts | None = None
        self._woken = threading.Event()
        self._seen: int | None = None

    def __repr__(self) -> str:
        return f"<FileBackend {self._path!r}>"

    # life

    def open(self) -> None:
        self._woken.clear()
        if not self.creates and not os.path.lexists(self._path):
            raise StoreUnavailableError(KIND, f"there is none at {self._path!r}")
        place = Place(self._path, self._disk)
        self._parts = _Parts(place, self._clock)
        try:
            with _Guarded("the directory cannot be read"):
                place.sweep()
                self._seen = place.bell_of_others()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.writes.close()
            parts.finished.close()
            parts.place.close()

    @property
    def _open(self) -> _Parts:
        if self._parts is None:
            raise StoreUnavailableError(KIND, "it is not open")
        return self._parts

    @property
    def _writable(self) -> _Parts:
        parts = self._open
        parts.place.check_writable()
        return parts

    def ping(self) -> None:
        self._open.place.ping()

    def describe(self) -> Mapping[str, object]:
        facts: dict[str, object] = {**super().describe(), "directory": self._path, "format": FORMAT}
        if self._parts is not None:
            with _Guarded("the directory cannot be read"):
                space = self._disk.space(self._parts.place.top.fd)
                facts["quarantined"] = len(self._parts.place.quarantine.names())
            facts |= {"free_bytes": space.f_bavail * space.f_frsize, "fsync": "fdatasync for every acknowledged write"}
            facts["read_only"] = self._parts.place.read_only
        return facts

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        writes = self._writable.writes
        answers: list[Answer] = [None] * len(batch)
        try:
            if _SAVES.issuperset(map(type, batch)):
                _commit_kind(writes.save, list(enumerate(batch)), answers)
            else:
                for creates, saves, sends in _in_order(batch):
                    _commit_kind(writes.create, creates, answers)
                    _commit_kind(writes.save, saves, answers)
                    _commit_kind(writes.send, sends, answers)
            writes.janitor.tidy_soon()
        finally:
            writes.journals.ring()
        return answers

    def claim(self, claim: Claim) -> list[Loaded]:
        parts = self._writable
        with _Guarded("a claim failed"):
            try:
                return parts.claims.claim(claim)
            finally:
                parts.writes.journals.ring()

    def register(self, owner: Owner, ttl: float) -> None:
        parts = self._writable
        with _Guarded("an owner cannot be registered"):
            owners.register(parts.place, self._clock, owner, ttl)
        parts.finished.believe_notes()  # the first renewal has them proven

    def renew(self, owner: str, ttl: float) -> bool:
        parts = self._writable
        parts.writes.janitor.tidy_soon(now=True)
        with _Guarded("a lease cannot be renewed"):
            return owners.renew(parts.place, self._clock, owner, ttl)

    def unregister(self, owner: str) -> None:
        with _Guarded("an owner cannot be removed"):
            owners.unregister(self._writable.place, owner)

    def delete(self, ids: Sequence[str]) -> list[bool]:
        writes = self._writable.writes
        with _Guarded("a deletion failed"):
            try:
                return delete(writes, ids)
            finally:
                writes.journals.ring()

    # readers

    def load(self, id: str) -> Loaded | None:
        return self._read(id, _loaded)

    def head(self, id: str) -> Head | None:
        with _Guarded("a journal cannot be read"):
            known = self._open.catalog.head(id)
        return known or self._read(id, _head)

    def find(self, query: Query) -> list[Stored]:
        return self._listed(self._page, query)

    def _page(self, query: Query) -> list[Stored]:
        finished = self._open.finished
        rows, live = self._live(query)
        if query.after is not None:
            rows = [row for row in rows if _position(row) < query.after]
        rows.sort(key=_position, reverse=True)
        rows = rows[: query.limit]
        if live is None:
            return rows
        for stored in finished.find(query, live):
            rows.append(stored)
            if len(rows) >= 2 * query.limit:
                break
        rows.sort(key=_position, reverse=True)
        page = rows[: query.limit]
        return [row if row.definition.id in live else finished.checked(row) for row in page]

    def count(self, query: Query) -> dict[ExecutionState, int]:
        return self._listed(self._counts, query)

    def _counts(self, query: Query) -> dict[ExecutionState, int]:
        rows, live = self._live(query)
        counts = {} if live is None else self._open.finished.count(query, live)
        for row in rows:
            counts[row.head.state] = counts.get(row.head.state, 0) + 1
        return counts

    def _listed(self, look: Callable[[Query], T], query: Query) -> T:
        """What live/ and then the index show. What comes back for a retry in between is in neither: look again."""
        finished = self._open.finished
        with _Guarded("a listing failed"):
            for _ in range(TRIES):
                returned = finished.returned
                found = look(query)
                if finished.returned == returned:
                    return found
        raise StoreUnavailableError(KIND, "executions keep moving")

    def _live(self, query: Query) -> tuple[list[Stored], set[str] | None]:
        """What matches in live/, and every id there; None for these if nothing in done/ can match."""
        catalog, finished = self._open.catalog, self._open.finished
        with catalog.lock:
            catalog.look_for(query)
            found = [entry.shown for entry in catalog.entries.candidates(query) if entry.may_be(query.states)]
            rows = [Stored(definition=one, head=head) for one, head in found if matches(one, head, query)]
            ids = None if finished.has_none(query) else {entry.id for entry in catalog.entries.by_stem.values()}
            return rows, ids

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        def rows(place: Place, spot: Spot, contents: Contents, _: Callable[[], list[Message]]) -> list[Boundary]:
            found = {**read_history(place, spot.stem, id, contents.born), **contents.rows}
            numbers = [seq for seq in sorted(found) if seq > after][:limit]
            return [boundary_from(found[seq], blobs=seq in contents.states) for seq in numbers]

        return self._read(id, rows) or []

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        def one(
            place: Place, spot: Spot, contents: Contents, _: Callable[[], list[Message]]
        ) -> tuple[Boundary, Mapping[str, bytes]] | None:
            if contents.readable(seq):
                boundary = contents.boundary(seq)
                return boundary, {name: contents.blobs[name] for name in boundary.blobs}
            if seq in contents.states or seq in contents.lost:
                raise CorruptDataError(f"checkpoint {seq} of execution {id!r}", "its state is not readable")
            return None

        return self._read(id, one)

    def messages(self, id: str) -> list[Message]:
        def waiting(
            place: Place, spot: Spot, contents: Contents, letters: Callable[[], list[Message]]
        ) -> list[Message]:
            return [message for message in letters() if contents.mail.waits(message.id)]

        return self._read(id, waiting) or []

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        parts = self._open
        found: dict[str, ExecutionState] = {}
        with _Guarded("a listing failed"):
            for id in ids:
                spot = self._locate(id)
                if spot is None:
                    continue
                if spot.folder is parts.place.live:
                    entry = parts.catalog.find(id, spot.gen)
                    state = None if entry is None else entry.state
                else:
                    state = parts.finished.state_of(id)
                found |= super().states_of([id]) if state is None else {id: state}
        return found

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        def numbers(
            place: Place, spot: Spot, contents: Contents, _: Callable[[], list[Message]]
        ) -> tuple[int, Mapping[str, int]]:
            box, data = read_box(place, spot.stem, id, done=spot.folder is place.done)
            found = parse_letters(place, attrs.evolve(box, born=contents.born), data)
            return found.last, found.keys

        return self._read(id, numbers) or (0, {})

    def pending(self, owner: str) -> list[str]:
        catalog = self._open.catalog
        with _Guarded("a listing failed"), catalog.lock:
            catalog.listen()
            return catalog.entries.pending(owner)

    def owners(self) -> list[Owner]:
        with _Guarded("owners cannot be read"):
            return owners.read_owners(self._open.place, self._clock)

    def next_due(self) -> float | None:
        catalog = self._open.catalog
        with _Guarded("a listing failed"), catalog.lock:
            catalog.listen()
            return catalog.entries.next_due()

    def size(self, id: str) -> int:
        place = self._open.place
        with _Guarded("a size cannot be read"):
            spot = self._locate(id)
            if spot is None:
                return 0
            inbox = done_inbox_name(spot.stem) if spot.folder is place.done else f"{spot.stem}.jsonl"
            inbox_folder = place.done if spot.folder is place.done else place.inbox
            files = (
                spot.folder.stat(spot.name),
                place.history.stat(f"{spot.stem}.jsonl"),
                inbox_folder.stat(inbox),
            )
            return sum(status.st_size for status in files if status is not None)

    def _read(self, id: str, use: Callable[[Place, Spot, Contents, Callable[[], list[Message]]], T]) -> T | None:
        """Read one execution and hand it to `use`; start over if it moved meanwhile. None if there is none."""
        parts = self._open
        with _Guarded("a journal cannot be read"):
            for _ in range(TRIES):
                spot = self._locate(id)
                if spot is None:
                    return None
                try:
                    return _read_once(parts, id, spot, use)
                except FileNotFoundError:
                    continue
        raise StoreUnavailableError(KIND, f"the journal of execution {id!r} keeps moving")

    def _locate(self, id: str) -> Spot | None:
        """Where an execution's newest journal is. That there is none is only said under the lock: without it, one that
        goes to and fro may be elsewhere whenever we look."""
        parts = self._open
        spot = parts.catalog.locate(id)
        if spot is None and not parts.place.read_only:
            with parts.place.locked(shared=True):
                spot = parts.catalog.locate(id)
        return spot

    # the watcher

    def wait(self, timeout: float) -> bool:
        place = self._open.place
        deadline = time.monotonic() + timeout
        while True:
            with _Guarded("the bell cannot be read"):
                bell = place.bell_of_others()
            left = deadline - time.monotonic()
            if bell != self._seen:
                self._seen = bell
                return True
            if left <= 0:
                return False
            if self._woken.wait(min(left, self.poll_interval)):
                self._woken.clear()
                return True

    def wake(self) -> None:
        self._woken.set()


class FileCheckpointStore(CheckpointStore):
    """Executions in a directory, created where it is missing; the processes of one machine can share it."""

    def __init__(
        self,
        directory: str | os.PathLike[str] = ".longrun",
        *,
        seal: Seal | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(FileBackend(directory, clock=clock), seal=seal)


class _Parts:
    """What an open backend is made of."""

    def __init__(self, place: Place, clock: Clock) -> None:
        self.place = place
        self.catalog = Catalog(place)
        self.finished = Finished(place)
        self.writes = Writes(place, self.catalog, self.finished)
        self.claims = Claims(self.writes.journals, self.writes.pool, clock)


class _Guarded:
    """No error of the operating system leaves the store as it is."""

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise unavailable(error, self._doing) from error


def _in_order(batch: Sequence[Write]) -> Iterator[Iterable[list[tuple[int, Any]]]]:
    """Creates, saves and sends, which are done one kind after the other. A batch is cut where a write follows one of
    another kind on the same execution."""
    kinds: dict[str, type] = {}
    part: dict[type, list[tuple[int, Any]]] = {Create: [], Save: [], Send: []}
    for n, write in enumerate(batch):
        kind = Save if isinstance(write, Save) else type(write)
        if kinds.setdefault(write.id, kind) is not kind:
            yield part.values()
            kinds, part = {write.id: kind}, {Create: [], Save: [], Send: []}
        part[kind].append((n, write))
    yield part.values()


def _commit_kind(
    commit: Callable[[Sequence[tuple[int, W]], list[Answer]], None],
    writes: Sequence[tuple[int, Any]],
    answers: list[Answer],
) -> None:
    """What fails for all of one kind refuses these: the others of the batch are stored, and are answered so."""
    if not writes:
        return
    try:
        commit(writes, answers)
    except (OSError, StoreUnavailableError) as error:
        told = unavailable(error, "a write failed") if isinstance(error, OSError) else error
        for n, _ in writes:
            answers[n] = told


def _position(stored: Stored) -> tuple[float, str]:
    return stored.definition.created, stored.definition.id


def _read_once(
    parts: _Parts, id: str, spot: Spot, use: Callable[[Place, Spot, Contents, Callable[[], list[Message]]], T]
) -> T:
    """The inbox comes before the journal: a message that is taken in between is then seen as taken."""
    place, over = parts.place, spot.folder is parts.place.done
    try:
        box, data = read_box(place, spot.stem, id, done=over)
        closed = None
    except UnreadableFileError as error:
        if not over:
            raise
        box, data, closed = box_of(place, spot.stem, id, "", done=True), b"", error
    contents = parts.finished.read(id, spot) if over else read_settled(place, id, spot)[0]
    if closed is not None:  # what has ended needs no messages
        contents.damage.append(closed.problem)

    def letters() -> list[Message]:
        found = parse_letters(place, attrs.evolve(box, born=contents.born), data)
        contents.damage += found.damage
        return list(found.messages.values())

    return use(place, spot, contents, letters)


def _loaded(place: Place, spot: Spot, contents: Contents, letters: Callable[[], list[Message]]) -> Loaded:
    return contents.loaded(letters())


def _head(place: Place, spot: Spot, contents: Contents, letters: Callable[[], list[Message]]) -> Head:
    return contents.loaded(letters()).head
