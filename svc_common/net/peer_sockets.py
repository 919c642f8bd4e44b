"""Plain sockets between workers: mutual TLS if configured, else plain text, by the rules of `peers`."""

import socket
import ssl
from typing import Any

from svc_common.errors import PermissionDenied
from svc_common.net import tls
from svc_common.net.tls_settings import PeerSettings

_OPTIONS = "--peer-ca, --peer-cert and --peer-key"


def check(settings: PeerSettings, host: str, what: str) -> None:
    """Raise ConfigError if plain text would leave this machine, `what` for example "sending steps to"."""
    if not settings.encrypted and not settings.insecure:
        tls.refuse_plain_text(host, what=what, instead=_OPTIONS)


def accepted(settings: PeerSettings, connection: socket.socket, role: str) -> socket.socket:
    """The server's side of a connection. Raises OSError, or PermissionDenied for a certificate of another role."""
    if not settings.encrypted:
        return connection
    wrapped = tls.server_context(settings.files).wrap_socket(connection, server_side=True)
    names: Any = (wrapped.getpeercert() or {}).get("subjectAltName", ())
    shown = {value for _, value in names}
    if not shown & set(settings.names_of(role)):
        wrapped.close()
        raise PermissionDenied(
            f"the certificate is for {', '.join(sorted(map(str, shown))) or 'no name'}; accepted here: "
            f"{', '.join(settings.names_of(role))} (add names with --peer-name)",
            reason="PEER_NAME",
        )
    return wrapped


def connected(settings: PeerSettings, connection: socket.socket, role: str, host: str) -> socket.socket:
    """The caller's side of a connection to the peer of that role. Raises OSError."""
    if not settings.encrypted:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files = settings.files
    assert files.cert is not None and files.key is not None
    context.load_verify_locations(cafile=str(files.ca))
    context.load_cert_chain(str(files.cert), str(files.key))
    return context.wrap_socket(connection, server_hostname=settings.name_at(role, host))
