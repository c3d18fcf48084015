"""The contract of every store, in one place: what a backend must do, and nothing of how.

Place in the life of an execution: claim, checkpoint, finish. A `StoreBackend` is synchronous and small; the shared
`CheckpointStore` (in `store.py`) gives it group commit, sealing and an async face, the same on asyncio and trio.

Threads. `commit`, `claim`, `register`, `renew`, `unregister` and `delete` come from one writer
thread, one at a time. `wait` comes from one watcher thread. The other methods only read; they come from any thread, at
the same time as each other and as the writer. `open` comes first and `close` last, alone.

Errors. A failing disk or server is `StoreUnavailableError` with the driver's error as its cause; a driver's exception
never leaves a backend. Nothing is acknowledged that is not durable: when `commit` returns, every write that it answers
as done survives SIGKILL and, where the medium can, power loss. If `commit` raises, every write of the batch is
unknown, and its owner will repeat it with the same revision.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from longrun.errors import CorruptDataError, LongrunError
from longrun.records import ExecutionState
from longrun.stored import Boundary, Claim, Head, Loaded, Message, Owner, Query, Stored, Write

Answer = bool | int | None | LongrunError
"""What `commit` says of one write: Create → bool, Save → None, Send → int; a refusal is the error, returned."""

KEYS_REMEMBERED = 1024
"""Of the keys of messages that were taken, so many of each execution, the newest, are known again when they come."""


class StoreBackend(abc.ABC):
    """Keeps executions. Every method states its whole contract; the memory backend is its readable form."""

    kind: str
    """One word for messages: memory, file, sqlite, postgres, redis …"""
    durable: bool = True
    """Whether an acknowledged write survives the process."""
    fenced: bool = True
    """Whether the fence is compared and the write made in one atomic act, between processes too."""
    creates: bool = True
    """Whether `open` makes a store where there is none. Who only wants to look says no, and gets
    `StoreUnavailableError` from a backend that would leave an empty one behind."""
    poll_interval: float = 0.03
    """How often the default `wait` looks."""

    # life

    @abc.abstractmethod
    def open(self) -> None:
        """Make ready: create what is missing, migrate what is old, refuse what is newer (`NewerFormatError`) or not
        ours (`StoreSettingsError`). Safe when several processes do it at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to call twice."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Return if the store answers; raise `StoreUnavailableError` otherwise."""

    def describe(self) -> Mapping[str, object]:
        """Facts for `longrun doctor`: place (never a password), versions, settings that decide durability."""
        return {"kind": self.kind, "durable": self.durable, "fenced": self.fenced}

    # the writer

    @abc.abstractmethod
    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        """Apply each write in order, make all of them durable together, and answer each in its place.

        `Create`: if the id is free, store definition, head, boundary and blobs; True. If it is taken: change nothing;
        False.

        `Save`: find the head. No execution: `ExecutionNotFoundError`. Stored fence differs from `head.fence`:
        `LeaseLostError`. Stored revision at or past `head.revision`: done already, None. More than one behind it:
        `WriteOrderError`. Otherwise replace the head, append the boundaries, add the blobs; `clear` then `drop` then
        `put` the entries; remove the messages in `take` (remembering the keys of those that had one); strip the state
        from boundaries before `keep_from`; remove `drop_blobs`; if `steps` is given, the definition's `steps` and
        `total` become those. If the new head has no owner, is not finished and messages remain, `woken` is stored as
        true, so that a message that crossed this write is seen. When the new state is completed or cancelled, all
        entries and messages go; a failed execution keeps them, since `retry` goes on from there. One refused write
        leaves the others of the batch untouched.

        `Send`: append the message with the next id. A key seen before in this execution, taken or not, answers the id
        it got then. Where `limit` messages wait already, any other is refused: `SignalQueueFullError`. If nobody owns
        the execution and it is not finished, set `woken`. Wake whoever `wait`s, in other processes too.
        """

    @abc.abstractmethod
    def claim(self, claim: Claim) -> list[Loaded]:
        """Give up to `limit` executions to `claim.owner`, durably, oldest of the highest priority first.

        Given is what is in `states` and is owned by nobody or by one of `dead` (never what the claimer owns already,
        unless it names itself there); with `ids`, only those; without, only what is due: `initialized`, `waiting` and
        `resuming` need `woken`, no `due` and no `signal`, or `due <= now`; `running` is always due; `paused` and
        `blocked` are only given by `ids`. `workflows` and `queues` narrow it. Two claimers never get the same one.
        Each given head has `fence` + 1, the new owner, `woken` false, `crashes` + 1 if it was `running` or `resuming`
        under another owner, and is returned as stored, with everything that belongs to it. A claim whose answer was
        lost is given again at this owner's next claim, where the backend can lose answers.
        After this no write with the old fence is ever acknowledged.
        """

    @abc.abstractmethod
    def register(self, owner: Owner, ttl: float) -> None:
        """Store or replace an owner with a lease of `ttl` seconds from now, by the store's clock."""

    def register_other(self, owner: Owner, ttl: float) -> None:
        """The same for an owner that does not write through this backend: a replicated store brings one over. For a
        backend that keeps in memory what its own owners have stored."""
        self.register(owner, ttl)

    @abc.abstractmethod
    def renew(self, owner: str, ttl: float) -> bool:
        """Extend an owner's lease, which is all its executions' lease; False if it is not registered (any more)."""

    @abc.abstractmethod
    def unregister(self, owner: str) -> None:
        """Forget an owner, a dead one too. Its executions keep its name until they are claimed; an owner that is not
        registered counts as dead."""

    @abc.abstractmethod
    def delete(self, ids: Sequence[str]) -> list[bool]:
        """Remove each finished execution with all that belongs to it; False for what is not finished or not there.

        What `load` calls unreadable (`CorruptDataError`) is removed too, whatever its state: nobody can go on with it.
        Its bytes stay in quarantine (I5)."""

    # readers

    @abc.abstractmethod
    def load(self, id: str) -> Loaded | None:
        """Everything of one execution, consistent in itself; None if there is none.

        What does not fit its checksum goes into quarantine, and the newest readable boundary takes its place (I5): the
        returned head is moved back to it and `damage` says so. Nothing readable at all: `CorruptDataError`."""

    def head(self, id: str) -> Head | None:
        """The head of one execution, `woken` by what waits as `load` tells it; None if there is none. Where it cannot
        be read, what `load` says of that. It is asked before every signal. Without an override it comes from `load`,
        which reads the state and every message that waits: override it wherever a head can be read for less."""
        loaded = self.load(id)
        return None if loaded is None else loaded.head

    @abc.abstractmethod
    def find(self, query: Query) -> list[Stored]:
        """A page of executions, newest first (created, then id, descending), without reading states or step names."""

    @abc.abstractmethod
    def count(self, query: Query) -> dict[ExecutionState, int]:
        """How many match, by state. `limit` and `after` do not apply."""

    @abc.abstractmethod
    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        """The boundaries behind number `after`, oldest first, without their states; none if there is no execution."""

    @abc.abstractmethod
    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        """One boundary with its state and blobs; None if it or its state is gone; `CorruptDataError` if unreadable."""

    @abc.abstractmethod
    def messages(self, id: str) -> list[Message]:
        """The messages that wait, in order."""

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        """The state of each of these that is there; one that cannot be read counts as blocked. Without an override,
        each is loaded."""
        found: dict[str, ExecutionState] = {}
        for id in ids:
            try:
                loaded = self.load(id)
            except CorruptDataError:
                found[id] = ExecutionState.BLOCKED
            else:
                if loaded is not None:
                    found[id] = loaded.head.state
        return found

    @abc.abstractmethod
    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        """The number of the newest message that an execution was ever sent, and the numbers of the keys it remembers,
        taken or not: what an exact copy needs besides `load`. Zero and none if there is no execution."""

    @abc.abstractmethod
    def pending(self, owner: str) -> list[str]:
        """Ids of the executions of this owner that have messages."""

    @abc.abstractmethod
    def owners(self) -> list[Owner]:
        """Every registered owner."""

    @abc.abstractmethod
    def next_due(self) -> float | None:
        """The earliest moment at which something that nobody owns becomes due (0 if woken); None if nothing will."""

    @abc.abstractmethod
    def size(self, id: str) -> int:
        """Bytes that an execution takes, near enough; 0 if there is none."""

    # the watcher

    @abc.abstractmethod
    def wait(self, timeout: float) -> bool:
        """Return True as soon as another user of this store may have sent or taken a message, or created, released or
        finished something, since the last call; False after `timeout` seconds. Spurious True is harmless. An error says
        that the store was away: who owns something here then looks whether it is still as it was."""

    def wake(self) -> None:
        """Make a `wait` in progress return at once: the store is closing."""
