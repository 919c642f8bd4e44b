"""Options about encryption and access: certificates, keys, tenants; of services, and of commands that call one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quire.client.connections import API_KEY_VARIABLE, Credentials
from svc_common.net.tls_settings import DoorSettings, PeerSettings

_PEERS, _DOORS, _CREDENTIALS = "Encryption between services", "Access", "Credentials"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option without its default in the help; without `names`, it has that of its parameter."""
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, **more)


PeerCa = Annotated[
    Path | None,
    _option(_PEERS, "PEM of the CA that signed the other services' certificates; with it every call is mutual TLS."),
]
PeerCert = Annotated[Path | None, _option(_PEERS, "PEM of the certificate that this service presents to them.")]
PeerKey = Annotated[Path | None, _option(_PEERS, "PEM of its key.")]
PeerNames = Annotated[
    list[str] | None,
    _option(
        _PEERS,
        "A name in the certificates of peers of that role (gateway, scheduler, worker, operator); repeatable. Default: the role's "
        "own word.",
        "--peer-name",
        metavar="ROLE=NAME",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Plain text may leave this machine; for private networks.", rich_help_panel=_PEERS),
]

TlsCert = Annotated[
    Path | None, _option(_DOORS, "PEM of the certificate (with its chain) that clients see on all listeners.")
]
TlsKey = Annotated[Path | None, _option(_DOORS, "PEM of its key.")]
TlsClientCa = Annotated[
    Path | None,
    _option(_DOORS, "PEM of the CA that signed the clients' certificates; with it, clients without one are refused."),
]
Tenants = Annotated[
    Path | None,
    _option(
        _DOORS,
        "Tenants with their API keys and quotas (docs/access.md); read again when it changes. Default: no keys, no quotas.",
        metavar="FILE",
    ),
]
StackTls = Annotated[
    Path | None,
    _option(
        _DOORS, "Mutual TLS on every hop, with the certificates that `quire certs DIR` made.", "--tls", metavar="DIR"
    ),
]

ApiKey = Annotated[
    str | None,
    _option(
        _CREDENTIALS,
        "API key, if the gateway requires one; safer in the variable, as process lists show options.",
        envvar=API_KEY_VARIABLE,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Encrypted, with a certificate that a public CA signed; implied by the other --tls options.",
        rich_help_panel=_CREDENTIALS,
    ),
]
CallTlsCa = Annotated[
    Path | None, _option(_CREDENTIALS, "PEM of the CA that signed the gateway's certificate.", envvar="QUIRE_TLS_CA")
]
CallTlsCert = Annotated[
    Path | None,
    _option(_CREDENTIALS, "PEM of the client's certificate, if the gateway requires one.", envvar="QUIRE_TLS_CERT"),
]
CallTlsKey = Annotated[Path | None, _option(_CREDENTIALS, "PEM of its key.", envvar="QUIRE_TLS_KEY")]
CallTlsName = Annotated[
    str, _option(_CREDENTIALS, "Name to expect in the certificate. Default: the host that is called.")
]


# --- collectors, for `gathers` -----------------------------------------------------------------------------------------


def peer_settings(
    peer_ca: PeerCa = None,
    peer_cert: PeerCert = None,
    peer_key: PeerKey = None,
    peer_name: PeerNames = None,
    insecure: Insecure = False,
) -> PeerSettings:
    """TLS between a service and the others."""
    return PeerSettings.of(ca=peer_ca, cert=peer_cert, key=peer_key, names=tuple(peer_name or ()), insecure=insecure)


def door_settings(tls_cert: TlsCert = None, tls_key: TlsKey = None, tls_client_ca: TlsClientCa = None) -> DoorSettings:
    """TLS between a gateway and its clients."""
    return DoorSettings.of(cert=tls_cert, key=tls_key, client_ca=tls_client_ca)


def credentials(
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_ca: CallTlsCa = None,
    tls_cert: CallTlsCert = None,
    tls_key: CallTlsKey = None,
    tls_name: CallTlsName = "",
) -> Credentials:
    """Credentials of a command that calls a gateway."""
    return Credentials(api_key=api_key, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name)
