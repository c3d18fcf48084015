"""What the programs of the peers share: how they are asked, and how they answer. The standard library alone.

Place in the life of a measurement: inside a peer's process. `python -m benchmarks.peers.peer_NAME JOB URL SIZES`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

BLOCKED = 5
"""The step, counted from 0, that is in flight when the process is killed."""
KILL_STEPS = 10

Figures = dict[str, float]
Jobs = dict[str, Callable[[str, dict[str, int]], Figures]]

ran: Counter[int] = Counter()


def note(step: int) -> None:
    """Count a step's body."""
    ran[step] += 1


def ready() -> None:
    print("READY", flush=True)


def rate(executions: int, steps: int, began: float) -> Figures:
    return {"steps_per_s": executions * steps / (time.perf_counter() - began)}


def recovered(sizes: dict[str, int]) -> Figures:
    """What a process tells that has finished what a killed one left."""
    again = sum(count for step, count in ran.items() if step < BLOCKED)
    return {"seconds": (time.monotonic_ns() - sizes["asked"]) / 1e9, "again": again}


def check(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{found!r} instead of {expected!r}")


def sqlite_path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def is_postgres(url: str) -> bool:
    return urlsplit(url).scheme == "postgresql"


def one_value(url: str, sql: str) -> Any:
    """The single value a query gives, past the peer's own code."""
    if not is_postgres(url):
        import sqlite3

        connection = sqlite3.connect(sqlite_path(url), timeout=60)
        try:
            return connection.execute(sql).fetchone()[0]
        finally:
            connection.close()
    import psycopg

    with psycopg.connect(url, autocommit=True) as session:
        row: Any = session.execute(sql).fetchone()
    return row[0]


def main(jobs: Jobs) -> None:
    job, url, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    print("RESULT " + json.dumps(jobs[job](url, sizes)), flush=True)
    os._exit(0)  # some peers have threads that would delay the end
