"""Values with an annotation come back as they went."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime
from pathlib import PurePath, PureWindowsPath
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Optional,
    TypeVar,
)
from uuid import UUID

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from typing_extensions import TypeAliasType

from longrun import codec
from longrun.encoding import plain
from tests.codec_classes import (
    Access,
    Box,
    Cat,
    Converted,
    Counter,
    Derived,
    Failed,
    Job,
    Labelled,
    Node,
    Ok,
    Page,
    Rule,
    Shape,
    Spot,
    State,
    Swapped,
    UserId,
    states,
)
from tests.codec_values import (
    Colour,
    Level,
    Point,
    round_trip,
    same,
)

T = TypeVar("T")
Named = TypeAliasType("Named", Point)
Many = TypeAliasType("Many", list[T], type_params=(T,))
Either = TypeAliasType("Either", Many[int] | str)
"""As `type Either = Many[int] | str` says it from Python 3.12 on."""


@pytest.fixture(params=["orjson", "json"])
def either_json(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with orjson, and again as if it were not installed."""
    if request.param == "json":
        monkeypatch.setattr(plain, "_orjson", None)
    else:
        assert plain._orjson is not None
    return str(request.param)


@given(states())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_typed_state_comes_back_exactly_whichever_json_wrote_and_read_it(state: State):
    data = codec.encode(state, State)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_orjson", None)
        slow = codec.encode(state, State)
        again = codec.decode(data, State)
    for back in (again, codec.decode(slow, State)):
        assert type(back) is State
        for field in attrs.fields(State):
            left, right = getattr(state, field.name), getattr(back, field.name)
            assert type(left) is type(right)
            assert same(left, right) or not isinstance(left, dict | list | tuple | float), field.name
            assert left == right or field.name == "loose"


def test_without_an_annotation_a_typed_state_is_plain_data(either_json: str):
    page = Page("u", datetime(2024, 1, 1, tzinfo=UTC), Colour.BLUE, 3)
    assert codec.decode(codec.encode([page], list[Page])) == [
        {"url": "u", "fetched": datetime(2024, 1, 1, tzinfo=UTC), "colour": "blue", "size": 3}
    ]


def test_stored_data_names_no_class():
    """I15: neither classes nor modules; only field names, values and the tags of the closed set."""
    data = codec.encode(Page("u", datetime(2024, 1, 1, tzinfo=UTC)), Page | Rule)
    assert data == (
        b'{"url":"u","fetched":{"$":"datetime","v":"2024-01-01T00:00:00+00:00"},"colour":"red","size":null}'
    )


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (Box(1, [2]), Box[int]),
        (Box(Colour.RED, [Colour.BLUE]), Box[Colour]),
        (Box({"a": (1,)}), Box),
        (Box(Box(Colour.RED)), Box[Box[Colour]]),
        (Labelled(Colour.RED, [], Point(1)), Labelled[Colour, Point]),
        (Swapped(Colour.RED, Point(1)), Swapped[Point]),
        (Node(1, [Node(2), Node(3, next=Node(4))]), Node),
        (Colour.RED, Colour),
        (Access.READ | Access.WRITE, Access),
        (Level.LOW, Level),
        (Shape.UNIT, Shape),
        (None, None),
        (None, type(None)),
        (7, UserId),
        (7, Final[int]),
        (7, float),
        (True, int),
        (2**70, int),
        (math.inf, float),
        (Point(1), Optional[Point]),  # noqa: UP045 -- the older spelling, on purpose
        (None, Point | None),
        ("x", str | bytes | datetime),
        (b"x", str | bytes | datetime),
        (datetime(2024, 1, 1, tzinfo=UTC), str | bytes | datetime),
        (datetime(2024, 1, 1, tzinfo=UTC), date),
        (PureWindowsPath("a"), PurePath),
        ([Point(1), "x", None, 3], list[Point | str | int | None]),
        ({"a": [Point(1)]}, dict[str, list[Point]]),
        ({"$": Point(1)}, dict[str, Point]),
        ({Colour.RED: 1}, dict[Colour, int]),
        ({(1, Colour.RED): Point(1)}, dict[tuple[int, Colour], Point]),
        ({Spot(1)}, set[Spot]),
        (frozenset({Rule("a", 1.0)}), frozenset[Rule]),
        ((Point(1), Colour.RED), tuple[Point, Colour]),
        ((), tuple[Point, ...]),
        ([1], list[int] | list[str]),
        (["a"], list[int] | list[str]),
        ([Point(1)], str | list[Point]),
        ("text", str | list[Point]),
        (Ok("ok", 1), Ok | Failed),
        (Failed("failed", 1), Ok | Failed),
        (Colour.RED, Literal[Colour.RED]),
        (Colour.RED, Colour | int),
        (3, Colour | int),
        ({"id": UUID(int=1), "other": (1, 2)}, Job),
        ({"kind": "x"}, Cat | None),
        (Spot(1, "a"), Spot),
        ([1.5, 2, math.nan], list[float]),
        ([1.5, math.inf], list[float]),
        (Point(1), Annotated[Point, []]),
        ({1}, AbstractSet[int]),
        ([Point(1)], Sequence[Point]),
        ((Point(1),), Sequence[Point]),
        (Point(1), Named),
        ([Point(1), Point(2)], list[Named]),
        ([Colour.RED], Many[Colour]),
        ({"a": [Point(1)]}, dict[str, Many[Named]]),
        ([Point(1)], Many[Named] | None),
        (None, Many[Named] | None),
        (Point(1), Named | Colour),
        (Colour.RED, Named | Colour),
        ([3], Either),
        ("x", Either),
        (None, Either | None),
    ],
)
def test_a_typed_value_comes_back_as_it_went(value: Any, annotation: Any, either_json: str):
    codec.check_annotation(annotation)
    back = round_trip(value, annotation)
    assert type(back) is type(value)
    assert same(back, value)


def test_fields_outside_the_constructor_are_stored_too_and_unset_ones_stay_unset():
    value = Derived(4)
    object.__setattr__(value, "double", 9)
    back = round_trip(value, Derived)
    assert (back.base, back.double, hasattr(back, "never_set")) == (4, 9, False)


def test_the_stored_fields_win_over_what_the_constructor_does():
    """A converter or __post_init__ that is not idempotent must not change a state each time it is loaded."""
    counter = Counter(1)
    assert counter.total == 2
    assert round_trip(counter, Counter) == counter
    converted = Converted("a")
    assert round_trip(converted, Converted).text == "a!"


@dataclasses.dataclass
class Parcel:
    to: str
    weight: int = 0


Letter = attrs.make_class("Letter", {"text": attrs.field(type=str), "_pages": attrs.field(type=int, default=1)})
UNSAID = codec.perhaps(Parcel | Letter | None)
PLAIN = [
    {},
    {"to": "x"},
    {"to": "x", "weight": 3},
    {"text": "", "_pages": 2},
    {"a": 1},
    {1: 2},
    {"$": 1},
    [{}],
    3,
    None,
]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_data_stays_plain_where_a_class_could_stand_and_reads_without_the_annotation(
    value: Any, either_json: str
):
    assert same(round_trip(value, UNSAID), value)
    assert same(codec.decode(codec.encode(value, UNSAID)), value)


@pytest.mark.parametrize("value", [Parcel("x"), Parcel("x", 3), Letter("t"), Letter("t", 4)])
def test_an_instance_where_plain_data_could_stand_is_stored_as_if_that_were_said(value: Any, either_json: str):
    assert round_trip(value, UNSAID) == value
    assert codec.encode(value, UNSAID) == codec.encode(value, type(value))


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (b'{"to":"x"}', Parcel("x")),
        (b'{"to":"x","weight":3}', Parcel("x", 3)),
        (b'{"text":"t","_pages":4}', Letter("t", 4)),
        (b'{"to":"x","weight":3,"rows":[1]}', {"to": "x", "weight": 3, "rows": [1]}),
        (b'{"to":"x","weight":"3"}', {"to": "x", "weight": "3"}),
        (b'{"weight":3}', {"weight": 3}),
        (b"{}", {}),
    ],
)
def test_an_object_without_a_tag_is_of_the_class_only_if_nothing_of_it_is_lost(stored: bytes, value: Any):
    """So it was stored once, whatever it had been."""
    assert same(codec.decode(stored, UNSAID), value)
