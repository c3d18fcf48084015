"""Records as plain JSON values, and back. What has its default value is left out, so that lines stay short.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from longrun.records import ExecutionState
from longrun.stored import EMPTY, Boundary, Definition, Head, Message

_STATES = {state.value: state for state in ExecutionState}


def _defaults(kind: type, *without: str) -> tuple[tuple[str, Any], ...]:
    return tuple((one.name, one.default) for one in attrs.fields(kind) if one.name not in without)


_HEAD = _defaults(Head)
_DEFINITION = _defaults(Definition, "steps", "id")
_BOUNDARY = _defaults(Boundary, "data", "blobs")
_MESSAGE = _defaults(Message, "payload", "options", "id")


def _plain(record: object, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {name: value for name, default in fields if (value := getattr(record, name)) != default}


def head_form(head: Head) -> dict[str, Any]:
    return _plain(head, _HEAD)


def head_from(form: Mapping[str, Any]) -> Head:
    return Head(**{**form, "state": _STATES[form["state"]]})


def definition_form(definition: Definition) -> dict[str, Any]:
    """Without the steps, which have a line of their own: a listing does not read them."""
    form = _plain(definition, _DEFINITION)
    if definition.metadata:
        form["metadata"] = dict(definition.metadata)
    return form


def definition_from(id: str, form: Mapping[str, Any], steps: tuple[str, ...] = ()) -> Definition:
    return Definition(id=id, steps=steps, **form)


def boundary_form(boundary: Boundary) -> dict[str, Any]:
    """The row without its state."""
    form = _plain(boundary, _BOUNDARY)
    if boundary.blobs:
        form["blobs"] = list(boundary.blobs)
    return form


def boundary_from(form: Mapping[str, Any], data: bytes | None = None, *, blobs: bool = True) -> Boundary:
    fields = dict(form)
    names = fields.pop("blobs", ())
    fields.pop("state", None)
    return Boundary(**fields, data=data, blobs=tuple(names) if blobs else ())


def message_form(message: Message) -> dict[str, Any]:
    form = _plain(message, _MESSAGE)
    if message.options:
        form["options"] = dict(message.options)
    return form


def message_from(form: Mapping[str, Any], id: int, payload: bytes | None) -> Message:
    fields = dict(form)
    options = fields.pop("options", EMPTY)
    return Message(**fields, id=id, payload=payload, options=options)
