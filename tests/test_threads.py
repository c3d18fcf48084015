"""Plain steps in threads: the blocking context, what stops a thread, and what a thread that will not stop cannot do."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from longrun import (
    ConfigError,
    ContextClosedError,
    ExecutionFailedError,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    RetryPolicy,
    StepContext,
    StepError,
    StepInterrupted,
    StepMisuseError,
    StepRegistry,
    SyncStepContext,
)
from longrun.loops import current_loop
from longrun.threads import StepThreads
from tests.crashing import AT_ONCE, LASTING, NEVER, PATIENCE, crash_at, expire, finish, registry_of, run, stored


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


class Flag(threading.Event):
    """A thread's event that a task can wait for."""

    async def reached(self) -> None:
        assert await anyio.to_thread.run_sync(self.wait, PATIENCE)

    def wait_for(self) -> None:
        assert self.wait(PATIENCE)


def read(store) -> dict[str, Any]:
    """What is stored, read from a thread."""
    return dict(store.backend.load("x").entries)


async def test_a_plain_step_runs_in_a_daemon_thread_of_the_library():
    def step(state):
        thread = threading.current_thread()
        return thread.name.startswith("longrun-step-"), thread.daemon

    assert await run(registry_of(step)) == (True, True)


async def test_the_blocking_context_has_the_same_names(store):
    """`each`, `once`, `map`, `checkpoint`, `local`: and a crash is taken up from the last save."""
    calls: list[Any] = []
    reached = anyio.Event()
    stop = Flag()
    call_soon = current_loop().call_soon

    def step(ctx: SyncStepContext, state):
        for item in ctx.each("items", range(4), every=1):
            ctx.local["sum"] = ctx.local.get("sum", 0) + item
            ctx.once("call", calls.append, item)
            assert ctx.map(lambda n: n + 1, [item], name="plus") == [item + 1]
            if item == 2 and not stop.is_set():
                call_soon(reached.set)
                stop.wait_for()
                ctx.checkpoint()
        ctx.checkpoint(force=True)
        return ctx.local["sum"]

    registry = registry_of(step)
    await crash_at(reached, registry, store, config=NEVER)
    stop.set()
    assert (await stored(store))["each:items"] == {"n": 2, "of": 4}
    assert await finish(registry, store) == 6
    assert calls == [0, 1, 2, 3]


async def test_a_plain_step_may_be_annotated_with_the_other_context():
    def step(ctx: StepContext, state) -> str:
        return type(ctx).__name__

    assert await run(registry_of(step)) == "SyncStepContext"


async def test_a_forced_checkpoint_is_durable_on_return(store):
    def step(ctx: SyncStepContext, state):
        ctx.local["n"] = 1
        ctx.checkpoint()
        assert read(store) == {}
        ctx.checkpoint(force=True)
        assert set(read(store)) == {"local"}

    await run(registry_of(step), store, config=NEVER)


async def test_a_capture_is_saved_although_the_thread_sleeps(store):
    def step(ctx: SyncStepContext, state):
        ctx.local["n"] = 1
        ctx.checkpoint()
        saved.wait_for()

    saved = Flag()
    config = ExecutorConfig(checkpoint_interval=0.05, heartbeat_interval=0.1)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=config) as executor:
            handle = await executor.start("work", id="x")
            while await stored(store) != {"local": {"n": 1}}:
                await anyio.lowlevel.checkpoint()
            saved.set()
            await handle.result()


async def test_a_failed_attempt_hands_its_progress_to_the_next():
    def step(ctx: SyncStepContext, state):
        for item in ctx.each("items", range(4)):
            assert ctx.local.get("list", []) == list(range(item))
            ctx.local.setdefault("list", []).append(item)
            if item == 2 and ctx.attempt == 1:
                raise ValueError
        return ctx.local["list"], ctx.attempt

    assert await run(registry_of(step, retry=AT_ONCE), config=NEVER) == ([0, 1, 2, 3], 2)


async def test_a_pause_takes_effect_at_a_checkpoint_inside_the_thread(store):
    began, go_on, unwound = Flag(), Flag(), Flag()

    def step(ctx: SyncStepContext, state):
        if ctx.local:
            return ctx.local["n"]
        began.set()
        go_on.wait_for()
        ctx.local["n"] = 1
        try:
            ctx.checkpoint()
        except StepInterrupted:
            unwound.set()
            raise
        raise AssertionError("the pause took no effect")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await began.reached()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                go_on.set()
            assert await stored(store) == {"local": {"n": 1}}
            assert (await handle.info()).state == "paused"
            await unwound.reached()
            await handle.resume()
            assert await handle.result() == 1


CALLS = {
    "checkpoint": lambda ctx: ctx.checkpoint(),
    "forced checkpoint": lambda ctx: ctx.checkpoint(force=True),
    "each": lambda ctx: list(ctx.each("late", [1])),
    "once": lambda ctx: ctx.once("late", int),
    "map": lambda ctx: ctx.map(str, [1]),
    "child": lambda ctx: ctx.start_child("work", key="late"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["cancel", "interrupt", "time-out"])
async def test_a_stopped_attempt_closes_its_context_and_the_thread_unwinds(call, how, store):
    """Every later call raises there, past any `except Exception`; what it would return is thrown away, and the next
    attempt waits for its end."""
    log: list[str] = []
    began, go_on = Flag(), Flag()

    def step(ctx: SyncStepContext, state):
        if began.is_set():
            log.append("next attempt")
            return "second"
        began.set()
        go_on.wait_for()
        try:
            CALLS[call](ctx)
        except Exception as error:
            log.append(f"caught {error!r}")
        except StepInterrupted:
            log.append("unwound")
            raise
        return "first"

    options: dict[str, Any] = {"timeout": 0.3} if how == "time-out" else {}
    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, **options), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await began.reached()
            if how == "cancel":
                await handle.cancel()
            elif how == "interrupt":
                await handle.pause(interrupt=True)
                await handle.resume()
            else:
                while not (await handle.info()).attempt:
                    await anyio.lowlevel.checkpoint()
            assert log == []
            go_on.set()
            if how != "cancel":
                assert await handle.result() == "second"
                assert log == ["unwound", "next attempt"]
    if how == "cancel":
        await anyio.to_thread.run_sync(_until, lambda: log == ["unwound"])
        assert (await store.load("x")).head.state == "cancelled"


def _until(true) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        if true():
            return
        waiting.wait(0.01)
    raise AssertionError


async def test_a_thread_that_never_calls_its_context_is_waited_for_and_can_still_be_cancelled(store):
    """Its result is thrown away; the next attempt waits, and obeys while it waits."""
    runs: list[int] = []
    began, go_on = Flag(), Flag()

    def step(state):
        runs.append(1)
        began.set()
        go_on.wait_for()
        return "too late"

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, timeout=LASTING), store=store) as executor:
            handle = await executor.start("work", id="x")
            await began.reached()
            expire(executor)
            while not (await handle.info()).attempt:
                await anyio.lowlevel.checkpoint()
            await handle.cancel()
            assert (await handle.info()).state == "cancelled"
        assert runs == [1]
    go_on.set()


async def test_what_is_obeyed_while_a_thread_is_waited_for_does_not_end_the_waiting(store):
    runs: list[int] = []
    began, go_on = Flag(), Flag()

    def step(state):
        runs.append(1)
        if len(runs) == 1:
            began.set()
            go_on.wait_for()
        return len(runs)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, timeout=LASTING), store=store) as executor:
            handle = await executor.start("work", id="x")
            await began.reached()
            expire(executor)
            while not (await handle.info()).attempt:
                await anyio.lowlevel.checkpoint()
            fence = (await store.load("x")).head.fence
            await handle.resume()
            go_on.set()
            assert await handle.result() == 2
            assert (await store.load("x")).head.fence == fence, "nobody had to claim it again"


async def test_the_next_attempt_waits_for_every_thread_that_a_map_left():
    began = threading.Barrier(3)
    running: list[int] = []
    go_on = [Flag(), Flag(), Flag()]
    overlaps: list[int] = []

    def branch(ctx: SyncStepContext, n):
        if ctx.attempt == 2:
            overlaps.extend(running)
            assert running == []
            return
        running.append(n)
        began.wait(PATIENCE)
        go_on[n].wait_for()
        running.remove(n)

    async def step(ctx: StepContext, state):
        await ctx.map(branch, range(3))

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, timeout=LASTING), store="memory:") as executor:
            handle = await executor.start("work", id="x")
            while len(running) < 3:
                await anyio.lowlevel.checkpoint()
            expire(executor)
            while not (await handle.info()).attempt:
                await anyio.lowlevel.checkpoint()
            go_on[2].set()
            go_on[1].set()
            for _ in range(20):
                assert (await handle.info()).state == "running"
            assert running == [0]
            assert overlaps == []
            go_on[0].set()
            await handle.result()
    assert overlaps == []


async def test_a_drain_does_not_wait_for_a_thread_that_never_calls_its_context(store):
    began, go_on = Flag(), Flag()

    def step(state):
        began.set()
        go_on.wait_for()
        return "done"

    registry = registry_of(step)
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=ExecutorConfig(drain_timeout=0.01)) as executor:
            await executor.start("work", id="x")
            await began.reached()
    assert (await store.load("x")).head.state == "running"
    assert (await store.load("x")).head.owner is None
    go_on.set()
    assert await finish(registry, store) == "done"


async def test_no_more_threads_than_the_limit():
    running = most = 0
    lock = threading.Lock()
    pool = StepThreads(2)
    together = threading.Barrier(2)

    def job():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(PATIENCE)
        with lock:
            running -= 1

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(pool.run, job)
    assert most == 2
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("longrun-step-")}
    assert len(names) <= 2
    pool.close()


async def test_the_store_is_not_blocked_by_full_step_threads(store):
    """Steps wait for threads; saves, controls and looks do not."""
    began, go_on = Flag(), Flag()

    def blocking(state):
        began.set()
        go_on.wait_for()

    async def saving(ctx: StepContext, state):
        ctx.local["n"] = 1
        await ctx.checkpoint(force=True)
        return "saved"

    registry = StepRegistry()
    registry.register("blocking", blocking)
    registry.register("saving", saving)
    registry.workflow("block", ["blocking"])
    registry.workflow("save", ["saving"])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store) as executor:
            executor.threads = StepThreads(1)
            handles = [await executor.start("block", id=f"block-{n}") for n in range(3)]
            await began.reached()
            saved = await executor.start("save", id="x")
            assert await saved.result() == "saved"
            await executor.pause("block-2", interrupt=True)
            assert (await executor.get("block-2")).state == "paused"
            go_on.set()
            for handle in handles[:2]:
                await handle.result()


async def test_a_thread_that_waits_for_threads_gives_up_its_place():
    """Otherwise plain steps that call `map` would wait for each other for ever."""

    def leaf(n):
        return n + 1

    def branch(ctx: SyncStepContext, n):
        return sum(ctx.map(leaf, range(n), name="leaves"))

    def step(ctx: SyncStepContext, state):
        return ctx.map(branch, range(4), name="branches")

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store="memory:") as executor:
            executor.threads = StepThreads(1)
            runs = [await executor.start("work", id=f"x{n}") for n in range(3)]
            assert [await run.result() for run in runs] == [[0, 1, 3, 6]] * 3


async def test_branches_that_wait_for_a_thread_do_not_keep_a_pause_from_taking_effect(store):
    """A thread that waits at a point for the other branches gives up its place to them."""
    began, go_on = Flag(), Flag()

    def branch(ctx: SyncStepContext, n):
        began.set()
        go_on.wait_for()
        ctx.checkpoint()
        return n

    async def step(ctx: StepContext, state):
        return await ctx.map(branch, range(3), limit=3)

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store, config=NEVER) as executor:
            executor.threads = StepThreads(1)
            handle = await executor.start("work", id="x")
            await began.reached()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle.pause)
                while not executor.runners["x"].attention:
                    await anyio.lowlevel.checkpoint()
                go_on.set()
            assert (await handle.info()).state == "paused"
            await handle.resume()
            assert await handle.result() == [0, 1, 2]


async def test_a_context_in_a_foreign_thread_says_what_is_wrong():
    errors: list[BaseException] = []

    def elsewhere(ctx: SyncStepContext) -> None:
        ctx.progress(2, 2)  # this one may come from anywhere
        for call in CALLS.values():
            try:
                call(ctx)
            except BaseException as error:
                errors.append(error)

    def step(ctx: SyncStepContext, state):
        thread = threading.Thread(target=elsewhere, args=(ctx,))
        thread.start()
        thread.join()

    await run(registry_of(step))
    assert len(errors) == len(CALLS)
    assert all(type(error) is StepMisuseError and "only be used in the thread" in str(error) for error in errors)


async def test_a_context_of_an_earlier_attempt_is_closed():
    contexts: list[SyncStepContext] = []

    def step(ctx: SyncStepContext, state):
        contexts.append(ctx)
        if ctx.attempt == 1:
            raise ValueError
        for call in CALLS.values():
            with pytest.raises(ContextClosedError):
                call(contexts[0])
        with pytest.raises(ContextClosedError):
            contexts[0].progress(1)

    await run(registry_of(step, retry=AT_ONCE))


async def test_context_variables_come_along_and_a_thread_may_run_a_loop_of_its_own(anyio_backend):
    color = contextvars.ContextVar("color", default="none")

    def step(state):
        return color.get(), anyio.run(anyio.sleep, 0, backend=anyio_backend)

    color.set("blue")
    assert await run(registry_of(step)) == ("blue", None)


async def test_an_async_function_can_be_called_once_from_a_thread():
    """It runs in the loop."""
    threads = []

    async def call(n: int) -> int:
        await anyio.lowlevel.checkpoint()
        threads.append(threading.get_ident())
        return n + 1

    def step(ctx: SyncStepContext, state):
        return ctx.once("call", call, 1)

    assert await run(registry_of(step)) == 2
    assert threads == [threading.get_ident()]


async def test_async_items_are_refused_in_a_thread():
    async def items():
        yield 1

    def step(ctx: SyncStepContext, state):
        with pytest.raises(StepError, match="a plain step needs a plain one"):
            ctx.each("items", items())

    await run(registry_of(step))


async def test_sys_exit_fails_the_attempt_not_the_program():
    def step(state):
        raise SystemExit(3)

    with pytest.raises(ExecutionFailedError, match="SystemExit"):
        await run(registry_of(step, retry=RetryPolicy(max_attempts=1)))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError()])]
)
@pytest.mark.parametrize("where", ["step", "branch"])
async def test_what_would_end_a_program_fails_the_attempt_when_a_plain_function_raises_it(error, where):
    def bad(item):
        raise error

    def thread_step(ctx: SyncStepContext, state):
        ctx.map(bad, [1, 2])

    step_of: dict[str, Any] = {"step": bad, "branch": thread_step}
    with pytest.raises(ExecutionFailedError, match=f"{type(error).__name__}, which ends an attempt"):
        await run(registry_of(step_of[where]))


async def test_the_time_of_a_step_begins_when_there_is_a_thread_for_it():
    """However long it has waited for one."""
    began, go_on = Flag(), Flag()

    def blocking(state):
        began.set()
        go_on.wait_for()

    def bounded(ctx: SyncStepContext, state):
        return ctx.time_left

    registry = registry_of(bounded, timeout=1.0)
    registry.register("blocking", blocking)
    registry.workflow("block", ["blocking"])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:") as executor:
            executor.threads = StepThreads(1)
            await executor.start("block")
            await began.reached()
            queued = await executor.start("work")
            with pytest.raises(TimeoutError):
                await queued.result(timeout=1.2)
            go_on.set()
            assert 0 < await queued.result() <= 1.0


async def test_the_last_capture_of_a_thread_survives_a_time_out(store):
    began, go_on = Flag(), Flag()
    seen = []

    def step(ctx: SyncStepContext, state):
        seen.append(dict(ctx.local))
        if ctx.attempt == 2:
            return
        for n in ctx.each("items", range(3)):
            ctx.local["n"] = n
            if n == 2:
                began.set()
                go_on.wait_for()

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step, retry=AT_ONCE, timeout=LASTING), store=store, config=NEVER) as executor:
            handle = await executor.start("work", id="x")
            await began.reached()
            expire(executor)
            while not (await handle.info()).attempt:
                await anyio.lowlevel.checkpoint()
            assert await stored(store) == {"each:items": {"n": 2, "of": 3}, "local": {"n": 1}}
            go_on.set()
            await handle.result()
    assert seen == [{}, {"n": 1}]


def test_a_pool_of_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        StepThreads(0)


async def test_a_plain_function_that_returns_a_coroutine_is_told_what_is_wrong():
    """A decorator that is not async around a step that is."""

    async def step(state: Any) -> Any:
        return state

    def decorated(state: Any) -> Any:
        return step(state)

    with pytest.raises(ExecutionFailedError, match="'decorated' is a plain function that returns a coroutine"):
        await run(registry_of(decorated, retry=AT_ONCE))
