"""Everything that can go wrong, as one tree. Each error builds its sentence from typed arguments.

::

    LongrunError
    ├── ConfigError                    a value that can never work (also a ValueError)
    ├── RegistrationError              a step or workflow that cannot be defined so
    │   ├── DuplicateStepError         the name is taken
    │   ├── DuplicateWorkflowError     the name is taken
    │   └── StepSignatureError         not callable as (state) or (ctx, state)
    ├── UnknownStepError               no step of that name here
    ├── UnknownWorkflowError           no workflow of that name here
    ├── InvalidIdError                 an execution id that cannot be stored (also a ValueError)
    ├── ExecutionError                 about one execution
    │   ├── ExecutionNotFoundError
    │   ├── ExecutionExistsError       the id belongs to another workflow
    │   ├── ExecutionFailedError       result(): it failed
    │   ├── ExecutionCancelledError    result(): it was cancelled
    │   ├── ExecutionBlockedError      result(): it cannot go on as it is stored
    │   ├── InvalidStateError          the state it is in forbids that
    │   └── SignalQueueFullError       too many signals wait to be taken
    ├── StepError                      raised inside a step
    │   ├── NonRetryable               raise it to give up at once
    │   ├── StepMisuseError            something asked of longrun that makes no sense; not tried again
    │   ├── StepTimeoutError           an attempt ran over its time
    │   ├── StepProcessError           the child process of a step died
    │   ├── ItemsChangedError          the items no longer fit the stored cursor
    │   ├── DuplicateKeyError          a name used twice in one scope
    │   ├── BranchesFailedError        more branches of a map failed than it tolerates
    │   ├── ContextClosedError         a context used after its attempt had ended
    │   └── UnsupportedInProcessError  a context call that a child process cannot make
    ├── CodecError                     about stored bytes
    │   ├── NotStorableError           a value that cannot be stored, path named
    │   ├── TooLargeError              a value over the size limit
    │   ├── StateMismatchError         stored data that no longer fits its type
    │   ├── CorruptDataError           a checksum, a frame or a seal that is wrong
    │   └── NewerFormatError           written by a newer longrun
    └── StoreError                     about a store
        ├── StoreUnavailableError      unreachable, full or failing; may pass
        │   ├── KeyUnavailableError    the key that some data is encrypted under cannot be had; may pass
        │   ├── StoreReadOnlyError     it can be looked at, and nothing can be written there
        │   └── WriteOrderError        an earlier write of the same owner is still missing
        ├── StoreSettingsError         a directory, URL or schema that cannot be used
        ├── MissingExtraError          an optional package is not installed
        └── LeaseLostError             another process owns the execution now
"""

from __future__ import annotations

from typing import Any


class LongrunError(Exception):
    """The root of every error that longrun raises. It can be copied, and sent to another process, as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[LongrunError], args: tuple[Any, ...], fields: dict[str, Any]) -> LongrunError:
    """An error again. Its own arguments are gone: what they were made into is there."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


def _short(value: object) -> str:
    """As it was given, or as much of it as fits into a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 300 else f"{shown[:280]} … ({len(shown):,} characters)"


class ConfigError(LongrunError, ValueError):
    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"{name}={_short(value)} will not do: {expected}")


class RegistrationError(LongrunError):
    """A step or workflow that cannot be defined in this way."""


class DuplicateStepError(RegistrationError):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"a step named {name!r} is registered already; give this one another name: @registry.step(name=...)"
        )


class DuplicateWorkflowError(RegistrationError):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"a workflow named {name!r} is registered already; choose another name")


class StepSignatureError(RegistrationError):
    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"step {name!r} cannot be used: {problem}")


class UnknownStepError(LongrunError):
    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name = name
        super().__init__(f"no step named {name!r} is registered here{_known(known)}")


class UnknownWorkflowError(LongrunError):
    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name = name
        super().__init__(f"no workflow named {_short(name)} is registered here{_known(known)}")


class InvalidIdError(LongrunError, ValueError):
    def __init__(self, value: object, problem: str) -> None:
        self.value, self.problem = value, problem
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{shown} cannot be an execution id: {problem}")


class ExecutionError(LongrunError):
    """About one execution; `execution_id` names it."""

    def __init__(self, execution_id: str, message: str) -> None:
        self.execution_id = execution_id
        super().__init__(message)


class ExecutionNotFoundError(ExecutionError):
    def __init__(self, execution_id: str) -> None:
        super().__init__(execution_id, f"there is no execution {execution_id!r} in this store")


class ExecutionExistsError(ExecutionError):
    """`asked` is the workflow that was to be started; None for a fork, which needs a new id in any case."""

    def __init__(self, execution_id: str, stored: str, asked: str | None = None) -> None:
        self.stored, self.asked = stored, asked
        of = f"of workflow {stored!r}" if asked is None else f"of workflow {stored!r} and not {asked!r}"
        super().__init__(execution_id, f"execution {execution_id!r} exists already, {of}; use another id")


class _EndedError(ExecutionError):
    """An execution that ended without a result: the step, the attempt, and the original error's text."""

    verb = "ended"

    def __init__(
        self, execution_id: str, *, step: str | None = None, attempt: int = 0, error: str | None = None
    ) -> None:
        self.step, self.attempt, self.error = step, attempt, error
        where = f" in step {step!r}" if step else ""
        tries = f" at attempt {attempt}" if attempt else ""
        text = f": {error}" if error else ""
        super().__init__(execution_id, f"execution {execution_id!r} {self.verb}{where}{tries}{text}")


class ExecutionFailedError(_EndedError):
    verb = "failed"


class ExecutionCancelledError(_EndedError):
    verb = "was cancelled"


class ExecutionBlockedError(_EndedError):
    verb = "is blocked"


class InvalidStateError(ExecutionError):
    def __init__(self, execution_id: str, state: str, action: str, hint: str = "") -> None:
        self.state, self.action = state, action
        super().__init__(
            execution_id, f"cannot {action} execution {execution_id!r}: it is {state}{'; ' + hint if hint else ''}"
        )


class SignalQueueFullError(ExecutionError):
    def __init__(self, execution_id: str, limit: int) -> None:
        self.limit = limit
        super().__init__(
            execution_id, f"{limit} messages already wait for execution {execution_id!r}; let it take some first"
        )


class StepError(LongrunError):
    """Raised inside a step."""


def holds(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether it is one of these, or a group with one of them in it."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kinds) is not None
    return isinstance(error, kinds)


def raised_itself(error: BaseException) -> StepError:
    """What a step raised that would end more than its attempt if it came from elsewhere."""
    failure = StepError(f"the step raised {type(error).__name__}, which ends an attempt, not the program")
    failure.__cause__ = error
    return failure


class NonRetryable(StepError):  # noqa: N818 -- the contract's name: it reads as what to do, `raise NonRetryable(...)`
    """Raise it from a step to fail at once, whatever attempts are left."""


class StepMisuseError(StepError):
    """The step asks for what makes no sense, such as a `Goto` to nowhere: another attempt would ask the same."""


class StepTimeoutError(StepError):
    def __init__(self, step: str, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        super().__init__(f"step {step!r} ran over its time-out of {seconds:g} s")


class StepProcessError(StepError):
    def __init__(self, step: str, how: str) -> None:
        self.step, self.how = step, how
        super().__init__(f"the child process of step {step!r} {how}")


class ItemsChangedError(StepError):
    def __init__(self, name: str, stored: int, found: int) -> None:
        self.name, self.stored, self.found = name, stored, found
        super().__init__(
            f"the items of {name!r} no longer fit what was stored: {stored} then, {found} now; "
            "give the loop the same items, or another name to start it over"
        )


class DuplicateKeyError(StepError):
    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key!r} is used twice in one scope of this step; give each loop, call and map its own name")


class BranchesFailedError(StepError):
    def __init__(self, name: str, failures: int, tolerate: int, first: str) -> None:
        self.name, self.failures, self.tolerate, self.first = name, failures, tolerate, first
        super().__init__(f"{failures} branches of {name!r} failed and {tolerate} are tolerated; the first: {first}")


class ContextClosedError(StepError):
    def __init__(self, step: str, why: str) -> None:
        self.step, self.why = step, why
        super().__init__(f"this attempt of step {step!r} is over ({why}); its context takes no more calls")


class UnsupportedInProcessError(StepError):
    def __init__(self, call: str) -> None:
        self.call = call
        super().__init__(f"ctx.{call} does not work in a child process; use run_in=None for this step")


class CodecError(LongrunError):
    """About stored bytes."""


class NotStorableError(CodecError):
    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} cannot be stored: {problem}")


class TooLargeError(CodecError):
    def __init__(self, path: str, size: int, limit: int) -> None:
        self.path, self.size, self.limit = path, size, limit
        super().__init__(
            f"{path} takes {size:,} bytes and the limit is {limit:,}; keep large data outside and store where it is"
        )


class StateMismatchError(CodecError):
    def __init__(self, path: str, expected: str, problem: str) -> None:
        self.path, self.expected, self.problem = path, expected, problem
        super().__init__(f"stored {path} does not fit {expected}: {problem}")


class CorruptDataError(CodecError):
    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what} is damaged: {problem}")


class NewerFormatError(CodecError):
    def __init__(self, what: str, found: object, known: object) -> None:
        self.what, self.found, self.known = what, found, known
        super().__init__(f"{what} has format {found}, this longrun reads up to {known}; upgrade longrun")


class StoreError(LongrunError):
    """About a store."""


class StoreUnavailableError(StoreError):
    def __init__(self, store: str, problem: str) -> None:
        self.store, self.problem = store, problem
        super().__init__(f"the {store} store does not answer: {problem}")


class KeyUnavailableError(StoreUnavailableError):
    def __init__(self, what: str, key_id: str, problem: str) -> None:
        self.what, self.key_id = what, key_id
        super().__init__("sealed", f"{what} is encrypted under key {key_id!r}, which cannot be had ({problem})")


class StoreReadOnlyError(StoreUnavailableError):
    def __init__(self, store: str, problem: str) -> None:
        super().__init__(store, problem)
        self.args = (f"the {store} store can only be read: {problem}",)


class WriteOrderError(StoreUnavailableError):
    def __init__(self, store: str, execution_id: str, stored: int, given: int) -> None:
        self.execution_id, self.stored, self.given = execution_id, stored, given
        super().__init__(store, f"write {given} of execution {execution_id!r} cannot follow write {stored}")


class StoreSettingsError(StoreError):
    def __init__(self, store: str, problem: str) -> None:
        self.store, self.problem = store, problem
        super().__init__(f"the {store} store cannot be used: {problem}")


class MissingExtraError(StoreError):
    def __init__(self, what: str, extra: str) -> None:
        self.what, self.extra = what, extra
        super().__init__(f"{what} needs a package that is not installed: pip install 'longrun[{extra}]'")


class LeaseLostError(StoreError):
    def __init__(self, execution_id: str, fence: int) -> None:
        self.execution_id, self.fence = execution_id, fence
        super().__init__(f"execution {execution_id!r} was taken over: claim {fence} is no longer the newest")


def _known(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    shown: list[Any] = sorted(names)[:10]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"; there are {', '.join(map(repr, shown))}{more}"


class StepInterrupted(BaseException):
    """Unwinds a plain step whose attempt was stopped: raised by its context, and no `except Exception` catches it."""
