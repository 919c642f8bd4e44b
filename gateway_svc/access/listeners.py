"""The gateway's four listeners: encrypted with a certificate, otherwise plain text on this machine only."""

import ssl

import grpc.aio

from svc_common.net import rpc, tls
from svc_common.net.tls_settings import DoorSettings


class Listeners:
    """Binds listeners. Raises ConfigError for unusable certificates."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings

    def check(self, host: str) -> None:
        """Raise ConfigError if plain text would leave this machine."""
        if not (self._settings.encrypted or self._settings.insecure):
            tls.refuse_plain_text(host, what="listening on", instead="--tls-cert and --tls-key")

    def bind(self, server: grpc.aio.Server, host: str, port: int, *, option: str) -> int:
        """Bind a gRPC listener and return its port. Raises ConfigError naming `option` if the port is taken."""
        # Reloading credentials serve only one listener: the library supplies the initial files once.
        credentials = tls.server_credentials(self._settings.files) if self._settings.encrypted else None
        return rpc.bind(server, host, port, option=option, credentials=credentials)

    def http_context(self) -> ssl.SSLContext | None:
        """TLS context for one HTTP listener; None = plain text."""
        return tls.server_context(self._settings.files) if self._settings.encrypted else None
