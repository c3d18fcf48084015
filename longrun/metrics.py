"""Numbers about what happens, and an endpoint where Prometheus finds them (extra `metrics`).

Place in the life of an execution: beside it. `INSTRUMENTS` is the one table of what is measured; OpenTelemetry and
Prometheus both fill it. Labels are names from the code (workflow, step, queue) and words from a short list: never an
id, a state or the text of an error.

    async with Executor(registry, telemetry=PrometheusMetrics()) as executor: ...
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from longrun.errors import MissingExtraError
from longrun.events import LAST_EVENTS, EventType, ExecutionEvent
from longrun.stored import Definition
from longrun.telemetry import Call, Observer, Subject

PORT = 9464
"""The port that is registered for Prometheus exporters of this kind."""
SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
"""The limits of a histogram's buckets: from a checkpoint to a night's work."""
UNITS = {"s": "seconds", "By": "bytes"}


@frozen
class Instrument:
    kind: str
    """counter, histogram, gauge."""
    description: str
    labels: tuple[str, ...] = ()
    unit: str = ""


INSTRUMENTS = {
    "longrun.executions.started": Instrument("counter", "Executions created", ("workflow",)),
    "longrun.executions.ended": Instrument("counter", "Executions that came to an end", ("workflow", "state")),
    "longrun.steps": Instrument("counter", "Attempts of steps, by how they ended", ("workflow", "step", "outcome")),
    "longrun.step.failures": Instrument(
        "counter", "Attempts of steps that failed, by the error's type", ("workflow", "step", "error_type")
    ),
    "longrun.step.duration": Instrument("histogram", "How long an attempt took", ("workflow", "step"), "s"),
    "longrun.checkpoint.duration": Instrument("histogram", "From a write to its being durable", (), "s"),
    "longrun.checkpoint.bytes": Instrument("counter", "Data in durable writes", (), "By"),
    "longrun.queue.depth": Instrument("gauge", "Executions that wait for a worker; `*` is all queues", ("queue",)),
    "longrun.lease.losses": Instrument("counter", "Executions that another process took over", ("workflow",)),
    "longrun.store.failures": Instrument("counter", "Writes that the store did not answer"),
}
"""Everything that is measured, by its OpenTelemetry name; `prometheus_name` says what Prometheus calls it."""


class Meters(Observer, abc.ABC):
    """From what is observed to the instruments."""

    @abc.abstractmethod
    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter, record in a histogram, or set a gauge."""

    def created(self, definition: Definition, stored: bool) -> None:
        if stored:
            self.add("longrun.executions.started", 1, {"workflow": definition.workflow})

    def settled(self, call: Call) -> None:
        where = {"workflow": call.subject.workflow, "step": call.info.step}
        self.add("longrun.steps", 1, {**where, "outcome": call.outcome})
        self.add("longrun.step.duration", max(0.0, call.ended - call.began), where)
        if call.outcome == "failed":
            self.add("longrun.step.failures", 1, {**where, "error_type": call.error or ""})

    def happened(self, event: ExecutionEvent, subject: Subject | None) -> None:
        workflow = {"workflow": "" if subject is None else subject.workflow}
        if event.type in LAST_EVENTS:
            self.add("longrun.executions.ended", 1, {**workflow, "state": event.type.value.removeprefix("execution_")})
        elif event.type is EventType.LEASE_LOST:
            self.add("longrun.lease.losses", 1, workflow)
        elif event.type is EventType.STORE_UNAVAILABLE:
            self.add("longrun.store.failures", 1, {})

    def saved(self, seconds: float, size: int) -> None:
        self.add("longrun.checkpoint.duration", seconds, {})
        self.add("longrun.checkpoint.bytes", size, {})

    def waits(self, queue: str, number: int) -> None:
        self.add("longrun.queue.depth", number, {"queue": queue})


def prometheus_name(name: str) -> str:
    """`longrun.step.duration` is `longrun_step_duration_seconds`. To counters the client adds `_total`."""
    instrument = INSTRUMENTS[name]
    unit = UNITS.get(instrument.unit, "")
    plain = name.replace(".", "_")
    return plain if not unit or plain.endswith(unit) else f"{plain}_{unit}"


class PrometheusMetrics(Meters):
    """The instruments as Prometheus reads them. `registry` is a `CollectorRegistry`; without one it has its own."""

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client as client
        except ModuleNotFoundError as error:
            raise MissingExtraError("metrics for Prometheus", "metrics") from error
        self.registry = client.CollectorRegistry() if registry is None else registry
        self._made: dict[str, Any] = {}
        kinds: dict[str, Any] = {"counter": client.Counter, "gauge": client.Gauge, "histogram": client.Histogram}
        for name, one in INSTRUMENTS.items():
            more = {"buckets": SECONDS} if one.kind == "histogram" else {}
            kind = kinds[one.kind]
            known = prometheus_name(name)
            self._made[name] = kind(known, one.description, one.labels, registry=self.registry, **more)

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        found = self._made[name].labels(**labels) if labels else self._made[name]
        kind = INSTRUMENTS[name].kind
        if kind == "counter":
            found.inc(value)
        elif kind == "gauge":
            found.set(value)
        else:
            found.observe(value)

    def render(self) -> bytes:
        """Everything as text, for an endpoint of your own."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def serve(self, port: int = PORT, host: str = "127.0.0.1") -> MetricsServer:
        """An endpoint in a thread, on loopback unless told otherwise: it has no password."""
        from prometheus_client import start_http_server

        server, thread = start_http_server(port, addr=host, registry=self.registry)
        return MetricsServer(server, thread)


class MetricsServer:
    """An endpoint that is being served, until `close` or the end of a `with`."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.host, self.port = server.server_address[:2]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
