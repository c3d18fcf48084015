"""Records as plain JSON values, and back. What has its default value is left out, so that lines stay short.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import isfinite
from sys import intern
from typing import Any

import attrs

from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Definition, Head, Message

_STATES = {state.value: state for state in ExecutionState}


def _listing(kind: type, *without: str) -> Callable[[Any], dict[str, Any]]:
    """A function that lists a record's fields but those that have their default value."""
    found = [one for one in attrs.fields(kind) if one.name not in without]
    names = tuple([one.name for one in found])
    defaults = tuple([one.default for one in found])
    values_of = operator.attrgetter(*names)

    def listed(record: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value, default in zip(names, values_of(record), defaults, strict=True)
            if value is not default and value != default
        }

    return listed


_message = _listing(Message, "payload", "options", "id")
_TIMES = ("started", "updated", "ended", "due", "progress", "done", "of")


def head_form(head: Head) -> dict[str, Any]:
    """Written out, as is `boundary_form`: there is one of each for every step, and a loop takes much longer."""
    form: dict[str, Any] = {"state": head.state}
    if head.fence:
        form["fence"] = head.fence
    if head.revision:
        form["revision"] = head.revision
    if head.owner is not None:
        form["owner"] = head.owner
    if head.seq:
        form["seq"] = head.seq
    if head.step:
        form["step"] = head.step
    if head.visit != 1:
        form["visit"] = head.visit
    if head.iteration:
        form["iteration"] = head.iteration
    if head.attempt:
        form["attempt"] = head.attempt
    if head.started is not None:
        form["started"] = head.started
    form["updated"] = head.updated
    if head.ended is not None:
        form["ended"] = head.ended
    if head.due is not None:
        form["due"] = head.due
    if head.signal is not None:
        form["signal"] = head.signal
    if head.woken:
        form["woken"] = True
    if head.hold:
        form["hold"] = True
    if head.crashes:
        form["crashes"] = head.crashes
    if head.error is not None:
        form["error"] = head.error
    if head.reason is not None:
        form["reason"] = head.reason
    if head.progress:
        form["progress"] = head.progress
    if head.done:
        form["done"] = head.done
    if head.of is not None:
        form["of"] = head.of
    if head.note is not None:
        form["note"] = head.note
    if not isfinite(head.updated + head.progress + head.done + (head.of or 0.0) + (head.due or 0.0)):
        _spell_out(form)
    return form


def passing_form(head: Head) -> dict[str, Any]:
    """`head_form` of one that an owner has on its way from step to step, of which it is known what is left out."""
    return {
        "state": "running",
        "fence": head.fence,
        "revision": head.revision,
        "owner": head.owner,
        "seq": head.seq,
        "step": head.step,
        "visit": head.visit,
        "started": head.started,
        "updated": head.updated,
        "progress": head.progress,
    }


def ended_form(head: Head) -> dict[str, Any]:
    """The same of one that has come to its end."""
    return {
        "state": "completed",
        "fence": head.fence,
        "revision": head.revision,
        "seq": head.seq,
        "step": head.step,
        "visit": head.visit,
        "updated": head.updated,
        "ended": head.ended,
        "progress": 1.0,
    }


def _spell_out(form: dict[str, Any]) -> None:
    """JSON has no infinity: such a number is written as text, and listed under `odd`."""
    odd = [name for name in _TIMES if name in form and form[name] is not None and not isfinite(form[name])]
    form.update({name: repr(form[name]) for name in odd}, odd=odd)


def head_from(form: Mapping[str, Any]) -> Head:
    fields = {**form, "state": _STATES[form["state"]]}
    _share(fields, "owner", "signal")
    for name in fields.pop("odd", ()):
        fields[name] = float(fields[name])
    return Head(**fields)


def definition_form(definition: Definition) -> dict[str, Any]:
    """Without the steps, which have a line of their own: a listing does not read them."""
    form: dict[str, Any] = {"workflow": definition.workflow}
    if definition.version != "1":
        form["version"] = definition.version
    if definition.total:
        form["total"] = definition.total
    if definition.queue != "default":
        form["queue"] = definition.queue
    if definition.priority:
        form["priority"] = definition.priority
    if definition.metadata:
        form["metadata"] = dict(definition.metadata)
    if definition.parent_id is not None:
        form["parent_id"] = definition.parent_id
    form["created"] = definition.created
    return form


def with_steps(definition: Definition, steps: tuple[str, ...]) -> Definition:
    """The same definition with these steps. Written out: `attrs.evolve` takes many times as long."""
    new: Definition = object.__new__(Definition)
    new.id, new.workflow, new.version, new.steps = definition.id, definition.workflow, definition.version, steps
    new.total, new.queue, new.priority = definition.total, definition.queue, definition.priority
    new.metadata, new.parent_id, new.created = definition.metadata, definition.parent_id, definition.created
    return new


def definition_from(id: str, form: Mapping[str, Any], steps: tuple[str, ...] = ()) -> Definition:
    fields = dict(form)
    _share(fields, "workflow", "version", "queue")
    return Definition(id=id, steps=steps, **fields)


def _share(fields: dict[str, Any], *names: str) -> None:
    """Texts that many executions have in common are kept once."""
    for name in names:
        if type(fields.get(name)) is str:
            fields[name] = intern(fields[name])


def boundary_form(boundary: Boundary) -> dict[str, Any]:
    """The row without its state."""
    form: dict[str, Any] = {"seq": boundary.seq, "kind": boundary.kind, "step": boundary.step}
    if boundary.name is not None:
        form["name"] = boundary.name
    if boundary.started is not None:
        form["started"] = boundary.started
    form["ended"] = boundary.ended
    if boundary.attempts:
        form["attempts"] = boundary.attempts
    if boundary.error is not None:
        form["error"] = boundary.error
    form["next"] = boundary.next
    if boundary.visit != 1:
        form["visit"] = boundary.visit
    if boundary.iteration:
        form["iteration"] = boundary.iteration
    if boundary.size:
        form["size"] = boundary.size
    if boundary.blobs:
        form["blobs"] = list(boundary.blobs)
    return form


def boundary_from(form: Mapping[str, Any], data: bytes | None = None, *, blobs: bool = True) -> Boundary:
    fields = dict(form)
    names = fields.pop("blobs", ())
    fields.pop("state", None)
    return Boundary(**fields, data=data, blobs=tuple(names) if blobs else ())


def message_form(message: Message) -> dict[str, Any]:
    form = _message(message)
    if message.options:
        form["options"] = dict(message.options)
    return form


def message_from(form: Mapping[str, Any], id: int, payload: bytes | None) -> Message:
    fields = dict(form)
    options = fields.pop("options", EMPTY)
    return Message(**fields, id=id, payload=payload, options=options)
