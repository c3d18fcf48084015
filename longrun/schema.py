"""What `--json` prints and the dashboard's answers are made of: one schema, with a version.

Place in the life of an execution: whenever somebody looks. Streams (`events`, `watch`) print one document a line.

Every document has `longrun` (the schema's version) and `kind`; the rest is what `KINDS` says of that kind. A field may
be added within a version; none changes its meaning or goes. Times are ISO 8601 in UTC. A type with `?` may be null.
Errors and states of executions stand only where one execution is shown, never in lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from longrun.events import ExecutionEvent
    from longrun.plan import ResumePlan
    from longrun.queues import QueueInfo
    from longrun.records import Checkpoint, Execution, Forecast, StepRecord
    from longrun.stored import Owner

VERSION = 1

KINDS: dict[str, dict[str, str]] = {
    # documents
    "executions": {"executions": "[summary]", "counts": "counts", "next": "string?"},
    "execution": {
        "execution": "summary",
        "error": "string?",
        "reason": "string?",
        "step_names": "[string]",
        "steps": "[step]",
        "steps_left_out": "integer",
        "checkpoints": "[checkpoint]",
        "inside": "[inside]",
        "messages": "[message]",
        "children": "[summary]",
        "state": "any",
    },
    "run": {"execution": "summary", "result": "any", "error": "string?", "reason": "string?", "exit_code": "integer"},
    "running": {"executions": "[summary]", "counts": "counts", "time": "time"},
    "event": {
        "type": "string",
        "id": "string",
        "step": "string?",
        "time": "time",
        "attempt": "integer",
        "error": "string?",
        "data": "object",
    },
    "workers": {"workers": "[worker]"},
    "queues": {"queues": "[queue]"},
    "plans": {"plans": "[plan]", "blocked": "integer", "unchecked": "[string]"},
    "doctor": {"checks": "[check]", "worst": "string"},
    "store": {"facts": "object", "counts": "counts"},
    "copied": {"copied": "[string]", "present": "[string]", "skipped": "object"},
    "changes": {"verb": "string", "changes": "[change]"},
    "started": {"id": "string"},
    "collected": {"executions": "integer", "owners": "integer", "dry_run": "boolean"},
    # parts
    "summary": {
        "id": "string",
        "workflow": "string",
        "version": "string",
        "state": "string",
        "hold": "boolean",
        "progress": "forecast",
        "step": "integer",
        "total_steps": "integer",
        "step_progress": "step_progress?",
        "attempt": "integer",
        "queue": "string",
        "priority": "integer",
        "owner": "string?",
        "parent_id": "string?",
        "metadata": "object",
        "started": "time",
        "updated": "time",
        "ended": "time?",
        "due": "time?",
        "waiting_for": "string?",
        "checkpoints": "integer",
    },
    "forecast": {
        "fraction": "number",
        "remaining_seconds": "number?",
        "items_per_second": "number?",
        "basis": "string",
    },
    "step_progress": {"done": "number", "total": "number?", "message": "string?"},
    "step": {
        "seq": "integer",
        "kind": "string",
        "step": "integer",
        "name": "string?",
        "started": "time?",
        "ended": "time",
        "seconds": "number?",
        "attempts": "integer",
        "error": "string?",
        "next_step": "integer",
    },
    "checkpoint": {
        "id": "string",
        "seq": "integer",
        "step": "integer",
        "kind": "string",
        "size": "integer",
        "time": "time",
    },
    "inside": {"kind": "string", "name": "string", "done": "integer", "total": "integer?"},
    "message": {"kind": "string", "name": "string?", "sent": "time"},
    "worker": {
        "id": "string",
        "host": "string?",
        "pid": "integer?",
        "status": "string",
        "lease_seconds": "number",
        "executions": "integer",
        "workflows": "[string]",
        "queues": "[string]",
    },
    "queue": {
        "name": "string",
        "queued": "integer",
        "running": "integer",
        "concurrency": "integer?",
        "rate": "number?",
        "per_seconds": "number?",
    },
    "plan": {
        "id": "string",
        "workflow": "string",
        "state": "string",
        "action": "string",
        "reason": "string",
        "blocked": "boolean",
        "step": "integer",
        "total_steps": "integer",
        "step_name": "string?",
        "skipped": "[string]",
        "inside": "[inside]",
        "missing": "[string]",
        "misfit": "string?",
        "owner": "string?",
        "owner_alive": "boolean",
        "at_risk_seconds": "number?",
        "version": "string",
        "notes": "[string]",
        "unchecked": "[string]",
    },
    "check": {"name": "string", "status": "string", "message": "string"},
    "change": {"id": "string", "ok": "boolean", "error": "string?"},
}
"""The fields of every kind, and their types: string, integer, number, boolean, time, object, counts, any, `[type]`, or
another kind."""

STATUSES = ("alive", "dead", "expired")
"""Of a worker: its lock and lease are held, its lock is free, its lease ran out."""

_PLAIN: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "time": str,
    "counts": dict,
}


def document(kind: str, **fields: Any) -> dict[str, Any]:
    return {"longrun": VERSION, "kind": kind, **fields}


def problems(value: Any, kind: str | None = None, where: str = "") -> list[str]:
    """What of a document does not fit the schema; nothing if it is as promised."""
    if kind is None:
        if not isinstance(value, dict) or value.get("longrun") != VERSION or value.get("kind") not in KINDS:
            return ["it is no document of this version"]
        rest = {name: one for name, one in value.items() if name not in ("longrun", "kind")}
        return problems(rest, value["kind"], value["kind"])
    if kind.endswith("?"):
        return [] if value is None else problems(value, kind[:-1], where)
    if kind == "any":
        return []
    if kind.startswith("["):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [found for n, one in enumerate(value) for found in problems(one, kind[1:-1], f"{where}[{n}]")]
    if kind in _PLAIN:
        fits = isinstance(value, _PLAIN[kind]) and (kind == "boolean" or not isinstance(value, bool))
        return [] if fits else [f"{where} is no {kind}"]
    return _misfits(value, kind, where)


def _misfits(value: Any, kind: str, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is no {kind}"]
    wrong = [f"{where}.{name} is missing" for name in KINDS[kind] if name not in value]
    wrong += [f"{where}.{name} is not in the schema" for name in value if name not in KINDS[kind]]
    return wrong + [
        found
        for name, one in value.items()
        if name in KINDS[kind]
        for found in problems(one, KINDS[kind][name], f"{where}.{name}")
    ]


# --- from records to documents ----------------------------------------------------------------------------------------


def time(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat()


def summary(execution: Execution, forecast: Forecast) -> dict[str, Any]:
    """What a list may show of an execution: no error, no reason, no state."""
    shown = execution.step_progress
    return {
        "id": execution.id,
        "workflow": execution.name,
        "version": execution.version,
        "state": execution.state.value,
        "hold": execution.hold,
        "progress": forecast.to_data(),
        "step": execution.current_step,
        "total_steps": execution.total_steps,
        "step_progress": None if shown is None else attrs.asdict(shown),
        "attempt": execution.attempt,
        "queue": execution.queue,
        "priority": execution.priority,
        "owner": execution.owner,
        "parent_id": execution.parent_id,
        "metadata": dict(execution.metadata),
        "started": time(execution.start_time),
        "updated": time(execution.last_update),
        "ended": time(execution.end_time),
        "due": time(execution.due),
        "waiting_for": execution.waiting_for,
        "checkpoints": execution.checkpoints,
    }


def step(row: StepRecord) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "kind": row.kind,
        "step": row.step,
        "name": row.name,
        "started": time(row.started),
        "ended": time(row.ended),
        "seconds": None if row.started is None else round((row.ended - row.started).total_seconds(), 6),
        "attempts": row.attempts,
        "error": row.error,
        "next_step": row.next_step,
    }


def checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "id": one.id,
        "seq": one.seq,
        "step": one.step,
        "kind": one.kind,
        "size": one.size,
        "time": time(one.timestamp),
    }


def event(one: ExecutionEvent) -> dict[str, Any]:
    return document(
        "event",
        type=one.type.value,
        id=one.execution_id,
        step=one.step,
        time=time(one.timestamp),
        attempt=one.attempt,
        error=one.error,
        data=dict(one.data),
    )


def worker(owner: Owner, executions: int) -> dict[str, Any]:
    life: Mapping[str, Any] = owner.life
    host, pid = life.get("host"), life.get("pid")
    return {
        "id": owner.id,
        "host": host if isinstance(host, str) else None,
        "pid": pid if isinstance(pid, int) else None,
        "status": _status(owner),
        "lease_seconds": round(owner.remaining, 3),
        "executions": executions,
        "workflows": list(owner.workflows),
        "queues": list(owner.queues),
    }


def queue(one: QueueInfo) -> dict[str, Any]:
    limit = one.limit
    rate = None if limit is None else limit.rate
    return {
        "name": one.name,
        "queued": one.queued,
        "running": one.running,
        "concurrency": None if limit is None else limit.concurrency,
        "rate": rate,
        "per_seconds": None if limit is None or rate is None else limit.per,
    }


def _status(owner: Owner) -> str:
    from longrun import lease  # here: it brings the event loop along, and `--help` needs none

    if owner.remaining < 0:
        return "expired"
    return "dead" if lease.gone([owner]) else "alive"


def plan(one: ResumePlan) -> dict[str, Any]:
    return {
        "id": one.id,
        "workflow": one.workflow,
        "state": one.state.value,
        "action": one.action,
        "reason": one.reason,
        "blocked": one.blocked,
        "step": one.step,
        "total_steps": one.total,
        "step_name": one.step_name,
        "skipped": list(one.skipped),
        "inside": [attrs.asdict(part) for part in one.inside],
        "missing": list(one.missing),
        "misfit": one.misfit,
        "owner": one.owner,
        "owner_alive": one.owner_alive,
        "at_risk_seconds": None if one.at_risk is None else round(one.at_risk, 3),
        "version": one.version,
        "notes": list(one.notes),
        "unchecked": list(one.unchecked),
    }
