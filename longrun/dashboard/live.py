"""Server-sent events: the same answer again and again, told when it has changed.

Place in the life of an execution: while somebody watches.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from longrun.dashboard.wire import to_json
from longrun.errors import ExecutionNotFoundError, LongrunError
from longrun.stores.store import CheckpointStore

SHORTEST = 0.25
"""At most four updates a second."""
IDLE = 1.0
"""How long to wait for a change before looking anyway: a step that goes on is not announced."""
SHARE = 5
"""Looking may take one part in so many of the time, however large the store is."""
PING = 15

Look = Callable[[], Awaitable[dict[str, Any]]]


class Stream(EventSourceResponse):
    """Ends its events with itself, also when the browser leaves in the middle of one."""

    def __init__(self, events: AsyncGenerator[ServerSentEvent, None]) -> None:
        super().__init__(events, ping=PING)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def stream(store: CheckpointStore, look: Look, now: Callable[[], Any]) -> Stream:
    return Stream(changes(store, look, now))


async def changes(store: CheckpointStore, look: Look, now: Callable[[], Any]) -> AsyncGenerator[ServerSentEvent, None]:
    """An event whenever what `look` gives is another than before; `problem` while the store does not answer."""
    bell = Doorbell()
    unwatch = store.watch(bell.ring)
    try:
        told = ""
        while True:
            began = time.monotonic()
            bell.listen()
            kind, text = await _look(look)
            took = time.monotonic() - began
            if text != told:
                told = text
                yield ServerSentEvent(event=kind, data=f'{{"now": {to_json(now())}, {text[1:]}', sep="\n")
            if kind == "gone":
                return
            await anyio.sleep(max(SHORTEST, took * SHARE))
            await bell.wait(IDLE)
    finally:
        unwatch()


async def _look(look: Look) -> tuple[str, str]:
    try:
        return "data", to_json(await look())
    except ExecutionNotFoundError as error:
        return "gone", to_json({"error": str(error), "kind": type(error).__name__})
    except LongrunError as error:
        return "problem", to_json({"error": str(error), "kind": type(error).__name__})


class Doorbell:
    """Rung by the store's watcher when somebody else may have changed something."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    def listen(self) -> None:
        """Forget earlier rings: what they told of is about to be looked at."""
        self._event = anyio.Event()

    async def wait(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._event.wait()
