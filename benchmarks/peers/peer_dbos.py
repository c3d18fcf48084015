"""DBOS: a workflow of steps, on its SQLite or PostgreSQL system database, through its async interface.

Place in the life of a measurement: a peer's process.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

from benchmarks.machine import begin
from benchmarks.peers.common import (
    BLOCKED,
    KILL_STEPS,
    Figures,
    check,
    is_postgres,
    main,
    note,
    one_value,
    ran,
    rate,
    ready,
    recovered,
)

DBOS: Any = import_module("dbos").DBOS
block = "J4-crash" in sys.argv


@DBOS.step()
async def step(state: dict[str, int]) -> dict[str, int]:
    note(state["n"])
    if block and state["n"] == BLOCKED:
        await asyncio.Event().wait()
    return {**state, "n": state["n"] + 1}


@DBOS.workflow()
async def flow(steps: int, state: dict[str, int]) -> int:
    for _ in range(steps):
        state = await step(state)
    return state["n"]


def launch(url: str) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "log_level": "ERROR",
            "application_version": "1",
            "executor_id": "local",
        }
    )
    DBOS.launch()


def table(url: str, name: str) -> str:
    return f"dbos.{name}" if is_postgres(url) else name


async def start_all(count: int, steps: int) -> list[Any]:
    return [await DBOS.start_workflow_async(flow, steps, {"n": 0}) for _ in range(count)]


async def run_all(count: int, steps: int) -> list[int]:
    return [await handle.get_result() for handle in await start_all(count, steps)]


def many(url: str, sizes: dict[str, int]) -> Figures:
    executions, steps = sizes["executions"], sizes["steps"]
    launch(url)
    began = begin()
    found = asyncio.run(run_all(executions, steps))
    answer = rate(executions, steps, began)
    check(found, [steps] * executions)
    check(one_value(url, f"select count(*) from {table(url, 'operation_outputs')}"), executions * steps)
    return answer


async def crash(url: str, count: int) -> None:
    launch(url)
    await start_all(count, KILL_STEPS)
    while ran[BLOCKED] < count:  # noqa: ASYNC110 -- what it waits for is counted by another library's tasks
        await asyncio.sleep(0.05)
    ready()
    await asyncio.Event().wait()


async def resume(url: str, sizes: dict[str, int]) -> Figures:
    launch(url)
    sql = f"select count(*) from {table(url, 'workflow_status')} where status = 'SUCCESS'"
    while one_value(url, sql) < sizes["executions"]:  # noqa: ASYNC110 -- only the database knows
        await asyncio.sleep(0.05)
    return recovered(sizes)


def j4_crash(url: str, sizes: dict[str, int]) -> Figures:
    asyncio.run(crash(url, sizes["executions"]))
    return {}


def j4_resume(url: str, sizes: dict[str, int]) -> Figures:
    return asyncio.run(resume(url, sizes))


if __name__ == "__main__":
    main({"J1": many, "J2": many, "J4-crash": j4_crash, "J4-resume": j4_resume})
