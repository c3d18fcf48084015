"""LangGraph: a looping graph with a checkpointer on SQLite or PostgreSQL, durability "sync". Resume is the caller's.

Place in the life of a measurement: a peer's process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, TypedDict

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
    sqlite_path,
)

os.environ.update(LANGSMITH_TRACING="false", LANGCHAIN_TRACING_V2="false")
graphs: Any = import_module("langgraph.graph")
block = "J4-crash" in sys.argv
CONNECTIONS = 20


class Loop(TypedDict, total=False):
    n: int
    limit: int


async def step(state: Loop) -> Loop:
    note(state["n"])
    if block and state["n"] == BLOCKED:
        await asyncio.Event().wait()
    return {"n": state["n"] + 1}


def built(saver: Any) -> Any:
    graph = graphs.StateGraph(Loop)
    graph.add_node("step", step)
    graph.add_edge(graphs.START, "step")
    graph.add_conditional_edges(
        "step", lambda state: "step" if state["n"] < state["limit"] else graphs.END, ["step", graphs.END]
    )
    return graph.compile(checkpointer=saver)


async def saver_at(url: str, stack: AsyncExitStack) -> Any:
    if is_postgres(url):
        pools, rows = import_module("psycopg_pool"), import_module("psycopg.rows")
        options = {"autocommit": True, "prepare_threshold": 0, "row_factory": rows.dict_row}
        pool = pools.AsyncConnectionPool(url, min_size=1, max_size=CONNECTIONS, open=False, kwargs=options)
        await stack.enter_async_context(pool)
        saver = import_module("langgraph.checkpoint.postgres.aio").AsyncPostgresSaver(pool)
    else:
        kind = import_module("langgraph.checkpoint.sqlite.aio").AsyncSqliteSaver
        saver = await stack.enter_async_context(kind.from_conn_string(sqlite_path(url)))
    await saver.setup()
    return saver


async def run_all(url: str, count: int, steps: int, *, resume: bool = False) -> tuple[list[int], float]:
    async with AsyncExitStack() as stack:
        graph = built(await saver_at(url, stack))

        async def one(number: int) -> int:
            config = {"configurable": {"thread_id": str(number)}, "recursion_limit": steps + 10}
            first = None if resume else {"n": 0, "limit": steps}
            return int((await graph.ainvoke(first, config, durability="sync"))["n"])

        began = begin()
        return await asyncio.gather(*(one(number) for number in range(count))), began


def many(url: str, sizes: dict[str, int]) -> Figures:
    executions, steps = sizes["executions"], sizes["steps"]
    found, began = asyncio.run(run_all(url, executions, steps))
    answer = rate(executions, steps, began)
    check(found, [steps] * executions)
    check(one_value(url, "select count(*) from checkpoints") >= executions * steps, True)
    return answer


async def crash(url: str, count: int) -> None:
    running = asyncio.create_task(run_all(url, count, KILL_STEPS))
    while ran[BLOCKED] < count:  # noqa: ASYNC110 -- what it waits for is counted by another library's tasks
        await asyncio.sleep(0.05)
    ready()
    await running


def j4_crash(url: str, sizes: dict[str, int]) -> Figures:
    asyncio.run(crash(url, sizes["executions"]))
    return {}


def j4_resume(url: str, sizes: dict[str, int]) -> Figures:
    found, _ = asyncio.run(run_all(url, sizes["executions"], KILL_STEPS, resume=True))
    answer = recovered(sizes)
    check(found, [KILL_STEPS] * sizes["executions"])
    return answer


if __name__ == "__main__":
    main({"J1": many, "J2": many, "J4-crash": j4_crash, "J4-resume": j4_resume})
