"""Checkpoint: states, locals, memos and signals become bytes here, and values again.

`encode` and `decode` are led by an annotation. Where it says `dict`, `Any` or nothing, the value itself decides: JSON
values and a closed set of standard types, each coming back as it went, and class instances refused. Where it names
attrs classes, dataclasses or enums, those are stored by their fields and values. Stored data holds no class names and
nothing that is imported, looked up or called on its way back: only the annotation chooses what is built (I15).

`unstructure` and `dumps`, `loads` and `structure` are the two halves, for whoever stores parts of a state apart. Errors
name the place (`state['items'][3].name`) and types, never a value.
"""

from __future__ import annotations

from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from attrs import frozen

from longrun.encoding import plain
from longrun.encoding.annotations import compile_annotation
from longrun.encoding.classes import PerhapsForm
from longrun.encoding.forms import MAX_TYPED_DEPTH, Form, Mismatch, PlainForm, Unfit, depth, is_recursive
from longrun.encoding.plain import MAX_DEPTH, Damaged, Json, Refused, dumps, dumps_flat, has_fields, loads
from longrun.errors import CorruptDataError, NotStorableError, StateMismatchError, TooLargeError

__all__ = [
    "DEFAULT_LIMIT",
    "MAX_DEPTH",
    "check_annotation",
    "decode",
    "dumps",
    "dumps_flat",
    "encode",
    "for_others",
    "has_fields",
    "is_plain",
    "loads",
    "perhaps",
    "structure",
    "unstructure",
]

DEFAULT_LIMIT = 64 * 1024 * 1024


@frozen
class Perhaps:
    """An annotation of ours: what it names, or anything plain. For a result of which the step says nothing."""

    annotation: Any
    tagged: bool = True
    """Whether a dict is stored so that it is told from an instance. Only who reads by this annotation can tell."""


def perhaps(annotation: Any) -> Any:
    """`Perhaps`, if the annotation names an attrs class or a dataclass; Any, if nothing but plain data can be meant."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    named = any(isinstance(part, type) and has_fields(part) for part in parts)
    return Perhaps(annotation) if named else Any


def for_others(annotation: Any) -> Any:
    """The annotation to write by, if another reads by one that is not known here."""
    return Perhaps(annotation.annotation, tagged=False) if isinstance(annotation, Perhaps) else annotation


def encode(value: Any, annotation: Any = Any, *, path: str = "state", limit: int = DEFAULT_LIMIT) -> bytes:
    """The bytes of a value. `NotStorableError` names the first place that cannot be stored."""
    data = dumps(unstructure(value, annotation, path))
    if len(data) > limit:
        raise TooLargeError(path, len(data), limit)
    return data


def decode(data: bytes, annotation: Any = Any, *, path: str = "state") -> Any:
    """The value of bytes that `encode` made. Without an annotation, a class comes back as a dict of its fields."""
    return structure(loads(data, path), annotation, path)


def is_plain(annotation: Any) -> bool:
    """Whether the annotation leaves it to the value itself how it is stored."""
    try:
        return isinstance(_form(annotation)[0], PlainForm)
    except NotStorableError:
        return False


def check_annotation(annotation: Any) -> None:
    """`NotStorableError` when values of this annotation could not come back as they went."""
    _form(annotation)


def unstructure(value: Any, annotation: Any = Any, path: str = "state") -> Json:
    """The JSON tree of a value. It may share lists with the value: use it at once, and do not change it."""
    try:
        if annotation is dict or annotation is Any:
            return plain.to_plain(value)
        form, recursive = _form(annotation)
        tree = form.write(value)
        if recursive and depth(tree) > MAX_TYPED_DEPTH:
            raise plain.too_deep(MAX_TYPED_DEPTH)
    except Refused as refused:
        raise NotStorableError(refused.path(path), refused.problem) from None
    except RecursionError:
        raise NotStorableError(path, plain.too_deep().problem) from None
    except RuntimeError as error:
        if "during iteration" not in str(error):
            raise
        raise NotStorableError(path, "it was changed by other code while it was being stored") from None
    return tree


def structure(tree: Json, annotation: Any = Any, path: str = "state") -> Any:
    """The value of a tree: the other way round. The value shares nothing with the tree."""
    form, _ = _form(annotation)
    try:
        return form.read(tree)
    except Mismatch as mismatch:
        raise StateMismatchError(mismatch.path(path), mismatch.expected, mismatch.problem) from None
    except Damaged as damaged:
        raise CorruptDataError(damaged.path(path), damaged.problem) from None
    except RecursionError:
        raise CorruptDataError(path, "nested too deeply") from None


def _form(annotation: Any) -> tuple[Form, bool]:
    try:
        return _compiled(annotation)
    except TypeError:  # Annotated with something unhashable: compiled anew each time
        return _compiled.__wrapped__(annotation)


@lru_cache(maxsize=1024)
def _compiled(annotation: Any) -> tuple[Form, bool]:
    """The form of an annotation, and whether it holds itself."""
    unsaid = isinstance(annotation, Perhaps)
    try:
        form = compile_annotation(annotation.annotation if unsaid else annotation)
    except Unfit as unfit:
        raise NotStorableError(unfit.path(""), unfit.problem) from None
    return PerhapsForm(form, tagged=annotation.tagged) if unsaid else form, is_recursive(form)
