"""Ends take the short way of moves in PostgreSQL, and do all that the saves do which they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import psycopg
import psycopg_pool
import pytest

from longrun.records import ExecutionState
from longrun.stored import Write
from longrun.stores._postgres import moves
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import created, done, head_of, loaded, opened
from longrun.testing.conformance_move import as_save
from longrun.testing.samples import change, claim, create, end, move, owned, send, step
from tests.servers import PostgresServer, Source
from tests.stores.postgres_tools import committed_while_sending


@pytest.fixture
def url(postgres_server: PostgresServer | Source) -> str:
    assert postgres_server.url is not None
    return postgres_server.url


@pytest.fixture(params=["url", "pool"])
def backend(request: pytest.FixtureRequest, url: str, empty_schema: str) -> Iterator[PostgresBackend]:
    with psycopg_pool.ConnectionPool(url, min_size=1, max_size=1, open=True) as pool:
        source = pool if request.param == "pool" else url
        with opened(PostgresBackend(source, schema=empty_schema)) as backend:
            assert isinstance(backend, PostgresBackend)
            yield backend


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ends went the short way, time after time."""
    seen: list[int] = []
    usual = moves.apply

    def apply(connection: Any, queries: Any, found: Any, *, ends: bool) -> list[str]:
        if ends:
            seen.append(len(found))
        return usual(connection, queries, found, ends=ends)

    monkeypatch.setattr(moves, "apply", apply)
    return seen


@pytest.mark.parametrize("ids", ["a", "abc"])
@pytest.mark.parametrize("keep_from", [None, 2])
def test_it_is_stored_as_the_save_that_it_is(
    backend: PostgresBackend, shortened: list[int], ids: str, keep_from: int | None
) -> None:
    new = [owned(id) for id in ids]
    same = [owned(f"same-{id}") for id in ids]
    created(backend, *new, *same)
    noted = [change(one.id, one.head, put={"e": b"1"}) for one in new + same]
    done(backend, *noted)
    last = [end(one.id, one.head, keep_from=keep_from) for one in noted]
    assert done(backend, *last[: len(new)]) == [None] * len(ids)
    assert done(backend, *map(as_save, last[len(new) :])) == [None] * len(ids)
    assert shortened == [len(ids)]
    for id in ids:
        one, other = loaded(backend, id), loaded(backend, f"same-{id}")
        assert (one.head, one.boundary, one.kept) == (other.head, other.boundary, other.kept)
        assert (one.entries, one.damage) == ({}, ())
        assert backend.boundaries(id) == backend.boundaries(f"same-{id}")


def test_ends_that_nobody_has_written_to_are_one_statement(
    backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = [owned(id) for id in "abc"]
    created(backend, *new)
    monkeypatch.setattr(psycopg.Connection, "transaction", lambda connection: pytest.fail("a transaction"))
    done(backend, end("a", new[0].head))
    done(backend, *(end(one.id, one.head) for one in new[1:]))
    monkeypatch.undo()
    assert [head_of(backend, id).state for id in "abc"] == [ExecutionState.COMPLETED] * 3


def test_messages_of_what_has_ended_are_swept(backend: PostgresBackend) -> None:
    new = [owned(id) for id in "abc"]
    created(backend, *new)
    done(backend, send("a"), send("c"))
    done(backend, *(end(one.id, one.head) for one in new))
    assert [backend.messages(id) for id in "abc"] == [[], [], []]
    assert [head_of(backend, id).state for id in "abc"] == [ExecutionState.COMPLETED] * 3


def test_a_message_that_comes_while_an_end_waits_for_the_row_is_not_overlooked(url: str, empty_schema: str) -> None:
    with opened(PostgresBackend(url, schema=empty_schema)) as backend:
        assert isinstance(backend, PostgresBackend)
        new = [owned(id) for id in "ab"]
        created(backend, *new)
        ends = [end(one.id, one.head) for one in new]
        assert committed_while_sending(backend, url, "a", ends) == [None, None]
        assert [head_of(backend, id).state for id in "ab"] == [ExecutionState.COMPLETED] * 2
        assert backend.messages("a") == []


def test_an_end_is_told_to_others(backend: PostgresBackend, url: str, empty_schema: str) -> None:
    new = owned("a")
    created(backend, new)
    with opened(PostgresBackend(url, schema=empty_schema)) as other:
        while other.wait(0.1):
            pass
        done(backend, move("a", new.head))
        assert other.wait(0.2) is False
        done(backend, end("a", move("a", new.head).head))
        assert other.wait(30) is True


@pytest.mark.parametrize("few", [0, 16])
def test_ends_beside_moves_saves_starts_and_messages(
    backend: PostgresBackend, shortened: list[int], monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """All in one batch, some of them of one execution; whether they are enough for statements of their own or not."""
    monkeypatch.setattr(moves, "FEW", few)
    new = [owned(f"x{n}") for n in range(8)]
    created(backend, *new[:6])
    heads = [one.head for one in new]
    moved = [move(one.id, one.head) for one in new[:2]]
    writes: list[Write] = [
        *moved,
        end("x0", moved[0].head),
        end("x2", heads[2]),
        end("x3", heads[3]),
        send("x3"),
        step("x4", heads[4], put={"e": b"1"}),
        create("y"),
        new[6],
        end("x6", heads[6]),
        end("x5", attrs.evolve(heads[5], fence=7)),
    ]
    answers = backend.commit(writes)
    assert [type(answer).__name__ for answer in answers[-1:]] == ["LeaseLostError"]
    assert answers[:-1] == [None, None, None, None, None, 1, None, True, True, None]
    states = [head_of(backend, f"x{n}").state.value for n in (0, 1, 2, 3, 4, 5, 6)]
    assert states == ["completed", "running", "completed", "completed", "running", "running", "completed"]
    assert [one.seq for one in backend.boundaries("x0")] == [1, 2, 3]
    assert [one.definition.id for one in backend.claim(claim(limit=10))] == ["y"]
    assert shortened
