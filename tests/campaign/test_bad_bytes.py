"""Random flips, truncations and blanked ranges in the files of a store: told, or harmless, and never misread (I5).

Fifty for each of the campaign's size. A flip that nothing tells of must leave everything as it was. A truncation may
also leave what was stored before, since that is what a torn append looks like.
"""

from __future__ import annotations

import random
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

EACH = 50
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


def look(backend: StoreBackend, id: str, before: Known, how: str) -> tuple[str, list[str]]:
    try:
        found = backend.load(id)
        messages = backend.messages(id)
        rows = backend.boundaries(id)
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


def test_a_damaged_message_is_told_by_its_execution(tmp_path: Path) -> None:
    """I5: the bytes are in quarantine, the others go on, and the execution says what happened."""
    with opened(FileBackend(tmp_path)) as backend:
        done(backend, owned("a"), send("a", payload=b"1"), send("a", payload=b"2"))
    _damage_last_line(tmp_path / "inbox" / "a.jsonl")
    with opened(FileBackend(tmp_path)) as backend:
        found = backend.load("a")
        assert found is not None
        assert [message.payload for message in found.messages] == [b"1"]
        assert any((tmp_path / "quarantine").iterdir())
        assert found.damage != ()


def test_a_message_sent_after_a_damaged_one_that_was_taken_arrives(tmp_path: Path) -> None:
    """I1: its number is a new one, although the line with the highest number cannot be read any more."""
    with opened(FileBackend(tmp_path)) as backend:
        new = owned("a")
        done(backend, new, send("a", payload=b"1"), send("a", payload=b"2"))
        done(backend, change("a", new.head, take=(1, 2)))
    _damage_last_line(tmp_path / "inbox" / "a.jsonl")
    with opened(FileBackend(tmp_path)) as backend:
        done(backend, send("a", payload=b"3"))
        assert [message.payload for message in backend.messages("a")] == [b"3"]


def _damage_last_line(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(bytes(data))


def test_no_damage_is_misread(tmp_path: Path, campaign_size: int, campaign_seed: int) -> None:
    dice = random.Random(campaign_seed)
    with opened(FileBackend(tmp_path)) as backend:
        known = fill(backend)
    whole = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
    counts: Counter[str] = Counter()
    for n in range(EACH * campaign_size):
        file = dice.choice(list(whole))
        how = spoil(file, dice)
        if how is not None:
            outcome, faults = judge(tmp_path, known, how)
            counts[f"{how}: {outcome}"] += 1
            assert not faults, f"{how} no. {n} of {file.name}:\n" + "\n".join(faults)
        restore(tmp_path, whole)
    print(dict(counts))
    assert counts["flip: told"] > 0, "no damage was found, so none was done"
