"""What a resume would do, without doing it: steps skipped, the step that runs again and from where, what is in the way.

Place in the life of an execution: before it is taken up again, for instance before new code is deployed. Nothing is
claimed and nothing is written. The rules are those of the pass at start (`sweep`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from urllib.parse import unquote

import attrs
from attrs import field, frozen

from longrun import codec, lease
from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import CodecError, RegistrationError
from longrun.records import UNFINISHED, ExecutionState, ExecutorConfig, check_id
from longrun.registry import AD_HOC, StepRegistry
from longrun.snapshot import decode_state
from longrun.stored import Loaded, Query, blocked_for_good
from longrun.stores.store import CheckpointStore

State = ExecutionState
PAGE = 200
IN_FLIGHT = frozenset({State.RUNNING, State.RESUMING})
"""To claim such a one from a dead owner counts as a crash."""


@frozen(kw_only=True)
class InStep:
    """Progress inside the step in flight that a resume keeps: a loop, a map, or memos."""

    kind: str
    """each, map or once."""
    name: str
    done: int
    total: int | None = None


@frozen(kw_only=True)
class ResumePlan:
    """What would become of one execution if a program with this registry started now."""

    id: str
    workflow: str
    state: ExecutionState
    action: str
    """start, run-again, go-on, wait, finish; stay (held, or over), leave (not ours, or in living hands), block."""
    reason: str
    step: int
    """The index of the step that would run next."""
    total: int
    step_name: str | None
    skipped: tuple[str, ...] = field(default=(), repr=False)
    """The steps before it, which would not run again."""
    inside: tuple[InStep, ...] = ()
    missing: tuple[str, ...] = ()
    """Steps still to run that the code does not have."""
    misfit: str | None = field(default=None, repr=False)
    """How the stored state does not fit its type any more."""
    owner: str | None = None
    owner_alive: bool = False
    at_risk: float | None = None
    """Seconds since the last save of what is in flight: work that a crash now would cost."""
    version: str = "1"
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and why."""

    @property
    def blocked(self) -> bool:
        return self.action == "block"


class Planner:
    """Makes plans for the executions of one store."""

    def __init__(
        self,
        store: CheckpointStore,
        registry: StepRegistry | None = None,
        config: ExecutorConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store, self._registry, self._clock = store, registry, clock
        self._config = config or ExecutorConfig()

    async def all(self) -> AsyncIterator[ResumePlan]:
        """The plans of everything unfinished, newest first."""
        alive = await self._alive()
        query = Query(states=UNFINISHED, limit=PAGE)
        while page := await self._store.find(query):
            last = page[-1].definition
            query = attrs.evolve(query, after=(last.created, last.id))
            for stored in page:
                yield await self._read(stored.definition.id, alive)

    async def some(self, ids: Iterable[str]) -> AsyncIterator[ResumePlan]:
        alive = await self._alive()
        for id in ids:
            yield await self._read(check_id(id), alive)

    async def _alive(self) -> frozenset[str]:
        return lease.alive(await self._store.owners())

    async def _read(self, id: str, alive: frozenset[str]) -> ResumePlan:
        try:
            loaded = await self._store.load(id)
        except CodecError as error:
            found = await self._store.find(Query(text=id, limit=PAGE))
            name = next((one.definition.workflow for one in found if one.definition.id == id), "")
            return ResumePlan(
                id=id,
                workflow=name,
                state=State.BLOCKED,
                action="block",
                reason=f"it cannot be read: {error}",
                step=0,
                total=0,
                step_name=None,
            )
        return self.plan(loaded, alive)

    def plan(self, loaded: Loaded, alive: frozenset[str] = frozenset()) -> ResumePlan:
        """The plan of an execution that was loaded; `alive` are the owners that live."""
        head, definition = loaded.head, loaded.definition
        steps = definition.steps or self._steps_of(definition.workflow)
        draft = ResumePlan(
            id=definition.id,
            workflow=definition.workflow,
            state=head.state,
            action="go-on",
            reason="",
            step=head.step,
            total=len(steps),
            step_name=steps[head.step] if head.step < len(steps) else None,
            skipped=steps[: head.step],
            inside=in_step(loaded),
            owner=head.owner,
            owner_alive=head.owner in alive,
            at_risk=self._at_risk(loaded, alive),
            version=definition.version,
            notes=self._notes(loaded),
            unchecked=() if self._registry is not None else ("no registry was given: missing steps and state types",),
        )
        draft = self._checked(draft, loaded, steps)
        action, reason = self._action(draft, loaded)
        return attrs.evolve(draft, action=action, reason=reason)

    def _steps_of(self, workflow: str) -> tuple[str, ...]:
        """The steps of what was submitted by name alone: whoever first runs it supplies them."""
        if self._registry is None or workflow.startswith(AD_HOC) or not self._registry.knows(workflow):
            return ()
        return self._registry.resolve(workflow).steps

    def _at_risk(self, loaded: Loaded, alive: frozenset[str]) -> float | None:
        head = loaded.head
        if head.state is not State.RUNNING or head.owner not in alive:
            return None
        return max(0.0, self._clock.now() - head.updated)

    def _notes(self, loaded: Loaded) -> tuple[str, ...]:
        notes = list(loaded.damage)
        definition = loaded.definition
        ours = self._registry is not None and self._registry.knows(definition.workflow, definition.steps)
        if ours and self._registry is not None and not definition.workflow.startswith(AD_HOC):
            workflow = self._registry.resolve(definition.workflow)
            if definition.steps and workflow.steps != definition.steps:
                notes.append("the code lists other steps now; the stored list rules this execution")
            if definition.steps and workflow.version != definition.version:
                notes.append(f"it was started by version {definition.version}, the code has {workflow.version}")
        waiting = [message.kind for message in loaded.messages if message.kind != "signal"]
        if waiting:
            notes.append(f"requests wait to be obeyed first: {', '.join(waiting)}")
        if loaded.head.crashes:
            notes.append(f"its process died {loaded.head.crashes} times since its last progress")
        return tuple(notes)

    def _checked(self, draft: ResumePlan, loaded: Loaded, steps: tuple[str, ...]) -> ResumePlan:
        """The plan with what the code says about it: steps that are missing, a state that no longer fits."""
        registry = self._registry
        if registry is None or not registry.knows(draft.workflow, steps) or draft.state.finished:
            return draft
        missing = tuple(dict.fromkeys(name for name in steps[draft.step :] if registry.get(name) is None))
        step = None if draft.step_name is None else registry.get(draft.step_name)
        misfit = None
        if step is not None:
            boundary = loaded.boundary
            try:
                decode_state(boundary.data or b"null", loaded.blobs, bool(boundary.blobs), step.state_type)
            except (CodecError, RegistrationError) as error:
                misfit = str(error)
        return attrs.evolve(draft, missing=missing, misfit=misfit)

    def _action(self, draft: ResumePlan, loaded: Loaded) -> tuple[str, str]:
        state = draft.state
        if state.finished:
            return "stay", f"it is {state.value}" + ("; retry runs it again" if state is State.FAILED else "")
        if self._registry is not None and not self._registry.knows(draft.workflow, loaded.definition.steps):
            return "leave", "its workflow is not registered here"
        problem = self._in_the_way(draft, loaded)
        if problem is not None:
            return "block", problem
        if draft.owner_alive:
            return "leave", f"{draft.owner} is alive and has it"
        return self._next(draft, loaded)

    def _in_the_way(self, draft: ResumePlan, loaded: Loaded) -> str | None:
        if draft.missing:
            return f"the code has no step {', '.join(map(repr, draft.missing))}"
        if draft.misfit is not None:
            return draft.misfit
        dies_now = draft.state in IN_FLIGHT and draft.owner is not None and not draft.owner_alive
        crashes = loaded.head.crashes + dies_now
        if crashes >= self._config.max_crashes:
            return f"its process died {crashes} times without progress; resume frees it"
        if loaded.damage and self._config.on_corruption == "block":
            return "; ".join(loaded.damage)
        if blocked_for_good(loaded.head):
            return loaded.head.reason or "it is blocked until somebody resumes it"
        if draft.state is State.BLOCKED and self._registry is None:
            return loaded.head.reason or "it is blocked"
        return None

    def _next(self, draft: ResumePlan, loaded: Loaded) -> tuple[str, str]:
        head = loaded.head
        where = f"step {draft.step + 1} of {draft.total}" if draft.total else "its first step"
        if draft.state is State.PAUSED and head.hold:
            return "stay", "it is paused and held until somebody resumes it"
        later = head.due is not None and head.due > self._clock.now()
        sent = any(message.name == head.signal for message in loaded.messages)
        if head.signal is not None and not sent and (later or head.due is None):
            return "wait", f"for signal {head.signal!r}"
        if head.signal is None and later and not head.attempt:
            return "wait", "for its time to come"
        if draft.state is State.INITIALIZED:
            return "start", "it was submitted and nobody has begun it"
        if draft.total and draft.step >= draft.total:
            return "finish", "all its steps are done"
        if draft.inside:
            return "run-again", f"{where} goes on inside: {'; '.join(map(describe, draft.inside))}"
        if draft.state in (State.RUNNING, State.RESUMING):
            return "run-again", f"{where} runs again from its beginning"
        return "go-on", f"{where} is next"


def describe(inside: InStep) -> str:
    """A few words on progress that is kept: `pages: item 312 of 1000`."""
    of = "" if inside.total is None else f" of {inside.total}"
    if inside.kind == "each":
        return f"{inside.name}: from item {inside.done + 1}{of}"
    if inside.kind == "map":
        return f"{inside.name}: {inside.done}{of} branches done"
    return f"{inside.done} calls of once done"


def in_step(loaded: Loaded) -> tuple[InStep, ...]:
    """The progress inside the step in flight, as its entries tell; what stands inside an item is left out."""
    found: list[InStep] = []
    memos = 0
    for key in sorted(loaded.entries):
        kind, colon, name = key.partition(":")
        if not colon or "/" in key:
            continue
        if kind == "once":
            memos += 1
        elif kind == "each":
            cursor = codec.loads(loaded.entries[key])
            found.append(InStep(kind=kind, name=unquote(name), done=cursor.get("n", 0), total=cursor.get("of")))
        elif kind == "map":
            done = sum(other.startswith(f"{key}/") and "/" not in other[len(key) + 1 :] for other in loaded.entries)
            total = codec.loads(loaded.entries[key]).get("of")
            found.append(InStep(kind=kind, name=unquote(name), done=done, total=total))
    if memos:
        found.append(InStep(kind="once", name="", done=memos))
    return tuple(found)
