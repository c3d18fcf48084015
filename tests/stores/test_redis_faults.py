"""Redis and Valkey when things go wrong: lost answers, killed servers, full memory, replicas, wrong passwords."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis

from longrun.client import Client
from longrun.errors import ConfigError, LongrunError, StoreSettingsError, StoreUnavailableError
from longrun.queues import QueueLimit
from longrun.records import ExecutionState
from longrun.stored import Head, Query, Save
from longrun.stores._redis import watching
from longrun.stores._redis.link import KEPT, Link, Options, Server
from longrun.stores.redis import RedisBackend, RedisCheckpointStore
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import change, claim, create, owned, send, step
from tests.servers import RedisServer
from tests.stores.redis_proxy import Relay

PATIENCE = 60.0


@pytest.fixture
def admin(disposable_redis: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(disposable_redis.url) as client:
        yield client


@pytest.fixture
def backend(disposable_redis: RedisServer) -> Iterator[RedisBackend]:
    store = RedisBackend(disposable_redis.url)
    store.open()
    yield store
    store.close()


@pytest.fixture
def relay(disposable_redis: RedisServer) -> Iterator[Relay]:
    with Relay(disposable_redis.socket) as relay:
        yield relay


@pytest.fixture
def relayed(relay: Relay) -> Iterator[RedisBackend]:
    """A store whose connection goes through the relay."""
    store = RedisBackend(relay.url)
    store.open()
    yield store
    store.close()


class TestLostAnswers:
    def test_a_batch_whose_answer_was_lost_is_applied_once(self, relay: Relay, relayed: RedisBackend) -> None:
        """I9: it is sent again, recognised, and answered as the first time."""
        new = owned("a")
        second = step("a", new.head, put={"e": b"1"})
        relay.lose(2)
        answers = relayed.commit([new, second, send("a"), send("a", key="k"), owned("a")])
        assert answers == [True, None, 1, 2, False]
        assert relay.lost == 2
        found = relayed.load("a")
        assert found is not None
        assert (found.head, len(found.messages)) == (second.head, 2)
        assert [row.seq for row in relayed.boundaries("a")] == [1, 2]

    def test_saves_whose_answer_was_lost_are_compared(self, relay: Relay, relayed: RedisBackend) -> None:
        """I9."""
        new = owned("a")
        relayed.commit([new])
        second = step("a", new.head)
        third = step("a", second.head)
        relay.lose(1)
        assert relayed.commit([second, third]) == [None, None]
        assert relay.lost == 1
        assert relayed.commit([second]) == [None]
        found = relayed.load("a")
        assert found is not None
        assert found.head == third.head
        assert [row.seq for row in relayed.boundaries("a")] == [1, 2, 3]

    def test_a_claim_whose_answer_was_lost_is_given_once(self, relay: Relay, relayed: RedisBackend) -> None:
        """I3, I9: with the fence of the first time."""
        relayed.commit([create(id, ExecutionState.WAITING) for id in "abc"])
        relay.lose(1)
        given = relayed.claim(claim())
        assert relay.lost == 1
        assert [(one.definition.id, one.head.fence) for one in given] == [("a", 1), ("b", 1), ("c", 1)]

    def test_a_claim_that_was_given_up_is_found_again(self, relay: Relay, relayed: RedisBackend) -> None:
        """I4: the server gave it, nobody heard; the owner's next claim gets it, and it is not lost for ever."""
        relayed.commit([create("a", ExecutionState.WAITING)])
        relay.lose(1000)
        with pytest.raises(StoreUnavailableError):
            relayed.claim(claim())
        relay.lose(0)
        relayed.commit([create("b", ExecutionState.WAITING)])
        given = relayed.claim(claim()) + relayed.claim(claim())
        assert [(one.definition.id, one.head.fence) for one in given] == [("a", 1), ("b", 1)]
        assert relayed.claim(claim()) == []

    def test_who_asks_for_something_else_does_not_get_what_nobody_heard_of(
        self, relay: Relay, relayed: RedisBackend
    ) -> None:
        """I3: the claim of one was given up; the claim of another is answered with that one, and the first is kept."""
        relayed.commit([create(id, ExecutionState.WAITING) for id in "ab"])
        relay.lose(1000)
        with pytest.raises(StoreUnavailableError):
            relayed.claim(claim(ids=("a",)))
        relay.lose(0)
        assert [one.definition.id for one in relayed.claim(claim(ids=("b",)))] == ["b"]
        assert sorted(one.definition.id for one in relayed.find(Query(owner="me"))) == ["a", "b"]
        given = relayed.claim(claim(ids=("a",), dead=frozenset({"me"})))
        assert [(one.definition.id, one.head.fence) for one in given] == [("a", 2)]

    async def test_a_limit_is_not_written_to_what_a_lost_claim_had_given(
        self, disposable_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """I3: the queue's record is asked for by its name, and no execution is taken for it."""
        backend = RedisBackend(disposable_redis.url)
        store, link = CheckpointStore(backend), backend._link
        async with store, Client(store) as client:
            await client.limit_queue("q", concurrency=1)
            await client.submit("work", id="a", queue="q")
            before = (await store.load("a")).head
            with monkeypatch.context() as patch:
                patch.setattr(link, "repeated", _unheard(link))
                with pytest.raises(StoreUnavailableError):
                    await store.claim(claim(client.owner, queues=frozenset({"q"}), workflows=frozenset({"work"})))
            await client.limit_queue("q", concurrency=2)
            limits = {queue.name: queue.limit for queue in await client.list_queues()}
            assert limits["q"] == QueueLimit(concurrency=2)
            after = (await store.load("a")).head
            assert (after.state, after.note, after.owner) == (before.state, before.note, client.owner)

    def test_a_deletion_whose_answer_was_lost(self, relay: Relay, relayed: RedisBackend) -> None:
        relayed.commit([create("a", ExecutionState.COMPLETED)])
        relay.lose(1)
        assert relayed.delete(["a", "b"]) == [True, False]
        assert relay.lost == 1

    def test_connections_that_are_killed_during_commits(
        self, backend: RedisBackend, admin: redis.Redis, campaign_size: int
    ) -> None:
        """I1, I9: nothing is lost and nothing is doubled."""
        new = owned("a")
        backend.commit([new])
        rounds = campaign_size * 3
        begun = threading.Semaphore(0)

        def kill() -> None:
            """Once for each commit, at whatever point it has come to."""
            for _ in range(rounds):
                begun.acquire()
                admin.client_kill_filter(_type="normal", skipme=True)

        killer = threading.Thread(target=kill)
        killer.start()
        head, numbers = new.head, []
        try:
            for _ in range(rounds):
                save = step("a", head)
                begun.release()
                numbers.append(backend.commit([save, send("a", limit=10_000)])[1])
                head = save.head
        finally:
            begun.release(rounds)
            killer.join()
        assert [row.seq for row in backend.boundaries("a")] == list(range(1, head.seq + 1))
        assert [message.id for message in backend.messages("a")] == numbers == list(range(1, len(numbers) + 1))


def _unheard(link: Link) -> Callable[..., Any]:
    """Every claim is made, and no answer to one comes."""
    usual = link.repeated

    def repeated(name: str, *args: Any) -> Any:
        answer = usual(name, *args)
        if name == "claim":
            raise StoreUnavailableError("Redis", "no answer in time")
        return answer

    return repeated


class TestServerDeath:
    def test_what_was_acknowledged_outlives_the_server(
        self, disposable_redis: RedisServer, backend: RedisBackend, campaign_size: int
    ) -> None:
        """I1: the server is killed in the middle of commits and started again on its append-only file."""
        news = [owned(f"x{n}") for n in range(20)]
        backend.commit(news)
        worker = _Saver(backend, [new.head for new in news], [new.id for new in news])
        thread = threading.Thread(target=worker.run)
        thread.start()
        for _ in range(max(2, campaign_size // 10)):
            worker.progress(5)
            disposable_redis.kill()
            disposable_redis.start()
        worker.progress(5)
        worker.stop.set()
        thread.join(PATIENCE)
        assert worker.errors == []
        for id, head in zip(worker.ids, worker.acknowledged, strict=True):
            found = backend.load(id)
            assert found is not None
            assert (found.head, found.damage) == (head, ())
            assert [row.seq for row in backend.boundaries(id)] == list(range(1, head.seq + 1))

    def test_connections_that_were_kept_do_not_use_up_the_patience(
        self, disposable_redis: RedisServer, backend: RedisBackend
    ) -> None:
        """Several threads left a connection each behind, and the server that they led to is gone."""
        link = backend._link
        backend.commit([owned("a")])
        for connection in [link._take() for _ in range(KEPT)]:
            link._keep(connection)
        assert len(link._kept) == KEPT
        disposable_redis.restart()
        assert backend.commit([step("a", owned("a").head)]) == [None]
        assert len(link._kept) == 1  # the new one; the others were dropped with the first that failed

    def test_while_it_is_away_every_call_says_so(self, disposable_redis: RedisServer, backend: RedisBackend) -> None:
        backend.commit([create("a")])
        disposable_redis.kill()
        for call in (
            lambda: backend.commit([send("a")]),
            lambda: backend.claim(claim()),
            lambda: backend.load("a"),
            lambda: backend.wait(0.1),
            backend.ping,
        ):
            with pytest.raises(StoreUnavailableError) as caught:
                call()
            assert isinstance(caught.value.__cause__, redis.RedisError | OSError)
        disposable_redis.start()
        assert backend.wait(0.1) is True
        assert backend.commit([send("a")]) == [1]
        assert len(backend.claim(claim())) == 1


class _Saver:
    """Saves all its executions again and again; what is refused for now it repeats with the same revision."""

    def __init__(self, backend: RedisBackend, heads: list[Head], ids: list[str]) -> None:
        self._backend = backend
        self.ids, self.acknowledged = ids, heads
        self.stop = threading.Event()
        self.errors: list[object] = []
        self._rounds = threading.Semaphore(0)

    def run(self) -> None:
        while not self.stop.is_set():
            batch = [step(id, head) for id, head in zip(self.ids, self.acknowledged, strict=True)]
            if self._committed(batch):
                self.acknowledged = [save.head for save in batch]
                self._rounds.release()

    def _committed(self, batch: list[Save]) -> bool:
        while True:
            try:
                answers = self._backend.commit(batch)
            except StoreUnavailableError:
                if self.stop.is_set():
                    return False
                continue
            self.errors += [answer for answer in answers if answer is not None]
            return True

    def progress(self, rounds: int) -> None:
        for _ in range(rounds):
            assert self._rounds.acquire(timeout=PATIENCE)


class TestRefusals:
    def refused(self, backend: RedisBackend, save: Save) -> StoreUnavailableError:
        with pytest.raises(StoreUnavailableError) as caught:
            backend.commit([save, send(save.id), create("b")])
        assert isinstance(caught.value.__cause__, redis.RedisError)
        found = backend.load(save.id)
        assert found is not None
        assert (found.head.revision, found.messages) == (save.head.revision - 1, ())
        assert backend.load("b") is None
        return caught.value

    def test_full_memory(self, backend: RedisBackend, admin: redis.Redis) -> None:
        """Nothing of the batch is applied, the error says why, and work goes on when there is room."""
        new = owned("a")
        backend.commit([new])
        admin.config_set("maxmemory", 1)
        assert "memory is full" in str(self.refused(backend, step("a", new.head)))
        admin.config_set("maxmemory", 0)
        assert backend.commit([step("a", new.head)]) == [None]

    def test_a_replica(self, backend: RedisBackend, admin: redis.Redis) -> None:
        new = owned("a")
        backend.commit([new])
        admin.replicaof("127.0.0.1", "1")
        assert "read-only replica" in str(self.refused(backend, step("a", new.head)))
        admin.replicaof("NO", "ONE")
        assert backend.commit([step("a", new.head)]) == [None]

    def test_a_key_of_another_type_refuses_only_its_own_write(self, backend: RedisBackend, admin: redis.Redis) -> None:
        a, b = owned("a"), owned("b")
        backend.commit([a, b])
        admin.delete("{longrun}:x:a")
        admin.set("{longrun}:x:a", "not ours")
        answers = backend.commit([step("a", a.head), step("b", b.head)])
        assert isinstance(answers[0], LongrunError)
        assert answers[1] is None

    def test_what_a_claim_cannot_read_is_given_all_the_same(self, backend: RedisBackend, admin: redis.Redis) -> None:
        """I4: the claim was made, and says so to whoever asks again."""
        backend.commit([create(id, ExecutionState.WAITING) for id in "ab"])
        admin.set("{longrun}:e:b", "not ours")
        with pytest.raises(StoreSettingsError, match="not longrun's"):
            backend.claim(claim())
        admin.delete("{longrun}:e:b")
        given = backend.claim(claim())
        assert [(one.definition.id, one.head.fence) for one in given] == [("a", 1), ("b", 1)]

    def test_a_restarted_server_has_forgotten_the_scripts(self, backend: RedisBackend, admin: redis.Redis) -> None:
        new = owned("a")
        backend.commit([new])
        admin.script_flush()
        assert backend.commit([step("a", new.head)]) == [None]


class TestSettings:
    SECRET = "correct-horse-battery"

    @pytest.mark.parametrize("given", [None, "wrong-horse-battery"])
    def test_a_password_that_is_wrong_or_missing(
        self, disposable_redis: RedisServer, admin: redis.Redis, given: str | None
    ) -> None:
        admin.config_set("requirepass", self.SECRET)
        password = "" if given is None else f"&password={given}"
        store = RedisBackend(disposable_redis.url + password)
        try:
            with pytest.raises(StoreSettingsError) as caught:
                store.open()
            shown = "".join(traceback.format_exception(caught.value)) + repr(store) + str(store.describe())
            assert "password" in str(caught.value)
            assert str(given) not in shown
        finally:
            store.close()
            admin.execute_command("AUTH", self.SECRET)
            admin.config_set("requirepass", "")

    def test_the_right_password_is_never_shown(self, disposable_redis: RedisServer, admin: redis.Redis) -> None:
        admin.config_set("requirepass", self.SECRET)
        store = RedisCheckpointStore(f"{disposable_redis.url}&password={self.SECRET}")
        try:
            store.backend.open()
            assert self.SECRET not in repr(store) + str(store.backend.describe())
        finally:
            store.backend.close()
            admin.execute_command("AUTH", self.SECRET)
            admin.config_set("requirepass", "")

    @pytest.mark.parametrize("url", ["nonsense", "http://:secret@host/", "redis://:sec#ret@host:port/0", "redis://h:x"])
    def test_a_url_that_is_none(self, url: str) -> None:
        with pytest.raises(StoreSettingsError, match="URL") as caught:
            RedisBackend(url)
        assert "sec" not in "".join(traceback.format_exception(caught.value)).replace("RedisBackend(url)", "")

    def test_nobody_listens(self, tmp_path: Path) -> None:
        store = RedisBackend(f"unix://{tmp_path}/nowhere")
        with pytest.raises(StoreUnavailableError, match="no connection to unix:"):
            store.open()
        store.close()

    def test_a_durable_server_is_called_by_its_name(
        self, disposable_redis: RedisServer, backend: RedisBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Valkey is never called Redis."""
        facts = backend.describe()
        assert facts["server"] == f"{disposable_redis.name} {disposable_redis.version}"
        assert facts["kind"] == backend.kind == disposable_redis.name.lower()
        assert (facts["appendfsync"], facts["warnings"], backend.durable) == ("always", (), True)
        assert caplog.records == []

    @pytest.mark.parametrize(
        ("settings", "word"),
        [
            ({"appendfsync": "everysec"}, "everysec"),
            ({"appendonly": "no"}, "appendonly"),
            ({"maxmemory": 1 << 30, "maxmemory-policy": "allkeys-lru"}, "allkeys-lru"),
        ],
    )
    def test_a_server_that_may_lose_data_is_warned_about(
        self,
        disposable_redis: RedisServer,
        admin: redis.Redis,
        caplog: pytest.LogCaptureFixture,
        settings: dict[str, str],
        word: str,
    ) -> None:
        for name, value in settings.items():
            admin.config_set(name, value)
        store = RedisBackend(disposable_redis.url)
        with caplog.at_level(logging.WARNING, "longrun"):
            store.open()
        store.close()
        assert store.durable is False
        (line,) = caplog.messages
        assert line.startswith("store.not_durable")
        assert word in line
        assert word in str(store.describe()["warnings"])

    def test_settings_that_may_not_be_asked_for_are_unknown(
        self, disposable_redis: RedisServer, admin: redis.Redis
    ) -> None:
        admin.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", "-config")
        store = RedisBackend(f"{disposable_redis.url}&username=plain&password=pw")
        store.open()
        try:
            assert (store.durable, store.describe()["appendfsync"]) == (False, "unknown")
            assert store.commit([create("a")]) == [True]
        finally:
            store.close()


@pytest.mark.parametrize("rights", [("resetchannels", "+@all"), ("allchannels", "+@all", "-publish")])
def test_who_may_not_publish_is_warned_and_writes_all_the_same(
    disposable_redis: RedisServer,
    admin: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    rights: tuple[str, ...],
) -> None:
    """I10: what was written is never answered by an error, and no answer is lost with it."""
    admin.execute_command("ACL", "SETUSER", "mute", "on", ">pw", "~{longrun}:*", *rights)
    store = RedisBackend(f"{disposable_redis.url}&username=mute&password=pw")
    with caplog.at_level(logging.WARNING, "longrun"):
        store.open()
    try:
        (line,) = caplog.messages
        assert line.startswith("store.silent")
        for shown in (line, str(store.describe()["warnings"])):
            assert "{longrun}:changes" in shown
        assert store.durable
        new = owned("a")
        assert store.commit([new]) == [True]
        assert store.commit([send("a"), step("a", new.head)]) == [1, None]
        assert store.commit([new]) == [False]
    finally:
        store.close()


def test_who_may_not_subscribe_is_told_however_late_the_refusal_comes(
    backend: RedisBackend, disposable_redis: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever believed to hear the others would not even look now and then. Without the refusal it hears them."""
    admin.execute_command("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all")
    store = RedisBackend(f"{disposable_redis.url}&username=deaf&password=pw")
    store.open()
    original, waits = redis.client.PubSub.get_message, iter([True] * 6)

    def late(*args: Any, **options: Any) -> Any:
        return None if next(waits, False) else original(*args, **options)

    monkeypatch.setattr(redis.client.PubSub, "get_message", late)
    for _ in range(2):
        with pytest.raises(StoreSettingsError, match="may not run a command"):
            store.wait(PATIENCE)
    admin.execute_command("ACL", "SETUSER", "deaf", "allchannels")
    assert store.wait(PATIENCE) is True
    assert store.wait(0.2) is False
    backend.commit([create("a")])
    assert store.wait(PATIENCE) is True
    store.close()


def test_who_waits_for_the_answer_to_its_subscription_can_be_woken(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(redis.client.PubSub, "get_message", lambda *args, **options: None)
        backend.wake()
        assert backend.wait(PATIENCE) is True
        patched.setattr(watching, "PATIENCE", 0.0)
        with pytest.raises(StoreUnavailableError):
            backend.wait(PATIENCE)
    assert backend.wait(PATIENCE) is True
    assert backend.wait(0.1) is False


def test_who_opens_the_store_is_no_news(backend: RedisBackend, disposable_redis: RedisServer) -> None:
    backend.wait(0.0)
    other = RedisBackend(disposable_redis.url)
    other.open()
    assert backend.wait(0.2) is False
    other.commit([create("a")])
    assert backend.wait(PATIENCE) is True
    other.close()


def test_who_writes_is_not_told_of_it(backend: RedisBackend, disposable_redis: RedisServer) -> None:
    """To sweep after each start and end of one's own would stand in the way of the steps."""
    backend.wait(0.0)
    backend.commit([create("a"), send("a")])
    assert backend.wait(0.2) is False
    other = RedisBackend(disposable_redis.url)
    other.open()
    backend.commit([create("b")])
    other.commit([create("c")])
    backend.commit([create("d")])
    assert backend.wait(PATIENCE) is True
    other.close()


def test_a_server_that_takes_no_writes_can_be_opened_and_made_room_on(
    backend: RedisBackend, admin: redis.Redis, disposable_redis: RedisServer
) -> None:
    """I10: what is there can be read; and who deletes from a full one has room again."""
    done = owned("a", state=ExecutionState.COMPLETED)
    backend.commit([done, owned("b")])
    admin.config_set("maxmemory", 1)
    other = RedisBackend(disposable_redis.url)
    other.open()
    assert len(other.find(Query())) == 2
    assert other.delete(["a"]) == [True]
    admin.config_set("maxmemory", 0)
    admin.replicaof("127.0.0.1", "1")
    other.close()
    other.open()
    assert [one.definition.id for one in other.find(Query())] == ["b"]
    other.close()


@pytest.mark.parametrize("how", ["replica", "too few replicas", "a user that may not"])
def test_what_expired_keeps_nobody_from_looking_where_nothing_can_be_written(
    admin: redis.Redis, disposable_redis: RedisServer, how: str
) -> None:
    """I10: it cannot be forgotten there, and is not shown all the same."""
    backend = RedisBackend(disposable_redis.url, finished_ttl=0.001)
    backend.open()
    children = [create(f"a{n}", ExecutionState.COMPLETED, parent_id="p") for n in range(3)]
    backend.commit([owned("b", parent_id="p"), *children])
    deadline = time.monotonic() + PATIENCE
    while any(admin.exists(f"{{longrun}}:x:{child.id}") for child in children):
        assert time.monotonic() < deadline
    backend.close()
    assert admin.zcard("{longrun}:i:child:=p") > 1
    url = disposable_redis.url
    if how == "replica":
        admin.replicaof("127.0.0.1", "1")
    elif how == "too few replicas":
        admin.config_set("min-replicas-to-write", 3)
    else:
        admin.acl_setuser(
            "looks", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all", "-@write"]
        )
        admin.execute_command("ACL", "SETUSER", "looks", "+eval", "+evalsha")
        url = url.replace("unix://", "unix://looks@")
    other = RedisBackend(url)
    other.open()
    for query in (Query(), Query(parent_id="p")):
        assert [one.definition.id for one in other.find(query)] == ["b"]
        assert other.count(query) == {ExecutionState.RUNNING: 1}
    other.close()


def test_who_may_not_is_told_so(backend: RedisBackend, admin: redis.Redis, disposable_redis: RedisServer) -> None:
    admin.acl_setuser("looks", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@read", "+@connection"])
    poor = RedisBackend(disposable_redis.url.replace("unix://", "unix://looks:s3cret@"))
    with pytest.raises(StoreSettingsError, match="may not run a command") as caught:
        poor.open()
    assert "s3cret" not in str(caught.value)
    admin.hset("{other}:format", "a", "b")
    with pytest.raises(StoreSettingsError, match="not longrun's; give another prefix="):
        RedisBackend(disposable_redis.url, prefix="other").open()


class TestLink:
    """The connection itself."""

    @pytest.fixture
    def link(self, disposable_redis: RedisServer) -> Iterator[Link]:
        link = Link(disposable_redis.url, "test", Options(max_connections=2, timeout=1.0))
        yield link
        link.close()

    def test_a_pool_of_two_is_not_used_up(self, link: Link, admin: redis.Redis) -> None:
        """While somebody listens on one: neither by what is kept for the next call nor by what the server refuses."""
        pool = link.client.connection_pool
        listening = pool.get_connection()
        try:
            for _ in range(3):
                with pytest.raises(StoreUnavailableError, match="answers with an error"):
                    link.once(lambda: link._ask("EVAL", "return redis.error_reply('ODD')", 0))
            assert link._ask("EVAL", "return 7", 0) == 7
            assert link.read("PING")
            assert {one["name"] for one in admin.client_list() if one["name"]} == {"longrun"}
        finally:
            pool.release(listening)

    def test_who_is_refused_does_not_ask_again(self, link: Link) -> None:
        asked: list[None] = []

        def refused() -> None:
            asked.append(None)
            raise redis.AuthenticationError("no")

        with pytest.raises(StoreSettingsError, match="refuses this user name and password"):
            link._repeat(refused)
        assert len(asked) == 1

    def test_a_driver_that_asks_what_a_connection_is_for(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before redis-py 5.3."""
        pool = link.client.connection_pool
        usual = pool.get_connection

        def older(command_name: str) -> Any:
            assert command_name
            return usual()

        monkeypatch.setattr(pool, "get_connection", older)
        assert link._ask("EVAL", "return 7", 0) == 7

    @pytest.mark.parametrize(
        ("info", "name"), [({"valkey_version": "7.2.4"}, "Valkey 7.2.4"), ({"redis_version": "6.2.0"}, "Redis 6.2.0")]
    )
    def test_what_a_server_says_of_itself(
        self, link: Link, monkeypatch: pytest.MonkeyPatch, info: dict[str, str], name: str
    ) -> None:
        monkeypatch.setattr(link.client, "info", lambda _: info)
        server = link.inspect()
        assert f"{server.name} {server.version}" == name

    def test_a_server_that_is_too_old_is_refused(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link.client, "info", lambda _: {"redis_version": "6.0.16"})
        with pytest.raises(StoreSettingsError, match=r"6\.0\.16 is too old"):
            link.inspect()


@pytest.mark.parametrize(
    ("url", "place"),
    [("redis://me:pw@host:1/2", "host:1 db 2"), ("redis://", "localhost:6379 db 0"), ("unix:///s", "unix:/s db 0")],
)
def test_where_the_server_is(url: str, place: str) -> None:
    assert Link(url, "test", Options()).place() == place


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (redis.ResponseError("NOAUTH Authentication required."), StoreSettingsError, "wants a password"),
        (redis.ResponseError("WRONGPASS invalid username-password pair"), StoreSettingsError, "refuses this user name"),
        (redis.AuthenticationError("no"), StoreSettingsError, "or wants one"),
        (redis.exceptions.ReadOnlyError("x"), StoreUnavailableError, "read-only replica"),
        (redis.ResponseError("MISCONF Redis is configured to save"), StoreUnavailableError, "cannot write to its disk"),
        (redis.TimeoutError("x"), StoreUnavailableError, "no answer from host:1 db 0 in time"),
        (redis.ConnectionError("x"), StoreUnavailableError, "no connection to host:1 db 0"),
        (ConnectionResetError(), StoreUnavailableError, "no connection to host:1 db 0"),
        (redis.ConnectionError("Too many connections"), StoreUnavailableError, "max_connections: it needs up to 6"),
        (redis.ConnectionError("No connection available."), StoreUnavailableError, "max_connections: it needs up to 6"),
        (redis.ResponseError("ERR odd"), StoreUnavailableError, r"answers with an error \(ResponseError\)"),
    ],
)
def test_what_an_error_of_the_server_means(error: Exception, kind: type[Exception], words: str) -> None:
    def failing() -> None:
        raise error

    with pytest.raises(kind, match=words) as caught:
        Link("redis://host:1", "test", Options()).once(failing)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_finished_executions_are_kept_for_a_time_or_for_ever(seconds: float) -> None:
    with pytest.raises(ConfigError, match="finished_ttl"):
        RedisBackend("redis://host:1", finished_ttl=seconds)


@pytest.mark.parametrize("maxmemory", ["0", None])
def test_a_server_without_a_limit_deletes_nothing(maxmemory: str | None) -> None:
    settings = {"appendonly": "yes", "appendfsync": "always", "maxmemory_policy": "allkeys-lru"}
    assert Server(name="Redis", version="7", maxmemory=maxmemory, **settings).losses == ()
    assert Server(name="Redis", version="7", maxmemory="1", **settings).losses != ()


def test_a_reader_sees_what_was_released_while_the_writer_is_refused(backend: RedisBackend, admin: redis.Redis) -> None:
    """Reading goes on while the memory is full."""
    new = owned("a")
    backend.commit([new, change("a", new.head, head_fields={"owner": None, "state": ExecutionState.RESUMING})])
    admin.config_set("maxmemory", 1)
    assert [one.definition.id for one in backend.find(Query())] == ["a"]
    assert backend.next_due() == 0
    found = backend.load("a")
    assert found is not None
    assert found.head == attrs.evolve(new.head, revision=1, owner=None, state=ExecutionState.RESUMING)
