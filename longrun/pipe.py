"""Frames between a program and the child processes of its steps: a length, then JSON. Never pickled.

Place in the life of an execution: run a step, in another process.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
from typing import Any

from longrun import codec

_LENGTH = struct.Struct(">Q")
UNTIL_READY = (signal.SIGINT, signal.SIGTERM)
"""Signals that come to a whole process group, for the parent to obey. A child is started with them blocked, and
unblocks them when they no longer end it."""
MAIN = "__longrun_main__"
"""What a program that is a file is called in a child process that has loaded it."""
loading_main = False
"""Whether this is a child process that loads the program to find a step in it."""


def class_name(kind: type) -> str:
    """What a class is called on its way to the other side."""
    return f"{kind.__module__}.{kind.__qualname__}"


class Pipe:
    """One end of a socket pair: read by one thread at a time, written to by any."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        data = codec.dumps(message)
        with self._sending:
            self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        data = self._read(_LENGTH.unpack(header)[0])
        if data is None:
            return None
        message: dict[str, Any] = codec.loads(data)
        return message

    def _read(self, size: int) -> bytes | None:
        chunks: list[bytes] = []
        while size:
            try:
                chunk = self._end.recv(min(size, 1 << 20))
            except OSError:
                return None
            if not chunk:
                return None
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone
            self._end.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, whoever else holds the other end
        self._end.close()
