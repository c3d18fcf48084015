"""Sealing through a store: what is compressed or encrypted comes back, and what was moved is refused.

Place in the life of an execution: checkpoint.
"""

from __future__ import annotations

import importlib.util

import attrs
import pytest

from longrun.errors import CorruptDataError, StoreError
from longrun.seal import Seal
from longrun.stores.store import CheckpointStore
from longrun.testing.conformance_async import both, soon
from longrun.testing.conformance_base import ConformanceBase
from longrun.testing.samples import boundary, claim, end, move, owned, send, step

KEY = bytes(range(32))
TEXT = b"a secret that is long enough to be found " * 1000

encrypting = pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="needs cryptography")


def key(id: str | None) -> tuple[str, bytes]:
    if id not in (None, "first"):
        raise KeyError(id)
    return "first", KEY


class SealContract(ConformanceBase):
    def sealed(self, store: CheckpointStore, seal: Seal) -> CheckpointStore:
        """The same backend under another seal."""
        return CheckpointStore(store.backend, seal=seal)

    async def round_trip(self, store: CheckpointStore) -> None:
        new = owned("a", data=TEXT, blobs={"b": TEXT + b"1"})
        await store.create(new)
        row = boundary(2, data=TEXT + b"2", blobs=("b", "c"))
        saved = step("a", new.head, boundaries=(row,), blobs={"c": b"\x01small"}, put={"e": TEXT + b"3", "f": b""})
        await store.save(saved)
        await store.send("a", send("a", payload=TEXT + b"4").message)
        found = await store.load("a")
        assert (found.boundary, found.blobs) == (row, {"b": TEXT + b"1", "c": b"\x01small"})
        assert found.entries == {"e": TEXT + b"3", "f": b""}
        assert [message.payload for message in found.messages] == [TEXT + b"4"]
        assert await store.checkpoint("a", 1) == (new.boundary, {"b": TEXT + b"1"})
        assert [message.payload for message in await store.messages("a")] == [TEXT + b"4"]
        (given,) = await store.claim(claim(dead=frozenset({"me"})))
        assert attrs.evolve(given, head=found.head) == found
        await self.moved(store)

    async def moved(self, store: CheckpointStore) -> None:
        """The smallest writes are sealed as well."""
        new = owned("m")
        await store.create(new)
        for make in (move, end):
            made = make("m", (await store.load("m")).head, data=TEXT)
            await store.save(made)
            assert (await store.load("m")).boundary == made.boundary
            stored = store.backend.checkpoint("m", made.head.seq)
            assert stored is not None
            assert stored[0].data is not None
            assert stored[0].data[:2] == store.seal.wrap(TEXT, "m")[:2]  # version and flags of the frame

    @both
    async def test_compressed(self, store: CheckpointStore) -> None:
        async with soon(), self.sealed(store, Seal(compress_over=100)) as sealed:
            await self.round_trip(sealed)

    @both
    async def test_as_it_is(self, store: CheckpointStore) -> None:
        async with soon(), self.sealed(store, Seal(compress_over=None)) as sealed:
            await self.round_trip(sealed)

    @encrypting
    @both
    async def test_encrypted(self, store: CheckpointStore) -> None:
        """No state, blob, entry or payload reaches the backend in the clear."""
        async with soon(), self.sealed(store, Seal(compress_over=None, key=key)) as sealed:
            await self.round_trip(sealed)
            raw = store.backend.load("a")
            assert raw is not None
            stored = [raw.boundary.data, *raw.blobs.values(), *raw.entries.values(), raw.messages[0].payload]
            assert not any(b"secret" in (data or b"") for data in stored)
            assert all(stored)

    @encrypting
    @both
    async def test_what_was_moved_is_refused(self, store: CheckpointStore) -> None:
        """A state, a blob or a message of another execution, or of another place in the same one, does not open."""
        async with soon(), self.sealed(store, Seal(key=key)) as sealed:
            await self.round_trip(sealed)
            raw = store.backend.load("a")
            assert raw is not None
            first = store.backend.checkpoint("a", 1)
            assert first is not None
            forged = [
                owned("state", data=raw.boundary.data or b""),
                owned("earlier", data=first[0].data or b""),
                owned("blob", blobs={"b": raw.blobs["b"]}),
            ]
            forged.append(owned("plain", data=b"not sealed at all"))
            for create in forged:
                assert store.backend.commit([create]) == [True]
                with pytest.raises(CorruptDataError):
                    await sealed.load(create.id)
            swapped = step("a", raw.head, boundaries=(boundary(3, data=raw.boundary.data),))
            assert store.backend.commit([swapped]) == [None]
            with pytest.raises(CorruptDataError):
                await sealed.load("a")
            with pytest.raises(CorruptDataError):
                await sealed.checkpoint("a", 3)

    @encrypting
    @both
    async def test_a_key_that_cannot_be_had_refuses_only_what_needs_it(self, store: CheckpointStore) -> None:
        """I10: the writer goes on, and the write is there once the key is."""
        locked = True

        def sometimes(id: str | None) -> tuple[str, bytes]:
            if locked:
                raise OSError("the key store is away")
            return key(id)

        async with soon(), self.sealed(store, Seal(key=sometimes)) as sealed:
            new = owned("a")
            with pytest.raises((StoreError, OSError)):
                await sealed.create(new)
            locked = False
            assert await sealed.create(new) is True
            assert (await sealed.load("a")).boundary == new.boundary
