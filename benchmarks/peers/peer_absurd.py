"""Absurd: tasks of steps in PostgreSQL. Its schema comes from absurdctl; a dead worker's tasks wait for their lease.

Place in the life of a measurement: a peer's process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import begin
from benchmarks.peers.common import (
    BLOCKED,
    KILL_STEPS,
    Figures,
    check,
    main,
    note,
    one_value,
    ran,
    rate,
    ready,
    recovered,
)

sdk: Any = import_module("absurd_sdk")
block = "J4-crash" in sys.argv
WORKERS = 8
LEASE = 10
"""Seconds; its default is 120."""


async def step(state: dict[str, int]) -> dict[str, int]:
    note(state["n"])
    if block and state["n"] == BLOCKED:
        await asyncio.Event().wait()
    return {**state, "n": state["n"] + 1}


async def flow(given: dict[str, Any], context: Any) -> int:
    state = {"n": 0}
    for _ in range(given["steps"]):
        state = await context.step("step", lambda state=state: step(state))
    return state["n"]


def client(url: str) -> Any:
    made = sdk.AsyncAbsurd(url, queue_name="bench")
    made.register_task("flow")(flow)
    return made


async def made_ready(url: str) -> Any:
    control = Path(sys.executable).with_name("absurdctl")
    environment = {**os.environ, "ABSURD_DATABASE_URL": url}
    subprocess.run([sys.executable, control, "init"], env=environment, check=True, stdout=subprocess.DEVNULL)  # noqa: ASYNC221
    made = client(url)
    await made.create_queue()
    return made


def completed(url: str) -> Any:
    return one_value(url, "select count(*) from absurd.t_bench where state = 'completed'")


async def until_completed(url: str, count: int) -> None:
    while completed(url) < count:  # noqa: ASYNC110 -- only the database knows
        await asyncio.sleep(0.05)


async def one_flow(url: str, steps: int) -> Figures:
    made = await made_ready(url)
    await made.spawn("flow", {"steps": steps})
    began = begin()
    await made.work_batch()
    answer = rate(1, steps, began)
    check((completed(url), one_value(url, "select count(*) from absurd.c_bench")), (1, steps))
    return answer


async def many_flows(url: str, executions: int, steps: int) -> Figures:
    made = await made_ready(url)
    share = max(1, executions // WORKERS // 4)
    began = begin()
    work = [
        asyncio.create_task(client(url).start_worker(worker_id=str(number), concurrency=share, poll_interval=0.02))
        for number in range(WORKERS)
    ]
    for _ in range(executions):
        await made.spawn("flow", {"steps": steps})
    await until_completed(url, executions)
    answer = rate(executions, steps, began)
    check(one_value(url, "select count(*) from absurd.c_bench"), executions * steps)
    check(len(work), WORKERS)
    return answer


async def crash(url: str, count: int) -> None:
    made = await made_ready(url)
    for _ in range(count):
        await made.spawn("flow", {"steps": KILL_STEPS}, retry_strategy={"kind": "none"})
    working = asyncio.create_task(client(url).start_worker(concurrency=count, claim_timeout=LEASE, poll_interval=0.05))
    while ran[BLOCKED] < count:  # noqa: ASYNC110 -- what it waits for is counted by another library's tasks
        await asyncio.sleep(0.05)
    ready()
    await working


async def resume(url: str, sizes: dict[str, int]) -> Figures:
    count = sizes["executions"]
    working = asyncio.create_task(client(url).start_worker(concurrency=count, claim_timeout=LEASE, poll_interval=0.05))
    await until_completed(url, count)
    check(working.done(), False)
    return recovered(sizes)


def j4_crash(url: str, sizes: dict[str, int]) -> Figures:
    asyncio.run(crash(url, sizes["executions"]))
    return {}


if __name__ == "__main__":
    main(
        {
            "J1": lambda url, sizes: asyncio.run(one_flow(url, sizes["steps"])),
            "J2": lambda url, sizes: asyncio.run(many_flows(url, sizes["executions"], sizes["steps"])),
            "J4-crash": j4_crash,
            "J4-resume": lambda url, sizes: asyncio.run(resume(url, sizes)),
        }
    )
