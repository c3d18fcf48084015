"""The outside ledger: what a program that is killed again and again did, in the order in which it happened.

Every record is one `write` to a file opened for appending. When `write` has returned, the record is the kernel's, and
SIGKILL cannot take it back; so the order of the records is the order of what they say, across processes too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

Record = dict[str, Any]


class Outside:
    """A writer on the ledger, for one process."""

    def __init__(self, path: str | Path, process: int) -> None:
        self._process = process
        self._bell = bell_of(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, **fields: Any) -> None:
        """Append a record. It begins with the line break, so that one torn by a kill cannot swallow the next."""
        os.write(self._fd, b"\n" + json.dumps({"kind": kind, "process": self._process, **fields}).encode())
        with contextlib.suppress(OSError):  # nobody listens, or has heard it and not come yet
            bell = os.open(self._bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(bell, b"!")
            finally:
                os.close(bell)

    def close(self) -> None:
        os.close(self._fd)


def bell_of(path: str | Path) -> str:
    return f"{path}.bell"


class Reader:
    """Waits for records: a pipe beside the ledger is rung with each."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __enter__(self) -> Self:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(bell_of(self._path), 0o600)
        self._fd = os.open(bell_of(self._path), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # never without a writer
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def records(self) -> list[Record]:
        return read(self._path) if self._path.exists() else []

    def until(self, true: Callable[[list[Record]], bool], within: float) -> bool:
        """Whether it became true of the records in so many seconds."""
        deadline = time.monotonic() + within
        while not true(self.records()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if select.select([self._fd], [], [], left)[0]:
                os.read(self._fd, 1 << 16)
        return True


def read_on(path: Path, start: int) -> tuple[list[Record], int]:
    """The records behind a place in the ledger that nobody writes to just now, and the place behind them."""
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    return _records(data), start + len(data)


def read(path: str | Path) -> list[Record]:
    """Every whole record, oldest first. One whose writer was killed within the `write` itself is left out."""
    return _records(Path(path).read_bytes())


def _records(data: bytes) -> list[Record]:
    records: list[Record] = []
    for line in data.split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
