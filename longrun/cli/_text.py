"""What the terminal shows: escaped text, durations, times, states as word, glyph and colour, aligned columns.

Nothing from a store reaches a terminal but through `clean`: names, errors and metadata can hold any character.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import IO, Any, NoReturn

import click

STATES = {
    "initialized": ("○", "white"),
    "running": ("▸", "blue"),
    "paused": ("‖", "yellow"),
    "resuming": ("↻", "cyan"),
    "waiting": ("◷", "cyan"),
    "blocked": ("⊘", "magenta"),
    "completed": ("✓", "green"),
    "failed": ("✗", "red"),
    "cancelled": ("∅", "bright_black"),
}
"""Glyph and colour of each state; the word always stands beside them."""
STATUS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)?")
_USERINFO = re.compile(r"([a-z][a-z0-9+.-]{0,30}://)([^/@\s:]*):(\S*)@", re.IGNORECASE)
_SECRET = r"(?:\w*(?:password|passwd|pwd|secret|token)|key)"
_SECRET_FIELD = re.compile(rf"\b({_SECRET})=([^&;\s]+)", re.IGNORECASE)
_ENCODED_USERINFO = re.compile(r"(%3A(?:%2F|/){2}(?:(?!%2F|%3A|%40)[^/:@&\s])*(?:%3A|:))[^&\s]*(%40|@)", re.IGNORECASE)
_ENCODED_FIELD = re.compile(rf"((?:%26|%3F|[&?]){_SECRET}(?:%3D|=))(?:(?!%26|%3B)[^&;\s])+", re.IGNORECASE)
"""The same in a URL that stands percent-encoded in another one."""


# --- escaping ---------------------------------------------------------------------------------------------------------


def clean(value: object, *, limit: int | None = None, lines: bool = False) -> str:
    """Text that cannot move the cursor, ring, or change colours: every unprintable character is shown as its number."""
    text = str(value)
    if not text.isprintable():
        text = "".join(one if one.isprintable() or (lines and one == "\n") else _escape(one) for one in text)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def _escape(character: str) -> str:
    number = ord(character)
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that is safe on a terminal too: unprintable characters stand as JSON's own escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def hide_secrets(text: str) -> str:
    """A URL, or a sentence with one in it, without its password."""
    text = _SECRET_FIELD.sub(r"\1=***", _USERINFO.sub(r"\1\2:***@", text))
    return _ENCODED_FIELD.sub(r"\1***", _ENCODED_USERINFO.sub(r"\1***\2", text))


# --- numbers and times ------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Two units at most: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 04 min`, `3 d 4 h`."""
    if seconds is None:
        return "–"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(when: datetime | None) -> str:
    """A time as the reader's own clock shows it."""
    return "–" if when is None else when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(when: datetime | None, now: datetime | None = None) -> str:
    if when is None:
        return "–"
    return f"{duration(((now or datetime.now(UTC)) - when).total_seconds())} ago"


def count(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"


def number_of(number: int, noun: str) -> str:
    """`1 execution`, `2 executions`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "–"
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    if per_second >= 1:
        return f"{per_second:.1f}/s"
    return f"{per_second * 60:.1f}/min" if per_second * 60 >= 1 else f"{per_second * 3600:.1f}/h"


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `2h`, `30d`, `4w`; `ValueError` if it is none of them."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no duration")
    return float(found[1]) * _UNITS[found[2] or "s"]


def parse_moment(text: str) -> datetime:
    """A date, a date and time (this machine's zone unless it says another), or how long ago: `2h`."""
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    except ValueError:
        return datetime.fromisoformat(text).astimezone()


def parse_json(text: str | bytes, option: str | None = None) -> Any:
    """The value of a JSON text; `ValueError` if it is none, a wrong call if it is nested too deeply to be read."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise click.BadParameter("the JSON is nested too deeply", param_hint=option) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"there is no {name}")


# --- colours, glyphs and columns --------------------------------------------------------------------------------------


def coloured(stream: IO[Any] | None = None) -> bool:
    """Whether to colour what goes to a stream: NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    stream = stream or sys.stdout
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def out(text: str = "") -> None:
    """A line of data, on standard output."""
    click.echo(text, color=coloured(sys.stdout))


def say(text: str = "") -> None:
    """A line about what happens, on standard error. What happens does not depend on whether anybody can be told."""
    try:
        click.echo(text, err=True, color=coloured(sys.stderr))
    except OSError:
        close(sys.stderr)


def close(stream: IO[Any]) -> None:
    """Let what is written to a stream that takes nothing more be lost, at exit too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def state_text(state: str) -> str:
    glyph, colour = STATES.get(state, ("?", "white"))
    return click.style(f"{glyph} {state}", fg=colour)


def status_text(status: str) -> str:
    glyph, colour = STATUS[status]
    return click.style(f"{glyph} {status}", fg=colour)


def dim(text: str) -> str:
    return click.style(text, dim=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Aligned columns, two spaces apart. Cells may be coloured; they must be clean already."""
    widths = [max([len(header), *(_width(row[n]) for row in rows)]) for n, header in enumerate(headers)]
    lines = [_line([dim(header.upper()) for header in headers], widths, right)]
    return lines + [_line(row, widths, right) for row in rows]


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = []
    for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - _width(cell))
        padded.append(space + cell if n in right else cell + space)
    return "  ".join(padded).rstrip()
