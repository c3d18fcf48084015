"""Strings as the commit script takes them: MessagePack, with what stands before a short one ready made.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import struct

SHORT = [b"\xda" + struct.pack(">H", length) for length in range(4096)]
"""What stands before a string of each length."""


def length(size: int) -> bytes:
    """What stands before a string of any length."""
    return SHORT[size] if size < 4096 else b"\xdb" + struct.pack(">I", size)


def string(value: bytes) -> bytes:
    return length(len(value)) + value


_NUMBERS = [string(b"%d" % number) for number in range(1024)]
NONE = string(b"")


def number(value: int) -> bytes:
    return _NUMBERS[value] if 0 <= value < 1024 else string(b"%d" % value)
