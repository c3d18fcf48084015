"""Checkpoint, the outermost layer: the frame around stored bytes, compressed and encrypted when wanted.

Small text without a key is stored as it is, so that files stay readable with ``cat`` and ``jq``. Everything else is one
frame, known by a first byte that no JSON text starts with::

    version  1 byte    0x01
    flags    1 byte    1 = compressed with zstd, 2 = encrypted with AES-256-GCM
    crc32    4 bytes   of the payload
    length   8 bytes   of the data, before compression
    key id   1 byte n, then n bytes of UTF-8   only when encrypted
    nonce    12 bytes                          only when encrypted
    payload

Numbers are big-endian. Encryption binds in the frame's head and the caller's context (execution and sequence number),
so a payload that was changed, or moved to another place, is refused. The key comes from a callable, for every frame
anew: this module keeps none.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias
from zlib import crc32

from longrun.codec import DEFAULT_LIMIT
from longrun.errors import (
    ConfigError,
    CorruptDataError,
    KeyUnavailableError,
    MissingExtraError,
    NewerFormatError,
    TooLargeError,
)

VERSION = 1
COMPRESSED = 1
ENCRYPTED = 2

KeySource: TypeAlias = Callable[[str | None], tuple[str, bytes]]
"""Gives a key's id and bytes: `None` asks for the key to write with, an id for that key (`KeyError` if unknown). Called
in threads of the store, several at once."""

_HEAD = struct.Struct(">BBIQ")
_NONCE = 12
_KEY = 32
_GIVEN = f"an id (str) and a key of {_KEY} bytes"
_LAST_VERSION = 8
"""First bytes up to here belong to frames, of this version or of later ones; JSON's white space starts behind it."""


class Seal:
    """Wraps stored bytes into frames and opens them again."""

    def __init__(
        self,
        *,
        compress_over: int | None = 16384,
        key: KeySource | None = None,
        allow_plain: bool = False,
        limit: int = DEFAULT_LIMIT,
        level: int = 3,
    ) -> None:
        if compress_over is not None and compress_over < 0:
            raise ConfigError("compress_over", compress_over, "a number of bytes, or None for no compression")
        if limit < 1:
            raise ConfigError("limit", limit, "a number of bytes above 0")
        _check_callable(key)
        self._compress_over = compress_over
        self._key = key
        self._allow_plain = allow_plain
        self._limit = limit
        self._level = level
        self.untouched = -1 if key is not None else limit if compress_over is None else min(limit, compress_over)
        """Up to this many bytes are stored as they are, if they do not look like a frame; JSON never does."""

    def __repr__(self) -> str:
        return f"Seal(compress_over={self._compress_over}, encrypted={self._key is not None})"

    def leaves_alone(self, data: bytes) -> bool:
        """Whether `wrap` would give these bytes back as they are, as it does with small plain JSON."""
        return len(data) <= self.untouched and (not data or data[0] > _LAST_VERSION)

    @property
    def encrypts(self) -> bool:
        return self._key is not None

    def wrap(self, data: bytes, context: str) -> bytes:
        """The bytes to store. `context` says whose they are; `unwrap` must be given the same."""
        if len(data) > self._limit:
            raise TooLargeError(context, len(data), self._limit)
        payload = self._compress(data)
        flags = 0 if payload is None else COMPRESSED
        if self._key is not None:
            return _encrypt(data if payload is None else payload, flags, len(data), context, self._key)
        if payload is not None:
            return _HEAD.pack(VERSION, flags, crc32(payload), len(data)) + payload
        if data[:1] and data[0] <= _LAST_VERSION:  # it would be taken for a frame
            return _HEAD.pack(VERSION, flags, crc32(data), len(data)) + data
        return data

    def _compress(self, data: bytes) -> bytes | None:
        """The data compressed; None when it is small, when zstd is not there, or when nothing is gained."""
        if self._compress_over is None or len(data) <= self._compress_over:
            return None
        zstd = _zstd()
        if zstd is None:
            return None
        compressed: bytes = zstd.compress(data, self._level)
        return compressed if len(compressed) < len(data) else None

    def unwrap(self, blob: bytes, context: str) -> bytes:
        """The bytes that were wrapped; `CorruptDataError` when they are not what was stored under this context."""
        blob = bytes(blob)
        if not blob or blob[0] > _LAST_VERSION:
            self._check_plain(context)
            return blob
        _check_version(blob[0], context)
        if len(blob) < _HEAD.size:
            raise CorruptDataError(context, "its frame is cut off")
        _, flags, checksum, length = _HEAD.unpack_from(blob)
        if flags & ~(COMPRESSED | ENCRYPTED):
            raise CorruptDataError(context, "its frame has flags that this version does not have")
        if length > self._limit:
            raise CorruptDataError(context, f"its frame promises {length:,} bytes and the limit is {self._limit:,}")
        payload = self._open(blob, flags, checksum, context)
        if flags & COMPRESSED:
            return _decompress(payload, length, context)
        if len(payload) != length:
            raise CorruptDataError(context, "it has not the length that its frame states")
        return payload

    def _check_plain(self, context: str) -> None:
        if self._key is not None and not self._allow_plain:
            raise CorruptDataError(
                context, "it is not encrypted, and a key is set (allow_plain=True reads it all the same)"
            )

    def _open(self, blob: bytes, flags: int, checksum: int, context: str) -> bytes:
        if flags & ENCRYPTED:
            return _decrypt(blob, checksum, context, self._key)
        self._check_plain(context)
        payload = blob[_HEAD.size :]
        _check_sum(payload, checksum, context)
        return payload


def _check_version(version: int, context: str) -> None:
    if version == 0:
        raise CorruptDataError(context, "it starts with a zero byte")
    if version > VERSION:
        raise NewerFormatError(context, version, VERSION)


def _check_sum(payload: bytes, checksum: int, context: str) -> None:
    if crc32(payload) != checksum:
        raise CorruptDataError(context, "its checksum is wrong")


# ---------------------------------------------------------------- compression


@cache
def _zstd() -> Any | None:
    """The zstd module of this Python; None when there is none."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return import_module(name)
    except ImportError:
        return None


def _decompress(payload: bytes, length: int, context: str) -> bytes:
    """Never makes more than the stated length, whatever the payload would unfold to."""
    zstd = _zstd()
    if zstd is None:
        raise MissingExtraError("reading zstd data", "zstd")
    decompressor = zstd.ZstdDecompressor()
    try:
        data: bytes = decompressor.decompress(payload, max_length=length + 1)
    except zstd.ZstdError:
        raise CorruptDataError(context, "its zstd data cannot be read") from None
    if len(data) != length or not decompressor.eof or decompressor.unused_data:
        raise CorruptDataError(context, "its zstd data has not the length that its frame states")
    return data


# ---------------------------------------------------------------- encryption


def _cryptography() -> tuple[Any, type[Exception]]:
    """The cipher, and the error it raises when a payload is not what was encrypted."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MissingExtraError("encryption", "crypto") from None
    return AESGCM, InvalidTag


def _check_callable(key: object) -> None:
    if key is not None and not callable(key):
        expected = f"give a callable that takes a key's id or None and returns {_GIVEN}"
        raise ConfigError("key", "<hidden>", expected)


def _ask(source: KeySource, key_id: str | None) -> tuple[bytes, bytes]:
    """A key's id, as it is stored, and its bytes. An error here must not show the key."""
    match source(key_id):
        case (str() as given, bytes() | bytearray() | memoryview() as key) if len(key) == _KEY:
            stored_id = given.encode()
        case _:
            raise ConfigError("key", "<hidden>", f"the callable must return {_GIVEN}")
    if len(stored_id) > 255:
        raise ConfigError("key", "<hidden>", "its id must be at most 255 bytes long")
    return stored_id, bytes(key)


def _bound(flags: int, length: int, key_id: bytes, context: str) -> bytes:
    """What is authenticated beside the payload. Every part but the last has a known length, so no two run together."""
    return struct.pack(">BBQB", VERSION, flags, length, len(key_id)) + key_id + context.encode()


def _encrypt(payload: bytes, flags: int, length: int, context: str, source: KeySource) -> bytes:
    key_id, key = _ask(source, None)
    nonce = os.urandom(_NONCE)
    flags |= ENCRYPTED
    cipher, _ = _cryptography()
    hidden: bytes = cipher(key).encrypt(nonce, payload, _bound(flags, length, key_id, context))
    head = _HEAD.pack(VERSION, flags, crc32(hidden), length)
    return head + bytes([len(key_id)]) + key_id + nonce + hidden


def _decrypt(blob: bytes, checksum: int, context: str, source: KeySource | None) -> bytes:
    if source is None:
        raise CorruptDataError(
            context, "it is encrypted and no key is set: give the store its Seal(key=...), here or in a module:name"
        )
    start = _HEAD.size + 1
    end = start + blob[_HEAD.size] if len(blob) > _HEAD.size else start
    key_id, nonce, hidden = blob[start:end], blob[end : end + _NONCE], blob[end + _NONCE :]
    if len(nonce) < _NONCE:
        raise CorruptDataError(context, "its frame is cut off")
    _check_sum(hidden, checksum, context)
    key = _key_for_reading(key_id, context, source)
    flags, length = blob[1], _HEAD.unpack_from(blob)[3]
    cipher, invalid = _cryptography()
    try:
        data: bytes = cipher(key).decrypt(nonce, hidden, _bound(flags, length, key_id, context))
    except invalid:
        raise CorruptDataError(context, "it was changed, or belongs to another place or key") from None
    return data


def _key_for_reading(key_id: bytes, context: str, source: KeySource) -> bytes:
    name = key_id.decode(errors="backslashreplace")
    try:
        return _ask(source, name)[1]
    except KeyError:
        raise CorruptDataError(context, f"it is encrypted under an unknown key id, {name!r}") from None
    except ConfigError:
        raise
    except Exception as error:  # whoever keeps the keys is away, or refuses this one: that says nothing of the data
        raise KeyUnavailableError(context, name, type(error).__name__) from error
