"""The frame around stored bytes: readable where it can be, and refused where it is not what was stored."""

from __future__ import annotations

import os
import struct
import sys
import threading
from typing import Any
from zlib import crc32

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrun import seal as seal_module
from longrun.errors import (
    ConfigError,
    CorruptDataError,
    KeyUnavailableError,
    MissingExtraError,
    NewerFormatError,
    TooLargeError,
)
from longrun.seal import COMPRESSED, ENCRYPTED, VERSION, Seal
from longrun.stores.memory import MemoryBackend
from longrun.stores.store import CheckpointStore
from longrun.testing.samples import claim, create, send

OLD, NEW = os.urandom(32), os.urandom(32)
PLACE = "job-1/7"
LARGE = b'{"text":"' + b"abcdefgh" * 10_000 + b'"}'


class Keys:
    """A key ring, as an application would keep one."""

    def __init__(self, current: str = "new") -> None:
        self.keys = {"old": OLD, "new": NEW}
        self.current = current

    def __call__(self, key_id: str | None) -> tuple[str, bytes]:
        name = key_id or self.current
        return name, self.keys[name]


def frame(payload: bytes, *, flags: int = 0, length: int | None = None, version: int = VERSION) -> bytes:
    return struct.pack(">BBIQ", version, flags, crc32(payload), len(payload) if length is None else length) + payload


SEALS = {
    "as it is": Seal(compress_over=None),
    "compressed": Seal(compress_over=0),
    "default": Seal(),
    "encrypted": Seal(key=Keys()),
    "both": Seal(compress_over=0, key=Keys()),
}


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@given(data=st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(lambda part: part * 500)))
@example(data=b"")
@example(data=b"\x00")
@example(data=b"\x01" * 20)
@example(data=b"\x08x")
@example(data=b'\t{"a":1}')
@example(data=LARGE)
@settings(max_examples=60, deadline=None)
def test_what_is_wrapped_comes_back(seal: Seal, data: bytes):
    assert seal.unwrap(seal.wrap(data, PLACE), PLACE) == data


def test_small_text_without_a_key_is_stored_as_it_is():
    """So that a checkpoint can be read with cat and jq."""
    data = b'{"n":7}'
    assert Seal().wrap(data, PLACE) == data
    assert Seal(compress_over=len(data)).wrap(data, PLACE) == data


@pytest.mark.parametrize("data", [b"", b'{"n":7}', b"\x00", b"\x08x", b"\t1", b"x" * 16, b"x" * 17, b"y" * 40])
def test_what_is_left_alone_can_be_told_without_wrapping_it(data: bytes):
    for seal in (Seal(compress_over=16), Seal(compress_over=None), Seal(key=Keys())):
        assert seal.encrypts is ("encrypted=True" in repr(seal))
        if seal.leaves_alone(data):
            assert seal.wrap(data, PLACE) is data
    assert Seal(compress_over=16).leaves_alone(data) is (data[:1] not in (b"\x00", b"\x08") and len(data) <= 16)
    assert not Seal(key=Keys()).leaves_alone(data)


def test_an_encrypted_frame_that_ends_in_its_nonce_is_cut_off():
    blob = Seal(key=Keys()).wrap(b"secret", PLACE)
    head = struct.calcsize(">BBIQ") + 1 + len("new")
    for end in (head, head + 5, head + 11):
        with pytest.raises(CorruptDataError, match="cut off"):
            Seal(key=Keys()).unwrap(blob[:end], PLACE)


def test_large_text_is_compressed_and_kept_only_when_it_is_smaller():
    blob = Seal().wrap(LARGE, PLACE)
    assert blob[0] == VERSION
    assert blob[1] == COMPRESSED
    assert len(blob) < len(LARGE) // 10
    noise = b"x" + os.urandom(50_000)
    assert Seal().wrap(noise, PLACE) == noise
    assert Seal(compress_over=None).wrap(LARGE, PLACE) == LARGE


def test_without_zstd_nothing_is_compressed_and_a_compressed_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    blob = Seal().wrap(LARGE, PLACE)
    monkeypatch.setattr(seal_module, "_zstd", lambda: None)
    assert Seal().wrap(LARGE, PLACE) == LARGE
    with pytest.raises(MissingExtraError, match=r"longrun\[zstd\]"):
        Seal().unwrap(blob, PLACE)


def test_a_zstd_module_that_is_not_installed_is_not_an_error(monkeypatch: pytest.MonkeyPatch):
    for name in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    assert seal_module._zstd.__wrapped__() is None


def test_without_cryptography_a_key_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    blob = Seal(key=Keys()).wrap(b"{}", PLACE)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingExtraError, match=r"longrun\[crypto\]"):
        Seal(key=Keys()).wrap(b"{}", PLACE)
    with pytest.raises(MissingExtraError, match=r"longrun\[crypto\]"):
        Seal(key=Keys()).unwrap(blob, PLACE)


# ---------------------------------------------------------------- bad frames


@pytest.mark.parametrize("seal", [SEALS["compressed"], SEALS["encrypted"], SEALS["both"]], ids=["zstd", "aes", "both"])
def test_every_flipped_byte_and_every_cut_is_noticed(seal: Seal):
    """A changed frame is never read as something else; a changed first byte may at most make it no frame at all."""
    data = b'{"text":"' + b"abc" * 20 + b'"}'
    blob = seal.wrap(data, PLACE)
    assert blob[0] == VERSION
    for at in range(len(blob)):
        for bits in (0x01, 0x80, 0xFF):
            broken = bytearray(blob)
            broken[at] ^= bits
            if at == 0 and seal is SEALS["compressed"]:
                assert broken[0] > 8 or _refused(seal, bytes(broken))
                continue
            assert _refused(seal, bytes(broken)), (at, bits)
        if at:
            assert _refused(seal, blob[:at]), at
    assert _refused(seal, blob + b"x")


def _refused(seal: Seal, blob: bytes) -> bool:
    try:
        seal.unwrap(blob, PLACE)
    except (CorruptDataError, NewerFormatError):
        return True
    return False


def test_a_newer_frame_is_refused_as_newer():
    """I14."""
    with pytest.raises(NewerFormatError) as caught:
        Seal().unwrap(frame(b"{}", version=2), PLACE)
    assert (caught.value.found, caught.value.known) == (2, VERSION)


def test_unknown_flags_and_a_block_of_zeros_are_damage():
    with pytest.raises(CorruptDataError, match="flags"):
        Seal().unwrap(frame(b"{}", flags=4), PLACE)
    with pytest.raises(CorruptDataError, match="zero byte"):
        Seal().unwrap(bytes(4096), PLACE)


def test_a_zstd_bomb_is_refused_before_it_unfolds():
    """Neither the stated length nor the payload can make more than the limit."""
    zstd = seal_module._zstd()
    assert zstd is not None
    bomb = zstd.compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    small = Seal(limit=1_000_000)
    with pytest.raises(CorruptDataError, match="the limit is 1,000,000"):
        small.unwrap(frame(bomb, flags=COMPRESSED, length=50_000_000), PLACE)
    with pytest.raises(CorruptDataError, match="length"):
        small.unwrap(frame(bomb, flags=COMPRESSED, length=1000), PLACE)
    with pytest.raises(CorruptDataError, match="length"):
        small.unwrap(frame(zstd.compress(b"abc"), flags=COMPRESSED, length=1000), PLACE)
    with pytest.raises(CorruptDataError, match="length"):
        small.unwrap(frame(zstd.compress(b"abc") + b"more", flags=COMPRESSED, length=3), PLACE)
    with pytest.raises(CorruptDataError, match="zstd"):
        small.unwrap(frame(b"no zstd at all", flags=COMPRESSED, length=1000), PLACE)


def test_a_bomb_takes_no_more_memory_than_it_states():
    """The decompressor is stopped at the stated length, not measured afterwards."""
    import tracemalloc

    zstd = seal_module._zstd()
    assert zstd is not None
    blob = frame(zstd.compress(bytes(100_000_000)), flags=COMPRESSED, length=1000)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            Seal().unwrap(blob, PLACE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def test_data_over_the_limit_is_not_wrapped():
    """What could not be read again is not written."""
    with pytest.raises(TooLargeError):
        Seal(limit=10).wrap(b"x" * 11, PLACE)
    assert Seal(limit=10).wrap(b"x" * 10, PLACE) == b"x" * 10


# ---------------------------------------------------------------- encryption


def test_encrypted_data_shows_nothing_and_never_repeats():
    seal = Seal(key=Keys())
    first, second = seal.wrap(b'{"secret":"word"}', PLACE), seal.wrap(b'{"secret":"word"}', PLACE)
    assert first[1] == ENCRYPTED
    assert b"secret" not in first
    assert first != second


@pytest.mark.parametrize("other", ["job-2/7", "job-1/8", "job-1/70", ""])
def test_a_blob_moved_to_another_place_is_refused(other: str):
    blob = Seal(key=Keys()).wrap(b"{}", PLACE)
    with pytest.raises(CorruptDataError, match="belongs to another place"):
        Seal(key=Keys()).unwrap(blob, other)


def test_a_key_id_and_the_place_do_not_run_together():
    """Moving a character from the place to the key id must not give the same authenticated bytes."""
    keys = {"k": NEW, "kj": NEW}
    blob = Seal(key=lambda name: (name or "k", keys[name or "k"])).wrap(b"{}", "job/1")
    moved = blob[:14] + b"\x02kj" + blob[16:]
    with pytest.raises(CorruptDataError, match="belongs to another place"):
        Seal(key=lambda name: (name or "k", keys[name or "k"])).unwrap(moved, "ob/1")


def test_after_a_change_of_keys_old_data_is_still_read_and_new_data_uses_the_new_key():
    blob = Seal(key=Keys("old")).wrap(b"{}", PLACE)
    now = Seal(key=Keys("new"))
    assert now.unwrap(blob, PLACE) == b"{}"
    assert b"new" in now.wrap(b"{}", PLACE)[:20]


def test_an_unknown_key_id_is_named():
    blob = Seal(key=Keys("old")).wrap(b"{}", PLACE)
    keys = Keys()
    del keys.keys["old"]
    with pytest.raises(CorruptDataError, match="unknown key id, 'old'"):
        Seal(key=keys).unwrap(blob, PLACE)


@pytest.mark.parametrize("problem", [PermissionError("the key is disabled"), TimeoutError("no answer")], ids=repr)
def test_a_key_that_cannot_be_had_is_named_and_no_damage(problem: Exception) -> None:
    """Whoever keeps the keys is away or refuses one: that says nothing of the data, and may pass."""

    def refused(key_id: str | None) -> tuple[str, bytes]:
        raise problem

    blob = Seal(key=Keys("old")).wrap(b"{}", PLACE)
    with pytest.raises(KeyUnavailableError, match=type(problem).__name__) as caught:
        Seal(key=refused).unwrap(blob, PLACE)
    assert (caught.value.what, caught.value.key_id) == (PLACE, "old")
    assert caught.value.__cause__ is problem
    assert str(problem) not in str(caught.value)


def test_another_key_under_the_same_id_is_refused():
    blob = Seal(key=Keys()).wrap(b"{}", PLACE)
    keys = Keys()
    keys.keys["new"] = os.urandom(32)
    with pytest.raises(CorruptDataError, match="or key"):
        Seal(key=keys).unwrap(blob, PLACE)


def test_encrypted_data_without_a_key_says_so():
    blob = Seal(key=Keys()).wrap(b"{}", PLACE)
    with pytest.raises(CorruptDataError, match="no key is set"):
        Seal().unwrap(blob, PLACE)


@pytest.mark.parametrize(
    "blob",
    [b'{"a":1}', b"", Seal(compress_over=0).wrap(LARGE, PLACE), frame(b"\x01x")],
    ids=["text", "empty", "compressed", "framed"],
)
def test_with_a_key_unencrypted_data_is_read_only_when_that_is_allowed(blob: bytes):
    """Otherwise whoever can write to the store could leave the encryption out."""
    with pytest.raises(CorruptDataError, match="not encrypted"):
        Seal(key=Keys()).unwrap(blob, PLACE)
    assert Seal(key=Keys(), allow_plain=True).unwrap(blob, PLACE) == Seal().unwrap(blob, PLACE)


def test_keys_appear_in_no_repr_and_no_error():
    short = b"a-key-that-is-too-short"
    seal = Seal(key=lambda name: ("id", short))
    with pytest.raises(ConfigError) as caught:
        seal.wrap(b"{}", PLACE)
    assert "32 bytes" in str(caught.value)
    assert short.decode() not in str(caught.value) + repr(caught.value) + repr(seal)
    assert repr(Seal(key=Keys())) == "Seal(compress_over=16384, encrypted=True)"


def test_a_key_id_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match="255"):
        Seal(key=lambda name: ("x" * 256, NEW)).wrap(b"{}", PLACE)


@pytest.mark.parametrize("key", ["notcallable", NEW, ("id", NEW)], ids=["text", "bytes", "pair"])
def test_a_key_that_cannot_be_called_is_refused_and_not_shown(key: Any):
    with pytest.raises(ConfigError, match="a callable that takes a key's id or None and returns") as caught:
        Seal(key=key)
    assert str(key) not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [NEW, NEW[:2], None, "id", ("id",), ("id", NEW, 1), (b"id", NEW), (None, NEW), ("id", "x" * 32), ("id", None), 5],
    ids=lambda given: type(given).__name__,
)
def test_a_callable_that_gives_no_id_and_key_is_told_what_to_give(given: Any):
    """The first is the likely mistake: `lambda id: KEY`."""
    seal = Seal(key=lambda name: given)
    stored = Seal(key=Keys()).wrap(b"{}", PLACE)
    for call in (lambda: seal.wrap(b"{}", PLACE), lambda: seal.unwrap(stored, PLACE)):
        with pytest.raises(ConfigError, match=r"an id \(str\) and a key of 32 bytes") as caught:
            call()
        assert repr(NEW)[2:10] not in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_a_store_tells_what_its_key_must_be():
    key: Any = lambda name: NEW  # noqa: E731 -- as somebody writes it who forgot the id
    async with CheckpointStore(MemoryBackend(), seal=Seal(key=key)) as store:
        with pytest.raises(ConfigError, match="32 bytes"):
            await store.create(create("a"))


@pytest.mark.parametrize("bad", [{"compress_over": -1}, {"limit": 0}])
def test_settings_that_can_never_work_are_refused(bad: dict[str, int]):
    with pytest.raises(ConfigError):
        Seal(**bad)  # type: ignore[arg-type]


@given(st.binary(max_size=80), st.sampled_from(sorted(SEALS)))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused_with_an_error_of_the_codec(tail: bytes, which: str):
    for blob in (tail, b"\x01" + tail, b"\x01\x01" + tail, b"\x01\x02" + tail, b"\x01\x03" + tail):
        try:
            SEALS[which].unwrap(blob, PLACE)
        except (CorruptDataError, NewerFormatError):
            continue


async def test_the_loop_does_not_wait_for_keys():
    """Who keeps them may be far away."""
    threads: set[int] = set()
    ring = Keys()

    def slow(key_id: str | None) -> tuple[str, bytes]:
        threads.add(threading.get_ident())
        return ring(key_id)

    async with CheckpointStore(MemoryBackend(), seal=Seal(key=slow)) as store:
        await store.create(create("a"))
        await store.send("a", attrs.evolve(send("a").message, payload=b"1"))
        threads.clear()
        await store.load("a")
        await store.messages("a")
        await store.checkpoint("a", 1)
        assert await store.claim(claim())
        assert threads
        assert threading.get_ident() not in threads
