"""From options to things: the store, a desk to read at, a client to control with, the registry, JSON values."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from longrun.cli._settings import settings
from longrun.cli._text import clean

if TYPE_CHECKING:
    from longrun.client import Client
    from longrun.desk import Desk
    from longrun.registry import StepRegistry
    from longrun.stores.store import CheckpointStore

T = TypeVar("T")
SCHEMES = frozenset(
    {
        "memory",
        "file",
        "sqlite",
        "postgresql",
        "postgres",
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "unix",
        "redis+unix",
        "replicated",
    }
)
_OBJECT = re.compile(r"(?P<module>[\w.]+|[^:]+\.py):(?P<name>[\w.]+)")


def go(function: Callable[..., Awaitable[T]], *args: Any, loop: str | None = None) -> T:
    """Run an async function to its end."""
    import anyio

    backend = settings().get("loop", loop, "asyncio")
    if backend not in ("asyncio", "trio"):
        raise click.UsageError(f"--loop is asyncio or trio, not {clean(backend, limit=40)!r}")
    if backend == "trio":
        try:
            importlib.import_module("trio")
        except ImportError:
            raise click.UsageError("trio is not installed: pip install trio") from None
    return anyio.run(function, *args, backend=backend)


# --- the store --------------------------------------------------------------------------------------------------------


def make_store(text: str | None, *, create: bool = False) -> CheckpointStore:
    """The store that a flag or the settings name: by URL, or as `module:attribute` of one (or of what makes one).

    Unless `create`, a store on disk must be there already: looking must not leave an empty one behind."""
    from longrun.stores import open_store
    from longrun.stores.store import CheckpointStore

    text = settings().store(text)
    scheme = text.partition(":")[0]
    if scheme not in SCHEMES and _OBJECT.fullmatch(text):
        found = load_object(text)
        found = found() if callable(found) else found
        if not isinstance(found, CheckpointStore):
            raise click.UsageError(f"{clean(text)} is no CheckpointStore, nor does it return one")
        return found
    if not create:
        _must_exist(text)
    return open_store(text)


def _must_exist(url: str) -> None:
    from longrun.errors import StoreUnavailableError

    places = [_place(one) for one in _stores_of(url)]
    missing = [place for place in places if place is not None and not os.path.lexists(place[1])]
    if len(missing) == len(places):  # of a pair, one may be gone: that is what the other is for
        scheme, path = missing[0]
        raise StoreUnavailableError(
            scheme, f"there is none at {path!r}; name another with --store, or begin with longrun run"
        )


def _stores_of(url: str) -> list[str]:
    if not url.startswith("replicated:"):
        return [url]
    from longrun.stores._replicated.address import parse

    address = parse(url)
    return [address.primary, address.secondary]


def _place(url: str) -> tuple[str, str] | None:
    """Scheme and path of a store on disk."""
    from longrun.stores import _file_path, _sqlite_path

    scheme, _, rest = url.partition(":")
    if scheme not in ("file", "sqlite"):
        return None
    return scheme, _file_path(rest) if scheme == "file" else _sqlite_path(rest)


@contextlib.asynccontextmanager
async def reading(store: CheckpointStore) -> AsyncIterator[Desk]:
    """A desk on an open store: it looks, and writes nothing."""
    from longrun.desk import Desk

    async with store:
        yield Desk(store, None)


@contextlib.asynccontextmanager
async def controlling(store: CheckpointStore) -> AsyncIterator[Client]:
    from longrun.client import Client

    async with Client(store) as client:
        yield client


# --- the application --------------------------------------------------------------------------------------------------


def load_object(text: str, default: str | None = None) -> Any:
    """What `module:attribute` or `path/to/file.py:attribute` names. The working directory can be imported from."""
    text = text if ":" in text or default is None else f"{text}:{default}"
    found = _OBJECT.fullmatch(text)
    if found is None:
        raise click.UsageError(f"{clean(text, limit=80)!r} is no module:name, e.g. app:registry")
    module, name = found["module"], found["name"]
    folder = Path.cwd()
    if module.endswith(".py"):
        path = Path(module).absolute()
        folder, module = path.parent, path.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        value: Any = importlib.import_module(module)
    except Exception as error:
        raise click.UsageError(_import_failed(module, error)) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise click.UsageError(f"module {module!r} has no {name!r}")
        value = getattr(value, part)
    return value


def _import_failed(module: str, error: Exception) -> str:
    """What broke, and in which line of the user's code."""
    if os.environ.get("LONGRUN_DEBUG"):
        return "".join(traceback.format_exception(error))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    frames = [one for one in frames if one.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"cannot import {module!r}: {type(error).__name__}: {clean(error, limit=300)}{where}"


def load_registry(text: str | None) -> StepRegistry:
    from longrun.registry import StepRegistry

    name = settings().get("app", text)
    if name is None:
        raise click.UsageError("which application? name its registry, e.g. app:registry, or set LONGRUN_APP")
    found = load_object(name, default="registry")
    if not isinstance(found, StepRegistry):
        raise click.UsageError(f"{clean(name, limit=80)!r} is a {type(found).__name__}, not a StepRegistry")
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def json_argument(text: str, option: str) -> bytes:
    """The JSON text of an option: itself, or the content of `@file` (`@-`: standard input)."""
    if text.startswith("@"):
        try:
            data = sys.stdin.buffer.read() if text == "@-" else Path(text[1:]).read_bytes()
        except OSError as error:
            raise click.UsageError(f"{option}: {clean(text[1:])}: {error.strerror}") from None
    else:
        data = text.encode("utf-8", "surrogateescape")
    try:
        json.loads(data)
    except ValueError as error:
        raise click.UsageError(f"{option} is no JSON: {clean(error, limit=200)}") from None
    return data


def value_argument(text: str, option: str, annotation: Any = Any) -> Any:
    """The value of such an option, as the step that receives it declares it."""
    from longrun import codec
    from longrun.errors import CodecError

    try:
        return codec.decode(json_argument(text, option), annotation, path=option.lstrip("-"))
    except CodecError as error:
        raise click.UsageError(f"{option}: {clean(error, limit=500)}") from None
