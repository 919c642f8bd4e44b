"""File names in a folder made by `quire certs`. Not here: making the certificates (`quire.local_stack.certificates`)."""

from dataclasses import dataclass
from pathlib import Path

from quire.client.connections import Credentials
from svc_common.net.tls_settings import GATEWAY, OPERATOR, SCHEDULER, WORKER

CLIENT = "client"
NAMES = (GATEWAY, SCHEDULER, WORKER, OPERATOR, CLIENT)
CA = "ca"


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """Folder `path` with NAME.pem and NAME-key.pem for each of NAMES, and with ca.pem, which signed them all."""

    path: Path

    def cert(self, name: str) -> Path:
        """Path of the PEM certificate `name`."""
        return self.path / f"{name}.pem"

    def key(self, name: str) -> Path:
        """Path of the PEM key of certificate `name`."""
        return self.path / f"{name}-key.pem"

    def peer_arguments(self, role: str) -> list[str]:
        """Arguments of `quire serve` for mutual TLS of `role` with the other services."""
        files = {"--peer-ca": self.cert(CA), "--peer-cert": self.cert(role), "--peer-key": self.key(role)}
        return [part for option, path in files.items() for part in (option, str(path))]

    def door_arguments(self) -> list[str]:
        """Arguments of `quire serve gateway` that require certificates from clients."""
        files = {"--tls-cert": self.cert(GATEWAY), "--tls-key": self.key(GATEWAY), "--tls-client-ca": self.cert(CA)}
        return [part for option, path in files.items() for part in (option, str(path))]

    def credentials(self, name: str = CLIENT, *, expects: str = "") -> Credentials:
        """Credentials to call as `name`; `expects`: the name in the server's certificate, empty = its host."""
        return Credentials(
            api_key=None if name == CLIENT else "",
            tls_ca=self.cert(CA),
            tls_cert=self.cert(name),
            tls_key=self.key(name),
            tls_name=expects,
        )
