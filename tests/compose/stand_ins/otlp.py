"""The gRPC side of OTLP: a server for one servicer, until the process is asked to stop."""

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


def serve_until_stopped(servicer: trace_service_pb2_grpc.TraceServiceServicer, address: str) -> None:
    """Blocks; returns on SIGTERM."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: server.stop(grace=1.0))
    server.wait_for_termination()
