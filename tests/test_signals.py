"""Signals: a durable queue per name, kept until a `WaitFor` takes one, in the same commit as the move."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from longrun import (
    Client,
    ConfigError,
    ExecutionNotFoundError,
    Executor,
    Goto,
    InvalidStateError,
    MemoryCheckpointStore,
    NotStorableError,
    QueueLimit,
    Repeat,
    SignalQueueFullError,
    StepContext,
    StepRegistry,
    WaitFor,
    Worker,
)
from longrun.inbox import Inbox
from longrun.stored import Message, Save
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing import ManualClock
from longrun.testing.interposed import InterposedBackend
from tests.crashing import CrashableExecutor, crash


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
def registry() -> StepRegistry:
    """Waits for three letters, then shows them."""
    registry = StepRegistry()

    async def ask(ctx: StepContext, state: list[Any]) -> Any:
        if ctx.step_index:
            state = [*state, ctx.signal]
        return WaitFor("letter", state) if len(state) < 3 else state

    registry.workflow("letters", [ask] * 4)
    return registry


async def test_signals_are_taken_first_in_first_out(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("letters", [])
        await run.wait("waiting")
        for letter in "abc":
            await run.signal("letter", letter)
        assert await run.result() == ["a", "b", "c"]


async def test_a_signal_that_comes_before_its_wait_is_not_lost(store):
    registry = StepRegistry()
    begun, go = anyio.Event(), anyio.Event()

    async def first(state: Any) -> WaitFor:
        begun.set()
        await go.wait()
        return WaitFor("early", state)

    async def then(ctx: StepContext, state: Any) -> Any:
        return ctx.signal

    registry.workflow("early", [first, then])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("early")
        await begun.wait()
        await run.signal("early", "bird")
        go.set()
        assert await run.result() == "bird"


async def test_an_acknowledged_signal_survives_a_crash(registry, store):
    """I1"""
    async with CrashableExecutor(registry, store=store) as dying:
        run = await dying.start("letters", [], id="a")
        await run.wait("waiting")
        dying._sweeping.cancel()
        for letter in "abc":
            await run.signal("letter", letter)
        await crash(dying)
    async with Executor(registry, store=store) as executor:
        assert await (await executor.handle("a")).result() == ["a", "b", "c"]


async def test_a_crash_after_the_claim_and_before_the_move_loses_no_signal(registry, store):
    """I4: what a dying process had claimed and not moved yet is not due by itself; the next one looks for it."""
    async with CrashableExecutor(registry, store=store) as dying:
        run = await dying.start("letters", [], id="a")
        await run.wait("waiting")
        await dying.wait_idle()
        dying.run = lambda loaded, **how: None  # type: ignore[assignment, method-assign]
        await run.signal("letter", "a")
        while (await run.info()).owner is None:
            await dying.sweeper.once()
        await crash(dying)
    async with Executor(registry, store=store) as executor:
        run = await executor.handle("a")
        for letter in "bc":
            await run.signal("letter", letter)
        assert await run.result() == ["a", "b", "c"]


async def test_a_signal_is_taken_in_the_same_write_as_the_move(registry):
    """I1: no write takes a signal and leaves its wait as it was, so no crash can fall between the two."""
    backend = Noting(MemoryBackend())
    async with Executor(registry, store=CheckpointStore(backend)) as executor:
        run = await executor.start("letters", [])
        await run.wait("waiting")
        for letter in "abc":
            await run.signal("letter", letter)
        assert await run.result() == ["a", "b", "c"]
    taking = [save.head for save in backend.saves if save.take]
    assert [(head.step, head.state, head.signal) for head in taking] == [(n, "running", None) for n in (1, 2, 3)]


class Noting(InterposedBackend):
    """Remembers every call and every save, and how many were claimed."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.saves: list[Save] = []
        self.claimed = 0
        self.calls: list[str] = []

    def around(self, call: str, function: Any, *args: Any, **options: Any) -> Any:
        self.calls.append(call)
        if call == "commit":
            self.saves += [write for write in args[0] if isinstance(write, Save)]
        answer = function(*args, **options)
        if call == "claim":
            self.claimed += len(answer)
        return answer


async def test_who_sends_a_signal_does_not_read_those_that_wait(registry):
    backend = Noting(MemoryBackend())
    async with CheckpointStore(backend) as store, Client(store) as client:
        await client.submit("letters", [], id="a")
        backend.calls.clear()
        for letter in "abc":
            await client.signal("a", "letter", letter)
    assert {"load", "messages"}.isdisjoint(backend.calls)


class Chat:
    """An agent that hears word after word, and begins when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = anyio.Event(), anyio.Event()
        self.registry = StepRegistry()

        async def begin(state: Any) -> Any:
            self.begun.set()
            await self.go.wait()
            return state

        async def listen(state: list[Any]) -> WaitFor:
            return WaitFor("word", state)

        async def reply(ctx: StepContext, state: list[Any]) -> Any:
            state = [*state, ctx.signal]
            return state if ctx.signal == "bye" else Goto("listen", state)

        self.registry.workflow("chat", [begin, listen, reply])


WORDS = ["hello", "how", "are", "you", "bye"]


async def test_signals_that_have_come_already_are_taken_without_parking():
    """A write for each wait and one for each reply; nothing is given back, claimed or looked for in between."""
    chat, backend = Chat(), Noting(MemoryBackend())
    async with Executor(chat.registry, store=CheckpointStore(backend)) as executor:
        run = await executor.start("chat", [], id="a")
        events = run.events()
        await chat.begun.wait()
        for word in WORDS:
            await run.signal("word", word)
        await executor.deliver("a")
        backend.saves.clear()
        chat.go.set()
        assert await run.result() == WORDS
        told = [event.type async for event in events if event.type in ("waiting", "resumed")]
        kinds = [one.kind for one in await executor.store.boundaries("a")]
    saves = [save for save in backend.saves if save.boundaries]
    assert kinds == ["start", "step", *["wait", "goto"] * 4, "wait", "finish"]
    assert told == ["waiting", "resumed"] * 5, "as if it had waited"
    assert len(saves) == len(backend.saves) == 11
    assert [len(save.take) for save in saves] == [0, *[1, 0] * 5]
    assert {save.head.state for save in saves[:-1]} == {"running"}
    assert backend.claimed == 0


async def test_a_pause_comes_before_a_signal_that_has_come_already(store):
    registry = StepRegistry()

    async def listen(state: Any) -> WaitFor:
        await store.send("a", Message(kind="signal", name="word", sent=0.0))
        await store.send("a", Message(kind="pause", sent=0.0))
        await executor.deliver("a")
        return WaitFor("word", state)

    async def reply(state: Any) -> Any:
        return state

    registry.workflow("chat", [listen, reply])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("chat", 5, id="a")
        assert (await run.wait("paused")).waiting_for == "word"
        assert [message.name for message in await store.messages("a")] == ["word"]
        await run.resume()
        assert await run.result() == 5


async def test_where_a_queue_is_limited_a_wait_is_left_to_the_limit():
    """Otherwise an execution could go on for ever past a limit that lets so many begin in a second."""
    chat, backend = Chat(), Noting(MemoryBackend())
    chat.go.set()
    store = CheckpointStore(backend)
    async with Client(store) as client:
        run = await client.submit("chat", [], id="a", queue="slow")
        for word in WORDS:
            await client.signal("a", "word", word)
        async with Worker(chat.registry, store=store, limits={"slow": QueueLimit(concurrency=1)}):
            assert await run.result() == WORDS
    parked = [save for save in backend.saves if save.id == "a" and save.head.state == "waiting"]
    assert len(parked) == 5


async def test_a_signal_that_was_read_before_it_was_taken_is_not_taken_again():
    """A sweep has read the signals, and hands them over when one of them is gone."""
    registry, backend = StepRegistry(), Slow(MemoryBackend())
    begun, go, heard, on = anyio.Event(), anyio.Event(), anyio.Event(), anyio.Event()

    async def begin(state: list[Any]) -> WaitFor:
        begun.set()
        await go.wait()
        return WaitFor("word", state)

    async def first(ctx: StepContext, state: list[Any]) -> WaitFor:
        heard.set()
        await on.wait()
        return WaitFor("word", [ctx.signal])

    async def second(ctx: StepContext, state: list[Any]) -> list[Any]:
        return [*state, ctx.signal]

    registry.workflow("chat", [begin, first, second])
    async with Executor(registry, store=CheckpointStore(backend)) as executor:
        run = await executor.start("chat", [], id="a")
        await begun.wait()
        for n in (1, 2):
            await run.signal("word", n)
        await executor.deliver("a")
        async with anyio.create_task_group() as tasks:
            backend.held = threading.Event()
            tasks.start_soon(executor.deliver, "a")
            try:
                while not backend.read:
                    await anyio.lowlevel.checkpoint()
                go.set()
                await heard.wait()
            finally:
                backend.held.set()
        on.set()
        assert await run.result() == [1, 2]


class Slow(InterposedBackend):
    """Holds the answers to who asks for messages."""

    held: threading.Event | None = None
    read = False

    def around(self, call: str, function: Any, *args: Any, **options: Any) -> Any:
        answer = function(*args, **options)
        if call == "messages" and self.held is not None:
            self.read = True
            assert self.held.wait(20)
        return answer


def test_what_is_taken_is_remembered_only_while_somebody_reads():
    inbox, signal = Inbox(), Message(kind="signal", name="word", sent=0.0, id=7)
    with inbox.reading():
        inbox.add([signal])
        inbox.consume(signal)
        with inbox.reading():
            pass
        inbox.add([signal])
        assert not inbox
    assert not inbox._consumed
    inbox.add([signal])
    inbox.consume(signal)
    assert not inbox._consumed


async def test_signals_of_other_names_wait_without_keeping_anybody_busy(store):
    registry = StepRegistry()

    async def one(state: Any) -> WaitFor:
        return WaitFor("first", state)

    async def two(ctx: StepContext, state: Any) -> WaitFor:
        return WaitFor("second", [ctx.signal])

    async def three(ctx: StepContext, state: list[Any]) -> list[Any]:
        return [*state, ctx.signal]

    registry.workflow("names", [one, two, three])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("names", id="a")
        await run.wait("waiting")
        await run.signal("second", 2)
        while "a" not in executor.resting:
            await executor.sweeper.once()
            await executor.wait_idle()
        fence = (await store.load("a")).head.fence
        for _ in range(5):
            await executor.sweeper.once()
        assert (await store.load("a")).head.fence == fence
        assert (await run.info()).state == "waiting"
        await run.signal("first", 1)
        assert await run.result() == [1, 2]


async def test_the_deadline_of_a_wait_passes_although_other_signals_wait():
    clock = ManualClock()
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("wanted", state, timeout=100)

    async def use(ctx: StepContext, state: Any) -> Any:
        return ctx.timed_out

    registry.workflow("ask", [ask, use])
    async with Executor(registry, store=MemoryCheckpointStore(clock=clock), clock=clock) as executor:
        run = await executor.start("ask", id="a")
        await run.wait("waiting")
        await run.signal("other")
        while "a" not in executor.resting:
            await executor.sweeper.once()
            await executor.wait_idle()
        clock.advance(100)
        assert await run.result() is True


async def test_what_rests_here_for_later_signals_is_given_back_on_leaving(store):
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("wanted", state)

    async def use(ctx: StepContext, state: Any) -> Any:
        return ctx.signal

    registry.workflow("ask", [ask, use])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask", id="a")
        await run.wait("waiting")
        await run.signal("other")
        while "a" not in executor.resting:
            await executor.sweeper.once()
            await executor.wait_idle()
    assert (await store.load("a")).head.owner is None
    async with Executor(registry, store=store) as executor:
        await executor.signal("a", "wanted", 5)
        assert await (await executor.handle("a")).result() == 5


async def test_a_key_is_counted_once_and_without_one_every_call_counts(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("letters", [])
        await run.wait("waiting")
        for _ in range(3):
            await run.signal("letter", "a", key="one")
        for _ in range(2):
            await run.signal("letter", "b")
        assert await run.result() == ["a", "b", "b"]


async def test_a_key_is_that_of_one_name(store):
    """The id of a request may stand for all the signals that the request causes."""
    registry = StepRegistry()

    @registry.step
    async def first(state):
        return WaitFor("paid", state)

    @registry.step
    async def second(ctx: StepContext, state):
        return WaitFor("sent", [ctx.signal])

    @registry.step
    async def third(ctx: StepContext, state):
        return [*state, ctx.signal]

    registry.workflow("order", [first, second, third])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("order")
        for name in ("paid", "paid", "sent"):
            await run.signal(name, name, key="request-1")
        with anyio.fail_after(20.0):
            assert await run.result() == ["paid", "sent"]


async def test_a_timeout_ends_the_waiting_and_a_key_lets_it_be_sent_again(registry, store, monkeypatch):
    answers, commit = threading.Event(), store.backend.commit

    def slow(batch):
        assert answers.wait(60)
        return commit(batch)

    async with Executor(registry, store=store) as executor:
        run = await executor.start("letters", [])
        await run.wait("waiting")
        monkeypatch.setattr(store.backend, "commit", slow)
        try:
            with pytest.raises(TimeoutError):
                await run.signal("letter", "a", key="a", timeout=0.01)
        finally:
            answers.set()
        for letter in "abc":
            await run.signal("letter", letter, key=letter, timeout=60)
        assert await run.result() == ["a", "b", "c"]


async def test_a_repeated_key_is_ignored_after_the_end_too(registry, store):
    """Who repeats a signal because the answer was lost cannot know that it has ended of it."""
    async with Executor(registry, store=store) as executor, Client(store) as client:
        run = await executor.start("letters", [])
        await run.wait("waiting")
        for letter in "abc":
            await client.signal(run.id, "letter", letter, key=letter)
        assert await run.result() == ["a", "b", "c"]
        for room in (executor, client):
            await room.signal(run.id, "letter", "c", key="c")
            for name, key in (("letter", "d"), ("other", "c"), ("letter", None)):
                with pytest.raises(InvalidStateError, match="completed"):
                    await room.signal(run.id, name, key=key)


async def test_which_keys_came_is_asked_of_what_has_ended_alone(registry):
    backend = Noting(MemoryBackend())
    async with CheckpointStore(backend) as store, Client(store) as client:
        await client.submit("letters", [], id="a")
        for _ in range(2):
            await client.signal("a", "letter", "a", key="k")
        assert "sent" not in backend.calls
        await client.cancel("a")
        await client.signal("a", "letter", "a", key="k")
        assert backend.calls.count("sent") == 1


async def test_the_queue_is_bounded(store):
    registry = StepRegistry()

    async def ask(state: Any) -> WaitFor:
        return WaitFor("never", state)

    registry.workflow("ask", [ask])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("ask")
        await run.wait("waiting")
        with pytest.raises(SignalQueueFullError, match="1000"):
            for _ in range(1001):
                await run.signal("other")
        await run.cancel()


async def test_an_agents_loop_takes_one_signal_a_turn(store):
    registry = StepRegistry()

    async def listen(state: list[Any]) -> WaitFor:
        return WaitFor("word", state)

    async def reply(ctx: StepContext, state: list[Any]) -> Any:
        state = [*state, ctx.signal]
        return state if ctx.signal == "bye" else Goto("listen", state)

    registry.workflow("chat", [listen, reply])
    async with Executor(registry, store=store) as executor:
        run = await executor.start("chat", [])
        words = ["hello", "how", "are", "you", "bye"]
        for word in words:
            await run.signal("word", word)
        assert await run.result() == words


async def test_the_payload_is_there_for_every_attempt_and_gone_in_the_next_visit(store):
    registry = StepRegistry()
    seen = []

    async def ask(state: Any) -> WaitFor:
        return WaitFor("answer", state)

    async def use(ctx: StepContext, state: int) -> Any:
        seen.append((ctx.attempt, ctx.iteration, ctx.signal))
        if ctx.attempt == 1 and ctx.iteration == 0:
            raise ValueError
        return Repeat(state) if ctx.iteration == 0 else state

    clock = ManualClock(autojump=True)
    registry.workflow("ask", [ask, use])
    async with Executor(registry, store=store, clock=clock) as executor:
        run = await executor.start("ask", 1)
        await run.signal("answer", {"deep": [1, (2, 3)]})
        await run.result()
    assert seen == [(1, 0, {"deep": [1, (2, 3)]}), (2, 0, {"deep": [1, (2, 3)]}), (1, 1, None)]


async def test_bad_signals_are_refused(registry, store):
    async with Executor(registry, store=store) as executor:
        run = await executor.start("letters", [])
        for name in ("", None, 5, "x" * 201, "a\nb"):
            with pytest.raises(ConfigError, match="name"):
                await run.signal(name)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="key"):
            await run.signal("letter", key="")
        with pytest.raises(NotStorableError, match=r"payload\['client'\]"):
            await run.signal("letter", {"client": object()})
        with pytest.raises(ExecutionNotFoundError):
            await executor.signal("nobody", "letter")
        await run.cancel()
        with pytest.raises(InvalidStateError, match="cancelled"):
            await run.signal("letter")
