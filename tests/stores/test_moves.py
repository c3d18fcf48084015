"""A move is stored and judged as the equal save is, by the stores that have a shorter way for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg_pool
import pytest

from longrun.errors import CorruptDataError, ExecutionNotFoundError, LeaseLostError, NotStorableError, WriteOrderError
from longrun.moves import Move, passing
from longrun.stored import Boundary, Head, Save, copied
from longrun.stores._postgres import moves as postgres_moves
from longrun.stores._redis import encode
from longrun.stores.base import StoreBackend
from longrun.stores.postgres import PostgresBackend
from longrun.stores.redis import RedisBackend
from longrun.testing.conformance_base import created, done, loaded, opened
from longrun.testing.samples import NOW, create, head, owned, send, step
from tests.servers import PostgresServer, RedisServer, Source


def move(id: str, before: Head, **fields: Any) -> Move:
    """The move from a head to its next boundary. A name with `h_` changes its head."""
    heads = {name[2:]: value for name, value in fields.items() if name.startswith("h_")}
    named, data = fields.get("name", "one"), fields.get("data", b"{}")
    started = fields.get("started", NOW)
    from_head = attrs.evolve(before, started=started, step=before.seq - 1, visit=before.seq)
    made = passing(id, from_head, named, NOW + before.seq, data, 7, fields.get("keep_from"))
    for name, value in heads.items():
        setattr(made.head, name, value)
    return made


def equal_save(one: Move) -> Save:
    return Save(id=one.id, head=copied(one.head), boundaries=(one.boundary,), keep_from=one.keep_from)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "an older state goes": {"keep_from": 2},
    "its own state goes": {"keep_from": 3},
    "no beginning": {"started": None},
    "other letters": {"name": "Schritt »ß« 步", "h_owner": "Ich 🙂"},
    "half a letter": {"h_owner": "\ud800"},
    "nobody": {"h_owner": None},
    "no bytes": {"data": b""},
    "many bytes": {"data": bytes(range(256)) * 40},
    "minus nothing": {"h_progress": -0.0},
    "a moment that is whole": {"h_updated": 1_700_000_002, "h_started": 1_700_000_002},
}


@pytest.fixture
def postgres(postgres_server: PostgresServer | Source, empty_schema: str) -> Iterator[StoreBackend]:
    assert postgres_server.url is not None
    with opened(PostgresBackend(postgres_server.url, schema=empty_schema)) as backend:
        yield backend


@pytest.fixture
def pooled(postgres_server: PostgresServer | Source, empty_schema: str) -> Iterator[StoreBackend]:
    assert postgres_server.url is not None
    with (
        psycopg_pool.ConnectionPool(postgres_server.url, open=True) as pool,
        opened(PostgresBackend(pool, schema=empty_schema)) as backend,
    ):
        yield backend


@pytest.fixture
def redis(redis_server: RedisServer | Source, redis_prefix: str) -> Iterator[StoreBackend]:
    assert redis_server.url is not None
    with opened(RedisBackend(redis_server.url, prefix=redis_prefix.strip(":"))) as backend:
        yield backend


def seen(backend: StoreBackend, id: str) -> tuple[Any, ...]:
    """All that is stored of an execution, but for its id."""
    rows = backend.boundaries(id)
    states = [backend.checkpoint(id, row.seq) for row in rows]
    try:
        one = backend.load(id)
    except CorruptDataError:  # no state is left of it
        return rows, states
    assert one is not None
    return one.head, one.boundary, one.kept, one.messages, one.damage, rows, states, backend.head(id)


def outcome(backend: StoreBackend, write: Save) -> Any:
    (answer,) = backend.commit([write])
    return type(answer) if isinstance(answer, Exception) else answer


class MoveTests:
    """What is true of every store."""

    @pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
    def test_it_is_stored_as_the_equal_save_is(self, backend: StoreBackend, fields: dict[str, Any]) -> None:
        one, other = owned("one", blobs={"one": b"1", "two": b"2"}), owned("other", blobs={"one": b"1", "two": b"2"})
        created(backend, one, other)
        moved_on = move("one", one.head, **fields)
        saved = equal_save(move("other", other.head, **fields))
        assert outcome(backend, moved_on) == outcome(backend, saved)
        assert seen(backend, "one") == seen(backend, "other")

    @pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
    def test_many_at_once_are_stored_as_equal_saves_are(self, backend: StoreBackend, fields: dict[str, Any]) -> None:
        """With others of another kind among them, and enough to be written apart from those."""
        count = postgres_moves.FEW + 4
        news = [owned(f"{kind}{n}", blobs={"one": b"1", "two": b"2"}) for kind in "ms" for n in range(count)]
        other = owned("other")
        created(backend, *news, other)
        extra = {} if "data" in fields else {"data": b"another"}
        changed = [extra | fields if n == 1 else fields for n in range(count)] * 2
        moves = [move(new.id, new.head, **more) for new, more in zip(news, changed, strict=True)]
        answers = backend.commit([*moves[:count], step("other", other.head), create("new")])
        backend.commit([equal_save(one) for one in moves[count:]])
        assert answers[count:] == [None, True]
        assert [seen(backend, f"m{n}") for n in range(count)] == [seen(backend, f"s{n}") for n in range(count)]

    @pytest.mark.parametrize("count", [1, 40])
    def test_each_is_judged_by_itself(self, backend: StoreBackend, count: int) -> None:
        """I3, I9: another fence, a repetition, one that is missing before it, nobody there; the others are done."""
        news = [owned(f"x{n}") for n in range(count + 3)]
        created(backend, *news)
        moves = [move(new.id, new.head) for new in news]
        stale, repeated, early = news[-3:]
        moves[-3] = move(stale.id, stale.head, h_fence=7)
        done(backend, moves[-2])
        moves[-1] = move(early.id, early.head, h_revision=5)
        moves.append(move("nobody", repeated.head))
        answers = backend.commit(moves)
        assert answers[:count] == [None] * count
        assert [type(answer) for answer in answers[count:]] == [
            LeaseLostError,
            type(None),
            WriteOrderError,
            ExecutionNotFoundError,
        ]
        assert [loaded(backend, new.id).head.seq for new in news] == [2] * count + [1, 2, 1]
        for one in moves[count:]:
            backend.commit([one])
        assert [len(backend.boundaries(new.id)) for new in news] == [2] * count + [1, 2, 1]

    def test_two_of_one_execution_follow_each_other(self, backend: StoreBackend) -> None:
        one, other = owned("one"), owned("other")
        created(backend, one, other)
        first = move("one", one.head)
        done(backend, first, move("other", other.head), move("one", first.head))
        assert [row.seq for row in backend.boundaries("one")] == [1, 2, 3]
        assert loaded(backend, "other").head.seq == 2

    def test_it_may_follow_its_own_start_and_messages(self, backend: StoreBackend) -> None:
        one = owned("one")
        assert done(backend, one, move("one", one.head), send("one")) == [True, None, 1]
        assert (loaded(backend, "one").head.seq, len(backend.messages("one"))) == (2, 1)

    def test_a_state_that_retention_lets_go_is_gone(self, backend: StoreBackend) -> None:
        news = [owned(f"x{n}") for n in range(3)]
        created(backend, *news)
        done(backend, *(move(new.id, new.head, keep_from=keep) for new, keep in zip(news, (2, None, 1), strict=True)))
        kept = [[seq for seq, _ in loaded(backend, new.id).kept] for new in news]
        assert kept == [[2], [1, 2], [1, 2]]


class TestPostgres(MoveTests):
    @pytest.fixture
    def backend(self, postgres: StoreBackend) -> StoreBackend:
        return postgres


class TestPostgresWithAPool(MoveTests):
    @pytest.fixture
    def backend(self, pooled: StoreBackend) -> StoreBackend:
        return pooled


class TestRedis(MoveTests):
    @pytest.fixture
    def backend(self, redis: StoreBackend) -> StoreBackend:
        return redis


@pytest.mark.parametrize("wrong", [{"name": "a\0b"}, {"h_visit": 1 << 70}, {"name": "\ud800"}])
def test_one_that_cannot_be_stored_does_not_spoil_the_others(postgres: StoreBackend, wrong: dict[str, Any]) -> None:
    news = [owned(f"x{n}") for n in range(5)]
    created(postgres, *news)
    answers = postgres.commit([move(new.id, new.head, **(wrong if n == 2 else {})) for n, new in enumerate(news)])
    assert [type(answer) for answer in answers] == [type(None)] * 2 + [NotStorableError] + [type(None)] * 2


def test_moves_alone_are_one_statement(postgres: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked before or after it."""
    assert isinstance(postgres, PostgresBackend)
    news = [owned(f"x{n}") for n in range(30)]
    created(postgres, *news)
    asked: list[int] = []
    usual: Callable[..., Any] = postgres_moves.apply

    def counted(connection: Any, queries: Any, found: Any, *, ends: bool) -> Any:
        asked.append(len(found))
        monkeypatch.setattr(connection, "cursor", None)
        return usual(connection, queries, found, ends=ends)

    monkeypatch.setattr(postgres_moves, "apply", counted)
    done(postgres, *(move(new.id, new.head) for new in news))
    assert asked == [30]


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
@pytest.mark.parametrize("seq", [1, 1022, 5000])
def test_its_bytes_are_those_of_the_equal_save(fields: dict[str, Any], seq: int) -> None:
    """What the Redis store's script is given, letter by letter."""
    before = head(owner="me", fence=3, revision=seq + 4, seq=seq)
    one = move("x", before, **fields)
    (chunk,), (equal,) = encode.chunks([one], {}), encode.chunks([equal_save(one)], {})
    assert chunk.argument() == equal.argument()


def test_a_long_name_is_no_obstacle(redis: StoreBackend) -> None:
    one = owned("one", owner="o" * 5000)
    created(redis, one)
    done(redis, move("one", one.head, name="n" * 5000))
    assert isinstance(one.boundary, Boundary)
    assert loaded(redis, "one").boundary.name == "n" * 5000
