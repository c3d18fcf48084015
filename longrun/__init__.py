"""longrun: named steps that survive a crash.

The map follows the life of an execution; what stands further up mostly uses what stands further down.

    define      registry    steps and workflows by name; what a step may return
    start       executor    run many; office: what clients do too; desk, control_room: look and control
    claim       sweep       take up what nobody alive runs; lease and life: who is alive, whose it is
                gates       take from limited queues; queues: their limits; fitness: what the code can go on with
    run         runner      one execution, step by step; stride: in one go while nothing stands in the way
                control     obey pause, resume, cancel, retry
                attempt     one call of a step; threads, process: where the function is called
                context     what a step sees; items, branches, ledger: progress inside a step
    checkpoint  book        every write of an owned execution; snapshot, outbox: its bytes, its way to the store
                moves       the writes that there are most of
                stores      where it is kept; codec, seal: how values become bytes
    event       events      what happened, told after it is durable
    finish      handle      the result, whichever process made it
    look        eta, plan   when it will be done; what a resume would do; schema: both as JSON
                cli         the edges where people look: cli, dashboard, notebook
    beside      telemetry   to be watched; otel, metrics: who watches

Below all of them: errors, records (what users hold), stored (what stores hold), clock, chance, loops, logging.

A name is imported when it is first asked for, so that `longrun --help` does not wait for the whole library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrun.client import Client as Client
    from longrun.client import client_sync as client_sync
    from longrun.context import StepContext as StepContext
    from longrun.context import SyncStepContext as SyncStepContext
    from longrun.errors import BranchesFailedError as BranchesFailedError
    from longrun.errors import CodecError as CodecError
    from longrun.errors import ConfigError as ConfigError
    from longrun.errors import ContextClosedError as ContextClosedError
    from longrun.errors import CorruptDataError as CorruptDataError
    from longrun.errors import DuplicateKeyError as DuplicateKeyError
    from longrun.errors import DuplicateStepError as DuplicateStepError
    from longrun.errors import DuplicateWorkflowError as DuplicateWorkflowError
    from longrun.errors import ExecutionBlockedError as ExecutionBlockedError
    from longrun.errors import ExecutionCancelledError as ExecutionCancelledError
    from longrun.errors import ExecutionError as ExecutionError
    from longrun.errors import ExecutionExistsError as ExecutionExistsError
    from longrun.errors import ExecutionFailedError as ExecutionFailedError
    from longrun.errors import ExecutionNotFoundError as ExecutionNotFoundError
    from longrun.errors import InvalidIdError as InvalidIdError
    from longrun.errors import InvalidStateError as InvalidStateError
    from longrun.errors import ItemsChangedError as ItemsChangedError
    from longrun.errors import KeyUnavailableError as KeyUnavailableError
    from longrun.errors import LeaseLostError as LeaseLostError
    from longrun.errors import LongrunError as LongrunError
    from longrun.errors import MissingExtraError as MissingExtraError
    from longrun.errors import NewerFormatError as NewerFormatError
    from longrun.errors import NonRetryable as NonRetryable
    from longrun.errors import NotStorableError as NotStorableError
    from longrun.errors import RegistrationError as RegistrationError
    from longrun.errors import SignalQueueFullError as SignalQueueFullError
    from longrun.errors import StateMismatchError as StateMismatchError
    from longrun.errors import StepError as StepError
    from longrun.errors import StepInterrupted as StepInterrupted
    from longrun.errors import StepMisuseError as StepMisuseError
    from longrun.errors import StepProcessError as StepProcessError
    from longrun.errors import StepSignatureError as StepSignatureError
    from longrun.errors import StepTimeoutError as StepTimeoutError
    from longrun.errors import StoreError as StoreError
    from longrun.errors import StoreReadOnlyError as StoreReadOnlyError
    from longrun.errors import StoreSettingsError as StoreSettingsError
    from longrun.errors import StoreUnavailableError as StoreUnavailableError
    from longrun.errors import TooLargeError as TooLargeError
    from longrun.errors import UnknownStepError as UnknownStepError
    from longrun.errors import UnknownWorkflowError as UnknownWorkflowError
    from longrun.errors import UnsupportedInProcessError as UnsupportedInProcessError
    from longrun.events import EventType as EventType
    from longrun.events import ExecutionEvent as ExecutionEvent
    from longrun.executor import Executor as Executor
    from longrun.handle import ExecutionHandle as ExecutionHandle
    from longrun.queues import QueueInfo as QueueInfo
    from longrun.queues import QueueLimit as QueueLimit
    from longrun.records import BranchFailure as BranchFailure
    from longrun.records import Checkpoint as Checkpoint
    from longrun.records import Execution as Execution
    from longrun.records import ExecutionState as ExecutionState
    from longrun.records import ExecutorConfig as ExecutorConfig
    from longrun.records import Forecast as Forecast
    from longrun.records import Progress as Progress
    from longrun.records import ResumeReport as ResumeReport
    from longrun.records import RetentionPolicy as RetentionPolicy
    from longrun.records import RetryPolicy as RetryPolicy
    from longrun.records import StepRecord as StepRecord
    from longrun.registry import Finish as Finish
    from longrun.registry import Goto as Goto
    from longrun.registry import Repeat as Repeat
    from longrun.registry import Sleep as Sleep
    from longrun.registry import Step as Step
    from longrun.registry import StepRegistry as StepRegistry
    from longrun.registry import WaitFor as WaitFor
    from longrun.registry import Workflow as Workflow
    from longrun.stores import CheckpointStore as CheckpointStore
    from longrun.stores import FileCheckpointStore as FileCheckpointStore
    from longrun.stores import MemoryCheckpointStore as MemoryCheckpointStore
    from longrun.stores import PostgresCheckpointStore as PostgresCheckpointStore
    from longrun.stores import RedisCheckpointStore as RedisCheckpointStore
    from longrun.stores import ReplicatedCheckpointStore as ReplicatedCheckpointStore
    from longrun.stores import SQLAlchemyTaskStore as SQLAlchemyTaskStore
    from longrun.stores import SQLiteCheckpointStore as SQLiteCheckpointStore
    from longrun.stores import StoreBackend as StoreBackend
    from longrun.stores import TaskCheckpointStore as TaskCheckpointStore
    from longrun.stores import TaskRecord as TaskRecord
    from longrun.stores import TaskStoreAdapter as TaskStoreAdapter
    from longrun.stores import copy_store as copy_store
    from longrun.stores import open_store as open_store
    from longrun.worker import Worker as Worker

__version__ = "0.1.0"

_NAMES = {
    "client": "Client client_sync",
    "context": "StepContext SyncStepContext",
    "errors": (
        "BranchesFailedError CodecError ConfigError ContextClosedError CorruptDataError DuplicateKeyError"
        " DuplicateStepError DuplicateWorkflowError ExecutionBlockedError ExecutionCancelledError ExecutionError"
        " ExecutionExistsError ExecutionFailedError ExecutionNotFoundError InvalidIdError InvalidStateError"
        " ItemsChangedError KeyUnavailableError LeaseLostError LongrunError MissingExtraError NewerFormatError"
        " NonRetryable NotStorableError RegistrationError SignalQueueFullError StateMismatchError StepError"
        " StepInterrupted StepMisuseError StepProcessError StepSignatureError StepTimeoutError StoreError"
        " StoreReadOnlyError StoreSettingsError StoreUnavailableError TooLargeError UnknownStepError"
        " UnknownWorkflowError UnsupportedInProcessError"
    ),
    "events": "EventType ExecutionEvent",
    "executor": "Executor",
    "handle": "ExecutionHandle",
    "queues": "QueueInfo QueueLimit",
    "records": (
        "BranchFailure Checkpoint Execution ExecutionState ExecutorConfig Forecast Progress ResumeReport"
        " RetentionPolicy RetryPolicy StepRecord"
    ),
    "registry": "Finish Goto Repeat Sleep Step StepRegistry WaitFor Workflow",
    "stores": (
        "CheckpointStore FileCheckpointStore MemoryCheckpointStore PostgresCheckpointStore RedisCheckpointStore"
        " ReplicatedCheckpointStore SQLAlchemyTaskStore SQLiteCheckpointStore StoreBackend TaskCheckpointStore"
        " TaskRecord TaskStoreAdapter copy_store open_store"
    ),
    "worker": "Worker",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = frozenset({*_NAMES, "logging", "metrics", "notebook", "otel", "testing"})
"""What `import longrun` alone makes reachable as `longrun.<module>`."""

_NEED_EXTRAS = frozenset({"PostgresCheckpointStore", "RedisCheckpointStore", "SQLAlchemyTaskStore"})
"""Importable by name; left out of `*`, which must work without them."""

# The names above, which a test compares with what type checkers see.
__all__ = sorted(_WHERE.keys() - _NEED_EXTRAS)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"longrun.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"longrun.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES})
