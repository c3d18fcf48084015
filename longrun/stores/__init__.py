"""The stores: one contract (`base`), one async face (`store`), one module a backend, none importing another.

Place in the life of an execution: claim, checkpoint, finish. `open_store` picks a store by its URL; each is imported
when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from longrun.errors import StoreSettingsError

if TYPE_CHECKING:
    from longrun.stores.base import StoreBackend as StoreBackend
    from longrun.stores.copy import copy_store as copy_store
    from longrun.stores.file import FileCheckpointStore as FileCheckpointStore
    from longrun.stores.memory import MemoryCheckpointStore as MemoryCheckpointStore
    from longrun.stores.postgres import PostgresCheckpointStore as PostgresCheckpointStore
    from longrun.stores.redis import RedisCheckpointStore as RedisCheckpointStore
    from longrun.stores.replicated import DirectoryWitness as DirectoryWitness
    from longrun.stores.replicated import ReplicatedCheckpointStore as ReplicatedCheckpointStore
    from longrun.stores.replicated import StoreWitness as StoreWitness
    from longrun.stores.sqlalchemy_tasks import SQLAlchemyTaskStore as SQLAlchemyTaskStore
    from longrun.stores.sqlite import SQLiteCheckpointStore as SQLiteCheckpointStore
    from longrun.stores.store import CheckpointStore as CheckpointStore
    from longrun.stores.task import TaskCheckpointStore as TaskCheckpointStore
    from longrun.stores.task import TaskRecord as TaskRecord
    from longrun.stores.task import TaskStoreAdapter as TaskStoreAdapter

WHERE = {
    "CheckpointStore": "store",
    "StoreBackend": "base",
    "MemoryCheckpointStore": "memory",
    "FileCheckpointStore": "file",
    "SQLiteCheckpointStore": "sqlite",
    "PostgresCheckpointStore": "postgres",
    "RedisCheckpointStore": "redis",
    "ReplicatedCheckpointStore": "replicated",
    "DirectoryWitness": "replicated",
    "StoreWitness": "replicated",
    "TaskCheckpointStore": "task",
    "TaskStoreAdapter": "task",
    "TaskRecord": "task",
    "SQLAlchemyTaskStore": "sqlalchemy_tasks",
    "copy_store": "copy",
}
SCHEMES = ("memory:", "file:DIR", "sqlite:///PATH", "postgresql://…", "redis://…", "replicated:?primary=…&secondary=…")

__all__ = [*WHERE, "open_store"]  # noqa: PLE0604 -- the names are the keys above


def __getattr__(name: str) -> Any:
    if name in WHERE:
        return getattr(importlib.import_module(f"longrun.stores.{WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_store(url: str, **options: Any) -> CheckpointStore:
    """The store that a URL names. It is opened on entering it, or by whoever uses it.

    `memory:`, `file:DIR`, `sqlite:///PATH` (a fourth slash makes it absolute), `postgresql://…` and `redis://…` (also
    `rediss://`, `valkey://`, `unix://`) are stores. `?schema=NAME` chooses the schema in PostgreSQL, `?prefix=NAME`
    what the keys in Redis begin with, `?finished_ttl=SECONDS` how long what is finished stays there and
    `?timeout=SECONDS` how long its answer is waited for. `replicated:?primary=URL&secondary=URL` is two in step, see
    `ReplicatedCheckpointStore`. There the URLs are percent-encoded, and may be followed by `witness=URL` (`file:DIR` is
    a `DirectoryWitness`, any other store a `StoreWitness`, with `witness_name=` if several pairs share it), by
    `mode=async` and by the numbers that the class takes. `options` go to the class of the store.
    """
    scheme, colon, rest = str(url).partition(":")
    if not colon:
        raise StoreSettingsError("checkpoint", f"a URL is needed, one of {', '.join(SCHEMES)}")
    store: CheckpointStore
    if scheme == "memory":
        store = __getattr__("MemoryCheckpointStore")(**options)
    elif scheme == "file":
        store = __getattr__("FileCheckpointStore")(_file_path(rest), **options)
    elif scheme == "sqlite":
        store = __getattr__("SQLiteCheckpointStore")(_sqlite_path(rest), **options)
    elif scheme in ("postgresql", "postgres"):
        plain, own = _own_options(str(url), ("schema",))
        store = __getattr__("PostgresCheckpointStore")(plain, **{**own, **options})
    elif scheme in ("redis", "rediss", "valkey", "valkeys", "unix", "redis+unix"):
        plain, own = _own_options(str(url), ("prefix",))
        store = __getattr__("RedisCheckpointStore")(plain, **{**own, **options})
    elif scheme == "replicated":
        store = _pair(str(url), options)
    else:
        raise StoreSettingsError("checkpoint", f"{scheme!r} is no kind of store; use one of {', '.join(SCHEMES)}")
    return store


def _pair(url: str, options: dict[str, Any]) -> CheckpointStore:
    from longrun.stores._replicated.address import parse

    address = parse(url)
    if address.witness is not None:
        options = {"witness": _witness(address.witness, address.witness_name), **options}
    primary, secondary = _part("primary", address.primary), _part("secondary", address.secondary)
    pair: CheckpointStore = __getattr__("ReplicatedCheckpointStore")(
        primary, secondary, **{**address.options, **options}
    )
    return pair


def _witness(url: str, name: str | None) -> Any:
    if url.startswith("file:"):
        return __getattr__("DirectoryWitness")(_file_path(url.removeprefix("file:")))
    return __getattr__("StoreWitness")(_part("witness", url), **({} if name is None else {"name": name}))


def _part(name: str, url: str) -> CheckpointStore:
    """One of the stores of a pair; an error says which of them it is about."""
    try:
        return open_store(url)
    except StoreSettingsError as error:
        raise StoreSettingsError("replicated", f"its {name}: {error.problem}") from error


def _own_options(url: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The URL for the driver, and those parts of its query that are for the store itself."""
    front, _, query = url.partition("?")
    parts = [part.partition("=") for part in query.split("&")]
    own = {name: unquote(value) for name, _, value in parts if name in names}
    rest = "&".join("".join(part) for part in parts if part[0] not in names)
    return (url if not own else f"{front}?{rest}" if rest else front), own


def _file_path(rest: str) -> str:
    path = rest.removeprefix("//")
    if not path:
        raise StoreSettingsError("file", "the URL names no directory: file:DIR")
    return path


def _sqlite_path(rest: str) -> str:
    if not rest.startswith("///") or len(rest) == 3:
        raise StoreSettingsError("sqlite", "write sqlite:///PATH, with a fourth slash for an absolute path")
    return rest[3:]
