"""A program that is killed at every few effects: `python crashing_program.py URL EFFECTS BACKEND DIE_AFTER`.

Each effect is a line in the file EFFECTS, written through to the kernel. After DIE_AFTER of them the process kills
itself, in the middle of whatever had that effect. It is to be started again until it prints its result.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import anyio

from longrun import Executor, ExecutorConfig, StepContext, StepRegistry, SyncStepContext

registry = StepRegistry()
effects = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
left = iter(range(int(sys.argv[4]) - 1, -1, -1))


def effect(what: str) -> str:
    os.write(effects, f"{what}\n".encode())
    if next(left) == 0:
        os.write(effects, b"KILLED\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return what


async def branch(ctx: StepContext, name: str) -> str:
    await ctx.once("begin", effect, f"{name} begins")
    return effect(f"{name} ends")


@registry.step
async def loop(ctx: StepContext, state: Any) -> list[str]:
    async for item in ctx.each("items", range(4), every=1):
        ctx.local.setdefault("done", []).append(effect(f"item {item}"))
    await ctx.once("pay", effect, "pay")
    return list(ctx.local["done"])


@registry.step
async def fan(ctx: StepContext, state: list[str]) -> list[str]:
    return [*state, *await ctx.map(branch, ["a", "b"], limit=1)]


@registry.step
def thread(ctx: SyncStepContext, state: list[str]) -> list[str]:
    for item in ctx.each("items", range(2), every=1):
        ctx.local["n"] = ctx.once("call", effect, f"call {item}")
    return [*state, ctx.local["n"]]


registry.workflow("work", [loop, fan, thread])


async def main() -> None:
    config = ExecutorConfig(checkpoint_interval=3600, max_crashes=3)
    async with Executor(registry, store=sys.argv[1], config=config) as executor:
        run = await executor.start("work", id="x")
        print(*await run.result(), sep=",")


anyio.run(main, backend=sys.argv[3])
