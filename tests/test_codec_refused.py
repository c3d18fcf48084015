"""What does not fit its annotation is refused, on the way in and on the way out, and stored data is never code."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import (
    Any,
    Literal,
    Never,
    TypedDict,
)
from uuid import UUID

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrun import codec
from longrun.encoding.forms import MAX_TYPED_DEPTH
from longrun.errors import CorruptDataError, NotStorableError, StateMismatchError
from tests.codec_classes import (
    Box,
    Cat,
    Colours,
    Failed,
    Job,
    Labelled,
    Node,
    Ok,
    Page,
    Rule,
    Spot,
    State,
)
from tests.codec_values import (
    SECRET,
    Client,
    Colour,
    Level,
    Name,
    Point,
    round_trip,
)

PAGE: Any = Page("u", datetime(2024, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("value", "annotation", "path", "says"),
    [
        ({"name": SECRET}, Page, "state", "expected Page, got dict"),
        (None, Page, "state", "expected Page, got None"),
        ([attrs.evolve(PAGE, size=SECRET)], list[Page], "state[0].size", "expected int, got str"),
        (Box({"a": Client()}), Box, "state.item['a']", "Client"),
        (Box([1, Client()]), Box[Any], "state.item[1]", "Client"),
        (Node(1, [Node(2), Node(SECRET)]), Node, "state.children[1].value", "expected int, got str"),  # type: ignore[arg-type]
        ((1, 2), list[int], "state", "expected list"),
        ([1], tuple[int, ...], "state", "expected tuple"),
        ((1,), tuple[int, int], "state", "a tuple of 1"),
        ((1, "x"), tuple[int, int], "state[1]", "expected int, got str"),
        ({"a": "x"}, dict[str, int], "state['a']", "expected int"),
        ({1: 1}, dict[str, int], "state[1]", "expected str, got int"),
        ({Client: 1}, dict[str, int], "state[<type key>]", "expected str"),
        ({SECRET}, set[int], "state[<element>]", "expected int"),
        ("red", Colour, "state", "expected Colour, got str"),
        (Level.LOW, int, "state", "enum"),
        (Name("x"), str, "state", "subclass of str"),
        (SECRET, Literal["a"], "state", "none of the choices"),
        (True, Literal[1], "state", "none of the choices"),
        (1.5, int, "state", "expected int, got float"),
        ("x", int | None, "state", "expected int, got str"),
        (b"x", int | str, "state", "got bytes"),
        (Colours(Colour.RED), Labelled[Colour, Page], "state", "subclass"),
        ({}, Job, "state", "needs the key 'id'"),
        ({"id": 3}, Job, "state['id']", "expected UUID, got int"),
        ({"id": UUID(int=1), "x": Client()}, Job, "state['x']", "Client"),
        ({"id": UUID(int=1), "$": 1}, Job, "state", "keys"),
        ((1, "x"), Spot, "state", "expected Spot, got tuple"),
        ([Ok("failed", 1)], list[Ok | Failed], "state[0].kind", "none of the choices"),  # type: ignore[arg-type]
        ({"a": 1}, dict[str, Page | Rule], "state['a']", "got int"),
        ([1, 2], tuple[int, int], "state", "expected tuple\\[int, int\\], got list"),
        ([("id", UUID(int=1))], Job, "state", "expected Job, got list"),
        ([("a", 1)], dict[str, int], "state", "expected dict\\[str, int\\], got list"),
    ],
)
def test_a_value_that_is_not_of_the_annotated_type_is_refused(value: Any, annotation: Any, path: str, says: str):
    with pytest.raises(NotStorableError, match=says) as caught:
        codec.encode(value, annotation)
    assert caught.value.path == path
    assert SECRET not in str(caught.value)


def test_a_field_that_was_never_set_is_refused():
    page = Page.__new__(Page)
    with pytest.raises(NotStorableError, match="'url' is not set"):
        codec.encode(page, Page)


def test_a_class_that_contains_itself_is_refused_when_it_is_a_ring_or_too_deep():
    """And the deepest one that is stored can be read again."""
    ring = Node(1)
    ring.next = ring
    with pytest.raises(NotStorableError, match="contains itself"):
        codec.encode(ring, Node)
    chain = Node(0)
    for _ in range(MAX_TYPED_DEPTH - 2):  # the last node's empty list is one level too
        chain = Node(0, next=chain)
    assert round_trip(chain, Node) == chain
    with pytest.raises(NotStorableError, match="nested deeper"):
        codec.encode(Node(0, next=chain), Node)


def test_a_tree_that_is_deeper_than_any_that_was_stored_is_damage():
    tree: dict[str, Any] = {"value": 0}
    for _ in range(100_000):
        tree = {"value": 0, "next": tree}
    with pytest.raises(CorruptDataError, match="nested too deeply"):
        codec.structure(tree, Node)


class Refusing:
    pass


@attrs.define
class Holder:
    inner: list[dict[str, Refusing]]


@dataclasses.dataclass
class NeedsMore:
    a: int
    seed: dataclasses.InitVar[int]


@attrs.define
class Unresolved:
    inner: NoSuchName  # type: ignore[name-defined] # noqa: F821


@attrs.define
class One:
    x: int = 0


@attrs.define
class Other:
    x: int = 0


class Objects(enum.Enum):
    A = object()


class Textual(enum.Enum):
    A = "a"


class Nothing(enum.Enum):
    NONE = None


Dollar = TypedDict("Dollar", {"$": int})


@pytest.mark.parametrize(
    ("annotation", "path", "says"),
    [
        (Refusing, "Refusing", "no attrs class"),
        (Holder, "Holder.inner", "Refusing is no attrs class"),
        (One | Other, "One | ", "told apart"),
        (Box[int] | Box[str], "", "look alike"),
        (list[Point] | list[One], "", "look alike"),
        (Textual | str, "", "look alike"),
        (Cat | Job, "", "look alike"),
        (Point | dict, "", "look alike"),
        (Nothing | None, "", "look alike"),
        (Literal["a", Textual.A], "", "look alike"),
        (Objects, "Objects", "Objects.A"),
        (NeedsMore, "NeedsMore", "seed"),
        (Unresolved, "Unresolved", "NoSuchName"),
        (bytearray, "bytearray", "standard type"),
        (complex, "complex", "standard type"),
        (type[int], "", "no attrs class"),
        (defaultdict[str, int], "", "no attrs class"),
        ("State", "'State'", "still text"),
        (list["State"], "", "still text"),
        (Dollar, "Dollar", "key '\\$'"),
        (Literal[Objects.A], "", "a choice of the Literal cannot be"),
        (list[Never], "", "is not a type that longrun can store"),
    ],
)
def test_an_annotation_that_cannot_be_kept_is_refused_before_anything_is_stored(annotation: Any, path: str, says: str):
    with pytest.raises(NotStorableError, match=says) as caught:
        codec.check_annotation(annotation)
    assert path in caught.value.path
    with pytest.raises(NotStorableError, match=says):
        codec.encode(None, annotation)


@attrs.define
class Checked:
    n: int = attrs.field(default=0)

    @n.validator
    def _positive(self, attribute: Any, value: int) -> None:
        if value < 0:
            raise ValueError(SECRET, value)


@pytest.mark.parametrize(
    ("tree", "annotation", "path", "expected", "says"),
    [
        ({"fetched": 1}, Page, "state.url", "str", "missing"),
        ({"url": 5}, Page, "state.url", "str", "stored int"),
        (
            [{"value": 1, "children": [{"value": SECRET}]}],
            list[Node],
            "state[0].children[0].value",
            "int",
            "stored text",
        ),
        ([1], Page, "state", "Page", "stored array"),
        ({"$": "tuple", "v": []}, Page, "state", "Page", "stored tagged tuple"),
        ("green", Colour, "state", "Colour", "no member"),
        ([[]], list[Colour], "state[0]", "Colour", "no member"),
        ({"n": -1}, Checked, "state", "Checked", "ValueError"),
        ("abc", list[str], "state", "list[str]", "stored text"),
        ({"$": "tuple", "v": [1]}, tuple[int, int], "state", "tuple[int, int]", "tuple of 1"),
        ({"a": None}, dict[str, int], "state['a']", "int", "null"),
        ([], dict[str, int], "state", "dict[str, int]", "array"),
        ({"$": "dict", "v": [["x", 1]]}, dict[int, int], "state['x']", "int", "text"),
        ({"other": 1}, Page | Rule, "state", None, "object"),
        (1.5, int | str, "state", None, "float"),
        ({"$": SECRET}, int, "state", None, "tag that this longrun does not know"),
        ({"$": {"a": SECRET}}, Page | None, "state", "Page", "unknown tag"),
        (SECRET, Literal["a"], "state", None, "none of the choices"),
        ({}, Job, "state['id']", "UUID", "missing"),
        ({"id": "x"}, Job, "state['id']", "UUID", "text"),
        ([], Job, "state", "Job", "array"),
        ({"$": "tuple", "v": []}, Job, "state", "Job", "tagged tuple"),
        ([1, 2], tuple[int, int], "state", "tuple[int, int]", "array"),
    ],
)
def test_stored_data_that_does_not_fit_its_type_names_the_place(
    tree: Any, annotation: Any, path: str, expected: str | None, says: str
):
    with pytest.raises((StateMismatchError, CorruptDataError), match=says) as caught:
        codec.decode(codec.dumps(tree), annotation)
    error = caught.value
    place = error.path if isinstance(error, StateMismatchError) else getattr(error, "what", None)
    assert place == path
    assert expected is None or getattr(error, "expected", None) == expected
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_damaged_tag_inside_a_typed_state_is_damage_with_its_place():
    tree = {"url": "u", "fetched": {"$": "datetime", "v": SECRET}}
    with pytest.raises(CorruptDataError) as caught:
        codec.decode(codec.dumps(tree), Page)
    assert caught.value.what == "state.fetched"


def test_a_field_that_came_later_takes_its_default_and_one_that_went_is_ignored():
    """A class may grow fields with defaults, and lose fields, while executions are in flight."""
    assert codec.decode(b'{"x":1,"gone":true}', Point) == Point(1, 0)


def test_a_state_typed_later_reads_what_was_stored_as_a_dict():
    value = {"url": "u", "fetched": datetime(2024, 1, 1, tzinfo=UTC), "colour": "blue"}
    assert codec.decode(codec.encode(value, dict), Page) == Page("u", value["fetched"], Colour.BLUE)  # type: ignore[arg-type]


# ---------------------------------------------------------------- stored data is never code

ROOT = Path(__file__).parent.parent
FUZZ = """
import random, sys
from typing import Any
from longrun import codec
from longrun.encoding import plain
from tests.codec_classes import *
from longrun.errors import CodecError

annotations = [Any, State, Node, list[Page | Rule | str | None], dict[int, Job], Access, Shape, Box[Colour], Spot]
tags = sorted(plain.TAGS) + ["object", "__reduce__", "py/object", "os.system", "longrun.errors"]
for annotation in annotations:
    codec.check_annotation(annotation)
texts = ["x", "", "2024-01-01", "0x10", "nan", "AAAA", "__class__", "__init__", "os.system('x')", "red", "url", "value"]
pick = random.Random(int(sys.argv[1]))

def tree(room):
    kind = pick.randrange(9 if room else 5)
    if kind == 0: return pick.choice([None, True, False])
    if kind == 1: return pick.choice([0, 1, -1, 2**62, 1.5, 10**18])
    if kind < 5: return pick.choice(texts)
    if kind == 5: return [tree(room - 1) for _ in range(pick.randrange(4))]
    if kind == 6: return {pick.choice(texts + ["children", "next", "item"]): tree(room - 1) for _ in range(3)}
    return {"$": pick.choice(tags), "v": tree(room - 1), **({"fold": tree(0)} if pick.random() < 0.1 else {})}

armed, seen = False, []
def hook(event, arguments):
    if armed and not event.startswith(("object.__getattr__", "sys._getframe")):
        seen.append(event)
sys.addaudithook(hook)

datas = [codec.dumps(tree(5)) for _ in range(4000)]
for i in range(0, len(datas), 2):
    data = bytearray(datas[i])
    data[pick.randrange(len(data))] = pick.randrange(256)
    datas[i] = bytes(data)
read = refused = 0
for data in datas:
    for annotation in annotations:
        armed = True
        try:
            codec.decode(data, annotation)
            read += 1
        except CodecError:
            refused += 1
        finally:
            armed = False
assert not seen, sorted(set(seen))
assert read > 1000 and refused > 1000, (read, refused)
armed = True
open("/dev/null").close()
armed = False
assert seen == ["open"], seen
print("quiet")
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_decoding_hostile_data_imports_opens_and_runs_nothing(seed: int):
    """I15: nothing but the codec's own errors comes of it. In a process of its own, because an audit hook stays."""
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(seed)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "quiet\n", done.stderr


@given(st.binary(max_size=60), st.sampled_from([Any, State, Node, list[Page | None]]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused_with_an_error_of_the_codec(data: bytes, annotation: Any):
    with contextlib.suppress(CorruptDataError, StateMismatchError):
        codec.decode(data, annotation)
