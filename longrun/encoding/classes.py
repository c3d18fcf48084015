"""Checkpoint, the middle layer: the forms of classes, typed dicts and unions.

A class is stored as an object of its fields, without its name. Which class it was is known from the annotation alone; a
union of several is told apart by the fields, and where that is not certain the annotation is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import attrs

from longrun.encoding.forms import ALL_SHAPES, Form, Mismatch, PlainForm, Unfit, is_plain, read_at, shape
from longrun.encoding.plain import (
    TAG,
    Json,
    Located,
    Refused,
    field_names,
    from_plain,
    has_fields,
    key_part,
    tagged_dict,
    to_plain,
    type_name,
)


@attrs.frozen(eq=False)
class FieldSpec:
    """One field of a class: its attribute, its name in the constructor, and whether stored data must have it."""

    name: str
    alias: str
    init: bool
    required: bool
    form: Form


class FieldsForm(Form):
    """An attrs class, a dataclass or a named tuple, as an object of its fields.

    The fields are resolved after the form was made, so that a class can hold itself.
    """

    self_describing = False
    shapes = frozenset({"object"})

    def __init__(self, name: str, kind: type, resolve: Callable[[], list[FieldSpec]]) -> None:
        self.name, self.kind, self.outer = name, kind, (kind,)
        self._resolve = resolve
        self._fields: list[FieldSpec] | None = None

    @property
    def fields(self) -> list[FieldSpec]:
        if self._fields is None:
            self._fields = self._resolve()
        return self._fields

    def parts(self) -> list[tuple[str, Form]]:
        return [(f".{field.name}", field.form) for field in self.fields]

    def write(self, value: Any) -> Json:
        if type(value) is not self.kind:
            raise self._refuse_instance(value)
        tree = {}
        for field in self._fields or self.fields:
            try:
                held = getattr(value, field.name)
            except AttributeError:
                if field.init:
                    raise Refused(f"its field {field.name!r} is not set") from None
                continue
            try:
                tree[field.name] = field.form.write(held)
            except Refused as refused:
                refused.parts.append(f".{field.name}")
                raise
        return tree

    def _refuse_instance(self, value: object) -> Refused:
        if isinstance(value, self.kind):
            return Refused(f"expected {self.name}, got its subclass {type_name(type(value))}, whose type would be lost")
        return self.refuse(value)

    def read(self, tree: Json) -> Any:
        if type(tree) is not dict or TAG in tree:
            raise self.mismatch(tree)
        values = {}
        for field in self.fields:
            if field.name in tree:
                values[field] = read_at(f".{field.name}", field.form, tree[field.name])
            elif field.required:
                missing = Mismatch(field.form.name, "it is missing")
                missing.parts.append(f".{field.name}")
                raise missing
        return self._build(values)

    def _build(self, values: dict[FieldSpec, Any]) -> Any:
        """Call the constructor, then give every field its stored value, whatever the constructor made of it."""
        arguments = {field.alias: value for field, value in values.items() if field.init}
        try:
            built = self.kind(**arguments)
            for field, value in values.items():
                if getattr(built, field.name, dataclasses.MISSING) is not value:
                    object.__setattr__(built, field.name, value)
        except Exception as error:
            raise Mismatch(self.name, f"its constructor raised {type_name(type(error))}") from None
        return built


class TypedDictForm(Form):
    """A TypedDict. Keys that it does not name are kept in their plain form."""

    self_describing = False
    outer = (dict,)
    shapes = frozenset({"object"})

    def __init__(self, name: str, resolve: Callable[[], list[FieldSpec]]) -> None:
        self.name = name
        self._resolve = resolve
        self._fields: dict[str, FieldSpec] | None = None

    @property
    def fields(self) -> dict[str, FieldSpec]:
        if self._fields is None:
            self._fields = {field.name: field for field in self._resolve()}
        return self._fields

    def parts(self) -> list[tuple[str, Form]]:
        return [(key_part(name), field.form) for name, field in self.fields.items()]

    def write(self, value: Any) -> Json:
        if type(value) is not dict:
            raise self.refuse(value)
        fields = self.fields
        tree = {}
        for key, item in value.items():
            if type(key) is not str or key == TAG:
                raise Refused(f"a {self.name} takes only text other than '$' as its keys")
            try:
                tree[key] = fields[key].form.write(item) if key in fields else to_plain(item)
            except Refused as refused:
                refused.parts.append(key_part(key))
                raise
        for name, field in fields.items():
            if field.required and name not in tree:
                raise Refused(f"a {self.name} needs the key {name!r}")
        return tree

    def read(self, tree: Json) -> Any:
        if type(tree) is not dict or TAG in tree:
            raise self.mismatch(tree)
        fields = self.fields
        for name, field in fields.items():
            if field.required and name not in tree:
                missing = Mismatch(field.form.name, "it is missing")
                missing.parts.append(key_part(name))
                raise missing
        extra = PlainForm("Any", object, ALL_SHAPES)
        forms = {key: fields[key].form if key in fields else extra for key in tree}
        return {key: read_at(key_part(key), forms[key], item) for key, item in tree.items()}


class UnionForm(Form):
    """A | B: written by the value's type, read by what the stored tree looks like."""

    def __init__(self, name: str, members: list[Form]) -> None:
        self.name, self.members = name, members
        self.outer = tuple({kind for member in members for kind in member.outer})
        self._by_shape: dict[str, list[Form]] = {}
        self._class_of: Callable[[Mapping[str, Json]], Any] | None = None

    @property
    def shapes(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(member.shapes for member in self.members))

    def parts(self) -> list[tuple[str, Form]]:
        return [("", member) for member in self.members]

    def prepare(self) -> None:
        for member in self.members:
            for look in member.shapes:
                self._by_shape.setdefault(look, []).append(member)
        for alike in self._by_shape.values():
            if len(alike) > 1 and not all(map(is_plain, alike)):
                self._class_of = self._tell_apart(alike)

    def _tell_apart(self, alike: list[Form]) -> Callable[[Mapping[str, Json]], Any]:
        names = " and ".join(form.name for form in alike)
        kinds = [form.kind for form in alike if isinstance(form, FieldsForm) and not issubclass(form.kind, tuple)]
        if len(kinds) < len(alike) or len(set(kinds)) < len(kinds):
            raise Unfit(f"{names} look alike once stored, and could not come back as they went; put them into classes")
        try:
            return telling_function(kinds)
        except TypeError:
            raise Unfit(
                f"{names} cannot be told apart once stored; "
                "give each a field of its own without a default, or one field with a Literal of its own"
            ) from None

    def write(self, value: Any) -> Json:
        fitting = [member for member in self.members if isinstance(value, member.outer)]
        if not fitting:
            raise self.refuse(value)
        for member in fitting[:-1]:
            try:
                return self._checked(member, member.write(value))
            except Refused:
                continue
        return self._checked(fitting[-1], fitting[-1].write(value))

    def _checked(self, member: Form, tree: Json) -> Json:
        """A class among several must be found again by what is stored, before it is stored."""
        if self._class_of is not None and isinstance(member, FieldsForm) and self._member_of(tree) is not member:
            raise Refused(f"this {member.name} would be taken for another member of {self.name}")
        return tree

    def _member_of(self, tree: Json) -> Form | None:
        if self._class_of is None:
            return None
        try:
            kind = self._class_of(tree)
        except (ValueError, KeyError, TypeError):
            return None
        return next((form for form in self.members if isinstance(form, FieldsForm) and form.kind is kind), None)

    def read(self, tree: Json) -> Any:
        alike = self._by_shape.get(shape(tree), [])
        if len(alike) > 1 and not all(form.self_describing for form in alike):
            member = self._member_of(tree)
            alike = [member] if member else []
        if not alike:
            raise self.mismatch(tree)
        for member in alike[:-1]:
            try:
                return member.read(tree)
            except Located:
                continue
        return alike[-1].read(tree)


class OptionalForm(Form):
    """X | None, the union that nearly every class has."""

    def __init__(self, name: str, inner: Form) -> None:
        self.name, self.inner = name, inner
        self.outer = (*inner.outer, NoneType)

    @property
    def shapes(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.shapes | {"null"}

    def parts(self) -> list[tuple[str, Form]]:
        return [("", self.inner)]

    def prepare(self) -> None:
        if "null" in self.inner.shapes and not self.inner.self_describing:
            raise Unfit(f"None and {self.inner.name} look alike once stored")

    def write(self, value: Any) -> Json:
        return None if value is None else self.inner.write(value)

    def read(self, tree: Json) -> Any:
        return None if tree is None else self.inner.read(tree)


class PerhapsForm(Form):
    """What may be of a class, and may be anything plain: nobody has said. An object without a tag is an instance, and a
    dict is tagged as one, so that it comes back as a dict whatever its keys are."""

    def __init__(self, inner: Form, *, tagged: bool = True) -> None:
        self.name, self.inner, self._tagged = f"{inner.name}, or plain data", inner, tagged
        self.outer, self.shapes = (object,), ALL_SHAPES

    def parts(self) -> list[tuple[str, Form]]:
        return [("", self.inner)]

    def write(self, value: Any) -> Json:
        if has_fields(type(value)):
            return self.inner.write(value)
        return tagged_dict(value) if self._tagged and type(value) is dict else to_plain(value)

    def read(self, tree: Json) -> Any:
        """A dict had no tag here once: what the class would ignore of it is not lost."""
        if type(tree) is dict and TAG not in tree:
            with contextlib.suppress(Mismatch):
                value = self.inner.read(tree)
                if tree.keys() <= field_names(type(value)):
                    return value
        return from_plain(tree)


class AliasForm(Form):
    """A named type alias, resolved after it was made, so that it can hold itself."""

    def __init__(self, name: str, resolve: Callable[[], Form]) -> None:
        self.name = name
        self._resolve = resolve
        self._target: Form | None = None

    @property
    def target(self) -> Form:
        if self._target is None:
            self._target = self._resolve()
        return self._target

    @property
    def outer(self) -> tuple[type, ...]:  # type: ignore[override]
        return self.target.outer

    @property
    def shapes(self) -> frozenset[str]:  # type: ignore[override]
        return self.target.shapes

    def parts(self) -> list[tuple[str, Form]]:
        return [("", self.target)]

    def write(self, value: Any) -> Json:
        return self.target.write(value)

    def read(self, tree: Json) -> Any:
        return self.target.read(tree)


def telling_function(kinds: list[type]) -> Callable[[Mapping[str, Json]], Any]:
    """cattrs' way to tell classes apart: a Literal field with different values, or required fields of their own."""
    from cattrs import Converter  # here, because few programs need it and it takes long to import
    from cattrs.disambiguators import create_default_dis_func

    for kind in kinds:
        if attrs.has(kind):
            attrs.resolve_types(kind)
    return create_default_dis_func(Converter(), *kinds, overrides={})
