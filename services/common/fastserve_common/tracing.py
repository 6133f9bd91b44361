"""OpenTelemetry traces, off unless an OTLP endpoint is given; OpenTelemetry is imported only then.

A process has one tracer, like one root logger. Context travels as W3C `traceparent`: in from callers by HTTP header or
gRPC metadata, on to the scheduler as a field of the request.
"""

import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserve_common.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACEPARENT = "traceparent"
#: `00-<32 hex>-<16 hex>-<2 hex>`; anything longer is no traceparent.
MAX_TRACEPARENT_CHARS = 55

#: Standard variables that turn tracing on as `--otlp-endpoint` does.
_ENDPOINT_ENV = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

#: Of the request that this task serves, as its caller sent it; "": none.
incoming: ContextVar[str] = ContextVar("traceparent", default="")

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened inside a span. Times are of the epoch."""

    name: str
    at_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """One that has begun; `end` it once. `traceparent` makes others its children."""

    _span: "object"
    traceparent: str

    def end(
        self,
        *,
        at_ns: int | None = None,
        attributes: Attributes | None = None,
        events: Sequence[SpanEvent] = (),
        error: str = "",
    ) -> None:
        """`error`: a sentence; empty: it went well."""
        from opentelemetry.trace import Span as OtelSpan
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        assert isinstance(span, OtelSpan)
        span.set_attributes(dict(attributes or {}))
        for event in events:
            span.add_event(event.name, dict(event.attributes), event.at_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(at_ns)


class Tracing:
    """Spans of this process, on their way to a collector. Never waits: what a slow collector cannot take is dropped."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fastserve")

    def begin(self, name: str, *, parent: str = "", server: bool = False, at_ns: int | None = None) -> Span:
        """`parent`: a traceparent; one that is none begins a trace. `server`: somebody outside waits for it."""
        from opentelemetry.trace import SpanKind, format_span_id, format_trace_id
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {TRACEPARENT: parent} if 0 < len(parent) <= MAX_TRACEPARENT_CHARS else {}
        context = TraceContextTextMapPropagator().extract(carrier)
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context=context, kind=kind, start_time=at_ns)
        known = span.get_span_context()
        ids = f"{format_trace_id(known.trace_id)}-{format_span_id(known.span_id)}"
        return Span(span, f"00-{ids}-{int(known.trace_flags):02x}")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def flush(self) -> None:
        self._provider.force_flush()


_tracing: Tracing | None = None


def tracing() -> Tracing | None:
    """None: off."""
    return _tracing


def setup_tracing(service: str, endpoint: str) -> None:
    """Send spans of `service` to the OTLP gRPC endpoint; empty: the standard variables say where, or nowhere.

    Raises SettingsError when OpenTelemetry is not installed.
    """
    global _tracing  # a process has one
    close_tracing()
    if not endpoint and not any(os.environ.get(name) for name in _ENDPOINT_ENV):
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"--otlp-endpoint needs OpenTelemetry, which is not installed ({error.name})") from error
    exporter = OTLPSpanExporter(endpoint=endpoint) if endpoint else OTLPSpanExporter()
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"fastserve-{service}"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracing = Tracing(provider)


def close_tracing() -> None:
    """Send what is left, and turn tracing off."""
    global _tracing
    if _tracing is not None:
        _tracing.close()
        _tracing = None
