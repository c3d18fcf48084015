"""Workers in processes of their own, for tests that kill, limit and pause them: what such a process runs.

They run the campaign's workflows and three more, and tell the outside ledger what they do and what the store
acknowledged. A worker process ends on SIGTERM, as `longrun worker` does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import frozen

from longrun import ExecutorConfig, StepContext, StepRegistry
from longrun.stores import open_store
from longrun.stores.base import StoreBackend
from longrun.stores.store import CheckpointStore
from longrun.worker import Worker
from tests.campaign import work
from tests.campaign.forks import Forks
from tests.campaign.outside import Outside, Reader, Record, read
from tests.campaign.program import CONFIG, make_store

LOOPS = ("asyncio", "trio")
PATIENCE = 60.0

registry = StepRegistry()
registry.include(work.registry)


@registry.step
async def inside(ctx: StepContext, state: Any) -> Any:
    """As long as a record `enter` has no `leave`, it runs: never longer than the library thinks it does."""
    work.note("enter", id=ctx.execution_id)
    await anyio.sleep(0.01)
    work.note("leave", id=ctx.execution_id)
    return state


@registry.step
async def round_and_round(ctx: StepContext, state: Any) -> Any:
    """Comes to a checkpoint every few milliseconds, for ever."""
    while True:
        await ctx.checkpoint()
        work.note("alive", id=ctx.execution_id)
        await anyio.sleep(0.002)


registry.workflow("counted", [inside])
registry.workflow("endless", [round_and_round])


def main(settings: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))  # until the worker listens itself
    outside = Outside(settings["ledger"], settings["process"])
    work.tell_to(outside)
    outside.note("up", pid=os.getpid())
    if settings["telling"]:
        store = make_store(settings["url"], settings["options"], outside, None, disk=False)
    else:
        store = open_store(settings["url"], **settings["options"])
    anyio.run(_serve, store, settings["concurrency"], backend=settings["loop"])
    return 0


async def _serve(store: CheckpointStore, concurrency: int) -> None:
    await Worker(registry, store=store, concurrency=concurrency, config=ExecutorConfig(**CONFIG)).run_forever()


@frozen
class Shared:
    """A store that several processes use, and the ledger beside it."""

    url: str
    ledger: Path
    options: dict[str, Any]

    def open(self) -> CheckpointStore:
        return open_store(self.url, **self.options)

    @contextmanager
    def backend(self) -> Iterator[StoreBackend]:
        backend = self.open().backend
        backend.open()
        try:
            yield backend
        finally:
            backend.close()

    def records(self) -> list[Record]:
        return read(self.ledger) if self.ledger.exists() else []

    async def until(self, true: Callable[[list[Record]], bool], what: str) -> None:
        with Reader(self.ledger) as reader:
            if not await anyio.to_thread.run_sync(reader.until, true, PATIENCE):
                raise AssertionError(f"waited in vain: {what}\n" + "\n".join(map(str, self.records()[-20:])))


def in_order(records: list[Record]) -> list[Record]:
    """The records in the order of the store. A process that lets an execution go writes that down when it has its
    answer; by then another one may have claimed it and told of that. Such an acknowledgement belongs before the claim,
    which shows by its revision that it had seen the write. One that the claim had not seen stays, and is a fault."""
    placed: list[tuple[float, Record]] = []
    claims: dict[str, list[tuple[int, Record]]] = {}
    for place, record in enumerate(records):
        at = float(place)
        if record["kind"] == "claim":
            claims.setdefault(record["id"], []).append((place, record))
        elif record["kind"] == "ack":
            later = [
                number
                for number, claim in claims.get(record["id"], ())
                if claim["fence"] > record["fence"] and claim["revision"] >= record["revision"]
            ]
            at = min(later) - 0.5 if later else at
        placed.append((at, record))
    return [record for _, record in sorted(placed, key=lambda one: one[0])]


@contextmanager
def fleet(number: int = 4) -> Iterator[list[Forks]]:
    """The parents of so many worker processes; they take long to start and are good for many tests."""
    with ExitStack() as stack:
        yield [stack.enter_context(Forks("tests.campaign.fleet")) for _ in range(number)]


def sail(ships: list[Forks], shared: Shared, *, telling: bool = True, concurrency: int = 20, first: int = 1) -> None:
    """Start a worker process in each, numbered from `first` on."""
    for number, ship in enumerate(ships, start=first):
        ship.spawn(
            url=shared.url,
            options=shared.options,
            ledger=str(shared.ledger),
            process=number,
            telling=telling,
            concurrency=concurrency,
            loop=LOOPS[number % 2],
        )
