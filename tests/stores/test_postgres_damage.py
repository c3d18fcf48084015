"""Damaged rows in PostgreSQL are found by their checksums, kept in quarantine, and the newest readable is used (I5)."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Head, Owner, Query
from longrun.stores._postgres.loading import Loader
from longrun.stores.base import StoreBackend
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import created, done, ids_of, loaded, opened
from longrun.testing.samples import boundary, claim, create, owned, send, step
from tests.servers import PostgresServer, Source


class Place:
    """An execution with three checkpoints, and somebody who breaks rows."""

    def __init__(self, url: str, schema: str, backend: StoreBackend) -> None:
        self.url, self.schema, self.backend = url, schema, backend
        new = owned("a", "gone", blobs={"b1": b"one"})
        second = step("a", new.head, blobs={"b2": b"two"}, boundaries=(boundary(2, blobs=("b1", "b2")),))
        third = step(
            "a", second.head, blobs={"b3": b"three"}, boundaries=(boundary(3, blobs=("b3",)),), put={"e": b"1"}
        )
        done(backend, new, second, third, send("a", payload=b"m"), owned("b", "gone"))
        self.head: Head = third.head

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True, options=f"-c search_path={self.schema}") as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def quarantined(self) -> list[object]:
        return [part for (part,) in self.execute("SELECT part FROM quarantine ORDER BY part")]


@pytest.fixture
def place(postgres_server: PostgresServer | Source, postgres_schema: str) -> Iterator[Place]:
    assert postgres_server.url is not None
    with opened(PostgresBackend(postgres_server.url, schema=postgres_schema)) as backend:
        yield Place(postgres_server.url, postgres_schema, backend)


FALL_BACK = {
    "state": "UPDATE states SET data = 'x' WHERE execution = 'a' AND seq = 3",
    "its blob list": "UPDATE states SET blobs = NULL WHERE execution = 'a' AND seq = 3",
    "boundary": "UPDATE boundaries SET next = 0 WHERE execution = 'a' AND seq = 3",
    "boundary lost": "DELETE FROM boundaries WHERE execution = 'a' AND seq = 3",
    "strayed": "UPDATE states t SET data = s.data, blobs = s.blobs, crc = s.crc FROM states s"
    " WHERE (t.execution, t.seq) = ('a', 3) AND (s.execution, s.seq) = ('a', 2)",
    "blob": "UPDATE blobs SET data = 'x' WHERE execution = 'a' AND name = 'b3'",
    "blob lost": "DELETE FROM blobs WHERE execution = 'a' AND name = 'b3'",
}


@pytest.mark.parametrize("how", FALL_BACK)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(place: Place, how: str) -> None:
    place.execute(FALL_BACK[how])
    found = place.backend.load("a")
    assert found is not None
    assert found.damage
    assert (found.boundary.seq, found.blobs) == (2, {"b1": b"one", "b2": b"two"})
    assert (found.head.step, found.head.visit, found.head.attempt, found.head.seq) == (1, 2, 0, 3)
    assert found.entries == {}
    given = {one.definition.id: one for one in place.backend.claim(claim(dead=frozenset({"gone"})))}
    assert given["b"].damage == ()
    assert (given["a"].boundary, given["a"].damage != ()) == (found.boundary, True)
    again = place.backend.load("a")
    assert again is not None
    assert (again.head, again.boundary) == (given["a"].head, found.boundary)
    assert bool(again.damage) == (how == "boundary lost")  # its number stays missing until the next checkpoint
    assert "state/3" in place.quarantined()
    row = boundary(4)
    done(place.backend, step("a", again.head, boundaries=(row,)))
    assert loaded(place.backend, "a").boundary == row


@pytest.mark.parametrize(
    "column", ["step = 9", "state = 'waiting'", "fence = 1, progress = 0.5", "crc = 1", "note = 'x'"]
)
def test_a_damaged_head_is_made_from_the_newest_checkpoint(place: Place, column: str) -> None:
    place.execute(f"UPDATE heads SET {column} WHERE id = 'a'")
    found = place.backend.load("a")
    assert found is not None
    assert found.damage
    assert (found.head.step, found.head.visit, found.head.seq, found.boundary.seq) == (2, 3, 3, 3)
    assert place.quarantined() == ["head"]
    place.backend.load("a")
    assert place.quarantined() == ["head"]
    assert place.backend.head("a") == found.head


def test_the_head_alone_is_read_without_the_rest(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = loaded(place.backend, "a").head
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("everything of it is read"))
    assert place.backend.head("a") == expected


def test_a_damaged_entry_or_message_is_left_out_and_kept_aside(place: Place) -> None:
    place.execute("UPDATE entries SET data = 'x'")
    place.execute("UPDATE messages SET payload = 'x'")
    found = place.backend.load("a")
    assert found is not None
    assert (found.entries, found.messages, found.boundary.seq) == ({}, (), 3)
    assert place.quarantined() == ["entry/e", "message/1"]
    assert place.backend.messages("a") == []


@pytest.mark.parametrize("table", ["definitions", "states"])
def test_what_cannot_be_read_at_all_is_parked_and_the_others_go_on(place: Place, table: str) -> None:
    column = "crc = 1" if table == "definitions" else "data = 'x'"
    place.execute(f"UPDATE {table} SET {column} WHERE {'id' if table == 'definitions' else 'execution'} = 'a'")
    with pytest.raises(CorruptDataError):
        place.backend.load("a")
    everything = claim(dead=frozenset({"gone"}), limit=1)
    assert [ids_of(place.backend.claim(everything)) for _ in range(2)] == [[], ["b"]]
    (listed,) = place.backend.find(Query(states=frozenset({ExecutionState.BLOCKED})))
    assert listed.definition.id == "a"
    assert listed.head.reason is not None
    assert "damaged" in listed.head.reason


def test_a_listing_shows_damaged_rows_as_far_as_it_can(place: Place) -> None:
    created(place.backend, create("c", metadata={"k": 1}))
    place.execute("UPDATE definitions SET metadata = '{' WHERE id = 'c'")
    place.execute("UPDATE heads SET state = 'nonsense' WHERE id = 'b'")
    listed = {one.definition.id: one for one in place.backend.find(Query())}
    assert (listed["c"].definition.metadata, listed["b"].head.state) == ({}, ExecutionState.BLOCKED)
    assert place.backend.count(Query()) == {ExecutionState.RUNNING: 2, ExecutionState.BLOCKED: 1}


@pytest.mark.parametrize("damage", ["life = '{\"owner'", "life = '[1]'", "workflows = '\"w\"'", "queues = '[1]'"])
def test_of_an_owner_that_cannot_be_read_the_lease_is_left(place: Place, damage: str) -> None:
    for id in ("a", "b"):
        place.backend.register(Owner(id=id, life={"pid": 1}, remaining=0.0, workflows=("w",), queues=("q",)), 100.0)
    place.execute(f"UPDATE owners SET {damage} WHERE id = 'a'")
    damaged, sound = place.backend.owners()
    assert (damaged.id, damaged.life, damaged.workflows, damaged.queues) == ("a", {}, (), ())
    assert 90 < damaged.remaining <= 100
    assert (sound.id, sound.life, sound.workflows, sound.queues) == ("b", {"pid": 1}, ("w",), ("q",))


@pytest.mark.parametrize("how", FALL_BACK)
def test_a_damaged_checkpoint_is_not_given_out(place: Place, how: str) -> None:
    place.execute(FALL_BACK[how])
    if how == "boundary lost":
        assert place.backend.checkpoint("a", 3) is None
    else:
        with pytest.raises(CorruptDataError, match="checkpoint 3"):
            place.backend.checkpoint("a", 3)
    assert place.backend.checkpoint("a", 2) is not None
