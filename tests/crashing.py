"""A crash inside one process: an executor that ends as if its process had been killed, and what it leaves for the next.

Nothing more is written for its executions, its tasks end wherever they are, and its kernel lock is free, so that the
next executor on the same store sees its owner dead. (Step threads run on: a test that leaves one must let it end.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anyio

from longrun import Executor, ExecutorConfig, LeaseLostError, RetryPolicy, StepRegistry, codec
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.interposed import InterposedBackend
from longrun.worker import Worker

PATIENCE = 20.0
"""Seconds after which a test that waits has failed."""
ONE = RetryPolicy(max_attempts=1)
AT_ONCE = RetryPolicy(max_attempts=3, initial=0, jitter=False, give_up_on=(AssertionError, LookupError))
"""Three attempts, without waiting. A check inside a step that fails is not tried again until it holds."""
NEVER = ExecutorConfig(checkpoint_interval=3600.0)
"""Nothing is saved by the clock: what is durable is so for another reason."""


class CrashableExecutor(Executor):
    """An executor that `crash` can end; after that, leaving it does nothing."""

    crashed = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.crashed:
            await super().__aexit__(kind, error, trace)


class CrashableWorker(CrashableExecutor, Worker):
    """The same for a worker."""


async def crash(executor: CrashableExecutor) -> None:
    """End an executor as SIGKILL would. To be called in the task that entered it."""
    executor.crashed = executor.closed = True
    executor._unwatch()
    executor.keeper.stop()
    for runner in list(executor.runners.values()):
        runner.book.outbox.give_up(LeaseLostError(runner.id, runner.head.fence))
    await executor.sign_off()
    executor.bus.close()
    for engine in executor._engines.values():
        await engine.aclose()
    executor.threads.close()
    executor._lock.abandon()
    await executor.store.aclose()


class Held(InterposedBackend):
    """Holds what is to be written while `free` is not set."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.free = threading.Event()
        self.free.set()

    def around(self, call: str, function: Any, *args: Any, **options: Any) -> Any:
        assert call != "commit" or self.free.wait(PATIENCE)
        return function(*args, **options)


LASTING = 3600.0
"""A time-out that `expire` ends: on a busy machine nobody knows how far a step comes in a fraction of a second."""


def expire(executor: Executor, id: str = "x") -> None:
    """The time of the step that runs is over now, as if its time-out had passed."""
    attempt = executor.runners[id].attempt
    assert attempt is not None
    assert attempt.step.timeout is not None
    attempt._scope.deadline = anyio.current_time()


async def rest(executor: Executor) -> None:
    """Let its sweep take nothing more: no later one, and the one that is under way is over."""
    executor.draining = True
    later, once = anyio.Event(), executor.sweeper.once

    async def next_one() -> int:
        later.set()
        return await once()

    executor.sweeper.once = next_one  # type: ignore[method-assign]
    executor.stir()
    await later.wait()


def registry_of(*steps: Callable[..., Any], **options: Any) -> StepRegistry:
    """A registry with the workflow `work` of these steps; one attempt each, if `options` do not say otherwise."""
    registry = StepRegistry()
    for step in steps:
        registry.register(step.__name__, step, **{"retry": ONE, **options})
    registry.workflow("work", [step.__name__ for step in steps])
    return registry


async def crash_at(
    reached: anyio.Event,
    registry: StepRegistry,
    store: CheckpointStore,
    *,
    state: Any = None,
    config: ExecutorConfig | None = None,
) -> None:
    """Run the workflow `work` as execution `x` until `reached`, then crash."""
    with anyio.fail_after(PATIENCE):
        async with CrashableExecutor(registry, store=store, config=config) as executor:
            await executor.start("work", state, id="x")
            await reached.wait()
            await crash(executor)


async def finish(registry: StepRegistry, store: CheckpointStore, *, config: ExecutorConfig | None = None) -> Any:
    """Resume execution `x` in a new executor; its result."""
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=config) as executor:
            return await (await executor.handle("x")).result()


async def run(
    registry: StepRegistry,
    store: CheckpointStore | str = "memory:",
    *,
    state: Any = None,
    config: ExecutorConfig | None = None,
) -> Any:
    """Run the workflow `work` as execution `x`; its result."""
    with anyio.fail_after(PATIENCE):
        async with Executor(registry, store=store, config=config) as executor:
            return await (await executor.start("work", state, id="x")).result()


async def stored(store: CheckpointStore) -> dict[str, Any]:
    """What the store holds of the progress inside the step of execution `x`."""
    return {key: codec.decode(data) for key, data in (await store.load("x")).entries.items()}
