"""Messages in PostgreSQL with few round trips: what is sent or taken without a transaction, and what crosses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from longrun.errors import ExecutionNotFoundError, SignalQueueFullError
from longrun.records import ExecutionState
from longrun.stores import rows
from longrun.stores._postgres import arrays, sending
from longrun.stores._postgres.batch import Batch
from longrun.stores.postgres import PostgresBackend
from longrun.testing.conformance_base import created, done, loaded, opened
from longrun.testing.samples import change, owned, send
from tests.servers import PostgresServer, Source
from tests.stores.postgres_tools import committed_while_sending

ENDS = {"state": ExecutionState.COMPLETED, "owner": None}
FAILS = {"state": ExecutionState.FAILED, "owner": None}
WAITS = {"state": ExecutionState.WAITING, "owner": None, "signal": "go"}


@pytest.fixture
def url(postgres_server: PostgresServer | Source) -> str:
    assert postgres_server.url is not None
    return postgres_server.url


@pytest.fixture
def backend(url: str, empty_schema: str) -> Iterator[PostgresBackend]:
    with opened(PostgresBackend(url, schema=empty_schema)) as backend:
        assert isinstance(backend, PostgresBackend)
        yield backend


@pytest.fixture
def no_transaction(backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    created(backend, owned("a"), owned("b"), owned("c"))
    monkeypatch.setattr(psycopg.Connection, "transaction", lambda connection: pytest.fail("a transaction"))
    return monkeypatch


def left(backend: PostgresBackend, ids: str) -> list[list[int]]:
    return [[message.id for message in backend.messages(id)] for id in ids]


def test_one_message_needs_no_transaction(backend: PostgresBackend, no_transaction: pytest.MonkeyPatch) -> None:
    sent = [backend.commit([one])[0] for one in (send("a", key="k"), send("a"), send("a", key="k"), send("b", limit=1))]
    full, missing = backend.commit([send("b", limit=1)])[0], backend.commit([send("nobody")])[0]
    no_transaction.undo()
    assert sent == [1, 2, 1, 1]
    assert isinstance(full, SignalQueueFullError)
    assert isinstance(missing, ExecutionNotFoundError)
    assert left(backend, "ab") == [[1, 2], [1]]


@pytest.mark.parametrize("crossing", ["its key", "another"])
def test_a_message_that_another_sender_crosses_is_numbered_behind_it(
    backend: PostgresBackend, url: str, monkeypatch: pytest.MonkeyPatch, crossing: str
) -> None:
    """Somebody else sends between the look and the write: both are there, or the one with their key."""
    created(backend, owned("a"))
    usual = rows.message_values

    def late(message: Any) -> Any:
        monkeypatch.setattr(rows, "message_values", usual)
        with psycopg.connect(url, autocommit=True) as other:
            arrays.teach(other)
            Batch([send("a", key="k" if crossing == "its key" else "other")], backend._queries).apply(other)
        return usual(message)

    monkeypatch.setattr(rows, "message_values", late)
    assert done(backend, send("a", key="k")) == [1 if crossing == "its key" else 2]
    assert left(backend, "a") == [[1] if crossing == "its key" else [1, 2]]


def test_a_message_whose_answer_was_lost_is_sent_once(
    backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9: the write is repeated with its token, and finds what the first attempt did."""
    created(backend, owned("a"))
    usual, turns = sending.send_alone, [0]

    def lost(*args: Any) -> Any:
        found = usual(*args)
        turns[0] += 1
        if turns[0] == 1:
            raise psycopg.OperationalError("the connection is lost")
        return found

    monkeypatch.setattr("longrun.stores._postgres.batch.send_alone", lost)
    assert done(backend, send("a")) == [1]
    assert (turns, left(backend, "a")) == ([2], [[1]])


def test_receipts_of_messages_without_a_key_are_forgotten(
    backend: PostgresBackend, url: str, empty_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I16."""
    monkeypatch.setattr(sending, "TOKENS_REMEMBERED", 3)
    created(backend, owned("a"))
    for _ in range(6):
        done(backend, send("a"))
    with psycopg.connect(url) as connection:
        found = connection.execute(f"SELECT id FROM {empty_schema}.receipts ORDER BY id".encode()).fetchall()
    assert [number for (number,) in found] == [4, 5, 6]


def test_many_messages_forget_old_keys_one_by_one(backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: whatever was sent so much goes the longer way, which forgets."""
    monkeypatch.setattr(sending, "KEYS_REMEMBERED", 2)
    new = owned("a")
    created(backend, new)
    for n in range(3):
        done(backend, send("a", key=f"k{n}"))
    done(backend, change("a", new.head, take=(1, 2, 3)))
    assert done(backend, send("a", key="k3")) == [4]
    assert done(backend, send("a", key="k0")) == [5]


@pytest.mark.parametrize("fields", [ENDS, FAILS, WAITS])
def test_a_save_that_takes_messages_is_one_statement(
    backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    many = [owned(id) for id in "abc"]
    created(backend, *many)
    done(backend, send("a"), send("a"), send("b"), send("c"))
    monkeypatch.setattr(psycopg.Connection, "transaction", lambda connection: pytest.fail("a transaction"))
    done(backend, change("a", many[0].head, head_fields=fields, take=(1,)))
    done(
        backend,
        change("b", many[1].head, head_fields=fields, take=(1,)),
        change("c", many[2].head, head_fields=fields),
    )
    monkeypatch.undo()
    assert [loaded(backend, id).head.woken for id in "abc"] == [fields is WAITS, False, fields is WAITS]
    assert left(backend, "abc") == ([[], [], []] if fields is ENDS else [[2], [], [1]])


@pytest.mark.parametrize("fields", [ENDS, WAITS])
def test_a_message_that_comes_while_a_taking_save_waits_for_the_row_is_not_overlooked(
    backend: PostgresBackend, url: str, fields: dict[str, Any]
) -> None:
    news = [owned("a"), owned("b")]
    created(backend, *news)
    done(backend, send("a"), send("b"))
    saves = [change(new.id, new.head, head_fields=fields, take=(1,)) for new in news]
    assert committed_while_sending(backend, url, "a", saves) == [None, None]
    assert [loaded(backend, id).head.state for id in "ab"] == [fields["state"]] * 2
    assert left(backend, "ab") == ([[], []] if fields is ENDS else [[2], []])
    assert [loaded(backend, id).head.woken for id in "ab"] == [fields is WAITS, False]
