"""Thousands of executions at once, twenty steps each, in a program that is killed on the way: none lost or doubled."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field

from longrun import Executor, ExecutorConfig, StepContext, StepRegistry
from longrun.stored import Query
from longrun.stores import open_store
from longrun.stores.base import StoreBackend
from tests.campaign.forks import Forks
from tests.campaign.judge import judge_records
from tests.campaign.outside import Outside, read
from tests.campaign.program import make_store

CONFIG: dict[str, Any] = {"heartbeat_interval": 1.0, "lease_ttl": 60.0, "max_crashes": 1000}
registry = StepRegistry()
outside: Outside


@registry.step
async def add(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    visit = int(ctx.idempotency_key.rpartition(":")[2])
    outside.note("begin", id=ctx.execution_id, step=ctx.step, visit=visit, attempt=ctx.attempt)
    return {"sum": state["sum"] + ctx.step_index}


def main(settings: dict[str, Any]) -> int:
    global outside  # noqa: PLW0603 -- the step of this process
    outside = Outside(settings["ledger"], settings["process"])
    registry.workflow("crowd", [add] * settings["steps"])
    anyio.run(_serve, settings, backend=settings["loop"])
    return 0


async def _serve(settings: dict[str, Any]) -> None:
    store = make_store(settings["url"], settings["options"], outside, None, disk=False)
    async with (
        Executor(registry, store=store, config=ExecutorConfig(**CONFIG)) as executor,
        anyio.create_task_group() as tasks,
    ):
        for n in range(settings["executions"]):
            tasks.start_soon(_run_one, executor, n)


async def _run_one(executor: Executor, n: int) -> None:
    run = await executor.start("crowd", {"sum": n}, id=f"c{n}")
    result = await run.result()
    outside.note("result", id=run.id, result=result)


@define
class Crowd:
    url: str
    place: Path
    executions: int
    steps: int = 20
    options: dict[str, Any] = field(factory=dict)
    kills: int = 0
    acknowledged: int = 0
    seconds: float = 0.0

    def run(self, kills: int, seed: int, within: float) -> list[str]:
        """The faults found, after so many kills spread over the run."""
        dice = random.Random(seed)
        began = time.monotonic()
        life = max(0.2, self.executions * self.steps / 40_000)
        with Forks("tests.campaign.crowd") as forks:
            while self.kills < kills:
                self._spawn(forks)
                end = forks.end(dice.uniform(0.3 * life, life))
                assert end is not None
                if not end.by_us:
                    assert end.code == 0, f"ended with {end.code}"
                    break
                self.kills += 1
            self._spawn(forks)
            end = forks.end(within)
            assert end is not None
            assert end.code == 0, f"the last process ended with {end.code}; killed for its slowness: {end.by_us}"
        self.seconds = time.monotonic() - began
        return self._judge()

    def _spawn(self, forks: Forks) -> None:
        forks.spawn(
            url=self.url,
            options=self.options,
            ledger=str(self.place / "ledger"),
            process=self.kills + 1,
            executions=self.executions,
            steps=self.steps,
            loop="asyncio",
        )

    def _judge(self) -> list[str]:
        records = read(self.place / "ledger")
        self.acknowledged = sum(record["kind"] == "ack" for record in records)
        faults = judge_records(records)
        begun = Counter((record["id"], record["visit"]) for record in records if record["kind"] == "begin")
        results = {record["id"]: record["result"] for record in records if record["kind"] == "result"}
        backend = open_store(self.url, **self.options).backend
        backend.open()
        try:
            faults += self._compare(backend, begun, results)
        finally:
            backend.close()
        return faults

    def _compare(self, backend: StoreBackend, begun: Counter[tuple[str, int]], results: dict[str, Any]) -> list[str]:
        faults: list[str] = []
        counts = backend.count(Query())
        if {str(state): n for state, n in counts.items() if n} != {"completed": self.executions}:
            faults.append(f"the store has {dict(counts)}")
        for n in range(self.executions):
            id = f"c{n}"
            if results.get(id) != {"sum": n + sum(range(self.steps))}:
                faults.append(f"{id}: ended with {results.get(id)}")
            if missing := [visit for visit in range(1, self.steps + 1) if not begun[id, visit]]:
                faults.append(f"{id}: visits {missing} never began")
        some = random.Random(self.executions).sample(range(self.executions), min(50, self.executions))
        return faults + [f"c{n}: its boundaries have a gap or a repeat" for n in some if not self._whole(backend, n)]

    def _whole(self, backend: StoreBackend, n: int) -> bool:
        return [row.seq for row in backend.boundaries(f"c{n}")] == list(range(1, self.steps + 2))
