"""Apache Burr: one looping action with its SQLite persister. It has no lease and no resume of its own.

Place in the life of a measurement: a peer's process.
"""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
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
    sqlite_path,
)

os.environ.update(DO_NOT_TRACK="true", BURR_TELEMETRY_ENABLED="false", HAMILTON_TELEMETRY_ENABLED="false")
core: Any = import_module("burr.core")
persistence: Any = import_module("burr.core.persistence")
block = False


@core.action(reads=["n"], writes=["n"])
def step(state: Any) -> Any:
    return state.update(n=state["n"] + 1)


@core.action(reads=["n"], writes=["n"])
async def async_step(state: Any) -> Any:
    note(state["n"])
    if block and state["n"] == BLOCKED:
        await asyncio.Event().wait()
    return state.update(n=state["n"] + 1)


@core.action(reads=["n"], writes=[])
def done(state: Any) -> Any:
    return state


def builder(persister: Any, id: str, function: Any, steps: int, *, resume: bool = False) -> Any:
    made = core.ApplicationBuilder().with_actions(step=function, done=done)
    made = made.with_transitions(("step", "step", core.expr(f"n < {steps}")), ("step", "done"))
    made = made.with_identifiers(app_id=id).with_state_persister(persister)
    if resume:
        return made.initialize_from(
            persister, resume_at_next_action=True, default_state={"n": 0}, default_entrypoint="step"
        )
    return made.with_state(n=0).with_entrypoint("step")


def rows(url: str) -> Any:
    return one_value(url, "select count(*) from burr_state")


def j1(url: str, sizes: dict[str, int]) -> Figures:
    persister = persistence.SQLitePersister.from_values(db_path=sqlite_path(url))
    persister.initialize()
    application = builder(persister, "x", step, sizes["steps"]).build()
    began = begin()
    *_, state = application.run(halt_before=["done"])
    found = rate(1, sizes["steps"], began)
    check((state["n"], rows(url)), (sizes["steps"], sizes["steps"]))
    return found


async def run_all(url: str, count: int, steps: int, *, resume: bool = False) -> list[int]:
    shared: Any = import_module("burr.integrations.persisters.b_aiosqlite")
    persister = await shared.AsyncSQLitePersister.from_values(db_path=sqlite_path(url))
    await persister.initialize()

    async def one(number: int) -> int:
        application = await builder(persister, f"x{number}", async_step, steps, resume=resume).abuild()
        *_, state = await application.arun(halt_before=["done"])
        return int(state["n"])

    return await asyncio.gather(*(one(number) for number in range(count)))


def j2(url: str, sizes: dict[str, int]) -> Figures:
    began = begin()
    found = asyncio.run(run_all(url, sizes["executions"], sizes["steps"]))
    answer = rate(sizes["executions"], sizes["steps"], began)
    check(found, [sizes["steps"]] * sizes["executions"])
    check(rows(url), sizes["executions"] * sizes["steps"])
    return answer


async def crash_all(url: str, count: int) -> None:
    running = asyncio.create_task(run_all(url, count, KILL_STEPS))
    while ran[BLOCKED] < count:  # noqa: ASYNC110 -- what it waits for is counted by another library's tasks
        await asyncio.sleep(0.02)
    ready()
    await running


def j4_crash(url: str, sizes: dict[str, int]) -> Figures:
    global block  # noqa: PLW0603 -- the action above is registered once for the process
    block = True
    asyncio.run(crash_all(url, sizes["executions"]))
    return {}


def j4_resume(url: str, sizes: dict[str, int]) -> Figures:
    found = asyncio.run(run_all(url, sizes["executions"], KILL_STEPS, resume=True))
    answer = recovered(sizes)
    check(found, [KILL_STEPS] * sizes["executions"])
    return answer


if __name__ == "__main__":
    main({"J1": j1, "J2": j2, "J4-crash": j4_crash, "J4-resume": j4_resume})
