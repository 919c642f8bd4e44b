"""STAND-IN for the OpenTelemetry collector (test): hands every span on at once. It limits, samples and batches nothing.

Reads the real configuration for its addresses, and counts on the metrics port.
"""

from typing import Any

import grpc
import otlp
import pages
import settings
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TITLE = "STAND-IN for the OpenTelemetry collector (test)"
_TIMEOUT_S = 5.0


class Forwarder(trace_service_pb2_grpc.TraceServiceServicer):
    """TraceService that another one answers."""

    def __init__(self, target: str) -> None:
        self._next = trace_service_pb2_grpc.TraceServiceStub(grpc.insecure_channel(target))
        self.num_spans = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Counted once the next one has it; its errors are the sender's, which retries."""
        try:
            answer = self._next.Export(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        self.num_spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return answer

    def metrics(self, path: str, _: dict[str, str]) -> pages.Answer | None:
        """For Prometheus."""
        if path != "/metrics":
            return None
        name = "otelcol_exporter_sent_spans_total"
        text = f"# HELP {name} {TITLE}\n# TYPE {name} counter\n{name} {self.num_spans}\n"
        return pages.Answer(text.encode(), "text/plain; version=0.0.4")


def _target(config: dict[str, Any]) -> str:
    """Where the only exporter of the only pipeline of traces sends."""
    (exporter,) = config["service"]["pipelines"]["traces"]["exporters"]
    return settings.address(config, "exporters", exporter, "endpoint")


def main() -> None:
    """Runs with the collector's own configuration file."""
    config = settings.read()
    forwarder = Forwarder(_target(config))
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    listener = reader["pull"]["exporter"]["prometheus"]
    pages.serve(f"{listener['host']}:{listener['port']}", forwarder.metrics)
    print(TITLE, flush=True)
    otlp.serve_until_stopped(forwarder, settings.address(config, "receivers", "otlp", "protocols", "grpc", "endpoint"))


if __name__ == "__main__":
    main()
