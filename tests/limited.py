"""Steps that tell how many of them run at once, and four workers who keep to a limit."""

from __future__ import annotations

from typing import Any

import anyio

from longrun import ExecutorConfig, QueueLimit, StepContext, StepRegistry, WaitFor, open_store
from longrun.client import Client
from longrun.stores.store import CheckpointStore
from longrun.worker import Worker

PATIENCE = 60.0
QUICK = ExecutorConfig(heartbeat_interval=0.1, lease_ttl=30.0)


class Ledger:
    """Steps that tell how many of them run at once, and that the test can hold up."""

    def __init__(self, *, held: bool = False) -> None:
        self.registry = StepRegistry()
        self.running: dict[str, int] = {}
        self.most = 0
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.changed = anyio.Event()
        self.go = anyio.Event()
        if not held:
            self.go.set()
        self.registry.register("work", self.work)
        self.registry.register("wait", self.wait)
        self.registry.register("look", self.look)
        self.registry.workflow("work", ["work"])
        self.registry.workflow("look", ["look"])
        self.registry.workflow("waits", ["wait", "work"])

    async def work(self, ctx: StepContext, state: Any) -> Any:
        self.begun.append(ctx.execution_id)
        self.running[ctx.execution_id] = self.running.get(ctx.execution_id, 0) + 1
        self.most = max(self.most, sum(self.running.values()))
        self.tell()
        try:
            await self.go.wait()
            await anyio.sleep(0.002)
        finally:
            self.running[ctx.execution_id] -= 1
        self.ended.append(ctx.execution_id)
        self.tell()
        return state

    async def wait(self, state: Any) -> WaitFor:
        return WaitFor("go", state)

    async def look(self, state: Any) -> Any:
        return state

    def tell(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def until_begun(self, number: int) -> None:
        while len(self.begun) < number:
            await self.changed.wait()


async def keeps_to_its_limit(
    store: CheckpointStore | str, *, number: int = 40, config: ExecutorConfig = QUICK, **options: Any
) -> None:
    """Four workers, forty executions, three at once: the first three are held until they are there together."""

    def mine() -> CheckpointStore:
        return store if isinstance(store, CheckpointStore) else open_store(store, **options)

    ledger = Ledger(held=True)
    with anyio.fail_after(PATIENCE):
        async with Client(mine()) as client:
            await client.limit_queue("gpu", concurrency=3)
            runs = [await client.submit("work", n, queue="gpu") for n in range(number)]
            (default, gpu) = await client.list_queues()
            assert (default.name, default.limit) == ("default", None)
            assert (gpu.name, gpu.queued, gpu.running) == ("gpu", number, 0)
            assert gpu.limit == QueueLimit(concurrency=3)
            async with anyio.create_task_group() as tasks:
                workers = [Worker(ledger.registry, store=mine(), config=config) for _ in range(4)]
                for worker in workers:
                    tasks.start_soon(_serve, worker, name="worker")
                await ledger.until_begun(3)
                ledger.go.set()
                for n, run in enumerate(runs):
                    assert await run.result() == n
                tasks.cancel_scope.cancel()
            assert sorted(ledger.ended) == sorted(run.id for run in runs), "each ran once"
            assert ledger.most == 3
            assert sum((await client.count()).values()) == number
            assert (await client.list_queues())[1].running == 0


async def _serve(worker: Worker) -> None:
    async with worker:
        await anyio.sleep_forever()
