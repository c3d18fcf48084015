"""The outside ledger: what a program that is killed again and again did, in the order in which it happened.

Every record is one `write` to a file opened for appending. When `write` has returned, the record is the kernel's, and
SIGKILL cannot take it back; so the order of the records is the order of what they say, across processes too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Outside:
    """A writer on the ledger, for one process."""

    def __init__(self, path: str | Path, process: int) -> None:
        self._process = process
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, **fields: Any) -> None:
        """Append a record. It begins with the line break, so that one torn by a kill cannot swallow the next."""
        os.write(self._fd, b"\n" + json.dumps({"kind": kind, "process": self._process, **fields}).encode())

    def close(self) -> None:
        os.close(self._fd)


def read(path: str | Path) -> list[Record]:
    """Every whole record, oldest first. One whose writer was killed within the `write` itself is left out."""
    records: list[Record] = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
