"""The guard of the admin HTTP listener. An ASGI application around the lab's.

Three dangers, each from a page that the operator's browser has open elsewhere: it calls this listener by a name of its own that
leads here (DNS rebinding: Host tells), or by ours from its own site (Origin and Sec-Fetch-Site tell), or frames it (CSP).
And who is no operator: where there are API keys, what the scheduler holds wants one marked `admin`, as over gRPC.
"""

import ipaddress
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.access import grpc_guard
from gateway_svc.calls import Callers
from gateway_svc.openai.http_io import Reply
from svc_common.errors import PermissionDenied, QuireError

METRICS = "/metrics"
PLAY = "/lab/api/"
"""Has a guard of its own: any key that may generate."""

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
    """Lets calls into `app` that an operator means. `names`: hosts it may be called by, beside addresses and localhost."""

    def __init__(self, app: ASGIApp, callers: Callers, names: Collection[str] = ()) -> None:
        self._app = app
        self._callers = callers
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module's docstring. What is no HTTP request (a web socket) is refused: nothing here speaks it."""
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
        if path != METRICS:  # scraped by whatever name; it has nothing of anybody's
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
    """What would change something must say that it comes from the lab's own page; the rest must not say otherwise."""
    is_safe = scope["method"] in _SAFE_METHODS
    if is_safe and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate":
        return  # a link to the page
    # Without the scheme: behind a proxy that ends TLS it is another one here.
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
    """Nobody else can have a name that is an address."""
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
