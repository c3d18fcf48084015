"""What a context needs from whoever runs the attempt: where it is, and a way to save, obey and report.

Place in the life of an execution: run a step. The runner has one for steps in this process; a child process has one
that speaks over its pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from attrs import field, frozen

from longrun.records import Progress

T = TypeVar("T")


@frozen(kw_only=True)
class StepInfo:
    """Where a step is: plain data that can cross a pipe."""

    execution_id: str
    workflow: str
    step: str
    step_index: int
    attempt: int
    iteration: int
    visit: int
    metadata: Mapping[str, Any]
    signal: Any = field(default=None, repr=False)
    timed_out: bool = False

    @property
    def idempotency_key(self) -> str:
        return f"{self.execution_id}:{self.visit}"


class Port(Protocol):
    """The attempt's side of a context."""

    save_at: float
    """When (monotonic) what was captured should be handed over to be saved."""

    @property
    def attention(self) -> bool:
        """Something may have to be obeyed at the next point: a pause, a cancel, a shutdown, the end of the attempt."""

    def check(self, *, blocking: bool = False) -> None:
        """Raise unless the context may be used now and, if it blocks, in this thread."""

    def hand_over(self) -> None:
        """Give what was captured to the writer, without waiting."""

    async def durable(self) -> None:
        """Save what was captured; durable on return."""

    async def obey(self) -> None:
        """Let a pause, a cancel or a shutdown take effect here; does not return if one does."""

    def must_stop(self) -> bool:
        """Whether `obey` would not return."""

    def report(self, progress: Progress) -> None:
        """Show how far the step is, unless it says so itself."""

    def announce(self, progress: Progress) -> None:
        """The step itself says how far it is."""

    def follow(self, source: Callable[[], Progress]) -> None:
        """Ask `source` how far the step is, unless it says so itself."""

    def time_left(self) -> float | None:
        """Seconds until this attempt is stopped, by its time-out or a shutdown; None if nothing stops it."""

    @property
    def shutting_down(self) -> bool: ...

    async def run_sync(self, function: Callable[..., T], *args: Any) -> T:
        """Run a plain function in a step thread."""

    async def start_child(self, workflow: Any, state: Any, key: str) -> Any:
        """Start another execution, once for this visit and key."""

    def call_from_thread(self, function: Callable[..., Any], *args: Any, lasting: bool = False) -> Any:
        """Run an async function in the loop and wait for it; for the step's own thread. With `lasting`, another step
        may have the thread's place meanwhile."""
