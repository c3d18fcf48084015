"""Log lines: dotted event names and fields, through structlog. The user's own configuration is respected.

Place in the life of an execution: beside it. If the application has configured structlog, lines go where it says. If
not, they go to the standard library's logger `longrun`, so that nothing is printed below WARNING unless asked for.
No line carries a state, a payload or the text of an exception from outside; what longrun's own errors say of a store or
of a blocked execution it does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

from longrun.errors import ConfigError

_fallback = logging.getLogger("longrun")


class Log:
    """A logger that decides at each line whether anybody reads it, before any field is formatted."""

    __slots__ = ("_bound", "_fields")

    def __init__(self, fields: dict[str, Any] | None = None) -> None:
        self._fields = fields or {}
        self._bound: Any = None

    def debug(self, event: str, **fields: Any) -> None:
        self._log("debug", logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log("info", logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log("warning", logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log("error", logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """For defects of the library itself, inside an `except`: with the traceback."""
        self._log("error", logging.ERROR, event, {**fields, "exc_info": True})

    def _log(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        structlog = sys.modules.get("structlog")  # a program that has not imported it has not configured it
        if structlog is not None and structlog.is_configured():
            if self._bound is None:
                self._bound = structlog.get_logger("longrun", **self._fields)  # lazy: a later configuration counts too
            getattr(self._bound, method)(event, **fields)
        elif _fallback.isEnabledFor(level):
            exc_info = fields.pop("exc_info", None)
            pairs = " ".join(f"{key}={_plain(value)}" for key, value in {**self._fields, **fields}.items())
            _fallback.log(level, "%s %s", event, pairs, exc_info=exc_info)


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else ascii(text)


def _escape(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What a program put into a field must not steer a terminal. A traceback keeps its lines."""
    for key, value in fields.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n") if key in ("exception", "stack") else [value]
            fields[key] = "\n".join(line if line.isprintable() else ascii(line)[1:-1] for line in lines)
    return fields


def get_logger(**fields: Any) -> Log:
    return Log(fields)


def user_logger(**fields: Any) -> Any:
    """What `ctx.log` is: structlog's own logger, bound to where the step is."""
    import structlog

    return structlog.get_logger("longrun").bind(**fields)


def configure(level: str | int = "INFO", *, json: bool = False) -> None:
    """A sensible structlog set-up on standard error, for programs that have none."""
    import structlog

    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise ConfigError("level", level, "give one of debug, info, warning, error, critical")
    renderer: Any = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _escape,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
