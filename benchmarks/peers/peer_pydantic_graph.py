"""pydantic-graph 1.x: its file persistence, which rewrites a JSON file at every change and never syncs it.

Place in the life of a measurement: a peer's process. What is killed while a node runs cannot be taken up: no J4.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import begin
from benchmarks.peers.common import Figures, check, main, rate

warnings.simplefilter("ignore")
library: Any = import_module("pydantic_graph")
persistence: Any = import_module("pydantic_graph.persistence.file")
AT_ONCE = 32
"""Its file lock gives up after a second, so that more at once fail."""


@dataclass
class Count:
    n: int = 0
    limit: int = 1


@dataclass
class Step(library.BaseNode[Count, None, int]):  # type: ignore[misc]  # known only when it runs
    async def run(self, ctx: library.GraphRunContext[Count]) -> Step | library.End[int]:
        ctx.state.n += 1
        return Step() if ctx.state.n < ctx.state.limit else library.End(ctx.state.n)


graph = library.Graph(nodes=[Step])


async def run_all(directory: Path, count: int, steps: int) -> list[int]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> int:
        async with room:
            kept = persistence.FileStatePersistence(directory / f"{number}.json")
            return int((await graph.run(Step(), state=Count(0, steps), persistence=kept)).output)

    return await asyncio.gather(*(one(number) for number in range(count)))


def many(url: str, sizes: dict[str, int]) -> Figures:
    executions, steps = sizes["executions"], sizes["steps"]
    directory = Path(url.removeprefix("file:"))
    directory.mkdir(parents=True)
    began = begin()
    found = asyncio.run(run_all(directory, executions, steps))
    answer = rate(executions, steps, began)
    check(found, [steps] * executions)
    check(len(json.loads((directory / "0.json").read_bytes())), steps + 1)
    return answer


if __name__ == "__main__":
    main({"J1": many, "J2": many})
