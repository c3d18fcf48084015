"""The dashboard on a real port, in a thread of its own, to be stopped and started again."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import Receive, Scope, Send

from longrun.dashboard import DashboardApp


class Served:
    """Serves an application on a free port of this machine, and again on the same one after `stop`. The application
    may be changed meanwhile: a server for many tests costs each of them nothing."""

    def __init__(self, app: DashboardApp | None = None) -> None:
        self.app = app
        self.port = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)

    def start(self) -> Self:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="served-dashboard")
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
