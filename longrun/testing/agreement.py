"""Crash points that every worker of pytest-xdist agrees on.

Place in the life of an execution: before it, while tests are collected. Each worker learns the points by a run of its
own, and no two runs need pass them in one order; but all workers must collect the same tests. So the first to have
learned them writes them down, in a directory that the plugin gives to all, and the others read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from longrun.testing.points import CrashPoint

_asked: Counter[tuple[str, str]] = Counter()


def agreed(place: str | None, module: str, workflow: str, points: Sequence[CrashPoint]) -> tuple[CrashPoint, ...]:
    """The points of whoever was first to ask for this workflow in this module, for the n-th time as we do."""
    _asked[module, workflow] += 1
    if place is None:
        return tuple(points)
    asked = f"{module}-{workflow}-{_asked[module, workflow]}"
    own, shared = Path(place, secrets.token_hex(8)), Path(place, hashlib.sha256(asked.encode()).hexdigest())
    own.write_text(json.dumps([attrs.astuple(point) for point in points]))
    with contextlib.suppress(FileExistsError):
        os.link(own, shared)  # complete from the first moment, and only once
    own.unlink()
    return tuple([CrashPoint(*point) for point in json.loads(shared.read_text())])
