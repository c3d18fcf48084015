"""The writer's thread: it never dies of a job, answers every one, and makes those wait who write too much at once."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from longrun import MemoryCheckpointStore
from longrun.errors import CodecError, StoreUnavailableError
from longrun.loops import Loop, current_loop
from longrun.stored import Head, Query, Write
from longrun.stores import writer as module
from longrun.stores.base import Answer
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.stores.writer import Job, Writer
from longrun.testing.samples import create, move, owned
from tests.crashing import PATIENCE


class Buggy(MemoryBackend):
    """A backend with a defect: it raises what no backend should."""

    broken = False

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        if self.broken:
            raise KeyError("a defect")
        return super().commit(batch)


class Held(MemoryBackend):
    """Commits nothing before it is told to go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.batches: list[int] = []

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        assert self.go.wait(PATIENCE)
        self.batches.append(len(batch))
        return super().commit(batch)


@pytest.fixture
def backend() -> Iterator[Buggy]:
    made = Buggy()
    made.open()
    yield made
    made.close()


async def test_a_defect_of_a_backend_is_told_and_the_next_write_is_made(backend: Buggy) -> None:
    async with CheckpointStore(backend) as store:
        backend.broken = True
        with pytest.raises(StoreUnavailableError, match="KeyError in the backend") as caught:
            await store.create(create("a"))
        assert isinstance(caught.value.__cause__, KeyError)
        assert "a defect" not in str(caught.value)
        backend.broken = False
        assert await store.create(create("a"))


async def test_a_writer_that_is_far_ahead_of_its_store_waits(backend: Buggy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or refused by it: with room for one write, a hundred are made."""
    monkeypatch.setattr(module, "QUEUE_LIMIT", 1)
    monkeypatch.setattr(module, "BATCH_LIMIT", 1)
    async with CheckpointStore(backend) as store:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                for n in range(100):
                    tasks.start_soon(store.create, create(f"run-{n}"))
        assert sum((await store.count()).values()) == 100


async def test_whoever_comes_to_a_full_queue_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_LIMIT", 2)
    backend = Held()
    with anyio.fail_after(PATIENCE):
        async with CheckpointStore(backend) as store:
            async with anyio.create_task_group() as tasks:
                for n in range(8):
                    tasks.start_soon(store.create, create(f"job-{n}"))
                await anyio.wait_all_tasks_blocked()
                assert len(store._writer._queue) <= 2
                backend.go.set()
            assert sum((await store.count()).values()) == 8
    assert sum(backend.batches) == 8


async def test_a_batch_is_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_LIMIT", 3)
    backend = Held()
    with anyio.fail_after(PATIENCE):
        async with CheckpointStore(backend) as store, anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(store.create, create(f"job-{n}"))
            await anyio.wait_all_tasks_blocked()
            backend.go.set()
    assert sum(backend.batches) == 8
    assert max(backend.batches) == 3


def batches_of(executions: int, saves: int) -> list[int]:
    """What the commits are that create so many executions at once, each of which is saved again as soon as its last
    write is answered."""
    backend, ended, held = Held(), threading.Semaphore(0), threading.Event()
    backend.open()
    writer = Writer(backend, list)
    writer.start()

    def save(head: Head, number: int) -> None:
        made = move(f"run-{number}", head)

        def answered(answer: Any) -> None:
            assert answer is None
            if made.head.seq > saves:
                ended.release()
            else:
                save(made.head, number)

        writer.add((answered, None, made, None))

    writer.call(held.wait, lambda _: None, None)
    for number in range(executions):
        new = owned(f"run-{number}")
        writer.add((partial(lambda head, n, answer: save(head, n), new.head, number), None, new, None))
    backend.go.set()
    held.set()
    for _ in range(executions):
        assert ended.acquire(timeout=PATIENCE)
    writer.stop()
    backend.close()
    return backend.batches


def test_of_very_many_one_half_goes_on_while_the_other_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that wait again, whose number the writer does not know: the halves stay halves."""
    monkeypatch.setattr(module, "LITTLE", math.inf)
    assert batches_of(1400, saves=2) == [700] * 6
    assert batches_of(module.HALVED_FROM - 1, saves=1) == [module.HALVED_FROM - 1] * 2


def test_where_a_commit_takes_long_there_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a slow disk, where two commits take twice as long as one. That the first was one too many shows then."""
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert batches_of(1400, saves=2) == [700, 1400, 1400, 700]


class Counted(MemoryBackend):
    """Tells of each batch how many writes it has, and takes as long for each as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.begun = threading.Semaphore(0)
        self.go: threading.Event | None = None

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        self.batches.append(len(batch))
        self.begun.release()
        if self.go is not None:
            assert self.go.wait(PATIENCE)
        return super().commit(batch)


def let_go(seconds: float) -> None:
    """What a task does that computes: other threads have their turn meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_who_begins_at_once_is_one_batch_and_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes the loop to let them all begin, or go on: the writer could have gone ahead with some."""
    monkeypatch.setattr(module, "GATHERS", PATIENCE)
    monkeypatch.setattr(module, "GOES_ON", PATIENCE)
    backend = Counted()

    async def life(store: CheckpointStore, number: int) -> None:
        let_go(0.0002)
        new = owned(f"run-{number}")
        assert await store.create(new)
        head = new.head
        for _ in range(3):
            let_go(0.0002)
            made = move(f"run-{number}", head)
            await store.save(made)
            head = made.head

    async def main() -> None:
        async with CheckpointStore(backend) as store, anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(life, store, number)

    anyio.run(main)
    assert backend.batches == [100] * 4


def test_few_that_are_ahead_wait_for_the_many_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be one small commit for which all the others wait, and stay ahead for ever."""
    monkeypatch.setattr(module, "GATHERS", PATIENCE)
    monkeypatch.setattr(module, "GOES_ON", PATIENCE)
    backend = Counted()
    backend.go = go = threading.Event()

    async def life(store: CheckpointStore, number: int) -> None:
        new = owned(f"run-{number}")
        assert await store.create(new)
        let_go(0.0002)
        await store.save(move(f"run-{number}", new.head))

    async def main() -> None:
        async with CheckpointStore(backend) as store, anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(life, store, number)
            await anyio.to_thread.run_sync(backend.begun.acquire)
            for number in range(60, 80):
                tasks.start_soon(life, store, number)
            await anyio.wait_all_tasks_blocked()
            go.set()

    anyio.run(main)
    assert backend.batches == [60, 80, 20]


def test_who_is_held_up_by_another_is_written_all_the_same() -> None:
    """One task keeps the loop to itself for as long as the other's write is not under way."""
    backend = Counted()

    async def write(store: CheckpointStore, id: str) -> None:
        new = owned(id)
        assert await store.create(new)
        await store.save(move(id, new.head))

    async def block(store: CheckpointStore) -> None:
        assert await store.create(owned("other"))
        assert backend.begun.acquire(timeout=PATIENCE)
        assert backend.begun.acquire(timeout=PATIENCE)

    async def main() -> None:
        async with CheckpointStore(backend) as store, anyio.create_task_group() as tasks:
            tasks.start_soon(write, store, "one")
            tasks.start_soon(block, store)

    anyio.run(main)
    assert backend.batches == [2, 1]


def test_steps_that_compute_are_not_waited_for() -> None:
    """The store is busy while they compute: nobody gains by one commit for all of them behind the last."""
    backend = Counted()

    async def life(store: CheckpointStore, number: int) -> None:
        new = owned(f"run-{number}")
        assert await store.create(new)
        let_go(0.004)  # many times what is waited for such a few
        await store.save(move(f"run-{number}", new.head))

    async def main() -> None:
        async with CheckpointStore(backend) as store, anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(life, store, number)

    anyio.run(main)
    assert backend.batches[0] == 10
    assert sum(backend.batches) == 20
    assert len(backend.batches) > 3


def test_what_came_during_a_commit_does_not_wait_for_those_whom_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a loop that is not its own, and that somebody keeps busy."""
    monkeypatch.setattr(module, "GATHERS", 2 * PATIENCE)
    monkeypatch.setattr(module, "GOES_ON", 2 * PATIENCE)
    backend = Counted()
    backend.go = go = threading.Event()
    backend.open()
    writer = Writer(backend, list)
    writer.start()
    renewed = threading.Event()

    async def write(store_loop: Loop, id: str) -> None:
        waiter = store_loop.waiter()
        writer.add((waiter, store_loop, owned(id), None))
        assert await waiter
        assert renewed.wait(PATIENCE)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(write, current_loop(), f"run-{number}")
            await anyio.to_thread.run_sync(backend.begun.acquire)
            writer.call(lambda: None, lambda _: renewed.set(), None)
            go.set()

    try:
        anyio.run(main)
    finally:
        renewed.set()
        writer.stop()
        backend.close()
    assert sum(backend.batches) == 3


def test_one_loop_does_not_wait_for_another() -> None:
    """While somebody keeps the first loop to himself, what is written in a second one is under way."""
    backend = Counted()
    backend.open()
    writer = Writer(backend, list)
    writer.start()
    kept, over = threading.Event(), threading.Event()

    async def keep() -> None:
        loop = current_loop()
        writer.add((lambda answer: None, loop, owned("a"), None))
        writer.add((lambda answer: None, loop, owned("b"), None))
        kept.set()
        assert over.wait(PATIENCE)

    async def write() -> None:
        loop = current_loop()
        waiter = loop.waiter()
        writer.add((waiter, loop, owned("c"), None))
        assert await waiter

    try:
        first = threading.Thread(target=anyio.run, args=(keep,))
        first.start()
        assert kept.wait(PATIENCE)
        anyio.run(write)
        over.set()
        first.join(PATIENCE)
    finally:
        over.set()
        writer.stop()
        backend.close()
    assert sum(backend.batches) == 3


async def test_a_store_that_was_never_opened_takes_no_write() -> None:
    with pytest.raises(StoreUnavailableError, match="not open"):
        await MemoryCheckpointStore().create(create("a"))


def test_a_writer_that_was_never_started_can_be_stopped_and_takes_nothing(backend: Buggy) -> None:
    made = Writer(backend, list)
    made.stop()
    answers: list[Any] = []
    with pytest.raises(StoreUnavailableError, match="not open"):
        made.add((answers.append, None, create("a"), None))
    assert answers == []


def test_stopping_twice_is_stopping_once() -> None:
    writer = Writer(MemoryBackend(), list)
    writer.stop()
    writer.start()
    writer.stop()
    writer.stop()


def test_stopping_waits_for_what_is_queued() -> None:
    """Whoever closes a store knows that its thread has done everything and uses the backend no more."""
    backend, answers = Held(), list[Any]()
    writer = Writer(backend, list)
    writer.start()
    assert writer._thread is not None
    assert writer._thread.daemon  # a program that ends without closing its store does not hang
    writer.add((answers.append, None, create("a"), None))
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    backend.go.set()
    stopping.join(PATIENCE)
    assert answers == [True]


def test_a_write_that_cannot_be_sealed_is_refused_and_the_others_of_its_batch_are_made(backend: Buggy) -> None:
    """I10: what a write is refused for, and no other."""

    def sealed(writes: Sequence[Write]) -> list[Write]:
        for write in writes:
            if write.id == "secret":
                raise CodecError("it has no key")
            if write.id == "broken":
                raise KeyError("a defect")
        return list(writes)

    answers: list[Any] = []
    writer = Writer(backend, sealed)
    writer.start()
    for id in ("a", "secret", "broken", "b"):
        writer.add((answers.append, None, create(id), None))
    writer.stop()
    assert [answers[0], answers[3]] == [True, True]
    assert isinstance(answers[1], CodecError)
    assert isinstance(answers[2], StoreUnavailableError)
    assert sum(backend.count(Query()).values()) == 2


def test_what_a_backend_refuses_is_told_in_its_own_words(backend: Buggy) -> None:
    refusal = StoreUnavailableError("memory", "it is away")

    def refuse() -> None:
        raise refusal

    answers: list[Any] = []
    writer = Writer(backend, list)
    writer.start()
    writer.call(refuse, answers.append, None)
    writer.call(lambda: 7, answers.append, None)
    writer.stop()
    assert answers == [refusal, 7]


class Sneaky(deque[Job]):
    """A job comes in the moment after the thread has seen that there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.sneak: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self.sneak:
            self.sneak.pop()()
        return found


def test_a_job_that_comes_just_before_the_thread_sleeps_is_done() -> None:
    writer = Writer(MemoryBackend(), list)
    queue = writer._queue = Sneaky()
    first, second = threading.Event(), threading.Event()
    writer.start()
    writer.call(lambda: None, lambda _: first.set(), None)
    assert first.wait(PATIENCE)
    queue.sneak.append(lambda: writer.call(lambda: None, lambda _: second.set(), None))
    writer.call(lambda: None, lambda _: None, None)
    try:
        assert second.wait(5.0)
    finally:
        writer.stop()


def test_a_writer_without_work_costs_no_processor_time() -> None:
    """One that looked for work without end would get half of the interpreter while this thread is busy."""
    writer = Writer(MemoryBackend(), list)
    writer.start()
    try:
        answered = threading.Event()
        writer.call(lambda: None, lambda _: answered.set(), None)
        assert answered.wait(PATIENCE)
        assert writer._thread is not None
        clock = time.pthread_getcpuclockid(writer._thread.ident or 0)
        began, busy_until = time.clock_gettime(clock), time.thread_time() + 0.2
        while time.thread_time() < busy_until:
            pass
        assert time.clock_gettime(clock) - began < 0.05
    finally:
        writer.stop()


async def test_what_fails_for_many_is_an_error_of_his_own_for_each(backend: Buggy) -> None:
    """An error that all of them raised would gather the traceback of every one."""
    caught: list[StoreUnavailableError] = []

    async def try_it(store: CheckpointStore, id: str) -> None:
        try:
            await store.create(create(id))
        except StoreUnavailableError as error:
            caught.append(error)

    async with CheckpointStore(backend) as store:
        backend.broken = True
        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(try_it, store, f"job-{n}")
    assert len({id(error) for error in caught}) == 20
    assert len({str(error) for error in caught}) == 1
    assert all(isinstance(error.__cause__, KeyError) for error in caught)
    assert max(_length(error) for error in caught) < 20


def _length(error: BaseException) -> int:
    trace, length = error.__traceback__, 0
    while trace is not None:
        trace, length = trace.tb_next, length + 1
    return length
