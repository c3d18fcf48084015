"""SIGINT and SIGTERM for commands that run executions: the first drains, the second ends the patience."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from longrun.executor import Executor


class Stop:
    """Which signal came first, if any, and whether what runs has come to a point."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.asked = anyio.Event()
        self.drained = anyio.Event()


@asynccontextmanager
async def draining(executor: Executor, heard: Callable[[signal.Signals], object]) -> AsyncIterator[Stop]:
    """While inside, a signal drains the executor; `heard` is told of it at once."""
    stop = Stop()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_listen, received, executor, stop, heard, tasks, name="longrun-signals")
            yield stop
            tasks.cancel_scope.cancel()


async def _listen(
    received: AsyncIterator[signal.Signals],
    executor: Executor,
    stop: Stop,
    heard: Callable[[signal.Signals], object],
    tasks: anyio.abc.TaskGroup,
) -> None:
    async for number in received:
        if stop.signal is None:
            stop.signal = signal.Signals(number)
            heard(stop.signal)
            stop.asked.set()
            tasks.start_soon(_drain, executor, stop, name="longrun-drain")
        else:
            executor.hurry()


async def _drain(executor: Executor, stop: Stop) -> None:
    # Shielded: whatever else ends meanwhile, what runs must be brought to a point and written down.
    with anyio.CancelScope(shield=True):
        await executor.drain()
    stop.drained.set()
