"""Whatever a name or a payload is made of, it is data to the store, and nothing else.

Place in the life of an execution: all of it.
"""

from __future__ import annotations

import random
import string
from typing import Any

import attrs
import pytest

from longrun.records import ExecutionState, check_id
from longrun.stored import Owner, Query
from longrun.stores.base import StoreBackend
from longrun.testing.conformance_base import ConformanceBase, created, done, ids_of, loaded
from longrun.testing.samples import boundary, change, claim, create, owned, send, step

NAMES = [
    " ",
    "plain",
    "it's",
    'say "x"',
    "'; DROP TABLE executions; --",
    "a%b_c\\d",
    "{a}:{b}",
    "KEYS[1] .. ARGV[1]",
    "*?[a-z]",
    "../../etc/passwd",
    "a/b\\c",
    "$(id) `id` ${HOME} %s %(x)s {0} :x ?1",
    "line\nbreak\ttab\r",
    "naïve – ünïcode 漢字 🙂",
    "e\u0301 is not \u00e9",
    "null",
    "\x01\x7f",
    "x" * 300,
]
"""Names of anything but an execution, whose id has an alphabet of its own."""

IDS = [
    string.ascii_letters + string.digits + "_.:@=+~-",
    "x" * 200,
    "a", "A", "a:b", "a:b:c", "a.b", "a=b", "a-b", "a~b", "a@b", "a+b", "_", "0", "1e5", "a:", "a.", "CON", "nul",
    "x" * 199 + "y",
]  # fmt: skip


class NameContract(ConformanceBase):
    def test_ids_of_every_kind(self, backend: StoreBackend) -> None:
        """No two of them meet, though some are parts of others."""
        news = [owned(check_id(id), blobs={"b": id.encode()}, data=id.encode()) for id in IDS]
        created(backend, *news)
        done(backend, *[change(id, news[0].head, put={"e": id.encode(), "b:c": b""}) for id in IDS])
        done(backend, *[send(id, payload=id.encode()) for id in IDS])
        for id in IDS:
            found = loaded(backend, id)
            assert (found.definition.id, found.boundary.data) == (id, id.encode())
            assert (found.blobs, found.entries) == ({"b": id.encode()}, {"e": id.encode(), "b:c": b""})
            assert [message.payload for message in found.messages] == [id.encode()]
            assert len(backend.boundaries(id)) == 1
        assert {one.definition.id for one in backend.find(Query())} == set(IDS)
        assert sorted(backend.pending("me")) == sorted(IDS)

    def test_ids_of_every_kind_are_claimed_and_deleted(self, backend: StoreBackend) -> None:
        created(backend, *[create(id) for id in IDS])
        given = backend.claim(claim(ids=tuple(IDS)))
        assert sorted(ids_of(given)) == sorted(IDS)
        end = {"state": ExecutionState.COMPLETED, "owner": None}
        done(backend, *[change(one.definition.id, one.head, head_fields=end) for one in given])
        assert backend.delete(IDS[::2]) == [True] * len(IDS[::2])
        assert {one.definition.id for one in backend.find(Query())} == set(IDS[1::2])

    @pytest.mark.parametrize("name", NAMES, ids=ascii)
    def test_names_in_a_definition(self, backend: StoreBackend, name: str) -> None:
        odd = create(
            "odd", workflow=name, queue=name, version=name, steps=(name, "x"), parent_id=name, metadata={name: name}
        )
        created(backend, odd, create("even", workflow="w", queue="q", parent_id="p", metadata={"k": "v"}))
        assert loaded(backend, "odd").definition == odd.definition
        for query in (
            Query(workflows=frozenset({name})),
            Query(queue=name),
            Query(parent_id=name),
            Query(metadata={name: name}),
            Query(workflows=frozenset({name, "no"}), queue=name, metadata={name: name}, text=name or None),
        ):
            assert [one.definition.id for one in backend.find(query)] == ["odd"]
            assert backend.count(query) == {ExecutionState.RUNNING: 1}
        assert ids_of(backend.claim(claim(workflows=frozenset({name}), queues=frozenset({name})))) == ["odd"]

    @pytest.mark.parametrize("name", NAMES, ids=ascii)
    def test_names_of_owners_and_signals(self, backend: StoreBackend, name: str) -> None:
        owner = Owner(id=name, life={name: name}, remaining=0.0, workflows=(name,), queues=(name,))
        backend.register(owner, 1000.0)
        assert [attrs.evolve(one, remaining=0.0) for one in backend.owners()] == [owner]
        assert backend.renew(name, 1000.0) is True
        created(backend, create("a"))
        (given,) = backend.claim(claim(name))
        texts: dict[str, Any] = {"signal": name, "error": name, "reason": name, "note": name}
        saved = change("a", given.head, head_fields=texts)
        done(backend, saved, send("a", name, key=name, options={name: name}))
        assert loaded(backend, "a").head == attrs.evolve(given.head, revision=1, **texts)
        assert done(backend, send("a", name, key=name)) == [1]
        (message,) = backend.messages("a")
        assert (message.name, message.key, message.options) == (name, name, {name: name})
        assert (backend.pending(name), [one.head.owner for one in backend.find(Query(owner=name))]) == (["a"], [name])
        assert len(backend.claim(claim("next", dead=frozenset({name})))) == 1
        backend.unregister(name)
        assert backend.owners() == []

    def test_names_of_entries_and_blobs(self, backend: StoreBackend) -> None:
        values = {name: name.encode() for name in NAMES}
        new = owned("a", blobs=values)
        row = boundary(2, blobs=tuple(reversed(NAMES)), name=NAMES[4], error=NAMES[12])
        saved = step("a", new.head, put=values, boundaries=(row,))
        done(backend, new, saved)
        found = loaded(backend, "a")
        assert (found.entries, found.blobs, found.boundary) == (values, values, row)
        assert found.kept == ((1, tuple(NAMES)), (2, tuple(reversed(NAMES))))
        done(backend, change("a", saved.head, drop=tuple(NAMES[3:]), keep_from=2))
        assert set(loaded(backend, "a").entries) == set(NAMES[:3])


PAYLOADS = {
    "empty": b"",
    "zero": b"\x00",
    "frame": b"\x01\x02\x03",
    "every byte": bytes(range(256)),
    "text": "ünïcode 🙂\n".encode(),
    "json": b'{"a": [1, 2], "b": "\\u0000"}',
    "line": b"\n",
    "no text": b"\xff\xfe\x80\r\n\x00\x1a",
    "random": random.Random(7).randbytes(5000),
}


class PayloadContract(ConformanceBase):
    def test_bytes_come_back_as_they_were(self, backend: StoreBackend) -> None:
        """States, blobs, entries and messages are opaque: sealed data is binary."""
        for n, data in enumerate(PAYLOADS.values()):
            new = owned(f"x{n}", data=data, blobs={"b": data})
            row = boundary(2, data=data, blobs=("b", "c"), size=len(data))
            saved = step(new.id, new.head, boundaries=(row,), blobs={"c": data}, put={"e": data})
            done(backend, new, saved, send(new.id, payload=data))
            found = loaded(backend, new.id)
            assert (found.boundary, found.blobs, found.entries) == (row, {"b": data, "c": data}, {"e": data})
            assert [message.payload for message in found.messages] == [data]
            assert [backend.checkpoint(new.id, seq) for seq in (1, 2)] == [
                (new.boundary, {"b": data}),
                (row, {"b": data, "c": data}),
            ]

    def test_a_megabyte_of_each(self, backend: StoreBackend) -> None:
        one, two, three, four = (random.Random(seed).randbytes(2**20) for seed in range(4))
        new = owned("a", data=one, blobs={"b": two})
        saved = change("a", new.head, put={"e": three})
        done(backend, new, saved, send("a", payload=four), create("small"))
        (found, _) = sorted(backend.claim(claim("new", dead=frozenset({"me"}))), key=lambda found: found.definition.id)
        assert (found.boundary.data, found.blobs, found.entries) == (one, {"b": two}, {"e": three})
        assert found.messages[0].payload == four
        assert backend.size("a") >= 3 * 2**20

    def test_what_comes_back_is_bytes(self, backend: StoreBackend) -> None:
        """Not a view, nor whatever else a driver makes of a binary column."""
        new = owned("a")
        created(backend, new)
        found = loaded(backend, "a")
        assert type(found.boundary.data) is bytes
        done(backend, change("a", new.head, put={"e": b"x"}, blobs={"b": b"y"}), send("a", payload=b"z"))
        found = loaded(backend, "a")
        assert type(found.entries["e"]) is bytes
        assert type(found.messages[0].payload) is bytes

    def test_a_large_head(self, backend: StoreBackend) -> None:
        """Errors and notes may be long, steps and metadata many."""
        new = owned(
            "a",
            steps=tuple(f"step {n}" for n in range(2000)),
            total=2000,
            metadata={f"key {n}": "v" * 50 for n in range(200)},
        )
        saved = change("a", new.head, head_fields={"error": "e" * 100_000, "note": "ü" * 10_000})
        done(backend, new, saved)
        found = loaded(backend, "a")
        assert (found.definition, found.head) == (new.definition, saved.head)
