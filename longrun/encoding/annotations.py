"""Define: from an annotation to its form, once, when a step is registered or first met.

Whatever an annotation cannot say exactly (a union whose members look alike, a class that is neither attrs nor
dataclass, an enum over objects) is refused here, before anything has been stored under it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import reduce
from operator import or_
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin
from uuid import UUID

import attrs

from longrun.encoding.classes import AliasForm, FieldsForm, FieldSpec, OptionalForm, TypedDictForm, UnionForm
from longrun.encoding.forms import (
    ALL_SHAPES,
    CollectionForm,
    EnumForm,
    FixedTupleForm,
    Form,
    LeafForm,
    LiteralForm,
    MappingForm,
    PlainForm,
    Unfit,
    reachable,
)
from longrun.encoding.plain import TAG, type_name

_INTEGER = {"int", "bool", "tagged int"}
_PURE = {"tagged pureposixpath", "tagged purewindowspath"}
_LEAVES: dict[Any, set[str]] = {
    NoneType: {"null"},
    bool: {"bool"},
    int: _INTEGER,
    float: {*_INTEGER, "float", "tagged float"},
    str: {"text"},
    bytes: {"tagged bytes"},
    datetime: {"tagged datetime"},
    date: {"tagged date", "tagged datetime"},
    time: {"tagged time"},
    timedelta: {"tagged timedelta"},
    UUID: {"tagged uuid"},
    Decimal: {"tagged decimal"},
    PurePath: {*_PURE, "tagged path"},
    PurePosixPath: {"tagged pureposixpath", "tagged path"},
    PureWindowsPath: {"tagged purewindowspath"},
    Path: {"tagged path"},
    type(Path()): {"tagged path"},
}
_COLLECTIONS: dict[Any, tuple[type, ...]] = {
    list: (list,),
    tuple: (tuple,),
    set: (set,),
    frozenset: (frozenset,),
    MutableSequence: (list,),
    Sequence: (list, tuple),
    MutableSet: (set,),
    AbstractSet: (set, frozenset),
    Collection: (list, tuple, set, frozenset),
    Iterable: (list, tuple, set, frozenset),
}
_MAPPINGS = (dict, Mapping, MutableMapping)
_TRANSPARENT = {
    getattr(typing, name)
    for name in ("Final", "ClassVar", "Required", "NotRequired", "ReadOnly")
    if hasattr(typing, name)
}
_ANYTHING = (Any, object, None, inspect.Parameter.empty)


def compile_annotation(annotation: Any) -> Form:
    """The form of an annotation, ready for use; `Unfit` when it has none."""
    if _is_one_of(annotation, _ANYTHING):
        return PlainForm("Any", object, ALL_SHAPES)
    path = shown(annotation)
    try:
        root = _Compiler().form(annotation)
    except Unfit as unfit:
        unfit.parts.append(path)
        raise
    for place, form in list(reachable(root, path)):
        try:
            form.prepare()
        except Unfit as unfit:
            unfit.parts.append(place)
            raise
    return root


def _is_one_of(annotation: Any, choices: tuple[Any, ...]) -> bool:
    return any(annotation is choice for choice in choices)


def shown(annotation: Any) -> str:
    """An annotation as an error names it."""
    if isinstance(annotation, type) and not get_args(annotation):
        return type_name(annotation)
    return repr(annotation).replace("typing.", "").replace("__main__.", "")


class _Compiler:
    """Makes the forms of one annotation. Forms of classes are remembered, so that a class can hold itself."""

    def __init__(self) -> None:
        self._known: dict[Any, Form] = {}

    def form(self, annotation: Any) -> Form:
        annotation = _bare(annotation)
        if _is_one_of(annotation, (Any, object)):
            return PlainForm("Any", object, ALL_SHAPES)
        origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
        if origin in (Union, UnionType):
            return self._union(annotation)
        if origin is typing.Literal:
            return LiteralForm(shown(annotation), arguments)
        if origin in _LEAVES:
            return LeafForm(origin, frozenset(_LEAVES[origin]))
        if origin in _COLLECTIONS:
            return self._collection(annotation, origin, arguments)
        if origin in _MAPPINGS:
            return self._mapping(annotation, arguments)
        return self._named(annotation, origin)

    def _union(self, annotation: Any) -> Form:
        members = _members(annotation)
        name = shown(annotation)
        present = [member for member in members if member is not NoneType]
        if len(present) < len(members) and len(present) == 1:
            return OptionalForm(name, self.form(present[0]))
        return UnionForm(name, [self.form(member) for member in members])

    def _collection(self, annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> Form:
        kinds, name = _COLLECTIONS[origin], shown(annotation)
        several = origin is not tuple or arguments[1:] == (...,)
        if not arguments or (several and _bare(arguments[0]) in (Any, object)):
            shapes = CollectionForm(name, kinds, LeafForm(int, frozenset())).shapes
            return PlainForm(name, origin, shapes)
        if several:
            return CollectionForm(name, kinds, self.form(arguments[0]))
        return FixedTupleForm(name, [self.form(item) for item in arguments])

    def _mapping(self, annotation: Any, arguments: tuple[Any, ...]) -> Form:
        name = shown(annotation)
        anything = (Any, object)
        if not arguments or (_bare(arguments[1]) in anything and _bare(arguments[0]) in (*anything, str)):
            return PlainForm(name, dict, MappingForm.shapes)
        return MappingForm(name, self.form(arguments[0]), self.form(arguments[1]))

    def _named(self, annotation: Any, origin: Any) -> Form:
        """A class or a named alias: one form for each, made before what it holds is looked at."""
        if annotation not in self._known:
            self._known[annotation] = self._make_named(annotation, origin)
        return self._known[annotation]

    def _make_named(self, annotation: Any, origin: Any) -> Form:
        name = shown(annotation)
        if _alias_of(annotation) is not None:
            return AliasForm(name, lambda: self.form(_alias_target(annotation)))
        if not isinstance(origin, type):
            raise Unfit(f"{name} is not a type that longrun can store")
        if issubclass(origin, Enum):
            return EnumForm(origin)
        if _is_typed_dict(origin):
            return TypedDictForm(name, lambda: self._typed_dict_fields(annotation, origin))
        if attrs.has(origin) or dataclasses.is_dataclass(origin) or _is_named_tuple(origin):
            return FieldsForm(name, origin, lambda: self._class_fields(annotation, origin))
        raise Unfit(f"{name} is no attrs class, dataclass, enum or standard type that longrun can store")

    def _class_fields(self, annotation: Any, origin: type) -> list[FieldSpec]:
        hints = _field_types(annotation, origin)
        fields = _declared_fields(origin)
        _check_constructor(origin, fields)
        return [
            FieldSpec(
                one.name, one.alias, one.init, one.required, self._inner(f".{one.name}", hints.get(one.name, one.hint))
            )
            for one in fields
        ]

    def _typed_dict_fields(self, annotation: Any, origin: Any) -> list[FieldSpec]:
        hints = _field_types(annotation, origin)
        if TAG in hints:
            raise Unfit(f"{shown(annotation)} has the key '$', which marks longrun's own tags")
        return [
            FieldSpec(
                name, name, True, _is_required(hint, name in origin.__required_keys__), self._inner(f"[{name!r}]", hint)
            )
            for name, hint in hints.items()
        ]

    def _inner(self, part: str, annotation: Any) -> Form:
        try:
            return self.form(annotation)
        except Unfit as unfit:
            unfit.parts.append(part)
            raise


def _bare(annotation: Any) -> Any:
    """The annotation under what says nothing about the stored form: Annotated, NewType, Final, type variables."""
    while True:
        if isinstance(annotation, str | typing.ForwardRef):
            raise Unfit("an annotation is still text; it must be resolved first")
        if isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, typing.TypeVar):
            choices = annotation.__constraints__
            annotation = annotation.__bound__ or (reduce(or_, choices) if choices else Any)
        elif get_origin(annotation) is typing.Annotated or get_origin(annotation) in _TRANSPARENT:
            annotation = get_args(annotation)[0]
        else:
            return annotation


def _members(annotation: Any) -> list[Any]:
    """The members of a union, named aliases and inner unions opened, each once."""
    found: list[Any] = []
    for member in map(_bare, get_args(annotation)):
        while _alias_of(member) is not None:
            member = _bare(_alias_target(member))
        inner = _members(member) if get_origin(member) in (Union, UnionType) else [member]
        found.extend(one for one in inner if one not in found)
    return found


def _alias_of(annotation: Any) -> Any:
    """The named alias (`type X = ...`) behind an annotation, or None."""
    origin = get_origin(annotation) or annotation
    return origin if type(origin).__name__ == "TypeAliasType" else None


def _alias_target(annotation: Any) -> Any:
    alias = _alias_of(annotation)
    return _filled(alias.__value__, dict(zip(alias.__type_params__, get_args(annotation), strict=False)))


def _is_typed_dict(kind: type) -> bool:
    return issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_field_defaults")


def _is_required(hint: Any, otherwise: bool) -> bool:
    """Asked of the resolved hint first: under postponed annotations a TypedDict does not know its own NotRequired."""
    if get_origin(hint) in (typing.Required, typing.NotRequired):
        return get_origin(hint) is typing.Required
    return otherwise


@attrs.frozen
class _Declared:
    """A field as its class declares it: see `FieldSpec`."""

    name: str
    alias: str
    init: bool
    required: bool
    hint: Any = Any


def _declared_fields(kind: Any) -> list[_Declared]:
    if attrs.has(kind):
        return [_from_attrs(field) for field in attrs.fields(kind)]
    if dataclasses.is_dataclass(kind):
        return [_from_dataclass(field) for field in dataclasses.fields(kind)]
    return [_Declared(name, name, True, name not in kind._field_defaults) for name in kind._fields]


def _from_attrs(field: Any) -> _Declared:
    required = field.init and field.default is attrs.NOTHING
    return _Declared(field.name, field.alias or field.name, field.init, required, field.type or Any)


def _from_dataclass(field: dataclasses.Field[Any]) -> _Declared:
    required = field.init and field.default is field.default_factory is dataclasses.MISSING
    return _Declared(field.name, field.name, field.init, required, field.type)


def _check_constructor(kind: Any, fields: list[_Declared]) -> None:
    """A class that insists on more than its fields (an InitVar, an __init__ of its own) could never be built again."""
    try:
        inspect.signature(kind).bind(**{field.alias: None for field in fields if field.init})
    except TypeError as error:
        raise Unfit(f"the constructor of {type_name(kind)} cannot be called with its fields alone ({error})") from None


def _field_types(annotation: Any, origin: Any) -> dict[str, Any]:
    """The types of a class's fields, with the type variables of generic classes and bases filled in."""
    parameters = {one.__name__: one for one in getattr(origin, "__type_params__", ())}
    names = {**vars(origin), **parameters} if parameters else None  # before 3.12.4 quoted hints do not see them
    try:
        hints = typing.get_type_hints(origin, localns=names, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise Unfit(f"its annotations cannot be resolved ({type_name(type(error))}: {error})") from None
    variables = _variables(annotation)
    owners = {name: kind for kind in reversed(origin.__mro__) for name in inspect.get_annotations(kind)}
    return {name: _filled(hint, variables.get(owners.get(name, origin), {})) for name, hint in hints.items()}


def _variables(annotation: Any) -> dict[Any, dict[Any, Any]]:
    """For a class and each of its generic bases: what its type variables stand for."""
    origin = get_origin(annotation) or annotation
    own = dict(zip(getattr(origin, "__parameters__", ()), get_args(annotation), strict=False))
    found = {origin: own}
    for base in origin.__dict__.get("__orig_bases__", origin.__bases__):
        if isinstance(get_origin(base) or base, type) and get_origin(base) not in (typing.Generic, typing.Protocol):
            found |= _variables(_filled(base, own))
    return found


def _filled(hint: Any, variables: dict[Any, Any]) -> Any:
    if isinstance(hint, typing.TypeVar):
        return variables.get(hint, hint)
    open_ones = () if isinstance(hint, type) and not get_args(hint) else getattr(hint, "__parameters__", ())
    if not open_ones:
        return hint
    return hint[tuple(variables.get(one, _bare(one)) for one in open_ones)]
