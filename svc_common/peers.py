"""The services among themselves: channels and listeners with mutual TLS where it is set, plain text on this machine where not.

Who may call is decided by the names in a caller's certificate, who is called by the name in the server's: a certificate of the
right CA alone opens nothing (a worker may not speak as a scheduler).
"""

import contextlib
import inspect
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from svc_common import rpc, tls
from svc_common.errors import PermissionDenied
from svc_common.fresh_channel import FreshChannel
from svc_common.tls_settings import PeerSettings

_Handler = Any
_OPTIONS = "--peer-ca, --peer-cert and --peer-key"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SAN = "x509_subject_alternative_name"


class Peers:
    """Makes channels to other services and listeners for them; one per process."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings

    def channel(self, address: str, role: str) -> grpc.aio.Channel:
        """To the peer of that role at `address`. ConfigError where plain text would leave this machine, and for bad certificates.

        With certificates: the peer's must have a name of its role, whatever its address; renewed ones are used from the next call.
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
        """The errors of `channel`, before it is needed."""
        if not self._settings.encrypted:
            self._check_plain(tls.host_of(address), f"what is sent to the {role} at")
        else:
            self._settings.name_at(role, tls.host_of(address))
            tls.WatchedFiles(self._settings.files)

    def server(self, *callers: str) -> grpc.aio.Server:
        """A server for peers of these roles alone, where there are certificates. Health is open to all that the CA signed."""
        if not self._settings.encrypted:
            return rpc.server()
        names = {name for role in callers for name in self._settings.names_of(role)}
        return rpc.server(interceptors=(_NamesOnly(names),))

    def bind(self, server: grpc.aio.Server, host: str, port: int, *, option: str) -> int:
        """Binds and returns the port. ConfigError for a port that is taken, and as `channel`."""
        if not self._settings.encrypted:
            self._check_plain(host, "listening on")
            return rpc.bind(server, host, port, option=option)
        credentials = tls.server_credentials(self._settings.files)
        return rpc.bind(server, host, port, option=option, credentials=credentials)

    def http_context(self, host: str) -> ssl.SSLContext | None:
        """For a listener that answers whoever the CA signed, as health does; None = plain text. ConfigError as `bind`."""
        if not self._settings.encrypted:
            self._check_plain(host, "listening on")
            return None
        return tls.server_context(self._settings.files)

    def _check_plain(self, host: str, what: str) -> None:
        if not self._settings.insecure:
            tls.refuse_plain_text(host, what=what, instead=_OPTIONS)


class _NamesOnly(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers whose certificate has none of `names`."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> _Handler:
        """The handler, behind the check."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        return _guarded(handler, self._check)

    def _check(self, context: Any) -> None:
        shown = [name.decode("utf-8", "replace") for name in context.auth_context().get(_SAN, ())]
        if not self._names.intersection(shown):
            raise PermissionDenied(
                f"the certificate is for {', '.join(shown) or 'nobody'}; here call {', '.join(sorted(self._names))} "
                "(--peer-name says who else)",
                reason="PEER_NAME",
                metadata={"shown": ",".join(shown), "allowed": ",".join(sorted(self._names))},
            )


def _guarded(handler: _Handler, check: Callable[[Any], None]) -> _Handler:
    """`handler`, which runs only where `check(context)` raises nothing. Its behaviour keeps its kind: generator or coroutine."""
    kinds: Sequence[tuple[str, Callable[..., Any]]] = (
        ("unary_unary", grpc.unary_unary_rpc_method_handler),
        ("unary_stream", grpc.unary_stream_rpc_method_handler),
        ("stream_unary", grpc.stream_unary_rpc_method_handler),
        ("stream_stream", grpc.stream_stream_rpc_method_handler),
    )
    for kind, make in kinds:
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            return make(_behind(behaviour, check), handler.request_deserializer, handler.response_serializer)
    raise AssertionError("a handler has one behaviour")


def _behind(behaviour: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> Any:
        async with rpc.errors_to_status(context):
            check(context)
        return await behaviour(request, context)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with rpc.errors_to_status(context):
            check(context)
        async with contextlib.aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                yield message

    return generate if inspect.isasyncgenfunction(behaviour) else answer
