"""`crash_matrix`: does a workflow survive a crash at every point of its life?

Place in the life of an execution: all of it. The workflow runs once undisturbed, to learn its points and its result.
Then once for each point: it crashes there, another program takes it up, and what came of it is held against the first.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
from attrs import field, frozen

from longrun.errors import InvalidStateError, StoreUnavailableError
from longrun.handle import ExecutionHandle
from longrun.loops import current_loop
from longrun.records import ExecutionState, ExecutorConfig
from longrun.registry import StepRegistry
from longrun.snapshot import decode_state
from longrun.stored import Loaded
from longrun.stores.base import StoreBackend
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.clock import ManualClock
from longrun.testing.effects import Effect, Effects, count
from longrun.testing.mortal import MortalExecutor, only_crashes
from longrun.testing.points import CrashPoint, Probe, ProbedBackend
from longrun.testing.settings import CALM

ID = "crash-test"
LIVES = 20
"""Programs that may follow one another before a point counts as never coming to an end."""

Drive = Callable[[ExecutionHandle], Awaitable[object]]


@frozen(kw_only=True)
class CrashPlan:
    """A workflow to be crashed: what to start, and how."""

    registry: StepRegistry
    workflow: Any
    state: Any = field(default=None, repr=False)
    effects: Effects | None = None
    tolerate: tuple[str, ...] = ()
    """Effects that may happen twice."""
    drive: Drive | None = None
    """Called in every program with the handle: sends the signals that the workflow waits for."""
    config: ExecutorConfig = CALM
    awaits: bool = False
    """Whether each await of an async step is a point."""
    strict: bool = False
    same: Callable[[Any, Any], object] = operator.eq
    """Whether two results are the same."""
    timeout: float = 30.0
    """Real seconds that one program may take."""


@frozen
class Ending:
    """How an execution ended, as the store has it."""

    state: str
    result: Any = field(repr=False)
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.state} with {self.result!r}" if self.error is None else f"{self.state}: {self.error}"


@frozen
class Course:
    """One run of the workflow, over all the programs it took."""

    ending: Ending
    effects: tuple[Effect, ...]
    points: tuple[CrashPoint, ...]
    fired: bool


@frozen
class CrashFailure:
    """A point at which a crash changed what came of the execution."""

    point: CrashPoint
    reason: str

    def __str__(self) -> str:
        return f"{self.point}: {self.reason}"


@frozen
class DoubledEffect:
    """An outside effect that happened more often because of a crash at a point."""

    point: CrashPoint
    name: str
    times: int
    """How often in all."""

    def __str__(self) -> str:
        return f"{self.point}: {self.name!r} happened {self.times} times"


@frozen(kw_only=True)
class CrashReport:
    """What became of the workflow at each point."""

    workflow: str
    points: tuple[CrashPoint, ...] = field(repr=False)
    failures: tuple[CrashFailure, ...] = ()
    doubled_effects: tuple[DoubledEffect, ...] = ()
    missed: tuple[CrashPoint, ...] = field(default=(), repr=False)
    """Points that the run meant to crash there never came to."""

    @property
    def ok(self) -> bool:
        return not self.failures and not self.doubled_effects and len(self.missed) < len(self.points)

    def __str__(self) -> str:
        lines = [f"{self.workflow}: {len(self.points)} crash points, {'all survived' if self.ok else 'NOT survived'}"]
        for title, found in (
            ("the result changed", self.failures),
            ("an effect happened twice", self.doubled_effects),
            ("never reached again", self.missed),
        ):
            lines += [f"  {title}: {len(found)}"] if found else []
            lines += [f"    {one}" for one in found]
        return "\n".join(lines)

    def check(self) -> None:
        """Raise `AssertionError` with the report if it is not ok."""
        if not self.ok:
            raise AssertionError(str(self))


async def crash_matrix(
    registry: StepRegistry,
    workflow: Any,
    state: Any = None,
    *,
    effects: Effects | None = None,
    tolerate: Iterable[str] = (),
    drive: Drive | None = None,
    config: ExecutorConfig | None = None,
    awaits: bool = False,
    strict: bool = False,
    same: Callable[[Any, Any], object] = operator.eq,
    timeout: float = 30.0,
    points: Sequence[CrashPoint] | None = None,
    kill: bool = False,
) -> CrashReport:
    """Crash a workflow at every point (or at `points`), resume it, and compare.

    In the same process a crash abandons the executor where it stands. With `kill` each crash is a SIGKILL in a child
    process on a file store; the registry, `effects` and `drive` must then be names of importable modules.
    Time is a `ManualClock`'s: sleeps, back-offs and timers pass at once.
    """
    plan = CrashPlan(
        registry=registry,
        workflow=workflow,
        state=state,
        effects=effects,
        tolerate=tuple(tolerate),
        drive=drive,
        config=config or CALM,
        awaits=awaits,
        strict=strict,
        same=same,
        timeout=timeout,
    )
    run = _run_in_children(plan) if kill else None
    return await matrix(plan, points, run)


def _run_in_children(plan: CrashPlan) -> Callable[[CrashPoint | None], Awaitable[Course]]:
    from longrun.testing.crash_child import Children

    return Children(plan).course


async def matrix(
    plan: CrashPlan,
    points: Sequence[CrashPoint] | None = None,
    run: Callable[[CrashPoint | None], Awaitable[Course]] | None = None,
) -> CrashReport:
    run = run or World(plan).course
    whole = await run(None)
    chosen = tuple(whole.points if points is None else points)
    verdicts = [judge(plan, whole, point, await run(point)) for point in chosen]
    return CrashReport(
        workflow=plan.registry.resolve(plan.workflow).name,
        points=chosen,
        failures=tuple([one for report in verdicts for one in report.failures]),
        doubled_effects=tuple([one for report in verdicts for one in report.doubled_effects]),
        missed=tuple([one for report in verdicts for one in report.missed]),
    )


def judge(plan: CrashPlan, whole: Course, point: CrashPoint, course: Course) -> CrashReport:
    """The report on one point."""
    return CrashReport(
        workflow=plan.registry.resolve(plan.workflow).name,
        points=(point,),
        failures=tuple(compare(plan, point, whole, course)),
        doubled_effects=tuple(repeated(plan, point, whole, course)),
        missed=() if course.fired else (point,),
    )


def compare(plan: CrashPlan, point: CrashPoint, whole: Course, course: Course) -> list[CrashFailure]:
    """What a crash changed of the end."""
    first, second = whole.ending, course.ending
    if first.state == second.state and bool(plan.same(first.result, second.result)):
        return []
    return [CrashFailure(point, f"it ended {second}, and undisturbed {first}")]


def repeated(plan: CrashPlan, point: CrashPoint, whole: Course, course: Course) -> list[DoubledEffect]:
    """The effects that a crash multiplied."""
    before, after = count(list(whole.effects)), count(list(course.effects))
    more: Counter[str] = after - before
    return [DoubledEffect(point, name, after[name]) for name in more if name not in plan.tolerate]


class World:
    """Where programs live one after the other: the store and the clock outlast each of them."""

    def __init__(self, plan: CrashPlan, make_backend: Callable[[ManualClock], StoreBackend] = MemoryBackend) -> None:
        self._plan = plan
        self._make_backend = make_backend

    async def course(self, target: CrashPoint | None) -> Course:
        """Run the workflow to its end, with a crash at the target if there is one."""
        probe = Probe(target)
        clock = ManualClock(autojump=True)
        backend = self._make_backend(clock)
        seen: list[Effect] = []
        with watching(self._plan.effects, probe, seen.append):
            for _ in range(LIVES):
                if await self.live(backend, clock, probe):
                    break
        ending = ending_of(backend.load(ID))
        return Course(ending, tuple(seen), tuple(probe.points), probe.fired)

    async def live(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> bool:
        """One program, to the end of the execution or to its crash; whether the execution has ended."""
        loop, scope = current_loop(), anyio.CancelScope()
        probe.new_life(lambda: loop.call_soon(scope.cancel))
        try:
            with scope, anyio.fail_after(self._plan.timeout):
                await self.program(backend, clock, probe)
        except BaseException as error:
            if not probe.crashed or not _by_the_crash(error):
                raise
        return not probe.crashed

    async def program(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> None:
        plan = self._plan
        store = CheckpointStore(ProbedBackend(backend, probe))
        executor = MortalExecutor(
            plan.registry, probe, awaits=plan.awaits, store=store, config=plan.config, clock=clock, strict=plan.strict
        )
        async with executor, anyio.create_task_group() as tasks:
            run = await executor.start(plan.workflow, plan.state, id=ID)
            if plan.drive is not None:
                tasks.start_soon(_drive, plan.drive, run, name="longrun-test-drive")
            await run.wait(ExecutionState.BLOCKED)
            tasks.cancel_scope.cancel()


async def _drive(drive: Drive, run: ExecutionHandle) -> None:
    with contextlib.suppress(InvalidStateError):  # the execution has ended: an earlier program had sent it everything
        await drive(run)


def _by_the_crash(error: BaseException) -> bool:
    """Whether an error is only what a program sees of its own death: the store that it has lost, for one."""
    if isinstance(error, BaseExceptionGroup):
        return all(_by_the_crash(one) for one in error.exceptions)
    return isinstance(error, StoreUnavailableError) or only_crashes(error)


class watching:  # noqa: N801 -- used as a with-statement's verb
    """While this is entered, each effect is noted and is a point; a dead program has none."""

    def __init__(self, effects: Effects | None, probe: Probe, note: Callable[[Effect], object]) -> None:
        self._effects, self._probe, self._note = effects, probe, note

    def __enter__(self) -> None:
        if self._effects is not None:
            self._effects.watched(self._effect)

    def __exit__(self, *exception: object) -> None:
        if self._effects is not None:
            self._effects.watched(None)

    def _effect(self, name: str, key: str | None) -> None:
        self._probe.pass_through("before", f"the effect {name!r}")
        self._note((name, key))
        self._probe.pass_through("after", f"the effect {name!r}")


def ending_of(loaded: Loaded | None) -> Ending:
    if loaded is None:
        return Ending("lost", None, "the store does not have it")
    head, boundary = loaded.head, loaded.boundary
    if head.state is not ExecutionState.COMPLETED:
        return Ending(str(head.state), None, head.error or head.reason)
    return Ending(str(head.state), decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), Any))
