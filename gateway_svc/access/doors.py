"""The gateway's four doors: encrypted where there is a certificate, and plain text on this machine alone where not."""

import ssl

import grpc.aio

from svc_common import rpc, tls
from svc_common.tls_settings import DoorSettings


class Doors:
    """Binds doors; ConfigError for certificates of no use."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings

    def check(self, host: str) -> None:
        """ConfigError where plain text would leave this machine."""
        if not (self._settings.encrypted or self._settings.insecure):
            tls.refuse_plain_text(host, what="listening on", instead="--tls-cert and --tls-key")

    def bind(self, server: grpc.aio.Server, host: str, port: int, *, option: str) -> int:
        """A gRPC door; its port. ConfigError naming `option` when the port is taken."""
        # Credentials that follow their files serve one listener: the library gives each the first files once.
        credentials = tls.server_credentials(self._settings.files) if self._settings.encrypted else None
        return rpc.bind(server, host, port, option=option, credentials=credentials)

    def http_context(self) -> ssl.SSLContext | None:
        """For each of the HTTP doors; None = plain text."""
        return tls.server_context(self._settings.files) if self._settings.encrypted else None
