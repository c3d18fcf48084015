"""Executions in Redis or Valkey: many machines, one server, every batch of writes one script.

Place in the life of an execution: claim, checkpoint, finish. The scripts in `lua/` compare the fence and write in one
atomic act; `_redis/` turns records into bytes, connects, reads and lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from longrun.clock import SYSTEM_CLOCK, Clock
from longrun.errors import ConfigError, CorruptDataError, NewerFormatError, StoreSettingsError
from longrun.logging import get_logger
from longrun.records import ExecutionState
from longrun.seal import Seal
from longrun.stored import (
    Boundary,
    Claim,
    Create,
    Definition,
    Head,
    Loaded,
    Message,
    Owner,
    Query,
    Save,
    Stored,
    Write,
    named,
)
from longrun.stores import rows
from longrun.stores._redis import encode, wire
from longrun.stores._redis.address import own_options
from longrun.stores._redis.finding import Finder
from longrun.stores._redis.link import Link, Options, is_seconds
from longrun.stores._redis.reading import BYTES, LOADED, Reader
from longrun.stores._redis.watching import Watch
from longrun.stores.base import Answer, StoreBackend
from longrun.stores.store import CheckpointStore

if TYPE_CHECKING:
    import redis

DELETED = 100
"""Executions that one call removes."""
LONGEST_TTL = 1e12
"""Seconds. The server counts milliseconds, and has no number for much more."""
_NAMING = frozenset({Save})
"""What can set steps. Moves and ends cannot."""
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


class RedisBackend(StoreBackend):
    """Keeps executions in Redis 6.2 and up, or Valkey.

    An acknowledged write is on the server's disk if it has `appendonly yes` and `appendfsync always`; `durable` says
    whether that is so, and `open` warns if it is not. Replication is asynchronous: when a replica takes over from a
    primary that died, writes that were acknowledged last can be lost, whatever the settings.
    """

    kind = "redis"

    def __init__(
        self,
        url_or_client: str | redis.Redis,
        *,
        prefix: str = "longrun",
        finished_ttl: float | None = None,
        options: Options | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ttl = _checked_ttl(finished_ttl)
        self._clock = clock
        self._prefix = _checked_prefix(prefix)
        self._link = Link(url_or_client, prefix, options or Options())
        self._reader, self._finder, self._watch = Reader(self._link), Finder(self._link), Watch(self._link)
        self._number = 0
        self._unanswered: dict[str, tuple[int, Claim]] = {}
        self._unnamed: dict[str, Definition] = {}
        """Of what was claimed last and has no steps: most likely its owner sets them next. If another one did so in
        between, the save with these is refused for its fence."""
        self._log = get_logger(store=self.kind, prefix=prefix)

    # life

    def open(self) -> None:
        self._link.open()
        server = self._link.inspect()
        name = self._link.base + b"format"
        found = self._link.read("GET", name)
        if found is None:  # not before: a server that is full or only a replica can still be looked at
            self._link.once(lambda: self._link.client.set(name, wire.FORMAT, nx=True))
            found = self._link.read("GET", name)
        if not found.isdigit():
            raise StoreSettingsError(server.name, f"what is stored under the prefix {self._prefix!r} is not longrun's")
        if int(found) > wire.FORMAT:
            raise NewerFormatError(f"the {server.name} store", int(found), wire.FORMAT)
        self.durable = not server.losses
        self.kind = self._link.kind
        self._log = get_logger(store=self.kind, prefix=self._prefix)
        for loss in server.losses:
            self._log.warning("store.not_durable", server=server.name, version=server.version, why=loss)
        if server.silent_on is not None:
            self._log.warning("store.silent", server=server.name, version=server.version, why=server.silence)

    def close(self) -> None:
        self._watch.close()
        self._link.close()

    def ping(self) -> None:
        self._link.once(self._link.client.ping)

    def describe(self) -> Mapping[str, object]:
        server = self._link.server
        return {
            **super().describe(),
            "server": f"{server.name} {server.version}".strip(),
            "place": self._link.place(),
            "prefix": self._prefix,
            "appendonly": server.appendonly or "unknown",
            "appendfsync": server.appendfsync or "unknown",
            "maxmemory_policy": server.maxmemory_policy or "unknown",
            "warnings": server.warnings,
        }

    # the writer

    def commit(self, batch: Sequence[Write]) -> list[Answer]:
        found: list[Answer] = []
        for chunk in encode.chunks(batch, self._renamed(batch)):
            number: str | int = "" if chunk.comparable else self._next()
            reply = self._link.repeated("commit", self._link.name, number, self._ttl, chunk.argument())
            found += encode.answers(chunk, reply, self._link.server.name)
        return found

    def _renamed(self, batch: Sequence[Write]) -> dict[int, Definition]:
        """What saves that set steps make of definitions: rare, so that reading those first does not matter."""
        found: dict[int, Definition] = {}
        for write in batch if self._unnamed else ():
            if isinstance(write, Create):  # another one of that id, if it is made
                self._unnamed.pop(write.id, None)
        if _NAMING.isdisjoint(map(type, batch)):
            return found
        for place, write in enumerate(batch):
            if isinstance(write, Save) and write.steps is not None:
                made = (one.definition for one in batch if isinstance(one, Create) and one.id == write.id)
                definition = self._unnamed.pop(write.id, None) or self._definition(write.id) or next(made, None)
                if definition is not None:
                    found[place] = named(definition, write.steps, write.version)
        return found

    def _definition(self, id: str) -> Definition | None:
        value = self._link.read("HGET", self._link.base + b"x:" + id.encode(), "d")
        return None if value is None else wire.definition_from(id, value)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def claim(self, claim: Claim) -> list[Loaded]:
        loaded, damaged = self._claim(claim)
        for id in damaged:
            self._repair(id)
        if damaged and len(loaded) < claim.limit:
            loaded += self._claim(attrs.evolve(claim, limit=claim.limit - len(loaded)))[0]
        return loaded

    def _claim(self, claim: Claim) -> tuple[list[Loaded], list[str]]:
        """What was given, and what has a damaged control record.

        If the answer is lost, the same call of this owner asks with the same number, and gets what was given then. Who
        asks for something else must not get that: whose answer was lost looks for what it owns."""
        asked = attrs.evolve(claim, now=0.0)
        number, before = self._unanswered.get(claim.owner, (0, None))
        if before != asked:
            number = self._next()
        self._unanswered[claim.owner] = number, asked
        args = _claim_arguments(claim)
        given, damaged, *read = self._link.repeated("claim", f"{self._link.name}:{claim.owner}", number, *args)
        loaded = self._given(given.decode().split(), claim.owner, read)
        del self._unanswered[claim.owner]
        return loaded, [id.decode() for id in damaged]

    def _given(self, words: list[str], owner: str, read: Sequence[bytes]) -> list[Loaded]:
        """Load what was claimed, as far as the claim has not. Left out is what another claimer took meanwhile, and what
        cannot be read at all."""
        fences = {id: int(fence) for id, fence in zip(words[::2], words[1::2], strict=True)}
        found: list[Loaded] = []
        for id, loaded in self._reader.loads(list(fences), read):
            if isinstance(loaded, CorruptDataError):
                self._block(id, fences[id], loaded)
            elif (loaded.head.fence, loaded.head.owner) == (fences[id], owner):
                found.append(loaded)
        if found:
            self._unnamed = {one.definition.id: one.definition for one in found if not one.definition.steps}
        return found

    def _block(self, id: str, fence: int, error: CorruptDataError) -> None:
        """Nobody can go on with it, and claiming it again and again would not help: it waits for somebody to look."""
        value = self._link.read("HGET", self._link.base + b"x:" + id.encode(), "c")
        try:
            control = wire.control_from(id, value or b"")
        except wire.DamagedError:  # another claimer has it by now; so will the repair
            return
        head = Head(
            state=ExecutionState.BLOCKED,
            fence=fence,
            revision=control.revision + 1,
            seq=control.seq,
            crashes=control.crashes,
            updated=self._clock.now(),
            reason=str(error),
        )
        self.commit([Save(id=id, head=head)])

    def _repair(self, id: str) -> None:
        """Give an execution a sound control record again, from its head or its place in the listing. Nobody owns it."""
        key = self._link.base + b"x:" + id.encode()
        control, head, definition = self._link.read("HMGET", key, "c", "h", "d")
        try:
            record = wire.index_record(wire.definition_from(id, definition))
        except wire.DamagedError:
            self._log.warning("store.unreadable", execution=id)
            return
        self._reader.quarantine(id, {"control": control})
        rest = wire.control_from_head(id, head)
        state = "-" if rest is None else rest.state.value
        revision, seq, wake = (0, 0, "0") if rest is None else (rest.revision, rest.seq, rest.wake)
        self._link.repeated("repair", id, control, revision, f"{seq} {state} {wake}", record)

    def register(self, owner: Owner, ttl: float) -> None:
        self._link.repeated("owners", "register", wire.owner_name(owner.id)[1:], ttl, wire.owner_bytes(owner))

    def renew(self, owner: str, ttl: float) -> bool:
        return bool(self._link.repeated("owners", "renew", wire.owner_name(owner)[1:], ttl))

    def unregister(self, owner: str) -> None:
        self._link.repeated("owners", "unregister", wire.owner_name(owner)[1:])

    def delete(self, ids: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(ids), DELETED):
            name = f"{self._link.name}:delete"
            reply = self._link.repeated("delete", name, self._next(), *ids[at : at + DELETED])
            found += [answer == ord("1") for answer in reply]
        left = [id for id, deleted in zip(ids, found, strict=True) if not deleted]
        for id, loaded in list(self._reader.loads(list(dict.fromkeys(left)))):
            if isinstance(loaded, CorruptDataError):
                found[ids.index(id)] = self._discard(id)
        return found

    def _discard(self, id: str) -> bool:
        """Remove one of which nothing can be read."""
        control = self._link.read("HGET", self._link.base + b"x:" + id.encode(), "c")
        name = f"{self._link.name}:delete"
        return control is not None and bool(int(self._link.repeated("discard", name, self._next(), id, control)))

    # readers

    def load(self, id: str) -> Loaded | None:
        return self._reader.load(id)

    def head(self, id: str) -> Head | None:
        return self._reader.head(id) or super().head(id)

    def find(self, query: Query) -> list[Stored]:
        return self._finder.find(query)

    def count(self, query: Query) -> dict[ExecutionState, int]:
        return self._finder.count(query)

    def boundaries(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Boundary]:
        return self._reader.boundaries(id, after, limit)

    def checkpoint(self, id: str, seq: int) -> tuple[Boundary, Mapping[str, bytes]] | None:
        return self._reader.checkpoint(id, seq)

    def messages(self, id: str) -> list[Message]:
        return self._reader.messages(id)

    def states_of(self, ids: Sequence[str]) -> Mapping[str, ExecutionState]:
        asked = [id.encode("utf-8", "surrogatepass") for id in ids]
        flat = [wire.text_of(text) for text in self._link.repeated("states", *asked)]
        return rows.states_from(zip(flat[::2], flat[1::2], strict=True))

    def sent(self, id: str) -> tuple[int, Mapping[str, int]]:
        last = self._link.read("HGET", self._link.base + b"x:" + id.encode(), "m")
        name = self._link.base + b"k:" + id.encode()
        keys = self._link.read("ZRANGE", name, 0, -1)
        numbers = self._link.read("ZMSCORE", name, *keys) if keys else ()
        found = {wire.text_of(key)[1:]: int(float(n)) for key, n in zip(keys, numbers, strict=True) if n is not None}
        return int(last or 0), found

    def pending(self, owner: str) -> list[str]:
        found = self._link.read("SMEMBERS", self._link.base + b"i:mail:" + wire.owner_name(owner))
        return sorted(id.decode() for id in found)

    def owners(self) -> list[Owner]:
        flat = self._link.repeated("owners", "list", "")
        return [wire.owner_from(flat[n], flat[n + 1], float(flat[n + 2])) for n in range(0, len(flat), 3)]

    def next_due(self) -> float | None:
        found = self._link.repeated("due")
        return None if found is None else float(found)

    def size(self, id: str) -> int:
        return int(self._link.repeated("size", id))

    # the watcher

    def wait(self, timeout: float) -> bool:
        return self._watch.wait(timeout)

    def wake(self) -> None:
        self._watch.wake()


class RedisCheckpointStore(CheckpointStore):
    """Executions in Redis (6.2 and up) or Valkey, for many processes on many machines.

    Give a URL (`redis://`, `rediss://`, `unix://`) or a client of redis-py, which is then yours to close. `prefix`
    keeps several stores on one server apart. `finished_ttl` removes executions that many seconds after they finished,
    and children that long after their parent completed or was cancelled; those of a failed one, which can be retried,
    that long after it has gone. Without it they stay until `gc` or `delete`. What waits, is paused or runs never
    expires. `timeout` and `connect_timeout` are seconds, and `max_connections` bounds the pool; a client brings
    its own. A URL may hold these too (`redis://host?prefix=jobs&finished_ttl=86400`), and counts where the argument is
    left at its default.

    The server decides what an acknowledged write is worth: with `appendonly yes` and `appendfsync always` it is on its
    disk. With less, or with a `maxmemory-policy` other than `noeviction`, writes can be lost, and opening the store
    warns. A failover to a replica can lose writes that were acknowledged last, whatever the settings, since
    replication is asynchronous.
    """

    def __init__(
        self,
        url_or_client: str | redis.Redis,
        *,
        prefix: str = "longrun",
        finished_ttl: float | None = None,
        timeout: float = 5.0,
        connect_timeout: float = 5.0,
        max_connections: int = 16,
        seal: Seal | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        given: dict[str, Any] = {
            "prefix": prefix,
            "finished_ttl": finished_ttl,
            "timeout": timeout,
            "connect_timeout": connect_timeout,
            "max_connections": max_connections,
        }
        if isinstance(url_or_client, str):
            url_or_client, own = own_options(url_or_client)
            given |= {name: value for name, value in own.items() if given[name] == _DEFAULTS[name]}
        ours = {name: given.pop(name) for name in ("prefix", "finished_ttl")}
        super().__init__(RedisBackend(url_or_client, **ours, options=Options(**given), clock=clock), seal=seal)


_DEFAULTS: Any = RedisCheckpointStore.__init__.__kwdefaults__
"""What its arguments are when nobody gives them."""


def _checked_prefix(prefix: object) -> str:
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ConfigError("prefix", prefix, "use 1 to 100 letters, digits and _ . : -")
    return prefix


def _checked_ttl(seconds: float | None) -> str:
    """In milliseconds, as the scripts take it; empty for what is kept."""
    if seconds is None:
        return ""
    if not is_seconds(seconds) or seconds > LONGEST_TTL:
        expected = f"use seconds above 0, up to {LONGEST_TTL:g}, or None to keep what is finished"
        raise ConfigError("finished_ttl", seconds, expected)
    return str(max(1, round(seconds * 1000)))


def _claim_arguments(claim: Claim) -> list[Any]:
    args: list[Any] = [wire.owner_name(claim.owner), repr(claim.now), claim.limit, LOADED, BYTES]
    args += _list([state.value for state in sorted(claim.states)])
    args += _list(claim.ids)
    args += _list(None if claim.workflows is None else [wire.named(name) for name in sorted(claim.workflows)])
    args += _list(None if claim.queues is None else [wire.named(name) for name in sorted(claim.queues)])
    args += _list([wire.owner_name(owner) for owner in sorted(claim.dead)])
    return args


def _list(items: Sequence[Any] | None) -> list[Any]:
    return ["-"] if items is None else [len(items), *items]
