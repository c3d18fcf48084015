"""Several statements in one transaction: few journeys, whatever their size, and all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longrun.errors import StoreUnavailableError
from longrun.stores._postgres import asking
from longrun.stores._postgres.driver import errors
from longrun.stores._postgres.links import OwnConnection
from longrun.stores._postgres.queries import Statement
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import created, done, head_of, ids_of, loaded, opened
from longrun.testing.samples import change, claim, create, owned, send
from tests.servers import PostgresServer, Source


@pytest.fixture
def backend(postgres_server: PostgresServer | Source, postgres_schema: str) -> Iterator[PostgresBackend]:
    assert postgres_server.url is not None
    with opened(PostgresBackend(postgres_server.url, schema=postgres_schema)) as backend:
        assert isinstance(backend, PostgresBackend)
        yield backend


@pytest.fixture
def journeys(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that something was waited for."""
    seen: list[None] = []
    usual = asking._Together.read

    def read(self: asking._Together) -> None:
        seen.append(None)
        usual(self)

    monkeypatch.setattr(asking._Together, "read", read)
    return seen


def test_a_claim_is_two_journeys(backend: PostgresBackend, journeys: list[None]) -> None:
    """One to choose and load, one to write. What has messages, entries or blobs needs another, however many it are."""
    created(backend, *[create(f"x{n}") for n in range(20)])
    assert len(backend.claim(claim(limit=20))) == 20
    assert len(journeys) == 2
    more = [create("a", blobs={"b": b"1"}), create("b"), owned("c")]
    done(backend, *more, send("b"), change("c", more[2].head, put={"e": b"2"}, head_fields={"owner": None}))
    journeys.clear()
    found = {one.definition.id: one for one in backend.claim(claim(limit=20))}
    assert len(journeys) == 3
    assert (found["a"].blobs, found["c"].entries) == ({"b": b"1"}, {"e": b"2"})
    assert [len(found[id].messages) for id in "abc"] == [0, 1, 0]


def test_more_than_a_socket_takes_goes_out_and_comes_back(backend: PostgresBackend) -> None:
    large = b"x" * (4 << 20)
    created(backend, create("a", data=large), create("b", data=large))
    ids = ("a", "b", *(f"{n:0200}" for n in range(20_000)))
    assert ids_of(backend.claim(claim(ids=ids))) == ["a", "b"]
    assert loaded(backend, "b").boundary.data == large


def test_what_fails_in_the_middle_leaves_nothing_behind(backend: PostgresBackend) -> None:
    """I3, I10: neither a half of it nor a connection on which the other half might be made."""
    created(backend, create("a"))
    connection = backend._links._writer
    assert isinstance(connection, OwnConnection)
    with pytest.raises(RuntimeError), asking.in_one(connection, backend._queries) as ask:
        assert list(ask("claim_lock", token=1)) != []
        ask("block", id="a", reason="no")
        raise RuntimeError
    assert connection.closed
    assert head_of(backend, "a") == create("a").head
    assert ids_of(backend.claim(claim())) == ["a"]


def test_what_the_server_refuses_is_its_error_and_the_next_one_works(
    backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(backend, create("a"))
    monkeypatch.setitem(backend._queries._statements, "claim_lock", Statement("SELECT 1 / (%(token)s - %(token)s)"))
    with pytest.raises(StoreUnavailableError) as refused:
        backend.claim(claim())
    assert isinstance(refused.value.__cause__, errors.DivisionByZero)
    monkeypatch.undo()
    assert ids_of(backend.claim(claim())) == ["a"]


def test_what_was_claimed_is_forgotten_with_the_claim(backend: PostgresBackend) -> None:
    """The server leaves an empty text where the ids stood: a load by ids, planned after that, must not mind it."""
    created(backend, create("a"), create("b"))
    assert ids_of(backend.claim(claim(limit=1))) == ["a"]
    assert backend.delete(["b"]) == [False]
    assert backend.delete(["a", "nowhere"]) == [False, False]
    assert ids_of(backend.claim(claim())) == ["b"]
