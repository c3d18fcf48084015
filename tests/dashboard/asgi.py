"""A browser's half of HTTP, spoken to an ASGI application in this process, on either event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
from attrs import field, frozen

TOKEN = "a-token-for-the-tests"
HOST = "127.0.0.1:8765"


@frozen
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """Sends requests to an application, with the token unless told otherwise."""

    def __init__(self, app: Any, *, headers: Mapping[str, str] | None = None, root_path: str = "") -> None:
        self._app, self._root = app, root_path
        base = {"host": HOST, "authorization": f"Bearer {TOKEN}"}
        self._headers = {**base, **{name.lower(): value for name, value in (headers or {}).items()}}

    async def get(self, path: str, **headers: str | None) -> Answer:
        return await self.ask("GET", path, headers=headers)

    async def post(self, path: str, body: Any = None, **headers: str | None) -> Answer:
        return await self.ask("POST", path, body=json.dumps(body or {}).encode(), headers={"x-longrun": "1", **headers})

    async def ask(
        self, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str | None] | None = None
    ) -> Answer:
        """One request and its whole answer. A header given as None is left out."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(self._scope(method, path, headers or {}), _body(body), send)
        return _answer(sent)

    async def leave(self, path: str) -> Answer:
        """Begin to post something, and go."""
        sent: list[dict[str, Any]] = []
        said: list[dict[str, Any]] = [{"type": "http.disconnect"}]
        said.append({"type": "http.request", "body": b"{", "more_body": True})

        async def receive() -> dict[str, Any]:
            return said.pop() if len(said) > 1 else said[0]

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(self._scope("POST", path, {"x-longrun": "1"}), receive, send)
        return _answer(sent)

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """The server-sent events of a path, as pairs of name and data."""
        sender, receiver = anyio.create_memory_object_stream[dict[str, Any]](100)
        left = anyio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            async with sender:
                await self._app(self._scope("GET", path, {}), receive, sender.send)

        async with anyio.create_task_group() as tasks, receiver:
            tasks.start_soon(run)
            async with aclosing(_events(receiver)) as events:
                yield events
            left.set()
            tasks.cancel_scope.cancel()

    def _scope(self, method: str, path: str, headers: Mapping[str, str | None]) -> dict[str, Any]:
        path, _, query = path.partition("?")
        more = {name.lower().replace("_", "-"): value for name, value in headers.items()}
        chosen = {**self._headers, **more}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": self._root + path,
            "raw_path": (self._root + path).encode(),
            "root_path": self._root,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in chosen.items() if value is not None],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8765),
            "state": {},
        }


def _body(body: bytes) -> Any:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await anyio.sleep_forever()
        raise AssertionError

    return receive


def _answer(sent: list[dict[str, Any]]) -> Answer:
    start = next(message for message in sent if message["type"] == "http.response.start")
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in sent))


async def _events(receiver: Any) -> AsyncGenerator[tuple[str, Any], None]:
    text = ""
    async for message in receiver:
        text += message.get("body", b"").decode()
        while "\n\n" in text:
            block, text = text.split("\n\n", 1)
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if "event" in fields:
                yield fields["event"], json.loads(fields["data"])
