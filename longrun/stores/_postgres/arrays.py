"""Columns of a batch as PostgreSQL arrays in their binary form.

Place in the life of an execution: checkpoint. psycopg can turn lists into arrays by itself, at three to five times the
price for each element; with some forty columns a checkpoint that would be the larger half of a commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from longrun.stores._postgres.driver import Dumper, Format, psycopg

_HEAD = struct.Struct(">3i").pack
_SIZE = struct.Struct(">2i").pack
_LENGTH = struct.Struct(">i").pack
_INT = struct.Struct(">iq").pack
_FLOAT = struct.Struct(">id").pack
_NULL = _LENGTH(-1)
_TRUE = _LENGTH(1) + b"\1"
_FALSE = _LENGTH(1) + b"\0"


class Column:
    """One column of a batch, packed when it is made. Its class is the type of its elements; None is null."""

    __slots__ = ("data",)
    element: ClassVar[int]
    """The number (oid) of the element's type: the same in every PostgreSQL."""
    array: ClassVar[int]
    head: ClassVar[bytes]

    def __init__(self, values: Iterable[Any]) -> None:
        parts = self.pack(values)
        self.data = b"".join([self.head, _SIZE(len(parts), 1), *parts])

    def __init_subclass__(cls) -> None:
        cls.head = _HEAD(1, 1, cls.element)

    @staticmethod
    def pack(values: Iterable[Any]) -> list[bytes]:
        raise NotImplementedError


class Ints(Column):
    __slots__ = ()
    element, array = 20, 1016

    @staticmethod
    def pack(values: Iterable[int | None]) -> list[bytes]:
        return [_NULL if value is None else _INT(8, value) for value in values]


class Floats(Column):
    __slots__ = ()
    element, array = 701, 1022

    @staticmethod
    def pack(values: Iterable[float | None]) -> list[bytes]:
        return [_NULL if value is None else _FLOAT(8, value) for value in values]


class Flags(Column):
    __slots__ = ()
    element, array = 16, 1000

    @staticmethod
    def pack(values: Iterable[bool]) -> list[bytes]:
        return [_TRUE if value else _FALSE for value in values]


class Texts(Column):
    __slots__ = ()
    element, array = 25, 1009

    @staticmethod
    def pack(values: Iterable[str | None]) -> list[bytes]:
        encoded = [None if value is None else value.encode() for value in values]
        return [_NULL if data is None else _LENGTH(len(data)) + data for data in encoded]


class Blobs(Column):
    __slots__ = ()
    element, array = 17, 1001

    @staticmethod
    def pack(values: Iterable[bytes | None]) -> list[bytes]:
        return [_NULL if data is None else _LENGTH(len(data)) + data for data in values]


def columns(names: Iterable[str], kinds: Iterable[type[Column]], rows: Iterable[tuple[Any, ...]]) -> dict[str, Column]:
    """Rows as named columns: what `unnest` turns into rows again."""
    return {name: kind(values) for name, kind, values in zip(names, kinds, zip(*rows, strict=True), strict=True)}


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
