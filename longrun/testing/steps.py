"""`run_step`: one step on its own, with a context that behaves like the real one and keeps everything in memory.

Place in the life of an execution: run a step.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import anyio
from attrs import field, frozen

from longrun import codec
from longrun.attempt import Attempt
from longrun.context import StepContext, SyncStepContext
from longrun.desk import UNCHANGED
from longrun.events import ExecutionEvent
from longrun.ledger import Ledger
from longrun.loops import current_loop
from longrun.port import StepInfo
from longrun.records import Execution, ExecutionState, Progress
from longrun.registry import AD_HOC, DIRECTIVES, Finish, Step, StepFunction, StepRegistry
from longrun.starting import child_id
from longrun.threads import StepThreads

Children = Callable[[Any, Any, str], Any]
"""Stands for the children that a step starts: workflow, state and key in, the child's result out."""


@frozen(kw_only=True)
class StepRun:
    """What a step did."""

    returned: Any
    """What the function returned."""
    state: Any
    """The next state, taken out of the directive if it was one; through the codec, as the next step would get it."""
    directive: Any = None
    """The `Goto`, `Repeat`, `Finish`, `Sleep` or `WaitFor`; None for a plain state."""
    local: dict[Any, Any] = field(factory=dict)
    """`ctx.local` as the step left it."""
    progress: Progress | None = None
    """How far it said it was, at last."""
    saves: int = 0
    """How often progress was made durable inside the step."""
    entries: Mapping[str, bytes] = field(factory=dict, repr=False)
    """Cursors, memos and `local`: give it as `entries` to take the step up where this one stopped."""


class _Host:
    """What an attempt needs from the runner of its execution, without one."""

    attention = False
    checkpoint_interval = 0.0
    in_its_task = False
    goes_on = False
    """It runs in the test's own task: who cancels that means the test."""

    def __init__(self, info: StepInfo, ledger: Ledger, children: Children | None) -> None:
        self._info, self.ledger, self._children = info, ledger, children
        self.loop, self.thread = current_loop(), threading.get_ident()
        self.saves = 0

    def step_info(self, step: Step) -> StepInfo:
        return self._info

    @property
    def unsaved(self) -> bool:
        return self.ledger.dirty

    def save_progress(self, done: Callable[[Any], object]) -> None:
        self.ledger.collect()
        self.saves += 1
        done(None)

    async def commit_progress(self) -> None:
        self.ledger.collect()
        self.saves += 1

    def stop_here(self) -> bool:
        return False

    def show_progress(self, progress: Progress) -> None:
        pass

    def shutdown_left(self) -> float | None:
        return None

    async def start_child(self, workflow: Any, state: Any, key: str) -> Any:
        if self._children is None:
            raise LookupError("the step starts a child: give run_step a `children` function that answers for it")
        id = child_id(self._info.execution_id, self._info.visit, key)
        return _Child(id, self._info.execution_id, workflow, self._children(workflow, state, key))


class _Child:
    """Stands for the handle of a child: it has ended as soon as it is started, and whatever is asked of it is done."""

    def __init__(self, id: str, parent: str, workflow: Any, result: Any) -> None:
        self.id, self._result = id, result
        now = datetime.now(UTC)
        self._execution = Execution(
            id=id,
            name=workflow if isinstance(workflow, str) else getattr(workflow, "name", AD_HOC),
            state=ExecutionState.COMPLETED,
            progress=1.0,
            current_step=1,
            total_steps=1,
            start_time=now,
            last_update=now,
            end_time=now,
            parent_id=parent,
        )

    async def result(self, *, timeout: float | None = None) -> Any:
        return self._result

    async def wait(self, *states: ExecutionState | str, timeout: float | None = None) -> Execution:
        return self._execution

    async def info(self) -> Execution:
        return self._execution

    async def pause(self, *, hold: bool = False, interrupt: bool = False, timeout: float | None = None) -> None: ...

    async def resume(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None: ...

    async def cancel(
        self, reason: str | None = None, *, children: bool = False, timeout: float | None = None
    ) -> None: ...

    async def signal(
        self, name: str, payload: Any = None, *, key: str | None = None, timeout: float | None = None
    ) -> None: ...

    async def retry(self, *, state: Any = UNCHANGED, timeout: float | None = None) -> None: ...

    async def events(self) -> AsyncIterator[ExecutionEvent]:
        nothing: tuple[ExecutionEvent, ...] = ()
        for event in nothing:
            yield event


async def run_step(
    step: Step | StepFunction,
    state: Any = None,
    *,
    attempt: int = 1,
    iteration: int = 0,
    signal: Any = None,
    timed_out: bool = False,
    local: Mapping[Any, Any] | None = None,
    entries: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, Any] | None = None,
    children: Children | None = None,
    execution_id: str = "test",
    workflow: str = "test",
    step_index: int = 0,
    visit: int = 1,
) -> StepRun:
    """Run one step with a context as it would have it there, and tell what it did. What it raises is raised here.

    The state goes in and out through the codec, so what could not be stored fails here too. A step for a child process
    runs in a thread.
    """
    found = step if isinstance(step, Step) else StepRegistry().register(_name_of(step), step)
    ledger = Ledger(_with_local(entries, local))
    info = StepInfo(
        execution_id=execution_id,
        workflow=workflow,
        step=found.name,
        step_index=step_index,
        attempt=attempt,
        iteration=iteration,
        visit=visit,
        metadata=metadata or {},
        signal=signal,
        timed_out=timed_out,
    )
    host = _Host(info, ledger, children)
    returned, left, shown = await _call(found, host, _through_the_codec(state, found.state_type))
    directive = returned if isinstance(returned, DIRECTIVES) else None
    state = returned if directive is None else directive.state
    return StepRun(
        returned=returned,
        state=_through_the_codec(state, _type_of(returned, state, found)),
        directive=directive,
        local=left,
        progress=shown,
        saves=host.saves,
        entries=dict(ledger.entries),
    )


class _Calling:
    """Calls a step's function and keeps the context that it was given."""

    context: StepContext | None = None

    async def run(self, attempt: Attempt, state: Any) -> Any:
        step = attempt.step
        args: tuple[Any, ...] = (state,)
        if step.takes_context:
            context = self.context = attempt.context()
            args = (context if step.is_async else SyncStepContext.of(context), state)
        if step.is_async:
            return await step.function(*args)
        return await attempt.run_sync(step.function, *args)

    async def aclose(self) -> None:
        pass


async def _call(step: Step, host: _Host, state: Any) -> tuple[Any, dict[Any, Any], Progress | None]:
    threads, engine = StepThreads(), _Calling()
    try:
        with anyio.CancelScope() as scope:
            attempt = Attempt(host, step, scope, threads)
            outcome = await attempt.run(engine, state)
        if scope.cancelled_caught:
            outcome = attempt.cut_short()
    finally:
        threads.close()
    if outcome.error is not None:
        raise outcome.error
    return outcome.value, {} if engine.context is None else dict(engine.context.local), attempt.progress


def _name_of(function: StepFunction) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "step" if name == "<lambda>" else name


def _with_local(entries: Mapping[str, bytes] | None, local: Mapping[Any, Any] | None) -> dict[str, bytes]:
    given = dict(entries or {})
    if local is not None:
        given["local"] = codec.encode(dict(local), dict, path="local")
    return given


def _type_of(returned: Any, state: Any, step: Step) -> Any:
    """What the step says that it gives; if it says nothing, what it gave: a step behind it would say so. None is behind
    a `Finish`."""
    if step.says_result or isinstance(returned, Finish) or not codec.has_fields(type(state)):
        return step.result_type
    return type(state)


def _through_the_codec(state: Any, annotation: Any) -> Any:
    return codec.decode(codec.encode(state, annotation), annotation)
