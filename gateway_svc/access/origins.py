"""CORS: web origins with pages that may call the HTTP APIs from a browser. An ASGI application around the API's."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_SHOWN_HEADERS = (
    *("request-id", "x-request-id", "x-trace-id", "retry-after", "retry-after-ms", "openai-processing-ms"),
)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap `app` to answer pages of these origins.

    Without origins `app` is unchanged, and browsers hide its responses from pages. Keys are sent in a header
    that the page sets; cookies are not used, so credentials stay off.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )
