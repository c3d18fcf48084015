"""Classes of every kind that an annotation may name, and states made of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
)
from uuid import UUID

import attrs
from hypothesis import strategies as st

from tests.codec_values import (
    Colour,
    keys,
    plain_values,
    text,
)

UserId = NewType("UserId", int)
T = TypeVar("T")
U = TypeVar("U")


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Shape(enum.Enum):
    UNIT = (1, 1)
    DAY = timedelta(days=1)


class Options(TypedDict, total=False):
    depth: int
    when: date


class Job(TypedDict):
    id: UUID
    options: NotRequired[Options]


class Spot(NamedTuple):
    x: int
    label: str = "here"


@attrs.frozen
class Page:
    url: str
    fetched: datetime
    colour: Colour = Colour.RED
    size: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    weight: float
    tags: frozenset[str] = frozenset()


@attrs.define
class State:
    name: str
    pages: list[Page]
    by_colour: dict[Colour, Rule]
    user: UserId
    spent: Decimal
    pause: timedelta
    root: Path
    raw: bytes
    mode: Literal["fast", "slow", 3]
    access: Access
    shape: Shape
    spot: Spot
    job: Job
    span: tuple[date, time]
    numbers: tuple[int, ...]
    ids: set[UUID]
    loose: Any
    bag: dict  # type: ignore[type-arg]
    items: list  # type: ignore[type-arg]
    named: Annotated[dict[str, int | str | None], "anything"]
    by_number: dict[int, Page]
    either: Page | Rule | str | None
    _private: int = 5
    rule: Rule | None = None
    kinds: Sequence[Colour] = ()
    seen: AbstractSet[Colour] = frozenset()
    count: int = attrs.field(init=False, default=0)


pages = st.builds(
    Page, text, st.datetimes(timezones=st.just(UTC)), st.sampled_from(Colour), st.one_of(st.none(), st.integers())
)
rules = st.builds(Rule, text, st.one_of(st.floats(allow_nan=False), st.integers()), st.frozensets(text, max_size=2))


@st.composite
def states(draw: st.DrawFn) -> State:
    few: dict[str, Any] = {"max_size": 3}
    jobs = st.fixed_dictionaries(
        {"id": st.uuids()},
        optional={"options": st.fixed_dictionaries({}, optional={"depth": st.integers(), "when": st.dates()})},
    )
    colours = st.sampled_from(Colour)
    state = State(
        name=draw(text),
        pages=draw(st.lists(pages, **few)),
        by_colour=draw(st.dictionaries(colours, rules)),
        user=UserId(draw(st.integers())),
        spent=draw(st.decimals(allow_nan=False)),
        pause=draw(st.timedeltas()),
        root=Path(draw(st.sampled_from(["/", "a/b", "."]))),
        raw=draw(st.binary(**few)),
        mode=draw(st.sampled_from(["fast", "slow", 3])),
        access=draw(st.sampled_from([Access.READ, Access.READ | Access.WRITE, Access(0)])),
        shape=draw(st.sampled_from(Shape)),
        spot=Spot(draw(st.integers()), draw(text)),
        job=draw(jobs),  # type: ignore[arg-type]
        span=(draw(st.dates()), draw(st.times())),
        numbers=tuple(draw(st.lists(st.integers(), **few))),
        ids=draw(st.sets(st.uuids(), **few)),
        loose=draw(plain_values.filter(lambda value: value == value)),
        bag=draw(st.dictionaries(keys, st.integers(), **few)),
        items=draw(st.lists(st.one_of(st.integers(), st.dates()), **few)),
        named=draw(st.dictionaries(keys, st.one_of(st.none(), st.integers(), text), **few)),
        by_number=draw(st.dictionaries(st.integers(), pages, **few)),
        either=draw(st.one_of(pages, rules, text, st.none())),
        private=draw(st.integers()),
        rule=draw(st.one_of(st.none(), rules)),
        kinds=draw(st.one_of(st.lists(colours, **few), st.lists(colours, **few).map(tuple))),
        seen=draw(st.one_of(st.sets(colours), st.frozensets(colours))),
    )
    state.count = draw(st.integers())
    return state


@attrs.define
class Box(Generic[T]):
    item: T
    more: list[T] = attrs.Factory(list)


@attrs.define
class Labelled(Box[T], Generic[T, U]):
    label: U | None = None


@attrs.define
class Colours(Labelled[Colour, Page]):
    pass


@dataclasses.dataclass
class Base(Generic[T]):
    first: T


@dataclasses.dataclass
class Swapped(Base[Colour], Generic[T]):
    """The same type variable as its base, with another meaning."""

    second: T


@attrs.define
class Node:
    value: int
    children: list[Node] = attrs.Factory(list)
    next: Node | None = None


@dataclasses.dataclass
class Counter:
    total: int

    def __post_init__(self) -> None:
        self.total += 1


@attrs.define
class Converted:
    text: str = attrs.field(converter=lambda value: value + "!")


@attrs.frozen
class Derived:
    base: int
    double: int = attrs.field(init=False)
    never_set: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "double", self.base * 2)


class Cat(TypedDict):
    kind: str


@attrs.define
class Ok:
    kind: Literal["ok"]
    value: int


@attrs.define
class Failed:
    kind: Literal["failed"]
    value: int
