"""Workflows for the tests of `longrun.testing`: one that survives every crash, and some with the usual mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.lowlevel

from longrun import (
    ExecutionHandle,
    RetryPolicy,
    Sleep,
    SQLiteCheckpointStore,
    StepContext,
    StepRegistry,
    SyncStepContext,
    WaitFor,
)
from longrun.testing import CrashPoint, Effects

registry = StepRegistry()
effects = Effects()

MAILS = (
    CrashPoint("after", "the checkpoint of crash-test: step at step 0 'fetch'"),
    CrashPoint("after", "the effect 'mail'"),
)
"""Two of the points of the workflow `mails`; at the second the mail is sent twice."""


@registry.step
async def fetch(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "pages": 3}


@registry.step(retry=RetryPolicy(max_attempts=3, initial=0.0))
async def crawl(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    if ctx.attempt == 1:
        raise ConnectionError("the first attempt always fails")
    async for page in ctx.each("pages", range(state["pages"])):
        ctx.local["bytes"] = ctx.local.get("bytes", 0) + 1000 * page
    return {**state, "bytes": ctx.local["bytes"]}


@registry.step
async def charge(ctx: StepContext, state: dict[str, Any]) -> Sleep:
    effects("charge", key=ctx.idempotency_key)
    return Sleep(24 * 3600, state)


@registry.step
def ask(ctx: SyncStepContext, state: dict[str, Any]) -> WaitFor:
    for n in ctx.each("people", ["ann", "bob"]):
        effects("ask", key=f"{ctx.idempotency_key}/{n}")
    return WaitFor("answer", state)


@registry.step
async def note(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "answer": ctx.signal}


registry.workflow("sound", [fetch, crawl, charge, ask, note])


def in_sqlite(place: Path) -> SQLiteCheckpointStore:
    return SQLiteCheckpointStore(place / "work.db")


async def answer(run: ExecutionHandle) -> None:
    await run.signal("answer", 42, key="answer")


@registry.step
async def mail(state: dict[str, Any]) -> dict[str, Any]:
    effects("mail")
    return state


registry.workflow("mails", [fetch, mail])

_remembered: list[int] = []


@registry.step
async def remember(state: dict[str, Any]) -> dict[str, Any]:
    """It keeps something outside its state."""
    _remembered.append(1)
    return {**state, "seen": len(_remembered)}


@registry.step
async def forget(state: dict[str, Any]) -> dict[str, Any]:
    _remembered.clear()
    return state


registry.workflow("forgetful", [forget, fetch, remember])


@registry.step
async def count_items(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    """It counts in a variable what only the cursor remembers."""
    n = 0
    async for _ in ctx.each("items", range(3), every=1):
        n += 1
    return {**state, "n": n}


registry.workflow("miscounts", [count_items])


@registry.step
async def wait_a_little(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    return {**state, "waited": await ctx.once("wait", _waited), "doubled": await ctx.map(_doubled, [1, 2])}


async def _doubled(n: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * n


async def _waited() -> bool:
    await anyio.lowlevel.checkpoint()
    return True


registry.workflow("awaits", [wait_a_little])


@registry.step
async def wait_for_word(state: dict[str, Any]) -> WaitFor:
    return WaitFor("word", state)


registry.workflow("waits", [wait_for_word])

_queued: list[str] = []


@registry.step
async def queue_mail(state: dict[str, Any]) -> dict[str, Any]:
    """It leaves to a variable what is to be done later."""
    _queued.append("mail")
    return state


@registry.step
async def send_queued(state: dict[str, Any]) -> dict[str, Any]:
    while _queued:
        effects(_queued.pop())
    return state


registry.workflow("queues", [queue_mail, send_queued])
