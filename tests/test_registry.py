"""Define: what may be a step and a workflow, and what is refused when it is defined, not in the middle of a run."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
from attrs import frozen

from longrun import (
    ConfigError,
    DuplicateStepError,
    DuplicateWorkflowError,
    Finish,
    Goto,
    NotStorableError,
    RegistrationError,
    RetryPolicy,
    StepContext,
    StepRegistry,
    StepSignatureError,
    UnknownStepError,
    UnknownWorkflowError,
    codec,
)
from longrun.registry import Directive


async def plain(state: dict[str, Any]) -> dict[str, Any]:
    return state


@frozen
class Order:
    number: int


def test_a_step_takes_its_functions_name_and_is_returned_unchanged():
    registry = StepRegistry()
    assert registry.step(plain) is plain
    step = registry.get("plain")
    assert step is not None
    assert (step.name, step.function, step.takes_context, step.is_async) == ("plain", plain, False, True)
    assert registry.get("other") is None


def test_a_step_can_have_another_name_and_options():
    registry = StepRegistry()
    policy = RetryPolicy(max_attempts=2)
    registry.step("one")(plain)
    registry.step(name="two", retry=policy, timeout=timedelta(seconds=5))(plain)
    three = registry.register("three", plain, timeout=2)
    two = registry.get("two")
    assert two is not None
    assert (two.retry, two.timeout) == (policy, 5.0)
    assert three.timeout == 2.0
    assert [step.name for step in registry] == ["one", "two", "three"]


def test_a_registry_counts_iterates_and_contains():
    registry = StepRegistry()
    step = registry.register("a", plain)
    assert len(registry) == 1
    assert list(registry) == [step]
    assert "a" in registry
    assert step in registry
    assert "b" not in registry


def test_a_name_taken_twice_is_refused_and_nothing_is_overwritten():
    registry = StepRegistry()
    registry.step(plain)
    with pytest.raises(DuplicateStepError, match="'plain' is registered already"):
        registry.register("plain", lambda state: state)
    step = registry.get("plain")
    assert step is not None
    assert step.function is plain
    registry.workflow("w", [plain])
    with pytest.raises(DuplicateWorkflowError, match="'w'"):
        registry.workflow("w", [plain])


def test_a_workflow_takes_functions_steps_and_names():
    registry = StepRegistry()
    step = registry.register("a", plain)

    async def fresh(state: Any) -> Any:
        return state

    workflow = registry.workflow("w", [step, "a", plain, fresh, fresh], version="7")
    assert workflow.steps == ("a", "a", "a", "fresh", "fresh")
    assert (workflow.name, workflow.version, len(workflow)) == ("w", "7", 5)
    assert "fresh" in registry
    assert list(workflow) == list(workflow.steps)
    assert registry.get_workflow("w") is workflow


def test_unknown_steps_and_workflows_are_named():
    registry = StepRegistry()
    registry.step(plain)
    with pytest.raises(UnknownStepError, match=r"'nope'.*'plain'"):
        registry.workflow("w", ["nope"])
    with pytest.raises(UnknownStepError, match="'plain'"):
        StepRegistry().workflow("w", [registry.get("plain")])  # type: ignore[list-item]
    with pytest.raises(UnknownWorkflowError, match="'nope'"):
        registry.resolve("nope")


@pytest.mark.parametrize("steps", [[], "abc", [5], [None]])
def test_a_workflow_of_nothing_or_nonsense_is_refused(steps):
    with pytest.raises(RegistrationError):
        StepRegistry().workflow("w", steps)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, 5, "steps:a"])
def test_names_are_short_printable_strings(name):
    registry = StepRegistry()
    with pytest.raises(RegistrationError, match="name"):
        registry.workflow(name, [plain])
    if name != "steps:a":
        with pytest.raises(RegistrationError, match="name"):
            registry.register(name, plain)


def two_states(a: Any, b: Any, c: Any) -> Any: ...


def no_state() -> Any: ...


def keyword_state(*, state: Any) -> Any: ...


def generator(state: Any) -> Any:
    yield state


async def async_generator(state: Any) -> Any:
    yield state


def swapped(state: Any, ctx: Any) -> Any: ...


def swapped_by_type(state: Any, here: StepContext) -> Any: ...


@pytest.mark.parametrize(
    "function", [two_states, no_state, keyword_state, generator, async_generator, swapped, swapped_by_type]
)
def test_a_step_with_the_wrong_signature_is_refused(function):
    with pytest.raises(StepSignatureError, match=function.__name__):
        StepRegistry().step(function)


@pytest.mark.parametrize(
    ("function", "takes_context"),
    [
        (lambda ctx, state=None: state, True),
        (lambda ctx=None, state=None: state, True),
        (lambda ctx, state=None, more=1: state, True),
        (lambda state, more=None: state, False),
        (lambda state=None: state, False),
    ],
)
def test_a_state_may_have_a_default(function, takes_context):
    step = StepRegistry().register("name", function)
    assert step.takes_context is takes_context


@pytest.mark.parametrize("value", [5, None, "text"])
def test_what_cannot_be_called_is_no_step(value):
    with pytest.raises(RegistrationError):
        StepRegistry().register("name", value)


def test_a_lambda_needs_a_name():
    registry = StepRegistry()
    with pytest.raises(StepSignatureError, match="lambda"):
        registry.workflow("w", [lambda state: state])
    registry.register("same", lambda state: state)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"retry": 3}, "retry"),
        ({"run_in": "cloud"}, "run_in"),
    ],
)
def test_bad_options_are_refused_at_once(options, word):
    with pytest.raises(ConfigError, match=word):
        StepRegistry().register("a", plain, **options)


def test_a_time_out_may_be_endless():
    assert StepRegistry().register("a", plain, timeout=float("inf")).timeout == float("inf")


def test_a_process_step_must_be_found_by_name():
    registry = StepRegistry()

    def closure(state: Any) -> Any:
        return state

    for function in (closure, lambda state: state):
        with pytest.raises(StepSignatureError, match="module level"):
            registry.register("a", function, run_in="process")
    registry.register("b", no_op, run_in="process")


def no_op(state: Any) -> Any:
    return state


def test_methods_partials_and_callable_objects_can_be_steps():
    class Service:
        async def work(self, ctx: StepContext, state: Order) -> Order:
            return state

        async def __call__(self, state: Order) -> Order:
            return state

    registry = StepRegistry()
    registry.step(Service().work)
    registry.register("object", Service())
    registry.register("part", functools.partial(plain))
    work, called, part = (registry.get(name) for name in ("work", "object", "part"))
    assert work is not None
    assert called is not None
    assert part is not None
    assert (work.takes_context, work.is_async, work.state_type, work.result_type) == (True, True, Order, Order)
    assert (called.takes_context, called.is_async, called.state_type) == (False, True, Order)
    assert (part.is_async, part.state_type) == (True, dict[str, Any])


def test_directives_are_no_part_of_the_result_type():
    async def step(state: Order) -> Order | Goto | Finish:
        return state

    async def only(state: Any) -> Goto:
        return Goto("step")

    async def any_of_them(state: Order) -> Order | Directive:
        return Finish(state)

    async def one_of_them(state: Order) -> Directive:
        return Finish(state)

    registry = StepRegistry()
    registry.workflow("w", [step, only, any_of_them, one_of_them])
    assert [found.result_type for found in registry] == [Order, Any, Order, codec.perhaps(Order)]


def test_a_state_type_that_cannot_be_stored_is_refused_with_the_workflow():
    class Client: ...

    async def step(state: Client) -> Client:
        return state

    registry = StepRegistry()
    step.__annotations__ = {"state": Client, "return": Client}
    with pytest.raises(NotStorableError):
        registry.workflow("w", [step])
    assert registry.workflows == ()


def test_an_annotation_that_names_nothing_is_refused_but_only_where_it_matters():
    """The context's annotation is often imported for type checkers alone: nobody needs it at run time."""

    async def fine(ctx: OnlyForTypeCheckers, state: Order) -> Order:  # type: ignore[name-defined]  # noqa: F821
        return state

    async def bad(state: Missing) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return state

    registry = StepRegistry()
    registry.workflow("w", [fine])
    step = registry.get("fine")
    assert step is not None
    assert step.state_type is Order
    with pytest.raises(StepSignatureError, match="'Missing'"):
        registry.workflow("v", [bad])


def test_registries_can_be_merged():
    one, two = StepRegistry(), StepRegistry()
    one.step(plain)
    one.workflow("w", [plain])
    two.step(no_op)
    two.include(one)
    two.include(one)
    assert "plain" in two
    assert two.resolve("w").steps == ("plain",)
    clash = StepRegistry()
    clash.register("plain", no_op)
    with pytest.raises(DuplicateStepError):
        two.include(clash)
    clash = StepRegistry()
    clash.workflow("w", [no_op])
    with pytest.raises((DuplicateWorkflowError, DuplicateStepError)):
        two.include(clash)


def test_a_workflow_that_means_something_else_here_is_not_merged():
    one, two = StepRegistry(), StepRegistry()
    one.workflow("w", [plain])
    two.workflow("w", [no_op])
    with pytest.raises(DuplicateWorkflowError):
        two.include(one)
    assert "plain" not in two, "nothing of it is taken over"
    assert two.resolve("w").steps == ("no_op",)


def test_a_step_knows_whether_it_is_in_a_workflow():
    workflow = StepRegistry().workflow("w", [plain])
    assert "plain" in workflow
    assert "no_op" not in workflow


def test_a_partial_has_the_name_of_its_function_and_an_object_has_none():
    class Nameless:
        def __call__(self, state: Any) -> Any:
            return state

    registry = StepRegistry()
    assert registry.workflow("w", [functools.partial(no_op)]).steps == ("no_op",)
    with pytest.raises(StepSignatureError, match="no name of its own"):
        registry.workflow("v", [Nameless()])


def test_an_async_step_is_not_for_a_thread():
    async def waits(state: Any) -> Any:
        return state

    with pytest.raises(StepSignatureError, match="not in a thread"):
        StepRegistry().register("waits", waits, run_in="thread")


def test_a_list_of_steps_is_a_workflow_with_a_name_of_its_own():
    registry = StepRegistry()
    first, second = registry.resolve([plain, no_op]), registry.resolve(["plain", "no_op"])
    assert first.name == second.name == "steps:plain,no_op"
    assert registry.resolve([plain] * 500).name != registry.resolve([plain] * 501).name
    assert registry.workflows == ()


def test_a_workflow_of_another_registry_is_unknown():
    other = StepRegistry()
    workflow = other.workflow("w", [plain])
    with pytest.raises(UnknownWorkflowError):
        StepRegistry().resolve(workflow)
    assert other.resolve(workflow) is workflow
