"""The process that is killed: an executor on a store, running batch after batch of the workflows, telling the ledger.

Between the executor and the store stands a backend that writes down each acknowledgement as soon as the store has given
it, and that kills the process before or after a chosen call, if it is told to.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio

from longrun import EventType, ExecutionEvent, Executor, ExecutorConfig, InvalidStateError, StoreUnavailableError
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.stored import Create, Loaded, Save, Write
from longrun.stores import open_store
from longrun.stores._file.queue import QueueDisk
from longrun.stores.base import StoreBackend
from longrun.stores.file import FileBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.interposed import WRITES, InterposedBackend
from tests.campaign import work
from tests.campaign.outside import Outside

T = TypeVar("T")
TOLD = (EventType.CHECKPOINTED, EventType.EXECUTION_COMPLETED)
DISK_WRITES = ("open", "write", "fdatasync", "sync_all", "fsync", "truncate", "rename", "link", "unlink")
"""The system calls by which a file store changes something, and what it opens for that."""
DISK_CALLS = (*DISK_WRITES, "mkdir", "lock")
CONFIG: dict[str, Any] = {
    "checkpoint_interval": 0.005,
    "heartbeat_interval": 0.2,
    "lease_ttl": 30.0,
    "max_crashes": 1_000_000,
    "drain_timeout": 5.0,
}


class Trap:
    """Kills this process at the n-th call of a kind: before it, or after it and before anybody has heard of it."""

    def __init__(self, call: str, n: int, when: str, signal: int = signal.SIGKILL) -> None:
        self._signal = signal
        self._calls = {"any": WRITES, "disk": DISK_CALLS}.get(call, (call,))
        self._left, self._when = n, when
        self._lock = threading.Lock()

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        mine = call in self._calls and self._falls()
        if mine and self._when == "before":
            signal.pthread_kill(threading.get_ident(), self._signal)  # this very thread goes no further
        try:
            return function(*args, **options)
        finally:
            if mine:
                signal.pthread_kill(threading.get_ident(), self._signal)  # this very thread goes no further

    def _falls(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


class Telling(InterposedBackend):
    """Tells the ledger what the store has acknowledged."""

    def __init__(self, inner: StoreBackend, outside: Outside, trap: Trap | None) -> None:
        super().__init__(inner)
        self._outside, self._trap = outside, trap
        self.calls = 0

    def around(self, call: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        self.calls += call in WRITES
        try:
            if self._trap is None:
                result = function(*args, **options)
            else:
                result = self._trap.around(call, function, *args, **options)
        except Exception as error:
            for write in args[0] if call == "commit" else ():
                if isinstance(write, Save):
                    self._tell_refusal(write, error)
            raise
        if call == "commit":
            self._tell_commit(args[0], result)
        elif call == "claim":
            self._tell_claim(result)
        return result

    def _tell_commit(self, batch: Sequence[Write], answers: Any) -> None:
        for write, answer in zip(batch, answers, strict=True):
            if isinstance(write, Create) and answer is True:
                self._tell_write(write, (write.boundary,), ())
            elif isinstance(write, Save):
                if answer is None:
                    self._tell_write(write, write.boundaries, tuple(write.put))
                else:
                    self._tell_refusal(write, answer)

    def _tell_refusal(self, save: Save, error: object) -> None:
        head = save.head
        name = type(error).__name__
        self._outside.note("refused", id=save.id, fence=head.fence, revision=head.revision, error=name)

    def _tell_write(self, write: Create | Save, boundaries: Sequence[Any], put: tuple[str, ...]) -> None:
        head = write.head
        self._outside.note(
            "ack",
            id=write.id,
            fence=head.fence,
            revision=head.revision,
            seq=head.seq,
            state=str(head.state),
            visit=head.visit,
            attempt=head.attempt,
            rows=[[b.seq, b.kind, b.step, b.visit] for b in boundaries],
            put=put,
        )

    def _tell_claim(self, claimed: Any) -> None:
        given: list[Loaded] = claimed
        for one in given:
            head = one.head
            self._outside.note("claim", id=one.definition.id, fence=head.fence, revision=head.revision, seq=head.seq)


class DyingDisk(QueueDisk):
    """The system calls of the file store, with the trap around each."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        for call in DISK_CALLS:
            setattr(self, call, _around(trap, call, getattr(super(), call)))


def _around(trap: Trap, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: trap.around(call, function, *args, **options)


class JumpingClock(Clock):
    """A wall clock that somebody sets wrong, again and again, until `jumps` are used up. The other clock goes on.

    It stays at the latest of its times, since what was told to sleep until a moment there may sleep until then."""

    LEAPS = (0.0, 0.0, 1.0, -1.0, 60.0, -60.0, 3600.0, -3600.0, 86_400.0, -86_400.0)

    def __init__(self, seed: int, jumps: int, outside: Outside) -> None:
        self._dice = random.Random(seed)
        self._left, self._outside = jumps, outside
        self._lock = threading.Lock()
        self._next = time.monotonic()
        self._off = 0.0

    def now(self) -> float:
        with self._lock:
            if time.monotonic() >= self._next:
                self._jump()
            return time.time() + self._off

    def _jump(self) -> None:
        self._next = time.monotonic() + self._dice.uniform(0.01, 0.1)
        if self._left:
            self._left -= 1
            self._off = self._dice.choice(self.LEAPS)
            self._outside.note("jump", seconds=self._off)
        else:
            self._off = max(self.LEAPS)


def make_store(url: str, options: dict[str, Any], outside: Outside, trap: Trap | None, disk: bool) -> CheckpointStore:
    """The store of the URL with the telling backend in front of its own."""
    if disk and trap is not None:
        return CheckpointStore(Telling(FileBackend(url.partition(":")[2], disk=DyingDisk(trap)), outside, None))
    return CheckpointStore(Telling(open_store(url, **options).backend, outside, trap))


def main(settings: dict[str, Any]) -> int:
    """Run until a batch has ended and the file `stop` is there. What a kill left is resumed on the way in."""
    outside = Outside(settings["ledger"], settings["process"])
    work.tell_to(outside)
    outside.note("up", pid=os.getpid())
    clock: Clock = SYSTEM_CLOCK
    options = settings.get("options", {})
    if "jumps" in settings:
        clock = JumpingClock(settings["process"], settings["jumps"], outside)
        options = {**options, "clock": clock} if settings["url"].startswith(("file:", "sqlite:")) else options
    found = settings.get("trap")
    trap = None if found is None else Trap(**found)
    disk = found is not None and found["call"] == "disk"
    store = make_store(settings["url"], options, outside, trap, disk)
    config = ExecutorConfig(**{**CONFIG, **settings.get("config", {})})
    backend: str = settings.get("loop", "asyncio")
    on_event = _teller(outside) if settings["process"] % 2 else None  # who is watched takes the long way
    anyio.run(
        _serve, store, outside, config, clock, on_event, settings["batch"], Path(settings["stop"]), backend=backend
    )
    return 0


def _teller(outside: Outside) -> Callable[[ExecutionEvent], None]:
    def tell(event: ExecutionEvent) -> None:
        if event.type in TOLD:
            outside.note("event", type=str(event.type), id=event.execution_id, seq=event.data.get("seq"))

    return tell


async def _serve(
    store: CheckpointStore,
    outside: Outside,
    config: ExecutorConfig,
    clock: Clock,
    on_event: Callable[[ExecutionEvent], None] | None,
    batch: int,
    stop: Path,
) -> None:
    async with Executor(work.registry, store=store, config=config, on_event=on_event, clock=clock) as executor:
        while True:
            await _run_batch(executor, outside, batch)
            outside.note("batch", number=batch, calls=store.backend.calls)  # type: ignore[attr-defined]
            batch += 1
            if stop.exists():
                return


async def _run_batch(executor: Executor, outside: Outside, batch: int) -> None:
    async with anyio.create_task_group() as tasks:
        for workflow in work.WORKFLOWS:
            tasks.start_soon(run_one, executor, outside, f"{batch}-{workflow}")


async def run_one(executor: Executor, outside: Outside, id: str) -> None:
    """Start an execution, or find it again, and wait for its end; whatever becomes of the store meanwhile."""
    run = await until_done(lambda: executor.start(work.workflow_of(id), work.first_state(id), id=id))
    outside.note("started", id=id)
    if id.endswith("-waits"):
        try:
            await until_done(lambda: run.signal("go", work.first_state(id), key="go"))
            outside.note("signalled", id=id)
        except InvalidStateError:
            outside.note("over", id=id)  # an earlier process had sent it, and it has gone all the way since
    outside.note("result", id=id, result=await until_done(run.result))


async def until_done(call: Callable[[], Awaitable[T]]) -> T:
    """Again and again while the store is away: an error is not an acknowledgement, so asking again is right."""
    while True:
        try:
            return await call()
        except StoreUnavailableError:
            await anyio.sleep(0.002)
        except BaseExceptionGroup as group:
            if group.split(StoreUnavailableError)[1] is not None:
                raise
