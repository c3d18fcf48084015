"""OpenTelemetry: a trace an execution, a span an attempt, and the metrics (extra `otel`).

Place in the life of an execution: beside it. The trace begins when the execution is created; its context is stored with
it, so that whoever takes the execution up, in whichever process and after whichever crash, adds to the same trace:

    start WORKFLOW        when it was created; linked to the span in which that was done, and that one to it
      step STEP           one attempt: its outcome is that of a durable result, or `stopped`
      execution WORKFLOW  from its creation to its end

A child execution and a fork have traces of their own, linked to where they come from. Inside a step its span is the
current one, in threads and child processes too, so that spans of the application's own nest in it. An execution that
was created without telemetry gets a trace whose id follows from its own id. Errors appear by their type alone: their
text may quote a state.

    async with Executor(registry, telemetry=OpenTelemetry()) as executor: ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from longrun import __version__
from longrun.errors import MissingExtraError
from longrun.events import LAST_EVENTS, ExecutionEvent
from longrun.metrics import INSTRUMENTS, SECONDS, Meters
from longrun.stored import Definition
from longrun.telemetry import Call, Subject, trace_of

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingExtraError("OpenTelemetry", "otel") from error

PROPAGATOR = TraceContextTextMapPropagator()
HEADERS = ("traceparent", "tracestate")
WHY = "longrun.link"
"""The attribute that says what a link means."""


class OpenTelemetry(Meters):
    """Traces and metrics, by the providers given or the global ones."""

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("longrun", __version__, tracer_provider)
        self._starts: dict[str, tuple[trace.Span, trace.Span]] = {}
        """Spans of executions being created, and the spans in which that is done, by the context to be stored."""
        self._instruments = _instruments(metrics.get_meter("longrun", __version__, meter_provider))

    # the trace of an execution

    def creating(self, definition: Definition, origin: str | None) -> str | None:
        caller = trace.get_current_span()
        span = self._tracer.start_span(
            f"start {definition.workflow}",
            context=context.Context(),
            kind=trace.SpanKind.PRODUCER,
            attributes=_attributes(definition.id, definition.workflow, definition.parent_id),
            links=_links(caller, origin),
            start_time=_nanoseconds(definition.created),
        )
        headers = _inject(trace.set_span_in_context(span))
        text = "\n".join(headers[name] for name in HEADERS if name in headers)
        if not text:
            return None
        self._starts[text] = (span, caller)
        return text

    def created(self, definition: Definition, stored: bool) -> None:
        super().created(definition, stored)
        span, caller = self._starts.pop(trace_of(definition) or "", (None, None))
        if span is None or caller is None or not stored:
            return
        span.end()
        why = {WHY: "started", "longrun.execution.id": definition.id}
        caller.add_link(span.get_span_context(), why)

    def happened(self, event: ExecutionEvent, subject: Subject | None) -> None:
        super().happened(event, subject)
        if event.type in LAST_EVENTS and subject is not None:
            state = event.type.value.removeprefix("execution_")
            span = self._tracer.start_span(
                f"execution {subject.workflow}",
                context=_context_of(subject),
                attributes={
                    **_attributes(subject.id, subject.workflow, subject.parent_id),
                    "longrun.owner": subject.owner,
                    "longrun.state": state,
                },
                start_time=_nanoseconds(subject.created),
            )
            _set_status(span, "completed" if state == "completed" else "failed" if state == "failed" else "stopped")
            span.end(_nanoseconds(event.timestamp.timestamp()))

    # the span of an attempt

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        info, subject = call.info, call.subject
        parent = _context_of(subject)
        attributes: dict[str, Any] = {
            **_attributes(subject.id, subject.workflow, subject.parent_id),
            "longrun.step": info.step,
            "longrun.step.index": info.step_index,
            "longrun.visit": info.visit,
            "longrun.attempt": info.attempt,
            "longrun.iteration": info.iteration,
            "longrun.owner": subject.owner,
            "longrun.run_in": call.run_in,
        }
        began = _nanoseconds(call.began)
        span = self._tracer.start_span(f"step {info.step}", context=parent, attributes=attributes, start_time=began)
        call.marks[self] = span
        token = context.attach(trace.set_span_in_context(span, parent))
        try:
            yield
        finally:
            context.detach(token)

    def settled(self, call: Call) -> None:
        super().settled(call)
        span = call.marks.pop(self, None)
        if span is None:
            return
        span.set_attribute("longrun.outcome", call.outcome)
        _set_status(span, call.outcome, call.error)
        span.end(_nanoseconds(call.ended))

    # metrics

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        kind = INSTRUMENTS[name].kind
        found = self._instruments[name]
        if kind == "counter":
            found.add(value, labels)
        elif kind == "gauge":
            found.set(value, labels)
        else:
            found.record(value, labels)


def _instruments(meter: metrics.Meter) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, one in INSTRUMENTS.items():
        if one.kind == "counter":
            made[name] = meter.create_counter(name, one.unit, one.description)
        elif one.kind == "gauge":
            made[name] = meter.create_gauge(name, one.unit, one.description)
        else:
            made[name] = meter.create_histogram(
                name, one.unit, one.description, explicit_bucket_boundaries_advisory=SECONDS
            )
    return made


def _attributes(id: str, workflow: str, parent_id: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"longrun.execution.id": id, "longrun.workflow": workflow}
    if parent_id is not None:
        found["longrun.parent.id"] = parent_id
    return found


def _set_status(span: trace.Span, outcome: str, error: str | None = None) -> None:
    if outcome == "failed":
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        if error:
            span.set_attribute("error.type", error)
    elif outcome == "completed":
        span.set_status(trace.Status(trace.StatusCode.OK))


def _links(caller: trace.Span, origin: str | None) -> list[trace.Link]:
    """Where a new execution comes from: the span that is current, and the execution that it is a fork of."""
    known = trace.get_current_span(_extract(origin)).get_span_context()
    found = ((caller.get_span_context(), "started by"), (known, "forked from"))
    return [trace.Link(one, {WHY: why}) for one, why in found if one.is_valid]


def _context_of(subject: Subject) -> context.Context:
    found = _extract(subject.trace)
    if trace.get_current_span(found).get_span_context().is_valid:
        return found
    digest = hashlib.blake2b(f"{subject.id}\0{subject.created!r}".encode(), digest_size=24).digest()
    known = trace.SpanContext(
        int.from_bytes(digest[:16], "big") or 1,
        int.from_bytes(digest[16:], "big") or 1,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(known), context.Context())


def _extract(text: str | None) -> context.Context:
    """A stored context; an empty one where nothing usable is stored."""
    headers = dict(zip(HEADERS, (text or "").split("\n"), strict=False))
    return PROPAGATOR.extract(headers, context.Context())


def _inject(where: context.Context | None = None) -> dict[str, str]:
    headers: dict[str, str] = {}
    PROPAGATOR.inject(headers, where)
    return headers


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000) * 1000


def carrier() -> dict[str, str]:
    """The current context, to be taken to another process."""
    return _inject()


@contextmanager
def carried(given: Mapping[str, str]) -> Iterator[None]:
    """Stand in a context that came from another process."""
    token = context.attach(PROPAGATOR.extract(given, context.Context()))
    try:
        yield
    finally:
        context.detach(token)
