"""A real browser for the page's tests: found, not fetched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOW = (
    "no Chromium on this machine: `apt-get install chromium`, or `playwright install chromium`,"
    " or name one with LONGRUN_CHROMIUM"
)


def find_chromium(own: str | None = None) -> str | None:
    """The browser that LONGRUN_CHROMIUM names, one on PATH, or Playwright's own; None if there is none."""
    named = os.environ.get("LONGRUN_CHROMIUM")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"LONGRUN_CHROMIUM names {named!r}, which is not there")
        return named
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    return own if own is not None and Path(own).is_file() else None
