"""J9: several processes that claim from one queue at once, and how often one of them goes short.

Place in the life of an execution: claim. As seen in PostgreSQL, where claimers pass over what others hold; in SQLite
one waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import Any

from benchmarks.helpers import helper, say_ready
from benchmarks.orders import Order, Samples, Sizes
from benchmarks.results import Figures, Row, value_at_most
from benchmarks.samples import column
from longrun.client import Client
from longrun.records import ExecutionState
from longrun.stored import Claim, Owner, Query

STORES = ("postgres",)
ROLE = "claimer"
EACH = 5
"""Claimed at once: few, so that all of them are after the same rows."""
SHORT_AT_MOST = 10.0
"""Percent of the rounds."""


def name_of(pid: int) -> str:
    return f"{ROLE}-{pid}"


def wanted(owner: str) -> Claim:
    return Claim(owner=owner, now=time.time(), states=frozenset({ExecutionState.INITIALIZED}), limit=EACH)


async def take(order: Order) -> Figures:
    """One of them: its rounds, one behind the other."""
    me = Owner(id=name_of(os.getpid()), life={}, remaining=60.0)
    async with Client(order.url) as client:
        await client.store.register(me, 60.0)
        say_ready()
        await asyncio.to_thread(sys.stdin.readline)  # all begin at the same word
        given = [len(await client.store.claim(wanted(me.id))) for _ in range(order.sizes["turns"])]
    return {"given": sum(given), "short": sum(count < EACH for count in given)}


def race(order: Order) -> Figures:
    """Percent of the rounds that came back short, although enough for all of them was queued."""
    with contextlib.ExitStack() as stack:
        claimers = [stack.enter_context(helper(order, ROLE)) for _ in range(order.sizes["claimers"])]
        for claimer in claimers:
            claimer.ready()
        for claimer in claimers:
            claimer.tell("go")
        found = {name_of(claimer.pid): claimer.figures() for claimer in claimers}
    asyncio.run(check(order, {owner: figures["given"] for owner, figures in found.items()}))
    rounds = order.sizes["claimers"] * order.sizes["turns"]
    return {"short_percent": sum(figures["short"] for figures in found.values()) / rounds * 100}


async def check(order: Order, given: dict[str, float]) -> None:
    """What was given twice is missing where it was given first; and there must have been more than all could take."""
    async with Client(order.url) as client:
        for owner, count in given.items():
            owned = sum((await client.store.count(Query(owner=owner))).values())
            if owned != count:
                raise AssertionError(f"{owner} was given {count:g} and has {owned}")
        left = await client.store.count(Query(states=frozenset({ExecutionState.INITIALIZED}), owned=False))
    if not left:
        raise AssertionError("nothing is left: too little was queued")


def rows(samples: Samples, sizes: Sizes, common: dict[str, Any]) -> list[Row]:
    return [
        Row(
            what=f"claim rounds of {sizes['claimers']} workers that came back short",
            unit="%",
            ours=column(samples, "many", "short_percent"),
            goal=value_at_most(SHORT_AT_MOST),
            note=f"{sizes['turns']} rounds each",
            **common,
        )
    ]
