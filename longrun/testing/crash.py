"""`crash_matrix`: does a workflow survive a crash at every point of its life?

Place in the life of an execution: all of it. The workflow runs once undisturbed, to learn its points and its result.
Then once for each point: it crashes there, another program takes it up, and what came of it is held against the first.
"""

from __future__ import annotations

import contextlib
import operator
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
from attrs import field, frozen

from longrun import codec
from longrun.errors import ExecutionNotFoundError, InvalidStateError, StoreUnavailableError
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
MakeStore = Callable[[Path], CheckpointStore]


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _calm(given: ExecutorConfig | None) -> ExecutorConfig:
    return given or CALM


@frozen(kw_only=True)
class CrashPlan:
    """A workflow to be crashed: what to start, and how."""

    registry: StepRegistry
    workflow: Any
    state: Any = field(default=None, repr=False)
    effects: Effects | None = None
    tolerate: tuple[str, ...] = field(default=(), converter=_names)
    """Effects whose number a crash may change."""
    drive: Drive | None = None
    """Called in every program with the handle: sends the signals that the workflow waits for."""
    store: MakeStore | None = None
    """Makes a store in a directory of its own; without it, one in memory, or in files for programs that are killed."""
    config: ExecutorConfig = field(default=None, converter=_calm)
    awaits: bool = False
    """Whether each await of an async step is a point."""
    strict: bool = False
    same: Callable[[Any, Any], object] = operator.eq
    """Whether two results are the same."""
    timeout: float = 30.0
    """Real seconds that one program may take."""

    def __attrs_post_init__(self) -> None:
        """What cannot be started is refused here, and not in the middle of a program."""
        first = self.registry.get(self.registry.resolve(self.workflow).steps[0])
        codec.encode(self.state, Any if first is None else first.state_type)


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


Run = Callable[[CrashPoint | None], Awaitable[Course]]
"""Runs a plan to its end, with a crash at a point or undisturbed."""


@frozen
class CrashFailure:
    """A point at which a crash changed what came of the execution."""

    point: CrashPoint
    reason: str

    def __str__(self) -> str:
        return f"{self.point}: {self.reason}"


@frozen
class _Counted:
    point: CrashPoint
    name: str
    times: int
    """How often in all."""

    def __str__(self) -> str:
        return f"{self.point}: {self.name!r} happened {self.times} times"


@frozen
class DoubledEffect(_Counted):
    """An outside effect that happened more often because of a crash at a point."""


@frozen
class LostEffect(_Counted):
    """An outside effect that happened less often because of a crash at a point."""


@frozen(kw_only=True)
class CrashReport:
    """What became of the workflow at each point."""

    workflow: str
    points: tuple[CrashPoint, ...] = field(repr=False)
    failures: tuple[CrashFailure, ...] = ()
    doubled_effects: tuple[DoubledEffect, ...] = ()
    lost_effects: tuple[LostEffect, ...] = ()
    missed: tuple[CrashPoint, ...] = field(default=(), repr=False)
    """Points that the run meant to crash there never came to."""
    notes: tuple[str, ...] = ()
    """What the report should be read with: that the workflow fails, or that its result changes, without any crash."""

    @property
    def ok(self) -> bool:
        wrong = self.failures or self.doubled_effects or self.lost_effects
        return not wrong and len(self.missed) < len(self.points)

    def __str__(self) -> str:
        number = f"{len(self.points)} crash point{'' if len(self.points) == 1 else 's'}"
        lines = [f"{self.workflow}: {number}, {'all survived' if self.ok else 'NOT survived'}"]
        lines += [f"  {note}" for note in self.notes]
        for title, found in (
            ("the result changed", self.failures),
            ("an effect happened again", self.doubled_effects),
            ("an effect was lost", self.lost_effects),
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
    tolerate: str | Iterable[str] = (),
    drive: Drive | None = None,
    store: MakeStore | None = None,
    config: ExecutorConfig | None = None,
    awaits: bool = False,
    strict: bool = False,
    same: Callable[[Any, Any], object] = operator.eq,
    timeout: float = 30.0,
    points: Sequence[CrashPoint] | None = None,
    kill: bool = False,
) -> CrashReport:
    """Crash a workflow at every point (or at `points`), resume it, and compare.

    In the same process a crash abandons the executor where it stands; global variables outlast it. With `kill` each
    crash is a SIGKILL in a child process on a file store; the registry, `effects`, `drive` and `store` must then be
    names of importable modules. Steps that are to run in processes of their own run in threads here. Time is a
    `ManualClock`'s: sleeps, back-offs and timers pass at once; `timeout` are real seconds for one program.

    `tolerate` names effects that may happen again or not at all, `same` compares two results, `awaits` makes each await
    of an async step a point, `strict` passes states through the codec between steps, and `drive` is called with the
    handle in every program. `store` makes a store of your own in the empty directory that it is given, for each point
    anew; one program after the other opens it.
    """
    plan = CrashPlan(
        registry=registry,
        workflow=workflow,
        state=state,
        effects=effects,
        tolerate=tolerate,
        drive=drive,
        store=store,
        config=config,
        awaits=awaits,
        strict=strict,
        same=same,
        timeout=timeout,
    )
    run = runner_of(plan, kill=kill)
    whole = await run(None)
    return await judge(plan, run, whole, whole.points if points is None else points)


def runner_of(plan: CrashPlan, *, kill: bool) -> Run:
    if not kill:
        return World(plan).course
    from longrun.testing.crash_child import Children

    return Children(plan).course


async def judge(plan: CrashPlan, run: Run, whole: Course, points: Sequence[CrashPoint]) -> CrashReport:
    """Crash at these points, one after the other, and hold each course against the undisturbed one."""
    courses = [(point, await run(point)) for point in points]
    failures = tuple([one for point, course in courses for one in compare(plan, point, whole, course)])
    return CrashReport(
        workflow=plan.registry.resolve(plan.workflow).name,
        points=tuple(points),
        failures=failures,
        doubled_effects=tuple([one for point, course in courses for one in repeated(plan, point, whole, course)]),
        lost_effects=tuple([one for point, course in courses for one in lost(plan, point, whole, course)]),
        missed=tuple([point for point, course in courses if not course.fired]),
        notes=(*shortfall(whole), *(unsteady(plan, whole, await run(None)) if failures else ())),
    )


def shortfall(whole: Course) -> list[str]:
    """A workflow that does not come to its end by itself proves little by coming to none after a crash."""
    completed = whole.ending.state == ExecutionState.COMPLETED
    return [] if completed else [f"without any crash it ended {whole.ending}"]


def unsteady(plan: CrashPlan, whole: Course, again: Course) -> list[str]:
    """What changes by itself is not changed by a crash."""
    if _alike(plan, whole, again):
        return []
    return ["without any crash it ended differently a second time, too: `same` can leave that out of the comparison"]


def compare(plan: CrashPlan, point: CrashPoint, whole: Course, course: Course) -> list[CrashFailure]:
    """What a crash changed of the end."""
    if _alike(plan, whole, course):
        return []
    return [CrashFailure(point, f"it ended {course.ending}, and undisturbed {whole.ending}")]


def _alike(plan: CrashPlan, one: Course, other: Course) -> bool:
    first, second = one.ending, other.ending
    return first.state == second.state and bool(plan.same(first.result, second.result))


def repeated(plan: CrashPlan, point: CrashPoint, whole: Course, course: Course) -> list[DoubledEffect]:
    """The effects that a crash multiplied."""
    before, after = count(list(whole.effects)), count(list(course.effects))
    more: Counter[str] = after - before
    return [DoubledEffect(point, name, after[name]) for name in more if name not in plan.tolerate]


def lost(plan: CrashPlan, point: CrashPoint, whole: Course, course: Course) -> list[LostEffect]:
    """The effects that a crash has prevented."""
    before, after = count(list(whole.effects)), count(list(course.effects))
    return [LostEffect(point, name, after[name]) for name in before - after if name not in plan.tolerate]


class World:
    """Where programs live one after the other: the store and the clock outlast each of them."""

    def __init__(self, plan: CrashPlan) -> None:
        self._plan = plan

    async def course(self, target: CrashPoint | None) -> Course:
        """Run the workflow to its end, with a crash at the target if there is one."""
        clock = ManualClock(autojump=True)
        if self._plan.store is None:
            return await self._course(MemoryBackend(clock), clock, Probe(target))
        with tempfile.TemporaryDirectory(prefix="longrun-crash-") as place:
            return await self._course(self._plan.store(Path(place)).backend, clock, Probe(target))

    async def _course(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> Course:
        seen: list[Effect] = []
        with watching(self._plan.effects, probe, seen.append):
            for _ in range(LIVES):
                if await self.live(backend, clock, probe):
                    break
        return Course(ending_of(await what_is_left(backend)), tuple(seen), tuple(probe.points), probe.fired)

    async def live(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> bool:
        """One program, to the end of the execution or to its crash; whether the execution has ended."""
        loop, scope = current_loop(), anyio.CancelScope()
        probe.new_life(lambda: loop.call_soon(scope.cancel))
        try:
            with scope:
                await self.program(backend, clock, probe)
        except BaseException as error:
            if not probe.crashed or not _by_the_crash(error):
                raise
        return not probe.crashed

    async def program(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> None:
        """One program, in the time that it may take."""
        with anyio.move_on_after(self._plan.timeout) as limit:
            await self._program(backend, clock, probe)
        if limit.cancelled_caught:
            raise TimeoutError(f"after {self._plan.timeout:g} s {_where(await what_is_left(backend))}")

    async def _program(self, backend: StoreBackend, clock: ManualClock, probe: Probe) -> None:
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


def _where(loaded: Loaded | None) -> str:
    """Where an execution is that does not come to its end."""
    if loaded is None:
        return "the execution has not started"
    head, names = loaded.head, loaded.definition.steps
    if head.signal is not None:
        return f"it still waits for the signal {head.signal!r}: give a `drive` that sends it"
    step = f"step {head.step} {names[head.step]!r}" if head.step < len(names) else "the end"
    return f"the execution is {head.state} at {step}; `timeout` is what one program may take"


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


async def what_is_left(backend: StoreBackend) -> Loaded | None:
    """The execution as the programs have left it."""
    async with CheckpointStore(backend) as store:
        with contextlib.suppress(ExecutionNotFoundError):
            return await store.load(ID)
    return None


def ending_of(loaded: Loaded | None) -> Ending:
    if loaded is None:
        return Ending("lost", None, "the store does not have it")
    head, boundary = loaded.head, loaded.boundary
    if head.state is not ExecutionState.COMPLETED:
        return Ending(str(head.state), None, head.error or head.reason)
    return Ending(str(head.state), decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), Any))
