"""An OTLP collector: takes spans over gRPC and keeps them for a test to look at."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.services: set[str] = set()

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: Any,  # noqa: ANN401 - grpc's
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.services.update(named)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[trace_pb2.Span]:
        return [span for span in self.spans if span.name == name]


def attribute(span: trace_pb2.Span, key: str) -> Any:  # noqa: ANN401 - of any kind
    (value,) = [item.value for item in span.attributes if item.key == key]
    return getattr(value, str(value.WhichOneof("value")))


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """The collector and its endpoint."""
    collector, server = Collector(), grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # it has no types
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
