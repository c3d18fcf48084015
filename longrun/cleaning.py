"""Clear away what is of no more use: the lock files of the dead.

Place in the life of an execution: after its end. Nothing waits for it, neither a start nor an end, and what goes wrong
is logged: the next program tries again.
"""

from __future__ import annotations

import threading

from longrun.errors import LongrunError
from longrun.life import STALE, sweep_run_directory
from longrun.logging import Log


def clear_lock_files(log: Log, lease_ttl: float) -> None:
    """In a thread of its own, which may outlive whoever asked. A file stays for twice the length of a lease at least:
    until then it is what proves the death."""

    def clear() -> None:
        try:
            sweep_run_directory(older_than=max(STALE, 2 * lease_ttl))
        except LongrunError as error:
            log.warning("lock_files.not_cleared", problem=str(error))
        except Exception as error:
            log.exception("lock_files.defect", error_type=type(error).__name__)

    try:
        threading.Thread(target=clear, name="longrun-clear", daemon=True).start()
    except RuntimeError:  # no more threads are to be had
        log.warning("lock_files.not_cleared", problem="no thread could be started")
