"""Options about who may call and over what: certificates, keys, tenants; of services, and of commands that call one."""

from pathlib import Path
from typing import Annotated

import typer

from quire.client.connections import API_KEY_VARIABLE, Credentials
from svc_common.tls_settings import DoorSettings, PeerSettings

_PEERS, _DOORS, _CREDENTIALS = "Encryption between services", "Access", "Credentials"

PeerCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM of who signed the certificates of the other services; with it all is mutual TLS.",
        show_default=False,
        rich_help_panel=_PEERS,
    ),
]
PeerCert = Annotated[
    Path | None,
    typer.Option(
        help="PEM of the certificate that this service shows them.", show_default=False, rich_help_panel=_PEERS
    ),
]
PeerKey = Annotated[Path | None, typer.Option(help="PEM of its key.", show_default=False, rich_help_panel=_PEERS)]
PeerNames = Annotated[
    list[str] | None,
    typer.Option(
        "--peer-name",
        metavar="ROLE=NAME",
        help="A name in the certificates of peers of that role (gateway, scheduler, worker, operator); repeatable. Default: the "
        "role's own word.",
        show_default=False,
        rich_help_panel=_PEERS,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Plain text may leave this machine; for private networks.",
        rich_help_panel=_PEERS,
    ),
]

TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="PEM of the certificate (with its chain) that clients see at all doors.",
        show_default=False,
        rich_help_panel=_DOORS,
    ),
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM of its key.", show_default=False, rich_help_panel=_DOORS)]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM of who signed the clients' certificates; with it, clients without one are refused.",
        show_default=False,
        rich_help_panel=_DOORS,
    ),
]
Tenants = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Tenants with their API keys and quotas (docs/access.md); read again when it changes. Default: no keys, no quotas.",
        show_default=False,
        rich_help_panel=_DOORS,
    ),
]
StackTls = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Mutual TLS on every hop, with the certificates that `quire certs DIR` made.",
        show_default=False,
        rich_help_panel=_DOORS,
    ),
]

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        help="API key, where the gateway wants one; better in the variable, where no list of processes shows it.",
        show_default=False,
        rich_help_panel=_CREDENTIALS,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Encrypted, by a certificate that a public authority signed; implied by the others.",
        rich_help_panel=_CREDENTIALS,
    ),
]
CallTlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="QUIRE_TLS_CA",
        help="PEM of who signed the gateway's certificate.",
        show_default=False,
        rich_help_panel=_CREDENTIALS,
    ),
]
CallTlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="QUIRE_TLS_CERT",
        help="PEM of one's own certificate, where the gateway wants one.",
        show_default=False,
        rich_help_panel=_CREDENTIALS,
    ),
]
CallTlsKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        envvar="QUIRE_TLS_KEY",
        help="PEM of its key.",
        show_default=False,
        rich_help_panel=_CREDENTIALS,
    ),
]
CallTlsName = Annotated[
    str,
    typer.Option(
        "--tls-name",
        help="Name to expect in the certificate. Default: the host that is called.",
        show_default=False,
        rich_help_panel=_CREDENTIALS,
    ),
]


# --- collectors, for `gathers` -----------------------------------------------------------------------------------------


def peer_settings(
    peer_ca: PeerCa = None,
    peer_cert: PeerCert = None,
    peer_key: PeerKey = None,
    peer_name: PeerNames = None,
    insecure: Insecure = False,
) -> PeerSettings:
    """Of a service, towards the others."""
    return PeerSettings.of(ca=peer_ca, cert=peer_cert, key=peer_key, names=tuple(peer_name or ()), insecure=insecure)


def door_settings(tls_cert: TlsCert = None, tls_key: TlsKey = None, tls_client_ca: TlsClientCa = None) -> DoorSettings:
    """Of a gateway, towards clients."""
    return DoorSettings.of(cert=tls_cert, key=tls_key, client_ca=tls_client_ca)


def credentials(
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_ca: CallTlsCa = None,
    tls_cert: CallTlsCert = None,
    tls_key: CallTlsKey = None,
    tls_name: CallTlsName = "",
) -> Credentials:
    """Of a command that calls a gateway."""
    return Credentials(api_key=api_key, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name)
