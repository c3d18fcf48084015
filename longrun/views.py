"""From what is stored to what users hold: executions, checkpoints and step records.

Place in the life of an execution: whenever somebody looks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from longrun import chance, codec
from longrun.errors import ConfigError, NotStorableError, StateMismatchError
from longrun.records import ID_LIMIT, Checkpoint, Execution, Forecast, Progress, StepRecord, to_time
from longrun.registry import StepRegistry
from longrun.snapshot import decode_state
from longrun.stored import TRACE, Boundary, Definition, Head, shown_metadata


def execution(
    definition: Definition, head: Head, live: Progress | None = None, forecast: Forecast | None = None
) -> Execution:
    """The record of an execution. `live` is progress that is not stored yet."""
    progress = head.progress
    shown = live if live is not None else Progress(done=head.done, total=head.of, message=head.note)
    if live is not None and definition.total and not head.state.finished:
        progress = min(1.0, (head.step + live.fraction) / definition.total)
    has_progress = bool(shown.done or shown.total or shown.message)
    return Execution(
        id=definition.id,
        name=definition.workflow,
        state=head.state,
        progress=progress,
        current_step=head.step,
        total_steps=definition.total,
        step_names=definition.steps,
        start_time=to_time(definition.created),  # type: ignore[arg-type]  # never None
        last_update=to_time(head.updated),  # type: ignore[arg-type]  # never None
        end_time=to_time(head.ended),
        checkpoints=head.seq,
        metadata=dict(shown_metadata(definition.metadata)),
        error=head.error,
        version=definition.version,
        queue=definition.queue,
        priority=definition.priority,
        owner=head.owner,
        parent_id=definition.parent_id,
        reason=head.reason,
        attempt=head.attempt,
        hold=head.hold,
        due=to_time(head.due),
        waiting_for=head.signal,
        step_progress=shown if has_progress else None,
        forecast=forecast,
    )


def checkpoint(
    definition: Definition, boundary: Boundary, blobs: Mapping[str, bytes], registry: StepRegistry | None
) -> Checkpoint:
    """A stored boundary as the checkpoint it is, its state typed if this program knows the step."""
    return Checkpoint(
        id=f"{definition.id}@{boundary.seq}",
        step=boundary.next,
        state=_old_state(boundary, blobs, state_type(definition.steps, boundary, registry)),
        timestamp=to_time(boundary.ended),  # type: ignore[arg-type]  # never None
        metadata={"step_name": boundary.name, "attempts": boundary.attempts, "visit": boundary.visit},
        seq=boundary.seq,
        kind=boundary.kind,
        size=boundary.size,
    )


def _old_state(boundary: Boundary, blobs: Mapping[str, bytes], kind: Any) -> Any:
    """An old state typed as it was then; as plain data if its class has changed since."""
    data, split = boundary.data or b"null", bool(boundary.blobs)
    try:
        return decode_state(data, blobs, split, kind)
    except StateMismatchError:
        return decode_state(data, blobs, split, Any)


def state_type(steps: tuple[str, ...], boundary: Boundary, registry: StepRegistry | None) -> Any:
    """The annotation that a boundary's state was encoded by; Any if this program does not know it."""
    if registry is None:
        return Any
    if boundary.next < len(steps):
        step = registry.get(steps[boundary.next])
        return Any if step is None else step.state_type
    step = registry.get(boundary.name) if boundary.name else None
    return Any if step is None else step.result_type


def step_record(boundary: Boundary) -> StepRecord:
    return StepRecord(
        seq=boundary.seq,
        kind=boundary.kind,
        step=boundary.step,
        name=boundary.name,
        started=to_time(boundary.started),
        ended=to_time(boundary.ended),  # type: ignore[arg-type]  # never None
        attempts=boundary.attempts,
        error=boundary.error,
        next_step=boundary.next,
    )


def new_id() -> str:
    """A fresh execution id; ids sort by the millisecond in which they were made."""
    return f"run-{time.time_ns() // 1_000_000:012x}{chance.bits(80):020x}"


def digest_id(parent: str, wanted: str) -> str:
    """An id for what would be too long or have other letters, the same every time."""
    digest = hashlib.blake2b(wanted.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{parent[: ID_LIMIT - len(digest) - 1]}~{digest}"


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata is a small dict of JSON values: it is listed, filtered by and shown."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ConfigError("metadata", type(metadata).__name__, "give a dict")
    plain = dict(metadata)
    for key, value in plain.items():
        if not isinstance(key, str):
            raise ConfigError("metadata", key, "its keys must be strings")
        if key == TRACE:
            raise ConfigError("metadata", key, "telemetry keeps something of its own under that name")
        if not is_plain(value):
            raise NotStorableError(f"metadata[{key!r}]", f"{type(value).__name__} is not a JSON value")
    codec.encode(plain, dict, path="metadata", limit=65536)
    return plain


def is_plain(value: Any) -> bool:
    """Whether it is a JSON value, which is all that metadata can hold."""
    try:
        return _is_json(value)
    except RecursionError:
        return False


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, float):
        return value == value and value not in (float("inf"), float("-inf"))
    return value is None or type(value) in (str, int, bool)
