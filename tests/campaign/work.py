"""The workflows that the campaign kills: one for every way in which an execution goes on, each with a known result.

A step tells the outside ledger what it is about to do, before it does it: that it begins, and each effect by the name
under which the library promises not to repeat it.
"""

from __future__ import annotations

from typing import Any

import anyio

from longrun import (
    Finish,
    Goto,
    Repeat,
    RetryPolicy,
    Sleep,
    StepContext,
    StepRegistry,
    SyncStepContext,
    WaitFor,
)
from tests.campaign.outside import Outside

SOON = RetryPolicy(max_attempts=4, initial=0.005, maximum=0.01)
ITEMS = 4
MANY = 60
BRANCHES = 5
ROUNDS = 3

registry = StepRegistry()
_outside: Outside | None = None


def tell_to(outside: Outside) -> None:
    """The ledger of the process that runs the steps."""
    global _outside  # noqa: PLW0603 -- steps are functions of a module, in the program as in any other
    _outside = outside


def note(kind: str, **fields: Any) -> None:
    assert _outside is not None
    _outside.note(kind, **fields)


def begin(ctx: StepContext | SyncStepContext) -> None:
    note("begin", id=ctx.execution_id, step=ctx.step, visit=visit_of(ctx), attempt=ctx.attempt)


def effect(ctx: StepContext | SyncStepContext, name: str) -> None:
    note("effect", id=ctx.execution_id, visit=visit_of(ctx), name=name)


def visit_of(ctx: StepContext | SyncStepContext) -> int:
    return int(ctx.idempotency_key.rpartition(":")[2])


def once_name(key: str) -> str:
    """As the store knows it; so a record of the effect can be held against a record of the write."""
    return f"once:{key}"


# loops


@registry.step
async def each_durable(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    async for n in ctx.each("items", range(ITEMS), every=1):
        effect(ctx, f"item/{n}")
        ctx.local["sum"] = ctx.local.get("sum", 0) + state["n"] * n
    return {**state, "durable": ctx.local["sum"]}


@registry.step
async def each_coalesced(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    async for n in ctx.each("many", range(MANY)):
        ctx.local["sum"] = ctx.local.get("sum", 0) + n
        await anyio.lowlevel.checkpoint()
    return {**state, "coalesced": ctx.local["sum"]}


@registry.step
def each_in_thread(ctx: SyncStepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    for n in ctx.each("items", range(ITEMS), every=2):
        ctx.local["sum"] = ctx.local.get("sum", 0) + n
    return {**state, "thread": ctx.local["sum"] + ctx.once("plus", _one)}


def _one() -> int:
    return 1


registry.workflow("loops", [each_durable, each_coalesced, each_in_thread])


# calls


@registry.step
async def call_once(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)

    async def pay(amount: int) -> int:
        effect(ctx, once_name("pay"))
        return amount * 2

    paid = await ctx.once("pay", pay, state["n"])
    again = await ctx.once("again", pay_again, ctx, paid)
    return {**state, "paid": again}


async def pay_again(ctx: StepContext, amount: int) -> int:
    effect(ctx, once_name("again"))
    return amount + 1


@registry.step
async def map_out(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)

    async def branch(branch_ctx: StepContext, n: int) -> int:
        effect(ctx, f"map:branch/{n}")
        half: int = await branch_ctx.once("half", _half, ctx, n)
        return half + n

    return {**state, "mapped": await ctx.map(branch, range(BRANCHES), limit=3)}


async def _half(ctx: StepContext, n: int) -> int:
    effect(ctx, f"map:branch/{n}/once:half")
    return n // 2


@registry.step(retry=SOON)
async def third_time(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    if ctx.attempt < 3:
        raise ConnectionError(f"attempt {ctx.attempt}")
    return {**state, "attempts": ctx.attempt}


registry.workflow("calls", [call_once, map_out, third_time])


# moves


@registry.step
async def again(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any] | Repeat:
    begin(ctx)
    state = {**state, "rounds": [*state.get("rounds", []), ctx.iteration]}
    return Repeat(state) if ctx.iteration < ROUNDS - 1 else state


@registry.step
async def back(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any] | Goto:
    begin(ctx)
    turns = state.get("turns", 0) + 1
    return Goto("again", {**state, "turns": turns}) if turns < 2 else {**state, "turns": turns}


@registry.step
async def leave(ctx: StepContext, state: dict[str, Any]) -> Finish:
    begin(ctx)
    return Finish({**state, "left": True})


@registry.step
async def never(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    raise AssertionError("Finish came before this step")


registry.workflow("moves", [again, back, leave, never])


# waits


@registry.step
async def nap(ctx: StepContext, state: dict[str, Any]) -> Sleep:
    begin(ctx)
    return Sleep(0.01, {**state, "slept": True})


@registry.step
async def gate(ctx: StepContext, state: dict[str, Any]) -> WaitFor:
    begin(ctx)
    return WaitFor("go", state)


@registry.step
async def through(ctx: StepContext, state: dict[str, Any]) -> WaitFor:
    begin(ctx)
    return WaitFor("never", {**state, "signal": ctx.signal}, timeout=0.01)


@registry.step
async def late(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    return {**state, "timed_out": ctx.timed_out}


registry.workflow("waits", [nap, gate, through, late])


# children


@registry.step
async def parent(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    first = await ctx.start_child("leaf", {"n": state["n"]}, key="a")
    second = await ctx.start_child("leaf", {"n": state["n"] + 1}, key="b")
    return {**state, "children": [(await first.result())["leaf"], (await second.result())["leaf"]]}


@registry.step
async def leaf_one(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    return {**state, "leaf": state["n"] * 10}


@registry.step
async def leaf_two(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    return {**state, "leaf": state["leaf"] + 1}


registry.workflow("family", [parent])
registry.workflow("leaf", [leaf_one, leaf_two])


# steps that merely follow each other: several of them at once, so that they are saved in one batch


async def hop(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any]:
    begin(ctx)
    return {**state, "hops": state.get("hops", 0) + 1}


CHAINS = tuple(f"chain{n}" for n in range(6))
HOPS = tuple(f"hop{n}" for n in range(8))
for name in HOPS:
    registry.register(name, hop)
for name in CHAINS:
    registry.workflow(name, HOPS)

WORKFLOWS = ("loops", "calls", "moves", "waits", "family", *CHAINS)


def children_of(id: str) -> tuple[str, ...]:
    """The ids of what an execution starts itself."""
    return (f"{id}~1~a", f"{id}~1~b") if id.endswith("-family") else ()


def workflow_of(id: str) -> str:
    return "leaf" if "~" in id else id.partition("-")[2]


def first_state(id: str) -> dict[str, Any]:
    batch = int(id.partition("-")[0])
    return {"n": batch + 1} if id.endswith("~b") else {"n": batch}


def expected_result(id: str) -> dict[str, Any]:
    """What an execution must end with, however often it was killed."""
    state = first_state(id)
    n = state["n"]
    added: dict[str, dict[str, Any]] = {
        "loops": {
            "durable": n * sum(range(ITEMS)),
            "coalesced": sum(range(MANY)),
            "thread": sum(range(ITEMS)) + 1,
        },
        "calls": {"paid": n * 2 + 1, "mapped": [k // 2 + k for k in range(BRANCHES)], "attempts": 3},
        "moves": {"rounds": [*range(ROUNDS), *range(ROUNDS)], "turns": 2, "left": True},
        "waits": {"slept": True, "signal": {"n": n}, "timed_out": True},
        "family": {"children": [n * 10 + 1, n * 10 + 11]},
        "leaf": {"leaf": n * 10 + 1},
        "items": {"durable": n * sum(range(ITEMS))},
        **{name: {"hops": len(HOPS)} for name in CHAINS},
    }
    return {**state, **added[workflow_of(id)]}


def expected_effects(id: str) -> set[str]:
    """Every effect that must have happened at least once."""
    if workflow_of(id) in ("loops", "items"):
        return {f"item/{n}" for n in range(ITEMS)}
    if workflow_of(id) == "calls":
        branches = {f"map:branch/{n}" for n in range(BRANCHES)}
        return {once_name("pay"), once_name("again"), *branches, *(f"{name}/once:half" for name in branches)}
    return set()
