"""longrun: named steps that survive a crash.

The map follows the life of an execution; imports only go down this list.

    define      registry    steps and workflows by name; what a step may return
    start       executor    run many; desk and control_room: look and control, running nothing
    claim       sweep       take up what nobody alive runs; lease and life: who is alive, whose it is
    run         runner      one execution, step by step; control: obey pause, resume, cancel, retry
                attempt     one call of a step; threads, process: where the function is called
                context     what a step sees; items, branches, ledger: progress inside a step
    checkpoint  book        every write of an owned execution; snapshot, outbox: its bytes, its way to the store
                stores      where it is kept; codec, seal: how values become bytes
    event       events      what happened, told after it is durable
    finish      handle      the result, whichever process made it

Below all of them: errors, records (what users hold), stored (what stores hold), clock, loops, logging.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from longrun.context import StepContext, SyncStepContext
from longrun.errors import (
    BranchesFailedError,
    CodecError,
    ConfigError,
    ContextClosedError,
    CorruptDataError,
    DuplicateKeyError,
    DuplicateStepError,
    DuplicateWorkflowError,
    ExecutionBlockedError,
    ExecutionCancelledError,
    ExecutionError,
    ExecutionExistsError,
    ExecutionFailedError,
    ExecutionNotFoundError,
    InvalidIdError,
    InvalidStateError,
    ItemsChangedError,
    LeaseLostError,
    LongrunError,
    MissingExtraError,
    NewerFormatError,
    NonRetryable,
    NotStorableError,
    RegistrationError,
    SignalQueueFullError,
    StateMismatchError,
    StepError,
    StepInterrupted,
    StepProcessError,
    StepSignatureError,
    StepTimeoutError,
    StoreError,
    StoreSettingsError,
    StoreUnavailableError,
    TooLargeError,
    UnknownStepError,
    UnknownWorkflowError,
    UnsupportedInProcessError,
)
from longrun.events import EventType, ExecutionEvent
from longrun.executor import Executor
from longrun.handle import ExecutionHandle
from longrun.records import (
    BranchFailure,
    Checkpoint,
    Execution,
    ExecutionState,
    ExecutorConfig,
    Progress,
    ResumeReport,
    RetentionPolicy,
    RetryPolicy,
    StepRecord,
)
from longrun.registry import Finish, Goto, Repeat, Sleep, Step, StepRegistry, WaitFor, Workflow
from longrun.stores import WHERE, open_store

if TYPE_CHECKING:
    from longrun.stores import CheckpointStore as CheckpointStore
    from longrun.stores import FileCheckpointStore as FileCheckpointStore
    from longrun.stores import MemoryCheckpointStore as MemoryCheckpointStore
    from longrun.stores import PostgresCheckpointStore as PostgresCheckpointStore
    from longrun.stores import RedisCheckpointStore as RedisCheckpointStore
    from longrun.stores import SQLAlchemyTaskStore as SQLAlchemyTaskStore
    from longrun.stores import SQLiteCheckpointStore as SQLiteCheckpointStore
    from longrun.stores import StoreBackend as StoreBackend
    from longrun.stores import TaskCheckpointStore as TaskCheckpointStore
    from longrun.stores import TaskRecord as TaskRecord
    from longrun.stores import TaskStoreAdapter as TaskStoreAdapter

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in WHERE:
        return getattr(importlib.import_module("longrun.stores"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = sorted(  # noqa: PLE0605 -- what was imported above, and the stores
    [name for name in globals() if not name.startswith("_") and name not in ("Any", "TYPE_CHECKING", "WHERE", "annotations", "importlib")]
    + list(WHERE)
)
