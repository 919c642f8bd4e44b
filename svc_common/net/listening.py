"""Listening sockets of services for protocols other than gRPC."""

import socket

from svc_common.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int, *, option: str) -> socket.socket:
    """Return a listening socket (port 0 = any free one). Raises ConfigError naming `option` if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {port} on {host} is in use or not allowed ({error.strerror}); choose another with {option} "
            "(0 = any free port)",
            reason="PORT_IN_USE",
            metadata={"port": str(port)},
        ) from None
    return sock
