"""An OTLP receiver over HTTP on loopback: what a real exporter sends is parsed as a collector would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from longrun.telemetry import Call, Observer


def provider(url: str) -> TracerProvider:
    """Sends each span when it ends, so that a kill loses none that had ended."""
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
    return made


def plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


class Span:
    """A span as it was received."""

    def __init__(self, sent: Any) -> None:
        self.name: str = sent.name
        self.trace: str = sent.trace_id.hex()
        self.id: str = sent.span_id.hex()
        self.parent: str = sent.parent_span_id.hex()
        self.attributes = {one.key: plain(one.value) for one in sent.attributes}
        self.status = ("unset", "ok", "error")[sent.status.code]
        self.message: str = sent.status.message
        self.seconds: float = (sent.end_time_unix_nano - sent.start_time_unix_nano) / 1e9
        self.links = {one.span_id.hex(): {a.key: plain(a.value) for a in one.attributes} for one in sent.links}

    def __repr__(self) -> str:
        return f"<{self.name} {self.status} {self.attributes}>"


class Receiver:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[Span] = []
        self.metrics: dict[str, Any] = {}
        """The newest of each name."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def take(self, path: str, body: bytes) -> None:
        self.bodies.append(body)
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
            self.spans += [Span(sent) for scope in scopes for sent in scope.spans]
        elif path == "/v1/metrics":
            sent = ExportMetricsServiceRequest.FromString(body)
            scopes = [scope for resource in sent.resource_metrics for scope in resource.scope_metrics]
            self.metrics.update({metric.name: metric for scope in scopes for metric in scope.metrics})
        else:
            raise AssertionError(f"nobody sends to {path}")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        [found] = self.named(name)
        return found

    def points(self, name: str) -> dict[tuple[str, ...], Any]:
        """The values of a metric, by its labels' values in the order of their names."""
        metric = self.metrics[name]
        data = getattr(metric, metric.WhichOneof("data"))
        found = {}
        for point in data.data_points:
            labels = {one.key: str(plain(one.value)) for one in point.attributes}
            key = tuple(labels[label] for label in sorted(labels))
            found[key] = point.count if hasattr(point, "count") else point.as_int or point.as_double
        return found

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class BrokenAround(Observer):
    """Telemetry that fails where a step begins, or where it ends."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        if self._late:
            yield
        raise RuntimeError("around")


class Broken(Observer):
    """Telemetry that always fails."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("creating", "created", "around", "settled", "happened", "saved", "waits"):
            raise RuntimeError(name)
        return super().__getattribute__(name)
