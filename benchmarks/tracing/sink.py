"""An OTLP collector of almost no cost, so that the services' cost of spans is measured; it can also hang."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

_SERVICE = trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name
_MAX_MESSAGE_BYTES = 64 * 2**20


class Sink:
    """Owner of the server and of the messages received. `hangs`: answers no request before the end."""

    def __init__(self, *, hangs: bool = False) -> None:
        self._ends = threading.Event()
        self._hangs = hangs
        self._messages: list[bytes] = []
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        self._server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="sink"), options=options)
        handler = grpc.unary_unary_rpc_method_handler(self._take)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),))
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> "Sink":
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._server.stop(grace=0.2).wait()

    def _take(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if self._hangs:
            self._ends.wait()
        self._messages.append(message)
        return b""

    def take_figures(self) -> dict[str, int]:
        """Number and bytes of spans received since the last call."""
        messages, self._messages = self._messages, []
        parse = trace_service_pb2.ExportTraceServiceRequest.FromString
        scopes = [scope for message in messages for r in parse(message).resource_spans for scope in r.scope_spans]
        return {"spans": sum(len(scope.spans) for scope in scopes), "bytes": sum(map(len, messages))}


@contextmanager
def unused_port() -> Iterator[int]:
    """A reserved port on which no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
