"""Look and control, without a registry and without running anything: from any process or machine on the same store.

Place in the life of an execution: beside it. `Client` is async; `client_sync` is the same object with blocking calls.
What nobody alive owns, a client claims for the moment it takes to obey a request, then leaves to whoever runs it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
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
        if not isinstance(workflow, str):
            raise ConfigError("workflow", workflow, "give its name: a client has no registry")
        if check_name("workflow", workflow) in RECORDS:
            raise ConfigError("workflow", workflow, "that name is kept for longrun's own records")
        return Workflow(name=workflow, steps=())

    def handle(self, id: str) -> ExecutionHandle:
        return ExecutionHandle(self, id)

    def watch(self, id: str) -> AsyncIterator[ExecutionEvent]:
        """The events of an execution from now on, wherever it runs, until it ends."""
        return self.events_of(check_id(id))


_ELSEWHERE: list[ExitStack] = []
"""What a fork has of clients that another process made, and closes: here it must not even be collected."""


class _Bridge:
    """Calls into the loop of a blocking client, which is another thread's."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal) -> None:
        self._portal, self._process = portal, os.getpid()
        self.closed = False

    @property
    def stands(self) -> bool:
        return os.getpid() == self._process

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.stands:
            raise ConfigError("client_sync", "in a forked process", "make one there: a fork has none of its threads")
        if self.closed:
            raise ConfigError("client_sync", "left already", "use it inside `with client_sync(...) as client:`")
        return self._portal.call(function, *args)


class _Blocking:
    """Anything async, with blocking calls: the same names, run in an event loop of its own."""

    def __init__(self, bridge: _Bridge, target: Any) -> None:
        self._bridge, self._target = bridge, target

    def __repr__(self) -> str:
        return f"<blocking {self._target!r}>"

    def __dir__(self) -> list[str]:
        return dir(self._target)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return self._wrapped(self._bridge.call(_call, found, args, options))

        return call

    def _wrapped(self, value: Any) -> Any:
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        return _Blocking(self._bridge, value) if isinstance(value, ExecutionHandle) else value

    def _iterate(self, source: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._bridge.call(source.__anext__)
            except StopAsyncIteration:
                return


async def _call(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = function(*args, **options)
    return await result if hasattr(result, "__await__") else result


@contextmanager
def client_sync(store: CheckpointStore | str, **options: Any) -> Iterator[Any]:
    """A `Client` for scripts: `with client_sync(url) as client: client.pause("id")`."""
    with ExitStack() as stack:
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        client = portal.call(_make, store, options)
        bridge = _Bridge(portal)
        entered = stack.enter_context(portal.wrap_async_context_manager(client))
        try:
            yield _Blocking(bridge, entered)
        finally:
            bridge.closed = True
            if not bridge.stands:
                _ELSEWHERE.append(stack.pop_all())


async def _make(store: CheckpointStore | str, options: dict[str, Any]) -> Client:
    return Client(store, **options)
