"""Connections between services: mutual TLS if configured, else plain text on this machine.

Permission depends on names: a server checks the names in the caller's certificate, a caller checks the name
in the server's. A certificate of the right CA alone gives no access (a worker may not act as a scheduler).
"""

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc
import grpc.aio

from svc_common.errors import PermissionDenied
from svc_common.net import rpc, tls
from svc_common.net.fresh_channel import FreshChannel
from svc_common.net.handlers import Handler, behind
from svc_common.net.malformed import MalformedRefused
from svc_common.net.tls_settings import PeerSettings

_OPTIONS = "--peer-ca, --peer-cert and --peer-key"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SAN = "x509_subject_alternative_name"


class Peers:
    """Makes channels to other services and listeners for them; one per process."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings

    def channel(self, address: str, role: str) -> grpc.aio.Channel:
        """Open a channel to the peer of that role at `address`.

        With certificates, the peer's must have a name of its role, at any address; renewed ones are used from
        the next call on. Raises ConfigError if plain text would leave this machine, and for bad certificates.
        """
        self.check(address, role)
        if not self._settings.encrypted:
            return rpc.channel(address)
        expected = self._settings.name_at(role, tls.host_of(address))
        return FreshChannel(
            tls.WatchedFiles(self._settings.files),
            lambda contents: rpc.channel(
                address,
                credentials=tls.channel_credentials(contents),
                options=tls.expects(expected),
            ),
        )

    def check(self, address: str, role: str) -> None:
        """Raise the errors of `channel` early."""
        if not self._settings.encrypted:
            self._check_plain(tls.host_of(address), f"what is sent to the {role} at")
        else:
            self._settings.name_at(role, tls.host_of(address))
            tls.WatchedFiles(self._settings.files)

    def server(self, *callers: str, also: Mapping[str, str] | None = None) -> grpc.aio.Server:
        """Make a server; with certificates only peers of these roles may call it.

        `also`: further roles by method ("/package.Service/Method"). Health is open to all that the CA signed.
        """
        if not self._settings.encrypted:
            return rpc.server(interceptors=(MalformedRefused(),))
        names = {name for role in callers for name in self._settings.names_of(role)}
        more = {method: names.union(self._settings.names_of(role)) for method, role in (also or {}).items()}
        return rpc.server(interceptors=(_NamesOnly(names, more), MalformedRefused()))

    def bind(self, server: grpc.aio.Server, host: str, port: int, *, option: str) -> int:
        """Bind and return the port. Raises ConfigError for a port that is taken, and as `channel`."""
        if not self._settings.encrypted:
            self._check_plain(host, "listening on")
            return rpc.bind(server, host, port, option=option)
        credentials = tls.server_credentials(self._settings.files)
        return rpc.bind(server, host, port, option=option, credentials=credentials)

    def http_context(self, host: str) -> ssl.SSLContext | None:
        """TLS context of a listener that, like health, is open to all that the CA signed; None = plain text.

        Raises ConfigError as `bind`.
        """
        if not self._settings.encrypted:
            self._check_plain(host, "listening on")
            return None
        return tls.server_context(self._settings.files)

    def _check_plain(self, host: str, what: str) -> None:
        if not self._settings.insecure:
            tls.refuse_plain_text(host, what=what, instead=_OPTIONS)


class _NamesOnly(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that refuses callers with a certificate for none of `names`, or of those of the method in `by_method`."""

    def __init__(self, names: set[str], by_method: Mapping[str, set[str]]) -> None:
        self._names, self._by_method = names, by_method

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Handler:
        """Return the handler behind the check."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        names = self._by_method.get(details.method, self._names)
        return behind(handler, partial(_checked, names), deserializer=handler.request_deserializer)


def _checked(names: set[str], request: Any, context: Any) -> Any:
    shown = [name.decode("utf-8", "replace") for name in context.auth_context().get(_SAN, ())]
    if not names.intersection(shown):
        raise PermissionDenied(
            f"the certificate is for {', '.join(shown) or 'no name'}; accepted here: {', '.join(sorted(names))} "
            "(add names with --peer-name)",
            reason="PEER_NAME",
            metadata={"shown": ",".join(shown), "allowed": ",".join(sorted(names))},
        )
    return request
