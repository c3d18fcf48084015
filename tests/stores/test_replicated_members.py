"""Which two stores are a pair: one that is mistyped is refused, and a lost one is replaced on somebody's word."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import attrs
import pytest

from longrun.errors import ConfigError, StoreSettingsError, StoreUnavailableError
from longrun.stored import Query
from longrun.stores._replicated.side import Side
from longrun.stores._replicated.term import TERM_ID, Term, read_term, write_term
from longrun.stores.memory import MemoryBackend
from longrun.stores.replicated import DirectoryWitness, ReplicatedCheckpointStore
from longrun.stores.sqlite import SQLiteBackend
from longrun.testing.samples import create
from tests.stores.replicated_tools import Switch, assert_equal, created, opened

PARTS = ("primary", "secondary")


class Stores:
    """Stores by name, and pairs of any two of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: dict[str, Switch] = {}

    def __getitem__(self, name: str) -> Switch:
        return self.made.setdefault(name, Switch(MemoryBackend()))

    def pair(self, primary: str = "a", secondary: str = "b", *, witness: bool = True, **options: Any) -> Any:
        """With connections of its own."""
        settings: dict[str, Any] = {"health_interval": None, "failback_after": None, **options}
        if witness:
            settings["witness"] = DirectoryWitness(self.path / "witness")
        return ReplicatedCheckpointStore(Switch(self[primary]), Switch(self[secondary]), **settings).backend

    def other(self, part: str, name: str, **options: Any) -> Any:
        """The pair with another store as one part."""
        names = {"primary": "a", "secondary": "b", part: name}
        return self.pair(names["primary"], names["secondary"], **options)

    def ids(self, name: str) -> list[str]:
        return sorted(row.definition.id for row in self[name].find(Query(limit=100)) if row.definition.id != TERM_ID)

    def term(self, part: str, name: str) -> Term | None:
        side = Side(part, self[name])
        side.open()
        return read_term(side)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    made = Stores(tmp_path)
    with opened(made.pair()) as backend:
        created(backend, create("x"))
    return made


# --- a store that is none of the two ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"witness": False}, {"witness": False, "single_process": True}])
@pytest.mark.parametrize("part", PARTS)
def test_a_mistyped_store_is_refused_and_the_pair_stays_as_it_was(
    stores: Stores, part: str, options: dict[str, Any]
) -> None:
    """I3: taken for the primary it would be filled and become active, beside the real one."""
    before = [stores.term("primary", "a"), stores.term("secondary", "b")]
    with pytest.raises(StoreSettingsError, match=f"the {part} is empty .* `longrun store replace {part}`"):
        stores.other(part, "typo", **options).open()
    assert [stores.term("primary", "a"), stores.term("secondary", "b")] == before
    assert stores.ids("typo") == []
    assert stores.term(part, "typo") is None


def test_two_mistyped_stores_are_not_taken_for_the_pair_that_the_witness_knows(stores: Stores) -> None:
    with pytest.raises(StoreSettingsError, match="neither store knows the pair that the witness knows"):
        stores.pair("typo", "typo too").open()


def test_a_mistyped_store_that_was_away_at_the_start_is_not_brought_up_to_date(stores: Stores) -> None:
    backend = stores.other("secondary", "typo")
    backend._sides[1].backend.down = True
    with opened(backend):
        created(backend, create("y"))
        assert backend.status().standby == "behind"
        backend._sides[1].backend.down = False
        with pytest.raises(StoreSettingsError, match="the secondary is empty and knows nothing"):
            backend.check()
        assert backend.status().standby == "behind"
        assert "longrun store replace secondary" in backend.status().reason
        created(backend, create("z"))
    assert stores.ids("typo") == []
    with opened(stores.pair()) as right:
        right.check()
        assert right.status().standby == "level"
    assert_equal(stores["a"], stores["b"])


def test_a_mistyped_store_that_answers_just_before_a_write_is_not_written_to(stores: Stores) -> None:
    backend = stores.other("secondary", "typo")
    backend._sides[1].backend.down = True
    with opened(backend):
        assert backend.status().standby == "level"
        backend._sides[1].backend.down = False
        backend._sides[1].open()
        with pytest.raises(StoreUnavailableError, match="the secondary is empty and knows nothing"):
            backend.commit([create("y")])
    assert stores.ids("a") == ["x"]
    assert stores.ids("typo") == []


def test_a_store_that_is_behind_and_empty_does_not_keep_the_other_from_going_on(stores: Stores) -> None:
    """Its disk was lost while it was away: that is what the other one is for."""
    with opened(stores.pair()) as backend:
        backend._sides[1].backend.down = True
        created(backend, create("y"))
    with opened(stores.other("secondary", "new disk")) as backend:
        assert "knows nothing of this pair" in backend.status().reason
        created(backend, create("z"))
        assert (backend.status().active, backend.status().standby) == ("primary", "behind")
    assert stores.ids("a") == ["x", "y", "z"]
    assert stores.ids("new disk") == []


def test_a_store_of_another_pair_that_answers_later_is_not_followed(stores: Stores) -> None:
    foreign = Term(generation=50, pair="foreign", active="secondary", standby="behind", by="somebody")
    side = Side("secondary", stores["foreign"])
    side.open()
    write_term(side, foreign, 0.0, first=True)
    backend = stores.other("secondary", "foreign")
    backend._sides[1].backend.down = True
    with opened(backend):
        created(backend, create("y"))
        backend._sides[1].backend.down = False
        with pytest.raises(StoreSettingsError, match="belongs to another pair"):
            backend.check()
        assert backend.status().active == "primary"
        created(backend, create("z"))


def test_a_failover_by_hand_does_not_take_an_empty_store_for_one_that_has_spoken(stores: Stores) -> None:
    """The other one may be the newer one all the same."""
    backend = stores.other("primary", "typo", witness=False)
    backend._sides[0].backend.down = True
    with opened(backend):
        backend._sides[0].backend.down = False
        with pytest.raises(StoreUnavailableError, match="may be the newer one"):
            backend.failover()
    assert stores.term("secondary", "b") == stores.term("primary", "a")


# --- the first time ---------------------------------------------------------------------------------------------------


def dies(stores: Stores, writes: int, *, witness: bool) -> None:
    """A process that opens the pair, behind so many writes."""
    left = writes

    def die(call: str) -> None:
        nonlocal left
        if call == "commit":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    for name in ("a", "b"):
        stores[name].told = die
    with contextlib.suppress(KeyboardInterrupt):
        stores.pair(witness=witness).open()
    for name in ("a", "b"):
        stores[name].told = lambda call: None


@pytest.mark.parametrize("witness", [True, False])
@pytest.mark.parametrize("writes", range(1, 7))
def test_a_pair_whose_maker_died_is_made_by_the_next(tmp_path: Path, writes: int, witness: bool) -> None:
    """With no ceremony, wherever it was."""
    stores = Stores(tmp_path)
    dies(stores, writes, witness=witness)
    with opened(stores.pair(witness=witness)) as backend:
        created(backend, create("x"))
        assert (backend.status().active, backend.status().standby) == ("primary", "level")
    assert stores.ids("a") == stores.ids("b") == ["x"]


def test_a_pair_whose_maker_died_after_the_witness_consented_is_made_by_the_next(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    named = Term(generation=0, pair="p", active="primary", standby="level", by="somebody")
    side = Side("primary", stores["a"])
    side.open()
    write_term(side, named, 0.0, first=True)
    witness = DirectoryWitness(tmp_path / "witness")
    witness.open()
    assert witness.propose(attrs.evolve(named, generation=1))
    with opened(stores.pair()) as backend:
        assert backend.status().standby == "level"
    assert stores.term("primary", "a") == stores.term("secondary", "b") == witness.read()


@pytest.mark.parametrize("witness", [True, False])
@pytest.mark.parametrize("then", [0, 1, 2])
@pytest.mark.parametrize("writes", [1, 2])
def test_what_is_stored_before_a_pair_is_made_at_last_comes_to_both(
    tmp_path: Path, writes: int, then: int, witness: bool
) -> None:
    """The process that made it has died, the primary was used alone for a while, and the next one died as well."""
    stores = Stores(tmp_path)
    dies(stores, writes, witness=witness)
    with opened(stores["a"]) as alone:
        created(alone, create("x"))
    dies(stores, then, witness=witness)
    with opened(stores.pair(witness=witness)) as backend:
        assert backend.status().standby == "behind"
        backend.check()
        assert backend.status().standby == "level"
    assert stores.ids("a") == stores.ids("b") == ["x"]


def test_what_is_stored_before_a_pair_is_made_comes_to_a_store_that_was_away_then(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    dies(stores, 2, witness=True)
    with opened(stores["a"]) as alone:
        created(alone, create("x"))
    stores["b"].down = True
    with opened(stores.pair()) as backend:
        assert backend.status().standby == "behind"
    stores["b"].down = False
    with opened(stores.pair()) as backend:
        backend.check()
        assert backend.status().standby == "level"
    assert stores.ids("a") == stores.ids("b") == ["x"]


def test_a_pair_is_made_when_both_answer_again(tmp_path: Path) -> None:
    """The maker has died, and the secondary is away, which knows nothing of the pair: nobody goes on without it."""
    stores = Stores(tmp_path)
    dies(stores, 1, witness=True)
    stores["b"].down = True
    with opened(stores.pair()) as backend:
        with pytest.raises(StoreUnavailableError, match="both stores must answer when they become a pair"):
            backend.commit([create("x")])
        stores["b"].down = False
    with opened(stores.pair()) as backend:
        created(backend, create("x"))
        assert (backend.status().active, backend.status().standby) == ("primary", "level")


def test_a_primary_that_was_used_alone_and_comes_back_late_keeps_what_it_has(tmp_path: Path) -> None:
    """The other one went on without it: somebody has to say what becomes of its executions."""
    stores = Stores(tmp_path)
    dies(stores, 2, witness=True)
    with opened(stores["a"]) as alone:
        created(alone, create("x"))
    stores["a"].down = True
    with opened(stores.pair()) as backend:
        backend.check()
        assert (backend.status().active, backend.status().standby) == ("secondary", "behind")
        stores["a"].down = False
        with pytest.raises(StoreSettingsError, match="the primary was used on its own before the pair was made"):
            backend.check()
    assert stores.ids("a") == ["x"]


def test_of_two_who_find_that_the_primary_was_used_one_says_so(tmp_path: Path) -> None:
    """The other one goes by what the witness says then."""
    stores = Stores(tmp_path)
    dies(stores, 1, witness=True)
    with opened(stores["a"]) as alone:
        created(alone, create("x"))
    slow, other = stores.pair(), stores.pair()
    propose = slow._council._founding._witness.propose

    def late(term: Term) -> bool:
        if term.generation == 2:
            with opened(other):
                assert other.status().standby == "behind"
        return bool(propose(term))

    slow._council._founding._witness.propose = late
    with opened(slow):
        assert (slow.status().standby, slow.status().generation) == ("behind", 2)
        slow.check()
    assert stores.ids("a") == stores.ids("b") == ["x"]


# --- replacing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"witness": False}, {"witness": False, "single_process": True}])
@pytest.mark.parametrize("part", PARTS)
def test_a_lost_store_is_replaced_and_refused_from_then_on(stores: Stores, part: str, options: dict[str, Any]) -> None:
    if part == "primary":
        with opened(stores.pair(**options)) as backend:
            backend._sides[0].backend.down = True
            if not backend.status().automatic:
                backend.failover()
            created(backend, create("y"))
    else:
        with opened(stores.pair(**options)) as backend:
            backend._sides[1].backend.down = True
            created(backend, create("y"))
    backend = stores.other(part, "new", **options)
    backend.replace(part)
    with opened(backend):
        backend.check()
        assert (backend.status().standby, backend.status().reason) == ("level", None)
        created(backend, create("z"))
    assert stores.ids("new") == ["x", "y", "z"]
    assert_equal(stores["b" if part == "primary" else "a"], stores["new"])
    with pytest.raises(StoreSettingsError, match=f"the {part} is not in the pair any more"):
        stores.pair(**options).open()


@pytest.mark.parametrize("part", PARTS)
def test_where_a_witness_knows_that_the_other_is_level_a_store_is_replaced_at_once(stores: Stores, part: str) -> None:
    backend = stores.other(part, "new")
    backend.replace(part)
    stays = "secondary" if part == "primary" else "primary"
    with opened(backend):
        assert (backend.status().active, backend.status().standby) == (stays, "behind")
        assert backend.load("x") is not None


@pytest.mark.parametrize("part", PARTS)
def test_where_the_lost_store_may_have_had_more_it_is_replaced_by_force_alone(stores: Stores, part: str) -> None:
    backend = stores.other(part, "new", witness=False)
    with pytest.raises(StoreUnavailableError, match="may have had more"):
        backend.replace(part)
    assert stores.term(part, "new") is None
    backend.replace(part, force=True)
    with opened(backend):
        backend.check()
        assert backend.status().standby == "level"


def test_a_standby_that_lacks_something_does_not_stay_alone_without_force(stores: Stores) -> None:
    with opened(stores.pair()) as backend:
        backend._sides[1].backend.down = True
        created(backend, create("y"))
    with pytest.raises(StoreUnavailableError, match="may have had more than the secondary"):
        stores.other("primary", "new").replace("primary")


def test_a_process_that_has_the_replaced_store_stops(stores: Stores) -> None:
    with opened(stores.pair()) as old:
        new = stores.other("secondary", "new")
        new.replace("secondary")
        with opened(new):
            new.check()
            with pytest.raises(StoreUnavailableError, match="the secondary is not in the pair any more"):
                old.check()
            with pytest.raises(StoreUnavailableError, match="another store has taken its place"):
                old.commit([create("y")])
            created(new, create("z"))
    assert stores.ids("b") == ["x"]


def test_a_process_that_has_a_replaced_primary_does_not_read_from_it(stores: Stores) -> None:
    """It saw nothing of the replacement before the new store was active."""
    with opened(stores.pair()) as old:
        new = stores.other("primary", "new", failback_after=0.0)
        new.replace("primary")
        with opened(new):
            new.check()
            assert (new.status().active, new.status().standby) == ("primary", "level")
            with pytest.raises(StoreUnavailableError, match="the primary is not in the pair any more"):
                old.check()
            with pytest.raises(StoreUnavailableError):
                old.load("x")


def test_a_store_that_was_emptied_is_replaced_by_itself_while_the_pair_is_at_work(stores: Stores) -> None:
    """Those who use the pair go on, since they have the right store."""
    with opened(stores.pair()) as one, opened(stores.pair()) as two:
        one._sides[1].backend.down = two._sides[1].backend.down = True
        created(one, create("y"))
        created(two, create("z"))
        stores["b"].inner = MemoryBackend()
        stores["b"].open()
        one._sides[1].backend.down = two._sides[1].backend.down = False
        with pytest.raises(StoreSettingsError, match="the secondary is empty"):
            one.check()
        one.replace("secondary")
        one.check()
        two.check()
        assert one.status() == attrs.evolve(two.status(), failovers=0)
        assert (one.status().standby, one.status().reason) == ("level", None)
        created(two, create("last"))
    assert stores.ids("b") == ["last", "x", "y", "z"]


@pytest.mark.parametrize("part", PARTS)
def test_a_replacement_that_only_the_witness_knows_is_made_again(stores: Stores, part: str) -> None:
    """Whoever replaced the store died in the middle."""
    backend = stores.other(part, "new")
    stays = backend._sides[part == "primary"].backend
    stays.full = True
    with pytest.raises(StoreUnavailableError, match="it is full"):
        backend.replace(part)
    stays.full = False
    backend.replace(part)
    with opened(backend):
        backend.check()
        assert backend.status().standby == "level"


def test_what_cannot_be_replaced_is_said(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        stores.pair().replace("witness")
    with pytest.raises(StoreSettingsError, match="in this pair already"):
        stores.pair().replace("secondary")
    with pytest.raises(StoreSettingsError, match="the primary is in no pair"):
        stores.pair("c", "d", witness=False).replace("secondary")
    with pytest.raises(StoreSettingsError, match="the primary is in no pair"):
        stores.pair("c", "d").replace("secondary")
    with opened(stores["used"]):
        stores["used"].commit([create("own")])
    with pytest.raises(StoreSettingsError, match="was used before"):
        stores.other("secondary", "used").replace("secondary")
    backend = stores.other("secondary", "new")
    backend._sides[0].backend.down = True
    with pytest.raises(StoreUnavailableError, match="both stores must answer"):
        backend.replace("secondary")


def test_only_the_new_store_is_made(tmp_path: Path) -> None:
    def pair(primary: str, secondary: str) -> Any:
        both = SQLiteBackend(tmp_path / primary), SQLiteBackend(tmp_path / secondary)
        return ReplicatedCheckpointStore(*both, health_interval=None).backend

    with opened(pair("a", "b")) as backend:
        created(backend, create("x"))
    with pytest.raises(StoreUnavailableError):
        pair("typo", "new").replace("secondary", force=True)
    assert not (tmp_path / "typo").exists()
    pair("a", "new").replace("secondary", force=True)
    with opened(pair("a", "new")) as backend:
        backend.check()
        assert backend.status().standby == "level"
