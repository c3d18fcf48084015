"""The bare loops: what each store can do with no library around it. The goal posts of the table.

Place in the life of a measurement: the other side of each ratio. A step's state is durable before the next step of the
same execution; one writer thread takes whatever is pending, commits it at once, and resolves all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

orjson: Any = importlib.import_module("orjson") if importlib.util.find_spec("orjson") else None
"""Without it the standard library serves, as it does for longrun."""

Record = tuple[str, int, bytes]
"""An execution's id (a dot and a key may follow), how many steps it has done, its state."""

SYNC_THREADS = 16


def dumps(value: object) -> bytes:
    data: bytes = json.dumps(value, separators=(",", ":")).encode() if orjson is None else orjson.dumps(value)
    return data


def loads(data: bytes) -> Any:
    return json.loads(data) if orjson is None else orjson.loads(data)


class Sink(Protocol):
    """Where records go. `commit` returns when all of them are on the disk."""

    def commit(self, batch: Sequence[Record]) -> None: ...
    def load(self) -> dict[str, tuple[int, bytes]]: ...
    def close(self) -> None: ...


class FileSink:
    """One append-only journal an execution (its id ends at the first dot); a batch's fdatasyncs run in 16 threads."""

    def __init__(self, url: str) -> None:
        self.directory = Path(url.removeprefix("file:"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, int] = {}
        self.threads = ThreadPoolExecutor(SYNC_THREADS)

    def commit(self, batch: Sequence[Record]) -> None:
        lines: dict[str, list[bytes]] = {}
        for id, done, state in batch:
            lines.setdefault(id.partition(".")[0], []).append(b"%b %d %b\n" % (id.encode(), done, state))
        work = [(name, b"".join(texts)) for name, texts in lines.items()]
        known = len(self.files)
        share = -(-len(work) // SYNC_THREADS)
        if len(work) == 1:
            self._append(work)
        else:
            parts = [work[start : start + share] for start in range(0, len(work), share)]
            for future in [self.threads.submit(self._append, part) for part in parts]:
                future.result()
        if len(self.files) != known:
            self._sync_directory()

    def _append(self, work: Sequence[tuple[str, bytes]]) -> None:
        for name, lines in work:
            journal = self.files.get(name)
            if journal is None:
                flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
                journal = self.files[name] = os.open(self.directory / name, flags, 0o600)
            os.write(journal, lines)
            os.fdatasync(journal)

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self) -> dict[str, tuple[int, bytes]]:
        found = {}
        for path in self.directory.iterdir():
            for line in path.read_bytes().splitlines():
                id, done, state = line.split(b" ", 2)
                found[id.decode()] = (int(done), state)
        return found

    def close(self) -> None:
        self.threads.shutdown()
        for journal in self.files.values():
            os.close(journal)


class SQLiteSink:
    """WAL with synchronous=FULL, one transaction a batch."""

    UPSERT = "insert into run values(?,?,?) on conflict(id) do update set done=excluded.done, state=excluded.state"

    def __init__(self, url: str) -> None:
        path = url.removeprefix("sqlite:///")
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.connection.execute("pragma journal_mode=wal")
        self.connection.execute("pragma synchronous=full")
        self.connection.execute(
            "create table if not exists run(id text primary key, done int, state blob) without rowid"
        )

    def commit(self, batch: Sequence[Record]) -> None:
        self.connection.execute("begin immediate")
        self.connection.executemany(self.UPSERT, batch)
        self.connection.execute("commit")

    def load(self) -> dict[str, tuple[int, bytes]]:
        return {id: (done, state) for id, done, state in self.connection.execute("select * from run")}

    def close(self) -> None:
        self.connection.close()


class PostgresSink:
    """One upsert of arrays a batch, prepared, on one connection."""

    UPSERT = (
        "insert into run select * from unnest(%b::text[], %b::int[], %b::bytea[])"
        " on conflict(id) do update set done=excluded.done, state=excluded.state"
    )

    def __init__(self, url: str) -> None:
        import psycopg

        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(
            "create table if not exists run(id text primary key, done int, state bytea) with (fillfactor=50)"
        )
        self.connection.execute("alter table run alter column state set storage external")

    def commit(self, batch: Sequence[Record]) -> None:
        columns = [list(column) for column in zip(*batch, strict=True)]
        self.connection.execute(self.UPSERT, columns, prepare=True)

    def load(self) -> dict[str, tuple[int, bytes]]:
        rows = self.connection.execute("select id, done, state from run")
        return {id: (done, bytes(state)) for id, done, state in rows}

    def close(self) -> None:
        self.connection.close()


class RedisSink:
    """One command a batch, on a server with appendfsync always."""

    def __init__(self, url: str) -> None:
        import redis

        self.client = redis.Redis.from_url(url)

    def commit(self, batch: Sequence[Record]) -> None:
        self.client.mset({b"run:" + id.encode(): b"%d %b" % (done, state) for id, done, state in batch})

    def load(self) -> dict[str, tuple[int, bytes]]:
        keys: Any = self.client.keys("run:*")
        values: Any = self.client.mget(keys)
        parts = [value.partition(b" ") for value in values]
        return {key[4:].decode(): (int(done), state) for key, (done, _, state) in zip(keys, parts, strict=True)}

    def close(self) -> None:
        self.client.close()


SINKS: dict[str, Callable[[str], Sink]] = {
    "file": FileSink,
    "sqlite": SQLiteSink,
    "postgres": PostgresSink,
    "redis": RedisSink,
    "valkey": RedisSink,
}


class Group:
    """Group commit: one writer thread, one commit for all that is pending, one call back into the loop for it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.loop = asyncio.get_running_loop()
        self.pending: list[tuple[Record, asyncio.Future[None]]] = []
        self.wake = threading.Event()
        self.closing = False
        self.thread = threading.Thread(target=self._run, name="bare-writer")
        self.thread.start()

    def put(self, record: Record) -> asyncio.Future[None]:
        future = self.loop.create_future()
        self.pending.append((record, future))
        self.wake.set()
        return future

    def _run(self) -> None:
        while True:
            self.wake.wait()
            self.wake.clear()
            batch, self.pending = self.pending, []
            if batch:
                self._commit(batch)
            elif self.closing:
                return

    def _commit(self, batch: list[tuple[Record, asyncio.Future[None]]]) -> None:
        error = None
        try:
            self.sink.commit([record for record, _ in batch])
        except Exception as caught:  # whatever it is belongs to those who wait
            error = caught
        self.loop.call_soon_threadsafe(_resolve, batch, error)

    def close(self) -> None:
        self.closing = True
        self.wake.set()
        self.thread.join()


def _resolve(batch: list[tuple[Record, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, future in batch:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


@contextlib.contextmanager
def opened(store: str, url: str) -> Iterator[Group]:
    """A group over the sink of a store; call it inside a running loop."""
    sink = SINKS[store](url)
    group = Group(sink)
    try:
        yield group
    finally:
        group.close()
        sink.close()


async def step(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "n": state["n"] + 1}


async def execute(group: Group, id: str, state: dict[str, Any], steps: int) -> int:
    """Run to the last step, each state whole and durable before the next step."""
    while state["n"] < steps:
        state = await step(state)
        await group.put((id, state["n"], dumps(state)))
    return int(state["n"])


async def execute_changed_keys(group: Group, id: str, state: dict[str, Any], steps: int) -> int:
    """The same, but only keys whose bytes changed are written, a record each."""
    written: dict[str, bytes] = {}
    while state["n"] < steps:
        state = await step(state)
        parts = {key: dumps(value) for key, value in state.items()}
        changed = [(f"{id}.{key}", state["n"], data) for key, data in parts.items() if written.get(key) != data]
        await asyncio.gather(*(group.put(record) for record in changed))
        written = parts
    return int(state["n"])
