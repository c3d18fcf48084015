"""`CheckpointStore`: one async face for every backend, with group commit, sealing, watching and retention.

Place in the life of an execution: claim, checkpoint, finish. Executor, worker, client, command line and dashboard all
speak to a store through this class; a backend knows none of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import attrs

from longrun.errors import (
    CorruptDataError,
    ExecutionNotFoundError,
    LongrunError,
    StoreUnavailableError,
)
from longrun.logging import get_logger
from longrun.loops import Loop, current_loop
from longrun.records import FINISHED, ExecutionState, RetentionPolicy
from longrun.seal import Seal
from longrun.stored import (
    RECORDS,
    Boundary,
    Claim,
    Create,
    Head,
    Loaded,
    Message,
    Owner,
    Query,
    Save,
    Send,
    Stored,
    Write,
)
from longrun.stores.base import StoreBackend
from longrun.stores.readers import Readers, apart
from longrun.stores.sealing import Sealing
from longrun.stores.writer import Done, Writer

T = TypeVar("T")

READERS = 4
PATIENCE = 5.0
"""How long leaving waits for a backend that answers nothing."""
OVER = frozenset({ExecutionState.COMPLETED, ExecutionState.CANCELLED})
"""What nobody can retry."""
AT_ONCE = 50
"""So many deletions in one commit of retention: what executors write meanwhile waits for no more."""


_OPEN: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()


def _forked() -> None:
    for store in list(_OPEN):
        store.leave_to_parent()
    _OPEN.clear()


os.register_at_fork(after_in_child=_forked)


class CheckpointStore:
    """Wraps a `StoreBackend`. Enter it, or give it to an executor, which does; it closes when its last user leaves."""

    def __init__(self, backend: StoreBackend, *, seal: Seal | None = None) -> None:
        self.backend = backend
        self.seal = seal or Seal()
        self._sealing = Sealing(self.seal)
        self._writer = Writer(backend, self._sealing.all_sealed)
        self._watcher = _Watcher(backend)
        self._users = 0
        self._lock = threading.Lock()
        self._readers = Readers(READERS)
        self._refusal: str | None = None
        """Why it cannot be used any more: something was still asked of the backend when everybody had left, and it was
        not closed; or this is the child of a process that has opened it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.backend.kind}>"

    # life

    async def open(self) -> Self:
        """Make ready. Each `open` needs its `aclose`."""
        await apart(self._open)
        return self

    def _open(self) -> None:
        with self._lock:
            self._check_usable()
            if self._users == 0:
                self.backend.open()
                self._writer.start()
                _OPEN.add(self)
            self._users += 1

    async def aclose(self) -> None:
        await apart(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._users == 0:
                return
            self._users -= 1
            if self._users == 0:
                _OPEN.discard(self)
                self._watcher.stop()
                ended = [self._writer.stop(PATIENCE), self._readers.close(PATIENCE)]
                if all(ended):
                    self.backend.close()
                else:
                    self._refusal = "it was left before it had answered: make another"
                    get_logger().error("store.left_behind", kind=self.backend.kind)

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreUnavailableError(self.backend.kind, self._refusal)

    def leave_to_parent(self) -> None:
        """In a child that was forked: its threads and its connections are those of the parent, and stay so."""
        self._refusal = "it was opened before this process was forked: make another"
        self._lock, self._users = threading.Lock(), 0

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def at_work(self) -> bool:
        """Whether somebody waits for an answer."""
        return self._writer.at_work or self._readers.at_work

    async def ping(self) -> None:
        await self._read(self.backend.ping)

    # the writer's side

    def create(self, create: Create) -> Coroutine[Any, Any, bool]:
        """Store a new execution; False if the id is taken."""
        return self._create_for_others(create) if create.head.owner is None else self._write(create)

    async def _create_for_others(self, create: Create) -> bool:
        created: bool = await self._write(create)
        if created:
            self._watcher.tell()
        return created

    async def save(self, save: Save) -> None:
        """Durable when it returns. `LeaseLostError` if another process owns the execution now."""
        await self._write(save)
        if self._watcher.shared and _is_news(save):
            self._watcher.tell()

    def submit(self, save: Save, done: Done, loop: Loop | None = None) -> None:
        """Hand a save over without waiting; `done` gets None or the error, in `loop` or else in this one."""
        if self._watcher.shared and _is_news(save):
            done = partial(self._watcher.told, done)
        self._writer.add((done, loop or current_loop(), save, None))

    async def send(self, id: str, message: Message, *, limit: int = 1000) -> int:
        number = int(await self._write(Send(id=id, message=message, limit=limit)))
        self._watcher.tell()
        return number

    async def claim(self, claim: Claim) -> list[Loaded]:
        loaded: list[Loaded] = await self._call(partial(self.backend.claim, claim))
        if self.seal.encrypts and loaded:  # neither the loop nor the writer waits for keys
            return await self._read(self._all_unsealed, loaded)
        return self._all_unsealed(loaded)

    def _all_unsealed(self, loaded: list[Loaded]) -> list[Loaded]:
        return [self._sealing.unsealed_or_damaged(one) for one in loaded]

    async def settled(self) -> None:
        """Return when everything that was handed over before has been written, also what nobody waits for any more."""
        await self._call(_nothing)

    async def register(self, owner: Owner, ttl: float) -> None:
        await self._call(partial(self.backend.register, owner, ttl))

    def renew(self, owner: str, ttl: float, done: Done) -> None:
        """Extend a lease; for the lease keeper's own thread. `done` gets a bool or the error in the writer's thread."""
        self._writer.call(partial(self.backend.renew, owner, ttl), done, None)

    async def unregister(self, owner: str) -> None:
        await self._call(partial(self.backend.unregister, owner))

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        deleted: list[bool] = await self._call(partial(self.backend.delete, tuple(ids)))
        return deleted

    async def gc(self, policy: RetentionPolicy, now: float, *, dry_run: bool = False) -> int:
        """Delete finished executions older than the policy allows, or only count them. What lives, waits or is paused
        is never touched, nor are the children of a parent that may ask for them again: of a failed one they go after
        it has gone itself."""
        if policy.max_age is None:
            return 0
        removed = 0
        unfinished: set[str] = set()
        query = Query(states=FINISHED, ended_before=now - policy.max_age, limit=500)
        while page := await self.find(query):
            ids = await self._let_go(page, unfinished)
            if dry_run:
                removed += len(ids)
            else:
                for start in range(0, len(ids), AT_ONCE):
                    removed += sum(await self.delete(ids[start : start + AT_ONCE]))
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id))
        return removed

    async def _let_go(self, page: list[Stored], unfinished: set[str]) -> list[str]:
        """Ids of those that no parent may ask for any more: a failed one may, as long as it can be retried. What is
        known of parents is kept in `unfinished`."""
        parents = {stored.definition.parent_id for stored in page} - unfinished
        if asked := [id for id in parents if id is not None]:
            found = await self._read(self.backend.states_of, asked)
            unfinished |= {id for id, state in found.items() if state not in OVER}
        return [stored.definition.id for stored in page if stored.definition.parent_id not in unfinished]

    # the readers' side

    async def load(self, id: str) -> Loaded:
        """Everything of one execution; `ExecutionNotFoundError` if there is none, `CorruptDataError` if its state is
        unreadable. A message of which that is true says so (`is_readable`)."""
        return await self._read(self._load, id, self._sealing.unsealed)

    async def peek(self, id: str) -> Loaded:
        """The same for whoever wants to end it, or to put another state in its place: what cannot be unsealed is left
        out, and `damage` tells."""
        return await self._read(self._load, id, self._sealing.unsealed_or_damaged)

    async def head(self, id: str) -> Head:
        """Where an execution is, and nothing else of it; `ExecutionNotFoundError` if there is none."""
        head = await self._read(self.backend.head, id)
        if head is None:
            raise ExecutionNotFoundError(id)
        return head

    def _load(self, id: str, unsealed: Callable[[Loaded], Loaded]) -> Loaded:
        loaded = self.backend.load(id)
        if loaded is None:
            raise ExecutionNotFoundError(id)
        return unsealed(loaded)

    async def find(self, query: Query) -> list[Stored]:
        """A page, newest first. The library's own records come last: leaving them out makes no hole in a page."""
        found = await self._read(self.backend.find, query)
        if query.workflows is not None:
            return found
        return [stored for stored in found if stored.definition.workflow not in RECORDS]

    async def find_all(self, query: Query) -> AsyncIterator[Stored]:
        """Everything that matches, page after page. To be read to its end: on trio, who leaves it has to close it."""
        while page := await self.find(query):
            for stored in page:
                yield stored
            if len(page) < query.limit:
                return
            query = attrs.evolve(query, after=(page[-1].definition.created, page[-1].definition.id))

    async def count(self, query: Query | None = None) -> dict[ExecutionState, int]:
        return await self._read(self._count, query or Query())

    def _count(self, query: Query) -> dict[ExecutionState, int]:
        """Without the library's own records, all of which are stored as paused."""
        counts = self.backend.count(query)
        if query.workflows is None and counts.get(ExecutionState.PAUSED):
            hidden = self.backend.count(attrs.evolve(query, workflows=RECORDS))
            shown = {state: number - hidden.get(state, 0) for state, number in counts.items()}
            counts = {state: number for state, number in shown.items() if number > 0}
        return counts

    async def exists(self, id: str) -> bool:
        try:
            return bool(await self._read(partial(self.backend.boundaries, id, limit=1)))
        except CorruptDataError:  # there it is, whatever became of it
            return True

    async def size(self, id: str) -> int:
        return await self._read(self.backend.size, id)

    async def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        return await self._read(partial(self.backend.boundaries, id, after=after, limit=limit))

    async def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        return await self._read(self._checkpoint, id, seq) if 0 < seq < 1 << 63 else None

    def _checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        found = self.backend.checkpoint(id, seq)
        if found is None:
            return None
        boundary, blobs = found
        return self._sealing.unsealed_boundary(id, boundary), self._sealing.unsealed_blobs(id, blobs)

    async def messages(self, id: str) -> list[Message]:
        return await self._read(self._messages, id)

    def _messages(self, id: str) -> list[Message]:
        return [self._sealing.unsealed_message(id, message) for message in self.backend.messages(id)]

    async def was_sent(self, id: str, key: str) -> bool:
        """Whether an execution was sent a message with this key, taken or not, as far as it remembers them."""
        _, keys = await self._read(self.backend.sent, id)
        return key in keys

    async def pending(self, owner: str) -> list[str]:
        return await self._read(self.backend.pending, owner)

    async def owners(self) -> list[Owner]:
        return await self._read(self.backend.owners)

    async def next_due(self) -> float | None:
        return await self._read(self.backend.next_due)

    def watch(self, changed: Callable[[], object]) -> Callable[[], None]:
        """Call `changed` in this loop whenever others may have changed something; returns how to stop that."""
        return self._watcher.add(current_loop(), changed)

    @property
    def breaks(self) -> int:
        """How often watching was interrupted. The server that answers now may be another one, which lacks what the last
        had acknowledged."""
        return self._watcher.breaks

    # plumbing

    def _write(self, write: Write) -> Coroutine[Any, Any, Any]:
        return self._answer(write, None)

    def _call(self, function: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
        return self._answer(None, function)

    async def _answer(self, write: Write | None, function: Callable[[], Any] | None) -> Any:
        self._check_usable()
        loop = current_loop()
        while (room := self._writer.room(loop)) is not None:
            await room
        waiter = loop.waiter()
        self._writer.add((waiter, loop, write, function))
        answer = await waiter
        if isinstance(answer, LongrunError):
            raise answer
        return answer

    async def _read(self, function: Callable[..., T], *args: Any) -> T:
        self._check_usable()
        if self._users == 0:  # closed: some stores can be read all the same, but no thread is kept for that
            return await apart(partial(function, *args))
        return await self._readers.run(function, *args)


def _nothing() -> None:
    """What the writer does when somebody only waits for his turn."""


def _is_news(save: Save) -> bool:
    """Whether others wait for such a save: it lets go, ends, or takes what somebody sent."""
    return save.head.owner is None or bool(save.take) or save.head.state.finished


class _Watcher:
    """One thread that waits for changes made elsewhere, and tells every loop that asked."""

    def __init__(self, backend: StoreBackend) -> None:
        self._backend = backend
        self._listeners: dict[object, tuple[Loop, Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.shared = False
        """Whether several listen, who have to be told of each other: executors, clients, a dashboard."""
        self.breaks = 0

    def add(self, loop: Loop, changed: Callable[[], object]) -> Callable[[], None]:
        mark = object()
        with self._lock:
            if self._thread is None:
                self._stopping.clear()
                thread = threading.Thread(target=self._run, name="longrun-watcher", daemon=True)
                thread.start()
                self._thread = thread
            self._listeners[mark] = (loop, changed)
            self.shared = len(self._listeners) > 1
        return lambda: self._remove(mark)

    def _remove(self, mark: object) -> None:
        with self._lock:
            self._listeners.pop(mark, None)
            self.shared = len(self._listeners) > 1

    def stop(self) -> None:
        self._stopping.set()
        self._backend.wake()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._thread = None

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                changed = self._backend.wait(1.0)
            except Exception as error:
                if not isinstance(error, LongrunError):
                    kind, error_type = self._backend.kind, type(error).__name__
                    get_logger().exception("store.watch_defect", kind=kind, error_type=error_type)
                self.breaks += 1
                self._stopping.wait(1.0)  # the store is away: look again in a while
                changed = True
            if changed:
                self.tell()

    def told(self, done: Done, answer: Any) -> None:
        """The answer to a save that is news: first to who made it."""
        done(answer)
        self.tell()

    def tell(self) -> None:
        """Something may have changed. A backend hears of others alone: who shares a store object tells each other."""
        with self._lock:
            listeners = list(self._listeners.values())
        for loop, function in listeners:
            loop.call_soon(function)
