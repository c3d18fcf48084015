"""From options to things: the store, a desk to read at, a client to control with, the registry, JSON values."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from longrun.cli._settings import here, settings
from longrun.cli._text import clean, parse_json

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

    Unless `create`, it must be there already: looking must not leave an empty one behind."""
    from longrun.errors import LongrunError
    from longrun.stores import open_store
    from longrun.stores.store import CheckpointStore

    text = settings().store(text)
    scheme = text.partition(":")[0]
    if scheme not in SCHEMES and _OBJECT.fullmatch(text):
        found = load_object(text)
        if callable(found):
            found = _call(f"{text!r} makes no store", found, (LongrunError,))
        if not isinstance(found, CheckpointStore):
            raise click.UsageError(f"{clean(text)} is no CheckpointStore, nor does it return one")
        return found
    if not create:
        _must_exist(text)
    store = open_store(text)
    store.backend.creates = create
    return store


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
    value: Any = _call(f"cannot import {module!r}", lambda: _module(module))
    for part in name.split("."):
        value = _call(f"cannot read {name!r} of {module!r}", partial(getattr, value, part, _MISSING))
        if value is _MISSING:
            raise click.UsageError(f"module {module!r} has no {name!r}")
    return value


_MISSING = object()


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _file_module(Path(name).absolute())
    if (folder := here()) is not None:
        _let_import_from(folder)
    return importlib.import_module(name)


def _file_module(path: Path) -> ModuleType:
    """By its name if that leads to the file: whoever imports it gets the same module. Else by its path."""
    taken = path.stem in sys.stdlib_module_names
    _let_import_from(path.parent, last=taken)
    if not taken and _origin(path.stem) == str(path):
        return importlib.import_module(path.stem)
    name = str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if name in sys.modules or spec is None or spec.loader is None:
        return importlib.import_module(name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _let_import_from(folder: Path, *, last: bool = False) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, str(folder))


def _origin(name: str) -> str | None:
    """The file that an import of this name would give, or has given."""
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # a module without a spec: a program that runs as `__main__`
        return None
    return None if spec is None else spec.origin


def _call(doing: str, function: Callable[[], T], expected: tuple[type[Exception], ...] = ()) -> T:
    """Let code of the application run: what breaks there is said in one line, and it cannot end this program."""
    try:
        return function()
    except expected:
        raise
    except (Exception, SystemExit) as error:
        raise click.UsageError(_broken(doing, error)) from error


def _broken(doing: str, error: BaseException) -> str:
    """What broke, and in which line of the user's code."""
    if os.environ.get("LONGRUN_DEBUG"):
        return "".join(traceback.format_exception(error))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    frames = [one for one in frames if one.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{doing}: {type(error).__name__}: {clean(error, limit=300)}{where}"


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
        parse_json(data, option)
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
