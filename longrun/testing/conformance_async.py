"""The contract of `CheckpointStore` over a backend, on asyncio and trio: the async face and group commit.

Place in the life of an execution: claim, checkpoint, finish.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest

from longrun.errors import ExecutionNotFoundError, LeaseLostError, StoreUnavailableError, WriteOrderError
from longrun.records import ExecutionState, RetentionPolicy
from longrun.stored import Owner, Query, Save
from longrun.stores.store import CheckpointStore
from longrun.testing.conformance_base import PATIENCE, ConformanceBase
from longrun.testing.samples import NOW, change, claim, create, owned, signal, step

both = pytest.mark.anyio
"""On every event loop that is installed."""


@contextlib.asynccontextmanager
async def soon() -> AsyncIterator[None]:
    """What does not end in time hangs."""
    with anyio.fail_after(PATIENCE):
        yield


class Answers:
    """Collects what `submit` answers."""

    def __init__(self, expected: int) -> None:
        self.all: list[tuple[Any, Any]] = []
        self._expected = expected
        self._complete = anyio.Event()

    def take(self, mark: object) -> Any:
        def done(answer: Any) -> None:
            self.all.append((mark, answer))
            if len(self.all) == self._expected:
                self._complete.set()

        return done

    async def wait(self) -> list[tuple[Any, Any]]:
        with anyio.fail_after(PATIENCE):
            await self._complete.wait()
        return self.all


class AsyncContract(ConformanceBase):
    @both
    async def test_a_life(self, store: CheckpointStore) -> None:
        """Create, claim, save, signal, finish, delete: each is there when its call returns (I1)."""
        async with soon(), store:
            await store.ping()
            new = create("a", ExecutionState.INITIALIZED, blobs={"b": b"x"})
            assert await store.create(new) is True
            assert await store.create(new) is False
            assert await store.exists("a")
            assert not await store.exists("b")
            (given,) = await store.claim(claim())
            assert await store.send("a", signal(payload=b"hello"), limit=5) == 1
            assert [message.payload for message in await store.messages("a")] == [b"hello"]
            assert (await store.pending("me"), await store.next_due()) == (["a"], None)
            saved = step("a", given.head, take=(1,), put={"e": b"1"})
            await store.save(saved)
            found = await store.load("a")
            assert (found.head, found.boundary, found.entries) == (saved.head, saved.boundaries[0], {"e": b"1"})
            assert await store.checkpoint("a", 1) == (new.boundary, {"b": b"x"})
            assert await store.checkpoint("a", 9) is None
            assert [one.seq for one in await store.boundaries("a", after=1)] == [2]
            assert await store.size("a") > 0
            end = change("a", saved.head, head_fields={"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW})
            await store.save(end)
            assert [one.head for one in await store.find(Query())] == [end.head]
            assert await store.count() == {ExecutionState.COMPLETED: 1}
            assert await store.delete(["a", "b"]) == [True, False]
            assert await store.find(Query()) == []

    @both
    async def test_refusals_are_raised(self, store: CheckpointStore) -> None:
        async with soon(), store:
            new = owned("a")
            with pytest.raises(ExecutionNotFoundError):
                await store.load("a")
            with pytest.raises(ExecutionNotFoundError):
                await store.send("a", signal())
            with pytest.raises(ExecutionNotFoundError):
                await store.save(step("a", new.head))
            await store.create(new)
            with pytest.raises(LeaseLostError):
                await store.save(step("a", attrs.evolve(new.head, fence=5)))
            with pytest.raises(WriteOrderError):
                await store.save(step("a", attrs.evolve(new.head, revision=5)))
            await store.save(step("a", new.head))

    @both
    async def test_whether_a_key_came_is_told_after_the_end(self, store: CheckpointStore) -> None:
        """Taken or not: who repeats a message because its answer was lost is told that it arrived."""
        async with soon(), store:
            assert await store.was_sent("a", "k") is False
            new = owned("a")
            await store.create(new)
            await store.send("a", signal(key="k"))
            await store.send("a", signal(key="l"))
            taken = step("a", new.head, take=(1,))
            await store.save(taken)
            ended = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
            await store.save(change("a", taken.head, head_fields=ended))
            assert [await store.was_sent("a", key) for key in ("k", "l", "m", "")] == [True, True, False, False]

    @both
    async def test_owners(self, store: CheckpointStore) -> None:
        async with soon(), store:
            await store.register(Owner(id="me", life={"pid": 1}, remaining=0.0), 100.0)
            renewed: list[Any] = []
            told = anyio.Event()
            here = anyio.lowlevel.current_token()

            def answered(answer: Any) -> None:
                renewed.append(answer)
                anyio.from_thread.run_sync(told.set, token=here)

            store.renew("me", 1000.0, answered)
            await told.wait()
            assert renewed == [True]
            (owner,) = await store.owners()
            assert owner.remaining > 900
            await store.unregister("me")
            assert await store.owners() == []

    @both
    async def test_retention_removes_what_ended_long_ago(self, store: CheckpointStore) -> None:
        """I16: nothing that lives, waits, is paused or failed to end goes."""
        async with soon(), store:
            for n in range(6):
                await store.create(create(f"old{n}", ExecutionState.FAILED, head_fields={"ended": NOW - 100 - n}))
            await store.create(create("young", ExecutionState.COMPLETED, head_fields={"ended": NOW - 5}))
            await store.create(create("paused", ExecutionState.PAUSED, created=NOW - 1e6))
            await store.create(create("waiting", ExecutionState.WAITING, created=NOW - 1e6))
            assert await store.gc(RetentionPolicy(), NOW) == 0
            assert await store.gc(RetentionPolicy(max_age=50), NOW) == 6
            assert await store.gc(RetentionPolicy(max_age=50), NOW) == 0
            left = [one.definition.id for one in await store.find(Query())]
            assert sorted(left) == ["paused", "waiting", "young"]

    @both
    @pytest.mark.parametrize("end", ["finished", "deleted"])
    async def test_retention_leaves_what_an_unfinished_parent_may_ask_for_again(
        self, store: CheckpointStore, end: str
    ) -> None:
        """Finished children stay until their parent has ended or is gone, however old they are; those of others go.
        Only the parent itself counts, and not who started that."""
        policy = RetentionPolicy(max_age=50)
        old = {"ended": NOW - 100}
        async with soon(), store:
            parent = owned("p:1")
            await store.create(parent)
            await store.create(create("middle", ExecutionState.COMPLETED, parent_id="p:1", head_fields=old))
            for state in (ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED):
                await store.create(create(f"child-{state.value}", state, parent_id="p:1", head_fields=old))
            for n in range(3):
                await store.create(create(f"grand{n}", ExecutionState.FAILED, parent_id="middle", head_fields=old))
            await store.create(create("orphan", ExecutionState.FAILED, parent_id="nobody", head_fields=old))
            await store.create(create("single", ExecutionState.FAILED, head_fields=old))
            for removed in (5, 0):
                assert await store.gc(policy, NOW, dry_run=True) == removed
                assert await store.gc(policy, NOW) == removed
            left = {one.definition.id for one in await store.find(Query())}
            assert left == {"p:1", "middle", "child-completed", "child-failed", "child-cancelled"}
            head = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
            await store.save(change("p:1", parent.head, head_fields=head))
            if end == "deleted":
                assert await store.delete(["p:1"]) == [True]
            assert await store.gc(policy, NOW, dry_run=True) == 4
            assert await store.gc(policy, NOW) == 4
            assert await store.count() == ({} if end == "deleted" else {ExecutionState.COMPLETED: 1})

    @both
    async def test_it_closes_when_its_last_user_has_closed_it(self, store: CheckpointStore) -> None:
        async with soon(), store:
            async with store:
                await store.create(create("a"))
            assert await store.exists("a")
        with pytest.raises(StoreUnavailableError):
            await store.create(create("b"))
        await store.aclose()

    @both
    async def test_it_opens_again(self, store: CheckpointStore) -> None:
        async with soon(), store:
            await store.create(create("a"))
        async with soon(), store:
            assert await store.exists("a") or not self.durable
            assert await store.create(create("b")) is True

    @both
    async def test_what_another_store_does_is_seen(self, store: CheckpointStore, other_store: CheckpointStore) -> None:
        """I4: a watcher is told, in its own loop, until it stops watching."""
        async with soon(), store, other_store:
            await store.create(create("a", ExecutionState.WAITING, head_fields={"signal": "go"}))
            told = anyio.Event()
            stop = store.watch(told.set)
            await other_store.send("a", signal())
            await told.wait()
            stop()
            assert await store.next_due() == 0

    @both
    async def test_those_who_share_a_store_hear_of_each_other(self, store: CheckpointStore) -> None:
        """I4: an execution that ends is told to all who watch, also to those for whom the writer is their own."""
        async with soon(), store:
            heads = []
            for n in range(3):
                new = owned(f"a{n}")
                await store.create(new)
                heads.append(new.head)
            told = [anyio.Event(), anyio.Event()]
            stops = [store.watch(lambda n=n: told[n].set()) for n in range(2)]  # type: ignore[misc]  # n is bound
            ended = {"state": ExecutionState.COMPLETED, "owner": None, "ended": NOW}
            for n, head in enumerate(heads):  # the first look of a watcher may be a guess; it makes only one
                told[:] = [anyio.Event(), anyio.Event()]
                save = change(f"a{n}", head, head_fields=ended)
                if n == 0:
                    await store.save(save)
                else:
                    store.submit(save, lambda answer: None)
                for event in told:
                    await event.wait()
            for stop in stops:
                stop()

    @both
    async def test_two_stores(self, store: CheckpointStore, other_store: CheckpointStore) -> None:
        """I3: a takeover through one store shuts out the owner at the other."""
        self.needs("fenced")
        async with soon(), store, other_store:
            new = owned("a", "one")
            await store.create(new)
            (given,) = await other_store.claim(claim("two", dead=frozenset({"one"})))
            with pytest.raises(LeaseLostError):
                await store.save(step("a", new.head))
            await other_store.save(step("a", given.head))


class GroupCommitContract(ConformanceBase):
    @both
    async def test_each_of_many_saves_gets_its_own_answer(self, store: CheckpointStore) -> None:
        """I1, I3: 200 executions save at once, every third with a lost lease."""
        outcomes: dict[int, str] = {}
        async with soon(), store:
            news = [owned(f"x{n}") for n in range(200)]
            async with anyio.create_task_group() as tasks:
                for new in news:
                    tasks.start_soon(store.create, new)

            async def save(n: int) -> None:
                try:
                    await store.save(step(f"x{n}", attrs.evolve(news[n].head, fence=1 + (n % 3 == 0))))
                    outcomes[n] = "saved"
                except LeaseLostError as error:
                    outcomes[n] = error.execution_id

            async with anyio.create_task_group() as tasks:
                for n in range(200):
                    tasks.start_soon(save, n)
            assert outcomes == {n: f"x{n}" if n % 3 == 0 else "saved" for n in range(200)}
            listed = await store.find(Query(limit=1000))
            assert {int(one.definition.id[1:]): one.head.seq for one in listed} == {
                n: 1 if n % 3 == 0 else 2 for n in range(200)
            }

    @both
    async def test_the_write_of_a_cancelled_waiter_is_committed_once_and_in_order(self, store: CheckpointStore) -> None:
        """I7: nobody is told, and the next write of the same owner fits behind it."""
        async with soon(), store:
            new = owned("a")
            await store.create(new)
            head = new.head
            for _ in range(10):
                dropped = step("a", head)
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await store.save(dropped)
                kept = step("a", dropped.head)
                await store.save(kept)
                head = kept.head
            assert (await store.load("a")).head == head
            assert [one.seq for one in await store.boundaries("a")] == list(range(1, 22))

    @both
    async def test_submitted_saves_are_answered_in_this_loop_and_in_order(self, store: CheckpointStore) -> None:
        async with soon(), store:
            new = owned("a")
            await store.create(new)
            answers = Answers(101)
            head = new.head
            for n in range(100):
                save = step("a", head)
                store.submit(save, answers.take(n))
                head = save.head
            store.submit(step("a", attrs.evolve(head, fence=7)), answers.take("stale"))
            told = await answers.wait()
            assert told[:100] == [(n, None) for n in range(100)]
            assert isinstance(told[100][1], LeaseLostError)
            assert (await store.load("a")).head == head

    @both
    async def test_submits_and_calls_keep_their_order(self, store: CheckpointStore) -> None:
        """A claim that follows a save sees it; a save that follows a claim is judged by it (I3)."""
        async with soon(), store:
            new = owned("a")
            await store.create(new)
            answers = Answers(1)
            save = step("a", new.head)
            store.submit(save, answers.take("before"))
            (given,) = await store.claim(claim("new", dead=frozenset({"me"})))
            assert given.head.revision == 1
            assert await answers.wait() == [("before", None)]
            with pytest.raises(LeaseLostError):
                await store.save(step("a", save.head))

    @both
    async def test_closing_does_what_is_queued(self, store: CheckpointStore) -> None:
        """I1: closing waits for everything that was handed over, and everybody is told."""
        answers = Answers(500)
        async with soon(), store:
            new = owned("a")
            await store.create(new)
            head = new.head
            for n in range(500):
                save = change("a", head, head_fields={"done": n + 1}, put={"e": str(n).encode()})
                store.submit(save, answers.take(n))
                head = save.head
        assert await answers.wait() == [(n, None) for n in range(500)]
        with pytest.raises(StoreUnavailableError):
            store.submit(change("a", head), answers.take("late"))
        if self.durable:
            async with soon(), store:
                assert (await store.load("a")).head == head

    @both
    async def test_two_event_loops_share_a_store(self, store: CheckpointStore, anyio_backend_name: str) -> None:
        """Each gets its own answers, in its own thread."""

        async def work(name: str) -> int:
            new = owned(name)
            assert await store.create(new) is True
            saves: list[Save] = []
            head = new.head
            for _ in range(30):
                saves.append(step(name, head))
                head = saves[-1].head
                await store.save(saves[-1])
            with pytest.raises(LeaseLostError):
                await store.save(step(name, attrs.evolve(head, fence=9)))
            return (await store.load(name)).head.seq

        async with soon(), store:
            seqs: list[int] = []

            async def elsewhere() -> None:
                seqs.append(
                    await anyio.to_thread.run_sync(lambda: anyio.run(work, "there", backend=anyio_backend_name))
                )

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(elsewhere)
                seqs.append(await work("here"))
            assert seqs == [31, 31]

    @both
    async def test_a_sender_and_an_owner_at_once(self, store: CheckpointStore) -> None:
        """Messages and saves share batches; none is lost and each has its number."""
        numbers: list[int] = []
        async with soon(), store:
            new = owned("a")
            await store.create(new)

            async def tell() -> None:
                numbers.extend([await store.send("a", signal()) for _ in range(20)])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tell)
                tasks.start_soon(tell)
                head = new.head
                for _ in range(20):
                    save = step("a", head)
                    await store.save(save)
                    head = save.head
            assert sorted(numbers) == list(range(1, 41))
            assert [message.id for message in await store.messages("a")] == list(range(1, 41))
            assert (await store.load("a")).head == head
