"""An executor that can die in the middle of a test: nothing is drained, nothing given back, its lock is left as a crash
leaves it.

Place in the life of an execution: from its start to the crash.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from longrun.attempt import Engine
from longrun.events import EventType
from longrun.executor import Executor
from longrun.logging import Log
from longrun.registry import Step, StepRegistry
from longrun.testing.points import Probe, ProbedEngine, SimulatedCrash, describe_event


class MortalExecutor(Executor):
    """Dies when its probe says so. Steps that were to run in child processes run in threads."""

    def __init__(self, registry: StepRegistry, probe: Probe, *, awaits: bool = False, **options: Any) -> None:
        super().__init__(registry, on_event=_ignore, **options)  # somebody listens, so that events are told
        self._probe = probe
        self._probed = ProbedEngine(probe, awaits=awaits)
        self.log = _UntilDeath(probe)

    @property
    def alive(self) -> bool:
        return not self._probe.crashed

    def engine(self, step: Step) -> Engine:
        return self._probed

    def emit(self, kind: EventType, execution_id: str, **fields: Any) -> None:
        what = describe_event(kind, execution_id, fields.get("step"))
        if what is None or not self._probe.reach("at", what):
            super().emit(kind, execution_id, **fields)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._probe.crashed:
            await super().__aexit__(kind, error, trace)
            return
        self._signed_on = False
        self.draining = self.closed = True
        self._unwatch()
        self.keeper.stop()
        self.bus.close()
        self.threads.close()
        self._lock.abandon()
        self.look()
        try:
            await self.sign_off()
        except BaseException as left:
            if not only_crashes(left):
                raise
        finally:
            await self.store.aclose()


class _UntilDeath(Log):
    """A logger that the dead do not use: what they would say of the store they have lost means nothing."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe

    def _log(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        if not self._probe.crashed:
            super()._log(method, level, event, fields)


async def _ignore(event: object) -> None:
    pass


def only_crashes(error: BaseException) -> bool:
    """Whether an error is nothing but simulated crashes."""
    if isinstance(error, BaseExceptionGroup):
        return all(only_crashes(one) for one in error.exceptions)
    return isinstance(error, SimulatedCrash)
