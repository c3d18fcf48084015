"""A batch: many independent pieces at once, each durable on its own.

    python examples/batch.py [DIRECTORY]

`ctx.map` runs eight branches at a time. After a crash only unfinished branches run again. Some pieces may fail:
`tolerate` lets the rest of the batch count.
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from typing import Any

import anyio

from longrun import BranchFailure, Executor, ExecutorConfig, StepContext, StepRegistry

registry = StepRegistry()


def digest(piece: int) -> str:
    """Work for one piece: a plain function, so each branch gets a worker thread."""
    if piece % 25 == 13:
        raise ValueError(f"piece {piece} is unreadable")
    return hashlib.sha256(str(piece).encode() * 10_000).hexdigest()[:12]


@registry.step
async def process(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    results = await ctx.map(digest, range(state["pieces"]), limit=8, tolerate=5)
    bad = [result.index for result in results if isinstance(result, BranchFailure)]
    return {"digests": [result for result in results if isinstance(result, str)], "bad": bad}


registry.workflow("batch", [process])


async def main(directory: str = ".longrun") -> None:
    async with Executor(registry, config=ExecutorConfig(checkpoint_dir=directory)) as executor:
        run = await executor.start("batch", {"pieces": 60}, id="batch-1")
        result = await run.result()
        print(f"{len(result['digests'])} done, unreadable: {result['bad']}")


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:2]))
