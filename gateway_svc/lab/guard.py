"""Guard of the admin HTTP listener. An ASGI application around the lab's.

Protects against pages that the operator's browser has open elsewhere. Such a page may call this listener by a
domain of its own that resolves here (DNS rebinding: checked by Host), call it by our name from its own site
(checked by Origin and Sec-Fetch-Site), or frame it (prevented by CSP). If there are API keys, the scheduler's
data also needs one marked `admin`, as over gRPC.
"""

import ipaddress
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.access import grpc_guard
from gateway_svc.calls import Callers
from gateway_svc.http.io import Reply
from svc_common.errors import PermissionDenied, QuireError

METRICS = "/metrics"
PLAY = "/lab/api/"
"""Has its own guard: any key that may generate."""

_OPEN_PATHS = frozenset({"/", METRICS})
_OPEN_FOLDER = "/page/"
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_SAME_SITE = frozenset({"same-origin", "none"})

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class LabGuard:
    """Passes calls made on an operator's behalf to `app`.

    `names`: allowed host names, besides addresses and localhost.
    """

    def __init__(self, app: ASGIApp, callers: Callers, names: Collection[str] = ()) -> None:
        self._app = app
        self._callers = callers
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard one request. Other protocols (web sockets) are refused, since no route supports them."""
        if scope["type"] != "http":
            await send({"type": f"{scope['type']}.close"})
            return
        send = _with_headers(send)
        try:
            self._check(scope)
        except QuireError as error:
            await Reply(send).error(error)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path: str = scope["path"]
        if path != METRICS:  # scraped under any name, and contains no users' data
            self._check_host(headers.get("host", ""))
            _check_origin(scope, headers)
        if not (path in _OPEN_PATHS or path.startswith((_OPEN_FOLDER, PLAY))):
            grpc_guard.enter_as_admin(self._callers.of(headers), path)

    def _check_host(self, host: str) -> None:
        name = _without_port(host).lower()
        if not (_is_address(name) or name == "localhost" or name in self._names):
            raise PermissionDenied(
                f"the lab is not called by the name {name[:80]!r} here; use its address, or allow the name with "
                "--admin-http-name",
                reason="UNKNOWN_HOST",
            )


def _check_origin(scope: Scope, headers: Mapping[str, str]) -> None:
    """Require that an unsafe request states the lab's own page as its origin, and that a safe one states no other."""
    is_safe = scope["method"] in _SAFE_METHODS
    if is_safe and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate":
        return  # a link to the page
    # Compared without the scheme, which differs here behind a proxy that ends TLS.
    origin = headers.get("origin", "").partition("://")[2]
    is_own = origin == headers.get("host", "") if "origin" in headers else is_safe
    if is_own and headers.get("sec-fetch-site", "none") in _SAME_SITE:
        return
    raise PermissionDenied("this was not asked by the lab's own page", reason="CROSS_SITE")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    """True for an IP address, which DNS rebinding cannot fake."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            known = {name.lower() for name, _ in given}
            added = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in known]
            message = {**message, "headers": [*given, *added]}
        await send(message)

    return send_with
