"""`longrun worker`: run what was submitted to a store, until SIGTERM; then drain."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import click

from longrun.cli._connect import go, load_registry, make_store
from longrun.cli._errors import CTRL_C, OK
from longrun.cli._options import loop_option, store_option
from longrun.cli._settings import settings
from longrun.cli._text import clean, say

if TYPE_CHECKING:
    from longrun.telemetry import Observer

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
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics for Prometheus here (extra: metrics)."
)
@click.option("--metrics-host", metavar="ADDRESS", help="The address to serve them on. Default: 127.0.0.1.")
@click.option("--otel", is_flag=True, help="Traces and metrics by OpenTelemetry's global providers (extra: otel).")
@store_option
@loop_option
@log_option
@json_logs_option
def worker_command(
    app: str | None,
    queues: tuple[str, ...],
    concurrency: int | None,
    metrics_port: int | None,
    metrics_host: str | None,
    otel: bool,
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
    number = found.get("concurrency", concurrency)
    port = found.get("metrics_port", metrics_port)
    made = make_store(store, create=True)
    if made.backend.kind == "memory":
        raise click.UsageError("nobody could submit to a store in memory: give the URL of another --store")
    with _telemetry(port, found.get("metrics_host", metrics_host, "127.0.0.1"), otel) as telemetry:
        config = found.config() if number is None else attrs.evolve(found.config(), max_concurrency=number)
        return go(_work, registry, made, names, config, telemetry, loop=loop)


@contextmanager
def _telemetry(port: int | None, host: str, otel: bool) -> Iterator[list[Observer]]:
    """What watches the worker, and the endpoint for as long as it works."""
    chosen: list[Observer] = []
    with ExitStack() as stack:
        if otel:
            from longrun.otel import OpenTelemetry

            chosen.append(OpenTelemetry())
        if port is not None:
            from longrun.metrics import PrometheusMetrics

            metrics = PrometheusMetrics()
            chosen.append(metrics)
            try:
                server = stack.enter_context(metrics.serve(port, host))
            except (OSError, OverflowError, UnicodeError) as error:
                problem = clean(getattr(error, "strerror", None) or error, limit=200)
                raise click.UsageError(f"metrics cannot be served on {clean(host)}:{port}: {problem}") from None
            say(f"metrics on {server.url}")
        yield chosen


async def _work(registry: Any, store: Any, queues: Any, config: Any, telemetry: list[Observer]) -> int:
    from longrun.cli._signals import draining
    from longrun.worker import Worker

    def heard(number: signal.Signals) -> None:
        say(f"{number.name}: draining, at most {config.drain_timeout:g} s; again to cut it short")

    made = Worker(registry, store=store, queues=queues, config=config, telemetry=telemetry)
    made.waits_for_pass = False  # which may be long: a signal is obeyed meanwhile
    async with made as worker, draining(worker, heard) as stop:
        shown = clean(", ".join(queues) if queues else "all queues")
        number = worker.config.max_concurrency
        say(f"{clean(worker.owner)} takes {shown} of the {store.backend.kind} store, {number:,} at once")
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
