"""Moving house: what is copied from one store to another goes on there where it was, from any store to any other.

Interrupted anywhere and run again, the copy is whole; nothing can go on in both stores; and a target that does not hold
what it was given is noticed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import redis

from longrun import (
    EventType,
    ExecutionNotFoundError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    InvalidStateError,
    LeaseLostError,
    MemoryCheckpointStore,
    QueueLimit,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    StoreError,
    StoreSettingsError,
    StoreUnavailableError,
    WaitFor,
    open_store,
)
from longrun.client import Client
from longrun.control_room import BETWEEN
from longrun.lease import gone
from longrun.stored import RECORDS, Boundary, Loaded, Message, Query, Save, Send, Stored, Write
from longrun.stores._copy.picture import NOTE
from longrun.stores.base import Answer
from longrun.stores.copy import CopyReport, copy_store
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore
from longrun.testing.interposed import InterposedBackend
from longrun.worker import Worker
from tests.crashing import CrashableExecutor, crash, rest
from tests.servers import PostgresServer, RedisServer, Source

PATIENCE = 60.0
BIG = "x" * 200_000
Make = Callable[[], CheckpointStore]


class Household:
    """Executions in every state that a store can hold."""

    ids = frozenset({"done", "failed", "waits", "sleeps", "held", "queued", "big", "interrupted"})
    live = ids - {"done", "failed"}

    def __init__(self) -> None:
        self.registry = StepRegistry()
        self.called: list[str] = []
        self.middle = anyio.Event()
        self.go_on = anyio.Event()
        self.mended = False
        once = RetryPolicy(max_attempts=1)
        for step in (self.plus, self.ask, self.answer, self.nap, self.breaks, self.grows, self.items):
            self.registry.register(step.__name__, step, retry=once)
        self.registry.workflow("count", ["plus", "plus", "plus"])
        self.registry.workflow("ask", ["ask", "answer"])
        self.registry.workflow("ask-twice", ["ask", "ask", "answer"])
        self.registry.workflow("nap", ["plus", "nap", "plus"])
        self.registry.workflow("breaks", ["plus", "breaks"])
        self.registry.workflow("grows", ["grows", "ask", "answer"])
        self.registry.workflow("items", ["plus", "items"])

    async def plus(self, state: int) -> int:
        return state + 1

    async def ask(self, state: Any) -> WaitFor:
        return WaitFor("go", state)

    async def answer(self, ctx: StepContext, state: Any) -> Any:
        return [len(state) if isinstance(state, str) else state, ctx.signal]

    async def nap(self, state: int) -> Sleep:
        return Sleep(1e6, state)

    async def breaks(self, ctx: StepContext, state: int) -> int:
        await ctx.once("before", self._call, "breaks")
        if not self.mended:
            raise ValueError("broken")
        return state

    async def grows(self, state: Any) -> str:
        return BIG

    async def items(self, ctx: StepContext, state: int) -> int:
        async for n in ctx.each("items", range(6), every=1):
            self.called.append(f"item {n}")
            ctx.local["sum"] = ctx.local.get("sum", 0) + n
            if n == 3:
                self.middle.set()
                await self.go_on.wait()
        return int(ctx.local["sum"])

    async def _call(self, name: str) -> None:
        self.called.append(name)

    async def move_in(self, store: CheckpointStore) -> None:
        """Everything that is to be moved, and a process that died at its work."""
        async with CrashableExecutor(self.registry, store=store, config=ExecutorConfig(lease_ttl=30.0)) as executor:
            await (await executor.start("count", 1, id="done", metadata={"customer": 7})).result()
            failed = await executor.start("breaks", 1, id="failed")
            await failed.wait("failed")
            events = executor.events()
            waits = await executor.start("ask-twice", "w", id="waits")
            await waits.signal("go", "first", key="taken")
            waited = 0
            async for event in events:
                waited += event.execution_id == "waits" and event.type is EventType.WAITING
                if waited == 2:
                    break
            await waits.signal("other", {"n": 1}, key="seen")
            await waits.signal("other", {"n": 2})
            await (await executor.start("nap", 1, id="sleeps")).wait("waiting")
            await executor.submit("count", 5, id="held", queue="gpu")
            await executor.pause("held", hold=True)
            await executor.submit("count", 7, id="queued", queue="gpu", priority=3, delay=0.0)
            await (await executor.start("grows", None, id="big")).wait("waiting")
            await executor.limit_queue("gpu", concurrency=2)
            await executor.start("items", 1, id="interrupted")
            await self.middle.wait()
            await crash(executor)

    async def live_on(self, make: Make) -> None:
        """All of it goes on in the new place, where it was."""
        store = make()
        self.go_on.set()
        self.mended = True
        self.called.clear()
        config = ExecutorConfig(heartbeat_interval=0.1)
        async with Worker(self.registry, store=store, config=config) as worker, Client(make()) as client:
            assert await client.handle("done").result() == 4
            assert (await client.get("done")).metadata == {"customer": 7}
            await client.retry("failed")
            assert await client.handle("failed").result() == 2
            await client.signal("waits", "other", {"n": 3}, key="seen")  # sent before the move, as was the next one
            await client.signal("waits", "go", "again", key="taken")
            assert [m.name for m in await store.messages("waits")] == ["other", "other"]
            for id in ("waits", "big"):
                await client.signal(id, "go", "now")
            assert await client.handle("waits").result() == [1, "now"]
            assert await client.handle("big").result() == [len(BIG), "now"]
            assert (await client.get("held")).state == "paused"
            await client.resume("held")
            assert await client.handle("held").result() == 8
            assert await client.handle("queued").result() == 10
            assert await client.handle("interrupted").result() == 15
            assert (await client.get("sleeps")).state == "waiting"
            queues = {queue.name: queue.limit for queue in await worker.list_queues()}
            assert queues["gpu"] == QueueLimit(concurrency=2)
        assert self.called == ["item 3", "item 4", "item 5"], "nothing that was done is done again"


async def move(source: Make, target: Make) -> None:
    """Copy, copy again, and live on."""
    house = Household()
    with anyio.fail_after(PATIENCE):
        await house.move_in(source())
        seen: list[str] = []
        report = await copy_store(source(), target(), progress=seen.append)
        assert set(report.copied) == house.ids == set(seen)
        assert not report.skipped
        again = await copy_store(source(), target())
        assert set(again.present) == house.ids
        assert not again.copied
        assert not again.skipped
        await assert_left_behind(source(), house)
        await house.live_on(target)
        late = await copy_store(source(), target())
        assert set(late.present) == house.ids, "what has gone on there is left alone"


async def assert_left_behind(source: CheckpointStore, house: Household) -> None:
    async with source:
        for stored in await source.find(Query()):
            head = stored.head
            if stored.definition.id in house.live:
                assert (head.state, head.hold, head.owner) == ("paused", True, None)
                assert head.reason is not None
                assert "moved" in head.reason
            else:
                assert head.state.finished


# --- from any to any ------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Make:
    return lambda: open_store(f"file:{tmp_path / 'store'}")


@pytest.fixture
def sqlite(tmp_path: Path) -> Make:
    return lambda: open_store(f"sqlite:///{tmp_path / 'store.db'}")


@pytest.fixture
def postgres(postgres_server: PostgresServer | Source, postgres_schema: str) -> Make:
    assert postgres_server.url is not None
    url = postgres_server.url
    return lambda: open_store(url, schema=postgres_schema)


@pytest.fixture
def redis_or_valkey(redis_server: RedisServer | Source) -> Iterator[Make]:
    assert redis_server.url is not None
    url, prefix = redis_server.url, f"test:{uuid.uuid4().hex}"
    yield lambda: open_store(url, prefix=prefix)
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(match=f"{{{prefix}}}*", count=1000):
            client.delete(key)


async def test_from_files_to_sqlite(files: Make, sqlite: Make) -> None:
    await move(files, sqlite)


async def test_from_sqlite_to_postgres(sqlite: Make, postgres: Make) -> None:
    await move(sqlite, postgres)


async def test_from_postgres_to_redis(postgres: Make, redis_or_valkey: Make) -> None:
    await move(postgres, redis_or_valkey)


async def test_from_redis_to_files(redis_or_valkey: Make, files: Make) -> None:
    await move(redis_or_valkey, files)


# --- interrupted ----------------------------------------------------------------------------------------------------


async def copy_until_done(source: FaultyStore, target: FaultyStore) -> tuple[CopyReport, int]:
    """Run the copy again and again, as whoever started it would; how often it was interrupted."""
    interrupted = 0
    while True:
        try:
            return await copy_store(source, target), interrupted
        except StoreUnavailableError:
            interrupted += 1


async def assert_equal(source: CheckpointStore, target: CheckpointStore, house: Household) -> None:
    for id in house.ids:
        here, there = await source.load(id), await target.load(id)
        assert _content(here) == _content(there)
        assert await source.boundaries(id) == await target.boundaries(id)
        for seq, _ in here.kept:
            assert await source.checkpoint(id, seq) == await target.checkpoint(id, seq)


def _content(loaded: Loaded) -> Any:
    messages = [attrs.evolve(message, id=0) for message in loaded.messages]
    entries = {key: data for key, data in loaded.entries.items() if key != NOTE}  # what the source keeps for itself
    return loaded.definition, loaded.boundary, loaded.blobs, entries, messages, loaded.kept


async def test_nothing_can_go_on_in_both_stores_whenever_a_copy_breaks_off() -> None:
    """I3, between two stores: what is live in the target is held in the source."""
    number, fired = 1, True
    with anyio.fail_after(PATIENCE):
        while fired:
            house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
            await house.move_in(source)
            faulty = FaultyStore(target)
            faulty.fail("commit", number, times=None)
            fired = False
            try:
                await copy_store(source, faulty)
            except StoreUnavailableError:
                fired = True
            async with source, target:
                there = {s.definition.id: s.head for s in await target.find(Query())}
                for stored in await source.find(Query()):
                    copy = there.get(stored.definition.id)
                    if copy is not None and not stored.head.state.finished:
                        assert stored.head.hold or copy.hold, f"{stored.definition.id} can go on in both"
            number += 5


# --- compared -------------------------------------------------------------------------------------------------------


class Forgetful(InterposedBackend):
    """Acknowledges everything, and keeps one row less than it was given."""

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        return self.inner.commit([self._shortened(write) for write in batch])

    @staticmethod
    def _shortened(write: Write) -> Write:
        if isinstance(write, Save) and len(write.boundaries) > 1:
            return attrs.evolve(write, boundaries=write.boundaries[:-2] + write.boundaries[-1:])
        return write


async def test_a_target_that_does_not_keep_what_it_is_given_is_noticed() -> None:
    house, source = Household(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        await house.move_in(source)
        with pytest.raises(StoreError, match="did not arrive"):
            await copy_store(source, CheckpointStore(Forgetful(MemoryCheckpointStore().backend)))
        async with source:
            states = {s.definition.id: s.head.state for s in await source.find(Query())}
        assert set(states) == house.ids, "the source has everything"


async def test_a_copy_that_was_damaged_since_is_noticed_when_the_copy_is_run_again(sqlite: Make) -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        await house.move_in(source)
        await copy_store(source, target)
        record = target.backend._records["done"]  # type: ignore[attr-defined]
        record.boundaries[-1] = attrs.evolve(record.boundaries[-1], data=b"5")
        with pytest.raises(StoreError, match=r"1 executions are not the same.*'done'"):
            await copy_store(source, target)


async def test_what_was_submitted_by_name_may_have_got_its_steps_in_the_target() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with target:
            async with Client(source) as client:
                await client.submit("count", 1, id="queued")
                await client.submit("count", 2, id="other")
            await copy_store(source, target)
            async with Worker(house.registry, store=target), Client(target) as client:
                assert await client.handle("queued").result() == 4
                assert await client.handle("other").result() == 5
            assert set((await copy_store(source, target)).present) == {"queued", "other"}
            record = target.backend._records["other"]  # type: ignore[attr-defined]
            record.definition = attrs.evolve(record.definition, queue="elsewhere")
            with pytest.raises(StoreError, match=r"1 executions are not the same.*'other'"):
                await copy_store(source, target)


class Busy(InterposedBackend):
    """Goes on with an execution between the look at its head and that at its rows."""

    def __init__(self, inner: Any, moments: int) -> None:
        super().__init__(inner)
        self.moments = moments

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        if self.moments and not after:
            self.moments -= 1
            loaded = self.inner.load(id)
            assert loaded is not None
            seq = loaded.head.seq + 1
            head = attrs.evolve(loaded.head, revision=loaded.head.revision + 1, seq=seq)
            more = attrs.evolve(loaded.boundary, seq=seq)
            assert self.inner.commit([Save(id=id, head=head, boundaries=(more,), keep_from=seq)]) == [None]
        return self.inner.boundaries(id, after=after, limit=limit)


@pytest.mark.parametrize("moments", [1, 2])
async def test_what_goes_on_while_it_is_compared_is_no_difference(moments: int) -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        await waiting(house.registry, source)
        await copy_store(source, target)
        busy = Busy(target.backend, moments)
        assert (await copy_store(source, CheckpointStore(busy))).present == ("a",)
        assert busy.moments == 0


# --- what is left behind --------------------------------------------------------------------------------------------


async def test_what_a_living_process_runs_is_left_where_it_is() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(house.registry, store=source) as executor:
            run = await executor.start("items", 1, id="interrupted")
            await house.middle.wait()
            report = await copy_store(source, target)
            assert list(report.skipped) == ["interrupted"]
            assert executor.owner in report.skipped["interrupted"]
            house.go_on.set()
            assert await run.result() == 15


async def test_another_execution_of_the_same_id_is_not_touched() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        for store, state in ((source, 1), (target, 100)):
            async with Executor(house.registry, store=store) as executor:
                await (await executor.start("count", state, id="same")).result()
        report = await copy_store(source, target)
        assert list(report.skipped) == ["same"]
        async with Client(target) as client:
            assert await client.handle("same").result() == 103


async def test_stores_may_be_given_by_their_urls(tmp_path: Path) -> None:
    house = Household()
    here, there = f"file:{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b.db'}"
    with anyio.fail_after(PATIENCE):
        await house.move_in(open_store(here))
        assert set((await copy_store(here, there)).copied) == house.ids
        async with open_store(there) as store:
            assert {stored.definition.id for stored in await store.find(Query())} == house.ids


@pytest.mark.parametrize("bad", [None, "nowhere", Path("a"), "ftp://x"], ids=repr)
async def test_what_names_no_store_is_refused_before_anything_is_touched(tmp_path: Path, bad: Any) -> None:
    there = tmp_path / "b"
    for source, target in ((bad, f"file:{there}"), (f"file:{there}", bad)):
        with pytest.raises(StoreSettingsError, match=r"use one of|a URL is needed"):
            await copy_store(source, target)
    assert not there.exists()


async def test_a_store_is_not_copied_to_itself(sqlite: Make) -> None:
    """Everything would look as if it had arrived, and be left behind."""
    house = Household()
    with anyio.fail_after(PATIENCE):
        await house.move_in(sqlite())
        with pytest.raises(StoreError, match="same store"):
            await copy_store(sqlite(), sqlite())
        async with sqlite() as store:
            assert {s.head.state for s in await store.find(Query()) if s.definition.id == "queued"} == {"initialized"}


async def waiting(registry: StepRegistry, store: CheckpointStore) -> None:
    async with Executor(registry, store=store) as executor:
        await (await executor.start("ask", 1, id="a")).wait("waiting")


async def test_what_was_moved_takes_no_orders_in_its_old_home() -> None:
    """I1, I6: what is acknowledged there would never take effect. Only a resume, by which it goes on there."""
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    await waiting(house.registry, source)
    await copy_store(source, target)
    async with Client(source) as client:
        orders = (client.signal("a", "go"), client.cancel("a"), client.pause("a"))
        for order in orders:
            with pytest.raises(InvalidStateError, match="moved to another store, where it goes on: ask there"):
                await order
        with pytest.raises(InvalidStateError, match="cannot wait for execution 'a': it is paused; it was moved"):
            await client.handle("a").result()
        await client.resume("a")
        assert (await client.get("a")).state == "waiting"
    assert (await copy_store(source, target)).skipped == {"a": "it can go on in both stores; cancel one of them"}
    async with Client(source) as client:
        await client.cancel("a")
    assert (await copy_store(source, target)).skipped == {"a": "it has ended otherwise in the source"}


class Postman(InterposedBackend):
    """Brings letters in the moment before the execution is left behind: too late to be carried with the rest."""

    letters: Sequence[Write] = ()

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        if any(isinstance(write, Save) and NOTE in write.put for write in batch):
            letters, self.letters = self.letters, ()
            for letter in letters:
                self.inner.commit([letter])
        return self.inner.commit(batch)


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_signal_that_comes_while_its_execution_moves_is_brought_after_it(interrupted: bool) -> None:
    """Once: also when the copy breaks off before that is noted."""
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    await waiting(house.registry, source)
    postman = Postman(source.backend)
    signals = [
        Message(kind="signal", name=name, sent=1.0, key=key) for name, key in (("x", f"x{BETWEEN}k"), ("x", None))
    ]
    postman.letters = [Send(id="a", message=message) for message in signals]
    faulty = FaultyStore(CheckpointStore(postman))
    if interrupted:
        faulty.fail("commit", 2)  # the note of what was brought
    report, broke_off = await copy_until_done(faulty, FaultyStore(target))
    assert broke_off == interrupted
    assert not report.skipped
    async with target:
        assert [message.name for message in (await target.load("a")).messages] == ["x", "x"]
        async with Client(target) as client:
            await client.signal("a", "x", key="k")
        assert len((await target.load("a")).messages) == 2
    assert (await copy_store(source, target)).present == ("a",)


async def test_what_was_moved_elsewhere_before_is_told_apart() -> None:
    house, source = Household(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        await house.move_in(source)
        await copy_store(source, MemoryCheckpointStore())
        report = await copy_store(source, MemoryCheckpointStore())
        assert set(report.skipped) == house.live
        assert set(report.copied) == house.ids - house.live


async def test_one_that_cannot_be_read_does_not_stop_the_others(files: Make, tmp_path: Path) -> None:
    house, target = Household(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        await house.move_in(files())
        damaged = [
            path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name.startswith("sleeps")
        ]
        assert damaged
        for path in damaged:
            path.write_bytes(b"\xff" * path.stat().st_size)
        report = await copy_store(files(), target)
        assert set(report.copied) == house.ids - {"sleeps"}


async def test_one_that_somebody_else_claims_meanwhile_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its owner and the claim, or between the claim and the last write."""
    house = Household()
    with anyio.fail_after(PATIENCE):
        source = FaultyStore(MemoryCheckpointStore())
        async with Executor(house.registry, store=source) as executor:
            await executor.submit("count", 1, id="queued")
        with monkeypatch.context() as patch:
            patch.setattr(source.backend, "claim", lambda claim: [])
            report = await copy_store(source, MemoryCheckpointStore())
        assert report.skipped == {"queued": "somebody else claimed it"}
        target = MemoryCheckpointStore()
        source.fail("commit", times=None, error=LeaseLostError("queued", 1))
        report = await copy_store(source, target)
        assert report.skipped == {"queued": "somebody else claimed it while it was carried"}
        async with target:
            arrived = (await target.load("queued")).head
        assert (arrived.state, arrived.hold) == ("paused", True), "nothing can go on in both stores"


async def test_a_limit_of_the_source_rules_in_a_target_that_knows_the_queue_but_has_none() -> None:
    source, target = MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Client(target) as client:
            for name in ("gpu", "cpu"):
                await client.limit_queue(name, concurrency=9)
            await client.limit_queue("gpu")
        async with Client(source) as client:
            for name in ("gpu", "cpu", "new"):
                await client.limit_queue(name, concurrency=2)
        await copy_store(source, target)
        async with Client(target) as client:
            limits = {queue.name: queue.limit for queue in await client.list_queues()}
        assert limits["gpu"] == limits["new"] == QueueLimit(concurrency=2)
        assert limits["cpu"] == QueueLimit(concurrency=9), "what the target says itself counts"


async def test_half_an_execution_that_cannot_be_removed_from_the_target_ends_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, source, target = Household(), MemoryCheckpointStore(), FaultyStore(MemoryCheckpointStore())
    with anyio.fail_after(PATIENCE):
        async with Executor(house.registry, store=source) as executor:
            await (await executor.start("count", 1, id="done")).result()
        target.fail("commit", 3, times=None)
        with pytest.raises(StoreUnavailableError):
            await copy_store(source, target)
        target.heal()
        with monkeypatch.context() as patch:
            patch.setattr(target.backend, "delete", lambda ids: [False])
            with pytest.raises(StoreError, match="half of execution 'done'"):
                await copy_store(source, target)


async def test_a_copier_that_cannot_sign_off_is_seen_to_be_gone() -> None:
    """Its registration stays, and the lock behind it is free: whoever looks knows."""
    source = FaultyStore(MemoryCheckpointStore())
    source.fail("unregister")
    with anyio.fail_after(PATIENCE):
        assert list((await copy_store(source, MemoryCheckpointStore())).copied) == []
        async with source:
            left = await source.owners()
            assert len(left) == 1
            assert gone(left) == {left[0].id}


async def test_a_copy_that_the_target_has_lost_since_is_noticed() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), FaultyStore(MemoryCheckpointStore())
    with anyio.fail_after(PATIENCE):
        async with Executor(house.registry, store=source) as executor:
            await (await executor.start("count", 1, id="done")).result()
        await copy_store(source, target)
        target.fail("load", 2, times=None, error=ExecutionNotFoundError("done"))
        with pytest.raises(StoreError, match="not the same in both stores"):
            await copy_store(source, target)


@pytest.mark.parametrize(("kind", "nth"), [("count", 3), ("ask", 2)])
async def test_a_copy_that_breaks_off_while_it_throws_away_another_is_completed(kind: str, nth: int) -> None:
    house, source, target = Household(), MemoryCheckpointStore(), FaultyStore(MemoryCheckpointStore())
    async with Executor(house.registry, store=source) as executor:
        run = await executor.start(kind, 1, id="x")
        before = await run.wait("waiting")
    for call, number in (("commit", nth), ("delete", 1)):
        target.fail(call, number, times=None)
        with pytest.raises(StoreUnavailableError):
            await copy_store(source, target)
        target.heal()
    assert (await copy_store(source, target)).copied == ("x",)
    async with target:
        assert (await target.load("x")).head.state == before.state


# --- what belongs together ------------------------------------------------------------------------------------------


class Relatives:
    """A grandparent, which waits for its child, which waits for its own: `g`, `g~1~a` and `g~1~a~1~a`."""

    ids = ("g", "g~1~a", "g~1~a~1~a")

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.go_on = anyio.Event()
        self.charged: list[str] = []
        self.child = StepRegistry()
        """Knows the youngest alone."""
        self.all = StepRegistry()
        once = RetryPolicy(max_attempts=1)
        for registry in (self.child, self.all):
            registry.register("charge", self.charge, retry=once)
            registry.register("rest", self.rest)
            registry.workflow("child", ["charge"])
            registry.workflow("resting", ["rest", "charge"])
        for name, of in (("parent", "child"), ("grandparent", "parent"), ("patient", "resting"), ("hasty", "child")):
            self.all.register(name, self._failing(of) if name == "hasty" else self._asking(of), retry=once)
            self.all.workflow(name, [name])

    @staticmethod
    def _asking(workflow: str) -> Callable[..., Any]:
        async def ask(ctx: StepContext, state: Any) -> Any:
            return await (await ctx.start_child(workflow, state, key="a")).result()

        return ask

    def _failing(self, workflow: str) -> Callable[..., Any]:
        async def fail(ctx: StepContext, state: Any) -> Any:
            await ctx.start_child(workflow, state, key="a")
            await self.begun.wait()
            raise ValueError("no")

        return fail

    async def charge(self, ctx: StepContext, state: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        self.charged.append(ctx.execution_id)
        return state

    async def rest(self, state: Any) -> WaitFor:
        return WaitFor("go", state)

    async def die(self, store: CheckpointStore, workflow: str) -> None:
        """Begin it as `g`, in a process that dies while its youngest is at work."""
        async with CrashableExecutor(self.all, store=store) as executor:
            await executor.start(workflow, 5, id="g")
            await self.begun.wait()
            await crash(executor)
        self.begun = anyio.Event()


async def ids_in(store: CheckpointStore) -> set[str]:
    async with store:
        return {stored.definition.id for stored in await store.find(Query())}


async def test_parents_stay_with_a_child_that_a_living_process_runs() -> None:
    """I3: in the target they would start it again."""
    family, source, target = Relatives(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with source, target:
            await family.die(source, "grandparent")
            async with Worker(family.child, store=source) as worker:
                await family.begun.wait()
                report = await copy_store(source, target)
                assert not report.copied
                assert set(report.skipped) == set(family.ids)
                running = f"{worker.owner} is running it; stop that process first"
                together = f"parent and child move together, and 'g~1~a~1~a' stays: {running}"
                assert [report.skipped[id] for id in family.ids] == [together, together, running]
                assert await ids_in(target) == set()
                assert (await source.load("g")).head.owner is None, "whoever can goes on with it there"
                family.go_on.set()
                async with Client(source) as client:
                    await client.handle("g~1~a~1~a").result()
            assert set((await copy_store(source, target)).copied) == set(family.ids)
            async with Worker(family.all, store=target), Client(target) as client:
                assert await client.handle("g").result() == 5
        assert family.charged == ["g~1~a~1~a"]


async def test_a_failed_parent_stays_with_its_running_child_too() -> None:
    """It could be retried in the target."""
    family, source, target = Relatives(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(family.all, store=source) as executor:
            await (await executor.start("hasty", 1, id="g")).wait("failed")
            assert set((await copy_store(source, target)).skipped) == {"g", "g~1~a"}
            family.go_on.set()
            await (await executor.handle("g~1~a")).result()
        assert set((await copy_store(source, target)).copied) == {"g", "g~1~a"}


async def test_a_resting_child_stays_with_its_living_parent() -> None:
    """Which would wait for it in vain, and the child would take no signals there."""
    family, source, target = Relatives(), MemoryCheckpointStore(), MemoryCheckpointStore()
    family.go_on.set()
    with anyio.fail_after(PATIENCE):
        async with Executor(family.all, store=source) as executor, Client(source) as client:
            events = executor.events()
            parent = await executor.start("patient", 3, id="g")
            async for event in events:
                if event.type is EventType.WAITING:
                    break
            report = await copy_store(source, target)
            assert not report.copied
            assert set(report.skipped) == {"g", "g~1~a"}
            assert "'g' stays" in report.skipped["g~1~a"]
            await client.signal("g~1~a", "go")
            assert await parent.result() == 3
        assert set((await copy_store(source, target)).copied) == {"g", "g~1~a"}


async def test_a_family_of_which_one_cannot_move_goes_on_in_the_source() -> None:
    """What was claimed of it is given back at once."""
    family, source, target = Relatives(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with source, target:
            await family.die(source, "parent")
            family.go_on.set()
            async with Executor(family.all, store=target) as executor:
                await (await executor.start("child", 100, id="g~1~a")).result()
            report = await copy_store(source, target)
            assert set(report.skipped) == {"g", "g~1~a"}
            assert "another execution of that id" in report.skipped["g"]
            assert [(await source.load(id)).head.owner for id in ("g", "g~1~a")] == [None, None]
            async with Executor(family.all, store=source) as executor:
                assert await (await executor.handle("g")).result() == 5


@pytest.mark.parametrize("parent", ["gone", "done", "unreadable"])
async def test_a_child_whose_parent_does_not_go_on_moves_alone(files: Make, tmp_path: Path, parent: str) -> None:
    family, target = Relatives(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(family.all, store=files()) as executor:
            events = executor.events()
            await executor.start("patient", 3, id="g")
            async for event in events:
                if event.type is EventType.WAITING:
                    break
            await executor.cancel("g")
            if parent == "gone":
                await executor.delete("g")
        if parent == "unreadable":
            for path in (tmp_path / "store").rglob("g.*"):
                path.write_bytes(b"\xff" * path.stat().st_size)
        report = await copy_store(files(), target)
        assert "g~1~a" in report.copied
        assert ("g" in report.copied) == (parent == "done")


class Fleeting(InterposedBackend):
    """Ends what it lists, in the moment after."""

    def find(self, query: Query) -> list[Stored]:
        found = self.inner.find(query)
        for stored in found:
            head = attrs.evolve(
                stored.head, revision=stored.head.revision + 1, state=ExecutionState.CANCELLED, ended=1.0
            )
            if not stored.head.state.finished and stored.definition.workflow not in RECORDS:
                assert self.inner.commit([Save(id=stored.definition.id, head=head)]) == [None]
        return found


async def test_what_has_ended_since_it_was_listed_is_copied_as_it_is() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), MemoryCheckpointStore()
    await waiting(house.registry, source)
    assert (await copy_store(CheckpointStore(Fleeting(source.backend)), target)).copied == ("a",)
    async with target:
        assert (await target.load("a")).head.state == "cancelled"


class Ending(InterposedBackend):
    """Ends the parent `g` in the moment after its child was found to belong to it."""

    looks = 0

    def load(self, id: str) -> Loaded | None:
        self.looks += id == "g"
        loaded = self.inner.load(id)
        if id == "g" and self.looks == 2 and loaded is not None:
            head = loaded.head
            end = attrs.evolve(head, revision=head.revision + 1, state=ExecutionState.CANCELLED, owner=None, ended=1.0)
            assert self.inner.commit([Save(id=id, head=end)]) == [None]
        return self.inner.load(id)


async def test_a_child_whose_parent_ends_meanwhile_is_not_forgotten() -> None:
    family, source, target = Relatives(), MemoryCheckpointStore(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with source:
            await family.die(source, "parent")
            report = await copy_store(CheckpointStore(Ending(source.backend)), target)
        assert set(report.copied) == {"g", "g~1~a"}


class Childless(InterposedBackend):
    """Finds nobody's children."""

    def find(self, query: Query) -> list[Stored]:
        return [] if query.parent_id is not None else self.inner.find(query)


async def test_a_child_that_its_parent_does_not_lead_to_is_reported() -> None:
    family, source = Relatives(), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        async with Executor(family.all, store=source) as executor:
            await executor.start("parent", 1, id="g")
            await family.begun.wait()
            report = await copy_store(CheckpointStore(Childless(source.backend)), MemoryCheckpointStore())
            family.go_on.set()
        assert report.skipped["g~1~a"] == "its parent has changed again and again; copy once more"


class Door(InterposedBackend):
    """Notes in which order executions are let go."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.let_go: list[str] = []

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        self.let_go += [write.id for write in batch if isinstance(write, Save) and NOTE in write.drop]
        return self.inner.commit(batch)


@pytest.mark.parametrize("child_is_listed", ["first", "last"])
async def test_children_are_there_before_their_parents_go_on(
    monkeypatch: pytest.MonkeyPatch, child_is_listed: str
) -> None:
    """On whichever page of the listing they are: clocks differ, and the newest come first."""
    monkeypatch.setattr("longrun.stores.copy.PAGE", 1)
    family, source, door = Relatives(), MemoryCheckpointStore(), Door(MemoryCheckpointStore().backend)
    with anyio.fail_after(PATIENCE):
        async with source:
            await family.die(source, "grandparent")
            for age, id in enumerate(family.ids):
                record = source.backend._records[id]  # type: ignore[attr-defined]
                created = record.definition.created + (age if child_is_listed == "first" else -age)
                record.definition = attrs.evolve(record.definition, created=created)
            assert set((await copy_store(source, CheckpointStore(door))).copied) == set(family.ids)
    assert door.let_go == list(reversed(family.ids))


# --- while others go on in the source -------------------------------------------------------------------------------


async def test_what_a_copy_that_breaks_off_had_claimed_goes_on_in_the_source() -> None:
    """I4: with the worker that lives there all the time; nobody has to start another one."""
    house, source, target = Household(), MemoryCheckpointStore(), FaultyStore(MemoryCheckpointStore())
    target.fail("commit", times=None)
    config = ExecutorConfig(heartbeat_interval=0.1)
    with anyio.fail_after(PATIENCE):
        async with Worker(house.registry, store=source, config=config) as worker, Client(source) as client:
            await rest(worker)  # its sweep takes nothing while the copy is made
            run = await client.submit("count", 1, id="queued")
            with pytest.raises(StoreUnavailableError):
                await copy_store(source, target)
            assert target.fired["commit"]
            worker.draining = False
            worker.stir()
            assert await run.result() == 4


async def test_a_copy_that_breaks_off_leaves_its_claims_to_an_owner_that_is_seen_to_be_gone() -> None:
    house, source, target = Household(), MemoryCheckpointStore(), FaultyStore(MemoryCheckpointStore())
    target.fail("commit", times=None)
    async with source:
        async with Executor(house.registry, store=source) as executor:
            await executor.submit("count", 1, id="queued")
        with pytest.raises(StoreUnavailableError):
            await copy_store(source, target)
        holder = (await source.load("queued")).head.owner
        assert gone(await source.owners()) == {holder}


async def finished(*ids: str) -> MemoryCheckpointStore:
    house, store = Household(), MemoryCheckpointStore()
    async with Executor(house.registry, store=store) as executor:
        for id in ids:
            await (await executor.start("count", 1, id=id)).result()
    return store


def deleting(store: CheckpointStore, id: str, when: str) -> Callable[[str], Any]:
    """The `load` of a store in which an execution is deleted around the first time that it is read."""
    usual, seen = store.load, [False]

    async def load(asked: str) -> Loaded:
        if asked != id or seen[0]:
            return await usual(asked)
        seen[0] = True
        if when == "before":
            await store.delete([id])
        loaded = await usual(id)
        await store.delete([id])
        return loaded

    return load


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_the_source_deletes_before_it_is_carried_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Retention goes on while a store is copied: before it is loaded, or between that and its rows."""
    source, target = await finished("a", "b", "c"), MemoryCheckpointStore()
    with anyio.fail_after(PATIENCE):
        monkeypatch.setattr(source, "load", deleting(source, "b", when))
        report = await copy_store(source, target)
        assert (sorted(report.copied), report.present, report.skipped) == (["a", "c"], (), {})
        async with target:
            assert sorted(one.definition.id for one in await target.find(Query())) == ["a", "c"]
        assert sorted((await copy_store(source, target)).present) == ["a", "c"]


async def test_what_the_source_deletes_after_it_was_carried_is_no_difference() -> None:
    source, target = await finished("a", "b", "c"), MemoryCheckpointStore()

    def progress(id: str) -> None:
        if id == "b":
            assert source.backend.delete(["b"]) == [True]

    with anyio.fail_after(PATIENCE):
        assert sorted((await copy_store(source, target, progress=progress)).copied) == ["a", "b", "c"]
        async with target:
            assert (await target.load("b")).head.state == "completed"


async def test_half_of_what_the_source_has_deleted_since_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy broke off in the middle of it; the next one finds it in the target alone."""
    source, target = await finished("a"), FaultyStore(MemoryCheckpointStore())
    with anyio.fail_after(PATIENCE):
        target.fail("commit", 3, times=None)
        with pytest.raises(StoreUnavailableError):
            await copy_store(source, target)
        target.heal()
        async with target:
            assert [one.definition.id for one in await target.find(Query())] == ["a"]
            monkeypatch.setattr(source, "load", deleting(source, "a", "before"))
            assert await copy_store(source, target) == CopyReport()
            assert await target.find(Query()) == []


async def test_half_an_execution_that_somebody_deletes_in_the_target_ends_the_copy() -> None:
    """The source still has it: that is no deletion that the copy may follow."""
    source, target = await finished("a"), FaultyStore(MemoryCheckpointStore())
    target.fail("load", 2, error=ExecutionNotFoundError("a"))
    with anyio.fail_after(PATIENCE), pytest.raises(StoreError, match="half of execution 'a' is gone"):
        await copy_store(source, target)
