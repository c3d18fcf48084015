"""Define: `Step`, `Workflow`, `StepRegistry`, and what a step may return besides a state.

Place in the life of an execution: the first. A registry maps names to functions; what is stored knows only the names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar, overload

from attrs import field, frozen

from longrun import codec
from longrun.errors import (
    ConfigError,
    DuplicateStepError,
    DuplicateWorkflowError,
    RegistrationError,
    StepSignatureError,
    UnknownStepError,
    UnknownWorkflowError,
)
from longrun.records import RetryPolicy
from longrun.stored import RECORDS

StepFunction = Callable[..., Any]
F = TypeVar("F", bound=StepFunction)
AD_HOC = "steps:"
NAME_LIMIT = 200


# What a step may return instead of the plain next state


class Directive:
    """Any of these: `dict | Directive` is the annotation of a step that may return one."""

    __slots__ = ()


@frozen
class Goto(Directive):
    """Go on with another step: by name, or by index where the name stands in the workflow more than once."""

    step: str | int
    state: Any = None


@frozen
class Repeat(Directive):
    """Run this step again, as a new visit with `ctx.iteration` one higher."""

    state: Any = None


@frozen
class Finish(Directive):
    """End the execution here, with this result."""

    state: Any = None


@frozen
class Sleep(Directive):
    """Park until then: seconds, a timedelta, or an aware datetime. The next step follows; at once if that is past."""

    until: float | timedelta | datetime
    state: Any = None


@frozen
class WaitFor(Directive):
    """Park until the signal comes; the next step sees its payload as `ctx.signal`, or `ctx.timed_out`."""

    signal: str
    state: Any = None
    timeout: float | timedelta | None = None


DIRECTIVES = (Goto, Repeat, Finish, Sleep, WaitFor)


@frozen(eq=False)
class Step:
    """A named function, and how to run it."""

    name: str
    function: StepFunction = field(repr=False)
    retry: RetryPolicy | None = None
    timeout: float | None = None
    run_in: str | None = None
    takes_context: bool = False
    is_async: bool = False
    engine: str = field(init=False, repr=False)
    """Where it runs, by the name of what calls it there: `loop`, `thread` or `process`."""
    _types: dict[str, Any] = field(factory=dict, init=False, repr=False)

    @engine.default
    def _engine(self) -> str:
        return self.run_in or ("loop" if self.is_async else "thread")

    @property
    def state_type(self) -> Any:
        """The annotation of the state it receives."""
        return (self._types or self._resolved())["state"]

    @property
    def takes_plain(self) -> bool:
        """Whether that annotation wants no look at the state: whatever is plain data will do."""
        return bool((self._types or self._resolved())["takes"])

    @property
    def result_type(self) -> Any:
        """The annotation of the state it returns, directives left out. One that says nothing else may mean the class
        that it receives."""
        return (self._types or self._resolved())["result"]

    @property
    def gives_plain(self) -> bool:
        """Whether that wants no look at the state."""
        return bool((self._types or self._resolved())["gives"])

    @property
    def says_result(self) -> bool:
        return bool((self._types or self._resolved())["said"])

    def _resolved(self) -> dict[str, Any]:
        """On first use: a forward reference may name a class defined below the step."""
        self._types.update(_resolve(self.name, self.function, self.takes_context))
        return self._types


@frozen(eq=False)
class Workflow:
    """A name and a list of step names."""

    name: str
    steps: tuple[str, ...] = field(repr=False)
    version: str = "1"

    def __iter__(self) -> Iterator[str]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, step: object) -> bool:
        return step in self.steps


class StepRegistry:
    """Steps and workflows by name. An object, not a global: a large application keeps one a module and merges them."""

    def __init__(self) -> None:
        self.by_name: dict[str, Step] = {}
        """Every step; to be read only."""
        self._workflows: dict[str, Workflow] = {}

    def __repr__(self) -> str:
        return f"<StepRegistry {len(self.by_name)} steps, {len(self._workflows)} workflows>"

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.by_name.values())

    def __contains__(self, step: object) -> bool:
        return step in self.by_name if isinstance(step, str) else step in self.by_name.values()

    @property
    def workflows(self) -> tuple[Workflow, ...]:
        return tuple(self._workflows.values())

    @overload
    def step(self, name: F, /) -> F: ...

    @overload
    def step(
        self,
        name: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = None,
        run_in: str | None = None,
    ) -> Callable[[F], F]: ...

    def step(
        self,
        name: Any = None,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = None,
        run_in: str | None = None,
    ) -> Any:
        """Register a function as a step: `@registry.step` or `@registry.step(retry=…, timeout=…)`."""
        if callable(name):
            self.register(None, name)
            return name

        def decorate(function: F) -> F:
            self.register(name, function, retry=retry, timeout=timeout, run_in=run_in)
            return function

        return decorate

    def register(
        self,
        name: str | None,
        function: StepFunction,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = None,
        run_in: str | None = None,
    ) -> Step:
        """Register `function` under `name`, or under its own name if that is None."""
        name = _step_name(function) if name is None else _check_name(name)
        if name in self.by_name:
            raise DuplicateStepError(name)
        step = Step(
            name=name,
            function=function,
            retry=_check_retry(retry),
            timeout=_check_timeout(timeout),
            run_in=_check_run_in(name, function, run_in),
            takes_context=_takes_context(name, function),
            is_async=is_async(function),
        )
        self.by_name[name] = step
        return step

    def get(self, name: str) -> Step | None:
        return self.by_name.get(name)

    def get_workflow(self, name: str) -> Workflow | None:
        return self._workflows.get(name)

    def workflow(self, name: str, steps: Iterable[StepFunction | Step | str], *, version: str = "1") -> Workflow:
        """Define a workflow. Functions that are not registered yet are, under their own names."""
        _check_name(name, "workflow")
        if name in self._workflows:
            raise DuplicateWorkflowError(name)
        workflow = Workflow(name=name, steps=self._names(steps), version=str(version))
        self._check_types(workflow)
        self._workflows[name] = workflow
        return workflow

    def include(self, other: StepRegistry) -> None:
        """Take over another registry's steps and workflows; a name that means something else here raises."""
        for step in other:
            if self.by_name.get(step.name, step) is not step:
                raise DuplicateStepError(step.name)
        for workflow in other.workflows:
            if self._workflows.get(workflow.name, workflow) is not workflow:
                raise DuplicateWorkflowError(workflow.name)
        self.by_name.update(other.by_name)
        self._workflows.update(other._workflows)

    def resolve(self, workflow: str | Workflow | Iterable[StepFunction | Step | str]) -> Workflow:
        """The workflow that a caller means: by name, as an object, or as a list of steps made up on the spot."""
        if isinstance(workflow, Workflow):
            return self._own(workflow)
        if isinstance(workflow, str):
            found = self._workflows.get(workflow)
            if found is None:
                raise UnknownWorkflowError(workflow, tuple(self._workflows))
            return found
        if not isinstance(workflow, Iterable):
            raise ConfigError("workflow", type(workflow).__name__, "give a name, a Workflow, or a list of steps")
        names = self._names(workflow)
        made_up = Workflow(name=_ad_hoc_name(names), steps=names)
        self._check_types(made_up)
        return made_up

    def knows(self, workflow: str, steps: tuple[str, ...] = ()) -> bool:
        """Whether executions of a stored workflow belong to this registry."""
        if workflow.startswith(AD_HOC):
            return bool(steps) and all(step in self.by_name for step in steps)
        return workflow in self._workflows

    def _own(self, workflow: Workflow) -> Workflow:
        if self._workflows.get(workflow.name) is not workflow:
            raise UnknownWorkflowError(workflow.name, tuple(self._workflows))
        return workflow

    def _names(self, steps: Iterable[StepFunction | Step | str]) -> tuple[str, ...]:
        if isinstance(steps, str):
            raise RegistrationError(f"steps must be a list, not the string {steps!r}")
        by_function = {step.function: step.name for step in self.by_name.values()}
        names = tuple(self._name_of(step, by_function) for step in steps)
        if not names:
            raise RegistrationError("a workflow needs at least one step")
        return names

    def _name_of(self, step: StepFunction | Step | str, by_function: dict[StepFunction, str]) -> str:
        if isinstance(step, str):
            if step not in self.by_name:
                raise UnknownStepError(step, tuple(self.by_name))
            return step
        if isinstance(step, Step):
            if self.by_name.get(step.name) is not step:
                raise UnknownStepError(step.name, tuple(self.by_name))
            return step.name
        if not callable(step):
            raise RegistrationError(f"a step is a function, a Step or a name, not {type(step).__name__}")
        if step not in by_function:
            by_function[step] = self.register(None, step).name
        return by_function[step]

    def _check_types(self, workflow: Workflow) -> None:
        """Refuse state types that can never be stored, now rather than in the middle of a run."""
        for name in dict.fromkeys(workflow.steps):
            step = self.by_name[name]
            codec.check_annotation(step.state_type)
        codec.check_annotation(self.by_name[workflow.steps[-1]].result_type)


def _ad_hoc_name(names: tuple[str, ...]) -> str:
    """A name that says which steps, the same in every process."""
    joined = AD_HOC + ",".join(names)
    if len(joined) <= 100:
        return joined
    return f"{joined[:80]}…{hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()}"


def _step_name(function: StepFunction) -> str:
    name = getattr(function, "__name__", None)
    if name is None and isinstance(function, functools.partial):
        name = getattr(function.func, "__name__", None)
    if not isinstance(name, str):
        raise StepSignatureError(type(function).__name__, "it has no name of its own; register it with a name")
    if name == "<lambda>":
        raise StepSignatureError(name, "a lambda has no stable name to resume by; register it with a name")
    return _check_name(name)


def _check_name(name: object, what: str = "step") -> str:
    if not isinstance(name, str) or not name or len(name) > NAME_LIMIT or not name.isprintable():
        raise RegistrationError(
            f"a {what}'s name is a printable string of 1 to {NAME_LIMIT} characters, not {name!r:.80}"
        )
    if what == "workflow" and name.startswith(AD_HOC):
        raise RegistrationError(f"a workflow's name cannot begin with {AD_HOC!r}")
    if what == "workflow" and name in RECORDS:
        raise RegistrationError(f"a workflow cannot be named {name!r}: longrun's own records are")
    return name


def _check_retry(retry: object) -> RetryPolicy | None:
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise ConfigError("retry", retry, "give a RetryPolicy or None")
    return retry


def _check_timeout(timeout: object) -> float | None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        return None
    with contextlib.suppress(OverflowError):  # a whole number with hundreds of digits
        if not isinstance(seconds, bool) and isinstance(seconds, int | float) and seconds > 0:
            return float(seconds)
    raise ConfigError("timeout", timeout, "give seconds above 0, a timedelta, or None")


def _check_run_in(name: str, function: StepFunction, run_in: str | None) -> str | None:
    if run_in not in (None, "thread", "process"):
        raise ConfigError("run_in", run_in, "give None, 'thread' or 'process'")
    if run_in == "thread" and is_async(function):
        raise StepSignatureError(name, "an async function runs in the event loop, not in a thread")
    if run_in == "process":
        if is_async(function):
            raise StepSignatureError(name, "a child process has no event loop; give a plain function")
        if inspect.ismethod(function) and not isinstance(function.__self__, type):
            raise StepSignatureError(name, "a child process does not have the object of a method; give a function")
        qualified = getattr(function, "__qualname__", "<")
        if "<" in qualified or not getattr(function, "__module__", None):
            raise StepSignatureError(name, "a child process must find it by module and name; define it at module level")
    return run_in


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, a partial of one, or an object with an async call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes_two(function: StepFunction) -> bool | None:
    """Whether a function takes `(ctx, value)`; False for `(value)`; None if it takes neither."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # a builtin that does not say: one argument is the common case
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    variable = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return None
    if len(positional) > 1 and _is_context(positional[0]) and set(needed) <= set(positional[:2]):
        return True
    if len(needed) == 2:
        return None if _is_context(needed[1]) and not _is_context(needed[0]) else True
    if len(needed) == 1 or (not needed and (positional or variable)):
        return False
    return None


def _is_context(parameter: inspect.Parameter) -> bool:
    return parameter.name in ("ctx", "context") or "StepContext" in str(parameter.annotation)


def _takes_context(name: str, function: StepFunction) -> bool:
    if not callable(function):
        raise StepSignatureError(name, f"a {type(function).__name__} cannot be called")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise StepSignatureError(name, "it is a generator; return the next state instead of yielding")
    two = takes_two(function)
    if two is None:
        raise StepSignatureError(name, f"it must take (state) or (ctx, state), not {inspect.signature(function)}")
    return two


def _resolve(name: str, function: StepFunction, takes_context: bool) -> dict[str, Any]:
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    state = parameters[1 if takes_context else 0]
    hints = type_hints(name, function, (state.name, "return"))
    received, given = hints.get(state.name, Any), _without_directives(hints.get("return", Any))
    said = given is not Any
    result = given if said else codec.perhaps(received)
    plain = {"takes": codec.is_plain(received), "gives": codec.is_plain(result)}
    return {"state": received, "result": result, "said": said, **plain}


def type_hints(name: str, function: StepFunction, wanted: tuple[str, ...] = ("return",)) -> dict[str, Any]:
    """The resolved annotations of a function, whatever kind of callable it is: those wanted, and perhaps others."""
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    if not isinstance(target, types.FunctionType | types.MethodType | type):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError:
        return _some_hints(name, target, wanted)
    except TypeError:
        return {}


def _some_hints(name: str, target: Any, wanted: tuple[str, ...]) -> dict[str, Any]:
    """One by one: an annotation that nobody needs, such as the context's, may name what only type checkers import."""
    found: dict[str, Any] = {}
    for key, annotation in _raw_annotations(target).items():
        one = types.SimpleNamespace(__annotations__={key: annotation})
        try:
            found |= typing.get_type_hints(one, getattr(target, "__globals__", {}), include_extras=True)
        except NameError as error:
            if key in wanted:
                problem = f"its annotation names {error.name!r}, which is not defined"
                raise StepSignatureError(name, problem) from error
    return found


def _raw_annotations(target: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):  # pragma: no cover -- as the line says
        import annotationlib

        return annotationlib.get_annotations(target, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(target)


def _without_directives(annotation: Any) -> Any:
    known = (Directive, *DIRECTIVES)
    if annotation in known:
        return Any
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = tuple(part for part in typing.get_args(annotation) if part not in known)
        if not rest:
            return Any
        return typing.Union[rest]  # noqa: UP007 -- built from a tuple
    return annotation
