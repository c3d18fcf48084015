"""Deleting finished executions, with everything that belongs to them.

Place in the life of an execution: after its end. History and messages go first and for good, so that a crash can
leave no rows for a later execution of the same id; the journal goes after them, and its line in the index last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from longrun.errors import CorruptDataError, StoreUnavailableError
from longrun.stores._file.crew import Crew
from longrun.stores._file.disk import Folder
from longrun.stores._file.journal import Spot, locate, read_spot, remove_locked, remove_older
from longrun.stores._file.place import KIND, Place, done_inbox_name, done_name, journal_name
from longrun.stores._file.writes import Writes


@attrs.frozen
class _Ended:
    id: str
    spot: Spot


def delete(writes: Writes, ids: Sequence[str]) -> list[bool]:
    """Remove each finished execution; False for what is not finished or not there."""
    place = writes.place
    with place.locked():
        found: dict[str, _Ended] = {}
        answers: list[bool] = []
        for id in ids:
            ended = None if id in found else _ended(place, id)
            answers.append(ended is not None)
            if ended is not None:
                found[id] = ended
                writes.release(id)
        _remove_all(place, writes.crew, list(found.values()))
        for ended in found.values():
            writes.catalog.forget(ended.spot.stem)
        listed = [id for id in dict.fromkeys(ids) if id in found or locate(place, id) is None]
        writes.finished.remove([id for id in listed if writes.finished.lists(id)])
        writes.finished.tidy()
    return answers


def _ended(place: Place, id: str) -> _Ended | None:
    spot = locate(place, id)
    if spot is None:
        return None
    try:
        contents, _ = read_spot(place, id, spot)
        contents.settle()
    except CorruptDataError:
        return None
    return _Ended(id, spot) if contents.found()[0].state.finished else None


def _remove_all(place: Place, crew: Crew, ended: list[_Ended]) -> None:
    if not ended:
        return
    changed: set[Folder] = set()
    for one in ended:
        stem = one.spot.stem
        names = ((place.history, f"{stem}.jsonl"), (place.inbox, f"{stem}.jsonl"), (place.done, done_inbox_name(stem)))
        changed |= {folder for folder, name in names if folder.remove(name)}
    _sync(changed)
    live = [one for one in ended if one.spot.folder is place.live]
    alone = remove_older(place, crew, [(one.id, one.spot.gen) for one in live])
    for one in live:
        gen = one.spot.gen
        if (gen > 0 and one.id not in alone) or not remove_locked(place, one.spot.stem, gen):
            raise StoreUnavailableError(KIND, f"execution {one.id!r} is in use by another process")
    if live:
        place.live.sync()
    for one in ended:
        place.live.remove(journal_name(one.spot.stem, 0))
        place.done.remove(done_name(one.spot.stem))
    _sync({one.spot.folder for one in ended})


def _sync(folders: Iterable[Folder]) -> None:
    for folder in folders:
        folder.sync()
