"""`python -m svc_common.health_probe HOST:PORT [SERVICE]`: ask gRPC health once, for container health checks.

Exit status 0 if SERVING, 1 otherwise (with the answer on standard error), 2 for wrong usage. An empty SERVICE
asks for readiness of the whole process, "liveness" whether the process answers at all. For an encrypted
listener give `--tls-ca FILE`; if it requires a client certificate, `--tls-cert FILE --tls-key FILE`; if its
certificate is for NAME instead of HOST, `--tls-name NAME`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.errors import ConfigError
from svc_common.net import tls

_TIMEOUT_S = 2.0


def probe(
    address: str,
    service: str = "",
    *,
    timeout_s: float = _TIMEOUT_S,
    files: tls.TlsFiles | None = None,
    name: str = "",
) -> str:
    """Return the status name at `address` ("SERVING"), or the gRPC error's name ("UNAVAILABLE") if none was received.

    `files` None: plain text. Raises ConfigError for unusable files.
    """
    with _channel(address, files, name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, files: tls.TlsFiles | None, name: str) -> grpc.Channel:
    if files is None:
        return grpc.insecure_channel(address)
    credentials = tls.channel_credentials(tls.WatchedFiles(files).current())
    return grpc.secure_channel(address, credentials, options=tls.expects(name))


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m svc_common.health_probe", description="Asks gRPC health once.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("service", metavar="SERVICE", nargs="?", default="")
    for option in ("--tls-ca", "--tls-cert", "--tls-key"):
        parser.add_argument(option, type=Path)
    parser.add_argument("--tls-name", default="")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    try:
        given = _arguments(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    encrypted = given.tls_ca or given.tls_cert or given.tls_name
    files = tls.TlsFiles(given.tls_ca, given.tls_cert, given.tls_key) if encrypted else None
    try:
        status = probe(given.address, given.service, files=files, name=given.tls_name)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    if status != "SERVING":
        sys.stderr.write(f"{given.address}: {status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
