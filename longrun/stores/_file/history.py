"""Rows of old checkpoints, moved out of journals that grew, so that those stay as long as what they keep.

Place in the life of an execution: checkpoint; looked at by whoever asks for its past.
"""

from __future__ import annotations

from longrun.stores._file.contents import Contents
from longrun.stores._file.disk import UnopenableError, UnreadableFileError, write_all
from longrun.stores._file.lines import BrokenLineError, ForeignLineError, Identity, pack, unpack
from longrun.stores._file.place import Place


def move_history(place: Place, stem: str, contents: Contents) -> None:
    """Append the old rows to the history, durably, and take them out of `contents`."""
    rows = contents.old_rows()
    if not rows:
        return
    identity = Identity(contents.id, 0)
    lines = [pack(identity, row["seq"], {"kind": "row", "born": contents.born, "row": row}) for row in rows]
    name = f"{stem}.jsonl"
    fd, new = place.history.open_or_create(name)
    if new:
        place.history.torn.add(name)  # until its name is durable too
    try:
        size = place.disk.fstat(fd).st_size
        torn = size > 0 and place.disk.pread(fd, 1, size - 1) != b"\n"
        write_all(place.disk, fd, b"".join([b"\n" if torn else b"", *lines]))
        place.disk.fdatasync(fd)
    finally:
        place.disk.close(fd)
    if name in place.history.torn:
        place.history.sync()
        place.history.torn.discard(name)
    contents.drop_old_rows()


def read_history(place: Place, stem: str, id: str, born: str) -> dict[int, dict[str, object]]:
    """Rows by number; a crash may have written some twice, and torn the last."""
    try:
        data = place.history.read(f"{stem}.jsonl")
    except FileNotFoundError:
        return {}
    except UnopenableError as error:
        raise UnreadableFileError(id, error) from error
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
