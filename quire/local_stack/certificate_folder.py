"""File names in a folder of certificates that `quire certs` made. Not here: making them (`quire.local_stack.certificates`)."""

from dataclasses import dataclass
from pathlib import Path

from quire.client.connections import Credentials
from svc_common.tls_settings import GATEWAY, OPERATOR, SCHEDULER, WORKER

CLIENT = "client"
NAMES = (GATEWAY, SCHEDULER, WORKER, OPERATOR, CLIENT)
CA = "ca"


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """`path` has NAME.pem and NAME-key.pem of each of NAMES, and ca.pem, which signed them all."""

    path: Path

    def cert(self, name: str) -> Path:
        """PEM of the certificate of that name."""
        return self.path / f"{name}.pem"

    def key(self, name: str) -> Path:
        """PEM of its key."""
        return self.path / f"{name}-key.pem"

    def peer_arguments(self, role: str) -> list[str]:
        """For `quire serve` of that role: mutual TLS with the other services."""
        files = {"--peer-ca": self.cert(CA), "--peer-cert": self.cert(role), "--peer-key": self.key(role)}
        return [part for option, path in files.items() for part in (option, str(path))]

    def door_arguments(self) -> list[str]:
        """For `quire serve gateway`: clients need a certificate."""
        files = {"--tls-cert": self.cert(GATEWAY), "--tls-key": self.key(GATEWAY), "--tls-client-ca": self.cert(CA)}
        return [part for option, path in files.items() for part in (option, str(path))]

    def credentials(self, name: str = CLIENT, *, expects: str = "") -> Credentials:
        """To call as `name`; `expects`: the name in the other's certificate, empty = its host."""
        return Credentials(
            api_key=None if name == CLIENT else "",
            tls_ca=self.cert(CA),
            tls_cert=self.cert(name),
            tls_key=self.key(name),
            tls_name=expects,
        )
