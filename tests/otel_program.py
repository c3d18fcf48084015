"""A traced program that is killed in its second step: `python tests/otel_program.py STORE URL`.

It prints where it is. If there is a file STORE.wait, it never leaves step two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio

from longrun import Executor, StepContext, StepRegistry
from longrun.otel import OpenTelemetry
from tests.otlp import provider

registry = StepRegistry()


@registry.step
async def one(state: Any) -> Any:
    return state


@registry.step
async def two(ctx: StepContext, state: Any) -> Any:
    print("two", flush=True)
    if Path(f"{sys.argv[1]}.wait").exists():
        await anyio.sleep_forever()
    return state


registry.workflow("flow", [one, two])


async def main() -> None:
    telemetry = OpenTelemetry(provider(sys.argv[2]))
    async with Executor(registry, store=f"file:{sys.argv[1]}", telemetry=telemetry) as executor:
        run = await executor.start("flow", id="a")
        await run.result()
        print("done", executor.owner, flush=True)


if __name__ == "__main__":
    anyio.run(main)
