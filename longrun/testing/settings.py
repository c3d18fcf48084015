"""How executors run in tests that drive the clock.

Place in the life of an execution: none of its own.
"""

from __future__ import annotations

import os

from longrun.records import ExecutorConfig

YEAR = 365 * 86_400.0
CALM = ExecutorConfig(heartbeat_interval=YEAR, lease_ttl=30 * YEAR, checkpoint_interval=YEAR)
"""A config for tests that drive the clock: nothing beats in between, and a long sleep passes in one jump."""

CHILD = "LONGRUN_CRASH_CHILD"
"""Set in the environment of a child process of the crash matrix."""


def in_child() -> bool:
    """Whether this is such a child: the test module that it imports must not learn its points all over again."""
    return CHILD in os.environ
