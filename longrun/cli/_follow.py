"""Follow one execution, whichever process runs it: its head, its progress, and the rows that its boundaries leave.

If it runs in this process, the runner is looked at, which costs the store nothing; otherwise the store is asked, when
something has changed and once a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from longrun.records import Progress
from longrun.stored import Boundary, Definition, Head

if TYPE_CHECKING:
    from longrun.runner import Runner
    from longrun.stores.store import CheckpointStore

LOOK_EVERY = 1.0


@frozen
class View:
    """One look at an execution."""

    definition: Definition
    head: Head
    live: Progress | None
    """Progress that is not stored yet, if it runs here."""
    rows: list[Boundary]
    """The boundaries since the last look."""
    here: bool
    """Whether it runs in this process."""

    @property
    def progress(self) -> Progress | None:
        head = self.head
        shown = self.live or Progress(done=head.done, total=head.of, message=head.note)
        return shown if shown.done or shown.total or shown.message else None

    @property
    def step_name(self) -> str | None:
        steps = self.definition.steps
        return steps[self.head.step] if self.head.step < len(steps) else None


class Follower:
    """Looks again and again. `after` is the number of the last row that is known already."""

    def __init__(
        self, store: CheckpointStore, id: str, runners: Mapping[str, Runner] | None = None, *, after: int = 0
    ) -> None:
        self._store, self._id = store, id
        self._runners = runners or {}
        self.seen = after
        self._definition: Definition | None = None
        self._head: Head | None = None
        self._look_at = 0.0
        self._changed = anyio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of changes made elsewhere meanwhile."""
        stop = self._store.watch(self._ring)
        try:
            yield
        finally:
            stop()

    def _ring(self) -> None:
        self._look_at = 0.0
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Until something may have changed, or so long."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()
        self._changed = anyio.Event()

    async def look(self) -> View:
        runner = self._runners.get(self._id)
        if runner is None or self._definition is None:
            definition, head = await self._load()
        else:
            definition, head = self._definition, runner.head
        rows = await self._store.boundaries(self._id, after=self.seen) if head.seq > self.seen else []
        self.seen = rows[-1].seq if rows else self.seen
        return View(definition, head, None if runner is None else runner.live_progress, rows, runner is not None)

    async def _load(self) -> tuple[Definition, Head]:
        now = time.monotonic()
        if self._definition is None or self._head is None or now >= self._look_at:
            loaded = await self._store.load(self._id)
            self._definition, self._head = loaded.definition, loaded.head
            self._look_at = now + LOOK_EVERY
        return self._definition, self._head
