"""What the front of every store does by itself, whatever stands behind it."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import anyio
import pytest

from longrun import CorruptDataError, MemoryCheckpointStore, StoreUnavailableError
from longrun.seal import Seal
from longrun.stores import memory, open_store, rows
from longrun.stores.memory import MemoryBackend
from longrun.stores.readers import Readers
from longrun.stores.store import CheckpointStore
from longrun.testing import FaultyStore, samples
from tests.crashing import PATIENCE


def test_it_shows_its_kind_and_nothing_of_its_place():
    assert repr(MemoryCheckpointStore()) == "<MemoryCheckpointStore memory>"


async def test_what_cannot_be_read_exists_all_the_same():
    async with FaultyStore(MemoryCheckpointStore()) as store:
        assert await store.exists("a") is False
        await store.create(samples.create("a"))
        assert await store.exists("a") is True
        store.fail("boundaries", error=CorruptDataError("a", "it is damaged"))
        assert await store.exists("a") is True
    assert store.fired["boundaries"] == 1


async def test_a_store_that_was_opened_again_is_watched_again():
    store = MemoryCheckpointStore()
    other = CheckpointStore(store.backend)
    for id in ("first", "second"):
        async with store, other:
            changed = anyio.Event()
            unwatch = store.watch(changed.set)
            await other.create(samples.create(id))
            with anyio.fail_after(PATIENCE):
                await changed.wait()
            unwatch()


def test_a_wait_is_ended_by_a_wake():
    """Closing a store does not wait for the time-out of its watcher."""
    backend = MemoryBackend()
    thread = threading.Thread(target=backend.wait, args=(3600.0,), daemon=True)
    thread.start()
    backend.wake()
    thread.join(PATIENCE)
    assert not thread.is_alive()


class Told(MemoryBackend):
    """Its waiting ends with what the test says."""

    def __init__(self, *answers: bool | Exception) -> None:
        super().__init__()
        self.answers: SimpleQueue[bool | Exception] = SimpleQueue()
        for answer in answers:
            self.answers.put(answer)

    def wait(self, timeout: float) -> bool:
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wake(self) -> None:
        self.answers.put(False)


async def test_a_defect_of_a_backend_does_not_end_the_watching():
    backend = Told(ValueError("a defect"))
    heard = anyio.Event()
    async with CheckpointStore(backend) as store:
        store.watch(heard.set)
        with anyio.fail_after(PATIENCE):
            await heard.wait()
            while not backend.answers.empty():
                await anyio.lowlevel.checkpoint()
            heard = anyio.Event()
            store.watch(heard.set)
            backend.answers.put(True)
            await heard.wait()


async def test_listeners_hear_of_changes_and_of_a_store_that_was_away_and_not_of_silence():
    backend = Told(True, False, False, False, StoreUnavailableError("told", "it is away"))
    calls: list[int] = []
    async with CheckpointStore(backend) as store:
        store.watch(lambda: calls.append(1))
        with anyio.fail_after(PATIENCE):
            while not backend.answers.empty():
                await store.ping()
    assert len(calls) == 2


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_reads_for_which_no_thread_could_be_started_leave_room_for_later_ones(monkeypatch: pytest.MonkeyPatch):
    """A read that nobody serves would hang, and could not be cancelled: it is made in a thread that can be left."""
    readers = Readers(2)
    answers: list[int] = []

    async def read() -> None:
        answers.append(await readers.run(len, "abc"))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                anyio.run(read)
    thread = threading.Thread(target=anyio.run, args=(read,), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    readers.close()
    assert answers == [3]


async def test_where_no_more_threads_can_be_started_those_that_there_are_read(monkeypatch: pytest.MonkeyPatch):
    readers = Readers(2)
    go = threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(readers.run, go.wait, PATIENCE)
        await anyio.wait_all_tasks_blocked()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                group.start_soon(readers.run, len, "abc")
                await anyio.wait_all_tasks_blocked()
        finally:
            go.set()
    assert await readers.run(len, "abc") == 3
    readers.close()


async def test_a_watcher_that_could_not_be_started_is_started_for_the_next_who_asks(monkeypatch: pytest.MonkeyPatch):
    """And the store can be closed."""
    store = MemoryCheckpointStore()
    async with store, CheckpointStore(store.backend) as other:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
            patch.setattr(threading.Thread, "start", no_thread)
            store.watch(lambda: None)
        changed = anyio.Event()
        store.watch(changed.set)
        assert "longrun-watcher" in [thread.name for thread in threading.enumerate()]
        await other.create(samples.create("a"))
        with anyio.fail_after(PATIENCE):
            await changed.wait()


async def test_one_that_cannot_be_unsealed_does_not_keep_the_others_of_a_claim():
    """I5"""
    backend = MemoryCheckpointStore().backend
    secret = os.urandom(32)
    old = CheckpointStore(backend, seal=Seal(key=lambda _: ("key", os.urandom(32))))
    new = CheckpointStore(backend, seal=Seal(key=lambda _: ("key", secret)))
    async with old, new:
        await old.create(samples.create("sealed"))
        await new.create(samples.create("readable"))
        claimed = {one.definition.id: one for one in await new.claim(samples.claim())}
    assert claimed.keys() == {"sealed", "readable"}
    assert claimed["readable"].damage == ()
    assert claimed["readable"].boundary.data == b"state 1"
    assert len(claimed["sealed"].damage) == 1


async def test_a_boundary_without_a_state_needs_no_seal():
    """Of boundaries that were gathered only some have one."""
    backend = MemoryBackend()
    new = samples.owned("a")
    rows = (samples.boundary(2, data=None), samples.boundary(3))
    key = os.urandom(32)
    async with CheckpointStore(backend, seal=Seal(key=lambda _: ("one", key))) as store:
        await store.create(new)
        await store.save(samples.step("a", new.head, boundaries=rows))
        found = await store.load("a")
        assert (found.boundary.seq, found.boundary.data) == (3, b"state 3")
        assert [row.data for row in await store.boundaries("a")] == [None] * 3
    stored = backend.load("a")
    assert stored is not None
    assert stored.boundary.data != b"state 3"


async def test_the_keys_of_messages_taken_long_ago_are_forgotten(monkeypatch):
    """I16: all of those that wait are known, and the newest of the others."""
    monkeypatch.setattr(memory, "KEYS_REMEMBERED", 2)
    async with MemoryCheckpointStore() as store:
        new = samples.owned("a")
        await store.create(new)
        assert [await store.send("a", samples.signal(key=f"k{n}")) for n in range(4)] == [1, 2, 3, 4]
        await store.save(samples.change("a", new.head, take=(1, 2, 3, 4)))
        assert await store.send("a", samples.signal(key="k4")) == 5
        assert [await store.send("a", samples.signal(key=f"k{n}")) for n in (3, 4, 0)] == [4, 5, 6]


def test_json_columns_take_any_mapping_and_give_objects_alone():
    assert rows.json_text(MappingProxyType({"a": 1})) == '{"a":1}'
    assert rows.json_mapping('{"a":1}') == {"a": 1}
    with pytest.raises(CorruptDataError, match="holds no object"):
        rows.json_mapping("[1]")


def told_by_child(ask: Callable[[], Awaitable[object]]) -> str:
    """What a forked child hears when it asks."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover -- it ends by _exit
        try:
            anyio.run(ask)
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


@pytest.mark.parametrize("what", ["open", "ping", "create"])
def test_a_store_that_the_parent_has_open_says_so_in_a_forked_child(what: str, tmp_path: Path) -> None:
    """Its threads are the parent's: whoever asked would wait for ever."""
    store = open_store(f"file:{tmp_path}/store")
    ask = {"open": store.open, "ping": store.ping, "create": lambda: store.create(samples.create("a"))}[what]
    anyio.run(store.open)
    try:
        assert "forked: make another" in told_by_child(ask)
        assert anyio.run(store.create, samples.create("b"))
    finally:
        anyio.run(store.aclose)
    assert told_by_child(store.open) == "nothing", "closed, it belongs to nobody"
