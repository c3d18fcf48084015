"""`ctx.start_child`: another execution, started once for a visit and a key."""

from __future__ import annotations

import itertools
import sys
from inspect import signature

import anyio
import pytest

from longrun import (
    ConfigError,
    ExecutionExistsError,
    ExecutionFailedError,
    ExecutionState,
    Executor,
    ExecutorConfig,
    MemoryCheckpointStore,
    NonRetryable,
    Repeat,
    RetentionPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    SyncStepContext,
    WaitFor,
)
from longrun.client import Client
from longrun.handle import BlockingHandle, ExecutionHandle
from longrun.testing.samples import create
from longrun.worker import Worker
from tests import crashing
from tests.crashing import AT_ONCE, ONE, PATIENCE, CrashableExecutor, crash, crash_at, finish, run


@pytest.fixture
async def store():
    async with MemoryCheckpointStore() as store:
        yield store


async def double(state):
    return state * 2


async def fail(state):
    raise ValueError("no")


async def nap(state):
    return Sleep(0.01, state)


def registry_of(step) -> StepRegistry:
    registry = crashing.registry_of(step)
    registry.register("double", double)
    registry.register("fail", fail, retry=AT_ONCE)
    registry.register("nap", nap)
    registry.workflow("child", ["double"])
    registry.workflow("bad", ["fail"])
    registry.workflow("rested", ["nap", "double"])
    return registry


async def test_a_child_has_the_id_of_its_parent_visit_and_key(store):
    async def step(ctx: StepContext, state):
        child = await ctx.start_child("child", 21, key="a")
        return child.id, await child.result()

    assert await run(registry_of(step), store) == ("x~1~a", 42)
    loaded = await store.load("x~1~a")
    assert loaded.definition.parent_id == "x"


async def test_a_step_that_has_to_stop_starts_no_child(store):
    begun, go = anyio.Event(), anyio.Event()

    async def step(ctx: StepContext, state):
        begun.set()
        await go.wait()
        child = await ctx.start_child("child", 21, key="a")
        return await child.result()

    with anyio.fail_after(PATIENCE):
        async with Executor(registry_of(step), store=store) as executor:
            parent = await executor.start("work", id="x")
            await begun.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parent.pause)
                while not executor.runners["x"].inbox:
                    await store.ping()
                go.set()
            assert sum((await store.count()).values()) == 1
            await parent.resume()
            assert await parent.result() == 42


async def test_a_second_call_returns_the_same_child():
    async def step(ctx: StepContext, state):
        first = await ctx.start_child("child", 1, key="a")
        assert await first.result() == 2
        second = await ctx.start_child("child", 50, key="a")
        assert second.id == first.id
        return await second.result()

    assert await run(registry_of(step)) == 2


async def test_another_visit_starts_another_child():
    async def step(ctx: StepContext, state):
        child = await ctx.start_child("child", ctx.iteration, key="a")
        state = [*(state or []), (child.id, await child.result())]
        return Repeat(state) if ctx.iteration < 1 else state

    assert await run(registry_of(step)) == [("x~1~a", 0), ("x~2~a", 2)]


def asks_again(reached: anyio.Event, ran: list[int]) -> StepRegistry:
    """A parent that waits for its child, is killed when that has ended, and asks for it again."""

    async def counted(state):
        ran.append(state)
        return state * 2

    async def step(ctx: StepContext, state):
        child = await ctx.start_child("counted", 21, key="a")
        if not reached.is_set():
            await child.result()
            reached.set()
            await anyio.sleep_forever()
        return await child.result()

    registry = registry_of(step)
    registry.register("counted", counted, retry=ONE)
    registry.workflow("counted", ["counted"])
    return registry


async def test_a_crash_between_start_and_result_finds_the_same_child(store):
    """The child is taken up as well; it runs once."""
    reached, ran = anyio.Event(), list[int]()
    registry = asks_again(reached, ran)
    await crash_at(reached, registry, store)
    assert await finish(registry, store) == 42
    assert ran == [21]


async def test_retention_leaves_a_child_that_its_parent_may_ask_for_again(store):
    """Its parent finds it after a crash, however long ago the child ended; both go when the parent has ended."""
    reached, ran = anyio.Event(), list[int]()
    policy, now = RetentionPolicy(max_age=0.0), 1e12
    registry = asks_again(reached, ran)
    await crash_at(reached, registry, store)
    assert await store.gc(policy, now) == 0
    assert await finish(registry, store) == 42
    assert ran == [21]
    assert await store.gc(policy, now) == 2


async def test_retention_leaves_the_children_of_a_failed_parent_that_may_be_retried(store):
    ran = []

    async def step(ctx: StepContext, state):
        ran.append(await (await ctx.start_child("child", 21, key="a")).result())
        if len(ran) == 1:
            raise NonRetryable("not yet")
        return ran[-1]

    async with Executor(registry_of(step), store=store) as executor:
        handle = await executor.start("work", 1, id="x")
        with pytest.raises(ExecutionFailedError):
            await handle.result()
        failed = (await store.load("x")).head.ended
        child = (await store.load("x~1~a")).head.ended
        assert failed is not None
        assert child is not None
        assert await store.gc(RetentionPolicy(max_age=1.0), now=(child + failed) / 2 + 1.0) == 0
        before = (await store.load("x~1~a")).head
        await executor.retry("x")
        assert await handle.result() == 42
        assert (await store.load("x~1~a")).head == before, "it was found, and did not run again"
        ended = (await store.load("x")).head.ended
        assert ended is not None
        assert await store.gc(RetentionPolicy(max_age=1.0), now=ended + 2.0) == 2


async def test_a_child_is_in_the_queue_of_its_parent(store):
    """Whoever serves that queue takes up what a crash leaves of both."""

    async def step(ctx: StepContext, state):
        return (await ctx.start_child("rested", 21, key="a")).id

    registry = registry_of(step)
    async with Client(store) as client, Worker(registry, store=store, queues=["films"]):
        handle = await client.submit("work", 1, id="x", queue="films", priority=7)
        with anyio.fail_after(PATIENCE):
            child = client.handle(await handle.result())
            assert await child.result() == 42
        found = await child.info()
        assert (found.queue, found.priority) == ("films", 7)


async def test_a_crash_while_the_child_runs_takes_up_both(store):
    reached = anyio.Event()
    starts = []

    async def counted(ctx: StepContext, state):
        starts.append(ctx.execution_id)
        if not reached.is_set():
            reached.set()
            await anyio.sleep_forever()
        return state * 2

    async def step(ctx: StepContext, state):
        starts.append(ctx.execution_id)
        return await (await ctx.start_child("counted", 21, key="a")).result()

    registry = registry_of(step)
    registry.register("counted", counted, retry=ONE)
    registry.workflow("counted", ["counted"])
    await crash_at(reached, registry, store)
    assert await finish(registry, store) == 42
    assert sorted(starts) == ["x", "x", "x~1~a", "x~1~a"]


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_waiting_for_a_child_gives_the_slot_back(kind):
    """With one slot, parent and child finish all the same."""

    async def step(ctx: StepContext, state):
        return await (await ctx.start_child("child", 21, key="a")).result()

    def thread_step(ctx: SyncStepContext, state):
        return ctx.start_child("child", 21, key="a").result()

    step_of = {"async": step, "thread": thread_step}
    assert await run(registry_of(step_of[kind]), config=ExecutorConfig(max_concurrency=1)) == 42


async def test_no_more_children_than_slots_run_at_once():
    """However many of them are being waited for."""
    running = most = 0

    async def counted(state):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return state

    async def wait(ctx: StepContext, n):
        return await (await ctx.start_child("counted", n, key=str(n))).result()

    async def step(ctx: StepContext, state):
        return await ctx.map(wait, range(6), limit=6)

    registry = registry_of(step)
    registry.register("counted", counted, retry=ONE)
    registry.workflow("counted", ["counted"])
    assert await run(registry, config=ExecutorConfig(max_concurrency=2)) == list(range(6))
    assert most <= 2


async def test_a_parent_that_waits_for_its_child_can_be_cancelled_at_once():
    """Although the child keeps the only slot."""
    began, release = anyio.Event(), anyio.Event()

    async def endless(state):
        began.set()
        await release.wait()

    async def step(ctx: StepContext, state):
        await (await ctx.start_child("endless", key="a")).result()

    registry = registry_of(step)
    registry.register("endless", endless)
    registry.workflow("endless", ["endless"])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:", config=ExecutorConfig(max_concurrency=1)) as executor:
            handle = await executor.start("work", id="x")
            await began.wait()
            await handle.cancel()
            assert (await handle.info()).state == "cancelled"
            assert (await executor.get("x~1~a")).state == "running"
            release.set()
            await executor.wait_idle()


async def test_the_failure_of_a_child_is_an_error_that_can_be_caught():
    async def step(ctx: StepContext, state):
        child = await ctx.start_child("bad", key="a")
        with pytest.raises(ExecutionFailedError, match="ValueError: no"):
            await child.result()
        return "caught"

    assert await run(registry_of(step)) == "caught"


async def test_a_thread_gets_a_handle_that_blocks():
    def step(ctx: SyncStepContext, state):
        child = ctx.start_child("child", 21, key="a")
        assert child.wait().state == "completed"
        assert child.info().parent_id == "x"
        return child.result()

    assert await run(registry_of(step)) == 42


async def test_a_thread_can_ask_of_its_child_what_a_task_can():
    def step(ctx: SyncStepContext, state):
        child = ctx.start_child("asking", key="asking")
        events = child.events()
        child.wait("waiting")
        child.pause(timeout=PATIENCE)
        assert child.info().state == "paused"
        child.resume(timeout=PATIENCE)
        child.signal("go", 21, key="once", timeout=PATIENCE)
        assert child.result() == 21
        assert [event.type for event in events][-1] == "execution_completed"

        bad = ctx.start_child("bad", key="bad")
        bad.wait("failed")
        bad.retry(timeout=PATIENCE)
        bad.wait("failed")

        idle = ctx.start_child("asking", key="idle")
        idle.cancel("enough", children=True, timeout=PATIENCE)
        return idle.info().reason

    registry = registry_of(step)

    async def ask(state):
        return WaitFor("go", state)

    async def told(ctx: StepContext, state):
        return ctx.signal

    registry.workflow("asking", [ask, told])
    assert await run(registry) == "enough"


def test_the_blocking_handle_has_the_names_of_the_other():
    public = {name for name in vars(ExecutionHandle) if not name.startswith("_")}
    assert public == {name for name in vars(BlockingHandle) if not name.startswith("_")}
    for name in public:
        theirs, ours = (signature(getattr(kind, name)) for kind in (ExecutionHandle, BlockingHandle))
        assert theirs.parameters == ours.parameters, name


@pytest.mark.parametrize("key", ["", None, 3])
async def test_a_child_needs_a_key(key):
    async def step(ctx: StepContext, state):
        with pytest.raises(ConfigError):
            await ctx.start_child("child", key=key)

    await run(registry_of(step))


async def test_a_key_of_any_letters_gives_an_id_that_can_be_stored():
    async def step(ctx: StepContext, state):
        long = await ctx.start_child("child", 1, key="ü/../" * 100)
        other = await ctx.start_child("child", 2, key="ü/../" * 101)
        return len({long.id, other.id}), await long.result(), await other.result()

    assert await run(registry_of(step)) == (2, 2, 4)


async def test_a_key_names_one_workflow():
    async def step(ctx: StepContext, state):
        await ctx.start_child("child", 1, key="a")
        with pytest.raises(ExecutionExistsError):
            await ctx.start_child("bad", 1, key="a")

    await run(registry_of(step))


async def test_a_parent_waits_for_its_place_again_also_after_a_childs_failure() -> None:
    """Whoever ran in its place meanwhile has it until its step is done."""
    at_work: list[str] = []
    most = 0

    async def busy(name: str) -> None:
        nonlocal most
        at_work.append(name)
        most = max(most, len(at_work))
        await anyio.wait_all_tasks_blocked()
        at_work.remove(name)

    async def parent(ctx: StepContext, state: int) -> int:
        child = await ctx.start_child("fail", state, key="k")
        with pytest.raises(ExecutionFailedError):
            await child.result()
        await busy("parent")
        return state

    async def other(state: int) -> int:
        await busy("other")
        return state

    registry = crashing.registry_of(parent)
    registry.register("fail", fail, retry=ONE)
    registry.register("other", other)
    for name in ("fail", "other"):
        registry.workflow(name, [name])
    async with Executor(registry, store="memory:", config=ExecutorConfig(max_concurrency=1)) as executor:
        with anyio.fail_after(PATIENCE):
            runs = [await executor.start(name, 1) for name in ("work", "other", "other", "other")]
            assert [await run.result() for run in runs] == [1] * 4
    assert most == 1


async def test_a_child_that_sleeps_goes_on_although_its_parent_has_waited_for_it_in_the_only_slot():
    """The parent counts for nothing while it is away: there is room to claim the child again."""

    async def step(ctx: StepContext, state):
        return await (await ctx.start_child("rested", 21, key="a")).result()

    assert await run(registry_of(step), config=ExecutorConfig(max_concurrency=1)) == 42


@pytest.mark.parametrize("call", ["result", "wait"])
async def test_a_child_that_sleeps_goes_on_although_its_parent_is_all_that_its_queue_has_room_for(call):
    async def step(ctx: StepContext, state):
        child = await ctx.start_child("rested", 21, key="a")
        await getattr(child, call)()
        return await child.result()

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(heartbeat_interval=0.05, lease_ttl=30)
        async with Worker(registry_of(step), store="memory:", config=config) as worker:
            await worker.limit_queue("default", concurrency=1)
            assert await (await worker.submit("work", id="x")).result() == 42


class Family:
    """A parent that waits for its child, where there is room for one of them; the child waits until it may go on."""

    def __init__(self) -> None:
        self.waits, self.works = anyio.Event(), anyio.Event()
        self.go = anyio.Event()
        self.registry = registry_of(self.parent)
        self.registry.register("held", self.held)
        self.registry.workflow("held", ["held"])
        self.store = MemoryCheckpointStore()

    async def parent(self, ctx: StepContext, state):
        child = await ctx.start_child("held", 21, key="a")
        self.waits.set()
        return await child.result()

    async def held(self, state):
        self.works.set()
        await self.go.wait()
        return state * 2

    def worker(self) -> Worker:
        return Worker(self.registry, store=self.store, config=ExecutorConfig(heartbeat_interval=0.05, lease_ttl=30))

    async def stop_the_child(self, client: Client) -> ExecutionHandle:
        """The parent's handle, when its child is paused and their worker has gone."""
        await client.limit_queue("default", concurrency=1)
        run = await client.submit("work", id="x")
        async with self.worker():
            await self.works.wait()
            await client.pause("x~1~a", hold=True, interrupt=True)
        self.waits, self.works = anyio.Event(), anyio.Event()
        return run


async def test_a_child_that_is_resumed_goes_on_although_its_parent_is_all_that_its_queue_has_room_for():
    """In another process than the one that started it, which waits for it and holds the room."""
    family = Family()
    with anyio.fail_after(PATIENCE):
        async with Client(family.store) as client:
            run = await family.stop_the_child(client)
            async with family.worker():
                await family.waits.wait()
                await client.resume("x~1~a")
                family.go.set()
                assert await run.result() == 42


async def test_a_child_that_died_elsewhere_goes_on_although_its_parent_is_all_that_its_queue_has_room_for():
    family = Family()
    with anyio.fail_after(PATIENCE):
        async with Client(family.store) as client:
            run = await family.stop_the_child(client)
            async with family.worker():
                await family.waits.wait()
                config = ExecutorConfig(auto_resume=False)
                async with CrashableExecutor(family.registry, store=family.store, config=config) as doomed:
                    await doomed.resume("x~1~a")
                    await family.works.wait()
                    await crash(doomed)
                family.go.set()
                assert await run.result() == 42


async def test_a_task_that_waits_for_its_place_goes_on_when_another_of_its_step_gives_the_place_up():
    """The first is back from its child and waits; the second goes away meanwhile, and takes the request along."""
    begun, let_go, go_away, release = anyio.Event(), anyio.Event(), anyio.Event(), anyio.Event()

    async def held(state):
        begun.set()
        await let_go.wait()

    async def other(state):
        await release.wait()

    async def step(ctx: StepContext, state):
        async def second():
            await go_away.wait()
            await (await ctx.start_child("child", 1, key="second")).result()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second)
            await (await ctx.start_child("held", key="first")).result()
        return "both"

    def asks() -> bool:
        return executor.runners["x"].seat.place is not None

    registry = registry_of(step)
    for function in (held, other):
        registry.register(function.__name__, function)
        registry.workflow(function.__name__, [function.__name__])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:", config=ExecutorConfig(max_concurrency=1)) as executor:
            parent = await executor.start("work", id="x")
            await begun.wait()
            await executor.start("other")
            let_go.set()
            while not asks():
                await anyio.lowlevel.checkpoint()
            go_away.set()
            while asks():
                await anyio.lowlevel.checkpoint()
            release.set()
            assert await parent.result() == "both"


async def test_a_task_that_comes_back_from_a_child_when_its_step_has_ended_takes_no_slot():
    begun, go = anyio.Event(), anyio.Event()

    async def held(state):
        begun.set()
        await go.wait()

    async def step(ctx: StepContext, state):
        outside.start_soon((await ctx.start_child("held", key="a")).result)
        await begun.wait()
        return "without it"

    registry = registry_of(step)
    registry.register("held", held)
    registry.workflow("held", ["held"])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:", config=ExecutorConfig(max_concurrency=1)) as executor:
            async with anyio.create_task_group() as outside:
                assert await (await executor.start("work", id="x")).result() == "without it"
                go.set()
            assert await (await executor.start("child", 21)).result() == 42


@pytest.mark.parametrize("workflow", ["child", "rested"])
async def test_waiting_for_an_execution_that_the_executor_started_gives_the_slot_back_too(workflow):
    async def step(state):
        return await (await executor.start(workflow, 21)).result()

    with anyio.fail_after(PATIENCE):
        config = ExecutorConfig(max_concurrency=1)
        async with Executor(registry_of(step), store="memory:", config=config) as executor:
            assert await (await executor.start("work")).result() == 42


async def test_a_chain_of_children_of_any_length_is_cancelled_to_its_end(store):
    """It is longer than the calls that Python lets stand in each other."""
    ids = [f"link-{n}" for n in range(sys.getrecursionlimit() // 2 + 50)]
    for parent, id in itertools.pairwise([None, *ids]):
        state = ExecutionState.RUNNING if id == ids[-1] else ExecutionState.CANCELLED
        await store.create(create(str(id), state, workflow="elsewhere", parent_id=parent))
    with anyio.fail_after(PATIENCE):
        async with Executor(StepRegistry(), store=store) as executor:
            await executor.cancel(ids[0], "enough", children=True)
            assert (await executor.get(ids[-1])).reason == "enough"


async def test_a_child_that_does_not_end_leaves_none_of_the_others_uncancelled():
    begun, release = anyio.Event(), anyio.Event()

    async def stubborn(state):
        begun.set()
        with anyio.CancelScope(shield=True):
            await release.wait()

    async def endless(state):
        await anyio.sleep_forever()

    async def step(ctx: StepContext, state):
        await ctx.start_child("endless", key="before")
        child = await ctx.start_child("stubborn", key="stubborn")
        await ctx.start_child("endless", key="after")
        await child.result()

    registry = registry_of(step)
    for function in (stubborn, endless):
        registry.register(function.__name__, function)
        registry.workflow(function.__name__, [function.__name__])
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store="memory:") as executor:
            parent = await executor.start("work", id="x")
            await begun.wait()
            with pytest.raises(TimeoutError, match="x~1~stubborn"):
                await parent.cancel(children=True, timeout=0.1)
            states = [(await executor.get(f"x~1~{key}")).state for key in ("before", "after")]
            release.set()
            assert states == ["cancelled", "cancelled"]


async def test_half_characters_may_be_in_the_key_of_a_child():
    """As in the name of a file that is not UTF-8."""
    registry = StepRegistry()

    @registry.step
    async def child(state):
        return state

    @registry.step
    async def parent(ctx: StepContext, state):
        return [
            await (await ctx.start_child("child", n, key=f"k{half}")).result() for n, half in enumerate("\udcff\ud800")
        ]

    registry.workflow("child", [child])
    registry.workflow("parent", [parent])
    async with Executor(registry, store="memory:") as executor:
        assert await (await executor.start("parent")).result() == [0, 1]
