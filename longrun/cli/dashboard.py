"""`longrun dashboard`: hands over to `longrun.dashboard`, which needs the extra `web`."""

from __future__ import annotations

import importlib
import importlib.util

import click

from longrun.cli._connect import make_store
from longrun.cli._options import store_option


@click.command("dashboard")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="The port; 0 takes a free one."
)
@click.option("--allow-control", is_flag=True, help="Let the page pause, resume, cancel, retry, signal and fork.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@store_option
def dashboard_command(host: str, port: int, allow_control: bool, no_open: bool, store: str | None) -> int | None:
    """Open the dashboard in a browser: read-only unless --allow-control, on this machine unless --host."""
    from longrun.errors import MissingExtraError

    for needed in ("starlette", "uvicorn", "sse_starlette"):
        if importlib.util.find_spec(needed) is None:
            raise MissingExtraError("the dashboard", "web")
    if importlib.util.find_spec("longrun.dashboard") is None:
        raise click.ClickException("this installation of longrun has no dashboard")
    serve = importlib.import_module("longrun.dashboard").serve
    code: int | None = serve(
        make_store(store), host=host, port=port, allow_control=allow_control, open_browser=not no_open
    )
    return code
