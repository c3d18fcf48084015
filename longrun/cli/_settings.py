"""Settings: a flag, then LONGRUN_*, then `longrun.toml` or `[tool.longrun]` in pyproject.toml, then the default.

The file is the nearest one, from the working directory upwards. A relative path in it is relative to it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from longrun.cli._text import clean, parse_duration

if TYPE_CHECKING:
    from longrun.records import ExecutorConfig

DEFAULT_STORE = "file:.longrun"
WORDS: Callable[[str], list[str]] = lambda text: [word.strip() for word in text.split(",") if word.strip()]  # noqa: E731
SETTINGS: dict[str, Callable[[str], Any]] = {
    "store": str,
    "app": str,
    "loop": str,
    "log_level": str,
    "queues": WORDS,
    "concurrency": int,
    "metrics_port": int,
    "metrics_host": str,
    "max_age": str,
    "durability": str,
    "checkpoint_interval": float,
    "max_retries": int,
    "heartbeat_interval": float,
    "lease_ttl": float,
    "drain_timeout": float,
    "max_crashes": int,
    "on_corruption": str,
}
"""Every setting, and how its text in the environment is read."""
CONFIG = (
    "durability",
    "checkpoint_interval",
    "max_retries",
    "heartbeat_interval",
    "lease_ttl",
    "drain_timeout",
    "max_crashes",
    "on_corruption",
)
"""Those that go to the executor's configuration."""


class Settings:
    """What environment and file say, read once an invocation."""

    def __init__(self, environment: Mapping[str, str], directory: Path | None) -> None:
        self._environment = environment
        self.path, self._file = _nearest(directory)

    def get(self, name: str, flag: Any = None, default: Any = None) -> Any:
        """The value that counts."""
        if flag is not None and flag != ():
            return flag
        variable = f"LONGRUN_{name.upper()}"
        text = self._environment.get(variable)
        if text:
            try:
                return SETTINGS[name](text)
            except ValueError:
                raise click.UsageError(f"{variable} is not a number: {clean(text, limit=80)}") from None
        if name in self._file:
            return self._file[name]
        return default

    def store(self, flag: str | None = None) -> str:
        """The store's URL, or `module:attribute` of a store."""
        found = self.get("store", flag, DEFAULT_STORE)
        if flag is None and not self._environment.get("LONGRUN_STORE") and "store" in self._file and self.path:
            return _relative_to(self.path.parent, found)
        return str(found)

    def max_age(self, flag: float | None = None) -> float | None:
        """Seconds for which finished executions are kept; None: for ever."""
        found = self.get("max_age", flag)
        try:
            return found if found is None or isinstance(found, float) else parse_duration(str(found))
        except ValueError:
            raise click.UsageError("max_age is a duration: 12h, 30d, 4w") from None

    def config(self, **more: Any) -> ExecutorConfig:
        """The executor's configuration."""
        from longrun.records import ExecutorConfig, RetentionPolicy

        given = {name: value for name in CONFIG if (value := self.get(name)) is not None}
        return ExecutorConfig(**given, retention=RetentionPolicy(max_age=self.max_age()), **more)


def settings() -> Settings:
    """Those of this invocation."""
    context = click.get_current_context().find_root()
    if not isinstance(context.obj, Settings):
        context.obj = Settings(os.environ, here())
    return context.obj


def here() -> Path | None:
    """The working directory; None if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _nearest(directory: Path | None) -> tuple[Path | None, dict[str, Any]]:
    for folder in () if directory is None else (directory, *directory.parents):
        own = folder / "longrun.toml"
        if own.is_file():
            return own, _checked(own, _read(own))
        project = folder / "pyproject.toml"
        if project.is_file():
            tool = _read(project).get("tool")
            found = tool.get("longrun") if isinstance(tool, dict) else None
            if isinstance(found, dict):
                return project, _checked(project, found)
    return None, {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{clean(path)} cannot be read: {clean(error, limit=200)}") from None


def _checked(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    for name, value in found.items():
        if name not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise click.UsageError(f"{clean(path)}: there is no setting {clean(name)!r}; there are {known}")
        kind = SETTINGS[name]
        fits = {int: int, float: (int, float), str: str}.get(kind, (list, str))  # type: ignore[call-overload]
        if isinstance(value, bool) or not isinstance(value, fits):
            raise click.UsageError(f"{clean(path)}: {name} has a value of the wrong kind")
        if kind is WORDS and isinstance(value, str):
            found[name] = WORDS(value)
    return found


def _relative_to(folder: Path, store: str) -> str:
    """A relative path in a store's URL, from the folder of the file that names it."""
    if store.startswith("replicated:"):
        from longrun.stores._replicated.address import with_stores

        return with_stores(store, lambda url: _relative_to(folder, url))
    for prefix in ("file:", "sqlite:///"):
        rest = store.removeprefix(prefix)
        if rest != store and not rest.startswith("/"):
            return f"{prefix}{folder / rest}"
    return store
