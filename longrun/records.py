"""What users hold in their hands: frozen records of executions, checkpoints, policies and progress. No I/O.

Place in the life of an execution: none of its own; every later module speaks in these.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from attrs import field, frozen

from longrun.errors import ConfigError, InvalidIdError, holds

ID_LIMIT = 200
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@=+~-]*")


class ExecutionState(enum.StrEnum):
    """Where an execution stands. Three are ends: `completed`, `cancelled`, and `failed`, which `retry` can leave."""

    INITIALIZED = "initialized"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMING = "resuming"
    WAITING = "waiting"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        return self in FINISHED


FINISHED = frozenset({ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED})
UNFINISHED = frozenset(ExecutionState) - FINISHED


def check_id(value: object) -> str:
    """Return `value` if it can name an execution; raise `InvalidIdError` otherwise."""
    if not isinstance(value, str):
        raise InvalidIdError(value, f"it must be a str, not {type(value).__name__}")
    if not value:
        raise InvalidIdError(value, "it is empty")
    if len(value) > ID_LIMIT:
        raise InvalidIdError(value, f"it has {len(value):,} characters and {ID_LIMIT} is the limit")
    if not _ID.fullmatch(value) or ".." in value:
        raise InvalidIdError(
            value, "use letters, digits and _ . : @ = + ~ -, beginning with a letter, digit or _, and no '..'"
        )
    return value


FOREVER = 253_402_300_799.0
"""The last second of the year 9999, which is as far as a datetime goes."""


def to_time(seconds: float | None) -> datetime | None:
    """An aware UTC datetime from stored seconds."""
    return None if seconds is None else datetime.fromtimestamp(min(seconds, FOREVER), UTC)


@frozen(kw_only=True)
class Progress:
    """How far a step is, as `ctx.progress()` or a cursor said."""

    done: float = 0
    """Items, bytes or whatever the step counts."""
    total: float | None = None
    """How many there will be; None where the step does not know."""
    message: str | None = None
    """What the step says of it."""

    @property
    def fraction(self) -> float:
        if not self.total or self.total <= 0:
            return 0.0
        return min(1.0, max(0.0, self.done / self.total))


@frozen(kw_only=True)
class Forecast:
    """How far a whole execution is, how fast, how long still: `eta.py` says how it is made.

    `fraction` weighs each step with the time that it took in earlier runs; `remaining` is in seconds, None where
    nothing honest can be said.
    """

    fraction: float
    """0.0 to 1.0, by the weights of the steps."""
    remaining: float | None = None
    """Seconds until it ends; None where nothing honest can be said."""
    rate: float | None = None
    """Items a second in the step in flight."""
    step: Progress | None = None
    """How far the step in flight is, if it says so."""
    basis: str = "none"
    """What `remaining` rests on: rate, history, own (this run's finished steps), none."""

    def to_data(self) -> dict[str, Any]:
        """The same as JSON values, for events and documents."""
        return {
            "fraction": round(self.fraction, 6),
            "remaining_seconds": None if self.remaining is None else round(self.remaining, 3),
            "items_per_second": None if self.rate is None else round(self.rate, 6),
            "basis": self.basis,
        }


@frozen(kw_only=True)
class Execution:
    """What is known of an execution: a snapshot, never updated behind your back."""

    id: str
    """As given to `start` or `submit`, or made there."""
    name: str
    """The workflow's name."""
    state: ExecutionState
    """Where it stands."""
    progress: float
    """0.0 to 1.0: finished steps, and the part of the one in flight, by the number of steps."""
    current_step: int
    """The index of the step in flight, or of the next one."""
    total_steps: int
    """How many steps its list has."""
    step_names: tuple[str, ...] = ()
    """The step list as it was stored at the start. Lists leave it out."""
    start_time: datetime
    """When it was started or submitted. All times are aware, in UTC."""
    last_update: datetime
    """When it was last written: a checkpoint, progress inside a step, a change of state."""
    end_time: datetime | None = None
    """When it completed, failed or was cancelled."""
    checkpoints: int = 0
    """How many there were: the number of the newest."""
    metadata: Mapping[str, Any] = field(factory=dict)
    """As given to `start` or `submit`."""
    error: str | None = field(default=None, repr=False)
    """Why it failed, or why the last attempt of the step in flight did: the exception's class and text."""
    version: str = "1"
    """The workflow's version when it started."""
    queue: str = "default"
    """Where workers find it."""
    priority: int = 0
    """Higher ones are taken first."""
    owner: str | None = None
    """The process that has it; None if nobody does."""
    parent_id: str | None = None
    """The execution that started it as its child."""
    reason: str | None = None
    """Why it is blocked, was cancelled, or what damage it went on from."""
    attempt: int = 0
    """How many attempts of the step in flight have failed."""
    hold: bool = False
    """Whether its pause lasts through restarts, until `resume`."""
    due: datetime | None = None
    """When a sleep, a delay, a wait's deadline or a back-off ends."""
    waiting_for: str | None = None
    """The name of the signal that it waits for."""
    step_progress: Progress | None = None
    """How far the step in flight is, if it says so."""
    forecast: Forecast | None = None
    """How far it is by the weight of its steps, and when it will be done. Lists leave it out."""

    def _repr_html_(self) -> str:
        from longrun import notebook

        return notebook.html(self)


@frozen(kw_only=True)
class Checkpoint:
    """A stored position and state. `step` is the index of the next step, `state` what that step receives."""

    id: str
    """The execution's id, `@` and `seq`."""
    step: int
    """The index of the next step; the number of steps once all are done."""
    state: Any = field(repr=False)
    """What that step receives, or the result. Typed where this program knows the step."""
    timestamp: datetime
    """When it was made, in UTC."""
    metadata: Mapping[str, Any] = field(factory=dict)
    """`step_name`, `attempts` and `visit` of the step that ended here."""
    seq: int
    """Its number in the execution, from 1: no gap and no repeat. `fork` takes it."""
    kind: str
    """What made it: start, step, repeat, goto, sleep, wait, finish, fail, cancel, pause, resume, retry, state,
    block."""
    size: int
    """Bytes of the stored state."""


@frozen(kw_only=True)
class StepRecord:
    """The small row that every boundary leaves for the execution's life."""

    seq: int
    """The checkpoint's number."""
    kind: str
    """What happened, as in `Checkpoint.kind`."""
    step: int
    """The index of the step that ended here; 0 for a start."""
    name: str | None
    """That step's name; None where no step ended."""
    started: datetime | None
    """When that visit of the step began."""
    ended: datetime
    """When the checkpoint was made."""
    attempts: int
    """How many attempts the step took."""
    error: str | None = field(repr=False)
    """The last failed attempt's error."""
    next_step: int
    """The index of the step that came next."""


@frozen(kw_only=True)
class BranchFailure:
    """What stands in a map's results for a branch that failed and was tolerated."""

    index: int
    """Which item it was, from 0."""
    error: str
    """The exception's class and text."""


@frozen(kw_only=True)
class ResumeReport:
    """What `auto_resume_all` did, and why it left the rest alone."""

    resumed: tuple[str, ...] = ()
    """The ids of those that run again."""
    skipped: Mapping[str, str] = field(factory=dict)
    """Ids that were left as they are, and why."""
    blocked: Mapping[str, str] = field(factory=dict)
    """Ids that cannot go on as stored, and why."""

    def __len__(self) -> int:
        return len(self.resumed)

    def __bool__(self) -> bool:
        """Whether it tells anything: what was blocked counts as much as what was resumed."""
        return bool(self.resumed or self.skipped or self.blocked)


def is_finite(value: float) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def _number(minimum: float, *, above: bool = False, none: bool = False) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None and none:
            return
        expected = f"give a number {'above' if above else 'of at least'} {minimum:g}{' or None' if none else ''}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            raise ConfigError(attribute.name, value, expected)
        if value < minimum or (above and value == minimum):
            raise ConfigError(attribute.name, value, expected)

    return check


def _whole(minimum: int, *, none: bool = False) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None and none:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(
                attribute.name, value, f"give a whole number of at least {minimum}{' or None' if none else ''}"
            )

    return check


def _one_of(*choices: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in choices:
            raise ConfigError(attribute.name, value, f"give one of {', '.join(map(repr, choices))}")

    return check


def _flag(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(attribute.name, value, "give True or False")


def _errors(value: Any) -> tuple[type[BaseException], ...]:
    kinds = tuple(value) if isinstance(value, Iterable) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigError("retry_on/give_up_on", kind, "give exception classes")
    return kinds


@frozen(kw_only=True)
class RetryPolicy:
    """When a failed attempt is tried again, and how long to wait before."""

    max_attempts: int = field(default=4, validator=_whole(1))
    """Attempts in all, the first included."""
    initial: float = field(default=1.0, validator=_number(0))
    """Seconds before the second attempt."""
    factor: float = field(default=2.0, validator=_number(1))
    """By which the wait grows."""
    maximum: float = field(default=30.0, validator=_number(0))
    """Seconds; the wait does not grow beyond."""
    jitter: bool = field(default=True, validator=_flag)
    """Draw each wait between a half and the whole."""
    retry_on: tuple[type[BaseException], ...] = field(default=(Exception,), converter=_errors)
    """A class of errors, or several."""
    give_up_on: tuple[type[BaseException], ...] = field(default=(), converter=_errors)
    """Errors that are not tried again, although `retry_on` names them."""

    def delay(self, failures: int, fraction: float = 1.0) -> float:
        """Seconds to wait after `failures` failed attempts. `fraction`, 0 to 1, is the jitter's die."""
        doublings = min(failures - 1, 1024)
        try:
            wait = self.initial * self.factor**doublings
        except OverflowError:
            wait = self.maximum if self.initial else 0.0
        wait = min(wait, self.maximum)
        return wait * (0.5 + 0.5 * fraction) if self.jitter else wait

    def allows(self, error: BaseException, attempts: int) -> bool:
        """Whether another attempt follows `attempts` failed ones, of which `error` was the last. A group of errors, as
        task groups raise them, is tried again if each error in it is."""
        if attempts >= self.max_attempts or holds(error, *self.give_up_on):
            return False
        if isinstance(error, self.retry_on):
            return True
        return isinstance(error, BaseExceptionGroup) and error.split(self.retry_on)[1] is None


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _filled(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(attribute.name, value, "give the path of a directory")


def _seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


@frozen(kw_only=True)
class RetentionPolicy:
    """What is kept: `history` states an execution, finished executions for `max_age` seconds (None: for ever)."""

    history: int = field(default=10, validator=_whole(1))
    """States that are kept of each execution; rows of its steps stay."""
    max_age: float | None = field(default=None, converter=_seconds, validator=_number(0, none=True))
    """Seconds for which finished executions are kept, children at least until their parent has ended; `None`: for
    ever."""
    interval: float = field(default=3600.0, converter=_seconds, validator=_number(0, above=True))
    """Seconds between two looks for what is older."""


def _policy(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, RetentionPolicy):
        raise ConfigError(attribute.name, value, "give a RetentionPolicy")


@frozen(kw_only=True)
class ExecutorConfig:
    """How an executor runs. Bad values raise here, not later."""

    checkpoint_dir: str = field(default=".longrun", converter=_path, validator=_filled)
    """The directory of the file store, when no store is given."""
    durability: str = field(default="step", validator=_one_of("step", "interval", "exit"))
    """`step`: durable at every step boundary; `interval`: boundaries are coalesced to `checkpoint_interval` too;
    `exit`: only start, pause, wait, failure, shutdown and end."""
    checkpoint_interval: float = field(default=5.0, converter=_seconds, validator=_number(0))
    """Seconds to which saves inside a step are coalesced."""
    max_retries: int = field(default=3, validator=_whole(0))
    """For steps without a `RetryPolicy`: one attempt more than this."""
    heartbeat_interval: float = field(default=5.0, converter=_seconds, validator=_number(0, above=True))
    """Seconds between renewals of the lease, sweeps, and writes of progress."""
    lease_ttl: float = field(default=30.0, converter=_seconds, validator=_number(0, above=True))
    """Seconds after which an owner that does not renew may be taken over; longer than `heartbeat_interval`."""
    auto_resume: bool = field(default=True, validator=_flag)
    """Take up what has no living owner, on entering and from then on; without it, only what was parked and is due, what
    a client or the command line has resumed or retried, and in a worker what was submitted."""
    max_concurrency: int | None = field(default=None, validator=_whole(1, none=True))
    """Executions in a step at the same time in this executor; `None`: any number."""
    drain_timeout: float = field(default=10.0, converter=_seconds, validator=_number(0))
    """Seconds for running steps to reach a checkpoint when the executor is left."""
    max_crashes: int = field(default=5, validator=_whole(1))
    """Unclean deaths without progress after which an execution is blocked."""
    on_corruption: str = field(default="previous", validator=_one_of("previous", "block"))
    """`previous`: go on from the newest readable checkpoint; `block`: stop the execution until it is resumed."""
    retention: RetentionPolicy = field(factory=RetentionPolicy, validator=_policy)
    """What is kept."""

    def __attrs_post_init__(self) -> None:
        if self.lease_ttl <= self.heartbeat_interval:
            raise ConfigError("lease_ttl", self.lease_ttl, "it must be longer than heartbeat_interval, which renews it")
