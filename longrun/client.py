"""Look and control, without a registry and without running anything: from any process or machine on the same store.

Place in the life of an execution: beside it. `Client` is async; `client_sync` is the same object with blocking calls.
What nobody alive owns, a client claims for the moment it takes to obey a request, then leaves to whoever runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.from_thread

from longrun.clock import Clock
from longrun.crew import Crew
from longrun.desk import UNCHANGED, check_delay
from longrun.errors import ExecutionExistsError
from longrun.handle import ExecutionHandle
from longrun.records import Checkpoint, ExecutionState, ExecutorConfig
from longrun.registry import StepRegistry, Workflow
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore


class Client(Crew):
    """Submit, look, watch and control. A workflow is named; whoever runs it knows its steps."""

    keeps_paused = False

    def __init__(
        self, store: CheckpointStore | str, *, config: ExecutorConfig | None = None, clock: Clock | None = None
    ) -> None:
        if not isinstance(store, CheckpointStore):
            store = open_store(store)
        super().__init__(StepRegistry(), store, config or ExecutorConfig(auto_resume=False), clock, strict=False)
        self.takes_work = False

    async def __aenter__(self) -> Self:
        await self.store.open()
        try:
            await self.sign_on(None)
        except BaseException:
            await self.store.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.drain()
            await self.give_back()
        await self.sign_off()
        await self.store.aclose()

    async def submit(
        self,
        workflow: str,
        state: Any = None,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float | timedelta | None = None,
    ) -> ExecutionHandle:
        """Store an execution for any worker that knows the workflow. An `id` given before returns its handle."""
        seconds = check_delay(delay)
        due = None if seconds is None else self.clock.now() + seconds
        head = self.first_head(ExecutionState.INITIALIZED, due=due)
        named = Workflow(name=workflow, steps=())
        made = self.new(named, state, head, id=id, metadata=metadata, queue=queue, priority=priority)
        if not await self.store.create(made):
            stored = (await self.store.load(made.id)).definition.workflow
            if stored != workflow:
                raise ExecutionExistsError(made.id, stored, workflow)
        return ExecutionHandle(self, made.id)

    async def fork(
        self,
        id: str,
        *,
        checkpoint: Checkpoint | int | str | None = None,
        state: Any = UNCHANGED,
        new_id: str | None = None,
    ) -> ExecutionHandle:
        """Store a new execution from an old boundary, for any worker that knows the workflow."""
        made = await self.forked(id, checkpoint, state, new_id, owner=None)
        if not await self.store.create(made):
            raise ExecutionExistsError(made.id, "another execution", made.definition.workflow)
        return ExecutionHandle(self, made.id)

    def handle(self, id: str) -> ExecutionHandle:
        return ExecutionHandle(self, id)


class _Blocking:
    """Anything async, with blocking calls: the same names, run in an event loop of its own."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, target: Any) -> None:
        self._portal, self._target = portal, target

    def __repr__(self) -> str:
        return f"<blocking {self._target!r}>"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            return self._wrapped(self._portal.call(_call, found, args, options))

        return call

    def _wrapped(self, value: Any) -> Any:
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        return _Blocking(self._portal, value) if isinstance(value, ExecutionHandle) else value

    def _iterate(self, source: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._portal.call(source.__anext__)
            except StopAsyncIteration:
                return


async def _call(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = function(*args, **options)
    return await result if hasattr(result, "__await__") else result


@contextmanager
def client_sync(store: CheckpointStore | str, **options: Any) -> Iterator[Any]:
    """A `Client` for scripts: `with client_sync(url) as client: client.pause("id")`."""
    with anyio.from_thread.start_blocking_portal() as portal:
        client = portal.call(_make, store, options)
        with portal.wrap_async_context_manager(client) as entered:
            yield _Blocking(portal, entered)


async def _make(store: CheckpointStore | str, options: dict[str, Any]) -> Client:
    return Client(store, **options)
