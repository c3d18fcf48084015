"""Look and control, without a registry and without running anything: from any process or machine on the same store.

Place in the life of an execution: beside it. `Client` is async; `client_sync` is the same object with blocking calls.
What nobody alive owns, a client claims for the moment it takes to obey a request, then leaves to whoever runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.from_thread

from longrun.clock import Clock
from longrun.desk import check_name
from longrun.errors import ConfigError
from longrun.events import ExecutionEvent
from longrun.handle import ExecutionHandle
from longrun.office import Office
from longrun.records import ExecutorConfig, check_id
from longrun.registry import StepRegistry, Workflow
from longrun.stored import RECORDS
from longrun.stores import open_store
from longrun.stores.store import CheckpointStore
from longrun.telemetry import Observer, Watch


class Client(Office):
    """Submit, look, watch and control. A workflow is named; whoever runs it knows its steps."""

    keeps_paused = False
    runs_here = False

    def __init__(
        self,
        store: CheckpointStore | str,
        *,
        config: ExecutorConfig | None = None,
        clock: Clock | None = None,
        telemetry: Observer | Iterable[Observer] | None = None,
    ) -> None:
        if not isinstance(store, CheckpointStore):
            store = open_store(store)
        super().__init__(StepRegistry(), store, config or ExecutorConfig(auto_resume=False), clock, strict=False)
        self.takes_work = False
        self.telemetry = Watch.of(telemetry)

    def find_workflow(self, workflow: Any) -> Workflow:
        """By its name alone: whoever first runs it gives it its steps."""
        if check_name("workflow", workflow) in RECORDS:
            raise ConfigError("workflow", workflow, "that name is kept for longrun's own records")
        return Workflow(name=workflow, steps=())

    def handle(self, id: str) -> ExecutionHandle:
        return ExecutionHandle(self, id)

    def watch(self, id: str) -> AsyncIterator[ExecutionEvent]:
        """The events of an execution from now on, wherever it runs, until it ends."""
        return self.events_of(check_id(id))


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
