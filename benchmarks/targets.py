"""Where figures are to be kept and stores made, looked at before anything is measured.

Place in the life of a measurement: before it. Each function says why something cannot be used, or None if it can.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from benchmarks import page


def directory_trouble(directory: Path) -> str | None:
    """Of a directory that must be there."""
    if not directory.is_dir():
        return f"{directory} is no directory"
    return None if os.access(directory, os.W_OK | os.X_OK) else f"{directory} may not be written to"


def file_trouble(file: Path) -> str | None:
    """Of a file that is written, or written over."""
    if file.is_dir():
        return f"{file} is a directory"
    if not file.exists():
        return directory_trouble(file.parent)
    return None if os.access(file, os.W_OK) else f"{file} may not be written to"


def page_trouble(file: Path) -> str | None:
    """Of a page that holds a table."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read: {error}"
    if not page.has_marks(text):
        return f"{file} has no place for the table: {page.BEGIN} … {page.END}"
    return file_trouble(file)


def plots_trouble(directory: Path) -> str | None:
    """Of a directory that is made where it is missing, with those above it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install 'longrun[bench]'"
    whole = directory.absolute()
    return directory_trouble(next(one for one in (whole, *whole.parents) if one.exists()))
