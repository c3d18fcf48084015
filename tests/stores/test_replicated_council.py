"""Which of two stores is active: what the council does with records that are old, missing, foreign or contested."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.clock import SYSTEM_CLOCK
from longrun.errors import CorruptDataError, NewerFormatError, StoreSettingsError, StoreUnavailableError
from longrun.stored import Boundary, Loaded, Query
from longrun.stores._replicated import copying
from longrun.stores._replicated import term as terms
from longrun.stores._replicated.copying import Copier
from longrun.stores._replicated.council import BEHIND, LEVEL, Council, Rules
from longrun.stores._replicated.side import LostError, Side
from longrun.stores._replicated.tending import TendedBackend
from longrun.stores._replicated.term import Term, bury, read_term, write_term
from longrun.stores._replicated.witness import DirectoryWitness, StoreWitness
from longrun.stores.file import FileBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import ReplicatedCheckpointStore
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import create, owned, step
from tests.stores.file_tools import FolderDisk
from tests.stores.replicated_tools import Pair, Switch, created, done, opened

FIRST = Term(generation=1, pair="p", active="primary", standby=LEVEL, by="somebody")


class Witnessed:
    """A witness in memory that can be away, and in which others are quicker."""

    def __init__(self, newest: Term | None = None) -> None:
        self.newest = newest
        self.rival: Term | None = None
        """What somebody else proposes just before us."""

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def read(self) -> Term | None:
        return self.newest

    def propose(self, term: Term) -> bool:
        self.newest, self.rival = self.rival or term, None
        return self.newest == term


class Two:
    """A council on two stores that can be switched off."""

    def __init__(self, witness: Witnessed | None = None, *, alone: bool = False) -> None:
        self.primary, self.secondary = Switch(MemoryBackend()), Switch(MemoryBackend())
        self.sides = Side("primary", self.primary), Side("secondary", self.secondary)
        self.witness = witness
        rules = Rules(asynchronous=False, alone=alone, max_failovers=3, strikes=2)
        self.council = Council(self.sides, witness, rules, SYSTEM_CLOCK)
        for side in self.sides:
            side.open()

    def write(self, primary: Term | None, secondary: Term | None) -> None:
        for side, term in zip(self.sides, (primary, secondary), strict=True):
            if term is not None:
                write_term(side, term, 0.0, first=True)

    @property
    def stored(self) -> tuple[int | None, int | None]:
        """The generations that the two sides have on record."""
        found = [read_term(side) for side in self.sides]
        return tuple(None if term is None else term.generation for term in found)  # type: ignore[return-value]

    @property
    def followed(self) -> tuple[int, str, str] | None:
        term = self.council.term
        return None if term is None else (term.generation, term.active, term.standby)


def after(term: Term, **fields: Any) -> Term:
    return attrs.evolve(term, generation=term.generation + 1, **fields)


# --- the start -------------------------------------------------------------------------------------------------------


def test_nothing_is_decided_while_neither_answers() -> None:
    two = Two()
    two.primary.down = two.secondary.down = True
    with pytest.raises(StoreUnavailableError, match="neither the primary nor the secondary answers"):
        two.council.decide()


@pytest.mark.parametrize("away", ["primary", "secondary"])
def test_both_must_answer_when_they_become_a_pair(away: str) -> None:
    """Otherwise each could become the first of a pair of its own."""
    two = Two()
    getattr(two, away).down = True
    with pytest.raises(StoreUnavailableError, match="both stores must answer"):
        two.council.decide()
    getattr(two, away).down = False
    two.council.decide()
    assert two.followed == (1, "primary", LEVEL)
    assert two.stored == (1, 1)


def test_of_two_processes_that_make_the_pair_one_names_it() -> None:
    witness = Witnessed()
    witness.rival = FIRST
    two = Two(witness)
    two.write(attrs.evolve(FIRST, generation=0), None)
    two.council.decide()
    assert two.council.term == FIRST
    assert two.stored == (1, 1)


def test_a_store_with_executions_of_its_own_is_not_taken_into_a_pair() -> None:
    two = Two()
    two.write(FIRST, None)
    two.secondary.commit([create("own")])
    with pytest.raises(StoreSettingsError, match="the secondary has executions of its own"):
        two.council.decide()


def test_a_witness_that_another_pair_uses_is_refused() -> None:
    witness = Witnessed()
    witness.rival = FIRST
    with pytest.raises(StoreSettingsError, match="the witness is that of another pair"):
        Two(witness).council.decide()


def test_a_standby_that_missed_a_term_is_behind() -> None:
    """It has an older record and the newest says that it is level: it cannot be."""
    two = Two(alone=True)
    two.primary.commit([create("a")])
    two.write(after(FIRST), FIRST)
    two.council.decide()
    assert two.followed == (3, "primary", BEHIND)
    assert two.stored == (3, 1)


def test_a_term_that_only_the_witness_knows_is_written_down() -> None:
    """Its proposer died in between: nothing was acknowledged under it."""
    two = Two(Witnessed(after(FIRST, standby=BEHIND)))
    two.primary.commit([create("a")])
    two.write(FIRST, FIRST)
    two.council.decide()
    assert two.followed == (2, "primary", BEHIND)
    assert two.stored[0] == 2


def test_an_active_side_that_missed_more_than_one_term_waits_for_a_word() -> None:
    """What was acknowledged in between may be lost: a person decides."""
    two = Two(Witnessed(after(after(FIRST), standby=BEHIND)))
    two.primary.commit([create("a")])
    two.write(FIRST, FIRST)
    two.council.decide()
    assert two.council.term is None
    assert "failover() with force decides" in two.council.trouble


# --- changes ---------------------------------------------------------------------------------------------------------


def level(witness: Witnessed | None = None, *, alone: bool = False) -> Two:
    two = Two(witness, alone=alone)
    two.council.decide()
    assert two.followed == (1, "primary", LEVEL)
    return two


def test_a_proposal_that_the_witness_refuses_is_dropped_for_the_one_it_took() -> None:
    two = level(witness := Witnessed())
    assert two.council.term is not None
    witness.rival = after(two.council.term, active="secondary", standby=BEHIND)
    assert two.council.propose("primary", BEHIND) is False
    assert two.followed == (2, "secondary", BEHIND)
    assert two.stored == (1, 1), "whoever won writes it down"


def test_without_a_term_a_lost_side_is_only_an_error() -> None:
    two = Two()
    error = StoreUnavailableError("memory", "gone")
    with pytest.raises(StoreUnavailableError, match="gone"):
        two.council.lost(LostError(two.sides[0], error))


def test_a_switch_to_a_side_that_dies_too_is_an_error() -> None:
    two = level(alone=True)
    two.primary.down = two.secondary.full = True
    with pytest.raises(StoreUnavailableError, match="it is full"):
        two.council.lost(LostError(two.sides[0], StoreUnavailableError("memory", "gone")))
    assert two.council.failovers == 0


def test_a_switch_that_somebody_else_forestalled_keeps_the_side_that_they_chose() -> None:
    """They went on with the side that we have lost: it is our connection that is broken."""
    two = level(witness := Witnessed())
    two.primary.down = True
    assert two.council.term is not None
    witness.rival = after(two.council.term, standby=BEHIND)
    with pytest.raises(StoreUnavailableError, match="gone"):
        two.council.lost(LostError(two.sides[0], StoreUnavailableError("memory", "gone")))
    assert two.followed == (2, "primary", BEHIND)


def test_handing_over_what_another_process_has_handed_over_already_is_done() -> None:
    two = level()
    assert two.council.term is not None
    newer = after(two.council.term, active="secondary", standby=LEVEL)
    two.write(newer, newer)
    two.council.hand_over(force=False)
    assert two.council.term == newer


def test_a_term_is_on_its_active_side_before_anything_is_written_under_it(tmp_path: Path) -> None:
    """I13: the witness took it, and it could not be written down. Who starts without the witness must know of it."""
    pair = Pair(tmp_path, witness=Witnessed(), single_process=False)
    with opened(pair.backend) as backend:
        new = owned("a")
        created(backend, new)
        pair.secondary.down = pair.primary.full = True
        with pytest.raises(StoreUnavailableError, match="it is full"):
            backend.commit([step("a", new.head)])
        pair.primary.full = False
        done(backend, step("a", new.head))
        assert pair.parts == ("primary", BEHIND)
        assert read_term(backend._council.active) == backend._council.term


# --- by force --------------------------------------------------------------------------------------------------------


def test_force_needs_a_side_that_knows_the_pair() -> None:
    two = Two()
    with pytest.raises(StoreUnavailableError, match="neither side that answers has a record"):
        two.council.hand_over(force=True)


def test_one_side_alone_becomes_active_only_by_force() -> None:
    two = Two()
    two.write(FIRST, FIRST)
    two.primary.down = True
    two.council.decide()
    assert two.council.term is None
    with pytest.raises(StoreUnavailableError, match="may be the newer one"):
        two.council.hand_over(force=False)
    two.council.hand_over(force=True)
    assert two.followed == (2, "secondary", BEHIND)


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", '{"format":1}', '{"format":"x"}', '{"format":1,"by":"me"}']
)
def test_a_record_that_is_damaged_is_no_term(text: str) -> None:
    with pytest.raises(CorruptDataError, match="record of a replicated store"):
        Term.from_text(text)


def test_a_record_of_a_newer_longrun_is_refused_as_such() -> None:
    text = json.dumps({**json.loads(FIRST.to_text()), "format": terms.FORMAT + 1})
    with pytest.raises(NewerFormatError):
        Term.from_text(text)
    assert Term.from_text(FIRST.to_text()) == FIRST


def test_a_record_that_others_change_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two()
    for write in ("_put", "_replace"):  # somebody else's write is always the earlier one
        monkeypatch.setattr(terms, write, lambda *args, **options: None)
    with pytest.raises(StoreUnavailableError, match="again and again"):
        write_term(two.sides[0], FIRST, 0.0, first=True)
    with pytest.raises(StoreUnavailableError, match="again and again"):
        bury(two.sides[0], ["a"], 0.0)


def test_a_side_that_is_not_open_is_lost() -> None:
    side = Side("primary", MemoryBackend())
    side.wake()
    assert not side.healthy
    with pytest.raises(LostError, match="primary does not answer"):
        side.read("ping")


def test_a_witness_whose_directory_cannot_be_used_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="its directory cannot be used"):
        DirectoryWitness(tmp_path / "file").open()
    with pytest.raises(StoreUnavailableError, match="its directory cannot be used"):
        DirectoryWitness(tmp_path / "nowhere").read()


def test_a_directory_witness_consents_only_to_what_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I13: also if an earlier call stored the term and failed."""
    sync = os.fsync

    def sick(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "the disk is sick")
        sync(fd)

    witness = DirectoryWitness(tmp_path)
    witness.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sick)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="the disk is sick"):
                witness.propose(FIRST)
    assert witness.propose(FIRST) is True
    assert witness.propose(attrs.evolve(FIRST, by="me")) is False


def test_a_store_witness_consents_only_to_what_is_durable(tmp_path: Path) -> None:
    """I13: also if an earlier call stored the term and failed."""
    disk = FolderDisk(tmp_path)
    witness = StoreWitness(FileBackend(tmp_path, disk=disk))
    witness.open()
    disk.sick = "live"
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="the disk is sick"):
            witness.propose(FIRST)
    disk.sick = ""
    disk.synced.clear()
    assert witness.propose(FIRST) is True
    assert "live" in disk.synced
    assert witness.propose(attrs.evolve(FIRST, by="me")) is False
    witness.close()


def test_their_names_tell_what_they_are_and_nothing_else(tmp_path: Path) -> None:
    """A path or an address may be a secret."""
    assert repr(DirectoryWitness(tmp_path)) == "<DirectoryWitness>"
    assert repr(StoreWitness(MemoryBackend())) == "<StoreWitness memory>"
    assert repr(Side("primary", MemoryBackend())) == "<primary memory>"


# --- copies of what is damaged ----------------------------------------------------------------------------------------


class Damaged(MemoryBackend):
    """Cannot read some executions until they are removed."""

    unreadable: frozenset[str] = frozenset()
    keeps = False
    """Whether nothing can be removed from it."""
    lost_state: int | None = None
    """The number of a checkpoint whose state cannot be read."""

    def load(self, id: str) -> Loaded | None:
        if id in self.unreadable:
            raise CorruptDataError("the head", "its checksum is wrong")
        return super().load(id)

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        if seq == self.lost_state:
            raise CorruptDataError("the state", "its checksum is wrong")
        return super().checkpoint(id, seq)

    def delete(self, ids: Sequence[str]) -> list[bool]:
        if self.keeps:
            return [False for _ in ids]
        self.unreadable -= set(ids)
        return super().delete(ids)


def copier() -> tuple[Damaged, Damaged, Copier]:
    """From the first to the second, which both have an execution; the first is further."""
    source, target = Damaged(), Damaged()
    for backend in (source, target):
        backend.open()
        backend.commit([owned("a")])
    second = step("a", owned("a").head)
    source.commit([second, step("a", second.head)])
    sides = Side("primary", source), Side("secondary", target)
    for side in sides:
        side.open()
    return source, target, Copier(*sides, lambda *_: None)


def test_an_older_copy_is_better_than_none() -> None:
    """What cannot be read on the active side is left as it is on the other."""
    source, target, made = copier()
    source.unreadable = frozenset({"a"})
    made.agree(["a"])
    assert made.unreadable == {"a"}
    found = target.load("a")
    assert found is not None
    assert found.head.seq == 1


def test_a_copy_that_cannot_be_read_is_replaced() -> None:
    source, target, made = copier()
    target.unreadable = frozenset({"a"})
    made.agree(["a"])
    assert target.load("a") == source.load("a")


@pytest.mark.parametrize("lost", [1, 2])
def test_a_checkpoint_that_cannot_be_read_is_not_kept_by_the_copy(lost: int) -> None:
    """Nor does it get another one's state: the newest, say, which stands in for what was cut off (I5)."""
    source, target, made = copier()
    source.lost_state = lost
    made.agree(["a"])
    assert target.checkpoint("a", lost) is None
    found, original = target.load("a"), source.load("a")
    assert found is not None
    assert original is not None
    assert {seq for seq, _ in found.kept} == {1, 2, 3} - {lost}
    assert found.boundary == original.boundary
    assert [row.seq for row in target.boundaries("a")] == [1, 2, 3]


def test_sides_that_cannot_be_made_equal_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "TRIES", 3)
    _, target, made = copier()
    target.keeps = True
    with pytest.raises(LostError) as caught:
        made.agree(["a"])
    assert "'a' cannot be made equal" in str(caught.value.error)


# --- the store itself ------------------------------------------------------------------------------------------------


async def test_it_can_be_handed_over_and_brought_up_to_date_by_hand(tmp_path: Path) -> None:
    pair = Pair(tmp_path, failback_after=None)
    async with pair.store as store:
        await store.create(create("a"))
        await store.failover()
        assert pair.parts == ("secondary", "level")
        pair.primary.down = True
        await store.create(create("b"))
        assert pair.parts == ("secondary", "behind")
        pair.primary.down = False
        await store.resync()
        assert pair.parts == ("secondary", "level")
        assert pair.primary.load("b") is not None


def test_what_was_sent_is_told_by_the_active_side(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with opened(pair.backend) as backend:
        backend.commit([create("a")])
        assert backend.sent("a") == (0, {})


# --- the part that each store has -----------------------------------------------------------------------------------


@pytest.mark.parametrize("witnessed", [False, True])
def test_two_stores_are_given_in_the_order_in_which_they_were_paired(tmp_path: Path, witnessed: bool) -> None:
    """Two processes that call the other one's primary their secondary would both be right, and lose what they write."""
    one, two = MemoryBackend(), MemoryBackend()
    witness = DirectoryWitness(tmp_path / "witness") if witnessed else None

    def pair(*backends: MemoryBackend) -> TendedBackend:
        return ReplicatedCheckpointStore(*backends, witness=witness, health_interval=None).backend

    with opened(pair(one, two)) as first:
        first.commit([create("a")])
    with pytest.raises(StoreSettingsError, match="given as primary is the secondary of its pair"):
        pair(two, one).open()
    with opened(pair(one, two)) as again:
        again.failover()
        again.commit([create("b")])
    with pytest.raises(StoreSettingsError, match="in the order in which they were paired"):
        pair(two, one).open()
    with opened(pair(one, two)) as last:
        assert {stored.definition.id for stored in last.find(Query())} >= {"a", "b"}


def test_one_store_under_two_names_is_no_pair(tmp_path: Path) -> None:
    two_names = SQLiteBackend(tmp_path / "x.db"), SQLiteBackend(tmp_path / "." / "x.db")
    with pytest.raises(StoreSettingsError, match="not one store twice"):
        ReplicatedCheckpointStore(*two_names, health_interval=None).backend.open()


def test_what_is_deleted_while_it_is_copied_is_nothing_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Side("primary", MemoryBackend()), Side("secondary", MemoryBackend())
    for side in (source, target):
        assert side.open()
    source.write("commit", [create("a")])
    monkeypatch.setattr(source.backend, "boundaries", lambda *args, **page: [])
    assert Copier(source, target, lambda *_: None)._batches("a") == []


def test_a_defect_while_copying_leaves_the_standby_behind_and_the_queue_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = MemoryBackend(), MemoryBackend()
    with opened(ReplicatedCheckpointStore(one, two, mode="async", health_interval=None).backend) as pair:

        def broken(*args: Any) -> list[str]:
            raise ValueError("a defect")

        monkeypatch.setattr(pair._mirror, "writes", broken)
        pair.commit([create("a")])
        pair._lag.drain()
        assert pair._lag.broken is not None
        pair.commit([create("b")])  # it goes on: the side answers
        pair._lag.drain()
        monkeypatch.undo()
        pair.commit([create("c")])
        assert pair.status().standby == BEHIND
