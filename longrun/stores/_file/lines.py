r"""One line of a journal, an inbox or an index: a JSON object with a checksum and the identity of what it belongs to.

Place in the life of an execution: checkpoint. ::

    {"crc":"9ae0c1b2","id":"site-42","gen":3,"n":7,"sizes":[14],"data":[{"url":"x"}],"kind":"save","head":{…}}\n

The checksum covers every byte behind its own field. Payloads are opaque bytes, cut out again by `sizes` and never
parsed: JSON text stands there as it is, so that `cat` and `jq` can read it; all else is a base64 string, marked by a
negative size.
"""

from __future__ import annotations

import binascii
import importlib
import json
import re
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any
from zlib import crc32

try:
    orjson: Any = importlib.import_module("orjson")
except ImportError:  # an extra: only faster
    orjson = None

_BEHIND_CRC = 18
_ID = re.compile(rb'"id":("(?:[^"\\]|\\.)*"),"gen":(\d+),"n":')
_FRONT = re.compile(rb'(\d+)(?:,"sizes":\[([-0-9,]*)\],"data":\[)?')
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_OURS = frozenset({"save", "state", "blob", "entry", "steps", "row"})
"""Kinds of lines with nothing in them but text and small numbers of our own: no large number and no NaN of a user's."""
_OURS_STARTS = (b'{"kind":"save"', b'{"kind":"steps"', b'{"kind":"row"')
_DEFINED_STARTS = (b'{"kind":"definition"', b'{"kind":"finished"')
"""Lines with a definition. Of a user's there can be a priority and metadata in it."""
_JSON_STARTS = frozenset(bytes([start]) for start in b'{["-0123456789tfn')


class Identity:
    """Whose lines they are: execution and generation, as the bytes that each line repeats."""

    __slots__ = ("front", "gen", "id")

    def __init__(self, id: str, gen: int) -> None:
        self.id, self.gen = id, gen
        self.front = f'"id":{quoted(id)},"gen":{gen},"n":'.encode()


class Line:
    """A line that fits its checksum."""

    __slots__ = ("fields", "n", "payloads")

    def __init__(self, n: int, fields: dict[str, Any], payloads: list[bytes]) -> None:
        self.n, self.fields, self.payloads = n, fields, payloads


class ForeignLineError(Exception):
    """A whole line that belongs to another execution or generation; its text says to which."""


class BrokenLineError(Exception):
    """A line that does not fit its checksum."""


def pack(identity: Identity, n: int, fields: dict[str, Any], payloads: Sequence[bytes] = ()) -> bytes:
    """The line, newline included. `fields` begin with their `kind`."""
    body = b"%b%d%b,%b" % (identity.front, n, _data(payloads) if payloads else b"", _dumped(fields)[1:])
    return b'{"crc":"%08x",%b\n' % (crc32(body), body)


def pack_save(identity: Identity, n: int, fields: dict[str, Any], data: bytes) -> bytes:
    """As `pack`, for a line of our own with one payload."""
    if data[:1] not in _JSON_STARTS or b"\n" in data:
        return pack(identity, n, fields, (data,))
    text = dumped(fields, ours=True)
    body = b'%b%d,"sizes":[%d],"data":[%b],%b' % (identity.front, n, len(data), data, text[1:])
    return b'{"crc":"%08x",%b\n' % (crc32(body), body)


def pack_twice(identity: Identity, n: int, *lines: dict[str, Any]) -> list[bytes]:
    """These lines, without payloads, and behind them the same again."""
    texts = [_dumped(fields)[1:] for fields in lines]
    return [_sealed(b"%b%d,%b" % (identity.front, number, text)) for number, text in enumerate(texts * 2, n)]


def _sealed(body: bytes) -> bytes:
    return b'{"crc":"%08x",%b\n' % (crc32(body), body)


def _dumped(fields: dict[str, Any]) -> bytes:
    ours = fields["kind"] in _OURS or ("definition" in fields and "metadata" not in fields["definition"])
    return dumped(fields, ours=ours)


def dumped(value: Any, *, ours: bool) -> bytes:
    """JSON text, in no more bytes than it needs; `ours`: text and small numbers of our own and no others."""
    if orjson is not None and ours:
        try:
            return orjson.dumps(value)  # type: ignore[no-any-return]  # bytes, always
        except TypeError:  # text that is no Unicode
            pass
    return _ENCODER.encode(value).encode()


def loaded(text: bytes, *, ours: bool) -> Any:
    if orjson is not None and ours:
        try:
            return orjson.loads(text)
        except ValueError:  # as above
            pass
    return json.loads(text)


def _data(payloads: Sequence[bytes]) -> bytes:
    if len(payloads) == 1 and _stands_as_it_is(payload := payloads[0]):
        return b',"sizes":[%d],"data":[%b]' % (len(payload), payload)
    sizes: list[bytes] = []
    texts: list[bytes] = []
    for payload in payloads:
        if _stands_as_it_is(payload):
            texts.append(payload)
            sizes.append(b"%d" % len(payload))
        else:
            text = b'"%b"' % binascii.b2a_base64(payload, newline=False)
            texts.append(text)
            sizes.append(b"-%d" % len(text))
    return b',"sizes":[%b],"data":[%b]' % (b",".join(sizes), b",".join(texts))


def _stands_as_it_is(payload: bytes) -> bool:
    """Whether it looks like JSON in one line."""
    return payload[:1] in _JSON_STARTS and b"\n" not in payload


def unpack(line: bytes, identity: Identity) -> Line:
    """The contents of a line without its newline; raises `BrokenLineError` or `ForeignLineError`."""
    return _unpacked(_checked(line), identity)


def _unpacked(body: bytes, identity: Identity) -> Line:
    front = identity.front
    if not body.startswith(front):
        raise ForeignLineError(_whose(body))
    match = _FRONT.match(body, len(front))
    if match is None:
        raise BrokenLineError
    number, sizes = match.groups()
    position = match.end()
    payloads: list[bytes] = []
    if sizes is not None and sizes.isdigit():  # one, and it stands there as it is
        end = position + int(sizes)
        payloads.append(body[position:end])
        position = end + 1
    elif sizes is not None:
        for size in sizes.split(b","):
            length = int(size)
            text = body[position : position + abs(length)]
            payloads.append(text if length > 0 else binascii.a2b_base64(text[1:-1]))
            position += abs(length) + 1
    try:
        text = b"{" + body[position + 1 :]
        fields = loaded(text, ours=text.startswith(_OURS_STARTS) or _is_ours(text))
    except ValueError as error:
        raise BrokenLineError from error
    return Line(int(number), fields, payloads)


def _is_ours(text: bytes) -> bool:
    """Whether a line with a definition has nothing of a user's in it."""
    return text.startswith(_DEFINED_STARTS) and b'"metadata":' not in text and b'"priority":' not in text


def unpack_any(line: bytes) -> tuple[Identity, Line]:
    """The contents of a line that may belong to anybody."""
    body = _checked(line)
    identity = _identity_of(body)
    return identity, _unpacked(body, identity)


def fits(line: bytes) -> bool:
    """Whether a line, whoever owns it, fits its checksum."""
    try:
        _checked(line)
    except BrokenLineError:
        return False
    return True


def all_fit(lines: list[bytes]) -> bool:
    """Whether each of these does, in two thirds of the time."""
    fronts = [b'{"crc":"%08x",' % crc32(line[_BEHIND_CRC:]) for line in lines]
    return fronts == [line[:_BEHIND_CRC] for line in lines]


def claims_to_be(line: bytes, identity: Identity) -> bool:
    """Whether a line says that it is of this execution and generation, be it damaged or not."""
    return line.startswith(identity.front, _BEHIND_CRC)


def identity_of(line: bytes) -> Identity:
    """Whose line it says it is."""
    return _identity_of(_checked(line))


def _identity_of(body: bytes) -> Identity:
    match = _ID.match(body)
    if match is None:
        raise BrokenLineError
    return Identity(_unquoted(match[1]), int(match[2]))


def _checked(line: bytes) -> bytes:
    body = line[_BEHIND_CRC:]
    if line[:_BEHIND_CRC] != b'{"crc":"%08x",' % crc32(body):
        raise BrokenLineError
    return body


def _unquoted(text: bytes) -> str:
    id: str = json.loads(text) if b"\\" in text else text[1:-1].decode()
    return id


def _whose(body: bytes) -> str:
    match = _ID.match(body)
    return "something else" if match is None else f"execution {_unquoted(match[1])!r}, generation {int(match[2])}"
