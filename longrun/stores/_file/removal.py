"""Deleting finished executions, and what cannot be read at all, with everything that belongs to them.

Place in the life of an execution: after its end. History and messages go first and for good, so that a crash can
leave no rows for a later execution of the same id; the journal goes after them, and its line in the index last, which
has been told before. Of what cannot be read the bytes stay in quarantine (I5).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import attrs

from longrun.errors import CorruptDataError, StoreUnavailableError
from longrun.stores._file.disk import Folder, UnreadableFileError
from longrun.stores._file.journal import Over, remove_locked, remove_older
from longrun.stores._file.place import KIND, Place, done_inbox_name, done_name, journal_name, parse_journal_name
from longrun.stores._file.reading import Spot, is_bare_claim, locate, read_done, read_spot
from longrun.stores._file.writes import Writes

TRIES = 100


@attrs.frozen
class _Ended:
    id: str
    spot: Spot


def delete(writes: Writes, ids: Sequence[str]) -> list[bool]:
    """Remove each finished or unreadable execution; False for what is neither or not there."""
    place = writes.place
    with place.locked():
        found: dict[str, _Ended] = {}
        answers: list[bool] = []
        for id in ids:
            ended = None if id in found else _ended(writes, id)
            answers.append(ended is not None)
            if ended is not None:
                found[id] = ended
                writes.journals.release(id)
        writes.finished.remove_soon([id for id in found if writes.finished.lists(id)])
        _remove_all(place, list(found.values()))
        for ended in found.values():
            writes.catalog.forget(ended.spot.stem)
            if ended.spot.folder is place.live:
                writes.journals.changed(ended.spot.name)
        listed = [id for id in dict.fromkeys(ids) if id in found or locate(place, id) is None]
        writes.finished.remove([id for id in listed if writes.finished.lists(id)])
        writes.finished.tidy()
    return answers


def _ended(writes: Writes, id: str) -> _Ended | None:
    place, spot = writes.place, writes.catalog.locate(id)
    if spot is None:
        return None
    try:
        if spot.folder is place.done:
            read_done(place, id, spot)
            return _Ended(id, spot)
        contents, _ = read_spot(place, id, spot)
        contents.settle()
    except UnreadableFileError:
        return None  # its bytes cannot be kept, and may be whole
    except CorruptDataError:
        _set_aside(place, spot)
        return _Ended(id, spot)
    return _Ended(id, _unclaimed(place, id, spot)) if contents.found()[0].state.finished else None


def _unclaimed(place: Place, id: str, spot: Spot) -> Spot:
    """The journal that holds the end. Claims of it whose takers died before they wrote anything go first: behind it,
    they would look like those of an execution whose journal was lost."""
    while is_bare_claim(place, spot, id) and remove_locked(place, spot.stem, spot.gen):
        place.live.sync()
        spot = Spot(place.live, spot.stem, spot.gen - 1, journal_name(spot.stem, spot.gen - 1))
    return spot


def _set_aside(place: Place, spot: Spot) -> None:
    """Every byte of a journal that goes, and of those before it."""
    place.set_aside(spot.name, spot.folder.read(spot.name))
    for name in place.live.names() if spot.folder is place.live else ():
        parsed = parse_journal_name(name)
        if parsed is not None and parsed[0] == spot.stem and parsed[1] < spot.gen:
            place.set_aside(name, place.live.read(name))


def _remove_all(place: Place, ended: list[_Ended]) -> None:
    if not ended:
        return
    changed: set[Folder] = set()
    for one in ended:
        stem = one.spot.stem
        names = ((place.history, f"{stem}.jsonl"), (place.inbox, f"{stem}.jsonl"), (place.done, done_inbox_name(stem)))
        changed |= {folder for folder, name in names if folder.remove(name)}
    _sync(changed)
    live = [one for one in ended if one.spot.folder is place.live]
    _remove_journals(place, live)
    if live:
        place.live.sync()
    for one in ended:
        place.live.remove(journal_name(one.spot.stem, 0))
        place.done.remove(done_name(one.spot.stem))
    _sync({one.spot.folder for one in ended})


def _remove_journals(place: Place, ended: list[_Ended]) -> None:
    """Oldest generations first, so that a stale owner never finds itself to be the newest."""
    left = ended
    for _ in range(TRIES):
        alone = remove_older(place, [over for one in left if (over := _over(place, one)) is not None])
        alone |= {one.id for one in left if one.spot.gen == 0}
        left = [one for one in left if one.id not in alone or not remove_locked(place, one.spot.stem, one.spot.gen)]
        if not left:
            return
        time.sleep(0.01)  # another process tidies there just now
    raise StoreUnavailableError(KIND, f"execution {left[0].id!r} is in use by another process")


def _over(place: Place, ended: _Ended) -> Over | None:
    status = place.live.stat(ended.spot.name)
    return None if status is None else Over(ended.id, ended.spot.gen, status.st_ino)


def _sync(folders: Iterable[Folder]) -> None:
    for folder in folders:
        folder.sync()
