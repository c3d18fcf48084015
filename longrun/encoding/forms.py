"""Checkpoint, the middle layer: what an annotation adds to the plain form.

An annotation is compiled once into a tree of forms. Each form writes a value of its type as JSON and reads it back.
Standard types keep the plain form everywhere, so only classes and enums need the annotation: a class is stored as an
object of its fields and an enum as its member's value, and neither leaves a name behind. Reading can build only what
the annotation names.

Writing is strict, because what is accepted here must come back the same: a value that is not of the annotated type is
refused, and so is an instance of a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum, Flag
from typing import Any

from longrun.encoding.plain import (
    TAG,
    TAGS,
    Damaged,
    Json,
    Located,
    Refused,
    from_plain,
    hashable,
    key_part,
    payload,
    to_plain,
    type_name,
)

_TAGGED_SHAPES = frozenset(f"tagged {tag}" for tag in TAGS)
ALL_SHAPES = frozenset({"object", "array", "text", "int", "float", "bool", "null"}) | _TAGGED_SHAPES
_NAMED_SHAPES = {list: "array", str: "text", int: "int", float: "float", bool: "bool", type(None): "null"}
MAX_TYPED_DEPTH = 100
"""Less than the plain form's, because a level of forms takes more of the interpreter's stack, reading most of all."""
_CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class Mismatch(Located):
    """Stored data that does not fit the annotation."""

    def __init__(self, expected: str, problem: str) -> None:
        self.expected = expected
        super().__init__(problem)


class Unfit(Located):
    """An annotation that has no form."""


def shape(tree: Json) -> str:
    """What a stored tree looks like from outside; unions choose by it."""
    if type(tree) is not dict:
        return _NAMED_SHAPES[type(tree)]
    if TAG not in tree:
        return "object"
    return f"tagged {tree[TAG]}" if type(tree[TAG]) is str else "unknown"


def _shown(tree: Json) -> str:
    found = shape(tree)
    return f"a stored {found}" if found in ALL_SHAPES else "stored with an unknown tag"


class Form(ABC):
    """How values of one annotation are stored."""

    name: str
    outer: tuple[type, ...]
    """What a value must be an instance of, for a union to try this form."""
    shapes: frozenset[str]
    """What its trees can look like."""
    self_describing = True
    """Whether its own layer of a tree reads the same without the annotation."""

    @abstractmethod
    def write(self, value: Any) -> Json: ...

    @abstractmethod
    def read(self, tree: Json) -> Any: ...

    def parts(self) -> list[tuple[str, Form]]:
        """The forms inside, each with its piece of a path. Asked for once, after the form itself was made."""
        return []

    def prepare(self) -> None:
        """Settle what needs the parts; called for every form before the first one is used."""

    def refuse(self, value: object) -> Refused:
        return Refused(f"expected {self.name}, got {type_name(type(value))}")

    def mismatch(self, tree: Json) -> Mismatch:
        return Mismatch(self.name, f"it is {_shown(tree)}")


def reachable(root: Form, name: str) -> Iterator[tuple[str, Form]]:
    """Every form below `root` and itself, each once, with the path that leads there."""
    seen = {id(root)}
    waiting = [(name, root)]
    while waiting:
        path, form = waiting.pop()
        yield path, form
        try:
            parts = form.parts()
        except Unfit as unfit:
            unfit.parts.append(path)
            raise
        for part, inner in parts:
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((path + part, inner))


def is_plain(form: Form) -> bool:
    return all(inner.self_describing for _, inner in reachable(form, ""))


def is_recursive(root: Form) -> bool:
    """Whether a form holds itself, so that its values have no depth of their own."""
    done: set[int] = set()
    above: set[int] = set()

    def visit(form: Form) -> bool:
        if id(form) in done:
            return False
        above.add(id(form))
        found = any(id(inner) in above or visit(inner) for _, inner in form.parts())
        above.discard(id(form))
        done.add(id(form))
        return found

    return visit(root)


def depth(tree: Json) -> int:
    """How many levels of containers a tree has."""
    level, found = [tree], 0
    while level := [item for item in level if type(item) is dict or type(item) is list]:
        found += 1
        level = [inner for item in level for inner in (item.values() if type(item) is dict else item)]
        if found > MAX_TYPED_DEPTH:
            break
    return found


# ---------------------------------------------------------------- values that describe themselves


class PlainForm(Form):
    """`Any`, `object`, no annotation, bare containers: whatever has a plain form, unchecked."""

    def __init__(self, name: str, outer: type, shapes: frozenset[str]) -> None:
        self.name, self.outer, self.shapes = name, (outer,), shapes

    write = staticmethod(to_plain)
    read = staticmethod(from_plain)


class LeafForm(Form):
    """One standard type. What is an instance of it and has a plain form comes back as it went."""

    def __init__(self, kind: type, shapes: frozenset[str]) -> None:
        self.name, self.shapes = type_name(kind), shapes
        self.outer = (int, float) if kind is float else (kind,)
        self.exact = {int: {int, bool}, float: {int, float, bool}}.get(kind, {kind})

    def write(self, value: Any) -> Json:
        if not isinstance(value, self.outer):
            raise self.refuse(value)
        return to_plain(value)

    def read(self, tree: Json) -> Any:
        value = from_plain(tree)
        if not isinstance(value, self.outer):
            raise self.mismatch(tree)
        return value


class LiteralForm(Form):
    """One of a few known values; an enum member among them is stored as its value."""

    def __init__(self, name: str, choices: tuple[Any, ...]) -> None:
        self.name = name
        self.choices = [(choice, _literal_tree(choice)) for choice in choices]
        self.outer = tuple({type(choice) for choice in choices})
        self.shapes = frozenset(shape(tree) for _, tree in self.choices)
        self.self_describing = not any(isinstance(choice, Enum) for choice in choices)
        trees = [(type(tree), str(tree)) for _, tree in self.choices]
        if len(set(trees)) < len(trees):
            raise Unfit(f"two choices of {name} look alike once stored")

    def write(self, value: Any) -> Json:
        for choice, tree in self.choices:
            if type(choice) is type(value) and choice == value:
                return tree
        raise Refused(f"it is a {type_name(type(value))} that is none of the choices of its Literal")

    def read(self, tree: Json) -> Any:
        for choice, stored in self.choices:
            if type(stored) is type(tree) and stored == tree:
                return choice
        raise Mismatch(self.name, "it is none of the choices")


def _literal_tree(choice: Any) -> Json:
    try:
        return to_plain(choice.value if isinstance(choice, Enum) else choice)
    except Refused as refused:
        raise Unfit(f"a choice of the Literal cannot be: {refused.problem}") from None


class EnumForm(Form):
    self_describing = False

    def __init__(self, kind: type[Enum]) -> None:
        self.kind, self.name, self.outer = kind, type_name(kind), (kind,)
        self.shapes = frozenset({"int", "tagged int"}) if issubclass(kind, Flag) else self._member_shapes()

    def _member_shapes(self) -> frozenset[str]:
        shapes = set()
        for name, member in self.kind.__members__.items():
            try:
                shapes.add(shape(to_plain(member.value)))
            except Refused as refused:
                raise Unfit(f"the value of {self.name}.{name} cannot be: {refused.problem}") from None
            if self.kind(member.value) is not member:
                raise Unfit(f"{self.name}.{name} is not found again by its value")
        return frozenset(shapes)

    def write(self, value: Any) -> Json:
        if type(value) is not self.kind:
            raise self.refuse(value)
        return to_plain(value.value)

    def read(self, tree: Json) -> Any:
        stored = from_plain(tree)
        try:
            return self.kind(stored)
        except Exception:  # `_missing_` is the user's code and its error may show the value
            raise Mismatch(self.name, "no member has that value") from None


# ---------------------------------------------------------------- containers


class CollectionForm(Form):
    """list[T], tuple[T, ...], set[T], Sequence[T] …: `kinds` are the concrete types that the annotation allows."""

    def __init__(self, name: str, kinds: tuple[type, ...], item: Form) -> None:
        self.name, self.outer, self.item = name, kinds, item
        self.shapes = frozenset("array" if kind is list else f"tagged {kind.__name__}" for kind in kinds)

    def parts(self) -> list[tuple[str, Form]]:
        return [("[]", self.item)]

    def write(self, value: Any) -> Json:
        kind = type(value)
        if kind not in self.outer:
            raise self.refuse(value)
        if kind is list and isinstance(self.item, LeafForm) and set(map(type, value)) <= self.item.exact:
            return to_plain(value)
        items = []
        for index, item in enumerate(value):
            try:
                items.append(self.item.write(item))
            except Refused as refused:
                refused.parts.append("[<element>]" if kind in (set, frozenset) else f"[{index}]")
                raise
        return items if kind is list else {TAG: kind.__name__, "v": items}

    def read(self, tree: Json) -> Any:
        kind = _container_kind(tree)
        if kind not in self.outer:
            raise self.mismatch(tree)
        items = [read_at(f"[{index}]", self.item, item) for index, item in enumerate(_items(tree))]
        if kind is list:
            return items
        return kind(items if kind is tuple else hashable(items))


class FixedTupleForm(Form):
    """tuple[A, B]: as many items as the annotation names, each of its own type."""

    outer = (tuple,)
    shapes = frozenset({"tagged tuple"})

    def __init__(self, name: str, items: list[Form]) -> None:
        self.name, self.items = name, items

    def parts(self) -> list[tuple[str, Form]]:
        return [(f"[{index}]", form) for index, form in enumerate(self.items)]

    def write(self, value: Any) -> Json:
        if type(value) is not tuple:
            raise self.refuse(value)
        if len(value) != len(self.items):
            raise Refused(f"expected {self.name}, got a tuple of {len(value)}")
        items = []
        for index, (form, item) in enumerate(zip(self.items, value, strict=True)):
            try:
                items.append(form.write(item))
            except Refused as refused:
                refused.parts.append(f"[{index}]")
                raise
        return {TAG: "tuple", "v": items}

    def read(self, tree: Json) -> Any:
        if _container_kind(tree) is not tuple:
            raise self.mismatch(tree)
        items = payload(tree)
        if len(items) != len(self.items):
            raise Mismatch(self.name, f"it is a stored tuple of {len(items)}")
        pairs = zip(self.items, items, strict=True)
        return tuple(read_at(f"[{index}]", form, item) for index, (form, item) in enumerate(pairs))


def _container_kind(tree: Json) -> type | None:
    if type(tree) is list:
        return list
    tag = tree.get(TAG) if type(tree) is dict else None
    return _CONTAINERS.get(tag) if type(tag) is str else None


def _items(tree: Json) -> list[Json]:
    return tree if type(tree) is list else payload(tree)


def read_at(part: str, form: Form, tree: Json) -> Any:
    try:
        return form.read(tree)
    except Located as located:
        located.parts.append(part)
        raise


class MappingForm(Form):
    """dict[K, V]: an object where every key is stored as text, a list of pairs otherwise."""

    outer = (dict,)
    shapes = frozenset({"object", "tagged dict"})

    def __init__(self, name: str, key: Form, item: Form) -> None:
        self.name, self.key, self.item = name, key, item

    def parts(self) -> list[tuple[str, Form]]:
        return [("[<key>]", self.key), ("[]", self.item)]

    def write(self, value: Any) -> Json:
        if type(value) is not dict:
            raise self.refuse(value)
        pairs = []
        as_object = True
        for key, item in value.items():
            try:
                stored = self.key.write(key)
                pairs.append([stored, self.item.write(item)])
            except Refused as refused:
                refused.parts.append(key_part(key))
                raise
            as_object = as_object and type(stored) is str and stored != TAG
        return dict(pairs) if as_object else {TAG: "dict", "v": pairs}

    def read(self, tree: Json) -> Any:
        keys, items = _pairs(tree) or self._not_a_dict(tree)
        keys = [read_at(key_part(key), self.key, key) for key in keys]
        return {key: read_at(key_part(key), self.item, item) for key, item in zip(hashable(keys), items, strict=True)}

    def _not_a_dict(self, tree: Json) -> tuple[list[Json], list[Json]]:
        raise self.mismatch(tree)


def _pairs(tree: Json) -> tuple[list[Json], list[Json]] | None:
    """The stored keys and values of either form of a dict; None when it is no dict at all."""
    if type(tree) is not dict or (TAG in tree and tree[TAG] != "dict"):
        return None
    if TAG not in tree:
        return list(tree.keys()), list(tree.values())
    pairs = payload(tree)
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise Damaged("it is tagged as a dict and holds no pairs")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
