"""How executors run in tests that drive the clock.

Place in the life of an execution: none of its own.
"""

from __future__ import annotations

from longrun.records import ExecutorConfig

DAY = 86_400.0
CALM = ExecutorConfig(heartbeat_interval=DAY, lease_ttl=30 * DAY, checkpoint_interval=DAY)
"""Nothing happens by the clock alone: every run is like the other, and a long sleep passes in one jump."""
