"""How a pair of stores is doing, as `status()` shows it.

Place in the life of an execution: beside it.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class SideStatus:
    """One of the two stores, as it was last seen."""

    kind: str
    healthy: bool
    problem: str | None


@frozen(kw_only=True)
class ReplicationStatus:
    """How a pair of stores is doing. Taken from memory: asking costs nothing and waits for nothing."""

    mode: str
    active: str | None
    """`primary` or `secondary`; None while it is not known, and `reason` says why."""
    standby: str | None
    """The other one is `level`, `joining` or `behind`."""
    generation: int
    failovers: int
    """Automatic ones since the count was last reset."""
    automatic: bool
    lag: int
    """Writes that are acknowledged and not copied yet (asynchronous mode)."""
    errors: int
    """Copies that failed and were tried again (asynchronous mode)."""
    unreadable: tuple[str, ...]
    """Executions that could not be copied because the active side cannot read them."""
    primary: SideStatus
    secondary: SideStatus
    reason: str | None = None
