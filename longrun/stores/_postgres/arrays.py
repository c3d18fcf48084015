"""Columns of a batch as PostgreSQL arrays in their binary form.

Place in the life of an execution: checkpoint. psycopg can turn lists into arrays by itself, at three to five times the
price for each element; with some forty columns a checkpoint that would be the larger half of a commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from longrun.stores._postgres.driver import Dumper, Format, psycopg

_HEAD = struct.Struct(">3i").pack
_SIZE = struct.Struct(">2i").pack
_LENGTH = struct.Struct(">i").pack
_NULL = _LENGTH(-1)
_DOUBLE = 701
_TOGETHER = 32
"""Numbers that are packed in one call: half the price of a call for each."""
_FIRST_ELEMENT = 20
"""Where the elements of an array begin, behind its head and its size."""


_SHORT = [_LENGTH(length) for length in range(4096)]


def _sized(values: Sequence[bytes | None]) -> bytes:
    flat: list[Any] = [None] * (2 * len(values))
    flat[1::2] = values
    try:
        flat[::2] = map(_SHORT.__getitem__, map(len, values))  # type: ignore[arg-type]  # a null is a TypeError
    except (TypeError, IndexError):
        return b"".join([_NULL if data is None else _LENGTH(len(data)) + data for data in values])
    return b"".join(flat)


class Column:
    """One column of a batch, packed when it is made. Its class is the type of its elements; None is null."""

    __slots__ = ("data",)
    element: ClassVar[int] = 0
    """The number (oid) of the element's type: the same in every PostgreSQL."""
    array: ClassVar[int]
    head: ClassVar[bytes]
    one: ClassVar[Callable[..., bytes]]
    """Packs a value that stands alone."""

    def __init__(self, values: Iterable[Any]) -> None:
        values = tuple(values)
        first = values[0] if values else None
        # Most columns of most batches have one value all over. What is equal has the same bytes, but for 0.0 and -0.0.
        if values.count(first) == len(values) and (first or first is None or self.element != _DOUBLE):
            body = self.pack((first,)) * len(values)
        else:
            body = self.pack(values)
        self.data = b"".join((self.head, _SIZE(len(values), 1), body))

    def __init_subclass__(cls) -> None:
        cls.head = _HEAD(1, 1, cls.element)

    @classmethod
    def pack(cls, values: Sequence[Any]) -> bytes:
        """The elements, each with its length before it."""
        return _sized([None if value is None else cls.one(value) for value in values])


class _Fixed(Column):
    """Elements of one length."""

    __slots__ = ()
    code: ClassVar[str] = "q"
    width: ClassVar[int]
    many: ClassVar[list[Callable[..., bytes]]]
    """Packs so many, each with its length before it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.one = staticmethod(struct.Struct(f">{cls.code}").pack)
        cls.width = struct.calcsize(cls.code)
        cls.many = [struct.Struct(">" + f"i{cls.code}" * count).pack for count in range(_TOGETHER + 1)]

    @classmethod
    def pack(cls, values: Sequence[Any]) -> bytes:
        flat: list[Any] = [cls.width] * (2 * len(values))
        flat[1::2] = values
        whole = len(values) // _TOGETHER * _TOGETHER
        most, rest = cls.many[_TOGETHER], cls.many[len(values) - whole]
        try:
            parts = [most(*flat[2 * at : 2 * (at + _TOGETHER)]) for at in range(0, whole, _TOGETHER)]
            return b"".join((*parts, rest(*flat[2 * whole :])))
        except struct.error:  # a null is among them
            return super().pack(values)


class Ints(_Fixed):
    __slots__ = ()
    element, array, code = 20, 1016, "q"


class Floats(_Fixed):
    __slots__ = ()
    element, array, code = _DOUBLE, 1022, "d"


class Flags(_Fixed):
    __slots__ = ()
    element, array, code = 16, 1000, "?"


class Texts(Column):
    __slots__ = ()
    element, array = 25, 1009

    @staticmethod
    def one(value: str) -> bytes:
        return value.encode()

    @classmethod
    def pack(cls, values: Sequence[str | None]) -> bytes:
        try:
            return _sized(list(map(str.encode, values)))  # type: ignore[arg-type]  # a null is a TypeError
        except TypeError:
            return super().pack(values)


class Blobs(Column):
    __slots__ = ()
    element, array = 17, 1001

    @staticmethod
    def one(value: bytes) -> bytes:
        return value

    @classmethod
    def pack(cls, values: Sequence[bytes | None]) -> bytes:
        return _sized(values)


def length_of(data: bytes | None) -> int:
    """How many elements an array has, as the server sends it."""
    return 0 if data is None or len(data) < _FIRST_ELEMENT else int.from_bytes(data[12:16])


def texts_of(data: bytes | None) -> list[str]:
    """An array of texts as the server sends it."""
    found: list[str] = []
    at = _FIRST_ELEMENT
    while data is not None and at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4])
        found.append(data[at + 4 : end].decode())
        at = end
    return found


def columns(names: Iterable[str], kinds: Iterable[type[Column]], rows: Iterable[tuple[Any, ...]]) -> dict[str, Column]:
    """Rows as named columns: what `unnest` turns into rows again."""
    return {name: kind(values) for name, kind, values in zip(names, kinds, zip(*rows, strict=True), strict=True)}


_ALONE: dict[type, type[Column]] = {str: Texts, int: Ints, float: Floats, bytes: Blobs, bool: Flags}


def bound(value: Any) -> tuple[int, bytes | None]:
    """A parameter as libpq takes it: the number of its type (0: the server finds out), and its bytes."""
    if value is None:
        return 0, None
    if isinstance(value, Column):
        return value.array, value.data
    kind = _ALONE[type(value)]
    return kind.element, kind.one(value)


def _dumper(kind: type[Column]) -> type[Dumper]:
    class ColumnDumper(Dumper):
        format = Format.BINARY
        oid = kind.array

        def dump(self, obj: Any) -> bytes:
            data: bytes = obj.data
            return data

    return ColumnDumper


_DUMPERS: tuple[tuple[type[Column], type[Dumper]], ...] = tuple(
    (kind, _dumper(kind)) for kind in (Ints, Floats, Flags, Texts, Blobs)
)


def teach(connection: psycopg.Connection[Any]) -> None:
    """Let a connection take columns as parameters."""
    register: Callable[[type[Column], type[Dumper]], None] = connection.adapters.register_dumper
    for kind, dumper in _DUMPERS:
        register(kind, dumper)
