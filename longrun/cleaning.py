"""Clear away what is of no more use: executions that retention lets go, and the lock files of the dead.

Place in the life of an execution: after its end. Nothing waits for it, neither a start nor an end, and what goes wrong
is logged: the next look, or the next program, tries again.
"""

from __future__ import annotations

import threading

from longrun import chance
from longrun.clock import Clock
from longrun.errors import LongrunError
from longrun.life import STALE, sweep_run_directory
from longrun.logging import Log
from longrun.records import RetentionPolicy
from longrun.stores.store import CheckpointStore

SOON = 0.25
"""Seconds after which an executor first looks for what is older than retention allows. A look reads of all that ever
ended, which would hold up the start and the end of a program that is over sooner."""
LATER = 5.0
"""Seconds after which it looks at the lock files. Of a crowded directory each name is a turn that the thread takes from
the steps, and a start after a crash has better things to do."""
BITS = 4
"""One executor of sixteen looks at once, so that programs that are over sooner clear away what they leave, too."""


async def clear_executions(store: CheckpointStore, policy: RetentionPolicy, clock: Clock, log: Log) -> None:
    """Remove finished executions past their time: soon for the first time, since a program may be over long before the
    second."""
    await clock.sleep(SOON if chance.bits(BITS) else 0.0)
    while True:
        began = clock.monotonic()
        try:
            removed = await store.gc(policy, clock.now())
        except LongrunError as error:
            log.warning("retention.failed", problem=str(error))
        except Exception as error:  # a defect of ours must not take the executions along
            log.exception("retention.defect", error_type=type(error).__name__)
        else:
            if removed:
                log.info("retention.removed", executions=removed)
        await clock.sleep(began + policy.interval - clock.monotonic())


async def clear_lock_files(clock: Clock, log: Log, lease_ttl: float) -> None:
    """In a thread of its own, which may outlive whoever asked. A file stays for twice the length of a lease at least:
    until then it is what proves the death."""

    def clear() -> None:
        try:
            sweep_run_directory(older_than=max(STALE, 2 * lease_ttl))
        except LongrunError as error:
            log.warning("lock_files.not_cleared", problem=str(error))
        except Exception as error:
            log.exception("lock_files.defect", error_type=type(error).__name__)

    await clock.sleep(LATER if chance.bits(BITS) else 0.0)
    try:
        threading.Thread(target=clear, name="longrun-clear", daemon=True).start()
    except RuntimeError:  # no more threads are to be had
        log.warning("lock_files.not_cleared", problem="no thread could be started")
