"""Run: from step to step, as long as nothing stands in the way.

Place in the life of an execution: run a step, checkpoint. What the runner does in many calls, because anything may
happen, is done here in few, because nothing does: a step ends with a state, another follows at once, and nobody wants
anything of the execution. Where steps are small, calls are most of what they cost. All else is left to the runner,
before a step or after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from longrun.attempt import Attempt, Engine, LoopEngine, Outcome
from longrun.book import MISSING
from longrun.errors import CodecError, RegistrationError
from longrun.registry import Directive, Step
from longrun.threads import LEFT

if TYPE_CHECKING:
    from longrun.runner import Runner

Names = tuple[str, str | None]
"""Of a step and of the one behind it; None stands for the end."""
Call = Callable[[Any], Awaitable[Any]]
Stage = tuple[Step, Any, Engine, Call | None, bool]
"""A step that stands before another, the annotation of the state it receives, who calls its function, that function if
there is no more to it than to call it with the state, and whether what it returns needs no look where it is plain
data."""


class Stages(dict[Names, Stage | None]):
    """How the steps that a crew knows are run there. What is registered stays as it is, and so does what was found
    here."""

    def __init__(self, by_name: Mapping[str, Step], engine_of: Callable[[Step], Engine]) -> None:
        self._by_name, self._engine_of = by_name, engine_of

    def __missing__(self, names: Names) -> Stage | None:
        """None, for now, if there is more to be said of either: they are not known here, their types cannot be found,
        or there is a time-out."""
        name, following = names
        step, behind = self._by_name.get(name), None if following is None else self._by_name.get(following)
        if step is None or step.timeout is not None or (behind is None and following is not None):
            return None
        try:
            plain = step.gives_plain if behind is None else behind.takes_plain
            engine = self._engine_of(step)
            call = step.function if type(engine) is LoopEngine and not step.takes_context else None
            stage = self[names] = step, step.state_type, engine, call, plain
        except (CodecError, RegistrationError):  # it is looked for again, and then it is said
            return None
        return stage


async def stride(runner: Runner) -> tuple[Attempt, Outcome] | bool:
    """Run steps until one has ended of which there is more to say: that one, and how it ended. True if there is
    something to do before the next, False if the execution has come to its end."""
    book, inbox, seat, crew, scope = runner.book, runner.inbox, runner.seat, runner.crew, runner.scope
    steps, outbox, stages = book.steps, book.outbox, crew.stages
    keeper, monotonic, bus = crew.keeper, crew.clock.monotonic, crew.bus
    last, attempt = len(steps) - 1, None
    while True:
        head = book.head
        index = head.step
        if runner.attention or index > last or head.attempt or inbox or outbox.lost or bus.active:
            return True
        if monotonic() >= keeper.held_until:
            return True
        if LEFT and LEFT.get(runner.key):
            return True
        stage = stages[steps[index], None if index == last else steps[index + 1]]
        if stage is None or not (((place := seat.place) and place.granted) or seat.take_at_once(runner)):
            return True
        step, annotation, engine, call, plain = stage
        state, book.value = book.value, MISSING
        if state is MISSING or crew.strict:
            try:
                state = book.stored_state(annotation)
            except (CodecError, RegistrationError):  # it is read again, and then it is said
                return True
        if attempt is None or attempt.used:
            attempt = Attempt(runner, step, scope, crew.threads)
        attempt.step = step  # one that nobody has heard of serves again
        runner.attempt = runner.running = attempt
        try:
            value = await (engine.run(attempt, state) if call is None else call(state))
        except BaseException as error:
            if not attempt.has_raised(error):
                raise
            return attempt, attempt.failed(error)
        finally:
            runner.attempt = None
            if attempt.used:
                attempt.end()
                book.progress = attempt.progress
        del state
        if attempt.stopped or attempt.left or inbox or outbox.lost is not None or isinstance(value, Directive):
            return attempt, Outcome(value)
        if not plain or (durable := book.pass_on(value)) is None:
            return attempt, Outcome(value)
        runner.running = None
        if (refused := await durable) is not None:
            raise refused
        if index == last:
            book.result = value
            return False
