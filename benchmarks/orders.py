"""What a job is, and what one child process is told: shared by the side that asks and the side that measures.

Place in the life of a measurement: before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from benchmarks.results import Figures, Row

Sizes = Mapping[str, int]
Samples = Mapping[str, Sequence[Figures]]
"""By role, one set of figures a round. A role that failed is missing."""

ALL_STORES = ("sqlite", "file", "postgres", "redis", "valkey")


@frozen(kw_only=True)
class Order:
    """One measurement: which job, which side of it, on which store, how large."""

    job: str
    role: str
    store: str
    url: str
    sizes: Mapping[str, int]
    asked: int
    """When the process was asked for, by the monotonic clock in nanoseconds: its start-up can be counted."""


@frozen(kw_only=True)
class Job:
    """A line of the catalogue. `measure` runs in a child, `rows` where the table is made."""

    name: str
    title: str
    roles: tuple[str, ...]
    """The sides that are measured, in turn, in every round."""
    measure: Callable[[Order], Figures]
    rows: Callable[[str, Samples, Sizes], list[Row]]
    full: Sizes
    short: Sizes | None = None
    """Sizes of the short form; None where it leaves the job out."""
    stores: tuple[str, ...] = ALL_STORES
    short_stores: tuple[str, ...] = ("sqlite", "file")
    short_without: tuple[str, ...] = ()
    """Roles that the short form leaves out: no ratio with a goal is taken from them."""
    lasting: tuple[str, ...] = ()
    """Roles whose place is made once and kept for all rounds, after a child in the role `prepare-<role>` filled it."""
    timeout: float = field(default=300.0)

    def runs_on(self, *, short: bool) -> tuple[str, ...]:
        """The stores it can be measured on; none where the short form leaves it out."""
        if not short:
            return self.stores
        return () if self.short is None else self.short_stores

    def sides(self, *, short: bool) -> tuple[str, ...]:
        """The roles of a round."""
        return tuple(role for role in self.roles if not (short and role in self.short_without))
