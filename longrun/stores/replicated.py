"""Executions in two stores: one goes on when the other dies, and takes it back when it has caught up.

Place in the life of an execution: claim, checkpoint, finish. Any two stores will do, of the same kind or of two kinds.
"""

from __future__ import annotations

import threading

import anyio.to_thread

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ConfigError
from longrun.seal import Seal
from longrun.stores._replicated.council import Rules
from longrun.stores._replicated.status import ReplicationStatus, SideStatus
from longrun.stores._replicated.tending import TendedBackend, Times
from longrun.stores._replicated.witness import DirectoryWitness, StoreWitness, Witness
from longrun.stores.base import StoreBackend
from longrun.stores.store import CheckpointStore

MODES = ("sync", "async")


class ReplicatedCheckpointStore(CheckpointStore):
    """Two stores that hold the same. It takes over their backends: do not open the two beside it.

    `mode="sync"`: a write is acknowledged when both stores have it, so failing over loses nothing (I13). If the standby
    does not answer, work goes on with the active store alone; from then on the standby is `behind`, and cannot become
    active before it was brought up to date. `mode="async"`: a write is acknowledged when the active store has it, and
    is copied in order from a bounded queue; a full queue makes writers wait, nothing is dropped. What was not copied
    when the active store *and* this process died is missing after a failover (`status().lag` says how much that would
    be); closing copies it, or leaves the standby `behind`. An execution that only the old store has is taken back from
    it when it returns, unless it was deleted. Where both stores answer, the two exchange their parts (by hand, or back
    to the primary) only when everything on them was compared, with every write of every process on both meanwhile: also
    what another process had in its queue is there.

    A store that comes back is not used as it is. Every new write reaches it first, then everything on the two is
    compared, and what differs is copied or deleted; `failback_after` seconds after it is level, the primary becomes
    active again. Every change of parts has a generation number, which both stores keep: a store with an older one is
    refused until it was brought up to date, also by a process that has just started.

    All processes give the same two in the same order: each store keeps the name of the pair and which part it has. The
    other order is refused, and so is a store of another pair, and an empty one that knows nothing of this pair: its URL
    may be mistyped. If a store is lost, `replace` (or `longrun store replace`) puts an empty one in its place; the lost
    one is refused from then on. Whoever replaces a store says that no process uses it any more: one that does stops
    when it sees the new term, at the latest at its next check. Only a standby that is `behind` anyway does not keep the
    other store from going on; `status().reason` says why it is not brought up to date. A store that loses everything
    while the pair is at work (a Redis without a file of its own that is started again, say) is lost too, although it
    answers: it is noticed before anything on the other one is changed for that.

    **Who may decide.** Automatic failover needs a `witness`, which all processes share, or `single_process=True`, which
    says that nobody else uses the two stores. Without either, a dead primary makes calls fail until somebody calls
    `failover()` in one process; the others follow.

    **Under a partition**, plainly:

    - With a witness, whoever reaches the witness and one store goes on; whoever does not reach the witness can neither
      fail over nor drop a store. If the witness is away, work goes on as long as both stores answer; if the witness and
      a store are away, writes fail until one of them is back. The witness must not share a machine with a store.
    - With `single_process=True`, a store that cannot be reached counts as dead. That is right only if it is true that
      nobody else writes; a second process that says the same is noticed within `health_interval`, not at once. Then
      the one that was first does nothing more before it is opened again.
    - With neither, `failover()` is a statement by whoever calls it: that no process still writes to the old active
      store, and that `status()` last showed the standby `level`. If either is wrong, two processes can both go on with
      one execution, and acknowledged writes can be lost: across a failover by hand I3 is not promised.
    - A process that starts while one store is away uses the other only if the witness says so, or if the stored
      record says that it was alone before. Otherwise it waits: the store that is away may be the newer one.
    - A store that is set back to an older copy of itself is noticed only if its generation is older too.
    - A store that hangs is away when its driver says so: Redis after its time-outs, some of them one after another;
      PostgreSQL when its connection breaks, which that to a server that is frozen, and not dead, does not. Until then a
      synchronous pair waits, and so does everybody whose active store it is.

    The number of automatic failovers is bounded by `max_failovers`; it starts again from nothing when the two have been
    level for `failover_reset` seconds, and after a `failover()` by hand. States are sealed once, by the primary's
    `Seal` or by `seal`; both stores hold the same bytes.
    """

    backend: TendedBackend

    def __init__(
        self,
        primary: CheckpointStore | StoreBackend,
        secondary: CheckpointStore | StoreBackend,
        *,
        mode: str = "sync",
        witness: Witness | None = None,
        single_process: bool = False,
        health_interval: float | None = 5.0,
        max_failovers: int = 3,
        failover_reset: float = 3600.0,
        failback_after: float | None = 300.0,
        strikes: int = 3,
        queue_limit: int = 10_000,
        seal: Seal | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if mode not in MODES:
            raise ConfigError("mode", mode, "give 'sync' or 'async'")
        _check_counts(max_failovers=max_failovers, strikes=strikes, queue_limit=queue_limit)
        _check_seconds(health_interval=health_interval, failover_reset=failover_reset, failback_after=failback_after)
        if _backend(primary) is _backend(secondary):
            raise ConfigError("secondary", secondary, "give two different stores")
        backend = TendedBackend(
            _backend(primary),
            _backend(secondary),
            witness=witness,
            rules=Rules(
                asynchronous=mode == "async", alone=single_process, max_failovers=max_failovers, strikes=strikes
            ),
            times=Times(health_interval=health_interval, failover_reset=failover_reset, failback_after=failback_after),
            queue_limit=queue_limit,
            clock=clock,
        )
        super().__init__(backend, seal=seal or _seal_of(primary, secondary))

    def status(self) -> ReplicationStatus:
        return self.backend.status()

    async def failover(self, *, force: bool = False) -> None:
        """Make the standby active, by hand. `force` takes one that is not level, and loses what it lacks."""
        await anyio.to_thread.run_sync(lambda: self.backend.failover(force=force))

    async def replace(self, part: str, *, force: bool = False) -> None:
        """Put the store that is given as `part` ('primary' or 'secondary'), which is new and empty, in the place of one
        that is lost; the other one is active then. The pair may be open or not. `force` where the lost store may have
        had more: that is lost too."""
        await anyio.to_thread.run_sync(lambda: self.backend.replace(part, force=force))

    async def check(self) -> None:
        """One round of looking after the pair, now instead of at the next `health_interval`."""
        await anyio.to_thread.run_sync(self.backend.check)

    async def resync(self) -> None:
        """Compare everything on the two stores now, and make the standby equal to the active one."""
        await anyio.to_thread.run_sync(self.backend.resync)


def _backend(store: CheckpointStore | StoreBackend) -> StoreBackend:
    return store.backend if isinstance(store, CheckpointStore) else store


def _seal_of(primary: CheckpointStore | StoreBackend, secondary: CheckpointStore | StoreBackend) -> Seal | None:
    """The primary's. Two that differ in whether they encrypt would leave one store in the open."""
    seals = [store.seal if isinstance(store, CheckpointStore) else None for store in (primary, secondary)]
    encrypted = [seal is not None and seal.encrypts for seal in seals]
    if encrypted[1] and not encrypted[0]:
        raise ConfigError("seal", seals[1], "give the seal to the replicated store: it seals for both")
    return seals[0]


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        least = 0 if name == "max_failovers" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(name, value, f"give a whole number from {least} on")


def _check_seconds(**times: object) -> None:
    for name, value in times.items():
        never = value is None and name != "failover_reset"
        if not never and (isinstance(value, bool) or not isinstance(value, int | float) or not _waits(name, value)):
            more = "more than 0" if name == "health_interval" else "0 or more"
            raise ConfigError(name, value, f"give a number of seconds, {more} and at most {threading.TIMEOUT_MAX:.0f}")


def _waits(name: str, seconds: float) -> bool:
    """Whether a thread can wait so long; between two rounds, whether it waits at all."""
    return 0 <= seconds <= threading.TIMEOUT_MAX and (seconds > 0 or name != "health_interval")


__all__ = [
    "DirectoryWitness",
    "ReplicatedCheckpointStore",
    "ReplicationStatus",
    "SideStatus",
    "StoreWitness",
    "Witness",
]
