"""Who may ask: the token, the `Host`, the site a request comes from. Everything passes here before it is routed.

Place in the life of an execution: beside it, at the edge.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longrun.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
READS = frozenset({"GET", "HEAD"})
WRITE_HEADER = "x-longrun"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

ENTER = """<!doctype html><html lang="en"><meta charset="utf-8"><title>longrun</title>
<link rel="icon" href="static/icon.svg"><meta http-equiv="refresh" content="0; url=./">
<p><a href="./">Go on to the dashboard</a></p></html>"""
"""The answer to the right token: a page of our own that goes on by itself. A redirect would still count as caused by
whoever linked here, and the browser would keep the strict cookie back."""

LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>longrun: token needed</title>
<meta name="viewport" content="width=device-width"><h1>This dashboard needs its token</h1>
<p>Open the address that <code>longrun dashboard</code> printed when it started; it ends in <code>?token=…</code>.</p>
<p>The browser remembers it until it is closed.</p></html>"""


def new_token() -> str:
    return secrets.token_urlsafe(32)


def check_token(token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise ConfigError("token", "…", "give 16 to 200 letters, digits, _ or -, or None for a random one")
    return token


class Guard:
    """Refuses what may not pass, and adds the headers that keep a browser strict."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._token = check_token(token)
        self._hosts = frozenset(host.lower() for host in (*LOOPBACK, *hosts))
        digest = hashlib.blake2b(token.encode(), digest_size=6).hexdigest()
        self.cookie = f"longrun_{digest}"
        """Browsers share cookies between the ports of a host: dashboards with other tokens use other names."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._answer(Request(scope)) or self._app
            await answer(scope, receive, _strict(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, request: Request) -> Response | None:
        """What to say instead of passing a request on; None if it may pass."""
        problem = self._foreign(request)
        if problem is not None:
            return refusal(403, problem)
        given = request.query_params.get("token")
        if given is not None and _is_page(request) and request.method in READS:
            return self._enter(request) if self._is_token(given) else _locked(request)
        if not self._has_token(request):
            return _locked(request)
        if request.method not in READS and request.headers.get(WRITE_HEADER) != "1":
            return refusal(403, "a write needs the header X-Longrun: 1")
        return None

    def _foreign(self, request: Request) -> str | None:
        """Why a request may come from a page that is not ours."""
        hosts = request.headers.getlist("host")
        found = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if found is None or found["name"] not in self._hosts:
            return "this Host is not allowed here"
        for origin in request.headers.getlist("origin"):
            if origin.lower().partition("://")[2] != hosts[0].lower():
                return "this came from another site"
        site = request.headers.get("sec-fetch-site", "none")
        if site in ("same-origin", "none"):
            return None
        is_link = request.headers.get("sec-fetch-mode") == "navigate" and request.method in READS
        return None if is_link and _is_page(request) else "this came from another site"

    def _has_token(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        return self._is_token(request.cookies.get(self.cookie, ""))

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _enter(self, request: Request) -> Response:
        response = HTMLResponse(ENTER)
        path = request.scope.get("root_path") or "/"
        secure = request.url.scheme == "https"
        response.set_cookie(self.cookie, self._token, path=path, secure=secure, httponly=True, samesite="strict")
        return response


def _is_page(request: Request) -> bool:
    path = str(request.scope["path"]).removeprefix(str(request.scope.get("root_path", "")))
    return path in ("", "/")


def _locked(request: Request) -> Response:
    if _is_page(request) and request.method in READS:
        return HTMLResponse(LOCKED, status_code=401)
    return refusal(401, "the token is missing or wrong: open the address that the dashboard printed")


def refusal(status: int, problem: str, kind: str = "Refused") -> Response:
    return JSONResponse({"error": problem, "kind": kind}, status_code=status)


def _strict(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return with_headers
