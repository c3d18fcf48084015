"""`longrun worker`: run what was submitted to a store, until SIGTERM; then drain."""

from __future__ import annotations

import signal
from typing import Any

import click

from longrun.cli._connect import go, load_registry, make_store
from longrun.cli._errors import CTRL_C, OK
from longrun.cli._options import loop_option, store_option
from longrun.cli._settings import settings
from longrun.cli._text import clean, say

LEVELS = ("debug", "info", "warning", "error")
log_option = click.option(
    "--log-level", type=click.Choice(LEVELS, case_sensitive=False), help="Log lines from this level on."
)
json_logs_option = click.option("--log-json", is_flag=True, help="Log lines as JSON.")


@click.command("worker")
@click.argument("app", required=False, metavar="[APP]")
@click.option(
    "--queue", "queues", multiple=True, metavar="NAME", help="A queue to take from; may be given again. Default: all."
)
@click.option("--concurrency", type=click.IntRange(1), help="How many executions at once. Default: 100.")
@store_option
@loop_option
@log_option
@json_logs_option
def worker_command(
    app: str | None,
    queues: tuple[str, ...],
    concurrency: int | None,
    store: str | None,
    loop: str | None,
    log_level: str | None,
    log_json: bool,
) -> int:
    """Run what was submitted to the store, and whatever a dead worker left, until SIGTERM.

    APP names the registry: app:registry, or path/to/app.py:registry. SIGTERM or Ctrl-C drains: running steps get
    `drain_timeout` seconds to reach a checkpoint; a second one cuts that short.
    """
    registry = load_registry(app)
    found = settings()
    configure_logs(found.get("log_level", log_level, "info"), log_json)
    names = found.get("queues", queues, None)
    number = found.get("concurrency", concurrency, 100)
    return go(_work, registry, make_store(store, create=True), names, number, found.config(), loop=loop)


async def _work(registry: Any, store: Any, queues: Any, concurrency: int, config: Any) -> int:
    from longrun.cli._signals import draining
    from longrun.worker import Worker

    def heard(number: signal.Signals) -> None:
        say(f"{number.name}: draining, at most {config.drain_timeout:g} s; again to cut it short")

    made = Worker(registry, store=store, queues=queues, concurrency=concurrency, config=config)
    async with made as worker, draining(worker, heard) as stop:
        shown = clean(", ".join(queues) if queues else "all queues")
        say(f"{clean(worker.owner)} takes {shown} of the {store.backend.kind} store, {concurrency:,} at once")
        await stop.drained.wait()
    return CTRL_C if stop.signal is signal.SIGINT else OK


def configure_logs(level: str, as_json: bool) -> None:
    """Log lines on standard error, unless the application has made its own arrangements."""
    import structlog

    from longrun.logging import configure

    if level.lower() not in LEVELS:
        raise click.UsageError(f"the log level is one of {', '.join(LEVELS)}")
    if not structlog.is_configured():
        configure(level, json=as_json)
