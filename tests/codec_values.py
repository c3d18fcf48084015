"""Values for the tests of the codec, and what it means that one came back the same."""

from __future__ import annotations

import dataclasses
import enum
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import (
    Any,
)
from zoneinfo import ZoneInfo

import attrs
from hypothesis import strategies as st

from longrun import codec

SECRET = "do-not-show-this-value"


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down; NaN is the same as NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) for pair in zip(left.items(), right.items(), strict=True) for a, b in zip(*pair, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return len(left) == len(right) and all(any(same(a, b) for b in right) for a in left)
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, Decimal):
        return str(left) == str(right)
    if isinstance(left, datetime | time):
        return (
            left.replace(tzinfo=None) == right.replace(tzinfo=None)
            and left.fold == right.fold
            and same_zone(left, right)
        )
    return bool(left == right)


def same_zone(left: datetime | time, right: datetime | time) -> bool:
    if isinstance(left.tzinfo, ZoneInfo):
        return isinstance(right.tzinfo, ZoneInfo) and left.tzinfo.key == right.tzinfo.key
    return left.utcoffset() == right.utcoffset()


def round_trip(value: Any, annotation: Any = Any) -> Any:
    return codec.decode(codec.encode(value, annotation), annotation)


def nested(levels: int, wrap: Any, value: Any = None) -> Any:
    for _ in range(levels):
        value = wrap(value)
    return value


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@attrs.define
class Client:
    token: str = SECRET


# ---------------------------------------------------------------- the plain form

offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
zones = st.sampled_from(["Europe/Berlin", "America/New_York", "Asia/Kathmandu", "UTC", "Etc/GMT+5"]).map(ZoneInfo)
anyzone = st.one_of(st.none(), st.just(UTC), offsets, zones)
folds = st.sampled_from([0, 1])
moments = st.builds(
    lambda at, fold: at.replace(fold=fold), st.datetimes(timezones=anyzone, allow_imaginary=True), folds
)
clock_times = st.builds(lambda at, fold: at.replace(fold=fold), st.times(timezones=anyzone), folds)
text = st.text(st.characters(exclude_categories=[]), max_size=8)  # lone surrogates included
keys = st.one_of(text, st.sampled_from(["$", "v", "$$", ""]))
hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=2**62, max_value=2**66),
        st.floats(),
        text,
        st.binary(max_size=8),
        moments,
        clock_times,
        st.dates(),
        st.timedeltas(),
        st.uuids(),
        st.decimals(allow_nan=False),
        st.sampled_from(
            [Path("a/b"), Path("/"), PurePosixPath("x/../y"), PureWindowsPath(r"c:\a b"), Path("bad\udcff")]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner.filter(lambda x: x == x), max_size=3)
    ),
    max_leaves=6,
)
plain_values = st.recursive(
    hashables,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=3),
        st.sets(hashables.filter(lambda x: x == x), max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=20,
)
