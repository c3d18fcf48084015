"""`longrun dashboard`: the application on a port of this machine, and the address that opens it.

Place in the life of an execution: beside it, at the edge.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import sys
import webbrowser
from collections.abc import Iterable

import anyio
import uvicorn

from longrun.dashboard.app import DashboardApp
from longrun.dashboard.guard import check_token, new_token
from longrun.errors import ConfigError, StoreSettingsError
from longrun.life import run_directory
from longrun.stores.store import CheckpointStore

PORT = 8765
TOKEN_FILE = "dashboard.token"
LAST_WORDS = 3


def serve(
    store: CheckpointStore | str,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    allow_control: bool = False,
    token: str | None = None,
    hosts: Iterable[str] = (),
    open_browser: bool = False,
) -> None:
    """Serve the dashboard until Ctrl-C. Port 0 takes a free one.

    Without a `token` one is made and kept for this user until the machine restarts, so that a page that is open finds
    back to a dashboard that was restarted. Nobody from elsewhere can reach it unless `host` says so.
    """
    names = [*hosts, *([] if _is_any(host) else [f"[{host}]" if ":" in host else host])]
    app = DashboardApp(store, allow_control=allow_control, token=kept_token() if token is None else token, hosts=names)
    with _listen(host, port) as listener:
        address = _address(host, listener.getsockname()[1], app.token)
        _tell(app, host, address)
        if open_browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            anyio.run(_serve, app, listener)


async def _serve(app: DashboardApp, listener: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # the first address has the token in it
        server_header=False,
        lifespan="off",  # so that a store that does not open is our error, not a line in a log
        timeout_graceful_shutdown=LAST_WORDS,
    )
    async with app:
        await uvicorn.Server(config).serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port <= 65535:  # the resolver would take what is left of it
            raise OverflowError("a port is 0 to 65535")
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(128)  # before the address is shown, so that it can be opened at once
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        problem = f"{getattr(error, 'strerror', None) or error}; choose another --port, or 0 for any that is free"
        raise ConfigError("port", f"{host}:{port}", problem) from error
    return listener


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _address(host: str, port: int, token: str) -> str:
    shown = "127.0.0.1" if _is_any(host) else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/?token={token}"


def _tell(app: DashboardApp, host: str, address: str) -> None:
    mode = "control is allowed" if app.allow_control else "read-only; --allow-control changes that"
    print(f"longrun dashboard ({mode}), Ctrl-C ends it:\n\n    {address}\n", file=sys.stderr, flush=True)
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback:
            print(
                "It can be reached from other machines, unencrypted: anyone who sees the token may enter.",
                file=sys.stderr,
            )


def kept_token() -> str:
    """This user's token on this machine, made when it is first needed. Only its owner can read the file."""
    path = run_directory() / TOKEN_FILE
    draft = path.with_name(f"{TOKEN_FILE}.{secrets.token_hex(8)}")
    if not os.path.lexists(path):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o600)
                file.write(new_token())
            with contextlib.suppress(FileExistsError):  # another dashboard was first: its token it is
                os.link(draft, path)
        finally:
            os.unlink(draft)
    return _read_token(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))


def _read_token(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise StoreSettingsError(
                "dashboard", f"others can read {file.name}: remove {TOKEN_FILE} in the run directory"
            )
        try:
            return check_token(file.read(300))
        except ConfigError as error:
            raise StoreSettingsError("dashboard", f"remove {TOKEN_FILE} in the run directory: it is damaged") from error
