"""Values without an annotation come back as they went, or are refused with the place named."""

from __future__ import annotations

import inspect
import math
import threading
import tracemalloc
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import (
    Annotated,
    Any,
)
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrun import codec
from longrun.encoding import plain
from longrun.errors import CorruptDataError, NotStorableError, TooLargeError
from tests.codec_values import (
    SECRET,
    Client,
    Colour,
    Level,
    Name,
    Point,
    nested,
    plain_values,
    round_trip,
    same,
)


@pytest.fixture(params=["orjson", "json"])
def either_json(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with orjson, and again as if it were not installed."""
    if request.param == "json":
        monkeypatch.setattr(plain, "_orjson", None)
    else:
        assert plain._orjson is not None
    return str(request.param)


class Zone(tzinfo):
    """A time zone of the user's own; each test gives it an offset."""

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> None:
        return None


@given(plain_values)
@example({"$": "datetime", "v": "2024-01-01"})
@example(datetime(2024, 1, 1, tzinfo=timezone(timedelta(microseconds=1))))
@example([0.5, math.nan])  # a list of nothing but floats takes a path of its own
@example([0.5, -math.inf])
@example({"$": {"$": 1}, "v": [{"$": "tuple", "v": []}]})
@example({1: "a", "1": "b", None: 3, (1, "x"): 4})
@example([2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**5000])
@example([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 1, True, 5e-324, 1.7976931348623157e308, 1e16])
@example(["\ud800", {"\udfff": 1}, "\x00\x7f\u2028\U0001f600"])
@example([Decimal("1.10"), Decimal("sNaN123"), Decimal("-0E+7"), Decimal("Infinity"), timedelta.min, timedelta.max])
@example([time(1, 2, tzinfo=ZoneInfo("Europe/Berlin")), date(1, 1, 1), bytes(range(256))])
@example([datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)])  # noqa: DTZ001 -- naive ones come back naive
@settings(max_examples=300, deadline=None)
def test_a_plain_value_comes_back_exactly_whichever_json_wrote_and_read_it(value: Any):
    """Types, order, signs, folds and zones included."""
    tree = codec.unstructure(value)
    fast = codec.dumps(tree)
    slow = plain._dumps_standard(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_orjson", None)
        assert same(codec.decode(fast), value)
        assert same(codec.decode(slow), value)
        assert codec.encode(value) == slow
    assert same(codec.decode(slow), value)
    assert same(codec.decode(fast), value)


@pytest.mark.parametrize(
    "annotation",
    [Any, None, inspect.Parameter.empty, object, dict, dict[str, Any], Mapping[str, Any], Annotated[dict, []]],
)
def test_annotations_that_say_nothing_store_the_plain_form(annotation: Any, either_json: str):
    value = {"at": datetime(2024, 5, 1, tzinfo=UTC), "ids": {UUID(int=7)}, "pair": (1, b"x"), 3: Path("a")}
    assert same(round_trip(value, annotation), value)


def test_plain_json_is_stored_as_itself(either_json: str):
    """So that it can be read with cat and jq; non-ASCII text is not escaped."""
    value = {"n": 7, "url": "https://example.org/ü", "list": [1, 2.5, None, True], "empty": {}}
    expected = '{"n":7,"url":"https://example.org/ü","list":[1,2.5,null,true],"empty":{}}'
    assert codec.encode(value) == expected.encode()


def test_a_tag_is_readable():
    assert codec.encode(datetime(2024, 5, 1, tzinfo=UTC)) == b'{"$":"datetime","v":"2024-05-01T00:00:00+00:00"}'


def test_the_value_shares_nothing_with_the_tree_it_was_read_from():
    tree = {"a": [1, 2], "b": {"c": []}}
    value = codec.structure(tree)
    value["a"].append(3)
    value["b"]["c"].append(1)
    assert tree == {"a": [1, 2], "b": {"c": []}}


def test_an_unnamed_zone_keeps_its_offset():
    class Odd(Zone):
        def utcoffset(self, moment: datetime | None) -> timedelta:
            return timedelta(hours=3, seconds=7)

    value = datetime(2024, 5, 1, 12, tzinfo=Odd())
    assert round_trip(value) == value
    assert round_trip(value).utcoffset() == timedelta(hours=3, seconds=7)


# ---------------------------------------------------------------- what the plain form refuses


Pair = namedtuple("Pair", "a b")


class Moment(datetime):
    pass


class NoOffset(Zone):
    def utcoffset(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("value", "path", "says"),
    [
        ({"client": Client()}, "state['client']", "Client"),
        ({"items": [1, 2, {"p": Point(1)}]}, "state['items'][2]['p']", "annotate"),
        ({"a": ({"b": {object()}},)}, "state['a'][0]['b'][<element>]", "object"),
        ({Colour.RED: 1}, "state[<Colour key>]", "enum"),
        ({1: {2: Colour.RED}}, "state[1][2]", "enum"),
        ([Level.LOW], "state[0]", "enum"),
        ([Name(SECRET)], "state[0]", "subclass of str"),
        ({"d": OrderedDict(a=1)}, "state['d']", "subclass of dict"),
        ({"d": defaultdict(list)}, "state['d']", "subclass of dict"),
        ({"p": Pair(1, 2)}, "state['p']", "subclass of tuple"),
        ({"at": Moment(2024, 1, 1)}, "state['at']", "subclass of datetime"),
        ({"at": datetime(2024, 1, 1, tzinfo=NoOffset())}, "state['at']", "no offset"),
        ({"f": len}, "state['f']", "builtin_function_or_method"),
        ({"f": lambda: None}, "state['f']", "function"),
        ({"b": bytearray(b"x")}, "state['b']", "bytearray"),
        ({"c": 1j}, "state['c']", "complex"),
        ({"t": int}, "state['t']", "type"),
        ({"e": ValueError(SECRET)}, "state['e']", "ValueError"),
        ({SECRET * 10: Client()}, "state['" + (SECRET * 10)[:55] + "...']", "Client"),
        (Client(), "state", "Client"),
    ],
)
@pytest.mark.parametrize("annotation", [Any, dict])
def test_what_would_not_come_back_is_refused_and_its_place_named(value: Any, path: str, says: str, annotation: Any):
    with pytest.raises(NotStorableError, match=says) as caught:
        codec.encode(value, annotation)
    assert caught.value.path == path
    assert SECRET not in str(caught.value).replace(path, "")


def test_the_caller_names_the_root_of_the_path():
    with pytest.raises(NotStorableError) as caught:
        codec.encode({"x": object()}, dict, path="local")
    assert caught.value.path == "local['x']"


def test_a_value_that_contains_itself_is_refused(either_json: str):
    loop: list[Any] = []
    loop.append(loop)
    ring: dict[str, Any] = {}
    ring["again"] = (ring,)
    for value in (loop, ring):
        with pytest.raises(NotStorableError, match="contains itself") as caught:
            codec.encode(value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("wrap", "cost"), [(lambda x: [x], 1), (lambda x: {"k": x}, 1), (lambda x: (x,), 2), (lambda x: {1: x}, 3)]
)
def test_the_deepest_value_that_is_stored_can_be_read(wrap: Any, cost: int, either_json: str):
    """What is one level deeper is refused before it is stored, not when it is needed again."""
    deepest = codec.MAX_DEPTH // cost
    value = nested(deepest, wrap)
    assert round_trip(value) == value
    for more in (1, 5000):
        with pytest.raises(NotStorableError, match="nested deeper"):
            codec.encode(nested(deepest + more, wrap))


@pytest.mark.parametrize(
    ("value", "levels"),
    [
        *(([0], 1), ({"k": 0}, 1), ((0,), 2), ({0}, 2), (frozenset({0}), 2), ({1: 0}, 3)),
        *(([[0]], 2), ({"k": [0]}, 2), (([0],), 3), (frozenset({(0,)}), 4), ({1: [0]}, 4), ({(0,): 1}, 5)),
    ],
)
def test_a_container_takes_as_many_levels_as_its_tree_has(value: Any, levels: int):
    """The same number on the way in and on the way out: what was stored can be read."""
    tree = plain.to_plain(value, levels)
    assert plain.from_plain(tree, levels) == value
    with pytest.raises(plain.Refused, match="nested deeper"):
        plain.to_plain(value, levels - 1)
    with pytest.raises(plain.Damaged, match="nested deeper"):
        plain.from_plain(tree, levels - 1)


def test_whole_numbers_of_64_bit_are_plain_json(either_json: str):
    assert codec.encode([2**63 - 1, -(2**63)]) == b"[9223372036854775807,-9223372036854775808]"


@pytest.mark.parametrize(("depth", "shortened"), [(24, False), (25, True)])
def test_a_long_path_is_shortened(depth: int, shortened: bool):
    with pytest.raises(NotStorableError) as caught:
        codec.encode(nested(depth, lambda x: [x], object()))
    whole = "state" + "[0]" * depth
    assert caught.value.path == ("state" + "[0]" * 12 + " ... " + "[0]" * 4 if shortened else whole)


@pytest.mark.parametrize(("key", "shown"), [(-(2**63), "[-9223372036854775808]"), (2**63, "[<int key>]")])
def test_a_number_that_is_a_key_is_shown_unless_it_is_huge(key: int, shown: str):
    with pytest.raises(NotStorableError) as caught:
        codec.encode({key: object()})
    assert caught.value.path == f"state{shown}"


def test_an_error_of_a_value_itself_comes_out_as_it_is():
    class Broken(Zone):
        def utcoffset(self, moment: datetime | None) -> timedelta:
            raise RuntimeError("the zone is broken")

    with pytest.raises(RuntimeError, match="the zone is broken"):
        codec.encode(datetime(2024, 1, 1, tzinfo=Broken()))


def test_a_value_over_the_limit_is_refused():
    with pytest.raises(TooLargeError) as caught:
        codec.encode({"text": SECRET}, limit=10)
    assert (caught.value.path, caught.value.limit) == ("state", 10)
    assert caught.value.size == len(codec.encode({"text": SECRET}))
    assert SECRET not in str(caught.value)
    codec.encode("x" * 8, limit=10)


def test_a_value_that_another_thread_changes_meanwhile_is_refused_not_torn():
    class Racing(Zone):
        """Asked for its offset while the dict is walked, as a thread would come in between."""

        def utcoffset(self, moment: datetime | None) -> timedelta:
            threads = [threading.Thread(target=lambda: value.update({"new": 1}))]
            threads[0].start()
            threads[0].join()
            return timedelta(0)

    value: dict[str, Any] = {"at": datetime(2024, 1, 1, tzinfo=Racing()), "after": 1}
    with pytest.raises(NotStorableError, match="changed by other code"):
        codec.encode(value)


# ---------------------------------------------------------------- damaged data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"[1,]",
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"NaN",
        b"-Infinity",
        b'{"a":1}x',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x00" * 100,
    ],
)
def test_what_is_not_json_is_damaged(data: bytes, either_json: str):
    with pytest.raises(CorruptDataError):
        codec.decode(data)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": {"$": "no-such-tag", "v": SECRET}}, "state['a']"),
        ({"a": {"$": None}}, "state['a']"),
        ({"a": {"$": ["datetime"]}}, "state['a']"),
        ([{"$": "datetime", "v": SECRET}], "state[0]"),
        ([{"$": "datetime", "v": 5}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "fold": 2}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "zone": "../../../etc/passwd"}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "zone": "No/Such"}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01T00:00:00+01:00", "zone": "UTC"}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "more": 1}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "offset": 10**12}], "state[0]"),
        ([{"$": "datetime", "v": "2024-01-01", "offset": 1, "zone": "UTC"}], "state[0]"),
        ([{"$": "time", "v": "25:00"}], "state[0]"),
        ([{"$": "date"}], "state[0]"),
        ([{"$": "timedelta", "v": [10**12, 0, 0]}], "state[0]"),
        ([{"$": "timedelta", "v": [1.5, 0, 0]}], "state[0]"),
        ([{"$": "timedelta", "v": [0, 0]}], "state[0]"),
        ([{"$": "uuid", "v": SECRET}], "state[0]"),
        ([{"$": "decimal", "v": SECRET}], "state[0]"),
        ([{"$": "bytes", "v": "%%%"}], "state[0]"),
        ([{"$": "bytes", "v": "ü"}], "state[0]"),
        ([{"$": "int", "v": "0xzz"}], "state[0]"),
        ([{"$": "float", "v": "1.0"}], "state[0]"),
        ([{"$": "path", "v": 1}], "state[0]"),
        ([{"$": "tuple", "v": "abc"}], "state[0]"),
        ([{"$": "tuple", "v": [], "w": 1}], "state[0]"),
        ([{"$": "set", "v": [[1]]}], "state[0]"),
        ([{"$": "frozenset", "v": [{}]}], "state[0]"),
        ([{"$": "dict", "v": [[1]]}], "state[0]"),
        ([{"$": "dict", "v": [[[], 1]]}], "state[0]"),
        ([{"$": "dict", "v": [[{"$": "uuid", "v": "x"}, 1]]}], "state[0]"),
        ({"k": [0, {"$": "tuple", "v": [1, {"$": "uuid", "v": SECRET}]}]}, "state['k'][1][1]"),
        (nested(codec.MAX_DEPTH + 1, lambda x: [x]), None),
        (nested(codec.MAX_DEPTH + 1, lambda x: {"a": x}), None),
        (nested(codec.MAX_DEPTH // 2 + 1, lambda x: {"$": "tuple", "v": [x]}), None),
        (nested(codec.MAX_DEPTH // 3 + 1, lambda x: {"$": "dict", "v": [[1, x]]}), None),
    ],
)
def test_a_tag_that_holds_nonsense_is_damaged_and_its_place_named(tree: Any, path: str | None):
    with pytest.raises(CorruptDataError) as caught:
        codec.decode(codec.dumps(tree))
    assert path is None or caught.value.what == path
    assert SECRET not in str(caught.value)


@pytest.mark.usefixtures("either_json")
def test_what_is_kept_takes_no_more_room_than_it_needs() -> None:
    """A state or a cursor stays in memory as long as its step runs: it must not keep a buffer along with it."""
    tracemalloc.start()
    try:
        kept = [codec.encode({"n": n}) for n in range(1000)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(kept) < 200


FLAT = st.dictionaries(
    st.one_of(st.text(), st.sampled_from(["$", "\udfff", Name("k")]), st.integers(0, 3), st.none()),
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(), st.sampled_from([Level.LOW, "\ud800", 0.5])
    ),
    max_size=4,
)


def is_no_text(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


@given(FLAT)
@example({})
@example({"n": 2**63 - 1, "m": -(2**63), "yes": True, "none": None})
@example({"n": 2**63})
@example({"n": 2**64 - 1})
@example({"n": 2**64})
@example({"n": -(2**63) - 1})
@example({"$": "int", "v": "0x1"})
@example({Name("k"): 1})
@example({"a": Name("v")})
@settings(max_examples=200, deadline=None)
def test_what_is_written_flat_comes_back_as_it_went(value: dict[Any, Any]) -> None:
    """Whatever cannot be written in this way is left to the others."""
    text = plain.dumps_flat(value)
    fits = all(type(key) is str for key in value) and all(
        type(one) in (str, int, bool, type(None)) for one in value.values()
    )
    if text is None:
        large = any(isinstance(one, int) and one.bit_length() > 63 for one in value.values())
        assert not fits or large or "$" in value or any(map(is_no_text, (*value, *value.values())))
        return
    back = codec.decode(text)
    assert back == value
    assert [*map(type, back), *map(type, back.values())] == [*map(type, value), *map(type, value.values())]
