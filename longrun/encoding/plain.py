"""Checkpoint, the lowest layer: values that describe themselves, as JSON text and back.

What JSON knows is stored as JSON. A closed set of standard types is stored as a small object with a tag, so that it
comes back as exactly the type it was: ``{"$": "datetime", "v": "2024-05-01T12:00:00+00:00"}``. A tag names an entry of
the table in this file, never a class or a module: reading can build these types and nothing else.

orjson does the text when it is installed, the standard library otherwise. What the two treat differently (integers
over 64 bit, NaN, infinities) is tagged here, and what orjson refuses (lone surrogates) falls back to the standard
library, so both write text that either reads alike.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import ModuleType, NoneType
from typing import Any, NoReturn
from uuid import UUID
from zoneinfo import ZoneInfo

from longrun.errors import CorruptDataError

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment, unused-ignore]

Json = Any
TAG = "$"
MAX_DEPTH = 200
MAX_INT = 2**63 - 1
MIN_INT = -(2**63)
SMALL = 8192
"""Texts up to this size are copied: orjson leaves some 4 KiB of room behind each, and states and cursors are kept."""

_orjson: ModuleType | None = orjson
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+){0,3}")
_AS_IT_IS = frozenset({str, bool, NoneType})
_FLAT = frozenset({*_AS_IT_IS, int})
_NAMES = frozenset({str})
_BUILTINS = (bool, int, float, str, bytes, dict, list, tuple, set, frozenset, datetime, date, time, timedelta, UUID)
_KNOWN = "datetime, date, time, timedelta, UUID, Decimal, bytes, set, frozenset, tuple and Path"


class Located(Exception):  # noqa: N818 -- never leaves the codec; each subclass becomes a named error there
    """Something wrong at one place of a value. The parts of its path are added while it travels outwards."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.parts: list[str] = []
        super().__init__(problem)

    def path(self, root: str) -> str:
        parts = self.parts[::-1]
        if len(parts) > 24:
            parts = [*parts[:12], " ... ", *parts[-4:]]
        return root + "".join(parts)


class Refused(Located):
    """A value that cannot be written."""


class Damaged(Located):
    """A stored value that cannot have been written by this module."""


def key_part(key: object) -> str:
    """One step of a path. Only text and numbers are shown; any other key is named by its type."""
    if type(key) is str:
        shown = repr(key)
        return f"[{shown}]" if len(shown) <= 60 else f"[{shown[:56]}...']"
    if type(key) is int and MIN_INT <= key <= MAX_INT:
        return f"[{key}]"
    return f"[<{type_name(type(key))} key>]"


def type_name(kind: type) -> str:
    return "None" if kind is NoneType else kind.__qualname__


# ---------------------------------------------------------------- text


def dumps(tree: Json) -> bytes:
    """The text of a tree that `to_plain` or a form made; with and without orjson it reads back the same."""
    if _orjson is not None:
        try:
            text: bytes = _orjson.dumps(tree)
        except TypeError:  # a lone surrogate, or more levels than orjson counts; the standard library takes both
            return _dumps_standard(tree)
        return b"%b" % text if len(text) < SMALL else text
    return _dumps_standard(tree)


def dumps_flat(value: Any) -> bytes | None:
    """The text of a dict of texts, whole numbers, truth values and None by names; None if it is anything else, or holds
    a number that may have to be tagged."""
    if type(value) is not dict or TAG in value or not _NAMES.issuperset(map(type, value)):
        return None
    if not _FLAT.issuperset(map(type, value.values())):
        return None
    if _orjson is None:
        return _dumps_standard(value) if all(map(_is_short, value.values())) else None
    try:
        text: bytes = _orjson.dumps(value)
    except TypeError:  # a lone surrogate, or a number over 64 bit
        return None
    return b"%b" % text if len(text) < SMALL else text


def _is_short(item: object) -> bool:
    return type(item) is not int or MIN_INT <= item <= MAX_INT


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_ascii_encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _dumps_standard(tree: Json) -> bytes:
    try:
        return _encoder.encode(tree).encode()
    except UnicodeEncodeError:
        return _ascii_encoder.encode(tree).encode()


def loads(data: bytes, what: str = "state") -> Json:
    """The tree of a stored text; `CorruptDataError` when it is not JSON."""
    if _orjson is not None:
        try:
            return _orjson.loads(data)
        except ValueError:  # maybe only a lone surrogate: the standard library has the last word
            pass
    try:
        return json.loads(str(data, "utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CorruptDataError(what, f"not UTF-8 text (at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise CorruptDataError(what, f"not JSON text (at character {error.pos})") from None
    except ValueError:
        raise CorruptDataError(what, "not JSON text (a number that JSON does not have)") from None
    except RecursionError:
        raise CorruptDataError(what, "nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


# ---------------------------------------------------------------- writing


def to_plain(value: Any, room: int = MAX_DEPTH) -> Json:
    """The JSON tree of a value. It may share lists with the value, so it must be used at once and never changed.

    `room` is how many levels of containers may still open.
    """
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    write = _WRITERS.get(kind)
    if write is None:
        raise Refused(why_not(value))
    return write(value, room)


def has_fields(kind: type) -> bool:
    """Whether it is an attrs class or a dataclass, whose instances are stored by their fields where that is said."""
    return hasattr(kind, "__attrs_attrs__") or hasattr(kind, "__dataclass_fields__")


def field_names(kind: type) -> frozenset[str]:
    """The names of these fields; none, if it has none."""
    attributes = getattr(kind, "__attrs_attrs__", ())
    fields = dataclasses.fields(kind) if not attributes and dataclasses.is_dataclass(kind) else ()
    return frozenset(field.name for field in (*attributes, *fields))


def why_not(value: object) -> str:
    """Why a value has no plain form, in terms of its type only."""
    kind = type(value)
    name = type_name(kind)
    if isinstance(value, Enum):
        return f"{name} is an enum; annotate the place with {name}, or store the member's value"
    for known in (*_BUILTINS, Decimal, PurePath):
        if isinstance(value, known):
            base = type_name(known)
            return f"{name} is a subclass of {base} and would come back as a plain {base}; convert it first"
    if has_fields(kind):
        return f"it is an instance of {name}, and the annotation does not say so; annotate the place with {name}"
    return f"{name} is neither a JSON value nor one of {_KNOWN}"


def _tagged(tag: str, payload: Json) -> dict[str, Json]:
    return {TAG: tag, "v": payload}


def _write_int(value: int, room: int) -> Json:
    return value if MIN_INT <= value <= MAX_INT else _tagged("int", hex(value))


def _write_float(value: float, room: int) -> Json:
    return value if math.isfinite(value) else _tagged("float", repr(value))


def _write_dict(value: dict[Any, Any], room: int) -> Json:
    if room < 1:
        raise too_deep()
    tree: dict[str, Json] = {}
    for key, item in value.items():
        if type(key) is not str or key == TAG:
            return _write_pairs(value, room)
        kind = type(item)
        if kind in _AS_IT_IS or (kind is int and MIN_INT <= item <= MAX_INT):
            tree[key] = item
            continue
        try:
            tree[key] = to_plain(item, room - 1)
        except Refused as refused:
            refused.parts.append(key_part(key))
            raise
    return tree


def tagged_dict(value: dict[Any, Any]) -> Json:
    """A dict that nothing else can be taken for, whatever its keys are."""
    return _write_pairs(value, MAX_DEPTH)


def _write_pairs(value: dict[Any, Any], room: int) -> Json:
    """A dict with a key that is no text, or with the tag's own key: a list of pairs, the order kept."""
    if room < 3:
        raise too_deep()
    pairs = []
    for key, item in value.items():
        try:
            pairs.append([to_plain(key, room - 3), to_plain(item, room - 3)])
        except Refused as refused:
            refused.parts.append(key_part(key))
            raise
    return _tagged("dict", pairs)


def _write_list(value: list[Any], room: int) -> Json:
    if room < 1:
        raise too_deep()
    kinds = set(map(type, value))
    if kinds <= _AS_IT_IS or (kinds == {float} and all(map(math.isfinite, value))):
        return value
    items = []
    for index, item in enumerate(value):  # not _write_items: one frame less for each level, so that 200 levels fit
        try:
            items.append(to_plain(item, room - 1))
        except Refused as refused:
            refused.parts.append(f"[{index}]")
            raise
    return items


def _write_items(value: tuple[Any, ...], room: int) -> list[Json]:
    items = []
    for index, item in enumerate(value):
        try:
            items.append(to_plain(item, room))
        except Refused as refused:
            refused.parts.append(f"[{index}]")
            raise
    return items


def _write_tuple(value: tuple[Any, ...], room: int) -> Json:
    if room < 2:
        raise too_deep()
    return _tagged("tuple", _write_items(value, room - 2))


def _write_set(value: set[Any] | frozenset[Any], room: int) -> Json:
    if room < 2:
        raise too_deep()
    try:
        items = [to_plain(item, room - 2) for item in value]
    except Refused as refused:
        refused.parts.append("[<element>]")
        raise
    return _tagged(type(value).__name__, items)


def too_deep(levels: int = MAX_DEPTH) -> Refused:
    return Refused(f"it is nested deeper than {levels} levels, or it contains itself")


def _write_moment(value: datetime | time, room: int) -> Json:
    """A time zone is kept by its name where it has one, otherwise as its offset at that moment."""
    zone = value.tzinfo
    key = zone.key if type(zone) is ZoneInfo else None
    named = key is not None and _ZONE.fullmatch(key) is not None
    offset = value.utcoffset()
    if zone is not None and not named and offset is None:
        raise Refused(f"its time zone, a {type_name(type(zone))}, gives no offset")
    tree = _tagged(type(value).__name__, value.isoformat())
    if named or (offset is not None and offset.microseconds):
        tree["v"] = value.replace(tzinfo=None).isoformat()
    if named:
        tree["zone"] = key
    elif offset is not None and offset.microseconds:  # `fromisoformat` can lose them
        tree["offset"] = offset // timedelta(microseconds=1)
    if value.fold:
        tree["fold"] = 1
    return tree


_WRITERS: dict[type, Callable[[Any, int], Json]] = {
    int: _write_int,
    float: _write_float,
    dict: _write_dict,
    list: _write_list,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    datetime: _write_moment,
    time: _write_moment,
    date: lambda value, room: _tagged("date", value.isoformat()),
    timedelta: lambda value, room: _tagged("timedelta", [value.days, value.seconds, value.microseconds]),
    UUID: lambda value, room: _tagged("uuid", str(value)),
    Decimal: lambda value, room: _tagged("decimal", str(value)),
    bytes: lambda value, room: _tagged("bytes", base64.b64encode(value).decode()),
    type(Path()): lambda value, room: _tagged("path", str(value)),
    PurePosixPath: lambda value, room: _tagged("pureposixpath", str(value)),
    PureWindowsPath: lambda value, room: _tagged("purewindowspath", str(value)),
}


# ---------------------------------------------------------------- reading


def from_plain(tree: Json, room: int = MAX_DEPTH) -> Any:
    """The value of a tree, as new objects throughout. `Damaged` when no value has that tree."""
    kind = type(tree)
    if kind is dict:
        if TAG in tree:
            return _read_tagged(tree, room)
        if room < 1:
            raise _too_deep_to_read()
        if _SCALARS.issuperset(map(type, tree.values())):
            return tree.copy()
        return _read_values(list(tree), list(tree.values()), room - 1)
    if kind is list:
        if room < 1:
            raise _too_deep_to_read()
        return _read_items(tree, room - 1)
    return tree


def _read_items(items: list[Json], room: int) -> list[Any]:
    if set(map(type, items)) <= _SCALARS:
        return items.copy()
    values = []
    for index, item in enumerate(items):
        try:
            values.append(from_plain(item, room))
        except Damaged as damaged:
            damaged.parts.append(f"[{index}]")
            raise
    return values


def _read_values(keys: list[Any], items: list[Json], room: int) -> dict[Any, Any]:
    values = {}
    for key, item in zip(keys, items, strict=True):
        try:
            values[key] = item if type(item) in _SCALARS else from_plain(item, room)
        except Damaged as damaged:
            damaged.parts.append(key_part(key))
            raise
    return values


_SCALARS = frozenset({str, bool, NoneType, int, float})


def _too_deep_to_read() -> Damaged:
    return Damaged(f"it is nested deeper than {MAX_DEPTH} levels")


def _read_tagged(tree: dict[str, Json], room: int) -> Any:
    tag = tree[TAG]
    reader = _CONTAINER_READERS.get(tag) if type(tag) is str else None
    if reader is not None:
        return reader(payload(tree), room)
    read = _READERS.get(tag) if type(tag) is str else None
    if read is None:
        raise Damaged("it has a tag that this longrun does not know")
    try:
        return read(tree)
    except (ValueError, TypeError, ArithmeticError, KeyError):
        raise Damaged(f"it is tagged as {tag} and holds none") from None


def payload(tree: dict[str, Json]) -> list[Json]:
    """The list that a tagged container holds."""
    items = tree.get("v")
    if type(items) is not list or len(tree) != 2:
        raise Damaged("it is tagged as a container and holds no list")
    return items


def _text(tree: dict[str, Json]) -> str:
    text = tree.get("v")
    if type(text) is not str or len(tree) != 2:
        raise ValueError
    return text


def _read_moment(kind: type[datetime] | type[time], tree: dict[str, Json]) -> datetime | time:
    text, fold = tree.get("v"), tree.get("fold", 0)
    if type(text) is not str or type(fold) is not int or not tree.keys() <= {TAG, "v", "zone", "offset", "fold"}:
        raise ValueError
    value = kind.fromisoformat(text).replace(fold=fold)
    zone = _read_zone(tree)
    if zone is None:
        return value
    if value.tzinfo is not None:
        raise ValueError
    return value.replace(tzinfo=zone)


def _read_zone(tree: dict[str, Json]) -> tzinfo | None:
    key, offset = tree.get("zone"), tree.get("offset")
    if type(offset) is int and key is None:
        return timezone(timedelta(microseconds=offset))
    if offset is not None or (key is not None and (type(key) is not str or not _ZONE.fullmatch(key))):
        raise ValueError
    try:
        return None if key is None else ZoneInfo(key)
    except (KeyError, ValueError, OSError, ImportError):
        raise Damaged("its time zone is not known on this machine") from None


def _read_timedelta(tree: dict[str, Json]) -> timedelta:
    parts = payload(tree)
    if len(parts) != 3 or set(map(type, parts)) != {int}:
        raise ValueError
    return timedelta(*parts)


def _read_float(tree: dict[str, Json]) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[_text(tree)]


def hashable(items: list[Any]) -> list[Any]:
    """The same items, once each of them is known to fit into a set or to be a key."""
    try:
        for item in items:
            hash(item)
    except TypeError:
        raise Damaged("it holds an element or a key that cannot be one") from None
    return items


def _read_pairs(pairs: list[Json], room: int) -> dict[Any, Any]:
    if room < 3:
        raise _too_deep_to_read()
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise Damaged("it is tagged as a dict and holds no pairs")
    keys = hashable([from_plain(pair[0], room - 3) for pair in pairs])
    return _read_values(keys, [pair[1] for pair in pairs], room - 3)


def _read_container(build: Callable[[list[Any]], Any], items: list[Json], room: int) -> Any:
    if room < 2:
        raise _too_deep_to_read()
    return build(_read_items(items, room - 2))


_CONTAINER_READERS: dict[str, Callable[[list[Json], int], Any]] = {
    "dict": _read_pairs,
    "tuple": lambda items, room: _read_container(tuple, items, room),
    "set": lambda items, room: set(hashable(_read_container(list, items, room))),
    "frozenset": lambda items, room: frozenset(hashable(_read_container(list, items, room))),
}

_READERS: dict[str, Callable[[dict[str, Json]], Any]] = {
    "int": lambda tree: int(_text(tree), 16),
    "float": _read_float,
    "datetime": lambda tree: _read_moment(datetime, tree),
    "time": lambda tree: _read_moment(time, tree),
    "date": lambda tree: date.fromisoformat(_text(tree)),
    "timedelta": _read_timedelta,
    "uuid": lambda tree: UUID(_text(tree)),
    "decimal": lambda tree: Decimal(_text(tree)),
    "bytes": lambda tree: base64.b64decode(_text(tree), validate=True),
    "path": lambda tree: Path(_text(tree)),
    "pureposixpath": lambda tree: PurePosixPath(_text(tree)),
    "purewindowspath": lambda tree: PureWindowsPath(_text(tree)),
}
TAGS = frozenset({*_CONTAINER_READERS, *_READERS})
