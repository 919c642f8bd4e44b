"""OTLP over HTTP in front of an `OtlpReceiver`: what is posted there is received as if it had come over gRPC."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from quire.local_stack.otlp_receiver import OtlpReceiver

PATH = "/v1/traces"


@contextlib.contextmanager
def posted_to(receiver: OtlpReceiver) -> Iterator[dict[str, str]]:
    """Variables that make a service export there over HTTP, while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_ours = self.path == PATH and self.headers["Content-Type"] == "application/x-protobuf"
            if is_ours:
                receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_ours else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
