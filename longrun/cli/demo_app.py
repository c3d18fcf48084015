"""The program that `longrun demo` runs and kills: three steps, the middle one long.

    python -m longrun.cli.demo_app DIRECTORY

It notes every outside effect in DIRECTORY/effects.log, so that the demo can show what ran how often.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio

from longrun import Executor, ExecutorConfig, StepContext, StepRegistry

PAGES = 150
registry = StepRegistry()


def note(state: dict[str, Any], effect: str) -> None:
    """An effect on the world outside: one line, on disk before anything else happens."""
    with Path(state["effects"]).open("a") as log:
        log.write(f"{os.getpid()} {effect}\n")


@registry.step
async def plan(state: dict[str, Any]) -> dict[str, Any]:
    note(state, "plan")
    return {**state, "pages": PAGES}


@registry.step
async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    async for page in ctx.each("pages", range(state["pages"]), every=1):
        note(state, f"page {page}")
        ctx.local["bytes"] = ctx.local.get("bytes", 0) + 1000 + page
        await anyio.sleep(0.02)
    return {**state, "bytes": ctx.local["bytes"]}


@registry.step
async def report(state: dict[str, Any]) -> dict[str, Any]:
    note(state, "report")
    return state


registry.workflow("demo", [plan, crawl, report])


async def run(directory: Path) -> None:
    config = ExecutorConfig(checkpoint_dir=str(directory / "store"), checkpoint_interval=0.1, heartbeat_interval=0.25)
    async with Executor(registry, config=config) as executor:
        handle = await executor.start("demo", {"effects": str(directory / "effects.log")}, id="demo")
        await handle.result()


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]))
