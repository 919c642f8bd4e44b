"""`python -m svc_common.health_probe HOST:PORT [SERVICE]`: asks gRPC health once; for container health checks.

Exit status 0 when SERVING, 1 otherwise (with the answer on standard error), 2 for wrong usage. SERVICE empty = readiness of the
whole process, "liveness" = whether the process answers at all.
"""

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0


def probe(address: str, service: str = "", *, timeout_s: float = _TIMEOUT_S) -> str:
    """Name of the status at `address` ("SERVING"), or of the gRPC error where none came ("UNAVAILABLE")."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m svc_common.health_probe HOST:PORT [SERVICE]\n")
        return 2
    status = probe(*arguments)
    if status != "SERVING":
        sys.stderr.write(f"{arguments[0]}: {status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
