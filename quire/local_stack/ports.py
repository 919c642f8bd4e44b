"""Ports chosen before the processes that will listen on them start, so that all can start at the same time."""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack

from svc_common.errors import ConfigError


@contextlib.contextmanager
def reserved(host: str, wanted: dict[str, int]) -> Iterator[dict[str, int]]:
    """Actual ports for `wanted` (option name -> port, 0 = any free one), held until the context ends.

    A reservation is a bound socket that does not listen: on Linux a service may still listen on the port,
    while no other process is assigned it by chance. On other systems it is released at once. Raises
    ConfigError naming the option if a port is taken.
    """
    with ExitStack() as held:
        sockets = {option: _bind(held, host, port, option) for option, port in wanted.items()}
        ports = {option: int(sock.getsockname()[1]) for option, sock in sockets.items()}
        if not hasattr(socket, "SO_PEERCRED"):  # not Linux: other systems do not allow a second bind of the port
            held.close()
        yield ports


def _bind(held: ExitStack, host: str, port: int, option: str) -> socket.socket:
    sock = held.enter_context(socket.socket(_family(host, option), socket.SOCK_STREAM))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} is in use or not allowed ({error.strerror}); choose another with {option} "
            "(0 = any free port)",
            reason="PORT_IN_USE",
            metadata={"port": str(port)},
        ) from None
    return sock


def _family(host: str, option: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror:
        raise ConfigError(f"{host} is no address of this machine ({option})", reason="BAD_HOST") from None
