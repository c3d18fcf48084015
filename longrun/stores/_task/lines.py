"""The text of a stored task: one JSON document, one part a line, each part with a checksum of its own.

Place in the life of an execution: checkpoint. The whole of it is valid JSON::

    {"longrun":1,"id":"site-42","parts":[
    {"crc":"0b5c1f2a","definition":{"workflow":"crawl-site", …}},
    {"crc":"94c1d3e0","head":{"state":"running", …}},
    …
    {"crc":"77d21c08","end":{"parts":9,"head":{…}}}
    ]}

A checksum covers the rest of its line *and* the execution's id. A damaged line costs that part only, and a part that
did not change is written again as the bytes it was. Bytes that are UTF-8 stand there as text, others as base64.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from zlib import crc32

import attrs

from longrun.errors import CorruptDataError, NewerFormatError, NotStorableError
from longrun.records import ExecutionState
from longrun.stored import Boundary, Definition, Head, Message, Owner

FORMAT = 1

_CRC_AT = len('{"crc":"')
_REST_AT = len('{"crc":"00000000",')

Part = tuple[str, Any, bytes]
"""A kind, its contents, and the line they came from."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def line(id: str, kind: str, value: Any) -> bytes:
    """One part, with its checksum."""
    try:
        return text_line(id, kind, _encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotStorableError(f"the {kind} of {id!r}", f"JSON does not take it ({type(error).__name__})") from error


def text_line(id: str, kind: str, text: str) -> bytes:
    """The same, of what is JSON already."""
    rest = f'"{kind}":{text}}}'.encode()
    return b'{"crc":"%08x",%b' % (_crc(id, rest), rest)


def _crc(id: str, rest: bytes) -> int:
    return crc32(rest, crc32(id.encode() + b"\n"))


def document(id: str, lines: Iterable[bytes]) -> bytes:
    return b'{"longrun":%d,"id":%b,"parts":[\n%b\n]}\n' % (FORMAT, json.dumps(id).encode(), b",\n".join(lines))


def is_ours(data: bytes) -> bool:
    return data.startswith(b'{"longrun":')


def check_format(id: str, header: bytes) -> bool:
    """Whether the first line can be read; a newer format raises."""
    try:
        values = json.loads((header + b"]}").decode())
        found, named = values["longrun"], values["id"]
    except (ValueError, KeyError, TypeError):
        return False
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormatError(f"task {id!r}", found, FORMAT)
    return bool(found == FORMAT and named == id)


def read_line(id: str, text: bytes) -> Part | None:
    """A part, or None if it is damaged."""
    text = text.rstrip(b",\r")
    if not text.startswith(b'{"crc":"'):
        return None
    try:
        if int(text[_CRC_AT : _CRC_AT + 8], 16) != _crc(id, text[_REST_AT:]):
            return None
        (_, part) = json.loads(text.decode()).items()
    except (ValueError, RecursionError):
        return None
    return *part, text


def read_document(id: str, data: bytes) -> tuple[list[Part], int, bool]:
    """The readable parts, how many lines were damaged, and whether the end is there."""
    lines = data.split(b"\n")
    damaged = 0 if check_format(id, lines[0]) else 1
    parts: list[Part] = []
    for text in lines[1:]:
        if text in (b"", b"]}"):
            continue
        part = read_line(id, text)
        if part is None:
            damaged += 1
        else:
            parts.append(part)
    whole = any(kind == "end" and value["parts"] == len(parts) + damaged for kind, value, _ in parts)
    return parts, damaged, whole


# bytes


def text_of(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def bytes_of(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    try:
        return base64.b64decode(value["base64"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise CorruptDataError("stored bytes", "they are neither text nor base64") from error


# records: what has its default value is left out


@cache
def _defaults(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in attrs.fields(kind)}


def _changed(record: Any, **instead: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = _defaults(record.__class__)
    values = {name: getattr(record, name) for name, default in defaults.items() if getattr(record, name) != default}
    values |= {name: value for name, value in instead.items() if name in values}
    return values


def definition_out(definition: Definition) -> dict[str, Any]:
    """Without the steps, which a listing does not read, and the id, which the document has."""
    values = _changed(definition, metadata=dict(definition.metadata))
    values.pop("steps", None)
    del values["id"]
    return values


def definition_in(id: str, values: Mapping[str, Any], steps: Iterable[str] = ()) -> Definition:
    return Definition(id=id, steps=tuple(steps), **values)


def head_text(head: Head) -> str:
    """As JSON: a document has it twice."""
    return _encode(_changed(head, state=head.state.value))


def head_in(values: Mapping[str, Any]) -> Head:
    return Head(**{**values, "state": ExecutionState(values["state"])})


def boundary_out(boundary: Boundary) -> dict[str, Any]:
    return _changed(boundary, data=text_of(boundary.data))


def boundary_in(values: dict[str, Any]) -> Boundary:
    return Boundary(**{**values, "data": bytes_of(values.get("data")), "blobs": tuple(values.get("blobs", ()))})


def message_out(message: Message) -> dict[str, Any]:
    return _changed(message, payload=text_of(message.payload), options=dict(message.options))


def message_in(values: dict[str, Any]) -> Message:
    return Message(**{**values, "payload": bytes_of(values.get("payload"))})


def owner_out(owner: Owner, until: float) -> dict[str, Any]:
    return {**_changed(owner, life=dict(owner.life)), "remaining": until}


def owner_in(values: dict[str, Any], now: float) -> Owner:
    """Stored is the moment at which the lease ends; given is what is left of it."""
    lists = {name: tuple(values.get(name, ())) for name in ("workflows", "queues")}
    return Owner(**{**values, **lists, "remaining": values["remaining"] - now})
