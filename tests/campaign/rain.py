"""Random flips, truncations and blanked ranges in the files of a store: told, or harmless, and never misread (I5).

A flip that nothing tells of must leave everything as it was. A truncation may also leave what was stored before, since
that is what a torn append looks like. Most of the damage is looked at by a reader that is open already, and only where
it was done; the rest by a process that begins anew and looks at everything.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from longrun.errors import LongrunError
from longrun.records import ExecutionState
from longrun.stored import Loaded, Query
from longrun.stores._file.disk import Disk
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.testing.samples import boundary, change, create, owned, send, step
from tests.stores.file_tools import done, opened

ANEW = 50
"""One of so many is looked at by a process that begins anew."""
IDS = ("runs", "parked", "ended", "claimed")


@frozen
class Known:
    """Everything that was ever stored of one execution, oldest first."""

    history: list[Loaded]
    messages: list[Any]

    @property
    def last(self) -> Loaded:
        return self.history[-1]


def fill(backend: StoreBackend) -> dict[str, Known]:
    """Executions in several states, with entries, blobs, messages and several generations."""
    histories: dict[str, list[Loaded]] = {id: [] for id in IDS}
    for id in IDS:
        new = owned(id, blobs={"shared": b'"blob"'}, data=b'{"n": 1}')
        done(backend, new)
        _note(backend, histories, id)
        head = new.head
        for n in range(3):
            row = boundary(head.seq + 1, blobs=("shared",), data=b'{"n": %d}' % (n + 2))
            save = step(id, head, boundaries=(row,), put={f"once:{n}": b"[1]"}, clear=n == 1)
            done(backend, save)
            head = save.head
            _note(backend, histories, id)
        if id != "ended":
            done(backend, send(id, payload=b'"hello"', key=f"key {id}"))
            _note(backend, histories, id)
        last = {"parked": {"state": ExecutionState.WAITING, "owner": None, "signal": "go", "due": 5e9}}
        last["ended"] = {"state": ExecutionState.COMPLETED, "owner": None, "ended": 1.0}
        if id in last:
            done(backend, change(id, head, head_fields=last[id]))
            _note(backend, histories, id)
    done(backend, create("fresh", ExecutionState.INITIALIZED))
    return {id: Known(histories[id], backend.messages(id)) for id in IDS}


def _note(backend: StoreBackend, histories: dict[str, list[Loaded]], id: str) -> None:
    found = backend.load(id)
    assert found is not None
    assert not found.damage
    histories[id].append(found)


def spoil(file: Path, dice: random.Random) -> str | None:
    """Damage one file; how, or None if there was nothing to damage."""
    data = bytearray(file.read_bytes())
    if not data:
        return None
    how = dice.choice(["flip", "flip", "flip", "truncate", "blank"])
    place = dice.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << dice.randrange(8)
    elif how == "truncate":
        del data[place:]
    else:
        end = min(len(data), place + dice.randint(1, 64))
        if not any(data[place:end]):
            return None
        data[place:end] = bytes(end - place)
    file.write_bytes(bytes(data))
    return how


def judge(path: Path, known: Mapping[str, Known], how: str) -> tuple[str, list[str]]:
    """What another process makes of it: told, older or unharmed; and what it misread."""
    outcome, faults = "unharmed", []
    try:
        with opened(FileBackend(path, disk=QuickDisk())) as backend:
            backend.find(Query())
            for id, before in known.items():
                seen, wrong = look(backend, id, before, how)
                outcome = seen if seen != "unharmed" else outcome
                faults += wrong
    except LongrunError:
        outcome = "told"
    return outcome, faults


def look(backend: StoreBackend, id: str, before: Known, how: str, *, lightly: bool = False) -> tuple[str, list[str]]:
    """What one execution looks like; lightly, without asking for its messages and rows apart."""
    try:
        found = backend.load(id)
        messages = backend.messages(id) if found is None or not lightly else list(found.messages)
        rows = [] if lightly else backend.boundaries(id)
    except LongrunError:
        return "told", []
    faults = [f"{id}: message {m} was never sent" for m in messages if m not in before.messages]
    if found is None:
        return "told", faults if how != "flip" else [*faults, f"{id}: gone, without a word"]
    states = [one.boundary for one in before.history]
    if found.boundary not in states:
        faults.append(f"{id}: a checkpoint that was never stored: {found.boundary}")
    known_rows = {(row.seq, row.kind, row.step, row.name) for one in before.history for row in [one.boundary]}
    faults += [
        f"{id}: a row that was never stored: {r}" for r in rows if (r.seq, r.kind, r.step, r.name) not in known_rows
    ]
    if found.damage:
        return "told", faults
    if found == before.last:
        return "unharmed", faults
    woken = attrs.evolve(found.head, woken=before.last.head.woken)
    if attrs.evolve(found, messages=before.last.messages, head=woken) == before.last:
        return "kept aside", faults  # a message; whether anybody is told has a test of its own
    if how == "flip":
        return "misread", [*faults, f"{id}: changed without a word: {found}"]
    entries = [one.entries for one in before.history]
    if found.entries not in entries or found.head not in [one.head for one in before.history]:
        faults.append(f"{id}: a mixture that was never stored: {found}")
    return "older", faults


class QuickDisk(Disk):
    """Nothing here has to survive a power cut."""

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync(self, fd: int) -> None:
        pass


def restore(place: Path, whole: Mapping[Path, bytes]) -> None:
    """Every file as it was, and no other."""
    for file in place.rglob("*"):
        if file.is_file() and file not in whole:
            file.unlink()
    for file, data in whole.items():
        if not file.exists() or file.read_bytes() != data:
            file.write_bytes(data)


def rain(place: Path, drops: int, seed: int) -> Counter[str]:
    """Damage a store so many times, each time whole again; how often what came of it. Raises at the first misread."""
    dice = random.Random(seed)
    store, spare = place / "store", place / "spare"
    with opened(FileBackend(store)) as backend:
        known = fill(backend)
    whole = {file: file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}
    journals = {file: id for file in whole for id in IDS if file.name.startswith(f"{id}.")}
    counts: Counter[str] = Counter()
    shutil.copytree(store, spare)
    with opened(FileBackend(spare, disk=QuickDisk())) as reader:
        for n in range(drops):
            file = dice.choice(list(journals if n % ANEW else whole))
            where = spare / file.relative_to(store) if n % ANEW else file
            where.write_bytes(whole[file])
            how = spoil(where, dice)
            if how is None:
                continue
            if n % ANEW:
                outcome, faults = look(reader, journals[file], known[journals[file]], how, lightly=n % 4 > 0)
                where.write_bytes(whole[file])
            else:
                outcome, faults = judge(store, known, how)
                restore(store, whole)
            counts[f"{how}: {outcome}"] += 1
            if faults:
                raise AssertionError(
                    f"LONGRUN_CAMPAIGN_SEED={seed}: {how} no. {n} of {file.name}:\n" + "\n".join(faults)
                )
    return counts
