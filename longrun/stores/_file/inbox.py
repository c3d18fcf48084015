"""Messages: appended by anybody under a lock on the file, taken by the owner in its journal.

Place in the life of an execution: signals and control requests. A message that was taken stays in the file until it
is compacted; the journal says which ones those are. Keys outlive their messages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from zlib import crc32

import attrs

from longrun.errors import SignalQueueFullError
from longrun.stored import Message, Send
from longrun.stores._file.contents import Mail
from longrun.stores._file.disk import Folder, UnopenableError, UnreadableFileError, read_range, write_all
from longrun.stores._file.entry import mark_of
from longrun.stores._file.forms import message_form, message_from
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, Line, fits, pack, unpack
from longrun.stores._file.place import Place, done_inbox_name, unavailable
from longrun.stores._file.tallies import NOTHING, Known, Tally
from longrun.stores.base import KEYS_REMEMBERED

COMPACT_OVER = 1 << 15


@attrs.frozen
class Box:
    """The inbox of one execution: where it is, and the birth mark that tells it from an earlier one of the same id."""

    folder: Folder
    name: str
    id: str
    born: str

    @property
    def place(self) -> tuple[Folder, str]:
        """What its tally is kept under."""
        return self.folder, self.name


@attrs.define
class Letters(Tally):
    """What an inbox holds, taken or not."""

    messages: dict[int, Message] = attrs.field(factory=dict)
    damage: list[str] = attrs.field(factory=list)
    """What of it cannot be read, and where its bytes are kept."""

    def add(self, message: Message) -> None:
        super().add(message)
        self.messages[message.id] = message

    def waiting(self, mail: Mail) -> list[Message]:
        return [message for message in self.messages.values() if mail.waits(message.id)]


def box_of(place: Place, stem: str, id: str, born: str, *, done: bool = False) -> Box:
    return Box(place.done, done_inbox_name(stem), id, born) if done else Box(place.inbox, f"{stem}.jsonl", id, born)


def read_letters(place: Place, box: Box) -> Letters:
    try:
        data = box.folder.read(box.name)
    except FileNotFoundError:
        return Letters()
    except UnopenableError as error:
        raise UnreadableFileError(box.id, error) from error
    return parse_letters(place, box, data)


def read_box(place: Place, stem: str, id: str, *, done: bool) -> tuple[Box, bytes]:
    """An inbox before it is known whose birth mark counts. It moves a moment before its journal does, in both
    directions, so it may be in the other place already; or have come back since."""
    here, there = box_of(place, stem, id, "", done=done), box_of(place, stem, id, "", done=not done)
    for box in (here, there, here):
        try:
            return box, box.folder.read(box.name)
        except FileNotFoundError:
            continue
        except UnopenableError as error:
            raise UnreadableFileError(id, error) from error
    return here, b""


def sure_box(place: Place, box: Box, stem: str, *, done: bool) -> Box:
    """Under the place's lock: where to write for an execution that has no inbox beside its journal. A move that was cut
    short has left it in the other place: from done/ it comes back, and in inbox/ it is as good as in done/."""
    there = box_of(place, stem, box.id, box.born, done=not done)
    if box.folder.stat(box.name) is not None or there.folder.stat(there.name) is None:
        return box
    if done:
        return there
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # somebody else does the same
        place.disk.link(there.name, box.name, there.folder.fd, box.folder.fd)
    box.folder.sync()
    there.folder.remove(there.name)
    return box


def parse_letters(place: Place, box: Box, data: bytes) -> Letters:
    """Damaged lines go to quarantine; a torn end is left out."""
    letters = Letters()
    letters.damage = _add_lines(place, box, data, letters) + _add_rest(place, box, data, letters)
    return letters


def _add_lines(place: Place, box: Box, data: bytes, into: Tally) -> list[str]:
    """Take in the whole lines behind those that are known; what of them is damaged."""
    start, into.end, into.size = into.end, data.rfind(b"\n") + 1, len(data)
    return _add_all(place, box, data[start : into.end].split(b"\n")[:-1], into)


def _add_rest(place: Place, box: Box, data: bytes, into: Tally) -> list[str]:
    """Take in what stands behind the last newline, if that is all it lacks."""
    into.size, rest = len(data), data[into.end :]
    return _add_all(place, box, [rest], into) if fits(rest) else []


def _add_all(place: Place, box: Box, lines: list[bytes], into: Tally) -> list[str]:
    identity, damage = Identity(box.id, 0), []
    for text in lines:
        try:
            _add(into, unpack(text, identity), box.born)
        except (BrokenLineError, ForeignLineError, KeyError, TypeError, ValueError):
            where = place.keep_aside(f"{box.name}.inbox", text)
            damage.append(f"a message is damaged, its bytes are {where}")
    return damage


def _add(into: Tally, line: Line, born: str) -> None:
    fields = line.fields
    if fields["born"] != born:
        return  # of an execution that had this id before
    if fields["kind"] == "keys":
        into.keys.update(fields["keys"])
        into.last = max(into.last, line.n)
    elif line.n > into.last:
        into.add(message_from(fields["message"], line.n, line.payloads[0] if line.payloads else None))


# without the messages


def read_tally(place: Place, box: Box, status: os.stat_result) -> Tally:
    """What an inbox holds, of which this is the status: not read at all where it is known. Not to be changed."""
    known = place.tallies.get(box.place, box.born)
    if known.mark == mark_of(status):
        return known.tally
    try:
        data = box.folder.read(box.name)
    except FileNotFoundError:
        return Tally()
    except UnopenableError as error:
        raise UnreadableFileError(box.id, error) from error
    return _tally(place, box, data, _learnt(place, box, data))


def _learnt(place: Place, box: Box, data: bytes) -> Known:
    """What is known of the whole lines of an inbox that holds this. Only those are parsed that are new."""
    known = place.tallies.get(box.place, box.born)
    if not known.begins(data):
        known = NOTHING
    tally = known.tally.copy()
    _add_lines(place, box, data, tally)
    crc = crc32(memoryview(data)[known.tally.end : tally.end], known.crc)
    known = Known(box.born, tally.copy(), crc)
    place.tallies.put(box.place, known)
    return known


def _tally(place: Place, box: Box, data: bytes, known: Known) -> Tally:
    tally = known.tally.copy()
    _add_rest(place, box, data, tally)
    return tally


# sending


def send(place: Place, box: Box, sends: Sequence[Send], mail: Mail) -> list[int | SignalQueueFullError]:
    """Append messages, durably but for the directory entry of a new file, and answer each."""
    try:
        if box.name in box.folder.torn:
            _write_anew(place, box)
        fd = place.open_locked(box.folder, box.name)
        try:
            return _send_locked(place, box, fd, sends, mail)
        finally:
            place.disk.close(fd)
    except UnopenableError as error:
        raise UnreadableFileError(box.id, error) from error
    except OSError as error:
        raise unavailable(error, "an inbox cannot be written") from error


def _send_locked(
    place: Place, box: Box, fd: int, sends: Sequence[Send], mail: Mail
) -> list[int | SignalQueueFullError]:
    known = place.tallies.get(box.place, box.born)
    if known.mark == mark_of(place.disk.fstat(fd)):
        data, tally = b"", known.tally.copy()
    else:
        data = read_range(place.disk, fd, 0)
        known = _learnt(place, box, data)
        tally = _tally(place, box, data, known)
    tally.last = max(tally.last, mail.upto, *mail.more)  # the line of one that was taken may be damaged since
    answers: list[int | SignalQueueFullError] = []
    lines: list[bytes] = []
    waiting = tally.count(mail)
    repeated = False
    for one in sends:
        message = one.message
        if message.key is not None and message.key in tally.keys:
            repeated = True
            answers.append(tally.keys[message.key])
        elif waiting >= one.limit:
            answers.append(SignalQueueFullError(one.id, one.limit))
        else:
            message = attrs.evolve(message, id=tally.last + 1)
            tally.add(message)
            waiting += 1
            lines.append(_message_line(box, message))
            answers.append(message.id)
    if lines and tally.clean:
        added = b"".join(lines)
        _append(place, box, fd, tally.end, added)
        tally.end = tally.size = tally.end + len(added)
        mark = mark_of(place.disk.fstat(fd))
        place.tallies.put(box.place, Known(box.born, tally, crc32(added, known.crc), mark))
    elif lines:
        _append(place, box, fd, _close_end(place, fd, data, tally.end), b"".join(lines))
    if repeated:
        _make_sure(place, box, fd)
    return answers


def _close_end(place: Place, fd: int, data: bytes, end: int) -> int:
    """Cut off a write that a crash left half done; one that only lacks its newline gets it."""
    if fits(data[end:]):
        write_all(place.disk, fd, b"\n")
        return len(data) + 1
    place.disk.truncate(fd, end)
    return end


def _append(place: Place, box: Box, fd: int, size: int, data: bytes) -> None:
    folder, ino = box.folder, place.disk.fstat(fd).st_ino
    folder.unsettled[ino] = size
    try:
        write_all(place.disk, fd, data)
        place.disk.fdatasync(fd)
    except OSError:
        folder.torn.add(box.name)
        place.disk.truncate(fd, size)  # what was not acknowledged leaves no trace; a later append writes its page anew
        folder.torn.discard(box.name)
        raise
    finally:
        del folder.unsettled[ino]


def _make_sure(place: Place, box: Box, fd: int) -> None:
    """Whoever had sent a message may have died, or failed, before it was durable."""
    box.folder.torn.add(box.name)
    place.disk.fdatasync(fd)
    box.folder.sync()
    box.folder.torn.discard(box.name)


def _write_anew(place: Place, box: Box) -> None:
    """A write has failed and could not be taken back: what stands in the file may be there in memory alone, and no sync
    would tell. It goes into a new file before anything is acknowledged because of it."""
    fd = place.open_locked(box.folder, box.name)
    try:
        data = read_range(place.disk, fd, 0)
        end = data.rfind(b"\n") + 1
        _replace(place, box, data + b"\n" if fits(data[end:]) else data[:end])
        box.folder.torn.discard(box.name)
    finally:
        place.disk.close(fd)


def _replace(place: Place, box: Box, data: bytes) -> None:
    """Under the lock: put this in the place of what the inbox holds."""
    temporary, new = place.temporary(data, sync=True)
    place.disk.close(new)
    place.replace(temporary, box.folder, box.name)
    box.folder.torn.add(box.name)  # until the new file has the name for good, nothing in it may be acknowledged
    box.folder.sync()
    box.folder.torn.discard(box.name)


def _message_line(box: Box, message: Message) -> bytes:
    fields = {"kind": "message", "born": box.born, "message": message_form(message)}
    return pack(Identity(box.id, 0), message.id, fields, () if message.payload is None else [message.payload])


def compact(place: Place, box: Box, mail: Mail) -> None:
    """Leave only what waits, and the keys. `mail` must be durable: what it names is gone after this."""
    status = box.folder.stat(box.name)
    if status is None or status.st_size < COMPACT_OVER:
        return
    fd = place.open_locked(box.folder, box.name)
    try:
        data = read_range(place.disk, fd, 0)
        tally = _tally(place, box, data, _learnt(place, box, data))
        if 2 * tally.count(mail) > len(tally.numbers):
            return
        letters = parse_letters(place, box, data)
        waiting = letters.waiting(mail)
        keys = dict(list(letters.keys.items())[-(KEYS_REMEMBERED + len(waiting)) :])
        first = waiting[0].id - 1 if waiting else letters.last
        lines = [pack(Identity(box.id, 0), first, {"kind": "keys", "born": box.born, "keys": keys})]
        lines += [_message_line(box, message) for message in waiting]
        if waiting and waiting[-1].id != letters.last:
            lines.append(pack(Identity(box.id, 0), letters.last, {"kind": "keys", "born": box.born, "keys": {}}))
        _replace(place, box, b"".join(lines))
    finally:
        place.disk.close(fd)
