"""A proxy between the store and its PostgreSQL that cuts a connection at a chosen moment, as a bad network would."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Self
from urllib.parse import quote

from tests.servers import PostgresServer

SOCKET = ".s.PGSQL.5432"


class CuttingProxy:
    """Passes bytes on, until what a client sends contains `marker`; then that connection is cut, once.

    `answer_lost`: the server gets the request and does it, and only its answer is lost. Otherwise the request is lost.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._target = str(server.directory / SOCKET)
        self._directory = Path(tempfile.mkdtemp(prefix="lrp"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._marker: bytes | None = None
        self._answer_lost = True
        self.cuts = 0

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self._directory))}&sslmode=disable&gssencmode=disable"

    def cut_at(self, marker: bytes, *, answer_lost: bool) -> None:
        with self._lock:
            self._marker, self._answer_lost = marker, answer_lost

    def __enter__(self) -> Self:
        self._listener.bind(str(self._directory / SOCKET))
        self._listener.listen()
        self._run(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            _cut(one)
        for thread in list(self._threads):
            thread.join(10)
        for one in self._sockets:
            one.close()
        shutil.rmtree(self._directory)

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="postgres-proxy", daemon=True)  # type: ignore[arg-type]  # any function
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.connect(self._target)
            self._sockets += [client, server]
            self._run(self._requests, client, server)
            self._run(self._answers, client, server)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if not self._is_marked(data):
                    server.sendall(data)
                    continue
                if self._answer_lost:
                    _cut(client)  # before the request goes on: no answer can slip through
                    server.sendall(data)
                    return  # the server's end is left open: it finishes, and `_answers` throws away what it says
                break
        _cut(client)
        _cut(server)

    def _is_marked(self, data: bytes) -> bool:
        with self._lock:
            if self._marker is None or self._marker not in data:
                return False
            self._marker = None
            self.cuts += 1
            return True

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                with contextlib.suppress(OSError):
                    client.sendall(data)
        _cut(client)
        _cut(server)


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
