"""What users import: every name of the contract is there, typed, and importing costs no optional package."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longrun
from longrun import errors, stores

CONTRACT = [
    "Executor",
    "ExecutorConfig",
    "RetentionPolicy",
    "RetryPolicy",
    "StepRegistry",
    "Step",
    "Workflow",
    "StepContext",
    "SyncStepContext",
    "Goto",
    "Repeat",
    "Finish",
    "Sleep",
    "WaitFor",
    "NonRetryable",
    "BranchFailure",
    "ResumeReport",
    "ExecutionHandle",
    "Execution",
    "ExecutionState",
    "Checkpoint",
    "ExecutionEvent",
    "EventType",
    "open_store",
    "CheckpointStore",
    "StoreBackend",
    "MemoryCheckpointStore",
    "FileCheckpointStore",
    "SQLiteCheckpointStore",
    "PostgresCheckpointStore",
    "RedisCheckpointStore",
    "TaskCheckpointStore",
    "TaskStoreAdapter",
    "TaskRecord",
    "SQLAlchemyTaskStore",
    "LongrunError",
    "DuplicateStepError",
    "ItemsChangedError",
    "ExecutionExistsError",
    "ExecutionFailedError",
    "ExecutionCancelledError",
    "ExecutionBlockedError",
    "InvalidStateError",
]
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", CONTRACT)
def test_the_names_of_the_contract_are_in_longrun(name):
    assert getattr(longrun, name) is not None
    assert name in dir(longrun)


def test_every_name_that_is_offered_can_be_had():
    for module in (longrun, stores):
        for name in dir(module) if module is longrun else module.__all__:
            assert getattr(module, name) is not None


def test_a_star_import_needs_no_extra():
    """What needs a driver is importable by name, and not part of `*`."""
    needs = {"PostgresCheckpointStore", "RedisCheckpointStore", "SQLAlchemyTaskStore"}
    assert set(CONTRACT) - set(longrun.__all__) <= needs
    assert not needs & set(longrun.__all__)


def test_every_error_is_exported_and_in_one_tree():
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and not value.__name__.startswith("_")
    ]
    for kind in classes:
        if kind.__module__ == errors.__name__ and issubclass(kind, Exception):
            assert issubclass(kind, longrun.LongrunError)
            assert kind.__name__ in (errors.__doc__ or "")
            if kind.__name__ != "WriteOrderError":  # between a store and its owner: nobody else ever sees it
                assert getattr(longrun, kind.__name__) is kind


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("name", 5, "another"),
        errors.InvalidStateError("a", "completed", "pause", "it is over"),
        errors.ExecutionNotFoundError("a"),
        errors.ExecutionExistsError("a", "w"),
        errors.StoreUnavailableError("sqlite", "away"),
        errors.LeaseLostError("a", 7),
        errors.NotStorableError("state", "no"),
        errors.UnknownWorkflowError("w", ("v",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_can_be_copied_as_it_must_be_to_come_to_another_process(error):
    error.add_note("here")
    other = copy.copy(error)
    assert other is not error
    assert (type(other), str(other), other.__dict__) == (type(error), str(error), error.__dict__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        longrun.nonsense  # noqa: B018


def test_importing_longrun_imports_no_driver_and_no_concrete_store():
    """An optional package is needed by whoever uses it, not by whoever imports longrun."""
    code = (
        "import sys, longrun.executor, longrun.client\n"
        "print(*sorted(name for name in sys.modules if name.startswith(tuple(sys.argv[1:]))))"
    )
    unwanted = ["psycopg", "redis", "sqlalchemy", "sqlite3", "trio", "longrun.stores.memory", "longrun.stores.sqlite"]
    unwanted += ["opentelemetry", "prometheus_client", "IPython"]
    done = subprocess.run(
        [sys.executable, "-c", code, *unwanted],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == ""


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "longrun" / "py.typed").exists()


def test_records_are_frozen_and_their_reprs_keep_states_and_errors_to_themselves():
    fields = {field.name: field for field in longrun.Execution.__attrs_attrs__}
    expected = [
        "id",
        "name",
        "state",
        "progress",
        "current_step",
        "total_steps",
        "step_names",
        "start_time",
        "last_update",
        "end_time",
        "checkpoints",
        "metadata",
        "error",
        "version",
        "queue",
        "priority",
        "owner",
        "parent_id",
        "reason",
    ]
    assert set(expected) <= set(fields)
    assert not fields["error"].repr
    checkpoint = {field.name: field for field in longrun.Checkpoint.__attrs_attrs__}
    assert set(checkpoint) == {"id", "step", "state", "timestamp", "metadata", "seq", "kind", "size"}
    assert not checkpoint["state"].repr
    event = {field.name for field in longrun.ExecutionEvent.__attrs_attrs__}
    assert event == {"type", "execution_id", "step", "timestamp", "error", "attempt", "data"}
    states = ["initialized", "running", "paused", "resuming", "waiting", "blocked", "completed", "failed", "cancelled"]
    assert [state.value for state in longrun.ExecutionState] == states


def test_the_defaults_are_those_of_the_contract():
    config = longrun.ExecutorConfig()
    assert config.checkpoint_dir == ".longrun"
    assert (config.durability, config.checkpoint_interval, config.max_retries) == ("step", 5.0, 3)
    assert (config.heartbeat_interval, config.lease_ttl, config.auto_resume) == (5.0, 30.0, True)
    assert (config.max_concurrency, config.drain_timeout, config.max_crashes) == (None, 10.0, 5)
    assert config.on_corruption == "previous"
    policy = longrun.RetryPolicy()
    assert (policy.max_attempts, policy.initial, policy.factor, policy.maximum, policy.jitter) == (
        4,
        1.0,
        2.0,
        30.0,
        True,
    )


@pytest.mark.parametrize(
    ("missing", "program", "extra"),
    [
        ("opentelemetry", "import longrun.otel", "otel"),
        ("prometheus_client", "from longrun.metrics import PrometheusMetrics; PrometheusMetrics()", "metrics"),
        ("sqlalchemy", "from longrun import SQLAlchemyTaskStore; SQLAlchemyTaskStore('sqlite://')", "sqlalchemy"),
    ],
)
def test_a_missing_extra_is_one_helpful_line(missing: str, program: str, extra: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
from longrun import MissingExtraError
try:
    {program}
except MissingExtraError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(longrun.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert f"pip install 'longrun[{extra}]'" in done.stdout
