"""Encryption settings, named alike in all services: between services (`--peer-*`) and for users' listeners."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from svc_common.errors import ConfigError
from svc_common.net.tls import TlsFiles

GATEWAY, SCHEDULER, WORKER, OPERATOR = ROLES = ("gateway", "scheduler", "worker", "operator")


class PeerSettings(BaseModel):
    """TLS between services, mutual: each shows its certificate and accepts those signed by `ca` for a name of the expected role.

    `names`: "ROLE=NAME" of the peers' certificates (their subject alternative names, DNS or URI); the default name of a role is
    the role itself: a worker accepts callers with a certificate for "scheduler". Roles: gateway, scheduler, worker, and operator
    (direct callers of the scheduler's AdminService). All empty: plain text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = None
    """PEM of the authority that signed the peers' certificates."""
    cert: Path | None = None
    """PEM of this process' own certificate (with its chain)."""
    key: Path | None = None
    """PEM of its key."""
    names: tuple[str, ...] = Field(default=())
    """ "ROLE=NAME", as often as needed."""
    insecure: bool = False
    """Plain text may leave this machine."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Make the settings. Raises ConfigError for some of the three files without the others, and unless names are ROLE=NAME."""
        settings = cls(**values)
        given = [path is not None for path in (settings.ca, settings.cert, settings.key)]
        if any(given) and not all(given):
            raise _config_error("--peer-ca, --peer-cert and --peer-key go together; give all three or none")
        for text in settings.names:
            role, _, name = text.partition("=")
            if role not in ROLES or not name:
                raise _config_error(f"--peer-name {text!r}: write ROLE=NAME with ROLE one of {', '.join(ROLES)}")
        if settings.names and not settings.encrypted:
            raise _config_error("--peer-name says nothing without --peer-ca, --peer-cert and --peer-key")
        return settings

    @property
    def encrypted(self) -> bool:
        """True if certificates are set."""
        return self.ca is not None

    @property
    def files(self) -> TlsFiles:
        """Paths of the certificate files."""
        return TlsFiles(self.ca, self.cert, self.key)

    def names_of(self, role: str) -> tuple[str, ...]:
        """Names that peers of that role may have in their certificates."""
        return tuple(text.partition("=")[2] for text in self.names if text.startswith(f"{role}=")) or (role,)

    def name_at(self, role: str, host: str) -> str:
        """Return the name to expect of the peer of that role at `host`. Raises ConfigError if it is ambiguous."""
        names = self.names_of(role)
        if host in names:
            return host
        if len(names) > 1:
            raise _config_error(
                f"--peer-name {role}=...: several are given and none is {host}, so that it is not known which one to expect there"
            )
        return names[0]


class DoorSettings(BaseModel):
    """The gateway's doors: gRPC, HTTP and admin. All empty: plain text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path | None = None
    """PEM of the certificate (with its chain) that clients see."""
    key: Path | None = None
    """PEM of its key."""
    client_ca: Path | None = None
    """PEM of the authority that signed the clients' certificates; with it, clients without one are refused."""
    insecure: bool = False
    """Plain text may leave this machine."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Make the settings. Raises ConfigError for a certificate without its key, and for a client CA without both."""
        settings = cls(**values)
        if (settings.cert is None) != (settings.key is None):
            raise _config_error("--tls-cert and --tls-key go together; give both or none")
        if settings.client_ca is not None and settings.cert is None:
            raise _config_error("--tls-client-ca needs --tls-cert and --tls-key")
        return settings

    @property
    def encrypted(self) -> bool:
        """True if a certificate is set."""
        return self.cert is not None

    @property
    def files(self) -> TlsFiles:
        """Paths of the certificate files."""
        return TlsFiles(self.client_ca, self.cert, self.key)


def _config_error(message: str) -> ConfigError:
    return ConfigError(message, reason="TLS_OPTIONS")
