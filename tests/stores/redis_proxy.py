"""A relay between a store and its server that loses answers when it is told to: the server has done the work."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from pathlib import Path
from typing import Self


class Relay:
    """Listens on a unix socket and passes everything on. `lose(n)` swallows the next n answers of a script that ran."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._directory = tempfile.TemporaryDirectory(prefix="relay-")
        self.path = Path(self._directory.name) / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._lock = threading.Lock()
        self._losses = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self.lost = 0

    @property
    def url(self) -> str:
        return f"unix://{self.path}?db=0"

    def lose(self, answers: int) -> None:
        with self._lock:
            self._losses = answers

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            server = socket.socket(socket.AF_UNIX)
            self._sockets += (client, server)
            try:
                server.connect(str(self._target))
            except OSError:  # the server is away
                client.close()
                continue
            self._start(self._relay, client, server)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        """One connection: requests in this thread's child, answers here."""
        asked = threading.Event()
        self._start(self._requests, client, server, asked)
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if asked.is_set() and not data.startswith(b"-NOSCRIPT") and self._loses():
                    break
                client.sendall(data)
        _hang_up(client, server)

    def _requests(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if b"EVAL" in data:
                    asked.set()
                server.sendall(data)
        _hang_up(client, server)

    def _loses(self) -> bool:
        with self._lock:
            if not self._losses:
                return False
            self._losses -= 1
            self.lost += 1
            return True

    def _start(self, function: object, *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        _hang_up(*self._sockets)
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()
        self._directory.cleanup()


def _hang_up(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
