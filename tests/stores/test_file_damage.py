"""Bad bytes in the file store: found by checksum, kept aside, never taken for good ones (I5)."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import attrs
import pytest

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Loaded, Query
from longrun.stores._file.contents import Mail
from longrun.stores._file.lines import BrokenLineError, Identity, unpack
from longrun.stores.file import FileBackend
from longrun.testing.samples import boundary, change, claim, create, owned, send, step
from tests.stores.file_tools import done, loaded, opened

BLOCKED = ExecutionState.BLOCKED
RUNNING = frozenset({ExecutionState.RUNNING})


def walk(backend: FileBackend, steps: int = 3, **fields: object) -> list[Loaded]:
    """Execution "a" with its start and this many steps: what was loaded after each write."""
    new = owned("a", blobs={"shared": b'"blob"'}, data=b'{"n": 1}')
    done(backend, new)
    known = [loaded(backend, "a")]
    head = new.head
    for n in range(steps):
        row = boundary(head.seq + 1, blobs=("shared",), data=b'{"n": %d}' % (n + 2))
        save = step("a", head, boundaries=(row,), put={f"e{n}": b"[1]"}, clear=n % 2 == 0)
        done(backend, save)
        head = save.head
        known.append(loaded(backend, "a"))
    return known


def look(path: Path) -> Loaded | None:
    """What another process makes of the files; None if it says that nothing is readable."""
    with opened(FileBackend(path)) as other:
        try:
            return other.load("a")
        except CorruptDataError:
            return None


def is_older(found: Loaded, known: list[Loaded]) -> bool:
    """Whether this is one of the states that were stored: its checkpoint as it was, and a head that fits it."""
    for one in known:
        if found.boundary == one.boundary and found.blobs == one.blobs:
            at = {"step": found.head.step, "visit": found.head.visit, "attempt": found.head.attempt}
            fits = (
                at == {"step": one.boundary.next, "visit": one.boundary.visit, "attempt": 0} or found.head == one.head
            )
            return fits and (not found.entries or any(found.entries == other.entries for other in known))
    return False


def test_every_flipped_byte_is_found(path: Path, backend: FileBackend, campaign_size: int) -> None:
    """I5: either everything is as it was, or the damage is told and an older checkpoint is used. In a small run, every
    few bytes."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    good = journal.read_bytes()
    told = 0
    places = range(0, len(good), max(1, 60 // campaign_size))
    for place in places:
        for bits in (0x01, 0x20):
            bad = bytearray(good)
            bad[place] ^= bits
            journal.write_bytes(bad)
            found = look(path)
            if found is None:
                told += 1
            elif found.damage:
                told += 1
                assert is_older(attrs.evolve(found, damage=()), known), (place, found)
            else:
                assert found == known[-1], (place, found)
    newlines = sum(good[place] == 0x0A for place in places)
    assert told >= 2 * (len(places) - newlines)
    assert any((path / "quarantine").iterdir())
    journal.write_bytes(good)
    assert look(path) == known[-1]


def test_every_truncation_leaves_an_older_state(path: Path, backend: FileBackend) -> None:
    """I5: a torn end is cut off. What is left is what was stored before, or nothing is readable."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    good = journal.read_bytes()
    seen = set()
    for size in range(len(good)):
        journal.write_bytes(good[:size])
        found = look(path)
        if found is not None:
            assert found in known, (size, found)
            seen.add(found.head.revision)
    assert seen == {0, 1, 2, 3}


def test_a_save_behind_a_torn_one_is_read_back(path: Path, backend: FileBackend) -> None:
    """I1: what a crash left half written is cut off before the next process of this owner appends to it."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    good = journal.read_bytes()
    for size in range(len(good) - 40, len(good)):
        journal.write_bytes(good[:size])
        with opened(FileBackend(path)) as other:
            left = loaded(other, "a")
            assert left in known
            save = step("a", left.head, put={"behind": b"1"})
            done(other, save)
        with opened(FileBackend(path)) as other:
            found = loaded(other, "a")
            assert (found.head, found.entries["behind"]) == (save.head, b"1")


def test_a_flip_in_the_middle_costs_one_row(path: Path, backend: FileBackend) -> None:
    """I5: the newest checkpoint is readable, so nothing is repeated; the damage is told."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[-2] = lines[-2].replace(b'"seq":3', b'"seq":4')
    journal.write_bytes(b"".join(lines))
    found = look(path)
    assert found is not None
    assert (found.boundary, found.head) == (known[-1].boundary, known[-1].head)
    assert "damaged" in " ".join(found.damage)
    with opened(FileBackend(path)) as other:
        assert [row.seq for row in other.boundaries("a")] == [1, 2, 4]


def test_a_missing_record_is_noticed(path: Path, backend: FileBackend) -> None:
    """I5: a line that was taken out whole, or put in twice, is damage too."""
    walk(backend)
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    for changed in (lines[:-2] + lines[-1:], [*lines[:-1], lines[-2], lines[-1]], [*lines, lines[-3]]):
        journal.write_bytes(b"".join(changed))
        found = look(path)
        assert found is not None
        assert found.damage
        assert found.head.revision == 3


def test_the_head_moves_back_to_what_is_readable(path: Path, backend: FileBackend) -> None:
    """I5, I7: position and visit of the older checkpoint, no attempts, numbering behind the highest seen."""
    known = walk(backend)
    last = step("a", known[-1].head, boundaries=(boundary(5, data=b"x" * 20_000),))
    done(backend, last, change("a", last.head, head_fields={"attempt": 2}, put={"late": b"1"}))
    journal = path / "live" / "a.0.jsonl"
    data = journal.read_bytes()
    journal.write_bytes(data.replace(b'"kind":"state","seq":5', b'"kind":"state","seq":6'))
    found = look(path)
    assert found is not None
    assert found.boundary == known[-1].boundary
    head = found.head
    assert (head.step, head.visit, head.attempt, head.seq) == (found.boundary.next, found.boundary.visit, 0, 5)
    assert (found.entries, bool(found.damage)) == ({}, True)
    with opened(FileBackend(path)) as other, pytest.raises(CorruptDataError):
        other.checkpoint("a", 5)


def test_a_claim_goes_on_from_what_is_readable_and_tells(path: Path, backend: FileBackend) -> None:
    """I5: the damaged bytes stay in quarantine when the journal is long gone."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = lines[-1].replace(b'"state":0', b'"state":1')
    journal.write_bytes(b"".join([*lines[:-1], broken]))
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
        assert given.boundary == known[-2].boundary
        assert given.damage
        assert other.load("a") == given
        save = step("a", given.head)
        done(other, save, step("a", save.head))
        assert loaded(other, "a").boundary.seq == 5
    assert broken.rstrip(b"\n") in [kept.read_bytes() for kept in (path / "quarantine").iterdir()]


def test_a_damaged_snapshot_falls_back_to_the_generation_before(path: Path, backend: FileBackend) -> None:
    """I5: it is kept until the new generation has a checkpoint of its own."""
    known = walk(backend)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
    journal = path / "live" / "a.1.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"whole":true', b'"whole":fals'))
    found = look(path)
    assert found is not None
    assert (found.boundary, found.head.fence, found.head.owner) == (known[-1].boundary, given.head.fence, "new")
    assert found.damage


def test_a_list_of_steps_that_cannot_be_read_is_taken_from_the_generation_before(
    path: Path, backend: FileBackend
) -> None:
    known = walk(backend)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
    journal = path / "live" / "a.1.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"kind":"steps"', b'"kind":"stepz"'))
    found = look(path)
    assert found is not None
    assert (found.definition, found.boundary) == (known[-1].definition, known[-1].boundary)
    assert found.head.fence == given.head.fence
    assert found.damage


def test_a_lost_newline_costs_nothing(path: Path, backend: FileBackend) -> None:
    """I5: both lines are whole; that one of them ended badly is told, and that is all."""
    known = walk(backend)
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join(lines[:-3]) + b"\x0b" + b"\n".join(lines[-3:]))
    found = look(path)
    assert found is not None
    assert found.damage == ("a line's end was damaged",)
    assert (found.head, found.boundary) == (known[-1].head, known[-1].boundary)
    assert list((path / "quarantine").iterdir()) == []


def spoil(path: Path, *starts: bytes) -> None:
    """One letter in each line of the journal that has one of these in it."""
    journal = path / "live" / "a.0.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(
        b"\n".join([line.swapcase() if any(map(line.__contains__, starts)) else line for line in lines])
    )


LARGE = b"x" * 10_000
"""Stands in a line of its own."""


def test_what_is_left_when_large_values_cannot_be_read(path: Path, backend: FileBackend) -> None:
    """I5: each is named; what was cleared meanwhile is not missed, and what came after that is kept."""
    new = owned("a")
    first = step("a", new.head, put={"e": LARGE})
    second = step("a", first.head, clear=True, put={"f": b"1"})
    third = step("a", second.head, boundaries=(boundary(4, data=LARGE),))
    done(backend, new, first, second)
    spoil(path, b'"kind":"entry"')
    found = look(path)
    assert found is not None
    assert "the entry 'e' is not readable" in found.damage
    assert (found.head, found.entries) == (second.head, {"f": b"1"})
    (path / "live" / "a.0.jsonl").unlink()
    backend.close()
    backend.open()
    done(backend, new, first, second, third)
    spoil(path, b'"kind":"state"')
    found = look(path)
    assert found is not None
    assert "the state of checkpoint 4 is not readable" in found.damage
    assert found.boundary.seq == 3


def test_a_single_state_that_cannot_be_read_is_said(path: Path, backend: FileBackend) -> None:
    done(backend, owned("a", data=LARGE))
    spoil(path, b'"kind":"state"')
    with opened(FileBackend(path)) as other, pytest.raises(CorruptDataError, match="no state of it is readable"):
        other.load("a")


def test_a_claim_that_a_power_cut_left_empty_belongs_to_the_id_before_it(path: Path, backend: FileBackend) -> None:
    """A long id cannot be told from the name of a file."""
    id = "long" * 60
    done(backend, create(id))
    (first,) = (path / "live").iterdir()
    first.with_name(first.name.replace(".0.jsonl", ".1.jsonl")).touch()
    with opened(FileBackend(path)) as other:
        assert [one.definition.id for one in other.find(Query())] == [id]


def test_messages_that_were_taken_in_order_are_one_number() -> None:
    """I16: however many there were."""
    mail = Mail()
    mail.take([1, 2, 5])
    assert (mail.upto, mail.more, mail.form) == (2, {5}, [2, 5])
    mail.take([3, 4])
    assert (mail.upto, mail.more) == (5, set())


def test_a_torn_snapshot_is_no_damage(path: Path, backend: FileBackend) -> None:
    """I4: a claimer that died in the middle of its claim leaves the execution as it was, one fence on."""
    walk(backend)
    with opened(FileBackend(path)) as other:
        (given,) = other.claim(claim("new", dead=frozenset({"me"})))
    journal = path / "live" / "a.1.jsonl"
    data = journal.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data) - 1):
        journal.write_bytes(data[:size])
        assert look(path) == given
    for size in (0, 1, first - 2):
        journal.write_bytes(data[:size])
        found = look(path)
        assert found is not None
        assert (found.boundary, found.head.fence) == (given.boundary, given.head.fence)
    with opened(FileBackend(path)) as third:
        (again,) = third.claim(claim("third", dead=frozenset({"me", "new"})))
        assert again.head.fence == given.head.fence + 1


def test_a_journal_under_another_name_is_refused(path: Path, backend: FileBackend) -> None:
    """I5: a file's name does not make it another execution's."""
    done(backend, create("a"), create("b"))
    (path / "live" / "b.0.jsonl").rename(path / "live" / "c.0.jsonl")
    (path / "live" / "a.0.jsonl").rename(path / "live" / "b.0.jsonl")
    with opened(FileBackend(path)) as other:
        for id in ("b", "c"):
            with pytest.raises(CorruptDataError, match="belongs to execution"):
                other.load(id)
        assert {one.definition.id: one.head.state for one in other.find(Query())} == {"b": BLOCKED, "c": BLOCKED}
        assert other.claim(claim()) == []
    assert len(list((path / "quarantine").iterdir())) >= 2


def test_one_unreadable_execution_does_not_stop_the_others(path: Path, backend: FileBackend) -> None:
    """I5."""
    done(backend, create("a"), create("b"), create("c"))
    (path / "live" / "b.0.jsonl").write_bytes(b"\0" * 500)
    with opened(FileBackend(path)) as other:
        assert [one.definition.id for one in other.find(Query(states=RUNNING))] == ["c", "a"]
        assert [one.definition.id for one in other.find(Query(states=frozenset({BLOCKED})))] == ["b"]
        assert sorted(one.definition.id for one in other.claim(claim())) == ["a", "c"]
        with pytest.raises(CorruptDataError):
            other.load("b")
        assert other.commit([create("b")]) == [False]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_message_is_cut_off_by_the_next_one(path: Path, backend: FileBackend, cut: int) -> None:
    """I1: what was acknowledged before it stays."""
    done(backend, create("a"), send("a", key="k"), send("a", payload=b"x" * 100))
    inbox = path / "inbox" / "a.jsonl"
    inbox.write_bytes(inbox.read_bytes()[:-cut])
    with opened(FileBackend(path)) as other:
        before = [message.id for message in other.messages("a")]
        assert before == ([1, 2] if cut == 1 else [1])
        assert done(other, send("a", key="k"), send("a")) == [1, before[-1] + 1]
        assert [message.id for message in other.messages("a")] == [*before, before[-1] + 1]


def test_a_damaged_message_is_kept_aside_and_the_others_arrive(path: Path, backend: FileBackend) -> None:
    """I5."""
    done(backend, create("a"), send("a"), send("a", payload=b"[1]"), send("a"))
    inbox = path / "inbox" / "a.jsonl"
    inbox.write_bytes(inbox.read_bytes().replace(b"[1]", b"[2]"))
    with opened(FileBackend(path)) as other:
        assert [message.id for message in other.messages("a")] == [1, 3]
        assert done(other, send("a")) == [4]
    assert any("inbox" in kept.name for kept in (path / "quarantine").iterdir())


@pytest.mark.parametrize("how", ["missing", "flipped", "torn"])
def test_a_damaged_index_is_made_anew(path: Path, backend: FileBackend, how: str) -> None:
    """I5: the journals rule; the index of finished executions only spares reading them."""
    done(backend, *[create(f"x{n}", ExecutionState.COMPLETED, metadata={"n": n}) for n in range(5)])
    listed = backend.find(Query())
    backend.close()
    index = path / "finished.jsonl"
    data = index.read_bytes()
    assert len(data.splitlines()) == 6
    if how == "missing":
        index.unlink()
    else:
        index.write_bytes(data.replace(b'"n":3', b'"n":4') if how == "flipped" else data[:-1])
    with opened(FileBackend(path)) as other:
        done(other, create("y", ExecutionState.FAILED))
    with opened(FileBackend(path)) as other:
        assert [one for one in other.find(Query()) if one.definition.id != "y"] == listed
        assert other.count(Query()) == {ExecutionState.COMPLETED: 5, ExecutionState.FAILED: 1}
        assert len(other.find(Query(metadata={"n": 3}))) == 1


@pytest.mark.parametrize("rest", [b'"kind":"save"}', b"7,no JSON}"])
def test_a_line_that_fits_its_checksum_and_is_none_of_ours_is_broken(rest: bytes) -> None:
    identity = Identity("a", 0)
    body = identity.front + rest
    with pytest.raises(BrokenLineError):
        unpack(b'{"crc":"%08x",%b' % (crc32(body), body), identity)


def test_every_line_is_json(path: Path, backend: FileBackend) -> None:
    """`cat` and `jq` read it: states stand there as they are, binary data as base64."""
    new = owned("a", data=b'{"deep":[1,2,{"x":null}]}', blobs={"b": b"\x01\x02"})
    done(backend, new, step("a", new.head, put={"e": b"true"}), send("a", payload=b'"hello"'))
    lines = [json.loads(line) for line in (path / "live" / "a.0.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [*["definition", "steps"] * 2, "save", "save"]
    assert {"deep": [1, 2, {"x": None}]} in lines[4]["data"]
    assert all({"crc", "id", "gen", "n"} <= set(line) for line in lines)
    assert json.loads((path / "inbox" / "a.jsonl").read_text())["data"] == ["hello"]
