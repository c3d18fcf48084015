"""A soak: one process that runs executions for a long time, and what it takes of memory, descriptors and disk.

I16: all three are bounded by what is running and by the retention policy, not by what has run. The slopes are those of
straight lines through the second half of the samples, by the hour.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from attrs import define, field, frozen

from longrun import Executor, ExecutorConfig, RetentionPolicy, RetryPolicy, Sleep, StepContext, StepRegistry

AT_ONCE = 32
FEWEST = 8
"""So many samples at least, however slow the machine: the quarters are compared."""
registry = StepRegistry()


@registry.step
async def walk(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for n in ctx.each("items", range(20)):
        ctx.local["sum"] = ctx.local.get("sum", 0) + n
    return {**state, "sum": ctx.local["sum"], "text": "x" * 2000}


@registry.step(retry=RetryPolicy(max_attempts=2, initial=0.001))
async def call(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    paid = await ctx.once("pay", _pay, state["n"])
    if ctx.attempt == 1:
        raise ConnectionError("the first time it always fails")
    return {**state, "paid": paid}


async def _pay(n: int) -> int:
    return n * 2


@registry.step
async def nap(state: dict[str, Any]) -> Sleep:
    return Sleep(0.01, state)


@registry.step
async def spread(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "mapped": await ctx.map(_pay, range(4))}


registry.workflow("soak", [walk, call, nap, spread])


@frozen
class Sample:
    at: float
    rss: float
    """Megabytes."""
    descriptors: int
    threads: int
    disk: float
    """Megabytes."""
    done: int


@define
class Soak:
    url: str
    place: Path
    done: int = 0
    samples: list[Sample] = field(factory=list)

    async def run(self, seconds: float, every: float) -> None:
        retention = RetentionPolicy(history=5, max_age=every, interval=every)
        config = ExecutorConfig(retention=retention, heartbeat_interval=0.5, checkpoint_interval=0.05)
        async with Executor(registry, store=self.url, config=config) as executor, anyio.create_task_group() as tasks:
            began = time.monotonic()
            for n in range(AT_ONCE):
                tasks.start_soon(self._work, executor, n, began + seconds)
            while time.monotonic() < began + seconds or len(self.samples) < FEWEST:
                await anyio.sleep(every)
                self.samples.append(await anyio.to_thread.run_sync(self._sample, time.monotonic() - began))
            tasks.cancel_scope.cancel()

    async def _work(self, executor: Executor, n: int, until: float) -> None:
        while time.monotonic() < until:
            run = await executor.start("soak", {"n": n})
            assert (await run.result())["paid"] == n * 2
            self.done += 1

    def _sample(self, at: float) -> Sample:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))
        rss = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return Sample(at, rss, descriptors, threading.active_count(), _disk(self.place) / 1e6, self.done)

    def slope(self, name: str) -> float:
        """By the hour, in the second half."""
        half = self.samples[len(self.samples) // 2 :]
        return 3600 * slope([one.at for one in half], [getattr(one, name) for one in half])

    def faults(self) -> tuple[str, ...]:
        """What grows with what has run: what the last quarter takes, against the quarter before it. Each of those that
        run at a moment may have a journal open."""
        found = []
        quarter = len(self.samples) // 4
        for name, least in (("rss", 8.0), ("descriptors", float(AT_ONCE)), ("threads", 4.0), ("disk", 8.0)):
            values = [float(getattr(one, name)) for one in self.samples]
            before, after = median(values[-2 * quarter : -quarter]), median(values[-quarter:])
            if after - before > max(least, 0.1 * before):
                found.append(f"{name} grew from {before:.1f} to {after:.1f} in the last quarter")
        return tuple(found)

    def plot(self) -> str:
        """An SVG with a curve for each of the three, each on its own scale."""
        names = ("rss", "disk", "descriptors")
        rows = [
            _curve(name, [(one.at, float(getattr(one, name))) for one in self.samples], 40 + 130 * n)
            for n, name in enumerate(names)
        ]
        head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 430" font-family="sans-serif" font-size="12">'
        return "\n".join([head, '<rect width="720" height="430" fill="white"/>', *rows, "</svg>\n"])


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _disk(place: Path) -> int:
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # removed since it was listed
    return total


def _curve(name: str, points: list[tuple[float, float]], top: int) -> str:
    unit = "" if name == "descriptors" else " MB"
    most = max([y for _, y in points] + [1.0]) * 1.1
    last = points[-1][0] or 1.0
    line = " ".join(f"{60 + 640 * x / last:.1f},{top + 100 - 100 * y / most:.1f}" for x, y in points)
    return (
        f'<text x="60" y="{top - 8}">{name}: {points[-1][1]:.0f}{unit} after {last / 60:.0f} minutes</text>'
        f'<path d="M60,{top} V{top + 100} H700" fill="none" stroke="#999"/>'
        f'<text x="4" y="{top + 8}">{most:.0f}</text><text x="4" y="{top + 100}">0</text>'
        f'<polyline points="{line}" fill="none" stroke="#0a5" stroke-width="1.5"/>'
    )
